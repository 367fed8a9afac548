"""The engine on a CUDA device: the same results as plain PyTorch there, memory that stays put."""

import gc
import subprocess
import sys
import warnings

import inside
import pytest
import torch
from families import FAMILIES, build_bert, masks
from reference import counts, reference_gradients, split

import l2l

pytestmark = pytest.mark.accelerator

ROWS = 6
STREAMED = {
    "num_tail": 0,
    "num_device_states": 0,
    "num_shared": 0,
    "outer_state": False,
    "keep": 0.0,
}


def make_engine(model, **settings) -> l2l.Engine:
    """An engine that streams all layers, as they are; test_budget.py has the others."""
    return inside.engine(model, **{"compile": False, "overrides": STREAMED, **settings})


@pytest.fixture(autouse=True)
def exact_products():
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("size", [6, 2])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_gradients_equal_those_of_plain_pytorch_on_the_device(name: str, size: int):
    family = FAMILIES[name]
    model, plain = family.build(), family.build().cuda()
    batch = family.batch(ROWS)
    recorder = l2l.RecordGradients()
    with make_engine(
        model,
        optimizer=recorder,
        precision="float32",
        device="cuda",
        microbatch_size=size,
        layers=family.layers,
    ) as engine:
        report = engine.step(batch)
        assert not report.skipped
    microbatches = split(batch, size)
    numbers = [counts(family.rule, one) for one in microbatches]
    on_device = [{key: value.cuda() for key, value in one.items()} for one in microbatches]
    loss, expected = reference_gradients(plain, on_device, numbers)
    assert report.loss == pytest.approx(float(loss), rel=1e-6)
    present = {key for key, gradient in expected.items() if gradient is not None}
    assert set(recorder.gradients) == present
    largest = max(float(expected[key].abs().max()) for key in present)
    for key in present:
        difference = float((recorder.gradients[key] - expected[key].cpu()).abs().max())
        assert difference <= 1e-5 * float(expected[key].abs().max()) + 1e-8 * largest, key


