"""How weights come and gradients leave: slots, fetches, drains and updates around the passes."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from l2l.schedule.lines import EPILOGUE, NOTHING, PROLOGUE, Action, action
from l2l.schedule.passes import Pass, join
from l2l.schedule.shape import OuterUnit, Shape, late_staging

NUM_LENT = 4  # pieces of optimizer state that are on the device at once
LENDING_AHEAD = 6  # layers by which such lines come before the layer is needed, at least

Draft = list[tuple[Pass, str, str] | Action]
"""Passes with their weight slots and gradient slots, and the actions between them."""


@dataclass(slots=True)
class _Slots:
    """Which layer is in which weight slot while a draft is written."""

    free: list[str]
    resident: dict[str, str] = field(default_factory=dict)

    def keep_next(self, upcoming: Sequence[str], num_slots: int) -> Iterator[Action]:
        """Release what is not among the next layers, fetch what is missing of them."""
        wanted = list(dict.fromkeys(upcoming))[:num_slots]
        for layer in [layer for layer in self.resident if layer not in wanted]:
            slot = self.resident.pop(layer)
            self.free.append(slot)
            yield action(f"release {layer} {slot}")
        for layer in wanted:
            if layer not in self.resident:
                self.resident[layer] = self.free.pop(0)
                yield action(f"fetch {layer} {self.resident[layer]}")


def add_transfers(passes: Sequence[Pass], shape: Shape) -> Draft:
    """Fetch each unit before its passes, drain and update after its last, with the slots given.

    The next `num_slots` distinct layers are kept or fetched as soon as a slot is free; the others
    are released. Layers at the turn from forward to backward therefore stay, and a step fetches
    2 x layers - slots times.
    """
    draft = _Transfers(shape, passes).draft
    if shape.parallel:
        draft = list(_with_collectives(draft))
    return _behind_updates(draft, _host_lines(draft, shape), shape)


def _part(run: list[Pass]) -> tuple[str, str]:
    """What the passes of a run have in common."""
    return run[0].verb, run[0].part


def _with_collectives(draft: Draft) -> Iterator[tuple[Pass, str, str] | Action]:
    """What ranks say to each other: weights after a fetch, gradients before they leave."""
    for item in draft:
        if isinstance(item, Action) and item.kind in ("drain U.grad", "update U device"):
            gradient = item.places[0 if item.verb == "drain" else 1]
            yield action(f"reduce {item.unit} {gradient}")
        elif isinstance(item, Action) and item.kind == "drain loss":
            yield action("reduce loss")
        yield item
        if isinstance(item, Action) and item.kind == "fetch U":
            yield action(f"gather {item.unit} {item.places[0]}")


class _Transfers:
    """Writes the draft of `add_transfers`, run by run."""

    def __init__(self, shape: Shape, passes: Sequence[Pass]) -> None:
        self._shape = shape
        self._slots = _Slots([f"S{index}" for index in range(shape.num_slots)])
        self._late, self._redone = frozenset(shape.late_units), frozenset(shape.redone)
        self._lent = deque(shape.reworked)
        self._num_drained = self._num_staged = self._num_lent = 0
        self.draft: Draft = []
        parts = groupby(passes, key=lambda one: (one.verb, one.part))
        runs = [list(run) for _, run in parts]
        self._order = [run[0].unit for run in runs if run[0].unit]
        self._last_visit = {shape.unit(call): call for call in shape.backward_layers}
        if shape.shares_memory and shape.training:
            self._add("release", self._gradient_slots())
            if shape.side == "backward" and shape.fused:  # it begins with layers
                self._add("take", self._gradient_slots())
        self._add("take", self._lent_places(shape.reworked))
        self._rework(before=0)
        if shape.side in ("outputs", "backward"):
            self._fetch(u for u in shape.outer if u.stays)
            self._continue()
        else:
            self._fetch(u for u in shape.outer if u.in_prologue or u.name in shape.on_device)
        self._renew([unit.name for unit in shape.outer if unit.device_state])
        self.draft += self._slots.keep_next(self._order, shape.num_slots)
        of_head = [run[0] for run in runs if run[0].part == EPILOGUE or "T" in run[0].part]
        last_of_head = of_head[-1] if of_head else None
        for index, run in enumerate(runs):
            following = _part(runs[index + 1]) if index + 1 < len(runs) else None
            if following in (("loss", ""), ("forward", EPILOGUE)):
                self._prepare_loss()
            elif following == ("backward", PROLOGUE):
                self._fetch(u for u in shape.outer if u.in_prologue and not u.stays)
            self._write(run)
            if shape.head is not None and run[0] == last_of_head:
                self._release(unit for unit in shape.beside_head if unit.passes)
            if run[0].unit:
                self._order = self._order[1:]
                self.draft += self._slots.keep_next(self._order, shape.num_slots)
        self._release(unit for unit in shape.outer if unit.stays)
        self._add("release", self._lent_places(self._redone))

    def _continue(self) -> None:
        """Go on from what the forward side of the step has left."""
        if not self._shape.fused:
            self._prepare_loss()
            return
        passing = [unit for unit in self._shape.outer if unit.passes and unit.trained]
        own = [f"{u.name} {late_staging(u.name)}" for u in passing if not u.looked_up]
        self._add("collect", own)

    def _add(self, verb: str, rest: Iterable[str]) -> None:
        """Lines of one verb."""
        self.draft += [action(f"{verb} {one}") for one in rest]

    def _write(self, run: list[Pass]) -> None:
        """The passes of one part of the model, and what goes with them."""
        verb, part = _part(run)
        unit, call = run[0].unit, run[0].call
        if part == EPILOGUE:
            self._epilogue(run, verb)
        elif verb == "loss":
            self._loss(run)
        elif not unit:
            (self._prologue if verb == "forward" else self._prologue_backward)(run)
        elif verb == "forward":
            if call is not None:
                self._rework(before=call)
            self.draft += [(one, self._slots.resident[unit], NOTHING) for one in run]
        elif call is None:
            self._slice_backward(run, unit)
        else:
            self._backward(run, call)

    def _prologue(self, run: list[Pass]) -> None:
        before = [unit for unit in self._shape.outer if unit.in_prologue]
        self.draft += [(one, join("S", before), NOTHING) for one in run]
        if run[-1].microbatch == self._shape.num_microbatches - 1:  # several stacks: all stay
            self._release(unit for unit in before if not unit.stays)

    def _rework(self, *, before: int) -> None:
        """Updates that the step before has left to the device, piece by piece.

        All of them at the beginning would be submitted before the first pass, and fill the queues.
        """
        shape, ahead = self._shape, max(LENDING_AHEAD, self._shape.num_slots + 1)
        soon = shape.streamed[: bisect_left(shape.streamed, before) + ahead + 1]
        soon_units = {*shape.units_of(soon)}
        while self._lent and self._lent[0] in soon_units:
            unit = self._lent.popleft()
            for piece in range(shape.num_pieces):
                place = f"W{self._num_lent % NUM_LENT}"
                self._num_lent += 1
                self._add("fetch", [f"{unit}.all:p{piece} {late_staging(unit)} {place}"])
                self._add("update", [f"{unit}:p{piece} device {place} late"])
                self._add("drain", [f"{unit}.all:p{piece} {place}"])

    def _lent_places(self, units: Collection[str]) -> list[str]:
        """Places for lent state of units that the schedule takes itself."""
        shape = self._shape
        number = min(NUM_LENT, shape.num_pieces * len(units)) if shape.shares_memory else 0
        return [f"W{index}" for index in range(number)]

    def _epilogue(self, run: list[Pass], verb: str) -> None:
        """The code up to a head in slices, or the loss behind it."""
        shape = self._shape
        units = shape.beside_head
        trained = [unit for unit in units if unit.trained]
        gradients = join("G", trained) if verb == "backward" else NOTHING
        turns = [f"G{unit.name}" for unit in trained if unit.passes and verb == "backward"]
        if shape.side and shape.shares_memory:
            self._add("take", turns)
        self.draft += [(one, join("S", units), gradients) for one in run]
        if verb == "loss":
            self._add("drain", ["loss"])
            self._add("order", shape.redone)
            return
        if verb == "backward":
            for unit in trained:
                if unit.passes:
                    self._leave(unit.name, f"S{unit.name}", f"G{unit.name}")
                elif unit.device_state and not unit.in_prologue:
                    self._add("drain", [f"{unit.name}.norm G{unit.name}"])
        if shape.side:
            passing = [unit for unit in units if unit.passes]
            self._release(passing)
            if shape.shares_memory:
                self._add("release", [f"S{unit.name}" for unit in passing] + turns)
                self._add("take", self._gradient_slots() if verb == "backward" else [])

    def _slice_backward(self, run: list[Pass], name: str) -> None:
        """Backward passes of a slice of the head; behind the last slice, the update of all."""
        shape, head = self._shape, self._shape.head
        assert head is not None
        gradient = f"G{self._num_drained % shape.num_gradient_slots}"
        gradient = gradient if head.trained else NOTHING
        self.draft += [(one, self._slots.resident[name], gradient) for one in run]
        if not head.trained:
            return
        unit, piece = name.split(":")
        staging = late_staging(unit)
        self._add("drain", [f"{unit}.grad:{piece} {gradient} {staging}"])
        self._num_drained += 1
        if piece == "p0" and unit not in self._late:
            self._add("update", [f"{unit} host {staging}"])

    def _gradient_slots(self) -> list[str]:
        shape = self._shape
        number = len({*shape.trained_backward} - shape.repeated)
        return [f"G{i}" for i in range(min(shape.num_gradient_slots, number))]

    def _prepare_loss(self) -> None:
        """Bring what the loss needs; it arrives under the passes before."""
        shape = self._shape
        passing = [unit for unit in shape.outer if unit.passes]
        self._add("release", self._lent_places(shape.reworked))
        if shape.shares_memory:
            self._add("take", [f"S{unit.name}" for unit in passing])
        tail = shape.units_of(shape.tail)
        self._add("fetch", [f"{unit} S{unit}" for unit in tail if unit not in shape.held])
        self._fetch(passing)

    def _renew(self, units: Iterable[str]) -> None:
        """Updates on the device that the step before has left."""
        for unit in units:
            if unit in self._shape.on_device and unit in self._shape.pending:
                self._add("update", [f"{unit} device S{unit} G{unit} late"])
                self._add("drain", [f"{unit} S{unit}"])

    def _loss(self, run: list[Pass]) -> None:
        shape = self._shape
        self._renew(shape.units_of(shape.tail))
        units = [unit for unit in shape.outer if unit.in_epilogue]
        names = [*(unit.name for unit in units), *shape.units_of(shape.tail)]
        trained = [unit.name for unit in units if unit.trained]
        trained += shape.units_of(i for i in shape.tail if i not in shape.frozen_layers)
        trained = trained if shape.training else []
        passing = [unit for unit in units if unit.passes]
        passing_gradients = [f"G{unit.name}" for unit in passing if unit.name in trained]
        if shape.shares_memory:
            self._add("take", passing_gradients)
        slots, gradients = _join("S", names), _join("G", trained)
        self.draft += [(one, slots, gradients) for one in run]
        self._add("drain", ["loss"])
        self._add("order", shape.redone)
        for unit in passing:
            if unit.name in trained:
                self._leave(unit.name, f"S{unit.name}", f"G{unit.name}")
            if not (shape.device_updates and unit.name in trained):
                self._release([unit])
        for layer in shape.tail[::-1]:
            self._leave_tail(layer)
        on_device = [u.name for u in units if u.device_state and not u.in_prologue]
        self._add("drain", [f"{unit}.norm G{unit}" for unit in on_device if unit in trained])
        if shape.shares_memory:
            self._add("release", [f"S{unit.name}" for unit in passing] + passing_gradients)
            if shape.training and not shape.side:
                self._add("take", self._gradient_slots() + self._lent_places(self._redone))

    def _leave_tail(self, layer: int) -> None:
        shape, unit = self._shape, self._shape.unit(layer)
        trains = shape.training and layer not in shape.frozen_layers
        if layer in shape.device_state:
            self._add("drain", [f"{unit}.norm G{unit}"] if trains else [])
            return
        if trains:
            self._leave(unit, f"S{unit}", f"G{unit}")
        if not (trains and shape.device_updates) and unit not in shape.held:
            self._add("release", [f"{unit} S{unit}"])

    def _backward(self, run: list[Pass], layer: int) -> None:
        shape, unit = self._shape, self._shape.unit(layer)
        slot, trains = self._slots.resident[unit], layer not in shape.frozen_layers
        leaves = trains and self._last_visit[unit] == layer
        gradient = f"G{self._num_drained % shape.num_gradient_slots}" if trains else NOTHING
        if trains and unit in shape.repeated:  # its sums grow from call to call
            gradient = f"G{unit}"
        if unit in self._redone:
            self._redo(run, unit, slot, gradient)
        else:
            self.draft += [(one, slot, gradient) for one in run]
            if leaves:
                self._leave(unit, slot, gradient)
        if leaves and shape.device_updates:
            self._slots.free.append(self._slots.resident.pop(unit))
        self._num_drained += trains and unit not in shape.repeated

    def _redo(self, run: list[Pass], unit: str, slot: str, gradient: str) -> None:
        """Backward passes, and the update on the device: its state arrives under them."""
        number = self._shape.num_pieces
        pieces = [(f"p{index}", f"W{index % NUM_LENT}") for index in range(number)]
        states = [f"{unit}.state:{piece} {place}" for piece, place in pieces]
        self._add("fetch", states[:NUM_LENT])
        self.draft += [(one, slot, gradient) for one in run]
        self._add("drain", [f"{unit}.norm {gradient}"])
        for index, (piece, place) in enumerate(pieces):
            if index >= NUM_LENT:  # its place was another piece's before
                self._add("fetch", [states[index]])
            self._add("update", [f"{unit}:{piece} device {slot} {gradient} {place}"])
            self._add("drain", [f"{unit}.all:{piece} {place}"])

    def _prologue_backward(self, run: list[Pass]) -> None:
        shape = self._shape
        before = [unit for unit in shape.outer if unit.in_prologue]
        trained = [unit for unit in before if unit.trained]
        slots, gradients = join("S", before), join("G", trained)
        if run[0].stack:
            self.draft += [(one, slots, gradients) for one in run]
            return
        collected = [unit.name for unit in shape.outer if unit.looked_up and unit.trained]
        for one in run:
            self.draft.append((one, slots, gradients))
            m = f"m{one.microbatch}"
            self._add("collect", [f"{unit} {m} {late_staging(unit)}" for unit in collected])
        if shape.side:
            self._add("collect", [f"{unit} {late_staging(unit)}" for unit in collected])
        for unit in trained:
            if unit.device_state:
                self._add("drain", [f"{unit.name}.norm G{unit.name}"])
            else:
                self._leave(unit.name, f"S{unit.name}", f"G{unit.name}")
        returned = trained if shape.device_updates else []
        self._release(unit for unit in before if not unit.stays and unit not in returned)

    def _leave(self, unit: str, slot: str, gradient: str) -> None:
        """What happens to a unit's gradient once it is complete."""
        shape = self._shape
        if shape.device_updates:
            self._add("update", [f"{unit} device {slot} {gradient}"])
            self._add("drain", [f"{unit} {slot} free"])
            return
        staging = late_staging(unit)
        if unit not in self._late and unit.startswith("L"):
            staging = f"H{self._num_staged % shape.num_staging}"
            self._num_staged += 1
        self._add("drain", [f"{unit}.grad {gradient} {staging}"])
        if shape.side:
            has_rows = any(one.name == unit and one.looked_up for one in shape.outer)
            if shape.side == "backward" and not has_rows:  # else once the rows came
                self._add("collect", [f"{unit} {staging}"])
        elif unit not in self._late:
            self._add("update", [f"{unit} host {staging}"])

    def _fetch(self, units: Iterable[OuterUnit]) -> None:
        missing = [unit.name for unit in units if unit.name not in self._shape.held]
        self._add("fetch", [f"{unit} S{unit}" for unit in missing])

    def _release(self, units: Iterable[OuterUnit]) -> None:
        shape = self._shape
        returned = shape.training and shape.device_updates
        self._add(
            "release",
            [
                f"{unit.name} S{unit.name}"
                for unit in units
                if not unit.device_state and not (unit.stays and unit.trained and returned)
            ],
        )


