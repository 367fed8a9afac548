"""A step as text: what happens, in which order, and which lane waits for which.

A schedule is a list of lines, frozen before it runs; the relay performs them and chooses nothing.
Three layers, one microbatch, two slots, before waits are added:

    fetch O SO                        regress needs no layer:
    fetch L0 S0                       O are the outer parameters (prologue and epilogue),
    fetch L1 S1                       SO, GO, HO their slot, gradient and staging.
    prologue m0 R0 C0                 R0: recorded arguments of the layers. C0: hidden state.
    forward L0 m0 S0 R0 C0 C1         reads slot S0 and cell C0, writes cell C1
    release L0 S0
    fetch L2 S0
    ...
    epilogue m0 C3 C4                 hidden state in, its gradient out, loss on the way
    report                            the losses leave the device
    backward L2 m0 S0 G0 R0 C2 C4 C5  recomputes L2 from C2; gradient in C4, out C5, weights' in G0
    drain L2 G0 H0                    gradient to the host
    update L2 H0                      the optimizer, on the host
    ...
    regress m0 C1                     the prologue backward
    drain O GO HO
    update O HO

[Note: late updates] An update may be left to the next step: the last `num_late` units drained have
staging of their own (`HL0`, `HO`) and no update line; the next schedule begins with `settle L0 HL0`
lines for them, in the order in which it fetches. None late is the *eager* policy: every unit is
updated under the backward passes of the layers before it. All late is *just in time*: nothing is
updated before the whole gradient is known, so it can be clipped by its global norm.

[Note: device updates] An optimizer with next to no state runs on the device: `revise L2 S0 G0`
updates the weights in their slot after the last backward pass, and `return L2 S0` copies them to
the host and frees the slot. No gradient leaves the device.

[Note: lanes] Every verb belongs to a lane (`VERBS`). Lines of one lane happen in order; lines of
different lanes happen whenever they like, unless a wait line orders them: `fetch waits release L0
S0` holds the fetch lane until that line of the compute lane is done. On an accelerator a lane is a
stream and a wait is an event.

[Note: places] Every line reads and writes named places: slots `S`, gradient slots `G`, host staging
`H`, cells `C` (one boundary tensor each), recorded cells `R`, host-side values (`h1 m0`: the hidden
state entering layer 1 of microbatch 0; `g1 m0` its gradient; `r m0` the recorded arguments). Two
lines on different lanes that touch one place, at least one writing, must be ordered. `add_waits`
inserts exactly the waits for which nothing else gives that order, so each of them matters; a test
deletes each in turn and sees the step fail. `validate` checks the finished text with the same rule.

Lowering: `compute_order` says what is computed; `add_transfers` adds slots, fetches and releases,
gradient slots, drains and updates; `add_stash` gives every boundary tensor a cell and moves what
does not fit to the stash and back; `add_waits` orders the lanes.

The layers of a step are data (`Shape.layers`), not a count: a step may run any increasing sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from l2l.schedule.lines import NOTHING, OUTER, VERBS, Action, Lane, Line, Verb, Wait, parse_line
from l2l.schedule.lowering import (
    Pass,
    Shape,
    add_stash,
    add_transfers,
    compute_order,
    late_staging,
)
from l2l.schedule.ordering import Orders, add_waits

__all__ = [
    "NOTHING",
    "OUTER",
    "VERBS",
    "Action",
    "Lane",
    "Line",
    "Pass",
    "Schedule",
    "Shape",
    "Verb",
    "Wait",
    "add_stash",
    "add_transfers",
    "add_waits",
    "compute_order",
    "late_staging",
    "make_schedule",
    "parse_line",
    "validate",
]


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
    contents: dict[str, str] = {}
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
    occupied = [slot for slot in contents if slot.startswith("S")]
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
    if action.verb in ("release", "return"):
        del contents[action.operands[1]]
    contents.update(leaves)


def _contents(action: Action, shape: Shape) -> tuple[dict[str, str], dict[str, str]]:
    """What an action expects in places, and what it leaves there."""
    verb, operands = action.verb, action.operands
    expects: dict[str, str] = {}
    leaves: dict[str, str] = {}
    if verb in ("fetch", "release", "revise", "return"):
        (leaves if verb == "fetch" else expects)[operands[1]] = operands[0]
    if verb in ("drain", "update", "revise"):
        expects[operands[2 if verb == "revise" else 1]] = f"gradient {operands[0]}"
        leaves |= {operands[2]: f"gradient {operands[0]}"} if verb == "drain" else {}
    if verb in ("stash", "unstash"):
        value, cell = " ".join(operands[:2]), operands[2]
        out, back = {cell: value}, {f"host {value}": value}
        expects, leaves = (out, back) if verb == "stash" else (back, out)
    elif verb in ("forward", "backward"):
        layer, m, slot = operands[:3]
        if int(layer[1:]) not in shape.layers:
            raise ValueError(f"{layer} is not among the layers of this step, {shape.layers}")
        after = shape.layers.index(int(layer[1:])) + 1
        following = str(shape.layers[after]) if after < len(shape.layers) else "E"
        recorded, before, *gradient, out_cell = operands[3 if verb == "forward" else 4 :]
        expects = {slot: layer, recorded: f"r {m}", before: f"h{layer[1:]} {m}"}
        expects |= dict.fromkeys(gradient, f"g{following} {m}")
        leaves[out_cell] = f"h{following} {m}" if verb == "forward" else f"g{layer[1:]} {m}"
        if verb == "backward":
            leaves[operands[3]] = f"gradient {layer}"
    elif verb in ("prologue", "epilogue", "score", "regress"):
        m, first = operands[0], shape.layers[0]
        expects["SO"] = OUTER
        if verb == "prologue":
            leaves = {operands[1]: f"r {m}", operands[2]: f"h{first} {m}"}
        else:
            expects[operands[1]] = f"g{first} {m}" if verb == "regress" else f"hE {m}"
        if verb == "epilogue":
            leaves[operands[2]] = f"gE {m}"
        if verb in ("epilogue", "regress"):
            leaves["GO"] = f"gradient {OUTER}"
    return expects, leaves
