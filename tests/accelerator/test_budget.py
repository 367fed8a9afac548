"""Plans on a CUDA device: every choice gives the same training, and the budget is kept."""

import gc
from typing import Any

import inside
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import l2l
from l2l.device.cuda import CudaDevice
from l2l.planner.decisions import STATE_ON_HOST
from l2l.planner.planning import Planning

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
]

NUM_LAYERS, VOCABULARY, LENGTH, ROWS = 6, 4096, 64, 16
ALONE = {
    "num_tail": 0,
    "num_device_states": 0,
    "num_shared": 0,
    "halves": False,
    "outer_state": False,
    "keep": 0.0,
    "num_kept_cells": 0,
    "shares_memory": False,
    "piece_tokens": None,
}
CHOICES = {
    "tail": {"num_tail": 2},
    "tail with state": {"num_tail": 3, "num_device_states": 3},
    "everything stays": {
        "num_tail": NUM_LAYERS,
        "num_device_states": NUM_LAYERS,
        "outer_state": True,
    },
    "shared updates": {"num_shared": 3, "num_late": 9},
    "halves": {"halves": True},
    "shared memory": {"shares_memory": True},
    "pieces": {"piece_tokens": 100},
    "all together": {
        "num_tail": 2,
        "num_device_states": 1,
        "num_shared": 2,
        "num_late": 9,
        "shares_memory": True,
        "piece_tokens": 100,
    },
}


@pytest.fixture(autouse=True)
def exact_products():
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    gc.collect()
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def build(
    num_layers: int = NUM_LAYERS,
    width: int = 256,
    *,
    num_words: int = VOCABULARY,
    tied: bool = True,
) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=num_words,
            tie_word_embeddings=tied,
        )
    )


def batches(number: int, *, rows: int = ROWS, length: int = LENGTH, num_words: int = VOCABULARY):
    generator = torch.Generator().manual_seed(1)
    for _ in range(number):
        ids = torch.randint(0, num_words, (rows, length), generator=generator)
        yield {"input_ids": ids, "labels": ids}


def train(**settings) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build()
    settings = {"precision": "float32", "clip_norm": 1.0, "compile": False, **settings}
    settings["overrides"] = {**ALONE, **settings.get("overrides", {})}
    engine = inside.engine(
        model, optimizer=l2l.AdamW(lr=1e-3, eps=1e-3), device="cuda", microbatch_size=4, **settings
    )
    losses = []
    for number, batch in enumerate(batches(5)):
        losses.append(engine.step(batch).loss)
        if number == 2:
            losses.append(engine.evaluate(batch))
    engine.close()
    return losses, model.state_dict()


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], dict[str, torch.Tensor]]:
    return train(embedding="device")


@pytest.mark.parametrize("embedding", ["device", "host"])
@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_gives_the_same_training(name: str, embedding: str, expected):
    losses, state = train(overrides=CHOICES[name], embedding=embedding)
    assert losses == pytest.approx(expected[0], rel=1e-5)
    for key, value in state.items():
        difference = float((value - expected[1][key]).abs().max())
        assert difference <= 2e-4 * float(expected[1][key].abs().max()) + 1e-6, key


@pytest.mark.parametrize(
    "overrides",
    [{}, {"num_tail": 2, "num_device_states": 2}, {"keep": 0.3, "num_kept_cells": 3}],
    ids=["streamed", "tail", "kept"],
)
def test_compiled_layers_train_alike(overrides: dict, expected):
    losses, _ = train(compile=True, overrides=overrides)
    assert losses == pytest.approx(expected[0], rel=1e-4)


CONTEXT = 1024  # MiB that a process may take beside its tensors: context, libraries, kernels


@pytest.mark.parametrize("budget", [256, 512, 1024])
def test_the_peak_stays_under_the_budget(budget: int):
    """By what the driver counts."""
    budget += CONTEXT
    before = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = build(num_layers=12, width=512)
    with inside.engine(
        model,
        optimizer=l2l.AdamW(lr=1e-4),
        device="cuda",
        device_memory=f"{budget}MiB",
        clip_norm=1.0,
    ) as engine:
        losses = [engine.step(one).loss for one in batches(4, rows=32, length=128)]
        engine.evaluate(next(batches(1)))
        plan, peak = engine.plan, engine.device.peak_bytes()
        taken = before - torch.cuda.mem_get_info()[0]  # since the test began
    assert losses[-1] < losses[0] + 0.1
    assert max(peak, taken) <= budget * 2**20
    assert plan.total_bytes("device") <= budget * 2**20
    assert plan.predicted_seconds is not None


