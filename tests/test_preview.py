"""Plans of models that are not there: families, memory, agreement with the engine, largest models.

Everything is planned for an H200 by its figures (l2l/hardware.py); nothing of it runs.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
import transformers
from families import FAMILIES, Family, build_llama, causal_batch
from sampled import sampled
from torch import Tensor, nn

import l2l
from l2l.bench.workload import Workload
from l2l.model.fake_weights import LARGE_BYTES, FakeWeights, fake_weight, is_fake
from l2l.planner import DoesNotFitError, Together
from l2l.planner.hardware import H200 as WITH_CONTEXT
from l2l.planner.preview import STREAMED, largest_model

H200 = dataclasses.replace(WITH_CONTEXT, context_bytes=0)  # budgets are those of tensors

META = torch.device("meta")
GIB = 2**30
STATUS = Path("/proc/self/status")


def shape(name: str = "1b", *, num_layers: int | None = None) -> nn.Module:
    return Workload(shape=name, num_layers=num_layers).model(META)


def without_values(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(META) for name, tensor in batch.items()}


# --------------------------------------------------------------------------------------------------
# Families


def plan_of(family: Family, model: nn.Module, batch: dict[str, Tensor]) -> l2l.Plan:
    return l2l.plan(
        model,
        batch,
        layers=family.layers,
        device_memory="1GiB",
        precision="float32",
        compile=False,
        hardware=H200,
    )


def test_a_table_of_encoder_and_decoder_is_planned_for_several_devices() -> None:
    """One looks its rows up on the host; where several gather it, it stays between the stacks."""
    sizes = {f"{part}_layers": 2 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    config = transformers.BartConfig(
        vocab_size=70_000, d_model=64, tie_word_embeddings=False, **sizes
    )
    with META:
        model = transformers.BartForConditionalGeneration(config)
        ids = torch.empty((4, 8), dtype=torch.int64)
    batch = {"input_ids": ids, "decoder_input_ids": ids, "labels": ids}
    settings = {"precision": "float32", "compile": False, "hardware": H200}
    plan = l2l.plan(model, batch, world=Together(num_ranks=2), **settings)
    assert [point.num_ranks for point in plan.scaling] == [1, 2]


OFTEN = {
    "llama_tied",
    "gpt2",
    "mixtral",
    "qwen3_next",
    "mamba",
    "bert_masked_lm",
    "mpnet",
    "batchnorm",
}
OFTEN |= {"vit_classification", "bart", "whisper", "hand_written"}


@pytest.mark.parametrize("name", sampled(FAMILIES, lambda name: name in OFTEN))
def test_every_family_has_a_plan_on_the_meta_device(name: str) -> None:
    family = FAMILIES[name]
    with META:
        model = family.build()
    plan = plan_of(family, model, without_values(family.batch(4)))
    assert plan.predicted_seconds is not None
    assert plan.predicted_seconds > 0
    assert plan.bound in ("compute", "link", "host")
    assert 0 < plan.total_bytes("device") <= GIB
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert plan.total_bytes("host") >= 4 * numel
    assert f"{numel:,}" in str(plan)


@pytest.mark.parametrize("name", ["llama_tied", "bert_classification", "hand_written", "whisper"])
def test_a_model_that_is_there_is_left_alone_and_has_the_same_plan(name: str) -> None:
    family = FAMILIES[name]
    model, batch = family.build(), family.batch(4)
    found = plan_of(family, model, batch)
    for key, tensor in family.build().state_dict().items():
        assert torch.equal(tensor, model.state_dict()[key]), key
    with META:
        absent = family.build()
    assert found.ledger == plan_of(family, absent, batch).ledger


def test_a_model_without_layers_is_refused() -> None:
    with META:
        model = nn.ParameterList([torch.ones(4)])
    with pytest.raises(ValueError, match="no list of layers"):
        l2l.plan(model, hardware=H200)


def test_a_layer_that_is_called_twelve_times_is_planned() -> None:
    with META:
        model = transformers.AlbertForMaskedLM(transformers.AlbertConfig())
    plan = l2l.plan(model, length=128, num_rows=2, device_memory="8GiB", hardware=H200)
    assert "albert_layer_groups, 1 of them" in str(plan)


# --------------------------------------------------------------------------------------------------
# Nothing is allocated


def peak_bytes() -> int:
    """Most memory that this process has had since `forget_peak`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())
    assert found is not None
    return 1024 * int(found[1])


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def build_large(*, num_layers: int = 80, hidden_size: int = 8192) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=7 * hidden_size // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128_256,
    )
    with META:
        return transformers.LlamaForCausalLM(config)


