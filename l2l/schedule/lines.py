"""The language of schedules: thirteen verbs, what each kind of line touches, and lines as data.

There are only copies, passes, collectives, work on rows and updates:

    take P                  release [unit] P        a place has memory from here on, or is free
    fetch X P               drain X P               copies to the device, and to the host
    gather L0 S0            reduce L0 G0 | loss     over ranks: weights; gradients or losses
    forward L3|Pro m0 ..    backward L3|Pro m0 ..   a microbatch through a layer, or the prologue;
                                                    Int1 is the interlude before stack 1, L3:v9
                                                    call 9 of a layer that is called several times
    loss m0 ..                                      the tail, the epilogue and their backward pass
    lookup m0               collect T0 m0 H         rows of tables on the host, and their gradients
                            collect L3 H            gradients, which the user's own code is to see
    order L3 [late]                                 the coefficients of an update on the device
    update L3 host H [B] [D] | device ..  [late] [weights | moments]

What is copied (X) is a unit's weights `L0`, its gradient `L0.grad`, the norm of that `L0.norm`, its
optimizer state `L0.state`, or all of it `L0.all`, perhaps a piece `:p3`; a boundary tensor `h1 m0`;
or the losses, `loss`. On their way from a disk or to it, weights are `L0.weights` and a boundary
tensor is `h1.stash m0`. `-` is no place. What a line does follows from its *kind*, which is the
line without numbers and places; `KINDS` says for each on which lane it runs, what it reads and
writes.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

OUTER: Final = "O"
PROLOGUE: Final = "Pro"
EPILOGUE: Final = "Epi"
NOTHING: Final = "-"
MAX_REMEMBERED: Final = 2**16  # lines


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
    READ = "read"
    """Disk to host; goes on from step to step, as the update lane does."""
    WRITE = "write"
    """Host to disk, likewise."""

    def __init__(self, _: object) -> None:
        self.number: Final[int] = len(type(self).__members__)  # from 0, as listed here


@dataclass(frozen=True, slots=True)
class Kind:
    """What all lines of a kind have in common.

    `places` has one word for each place that a line names: the letters it may begin with; what the
    line does there (`<` reads, `>` writes, `=` changes what is there, `!` frees it); and what it
    finds or leaves there, where that is checked (schedule.py). A line may name several places at
    once, parted by commas; those in brackets may be missing. `also` lists what a line touches
    without naming the place: `{unit}` is its unit, `{value}` its boundary tensor, `{m}` its
    microbatch.
    """

    lane: Lane
    units: str = ""
    """Letters that the unit may begin with."""
    places: tuple[tuple[str, str, str], ...] = ()
    also: tuple[tuple[str, str, str], ...] = ()
    num_optional: int = 0
    """Of the places, the last ones."""


def _kind(lane: Lane, units: str = "", places: str = "", also: str = "") -> Kind:
    split = re.compile(r"(.+)([<>=!])(.*)$").match
    named = [split(word.strip("[]")) for word in places.split()]
    unnamed = [split(word) for word in also.split(", ") if word]
    own, others = (tuple((f[1], f[2], f[3]) for f in one if f) for one in (named, unnamed))
    return Kind(lane, units, own, others, places.count("["))


ANY: Final = "LTO"
WEIGHTS: Final = "weights {unit}"  # on the host
NUMBERS: Final = "numbers {unit}"  # of an update on the device, on the host

KINDS: Final[Mapping[str, Kind]] = {
    "take": _kind(Lane.COMPUTE, "", "SGW>"),
    "release": _kind(Lane.COMPUTE, "", "SGW>"),
    "release U": _kind(Lane.COMPUTE, ANY, "S!unit"),
    "release U:p": _kind(Lane.COMPUTE, "T", "S!unit"),
    # copies to the device
    "fetch U": _kind(Lane.FETCH, ANY, "S>unit [D<weights]", f"{WEIGHTS}<"),
    "fetch U:p": _kind(Lane.FETCH, "T", "S>unit", f"{WEIGHTS}<"),
    "fetch U.state:p": _kind(Lane.FETCH, "L", "W>state"),
    "fetch U.state": _kind(Lane.READ, "L", "B>state", "{unit}.state<"),
    "fetch U.weights": _kind(Lane.READ, "L", "D>weights", "{unit}.weights<"),
    "fetch U.all:p": _kind(Lane.LEND, "L", "H< W>state"),
    "fetch v m": _kind(Lane.UNSTASH, "", "CRKP>value [E<value]", "{value}<itself"),
    "fetch v.stash m": _kind(Lane.READ, "", "E>value", "{value}.stash<"),
    # copies to the host
    "drain U": _kind(Lane.DRAIN, ANY, "S<unit", f"{WEIGHTS}>"),
    "drain U free": _kind(Lane.DRAIN, ANY, "S!unit", f"{WEIGHTS}>"),
    "drain U.grad": _kind(Lane.DRAIN, ANY, "G<gradient H>gradient"),
    "drain U.grad:p": _kind(Lane.DRAIN, "T", "G<gradient H>table"),
    "drain U.norm": _kind(Lane.DRAIN, ANY, "G<gradient"),
    "drain U.state": _kind(Lane.WRITE, "L", "B!state", "{unit}.state>"),
    "drain U.weights": _kind(Lane.WRITE, "L", "D!weights", "{unit}.weights>"),
    "drain U.all:p": _kind(Lane.DRAIN, "L", "W<state", f"{WEIGHTS}>"),
    "drain v m": _kind(Lane.STASH, "", "CRKP<value [E>value]", "{value}>itself"),
    "drain v.stash m": _kind(Lane.WRITE, "", "E<value", "{value}.stash>"),
    "drain loss": _kind(Lane.DRAIN, also="loss<, host loss>"),
    # collectives
    "gather U": _kind(Lane.GATHER, ANY, "S=unit"),
    "reduce U": _kind(Lane.REDUCE, ANY, "G=gradient"),
    "reduce loss": _kind(Lane.REDUCE, also="loss>"),
    # passes: weights, gradient sums, recorded arguments, input, (kept,) gradient or output
    "forward Pro m": _kind(Lane.COMPUTE, "P", "S<own R>r C<e C>h+"),
    "forward U m": _kind(Lane.COMPUTE, "L", "S<unit R<r C<h C>h+ K>k"),
    "forward Int m": _kind(Lane.COMPUTE, "I", "S<own R<r R>r+ C<h C>h+"),
    "loss m": _kind(Lane.COMPUTE, "", "S<own G>sum R<r C<h C>g", "loss>"),
    "forward Epi m": _kind(Lane.COMPUTE, "E", "S<own R<r C<h C>y P>s+"),
    "forward U:p m": _kind(Lane.COMPUTE, "T", "S<unit S<own C<y P<s P>s+"),
    "loss Epi m": _kind(Lane.COMPUTE, "E", "P<s P>c", "loss>"),
    "backward U:p m": _kind(Lane.COMPUTE, "T", "S<unit S<own G>gradient G>sum C<y P<c C<d+ C>d"),
    "backward Epi m": _kind(Lane.COMPUTE, "E", "S<own G>sum R<r C<h C<d C>g"),
    "backward U m": _kind(Lane.COMPUTE, "L", "S<unit G>gradient R<r C<h K<k C<g+ C>g"),
    "backward Pro m": _kind(Lane.COMPUTE, "P", "S<own G>sum R<r C<e K<k C<g+ C>x [C>i]"),
    "backward Int m": _kind(Lane.COMPUTE, "I", "S<own G>sum R<r C<h C<g+ C>g"),
    # rows of tables
    "lookup m": _kind(Lane.UPDATE, also="e {m}>itself"),
    "collect U m": _kind(Lane.UPDATE, "T", "H>"),
    # gradients that wait on the host for the user's own code
    "collect U": _kind(Lane.UPDATE, ANY, "H<"),
    # updates on the host; late ones were left by the step before
    "update U host": _kind(
        Lane.UPDATE, ANY, "H<gradient [B=state] [D=weights]", f"host loss<, {WEIGHTS}>"
    ),
    "update U host late": _kind(Lane.UPDATE, ANY, "H< [B=state] [D=weights]", f"{WEIGHTS}>"),
    "update U host late weights": _kind(Lane.UPDATE, ANY, "H<", f"{WEIGHTS}>"),
    "update U host late moments": _kind(Lane.UPDATE, ANY, "H<"),
    "update U:m host late": _kind(Lane.UPDATE, "T", "H<"),
    "update U:m host late weights": _kind(Lane.UPDATE, "T", "H<"),
    # updates on the device
    "order U": _kind(Lane.UPDATE, "L", "", f"host loss<, {NUMBERS}>"),
    "order U late": _kind(Lane.UPDATE, ANY, "", f"{NUMBERS}>"),
    "update U device": _kind(Lane.COMPUTE, ANY, "S=unit G<gradient", "loss<"),
    "update U device late": _kind(Lane.COMPUTE, ANY, "S=unit G<", f"{NUMBERS}<"),
    "update U:p device": _kind(Lane.REWORK, "L", "S<unit G<gradient W=state", f"{NUMBERS}<"),
    "update U:p device late": _kind(Lane.REWORK, "L", "W=state", f"{NUMBERS}<"),
}
VERBS: Final = tuple(dict.fromkeys(kind.split()[0] for kind in KINDS))
LEFT: Final = frozenset(k for k in KINDS if "late" in k and KINDS[k].lane is Lane.UPDATE)
"""Kinds of lines in which the host goes on with what the step before has left."""
FLAGS: Final = ("late", "weights", "moments", "free")
UNIT: Final = re.compile(r"(Pro|Epi|Int\d+|O|[LT]\d+)(\.[a-z]+)?(?::([pmv]\d+))?$")
VALUE: Final = re.compile(r"([hgk](?:\d+|E|I\d+)|r\d*|[sd]\d+|[eixyc])(\.stash)?$")
MICROBATCH: Final = re.compile(r"m\d+$")
PLACE: Final = re.compile(r"(?:[SGHWCRK]\w+|[PBDE]\d+)(?:,(?:[SGHWCRK]\w+|P\d+))*$|-$")
LASTING: Final = (Lane.UPDATE, Lane.READ, Lane.WRITE)
"""Lanes that go on when a step ends: those of host threads."""


@dataclass(frozen=True, slots=True)
class Action:
    """One line that does something; equal to another that reads the same."""

    text: str
    verb: str = field(compare=False)
    kind: str = field(compare=False)
    """The line without numbers and places, a key of `KINDS`."""
    lane: Lane = field(compare=False)
    places: tuple[str, ...] = field(compare=False)
    """As the kind lists them; `-` is none."""
    touches: tuple[tuple[str, str, str], ...] = field(compare=False)
    """What it touches, what it does there, and what it finds or leaves there: see `Kind`."""
    accesses: tuple[tuple[str, bool], ...] = field(compare=False)
    """What it touches, each with whether it writes ([Note: places])."""
    unit: str = field(default="", compare=False)
    """`L3`, `T0`, `O` or `Pro`; empty where it is about no unit."""
    piece: int | None = field(default=None, compare=False)
    call: int | None = field(default=None, compare=False)
    """Of a layer that is called several times: which of the calls."""
    microbatch: int | None = field(default=None, compare=False)
    value: str = field(default="", compare=False)
    """A boundary tensor with its microbatch, such as `h1 m0`."""

    def __str__(self) -> str:
        return self.text

    @property
    def name(self) -> str:
        """The unit, or the slice of a table, that it is about."""
        is_slice = self.unit.startswith("T") and self.piece is not None
        return f"{self.unit}:p{self.piece}" if is_slice else self.unit

    @property
    def stack(self) -> int:
        """The stack before which the code runs that it is about."""
        return int(self.unit[3:]) if self.unit.startswith("Int") else 0

    @property
    def layer(self) -> int:
        """The number of the layer that it is about."""
        assert self.unit.startswith("L")
        return int(self.unit[1:])


@dataclass(frozen=True, slots=True)
class Wait:
    """A lane goes on only when an earlier line of another lane is done."""

    lane: Lane
    action: Action

    def __str__(self) -> str:
        return f"{self.lane.value} waits {self.action}"


@dataclass(frozen=True, slots=True)
class WaitLast:
    """A lane goes on only when what earlier steps did to something is done ([Note: steps])."""

    lane: Lane
    what: str
    """A unit: its last update on the host. Staging: the last update that read it. `drain`: all."""

    def __str__(self) -> str:
        return f"{self.lane.value} waits last {self.what}"


Line = Action | Wait | WaitLast


@dataclass(slots=True)
class _Words:
    """A line's words, sorted by what they are."""

    kind: list[str]  # the verb and what follows it, without numbers
    places: list[str] = field(default_factory=list)
    unit: str = ""
    piece: int | None = None
    call: int | None = None
    microbatch: int | None = None
    value: str = ""

    def take(self, word: str) -> None:
        """Sort in the next one."""
        if (found := UNIT.match(word)) is not None:
            self.unit, part, of = found[1], found[2] or "", found[3] or ""
            of_what = self.unit[:3] if self.unit[0] in "PEI" else "U"
            self.kind.append(f"{of_what}{part}" + (f":{of[0]}" if of and of[0] != "v" else ""))
            if of.startswith("p"):
                self.piece = int(of[1:])
            elif of.startswith("v"):
                self.call = int(of[1:])
            elif of:
                self.microbatch = int(of[1:])
        elif MICROBATCH.match(word):
            self.microbatch = int(word[1:])
            self.kind.append("m")
        elif (found := VALUE.match(word)) is not None:
            self.value = found[1]
            self.kind.append(f"v{found[2] or ''}")
        elif PLACE.match(word):
            self.places.append(word)
        else:
            self.kind.append(word)

    def fit(self, kind: Kind) -> bool:
        """Whether unit and places are such as the kind takes."""
        return (
            len(kind.places) - kind.num_optional <= len(self.places) <= len(kind.places)
            and (not kind.units or self.unit[:1] in {*kind.units})
            and all(
                one == NOTHING or all(place[0] in letters for place in one.split(","))
                for one, (letters, _, _) in zip(self.places, kind.places, strict=False)
            )
        )

    def touches(self, kind: Kind) -> Iterator[tuple[str, str, str]]:
        """What a line with these words touches."""
        m = f"m{self.microbatch}"
        for one, (_, does, holds) in zip(self.places, kind.places, strict=False):
            for place in one.split(",") if one != NOTHING else ():
                yield place, does, holds
        for text, does, holds in kind.also:
            yield text.format(unit=self.unit, value=f"{self.value} {m}", m=m), does, holds
        if self.kind[0] == "collect" and self.microbatch is not None:
            for number in range(self.microbatch + 1):  # what earlier ones have left to it, too
                yield f"x m{number}", "<", ""


