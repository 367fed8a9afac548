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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, takewhile
from typing import Any

from l2l.device import format_bytes
from l2l.parameter_server import UpdatePolicy
from l2l.planner.cost_model import CostModel
from l2l.planner.decisions import STATE_ON_HOST, Decisions, LedgerLine
from l2l.planner.disk_tier import no_room
from l2l.planner.hardware import Hardware
from l2l.planner.problem import Problem
from l2l.schedule import NUM_LENT

MAX_TOKENS = 16384  # of a microbatch: more gain nothing
PIECES = (8192, 4096, 2048, 1024, 768, 512, 384, 256, 128)  # matrix products like 128s
KEEPS = (0.08, 0.16, 0.3)  # of what a layer makes
KEPT_CELLS = (2, 3)
SMALLER: Sequence[Mapping[str, Any]] = (  # for where nothing else fits
    {},
    {"num_gradient_slots": 1},
    {"num_slots": 1, "num_gradient_slots": 1},
    {"num_slots": 1, "num_gradient_slots": 1, "num_cells": 4},
)
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
EVEN = 1 + 1e-9  # of the seconds of another: as good
ON_DISK = {"num_on_disk", "num_weights_on_disk", "stash_values"}  # choices
SHARES = (0.2, 0.35, 0.5)  # of streamed layers that the device updates


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
    chosen: Mapping[str, Any] | None = None,
) -> Candidate:
    """The fastest choices that fit.

    Args:
        problem: what for.
        hardware: where.
        budget_bytes: of device memory.
        rows: of a microbatch; None: to be chosen.
        chosen: choices that are made already, but for the size of microbatches, by name.

    Raises:
        DoesNotFitError: nothing fits; says what the least is.
    """
    return _Search(CostModel(problem, hardware), budget_bytes, chosen or {}).run(rows)


