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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    "epilogue": Verb(
        lane=Lane.COMPUTE, operands=("m", "C<", "C>"), also=("SO<", "GO>", "loss>")
    ),
    "backward": Verb(
        lane=Lane.COMPUTE, operands=("L", "m", "S<", "G>", "R<", "C<", "C<", "C>")
    ),
    "regress": Verb(lane=Lane.COMPUTE, operands=("m", "C<"), also=("SO<", "GO>")),
    "report": Verb(lane=Lane.DRAIN, operands=(), also=("loss<", "host loss>")),
    "drain": Verb(lane=Lane.DRAIN, operands=("LO", "G<", "H>")),
    "update": Verb(lane=Lane.UPDATE, operands=("LO", "H<"), also=("host loss<",)),
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
    """What the device computes, in order: for each layer all microbatches, forward then backward."""
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


Draft = list[Pass | Action]


def add_transfers(passes: Sequence[Pass], shape: Shape) -> tuple[Draft, dict[int, dict[str, str]]]:
    """Fetch each layer before its passes, drain and update after its last, with the slots given.

    The next `num_slots` distinct layers are kept or fetched as soon as a slot is free; the others
    are released. Layers at the turn from forward to backward therefore stay, and a step fetches
    2 x layers - slots times.

    Returns:
        the draft, and for each pass (by its position in `passes`) the slots it works in.
    """
    runs = _runs(passes)
    order = [passes[start].layer for start, _ in runs if passes[start].layer is not None]
    draft: Draft = [Action("fetch", (OUTER, "SO"))]
    places: dict[int, dict[str, str]] = {}
    resident: dict[int, str] = {}
    free = [f"S{index}" for index in range(shape.num_slots)]
    num_backward_runs = 0

    def keep_next(upcoming: Sequence[int | None]) -> None:
        wanted = list(OrderedDict.fromkeys(upcoming))[: shape.num_slots]
        for layer in [layer for layer in resident if layer not in wanted]:
            slot = resident.pop(layer)
            draft.append(Action("release", (f"L{layer}", slot)))
            free.append(slot)
        for layer in wanted:
            if layer is not None and layer not in resident:
                resident[layer] = free.pop(0)
                draft.append(Action("fetch", (f"L{layer}", resident[layer])))

    keep_next(order)
    layer_run = 0
    for start, end in runs:
        first = passes[start]
        gradient = NOTHING
        if first.verb == "backward" and first.layer not in shape.frozen_layers:
            gradient = f"G{num_backward_runs % shape.num_gradient_slots}"
        for position in range(start, end):
            slot = resident[first.layer] if first.layer is not None else NOTHING
            places[position] = {"S": slot, "G": gradient}
            draft.append(passes[position])
        if first.verb == "epilogue":
            draft.append(Action("report"))
        if gradient != NOTHING:
            staging = f"H{num_backward_runs % shape.num_staging}"
            draft.append(Action("drain", (f"L{first.layer}", gradient, staging)))
            draft.append(Action("update", (f"L{first.layer}", staging)))
            num_backward_runs += 1
        if first.layer is not None:
            layer_run += 1
            keep_next(order[layer_run:])
    if not shape.training:
        draft.append(Action("report"))
    elif not shape.frozen_outer:
        draft += [Action("drain", (OUTER, "GO", "HO")), Action("update", (OUTER, "HO"))]
    draft.append(Action("release", (OUTER, "SO")))
    return draft, places


def _runs(passes: Sequence[Pass]) -> list[tuple[int, int]]:
    """Ranges of consecutive passes with the same verb and layer."""
    runs: list[tuple[int, int]] = []
    for position, one in enumerate(passes):
        if position and (one.verb, one.layer) == (
            passes[position - 1].verb,
            passes[position - 1].layer,
        ):
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs


@dataclass(slots=True)
class _Cells:
    """A fixed number of cells; the least recently used one is taken next.

    Least recently used gives double buffering by itself: what the next pass needs arrives in cells
    that the pass before the running one has left.
    """

    names: OrderedDict[str, str | None]  # cell -> value, least recently used first
    evicted: set[str] = field(default_factory=set)

    def find(self, value: str) -> str | None:
        for cell, held in self.names.items():
            if held == value:
                self.names.move_to_end(cell)
                return cell
        return None

    def take(self, value: str, *, busy: set[str], live: set[str]) -> str:
        cell = next(cell for cell in self.names if cell not in busy)
        held = self.names[cell]
        if held is not None and held in live:
            self.evicted.add(held)
        self.names[cell] = value
        self.names.move_to_end(cell)
        return cell


def add_stash(draft: Draft, places: Mapping[int, Mapping[str, str]], shape: Shape) -> list[Action]:
    """Give every boundary value a cell; stash what loses its cell before its last use.

    Runs twice: the first round learns which values lose their cell, the second stashes exactly
    those, as soon as they are written, so that the copy out is done long before the cell is reused.
    """
    _, evicted = _place_values(draft, places, shape, stashed=frozenset())
    lines, _ = _place_values(draft, places, shape, stashed=frozenset(evicted))
    return lines


