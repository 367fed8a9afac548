"""From a problem, a machine and a budget to the fastest choices that fit.

Candidates are all combinations of a few sensible values: rows of a microbatch, pieces of the
epilogue, whether head and gradients share memory, length of the tail, how much optimizer state is
on the device, how much streamed layers keep. For each, the ledger says what it takes, phase by
phase; those over the budget are dropped. A formula ranks the rest, and the best few are simulated
line by line (simulation.py). What cannot fit at all is refused with what would.

[Note: rates] Seconds come from counted operations and measured rates. What no rate tells was
measured once, on an H200 with the 3.2-billion-parameter shape, and stands below as constants:
plans for other shapes and budgets are predictions (docs/benchmarks.md compares).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from l2l.byte_size import format_bytes
from l2l.hardware import Hardware
from l2l.layer_cost import seconds
from l2l.parameter_server import NUM_STAGING, UpdatePolicy
from l2l.planner.plan import ALWAYS, Decisions, LedgerLine
from l2l.planner.problem import Problem, UnitSize
from l2l.schedule import NUM_LENT, NUM_PIECES, Action, Shape, make_schedule
from l2l.simulation import Cost, Simulation, simulate

MOST_TOKENS = 16384  # of a microbatch: more gain nothing
PIECES = (8192, 4096, 2048, 1024, 512, 256, 128)
KEEPS = (0.0, 0.16, 0.3)
NUM_RANKED = 24  # candidates that are looked at more closely
NUM_SIMULATED = 2  # of each kind
PROMISING = 1.2  # times the best estimate: what lies above is not simulated
MOST_PIECES = 6
MOST_LINES = 12000  # of a schedule to simulate; longer ones are simulated with fewer microbatches
LIBRARY_BYTES = 96 << 20  # workspaces of matrix libraries, and small tensors
ROUNDING_BYTES = 32 << 20
SLACK = 0.02  # of the budget, for what lies between tensors

HEAD_EFFICIENCY = 0.85
ACCUMULATE_BYTES = 16.0  # to add a parameter's gradient to its sum
DEVICE_UPDATE_BYTES = 34.0
PASS_SECONDS = 0.2e-3  # of a pass, beside its arithmetic: launches, copies into cells
PROLOGUE_SECONDS = 2e-3
HOST_COPY_RATE = 28e9  # of gathering rows; bytes that are read
BUSY_HOST = 0.75  # of the optimizer's rate while the link is busy and passes are launched
SHARES = (0.0, 0.2, 0.35, 0.5)  # of streamed layers that the device updates


class DoesNotFitError(ValueError):
    """No choices fit the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Choices with what they take and how long a step lasts."""

    decisions: Decisions
    rows: int
    ledger: tuple[LedgerLine, ...]
    seconds: float
    bound: str


def find_plan(
    problem: Problem,
    hardware: Hardware,
    *,
    budget_bytes: int,
    rows: int | None,
    overrides: Decisions | None = None,
    fixed: frozenset[str] = frozenset(),
) -> Candidate:
    """The fastest choices that fit.

    Args:
        problem: what for.
        hardware: where.
        budget_bytes: of device memory.
        rows: of a microbatch; None: to be chosen.
        overrides: choices that are made already, those named in `fixed`.
        fixed: names of choices.

    Raises:
        DoesNotFitError: nothing fits; says what the least is.
    """
    model = _Model(problem, hardware)
    limit = budget_bytes * (1 - SLACK)
    chosen = {name: getattr(overrides, name) for name in fixed}
    fitting: dict[tuple[Decisions, int], float] = {}
    least: tuple[int, Decisions, int] | None = None
    for candidate, number in _candidates(model, budget_bytes, rows):
        decisions = replace(candidate, **chosen)
        taken = model.peak_bytes(decisions, number)
        if least is None or taken < least[0]:
            least = (taken, decisions, number)
        if taken <= limit and (decisions, number) not in fitting:
            fitting[decisions, number] = model.estimate(decisions, number)
    if not fitting:
        assert least is not None
        raise DoesNotFitError(_refusal(model, budget_bytes, least))
    ranked = sorted(fitting, key=fitting.__getitem__)[:NUM_RANKED]
    if "num_shared" not in fixed:
        ranked = [one for one in _shared(model, ranked) if model.peak_bytes(*one) <= limit]
        ranked.sort(key=lambda one: model.estimate(*one))
    best: tuple[Simulation, Decisions, int] | None = None
    promising = model.estimate(*ranked[0]) * PROMISING
    for decisions, number in _distinct(ranked):
        if best is not None and model.estimate(decisions, number) > promising:
            continue
        found = model.simulate(decisions, number)
        if best is None or found.seconds < best[0].seconds:
            best = (found, decisions, number)
    assert best is not None
    simulation, decisions, number = best
    return Candidate(
        decisions=decisions,
        rows=number,
        ledger=tuple(model.ledger(decisions, number)),
        seconds=simulation.seconds,
        bound=simulation.bound,
    )


def _shared(
    model: _Model, candidates: Iterable[tuple[Decisions, int]]
) -> Iterator[tuple[Decisions, int]]:
    """Candidates, with and without the device's help in updating."""
    problem = model.problem
    for decisions, rows in candidates:
        yield decisions, rows
        late = problem.policy is UpdatePolicy.JUST_IN_TIME or decisions.num_late
        if not problem.may_update_on_device or not late:
            continue
        streamed = len(problem.layers) - decisions.num_tail
        for share in SHARES[1:]:
            if int(share * streamed):
                yield replace(decisions, num_shared=int(share * streamed)), rows