@pytest.mark.skipif(not STATUS.exists(), reason="the system does not say how much is taken")
def test_a_plan_for_70_billion_parameters_takes_no_memory() -> None:
    small = build_large(num_layers=2, hidden_size=512)  # what is loaded once is loaded now
    l2l.plan(small, num_rows=1, length=64, hardware=H200)
    forget_peak()
    before = peak_bytes()
    model = build_large()
    plan = l2l.plan(model, num_rows=8, length=4096, device_memory="40GiB", hardware=H200)
    assert sum(parameter.numel() for parameter in model.parameters()) > 70e9
    assert plan.total_bytes("host") > 500 * GIB
    assert peak_bytes() - before < 300 << 20


def test_large_tensors_are_fake_and_small_ones_real() -> None:
    weight = fake_weight((200_000, 4096), torch.bfloat16)
    assert is_fake(weight)
    with torch.no_grad(), FakeWeights():
        ids = torch.arange(6).view(2, 3)
        rows = torch.nn.functional.embedding(ids, weight)
        assert not is_fake(rows)
        assert rows.shape == (2, 3, 4096)
        rows = rows + 1
        logits = torch.nn.functional.linear(rows, weight)
        assert logits.shape == (2, 3, 200_000)
        assert not logits.any()
        wide = weight.float().mul_(2).t()
        assert is_fake(wide)
        assert wide.dtype is torch.float32
        mask = torch.ones(4096, 4096).tril()
        assert is_fake(mask)
        assert mask.nbytes > LARGE_BYTES
        assert ids.sum().item() == 15
        assert ids[ids > 3].tolist() == [4, 5]
        assert torch.empty(1 << 30, device="meta").is_meta
    assert rows[0, 0, 0] == 1


def test_long_rows_take_no_memory_either() -> None:
    """Hidden states and masks of 128 Ki tokens would."""
    with META:
        config = transformers.Gemma3TextConfig(
            hidden_size=1024, num_hidden_layers=6, num_attention_heads=4, sliding_window=512
        )
        model = transformers.Gemma3ForCausalLM(config)
    plan = l2l.plan(model, num_rows=1, length=1 << 16, hardware=H200, host_memory="100GiB")
    lines = {line.purpose: line.nbytes for line in plan.ledger}
    assert lines["recorded arguments"] > 2**32  # masks


# --------------------------------------------------------------------------------------------------
# What it depends on


