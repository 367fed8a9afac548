"""A schedule: the frozen lines of one step, made from its shape and checked before they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from l2l.schedule.cells import add_stash
from l2l.schedule.lines import (
    NOTHING,
    PROLOGUE,
    Action,
    Line,
    Wait,
    parse_line,
)
from l2l.schedule.ordering import Orders, add_waits
from l2l.schedule.passes import compute_order
from l2l.schedule.shape import Shape
from l2l.schedule.transfers import add_transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The frozen lines of one step, with the shape they were made from."""

    shape: Shape
    lines: tuple[Line, ...]

    def __str__(self) -> str:
        return "\n".join(str(line) for line in self.lines)

    @classmethod
    def parse(cls, text: str, shape: Shape) -> Schedule:
        """The schedule that prints as `text`; blank lines are passed over."""
        return cls(
            shape=shape,
            lines=tuple(parse_line(line) for line in text.splitlines() if line.strip()),
        )

    @property
    def actions(self) -> tuple[Action, ...]:
        """The lines that do something."""
        return tuple(line for line in self.lines if isinstance(line, Action))

    def count(self, kind: str) -> int:
        """How many lines are of this kind."""
        return sum(action.kind == kind for action in self.actions)


def make_schedule(shape: Shape) -> Schedule:
    """Lower a shape to a complete, validated schedule."""
    draft = add_transfers(compute_order(shape), shape)
    lines = add_waits(add_stash(draft, shape), updated=shape.updated_on_host)
    schedule = Schedule(shape=shape, lines=tuple(lines))
    validate(schedule)
    return schedule


def validate(schedule: Schedule) -> None:
    """Check a schedule as text, before anything runs.

    Raises:
        ValueError: with the line, if an action computes on a layer that is not resident, a slot is
            fetched into while occupied, a cell is read that does not hold the value, a slot is left
            occupied, or two conflicting lines are not ordered.
    """
    orders = Orders(schedule.shape.updated_on_host)
    contents = {f"S{unit}": unit for unit in schedule.shape.held}
    for number, line in enumerate(schedule.lines, start=1):
        try:
            if isinstance(line, Wait) and line.action not in orders.done:
                raise ValueError("waits for a line that has not been given before it")
            if not isinstance(line, Action):
                orders.wait(line)
                continue
            _follow(line, contents, schedule.shape)
            unordered = [*map(str, orders.missing(line))]
            if (last := orders.missing_last(line)) is not None:
                unordered.append(f"last {last}")
            if unordered:
                raise ValueError(f"is not ordered after '{unordered[0]}', which touches its places")
            orders.perform(line)
        except ValueError as error:
            raise ValueError(f"line {number}, '{line}': {error}") from None
    stays = {f"S{unit}" for unit in (*schedule.shape.on_device, *schedule.shape.held)}
    occupied = [place for place in contents if place.startswith("S") and place not in stays]
    if occupied:
        raise ValueError(f"slots are left occupied: {', '.join(sorted(occupied))}")


def _follow(action: Action, contents: dict[str, str], shape: Shape) -> None:
    """Check that places hold what the action expects, then note what it leaves in them."""
    expects, leaves = _contents(action, shape)
    for place, value in expects.items():
        if place != NOTHING and contents.get(place) != value:
            found = contents.get(place, "nothing")
            raise ValueError(f"{place} must hold {value!r}, found {found!r}")
    if action.kind in ("fetch U", "release"):
        place = action.places[0]
        if place.startswith("S") and place in contents:
            raise ValueError(f"{place} still holds {contents[place]!r}")
    if action.kind in ("release U", "drain U free"):
        del contents[action.places[0]]
    contents.update(leaves)


HOLDS: Final[Mapping[str, tuple[str, str]]] = {
    "fetch U": ("-", "unit"),
    "fetch U.state:p": ("-", "state"),
    "fetch U.all:p": ("- -", "- state"),
    "fetch v m": ("-", "value"),
    "release U": ("unit", "-"),
    "gather U": ("unit", "-"),
    "drain U": ("unit", "-"),
    "drain U free": ("unit", "-"),
    "drain U.grad": ("gradient -", "- gradient"),
    "drain U.norm": ("gradient", "-"),
    "drain U.all:p": ("state", "-"),
    "drain v m": ("value", "-"),
    "reduce U": ("gradient", "-"),
    "update U host": ("gradient", "-"),
    "update U device": ("unit gradient", "- -"),
    "update U device late": ("unit -", "- -"),  # the gradient is of the step before
    "update U:p device": ("unit gradient state", "- - -"),
    "update U:p device late": ("state", "-"),
}
"""For kinds of lines that are no passes: what each place must hold, and what it holds then."""


def _contents(action: Action, shape: Shape) -> tuple[dict[str, str], dict[str, str]]:
    """What an action expects in places, and what it leaves there."""
    if action.verb in ("forward", "loss", "backward"):
        return _pass_contents(action, shape)
    meaning = {
        "unit": action.unit,
        "gradient": f"gradient {action.unit}",
        "state": f"state {action.unit} {action.piece}",
        "value": action.value,
    }
    expects, leaves = (
        {
            place: meaning[word]
            for place, word in zip(action.places, words.split(), strict=False)
            if word != "-"
        }
        for words in HOLDS.get(action.kind, ("", ""))
    )
    # Boundary tensors are on the host once they were drained, and rows once they were looked up.
    on_host = {f"host {action.value}": action.value}
    if action.kind == "drain v m":
        leaves |= on_host
    elif action.kind == "fetch v m":
        expects |= on_host
    elif action.kind == "lookup m":
        leaves |= {f"host e m{action.microbatch}": f"e m{action.microbatch}"}
    return expects, leaves


def _pass_contents(action: Action, shape: Shape) -> tuple[dict[str, str], dict[str, str]]:
    """The same of a pass: weights in slots, boundary tensors in cells."""
    m, (slots, *rest), streamed = f"m{action.microbatch}", action.places, shape.streamed
    if action.unit in ("", PROLOGUE):  # units around the layers, each in its own slot
        expects = {slot: slot[1:] for slot in slots.split(",")}
        layer, following = "E", shape.first_value[1:]
    else:
        if action.layer not in streamed:
            raise ValueError(f"{action.unit} is not among the layers of this step, {streamed}")
        after = streamed.index(action.layer) + 1
        expects = {slots: action.unit}
        layer = str(action.layer)
        following = str(streamed[after]) if after < len(streamed) else "E"
    if action.kind == "forward Pro m":
        recorded, rows, out = rest
        return expects | {rows: f"e {m}"}, {recorded: f"r {m}", out: f"h{following} {m}"}
    if action.verb == "forward":
        recorded, before, out, kept = rest
        leaves = {out: f"h{following} {m}", kept: f"k{layer} {m}"}
        return expects | {recorded: f"r {m}", before: f"h{layer} {m}"}, leaves
    sums, recorded, before, *between, out = rest
    of = action.unit if action.kind == "backward U m" else ""
    leaves = {place: f"gradient {of or place[1:]}" for place in sums.split(",")}
    expects |= {recorded: f"r {m}"}
    if action.verb == "loss":
        return expects | {before: f"hE {m}"}, leaves | {out: f"gE {m}"}
    kept, gradient = between
    before_is, out_is = (f"h{layer} {m}", f"g{layer} {m}") if of else (f"e {m}", f"x {m}")
    expects |= {before: before_is, kept: f"k{layer} {m}", gradient: f"g{following} {m}"}
    return expects, leaves | {out: out_is}