def _host_lines(draft: Draft, shape: Shape) -> list[Action]:
    """What the host does first: updates that were left, in the order of need, and lookups."""
    looked_up = [unit.name for unit in shape.outer if unit.looked_up]
    on_device = [*shape.on_device, *shape.reworked]
    lines = [action(f"order {unit} late") for unit in on_device if unit in shape.pending]
    fetched = [line.unit for line in _actions(draft) if line.kind in ("fetch U", "fetch U:p")]
    needed = [unit for unit in dict.fromkeys([*fetched, *shape.pending]) if unit in shape.pending]
    own = [unit for unit in needed if unit not in on_device]
    halved = _halved(own, shape) if shape.halves and shape.training else frozenset()
    settled = [action(_late(unit, "weights" if unit in halved else "")) for unit in own]
    drained = {unit: index for index, unit in enumerate(shape.drained_units)}
    own.sort(key=lambda unit: drained.get(unit, -1))  # tables leave first: with the epilogue
    completed = [action(_late(unit, "moments")) for unit in own if unit in halved]
    rows = "weights" if shape.halves and shape.training else ""
    begins = shape.side != "outputs"  # which begins behind the layers
    for m in range(shape.num_microbatches if looked_up and begins else 0):
        lines += [
            action(f"update {unit}:m{m} host {late_staging(unit)} late {rows}".rstrip())
            for unit in looked_up
            if unit in shape.pending
        ]
        lines.append(action(f"lookup m{m}"))
        if m == 0 and settled and settled[0].unit.startswith("L"):
            lines.append(settled.pop(0))  # what the first microbatch needs next
    return lines + settled + completed