def test_it_is_what_the_engine_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for logits: on the CPU an engine does not put them off, where bits come first."""
    monkeypatch.setattr("l2l.planner.planning.known_hardware", lambda *_, **__: H200)
    batch = causal_batch(8)

    def build() -> nn.Module:
        return build_llama(hidden_size=256, intermediate_size=512, num_hidden_layers=6)

    for budget in ("146MiB", "160MiB", "240MiB"):
        settings: dict[str, Any] = {
            "optimizer": l2l.AdamW(),
            "precision": "float32",
            "device_memory": budget,
            "clip_norm": 1.0,
        }
        preview = l2l.plan(build(), batch, compile=False, hardware=H200, **settings)
        with inside.engine(build(), device="cpu", **settings) as engine:
            engine.step(batch)
            plan = engine.plan
        assert preview.budget_bytes == plan.budget_bytes
        assert preview.num_tokens == plan.num_tokens
        assert preview.predicted_seconds == pytest.approx(plan.predicted_seconds, rel=0.01)
        assert dict(preview.choices)["tail"] == dict(plan.choices)["tail"]
        mine, theirs = (
            {(one.phase, one.purpose): one.nbytes for one in found.ledger if one.place == "device"}
            for found in (preview, plan)
        )
        piece = ("epilogue", "a piece at work")
        assert mine.pop(piece) == pytest.approx(theirs.pop(piece), rel=0.2)
        assert mine == theirs
        if "optimizer state" not in dict(plan.choices)["tail"]:  # it does not move on the CPU
            hosts = [found.total_bytes("host") for found in (preview, plan)]
            assert hosts[0] == pytest.approx(hosts[1], rel=0.05)


def test_optimizers_take_on_the_host_what_they_say() -> None:
    model = shape("3.2b")
    numel = sum(parameter.numel() for parameter in model.parameters())
    for optimizer, clip_norm, expected in (
        (l2l.AdamW(), None, 12.5),
        (l2l.AdamW(), 1.0, 14),
        (l2l.AdamW(moments="8bit"), 1.0, 8.1),
        (l2l.Lion(), 1.0, 10),
        (l2l.SGD(), 1.0, 6),
        (l2l.Adafactor(), None, 2),
    ):
        plan = l2l.plan(
            model,
            num_rows=1,
            optimizer=optimizer,
            clip_norm=clip_norm,
            hardware=H200,
            overrides=STREAMED,
        )
        lines = {line.purpose: line.nbytes for line in plan.ledger}
        assert lines["parameter server"] / numel == pytest.approx(expected, rel=0.06), optimizer


def test_choices_can_be_overridden() -> None:
    overrides = {"num_tail": 3, "num_device_states": 0, "outer_state": False, "piece_tokens": 256}
    plan = l2l.plan(shape(), hardware=H200, overrides=overrides)
    assert dict(plan.choices)["tail"].startswith("the last 3 of 16")
    assert dict(plan.choices)["epilogue"] == "in pieces of 256 tokens"
    with pytest.raises(ValueError, match="contains unknown choices"):
        l2l.plan(shape(), hardware=H200, overrides={"tail": 3})


def test_microbatches_can_be_given() -> None:
    plan = l2l.plan(shape(), num_rows=12, microbatch_size=3, hardware=H200)
    assert dict(plan.choices)["microbatch"].startswith("3 rows")
    with pytest.raises(ValueError, match="at least 1 row"):
        l2l.plan(shape(), microbatch_size=0, hardware=H200)


# --------------------------------------------------------------------------------------------------
# What does not fit


def test_too_little_device_memory_is_refused() -> None:
    with pytest.raises(DoesNotFitError, match=r"of device memory, found a budget of 256\.00 MiB"):
        l2l.plan(shape(), device_memory="256MiB", hardware=H200)


def test_the_least_budget_does_not_grow_with_the_vocabulary() -> None:
    def least(words: int) -> float:
        config = transformers.LlamaConfig(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=4,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=words,
        )
        with META:
            model = transformers.LlamaForCausalLM(config)
        with pytest.raises(DoesNotFitError) as refused:
            l2l.plan(model, num_rows=8, device_memory="64MiB", hardware=H200)
        number = re.search(r"the step needs ([\d.]+) MiB", str(refused.value))
        assert number is not None
        return float(number[1])

    assert least(262_144) == pytest.approx(least(32_000), rel=0.03)


def test_too_little_host_memory_is_refused_with_optimizers_that_fit() -> None:
    with pytest.raises(DoesNotFitError, match="parameter server needs") as refused:
        l2l.plan(shape("7.5b"), host_memory="30GiB", hardware=H200)
    assert "optimizer=l2l.Adafactor()" in str(refused.value)
    plan = l2l.plan(
        shape("7.5b"), host_memory="30GiB", hardware=H200, optimizer=l2l.Adafactor(), num_rows=1
    )
    assert plan.total_bytes("host") <= 30 * GIB


def test_a_stash_that_the_host_has_no_room_for_is_refused() -> None:
    settings: dict[str, Any] = {"hardware": H200, "overrides": STREAMED}
    model = shape(num_layers=4)
    enough = l2l.plan(model, num_rows=1, **settings).total_bytes("host")
    with pytest.raises(DoesNotFitError, match=r"stash .* fewer rows"):
        l2l.plan(model, num_rows=16, host_memory=enough, **settings)


def test_the_most_layers_fit_and_one_more_does_not() -> None:
    def make(number: int) -> nn.Module:
        return shape(num_layers=number)

    settings: dict[str, Any] = {"num_rows": 4, "device_memory": "4GiB", "hardware": H200}
    found = []
    for optimizer in (l2l.AdamW(), l2l.Adafactor()):
        result = largest_model(make, host_memory="8GiB", optimizer=optimizer, **settings)
        assert result is not None
        number, plan = result
        assert 0.9 * 8 * GIB < plan.total_bytes("host") <= 8 * GIB
        assert plan.total_bytes("device") <= 4 * GIB
        assert dict(plan.choices)["layers"] == f"model.layers, {number} of them"
        with pytest.raises(DoesNotFitError):
            l2l.plan(
                make(number + 1),
                host_memory="8GiB",
                optimizer=optimizer,
                overrides=STREAMED,
                **settings,
            )
        found.append(number)
    assert 5 * found[0] < found[1]


def test_there_may_be_no_largest_model() -> None:
    def make(number: int) -> nn.Module:
        return shape(num_layers=number)

    assert largest_model(make, host_memory="1TiB", device_memory="256MiB", hardware=H200) is None
    assert largest_model(make, host_memory="1GiB", hardware=H200) is None
    few = largest_model(make, host_memory="1TiB", most_layers=20, num_rows=1, hardware=H200)
    assert few is not None
    assert few[0] == 20
