"""Which line must come before which: happens-before over lanes, and the waits that make it so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from l2l.schedule.lines import Action, Lane, Line, Wait


@dataclass(slots=True, eq=False)
class Done:
    """An action that was performed."""

    action: Action
    lane: int  # its number
    position: int  # on its lane, from 1
    clock: tuple[int, ...]
    """For each lane, the last position that was known to be done by then."""


NOBODY: Final[Mapping[int, Done]] = MappingProxyType({})


@dataclass(slots=True)
class Orders:
    """Which line of each lane every lane knows to be done: happens-before, as vector clocks."""

    known: list[list[int]] = field(default_factory=lambda: [[0] * len(Lane) for _ in Lane])
    done: dict[Action, Done] = field(default_factory=dict)
    writer: dict[str, Done] = field(default_factory=dict)
    readers: dict[str, dict[int, Done]] = field(default_factory=dict)
    """Since the last writer; of each lane the last, which is done after the others of its lane."""

    def missing(self, action: Action) -> list[Action]:
        """Earlier actions that must be done before this one and are not known to be, fewest first.

        An action that is known done once another of them is done is left out.
        """
        mine = self.known[action.lane.number]
        unknown: list[Done] = []
        for place, writes in action.accesses():
            one = self.writer.get(place)
            if one is not None and one.position > mine[one.lane] and one not in unknown:
                unknown.append(one)
            if writes:
                for one in self.readers.get(place, NOBODY).values():
                    if one.position > mine[one.lane] and one not in unknown:
                        unknown.append(one)
        return [
            one.action
            for one in unknown
            if not any(b.clock[one.lane] >= one.position for b in unknown if b is not one)
        ]

    def wait(self, wait: Wait) -> None:
        """A lane learns what the action it waits for knew when it was done."""
        number = wait.lane.number
        self.known[number] = list(map(max, self.known[number], self.done[wait.action].clock))

    def perform(self, action: Action) -> None:
        """An action is done on its lane."""
        lane = action.lane.number
        clock = self.known[lane]
        clock[lane] += 1
        done = self.done[action] = Done(action, lane, clock[lane], tuple(clock))
        for place, writes in action.accesses():
            if writes:
                self.writer[place] = done
                self.readers.pop(place, None)
            else:
                readers = self.readers.setdefault(place, {})
                readers.pop(lane, None)  # the new one comes last
                readers[lane] = done


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
