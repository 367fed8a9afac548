"""Layers that are compiled beside the first steps: which steps run what, and that bits agree."""

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from test_compiled_layer import BACKEND, batch, bert, llama
from torch._dynamo.backends.registry import lookup_backend

import l2l
from l2l.device import open_device
from l2l.model.beside import THREAD, Beside, NotCompiledYetError
from l2l.model.compiling import quietly

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BATCH = batch(16, padded=False, seed=0)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert not [one for one in threading.enumerate() if one.name == THREAD]


class Gate:
    """A backend that compiles once it is let; on the thread, where it is asked to there."""

    def __init__(self, *, fails: bool = False) -> None:
        self.opened, self.began, self.threads = threading.Event(), threading.Event(), set[str]()
        self._fails = fails

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.threads.add(threading.current_thread().name)
        self.began.set()
        assert self.opened.wait(30)
        if self._fails:
            raise RuntimeError("no such compiler")
        return lookup_backend(BACKEND)(graph, inputs)


def engine_with(backend: object, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = settings.pop("model", None) or llama(3)
    settings = {"overrides": {"num_tail": 1}, "precision": "float32", "seed": 1, **settings}
    return inside.engine(
        model, device="cpu", compile=backend, microbatch_size=4, prove=False, **settings
    )


def train(engine: Any, number: int) -> list[l2l.StepReport]:
    return [engine.step(BATCH) for _ in range(number)]


def ready(engine: Any) -> None:
    """Wait until everything is compiled; the next step finds it."""
    inside.compiler(engine).beside._thread.join()


def run(backend: object, number: int, **settings: Any) -> tuple[list[float], dict[str, Any]]:
    with engine_with(backend, **settings) as engine:
        losses = [report.loss for report in train(engine, number)]
        return losses, engine.state_dict()


def test_steps_run_uncompiled_until_the_step_after_it_is_ready() -> None:
    gate = Gate()
    with engine_with(gate, compile_ahead="background") as engine:
        before = train(engine, 3)
        assert gate.began.wait(10)
        assert [one.compiled for one in before] == [False] * 3
        assert "not ready yet" in dict(engine.plan.choices)["layers run"]
        gate.opened.set()
        ready(engine)
        after = train(engine, 2)
        assert [one.compiled for one in after] == [True] * 2
        assert "not ready" not in str(engine.plan)
        losses, weights = [one.loss for one in (*before, *after)], engine.state_dict()
    assert gate.threads == {THREAD}

    # Uncompiled steps, then compiled ones: those of runs that never, and that always compiled.
    assert losses[:3] == run(False, 3)[0]
    with engine_with(BACKEND) as engine:
        with inside.compiler(engine).paused():
            expected = [one.loss for one in train(engine, 3)]
        expected += [one.loss for one in train(engine, 2)]
        wanted = engine.state_dict()
    assert losses == expected
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)


def test_a_run_that_waits_compiles_in_its_first_step() -> None:
    with engine_with(BACKEND) as engine:
        assert engine.step(BATCH).compiled
        assert inside.compiler(engine).beside is None
    with engine_with(False, compile_ahead="background") as engine:
        assert engine.step(BATCH).compiled is None


def test_a_compiler_that_fails_on_the_thread_is_said_once_and_steps_go_on() -> None:
    gate = Gate(fails=True)
    gate.opened.set()
    with engine_with(gate, compile_ahead="background") as engine:
        losses = [engine.step(BATCH).loss]
        ready(engine)
        with pytest.warns(UserWarning, match="run without torch.compile.*no such") as said:
            losses += [one.loss for one in train(engine, 3)]
        assert len([one for one in said if "torch.compile" in str(one.message)]) == 1
    assert losses == run(False, 4)[0]


def test_an_engine_is_closed_while_it_compiles() -> None:
    gate = Gate()
    engine = engine_with(gate, compile_ahead="background")
    engine.step(BATCH)
    assert gate.began.wait(10)
    threading.Timer(0.2, gate.opened.set).start()
    engine.close()  # waits: the fixture finds no thread
    assert engine.state == "closed"


