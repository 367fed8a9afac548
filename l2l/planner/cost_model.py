"""How long a step lasts with some choices, by formula and simulated; `memory` says what they take.

[Note: rates] Seconds come from counted operations and measured rates. What no rate tells was
measured once, on an H200 with the 3.2-billion-parameter shape, and stands below as constants:
plans for other shapes and budgets are predictions (docs/benchmarks.md compares).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from itertools import pairwise
from typing import Final, Literal, final

from l2l.model import EVEN_ROWS, SLICE_PIECE_BYTES
from l2l.parameter_server import ALL_PARTS, UpdatePolicy
from l2l.planner.bounds import Work
from l2l.planner.decisions import Decisions
from l2l.planner.hardware import Hardware
from l2l.planner.memory import Memory
from l2l.planner.problem import Problem, UnitSize
from l2l.planner.simulation import Cost, Direction, Simulation, simulate
from l2l.schedule import EPILOGUE, Action, Lane, Schedule, Shape, lower

HEAD_EFFICIENCY = 0.95
HEAD_PASSES = 3  # forward, and gradients of its input and of its weights
SLICED_PASSES = 4  # where logits are made twice
FORWARD_LOGITS = 0.4  # of the traffic of a loss: logits are read, not written over
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
# What a share of the results, the best of them, spares of the time to recompute all of them.
SPARED = ((0.0, 0.0), (0.07, 0.37), (0.3, 0.5), (1.0, 1.0))
PART_SECONDS = 5e-3  # that the host needs to submit a part of the epilogue
MAX_LINES = 4000  # of a schedule to simulate; longer ones are simulated with fewer microbatches
NUM_REMEMBERED = 32  # schedules
DEVICE_UPDATE_BYTES = 34.0  # of AdamW there, a parameter
REVISE_BYTES = 150.0  # of Adafactor and Muon: about thirty operations one by one
HOST_MATRIX_RATE = 1e12  # operations of a host's products of matrices in 16 bits, roughly
# Which way a kind of line copies a unit, and what of it.
COPIED: Final[Mapping[str, tuple[Literal["in", "out"], tuple[str, ...]]]] = {
    "fetch U": ("in", ("weight",)),
    "fetch U:p": ("in", ("weight",)),
    "fetch U.state:p": ("in", ("state",)),
    "fetch U.all:p": ("in", ("weight", "staging", "state")),
    "drain U": ("out", ("weight",)),
    "drain U free": ("out", ("weight",)),
    "drain U.grad": ("out", ("staging",)),
    "drain U.grad:p": ("out", ("staging",)),
    "drain U.all:p": ("out", ("weight", "state")),
}


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
        self.memory = Memory(problem)
        self.busy_link = 1.0 if problem.policy is UpdatePolicy.ON_DEVICE else BUSY_LINK
        self.pass_seconds = cache(self._find_pass_seconds)
        self.backward_seconds = cache(self._find_backward_seconds)
        self._streamed_seconds = cache(self._find_streamed_seconds)
        self._epilogue_seconds = cache(self._find_epilogue_seconds)
        self._rows_seconds = cache(self._find_rows_seconds)

    def _find_pass_seconds(self, layer: int, kind: str, rows: float) -> float:
        """Of one pass of a layer; `kind` is a field of `LayerCosts`."""
        cost = self.memory.cost(getattr(self.problem.costs[layer], kind), rows)
        passing = cost.seconds(self.hardware) + PASS_SECONDS
        return max(passing, cost.submission_seconds(self.hardware))

    def _accumulate(self, unit: UnitSize) -> float:
        return unit.num_trained * ACCUMULATE_BYTES / self.hardware.memory_rate

    def _find_backward_seconds(self, layer: int, keep: float, rows: float) -> float:
        """Of recomputation and backward of a streamed layer, its gradients added up."""
        recomputed = self.pass_seconds(layer, "backward", rows)
        kept = self.pass_seconds(layer, "kept_backward", rows)
        recomputed -= _spared(keep) * (recomputed - kept)
        return recomputed + self._accumulate(self.problem.layers[layer])

    def _backward_flops(self, layer: int, keep: float, rows: float) -> float:
        """Of matrix products in recomputation and backward of a streamed layer."""
        costs, cost = self.problem.costs[layer], self.memory.cost
        recomputed = cost(costs.backward, rows).matrix_flops
        kept = cost(costs.kept_backward, rows).matrix_flops
        return recomputed - _spared(keep) * (recomputed - kept)

    def _find_streamed_seconds(
        self, layers: range, keep: float, rows: float
    ) -> tuple[float, float]:
        """Of one microbatch through all streamed layers, forward and backward."""
        forward = sum(self.pass_seconds(layer, "forward", rows) for layer in layers)
        return forward, sum(self.backward_seconds(layer, keep, rows) for layer in layers)

    def head_seconds(self, num_slices: int, rows: float) -> tuple[float, float]:
        """Of one slice of the head for one microbatch, forward and backward."""
        problem, hardware = self.problem, self.hardware
        assert problem.head is not None
        one, tokens = problem.head.slice(num_slices), rows * problem.length
        parameters = one.weight_bytes / (4 if problem.is_single else 2)
        product = 2.0 * parameters * tokens / hardware.matrix_rate / HEAD_EFFICIENCY
        moved = problem.logit_moved_bytes * one.num_rows * tokens / hardware.memory_rate
        width = one.num_rows * (4 if problem.is_single else 2)
        pieces = math.ceil(tokens / max(EVEN_ROWS, SLICE_PIECE_BYTES // width))
        sums = pieces * HEAD_SUM_BYTES * parameters / hardware.memory_rate
        forward = product + FORWARD_LOGITS * moved + PASS_SECONDS
        return forward, 3 * product + moved + (sums if one.num_trained else 0.0) + PASS_SECONDS

    def epilogue_seconds(self, decisions: Decisions) -> float:
        """Of the tail and the epilogue for one microbatch."""
        rows = decisions.mean_rows(self.problem)
        if number := self.num_slices(decisions):
            return PART_SECONDS + number * sum(self.head_seconds(number, rows))
        pieces = decisions.piece_tokens, decisions.part_tokens
        return self._epilogue_seconds(*pieces, decisions.num_tail, rows)

    def num_slices(self, decisions: Decisions) -> int:
        """In which the head comes; 0: it comes whole."""
        return decisions.num_head_slices if self.problem.head is not None else 0

    def _find_epilogue_seconds(
        self, piece_tokens: int | None, part_tokens: int | None, num_tail: int, rows: float
    ) -> float:
        problem, hardware = self.problem, self.hardware
        tokens = rows * problem.length
        piece = min(piece_tokens or tokens, tokens)
        matrix = 6.0 * problem.head_parameters * tokens / hardware.matrix_rate / HEAD_EFFICIENCY
        moved = problem.logit_moved_bytes * problem.head_width * tokens
        part = max(problem.length, min(part_tokens or tokens, tokens))
        number = math.ceil(tokens / max(1, part))
        pieces = number * math.ceil(part / max(1, piece))
        moved += pieces * HEAD_SUM_BYTES * problem.head_parameters
        total = max(matrix + moved / hardware.memory_rate, number * PART_SECONDS) + PASS_SECONDS
        for layer in range(len(problem.layers) - num_tail, len(problem.layers)):
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

    def looked_up_seconds(self, size: UnitSize, half: str | None) -> float:
        """Of updating the rows of a table that a step looks up."""
        looked_up = self.problem.num_rows * self.problem.looked_up_bytes
        share = min(1.0, looked_up / max(1, size.weight_bytes))
        return self.update_seconds(size.num_trained * share * 0.8, half=half)

    def _find_rows_seconds(self, half: str | None) -> float:
        """What the host does before the first microbatch can begin: rows of tables."""
        tables = [size for unit, size in self.problem.outer if unit.looked_up]
        total = sum(self.looked_up_seconds(size, half) for size in tables)
        return total + 2 * self.problem.num_rows * self.problem.looked_up_bytes / HOST_COPY_RATE

    def _shared(self, decisions: Decisions) -> list[UnitSize]:
        """Layers that are updated on the device, with state that is lent."""
        layers = self.problem.layers
        return [layers[index] for index in decisions.shared_layers(len(layers))]

    def beside_forward(self, decisions: Decisions) -> float:
        """Bytes that the link moves while one streamed layer runs forward."""
        problem, streamed = self.problem, self.memory.cut(decisions).streamed
        if not streamed:
            return 0.0
        number = decisions.num_microbatches(problem)
        values = problem.num_rows * problem.hidden_bytes
        moved = values * (1 if self._stays(decisions) else 2)
        moved += number * self.memory.kept_bytes(decisions) + streamed[0].weight_bytes
        shared = self._shared(decisions)
        lent = 2 * sum(unit.lent_bytes for unit in shared)
        return moved + lent / max(1, len(streamed) - len(shared))

    def _stays(self, decisions: Decisions) -> bool:
        """Whether hidden states stay on the device from layer to layer."""
        return decisions.num_microbatches(self.problem) + 2 <= decisions.num_cells

    def estimate(self, decisions: Decisions) -> float:
        """Seconds of a step, by formula."""
        problem, cut = self.problem, self.memory.cut(decisions)
        number, mean = decisions.num_microbatches(problem), decisions.mean_rows(problem)
        each = self._streamed_seconds(cut.indices, decisions.kept_share, mean)
        forward, backward = (number * one for one in each)
        middle = number * self.epilogue_seconds(decisions)
        ends = number * 2 * PROLOGUE_SECONDS
        half = "weights" if decisions.halves else None
        host, later = self._host_seconds(decisions)
        rows_first = 0.0 if decisions.outer_state else self._rows_seconds(half)
        lent = sum(unit.lent_bytes for unit in self._shared(decisions))
        weights = cut.streamed_weights
        values = len(cut.streamed) * number * mean * problem.hidden_bytes
        kept = len(cut.streamed) * number * self.memory.kept_bytes(decisions)
        again = 0.0 if self._stays(decisions) else values
        back = cut.tail[: len(cut.tail) - decisions.num_device_states]
        inwards = again + weights + sum(unit.weight_bytes for unit in back) + lent
        rate = self.hardware.both_ways_rate * self.busy_link
        if problem.policy is UpdatePolicy.JUST_IN_TIME:
            forward += self.products_seconds(decisions)
        else:
            backward += self.products_seconds(decisions)
        forward = max(forward, inwards / rate, (values + kept + lent) / rate)
        backward = max(backward, (weights + 2 * values + kept) / rate)
        if problem.policy is UpdatePolicy.JUST_IN_TIME:
            first = host
            if cut.streamed:
                first = self.update_seconds(cut.streamed[0].num_trained, half=half)
            backward = max(backward, later - middle)
            before, disk = self._disk_seconds(decisions, 1.0)
            device = middle + backward + ends + max(0.0, disk - middle - backward)
            return device + rows_first + max(forward + first, host, before)
        layer = backward / max(1, len(cut.streamed))
        device = forward + middle + backward + ends
        late = min(1.0, decisions.num_late / max(1, len(cut.streamed)))
        before, disk = self._disk_seconds(decisions, late)
        device += max(0.0, before - forward) + max(0.0, disk - backward - middle)
        return rows_first + max(device, host + middle + layer)

    def products_seconds(self, decisions: Decisions) -> float:
        """Of products of matrices in updates, of layers that the device updates."""
        return self._products(decisions) / self.hardware.matrix_rate

    def _products(self, decisions: Decisions) -> float:
        tail = self.memory.cut(decisions).tail
        states = tail[len(tail) - min(decisions.num_device_states, len(tail)) :]
        return sum(unit.work.matrix_flops for unit in (*self._shared(decisions), *states))

    def _disk_seconds(self, decisions: Decisions, late: float) -> tuple[float, float]:
        """Of what is read and written under the forward pass, and after it; `late`: a share.

        What updates need is read and written at the same time, once; weights are read once more.
        """
        disk = self.problem.disk
        if disk is None or not self.memory.all_disk_bytes(decisions):
            return 0.0, 0.0
        state, weights = (self.memory.disk_bytes(decisions, part) for part in ALL_PARTS)
        both = (state + weights) * max(1 / disk.both_read_rate, 1 / disk.both_write_rate)
        again, spilled = weights / disk.read_rate, self.memory.spilled_bytes(decisions)
        before = late * both + (1 - late) * again + spilled / disk.write_rate
        return before, (1 - late) * both + late * again + spilled / disk.read_rate

    def _host_seconds(self, decisions: Decisions) -> tuple[float, float]:
        """Of updates: those that passes wait for, and those that are done under the rest."""
        problem, cut = self.problem, self.memory.cut(decisions)
        if problem.policy is UpdatePolicy.ON_DEVICE:
            return 0.0, 0.0
        shared, whole = self._shared(decisions), self._whole(decisions)
        in_two, at_once = self.num_updated_on_host(decisions) - whole, self.update_seconds(whole)
        if problem.policy is UpdatePolicy.JUST_IN_TIME:
            beside = (len(cut.streamed) - len(shared)) * self.beside_forward(decisions)
            half = "weights" if decisions.halves else None
            later = self.update_seconds(in_two, half="moments") if half else 0.0
            return at_once + self.update_seconds(in_two, half=half, beside=beside), later
        beside = 2.0 * sum(unit.lent_bytes for unit in shared)
        if not decisions.halves:
            return at_once + self.update_seconds(in_two, beside=beside), 0.0
        late = min(1.0, decisions.num_late / max(1, len(cut.streamed)))  # only these are in two
        weights = self.update_seconds(late * in_two, half="weights")
        moments = self.update_seconds(late * in_two, half="moments")
        middle = decisions.num_microbatches(problem) * self.epilogue_seconds(decisions)
        moments = max(0.0, moments - middle)  # there the host has nothing else to do
        rest = self.update_seconds((1 - late) * in_two, beside=beside)
        return at_once + weights + moments + rest, 0.0

    def num_updated_on_host(self, decisions: Decisions) -> int:
        """Parameters that the host's optimizer updates in a step."""
        problem, cut = self.problem, self.memory.cut(decisions)
        if problem.policy is UpdatePolicy.ON_DEVICE:
            return 0
        back = cut.tail[: len(cut.tail) - decisions.num_device_states]
        outer = [] if decisions.outer_state else [size for _, size in problem.outer]
        shared = sum(unit.num_trained for unit in self._shared(decisions))
        return cut.num_trained - shared + sum(unit.num_trained for unit in [*back, *outer])

    def _whole(self, decisions: Decisions) -> int:
        """Parameters of layers that are updated at once where others are updated in two."""
        if not decisions.halves or not decisions.num_whole:
            return 0
        shared = decisions.shared_layers(len(self.problem.layers))
        streamed = self.memory.cut(decisions).streamed
        on_host = [unit.num_trained for i, unit in enumerate(streamed) if i not in shared]
        return sum(on_host[-decisions.num_whole :])

    def with_late(self, decisions: Decisions) -> Decisions:
        """Choices that leave no updates, with as many left as the host cannot do in their step."""
        problem, streamed = self.problem, self.memory.cut(decisions).streamed
        if problem.policy is not UpdatePolicy.EAGER or not streamed or problem.updates_wholes:
            return decisions
        host = self.update_seconds(streamed[0].num_trained)
        mean = decisions.mean_rows(problem)
        backward = self.backward_seconds(0, decisions.kept_share, mean)
        device = decisions.num_microbatches(problem) * backward
        done = len(streamed) if host <= device else int(len(streamed) * device / host)
        room = problem.host_limit_bytes - self.memory.host_bytes(decisions)
        most = max(0, room) // max(1, self.memory.largest_staged)
        late = min(len(streamed) - done, most)
        return replace(decisions, num_late=late + self.memory.num_before) if late else decisions

    def lines(self, decisions: Decisions) -> tuple[Schedule, LineCosts]:
        """A step, line by line, in the middle of a run, and what each of its lines costs."""
        problem = self.problem
        number = decisions.num_microbatches(problem)
        lines = len(problem.layers) * 6  # for each microbatch
        fewer = max(2, MAX_LINES // lines) if number * lines > MAX_LINES else number
        shape = decisions.shape(
            num_microbatches=fewer,
            layers=problem.layers,
            route=problem.route,
            outer=[unit for unit, _ in problem.outer],
            update=problem.policy,
            has_halves=problem.has_halves,
            parallel=problem.parallel or problem.together.num_ranks > 1,
            joint=problem.joint,
        )
        return _schedule_of(shape), LineCosts(self, decisions, scale=number / fewer)

    def work(self, decisions: Decisions) -> Work:
        """What such a step has to do, whatever the rates."""
        problem, (schedule, costs) = self.problem, self.lines(decisions)
        moved: defaultdict[str, float] = defaultdict(float)
        for line in schedule.lines:
            if isinstance(line, Action) and (found := costs(line)).link is not None:
                moved[found.link] += found.nbytes
        world = problem.together
        return Work(
            matrix_flops=self._flops(decisions),
            bytes_in=moved["in"],
            bytes_out=moved["out"],
            bytes_read=moved["read"],
            bytes_written=moved["write"],
            num_updated=self.num_updated_on_host(decisions) / world.num_shares * world.contention,
            update_bytes=problem.update_bytes,
            eight_bit=problem.eight_bit,
        )

    def _flops(self, decisions: Decisions) -> float:
        """Of matrix products, with what is computed again."""
        problem, rows, keep = self.problem, decisions.mean_rows(self.problem), decisions.kept_share
        passes = SLICED_PASSES if self.num_slices(decisions) else HEAD_PASSES
        total = passes * 2.0 * problem.head_parameters * rows * problem.length
        streamed = self.memory.cut(decisions).indices
        for layer, costs in enumerate(problem.costs):
            if layer in streamed:
                total += self.memory.cost(costs.forward, rows).matrix_flops
                total += self._backward_flops(layer, keep, rows)
            else:
                both = (
                    self.memory.cost(one, rows) for one in (costs.kept_forward, costs.kept_backward)
                )
                total += sum(one.matrix_flops for one in both)
        return decisions.num_microbatches(problem) * total + self._products(decisions)

    def simulate(self, decisions: Decisions) -> Simulation:
        """How long such a step takes, by the clock."""
        hardware, (schedule, costs) = self.hardware, self.lines(decisions)
        return simulate(
            schedule,
            costs,
            fetch_rate=hardware.fetch_rate * self.busy_link,
            drain_rate=hardware.drain_rate * self.busy_link,
            both_ways_rate=hardware.both_ways_rate * self.busy_link,
            disk=self.problem.disk,
        )


@lru_cache(maxsize=NUM_REMEMBERED)
def _schedule_of(shape: Shape) -> Schedule:
    """Many choices are not in the shape, and plans for other budgets meet the same shapes."""
    return lower(shape)


@final
class LineCosts:
    """What a line costs."""

    def __init__(self, model: CostModel, decisions: Decisions, *, scale: float) -> None:
        problem = model.problem
        self._model, self._problem, self._decisions = model, problem, decisions
        self._scale = scale  # microbatches that one line stands for
        self._mean = mean = decisions.mean_rows(problem)
        self._beside = model.beside_forward(decisions)
        self._streamed = {f"L{i}" for i in model.memory.cut(decisions).indices}
        self._sizes = {f"L{i}": unit for i, unit in enumerate(problem.layers)}
        self._sizes |= {unit.name: size for unit, size in problem.outer}
        rows = problem.looked_up_bytes * mean
        kept = model.memory.kept_bytes(decisions)
        self._value_bytes = {"k": kept, "r": problem.recorded_bytes * mean, "e": rows, "x": rows}
        looked_up = scale * mean * problem.looked_up_bytes / HOST_COPY_RATE
        loss = scale * model.epilogue_seconds(decisions)
        self._seconds = {"loss": loss, "lookup": looked_up, "collect": 2 * looked_up}
        self._lent = decisions.shared_layers(len(problem.layers))
        is_late = problem.policy is UpdatePolicy.JUST_IN_TIME
        self._beside_updates = "forward" if is_late else "backward"
        self._of_slices: dict[str, float] = {}
        if number := model.num_slices(decisions):
            each = model.head_seconds(number, mean)
            self._of_slices = dict(zip(("forward", "backward"), each, strict=True))
            self._seconds["loss"] = scale * PASS_SECONDS

    def __call__(self, action: Action) -> Cost:
        """The cost of one line."""
        if action.lane in (Lane.STASH, Lane.UNSTASH):
            hidden = self._problem.hidden_bytes * self._mean
            nbytes = int(self._scale * self._value_bytes.get(action.value[:1], hidden))
            return Cost(link="out" if action.lane is Lane.STASH else "in", nbytes=nbytes)
        size = self._sizes.get(action.unit)
        if action.lane in (Lane.READ, Lane.WRITE):
            way: Direction = "read" if action.lane is Lane.READ else "write"
            hidden = int(self._scale * self._problem.hidden_bytes * self._mean)
            return Cost(link=way, nbytes=_bytes_on_disk(action, size) if size else hidden)
        slices, pieces = self._decisions.num_head_slices, self._decisions.num_pieces
        num_pieces = 1 if action.piece is None else slices if action.unit[0] == "T" else pieces
        if size is not None and action.kind in COPIED:
            way, parts = COPIED[action.kind]
            nbytes = sum(getattr(size, f"{part}_bytes") for part in parts)
            return Cost(link=way, nbytes=nbytes // self._problem.together.num_shares // num_pieces)
        seconds = self._seconds.get(action.verb, 0.0)
        if action.lane in (Lane.GATHER, Lane.REDUCE):
            seconds = self._collective_seconds(action, size)
        elif action.verb in ("forward", "backward"):
            seconds = self._scale * self._pass_seconds(action, size)
        elif action.verb == "update" and size is not None:
            seconds = self._update_seconds(action, size) / num_pieces
        return Cost(seconds)

    def _collective_seconds(self, action: Action, size: UnitSize | None) -> float:
        world = self._problem.together
        if size is None:  # a few numbers
            return world.reduce_seconds(0.0)
        if action.lane is Lane.GATHER:
            return world.gather_seconds(size.weight_bytes)
        return world.reduce_seconds(size.gradient_bytes)

    def _pass_seconds(self, action: Action, size: UnitSize | None) -> float:
        if size is None:
            return PART_SECONDS / 2 if action.unit == EPILOGUE else PROLOGUE_SECONDS
        if action.unit.startswith("T"):
            return self._of_slices[action.verb]
        beside = 0.0  # products of an update on another lane, which the device makes meanwhile
        if action.verb == self._beside_updates and action.layer in self._lent:
            number = self._decisions.num_microbatches(self._problem)
            beside = self._products_seconds(size) / number
        if action.verb == "forward":
            return beside + self._model.pass_seconds(action.layer, "forward", self._mean)
        keep = self._decisions.kept_share
        return beside + self._model.backward_seconds(action.layer, keep, self._mean)

    def _products_seconds(self, size: UnitSize) -> float:
        return size.work.matrix_flops / self._model.hardware.matrix_rate

    def _update_seconds(self, action: Action, size: UnitSize) -> float:
        model = self._model
        if action.lane is not Lane.UPDATE:  # on the device
            revised = action.kind == "update U device" or self._problem.updates_wholes
            each = REVISE_BYTES if revised else DEVICE_UPDATE_BYTES
            moving = size.num_trained * each / model.hardware.memory_rate
            # Beside passes, products take from these: see `_pass_seconds`.
            return moving + (self._products_seconds(size) if action.lane is Lane.COMPUTE else 0.0)
        half = next((half for half in HALVES if action.kind.endswith(half)), None)
        if action.microbatch is not None:  # the rows that it looks up
            whole = model.looked_up_seconds(size, half)
            return self._scale * whole / self._decisions.num_microbatches(self._problem)
        is_before_forward = "late" in action.kind and half != "moments"
        beside = self._beside if is_before_forward and action.unit in self._streamed else 0.0
        products = size.work.matrix_flops / HOST_MATRIX_RATE
        return products + model.update_seconds(size.num_trained, half=half, beside=beside)


def _bytes_on_disk(action: Action, size: UnitSize) -> int:
    """What a line reads from disk, or writes there."""
    if not action.kind.endswith("weights"):
        return size.state_block_bytes
    is_read = action.lane is Lane.READ
    return size.weights_block_bytes if is_read else size.weights_written_bytes
