"""Quantized frozen weights: in host memory and on the link in their own format, exact beside it.

The reference is the same model, quantized by the library and run by plain PyTorch.
"""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
import transformers
from families import FAMILIES, build_llama
from reference import counts, reference_gradients, split, train_plain
from safetensors.torch import load_file
from test_generate import plain as generated
from test_generate import prompts
from test_peft import BACKEND, adapted, lora
from torch import Tensor, nn

import l2l
from l2l import cli
from l2l.device.checking import ByteCount
from l2l.distributed import Share, World
from l2l.hugging_face import empty_model
from l2l.model import CutError, format_of
from l2l.model.quantizing import plain_values
from l2l.planner.hardware import H200
from l2l.planner.layer_cost import count_pass
from l2l.proof.proof import Reference

peft = pytest.importorskip("peft")
torchao = pytest.importorskip("torchao.quantization")

ROWS = 6
WEIGHT = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
FAMILY = FAMILIES["llama_untied"]


def nf4(weight: Tensor) -> Tensor:
    block = min(256, weight.numel() // 64 & -(weight.numel() // 64))  # what divides the scales
    made: Tensor = torchao.NF4Tensor.from_tensor(weight, 64, block)
    return made


def int8(weight: Tensor) -> Tensor:
    made: Tensor = torchao.Int8Tensor.from_hp(weight, torchao.PerRow())
    return made


FORMATS: dict[str, Callable[[Tensor], Tensor]] = {"nf4": nf4, "int8": int8}


def build(dtype: torch.dtype = torch.float32, base: nn.Module | None = None) -> Any:
    """A model with an adapter, not quantized."""
    base = FAMILY.build() if base is None else base
    return adapted(base.to(dtype), lora(target_modules="all-linear")).to(dtype)


def quantized(model: Any, kind: str) -> Any:
    """What a user makes of it with the library alone."""
    for name, module in model.named_modules():
        frozen = isinstance(module, nn.Linear) and not module.weight.requires_grad
        if frozen and ".layers." in name:
            weight = FORMATS[kind](module.weight.detach())
            module.weight = nn.Parameter(weight, requires_grad=False)
    return model


def bitsandbytes_in(model: Any) -> Any:
    """The same with modules of bitsandbytes."""
    library: Any = pytest.importorskip("bitsandbytes")
    for name, module in list(model.named_modules()):
        if not (type(module) is nn.Linear and ".layers." in name) or module.weight.requires_grad:
            continue
        made = library.nn.Linear4bit(
            module.in_features,
            module.out_features,
            bias=False,
            compute_dtype=module.weight.dtype,
            quant_type="nf4",
        )
        made.load_state_dict(module.state_dict())
        parent, _, local = name.rpartition(".")
        setattr(model.get_submodule(parent), local, made.to("cpu"))
    return model


def engine_of(model: nn.Module, dtype: torch.dtype = torch.float32, **settings: Any) -> l2l.Engine:
    return inside.engine(model, **{"device": "cpu", "precision": dtype, **settings})


def assert_parity(
    model: Any, plain: Any, *, dtype: torch.dtype, size: int, bits: bool, **settings: Any
) -> None:
    batch, recorder = FAMILY.batch(ROWS), l2l.RecordGradients()
    with engine_of(model, dtype, optimizer=recorder, microbatch_size=size, **settings) as engine:
        loss = engine.step(batch).loss
        assert len(set(inside.partition(engine).structures)) == 1
        compiler = inside.compiler(engine)
        assert not compiler.uncompiled
        assert len(compiler.programs) == bool(settings.get("compile"))
    microbatches = split(batch, size)
    numbers = [counts(FAMILY.rule, one) for one in microbatches]
    expected_loss, expected = reference_gradients(plain.train(), microbatches, numbers)
    assert loss == pytest.approx(float(expected_loss), rel=1e-6)
    trained = {name: one for name, one in expected.items() if one is not None}
    assert set(recorder.gradients) == trained.keys()
    for name, gradient in trained.items():
        mine = recorder.gradients[name]
        tolerance = 2e-6 if dtype is torch.float32 else 2e-2  # sums here are float32
        same = torch.equal(mine, gradient)
        assert same or (not bits and torch.dist(mine, gradient) <= tolerance * gradient.norm())


# --------------------------------------------------------------------------------------------------
# Parity


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 2),
        (torch.bfloat16, 6),
        pytest.param(torch.float32, 6, marks=pytest.mark.thorough),
        pytest.param(torch.bfloat16, 2, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("way", ["as it is given", "as it moves in"])
def test_loss_and_gradients_are_those_of_plain_pytorch(
    kind: str, way: str, dtype: torch.dtype, size: int
) -> None:
    bits = dtype is torch.float32 or size == ROWS
    if way == "as it is given":
        model, settings = quantized(build(dtype), kind), {}
    else:
        model, settings = build(dtype), {"base": kind}
    plain = quantized(build(dtype), kind)
    assert_parity(model, plain, dtype=dtype, size=size, bits=bits, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_so_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    models = [bitsandbytes_in(build(dtype)) for _ in range(2)]
    assert_parity(*models, dtype=dtype, size=6, bits=True)


def test_the_proof_holds_two_layers_whatever_kernels_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of bitsandbytes keep weights where autograd does not see it."""
    brought, live = Reference._brought, list[int]()

    def noted(reference: Reference, name: str) -> Tensor:
        if name[0] == "L":
            there = (*reference._flats.values(), *reference._emptied.values())
            live.append(sum(one.untyped_storage().nbytes() > 0 for one in there))
        return brought(reference, name)

    monkeypatch.setattr(Reference, "_brought", noted)
    model = bitsandbytes_in(build(base=build_llama(num_hidden_layers=5))).train()
    with engine_of(model) as engine:
        engine.step(FAMILY.batch(ROWS))
    assert len(live) == 2 * (5 + 3) - 2, "two microbatches; two layers stay at each turn"
    assert max(live) == 2


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.thorough)])
def test_compiled_layers_expand_weights_themselves(kind: str) -> None:
    plain = quantized(build(), kind)
    settings = {"base": kind, "compile": BACKEND}
    assert_parity(build(), plain, dtype=torch.float32, size=6, bits=False, **settings)


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_after_several_steps_are_those_of_plain_pytorch(kind: str) -> None:
    batches = [FAMILY.batch(ROWS, seed=seed) for seed in range(3)]
    plain, model = quantized(build(), kind).train(), build()
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    expected = train_plain(plain, batches, optimizer=optimizer, rule=FAMILY.rule, size=2)
    settings = {"optimizer": l2l.AdamW(lr=1e-2), "microbatch_size": 2}
    with engine_of(model, base=kind, **settings) as engine:
        losses = [engine.step(batch).loss for batch in batches]
    assert losses == pytest.approx(expected, rel=1e-5)
    mine = dict(model.named_parameters())
    for name, one in plain.named_parameters():
        if one.requires_grad:
            assert torch.allclose(mine[name], one, rtol=1e-4, atol=1e-6), name
    # Closed, the model is what the library would have made of it.
    batch = FAMILY.batch(ROWS)
    assert type(model.get_parameter(WEIGHT)) is type(plain.get_parameter(WEIGHT))
    assert float(model(**batch).loss.detach()) == pytest.approx(
        float(plain(**batch).loss.detach()), rel=1e-5
    )


def test_a_head_may_be_quantized_too() -> None:
    def make() -> Any:
        model = quantized(build(), "int8")
        head = model.base_model.model.lm_head
        head.weight = nn.Parameter(int8(head.weight.detach()), requires_grad=False)
        return model

    assert_parity(make(), make(), dtype=torch.float32, size=6, bits=True)


@pytest.mark.parametrize("kind", FORMATS)
def test_generated_tokens_are_those_of_the_model(kind: str) -> None:
    expected = generated(quantized(build(), kind), do_sample=False, max_new_tokens=5)
    with engine_of(build(), base=kind) as engine:
        found = engine.generate(**prompts(), do_sample=False, max_new_tokens=5)
        predicted = engine.predict(FAMILY.batch(2)).logits
    assert torch.equal(found, expected)
    plain = quantized(build(), kind).eval()
    with torch.no_grad():
        assert torch.allclose(predicted, plain(**FAMILY.batch(2)).logits, atol=1e-6)


def test_a_frozen_model_is_run_in_4_bits() -> None:
    plain = FAMILY.build().requires_grad_(False)
    expected = generated(quantized(plain, "nf4"), do_sample=False, max_new_tokens=5)
    with engine_of(FAMILY.build().requires_grad_(False), base="nf4") as engine:
        found = engine.generate(**prompts(), do_sample=False, max_new_tokens=5)
        loss = engine.evaluate(FAMILY.batch(ROWS))
    assert torch.equal(found, expected)
    assert loss == pytest.approx(float(plain(**FAMILY.batch(ROWS)).loss), rel=1e-6)


# --------------------------------------------------------------------------------------------------
# Memory


def wide() -> nn.Module:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    return build_llama(**sizes, num_attention_heads=4, num_key_value_heads=2)


def test_it_takes_a_quarter_of_host_memory_link_and_slots() -> None:
    found = {}
    for base in (None, "nf4", "int8"):
        model = build(torch.bfloat16, wide())
        with engine_of(model, torch.bfloat16, base=base, prove=False) as engine:
            engine.step(FAMILY.batch(2))
            slots = {
                one.numel()
                for name, one in inside.weight_slots(engine).items()
                if name[1:].isdigit()
            }
            forms = [u.form for n, u in inside.server(engine).units.items() if n[0] == "L"]
            weights = sum(form.weight_layout.nbytes for form in forms)
            assert slots == {forms[0].weight_layout.nbytes}
            trained = sum(form.trained.nbytes for form in forms)
            found[base] = weights - trained
    numel = sum(p.numel() for n, p in wide().named_parameters() if "proj" in n)
    assert found[None] >= 2 * numel
    assert 0.5 * numel < found["nf4"] < 0.56 * numel
    assert numel < found["int8"] < 1.06 * numel


def test_slots_are_as_planned() -> None:
    settings = {"device_memory": "200MiB", "overrides": {"num_tail": 0}, "prove": False}
    with engine_of(build(torch.bfloat16, wide()), torch.bfloat16, base="nf4", **settings) as engine:
        engine.step(FAMILY.batch(2))
        slots, choices = inside.weight_slots(engine), dict(engine.plan.choices)
        streamed = {name: one.numel() for name, one in slots.items() if name[1:].isdigit()}
        planned = {one.purpose: one.nbytes for one in engine.plan.ledger if one.place == "device"}
    assert sum(streamed.values()) == planned["weight slots"]
    assert choices["quantized"] == "21 weights are NF4Tensor"


@pytest.mark.parametrize("kind", FORMATS)
def test_the_memory_of_an_expansion_is_counted(kind: str) -> None:
    """Without data as many bytes as the same pass takes."""

    def run(weight: Tensor, hidden: Tensor) -> Tensor:
        found = nn.functional.linear(hidden.requires_grad_(), weight)
        return torch.autograd.grad(found.sum(), hidden)[0]

    weight, hidden = torch.randn(128, 256), torch.randn(4, 256)
    real = FORMATS[kind](weight)
    with ByteCount() as count:
        run(real, hidden)
    known = format_of(real)
    assert known is not None
    given = known.copy(real, "meta"), hidden.detach().to("meta")
    cost = count_pass(lambda: run(*given), fused=False)
    assert cost.working_bytes == pytest.approx(count.peak_bytes, rel=0.02)


def test_it_fits_where_16_bits_do_not() -> None:
    def plan(base: str | None, **memory: str) -> l2l.Plan:
        with torch.device("meta"):
            big = build_llama(
                hidden_size=4096,
                intermediate_size=14336,
                num_hidden_layers=4,
                num_attention_heads=32,
                num_key_value_heads=8,
            )
            model = peft.get_peft_model(big, lora(r=16, target_modules="all-linear"))
        return l2l.plan(model, num_rows=1, length=512, base=base, hardware=H200, **memory)

    memory = {"device_memory": "1800MiB", "host_memory": "1GiB"}
    made = plan("nf4", **memory)
    assert made.total_bytes("device") <= 1800 << 20
    assert made.total_bytes("host") <= 1 << 30
    with pytest.raises(ValueError, match="host memory"):
        plan(None, **memory)
    with pytest.raises(ValueError, match="device"):
        plan(None, device_memory=memory["device_memory"])


def test_the_command_line_plans_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide().config.save_pretrained(tmp_path)
    found = {}
    for options in ([], ["--lora"], ["--lora", "--base", "nf4"]):
        command = ["plan", str(tmp_path), "--rows", "2", "--length", "16", *options]
        assert cli.main([*command, "--json"]) == 0
        found[len(options)] = json.loads(capsys.readouterr().out)
    assert found[0]["parameters"] < found[1]["parameters"] == found[3]["parameters"]
    assert found[0]["host_bytes"] > found[1]["host_bytes"] > found[3]["host_bytes"]
    assert cli.main(["plan", str(tmp_path), "--base", "nf4"]) == 2
    assert "expected --lora beside it" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# Saved, read, exported


@pytest.mark.parametrize("kind", FORMATS)
def test_a_run_goes_on_exactly(kind: str, tmp_path: Path) -> None:
    batches = [FAMILY.batch(ROWS, seed=seed) for seed in range(4)]
    settings = {"optimizer": l2l.AdamW(lr=1e-2), "base": kind, "dtype": torch.bfloat16}
    with engine_of(build(torch.bfloat16), **settings) as engine:
        for batch in batches[:2]:
            engine.step(batch)
        engine.save(tmp_path / "saved")
        losses = [engine.step(batch).loss for batch in batches[2:]]
        expected = engine.state_dict()
    other = build(torch.bfloat16)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)  # quantized weights are those of the checkpoint, too
    with engine_of(other, **settings) as engine:
        engine.load(tmp_path / "saved")
        assert [engine.step(batch).loss for batch in batches[2:]] == losses
        found = engine.state_dict()
    assert found.keys() == expected.keys()
    assert all(same(found[name], one) for name, one in expected.items())
    refused = pytest.raises(ValueError, match=r"(lacks|also has) .*q_proj.*of another model")
    with engine_of(build(torch.bfloat16), torch.bfloat16) as engine, refused:
        engine.load(tmp_path / "saved")


def same(one: Tensor, other: Tensor) -> bool:
    found, wanted = format_of(one), format_of(other)
    if found is None or wanted is None:
        return found is wanted and torch.equal(one, other)
    pairs = zip(found.take_apart(one).values(), wanted.take_apart(other).values(), strict=True)
    return found == wanted and all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_read_and_quantized_tensor_by_tensor(kind: str, tmp_path: Path) -> None:
    FAMILY.build().save_pretrained(tmp_path)
    whole = quantized(build(base=FAMILY.build()), kind)
    with torch.device("meta"):
        model = peft.get_peft_model(empty_model(tmp_path), lora(target_modules="all-linear"))
    with engine_of(model, base=kind, weights=tmp_path) as engine:
        found = engine.state_dict()
        assert isinstance(engine.step(FAMILY.batch(ROWS)).loss, float)
    quantities = 0
    for name, one in whole.state_dict().items():
        if "lora" not in name:
            assert same(found[name], one), name
            quantities += format_of(one) is not None
    assert quantities == 3 * 7


def test_random_weights_are_quantized_as_they_are_made(tmp_path: Path) -> None:
    FAMILY.build().config.save_pretrained(tmp_path)
    states = []
    for base in (None, "nf4"):
        with torch.device("meta"):
            model = peft.get_peft_model(empty_model(tmp_path), lora(target_modules="all-linear"))
        weights = l2l.RandomInit(seed=3)
        with engine_of(model, base=base, weights=weights) as engine:
            states.append(engine.state_dict())
    assert same(states[1][WEIGHT], nf4(states[0][WEIGHT]))


def test_what_is_read_is_the_quantized_weight() -> None:
    model, plain = build(), quantized(build(), "nf4")
    expected = plain.get_parameter(WEIGHT)
    with engine_of(model, base="nf4"):
        held = model.get_parameter(WEIGHT)
        assert held.shape == expected.shape
        assert same(held.detach(), expected)
        assert same(copy.deepcopy(held), expected)
        assert same(model.state_dict()[WEIGHT], expected)
        assert torch.equal(held.to(torch.bfloat16), expected.to(torch.bfloat16))
        assert "Quantized Data" in repr(held)
        with pytest.raises(RuntimeError, match="would be lost"):
            held.mul_(2)
        with pytest.raises(RuntimeError, match=r"engine\.step"):
            nn.functional.linear(torch.ones(1, 32), held)


@pytest.mark.parametrize("kind", FORMATS)
def test_an_adapter_is_exported_and_merged(kind: str, tmp_path: Path) -> None:
    """Merging expands the weights to float32, adds the adapter, and writes the model's dtype."""
    model = build()
    with engine_of(model, base=kind, optimizer=l2l.AdamW(lr=1e-2)) as engine:
        engine.step(FAMILY.batch(ROWS))
        engine.export(tmp_path / "adapter")
        engine.export(tmp_path / "merged", merge=True)
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all("lora" in name for name in adapter)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    path = "model.layers.1.mlp.up_proj"
    a, b = (adapter[f"base_model.model.{path}.lora_{one}.weight"] for one in "AB")
    weight = plain_values(model.get_parameter(f"base_model.model.{path}.base_layer.weight"))
    assert torch.allclose(merged[f"{path}.weight"], weight + 2.0 * (b @ a), atol=1e-7)
    whole = type(model.base_model.model).from_pretrained(tmp_path / "merged").eval()
    batch = FAMILY.batch(ROWS)
    with torch.no_grad():
        assert float(whole(**batch).loss) == pytest.approx(float(model.eval()(**batch).loss), 1e-4)


def test_layers_are_copied_and_removed_with_their_formats() -> None:
    model = build()
    with engine_of(model, base="nf4", optimizer=l2l.AdamW(lr=1e-2)) as engine:
        engine.step(FAMILY.batch(ROWS))
        before = engine.state_dict()
        engine.layers.grow(2)
        engine.layers.remove(0)
        grown = engine.state_dict()
        engine.step(FAMILY.batch(ROWS))
        assert len(set(inside.partition(engine).structures)) == 1
        with pytest.raises(CutError, match=r"is quantized.*train an adapter"):
            engine.layers.thaw(0)
    layers = model.base_model.model.model.layers
    assert len(layers) == 5
    name = "base_model.model.model.layers.{}.mlp.up_proj.base_layer.weight"
    for index, source in enumerate((1, 2, 0, 1, 2)):
        assert same(grown[name.format(index)], before[name.format(source)])
    assert format_of(layers[4].mlp.up_proj.base_layer.weight) is not None


# --------------------------------------------------------------------------------------------------
# Refused


def _trained(model: Any) -> Any:
    weight = model.get_parameter(WEIGHT).detach()
    module = model.get_submodule(WEIGHT.rpartition(".")[0])
    module.weight = nn.Parameter(weight, requires_grad=True)
    return model


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(CutError, match=r"q_proj.*is quantized.*NF4Tensor.*train an adapter"):
        engine_of(_trained(quantized(build(), "nf4")))
    with pytest.raises(ValueError, match=r"base='fp4' is not known. Expected 'nf4' or 'int8'"):
        engine_of(build(), base="fp4")
    model = FAMILY.build()
    with pytest.raises(CutError, match=r"no layer has a frozen weight of an nn.*get_peft_model"):
        engine_of(model, base="nf4")
    assert all(format_of(one) is None for one in model.parameters())


def test_ranks_that_hold_a_model_together_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(World):
        share = Share(index=0, number=2)

    monkeypatch.setattr("l2l.engine.engine.open_world", lambda **_: Two())
    with pytest.raises(ValueError, match=r"2 ranks hold the model together.*group_size=1"):
        engine_of(build(), base="nf4")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ValueError, match=r"needs torchao.*pip install 'torchao>=0.17'"):
        engine_of(build(), base="nf4")


# --------------------------------------------------------------------------------------------------
# Folders and models that others have quantized


def wide_enough() -> Any:
    """With rows as long as a block, which kernels of bitsandbytes for evaluation expect."""
    return build_llama(hidden_size=64, intermediate_size=128)


def loaded(folder: Path, config: Any) -> Any:
    transformers.utils.logging.disable_progress_bar()
    settings = {} if config is None else {"quantization_config": config}
    kind = transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, device_map={"": "cpu"}, dtype=torch.float32, **settings)


