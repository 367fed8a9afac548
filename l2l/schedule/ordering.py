"""Which line must come before which: happens-before over lanes, and the waits that make it so.

[Note: steps] A step begins when the one before has ended on every lane but the update lane and
those of the disk (`LASTING`), which go on in the order of their lines. So of earlier steps only a
few things need a wait, and these are lines as well:

    fetch waits last L0       the host may still update the layer that is fetched
    drain waits last H0       the host may still read the staging that is written
    update waits last drain   gradients, and their norms, that late updates are made of
    read waits last B0        a buffer that may still be written to the disk
    read waits last L0.state  a unit's state that may still be written there, from another buffer
    read waits last fetch     weights may still be copied from the buffer that is to be read into

An earlier step may have had other layers or another number of microbatches. So nothing is assumed
of it: a lane knows what the host did in earlier steps once it knows of any line of that lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from l2l.schedule.lines import LASTING, LEFT, Action, Lane, Line, Wait, WaitLast


@dataclass(slots=True, eq=False)
class Done:
    """An action that was performed."""

    action: Action
    lane: int  # its number
    position: int  # on its lane, from 1
    clock: tuple[int, ...]
    """For each lane, the last position that was known to be done by then."""
    earlier: frozenset[str]
    """What of earlier steps was known to be done by then."""


NOBODY: Final[Mapping[int, Done]] = MappingProxyType({})


@dataclass(slots=True)
class Orders:
    """Which line of each lane every lane knows to be done: happens-before, as vector clocks."""

    updated: frozenset[str]
    """Units that the host may have updated in an earlier step."""
    known: list[list[int]] = field(default_factory=lambda: [[0] * len(Lane) for _ in Lane])
    earlier: list[frozenset[str]] = field(default_factory=lambda: [frozenset[str]() for _ in Lane])
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
        for place, writes in action.accesses:
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

    def missing_last(self, action: Action) -> list[str]:
        """What of earlier steps must be done before this one and is not known to be."""
        number, known = action.lane.number, self.known[action.lane.number]
        what, is_known = tuple[str, ...](), known[Lane.UPDATE.number] > 0
        goes_on = action.kind == "collect U" and action.places[0] not in self.writer
        if action.kind in LEFT or goes_on:
            # Whatever these lanes do in this step, they do after all drains of earlier ones.
            what = ("drain",)
            is_known = any(known[lane.number] for lane in Lane if lane not in LASTING)
        elif action.kind in ("fetch U", "fetch U:p") and action.unit in self.updated:
            # Weights from a buffer were read in this step, once the host had written them.
            what = (action.unit,) if len(action.places) == 1 else ()
        elif action.kind in ("drain U.grad", "drain U.grad:p"):
            what = (action.places[1],)
        elif action.lane is Lane.READ and action.unit:
            part, (buffer,), is_known = action.text.split()[1], action.places, False
            if known[Lane.WRITE.number] == 0:
                what = (buffer, part) if action.unit in self.updated else (buffer,)
            if part.endswith(".weights") and known[Lane.FETCH.number] == 0:
                what += ("fetch",)
        return [] if is_known else [one for one in what if one not in self.earlier[number]]

    def wait(self, wait: Wait | WaitLast) -> None:
        """A lane learns what the action it waits for knew when it was done."""
        number = wait.lane.number
        if isinstance(wait, WaitLast):
            self.earlier[number] |= {wait.what}
            return
        done = self.done[wait.action]
        self.known[number] = list(map(max, self.known[number], done.clock))
        self.earlier[number] |= done.earlier

    def perform(self, action: Action) -> None:
        """An action is done on its lane."""
        lane = action.lane.number
        clock = self.known[lane]
        clock[lane] += 1
        done = Done(action, lane, clock[lane], tuple(clock), self.earlier[lane])
        self.done[action] = done
        for place, writes in action.accesses:
            if writes:
                self.writer[place] = done
                self.readers.pop(place, None)
            else:
                readers = self.readers.setdefault(place, {})
                readers.pop(lane, None)  # the new one comes last
                readers[lane] = done


def add_waits(actions: Sequence[Action], *, updated: frozenset[str]) -> list[Line]:
    """Insert the waits that order conflicting lines, none that another already implies.

    Args:
        actions: the lines.
        updated: units that the host may have updated in an earlier step.
    """
    orders, lines = Orders(updated), list[Line]()

    def wait(one: Wait | WaitLast) -> None:
        orders.wait(one)
        lines.append(one)

    for action in actions:
        for earlier in orders.missing(action):
            wait(Wait(action.lane, earlier))
        for last in orders.missing_last(action):
            wait(WaitLast(action.lane, last))
        orders.perform(action)
        lines.append(action)
    return lines
