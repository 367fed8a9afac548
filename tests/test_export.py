"""Exported folders are what plain transformers, PEFT and torch read, and are whole or not there."""

import copy
import json
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
import transformers
from families import FAMILIES, LAYERS, Family, build_llama
from safetensors.torch import load_file
from torch import Tensor, nn

import l2l
from l2l import files
from l2l.checkpoint import Checkpoint, CheckpointError, SavedModel
from l2l.files import TensorFileError
from l2l.hugging_face import export, tokenizer_of

transformers.utils.logging.disable_progress_bar()
NAMES = ["llama_tied", "llama_untied", "gpt2", "bert_classification", "bert_masked_lm", "qwen3"]
NAMES += ["qwen3_moe", "mixtral", "vit_classification"]
families = pytest.mark.parametrize("family", [FAMILIES[name] for name in NAMES], ids=NAMES)


def engine_of(model: nn.Module, **settings: Any) -> l2l.Engine:
    settings = {"device": "cpu", "precision": "float32", "kernel": "readable", **settings}
    return inside.engine(model, microbatch_size=4, **settings)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        assert not found.keys() & tensors.keys(), "each tensor is written once"
        found |= tensors
    return found


@families
def test_plain_transformers_computes_what_the_engine_computes(
    family: Family, tmp_path: Path
) -> None:
    model: Any = family.build()
    batch = family.batch(4)
    with engine_of(model) as engine:
        for seed in range(2):
            engine.step(family.batch(4, seed))
        logits = engine.predict(batch)["logits"]
        engine.export(tmp_path / "export")
    loaded, report = type(model).from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values()), report
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch)["logits"], logits)
    model.save_pretrained(tmp_path / "reference")  # the engine is closed: it has its weights
    expected, found = tensors_of(tmp_path / "reference"), tensors_of(tmp_path / "export")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    names = {path.name for path in (tmp_path / "reference").iterdir()}
    assert {path.name for path in (tmp_path / "export").iterdir()} == {*names, "l2l_export.json"}
    for name in names & {"config.json", "generation_config.json"}:
        assert (tmp_path / "export" / name).read_text() == (
            tmp_path / "reference" / name
        ).read_text()


@families
def test_a_model_on_the_meta_device_goes_on_from_an_export(family: Family, tmp_path: Path) -> None:
    model: Any = family.build()
    batch = family.batch(4)
    with engine_of(model) as engine:
        engine.step(batch)
        engine.export(tmp_path / "export", shard_bytes=20_000)
        logits = engine.predict(batch)["logits"]
    with torch.device("meta"):
        empty = type(model)(copy.deepcopy(model.config))
    with engine_of(empty, weights=tmp_path / "export") as engine:
        assert torch.equal(engine.predict(batch)["logits"], logits)


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_masters_are_written_in_the_dtype_asked_for(
    own: torch.dtype, dtype: str | None, tmp_path: Path
) -> None:
    family = FAMILIES["llama_tied"]
    model: Any = family.build().to(own)
    with engine_of(model, precision="bfloat16", optimizer=l2l.AdamW(lr=1e-4)) as engine:
        engine.step(family.batch(4))
        inside.server(engine).settle_all()
        masters = {
            name: inside.server(engine).weight(name).clone() for name, _ in model.named_parameters()
        }
        engine.export(tmp_path / "export", dtype=dtype)
    expected = own if dtype is None else getattr(torch, dtype)
    found = tensors_of(tmp_path / "export")
    assert all(torch.equal(found[name], masters[name].to(expected)) for name in masters)
    assert any(not torch.equal(one, one.bfloat16().float()) for one in masters.values())
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["dtype"] == str(expected).removeprefix("torch.")
    assert type(model).from_pretrained(tmp_path / "export").dtype is expected
    assert model.config.dtype != "float16", "the model's own configuration is left alone"


