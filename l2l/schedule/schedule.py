"""A schedule: the frozen lines of one step, made from its shape and checked before they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from l2l.schedule.cells import add_stash
from l2l.schedule.disk import add_disk, spill
from l2l.schedule.lines import EPILOGUE, Action, Line, Wait, parse_line
from l2l.schedule.ordering import Orders, add_waits
from l2l.schedule.passes import carried, compute_order, recorded
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
    schedule = lower(shape)
    validate(schedule)
    return schedule


def lower(shape: Shape) -> Schedule:
    """The same without the check, which a schedule needs only if it is to run."""
    draft = add_disk(add_transfers(compute_order(shape), shape), shape)
    actions = spill(add_stash(draft, shape), shape.num_stash_buffers)
    lines = add_waits(actions, updated=shape.updated_on_host)
    return Schedule(shape=shape, lines=tuple(lines))


def validate(schedule: Schedule) -> None:
    """Check a schedule as text, before anything runs.

    Raises:
        ValueError: with the line, if an action computes on a layer that is not resident, a slot is
            fetched into while occupied, a cell is read that does not hold the value, a slot is left
            occupied, or two conflicting lines are not ordered.
    """
    orders, following = Orders(schedule.shape.updated_on_host), schedule.shape.following
    contents = {f"S{unit}": unit for unit in schedule.shape.held}
    if schedule.shape.side in ("outputs", "backward"):
        contents |= {value: value for value in carried(schedule.shape)}
    for number, line in enumerate(schedule.lines, start=1):
        try:
            if isinstance(line, Wait) and line.action not in orders.done:
                raise ValueError("waits for a line that has not been given before it")
            if not isinstance(line, Action):
                orders.wait(line)
                continue
            _follow(line, contents, schedule.shape, following)
            unordered = [*map(str, orders.missing(line))]
            unordered += [f"last {one}" for one in orders.missing_last(line)]
            if unordered:
                raise ValueError(f"is not ordered after '{unordered[0]}', which touches its places")
            orders.perform(line)
        except ValueError as error:
            raise ValueError(f"line {number}, '{line}': {error}") from None
    stays = {f"S{unit}" for unit in (*schedule.shape.on_device, *schedule.shape.held)}
    occupied = [place for place in contents if place[0] in "SB" and place not in stays]
    if occupied:
        raise ValueError(f"slots are left occupied: {', '.join(sorted(occupied))}")


def _follow(
    action: Action, contents: dict[str, str], shape: Shape, following: Mapping[int, str]
) -> None:
    """Check that places hold what the action expects, then note what it leaves in them."""
    meaning = _meaning(action, shape, following)
    touched = [
        (place, does, meaning[word].format(place=place, unit=place[1:]))
        for place, does, word in action.touches
        if word
    ]
    for place, does, value in touched:
        if does != ">" and contents.get(place) != value:
            found = contents.get(place, "nothing")
            raise ValueError(f"{place} must hold {value!r}, found {found!r}")
    if action.kind in ("fetch U", "fetch U:p", "fetch U.state", "release"):
        place = action.places[0]
        if place[0] in "SB" and place in contents:
            raise ValueError(f"{place} still holds {contents[place]!r}")
    for place, does, value in touched:
        if does == "!":
            del contents[place]
        elif does == ">":
            contents[place] = value


def _meaning(action: Action, shape: Shape, following: Mapping[int, str]) -> dict[str, str]:
    """What the words of `Kind.places` mean in a line; `{place}` is the place's own name."""
    m, stack = f"m{action.microbatch}", action.stack
    before, after = "E", ""
    is_last = action.verb == "loss" or action.unit == EPILOGUE
    given = made = recorded(len(shape.stacks) if is_last else stack)
    if action.kind in ("forward U m", "backward U m"):
        call = shape.call_of(action)
        if call not in following or shape.unit(call) != action.unit:
            layers = shape.units_of(shape.streamed)
            raise ValueError(f"{action.unit} is not among the layers of this step, {layers}")
        before, after, given = str(call), following[call], recorded(shape.stack_of(call))
    elif stack > len(shape.stacks):
        raise ValueError(f"there is no stack {stack} in this step")
    elif action.unit[:1] in ("P", "I"):
        before, after = f"I{stack}", shape.first_value(stack)[1:]
        given = recorded(max(0, stack - 1))
    slices = shape.head.num_slices if shape.head is not None else 0
    summed = slices if action.verb == "loss" else -1  # slices that sums are of, so far
    place = summed if action.piece is None else action.piece
    return {
        "unit": action.name,
        "table": f"gradient {action.unit}",
        "gradient": f"gradient {action.name}",
        "state": f"state {action.unit}" + ("" if action.piece is None else f" {action.piece}"),
        "weights": f"weights {action.unit}",
        "value": action.value,
        "itself": "{place}",
        "own": "{unit}",
        "sum": "gradient {unit}",
        "r": f"{given} {m}",
        "r+": f"{made} {m}",
        **{word: f"{word} {m}" for word in "eixyc"},
        **{"s": f"s{place} {m}", "s+": f"s{place + 1} {m}"},
        **{"d": f"d{max(0, place)} {m}", "d+": f"d{place + 1} {m}"},
        **{word: f"{word}{before} {m}" for word in "hgk"},
        **{f"{word}+": f"{word}{after} {m}" for word in "hg"},
    }
