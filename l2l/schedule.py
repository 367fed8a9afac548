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

import enum
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

OUTER: Final = "O"
NOTHING: Final = "-"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """Lane and operands of a kind of line.

    `operands` has one word per operand: the leading letter it must have, then `<` if the line reads
    that place, `>` if it writes it, nothing if the operand is only a name. `also` lists the places
    the line touches without naming them.
    """

    lane: Lane
    operands: tuple[str, ...]
    also: tuple[str, ...] = ()


VERBS: Final[Mapping[str, Verb]] = {
    "fetch": Verb(lane=Lane.FETCH, operands=("LO", "S>")),
    "release": Verb(lane=Lane.COMPUTE, operands=("LO", "S>")),
    "prologue": Verb(lane=Lane.COMPUTE, operands=("m", "R>", "C>"), also=("SO<",)),
    "forward": Verb(lane=Lane.COMPUTE, operands=("L", "m", "S<", "R<", "C<", "C>")),
    "score": Verb(lane=Lane.COMPUTE, operands=("m", "C<"), also=("SO<", "loss>")),
    "epilogue": Verb(lane=Lane.COMPUTE, operands=("m", "C<", "C>"), also=("SO<", "GO>", "loss>")),
    "backward": Verb(lane=Lane.COMPUTE, operands=("L", "m", "S<", "G>", "R<", "C<", "C<", "C>")),
    "regress": Verb(lane=Lane.COMPUTE, operands=("m", "C<"), also=("SO<", "GO>")),
    "report": Verb(lane=Lane.DRAIN, operands=(), also=("loss<", "host loss>")),
    "drain": Verb(lane=Lane.DRAIN, operands=("LO", "G<", "H>")),
    "update": Verb(lane=Lane.UPDATE, operands=("LO", "H<"), also=("host loss<",)),
    "settle": Verb(lane=Lane.UPDATE, operands=("LO", "H<")),
    "revise": Verb(lane=Lane.COMPUTE, operands=("LO", "S>", "G<"), also=("loss<",)),
    "return": Verb(lane=Lane.DRAIN, operands=("LO", "S>")),
    "stash": Verb(lane=Lane.STASH, operands=("rhg", "m", "CR<")),
    "unstash": Verb(lane=Lane.UNSTASH, operands=("rhg", "m", "CR>")),
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

    def accesses(self) -> Iterator[tuple[str, bool]]:
        """Places the action touches, each with whether it writes ([Note: places])."""
        verb = VERBS[self.verb]
        for operand, kind in zip(self.operands, verb.operands, strict=True):
            if kind[-1] in "<>" and operand != NOTHING:
                yield operand, kind[-1] == ">"
        for place in verb.also:
            yield place[:-1], place[-1] == ">"
        if self.verb in ("stash", "unstash"):
            yield " ".join(self.operands[:2]), self.verb == "stash"
        elif self.verb in ("fetch", "update", "settle", "return"):
            yield f"weights {self.operands[0]}", self.verb != "fetch"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers a schedule is made from."""

    layers: tuple[int, ...]
    num_microbatches: int
    num_slots: int = 2
    num_cells: int = 6
    num_recorded_cells: int = 2
    num_gradient_slots: int = 2
    num_staging: int = 4
    training: bool = True
    frozen_layers: frozenset[int] = frozenset()
    frozen_outer: bool = False
    num_late: int = 0
    """Units, of those drained last, whose update is left to the next step."""
    pending: tuple[str, ...] = ()
    """Units whose update the step before has left, in the order of need: O, L0, L1, .."""
    device_updates: bool = False

    def __post_init__(self) -> None:
        if not self.layers or self.num_microbatches < 1:
            raise ValueError("a schedule needs at least one layer and one microbatch")
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ValueError(f"layers must be strictly increasing, found {self.layers}")
        for name, least in (
            ("num_slots", 1),
            ("num_cells", 3),
            ("num_recorded_cells", 1),
            ("num_gradient_slots", 1),
            ("num_staging", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, found {getattr(self, name)}")

    @property
    def late_units(self) -> tuple[str, ...]:
        """Units whose update this step leaves, in the order of need."""
        if not self.training or not self.num_late:
            return ()
        layers = [f"L{i}" for i in self.backward_layers if i not in self.frozen_layers]
        drained = layers if self.frozen_outer else [*layers, OUTER]
        return tuple(drained[-self.num_late :][::-1])

    @property
    def backward_layers(self) -> tuple[int, ...]:
        """Layers that need a backward pass, last first: none below the lowest trained parameter."""
        if not self.frozen_outer:
            return self.layers[::-1]
        trained = [layer for layer in self.layers if layer not in self.frozen_layers]
        return tuple(layer for layer in self.layers[::-1] if trained and layer >= trained[0])


@dataclass(frozen=True, slots=True)
class Pass:
    """One microbatch through one part of the model, in one direction; not yet placed."""

    verb: str
    microbatch: int
    layer: int | None = None
    reads: tuple[str, ...] = ()  # boundary values, "h1" or "g1"
    writes: str = NOTHING


def compute_order(shape: Shape) -> list[Pass]:
    """What the device computes: for each layer all microbatches, forward, then backward."""
    passes: list[Pass] = []
    microbatches = range(shape.num_microbatches)
    following = dict(zip(shape.layers, [*(f"h{i}" for i in shape.layers[1:]), "hE"], strict=True))
    passes += [Pass("prologue", m, writes=f"h{shape.layers[0]}") for m in microbatches]
    for layer in shape.layers:
        passes += [
            Pass("forward", m, layer, (f"h{layer}",), following[layer]) for m in microbatches
        ]
    if not shape.training:
        return passes + [Pass("score", m, reads=("hE",)) for m in microbatches]
    backward_layers = shape.backward_layers
    lowest = backward_layers[-1] if backward_layers else None
    gradient_out = "gE" if backward_layers else NOTHING
    passes += [Pass("epilogue", m, reads=("hE",), writes=gradient_out) for m in microbatches]
    for layer in backward_layers:
        out = NOTHING if layer == lowest and shape.frozen_outer else f"g{layer}"
        reads = (f"h{layer}", "g" + following[layer][1:])
        passes += [Pass("backward", m, layer, reads, out) for m in microbatches]
    if not shape.frozen_outer:
        passes += [Pass("regress", m, reads=(f"g{shape.layers[0]}",)) for m in microbatches]
    return passes


Draft = list[tuple[Pass, str, str] | Action]
"""Passes with their weight slot and gradient slot, and the actions between them."""


@dataclass(slots=True)
class _Slots:
    """Which layer is in which weight slot while a draft is written."""

    free: list[str]
    resident: dict[int, str] = field(default_factory=dict)

    def keep_next(self, upcoming: Sequence[int], num_slots: int) -> Iterator[Action]:
        """Release what is not among the next layers, fetch what is missing of them."""
        wanted = list(dict.fromkeys(upcoming))[:num_slots]
        for layer in [layer for layer in self.resident if layer not in wanted]:
            slot = self.resident.pop(layer)
            self.free.append(slot)
            yield Action("release", (f"L{layer}", slot))
        for layer in wanted:
            if layer not in self.resident:
                self.resident[layer] = self.free.pop(0)
                yield Action("fetch", (f"L{layer}", self.resident[layer]))


def add_transfers(passes: Sequence[Pass], shape: Shape) -> Draft:
    """Fetch each layer before its passes, drain and update after its last, with the slots given.

    The next `num_slots` distinct layers are kept or fetched as soon as a slot is free; the others
    are released. Layers at the turn from forward to backward therefore stay, and a step fetches
    2 x layers - slots times.
    """
    runs = [list(run) for _, run in groupby(passes, key=lambda one: (one.verb, one.layer))]
    order = [run[0].layer for run in runs if run[0].layer is not None]
    slots = _Slots([f"S{index}" for index in range(shape.num_slots)])
    draft: Draft = [Action("settle", (unit, late_staging(unit))) for unit in shape.pending]
    draft += [Action("fetch", (OUTER, "SO")), *slots.keep_next(order, shape.num_slots)]
    num_drained = 0
    for run in runs:
        verb, layer = run[0].verb, run[0].layer
        trains = verb == "backward" and layer not in shape.frozen_layers
        gradient = f"G{num_drained % shape.num_gradient_slots}" if trains else NOTHING
        slot = slots.resident[layer] if layer is not None else NOTHING
        draft += [(one, slot, gradient) for one in run]
        if verb in ("epilogue", "score"):
            draft.append(Action("report"))
        if trains and layer is not None:
            staging = f"H{num_drained % shape.num_staging}"
            draft += _leave(f"L{layer}", slot, gradient, staging, shape)
            if shape.device_updates:
                slots.free.append(slots.resident.pop(layer))
            num_drained += 1
        if layer is not None:
            order = order[1:]
            draft += slots.keep_next(order, shape.num_slots)
    if shape.training and not shape.frozen_outer:
        draft += _leave(OUTER, "SO", "GO", "HO", shape)
        if shape.device_updates:
            return draft
    return [*draft, Action("release", (OUTER, "SO"))]


def late_staging(unit: str) -> str:
    """The staging buffer of a unit whose update is late."""
    return f"H{unit}"


def _leave(unit: str, slot: str, gradient: str, staging: str, shape: Shape) -> list[Action]:
    """What happens to a unit's gradient once it is complete."""
    if shape.device_updates:
        return [Action("revise", (unit, slot, gradient)), Action("return", (unit, slot))]
    if unit in shape.late_units:
        return [Action("drain", (unit, gradient, late_staging(unit)))]
    return [Action("drain", (unit, gradient, staging)), Action("update", (unit, staging))]


@dataclass(slots=True)
class _Cells:
    """A fixed number of cells; the least recently used one is taken next.

    Least recently used gives double buffering by itself: what the next pass needs arrives in cells
    that the pass before the running one has left.
    """

    values: OrderedDict[str, str | None]  # cell -> value, least recently used first

    def find(self, value: str) -> str | None:
        """The cell that holds a value."""
        for cell, held in self.values.items():
            if held == value:
                self.values.move_to_end(cell)
                return cell
        return None

    def take(self, value: str, *, busy: set[str]) -> tuple[str, str | None]:
        """A cell for a value, and the value that had it."""
        cell = next(cell for cell in self.values if cell not in busy)
        held, self.values[cell] = self.values[cell], value
        self.values.move_to_end(cell)
        return cell, held


def add_stash(draft: Draft, shape: Shape) -> list[Action]:
    """Give every boundary value a cell; stash what loses its cell before its last use.

    Runs twice: the first round learns which values lose their cell, the second stashes exactly
    those, as soon as they are written, so that the copy out is done long before the cell is reused.
    """
    first = _Placing(draft, shape, stashed=frozenset())
    return _Placing(draft, shape, stashed=frozenset(first.evicted)).lines


class _Placing:
    """One round of `add_stash`."""

    def __init__(self, draft: Draft, shape: Shape, *, stashed: frozenset[str]) -> None:
        self.lines: list[Action] = []
        self.evicted: set[str] = set()
        self._stashed = stashed
        self._pools = {
            "C": _Cells(OrderedDict((f"C{i}", None) for i in range(shape.num_cells))),
            "R": _Cells(OrderedDict((f"R{i}", None) for i in range(shape.num_recorded_cells))),
        }
        self._uses_left = _count_uses(draft)
        self._busy: set[str] = set()
        for item in draft:
            if isinstance(item, Action):
                self.lines.append(item)
            else:
                self._place(*item)

    def _place(self, one: Pass, slot: str, gradient: str) -> None:
        self._busy = set()
        in_layer = one.layer is not None
        operands = [f"L{one.layer}"] if in_layer else []
        operands.append(f"m{one.microbatch}")
        operands += [slot] if in_layer else []
        operands += [gradient] if one.verb == "backward" else []
        written: dict[str, str] = {}
        recorded = f"r m{one.microbatch}"
        if one.verb == "prologue":
            written[recorded] = self._take("R", recorded)
            operands.append(written[recorded])
        elif in_layer:
            operands.append(self._read("R", recorded))
        operands += [self._read("C", f"{value} m{one.microbatch}") for value in one.reads]
        if one.writes != NOTHING:
            value = f"{one.writes} m{one.microbatch}"
            written[value] = self._take("C", value)
            operands.append(written[value])
        elif one.verb in ("epilogue", "backward"):
            operands.append(NOTHING)
        self.lines.append(Action(one.verb, tuple(operands)))
        for value, cell in written.items():
            if value in self._stashed:
                self.lines.append(Action("stash", (*value.split(), cell)))

    def _read(self, kind: str, value: str) -> str:
        cell = self._pools[kind].find(value)
        if cell is None:
            cell = self._take(kind, value)
            self.lines.append(Action("unstash", (*value.split(), cell)))
        self._busy.add(cell)
        self._uses_left[value] -= 1
        return cell

    def _take(self, kind: str, value: str) -> str:
        cell, held = self._pools[kind].take(value, busy=self._busy)
        if held is not None and self._uses_left.get(held):
            self.evicted.add(held)
        self._busy.add(cell)
        return cell


def _count_uses(draft: Draft) -> dict[str, int]:
    """How many passes read each value."""
    uses: dict[str, int] = {}
    for item in draft:
        if not isinstance(item, Action):
            one = item[0]
            for value in [*one.reads, "r"] if one.layer is not None else one.reads:
                key = f"{value} m{one.microbatch}"
                uses[key] = uses.get(key, 0) + 1
    return uses


@dataclass(slots=True)
class _Orders:
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
        mine, theirs = self.known[wait.lane], self.done[wait.action][2]
        for lane in Lane:
            mine[lane] = max(mine[lane], theirs[lane])

    def perform(self, action: Action) -> None:
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
    orders, lines = _Orders(), list[Line]()
    for action in actions:
        for earlier in orders.missing(action):
            wait = Wait(action.lane, earlier)
            orders.wait(wait)
            lines.append(wait)
        orders.perform(action)
        lines.append(action)
    return lines


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
    orders = _Orders()
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