def test_what_must_stay_float32_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = transformers.LlamaForCausalLM
    monkeypatch.setattr(kind, "_keep_in_fp32_modules_strict", ["input_layernorm"])
    with engine_of(build_llama()) as engine:
        engine.export(tmp_path / "export", dtype="bfloat16")
    found = tensors_of(tmp_path / "export")
    assert {name for name, one in found.items() if one.dtype is torch.float32} == {
        f"model.layers.{index}.input_layernorm.weight" for index in range(LAYERS)
    }


def test_large_models_are_written_as_several_files(tmp_path: Path) -> None:
    model: Any = build_llama()
    with engine_of(model) as engine:
        engine.export(tmp_path / "export", shard_bytes=30_000)
    index = json.loads((tmp_path / "export" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "export").glob("*.safetensors"))
    assert files == [
        f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert len(files) > 3
    sizes = [
        sum(one.nbytes for one in load_file(tmp_path / "export" / name).values()) for name in files
    ]
    assert max(sizes) <= 30_000
    assert index["metadata"]["total_size"] == sum(sizes)
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "export" / file)
    loaded = type(model).from_pretrained(tmp_path / "export")
    assert all(
        torch.equal(one, other)
        for one, other in zip(loaded.parameters(), model.parameters(), strict=True)
    )


def test_tied_weights_are_written_once_and_others_are_not(tmp_path: Path) -> None:
    for name, is_tied in {"llama_tied": True, "llama_untied": False}.items():
        with engine_of(FAMILIES[name].build()) as engine:
            engine.export(tmp_path / name)
        assert ("lm_head.weight" not in tensors_of(tmp_path / name)) == is_tied


def test_updates_that_wait_are_done_first(tmp_path: Path) -> None:
    family = FAMILIES["llama_tied"]
    model: Any = family.build()
    with engine_of(model, clip_norm=0.1) as engine:  # so updates are left to the next step
        engine.step(family.batch(4))
        assert inside.server(engine).waiting
        engine.export(tmp_path / "export")
    found = tensors_of(tmp_path / "export")
    assert all(torch.equal(found[name], one) for name, one in model.named_parameters())


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("llama_tied", "float32"),
        ("llama_tied", "bfloat16"),
        ("llama_tied", "float16"),
        ("batchnorm", "float32"),
    ],
)
def test_a_checkpoint_has_what_an_export_has(name: str, precision: str, tmp_path: Path) -> None:
    """Masters are put together, and buffers are as training has left them."""
    family = FAMILIES[name]
    settings = {"precision": precision, "clip_norm": 0.5}
    with engine_of(family.build(), **settings) as engine:
        for seed in range(2):
            engine.step(family.batch(4, seed))
        engine.save(tmp_path / "saved")
        engine.export(tmp_path / "export", dtype="float32")
    saved = SavedModel(Checkpoint(tmp_path / "saved"))
    for key, value in tensors_of(tmp_path / "export").items():
        assert key in saved
        assert torch.equal(saved.read(key, value.shape), value), key
    saved.check(family.build())
    with pytest.raises(CheckpointError, match="lacks 'nothing'"):
        saved.read("nothing", (1,))
    with pytest.raises(CheckpointError, match=r"has shape \[.*\], expected \[3\]"):
        saved.read(key, (3,))


def test_a_checkpoint_of_another_model_is_not_exported(tmp_path: Path) -> None:
    """One with more or fewer layers, with its head tied, or of other shapes."""
    with engine_of(FAMILIES["llama_untied"].build()) as engine:
        engine.save(tmp_path / "saved")
    saved = SavedModel(Checkpoint(tmp_path / "saved"))
    for build, words in (
        (partial(build_llama, num_hidden_layers=LAYERS + 1), "lacks 'model.layers"),
        (partial(build_llama, num_hidden_layers=LAYERS - 1), "also has 'model.layers"),
        (FAMILIES["llama_tied"].build, "also has 'lm_head.weight'"),
    ):
        with pytest.raises(CheckpointError, match=words):
            saved.check(build())


class Shared(nn.Module):
    """A layer with a buffer that all layers share, and a parameter without elements."""

    def __init__(self, scale: nn.Module) -> None:
        super().__init__()
        self.scale = scale
        self.linear = nn.Linear(4, 4)
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.linear(hidden) * self.scale.factor
        return found