def test_a_step_is_interrupted_while_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    with engine_with(gate, compile_ahead="background") as engine:
        first = engine.step(BATCH).loss
        assert gate.began.wait(10)
        device, submit = engine.device, engine.device.submit

        def interrupted(lane: Any, text: str, work: Any) -> None:
            if text.startswith("forward L1 m0"):
                raise KeyboardInterrupt
            submit(lane, text, work)

        monkeypatch.setattr(device, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step(BATCH)
        monkeypatch.undo()
        gate.opened.set()
        ready(engine)
        after = train(engine, 2)
        assert [one.compiled for one in after] == [True, True]
        assert [first, after[0].loss] == pytest.approx(run(False, 2)[0], rel=1e-5)


class Drawn(Gate):
    """Draws and warns while it compiles, as torch's own code may."""

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        state = torch.get_rng_state()
        self.opened.wait(30)
        torch.rand(3)
        torch.set_rng_state(state)
        warnings.warn("of no interest", RuntimeWarning, stacklevel=1)
        return lookup_backend(BACKEND)(graph, inputs)


def test_nobody_elses_random_numbers_and_warnings_change_meanwhile() -> None:
    torch.manual_seed(7)
    expected = [torch.rand(4) for _ in range(3)]
    drawn = Drawn()
    with engine_with(drawn, compile_ahead="background") as engine:
        engine.step(BATCH)
        torch.manual_seed(7)
        found = [torch.rand(4)]
        drawn.opened.set()
        found.append(torch.rand(4))
        ready(engine)
        found.append(torch.rand(4))
        assert engine.step(BATCH).compiled
    assert all(map(torch.equal, found, expected))
    with pytest.warns(RuntimeWarning, match="mine"):
        warnings.warn("mine", RuntimeWarning, stacklevel=1)


def test_random_numbers_are_drawn_again_by_what_was_compiled_beside() -> None:
    """And its first backward pass is compared with one that is not compiled."""
    losses = []
    for backend, ahead in ((False, "wait"), (BACKEND, "background")):
        model = bert(2, dropout=0.3)
        with engine_with(backend, model=model, compile_ahead=ahead) as engine:
            found = [engine.step(BATCH).loss]
            if backend:
                ready(engine)
            reports = train(engine, 3)
            losses.append([*found, *(one.loss for one in reports)])
            if backend:
                assert all(one.compiled for one in reports)
                assert not inside.compiler(engine)._unchecked
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_code_that_others_have_compiled_runs_in_a_step_meanwhile() -> None:
    model, gate = llama(3), Gate()
    doubled = torch.compile(lambda one: one * 2, backend="eager")
    head = model.lm_head.forward
    model.lm_head.forward = lambda hidden: doubled(head(hidden))
    with engine_with(gate, model=model, compile_ahead="background") as engine:
        before = engine.step(BATCH).loss
        assert gate.began.wait(10)
        gate.opened.set()
        while inside.compiler(engine).beside._thread.is_alive():
            assert engine.step(BATCH).loss < before


@pytest.mark.usefixtures("as_h200")
def test_a_plan_without_room_for_uncompiled_passes_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled() -> bool | None:
        settings = {"overrides": {}, "device_memory": "200MiB"}
        with engine_with(BACKEND, compile_ahead="background", **settings) as engine:
            return engine.step(BATCH).compiled

    assert compiled() is False
    monkeypatch.setattr("l2l.planner.memory.Memory.plain_bytes", lambda *_: 2**40)
    assert compiled() is True


def test_a_checkpoint_says_since_when_layers_were_compiled(tmp_path: Path, caplog) -> None:
    with engine_with(BACKEND, compile_ahead="background") as engine:
        engine.step(BATCH)
        ready(engine)
        train(engine, 2)
        engine.save(tmp_path / "checkpoint")
        expected = engine.step(BATCH).loss
    caplog.set_level("INFO", logger="l2l")
    with engine_with(BACKEND) as engine:
        engine.load(tmp_path / "checkpoint")
        assert "had compiled layers from step 2 on" in caplog.text
        assert engine.step(BATCH).loss == expected


def test_what_an_engine_has_dropped_is_compiled_by_whoever_needs_it() -> None:
    """Functions of losses are of all engines of a process."""
    gate, inputs = Gate(), torch.ones(3)
    function = torch.compile(lambda one: one + 1, backend=quietly(gate))
    beside = Beside(open_device("cpu"))
    with beside.running():
        with pytest.raises(NotCompiledYetError):
            function(inputs)
        beside.close()
    gate.opened.set()
    assert torch.equal(function(inputs), inputs + 1)
    assert gate.threads == {threading.current_thread().name}
