"""What is on disk: read into host buffers ahead of its use, written behind it ([Note: disk])."""

from __future__ import annotations

import math
from functools import partial

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
    after is read once, and so are those at the turn from forward to backward. Room is made by
    weights that are needed again last, or never in this step.
    """
    behind: Lines = {}
    uses = _about(draft, shape.weights_on_disk)
    last_use = dict.fromkeys((f"D{i}" for i in range(shape.num_weight_buffers)), -1)
    held: dict[str, str] = {}  # buffer -> unit
    updated: set[str] = set()  # buffers
    ready = -1

    def idle(position: int, buffer: str) -> tuple[float, int]:
        """When what is there is needed again, and for how long it was not."""
        later = (i for i, one in uses.items() if i > position and one.unit == held.get(buffer))
        return next(later, math.inf), -last_use[buffer]

    def leave(buffer: str) -> None:
        if buffer in updated:
            updated.discard(buffer)
            line = action(f"drain {held[buffer]}.weights {buffer}")
            behind.setdefault(last_use[buffer], []).append(line)

    for position, line in uses.items():
        buffer = next((place for place, unit in held.items() if unit == line.unit), "")
        if not buffer:
            buffer = max(last_use, key=partial(idle, position))
            leave(buffer)
            held[buffer], ready = line.unit, max(ready, last_use[buffer])
            read = action(f"fetch {line.unit}.weights {buffer}")
            behind.setdefault(ready, []).append(read)
        if line.verb == "update":
            updated.add(buffer)
        nothing = line.verb == "update" and len(line.places) == 1  # no state on disk
        draft[position] = _with_place(line, f"{NOTHING} {buffer}" if nothing else buffer)
        last_use[buffer] = position
    for buffer in last_use:
        leave(buffer)
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