@lru_cache(maxsize=MAX_REMEMBERED)
def action(text: str) -> Action:
    """The line that reads so; there is one object for each.

    Raises:
        ValueError: it is no line of this language.
    """
    verb, *rest = text.split() or [""]
    if verb not in VERBS:
        raise ValueError(f"{text!r}: unknown verb; verbs are {', '.join(VERBS)}")
    words = _Words([verb])
    for word in rest:
        words.take(word)
    name = " ".join(words.kind)
    kind = KINDS.get(name)
    if kind is None:
        kinds = [other for other in KINDS if other.split()[0] == verb]
        raise ValueError(f"{text!r}: found {name!r}; expected one of {', '.join(kinds)}")
    if not words.fit(kind) or _in_order(rest, words.places) != rest:
        named = [one + does for one, does, _ in kind.places]
        needed = len(named) - kind.num_optional
        takes = (kind.units, *named[:needed], *(f"[{one}]" for one in named[needed:]))
        wanted = " ".join(takes).strip()
        raise ValueError(f"{text!r}: {name!r} takes {wanted!r}, in this order")
    touches = tuple(words.touches(kind))
    return Action(
        " ".join((verb, *rest)),
        verb=verb,
        kind=name,
        lane=kind.lane,
        places=tuple(words.places),
        touches=touches,
        accesses=tuple((place, does != "<") for place, does, _ in touches),
        unit=words.unit,
        piece=words.piece,
        call=words.call,
        microbatch=words.microbatch,
        value=f"{words.value} m{words.microbatch}" if words.value else "",
    )


def _in_order(words: list[str], places: list[str]) -> list[str]:
    """The same words with the places behind what they are of, before the flags."""
    others = [word for word in words if not PLACE.match(word)]
    flags = [word for word in others if word in FLAGS]
    return [*(word for word in others if word not in FLAGS), *places, *flags]


def parse_line(text: str) -> Line:
    """The line that prints as `text`.

    Raises:
        ValueError: unknown verb or lane, or words that do not fit the verb.
    """
    words = text.split()
    if len(words) <= 2 or words[1] != "waits":
        return action(text)
    lanes = {lane.value: lane for lane in Lane}
    if words[0] not in lanes:
        raise ValueError(f"{text!r}: no lane {words[0]!r}; lanes are {', '.join(lanes)}")
    if words[2] == "last" and len(words) == 4:
        return WaitLast(lanes[words[0]], words[3])
    awaited = parse_line(" ".join(words[2:]))
    if not isinstance(awaited, Action):
        raise ValueError(f"{text!r}: a wait names an action, not another wait")
    return Wait(lanes[words[0]], awaited)
