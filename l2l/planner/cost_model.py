"""What choices take, in bytes by phase, and how long a step lasts with them.

[Note: rates] Seconds come from counted operations and measured rates. What no rate tells was
measured once, on an H200 with the 3.2-billion-parameter shape, and stands below as constants:
plans for other shapes and budgets are predictions (docs/benchmarks.md compares).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Final, Literal

from l2l.parameter_server import REVISED_BYTES, REVISED_PIECE, ROUNDING_BYTES, UpdatePolicy
from l2l.planner.decisions import ALWAYS, Decisions, LedgerLine
from l2l.planner.hardware import Hardware
from l2l.planner.layer_cost import PassCost, seconds, submission_seconds
from l2l.planner.problem import CostCurve, Problem, UnitSize
from l2l.schedule import (
    NUM_LENT,
    Action,
    Cost,
    Lane,
    OuterUnit,
    Schedule,
    Shape,
    Simulation,
    make_schedule,
    simulate,
)

MOST_LINES = 4000  # of a schedule to simulate; longer ones are simulated with fewer microbatches
NUM_REMEMBERED = 32  # schedules
LIBRARY_BYTES = 96 << 20  # workspaces of matrix libraries, and small tensors
HEAD_EFFICIENCY = 0.95
HEAD_SUM_BYTES = 9.0  # a parameter, to add a piece's gradient to that of the head
ACCUMULATE_BYTES = 10.0  # to add a parameter's gradient to its sum
DEVICE_UPDATE_BYTES = 34.0  # of AdamW there, a parameter
REVISE_BYTES = 150.0  # of Adafactor: about thirty operations one by one
PASS_SECONDS = 0.2e-3  # of a pass, beside its arithmetic: launches, copies into cells
PROLOGUE_SECONDS = 0.3e-3
HOST_COPY_RATE = 28e9  # of gathering rows; bytes that are read
BUSY_HOST = 0.74  # of the optimizer's rate while passes are launched and the link is busy
BUSY_CORES = 0.85  # the same where arithmetic bounds it, with 8-bit moments
BUSY_MEMORY = 0.95  # of the optimizer's rate, that these reach together with the link
BUSY_LINK = 0.85  # of the link's rates while the host updates
HALVES = {"weights": 0.72, "moments": 0.7}  # of an exact update's seconds
EIGHT_BIT_HALVES = {"weights": 0.74, "moments": 0.7}
SPARED = ((0.0, 0.0), (0.07, 0.37), (0.3, 0.5), (1.0, 1.0))
"""What a share of the results, the best of them, spares of the time to recompute all of them."""
PART_SECONDS = 5e-3  # that the host needs to submit a part of the epilogue
NUM_HEAD_VALUES = 8  # hidden states that an epilogue makes besides its logits
NUM_NORM_VALUES = 12  # those of 16 bits that its norm makes in its backward pass, in float32

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


def _spared(keep: float) -> float:
    """`SPARED`, with straight lines between."""
    for (left, low), (right, high) in pairwise(SPARED):
        if keep <= right:
            return low + (high - low) * (keep - left) / (right - left)
    return 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """Layers, cut into those that are streamed and the tail, with what is asked of either."""

    streamed: tuple[UnitSize, ...]
    tail: tuple[UnitSize, ...]
    streamed_weights: int = field(init=False)
    largest_weight: int = field(init=False)  # of those that are streamed, as the following
    largest_gradient: int = field(init=False)
    largest_lent: int = field(init=False)
    num_trained: int = field(init=False)
    num_training: int = field(init=False)
    tail_weights: int = field(init=False)
    tail_gradients: int = field(init=False)

    def __post_init__(self) -> None:
        streamed, tail = self.streamed, self.tail
        training = [unit for unit in streamed if unit.num_trained]
        for name, value in (
            ("streamed_weights", sum(unit.weight_bytes for unit in streamed)),
            ("largest_weight", max((unit.weight_bytes for unit in streamed), default=0)),
            ("largest_gradient", max((unit.gradient_bytes for unit in training), default=0)),
            ("largest_lent", max((CostModel.lent_bytes(unit) for unit in streamed), default=0)),
            ("num_trained", sum(unit.num_trained for unit in streamed)),
            ("num_training", len(training)),
            ("tail_weights", sum(unit.weight_bytes for unit in tail)),
            ("tail_gradients", sum(unit.gradient_bytes for unit in tail)),
        ):
            object.__setattr__(self, name, value)


class CostModel:
    """Bytes and seconds of choices.

    Thousands of them are compared: what depends on few choices is reckoned once for each of these.
    """

    def __init__(self, problem: Problem, hardware: Hardware) -> None:
        self.problem = problem
        if problem.is_single:
            hardware = replace(hardware, matrix_rate=hardware.single_rate)
        self.hardware = hardware
        self._cuts: dict[int, _Cut] = {}  # by length of the tail
        states = (unit.state_bytes for unit in reversed(problem.layers))
        self._states = list(accumulate(states, initial=0))  # of so many layers, the last of them
        staging = (unit.staging_bytes for unit in problem.layers)
        self._staged = list(accumulate(staging, initial=0))  # of so many layers, the first of them
        self._most_staged = max((unit.staging_bytes for unit in problem.layers), default=0)
        # Outer units that are drained after all layers.
        self._num_before = sum(unit.in_prologue and unit.trained for unit, _ in problem.outer)
        self._busy_link = 1.0 if problem.policy is UpdatePolicy.ON_DEVICE else BUSY_LINK
        self._largest: dict[tuple[str, range, int], PassCost] = {}
        self._kept: dict[tuple[range, int], tuple[int, int]] = {}
        self._sums: dict[tuple[str, range, float, float], float] = {}
        self._epilogues: dict[tuple[int | None, int, float], float] = {}
        self._rows: dict[str | None, float] = {}
        self._costs: dict[tuple[int, str, float], PassCost] = {}
        self._passes: dict[tuple[int, str, float], float] = {}

    # ----------------------------------------------------------------------------------------------
    # Bytes

    def peak_bytes(self, decisions: Decisions, rows: int) -> int:
        """Device memory in the phase that takes most."""
        phases: dict[str, int] = {}
        for phase, _, nbytes in self._device_lines(decisions, rows):
            phases[phase] = phases.get(phase, 0) + nbytes
        always = phases.pop(ALWAYS, 0)
        return always + max(phases.values(), default=0)

    def most_states(self, decisions: Decisions, rows: int, limit: float) -> int:
        """How many layers of the tail may have their optimizer state on the device."""
        low, high = 0, decisions.num_tail
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.peak_bytes(replace(decisions, num_device_states=middle), rows) <= limit
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def ledger(self, decisions: Decisions, rows: int) -> list[LedgerLine]:
        """What goes where."""
        lines = [
            LedgerLine(place="device", purpose=purpose, nbytes=nbytes, phase=phase)
            for phase, purpose, nbytes in self._device_lines(decisions, rows)
            if nbytes
        ]
        return lines + [
            LedgerLine(place="host", purpose=purpose, nbytes=nbytes)
            for purpose, nbytes in self._host_lines(decisions, rows)
            if nbytes
        ]

    def _device_lines(self, decisions: Decisions, rows: int) -> Iterator[tuple[str, str, int]]:
        yield from self._of_layers(decisions, rows)
        yield from self._of_outer(decisions)
        yield from self._of_phases(decisions, rows)

    def _of_layers(self, decisions: Decisions, rows: int) -> Iterator[tuple[str, str, int]]:
        """What layers and the values between them take in every phase."""
        problem = self.problem
        cut = self._cut(decisions)
        slots = min(decisions.num_slots, len(cut.streamed))
        yield ALWAYS, "weight slots", slots * cut.largest_weight
        yield ALWAYS, "tail: weights", cut.tail_weights
        yield ALWAYS, "tail: gradients", cut.tail_gradients
        yield ALWAYS, "tail: optimizer state", self._state_bytes(decisions)
        cell = max(problem.hidden_bytes, problem.looked_up_bytes) * rows
        yield ALWAYS, "boundary cells", decisions.num_cells * cell
        number = decisions.num_recorded_cells(self.num_microbatches(rows))
        yield ALWAYS, "recorded arguments", number * problem.recorded_bytes * rows
        kept = self.kept_bytes_of(decisions, rows)
        yield ALWAYS, "kept results", decisions.num_kept_cells * kept
        if decisions.num_shared:
            lent = NUM_LENT * cut.largest_lent // decisions.num_pieces
            for phase in ("forward", "backward") if decisions.shares_memory else (ALWAYS,):
                yield phase, "lent optimizer state", lent
        yield ALWAYS, "buffers, libraries", problem.buffer_bytes + LIBRARY_BYTES + ROUNDING_BYTES

    def _of_outer(self, decisions: Decisions) -> Iterator[tuple[str, str, int]]:
        """What stays of that which is around the layers."""
        staying = [
            size
            for unit, size in self.problem.outer
            if not self._passes_by(unit, decisions)
            and (unit.in_prologue or unit.in_epilogue or decisions.outer_state)
        ]
        yield ALWAYS, "around the layers: weights", sum(size.weight_bytes for size in staying)
        yield ALWAYS, "around the layers: gradients", sum(size.gradient_bytes for size in staying)
        if decisions.outer_state:
            yield ALWAYS, "around the layers: state", sum(size.state_bytes for size in staying)

    def _of_phases(self, decisions: Decisions, rows: int) -> Iterator[tuple[str, str, int]]:
        """What comes and goes."""
        problem = self.problem
        cut = self._cut(decisions)
        passing = [size for unit, size in problem.outer if self._passes_by(unit, decisions)]
        number = min(decisions.num_gradient_slots, cut.num_training)
        gradients = number * cut.largest_gradient
        head_weights = sum(size.weight_bytes for size in passing)
        head_gradients = sum(size.gradient_bytes for size in passing)
        shares = decisions.shares_memory
        yield "backward" if shares else ALWAYS, "gradient slots", gradients
        if shares:
            yield "forward", "head: weights, arriving", head_weights
        yield "epilogue" if shares else ALWAYS, "head: weights", head_weights
        yield "epilogue" if shares else ALWAYS, "head: gradients", head_gradients
        if cut.streamed:
            indices = range(len(cut.streamed))
            forward = self._most("forward", indices, rows).working_bytes
            yield "forward", "one layer at work", forward + self.kept_bytes_of(decisions, rows)
            backward = self._most("backward", indices, rows).working_bytes
            if problem.policy is UpdatePolicy.ON_DEVICE:
                most = max(unit.num_trained for unit in cut.streamed)
                backward = max(backward, REVISED_BYTES * min(REVISED_PIECE, most))
            yield "backward", "one layer at work", backward
        piece = min(decisions.piece_tokens or 2**62, rows * problem.length)
        logits = int(piece * problem.head_width * problem.logit_bytes)
        part = max(1.0, min(rows, (decisions.part_tokens or 2**62) / problem.length))
        rest = rows if part < rows else 0  # the gradient, put together
        working = logits + int((NUM_HEAD_VALUES * part + rest) * problem.hidden_bytes)
        if not problem.is_single:
            working = max(working, int((NUM_NORM_VALUES * part + rest) * problem.hidden_bytes))
        if cut.tail:
            held, last = self._held(range(len(cut.streamed), len(problem.layers)), rows)
            yield "epilogue", "tail: kept for backward", held
            working = max(working, last)
        yield "epilogue", "a piece at work", working

    def _held(self, layers: range, rows: int) -> tuple[int, int]:
        """What a tail keeps for its backward passes, and what these need beside it."""
        key = (layers, rows)
        if key not in self._kept:
            kept = [self._at("kept_forward", index, rows) for index in layers]
            held = sum(cost.kept_bytes + cost.output_bytes for cost in kept)
            last = self._most("kept_backward", layers, rows).working_bytes
            self._kept[key] = held, last - kept[-1].kept_bytes
        return self._kept[key]

    def _at(self, kind: str, layer: int, rows: float) -> PassCost:
        """The cost of a pass of a layer."""
        costs = self.problem.costs[layer]
        key = (id(costs), kind, rows)
        if key not in self._costs:
            line: CostCurve = getattr(costs, kind)
            self._costs[key] = line.at(rows)
        return self._costs[key]

    def _most(self, kind: str, layers: range, rows: int) -> PassCost:
        """The pass that takes most memory, of those of some layers."""
        key = (kind, layers, rows)
        if key not in self._largest:
            distinct = {id(self.problem.costs[index]): index for index in layers}
            found = (self._at(kind, index, rows) for index in distinct.values())
            self._largest[key] = max(found, key=lambda cost: cost.working_bytes)
        return self._largest[key]

    def _host_lines(self, decisions: Decisions, rows: int) -> Iterator[tuple[str, int]]:
        problem = self.problem
        num_streamed = len(problem.layers) - decisions.num_tail
        yield "parameter server", problem.server_bytes - self._state_bytes(decisions)
        number = self.num_microbatches(rows)
        values = num_streamed + 1 if num_streamed else 0
        yield "stash", values * number * problem.hidden_bytes * rows
        kept = self.kept_bytes_of(decisions, rows)
        yield "stash: kept results", num_streamed * number * kept
        yield "looked-up rows", 4 * problem.num_rows * problem.looked_up_bytes
        if problem.policy is UpdatePolicy.EAGER:  # just in time: all are late, and in the server
            late = max(0, decisions.num_late - self._num_before)  # of layers: the first
            yield "gradients of late updates", self._staged[min(late, num_streamed)]

    def host_bytes(self, decisions: Decisions, rows: int) -> int:
        """What choices take of the host's memory."""
        return sum(nbytes for _, nbytes in self._host_lines(decisions, rows))

    def fits_host(self, decisions: Decisions, rows: int) -> bool:
        """Whether the host has room for choices."""
        return self.host_bytes(decisions, rows) <= self.problem.host_limit_bytes

    def may_keep(self, decisions: Decisions, rows: int) -> bool:
        """Whether layers can keep results, and the host has room for them."""
        return self.problem.may_keep and self.fits_host(decisions, rows)

    def _cut(self, decisions: Decisions) -> _Cut:
        if decisions.num_tail not in self._cuts:
            layers = self.problem.layers
            number = len(layers) - decisions.num_tail
            self._cuts[decisions.num_tail] = _Cut(layers[:number], layers[number:])
        return self._cuts[decisions.num_tail]

    def _state_bytes(self, decisions: Decisions) -> int:
        """Of layers whose optimizer state is on the device."""
        return self._states[min(decisions.num_device_states, len(self.problem.layers))]

    @staticmethod
    def _passes_by(unit: OuterUnit, decisions: Decisions) -> bool:
        return unit.passes and not decisions.outer_state

    def kept_bytes_of(self, decisions: Decisions, rows: int) -> int:
        """Of one streamed layer and microbatch."""
        if not decisions.num_kept_cells:
            return 0
        number = len(self.problem.layers) - decisions.num_tail
        if not number:
            return 0
        return int(self._most("kept_forward", range(number), rows).kept_bytes * decisions.keep)

    # ----------------------------------------------------------------------------------------------
    # Seconds

    def num_microbatches(self, rows: int) -> int:
        """Microbatches of a step."""
        return -(-self.problem.num_rows // rows)

    def pass_seconds(self, layer: int, kind: str, rows: float) -> float:
        """Of one pass of a layer."""
        key = (id(self.problem.costs[layer]), kind, rows)
        if key not in self._passes:
            cost = self._at(kind, layer, rows)
            self._passes[key] = max(
                seconds(cost, self.hardware) + PASS_SECONDS,
                submission_seconds(cost, self.hardware),
            )
        return self._passes[key]

    def _accumulate(self, unit: UnitSize) -> float:
        return unit.num_trained * ACCUMULATE_BYTES / self.hardware.memory_rate

    def backward_seconds(self, layer: int, decisions: Decisions, rows: float) -> float:
        """Of recomputation and backward of a streamed layer, its gradients added up."""
        recomputed = self.pass_seconds(layer, "backward", rows)
        kept = self.pass_seconds(layer, "kept_backward", rows)
        saved = _spared(decisions.keep) if decisions.num_kept_cells else 0.0
        recomputed -= saved * (recomputed - kept)
        return recomputed + self._accumulate(self.problem.layers[layer])

    def _streamed_seconds(self, kind: str, decisions: Decisions, rows: float) -> float:
        """Of one microbatch through all streamed layers, forward or backward."""
        layers = range(len(self.problem.layers) - decisions.num_tail)
        keep = decisions.keep if decisions.num_kept_cells else 0.0
        key = (kind, layers, keep, rows)
        if key not in self._sums:
            self._sums[key] = sum(
                self.pass_seconds(layer, kind, rows)
                if kind == "forward"
                else self.backward_seconds(layer, decisions, rows)
                for layer in layers
            )
        return self._sums[key]

    def epilogue_seconds(self, decisions: Decisions, rows: float) -> float:
        """Of the tail and the epilogue for one microbatch."""
        key = (decisions.piece_tokens, decisions.num_tail, rows)
        if key not in self._epilogues:
            self._epilogues[key] = self._find_epilogue_seconds(decisions, rows)
        return self._epilogues[key]

    def _find_epilogue_seconds(self, decisions: Decisions, rows: float) -> float:
        problem, hardware = self.problem, self.hardware
        tokens = rows * problem.length
        piece = min(decisions.piece_tokens or tokens, tokens)
        matrix = 6.0 * problem.head_parameters * tokens / hardware.matrix_rate / HEAD_EFFICIENCY
        moved = problem.logit_moved_bytes * problem.head_width * tokens
        part = max(problem.length, min(decisions.part_tokens or tokens, tokens))
        number = math.ceil(tokens / max(1, part))
        pieces = number * math.ceil(part / max(1, piece))
        moved += pieces * HEAD_SUM_BYTES * problem.head_parameters
        total = max(matrix + moved / hardware.memory_rate, number * PART_SECONDS) + PASS_SECONDS
        for layer in range(len(problem.layers) - decisions.num_tail, len(problem.layers)):
            total += self.pass_seconds(layer, "kept_forward", rows)
            total += self.pass_seconds(layer, "kept_backward", rows)
            total += self._accumulate(problem.layers[layer])
        return total

    def update_seconds(
        self, num_parameters: float, *, half: str | None = None, beside: float = 0.0
    ) -> float:
        """Of the host optimizer.

        Args:
            num_parameters: to update.
            half: what of the update, if not all of it: "weights" or "moments".
            beside: bytes that the link reads and writes in host memory meanwhile; an update is
                bound by that memory, so they come on top.
        """
        problem, hardware = self.problem, self.hardware
        halves = EIGHT_BIT_HALVES if problem.eight_bit else HALVES
        share = halves[half] if half else 1.0
        num_parameters /= problem.together.num_shares
        moved = share * num_parameters * problem.update_bytes + beside
        found = moved / (hardware.host_rate * (BUSY_MEMORY if problem.eight_bit else BUSY_HOST))
        if problem.eight_bit:  # bound by arithmetic, unless much is moved beside it
            found = max(found, share * num_parameters / (hardware.eight_bit_rate * BUSY_CORES))
        return found * problem.together.contention

    def beside_forward(self, decisions: Decisions, rows: int) -> float:
        """Bytes that the link moves while one streamed layer runs forward."""
        streamed = self._cut(decisions).streamed
        if not streamed:
            return 0.0
        number = self.num_microbatches(rows)
        values = self.problem.num_rows * self.problem.hidden_bytes
        moved = values * (1 if self._stays(decisions, rows) else 2)
        moved += number * self.kept_bytes_of(decisions, rows) + streamed[0].weight_bytes
        shared = decisions.shared_layers(len(self.problem.layers))
        lent = 2 * sum(self.lent_bytes(streamed[index]) for index in shared)
        return moved + lent / max(1, len(streamed) - len(shared))

    def _stays(self, decisions: Decisions, rows: int) -> bool:
        """Whether hidden states stay on the device from layer to layer."""
        return self.num_microbatches(rows) + 2 <= decisions.num_cells

    def estimate(self, decisions: Decisions, rows: int) -> float:
        """Seconds of a step, by formula."""
        problem = self.problem
        number, mean = self.num_microbatches(rows), problem.num_rows / self.num_microbatches(rows)
        cut = self._cut(decisions)
        streamed, tail = cut.streamed, cut.tail
        forward = number * self._streamed_seconds("forward", decisions, mean)
        backward = number * self._streamed_seconds("backward", decisions, mean)
        middle = number * self.epilogue_seconds(decisions, mean)
        ends = number * 2 * PROLOGUE_SECONDS
        shared = decisions.shared_layers(len(problem.layers))
        lent = sum(self.lent_bytes(streamed[index]) for index in shared)
        back = tail[: len(tail) - decisions.num_device_states]
        half = "weights" if decisions.halves else None
        host, later = self._host_seconds(decisions, rows)
        rows_first = 0.0 if decisions.outer_state else self._rows_seconds(half=half)
        weights = cut.streamed_weights
        values = len(streamed) * number * mean * problem.hidden_bytes
        kept = len(streamed) * number * self.kept_bytes_of(decisions, rows)
        again = 0.0 if self._stays(decisions, rows) else values
        inwards = again + weights + sum(unit.weight_bytes for unit in back) + lent
        rate = self.hardware.both_ways_rate * self._busy_link
        forward = max(forward, inwards / rate, (values + kept + lent) / rate)
        backward = max(backward, (weights + 2 * values + kept) / rate)
        if problem.policy is UpdatePolicy.JUST_IN_TIME:
            first = self.update_seconds(streamed[0].num_trained, half=half) if streamed else host
            backward = max(backward, later - middle)
            return middle + backward + ends + rows_first + max(forward + first, host)
        layer = backward / max(1, len(streamed))
        return rows_first + max(forward + middle + backward + ends, host + middle + layer)

    def _host_seconds(self, decisions: Decisions, rows: int) -> tuple[float, float]:
        """Of updates: those that passes wait for, and those that are done under the rest."""
        problem = self.problem
        if problem.policy is UpdatePolicy.ON_DEVICE:
            return 0.0, 0.0
        cut = self._cut(decisions)
        streamed, tail = cut.streamed, cut.tail
        shared = decisions.shared_layers(len(problem.layers))
        back = tail[: len(tail) - decisions.num_device_states]
        outer = [] if decisions.outer_state else [size for _, size in problem.outer]
        whole = self._whole(decisions, streamed, shared)
        in_two = cut.num_trained - sum(streamed[index].num_trained for index in shared) - whole
        in_two += sum(unit.num_trained for unit in [*back, *outer])
        at_once = self.update_seconds(whole)
        if problem.policy is UpdatePolicy.JUST_IN_TIME:
            num_on_host = len(streamed) - len(shared)
            beside = num_on_host * self.beside_forward(decisions, rows)
            half = "weights" if decisions.halves else None
            later = self.update_seconds(in_two, half="moments") if half else 0.0
            return at_once + self.update_seconds(in_two, half=half, beside=beside), later
        beside = 2.0 * sum(self.lent_bytes(streamed[index]) for index in shared)
        if not decisions.halves:
            return at_once + self.update_seconds(in_two, beside=beside), 0.0
        late = min(1.0, decisions.num_late / max(1, len(streamed)))  # only these are done in two
        weights, moments = (
            self.update_seconds(late * in_two, half=half) for half in ("weights", "moments")
        )
        number = self.num_microbatches(rows)
        middle = number * self.epilogue_seconds(decisions, problem.num_rows / number)
        moments = max(0.0, moments - middle)  # there the host has nothing else to do
        rest = self.update_seconds((1 - late) * in_two, beside=beside)
        return at_once + weights + moments + rest, 0.0

    @staticmethod
    def _whole(decisions: Decisions, streamed: Sequence[UnitSize], shared: frozenset[int]) -> int:
        """Parameters of layers that are updated at once where others are updated in two."""
        if not decisions.halves or not decisions.num_whole:
            return 0
        on_host = [unit for index, unit in enumerate(streamed) if index not in shared]
        number = min(decisions.num_whole, len(on_host))
        return sum(unit.num_trained for unit in on_host[len(on_host) - number :])

    @staticmethod
    def lent_bytes(unit: UnitSize) -> int:
        """What is copied to the device for an update there."""
        return unit.state_bytes + unit.staging_bytes + unit.weight_bytes

    def _rows_seconds(self, *, half: str | None) -> float:
        """What the host does before the first microbatch can begin: rows of tables."""
        if half not in self._rows:
            self._rows[half] = self._find_rows_seconds(half=half)
        return self._rows[half]

    def _find_rows_seconds(self, *, half: str | None) -> float:
        problem = self.problem
        total = 0.0
        for unit, size in problem.outer:
            if unit.looked_up:
                share = min(1.0, problem.num_rows * problem.looked_up_bytes / size.weight_bytes)
                total += self.update_seconds(size.num_trained * share * 0.8, half=half)
        return total + 2 * problem.num_rows * problem.looked_up_bytes / HOST_COPY_RATE

    def with_late(self, decisions: Decisions, rows: int) -> Decisions:
        """The same, with as many updates left to the next step as the host cannot do in its own."""
        problem = self.problem
        if problem.policy is not UpdatePolicy.EAGER:
            return decisions
        streamed = self._cut(decisions).streamed
        if not streamed:
            return decisions
        number = self.num_microbatches(rows)
        mean = problem.num_rows / number
        host = self.update_seconds(streamed[0].num_trained)
        device = number * self.backward_seconds(0, decisions, mean)
        done = len(streamed) if host <= device else int(len(streamed) * device / host)
        room = problem.host_limit_bytes - self.host_bytes(replace(decisions, num_late=0), rows)
        most = max(0, room) // max(1, self._most_staged)
        late = min(len(streamed) - done, most)
        num_late = late + self._num_before if late else 0
        return (
            decisions if num_late == decisions.num_late else replace(decisions, num_late=num_late)
        )

    def simulate(self, decisions: Decisions, rows: int) -> Simulation:
        """A step, line by line, in the middle of a run."""
        problem, hardware = self.problem, self.hardware
        number = self.num_microbatches(rows)
        lines = number * len(problem.layers) * 6
        fewer = max(2, MOST_LINES // (len(problem.layers) * 6)) if lines > MOST_LINES else number
        shape = decisions.shape(
            num_microbatches=fewer,
            trains=[bool(unit.num_trained) for unit in problem.layers],
            outer=tuple(decisions.outer_unit(unit) for unit, _ in problem.outer),
            update=problem.policy,
        )
        shape = replace(shape, pending=shape.late_units, held=frozenset(shape.on_device))
        if problem.together.num_ranks > 1:
            shape = replace(shape, parallel=True)
        scale = number / fewer
        costs = _Costs(self, decisions, rows, scale=scale)
        return simulate(
            _schedule_of(shape),
            costs,
            fetch_rate=hardware.fetch_rate * self._busy_link,
            drain_rate=hardware.drain_rate * self._busy_link,
            both_ways_rate=hardware.both_ways_rate * self._busy_link,
        )


@lru_cache(maxsize=NUM_REMEMBERED)
def _schedule_of(shape: Shape) -> Schedule:
    """Many choices are not in the shape, and plans for other budgets meet the same shapes."""
    return make_schedule(shape)


class _Costs:
    """What a line costs."""

    def __init__(self, model: CostModel, decisions: Decisions, rows: int, *, scale: float) -> None:
        self._model = model
        self._decisions = decisions
        self._scale = scale  # microbatches that one line stands for
        problem = model.problem
        self._mean = problem.num_rows / model.num_microbatches(rows)
        self._rows = rows
        self._beside = model.beside_forward(decisions, rows)
        self._streamed = {f"L{i}" for i in range(len(problem.layers) - decisions.num_tail)}
        self._sizes = {f"L{i}": unit for i, unit in enumerate(problem.layers)}
        self._sizes |= {unit.name: size for unit, size in problem.outer}

    def __call__(self, action: Action) -> Cost:
        if action.lane in (Lane.STASH, Lane.UNSTASH):
            nbytes = int(self._scale * self._value_bytes(action.value))
            return Cost(link="out" if action.lane is Lane.STASH else "in", nbytes=nbytes)
        size = self._sizes.get(action.unit)
        if size is not None and action.kind in COPIED:
            way, parts = COPIED[action.kind]
            nbytes = sum(getattr(size, f"{part}_bytes") for part in parts)
            nbytes //= self._model.problem.together.num_shares
            pieces = 1 if action.piece is None else self._decisions.num_pieces
            return Cost(link=way, nbytes=nbytes // pieces)
        if action.lane is Lane.UPDATE:
            return Cost(self._host_seconds(action, size))
        if action.lane in (Lane.GATHER, Lane.REDUCE):
            return Cost(self._collective_seconds(action, size))
        return Cost(self._device_seconds(action, size))

    def _device_seconds(self, action: Action, size: UnitSize | None) -> float:
        model, verb = self._model, action.verb
        if verb == "loss":
            return self._scale * model.epilogue_seconds(self._decisions, self._mean)
        if verb in ("forward", "backward") and size is None:
            return self._scale * PROLOGUE_SECONDS
        if verb == "forward":
            return self._scale * model.pass_seconds(action.layer, "forward", self._mean)
        if verb == "backward":
            return self._scale * model.backward_seconds(action.layer, self._decisions, self._mean)
        if size is not None and verb == "update":
            each = REVISE_BYTES if action.kind == "update U device" else DEVICE_UPDATE_BYTES
            moved = size.num_trained * each / model.hardware.memory_rate
            return moved if action.piece is None else moved / self._decisions.num_pieces
        return 0.0

    def _collective_seconds(self, action: Action, size: UnitSize | None) -> float:
        world = self._model.problem.together
        if size is None:  # a few numbers
            return world.reduce_seconds(0.0)
        if action.lane is Lane.GATHER:
            return world.gather_seconds(size.weight_bytes)
        return world.reduce_seconds(size.gradient_bytes)

    def _host_seconds(self, action: Action, size: UnitSize | None) -> float:
        model, problem, verb = self._model, self._model.problem, action.verb
        if verb == "lookup":
            return self._scale * self._mean * problem.looked_up_bytes / HOST_COPY_RATE
        if size is None:
            return 0.0
        share = min(1.0, problem.num_rows * problem.looked_up_bytes / max(1, size.weight_bytes))
        if verb == "collect":
            return self._scale * 2 * self._mean * problem.looked_up_bytes / HOST_COPY_RATE
        if verb != "update":
            return 0.0
        half = next((half for half in HALVES if action.kind.endswith(half)), None)
        if action.microbatch is not None:  # the rows that it looks up
            whole = model.update_seconds(size.num_trained * share * 0.8, half=half)
            return self._scale * whole / model.num_microbatches(self._rows)
        is_before_forward = "late" in action.kind and half != "moments"
        beside = self._beside if is_before_forward and action.unit in self._streamed else 0.0
        return model.update_seconds(size.num_trained, half=half, beside=beside)

    def _value_bytes(self, value: str) -> float:
        problem = self._model.problem
        if value.startswith("k"):
            return self._model.kept_bytes_of(self._decisions, self._rows)
        if value.startswith("r"):
            return problem.recorded_bytes * self._mean
        if value.startswith(("e", "x")):
            return problem.looked_up_bytes * self._mean
        return problem.hidden_bytes * self._mean
