"""The first step soon: plans that are kept, a machine that is measured in no time, a timeline."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import inside
import pytest
from families import build_llama, causal_batch
from test_planner import H200, found, problem_of

from l2l.bench.first import FirstStep, describe
from l2l.bench.workload import Workload
from l2l.device import open_device
from l2l.engine.timeline import Timeline
from l2l.planner import KeptPlans, hardware
from l2l.planner.hardware import _lane_seconds
from l2l.proof import ProofMemory
from l2l.schedule import Lane

GIB = 2**30


class Searches:
    """A search that counts, and finds what was found."""

    def __init__(self, folder: Path) -> None:
        self.kept, self.number = KeptPlans(folder), 0
        self.problem, self.hardware = problem_of("exact"), H200
        self.budget, self.is_given, self.rows = 10 * GIB, True, None

    def find(self, **changed: Any) -> Any:
        problem = replace(self.problem, **changed.pop("problem", {}))
        rates = replace(self.hardware, **changed.pop("hardware", {}))
        asked = {"budget_bytes": self.budget, "is_given": True, "rows": None, "chosen": {}}
        return self.kept.find(self._search, problem, rates, **(asked | changed))

    def _search(self, *_: object, **__: object) -> Any:
        self.number += 1
        return found("exact", 10)


def test_the_same_is_not_searched_for_twice(tmp_path: Path) -> None:
    searches = Searches(tmp_path / "plans")
    first, again = searches.find(), Searches(tmp_path / "plans")
    assert again.find() == first
    assert (searches.number, again.number) == (1, 0)
    # What is free of the host, and the context, differ a little from run to run.
    about = {"host_limit_bytes": problem_of("exact").host_limit_bytes * 0.99, "context_bytes": 5}
    assert again.find(problem=about) is not None
    assert again.find(hardware={"context_bytes": 7}) is not None
    assert again.number == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"problem": {"num_rows": 33}},
        {"problem": {"may_keep": False}},
        {"hardware": {"fetch_rate": 50e9}},
        {"budget_bytes": 11 * GIB},
        {"is_given": False},
        {"rows": 4},
        {"chosen": {"num_tail": 2}},
        {"problem": {"host_limit_bytes": 2**20}},
        {"problem": {"context_bytes": 9 * GIB}},  # it does not fit any more
    ],
)
def test_anything_else_is_searched_for(changed: dict[str, Any], tmp_path: Path) -> None:
    searches = Searches(tmp_path)
    searches.find()
    searches.find(**changed)
    assert searches.number == 2


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"decisions": {"no": 1}}'])
def test_a_damaged_plan_is_searched_for_again(text: str, tmp_path: Path) -> None:
    searches = Searches(tmp_path)
    expected = searches.find()
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert searches.find() == expected
    assert searches.number == 2
    assert searches.find() == expected
    assert searches.number == 2


@pytest.mark.usefixtures("as_h200")
def test_an_engine_finds_the_plan_of_the_one_before(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("l2l.engine.engine.PLANS", KeptPlans(tmp_path))
    batch, plans = causal_batch(8), []
    for _ in range(2):
        with inside.engine(build_llama(), device="cpu", device_memory="180MiB") as engine:
            engine.step(batch)
            plans.append(engine.plan)
        monkeypatch.setattr("l2l.planner.planning.find_plan", pytest.fail)
    assert plans[0].choices == plans[1].choices
    assert plans[0].predicted_seconds == plans[1].predicted_seconds


def test_a_slow_machine_is_measured_in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever takes long is done less often."""
    device = open_device("cpu")
    calls: list[float] = []

    def slow() -> None:
        calls.append(time.perf_counter())
        time.sleep(0.02)

    began = time.perf_counter()
    seconds = _lane_seconds(device, 1000, (Lane.COMPUTE, slow))
    took = time.perf_counter() - began
    device.close()
    assert 0.02 <= seconds < 0.06
    assert len(calls) <= 2 + 4 * 3
    assert took < 5 * hardware.LONGEST_SECONDS


def test_a_timeline_counts_what_is_done_once() -> None:
    timeline = Timeline()
    with timeline.phase("proof"):
        time.sleep(0.02)
        with timeline.phase("step"):
            time.sleep(0.03)
    assert 0.02 <= timeline.seconds["proof"] < 0.03 <= timeline.seconds["step"]
    timeline.move(0.01, "compiling", out_of="step")
    assert sum(timeline.seconds.values()) == pytest.approx(0.05, abs=0.02)
    timeline.is_over = True
    with timeline.phase("trial"):
        pass
    assert "trial" not in timeline.seconds


def test_the_plan_has_the_seconds_until_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside.PROVEN, ProofMemory(None))  # so that there is a proof
    with inside.engine(build_llama(), device="cpu", precision="float32") as engine:
        assert dict(engine.plan.first_step).keys() == {"weights"}
        engine.step(causal_batch(4))
        first = engine.plan.first_step
        assert {"weights", "trial", "planning", "proof", "step", "compiling"} == dict(first).keys()
        assert "until the first step" in str(engine.plan)
        engine.step(causal_batch(4))
        assert engine.plan.first_step == first


def test_the_table_of_the_first_step() -> None:
    one = {
        "first_step_seconds": 12.0,
        "ten_steps_seconds": 40.0,
        "steady_seconds": 3.0,
        "phases": {"weights": 2.0, "step": 4.0},
        "compiled_from": 3,
        "device": "D",
        "torch_version": "2",
    }
    table = describe({"cold": one, "warm": {"note": "killed"}})
    rows = {" ".join(line.split()[:-1]): line.split()[-1] for line in table.splitlines()}
    assert "warm: failed, killed" in table
    assert rows["on the device, after that"] == "6.00"
    assert rows["ten steps beyond ten steady ones"] == "10.00"
    assert rows["layers run compiled from step"] == "3"
    asked = FirstStep(workload=Workload(shape="tiny"), compile_ahead="background")
    assert FirstStep.from_json(asked.to_json()) == asked


def test_compiled_programs_are_kept_in_the_users_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    for backend in (None, "eager"):
        inside.Compiler(backend=backend)
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    inside.Compiler(backend="inductor")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / ".cache" / "l2l" / "programs")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    inside.Compiler(backend="inductor")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "mine"
