"""Which line must come before which: happens-before over lanes, and the waits that make it so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from l2l.schedule.lines import Action, Lane, Line, Wait


@dataclass(slots=True)
class Orders:
    """Which line of each lane every lane knows to be done: happens-before, as vector clocks."""

    known: dict[Lane, dict[Lane, int]] = field(
        default_factory=lambda: {lane: dict.fromkeys(Lane, 0) for lane in Lane}
    )
    done: dict[Action, tuple[Lane, int, dict[Lane, int]]] = field(default_factory=dict)
    writer: dict[str, Action] = field(default_factory=dict)
    readers: dict[str, list[Action]] = field(default_factory=dict)

    def missing(self, action: Action) -> list[Action]:
        """Earlier actions that must be done before this one and are not known to be, fewest first.

        An action that is known done once another of them is done is left out.
        """
        required: dict[Action, None] = {}
        for place, writes in action.accesses():
            if place in self.writer:
                required[self.writer[place]] = None
            if writes:
                required.update(dict.fromkeys(self.readers.get(place, [])))
        mine = self.known[action.lane]
        unknown = [a for a in required if self.done[a][1] > mine[self.done[a][0]]]
        unknown = [a for a in unknown if a.lane is not action.lane]
        return [a for a in unknown if not any(self._implies(b, a) for b in unknown if b != a)]

    def _implies(self, later: Action, earlier: Action) -> bool:
        lane, position, _ = self.done[earlier]
        return self.done[later][2][lane] >= position

    def wait(self, wait: Wait) -> None:
        """A lane learns what the action it waits for knew when it was done."""
        mine, theirs = self.known[wait.lane], self.done[wait.action][2]
        for lane in Lane:
            mine[lane] = max(mine[lane], theirs[lane])

    def perform(self, action: Action) -> None:
        """An action is done on its lane."""
        clock = self.known[action.lane]
        clock[action.lane] += 1
        self.done[action] = (action.lane, clock[action.lane], dict(clock))
        for place, writes in action.accesses():
            if writes:
                self.writer[place] = action
                self.readers[place] = []
            else:
                self.readers.setdefault(place, []).append(action)


def add_waits(actions: Sequence[Action]) -> list[Line]:
    """Insert the waits that order conflicting lines, none that another already implies."""
    orders, lines = Orders(), list[Line]()
    for action in actions:
        for earlier in orders.missing(action):
            wait = Wait(action.lane, earlier)
            orders.wait(wait)
            lines.append(wait)
        orders.perform(action)
        lines.append(action)
    return lines
