"""The vocabulary of schedules: lanes, verbs, and the two kinds of line, as text and as data."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

OUTER: Final = "O"
NOTHING: Final = "-"
MOST_REMEMBERED: Final = 2**14  # actions, by what they touch


class Lane(enum.Enum):
    """What runs in order with itself and at the same time as the others."""

    COMPUTE = "compute"
    """The device computes."""
    FETCH = "fetch"
    """Weights, host to device."""
    DRAIN = "drain"
    """Gradients and losses, device to host."""
    STASH = "stash"
    """Boundary tensors out of the device's cells; never queues behind a drain."""
    UNSTASH = "unstash"
    """Boundary tensors back into cells; never queues behind a weight fetch."""
    UPDATE = "update"
    """The host optimizer."""
    LEND = "lend"
    """Optimizer state, host to device, for updates there."""
    REWORK = "rework"
    """Updates on the device, beside what it computes."""
    GATHER = "gather"
    """Weights that other ranks hold, device to device."""
    REDUCE = "reduce"
    """Gradients and losses, summed over ranks."""

    def __init__(self, _: object) -> None:
        self.number: Final[int] = len(type(self).__members__)  # from 0, as listed here


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """Lane and operands of a kind of line.

    `operands` has one word per operand: the leading letters it may have, then `<` if the line reads
    that place, `>` if it writes it, nothing if the operand is only a name. An operand may be some
    places, parted by commas. `also` lists the places the line touches without naming them.
    """

    lane: Lane
    operands: tuple[str, ...]
    also: tuple[str, ...] = ()


VERBS: Final[Mapping[str, Verb]] = {
    "take": Verb(lane=Lane.COMPUTE, operands=("SGW>",)),
    "drop": Verb(lane=Lane.COMPUTE, operands=("SGW>",)),
    "fetch": Verb(lane=Lane.FETCH, operands=("LOT", "S>")),
    "gather": Verb(lane=Lane.GATHER, operands=("LOT", "S>")),
    "release": Verb(lane=Lane.COMPUTE, operands=("LOT", "S>")),
    "refresh": Verb(lane=Lane.UPDATE, operands=("T", "m", "H<")),
    "lookup": Verb(lane=Lane.UPDATE, operands=("m",)),
    "prologue": Verb(lane=Lane.COMPUTE, operands=("m", "S<", "R>", "C<", "C>")),
    "forward": Verb(lane=Lane.COMPUTE, operands=("L", "m", "S<", "R<", "C<", "C>", "K>")),
    "score": Verb(lane=Lane.COMPUTE, operands=("m", "S<", "R<", "C<"), also=("loss>",)),
    "epilogue": Verb(
        lane=Lane.COMPUTE, operands=("m", "S<", "G>", "R<", "C<", "C>"), also=("loss>",)
    ),
    "backward": Verb(
        lane=Lane.COMPUTE, operands=("L", "m", "S<", "G>", "R<", "C<", "K<", "C<", "C>")
    ),
    "regress": Verb(lane=Lane.COMPUTE, operands=("m", "S<", "G>", "C<", "C<", "C>")),
    "pool": Verb(lane=Lane.REDUCE, operands=(), also=("loss>",)),
    "reduce": Verb(lane=Lane.REDUCE, operands=("LOT", "G>")),
    "report": Verb(lane=Lane.DRAIN, operands=(), also=("loss<", "host loss>")),
    "drain": Verb(lane=Lane.DRAIN, operands=("LOT", "G<", "H>")),
    "measure": Verb(lane=Lane.DRAIN, operands=("LOT", "G<")),
    "collect": Verb(lane=Lane.UPDATE, operands=("T", "m", "H>")),
    "update": Verb(lane=Lane.UPDATE, operands=("LOT", "H<"), also=("host loss<",)),
    "settle": Verb(lane=Lane.UPDATE, operands=("LOT", "H<")),
    "advance": Verb(lane=Lane.UPDATE, operands=("LOT", "H<")),
    "complete": Verb(lane=Lane.UPDATE, operands=("LOT", "H<")),
    "order": Verb(lane=Lane.UPDATE, operands=("LOT",)),
    "assign": Verb(lane=Lane.UPDATE, operands=("L",), also=("host loss<",)),
    "lease": Verb(lane=Lane.FETCH, operands=("L", "p", "W>")),
    "redo": Verb(lane=Lane.REWORK, operands=("L", "p", "S<", "G<", "W>")),
    "renew": Verb(lane=Lane.COMPUTE, operands=("LOT", "S>", "G<")),
    "borrow": Verb(lane=Lane.LEND, operands=("L", "p", "H<", "W>")),
    "rework": Verb(lane=Lane.REWORK, operands=("L", "p", "W>")),
    "repay": Verb(lane=Lane.DRAIN, operands=("L", "p", "W<")),
    "revise": Verb(lane=Lane.COMPUTE, operands=("LOT", "S>", "G<"), also=("loss<",)),
    "mirror": Verb(lane=Lane.DRAIN, operands=("LOT", "S<")),
    "return": Verb(lane=Lane.DRAIN, operands=("LOT", "S>")),
    "stash": Verb(lane=Lane.STASH, operands=("rhgkx", "m", "CRK<")),
    "unstash": Verb(lane=Lane.UNSTASH, operands=("rhgke", "m", "CRK>")),
}


