"""From a problem, a machine and a budget to the fastest choices that fit.

Candidates are all combinations of a few sensible values: rows of a microbatch, pieces of the
epilogue, whether head and gradients share memory, length of the tail, how much optimizer state is
on the device, how much streamed layers keep. For each, the ledger says what it takes, phase by
phase; those over the budget are dropped. A formula ranks the rest, and the best few are simulated
line by line (simulation.py). From the best of them, single choices are changed a little as long as
that makes it better still; what memory is left saves copies, if it can. What cannot fit at all is
refused with what would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from l2l.device import format_bytes
from l2l.parameter_server import UpdatePolicy
from l2l.planner.cost_model import CostModel
from l2l.planner.decisions import Decisions, LedgerLine
from l2l.planner.hardware import Hardware
from l2l.planner.line_costs import simulate_step
from l2l.planner.problem import Problem
from l2l.schedule import NUM_LENT, Simulation

MAX_TOKENS = 16384  # of a microbatch: more gain nothing
PIECES = (8192, 4096, 2048, 1024, 768, 512, 384, 256, 128)  # matrix products like 128s
KEEPS = (0.0, 0.08, 0.16, 0.3)
KEPT_CELLS = (2, 3)
NUM_RANKED = 60  # candidates that are looked at more closely
NUM_SIMULATED = 2  # of each kind
MAX_SIMULATED = 24  # of all
MAX_IN_VAIN = 8  # in a row that gain nothing, where the device is what is slow
REFINED = (0.85, 0.75, 0.6, 0.5, 0.35, 0.25, 0.15)  # of updates that are left, or done whole
TAILS = (0.75, 0.5, 0.25)  # of the tail that the formula likes best
CERTAIN = 0.98  # of an estimate: what a simulation takes at least
MAX_PIECES = 6  # ways to run the epilogue that fit
MAX_CELLS = 18
SLACK = 0.02  # of the budget, for what lies between tensors
WHOLE = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of streamed layers that are not updated in two
LENDING_GAIN = 0.05  # that lending must promise: it burdens the host's memory like nothing else
LENT_PIECES = (6, 16)  # few are sooner submitted, many take less memory
AT_ONCE_PIECES = (NUM_LENT, *LENT_PIECES)  # of all layers: all pieces of one arrive ahead, or fewer
MAX_CLIMBED = 40  # simulations
STEPS = (1, -1, 3, -3)
MIN_GAIN = 0.002
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
    model = CostModel(problem, hardware)
    limit = budget_bytes * (1 - SLACK)
    chosen = {name: getattr(overrides, name) for name in fixed}
    fitting: dict[tuple[Decisions, int], float] = {}
    overfull: dict[tuple[Decisions, int], float] = {}  # the host has no room: will be refused
    least: tuple[int, Decisions, int] | None = None
    for candidate, number in _candidates(model, budget_bytes, rows):
        decisions = replace(candidate, **chosen) if chosen else candidate
        if decisions.num_device_states > decisions.num_tail:
            continue  # chosen by the user for a longer tail
        taken = model.memory.peak_bytes(decisions, number)
        if least is None or taken < least[0]:
            least = (taken, decisions, number)
        found = fitting if model.memory.fits_host(decisions, number) else overfull
        if taken <= limit and (decisions, number) not in found:
            found[decisions, number] = model.estimate(decisions, number)
    fitting = fitting or overfull
    if not fitting:
        assert least is not None
        raise DoesNotFitError(_refusal(model, budget_bytes, least))
    ranked = sorted(fitting, key=fitting.__getitem__)[:NUM_RANKED]
    if "num_shared" not in fixed:
        shared = ((replace(one, **chosen), number) for one, number in _shared(model, ranked))
        ranked = [one for one in shared if model.memory.fits(*one, limit)]
    if "num_late" not in fixed:
        ranked = list(_late(model, ranked))
    if "halves" not in fixed:
        ranked = list(_halved(model, ranked))
    ranked.sort(key=lambda one: model.estimate(*one))
    best = _simulated(model, ranked)
    if "num_tail" not in fixed:
        best = _shorter(model, best, limit, fixed)
    best = _refined(model, best, fixed)
    best = _climbed(model, best, limit, fixed)
    simulation, decisions, number = _roomier(model, best, limit, fixed)
    return Candidate(
        decisions=decisions,
        rows=number,
        ledger=tuple(model.memory.ledger(decisions, number)),
        seconds=simulation.seconds,
        bound=simulation.bound,
    )


def _simulated(
    model: CostModel, ranked: list[tuple[Decisions, int]]
) -> tuple[Simulation, Decisions, int]:
    """The best of candidates, by simulation; those that can hardly be it are not simulated."""
    best: tuple[float, Simulation, Decisions, int] | None = None
    num_simulated = num_in_vain = 0
    for decisions, number in _distinct(ranked):
        least = _rated(CERTAIN * model.estimate(decisions, number), decisions)
        if num_simulated == MAX_SIMULATED or (best is not None and least > best[0]):
            continue
        if best is not None and best[1].bound == "compute" and num_in_vain == MAX_IN_VAIN:
            break  # how updates are done hardly matters then
        found = simulate_step(model, decisions, number)
        num_simulated += 1
        num_in_vain += 1
        rated = _rated(found.seconds, decisions)
        if best is None or rated < best[0]:
            if best is None or rated < (1 - MIN_GAIN) * best[0]:
                num_in_vain = 0
            best = (rated, found, decisions, number)
    assert best is not None
    return best[1:]


def _shorter(
    model: CostModel,
    best: tuple[Simulation, Decisions, int],
    limit: float,
    fixed: frozenset[str],
) -> tuple[Simulation, Decisions, int]:
    """The best, with a shorter tail where that is better still.

    What a tail saves is certain; what its weights and gradients hold up in the middle of a step is
    not in the formula.
    """
    (_, decisions, rows), memory = best, model.memory
    for share in TAILS if "num_device_states" not in fixed else ():
        number = int(share * decisions.num_tail)
        other = replace(
            decisions, num_tail=number, num_device_states=min(number, decisions.num_device_states)
        )
        if number in (0, decisions.num_tail) or other.outer_state:
            continue
        keeps = other.num_kept_cells > 0
        if not memory.fits(other, rows, limit) or (keeps and not memory.may_keep(other, rows)):
            continue
        simulation = simulate_step(model, other, rows)
        if _rated(simulation.seconds, other) < _rated(best[0].seconds, best[1]):
            best = (simulation, other, rows)
    return best


def _refined(
    model: CostModel, best: tuple[Simulation, Decisions, int], fixed: frozenset[str]
) -> tuple[Simulation, Decisions, int]:
    """The best, with other numbers of late and of whole updates where these are better still.

    How many updates are best left depends on when the host would be idle, which no formula knows.
    """
    for name in ("num_late", "num_whole"):
        _, decisions, rows = best
        present = decisions.num_late
        streamed = len(model.problem.layers) - decisions.num_tail
        if name == "num_whole":
            present = streamed if decisions.halves and decisions.num_whole else 0
        numbers = {int(share * present) for share in REFINED} - {getattr(decisions, name), 0}
        for number in sorted(numbers if name not in fixed else (), reverse=True):
            other = decisions.override({name: number})
            simulation = simulate_step(model, other, rows)
            if simulation.seconds < best[0].seconds:
                best = (simulation, other, rows)
    return best


def _climbed(
    model: CostModel,
    best: tuple[Simulation, Decisions, int],
    limit: float,
    fixed: frozenset[str],
) -> tuple[Simulation, Decisions, int]:
    """The best where the host is what is slow, with one choice after another a little different.

    There a step is as long as the host's work and its pauses; which updates fill the pauses is a
    matter of single layers.
    """
    num_simulated, last = 0, None
    while best[0].bound == "host" and best[1] is not last:
        _, last, rows = best
        for other in _neighbours(model, last, fixed):
            fits = model.memory.fits(other, rows, limit) and model.memory.fits_host(other, rows)
            if num_simulated == MAX_CLIMBED or not fits:
                continue
            num_simulated += 1
            simulation = simulate_step(model, other, rows)
            if simulation.seconds < (1 - MIN_GAIN) * best[0].seconds:
                best = (simulation, other, rows)
    return best


def _roomier(
    model: CostModel,
    best: tuple[Simulation, Decisions, int],
    limit: float,
    fixed: frozenset[str],
) -> tuple[Simulation, Decisions, int]:
    """The best, with hidden states that stay between layers where there is room left for them.

    Simulated, copies that nothing waits for are free. But the host has to submit them, and they
    take a share of its memory's rate.
    """
    simulation, decisions, rows = best
    other = replace(decisions, num_cells=_many_cells(model, rows))
    more = decisions.num_cells < other.num_cells <= MAX_CELLS
    streams = decisions.num_tail < len(model.problem.layers)
    if "num_cells" in fixed or not (more and streams) or not model.memory.fits(other, rows, limit):
        return best
    found = simulate_step(model, other, rows)
    return (found, other, rows) if found.seconds <= simulation.seconds else best


def _many_cells(model: CostModel, rows: int) -> int:
    """Cells in which the hidden states of all microbatches stay for a while."""
    return model.problem.num_microbatches(rows) + 2


def _neighbours(
    model: CostModel, decisions: Decisions, fixed: frozenset[str]
) -> Iterator[Decisions]:
    """Choices that differ from others in one, as far as that makes sense."""
    problem = model.problem
    streamed = len(problem.layers) - decisions.num_tail
    if problem.has_halves and not fixed & {"halves", "num_whole"}:  # of tables alone, or of none
        yield replace(decisions, halves=not decisions.halves, num_whole=streamed)
    tables = any(unit.looked_up and unit.trained for unit, _ in problem.outer)
    if decisions.halves and tables and "whole_tables" not in fixed:
        yield replace(decisions, whole_tables=not decisions.whole_tables)
    least = {"num_late": 1, "num_shared": 1} | ({"num_whole": 0} if decisions.halves else {})
    for name, lowest in least.items():
        number = getattr(decisions, name)
        for step in STEPS if number >= lowest and name not in fixed else ():
            if lowest <= number + step <= streamed:
                yield replace(decisions, **{name: number + step})


def _rated(seconds: float, decisions: Decisions) -> float:
    """Seconds, with a handicap for what is hard to foresee."""
    return seconds * (1 + LENDING_GAIN if decisions.num_shared else 1)


def _shared(
    model: CostModel, candidates: Iterable[tuple[Decisions, int]]
) -> Iterator[tuple[Decisions, int]]:
    """Candidates, with and without the device's help in updating."""
    problem = model.problem
    for decisions, rows in candidates:
        yield decisions, rows
        if not problem.may_update_on_device or problem.policy is UpdatePolicy.ON_DEVICE:
            continue
        streamed = len(problem.layers) - decisions.num_tail
        every = LENT_PIECES if problem.policy is UpdatePolicy.JUST_IN_TIME else AT_ONCE_PIECES
        for share in SHARES[1:]:
            number = int(share * streamed)
            for pieces in every if number else ():
                yield replace(decisions, num_shared=number, num_pieces=pieces), rows