def _distinct(ranked: list[tuple[Decisions, int]]) -> Iterator[tuple[Decisions, int]]:
    """The best candidates, a few of each kind: the formula that ranks them is rough."""
    seen: dict[tuple[float, ...], int] = {}
    for decisions, rows in ranked:
        kind = (decisions.keep, min(decisions.num_shared, 1))
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= NUM_SIMULATED:
            yield decisions, rows


def _candidates(
    model: _Model, budget_bytes: int, rows: int | None
) -> Iterator[tuple[Decisions, int]]:
    problem = model.problem
    most = max(1, min(problem.num_rows, MOST_TOKENS // problem.length))
    choices = [rows] if rows else sorted({1, most, *(2**i for i in range(12) if 2**i <= most)})
    for number in choices:
        tokens = number * problem.length
        pieces: list[int | None] = [None]
        if problem.may_cut_rows:
            smallest = 1 if problem.may_cut_positions else problem.length
            pieces += [size for size in PIECES if smallest <= size < tokens]
        num_fitting = 0
        for piece in pieces:
            for shares in (False, True):
                start = Decisions(
                    microbatch_tokens=tokens, piece_tokens=piece, shares_memory=shares
                )
                num_fitting += model.peak_bytes(start, number) <= budget_bytes * (1 - SLACK)
                yield from _tails(model, start, number, budget_bytes)
            if num_fitting >= MOST_PIECES:
                break  # smaller ones are only slower


def _tails(
    model: _Model, start: Decisions, rows: int, budget_bytes: int
) -> Iterator[tuple[Decisions, int]]:
    problem, limit = model.problem, budget_bytes * (1 - SLACK)
    yield model.with_late(start, rows), rows
    for keep in KEEPS[1:]:
        kept = replace(start, keep=keep, num_kept_cells=3)
        if model.may_keep(kept, rows) and model.peak_bytes(kept, rows) <= limit:
            yield model.with_late(kept, rows), rows
    num_layers = len(problem.layers)
    for tail in range(1, num_layers + 1, max(1, num_layers // 32)):
        one = replace(start, num_tail=tail)
        if model.peak_bytes(one, rows) > limit:
            return
        states = [0]
        if problem.may_update_on_device:
            most = model.most_states(one, rows, limit)
            states = sorted({0, most, most // 2, most // 4})
        for number in states:
            two = replace(one, num_device_states=number)
            yield model.with_late(two, rows), rows
            whole = replace(two, outer_state=True)
            if number == tail == num_layers and model.peak_bytes(whole, rows) <= limit:
                yield model.with_late(whole, rows), rows
            if tail < num_layers:
                kept = replace(two, keep=KEEPS[1], num_kept_cells=3)
                if model.may_keep(kept, rows) and model.peak_bytes(kept, rows) <= limit:
                    yield model.with_late(kept, rows), rows


def _refusal(model: _Model, budget_bytes: int, least: tuple[int, Decisions, int]) -> str:
    taken, decisions, rows = least
    lines = sorted(
        (line for line in model.ledger(decisions, rows) if line.place == "device"),
        key=lambda line: -line.nbytes,
    )
    largest = ", ".join(f"{line.purpose} {format_bytes(line.nbytes)}" for line in lines[:4])
    needed = int(taken / (1 - SLACK)) + 1
    return (
        f"the step needs {format_bytes(needed)} of device memory, found a budget of "
        f"{format_bytes(budget_bytes)}. The least was found with microbatches of {rows} row(s) of "
        f"{model.problem.length} positions; most of it: {largest}. Give device_memory="
        f"'{math.ceil(needed / 2**20)}MiB' or more, or shorter rows."
    )


class _Model:
    """Bytes and seconds of choices."""

    def __init__(self, problem: Problem, hardware: Hardware) -> None:
        self.problem = problem
        self.hardware = hardware
        self._memory: dict[tuple[Decisions, int], int] = {}
        self._passes: dict[tuple[int, str, float], float] = {}

    # ----------------------------------------------------------------------------------------------
    # Bytes

    def peak_bytes(self, decisions: Decisions, rows: int) -> int:
        """Device memory in the phase that takes most."""
        key = (replace(decisions, num_late=0), rows)
        if key not in self._memory:
            phases: dict[str, int] = {}
            for line in self.ledger(decisions, rows):
                if line.place == "device":
                    phases[line.phase] = phases.get(line.phase, 0) + line.nbytes
            always = phases.pop(ALWAYS, 0)
            self._memory[key] = always + max(phases.values(), default=0)
        return self._memory[key]

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
        problem = self.problem
        streamed, tail = self._split(decisions)
        trains = [unit for unit in streamed if unit.num_trained]
        slots = min(decisions.num_slots, len(streamed))
        yield ALWAYS, "weight slots", slots * max((u.weight_bytes for u in streamed), default=0)
        yield ALWAYS, "tail: weights", sum(unit.weight_bytes for unit in tail)
        yield ALWAYS, "tail: gradients", sum(unit.gradient_bytes for unit in tail)
        states = problem.layers[len(problem.layers) - decisions.num_device_states :]
        yield ALWAYS, "tail: optimizer state", sum(unit.state_bytes for unit in states)
        cell = max(problem.hidden_bytes, problem.looked_up_bytes) * rows
        yield ALWAYS, "boundary cells", decisions.num_cells * cell
        yield ALWAYS, "recorded arguments", 2 * problem.recorded_bytes * rows
        kept = self._kept_bytes(decisions, rows)
        yield ALWAYS, "kept results", decisions.num_kept_cells * kept
        passing = [size for unit, size in problem.outer if self._passes_by(unit.name, decisions)]
        staying = [
            (unit, size)
            for unit, size in problem.outer
            if not self._passes_by(unit.name, decisions)
            and (unit.in_prologue or unit.in_epilogue or decisions.outer_state)
        ]
        yield ALWAYS, "around the layers: weights", sum(s.weight_bytes for _, s in staying)
        yield ALWAYS, "around the layers: gradients", sum(s.gradient_bytes for _, s in staying)
        if decisions.outer_state:
            yield ALWAYS, "around the layers: state", sum(s.state_bytes for _, s in staying)
        yield ALWAYS, "buffers, libraries", problem.buffer_bytes + LIBRARY_BYTES + ROUNDING_BYTES
        number = min(decisions.num_gradient_slots, len(trains))
        gradients = number * max((unit.gradient_bytes for unit in trains), default=0)
        head_weights = sum(size.weight_bytes for size in passing)
        head_gradients = sum(size.gradient_bytes for size in passing)
        if not decisions.shares_memory:
            yield ALWAYS, "gradient slots", gradients
            yield ALWAYS, "head: weights", head_weights
            yield ALWAYS, "head: gradients", head_gradients
        costs = list(zip(problem.layers, problem.costs, strict=True))
        of_streamed = [cost for _, cost in costs[: len(streamed)]]
        of_tail = [cost for _, cost in costs[len(streamed) :]]
        if of_streamed:
            forward = max(cost.forward.at(rows).working_bytes for cost in of_streamed)
            yield "forward", "one layer at work", forward + kept
            if decisions.num_shared:
                lent = max(u.state_bytes + u.staging_bytes + u.weight_bytes for u in streamed)
                phase = "forward" if decisions.shares_memory else ALWAYS
                yield phase, "lent optimizer state", NUM_LENT * lent // NUM_PIECES
            if decisions.shares_memory:
                yield "forward", "head: weights, arriving", head_weights
                yield "backward", "gradient slots", gradients
            backward = max(cost.backward.at(rows).working_bytes for cost in of_streamed)
            yield "backward", "one layer at work", backward
        if decisions.shares_memory:
            yield "epilogue", "head: weights", head_weights
            yield "epilogue", "head: gradients", head_gradients
        kept_tail = sum(cost.kept_forward.at(rows).kept_bytes for cost in of_tail)
        outputs = sum(cost.kept_forward.at(rows).output_bytes for cost in of_tail)
        yield "epilogue", "tail: kept for backward", kept_tail + outputs
        piece = min(decisions.piece_tokens or 2**62, rows * problem.length)
        logits = (
            int(piece * problem.head_width * problem.logit_bytes) + 8 * problem.hidden_bytes * rows
        )
        unwinding = max(
            (
                cost.kept_backward.at(rows).working_bytes - cost.kept_forward.at(rows).kept_bytes
                for cost in of_tail
            ),
            default=0,
        )
        yield "epilogue", "a piece at work", max(logits, unwinding)

    def _host_lines(self, decisions: Decisions, rows: int) -> Iterator[tuple[str, int]]:
        problem = self.problem
        streamed, _ = self._split(decisions)
        states = problem.layers[len(problem.layers) - decisions.num_device_states :]
        moved = sum(unit.state_bytes for unit in states)
        yield "parameter server", problem.server_bytes - moved
        number = self._num_microbatches(rows)
        values = len(streamed) + 1 if streamed else 0
        yield "stash", values * number * problem.hidden_bytes * rows
        kept = self._kept_bytes(decisions, rows)
        yield "stash: kept results", len(streamed) * number * kept
        yield "looked-up rows", 4 * problem.num_rows * problem.looked_up_bytes

    def may_keep(self, decisions: Decisions, rows: int) -> bool:
        """Whether layers can keep results, and the host has room for them."""
        if not self.problem.may_keep:
            return False
        taken = sum(nbytes for _, nbytes in self._host_lines(decisions, rows))
        return taken <= self.problem.host_limit_bytes

    def _split(self, decisions: Decisions) -> tuple[tuple[UnitSize, ...], tuple[UnitSize, ...]]:
        number = len(self.problem.layers) - decisions.num_tail
        return self.problem.layers[:number], self.problem.layers[number:]

    def _passes_by(self, name: str, decisions: Decisions) -> bool:
        unit = next(unit for unit, _ in self.problem.outer if unit.name == name)
        return unit.passes and not decisions.outer_state

    def _kept_bytes(self, decisions: Decisions, rows: int) -> int:
        """Of one streamed layer and microbatch."""
        if not decisions.num_kept_cells:
            return 0
        costs = self.problem.costs[: len(self.problem.layers) - decisions.num_tail]
        most = max((cost.kept_forward.at(rows).kept_bytes for cost in costs), default=0)
        return int(most * decisions.keep)

    # ----------------------------------------------------------------------------------------------
    # Seconds

    def _num_microbatches(self, rows: int) -> int:
        return -(-self.problem.num_rows // rows)

    def _pass(self, layer: int, kind: str, rows: float) -> float:
        key = (id(self.problem.costs[layer]), kind, rows)
        if key not in self._passes:
            cost = getattr(self.problem.costs[layer], kind).at(rows)
            self._passes[key] = seconds(cost, self.hardware) + PASS_SECONDS
        return self._passes[key]

    def _accumulate(self, unit: UnitSize) -> float:
        return unit.num_trained * ACCUMULATE_BYTES / self.hardware.memory_rate

    def _backward(self, layer: int, decisions: Decisions, rows: float) -> float:
        recomputed = self._pass(layer, "backward", rows)
        kept = self._pass(layer, "kept_backward", rows)
        saved = (recomputed - kept) * decisions.keep**0.8 if decisions.num_kept_cells else 0.0
        return recomputed - saved + self._accumulate(self.problem.layers[layer])

    def _epilogue(self, decisions: Decisions, rows: float) -> float:
        problem, hardware = self.problem, self.hardware
        tokens = rows * problem.length
        piece = min(decisions.piece_tokens or tokens, tokens)
        matrix = 6.0 * problem.head_parameters * tokens / hardware.matrix_rate / HEAD_EFFICIENCY
        moved = problem.logit_moved_bytes * problem.head_width * tokens
        moved += math.ceil(tokens / max(1, piece)) * 8.0 * problem.head_parameters
        total = matrix + moved / hardware.memory_rate + PASS_SECONDS
        for layer in range(len(problem.layers) - decisions.num_tail, len(problem.layers)):
            total += self._pass(layer, "kept_forward", rows)
            total += self._pass(layer, "kept_backward", rows)
            total += self._accumulate(problem.layers[layer])
        return total

    def update_seconds(self, num_parameters: float) -> float:
        """Of the host optimizer."""
        if self.problem.eight_bit:
            return num_parameters / (self.hardware.eight_bit_rate * BUSY_HOST)
        return num_parameters * self.problem.update_bytes / (self.hardware.host_rate * BUSY_HOST)

    def estimate(self, decisions: Decisions, rows: int) -> float:
        """Seconds of a step, by formula."""
        problem = self.problem
        number, mean = self._num_microbatches(rows), problem.num_rows / self._num_microbatches(rows)
        streamed, tail = self._split(decisions)
        indices = range(len(streamed))
        forward = number * sum(self._pass(i, "forward", mean) for i in indices)
        backward = number * sum(self._backward(i, decisions, mean) for i in indices)
        middle = number * self._epilogue(decisions, mean)
        ends = number * 2 * PROLOGUE_SECONDS
        compute = forward + backward + middle + ends
        shared = decisions.shared_layers(len(problem.layers))
        on_host = [unit for index, unit in enumerate(streamed) if index not in shared]
        on_host += tail[: len(tail) - decisions.num_device_states]
        outer = [] if decisions.outer_state else [size for _, size in problem.outer]
        host = self.update_seconds(sum(u.num_trained for u in [*on_host, *outer]))
        host = 0.0 if problem.policy is UpdatePolicy.ON_DEVICE else host
        rows_first = self._rows_seconds() if not decisions.outer_state else 0.0
        fetched = sum(unit.weight_bytes for unit in streamed) * 2
        fetched += sum(u.weight_bytes for u in tail[: len(tail) - decisions.num_device_states])
        stash = len(streamed) * number * mean * problem.hidden_bytes
        stash += len(streamed) * number * self._kept_bytes(decisions, rows)
        lent = sum(self._lent_bytes(streamed[index]) for index in shared)
        link = (fetched + stash + lent) / self.hardware.both_ways_rate
        if problem.policy is UpdatePolicy.JUST_IN_TIME:
            first = self.update_seconds(streamed[0].num_trained) if streamed else host
            moved = lent / self.hardware.both_ways_rate
            lead = max(forward + rows_first + first, host + rows_first, moved)
            step = middle + backward + ends + lead
        else:
            layer = backward / max(1, len(streamed))
            step = max(compute + rows_first, host + rows_first + middle + layer)
        return max(step, link)

    @staticmethod
    def _lent_bytes(unit: UnitSize) -> int:
        return unit.state_bytes + unit.staging_bytes + unit.weight_bytes

    def _rows_seconds(self) -> float:
        """What the host does before the first microbatch can begin: rows of tables."""
        problem = self.problem
        total = 0.0
        for unit, size in problem.outer:
            if unit.looked_up:
                share = min(1.0, problem.num_rows * problem.looked_up_bytes / size.weight_bytes)
                total += self.update_seconds(size.num_trained * share * 0.8)
        return total + 2 * problem.num_rows * problem.looked_up_bytes / HOST_COPY_RATE

    def with_late(self, decisions: Decisions, rows: int) -> Decisions:
        """The same, with as many updates left to the next step as the host cannot do in its own."""
        problem = self.problem
        if problem.policy is not UpdatePolicy.EAGER:
            return decisions
        streamed, _ = self._split(decisions)
        if not streamed:
            return decisions
        number = self._num_microbatches(rows)
        mean = problem.num_rows / number
        host = self.update_seconds(streamed[0].num_trained)
        device = number * self._backward(0, decisions, mean)
        done = len(streamed) if host <= device else int(len(streamed) * device / host)
        late = len(streamed) - done
        before = sum(unit.in_prologue and unit.trained for unit, _ in problem.outer)
        return replace(decisions, num_late=late + before if late else 0)

    def simulate(self, decisions: Decisions, rows: int) -> Simulation:
        """A step, line by line, in the middle of a run."""
        problem, hardware = self.problem, self.hardware
        number = self._num_microbatches(rows)
        lines = number * len(problem.layers) * 6
        fewer = max(2, MOST_LINES // (len(problem.layers) * 6)) if lines > MOST_LINES else number
        shape = make_shape(problem, decisions, num_microbatches=fewer)
        shape = replace(shape, pending=shape.late_units, held=frozenset(shape.on_device))
        scale = number / fewer
        costs = _Costs(self, decisions, rows, scale=scale)
        return simulate(
            make_schedule(shape),
            costs,
            fetch_rate=hardware.fetch_rate,
            drain_rate=hardware.drain_rate,
            both_ways_rate=hardware.both_ways_rate,
        )


def make_shape(problem: Problem, decisions: Decisions, *, num_microbatches: int) -> Shape:
    """The shape of a training step."""
    num_layers = len(problem.layers)
    just_in_time = problem.policy is UpdatePolicy.JUST_IN_TIME
    return Shape(
        layers=tuple(range(num_layers)),
        num_microbatches=num_microbatches,
        num_slots=max(1, min(decisions.num_slots, num_layers - decisions.num_tail)),
        num_cells=decisions.num_cells,
        num_kept_cells=decisions.num_kept_cells,
        num_gradient_slots=decisions.num_gradient_slots,
        frozen_layers=frozenset(i for i, u in enumerate(problem.layers) if not u.num_trained),
        outer=tuple(
            decisions.outer_unit(unit) if size.num_trained else unit for unit, size in problem.outer
        ),
        num_tail=decisions.num_tail,
        device_state=frozenset(
            i
            for i in range(num_layers - decisions.num_device_states, num_layers)
            if problem.layers[i].num_trained
        ),
        num_late=num_layers + len(problem.outer) if just_in_time else decisions.num_late,
        num_staging=NUM_STAGING,
        device_updates=problem.policy is UpdatePolicy.ON_DEVICE,
        shared=decisions.shared_layers(num_layers),
        shares_memory=decisions.shares_memory,
    )


class _Costs:
    """What a line costs."""

    def __init__(self, model: _Model, decisions: Decisions, rows: int, *, scale: float) -> None:
        self._model = model
        self._decisions = decisions
        self._scale = scale  # microbatches that one line stands for
        problem = model.problem
        self._mean = problem.num_rows / model._num_microbatches(rows)
        self._rows = rows
        self._sizes = {f"L{i}": unit for i, unit in enumerate(problem.layers)}
        self._sizes |= {unit.name: size for unit, size in problem.outer}

    def __call__(self, action: Action) -> Cost:
        model, verb = self._model, action.verb
        problem, hardware = model.problem, model.hardware
        size = self._sizes.get(action.operands[0]) if action.operands else None
        if verb in ("forward", "backward"):
            layer = int(action.operands[0][1:])
            if verb == "forward":
                return Cost(self._scale * model._pass(layer, "forward", self._mean))
            return Cost(self._scale * model._backward(layer, self._decisions, self._mean))
        if verb in ("epilogue", "score"):
            return Cost(self._scale * model._epilogue(self._decisions, self._mean))
        if verb in ("prologue", "regress"):
            return Cost(self._scale * PROLOGUE_SECONDS)
        if verb in ("stash", "unstash"):
            nbytes = int(self._scale * self._value_bytes(action.operands[0]))
            return Cost(link="out" if verb == "stash" else "in", nbytes=nbytes)
        if verb == "lookup":
            return Cost(self._scale * self._mean * problem.looked_up_bytes / HOST_COPY_RATE)
        if size is None:
            return Cost()
        if verb == "fetch":
            return Cost(link="in", nbytes=size.weight_bytes)
        if verb == "drain":
            return Cost(link="out", nbytes=size.staging_bytes)
        if verb in ("mirror", "return"):
            return Cost(link="out", nbytes=size.weight_bytes)
        if verb == "borrow":
            return Cost(link="in", nbytes=model._lent_bytes(size) // NUM_PIECES)
        if verb == "repay":
            nbytes = (size.state_bytes + size.weight_bytes) // NUM_PIECES
            return Cost(link="out", nbytes=nbytes)
        if verb in ("renew", "revise", "rework"):
            pieces = NUM_PIECES if verb == "rework" else 1
            return Cost(size.num_trained * DEVICE_UPDATE_BYTES / hardware.memory_rate / pieces)
        return Cost(self._host_seconds(verb, size))

    def _host_seconds(self, verb: str, size: UnitSize) -> float:
        model, problem = self._model, self._model.problem
        share = min(1.0, problem.num_rows * problem.looked_up_bytes / max(1, size.weight_bytes))
        if verb == "refresh":
            return model.update_seconds(size.num_trained * share * 0.8)
        if verb == "collect":
            return 2 * problem.num_rows * problem.looked_up_bytes / HOST_COPY_RATE
        if verb in ("update", "settle"):
            return model.update_seconds(size.num_trained)
        return 0.0

    def _value_bytes(self, value: str) -> float:
        problem = self._model.problem
        if value.startswith("k"):
            return self._model._kept_bytes(self._decisions, self._rows)
        if value.startswith("r"):
            return problem.recorded_bytes * self._mean
        if value in ("e", "x"):
            return problem.looked_up_bytes * self._mean
        return problem.hidden_bytes * self._mean
