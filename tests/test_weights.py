"""Weights of a model on the meta device: those of `from_pretrained`, one tensor at a time."""

import copy
import json
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
import transformers
from families import FAMILIES, HIDDEN, LAYERS, VOCABULARY, Family, build_gpt2, build_llama
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import l2l
from l2l.device import open_device
from l2l.hugging_face import empty_model, recipes, tokenizer_of
from l2l.hugging_face.weights import Incoming, WeightFiles

transformers.utils.logging.disable_progress_bar()
NAMES = ["llama_tied", "llama_untied", "gpt2", "bert_classification", "qwen3", "qwen3_moe"]
NAMES += ["mixtral", "mamba", "vit_classification"]
families = pytest.mark.parametrize("family", [FAMILIES[name] for name in NAMES], ids=NAMES)


def on_meta(model: Any) -> Any:
    """The same model without weights."""
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


def saved(model: Any, folder: Path, **settings: Any) -> Path:
    model.save_pretrained(folder, **settings)
    return folder


def rewritten(model: Any, folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """A folder whose tensors were changed by hand."""
    saved(model, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def delivered(model: nn.Module, weights: Any) -> dict[str, Tensor]:
    """What would go into the parameter server."""
    found: dict[str, Tensor] = {}
    incoming = Incoming.of(model, weights)
    assert incoming is not None
    incoming.fill_buffers()
    incoming.deliver(found.__setitem__, torch.device("cpu"))
    assert found.keys() == dict(model.named_parameters()).keys()
    return found


def engine_of(model: nn.Module, **settings: Any) -> l2l.Engine:
    return inside.engine(model, device="cpu", precision="float32", kernel="readable", **settings)


def assert_equal(model: nn.Module, expected: nn.Module) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    others = [*expected.named_parameters(), *expected.named_buffers()]
    for (name, one), (_, other) in zip(tensors, others, strict=True):
        assert one.dtype is other.dtype, name
        assert torch.equal(one, other), name


# --------------------------------------------------------------------------------------------------
# From files


@families
def test_streamed_weights_are_those_of_from_pretrained(family: Family, tmp_path: Path) -> None:
    model = family.build()
    folder = saved(model, tmp_path / "model", max_shard_size="20KB")
    assert (folder / "model.safetensors.index.json").is_file()
    empty = on_meta(model)
    engine_of(empty, weights=folder).close()
    assert_equal(empty, type(model).from_pretrained(folder))


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_a_folder_or_a_file_is_given(name: str, as_text: bool, tmp_path: Path) -> None:
    model = build_llama()
    path = saved(model, tmp_path) / name
    found = delivered(on_meta(model), str(path) if as_text else path)
    assert all(torch.equal(found[name], one) for name, one in model.named_parameters())


def test_an_index_is_given(tmp_path: Path) -> None:
    model = build_llama()
    folder = saved(model, tmp_path, max_shard_size="20KB")
    found = delivered(on_meta(model), folder / "model.safetensors.index.json")
    assert all(torch.equal(found[name], one) for name, one in model.named_parameters())


def test_training_goes_on_as_from_a_model_with_weights(tmp_path: Path) -> None:
    family = FAMILIES["llama_tied"]
    model = family.build()
    folder = saved(model, tmp_path)
    empty = on_meta(model)
    optimizer = torch.optim.AdamW(empty.parameters(), lr=1e-2)
    with (
        engine_of(model, optimizer=l2l.AdamW(lr=1e-2)) as expected,
        engine_of(empty, optimizer=optimizer, weights=folder) as engine,
    ):
        for seed in range(2):
            batch = family.batch(4, seed)
            assert engine.step(batch).loss == expected.step(batch).loss
    assert_equal(empty, model)
    assert optimizer.param_groups[0]["params"][0] is empty.model.embed_tokens.weight


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_have_the_dtype_of_the_model(
    stored: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = saved(build_llama().to(stored), tmp_path)
    expected = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    empty = on_meta(expected).to(dtype)
    inside.engine(empty, device="cpu", weights=folder).close()
    assert all(
        torch.equal(one, other)
        for one, other in zip(empty.parameters(), expected.parameters(), strict=True)
    )


@pytest.mark.parametrize("weights", ["folder", l2l.RandomInit()])
def test_one_tensor_is_there_at_a_time(
    weights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_llama()
    folder = saved(model, tmp_path)
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    given = []

    def set_weight(name: str, value: Tensor) -> None:
        assert not alive, f"{name} came while others were there"
        alive.add(value)
        given.append(name)

    incoming = Incoming(on_meta(model), folder if weights == "folder" else weights)
    incoming.fill_buffers()
    incoming.deliver(set_weight, torch.device("cpu"))
    assert sorted(given) == sorted(name for name, _ in model.named_parameters())


def test_what_was_read_is_given_back_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_llama()
    folder = saved(model, tmp_path)
    opened = []
    original = l2l.files.tensor_file.safe_open

    def safe_open(*args: Any, **kwargs: Any) -> Any:
        opened.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(l2l.files.tensor_file, "safe_open", safe_open)
    delivered(on_meta(model), folder)
    assert len(opened) == 2  # for the header, then for all tensors
    monkeypatch.setattr(l2l.files.tensor_file, "MAPPED_BYTES", 10_000)
    opened.clear()
    delivered(on_meta(model), folder)
    total = sum(one.nbytes for one in model.parameters())
    assert total // 20_000 < len(opened) <= total // 10_000 + 1


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_are_stacked_one_by_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FAMILIES[name].build()
    folder = saved(model, tmp_path)
    numbers = []
    convert = recipes._convert

    def counting(template: Any, target: str, base: Any, sources: Any, read: Any) -> Any:
        numbers.append(len(sources))
        return convert(template, target, base, sources, read)

    monkeypatch.setattr(recipes, "_convert", counting)
    found = delivered(on_meta(model), folder)
    assert max(numbers) == 2  # gate and up
    assert all(torch.equal(found[name], one) for name, one in model.named_parameters())


# --------------------------------------------------------------------------------------------------
# Names


def bert(kind: str) -> Any:
    family = FAMILIES["bert_classification"].build()
    torch.manual_seed(1)
    return getattr(transformers, kind)(copy.deepcopy(family.config))


def test_a_new_head_is_made_and_named(tmp_path: Path) -> None:
    base = bert("BertModel")
    folder = saved(base, tmp_path)
    empty = on_meta(bert("BertForSequenceClassification"))
    with pytest.warns(UserWarning, match=r"2 tensors .* 'classifier.weight', 'classifier.bias'"):
        found = delivered(empty, folder)
    for name, one in base.named_parameters():
        assert torch.equal(found[f"bert.{name}"], one), name
    assert not found["classifier.bias"].any()
    deviation = float(found["classifier.weight"].std())
    assert deviation == pytest.approx(base.config.initializer_range, rel=0.3)


def test_the_seed_says_which_new_head(tmp_path: Path) -> None:
    folder = saved(bert("BertModel"), tmp_path)
    heads = []
    for seed in (1, 1, 2):
        empty = on_meta(bert("BertForSequenceClassification"))
        with pytest.warns(UserWarning, match="random values"):
            engine_of(empty, weights=folder, seed=seed).close()
        heads.append(empty.classifier.weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_a_head_that_is_not_used_is_named(tmp_path: Path) -> None:
    whole = bert("BertForSequenceClassification")
    folder = saved(whole, tmp_path)
    with pytest.warns(UserWarning, match=r"no place, not used: 'classifier.bias', 'classifier.w"):
        found = delivered(on_meta(bert("BertModel")), folder)
    assert all(torch.equal(found[name], one) for name, one in whole.bert.named_parameters())


def test_old_names_are_known(tmp_path: Path) -> None:
    model = FAMILIES["bert_classification"].build()

    def age(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            tensors[old.replace("LayerNorm.bias", "LayerNorm.beta")] = tensors.pop(name)
        tensors["bert.embeddings.position_ids"] = torch.arange(3)[None]  # once saved, now computed

    folder = rewritten(model, tmp_path, age)
    assert any("gamma" in name for name in WeightFiles(folder).shapes)
    found = delivered(on_meta(model), folder)
    assert all(torch.equal(found[name], one) for name, one in model.named_parameters())


EMBEDDING = "model.embed_tokens.weight"


def test_a_tied_weight_has_either_name_or_both(tmp_path: Path) -> None:
    model = FAMILIES["llama_tied"].build()
    names = {
        "first": lambda tensors: None,
        "other": lambda tensors: tensors.update({"lm_head.weight": tensors.pop(EMBEDDING)}),
        "both": lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}),
    }
    for name, change in names.items():
        folder = rewritten(model, tmp_path / name, change)
        found = delivered(on_meta(model), folder)
        assert torch.equal(found[EMBEDDING], model.lm_head.weight)


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    model = FAMILIES["llama_tied"].build()
    folder = rewritten(
        model, tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING] + 1})
    )
    with pytest.raises(ValueError, match=r"different values for .*tie_word_embeddings to false"):
        delivered(on_meta(model), folder)


MISSING = {  # what is taken from the files of a model of the same class
    "head": (build_llama, ["lm_head.weight"]),
    "layer": (build_llama, ["model.layers.0.mlp.up_proj.weight"]),
    "norm": (build_llama, ["model.norm.weight", "model.layers.0.input_layernorm.weight"]),
    "classifier": (lambda: bert("BertForSequenceClassification"), ["classifier.bias"]),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_weight_that_is_missing_is_refused_unless_it_is_allowed(
    case: str, tmp_path: Path
) -> None:
    build, names = MISSING[case]

    def take(tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors.pop(name)

    model = build()
    folder = rewritten(model, tmp_path, take)
    empty = on_meta(build())
    with pytest.raises(ValueError, match="do not belong to a new head") as refused:
        engine_of(empty, weights=folder)
    assert all(repr(name) in str(refused.value) for name in names)
    assert "allow_missing_weights" in str(refused.value)
    assert all(one.is_meta for one in empty.parameters())
    with pytest.warns(UserWarning, match="random values"):
        engine_of(empty, weights=folder, allow_missing_weights=True).close()
    found = dict(empty.named_parameters())
    assert all(torch.equal(found[k], v) for k, v in model.named_parameters() if k not in names)


def test_half_a_new_head_is_no_new_head(tmp_path: Path) -> None:
    """The files of a base model have the bias of a classifier, but not its weight."""
    extra = {"classifier.bias": torch.zeros(5)}
    folder = rewritten(bert("BertModel"), tmp_path, lambda tensors: tensors.update(extra))
    empty = on_meta(bert("BertForSequenceClassification"))
    with pytest.raises(ValueError, match=r"1 tensors of .* 'classifier.weight'"):
        delivered(empty, folder)


def test_a_pooler_may_be_new_with_its_head(tmp_path: Path) -> None:
    """Masked language models of BERT have none, and are what classifiers are made of."""
    folder = saved(bert("BertForMaskedLM"), tmp_path)
    empty = on_meta(bert("BertForSequenceClassification"))
    with (
        pytest.warns(UserWarning, match="'cls.predictions.bias'"),
        pytest.warns(UserWarning, match=r"4 tensors .*'bert.pooler.dense.weight'"),
    ):
        found = delivered(empty, folder)
    assert "bert.pooler.dense.bias" in found


def test_a_missing_weight_of_any_other_model_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    tensors = dict(model.state_dict())
    for gone in ("1.bias", "2.running_var"):
        left = {name: one for name, one in tensors.items() if name != gone}
        save_file(left, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=rf"1 tensors .*{gone}"):
            delivered(copy.deepcopy(model).to("meta"), tmp_path)
    left = {name: one for name, one in tensors.items() if name != "2.num_batches_tracked"}
    save_file(left, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="2.num_batches_tracked"):
        delivered(copy.deepcopy(model).to("meta"), tmp_path)


def test_when_most_is_missing_it_is_refused(tmp_path: Path) -> None:
    folder = saved(build_gpt2(), tmp_path)
    empty = on_meta(build_llama())
    pattern = r"has 0 of the 30 tensors of LlamaForCausalLM. Missing: 'model.embed_tokens.weight'"
    with pytest.warns(UserWarning, match="not used"), pytest.raises(ValueError, match=pattern):
        engine_of(empty, weights=folder)
    assert all(one.is_meta for one in [*empty.parameters(), *empty.buffers()])


def test_many_names_are_counted(tmp_path: Path) -> None:
    model = build_llama()
    extra = {f"extra.{number}": torch.zeros(1) for number in range(30)}
    folder = rewritten(model, tmp_path, lambda tensors: tensors.update(extra))
    with pytest.warns(UserWarning, match=r"has 30 tensors .*'extra.0', .* and 10 more") as seen:
        delivered(on_meta(model), folder)
    assert len(seen) == 1


def test_a_warning_points_to_the_line_that_made_the_engine(tmp_path: Path) -> None:
    folder = rewritten(build_llama(), tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.warns(UserWarning, match="lm_head") as seen:
        l2l.Engine(
            on_meta(build_llama()), device="cpu", weights=folder, allow_missing_weights=True
        ).close()
    assert seen[0].filename == __file__
    folder = rewritten(
        build_llama(), tmp_path, lambda tensors: tensors.update(extra=torch.zeros(1))
    )
    with pytest.warns(UserWarning, match="extra") as seen:
        l2l.Engine(on_meta(build_llama()), device="cpu", weights=folder).close()
    assert seen[0].filename == __file__


def test_wrong_shapes_are_named_with_both(tmp_path: Path) -> None:
    folder = saved(build_llama(), tmp_path)
    empty = on_meta(build_llama(vocab_size=VOCABULARY + 5))
    pattern = rf"'model.embed_tokens.weight' is \[{VOCABULARY}, {HIDDEN}\], expected \[72, {HIDDEN}"
    with pytest.raises(ValueError, match=pattern):
        delivered(empty, folder)


def test_an_expert_that_is_missing_is_a_wrong_shape(tmp_path: Path) -> None:
    model = FAMILIES["qwen3_moe"].build()
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    folder = rewritten(model, tmp_path, lambda tensors: tensors.pop(name))
    pattern = r"'model.layers.0.mlp.experts.down_proj' is \[3, 32, 16\], expected \[4, 32, 16\]"
    with pytest.raises(ValueError, match=pattern):
        delivered(on_meta(model), folder)


def test_without_a_mapping_transformers_loads_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(*_: Any) -> None:
        raise ImportError("another transformers")

    monkeypatch.setattr(l2l.hugging_face.weights, "recipes_for_loading", unknown)
    model = FAMILIES["qwen3_moe"].build()
    folder = saved(model, tmp_path)
    empty = on_meta(model)
    with caplog.at_level(logging.WARNING, logger="l2l"):
        engine_of(empty, weights=folder).close()
    assert_equal(empty, model)
    assert "from_pretrained loads the whole model first" in caplog.text
    assert [record.filename for record in caplog.records].count("weights.py") == 1


# --------------------------------------------------------------------------------------------------
# Random


@families
def test_random_weights_are_those_of_the_model_s_own_code(family: Family) -> None:
    torch.manual_seed(3)
    model = type(family.build())(family.build().config)
    found = delivered(empty := on_meta(model), l2l.RandomInit(seed=1))
    for name, one in model.named_parameters():
        deviation = float(one.detach().std()) if one.numel() > 1 else 0.0
        if not deviation:
            assert torch.equal(found[name], one), name
        elif one.numel() > 500:
            assert float(found[name].std()) == pytest.approx(deviation, rel=0.2), name
    for (name, one), other in zip(model.named_buffers(), empty.buffers(), strict=True):
        assert torch.equal(one, other), name


def test_the_seed_says_which_random_weights() -> None:
    model = build_llama()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again = (delivered(on_meta(model), l2l.RandomInit(seed=1)) for _ in range(2))
    other = delivered(on_meta(model), l2l.RandomInit(seed=2))
    assert torch.equal(torch.get_rng_state(), state), "the user's random numbers are left alone"
    name = "model.layers.{}.mlp.up_proj.weight"
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[name.format(0)], other[name.format(0)])
    assert not torch.equal(first[name.format(0)], first[name.format(1)])


def test_a_module_may_fill_what_is_inside_it() -> None:
    model = build_gpt2()
    found = delivered(on_meta(model), l2l.RandomInit())
    wide, narrow = (
        float(found[f"transformer.h.0.mlp.{n}.weight"].std()) for n in ("c_fc", "c_proj")
    )
    assert wide / narrow == pytest.approx((2 * LAYERS) ** 0.5, rel=0.1)


def test_modules_without_transformers_fill_themselves() -> None:
    create = FAMILIES["batchnorm"].build.args[0]  # type: ignore[attr-defined]
    with torch.device("meta"):
        empty = create()
    with engine_of(empty, weights=l2l.RandomInit(seed=4)) as engine:
        engine.step(FAMILIES["batchnorm"].batch(4))
    assert all(torch.isfinite(one).all() for one in [*empty.parameters(), *empty.buffers()])
    assert torch.equal(empty.stack[0].norm.norm.num_batches_tracked, torch.tensor(1))


def test_what_nothing_fills_is_named() -> None:
    create = FAMILIES["hand_written"].build.args[0]  # type: ignore[attr-defined]
    with torch.device("meta"):
        empty = create()
    pattern = r"nothing initializes 'places'.*reset_parameters of HandWritten"
    with pytest.raises(ValueError, match=pattern):
        engine_of(empty, weights=l2l.RandomInit())
    assert all(one.is_meta for one in empty.parameters())


# --------------------------------------------------------------------------------------------------
# Refused


def test_a_model_without_weights_is_told_of_weights() -> None:
    with pytest.raises(ValueError, match=r"on the meta device .*weights=: a folder"):
        engine_of(on_meta(build_llama()))


def test_a_model_with_weights_is_not_given_others(tmp_path: Path) -> None:
    model = build_llama()
    folder = saved(model, tmp_path)
    for weights in (folder, l2l.RandomInit()):
        with pytest.raises(ValueError, match="30 of 30 parameters already have values"):
            engine_of(model, weights=weights)
    empty = on_meta(model)
    empty.lm_head.weight = nn.Parameter(torch.zeros(VOCABULARY, HIDDEN))
    with pytest.raises(ValueError, match=r"1 of 30 parameters .* 'lm_head.weight'"):
        engine_of(empty, weights=folder)


def test_other_things_are_not_weights() -> None:
    with pytest.raises(ValueError, match=r"weights=3 is not known. Expected a folder or file"):
        engine_of(on_meta(build_llama()), weights=3)


def test_a_failure_leaves_the_model_on_the_meta_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_llama()
    folder = saved(model, tmp_path)
    empty = on_meta(model)
    ids = [id(one) for one in [*empty.parameters(), *empty.buffers()]]
    device = open_device("cpu")
    closed = []
    monkeypatch.setattr(device, "close", lambda: closed.append(True))
    reads = []
    get = l2l.files.TensorReader.__call__

    def failing(self: Any, name: str) -> Tensor:
        reads.append(name)
        if len(reads) == 5:
            raise KeyboardInterrupt
        return get(self, name)

    monkeypatch.setattr(l2l.files.TensorReader, "__call__", failing)
    with pytest.raises(KeyboardInterrupt):
        inside.engine(empty, device=device, weights=folder)
    tensors = [*empty.parameters(), *empty.buffers()]
    assert [id(one) for one in tensors] == ids
    assert all(one.is_meta for one in tensors)
    assert all(one.requires_grad for one in empty.parameters())
    assert closed
    monkeypatch.undo()
    engine_of(empty, weights=folder).close()
    assert_equal(empty, model)


def test_a_host_that_is_too_small_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    folder = saved(build_llama(), tmp_path)
    empty = on_meta(build_llama())
    with pytest.raises(ValueError, match="the parameter server needs"):
        engine_of(empty, weights=folder, host_memory="100KiB")
    assert all(one.is_meta for one in [*empty.parameters(), *empty.buffers()])


def break_header(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def lose_file(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()


def change_index(folder: Path, name: str, file: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][name] = file
    path.write_text(json.dumps(index))


BROKEN = {
    "header": (break_header, r"cannot read .*model-00001-of-00002.safetensors"),
    "lost": (lose_file, r"incomplete: 'model-00002-of-00002.safetensors' of .* not found"),
    "name": (
        lambda folder: change_index(folder, "new", "model-00001-of-00002.safetensors"),
        r"model-00001-of-00002.safetensors does not have 'new', which",
    ),
    "outside": (
        lambda folder: change_index(folder, "new", "../model.safetensors"),
        r"names the file '../model.safetensors'. Expected a file beside it",
    ),
    "index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("{}"),
        r"model.safetensors.index.json cannot be read: .*weight_map",
    ),
    "none": (
        lambda folder: (folder / "model.safetensors.index.json").rename(folder / "else.bin"),
        r"has no weights: expected model.safetensors or .*found .*else.bin.*pytorch_model.bin",
    ),
    "quantised": (
        lambda folder: (folder / "config.json").write_text('{"quantization_config": {"bits": 4}}'),
        r"quantized \(quantization_config in config.json\)",
    ),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_broken_folders_are_refused_by_name(name: str, tmp_path: Path) -> None:
    change, pattern = BROKEN[name]
    folder = saved(build_llama(), tmp_path, max_shard_size="80KB")
    change(folder)
    with pytest.raises(ValueError, match=pattern):
        delivered(on_meta(build_llama()), folder)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing does not exist. Expected a folder with"):
        delivered(on_meta(build_llama()), tmp_path / "nothing")


def test_numbers_that_are_not_floating_are_refused(tmp_path: Path) -> None:
    name = "model.norm.weight"
    change = {name: torch.zeros(HIDDEN, dtype=torch.int8)}
    folder = rewritten(build_llama(), tmp_path, lambda tensors: tensors.update(change))
    with pytest.raises(ValueError, match=r"'model.norm.weight' is stored as torch.int8"):
        engine_of(on_meta(build_llama()), weights=folder)


# --------------------------------------------------------------------------------------------------
# Hugging Face folders


def test_the_model_of_a_folder_is_made_without_memory(tmp_path: Path) -> None:
    folder = saved(build_llama().bfloat16(), tmp_path)
    generation = {"max_new_tokens": 7, "eos_token_id": [2, 5]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    model: Any = empty_model(folder, attention="eager")
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert all(one.is_meta and one.dtype is torch.bfloat16 for one in model.parameters())
    assert model.generation_config.eos_token_id == [2, 5]
    assert model.config._attn_implementation == "eager"
    assert not model.training
    assert isinstance(empty_model(folder / "config.json"), transformers.LlamaForCausalLM)


def test_the_task_says_which_model(tmp_path: Path) -> None:
    folder = saved(FAMILIES["bert_classification"].build(), tmp_path)
    kinds = {
        ("classification", None): ("BertForSequenceClassification", 5),
        ("classification", 3): ("BertForSequenceClassification", 3),
        ("regression", None): ("BertForSequenceClassification", 1),
        ("masked", None): ("BertForMaskedLM", 5),
    }
    for (task, number), (kind, labels) in kinds.items():
        model: Any = empty_model(folder, task=task, num_labels=number)
        assert type(model).__name__ == kind
        assert model.config.num_labels == labels
        assert (model.config.problem_type == "regression") == (task == "regression")


def test_what_must_stay_float32_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = transformers.LlamaForCausalLM
    monkeypatch.setattr(kind, "_keep_in_fp32_modules_strict", ["norm"])
    folder = saved(build_llama().bfloat16(), tmp_path)
    expected = kind.from_pretrained(folder)
    model = empty_model(folder)
    inside.engine(model, device="cpu", weights=folder).close()
    assert_equal(model, expected)
    assert model.get_parameter("model.norm.weight").dtype is torch.float32


def test_folders_that_lack_something_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json does not exist. Expected a folder with"):
        empty_model(tmp_path)
    with pytest.raises(ValueError, match=r"has no tokenizer: expected one of .*found nothing"):
        tokenizer_of(tmp_path)
    with pytest.raises(ValueError, match="gone does not exist"):
        tokenizer_of(tmp_path / "gone")
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(ValueError, match=r"is not a configuration that transformers .* knows"):
        empty_model(tmp_path)
    with pytest.raises(ValueError, match=r"task='poetry' is not known. Expected one of 'causal'"):
        empty_model(tmp_path, task="poetry")
    with pytest.raises(ValueError, match="num_labels=2 with task='causal'"):
        empty_model(tmp_path, num_labels=2)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ValueError, match=r"makes no model of ViTConfig for task='causal'"):
        empty_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "quantization_config": {"a": 1}}')
    with pytest.raises(ValueError, match="are quantized"):
        empty_model(tmp_path)


# --------------------------------------------------------------------------------------------------
# Adapters


def test_the_base_of_an_adapter_is_loaded_and_the_adapter_begins_as_peft_begins(
    tmp_path: Path,
) -> None:
    peft = pytest.importorskip("peft")
    family = FAMILIES["llama_tied"]
    model = family.build()
    folder = saved(model, tmp_path)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["norm"], task_type="CAUSAL_LM"
    )
    empty = peft.get_peft_model(on_meta(model), config)
    assert all(one.is_meta for one in empty.parameters())
    batch = family.batch(2)
    with engine_of(empty, weights=folder, microbatch_size=2) as engine:
        logits = engine.predict(batch).logits
    with torch.no_grad():
        assert torch.equal(logits, model.eval()(**batch).logits)
    for name, one in empty.named_parameters():
        assert bool(one.any()) != ("lora_B" in name), name
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    deviation = float(empty.get_parameter(first).detach().std())
    assert deviation == pytest.approx((3 * HIDDEN) ** -0.5, rel=0.2)


def test_an_adapter_that_begins_with_the_weights_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = build_llama()
    folder = saved(model, tmp_path)
    empty = peft.get_peft_model(on_meta(model), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    empty.peft_config["default"].init_lora_weights = "pissa"
    with pytest.raises(ValueError, match=r"init_lora_weights='pissa', which needs the base"):
        engine_of(empty, weights=folder)
