"""From a shape to actions: compute order, then transfers, then the stash. Pure list to list.

`compute_order` says what is computed; `add_transfers` adds slots, fetches and releases, gradient
slots, drains and updates; `add_stash` gives every boundary tensor a cell and moves what does not
fit to the stash and back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from l2l.schedule.lines import NOTHING, OUTER, Action


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
