"""What is on disk: read into host buffers ahead of its use, written behind it ([Note: disk])."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from l2l.schedule.lines import NOTHING, Action, action
from l2l.schedule.shape import Shape
from l2l.schedule.transfers import Draft

Lines = dict[int, list[Action]]  # what comes behind which line; -1: before all


def add_disk(draft: Draft, shape: Shape) -> Draft:
    """Let every line have what it needs of units on disk in a buffer."""
    if shape.on_disk:
        draft = _merged(draft, _state_lines(draft, shape))
    if shape.weights_on_disk:
        draft = _merged(draft, _weight_lines(draft, shape))
    return draft


def spill(lines: Sequence[Action], num_buffers: int) -> list[Action]:
    """Let boundary tensors that leave the device go to few buffers, and on to disk from there.

    Which ones do is known once all have been given a buffer; those are written as soon as they are
    in theirs, so that nobody waits for it later.
    """
    if not num_buffers:
        return list(lines)
    uses = {i: line for i, line in enumerate(lines) if _is_boundary(line)}
    buffers = _Buffers("E", num_buffers, {i: line.value for i, line in uses.items()})
    behind: Lines = {}
    changed: Draft = [*lines]
    spilled, at = set[str](), dict[str, tuple[int, str]]()  # value -> where it was put, and when
    for position, line in uses.items():
        value, part = line.value, _on_disk(line)
        buffer, gone = buffers.find(value), None
        if buffer is None:
            buffer, gone, ready = buffers.take(value, position)
            if line.verb == "fetch":
                behind.setdefault(ready, []).append(action(f"fetch {part} {buffer}"))
        if gone is not None and buffers.is_needed(gone, position):
            spilled.add(gone)
        if line.verb == "drain":
            at[value] = position, buffer
        changed[position] = _with_place(line, buffer)
        buffers.use(buffer, position)
    for value, (position, buffer) in at.items():
        if value in spilled:
            name = _on_disk(uses[position])
            behind.setdefault(position, []).insert(0, action(f"drain {name} {buffer}"))
    return [one for one in _merged(changed, behind) if isinstance(one, Action)]


def _is_boundary(line: Action) -> bool:
    """Whether a line copies a hidden state to or from the host, or a gradient of one."""
    return line.kind in ("drain v m", "fetch v m") and line.value[0] in "hg"


def _on_disk(line: Action) -> str:
    """What a boundary tensor is called there."""
    name, m = line.value.split()
    return f"{name}.stash {m}"


class _Buffers:
    """Which buffer has what, as long as nobody needs the buffer more.

    Room is made by what is needed again last, or never; of such, by what was used first.
    """

    def __init__(self, letter: str, number: int, uses: Mapping[int, str]) -> None:
        """`uses`: what is needed where in the text."""
        self._last = dict.fromkeys((f"{letter}{i}" for i in range(number)), -1)
        self._held: dict[str, str] = {}  # by buffer
        self._place: dict[str, str] = {}  # the same the other way round
        self._ready = -1
        self._uses: dict[str, list[int]] = {}
        for position, what in uses.items():
            self._uses.setdefault(what, []).append(position)

    def find(self, what: str) -> str | None:
        """The buffer that has something."""
        return self._place.get(what)

    def take(self, what: str, position: int) -> tuple[str, str | None, int]:
        """A buffer for something, what was there, and the line after which it may be read into.

        Reads come in the order of the text, so none is ready before the one before it.
        """

        def idle(buffer: str) -> tuple[float, int]:
            return self._next_use(self._held.get(buffer, ""), position), -self._last[buffer]

        buffer = max(self._last, key=idle)
        gone = self._held.get(buffer)
        if gone is not None:
            del self._place[gone]
        self._held[buffer], self._place[what] = what, buffer
        self._ready = max(self._ready, self._last[buffer])
        return buffer, gone, self._ready

    def use(self, buffer: str, position: int) -> None:
        """A line needs what is there."""
        self._last[buffer] = position

    def last_use(self, buffer: str) -> int:
        """The last line that did."""
        return self._last[buffer]

    def is_needed(self, what: str, position: int) -> bool:
        """Whether something is needed again."""
        return self._next_use(what, position) < math.inf

    def _next_use(self, what: str, position: int) -> float:
        uses = self._uses.get(what, [])
        index = bisect_right(uses, position)
        return uses[index] if index < len(uses) else math.inf


def _state_lines(draft: Draft, shape: Shape) -> Lines:
    """Reads and writes of optimizer state around updates, which get a buffer.

    Buffers are used in turns. A unit is read as soon as there is a buffer for it, which may be long
    before its update; if it has been updated earlier in this step, then once that is written.
    """
    updates = [(i, one) for i, one in _about(draft, shape.on_disk).items() if one.verb == "update"]
    behind: Lines = {}
    written: dict[str, int] = {}  # unit -> after which line
    ready, number = -1, shape.num_disk_buffers
    for index, (position, line) in enumerate(updates):
        state, buffer = f"{line.unit}.state", f"B{index % number}"
        freed = updates[index - number][0] if index >= number else -1
        ready = max(ready, freed, written.get(line.unit, -1))
        behind.setdefault(ready, []).append(action(f"fetch {state} {buffer}"))
        behind[position] = [action(f"drain {state} {buffer}")]
        written[line.unit] = position
        draft[position] = _with_place(line, buffer)
    return behind


def _weight_lines(draft: Draft, shape: Shape) -> Lines:
    """Reads of weights ahead of fetches and updates; writes of what was updated, at the end.

    Weights stay in their buffer until others need it, so a layer that is fetched and updated soon
    after is read once, and so are those at the turn from forward to backward.
    """
    behind: Lines = {}
    uses = _about(draft, shape.weights_on_disk)
    buffers = _Buffers("D", shape.num_weight_buffers, {i: one.unit for i, one in uses.items()})
    updated: dict[str, str] = {}  # unit -> its buffer

    def write(unit: str) -> None:
        buffer = updated.pop(unit)
        line = action(f"drain {unit}.weights {buffer}")
        behind.setdefault(buffers.last_use(buffer), []).append(line)

    for position, line in uses.items():
        buffer = buffers.find(line.unit)
        if buffer is None:
            buffer, gone, ready = buffers.take(line.unit, position)
            if gone in updated:
                write(gone)
            read = action(f"fetch {line.unit}.weights {buffer}")
            behind.setdefault(ready, []).append(read)
        if line.verb == "update":
            updated[line.unit] = buffer
        nothing = line.verb == "update" and len(line.places) == 1  # no state on disk
        draft[position] = _with_place(line, f"{NOTHING} {buffer}" if nothing else buffer)
        buffers.use(buffer, position)
    for unit in [*updated]:
        write(unit)
    return behind


def _about(draft: Draft, units: frozenset[str]) -> dict[int, Action]:
    """Lines that need something of units on disk, by position."""
    return {
        position: line
        for position, line in enumerate(draft)
        if isinstance(line, Action)
        and line.unit in units
        and (line.verb == "update" or line.kind == "fetch U")
    }


def _merged(draft: Draft, behind: Lines) -> Draft:
    """A draft with further lines."""
    found: Draft = [*behind.get(-1, ())]
    for position, item in enumerate(draft):
        found += [item, *behind.get(position, ())]
    return found


def _with_place(line: Action, place: str) -> Action:
    """The same line with one more place, behind the others."""
    last = line.places[-1]
    before, _, flags = line.text.rpartition(f" {last}")
    return action(f"{before} {last} {place}{flags}")
