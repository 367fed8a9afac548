"""Slots: reserved device memory that holds one unit's weights or gradients at a time.

Nothing else copies weights or gradients. Weights arrive by `fetch`, as one copy of a flat buffer;
parameters are views into the slot, so there is no copy on the device. Gradients are added up in
float32 in a gradient slot, over all microbatches, and leave once, by `drain`, into a staging buffer
of the host: rounded on the way, piece by piece, through a small buffer (`ROUNDING_BYTES`). Memory
is taken once (`reserve`), sized for the largest unit that uses it, except where the schedule says
from when to when a place has any (`take`, `release`).

Names are the schedule's: S0, S1, .. for streamed layers, SL7 for a layer of the tail, SO and ST0
for outer units; G0, GL7, GO, GT0 for their gradients, H.. for staging.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import final

import torch
from torch import Tensor

from l2l.device import Device
from l2l.parameter_server import (
    ROUNDING_BYTES,
    Arena,
    FlatUnit,
    ParameterServer,
    Unit,
    rows_of_slice,
)
from l2l.run.stash import Parked
from l2l.schedule import NUM_LENT, Shape, late_staging

Spans = tuple[slice, ...]  # of a unit's trained elements, as `UnitForm.piece`


@final
class Transfer:
    """Owner of weight slots, gradient slots and staging buffers."""

    def __init__(self, *, device: Device, arena: Arena, server: ParameterServer) -> None:
        self._device = device
        self._arena = arena
        self._server = server
        self._slots: dict[str, Tensor] = {}  # all places that have memory
        self._held: dict[str, str] = {}  # weight slot -> unit; a slot that is free is not here
        self._rounding: Tensor | None = None
        self._zero: set[str] = set()  # units whose staging was made zero
        self._sizes: dict[str, int] = {}
        self.staging: dict[str, Tensor] = {}
        self._returned: list[tuple[str, Tensor]] = []  # staging that nobody needs any more
        self._views: dict[tuple[str, str], dict[str, Tensor]] = {}

    def reserve(self, shape: Shape) -> None:
        """Take the memory a schedule of this shape uses, as far as it is not there yet."""
        taken_later = self._plan_sizes(shape)
        for name in self._sizes:
            if name not in self._slots and name not in taken_later:
                self.take(name)
        if not shape.training or shape.device_updates:
            return
        units = self._server.units
        if self._rounding is None:
            widest = max(unit.form.gradient_layout.nbytes for unit in units.values())
            self._rounding = self._device.empty(min(ROUNDING_BYTES, max(256, widest)))
        elsewhere = {*shape.late_units, *shape.redone}
        staged = [name for name in shape.drained_units if name not in elsewhere]
        layers = [name for name in staged if name.startswith("L")]
        largest = max((units[name].held.staging_layout.nbytes for name in layers), default=0)
        for index in range(min(shape.num_staging, len(layers))):
            self._reserve_staging(f"H{index}", largest)
        if shape.side:
            staged += [unit.name for unit in shape.outer if unit.looked_up and unit.trained]
        for name in {*shape.late_units, *staged} - {*layers} - {*shape.on_device}:
            self._reserve_staging(late_staging(name), units[name].held.staging_layout.nbytes)
        for unit in shape.outer:
            only_rows = unit.looked_up and unit.trained and not unit.in_epilogue
            if only_rows and unit.name not in self._zero:
                self.staging[late_staging(unit.name)].zero_()  # rows are added to it
                self._zero.add(unit.name)

    def _plan_sizes(self, shape: Shape) -> set[str]:
        """Note how large every place is; returns the places that the schedule takes itself."""
        units, sizes = self._server.units, self._sizes
        streamed = [units[name].form for name in shape.units_of(shape.streamed)]
        through = [form.weight_layout.nbytes for form in streamed]
        of_slice = self._slice_bytes(shape)
        if weight_bytes := max([*through, of_slice["S"]], default=0):
            sizes |= dict.fromkeys((f"S{i}" for i in range(shape.num_slots)), weight_bytes)
        own = [*shape.units_of(shape.tail)]
        own += [u.name for u in shape.outer if u.is_read and not u.num_slices]
        sizes |= {f"S{name}": units[name].form.weight_layout.nbytes for name in own}
        if shape.shared and shape.training:
            shared = [units[name] for name in shape.units_of(shape.shared)]
            sizes |= dict.fromkeys(
                (f"W{i}" for i in range(NUM_LENT)),
                max(_piece_bytes(unit, shape.num_pieces) for unit in shared),
            )
        passing = {unit.name for unit in shape.outer if unit.passes and shape.shares_memory}
        taken_later = {f"{kind}{name}" for name in passing for kind in "SG"}
        if shape.shares_memory:
            taken_later |= {f"W{i}" for i in range(NUM_LENT)}
        if not shape.training:
            return taken_later
        trained = [name for name in own if units[name].form.trained.names]
        sizes |= {f"G{name}": units[name].form.gradient_layout.nbytes for name in trained}
        backward = [name for name in shape.trained_backward if name not in shape.repeated]
        repeated = {*shape.trained_backward} & shape.repeated
        sizes |= {f"G{name}": units[name].form.gradient_layout.nbytes for name in repeated}
        gradients = [units[name].form.gradient_layout.nbytes for name in backward]
        if shape.head is not None and shape.head.trained:
            gradients += [of_slice["G"]] * shape.head.num_slices
        if gradients:
            gradient_bytes, number = max(gradients), min(shape.num_gradient_slots, len(gradients))
            sizes |= dict.fromkeys((f"G{i}" for i in range(number)), gradient_bytes)
            if shape.shares_memory:
                taken_later |= {f"G{i}" for i in range(number)}
        return taken_later

    def _slice_bytes(self, shape: Shape) -> dict[str, int]:
        """The largest slice of the head, as weights and as gradients."""
        if shape.head is None:
            return {"S": 0, "G": 0}
        form = self._server.units[shape.head.name].form
        share = rows_of_slice(form.num_rows, shape.head.num_slices) / form.num_rows
        sizes = {"S": form.weight_layout.nbytes, "G": form.gradient_layout.nbytes}
        return {kind: math.ceil(nbytes * share) for kind, nbytes in sizes.items()}

    def fetch_all(self, unit: str, spans: Spans, staging: str, place: str) -> None:
        """Copy elements of a unit, with gradient and state, to the device; for the lend lane."""
        for mine, theirs in self._lent_and_own(unit, spans, place, self.staging[staging]):
            _copy(mine.tensors, theirs.tensors)

    def fetch_state(self, unit: str, spans: Spans, place: str) -> None:
        """Copy the state of elements, and what completes their weights; for the fetch lane."""
        for mine, theirs in self._lent_and_own(unit, spans, place):
            _copy(mine.changed[1:], theirs.changed[1:])

    def join(self, unit: str, spans: Spans, slot: str, gradient_slot: str, place: str) -> None:
        """Copy weights and gradients, which are on the device, to their state."""
        form = self._server.units[unit].form
        weights = form.weight_layout.segment_views(self._slots[slot])[0]
        sums = form.gradient_layout.segment_views(self._slots[gradient_slot])[0]
        for span, (lent, _) in zip(spans, self._lent_and_own(unit, spans, place), strict=True):
            lent.weight.copy_(weights[span])
            lent.gradient.copy_(sums[span])

    def drain_all(self, unit: str, spans: Spans, place: str) -> None:
        """Copy them back, but for the gradient; the drain lane does this."""
        for mine, theirs in self._lent_and_own(unit, spans, place):
            _copy(theirs.changed, mine.changed)

    def lent(
        self, unit: str, spans: Spans, place: str, gradients: Tensor | None = None
    ) -> list[FlatUnit]:
        """The elements that were copied to a place, run by run."""
        return [mine for mine, _ in self._lent_and_own(unit, spans, place, gradients)]

    def _lent_and_own(
        self, unit: str, spans: Spans, place: str, gradients: Tensor | None = None
    ) -> Iterator[tuple[FlatUnit, FlatUnit]]:
        """Runs of elements in a place, one after the other, and on the host."""
        start = 0
        for span in spans:
            own = self._server.units[unit].part(span, gradients)
            yield own.in_buffer(self._slots[place][start:]), own
            start += own.buffer_bytes

    def take(self, name: str) -> None:
        """Take memory for a place; the compute lane does this."""
        self._slots[name] = self._device.empty(self._sizes[name])

    def drop(self, name: str) -> None:
        """Give a place's memory back; the compute lane does this."""
        self._views = {key: views for key, views in self._views.items() if key[1] != name}
        self._held.pop(name, None)
        found = self._slots.pop(name, None)
        if found is not None:
            self._device.poison(found)

    def fetch(self, unit: str, slot: str, buffer: str | None = None) -> None:
        """Copy a unit's weights into a slot; the fetch lane does this.

        Those of a unit on disk will be in a buffer when the copy begins.
        """
        if buffer is not None:
            assert self._server.disk is not None
            source = self._server.disk.weights_in(buffer, self._server.units[unit])
            self._slots[slot][: source.numel()].copy_(source, non_blocking=True)
        else:
            for source, target in self._host_and_slot(unit, slot):
                target.copy_(source, non_blocking=True)
        self._held[slot] = unit

    def fetch_rows(self, name: str, owner: str, rows: slice, slot: str) -> None:
        """Copy rows of a table, which is a unit, into a slot; the fetch lane does this."""
        unit = name.partition(":")[0]
        source = self._server.units[unit].weight_of(owner)[rows]
        self.rows_in(slot, unit, owner, rows).copy_(source, non_blocking=True)
        self._held[slot] = name

    def rows_in(self, slot: str, unit: str, owner: str, rows: slice) -> Tensor:
        """Rows of a table in a slot; in a gradient slot, their gradients."""
        form = self._server.units[unit].form
        layout = form.gradient_layout if slot.startswith("G") else form.weight_layout
        dtype, (_, *rest) = layout.dtype_of(owner), layout.shapes()[owner]
        assert dtype is not None
        shape = (rows.stop - rows.start, *rest)
        nbytes = math.prod(shape) * dtype.itemsize
        return self._slots[slot][:nbytes].view(dtype).view(shape)

    def drain_rows(self, sums: Tensor, unit: str, owner: str, rows: slice, staging: str) -> None:
        """Copy the gradients of rows to the host; the drain lane does this."""
        layout = self._server.units[unit].held.staging_layout
        target = layout.view(self.staging[staging], owner)[rows]
        self._copy_rounded(sums.view(-1), target.view(-1))

    def gather(self, unit: str, slot: str) -> None:
        """Fill a slot with what other ranks hold of a unit; the gather lane does this."""
        layout = self._server.units[unit].form.weight_layout
        for view in layout.segment_views(self._slots[slot]):
            self._server.world.gather(view)

    def _host_and_slot(self, unit: str, slot: str) -> list[tuple[Tensor, Tensor]]:
        """This rank's share of a unit's weights: on the host, and its places in a slot."""
        one = self._server.units[unit]
        if one.share.number == 1:
            return [(one.weights, self._slots[slot][: one.weights.numel()])]
        whole = one.form.weight_layout.segment_views(self._slots[slot])
        places = [view[one.share.of(view.numel())] for view in whole]
        return list(zip(one.held.weight_layout.segment_views(one.weights), places, strict=True))

    def release(self, slot: str) -> None:
        """The slot's contents are dead; the compute lane does this."""
        self._held.pop(slot, None)
        self._device.poison(self._slots[slot])

    def drain_weights(self, unit: str, slot: str) -> None:
        """Copy a unit's weights from its slot to the host; the drain lane does this."""
        for target, source in self._host_and_slot(unit, slot):
            target.copy_(source, non_blocking=True)

    def slot(self, name: str) -> Tensor:
        """The bytes of a place."""
        return self._slots[name]

    def holds(self, unit: str, slot: str) -> bool:
        """Whether a slot holds a unit."""
        return self._held.get(slot) == unit

    def views(self, unit: str, slot: str) -> dict[str, Tensor]:
        """A unit's tensors as views into a slot: weights, or in a gradient slot their gradients."""
        if (unit, slot) not in self._views:
            form = self._server.units[unit].form
            views = form.gradient_layout.views if slot.startswith("G") else form.weights_in
            self._views[unit, slot] = views(self._slots[slot])
        return self._views[unit, slot]

    def accumulate(
        self,
        unit: str,
        slot: str,
        gradients: Mapping[str, Tensor],
        *,
        received: set[str],
        add: Callable[[list[Tensor], list[Tensor]], None] | None = None,
    ) -> None:
        """Add one microbatch's gradients; the first to arrive for a parameter is copied.

        Args:
            unit: Whose they are.
            slot: Where their sums are.
            gradients: By parameter.
            received: The parameters that got a gradient earlier in this step; is extended.
            add: A faster way to add tensors to others.
        """
        sums = self.views(unit, slot)
        first = [name for name in gradients if name not in received]
        later = [name for name in gradients if name in received]
        if first:
            torch._foreach_copy_([sums[n] for n in first], [gradients[n] for n in first])
            received.update(first)
        if later:
            add = add or torch._foreach_add_
            add([sums[n] for n in later], [gradients[n] for n in later])

    def product_sum(
        self, unit: str, slot: str, owner: str, *, received: set[str]
    ) -> Callable[[Tensor, Tensor], None]:
        """A function that adds the gradient of a linear map's weight, as a product, to its sum."""
        return self.adding(self.views(unit, slot)[owner], owner, received)

    def adding(
        self, total: Tensor, name: str, received: set[str]
    ) -> Callable[[Tensor, Tensor], None]:
        """The same for any sum, of what is noted as `received` by this name."""

        def add(outputs: Tensor, inputs: Tensor) -> None:
            if name not in received:
                total.zero_()
                received.add(name)
            if self._device.sums_products and outputs.dtype.itemsize == 2:
                wide = torch.float32
                torch.addmm(total, outputs.t(), inputs, out_dtype=wide, out=total)
            else:
                total.addmm_(outputs.t().to(total.dtype), inputs.to(total.dtype))

        return add

    def drain(self, unit: str, slot: str, staging: str) -> None:
        """Copy a unit's gradients, or this rank's share, to the host; for the drain lane."""
        one = self._server.units[unit]
        sources = one.form.gradient_layout.segment_views(self._slots[slot])
        targets = one.held.staging_layout.segment_views(self.staging[staging])
        for source, target in zip(sources, targets, strict=True):
            self._copy_rounded(source[one.share.of(source.numel())], target)

    def reduce(self, unit: str, slot: str, *, received: set[str], all_of_it: bool) -> Tensor:
        """Sum a unit's gradients over all ranks; the reduce lane does this.

        Args:
            unit: Whose they are.
            slot: Where this rank's sums are.
            received: What got a gradient here; other ranks may have gradients of the rest.
            all_of_it: Whether every rank needs all of the sum, not its own share only.

        Returns:
            for each trained parameter the norm of its gradient, and below that how many ranks had
            one, on the device.
        """
        one, world, sums = self._server.units[unit], self._server.world, self.views(unit, slot)
        names = one.form.trained.names
        for name in names:
            if name not in received:
                sums[name].zero_()
        for view in one.form.gradient_layout.segment_views(self._slots[slot]):
            if all_of_it:
                world.pool(view)
            else:
                world.reduce(view)
        squares = [self._square(one, name, sums[name], all_of_it=all_of_it) for name in names]
        flags = torch.tensor([float(name in received) for name in names])
        flags = flags.to(self._slots[slot].device)
        found = torch.stack([torch.stack(squares), flags])
        world.pool(found[1])
        if not all_of_it:
            world.pool(found[0], within_group=True)
        found[0].sqrt_()
        return found

    @staticmethod
    def _square(one: Unit, name: str, total: Tensor, *, all_of_it: bool) -> Tensor:
        """The squared norm of what this rank has of a sum."""
        piece = slice(None) if all_of_it else one.form.trained.piece(name, one.share)
        norm: Tensor = torch.linalg.vector_norm(total.view(-1)[piece])
        return norm.square()

    def _copy_rounded(self, source: Tensor, target: Tensor) -> None:
        if source.dtype is target.dtype:
            target.copy_(source, non_blocking=True)
            return
        assert self._rounding is not None
        rounding = self._rounding.view(target.dtype)
        for start in range(0, source.numel(), rounding.numel()):
            piece = source[start : start + rounding.numel()]
            rounded = rounding[: piece.numel()].copy_(piece)
            target[start : start + piece.numel()].copy_(rounded, non_blocking=True)

    def norms(self, unit: str, slot: str, *, received: set[str]) -> Tensor:
        """The norm of each gradient that a unit got, a small tensor on the device.

        What got no gradient is left out, and so is what lies between parameters.
        """
        sums = self.views(unit, slot)
        present = [view for name, view in sums.items() if name in received]
        if not present:
            return torch.zeros(1, device=self._slots[slot].device)
        return torch.stack(torch._foreach_norm(present))

    def abandon(self) -> None:
        """A step has failed: what it began to write is written anew by the next."""
        self._views.clear()
        # Rows that it has added to a table's gradient go, unless they are of an update that waits.
        self._zero &= self._server.waiting.keys()

    def clear(self) -> None:
        """Give device memory back; nothing may be left in it."""
        for memory in (self._slots, self._views, self._held, self._sizes):
            memory.clear()
        self._zero.clear()  # an update may have been dropped that would have made them zero again
        self._rounding = None

    def set_aside(self, names: Iterable[str]) -> Parked:
        """Keep gradients that wait in staging; others get other memory."""
        return Parked({name: self.staging.pop(name) for name in names}, self._returned)

    def put_back(self, parked: Parked, *, keeps: bool) -> None:
        """Let gradients that were kept be in staging again, or copies of them."""
        for name in [*parked.kept]:
            if keeps:
                self.staging[name].copy_(parked.kept[name])
                continue
            other = self.staging.pop(name, None)
            if other is not None:
                self._returned.append((name, other))
            self.staging[name] = parked.kept.pop(name)

    def let_go_of_staging(self) -> None:
        """Give staging buffers back: units may have another size. None may wait there."""
        for buffer in (*self.staging.values(), *(one for _, one in self._returned)):
            self._arena.give_back("staging", buffer)
        self.staging.clear()
        self._returned.clear()

    def close(self) -> None:
        """Give all memory back."""
        self.clear()
        self.staging.clear()

    def bytes_by_place(self) -> dict[str, int]:
        """Bytes reserved, by what for."""
        found: dict[str, int] = {}
        for name in sorted(self._slots, key=lambda name: name.startswith("G")):
            kind = "gradient slots" if name.startswith("G") else "weight slots"
            owner = {"L": "tail", "O": "outer", "T": "outer"}.get(name[1], "streamed")
            purpose = f"{kind}, {owner}"
            found[purpose] = found.get(purpose, 0) + self._slots[name].numel()
        if self._rounding is not None:
            found["rounding"] = self._rounding.numel()
        return found

    def _reserve_staging(self, name: str, nbytes: int) -> None:
        spare = [index for index, one in enumerate(self._returned) if one[0] == name]
        if name not in self.staging and spare:
            self.staging[name] = self._returned.pop(spare[0])[1]
        if name not in self.staging:
            self.staging[name] = self._arena.take("staging", nbytes, torch.uint8, registered=True)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _piece_bytes(unit: Unit, num_pieces: int) -> int:
    """What the largest of so many pieces of a unit takes, with gradient and state."""
    staging = torch.empty(unit.form.staging_layout.nbytes, dtype=torch.uint8, device="meta")
    pieces = (unit.form.piece(number, num_pieces) for number in range(num_pieces))
    return max(sum(unit.part(span, staging).buffer_bytes for span in spans) for spans in pieces)