def test_a_model_that_transformers_has_quantized_trains_as_it_is(tmp_path: Path) -> None:
    wide_enough().save_pretrained(tmp_path / "plain")
    config = transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())
    models = [build(base=loaded(tmp_path / "plain", config)).train() for _ in range(2)]
    assert_parity(*models, dtype=torch.float32, size=6, bits=True)
    with engine_of(models[0]) as engine:
        engine.export(tmp_path / "merged", merge=True)
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    whole = loaded(tmp_path / "merged", None).eval()
    batch = FAMILY.batch(ROWS)
    with torch.no_grad():
        expected = float(models[1].eval()(**batch).loss)
        assert float(whole(**batch).loss) == pytest.approx(expected, rel=1e-5)


def test_a_folder_in_4_bits_is_read_tensor_by_tensor(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    wide_enough().save_pretrained(tmp_path / "plain")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    folder = tmp_path / "4 bits"
    loaded(tmp_path / "plain", config).save_pretrained(folder)
    with torch.device("meta"):
        model = peft.get_peft_model(empty_model(folder), lora(target_modules="all-linear"))
    model.train()
    recorder, batch = l2l.RecordGradients(), FAMILY.batch(ROWS)
    settings = {"optimizer": recorder, "microbatch_size": ROWS, "weights": folder}
    with engine_of(model, **settings) as engine:
        loss, present = engine.step(batch).loss, engine.state_dict()
        with pytest.raises(ValueError, match=r"Params4bit.*Export the adapter without merging"):
            engine.export(tmp_path / "merged", merge=True)
        engine.export(tmp_path / "adapter")
    plain = adapted(loaded(folder, None), lora(target_modules="all-linear")).train()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(present[name])
    assert present.keys() == plain.state_dict().keys()
    numbers = [counts(FAMILY.rule, batch)]
    expected_loss, expected = reference_gradients(plain, [batch], numbers)
    assert loss == float(expected_loss)
    for name, gradient in expected.items():
        assert gradient is None or torch.equal(recorder.gradients[name], gradient)
    assert type(model.get_parameter(WEIGHT)) is type(plain.get_parameter(WEIGHT))
    assert float(model(**batch).loss.detach()) == float(plain(**batch).loss.detach())


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_other_folders_are_refused_with_the_remedy(method: str, tmp_path: Path) -> None:
    FAMILY.build().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 8, "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"quantized .*by {method}.*base='nf4'.*transformers"):
        empty_model(tmp_path)


# --------------------------------------------------------------------------------------------------
# Formats


def test_formats_are_equal_where_tensors_are_made_alike() -> None:
    shapes = [(64, 64), (64, 64), (64, 128)]
    one, other, third = (format_of(nf4(torch.randn(shape))) for shape in shapes)
    assert one == other != third
    assert one != format_of(nf4(torch.randn(64, 64, dtype=torch.bfloat16)))
    assert one != format_of(int8(torch.randn(64, 64)))
    assert one is not None
    assert one.nbytes < 0.6 * 64 * 64


def test_dora_over_4_bits_is_refused() -> None:
    model = adapted(FAMILY.build(), lora(use_dora=True))
    with pytest.raises(CutError, match=r"DoRA.*base='int8'"):
        engine_of(model, base="nf4")
