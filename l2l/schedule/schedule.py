"""A schedule: the frozen lines of one step, made from its shape and checked before they run."""

from __future__ import annotations

from dataclasses import dataclass

from l2l.schedule.lines import NOTHING, Action, Line, Wait, parse_line
from l2l.schedule.lowering import Shape, add_stash, add_transfers, compute_order
from l2l.schedule.ordering import Orders, add_waits


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

    def count(self, verb: str) -> int:
        """How many lines have this verb."""
        return sum(action.verb == verb for action in self.actions)


def make_schedule(shape: Shape) -> Schedule:
    """Lower a shape to a complete, validated schedule."""
    draft = add_transfers(compute_order(shape), shape)
    schedule = Schedule(shape=shape, lines=tuple(add_waits(add_stash(draft, shape))))
    validate(schedule)
    return schedule


def validate(schedule: Schedule) -> None:
    """Check a schedule as text, before anything runs.

    Raises:
        ValueError: with the line, if an action computes on a layer that is not resident, a slot is
            fetched into while occupied, a cell is read that does not hold the value, a slot is left
            occupied, or two conflicting lines are not ordered.
    """
    orders = Orders()
    contents = {f"S{unit}": unit for unit in schedule.shape.held}
    for number, line in enumerate(schedule.lines, start=1):
        try:
            if isinstance(line, Wait):
                if line.action not in orders.done:
                    raise ValueError("waits for a line that has not been given before it")
                orders.wait(line)
                continue
            _follow(line, contents, schedule.shape)
            unordered = orders.missing(line)
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
    if action.verb == "fetch" and action.operands[1] in contents:
        raise ValueError(f"{action.operands[1]} still holds {contents[action.operands[1]]!r}")
    if (
        action.verb == "drop"
        and action.operands[0].startswith("S")
        and action.operands[0] in contents
    ):
        raise ValueError(f"{action.operands[0]} still holds {contents[action.operands[0]]!r}")
    if action.verb in ("release", "return"):
        del contents[action.operands[1]]
    contents.update(leaves)


def _contents(action: Action, shape: Shape) -> tuple[dict[str, str], dict[str, str]]:
    """What an action expects in places, and what it leaves there."""
    verb, operands = action.verb, action.operands
    if verb in ("forward", "backward"):
        return _layer_contents(action, shape)
    if verb in ("prologue", "epilogue", "score", "regress"):
        return _outer_contents(action, shape)
    expects: dict[str, str] = {}
    leaves: dict[str, str] = {}
    if verb in ("fetch", "gather", "release", "revise", "return", "renew", "mirror"):
        (leaves if verb == "fetch" else expects)[operands[1]] = operands[0]
    if verb in ("drain", "update", "revise", "measure", "reduce"):
        expects[operands[2 if verb == "revise" else 1]] = f"gradient {operands[0]}"
        leaves |= {operands[2]: f"gradient {operands[0]}"} if verb == "drain" else {}
    if verb in ("stash", "unstash"):
        value, cell = " ".join(operands[:2]), operands[2]
        out, back = {cell: value}, {f"host {value}": value}
        expects, leaves = (out, back) if verb == "stash" else (back, out)
    if verb in ("rework", "redo", "repay"):
        expects[operands[-1]] = f"state {operands[0]} {operands[1]}"
        if verb == "redo":
            expects |= {operands[2]: operands[0], operands[3]: f"gradient {operands[0]}"}
    elif verb in ("borrow", "lease"):
        leaves[operands[-1]] = f"state {operands[0]} {operands[1]}"
    elif verb == "lookup":
        leaves[f"host e {operands[0]}"] = f"e {operands[0]}"
    return expects, leaves


def _layer_contents(action: Action, shape: Shape) -> tuple[dict[str, str], dict[str, str]]:
    layer, m, slot = action.operands[:3]
    if int(layer[1:]) not in shape.streamed:
        raise ValueError(f"{layer} is not among the layers of this step, {shape.streamed}")
    after = shape.streamed.index(int(layer[1:])) + 1
    following = str(shape.streamed[after]) if after < len(shape.streamed) else "E"
    if action.verb == "forward":
        recorded, before, out, kept = action.operands[3:]
        leaves = {out: f"h{following} {m}", kept: f"k{layer[1:]} {m}"}
        return {slot: layer, recorded: f"r {m}", before: f"h{layer[1:]} {m}"}, leaves
    sums, recorded, before, kept, gradient, out = action.operands[3:]
    expects = {slot: layer, recorded: f"r {m}", before: f"h{layer[1:]} {m}"}
    expects |= {kept: f"k{layer[1:]} {m}", gradient: f"g{following} {m}"}
    return expects, {out: f"g{layer[1:]} {m}", sums: f"gradient {layer}"}


def _outer_contents(action: Action, shape: Shape) -> tuple[dict[str, str], dict[str, str]]:
    verb, (m, slots, *rest) = action.verb, action.operands
    expects = {slot: slot[1:] for slot in slots.split(",")}
    leaves: dict[str, str] = {}
    first = shape.first_value[1:]
    if verb == "prologue":
        recorded, rows, out = rest
        return expects | {rows: f"e {m}"}, {recorded: f"r {m}", out: f"h{first} {m}"}
    if verb == "score":
        return expects | {rest[0]: f"r {m}", rest[1]: f"hE {m}"}, {}
    leaves = {place: f"gradient {place[1:]}" for place in rest[0].split(",")}
    if verb == "epilogue":
        _, recorded, before, out = rest
        return expects | {recorded: f"r {m}", before: f"hE {m}"}, leaves | {out: f"gE {m}"}
    _, gradient, rows, out = rest
    return expects | {gradient: f"g{first} {m}", rows: f"e {m}"}, leaves | {out: f"x {m}"}
