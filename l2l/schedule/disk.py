"""Optimizer state on disk: read into host buffers ahead of updates, written behind them."""

from __future__ import annotations

from l2l.schedule.lines import Action, action
from l2l.schedule.shape import Shape
from l2l.schedule.transfers import Draft


def add_disk(draft: Draft, shape: Shape) -> Draft:
    """Let every update of a unit on disk have its state in a buffer ([Note: disk]).

    Buffers are used in turns. A unit is read as soon as there is a buffer for it, which may be long
    before its update; if it has been updated earlier in this step, then once that is written.
    """
    updates = [
        (position, line)
        for position, line in enumerate(draft)
        if isinstance(line, Action) and line.verb == "update" and line.unit in shape.on_disk
    ]
    behind: dict[int, list[Action]] = {-1: []}  # what comes after which line
    written: dict[str, int] = {}  # unit -> after which line
    ready, number = -1, shape.num_disk_buffers
    for index, (position, line) in enumerate(updates):
        state, buffer = f"{line.unit}.state", f"B{index % number}"
        freed = updates[index - number][0] if index >= number else -1
        ready = max(ready, freed, written.get(line.unit, -1))
        behind[ready].append(action(f"fetch {state} {buffer}"))
        behind[position] = [action(f"drain {state} {buffer}")]
        written[line.unit] = position
        draft[position] = _with_place(line, buffer)
    found: Draft = [*behind[-1]]
    for position, item in enumerate(draft):
        found += [item, *behind.get(position, ())]
    return found


def _with_place(line: Action, buffer: str) -> Action:
    """The same line with one more place."""
    place = line.places[0]
    return action(line.text.replace(f" {place}", f" {place} {buffer}"))
