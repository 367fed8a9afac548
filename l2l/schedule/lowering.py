"""From a shape to actions: compute order, then transfers, then the stash. Pure list to list.

`compute_order` says what is computed; `add_transfers` adds slots, fetches and releases, gradient
slots, drains and updates; `add_stash` gives every boundary tensor a cell and moves what does not
fit to the stash and back.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

from l2l.schedule.lines import NOTHING, OUTER, Action

NUM_LENT = 4  # pieces of optimizer state that are on the device at once
LENDING_AHEAD = 6  # layers by which such lines come before the layer is needed, at least


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterUnit:
    """Parameters around the layers, and where the step reads them."""

    name: str = OUTER
    in_prologue: bool = True
    """Read on the device before the layers."""
    in_epilogue: bool = True
    looked_up: bool = False
    """Its rows are gathered on the host before the layers."""
    trained: bool = True
    device_state: bool = False
    """Its optimizer state is on the device, where it stays from step to step."""

    @property
    def is_read(self) -> bool:
        """Whether any phase reads it on the device."""
        return self.in_prologue or self.in_epilogue

    @property
    def stays(self) -> bool:
        """Whether it is on the device for the whole step."""
        return self.device_state or (self.in_prologue and self.in_epilogue)

    @property
    def before_layers(self) -> bool:
        """Whether the gradient of the first hidden state reaches it."""
        return self.in_prologue or self.looked_up

    @property
    def passes(self) -> bool:
        """Whether it is on the device for the epilogue only."""
        return self.in_epilogue and not self.in_prologue and not self.device_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers a schedule is made from."""

    layers: tuple[int, ...]
    num_microbatches: int
    num_slots: int = 2
    num_cells: int = 6
    num_recorded_cells: int = 2
    num_kept_cells: int = 0
    """Cells for what forward passes keep for their backward passes; 0: everything is recomputed."""
    num_gradient_slots: int = 2
    num_staging: int = 4
    training: bool = True
    frozen_layers: frozenset[int] = frozenset()
    outer: tuple[OuterUnit, ...] = (OuterUnit(),)
    num_tail: int = 0
    """Layers, the last of them, that stay on the device and are walked with the epilogue."""
    device_state: frozenset[int] = frozenset()
    """Layers of the tail whose optimizer state is on the device."""
    held: frozenset[str] = frozenset()
    """Units that are in their slots before the step begins."""
    num_late: int = 0
    """Units, of those drained last, whose update is left to the next step."""
    pending: tuple[str, ...] = ()
    """Units whose update the step before has left."""
    device_updates: bool = False
    shared: frozenset[int] = frozenset()
    """Streamed layers whose update is done on the device, with borrowed state."""
    num_pieces: int = 16
    """In which the state of such a layer is lent."""
    halves: bool = False
    """Whether late updates are done in two: weights before they are needed, moments afterwards."""
    num_whole: int = 0
    """Layers, of those needed last, whose late update is done at once nevertheless."""
    whole_tables: bool = False
    """Whether those of tables that are looked up are, too."""
    shares_memory: bool = False
    """Whether units of the epilogue and the gradients of layers take turns in the same memory."""
    parallel: bool = False
    """Whether several ranks hold the units together."""

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ValueError("a schedule needs at least one microbatch")
        if list(self.layers) != sorted(set(self.layers)) or min(self.layers, default=0) < 0:
            raise ValueError(f"layers must be strictly increasing, found {self.layers}")
        for name, least in (
            ("num_slots", 1),
            ("num_cells", 3),
            ("num_recorded_cells", 1),
            ("num_gradient_slots", 1),
            ("num_staging", 1),
            ("num_tail", 0),
            ("num_pieces", 1),
            ("num_whole", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, found {getattr(self, name)}")
        if self.num_tail > len(self.layers):
            raise ValueError(f"num_tail={self.num_tail}, but there are {len(self.layers)} layers")
        if not self.device_state <= {*self.tail}:
            raise ValueError(f"device_state={sorted(self.device_state)}: the tail is {self.tail}")
        rows = [unit for unit in self.outer if unit.looked_up]
        if any(unit.in_prologue or unit.device_state for unit in rows):
            raise ValueError("a table that is looked up on the host is not on the device for that")
        if self.device_updates and (self.on_device or any(unit.trained for unit in rows)):
            raise ValueError("device_updates leave nothing: no device_state, no trained lookups")
        if self.parallel and (self.on_device or self.shared or rows):
            raise ValueError("ranks share everything: no device_state, no lookups, nothing lent")

    def only(self, layers: tuple[int, ...]) -> Shape:
        """The same step with some of its layers; those of the tail are walked there."""
        num_tail = len({*self.tail} & {*layers})
        fewer = replace(
            self,
            layers=layers,
            num_tail=num_tail,
            num_slots=max(1, min(self.num_slots, len(layers) - num_tail)),
            device_state=self.device_state & {*layers},
            shared=self.shared & {*layers},
        )
        late = {*self.late_units}  # the same are late: they have staging of their own
        return replace(fewer, num_late=sum(unit in late for unit in fewer.drained_units))

    @property
    def streamed(self) -> tuple[int, ...]:
        """Layers that come and go."""
        return self.layers[: len(self.layers) - self.num_tail]

    @property
    def tail(self) -> tuple[int, ...]:
        """Layers that stay for the whole step."""
        return self.layers[len(self.layers) - self.num_tail :]

    @property
    def first_value(self) -> str:
        """The hidden state that the prologue makes."""
        return f"h{self.streamed[0]}" if self.streamed else "hE"

    @property
    def trains_prologue(self) -> bool:
        """Whether anything before the layers is trained."""
        return any(unit.trained and unit.before_layers for unit in self.outer)

    @property
    def backward_layers(self) -> tuple[int, ...]:
        """Streamed layers that need a backward pass, last first: none below what is trained."""
        if self.trains_prologue:
            return self.streamed[::-1]
        trained = [layer for layer in self.streamed if layer not in self.frozen_layers]
        return tuple(layer for layer in self.streamed[::-1] if trained and layer >= trained[0])

    @property
    def drained_units(self) -> tuple[str, ...]:
        """Units whose gradient leaves for the host, first drained first."""
        outer = [unit for unit in self.outer if unit.trained and not unit.device_state]
        layers = [*self.tail[::-1], *self.backward_layers]
        return (
            *(unit.name for unit in outer if unit.passes and not unit.looked_up),
            *(
                f"L{layer}"
                for layer in layers
                if layer not in self.frozen_layers and layer not in self.device_state
            ),
            *(unit.name for unit in outer if unit.in_prologue and not unit.looked_up),
        )

    @property
    def late_units(self) -> tuple[str, ...]:
        """Units whose update this step leaves to the next."""
        if not self.training or self.device_updates:
            return ()
        drained = self.drained_units
        late = drained[len(drained) - min(self.num_late, len(drained)) :]
        rows = [unit.name for unit in self.outer if unit.trained and unit.looked_up]
        frozen = {unit.name for unit in self.outer if not unit.trained}
        frozen |= {f"L{layer}" for layer in self.frozen_layers}
        return (*(unit for unit in self.on_device if unit not in frozen), *rows, *late)

    @property
    def reworked(self) -> tuple[str, ...]:
        """Units whose update the step before has left and this one does on the device."""
        if not self.training:
            return ()
        return tuple(f"L{i}" for i in self.streamed if i in self.shared and f"L{i}" in self.pending)

    @property
    def redone(self) -> tuple[str, ...]:
        """Units whose update this step does on the device, under its own backward passes."""
        if not self.training or self.device_updates or not self.shared:
            return ()
        late = {*self.late_units}
        own = (f"L{i}" for i in self.backward_layers if i in self.shared - self.frozen_layers)
        return tuple(unit for unit in own if unit not in late)

    @property
    def on_device(self) -> tuple[str, ...]:
        """Units whose optimizer state is on the device."""
        outer = [unit.name for unit in self.outer if unit.device_state and unit.is_read]
        return (*outer, *(f"L{i}" for i in self.tail if i in self.device_state))


@dataclass(frozen=True, slots=True)
class Pass:
    """One microbatch through one part of the model, in one direction; not yet placed."""

    verb: str
    microbatch: int
    layer: int | None = None
    reads: tuple[str, ...] = ()  # boundary values, "h1" or "g1"
    writes: str = NOTHING
    recorded: bool = False  # whether it reads the recorded arguments
    kept: bool = False  # whether a forward pass writes, or a backward pass reads, what was kept


def compute_order(shape: Shape) -> list[Pass]:
    """What the device computes: for each layer all microbatches, forward, then backward."""
    passes: list[Pass] = []
    microbatches = range(shape.num_microbatches)
    streamed, kept = shape.streamed, shape.num_kept_cells > 0
    following = {a: f"h{b}" for a, b in pairwise([*streamed, "E"])}
    rows = ("e",) if any(unit.looked_up for unit in shape.outer) else ()
    prologue = [Pass("prologue", m, reads=rows, writes=shape.first_value) for m in microbatches]
    backward_layers = shape.backward_layers if shape.training else ()
    for layer in streamed:
        keeps = kept and layer in backward_layers
        passes += [
            Pass("forward", m, layer, (f"h{layer}",), following[layer], recorded=True, kept=keeps)
            for m in microbatches
        ]
    if rows and streamed:  # rows of a microbatch may be late: the first layer does not wait for all
        opening = zip(prologue, passes[: len(prologue)], strict=True)
        passes[: len(prologue)] = [one for pair in opening for one in pair]
    else:
        passes = prologue + passes
    walks = shape.num_tail > 0
    if not shape.training:
        return passes + [Pass("score", m, reads=("hE",), recorded=walks) for m in microbatches]
    lowest = backward_layers[-1] if backward_layers else None
    needs_gradient = bool(backward_layers) or shape.trains_prologue
    passes += [
        Pass("epilogue", m, None, ("hE",), "gE" if needs_gradient else NOTHING, recorded=walks)
        for m in microbatches
    ]
    for layer in backward_layers:
        out = NOTHING if layer == lowest and not shape.trains_prologue else f"g{layer}"
        reads = (f"h{layer}", "g" + following[layer][1:])
        passes += [
            Pass("backward", m, layer, reads, out, recorded=True, kept=kept) for m in microbatches
        ]
    if shape.trains_prologue:
        gradient = "g" + shape.first_value[1:]
        out = "x" if any(unit.looked_up and unit.trained for unit in shape.outer) else NOTHING
        passes += [Pass("regress", m, None, (gradient, *rows), out) for m in microbatches]
    return passes


Draft = list[tuple[Pass, str, str] | Action]
"""Passes with their weight slots and gradient slots, and the actions between them."""


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
    """Fetch each unit before its passes, drain and update after its last, with the slots given.

    The next `num_slots` distinct layers are kept or fetched as soon as a slot is free; the others
    are released. Layers at the turn from forward to backward therefore stay, and a step fetches
    2 x layers - slots times.
    """
    draft = _Transfers(shape, passes).draft
    if shape.parallel:
        draft = list(_with_collectives(draft))
    return [*_host_lines(draft, shape), *draft]


def _with_collectives(draft: Draft) -> Iterator[tuple[Pass, str, str] | Action]:
    """What ranks say to each other: weights after a fetch, gradients before they leave."""
    for item in draft:
        if isinstance(item, Action):
            unit = item.operands[0] if item.operands else ""
            if item.verb in ("drain", "revise"):
                gradient = item.operands[1 if item.verb == "drain" else 2]
                yield Action("reduce", (unit, gradient))
            elif item.verb == "report":
                yield Action("pool")
        yield item
        if isinstance(item, Action) and item.verb == "fetch":
            yield Action("gather", item.operands)


class _Transfers:
    """Writes the draft of `add_transfers`, run by run."""

    def __init__(self, shape: Shape, passes: Sequence[Pass]) -> None:
        self._shape = shape
        self._slots = _Slots([f"S{index}" for index in range(shape.num_slots)])
        self._num_drained = 0
        self._num_staged = 0
        self.draft: Draft = []
        runs = [list(run) for _, run in groupby(passes, key=lambda one: (one.verb, one.layer))]
        self._order = [run[0].layer for run in runs if run[0].layer is not None]
        if shape.shares_memory and shape.training:
            self.draft += [Action("drop", (name,)) for name in self._gradient_slots()]
        self.draft += [Action("take", (place,)) for place in self._lent_places(shape.reworked)]
        self._redone = frozenset(shape.redone)
        self._late = frozenset(shape.late_units)
        self._lent = deque(shape.reworked)
        self._num_lent = 0
        self._rework(before=0)
        self._fetch(u for u in shape.outer if u.in_prologue or u.name in shape.on_device)
        self._renew([unit.name for unit in shape.outer if unit.device_state])
        self.draft += self._slots.keep_next(self._order, shape.num_slots)
        for index, run in enumerate(runs):
            following = runs[index + 1][0].verb if index + 1 < len(runs) else None
            if following in ("epilogue", "score"):
                self._prepare_epilogue()
            elif following == "regress":
                again = (u for u in shape.outer if u.in_prologue and not u.stays)
                self._fetch(again)
            if run[0].verb == "forward":
                self._rework(before=run[0].layer or 0)
            getattr(self, f"_{run[0].verb}")(run)
            if run[0].layer is not None:
                self._order = self._order[1:]
                self.draft += self._slots.keep_next(self._order, shape.num_slots)
        self._release(unit for unit in shape.outer if unit.stays)
        self.draft += [Action("drop", (place,)) for place in self._lent_places(self._redone)]

    def _prologue(self, run: list[Pass]) -> None:
        before = [unit for unit in self._shape.outer if unit.in_prologue]
        self.draft += [(one, _places("S", before), NOTHING) for one in run]
        if run[-1].microbatch == self._shape.num_microbatches - 1:
            self._release(unit for unit in before if not unit.stays)

    def _forward(self, run: list[Pass]) -> None:
        assert run[0].layer is not None
        self.draft += [(one, self._slots.resident[run[0].layer], NOTHING) for one in run]

    def _rework(self, *, before: int) -> None:
        """Updates that the step before has left to the device, piece by piece.

        All of them at the beginning would be submitted before the first pass, and fill the queues.
        """
        shape, ahead = self._shape, max(LENDING_AHEAD, self._shape.num_slots + 1)
        last = shape.streamed[: bisect_left(shape.streamed, before) + ahead + 1][-1:]
        while self._lent and int(self._lent[0][1:]) <= last[0]:
            unit = self._lent.popleft()
            for piece in range(shape.num_pieces):
                place = f"W{self._num_lent % NUM_LENT}"
                self._num_lent += 1
                self.draft += [
                    Action("borrow", (unit, f"p{piece}", late_staging(unit), place)),
                    Action("rework", (unit, f"p{piece}", place)),
                    Action("repay", (unit, f"p{piece}", place)),
                ]

    def _lent_places(self, units: Collection[str]) -> list[str]:
        """Places for lent state of units that the schedule takes itself."""
        shape = self._shape
        number = min(NUM_LENT, shape.num_pieces * len(units)) if shape.shares_memory else 0
        return [f"W{index}" for index in range(number)]

    def _prepare_epilogue(self) -> None:
        """Bring what the epilogue needs; it arrives under the passes before."""
        shape = self._shape
        passing = [unit for unit in shape.outer if unit.passes]
        self.draft += [Action("drop", (place,)) for place in self._lent_places(shape.reworked)]
        if shape.shares_memory:
            self.draft += [Action("take", (f"S{unit.name}",)) for unit in passing]
        self.draft += [
            Action("fetch", (f"L{layer}", f"SL{layer}"))
            for layer in shape.tail
            if f"L{layer}" not in shape.held
        ]
        self._fetch(passing)

    def _gradient_slots(self) -> list[str]:
        trained = [i for i in self._shape.backward_layers if i not in self._shape.frozen_layers]
        return [f"G{i}" for i in range(min(self._shape.num_gradient_slots, len(trained)))]

    def _renew(self, units: Iterable[str]) -> None:
        """Updates on the device that the step before has left."""
        for unit in units:
            if unit in self._shape.on_device and unit in self._shape.pending:
                self.draft.append(Action("renew", (unit, f"S{unit}", f"G{unit}")))
                self.draft.append(Action("mirror", (unit, f"S{unit}")))

    def _score(self, run: list[Pass]) -> None:
        self._epilogue(run)

    def _epilogue(self, run: list[Pass]) -> None:
        shape = self._shape
        self._renew(f"L{layer}" for layer in shape.tail)
        units = [unit for unit in shape.outer if unit.in_epilogue]
        trained = [unit for unit in units if unit.trained]
        tail = [f"L{layer}" for layer in shape.tail]
        trained_tail = [f"L{layer}" for layer in shape.tail if layer not in shape.frozen_layers]
        slots = _join([*(f"S{unit.name}" for unit in units), *(f"S{name}" for name in tail)])
        gradients = _join(
            [*(f"G{unit.name}" for unit in trained), *(f"G{name}" for name in trained_tail)]
        )
        passing = [unit for unit in units if unit.passes]
        if shape.training and shape.shares_memory:
            self.draft += [Action("take", (f"G{unit.name}",)) for unit in passing if unit.trained]
        self.draft += [(one, slots, gradients) for one in run]
        self.draft.append(Action("report"))
        self.draft += [Action("assign", (unit,)) for unit in shape.redone]
        for unit in passing:
            if shape.training and unit.trained:
                self._leave(unit.name, f"S{unit.name}", f"G{unit.name}")
            if not (shape.training and shape.device_updates and unit.trained):
                self._release([unit])
        for layer in shape.tail[::-1]:
            self._leave_tail(layer)
        for unit in trained:
            if unit.device_state and not unit.in_prologue and shape.training:
                self.draft.append(Action("measure", (unit.name, f"G{unit.name}")))
        if shape.shares_memory:
            names = [f"S{unit.name}" for unit in passing]
            if shape.training:
                names += [f"G{unit.name}" for unit in passing if unit.trained]
            self.draft += [Action("drop", (name,)) for name in names]
            if shape.training:
                lent = self._lent_places(self._redone)
                self.draft += [Action("take", (name,)) for name in self._gradient_slots() + lent]

    def _leave_tail(self, layer: int) -> None:
        shape, unit, slot, gradient = self._shape, f"L{layer}", f"SL{layer}", f"GL{layer}"
        trains = shape.training and layer not in shape.frozen_layers
        if layer in shape.device_state:
            if trains:
                self.draft.append(Action("measure", (unit, gradient)))
            return
        if trains:
            self._leave(unit, slot, gradient)
        if not (trains and shape.device_updates) and unit not in shape.held:
            self.draft.append(Action("release", (unit, slot)))

    def _backward(self, run: list[Pass]) -> None:
        shape, layer = self._shape, run[0].layer
        assert layer is not None
        trains = layer not in shape.frozen_layers
        gradient = f"G{self._num_drained % shape.num_gradient_slots}" if trains else NOTHING
        slot = self._slots.resident[layer]
        unit = f"L{layer}"
        if unit in self._redone:
            self._redo(run, slot, gradient)
        else:
            self.draft += [(one, slot, gradient) for one in run]
            if trains:
                self._leave(unit, slot, gradient)
        if trains and shape.device_updates:
            self._slots.free.append(self._slots.resident.pop(layer))
        self._num_drained += trains

    def _redo(self, run: list[Pass], slot: str, gradient: str) -> None:
        """Backward passes, and the update on the device: its state arrives under them."""
        unit, number = f"L{run[0].layer}", self._shape.num_pieces
        pieces = [(f"p{index}", f"W{index % NUM_LENT}") for index in range(number)]
        leases = [Action("lease", (unit, *piece)) for piece in pieces]
        self.draft += leases[:NUM_LENT]
        self.draft += [(one, slot, gradient) for one in run]
        self.draft.append(Action("measure", (unit, gradient)))
        for index, (piece, place) in enumerate(pieces):
            if index >= NUM_LENT:  # its place was another piece's before
                self.draft.append(leases[index])
            self.draft.append(Action("redo", (unit, piece, slot, gradient, place)))
            self.draft.append(Action("repay", (unit, piece, place)))

    def _regress(self, run: list[Pass]) -> None:
        shape = self._shape
        before = [unit for unit in shape.outer if unit.in_prologue]
        trained = [unit for unit in before if unit.trained]
        slots, gradients = _places("S", before), _places("G", trained)
        collected = [unit.name for unit in shape.outer if unit.looked_up and unit.trained]
        for one in run:
            self.draft.append((one, slots, gradients))
            self.draft += [
                Action("collect", (unit, f"m{one.microbatch}", late_staging(unit)))
                for unit in collected
            ]
        for unit in trained:
            if unit.device_state:
                self.draft.append(Action("measure", (unit.name, f"G{unit.name}")))
            else:
                self._leave(unit.name, f"S{unit.name}", f"G{unit.name}")
        returned = {unit.name for unit in trained} if shape.device_updates else set()
        self._release(u for u in before if not u.stays and u.name not in returned)

    def _leave(self, unit: str, slot: str, gradient: str) -> None:
        """What happens to a unit's gradient once it is complete."""
        shape = self._shape
        if shape.device_updates:
            self.draft += [Action("revise", (unit, slot, gradient)), Action("return", (unit, slot))]
        elif unit in self._late:
            self.draft.append(Action("drain", (unit, gradient, late_staging(unit))))
        else:
            own = unit.startswith("L")
            staging = f"H{self._num_staged % shape.num_staging}" if own else late_staging(unit)
            self._num_staged += own
            self.draft += [
                Action("drain", (unit, gradient, staging)),
                Action("update", (unit, staging)),
            ]

    def _fetch(self, units: Iterable[OuterUnit]) -> None:
        self.draft += [
            Action("fetch", (unit.name, f"S{unit.name}"))
            for unit in units
            if unit.name not in self._shape.held
        ]

    def _release(self, units: Iterable[OuterUnit]) -> None:
        shape = self._shape
        returned = shape.training and shape.device_updates
        self.draft += [
            Action("release", (unit.name, f"S{unit.name}"))
            for unit in units
            if not unit.device_state and not (unit.stays and unit.trained and returned)
        ]


def _host_lines(draft: Draft, shape: Shape) -> list[Action]:
    """What the host does first: updates that were left, in the order of need, and lookups."""
    looked_up = [unit.name for unit in shape.outer if unit.looked_up]
    on_device = [*shape.on_device, *shape.reworked]
    lines = [Action("order", (unit,)) for unit in on_device if unit in shape.pending]
    fetched = [line.operands[0] for line in _actions(draft) if line.verb == "fetch"]
    needed = [unit for unit in dict.fromkeys([*fetched, *shape.pending]) if unit in shape.pending]
    own = [unit for unit in needed if unit not in on_device]
    halved = _halved(own, shape) if shape.halves and shape.training else frozenset()
    settled = [Action("advance" if u in halved else "settle", (u, late_staging(u))) for u in own]
    drained = {unit: index for index, unit in enumerate(shape.drained_units)}
    own.sort(key=lambda unit: drained.get(unit, -1))  # tables leave first: with the epilogue
    completed = [Action("complete", (unit, late_staging(unit))) for unit in own if unit in halved]
    for m in range(shape.num_microbatches if looked_up else 0):
        lines += [
            Action("refresh", (unit, f"m{m}", late_staging(unit)))
            for unit in looked_up
            if unit in shape.pending
        ]
        lines.append(Action("lookup", (f"m{m}",)))
        if m == 0 and settled and settled[0].operands[0].startswith("L"):
            lines.append(settled.pop(0))  # what the first microbatch needs next
    return lines + settled + completed


def _halved(needed: Sequence[str], shape: Shape) -> frozenset[str]:
    """Units, in the order of need, whose late update is done in two."""
    layers = [unit for unit in needed if unit.startswith("L")]
    whole = layers[max(0, len(layers) - shape.num_whole) :]
    tables = [unit.name for unit in shape.outer if unit.looked_up] if shape.whole_tables else []
    return frozenset(needed) - frozenset(whole) - frozenset(tables)


def _actions(draft: Draft) -> Iterator[Action]:
    return (item for item in draft if isinstance(item, Action))


def late_staging(unit: str) -> str:
    """The staging buffer of a unit whose update is late."""
    return f"H{unit}"


def _join(places: Sequence[str]) -> str:
    return ",".join(places) or NOTHING


def _places(kind: str, units: Iterable[OuterUnit]) -> str:
    return _join([f"{kind}{unit.name}" for unit in units])


@dataclass(slots=True)
class _Cells:
    """A fixed number of cells, each with the value it holds.

    A new value takes the cell whose value is needed last, or not at all any more. Cells that the
    last passes have touched are left alone if others are there: what the next pass needs should
    arrive while the running one still works on its own cells.
    """

    values: OrderedDict[str, str | None]  # cell -> value, least recently used first
    touched: dict[str, int] = field(default_factory=dict)  # cell -> pass that used it last

    def find(self, value: str, now: int) -> str | None:
        """The cell that holds a value."""
        for cell, held in self.values.items():
            if held == value:
                self._touch(cell, now)
                return cell
        return None

    def take(
        self, value: str, *, busy: set[str], now: int, next_use: Callable[[str], float]
    ) -> tuple[str, str | None]:
        """A cell for a value, and the value that had it."""
        cells = [cell for cell in self.values if cell not in busy]
        rested = [cell for cell in cells if now - self.touched.get(cell, -RESTED - 1) > RESTED]
        cell = max(rested or cells, key=lambda one: next_use(self.values[one] or ""))
        held, self.values[cell] = self.values[cell], value
        self._touch(cell, now)
        return cell, held

    def _touch(self, cell: str, now: int) -> None:
        self.values.move_to_end(cell)
        self.touched[cell] = now


RESTED = 1  # passes
PASSES = frozenset(("prologue", "forward", "score", "epilogue", "backward", "regress"))


def add_stash(draft: Draft, shape: Shape) -> list[Action]:
    """Give every boundary value a cell; stash what loses its cell before its last use.

    Runs twice: the first round learns which values lose their cell, the second stashes exactly
    those, as soon as they are written, so that the copy out is done long before the cell is reused.
    Gradients of looked-up rows (`x`) always leave: the host collects them.
    """
    first = _Placing(draft, shape, stashed=frozenset())
    return _ahead(_Placing(draft, shape, stashed=frozenset(first.evicted)).lines)


def _ahead(lines: Sequence[Action]) -> list[Action]:
    """Submit what a pass unstashes before the pass that precedes it, if its cell is free by then.

    For the device that changes nothing. But the host may need as long to submit a pass as the
    device to run it, and copies should not come late for that. Rows that are looked up (`e`) wait
    for the host's own work, and whoever submits them may have to wait, too: they stay where they
    are.
    """
    found: list[Action] = []
    for action in lines:
        place = len(found)
        if action.verb == "unstash" and action.operands[0] != "e":
            end = place
            while end and not _conflict(found[end - 1], action):
                end -= 1
                if found[end].verb in PASSES:
                    place = end
                    break
        found.insert(place, action)
    return found


def _conflict(one: Action, other: Action) -> bool:
    """Whether two lines must stay in their order: they are on one lane, or touch one place."""
    if one.lane is other.lane:
        return True
    mine = dict(one.accesses())
    return any(place in mine and (writes or mine[place]) for place, writes in other.accesses())


class _Placing:
    """One round of `add_stash`."""

    def __init__(self, draft: Draft, shape: Shape, *, stashed: frozenset[str]) -> None:
        self.lines: list[Action] = []
        self.evicted: set[str] = set()
        self._stashed = stashed
        self._pools = {
            kind: _Cells(OrderedDict((f"{kind}{i}", None) for i in range(number)))
            for kind, number in (
                ("C", shape.num_cells),
                ("R", shape.num_recorded_cells),
                ("K", shape.num_kept_cells),
            )
        }
        self._uses = _find_uses(draft)
        self._now = 0  # passes placed so far
        self._busy: set[str] = set()
        self._written: dict[str, str] = {}
        for item in draft:
            if isinstance(item, Action):
                self.lines.append(item)
            else:
                self._place(*item)
                self._now += 1

    def _place(self, one: Pass, slot: str, gradient: str) -> None:
        self._busy, self._written = set(), {}
        m = f"m{one.microbatch}"
        operands = [m] if one.layer is None else [f"L{one.layer}", m]
        operands.append(slot)
        if one.verb in ("epilogue", "backward", "regress"):
            operands.append(gradient)
        if one.verb == "prologue":
            operands.append(self._write("R", f"r {m}"))
        elif one.verb != "regress":
            operands.append(self._read("R", f"r {m}") if one.recorded else NOTHING)
        reads = [self._read("C", f"{value} {m}") for value in one.reads]
        if one.verb == "backward":
            kept = self._read("K", f"k{one.layer} {m}") if one.kept else NOTHING
            reads.insert(1, kept)
        elif one.verb in ("prologue", "regress") and "e" not in one.reads:
            reads.append(NOTHING)
        operands += reads
        if one.writes != NOTHING:
            operands.append(self._write("C", f"{one.writes} {m}"))
        elif one.verb in ("epilogue", "backward", "regress"):
            operands.append(NOTHING)
        if one.verb == "forward":
            operands.append(self._write("K", f"k{one.layer} {m}") if one.kept else NOTHING)
        self.lines.append(Action(one.verb, tuple(operands)))
        for value, cell in self._written.items():
            if value in self._stashed or value.startswith("x"):
                self.lines.append(Action("stash", (*value.split(), cell)))

    def _write(self, kind: str, value: str) -> str:
        cell = self._written[value] = self._take(kind, value)
        return cell

    def _read(self, kind: str, value: str) -> str:
        cell = self._pools[kind].find(value, self._now)
        if cell is None:
            cell = self._take(kind, value)
            self.lines.append(Action("unstash", (*value.split(), cell)))
        self._busy.add(cell)
        return cell

    def _take(self, kind: str, value: str) -> str:
        cell, held = self._pools[kind].take(
            value, busy=self._busy, now=self._now, next_use=self._next_use
        )
        if held is not None and self._next_use(held) < math.inf:
            self.evicted.add(held)
        self._busy.add(cell)
        return cell

    def _next_use(self, value: str) -> float:
        """The next pass, this one included, that has yet to read a value."""
        uses = self._uses.get(value, [])
        index = bisect_left(uses, self._now)
        return uses[index] if index < len(uses) else math.inf


def _find_uses(draft: Draft) -> dict[str, list[int]]:
    """Which passes read each value."""
    uses: dict[str, list[int]] = {}
    passes = [item[0] for item in draft if not isinstance(item, Action)]
    for number, one in enumerate(passes):
        values = [*one.reads]
        values += ["r"] if one.recorded else []
        values += [f"k{one.layer}"] if one.kept and one.verb == "backward" else []
        for value in values:
            uses.setdefault(f"{value} m{one.microbatch}", []).append(number)
    return uses