def _place_values(
    draft: Draft,
    places: Mapping[int, Mapping[str, str]],
    shape: Shape,
    *,
    stashed: frozenset[str],
) -> tuple[list[Action], set[str]]:
    cells = _Cells(OrderedDict((f"C{index}", None) for index in range(shape.num_cells)))
    recorded = _Cells(OrderedDict((f"R{i}", None) for i in range(shape.num_recorded_cells)))
    uses = _count_uses(draft)
    lines: list[Action] = []
    position = 0

    def live() -> set[str]:
        return {value for value, count in uses.items() if count}

    def read(pool: _Cells, value: str, busy: set[str]) -> str:
        cell = pool.find(value)
        if cell is None:
            cell = pool.take(value, busy=busy, live=live())
            lines.append(Action("unstash", (*value.split(), cell)))
        busy.add(cell)
        return cell

    def write(pool: _Cells, value: str, busy: set[str]) -> str:
        cell = pool.take(value, busy=busy, live=live())
        busy.add(cell)
        return cell

    for item in draft:
        if isinstance(item, Action):
            lines.append(item)
            continue
        place, busy, suffix = places[position], set[str](), f" m{item.microbatch}"
        position += 1
        operands = [f"L{item.layer}"] if item.layer is not None else []
        operands.append(f"m{item.microbatch}")
        operands += [place["S"]] if item.verb in ("forward", "backward") else []
        operands += [place["G"]] if item.verb == "backward" else []
        if item.verb == "prologue":
            operands.append(write(recorded, "r" + suffix, busy))
        elif item.verb in ("forward", "backward"):
            operands.append(read(recorded, "r" + suffix, busy))
            uses["r" + suffix] -= 1
        operands += [read(cells, value + suffix, busy) for value in item.reads]
        for value in item.reads:
            uses[value + suffix] -= 1
        if item.verb not in ("score", "regress"):
            written = item.writes != NOTHING
            operands.append(write(cells, item.writes + suffix, busy) if written else NOTHING)
        lines.append(Action(item.verb, tuple(operands)))
        fresh = ["r" + suffix] if item.verb == "prologue" else []
        fresh += [item.writes + suffix] if item.writes != NOTHING else []
        for value in fresh:
            if value in stashed:
                pool = recorded if value.startswith("r") else cells
                lines.append(Action("stash", (*value.split(), str(pool.find(value)))))
    return lines, cells.evicted | recorded.evicted


def _count_uses(draft: Draft) -> dict[str, int]:
    uses: dict[str, int] = {}
    for item in draft:
        if isinstance(item, Pass):
            values = [*item.reads, "r"] if item.layer is not None else list(item.reads)
            for value in values:
                key = f"{value} m{item.microbatch}"
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
    draft, places = add_transfers(compute_order(shape), shape)
    schedule = Schedule(shape=shape, lines=tuple(add_waits(add_stash(draft, places, shape))))
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
    if action.verb == "release":
        del contents[action.operands[1]]
    contents.update(leaves)


def _contents(action: Action, shape: Shape) -> tuple[dict[str, str], dict[str, str]]:
    """What an action expects in places, and what it leaves there."""
    verb, operands = action.verb, action.operands
    if verb in ("fetch", "release"):
        unit, slot = operands
        return ({}, {slot: unit}) if verb == "fetch" else ({slot: unit}, {})
    if verb in ("stash", "unstash"):
        value, cell = " ".join(operands[:2]), operands[2]
        host = f"host {value}"
        return ({cell: value}, {host: value}) if verb == "stash" else ({host: value}, {cell: value})
    if verb in ("forward", "backward"):
        layer, microbatch, slot = operands[:3]
        after = shape.layers.index(int(layer[1:])) + 1
        following = str(shape.layers[after]) if after < len(shape.layers) else "E"
        hidden = f"h{layer[1:]} {microbatch}"
        if verb == "forward":
            recorded, before, out = operands[3:]
            expects = {slot: layer, recorded: f"r {microbatch}", before: hidden}
            return expects, {out: f"h{following} {microbatch}"}
        _, recorded, before, gradient, out = operands[3:]
        expects = {slot: layer, recorded: f"r {microbatch}", before: hidden}
        expects[gradient] = f"g{following} {microbatch}"
        return expects, {out: f"g{layer[1:]} {microbatch}"}
    if verb in ("prologue", "epilogue", "score", "regress"):
        microbatch = operands[0]
        first = shape.layers[0]
        if verb == "prologue":
            leaves = {operands[1]: f"r {microbatch}", operands[2]: f"h{first} {microbatch}"}
            return {"SO": OUTER}, leaves
        entering = f"g{first}" if verb == "regress" else "hE"
        leaves = {operands[2]: f"gE {microbatch}"} if verb == "epilogue" else {}
        return {"SO": OUTER, operands[1]: f"{entering} {microbatch}"}, leaves
    return {}, {}


def lane_counts(lines: Iterable[Line]) -> dict[Lane, int]:
    """Number of actions on every lane."""
    counts = dict.fromkeys(Lane, 0)
    for line in lines:
        if isinstance(line, Action):
            counts[line.lane] += 1
    return counts
