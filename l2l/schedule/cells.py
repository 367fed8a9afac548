"""Where boundary tensors are: in cells of the device, or on the host and back."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from l2l.schedule.lines import NOTHING, Action, action
from l2l.schedule.passes import SLOTS, SUMS, Pass, carried
from l2l.schedule.shape import Shape
from l2l.schedule.transfers import Draft


@dataclass(slots=True)
class _Cells:
    """A fixed number of cells, each with the value it holds.

    A new value takes the cell whose value is needed last, or not at all any more. Cells that the
    last passes have touched are left alone if others are there: what the next pass needs should
    arrive while the running one still works on its own cells.
    """

    values: OrderedDict[str, str | None]  # cell -> value, least recently used first
    touched: dict[str, int] = field(default_factory=dict)  # cell -> pass that used it last

    def find(self, value: str, now: int) -> str | None:
        """The cell that holds a value."""
        for cell, held in self.values.items():
            if held == value:
                self._touch(cell, now)
                return cell
        return None

    def take(
        self, value: str, *, busy: set[str], now: int, next_use: Callable[[str], float]
    ) -> tuple[str, str | None]:
        """A cell for a value, and the value that had it."""
        cells = [cell for cell in self.values if cell not in busy]
        rested = [cell for cell in cells if now - self.touched.get(cell, -RESTED - 1) > RESTED]
        cell = max(rested or cells, key=lambda one: next_use(self.values[one] or ""))
        held, self.values[cell] = self.values[cell], value
        self._touch(cell, now)
        return cell, held

    def _touch(self, cell: str, now: int) -> None:
        self.values.move_to_end(cell)
        self.touched[cell] = now


RESTED = 1  # passes
PASSES = frozenset(("forward", "loss", "backward"))


def add_stash(draft: Draft, shape: Shape) -> list[Action]:
    """Give every boundary value a cell; stash what loses its cell before its last use.

    When all are placed it is known which values lose their cell. Exactly those are stashed, as soon
    as they are written, so that the copy out is done long before the cell is reused. Gradients of
    looked-up rows (`x`) always leave: the host collects them. So do those of what the model is
    called with (`i`), and what the other side of the step reads.
    """
    placing = _Placing(draft, shape)
    left = carried(shape) if shape.side == "forward" else frozenset()
    return _ahead(placing.lines(left.union(placing.evicted)))


def _ahead(lines: Sequence[Action]) -> list[Action]:
    """Submit what a pass fetches before the pass that precedes it, if its cell is free by then.

    For the device that changes nothing. But the host may need as long to submit a pass as the
    device to run it, and copies should not come late for that. Rows that are looked up (`e`) wait
    for the host's own work, and whoever submits them may have to wait, too: they stay where they
    are.
    """
    found: list[Action] = []
    for line in lines:
        place = len(found)
        if line.kind == "fetch v m" and not line.value.startswith("e"):
            end = place
            while end and not _conflict(found[end - 1], line):
                end -= 1
                if found[end].verb in PASSES:
                    place = end
                    break
        found.insert(place, line)
    return found


def _conflict(one: Action, other: Action) -> bool:
    """Whether two lines must stay in their order: they are on one lane, or touch one place."""
    if one.lane is other.lane:
        return True
    mine = dict(one.accesses)
    return any(place in mine and (writes or mine[place]) for place, writes in other.accesses)


class _Placing:
    """Which cell every value has, from when to when."""

    def __init__(self, draft: Draft, shape: Shape) -> None:
        self.evicted: set[str] = set()
        self._lines: list[
            Action | tuple[str, str]
        ] = []  # also values just written, and their cells
        self._pools = {
            kind: _Cells(OrderedDict((f"{kind}{i}", None) for i in range(number)))
            for kind, number in (
                ("C", shape.num_cells),
                ("R", shape.num_recorded_cells),
                ("K", shape.num_kept_cells),
                ("P", shape.num_head_cells),
            )
        }
        self._uses = _find_uses(draft)
        self._now = 0  # passes placed so far
        self._busy: set[str] = set()
        self._written: dict[str, str] = {}
        for item in draft:
            if isinstance(item, Action):
                self._lines.append(item)
            else:
                self._place(*item)
                self._now += 1

    def lines(self, stashed: Collection[str]) -> list[Action]:
        """All lines; values that are stashed leave as soon as they are written."""
        return [
            one if isinstance(one, Action) else action(f"drain {one[0]} {one[1]}")
            for one in self._lines
            if isinstance(one, Action) or one[0] in stashed or one[0].startswith(("x", "i"))
        ]

    def _place(self, one: Pass, slot: str, gradient: str) -> None:
        """Write a pass with its cells: what it reads is brought first."""
        self._busy, self._written = set(), {}
        m = f"m{one.microbatch}"
        kinds = {operand.value: operand.kind for operand in one.values}
        cells = {NOTHING: NOTHING, SLOTS: slot, SUMS: gradient}
        cells |= {value: self._read(kinds[value], f"{value} {m}") for value in one.reads}
        for operand in one.values:
            if operand.written:
                cells[operand.value] = self._write(operand.kind, f"{operand.value} {m}")
        names = [one if isinstance(one, str) else one.value for one in one.operands]
        words = [one.verb, one.part, m, *(cells.get(name, name) for name in names)]
        self._lines.append(action(" ".join(filter(None, words))))
        self._lines += self._written.items()

    def _write(self, kind: str, value: str) -> str:
        cell = self._written[value] = self._take(kind, value)
        return cell

    def _read(self, kind: str, value: str) -> str:
        cell = self._pools[kind].find(value, self._now)
        if cell is None:
            cell = self._take(kind, value)
            self._lines.append(action(f"fetch {value} {cell}"))
        self._busy.add(cell)
        return cell

    def _take(self, kind: str, value: str) -> str:
        cell, held = self._pools[kind].take(
            value, busy=self._busy, now=self._now, next_use=self._next_use
        )
        if held is not None and self._next_use(held) < math.inf:
            self.evicted.add(held)
        self._busy.add(cell)
        return cell

    def _next_use(self, value: str) -> float:
        """The next pass, this one included, that has yet to read a value."""
        uses = self._uses.get(value, [])
        index = bisect_left(uses, self._now)
        return uses[index] if index < len(uses) else math.inf


def _find_uses(draft: Draft) -> dict[str, list[int]]:
    """Which passes read each value."""
    uses: dict[str, list[int]] = {}
    passes = [item[0] for item in draft if not isinstance(item, Action)]
    for number, one in enumerate(passes):
        for value in one.reads:
            uses.setdefault(f"{value} m{one.microbatch}", []).append(number)
    return uses