def _late(
    model: CostModel, candidates: Iterable[tuple[Decisions, int]]
) -> Iterator[tuple[Decisions, int]]:
    """Candidates that leave some updates to the next step, also with all of them left."""
    every = len(model.problem.layers) + len(model.problem.outer)
    for decisions, rows in candidates:
        yield decisions, rows
        all_late = replace(decisions, num_late=every)
        if decisions.num_late and model.memory.fits_host(all_late, rows):
            yield all_late, rows


def _halved(
    model: CostModel, candidates: Iterable[tuple[Decisions, int]]
) -> Iterator[tuple[Decisions, int]]:
    """Candidates, with late updates at once and in two."""
    problem = model.problem
    tables = any(unit.looked_up and unit.trained for unit, _ in problem.outer)
    for decisions, rows in candidates:
        yield decisions, rows
        late = problem.policy is UpdatePolicy.JUST_IN_TIME or decisions.num_late
        if problem.has_halves and (late or (tables and not decisions.outer_state)):
            streamed = len(problem.layers) - decisions.num_tail if late else 0
            for number in sorted({int(share * streamed) for share in WHOLE}):
                yield replace(decisions, halves=True, num_whole=number), rows


def _distinct(ranked: list[tuple[Decisions, int]]) -> Iterator[tuple[Decisions, int]]:
    """The best candidates, a few of each kind: the formula that ranks them is rough."""
    seen: dict[tuple[float, ...], int] = {}
    for decisions, rows in ranked:
        kind = (
            rows,
            decisions.num_kept_cells,
            min(decisions.num_shared, 1),
            decisions.halves,
            decisions.num_whole,
            decisions.num_late,
        )
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= NUM_SIMULATED:
            yield decisions, rows