class _Search:
    """Looks for the best choices."""

    def __init__(self, model: CostModel, budget_bytes: int, chosen: Mapping[str, Any]) -> None:
        self._model, self._memory, self._problem = model, model.memory, model.problem
        self._budget_bytes, self._limit = budget_bytes, budget_bytes * (1 - SLACK)
        self._chosen = {k: v for k, v in chosen.items() if k != "microbatch_tokens"}
        self._has_tables = any(one.looked_up and one.trained for one, _ in model.problem.outer)
        self._num_simulated = 0

    def run(self, rows: int | None) -> Candidate:
        """The best, and what is better still with single choices made otherwise."""
        ranked = [other for one in self._fitting(rows) for other in self._updated(one)]
        best = self._simulated(sorted(ranked, key=self._model.estimate))
        best = self._better(best, self._shorter(best.decisions))
        for name in ("num_late", "num_whole"):
            best = self._better(best, self._fewer(best.decisions, name))
        climbed, most = None, self._num_simulated + MAX_CLIMBED
        while best.bound == "host" and best is not climbed:
            # A step is as long as the host's work and its pauses then; which updates fill the
            # pauses is a matter of single layers.
            climbed, near = best, self._neighbours(best.decisions)
            near = takewhile(lambda _: self._num_simulated < most, near)
            best = self._better(best, near, 1 - MIN_GAIN)
        # Simulated, copies that nothing waits for are free. But the host has to submit them, and
        # they take a share of its memory's rate.
        return self._better(best, self._roomier(best.decisions), EVEN)

    def _fits(self, decisions: Decisions) -> bool:
        return self._memory.peak_bytes(decisions) <= self._limit

    def _simulate(self, decisions: Decisions) -> Candidate:
        self._num_simulated += 1
        simulation = self._model.simulate(decisions)
        return Candidate(
            decisions=decisions,
            rows=decisions.rows(self._problem),
            ledger=self._memory.ledger(decisions),
            seconds=simulation.seconds,
            bound=simulation.bound,
        )

    def _better(
        self, best: Candidate, others: Iterable[Decisions], enough: float = 1.0
    ) -> Candidate:
        """The best so far, or one of others that takes less than enough of its time."""
        for other in map(self._placed, others):
            if self._fits(other) and self._memory.fits_host(other):
                found = self._simulate(other)
                best = found if found.seconds < enough * best.seconds else best
        return best

    # ----------------------------------------------------------------------------------------------
    # Candidates

    def _fitting(self, rows: int | None) -> list[Decisions]:
        """Candidates that fit, the best of them by the formula."""
        fitting: dict[Decisions, float] = {}
        overfull: dict[Decisions, float] = {}  # the host has no room: will be refused
        least: tuple[int, Decisions] | None = None
        for candidate in self._candidates(rows):
            decisions = self._placed(self._model.with_late(self._placed(candidate)))
            if decisions.num_device_states > decisions.num_tail or decisions.is_refused:
                continue  # the user has chosen something else with it
            if self._problem.needs_slices and not decisions.num_head_slices:
                continue
            taken = self._memory.peak_bytes(decisions)
            if least is None or taken < least[0]:
                least = (taken, decisions)
            found = fitting if self._memory.fits_host(decisions) else overfull
            if taken <= self._limit and decisions not in found:
                found[decisions] = self._model.estimate(decisions)
        if not fitting and self._problem.disk is not None:
            self._refuse_disk(overfull)
        fitting = fitting or overfull
        if not fitting:
            assert least is not None
            raise DoesNotFitError(self._refusal(*least))
        return sorted(fitting, key=fitting.__getitem__)[:NUM_RANKED]

    def _placed(self, decisions: Decisions) -> Decisions:
        """The same with what is chosen, and with as much on disk as is needed for that."""
        chosen = replace(decisions, **self._chosen)
        if self._problem.updates_wholes and not {*STATE_ON_HOST} & self._chosen.keys():
            tail = chosen.num_tail
            number = len(self._problem.layers) - tail
            chosen = replace(chosen, num_shared=number, num_device_states=tail)
        return chosen if ON_DISK & {*self._chosen} else self._memory.with_disk(chosen)

    def _candidates(self, rows: int | None) -> Iterator[Decisions]:
        problem, default = self._problem, Decisions().num_cells
        most = max(1, min(problem.num_rows, MAX_TOKENS // problem.length))
        numbers = [rows] if rows else sorted({1, most, *(2**i for i in range(12) if 2**i <= most)})
        for number in numbers:
            start = Decisions(
                microbatch_tokens=number * problem.length, tile_tokens=problem.tile_tokens
            )
            pieces: list[int | None] = [None]
            if problem.may_cut_rows:
                smallest = 1 if problem.may_cut_positions else problem.length
                pieces += [one for one in PIECES if smallest <= one < start.microbatch_tokens]
            many = self._many_cells(start)
            cells = sorted({default, many}) if many <= MAX_CELLS else [default]
            cells = [max(default, number) for number in cells]
            num_fitting = 0
            for piece in pieces:
                if num_fitting >= MAX_PIECES:
                    break  # smaller ones are only slower
                for shares, cell in product((False, True), cells):
                    one = replace(start, piece_tokens=piece, shares_memory=shares, num_cells=cell)
                    num_fitting += self._fits(one)
                    yield from self._tails(one)
            yield from self._sliced(start, cells)
            if rows is None and number % 4 == 0:  # where every byte counts, sizes between, too
                between = replace(start, microbatch_tokens=number * 3 // 4 * problem.length)
                yield from self._sliced(between, cells)

    def _sliced(self, start: Decisions, cells: Iterable[int]) -> Iterator[Decisions]:
        """The same with a head in slices, also with as little as a step can do with."""
        for number, cell in product(self._slices(), cells):
            one = replace(start, num_head_slices=number, num_cells=cell)
            for smaller in (replace(one, **choices) for choices in SMALLER):
                yield smaller
                yield from self._keeping(smaller, product(KEEPS, KEPT_CELLS))

    def _slices(self) -> list[int]:
        """Numbers of slices of the head: as large as layers, and smaller."""
        head = self._problem.head
        if head is None:
            return []
        largest = max(unit.weight_bytes for unit in self._problem.layers)
        fewest = max(2, math.ceil(head.weight_bytes / largest))
        found = [one for one in (fewest, 2 * fewest) if one <= head.num_rows]
        return [1, *found] if self._problem.needs_slices else found

    def _many_cells(self, decisions: Decisions) -> int:
        """Cells in which the hidden states of all microbatches stay for a while."""
        return decisions.num_microbatches(self._problem) + 2

    def _tails(self, start: Decisions) -> Iterator[Decisions]:
        """The same with tails of any length, and with kept results."""
        yield start
        yield from self._keeping(start, product(KEEPS, KEPT_CELLS))
        num_layers = len(self._problem.layers)
        most = 0 if self._problem.joint else self._problem.route.max_tail
        for tail in range(1, most + 1, max(1, num_layers // 32)):
            one = replace(start, num_tail=tail)
            if not self._fits(one):
                return
            states = {0}
            if self._problem.may_update_on_device:
                most = self._memory.most_states(one, self._limit)
                states |= {most, most // 2, most // 4}
            for number in sorted(states):
                two = replace(one, num_device_states=number)
                yield two
                whole = replace(two, outer_state=True)
                if number == tail == num_layers and self._fits(whole):
                    yield whole
                if tail < num_layers:
                    yield from self._keeping(two, [(KEEPS[0], KEPT_CELLS[-1])])

    def _keeping(
        self, start: Decisions, choices: Iterable[tuple[float, int]]
    ) -> Iterator[Decisions]:
        """The same with kept results, where device and host have room for them."""
        for keep, number in choices if self._problem.may_keep else ():
            kept = self._placed(replace(start, keep=keep, num_kept_cells=number))
            if self._memory.fits_host(kept) and self._fits(kept):
                yield kept

    def _updated(self, start: Decisions) -> Iterator[Decisions]:
        """The same with other ways to update."""
        for shared in self._shared(start):
            for late in self._late(shared):
                yield from self._halved(late)

    def _shared(self, start: Decisions) -> Iterator[Decisions]:
        """The same, with and without the device's help in updating."""
        yield start
        problem = self._problem
        helps = problem.may_update_on_device and problem.policy is not UpdatePolicy.ON_DEVICE
        pieces = LENT_PIECES if problem.policy is UpdatePolicy.JUST_IN_TIME else AT_ONCE_PIECES
        streamed = len(problem.layers) - start.num_tail
        shares = (1.0,) if problem.updates_wholes else SHARES
        for share in shares if helps and "num_shared" not in self._chosen else ():
            number = int(share * streamed)
            for num_pieces in pieces if number else ():
                other = replace(start, num_shared=number, num_pieces=num_pieces)
                other = self._placed(other)  # what is lent is not on disk
                if self._fits(other) and self._memory.fits_host(other):
                    yield other

    def _late(self, start: Decisions) -> Iterator[Decisions]:
        """The same; also with all updates left to the next step, if some are."""
        yield start
        every = len(self._problem.layers) + len(self._problem.outer)
        all_late = self._placed(replace(start, num_late=every))
        if start.num_late and "num_late" not in self._chosen and self._memory.fits_host(all_late):
            yield all_late

    def _halved(self, start: Decisions) -> Iterator[Decisions]:
        """The same, with late updates at once and in two."""
        yield start
        problem = self._problem
        if "halves" in self._chosen or not problem.has_halves:
            return
        late = problem.policy is UpdatePolicy.JUST_IN_TIME or start.num_late
        if late or (self._has_tables and not start.outer_state):
            streamed = len(problem.layers) - start.num_tail if late else 0
            for number in sorted({int(share * streamed) for share in WHOLE}):
                yield replace(start, halves=True, num_whole=number)

    def _simulated(self, ranked: list[Decisions]) -> Candidate:
        """The best of candidates, by simulation; those that can hardly be it are not simulated.

        A few of each kind: the formula that ranks them is rough.
        """
        best, least, num_in_vain = None, math.inf, 0
        seen: Counter[tuple[float, ...]] = Counter()
        for one in ranked:
            shares = one.num_shared > 0
            updates = (shares, one.halves, one.num_whole, one.num_late)
            kind = (one.microbatch_tokens, one.num_kept_cells, *updates)
            seen[kind] += 1
            is_known = seen[kind] > NUM_SIMULATED or self._num_simulated == MAX_SIMULATED
            handicap = 1 + LENDING_GAIN if shares else 1  # for what is hard to foresee
            if is_known or CERTAIN * self._model.estimate(one) * handicap > least:
                continue
            if best is not None and best.bound == "compute" and num_in_vain == MAX_IN_VAIN:
                break  # how updates are done hardly matters then
            found = self._simulate(one)
            rated = found.seconds * handicap
            num_in_vain = 0 if rated < (1 - MIN_GAIN) * least else num_in_vain + 1
            if rated < least:
                best, least = found, rated
        assert best is not None
        return best

    # ----------------------------------------------------------------------------------------------
    # What may be better still

    def _shorter(self, start: Decisions) -> Iterator[Decisions]:
        """Shorter tails.

        What a tail saves is certain; what its weights and gradients hold up in the middle of a step
        is not in the formula.
        """
        fixed = start.outer_state or {"num_tail", "num_device_states"} & self._chosen.keys()
        for number in () if fixed else (int(share * start.num_tail) for share in TAILS):
            if number not in (0, start.num_tail):
                states = min(number, start.num_device_states)
                yield replace(start, num_tail=number, num_device_states=states)

    def _fewer(self, start: Decisions, name: str) -> Iterator[Decisions]:
        """Other numbers of late or of whole updates.

        How many are best depends on when the host would be idle, which no formula knows.
        """
        most = start.num_late
        if name == "num_whole":
            is_some = start.halves and start.num_whole
            most = len(self._problem.layers) - start.num_tail if is_some else 0
        numbers = {int(share * most) for share in REFINED} - {getattr(start, name), 0}
        for number in sorted(numbers if name not in self._chosen else (), reverse=True):
            yield start.override({name: number})

    def _neighbours(self, start: Decisions) -> Iterator[Decisions]:
        """Choices that differ from others in one, as far as that makes sense."""
        fixed, streamed = self._chosen.keys(), len(self._problem.layers) - start.num_tail
        if self._problem.has_halves and not fixed & {"halves", "num_whole"}:  # of tables, or none
            yield replace(start, halves=not start.halves, num_whole=streamed)
        least = {"num_late": 1, "num_shared": 1} | ({"num_whole": 0} if start.halves else {})
        if self._problem.updates_wholes:
            least = {"num_late": 1}
        for name, lowest in least.items():
            number = getattr(start, name)
            for step in STEPS if number >= lowest and name not in fixed else ():
                if lowest <= number + step <= streamed:
                    yield start.override({name: number + step})

    def _roomier(self, start: Decisions) -> Iterator[Decisions]:
        """Hidden states that stay between layers, where there is room left for them."""
        number, streams = self._many_cells(start), start.num_tail < len(self._problem.layers)
        if "num_cells" not in self._chosen and streams and start.num_cells < number <= MAX_CELLS:
            yield replace(start, num_cells=number)

    def _refuse_disk(self, overfull: Iterable[Decisions]) -> None:
        """Refuse a disk that is too small for what the host has no room for."""
        disk, memory = self._problem.disk, self._memory
        least = min(overfull, key=memory.host_bytes, default=None)
        needed = 0 if least is None else memory.all_disk_bytes(least)
        if disk is not None and needed > disk.size_bytes:
            raise DoesNotFitError(no_room(needed, disk.size_bytes))

    def _refusal(self, taken: int, least: Decisions) -> str:
        lines = [line for line in self._memory.ledger(least) if line.place == "device"]
        lines.sort(key=lambda line: -line.nbytes)
        largest = ", ".join(f"{line.purpose} {format_bytes(line.nbytes)}" for line in lines[:4])
        needed = int(taken / (1 - SLACK)) + 1
        return (
            f"the step needs {format_bytes(needed)} of device memory, found a budget of "
            f"{format_bytes(self._budget_bytes)}. The least was found with microbatches of "
            f"{least.rows(self._problem)} row(s) of {self._problem.length} positions; most of it: "
            f"{largest}. Give device_memory='{math.ceil(needed / 2**20)}MiB' or more, or shorter "
            "rows."
        )