def test_buffers_that_layers_share_are_saved_once(tmp_path: Path) -> None:
    scale = nn.Module()
    scale.register_buffer("factor", torch.arange(4.0))
    layers = nn.Sequential(*(Shared(scale) for _ in range(3)))
    model = nn.Sequential(nn.Linear(4, 4), layers)
    with engine_of(model, loss=lambda outputs, _: outputs.square().mean()) as engine:
        engine.step({"input": torch.randn(4, 4)})
        engine.save(tmp_path / "saved")
    saved = SavedModel(Checkpoint(tmp_path / "saved"))
    saved.check(model)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(saved.read(name, value.shape), value), name


def test_training_goes_on_after_an_export(tmp_path: Path) -> None:
    family = FAMILIES["llama_tied"]
    losses = []
    for exports in (False, True):
        with engine_of(family.build(), clip_norm=0.1) as engine:
            for seed in range(3):
                loss = engine.step(family.batch(4, seed)).loss
                if exports:
                    engine.export(tmp_path / "export")
            losses.append(loss)
    assert losses[0] == losses[1]


def test_one_tensor_is_there_at_a_time(tmp_path: Path) -> None:
    model = FAMILIES["qwen3_moe"].build()
    values = dict(model.named_parameters())
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def weight_of(name: str) -> Tensor:
        assert not alive, f"{name} was asked for while others were there"
        value = values[name].detach().clone()
        alive.add(value)
        return value

    export.export_model(model, tmp_path / "export", weight_of=weight_of)
    found = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    assert all(torch.equal(found[name], one) for name, one in values.items())


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 0, "one": 1, "two": 2}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[PAD]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]")


def test_a_tokenizer_is_saved_beside_the_weights(tmp_path: Path) -> None:
    with engine_of(build_llama()) as engine:
        for _ in range(2):
            engine.export(tmp_path / "export", tokenizer=tokenizer())
    assert tokenizer_of(tmp_path / "export")("two one")["input_ids"] == [2, 1]


def test_a_generation_config_that_transformers_refuses_is_left_out(tmp_path: Path) -> None:
    model: Any = build_llama()
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.5
    with (
        engine_of(model) as engine,
        pytest.warns(UserWarning, match=r"generation_config.json is left out"),
    ):
        engine.export(tmp_path / "export")
    type(model).from_pretrained(tmp_path / "export")


# --------------------------------------------------------------------------------------------------
# Other models


@pytest.mark.parametrize("name", ["hand_written", "batchnorm"])
def test_other_modules_are_written_as_their_state_dict(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model = family.build()
    with engine_of(model) as engine:
        engine.step(family.batch(4))
        engine.export(tmp_path / "export")
    assert {path.name for path in (tmp_path / "export").iterdir()} == {
        "model.safetensors",
        "l2l_export.json",
    }
    other = family.build()
    other.load_state_dict(load_file(tmp_path / "export" / "model.safetensors"))
    expected = model.state_dict()
    assert all(torch.equal(one, expected[key]) for key, one in other.state_dict().items())


def test_weights_that_a_module_shares_have_all_their_names(tmp_path: Path) -> None:
    model: Any = FAMILIES["hand_written"].build()
    model.head.weight = model.words.weight
    export.export_model(model, tmp_path / "export", weight_of=model.get_parameter)
    found = load_file(tmp_path / "export" / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    model.load_state_dict(found)
    engine = engine_of(with_meta(model), weights=tmp_path / "export")
    engine.close()


def with_meta(model: Any) -> Any:
    empty = copy.deepcopy(model).to("meta")
    empty.head.weight = empty.words.weight
    return empty


def adapted(peft: Any) -> Any:
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(build_llama(), config)


def test_an_adapter_is_written_as_peft_writes_it(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    family = FAMILIES["llama_untied"]
    model, batch = adapted(peft), family.batch(4)
    with engine_of(model, optimizer=l2l.AdamW(lr=1e-2)) as engine:
        for seed in range(2):
            engine.step(family.batch(4, seed))
        logits = engine.predict(batch).logits
        engine.export(tmp_path / "export")
    model.save_pretrained(tmp_path / "reference")
    names = {path.name for path in (tmp_path / "reference").iterdir()}
    assert {path.name for path in (tmp_path / "export").iterdir()} == {*names, "l2l_export.json"}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    expected, found = tensors_of(tmp_path / "reference"), tensors_of(tmp_path / "export")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    read = [
        json.loads((tmp_path / n / "adapter_config.json").read_text())
        for n in ("export", "reference")
    ]
    for one in read:
        one["target_modules"].sort()  # a set
    assert read[0] == read[1]
    loaded = peft.PeftModel.from_pretrained(build_llama(), tmp_path / "export")
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch).logits, logits)


def test_an_adapter_that_is_not_pefts_own_model_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model: Any = build_llama()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]))
    with (
        engine_of(model) as engine,
        pytest.raises(ValueError, match=r"added with model.add_adapter. Expected .*get_peft_model"),
    ):
        engine.export(tmp_path / "export")
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------
# The folder


