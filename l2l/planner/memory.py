"""What choices take, in bytes by phase, on the device and on the host."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate

from l2l.model import EVEN_ROWS, SLICE_PIECE_BYTES
from l2l.parameter_server import (
    ALL_PARTS,
    BUFFERS,
    PLACES,
    REVISED_BYTES,
    REVISED_PIECE,
    ROUNDING_BYTES,
    Part,
    UpdatePolicy,
)
from l2l.planner.decisions import ALWAYS, Decisions, LedgerLine
from l2l.planner.layer_cost import PassCost
from l2l.planner.problem import CostCurve, Problem, UnitSize, disk_order
from l2l.schedule import NUM_HEAD_CELLS, NUM_LENT, OuterUnit

MIN_STASH_VALUES = 2  # layers: while one is read, the next is written
LIBRARY_BYTES = 96 << 20  # workspaces of matrix libraries, and small tensors
LABEL_BYTES = 8  # of a position, beside what a head in slices is given
SUM_BYTES = 16  # of a position, of all words so far
NUM_HEAD_VALUES = 8  # hidden states that an epilogue makes besides its logits
NUM_NORM_VALUES = 12  # those of 16 bits that its norm makes in its backward pass, in float32
NO_SLICE = UnitSize(weight_bytes=0, gradient_bytes=0, staging_bytes=0, state_bytes=0, num_trained=0)


class Cut:
    """Layers, cut into those that are streamed and the tail, with what is asked of either."""

    def __init__(self, problem: Problem, num_tail: int) -> None:
        self.indices = range(len(problem.layers) - num_tail)  # of those that are streamed
        self.streamed = problem.layers[: len(self.indices)]
        self.tail = problem.layers[len(self.indices) :]
        training = [unit for unit in self.streamed if unit.num_trained]
        self.streamed_weights = sum(unit.weight_bytes for unit in self.streamed)
        self.largest_weight = max((unit.weight_bytes for unit in self.streamed), default=0)
        self.largest_gradient = max((unit.gradient_bytes for unit in training), default=0)
        self.largest_lent = max((unit.lent_bytes for unit in self.streamed), default=0)
        self.most_trained = max((unit.num_trained for unit in self.streamed), default=0)
        self.num_trained = sum(unit.num_trained for unit in self.streamed)
        self.num_training = len(training)
        self.tail_weights = sum(unit.weight_bytes for unit in self.tail)
        self.tail_gradients = sum(unit.gradient_bytes for unit in self.tail)


class Memory:
    """Bytes of choices; what depends on few of them is reckoned once for each of these."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.cost = cache(CostCurve.at)
        self._cut = cache(partial(Cut, problem))
        self._largest = cache(self._find_largest)
        self._held = cache(self._find_held)
        self._largest_piece = cache(self._find_piece)
        self._disk_order = cache(self._find_disk_order)
        states = (unit.state_bytes for unit in reversed(problem.layers))
        self._states = list(accumulate(states, initial=0))  # of so many layers, the last of them
        staging = [unit.staging_bytes for unit in problem.layers]
        self._staged = list(accumulate(staging, initial=0))  # of so many layers, the first of them
        self.largest_staged = max(staging, default=0)
        # Outer units that are drained after all layers.
        self.num_before = sum(unit.in_prologue and unit.trained for unit, _ in problem.outer)

    def cut(self, decisions: Decisions) -> Cut:
        """The layers, cut where the tail begins."""
        return self._cut(decisions.num_tail)

    def peak_bytes(self, decisions: Decisions) -> int:
        """Device memory in the phase that takes most."""
        phases = {ALWAYS: 0}
        for phase, _, nbytes in self._device_lines(decisions):
            phases[phase] = phases.get(phase, 0) + nbytes
        always = phases.pop(ALWAYS)
        return always + max(phases.values(), default=0)

    def plain_bytes(self, decisions: Decisions) -> int:
        """The same while layers are not compiled yet: they keep nothing, though there are cells."""
        kept = decisions.num_kept_cells * self.kept_bytes(decisions)
        return kept + Memory(self._problem.plain).peak_bytes(replace(decisions, num_kept_cells=0))

    def most_states(self, decisions: Decisions, limit: float) -> int:
        """How many layers of the tail may have their optimizer state on the device."""

        def peak_bytes(number: int) -> int:
            return self.peak_bytes(replace(decisions, num_device_states=number))

        return bisect_right(range(1, decisions.num_tail + 1), limit, key=peak_bytes)

    def ledger(self, decisions: Decisions) -> tuple[LedgerLine, ...]:
        """What goes where."""
        lines = [("device", *line) for line in self._device_lines(decisions)]
        lines += [("host", ALWAYS, *line) for line in self._host_lines(decisions)]
        return tuple(
            LedgerLine(place, purpose, nbytes, phase)
            for place, phase, purpose, nbytes in lines
            if nbytes
        )

    def _device_lines(self, decisions: Decisions) -> Iterator[tuple[str, str, int]]:
        """What is there in every phase, then what comes and goes."""
        problem, cut, rows = self._problem, self.cut(decisions), decisions.rows(self._problem)
        slots, sliced = min(decisions.num_slots, len(cut.streamed)), self._slice(decisions)
        yield ALWAYS, "weight slots", slots * max(cut.largest_weight, sliced.weight_bytes)
        yield ALWAYS, "tail: weights", cut.tail_weights
        yield ALWAYS, "tail: gradients", cut.tail_gradients
        yield ALWAYS, "tail: optimizer state", self._state_bytes(decisions)
        labels = LABEL_BYTES * problem.length if sliced.num_rows else 0
        cell = max(problem.hidden_bytes + labels, problem.looked_up_bytes) * rows
        yield ALWAYS, "boundary cells", decisions.num_cells * cell
        sums = NUM_HEAD_CELLS * SUM_BYTES * problem.length * rows
        yield ALWAYS, "head: sums of slices", sums if sliced.num_rows else 0
        number = decisions.num_recorded_cells(
            decisions.num_microbatches(problem), problem.route.num_stacks
        )
        yield ALWAYS, "recorded arguments", number * problem.recorded_bytes * rows
        yield ALWAYS, "left by layers for the loss", problem.aside_bytes * problem.num_rows
        if problem.joint:
            yield ALWAYS, "one loss: all hidden states", problem.hidden_bytes * problem.num_rows
        yield ALWAYS, "kept results", decisions.num_kept_cells * self.kept_bytes(decisions)
        if decisions.num_shared:
            lent = NUM_LENT * cut.largest_lent // decisions.num_pieces
            if problem.updates_wholes:
                lent = NUM_LENT * self._largest_piece(decisions.num_tail, decisions.num_pieces)
            for phase in ("forward", "backward") if decisions.shares_memory else (ALWAYS,):
                yield phase, "lent optimizer state", lent
        if decisions.num_shared or decisions.num_device_states:
            working = max((unit.work.working_bytes for unit in problem.layers), default=0)
            yield ALWAYS, "updates of matrices at work", working
        yield ALWAYS, "context, libraries", problem.context_bytes
        yield ALWAYS, "buffers, workspaces", problem.buffer_bytes + LIBRARY_BYTES + ROUNDING_BYTES
        staying = [
            size
            for unit, size in self._placed(decisions)
            if decisions.outer_state or (unit.is_read and not unit.passes)
        ]
        yield ALWAYS, "around the layers: weights", sum(size.weight_bytes for size in staying)
        yield ALWAYS, "around the layers: gradients", sum(size.gradient_bytes for size in staying)
        if decisions.outer_state:
            yield ALWAYS, "around the layers: state", sum(size.state_bytes for size in staying)
        yield from self._passing_lines(decisions)

    def _passing_lines(self, decisions: Decisions) -> Iterator[tuple[str, str, int]]:
        problem, cut, rows = self._problem, self.cut(decisions), decisions.rows(self._problem)
        placed, sliced = self._placed(decisions), self._slice(decisions)
        head = [size for unit, size in placed if unit.passes and not decisions.outer_state]
        head_weights = sum(size.weight_bytes for size in head)
        shares = decisions.shares_memory
        many = cut.num_training + (decisions.num_head_slices if sliced.num_trained else 0)
        gradients = min(decisions.num_gradient_slots, many)
        gradients *= max(cut.largest_gradient, sliced.gradient_bytes)
        yield "backward" if shares else ALWAYS, "gradient slots", gradients
        if shares:
            yield "forward", "head: weights, arriving", head_weights
        middle = "epilogue" if shares else ALWAYS
        yield middle, "head: weights", head_weights
        yield middle, "head: gradients", sum(size.gradient_bytes for size in head)
        if cut.streamed:
            forward = self._largest("forward", cut.indices, rows).working_bytes
            yield "forward", "one layer at work", forward + self.kept_bytes(decisions)
            backward = self._largest("backward", cut.indices, rows).working_bytes
            if problem.policy is UpdatePolicy.ON_DEVICE:
                backward = max(backward, REVISED_BYTES * min(REVISED_PIECE, cut.most_trained))
            yield "backward", "one layer at work", backward
        if problem.route.num_stacks > 1:
            values = NUM_NORM_VALUES * problem.hidden_bytes + problem.recorded_bytes
            yield "interlude", "code between stacks at work", rows * values
        working = self._epilogue_bytes(decisions, problem.num_rows if problem.joint else rows)
        if cut.tail:
            held, last = self._held(decisions.num_tail, rows)
            yield "epilogue", "tail: kept for backward", held
            working = max(working, last)
        yield "epilogue", "a piece at work", working

    def _epilogue_bytes(self, decisions: Decisions, rows: int) -> int:
        """What the code after the layers makes of so many rows, at most at once."""
        problem, sliced = self._problem, self._slice(decisions)
        hidden, tokens = problem.hidden_bytes, rows * problem.length
        of_norm = 0 if problem.is_single else NUM_NORM_VALUES
        if sliced.num_rows:  # what comes before the head has no parts, and is gone by then
            width = sliced.num_rows * (4 if problem.is_single else 2)
            piece = min(tokens, max(EVEN_ROWS, SLICE_PIECE_BYTES // width))
            logits = int(piece * sliced.num_rows * problem.logit_bytes)
            return max(logits + 2 * rows * hidden, max(NUM_HEAD_VALUES, of_norm) * rows * hidden)
        piece = min(decisions.piece_tokens or 2**62, decisions.rows(problem) * problem.length)
        logits = int(piece * problem.head_width * problem.logit_bytes)
        part = max(1.0, min(rows, (decisions.part_tokens or 2**62) / problem.length))
        part = rows if problem.joint else part
        rest = rows if part < rows else 0  # the gradient, put together
        working = logits + int((NUM_HEAD_VALUES * part + rest) * hidden)
        return max(working, int((of_norm * part + rest) * hidden))

    def _placed(self, decisions: Decisions) -> list[tuple[OuterUnit, UnitSize]]:
        """Units around the layers but for a head in slices, as they are without outer state."""
        return [
            (unit, size)
            for unit, size in self._problem.outer
            if not (decisions.num_head_slices and unit.may_be_sliced)
        ]

    def _slice(self, decisions: Decisions) -> UnitSize:
        """A slice of the head, if it comes in slices."""
        head = self._problem.head if decisions.num_head_slices else None
        return NO_SLICE if head is None else head.slice(decisions.num_head_slices)

    def _find_largest(self, kind: str, layers: range, rows: int) -> PassCost:
        """The pass that takes most memory, of those of some layers."""
        curves = {getattr(self._problem.costs[index], kind): None for index in layers}
        return max((self.cost(one, rows) for one in curves), key=lambda cost: cost.working_bytes)

    def _find_piece(self, num_tail: int, num_pieces: int) -> int:
        """The largest piece that is lent of a streamed layer."""
        units = {*self._cut(num_tail).streamed}
        pieces = (unit.lent_bytes * unit.largest_piece(num_pieces) for unit in units)
        return math.ceil(max(pieces, default=0))

    def _find_held(self, num_tail: int, rows: int) -> tuple[int, int]:
        """What a tail keeps for its backward passes, and what these need beside it."""
        number = len(self._problem.layers)
        tail = range(number - num_tail, number)
        kept = [self.cost(self._problem.costs[index].kept_forward, rows) for index in tail]
        last = self._largest("kept_backward", tail, rows).working_bytes
        return sum(one.kept_bytes + one.output_bytes for one in kept), last - kept[-1].kept_bytes

    def _host_lines(self, decisions: Decisions) -> Iterator[tuple[str, int]]:
        problem, rows = self._problem, decisions.rows(self._problem)
        num_streamed = len(problem.layers) - decisions.num_tail
        elsewhere = self._state_bytes(decisions)
        for part in ALL_PARTS:
            elsewhere += sum(
                problem.layers[i].part_bytes(part) for i in self.on_disk(decisions, part)
            )
        yield "parameter server", problem.server_bytes - elsewhere
        if problem.disk is not None:
            yield BUFFERS, sum(self._buffer_bytes(p) for p in ALL_PARTS if decisions.num_parts(p))
        number = decisions.num_microbatches(problem)
        values = num_streamed + 1 if num_streamed else 0
        sliced = self._slice(decisions).num_rows > 0  # with what it is given, and its gradient
        values += 2 if sliced else 0
        beside = (2 * LABEL_BYTES + 2 * SUM_BYTES) * problem.length if sliced else 0
        values -= self.num_spilled(decisions)
        yield "stash", (values * problem.hidden_bytes + beside) * number * rows
        yield "stash: kept results", num_streamed * number * self.kept_bytes(decisions)
        yield "looked-up rows", 4 * problem.num_rows * problem.looked_up_bytes
        if problem.policy is UpdatePolicy.EAGER:  # just in time: all are late, and in the server
            late = max(0, decisions.num_late - self.num_before)  # of layers: the first
            yield "gradients of late updates", self._staged[min(late, num_streamed)]

    def num_spilled(self, decisions: Decisions) -> int:
        """Layers whose boundary tensors go to disk."""
        values = len(self._problem.layers) - decisions.num_tail + 1
        return 0 if decisions.stash_values is None else max(0, values - decisions.stash_values)

    def spilled_bytes(self, decisions: Decisions) -> int:
        """What they take there."""
        problem = self._problem
        rows = decisions.rows(problem) * decisions.num_microbatches(problem)
        return self.num_spilled(decisions) * problem.hidden_bytes * rows

    def on_disk(self, decisions: Decisions, part: Part) -> list[int]:
        """Calls whose layers' optimizer state, or weights, are on disk."""
        return self._able(decisions, part)[: decisions.num_parts(part)]

    def _able(self, decisions: Decisions, part: Part) -> list[int]:
        """Those of which it may be, in the order in which it goes there."""
        number = len(self._problem.layers)
        tail = number - min(decisions.num_device_states, decisions.num_tail)
        shared = decisions.shared_layers(number) if decisions.num_shared else frozenset[int]()
        return self._disk_order(tail, shared, part)

    def _find_disk_order(self, tail: int, shared: frozenset[int], part: Part) -> list[int]:
        problem = self._problem
        elsewhere = {*shared, *range(tail, len(problem.layers))}
        return disk_order(problem.route, problem.layers, part, but=elsewhere)

    def _buffer_bytes(self, part: Part) -> int:
        """Host memory through which a part comes from disk."""
        blocks = (one.block_bytes(part) for one in self._problem.layers)
        return len(PLACES[part]) * max(blocks, default=0)

    def disk_bytes(self, decisions: Decisions, part: Part) -> int:
        """What the disk has of all layers."""
        layers = self._problem.layers
        return sum(layers[call].block_bytes(part) for call in self.on_disk(decisions, part))

    def all_disk_bytes(self, decisions: Decisions) -> int:
        """The same of both parts, and of the stash."""
        own = self.spilled_bytes(decisions)
        return own + sum(self.disk_bytes(decisions, part) for part in ALL_PARTS)

    def with_disk(self, decisions: Decisions) -> Decisions:
        """The same with as little on disk as there is no room for on the host, if that may be.

        Optimizer state goes first, then the stash: both are written once a step and read once. Then
        weights, which are read twice. Only layers that were not on disk when the engine was made
        may come to memory: there is no room for the others.
        """
        problem = self._problem
        if problem.disk is None:
            return decisions
        numbers: dict[Part, int] = dict(zip(ALL_PARTS, problem.least_on_disk, strict=True))
        found = replace(decisions.with_parts(**numbers), stash_values=None)
        missing = self.host_bytes(found) - problem.host_limit_bytes
        for part, number in numbers.items():
            if part == "weights" and missing > 0 and problem.spills:
                found = self._spilled(found, missing)
                missing -= self.spilled_bytes(found)
            able = self._able(found, part)
            if missing > 0 and not number:
                buffers = self._buffer_bytes(part)
                if sum(problem.layers[call].part_bytes(part) for call in able) <= buffers:
                    continue
                missing += buffers
            for call in able[number:]:
                if missing > 0:
                    missing -= problem.layers[call].part_bytes(part)
                    numbers[part] += 1
        return found.with_parts(**numbers)

    def _spilled(self, decisions: Decisions, missing_bytes: int) -> Decisions:
        """The same with as few boundary tensors on disk as gives so much room, if that may be."""
        values = self.num_spilled(replace(decisions, stash_values=0))
        if values <= MIN_STASH_VALUES:
            return decisions
        each = self.spilled_bytes(replace(decisions, stash_values=values - 1))
        kept = max(MIN_STASH_VALUES, values + missing_bytes // -each)
        return replace(decisions, stash_values=kept)

    def host_bytes(self, decisions: Decisions) -> int:
        """What choices take of the host's memory."""
        return sum(nbytes for _, nbytes in self._host_lines(decisions))

    def fits_host(self, decisions: Decisions) -> bool:
        """Whether the host has room for choices, and the disk."""
        disk = self._problem.disk
        if disk is not None and self.all_disk_bytes(decisions) > disk.size_bytes:
            return False
        return self.host_bytes(decisions) <= self._problem.host_limit_bytes

    def _state_bytes(self, decisions: Decisions) -> int:
        """Of layers whose optimizer state is on the device."""
        return self._states[min(decisions.num_device_states, len(self._problem.layers))]

    def kept_bytes(self, decisions: Decisions) -> int:
        """Of one streamed layer and microbatch."""
        layers = self.cut(decisions).indices
        if not decisions.kept_share or not layers:
            return 0
        largest = self._largest("kept_forward", layers, decisions.rows(self._problem))
        return int(largest.kept_bytes * decisions.keep)
