"""What choices take, in bytes by phase, on the device and on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from l2l.parameter_server import REVISED_BYTES, REVISED_PIECE, ROUNDING_BYTES, UpdatePolicy
from l2l.planner.decisions import ALWAYS, Decisions, LedgerLine
from l2l.planner.pass_costs import PassCosts
from l2l.planner.problem import Problem, UnitSize
from l2l.schedule import NUM_LENT, OuterUnit

LIBRARY_BYTES = 96 << 20  # workspaces of matrix libraries, and small tensors
NUM_HEAD_VALUES = 8  # hidden states that an epilogue makes besides its logits
NUM_NORM_VALUES = 12  # those of 16 bits that its norm makes in its backward pass, in float32


class Cut:
    """Layers, cut into those that are streamed and the tail, with what is asked of either."""

    def __init__(self, streamed: tuple[UnitSize, ...], tail: tuple[UnitSize, ...]) -> None:
        self.streamed, self.tail = streamed, tail
        training = [unit for unit in streamed if unit.num_trained]
        self.streamed_weights = sum(unit.weight_bytes for unit in streamed)
        self.largest_weight = max((unit.weight_bytes for unit in streamed), default=0)
        self.largest_gradient = max((unit.gradient_bytes for unit in training), default=0)
        self.largest_lent = max((unit.lent_bytes for unit in streamed), default=0)
        self.num_trained = sum(unit.num_trained for unit in streamed)
        self.num_training = len(training)
        self.tail_weights = sum(unit.weight_bytes for unit in tail)
        self.tail_gradients = sum(unit.gradient_bytes for unit in tail)


class Memory:
    """Bytes of choices; what depends on few of them is reckoned once for each of these."""

    def __init__(self, problem: Problem, passes: PassCosts) -> None:
        self._problem = problem
        self._passes = passes
        self._cuts: dict[int, Cut] = {}  # by length of the tail
        states = (unit.state_bytes for unit in reversed(problem.layers))
        self._states = list(accumulate(states, initial=0))  # of so many layers, the last of them
        staging = (unit.staging_bytes for unit in problem.layers)
        self._staged = list(accumulate(staging, initial=0))  # of so many layers, the first of them
        self.largest_staged = max((unit.staging_bytes for unit in problem.layers), default=0)
        # Outer units that are drained after all layers.
        self.num_before = sum(unit.in_prologue and unit.trained for unit, _ in problem.outer)
        self._kept: dict[tuple[range, int], tuple[int, int]] = {}

    def peak_bytes(self, decisions: Decisions, rows: int) -> int:
        """Device memory in the phase that takes most."""
        phases: dict[str, int] = {}
        for phase, _, nbytes in self._device_lines(decisions, rows):
            phases[phase] = phases.get(phase, 0) + nbytes
        always = phases.pop(ALWAYS, 0)
        return always + max(phases.values(), default=0)

    def fits(self, decisions: Decisions, rows: int, limit: float) -> bool:
        """Whether choices take no more of the device than the limit."""
        return self.peak_bytes(decisions, rows) <= limit

    def most_states(self, decisions: Decisions, rows: int, limit: float) -> int:
        """How many layers of the tail may have their optimizer state on the device."""
        low, high = 0, decisions.num_tail
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.fits(replace(decisions, num_device_states=middle), rows, limit)
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
        problem = self._problem
        cut = self.cut(decisions)
        slots = min(decisions.num_slots, len(cut.streamed))
        yield ALWAYS, "weight slots", slots * cut.largest_weight
        yield ALWAYS, "tail: weights", cut.tail_weights
        yield ALWAYS, "tail: gradients", cut.tail_gradients
        yield ALWAYS, "tail: optimizer state", self._state_bytes(decisions)
        cell = max(problem.hidden_bytes, problem.looked_up_bytes) * rows
        yield ALWAYS, "boundary cells", decisions.num_cells * cell
        number = decisions.num_recorded_cells(problem.num_microbatches(rows))
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
            for unit, size in self._problem.outer
            if not self._passes_by(unit, decisions)
            and (unit.in_prologue or unit.in_epilogue or decisions.outer_state)
        ]
        yield ALWAYS, "around the layers: weights", sum(size.weight_bytes for size in staying)
        yield ALWAYS, "around the layers: gradients", sum(size.gradient_bytes for size in staying)
        if decisions.outer_state:
            yield ALWAYS, "around the layers: state", sum(size.state_bytes for size in staying)

    def _of_phases(self, decisions: Decisions, rows: int) -> Iterator[tuple[str, str, int]]:
        """What comes and goes."""
        problem = self._problem
        cut = self.cut(decisions)
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
            forward = self._passes.largest("forward", indices, rows).working_bytes
            yield "forward", "one layer at work", forward + self.kept_bytes_of(decisions, rows)
            backward = self._passes.largest("backward", indices, rows).working_bytes
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
            kept = [self._passes.at("kept_forward", index, rows) for index in layers]
            held = sum(cost.kept_bytes + cost.output_bytes for cost in kept)
            last = self._passes.largest("kept_backward", layers, rows).working_bytes
            self._kept[key] = held, last - kept[-1].kept_bytes
        return self._kept[key]

    def _host_lines(self, decisions: Decisions, rows: int) -> Iterator[tuple[str, int]]:
        problem = self._problem
        num_streamed = len(problem.layers) - decisions.num_tail
        yield "parameter server", problem.server_bytes - self._state_bytes(decisions)
        number = problem.num_microbatches(rows)
        values = num_streamed + 1 if num_streamed else 0
        yield "stash", values * number * problem.hidden_bytes * rows
        kept = self.kept_bytes_of(decisions, rows)
        yield "stash: kept results", num_streamed * number * kept
        yield "looked-up rows", 4 * problem.num_rows * problem.looked_up_bytes
        if problem.policy is UpdatePolicy.EAGER:  # just in time: all are late, and in the server
            late = max(0, decisions.num_late - self.num_before)  # of layers: the first
            yield "gradients of late updates", self._staged[min(late, num_streamed)]

    def host_bytes(self, decisions: Decisions, rows: int) -> int:
        """What choices take of the host's memory."""
        return sum(nbytes for _, nbytes in self._host_lines(decisions, rows))

    def fits_host(self, decisions: Decisions, rows: int) -> bool:
        """Whether the host has room for choices."""
        return self.host_bytes(decisions, rows) <= self._problem.host_limit_bytes

    def may_keep(self, decisions: Decisions, rows: int) -> bool:
        """Whether layers can keep results, and the host has room for them."""
        return self._problem.may_keep and self.fits_host(decisions, rows)

    def cut(self, decisions: Decisions) -> Cut:
        """The layers, cut where the tail begins."""
        if decisions.num_tail not in self._cuts:
            layers = self._problem.layers
            number = len(layers) - decisions.num_tail
            self._cuts[decisions.num_tail] = Cut(layers[:number], layers[number:])
        return self._cuts[decisions.num_tail]

    def _state_bytes(self, decisions: Decisions) -> int:
        """Of layers whose optimizer state is on the device."""
        return self._states[min(decisions.num_device_states, len(self._problem.layers))]

    @staticmethod
    def _passes_by(unit: OuterUnit, decisions: Decisions) -> bool:
        return unit.passes and not decisions.outer_state

    def kept_bytes_of(self, decisions: Decisions, rows: int) -> int:
        """Of one streamed layer and microbatch."""
        if not decisions.num_kept_cells:
            return 0
        number = len(self._problem.layers) - decisions.num_tail
        if not number:
            return 0
        return int(
            self._passes.largest("kept_forward", range(number), rows).kept_bytes * decisions.keep
        )
