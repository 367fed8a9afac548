"""State is whole or says so: interrupts, forks and threads, gradients and losses not finite."""

import importlib.util
import logging
import math
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from torch import Tensor, nn

import l2l
from l2l.device import UpdateFailedError

ROOT = Path(__file__).parents[1]
LAYERS, WIDTH, WORDS = 4, 8, 11


@pytest.fixture(autouse=True)
def interrupts_raise():
    """Also in a process that was started in the background, where Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Layer(nn.Module):
    """A layer whose gradient can be spoilt while its output stays finite."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.number = 0

    def forward(self, hidden: Tensor, spoilt: Tensor) -> Tensor:
        return hidden + Spoil.apply(torch.tanh(self.up(hidden)), spoilt[0] == self.number)


class Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, spoilt: Tensor) -> Tensor:
        ctx.save_for_backward(spoilt)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.where(ctx.saved_tensors[0], torch.nan, gradient), None


class Model(nn.Module):
    """Embedding, layers, head, loss; `spoilt` names the layer whose gradient is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        for number, layer in enumerate(self.layers):
            layer.number = number
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, spoilt: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.table(ids)
        for layer in self.layers:
            hidden = layer(hidden, spoilt)
        loss = nn.functional.cross_entropy(self.head(hidden), labels)
        return {"loss": loss * torch.where(spoilt[0] == 99, torch.nan, 1.0)}


def batch(seed: int, *, spoilt: int = -1, rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (rows,), generator=generator)
    return {"ids": ids, "spoilt": torch.full((rows,), spoilt), "labels": ids.flip(0)}


def make(**settings: Any) -> l2l.Engine:
    torch.manual_seed(0)
    settings = {"precision": "float32", "device": "cpu", "microbatch_size": 2, **settings}
    return inside.engine(Model(), layers="layers", **settings)


def state_of(engine: l2l.Engine) -> dict[str, Tensor]:
    """Everything, once all updates are done."""
    inside.server(engine).settle_all()
    found = {"number": torch.tensor(engine.step_number)}
    for name, unit in inside.server(engine).units.items():
        found[f"{name} weights"] = unit.weights.clone()
        for owner in unit.form.trained.names:  # what lies between them is anything
            state = unit.state_of(owner).items()
            found |= {f"{owner} {key}": value.clone() for key, value in state}
        found[f"{name} steps"] = torch.tensor(list(unit.steps.values()))
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


# --------------------------------------------------------------------------------------------------
# Interrupts


def campaign() -> Any:
    spec = importlib.util.spec_from_file_location(
        "interrupts", ROOT / "reproduce" / "interrupts.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["interrupts"] = module
    spec.loader.exec_module(module)
    return module


# An exception that is injected into a callback of the interpreter's own is only told of.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_random_instants_leave_the_engine_whole_or_torn(tmp_path: Path) -> None:
    interrupts = campaign()
    rows = interrupts.run(tries=42, folder=tmp_path, seed=1)
    assert sum(row.tries for row in rows) == 42
    assert sum(row.before + row.after for row in rows) > 0
    assert [row for row in rows if row.half or row.unusable or row.others] == []


def interrupting(engine: l2l.Engine, verb: str, *, times: int = 1) -> None:
    """Send SIGINT to this process while the first line of a kind is submitted."""
    submit, left = engine.device.submit, [times]

    def send(lane: Any, text: str, work: Any) -> None:
        if text.startswith(verb) and left[0]:
            for _ in range(left[0]):
                left[0] -= 1
                signal.raise_signal(signal.SIGINT)
        submit(lane, text, work)

    engine.device.submit = send  # type: ignore[method-assign]


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 1.0}], ids=["eager", "clipped"])
def test_an_interrupt_before_the_first_update_gives_the_step_up(settings: dict[str, Any]) -> None:
    with make(**settings) as engine, make(**settings) as other:
        for one in (engine, other):
            one.step(batch(0))
        interrupting(engine, "forward L2")
        with pytest.raises(KeyboardInterrupt):
            engine.step(batch(1))
        assert engine.state == "open"
        assert engine.step_number == 1
        for one in (engine, other):
            one.step(batch(2))
        assert_same(state_of(engine), state_of(other))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_after_the_first_update_comes_when_the_step_is_counted() -> None:
    with make() as engine, make() as other:
        for one in (engine, other):
            one.step(batch(0))
        interrupting(engine, "backward L0")
        with pytest.raises(KeyboardInterrupt):
            engine.step(batch(1))
        other.step(batch(1))
        assert engine.state == "open"
        assert_same(state_of(engine), state_of(other))


def test_a_second_interrupt_does_not_wait_and_leaves_a_torn_engine(tmp_path: Path) -> None:
    with make() as engine:
        engine.step(batch(0))
        engine.save(tmp_path / "checkpoint")
        engine.step(batch(1))
        expected = state_of(engine)
        interrupting(engine, "backward L0", times=2)
        with pytest.raises(KeyboardInterrupt):
            engine.step(batch(2))
        assert engine.state == "torn"
        with pytest.raises(RuntimeError, match="two steps"):
            engine.step(batch(2))
        engine.load(tmp_path / "checkpoint")
        assert engine.state == "open"
        engine.step(batch(1))
        assert_same(state_of(engine), expected)


def test_other_signals_wait_too_and_a_handler_that_does_not_raise_disturbs_nothing() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        with make() as engine:
            engine.step(batch(0))
            submit = engine.device.submit

            def send(lane: Any, text: str, work: Any) -> None:
                if text.startswith("backward L0"):
                    os.kill(os.getpid(), signal.SIGUSR1)
                    assert not came
                submit(lane, text, work)

            engine.device.submit = send  # type: ignore[method-assign]
            engine.step(batch(1))
            assert came == [signal.SIGUSR1]
            assert engine.step_number == 2
    finally:
        signal.signal(signal.SIGUSR1, before)


# --------------------------------------------------------------------------------------------------
# Processes and threads


def test_a_forked_child_is_refused_at_once() -> None:
    with make() as engine:
        engine.step(batch(0))
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            found = b"nothing was raised"
            try:
                engine.step(batch(1))
            except RuntimeError as error:
                found = str(error).encode()
            os.write(write, found)
            os._exit(0)
        os.close(write)
        said = os.read(read, 1000).decode()
        os.waitpid(child, 0)
        assert f"created in process {os.getpid()}" in said
        engine.step(batch(1))


def test_two_threads_at_the_same_time_are_refused_and_one_after_another_are_not() -> None:
    with make() as engine:
        engine.step(batch(0))
        submit, raised = engine.device.submit, list[BaseException]()

        def elsewhere() -> None:
            try:
                engine.evaluate(batch(2))
            except RuntimeError as error:
                raised.append(error)

        def start(lane: Any, text: str, work: Any) -> None:
            if text.startswith("forward L1") and not raised:
                thread = threading.Thread(target=elsewhere)
                thread.start()
                thread.join()
            submit(lane, text, work)

        engine.device.submit = start  # type: ignore[method-assign]
        engine.step(batch(1))
        assert "evaluate was called while engine.step is running on another" in str(raised[0])
        number = len(raised)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert len(raised) == number
        engine.step(batch(2))


def test_a_loss_that_uses_the_engine_is_refused() -> None:
    engines: list[l2l.Engine] = []

    def loss(outputs: Any, given: Any) -> Tensor:
        if engines:
            engines[0].evaluate(batch(1))
        return outputs["loss"]

    with make(loss=loss) as engine:
        engine.step(batch(0))
        engines.append(engine)
        with pytest.raises(RuntimeError, match="from inside it"):
            engine.step(batch(1))
        engines.clear()
        engine.step(batch(1))


# --------------------------------------------------------------------------------------------------
# Gradients that are not finite

WAITING = {
    "clipped": {"clip_norm": 1.0},
    "skip": {"nonfinite": "skip"},
    "just in time": {"update": "just in time"},
    "halves": {"nonfinite": "skip", "overrides": {"halves": True}},
    "lookup": {"nonfinite": "skip", "embedding": "host"},
    "tail": {"nonfinite": "skip", "overrides": {"num_tail": 2}},
    "device state": {"nonfinite": "skip", "overrides": {"num_tail": 2, "num_device_states": 2}},
    "shared": {"nonfinite": "skip", "overrides": {"num_shared": 2}},
}


@pytest.mark.parametrize("settings", WAITING.values(), ids=WAITING)
def test_a_step_with_a_gradient_not_finite_is_skipped_exactly(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with make(**settings) as engine, make(**settings) as other:
        for one in (engine, other):
            one.step(batch(0))
        with caplog.at_level(logging.WARNING, logger="l2l"):
            report = engine.step(batch(1, spoilt=1))
            assert report.skipped
            assert report.skip_reason == "the gradient of layer 1 (layers.1.up.weight) is nan"
            assert math.isfinite(report.loss)
        assert [r.message for r in caplog.records if "step 1 was skipped" in r.message]
        inside.count_a_step(other)
        for one in (engine, other):
            report = one.step(batch(2))
            assert report.skip_reason is None
        assert_same(state_of(engine), state_of(other))


EAGER = {
    "eager": {},
    "lookup": {"embedding": "host"},
    "device state": {"overrides": {"num_tail": 3, "num_device_states": 3}},
    "shared": {"overrides": {"num_shared": 4}},
    "adafactor": {"optimizer": l2l.Adafactor()},
}


@pytest.mark.parametrize("settings", EAGER.values(), ids=EAGER)
def test_eager_updates_stop_with_the_name_of_the_layer(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with make(**settings) as engine:
        engine.step(batch(0))
        engine.save(tmp_path / "checkpoint")
        expected = engine.step(batch(1)).loss
        with pytest.raises(UpdateFailedError) as error:  # noqa: PT012 (known a little later)
            engine.step(batch(2, spoilt=1))
            for number in range(3, 6):
                engine.step(batch(number))
        assert "step 2: the gradient of layer 1 (layers.1.up.weight) is nan" in str(error.value)
        assert "nonfinite='skip'" in str(error.value)
        assert engine.state == "torn"
        for unit in inside.server(engine).units.values():
            for owner in unit.form.trained.names:
                assert unit.weight_of(owner).isfinite().all(), owner
        engine.load(tmp_path / "checkpoint")
        assert engine.step(batch(1)).loss == expected


def test_the_wishes_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="Adafactor"):
        make(nonfinite="skip", optimizer=l2l.Adafactor())
    with pytest.raises(ValueError, match="cannot be combined with"):
        make(nonfinite="skip", update="eager")
    with pytest.raises(ValueError, match="Expected 'stop' or 'skip'"):
        make(nonfinite="ignore")


def test_the_norm_of_the_gradient_is_true_with_adafactor() -> None:
    with make(optimizer=l2l.Adafactor()) as engine, make() as other:
        found, expected = engine.step(batch(0)), other.step(batch(0))
        assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-6)
        assert found.layer_norms == pytest.approx(expected.layer_norms, rel=1e-6)


# --------------------------------------------------------------------------------------------------
# Steps that are skipped


@pytest.mark.parametrize(
    "settings", [{}, {"clip_norm": 1.0}, {"optimizer": l2l.Adafactor()}], ids=str
)
def test_a_skipped_step_says_why_and_three_at_first_are_an_error(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with make(**settings) as engine:
        engine.save(tmp_path / "checkpoint")
        before = state_of(engine)
        with caplog.at_level(logging.WARNING, logger="l2l"):
            reports = [engine.step(batch(n, spoilt=99)) for n in range(3)]
            with pytest.raises(RuntimeError, match=r"first 3 steps .* because the loss is nan"):
                engine.step(batch(3))
        said = [r.message for r in caplog.records if "was skipped" in r.message]
        assert [text.split()[1] for text in said] == ["0", "1", "2"]
        assert [report.skip_reason for report in reports] == ["the loss is nan"] * 3
        assert engine.state == "open"
        after = state_of(engine)
        del before["number"]
        assert_same(after, before)
        engine.load(tmp_path / "checkpoint")
        for n in range(2):
            engine.step(batch(n, spoilt=99))
        for n in range(3):
            assert engine.step(batch(n)).skip_reason is None
        for n in range(5):  # later ones are no error
            engine.step(batch(n, spoilt=99))


def test_the_search_for_a_loss_scale_is_no_error() -> None:
    with make(precision="float16") as engine:
        inside.scaler(engine).scale.value = 2.0**40
        assert sum(engine.step(batch(n)).skipped for n in range(8)) > 3
