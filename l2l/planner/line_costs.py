"""What the lines of a schedule cost, and a step simulated with these costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Final, Literal

from l2l.planner.cost_model import HALVES, HOST_COPY_RATE, PROLOGUE_SECONDS, CostModel
from l2l.planner.decisions import Decisions
from l2l.planner.problem import UnitSize
from l2l.schedule import Action, Cost, Lane, Schedule, Shape, Simulation, make_schedule, simulate

MAX_LINES = 4000  # of a schedule to simulate; longer ones are simulated with fewer microbatches
NUM_REMEMBERED = 32  # schedules
DEVICE_UPDATE_BYTES = 34.0  # of AdamW there, a parameter
REVISE_BYTES = 150.0  # of Adafactor: about thirty operations one by one

COPIED: Final[Mapping[str, tuple[Literal["in", "out"], tuple[str, ...]]]] = {
    "fetch U": ("in", ("weight",)),
    "fetch U.state:p": ("in", ("state",)),
    "fetch U.all:p": ("in", ("weight", "staging", "state")),
    "drain U": ("out", ("weight",)),
    "drain U free": ("out", ("weight",)),
    "drain U.grad": ("out", ("staging",)),
    "drain U.all:p": ("out", ("weight", "state")),
}
"""Which way a kind of line copies a unit, and what of it."""


def simulate_step(model: CostModel, decisions: Decisions) -> Simulation:
    """A step, line by line, in the middle of a run."""
    problem, hardware = model.problem, model.hardware
    number = problem.num_microbatches(decisions)
    lines = len(problem.layers) * 6  # for each microbatch
    fewer = max(2, MAX_LINES // lines) if number * lines > MAX_LINES else number
    shape = decisions.shape(
        num_microbatches=fewer,
        trains=[bool(unit.num_trained) for unit in problem.layers],
        outer=tuple(decisions.outer_unit(unit) for unit, _ in problem.outer),
        update=problem.policy,
    )
    shape = replace(
        shape,
        pending=shape.late_units,
        held=frozenset(shape.on_device),
        parallel=problem.together.num_ranks > 1,
    )
    return simulate(
        _schedule_of(shape),
        LineCosts(model, decisions, scale=number / fewer),
        fetch_rate=hardware.fetch_rate * model.busy_link,
        drain_rate=hardware.drain_rate * model.busy_link,
        both_ways_rate=hardware.both_ways_rate * model.busy_link,
    )


@lru_cache(maxsize=NUM_REMEMBERED)
def _schedule_of(shape: Shape) -> Schedule:
    """Many choices are not in the shape, and plans for other budgets meet the same shapes."""
    return make_schedule(shape)


class LineCosts:
    """What a line costs."""

    def __init__(self, model: CostModel, decisions: Decisions, *, scale: float) -> None:
        problem = model.problem
        self._model, self._problem, self._decisions = model, problem, decisions
        self._scale = scale  # microbatches that one line stands for
        self._mean = problem.mean_rows(decisions)
        self._beside = model.beside_forward(decisions)
        self._streamed = {f"L{i}" for i in range(len(problem.layers) - decisions.num_tail)}
        self._sizes = {f"L{i}": unit for i, unit in enumerate(problem.layers)}
        self._sizes |= {unit.name: size for unit, size in problem.outer}
        self._value_bytes = {
            "k": model.memory.kept_bytes(decisions),
            "r": problem.recorded_bytes * self._mean,
            "e": problem.looked_up_bytes * self._mean,
            "x": problem.looked_up_bytes * self._mean,
        }

    def __call__(self, action: Action) -> Cost:
        """The cost of one line."""
        if action.lane in (Lane.STASH, Lane.UNSTASH):
            hidden = self._problem.hidden_bytes * self._mean
            nbytes = int(self._scale * self._value_bytes.get(action.value[:1], hidden))
            return Cost(link="out" if action.lane is Lane.STASH else "in", nbytes=nbytes)
        size = self._sizes.get(action.unit)
        if size is not None and action.kind in COPIED:
            way, parts = COPIED[action.kind]
            nbytes = sum(getattr(size, f"{part}_bytes") for part in parts)
            nbytes //= self._problem.together.num_shares
            return Cost(link=way, nbytes=nbytes // self._num_pieces(action))
        if action.lane is Lane.UPDATE:
            return Cost(self._host_seconds(action, size))
        if action.lane in (Lane.GATHER, Lane.REDUCE):
            return Cost(self._collective_seconds(action, size))
        return Cost(self._device_seconds(action, size))

    def _num_pieces(self, action: Action) -> int:
        return 1 if action.piece is None else self._decisions.num_pieces

    def _device_seconds(self, action: Action, size: UnitSize | None) -> float:
        model, verb = self._model, action.verb
        if verb == "loss":
            return self._scale * model.epilogue_seconds(self._decisions)
        if verb in ("forward", "backward") and size is None:
            return self._scale * PROLOGUE_SECONDS
        if verb == "forward":
            return self._scale * model.pass_seconds(action.layer, "forward", self._mean)
        if verb == "backward":
            keep = self._decisions.kept_share
            return self._scale * model.backward_seconds(action.layer, keep, self._mean)
        if size is not None and verb == "update":
            each = REVISE_BYTES if action.kind == "update U device" else DEVICE_UPDATE_BYTES
            return size.num_trained * each / model.hardware.memory_rate / self._num_pieces(action)
        return 0.0

    def _collective_seconds(self, action: Action, size: UnitSize | None) -> float:
        world = self._problem.together
        if size is None:  # a few numbers
            return world.reduce_seconds(0.0)
        if action.lane is Lane.GATHER:
            return world.gather_seconds(size.weight_bytes)
        return world.reduce_seconds(size.gradient_bytes)

    def _host_seconds(self, action: Action, size: UnitSize | None) -> float:
        if action.verb in ("lookup", "collect"):
            looked_up = self._scale * self._mean * self._problem.looked_up_bytes / HOST_COPY_RATE
            return looked_up if action.verb == "lookup" else 2 * looked_up
        if size is None or action.verb != "update":
            return 0.0
        half = next((half for half in HALVES if action.kind.endswith(half)), None)
        if action.microbatch is not None:  # the rows that it looks up
            whole = self._model.looked_up_seconds(size, half)
            return self._scale * whole / self._problem.num_microbatches(self._decisions)
        is_before_forward = "late" in action.kind and half != "moments"
        beside = self._beside if is_before_forward and action.unit in self._streamed else 0.0
        return self._model.update_seconds(size.num_trained, half=half, beside=beside)