def train(seed: int, **settings):
    model = build_bert(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    engine = make_engine(
        model, optimizer=l2l.AdamW(lr=1e-3), device="cuda", microbatch_size=2, seed=seed, **settings
    )
    losses = [
        engine.step(FAMILIES["bert_classification"].batch(ROWS, seed=i)).loss for i in range(4)
    ]
    engine.close()
    return losses, model.state_dict()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_one_seed_gives_one_result_whatever_the_timing(precision: str):
    first, second = train(3, precision=precision), train(3, precision=precision)
    assert first[0] == second[0]
    assert all(torch.equal(first[1][key], second[1][key]) for key in first[1])
    assert train(4, precision=precision)[0] != first[0]


def test_the_stash_may_be_on_the_device():
    first, second = train(3, stash="host"), train(3, stash="device")
    assert first[0] == second[0]
    assert all(torch.equal(first[1][key], second[1][key]) for key in first[1])


def test_a_recomputed_layer_gives_the_bits_of_its_forward():
    model = build_bert(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    engine = make_engine(model, device="cuda", microbatch_size=2, seed=1)
    batch = FAMILIES["bert_classification"].batch(ROWS)
    engine.step(batch)
    outputs: list[list[torch.Tensor]] = []
    for part in inside.partition(engine).layers:
        outputs.append([])
        part.module.register_forward_hook(
            lambda _, __, value, kept=outputs[-1]: kept.append(value.detach().clone())
        )
    engine.step(batch)
    for kept in outputs:
        assert len(kept) == 6
        for forward, recomputed in zip(kept[:3], kept[3:], strict=True):
            assert torch.equal(forward, recomputed)
    engine.close()


def test_the_callers_stream_is_the_current_one_again_whatever_happens():
    batch = FAMILIES["bert_classification"].batch(ROWS)
    expected = train(3)[0][0]
    model = build_bert(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    own = torch.cuda.Stream()
    with (
        make_engine(
            model, optimizer=l2l.AdamW(lr=1e-3), device="cuda", microbatch_size=2, seed=3
        ) as engine,
        torch.cuda.stream(own),
    ):
        first = FAMILIES["bert_classification"].batch(ROWS, seed=0)
        assert engine.step(first).loss == expected
        assert torch.cuda.current_stream() == own
        handle = inside.partition(engine).layers[1].module.register_forward_hook(interrupt)
        with pytest.raises(InterruptedError):
            engine.step(batch)
        assert torch.cuda.current_stream() == own
        handle.remove()


def interrupt(*_: object) -> None:
    raise InterruptedError


def test_torchs_profiler_sees_the_lines_of_the_schedule():
    batch = FAMILIES["bert_classification"].batch(ROWS)
    with make_engine(build_bert(), device="cuda", microbatch_size=2) as engine:
        engine.step(batch)
        cpu = torch.profiler.ProfilerActivity.CPU
        with torch.profiler.profile(activities=[cpu], acc_events=True) as profile:
            engine.step(batch)
    names = {event.name for event in profile.events()}
    assert any(name.startswith("forward L0 m0") for name in names)
    assert any(name.startswith("fetch L1") for name in names)


def peak(num_layers: int, rows: int) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    model = build_bert(num_hidden_layers=num_layers, hidden_size=256, intermediate_size=1024)
    batch = FAMILIES["bert_classification"].batch(rows)
    # The proof holds as many layers as there is room for, and no budget is named here.
    with make_engine(model, device="cuda", microbatch_size=2, prove=False) as engine:
        engine.device.reset_peak()
        for _ in range(2):
            engine.step(batch)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


def test_the_peak_depends_neither_on_depth_nor_on_the_number_of_microbatches():
    peak(4, 8)  # libraries take their workspaces
    peaks = [peak(4, 8), peak(8, 8), peak(32, 8), peak(8, 2), peak(8, 64)]
    assert max(peaks) <= 1.01 * min(peaks), peaks


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_late_updates_give_the_bits_of_eager_ones(precision: str):
    eager = train(3, precision=precision, update="eager")
    late = train(3, precision=precision, update="just in time")
    clipped = train(3, precision=precision, clip_norm=1e9)
    for losses, state in (late, clipped):
        assert losses == eager[0]
        assert all(torch.equal(state[key], eager[1][key]) for key in state)


def test_clipped_steps_equal_those_of_plain_pytorch_on_the_device():
    family = FAMILIES["llama_untied"]
    model, plain = family.build(), family.build().cuda()
    numbers = {"lr": 1e-3, "eps": 1e-3}
    optimizer = torch.optim.AdamW(plain.parameters(), **numbers)
    for number in range(10):
        microbatches = split(family.batch(ROWS, seed=number), 2)
        shares = [counts(family.rule, one) for one in microbatches]
        plain.zero_grad()
        for one, share in zip(microbatches, shares, strict=True):
            on_device = {key: value.cuda() for key, value in one.items()}
            (plain(**on_device).loss * (share / sum(shares))).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        optimizer.step()
    with make_engine(
        model,
        optimizer=l2l.AdamW(**numbers, weight_decay=1e-2),
        device="cuda",
        precision="float32",
        microbatch_size=2,
        clip_norm=0.05,
    ) as engine:
        for number in range(10):
            engine.step(family.batch(ROWS, seed=number))
    for key, expected in plain.state_dict().items():
        allowed = 1e-5 * (float(expected.abs().max()) + 1e-3)
        assert float((model.state_dict()[key] - expected.cpu()).abs().max()) <= allowed, key


def test_adafactor_on_the_device_equals_that_of_torch():
    family = FAMILIES["llama_untied"]
    model, plain = family.build(), family.build().cuda()
    optimizer = torch.optim.Adafactor(plain.parameters(), lr=1e-2)
    with make_engine(
        model,
        optimizer=l2l.Adafactor(lr=1e-2),
        device="cuda",
        precision="float32",
        microbatch_size=ROWS,
    ) as engine:
        for number in range(4):
            batch = family.batch(ROWS, seed=number)
            engine.step(batch)
            optimizer.zero_grad()
            plain(**{key: value.cuda() for key, value in batch.items()}).loss.backward()
            optimizer.step()
    for key, expected in plain.state_dict().items():
        difference = float((model.state_dict()[key] - expected.cpu()).abs().max())
        assert difference <= 1e-4 * float(expected.abs().max()), key


def test_float16_skips_an_overflow_and_goes_on():
    family = FAMILIES["llama_untied"]
    with make_engine(
        family.build(), device="cuda", precision="float16", microbatch_size=2
    ) as engine:
        inside.scaler(engine).scale.value = 2.0**40
        assert engine.step(family.batch(ROWS)).skipped
        inside.scaler(engine).scale.value = 256.0
        reports = [engine.step(family.batch(ROWS)) for _ in range(5)]
        assert not any(report.skipped for report in reports)
        assert reports[-1].loss < reports[0].loss


def test_microbatches_of_growing_lengths_equal_plain_pytorch():
    """Cells grow while copies of earlier microbatches are under way."""
    family = FAMILIES["mpnet"]
    rows = [family.batch(2, seed=number) for number in range(4)]
    lengths = [4, 12, 6, 9]
    microbatches = [
        {key: value[:, :length].contiguous() for key, value in one.items()}
        for one, length in zip(rows, lengths, strict=True)
    ]
    model, plain = family.build(), family.build().cuda()
    recorder = l2l.RecordGradients()
    with make_engine(model, optimizer=recorder, precision="float32", device="cuda") as engine:
        for part in (microbatches[:1], microbatches[:2], microbatches):
            report = engine.step(part)
        assert not report.skipped
    numbers = [counts(family.rule, one) for one in microbatches]
    on_device = [{key: value.cuda() for key, value in one.items()} for one in microbatches]
    loss, expected = reference_gradients(plain, on_device, numbers)
    assert report.loss == pytest.approx(float(loss), rel=1e-6)
    largest = max(float(g.abs().max()) for g in expected.values() if g is not None)
    for key, gradient in recorder.gradients.items():
        difference = float((gradient - expected[key].cpu()).abs().max())
        assert difference <= 1e-5 * float(expected[key].abs().max()) + 1e-7 * largest, key


@pytest.mark.parametrize(
    "settings",
    [{"optimizer": l2l.Adafactor(lr=1e-2)}, {"clip_norm": 1.0}, {}],
    ids=["on the device", "clipped", "eager"],
)
def test_closing_at_once_gives_the_weights_of_the_last_step(settings: dict):
    """The last copies and updates are still under way when `close` is called."""
    results = []
    for wait in (False, True):
        model = build_bert(num_hidden_layers=4, hidden_size=512, intermediate_size=4096)
        engine = make_engine(model, device="cuda", microbatch_size=2, seed=1, **settings)
        engine.step(FAMILIES["bert_classification"].batch(ROWS))
        if wait:
            torch.cuda.synchronize()
        engine.close()
        results.append(model.state_dict())
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def test_evaluation_between_late_updates_changes_nothing():
    results = []
    for evaluates in (False, True):
        model = build_bert()
        batch = FAMILIES["bert_classification"].batch
        with make_engine(model, device="cuda", microbatch_size=2, clip_norm=0.1, seed=1) as engine:
            for number in range(3):
                engine.step(batch(ROWS, seed=number))
                if evaluates:
                    engine.evaluate(batch(ROWS, seed=9))
                    engine.predict(batch(ROWS, seed=8))
        results.append(model.state_dict())
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def test_a_trace_has_every_lane():
    with make_engine(build_bert(), device="cuda", microbatch_size=2) as engine:
        engine.step(FAMILIES["bert_classification"].batch(ROWS))
        with engine.trace() as trace:
            engine.step(FAMILIES["bert_classification"].batch(ROWS))
        lanes = {span.lane for span in trace.spans}
        assert {"compute", "fetch", "drain", "update"} <= lanes
        assert all(span.end >= span.start for span in trace.spans)


ASKED = (
    "llama_tied",
    "qwen3",
    "gpt2",
    "gpt_neox",
    "opt",
    "phi3",
    "falcon",
    "gemma3",
    "bert_classification",
)
"""Families whose code, around the layers, asks for nothing but what can be known beforehand."""


@pytest.mark.parametrize("kind", ["nothing", "all ones", "padded", "packed"])
@pytest.mark.parametrize("name", ASKED)
def test_a_step_never_waits_for_the_device(name: str, kind: str):
    """Torch raises where an operation would wait; what events say is not an operation."""
    family = FAMILIES[name]
    batch = {k: v for k, v in family.batch(ROWS).items() if k != "attention_mask"}
    batch |= masks(kind, batch["input_ids"])
    compiled = (
        name == "falcon"
    )  # its layers take elements by lists of numbers, which come one by one
    with make_engine(family.build(), device="cuda", microbatch_size=2, compile=compiled) as engine:
        losses = [engine.step(batch).loss for _ in range(2)]
        with warnings.catch_warnings():  # that it does not find all of them
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            report = engine.step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert report.loss < losses[0] + 1.0


TIDYING = """
import time, torch
from l2l.device import open_device
from l2l.schedule import Lane

device = open_device("cuda")
device.limit_memory(1 << 30)
program = torch.compile(lambda a, b: a[:, None] + b[None])
given = [torch.ones(8192, device="cuda") for _ in range(2)]
program(*given)
held = [device.empty(100 << 20) for _ in range(9)]
del held[::2]

def update():
    for _ in range(50):
        time.sleep(0.01)

device.submit(Lane.UPDATE, "update", update)
device.wait(Lane.FETCH, device.record(Lane.UPDATE))
device.submit(Lane.COMPUTE, "forward", lambda: program(*given))
torch.cuda.synchronize()
assert torch.cuda.memory_stats()["num_alloc_retries"] > 0, "nothing was to be tidied up"
device.close()
"""


def test_memory_is_tidied_up_while_a_stream_waits_for_an_update():
    """The allocator then waits for the device, that for the host thread, and that for the lock."""
    subprocess.run([sys.executable, "-c", TIDYING], check=True, timeout=90)
