"""How long a step lasts with some choices, by formula; `memory` says what they take.

[Note: rates] Seconds come from counted operations and measured rates. What no rate tells was
measured once, on an H200 with the 3.2-billion-parameter shape, and stands below as constants:
plans for other shapes and budgets are predictions (docs/benchmarks.md compares).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from l2l.parameter_server import UpdatePolicy
from l2l.planner.decisions import Decisions
from l2l.planner.hardware import Hardware
from l2l.planner.layer_cost import seconds, submission_seconds
from l2l.planner.memory import Memory
from l2l.planner.pass_costs import PassCosts
from l2l.planner.problem import Problem, UnitSize

HEAD_EFFICIENCY = 0.95
HEAD_SUM_BYTES = 9.0  # a parameter, to add a piece's gradient to that of the head
ACCUMULATE_BYTES = 10.0  # to add a parameter's gradient to its sum
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


def _spared(keep: float) -> float:
    """`SPARED`, with straight lines between."""
    for (left, low), (right, high) in pairwise(SPARED):
        if keep <= right:
            return low + (high - low) * (keep - left) / (right - left)
    return 1.0


class CostModel:
    """Bytes and seconds of choices.

    Thousands of them are compared: what depends on few choices is reckoned once for each of these.
    """

    def __init__(self, problem: Problem, hardware: Hardware) -> None:
        self.problem = problem
        if problem.is_single:
            hardware = replace(hardware, matrix_rate=hardware.single_rate)
        self.hardware = hardware
        self._costs = PassCosts(problem)
        self.memory = Memory(problem, self._costs)
        self.busy_link = 1.0 if problem.policy is UpdatePolicy.ON_DEVICE else BUSY_LINK
        self._sums: dict[tuple[str, range, float, float], float] = {}
        self._epilogues: dict[tuple[int | None, int, float], float] = {}
        self._rows: dict[str | None, float] = {}
        self._passes: dict[tuple[int, str, float], float] = {}

    def pass_seconds(self, layer: int, kind: str, rows: float) -> float:
        """Of one pass of a layer."""
        key = (id(self.problem.costs[layer]), kind, rows)
        if key not in self._passes:
            cost = self._costs.at(kind, layer, rows)
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
        streamed = self.memory.cut(decisions).streamed
        if not streamed:
            return 0.0
        number = self.problem.num_microbatches(rows)
        values = self.problem.num_rows * self.problem.hidden_bytes
        moved = values * (1 if self._stays(decisions, rows) else 2)
        moved += number * self.memory.kept_bytes_of(decisions, rows) + streamed[0].weight_bytes
        shared = decisions.shared_layers(len(self.problem.layers))
        lent = 2 * sum(streamed[index].lent_bytes for index in shared)
        return moved + lent / max(1, len(streamed) - len(shared))

    def _stays(self, decisions: Decisions, rows: int) -> bool:
        """Whether hidden states stay on the device from layer to layer."""
        return self.problem.num_microbatches(rows) + 2 <= decisions.num_cells

    def estimate(self, decisions: Decisions, rows: int) -> float:
        """Seconds of a step, by formula."""
        problem = self.problem
        number = problem.num_microbatches(rows)
        mean = problem.num_rows / number
        cut = self.memory.cut(decisions)
        streamed, tail = cut.streamed, cut.tail
        forward = number * self._streamed_seconds("forward", decisions, mean)
        backward = number * self._streamed_seconds("backward", decisions, mean)
        middle = number * self.epilogue_seconds(decisions, mean)
        ends = number * 2 * PROLOGUE_SECONDS
        shared = decisions.shared_layers(len(problem.layers))
        lent = sum(streamed[index].lent_bytes for index in shared)
        back = tail[: len(tail) - decisions.num_device_states]
        half = "weights" if decisions.halves else None
        host, later = self._host_seconds(decisions, rows)
        rows_first = 0.0 if decisions.outer_state else self._rows_seconds(half=half)
        weights = cut.streamed_weights
        values = len(streamed) * number * mean * problem.hidden_bytes
        kept = len(streamed) * number * self.memory.kept_bytes_of(decisions, rows)
        again = 0.0 if self._stays(decisions, rows) else values
        inwards = again + weights + sum(unit.weight_bytes for unit in back) + lent
        rate = self.hardware.both_ways_rate * self.busy_link
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
        cut = self.memory.cut(decisions)
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
        beside = 2.0 * sum(streamed[index].lent_bytes for index in shared)
        if not decisions.halves:
            return at_once + self.update_seconds(in_two, beside=beside), 0.0
        late = min(1.0, decisions.num_late / max(1, len(streamed)))  # only these are done in two
        weights, moments = (
            self.update_seconds(late * in_two, half=half) for half in ("weights", "moments")
        )
        number = self.problem.num_microbatches(rows)
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
        streamed = self.memory.cut(decisions).streamed
        if not streamed:
            return decisions
        number = self.problem.num_microbatches(rows)
        mean = problem.num_rows / number
        host = self.update_seconds(streamed[0].num_trained)
        device = number * self.backward_seconds(0, decisions, mean)
        done = len(streamed) if host <= device else int(len(streamed) * device / host)
        none_late = self.memory.host_bytes(replace(decisions, num_late=0), rows)
        room = problem.host_limit_bytes - none_late
        most = max(0, room) // max(1, self.memory.largest_staged)
        late = min(len(streamed) - done, most)
        num_late = late + self.memory.num_before if late else 0
        return (
            decisions if num_late == decisions.num_late else replace(decisions, num_late=num_late)
        )