def _candidates(
    model: CostModel, budget_bytes: int, rows: int | None
) -> Iterator[tuple[Decisions, int]]:
    problem = model.problem
    most = max(1, min(problem.num_rows, MAX_TOKENS // problem.length))
    choices = [rows] if rows else sorted({1, most, *(2**i for i in range(12) if 2**i <= most)})
    for number in choices:
        tokens = number * problem.length
        pieces: list[int | None] = [None]
        if problem.may_cut_rows:
            smallest = 1 if problem.may_cut_positions else problem.length
            pieces += [size for size in PIECES if smallest <= size < tokens]
        many = _many_cells(model, number)
        cells = sorted({Decisions().num_cells, many if many <= MAX_CELLS else 0} - {0})
        num_fitting, start_piece = 0, pieces[0]
        for piece, shares, num_cells in product(pieces, (False, True), cells):
            start = Decisions(
                microbatch_tokens=tokens,
                piece_tokens=piece,
                shares_memory=shares,
                num_cells=max(num_cells, Decisions().num_cells),
            )
            if num_fitting >= MAX_PIECES and piece != start_piece:
                break  # smaller ones are only slower
            start_piece = piece
            num_fitting += model.memory.peak_bytes(start, number) <= budget_bytes * (1 - SLACK)
            yield from _tails(model, start, number, budget_bytes)


def _tails(
    model: CostModel, start: Decisions, rows: int, budget_bytes: int
) -> Iterator[tuple[Decisions, int]]:
    problem, limit = model.problem, budget_bytes * (1 - SLACK)
    yield model.with_late(start, rows), rows
    for keep, number in product(KEEPS[1:], KEPT_CELLS):
        kept = replace(start, keep=keep, num_kept_cells=number)
        if model.memory.may_keep(kept, rows) and model.memory.fits(kept, rows, limit):
            yield model.with_late(kept, rows), rows
    num_layers = len(problem.layers)
    for tail in range(1, num_layers + 1, max(1, num_layers // 32)):
        one = replace(start, num_tail=tail)
        if not model.memory.fits(one, rows, limit):
            return
        states = [0]
        if problem.may_update_on_device:
            most = model.memory.most_states(one, rows, limit)
            states = sorted({0, most, most // 2, most // 4})
        for number in states:
            two = replace(one, num_device_states=number)
            yield model.with_late(two, rows), rows
            whole = replace(two, outer_state=True)
            if number == tail == num_layers and model.memory.fits(whole, rows, limit):
                yield model.with_late(whole, rows), rows
            if tail < num_layers:
                kept = replace(two, keep=KEEPS[1], num_kept_cells=KEPT_CELLS[-1])
                if model.memory.may_keep(kept, rows) and model.memory.fits(kept, rows, limit):
                    yield model.with_late(kept, rows), rows


def _refusal(model: CostModel, budget_bytes: int, least: tuple[int, Decisions, int]) -> str:
    taken, decisions, rows = least
    lines = sorted(
        (line for line in model.memory.ledger(decisions, rows) if line.place == "device"),
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