def _behind_updates(draft: Draft, lines: Sequence[Action], shape: Shape) -> Draft:
    """What the host does first, then the rest.

    Lanes run apart, so it is all the same where in the text an update stands, as long as it is
    before the fetch that needs it. But weights on disk pass through few buffers, in the order of
    the text: there an update stands just before that fetch, in the same order as the others.
    """
    if not shape.weights_on_disk:
        return [*lines, *draft]
    fetched: dict[str, int] = {}
    for position, item in enumerate(draft):
        if isinstance(item, Action) and item.kind in ("fetch U", "fetch U:p"):
            fetched.setdefault(item.unit, position)
    before: dict[int, list[Action]] = {}
    latest = max(fetched.values(), default=0)
    for line in reversed(lines):
        own = fetched.get(line.unit, latest) if line.verb == "update" else 0
        latest = min(latest, own)
        before.setdefault(latest, []).append(line)
    return [one for i, item in enumerate(draft) for one in (*before.get(i, ())[::-1], item)]


def _late(unit: str, half: str) -> str:
    """A host update that the step before has left: all of it, its weights or its moments."""
    return f"update {unit} host {late_staging(unit)} late {half}".rstrip()


def _halved(needed: Sequence[str], shape: Shape) -> frozenset[str]:
    """Units, in the order of need, whose late update is done in two."""
    layers = [unit for unit in needed if unit.startswith("L")]
    whole = layers[max(0, len(layers) - shape.num_whole) :]
    on_disk = shape.on_disk | shape.weights_on_disk  # which would be read twice
    return frozenset(needed) - frozenset(whole) - on_disk


def _actions(draft: Draft) -> Iterator[Action]:
    return (item for item in draft if isinstance(item, Action))


def _join(kind: str, units: Iterable[str]) -> str:
    """The slots of units, as a pass names them."""
    return ",".join(f"{kind}{unit}" for unit in units) or NOTHING