def exported(folder: Path, **settings: Any) -> None:
    model = build_llama()
    export.export_model(model, folder, weight_of=model.get_parameter, **settings)


def test_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    exported(tmp_path / "export", shard_bytes=20_000)
    exported(tmp_path / "export")
    assert {path.name for path in (tmp_path / "export").iterdir()} == {
        "config.json",
        "generation_config.json",
        "l2l_export.json",
        "model.safetensors",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_other_folders_are_not_replaced(tmp_path: Path) -> None:
    model: Any = build_llama()
    model.save_pretrained(tmp_path / "reference")
    with pytest.raises(ValueError, match=r"reference contains files .* config.json, "):
        exported(tmp_path / "reference")
    exported(tmp_path / "export")
    (tmp_path / "export" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"not from an earlier export: notes.txt. Expected"):
        exported(tmp_path / "export")
    assert (tmp_path / "export" / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match=r"notes.txt is a file"):
        exported(tmp_path / "export" / "notes.txt")


def test_a_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported(tmp_path / "export")
    before = tensors_of(tmp_path / "export")
    model = build_llama()

    def failing(name: str) -> Tensor:
        if "layers.2" in name:
            raise KeyboardInterrupt
        return model.get_parameter(name) + 1

    with pytest.raises(KeyboardInterrupt):
        export.export_model(model, tmp_path / "export", weight_of=failing)
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(files, "write_tensors", lambda *_, **__: (_ for _ in ()).throw(full))
    with pytest.raises(TensorFileError, match=r"cannot write .*export: No space left on device"):
        exported(tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    after = tensors_of(tmp_path / "export")
    assert all(torch.equal(after[name], one) for name, one in before.items())


def test_what_a_killed_export_left_is_in_nobodys_way(tmp_path: Path) -> None:
    exported(tmp_path / "export")
    (tmp_path / "export").rename(tmp_path / "export.replaced")
    for name in ("export.partial", "export.deleted"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("half")
    with pytest.raises(ZeroDivisionError):
        export.export_model(build_llama(), tmp_path / "export", weight_of=lambda _: 1 // 0)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]  # what was there, again
    exported(tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_arguments_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype='int8' is not known. Expected one of 'float32'"):
        exported(tmp_path / "export", dtype="int8")
    with pytest.raises(ValueError, match="shard_bytes=0; expected at least 1"):
        exported(tmp_path / "export", shard_bytes=0)
    assert not list(tmp_path.iterdir())


def test_an_engine_without_whole_weights_does_not_export(tmp_path: Path) -> None:
    engine = engine_of(build_llama())
    inside.tear(engine)
    with pytest.raises(RuntimeError, match="weights are a mix of two steps"):
        engine.export(tmp_path / "export")
    with pytest.warns(UserWarning, match="two steps"):
        engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.export(tmp_path / "export")
    assert not list(tmp_path.iterdir())