@dataclass(frozen=True, slots=True)
class Action:
    """One line that does something."""

    verb: str
    operands: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.verb, *self.operands))

    @property
    def lane(self) -> Lane:
        """The lane the action runs on."""
        return VERBS[self.verb].lane

    def accesses(self) -> tuple[tuple[str, bool], ...]:
        """Places the action touches, each with whether it writes ([Note: places])."""
        return _accesses(self.verb, self.operands)


@lru_cache(maxsize=MOST_REMEMBERED)
def _accesses(verb: str, operands: tuple[str, ...]) -> tuple[tuple[str, bool], ...]:
    """`Action.accesses`, which is asked for over and over, in one schedule after the other."""
    return tuple(_find_accesses(verb, operands))


def _find_accesses(verb: str, operands: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    kinds, also = VERBS[verb].operands, VERBS[verb].also
    for operand, kind in zip(operands, kinds, strict=True):
        if kind[-1] in "<>" and operand != NOTHING:
            for place in operand.split(","):
                yield place, kind[-1] == ">"
    for place in also:
        yield place[:-1], place[-1] == ">"
    if verb in ("stash", "unstash"):
        yield " ".join(operands[:2]), verb == "stash"
    elif verb == "collect":  # what earlier microbatches have left to this one, too
        for number in range(int(operands[1][1:]) + 1):
            yield f"x m{number}", False
    elif verb == "lookup":
        yield f"e {operands[0]}", True
    elif verb in ("order", "assign", "renew", "rework", "redo"):
        yield f"numbers {operands[0]}", verb in ("order", "assign")
    elif verb in ("fetch", "update", "settle", "advance", "return", "mirror", "repay"):
        yield f"weights {operands[0]}", verb != "fetch"


@dataclass(frozen=True, slots=True)
class Wait:
    """A lane goes on only when an earlier line of another lane is done."""

    lane: Lane
    action: Action

    def __str__(self) -> str:
        return f"{self.lane.value} waits {self.action}"


Line = Action | Wait


def parse_line(text: str) -> Line:
    """The line that prints as `text`.

    Raises:
        ValueError: unknown verb or lane, or operands that do not fit the verb.
    """
    words = text.split()
    if len(words) > 2 and words[1] == "waits":
        lanes = {lane.value: lane for lane in Lane}
        if words[0] not in lanes:
            raise ValueError(f"{text!r}: no lane {words[0]!r}; lanes are {', '.join(lanes)}")
        action = parse_line(" ".join(words[2:]))
        if not isinstance(action, Action):
            raise ValueError(f"{text!r}: a wait names an action, not another wait")
        return Wait(lanes[words[0]], action)
    if not words or words[0] not in VERBS:
        raise ValueError(f"{text!r}: unknown verb; verbs are {', '.join(VERBS)}")
    kinds, operands = VERBS[words[0]].operands, tuple(words[1:])
    fits = len(kinds) == len(operands) and all(
        operand[0] in kind or operand == NOTHING
        for kind, operand in zip(kinds, operands, strict=True)
    )
    if not fits:
        raise ValueError(f"{text!r}: {words[0]!r} takes operands like {' '.join(kinds)!r}")
    return Action(words[0], operands)