def test_a_plan_whose_first_step_fails_leaves_nothing_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
):
    """The next plan has all optimizer state on the host, where updates expect it."""
    failed: list[str] = []
    submit, tighten = CudaDevice.submit, Planning.tighten

    def failing(device: CudaDevice, lane: Any, text: str, work: Any) -> None:
        if text.startswith(("forward", "loss")) and not failed:
            failed.append(text)
            raise torch.OutOfMemoryError("CUDA out of memory")
        submit(device, lane, text, work)

    def tighten_more(planning: Planning, reason: str) -> bool:
        monkeypatch.setattr(CudaDevice, "submit", submit)
        again = tighten(planning, reason)
        planning.restrict(STATE_ON_HOST)
        return again

    monkeypatch.setattr(Planning, "tighten", tighten_more)

    def losses_of(*, fails: bool, **more: Any) -> list[float]:
        with inside.engine(
            build(),
            optimizer=l2l.AdamW(lr=1e-4),
            device="cuda",
            device_memory="2GiB",
            clip_norm=1.0,
            compile=False,
            **more,
        ) as engine:
            if fails:
                monkeypatch.setattr(CudaDevice, "submit", failing)
            losses = [engine.step(batch).loss for batch in batches(5)]
            assert inside.planning(engine).decisions.num_device_states == 0
        return losses

    found = losses_of(fails=True)
    assert len(failed) == 1
    expected = losses_of(fails=False, overrides=STATE_ON_HOST)
    assert found == pytest.approx(expected, rel=2e-4)


@pytest.mark.parametrize("budget", [768, 896, 1024, 1280])
def test_a_plan_has_room_for_norms_of_many_tokens_and_few_words(
    budget: int, caplog: pytest.LogCaptureFixture
):
    """A norm computes in float32: with few words the epilogue takes more for it than for logits."""
    budget += CONTEXT
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = build(num_layers=8, width=512, num_words=256, tied=False)
    with inside.engine(
        model, optimizer=l2l.AdamW(lr=1e-4), device="cuda", device_memory=f"{budget}MiB"
    ) as engine:
        for batch in batches(2, rows=32, length=512, num_words=256):
            engine.step(batch)
        assert engine.device.peak_bytes() <= budget * 2**20
    assert "needed more device memory" not in caplog.text


@pytest.mark.filterwarnings("ignore:1 frozen parameters")
@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
def test_no_more_logits_than_the_budget_has_room_for(frozen: bool):
    """A microbatch's would be 1 GiB, in training and in evaluation."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = build(num_layers=4, num_words=1 << 16, tied=False)
    model.lm_head.weight.requires_grad_(not frozen)
    with inside.engine(
        model,
        optimizer=l2l.AdamW(lr=1e-4),
        device="cuda",
        device_memory=f"{CONTEXT + 512}MiB",
        microbatch_size=128,
    ) as engine:
        [batch] = batches(1, rows=256, length=64)
        losses = [engine.step(batch).loss for _ in range(3)]
        losses.append(engine.evaluate(batch))
        assert engine.device.peak_bytes() <= (CONTEXT + 512) << 20
    assert losses[-1] < losses[0]


def test_a_head_in_slices_trains_alike(expected):
    overrides = {"num_head_slices": 3}
    for compiled in (False, True):
        losses, _ = train(overrides=overrides, embedding="host", compile=compiled)
        assert losses == pytest.approx(expected[0], rel=1e-4)


def test_a_large_vocabulary_trains_in_a_small_budget():
    """Its head alone has 256 MiB of weights and 512 of gradients; the trial runs on the host."""
    model = build(num_layers=3, width=512, num_words=1 << 18)
    with inside.engine(
        model, optimizer=l2l.AdamW(lr=1e-4), device="cuda", device_memory=f"{CONTEXT + 320}MiB"
    ) as engine:
        losses = [engine.step(one).loss for one in batches(3, num_words=1 << 18)]
        assert engine.device.peak_bytes() <= (CONTEXT + 320) << 20
        assert inside.planning(engine).decisions.num_head_slices > 1
        assert inside.trial(engine)._on_host
    assert losses[-1] < losses[0]


def test_layers_in_tiles_train_alike(expected):
    losses, _ = train(overrides={"tile_tokens": 64})
    assert losses == pytest.approx(expected[0], rel=1e-4)


def test_a_budget_that_is_too_small_says_what_would_do():
    with (
        inside.engine(build(), device="cuda", device_memory="20MiB", compile=False) as engine,
        pytest.raises(ValueError, match=r"context, libraries .* Give device_memory="),
    ):
        engine.step(next(batches(1)))
