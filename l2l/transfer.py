"""Slots: reserved device memory that holds one unit's weights or gradients at a time.

Nothing else copies weights or gradients. Weights arrive by `fetch`, as one copy of a flat buffer;
parameters are views into the slot, so there is no copy on the device. Gradients are added up in
float32 in a gradient slot, over all microbatches, and leave once, by `drain`, into a staging buffer
of the host. All this memory is taken once (`reserve`), sized for the largest unit that uses it.

Names are the schedule's: S0, S1, .. and SO for weights, G0, G1, .. and GO for gradients, H0, H1, ..
and HO for staging; O is for the outer parameters, which have their own.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from l2l.device import Device
from l2l.host_memory import Arena
from l2l.parameter_server import ParameterServer
from l2l.schedule import OUTER, Shape, late_staging


class SlotState(enum.Enum):
    """Who may touch a weight slot."""

    FREE = "free"
    """Holds nothing (NaN on the checking device); only a fetch may write it."""
    HOLDING = "holding"
    """Holds one unit; passes read it, nobody writes it."""


@final
class Transfer:
    """Owner of weight slots, gradient slots and staging buffers."""

    def __init__(self, *, device: Device, arena: Arena, server: ParameterServer) -> None:
        self._device = device
        self._arena = arena
        self._server = server
        self._slots: dict[str, Tensor] = {}
        self._states: dict[str, tuple[SlotState, str | None]] = {}
        self._gradients: dict[str, Tensor] = {}
        self._narrow: dict[str, Tensor] = {}
        self.staging: dict[str, Tensor] = {}
        self._views: dict[tuple[str, str], dict[str, Tensor]] = {}

    def reserve(self, shape: Shape) -> None:
        """Take the memory a schedule of this shape uses, as far as it is not there yet."""
        units = self._server.units
        layers = [unit for name, unit in units.items() if name != OUTER]
        weight_bytes = max(unit.form.weight_layout.nbytes for unit in layers)
        gradient_bytes = max(unit.form.gradient_layout.nbytes for unit in layers)
        staging_bytes = max(unit.form.staging_layout.nbytes for unit in layers)
        outer = units[OUTER].form
        for index in range(shape.num_slots):
            self._reserve_slot(f"S{index}", weight_bytes)
        self._reserve_slot("SO", outer.weight_layout.nbytes)
        if not shape.training:
            return
        narrow_bytes = 0 if shape.device_updates else staging_bytes
        outer_narrow_bytes = 0 if shape.device_updates else outer.staging_layout.nbytes
        for index in range(min(shape.num_gradient_slots, len(shape.backward_layers))):
            self._reserve_gradient(f"G{index}", gradient_bytes, narrow_bytes)
        self._reserve_gradient("GO", outer.gradient_layout.nbytes, outer_narrow_bytes)
        if shape.device_updates:
            return
        num_eager = sum(f"L{i}" not in shape.late_units for i in shape.backward_layers)
        for index in range(min(shape.num_staging, num_eager)):
            self._reserve_staging(f"H{index}", staging_bytes)
        for name in {OUTER, *shape.late_units}:
            self._reserve_staging(late_staging(name), units[name].form.staging_layout.nbytes)

    def fetch(self, unit: str, slot: str) -> None:
        """Copy a unit's weights into a slot; the fetch lane does this."""
        weights = self._server.units[unit].weights
        self._slots[slot][: weights.numel()].copy_(weights, non_blocking=True)
        self._states[slot] = (SlotState.HOLDING, unit)

    def release(self, unit: str, slot: str) -> None:
        """The slot's contents are dead; the compute lane does this."""
        self._states[slot] = (SlotState.FREE, None)
        self._device.poison(self._slots[slot])

    def give_back(self, unit: str, slot: str) -> None:
        """Copy a unit's weights from its slot to the host and free the slot; for the drain lane."""
        weights = self._server.units[unit].weights
        weights.copy_(self._slots[slot][: weights.numel()], non_blocking=True)
        self.release(unit, slot)

    def weights(self, unit: str, slot: str) -> dict[str, Tensor]:
        """A unit's tensors as views into the slot that holds it."""
        key = (unit, slot)
        if key not in self._views:
            layout = self._server.units[unit].form.weight_layout
            self._views[key] = layout.views(self._slots[slot])
        return self._views[key]

    def holds(self, unit: str, slot: str) -> bool:
        """Whether a slot holds a unit."""
        return self._states[slot] == (SlotState.HOLDING, unit)

    def accumulate(
        self, unit: str, slot: str, gradients: Mapping[str, Tensor], *, received: set[str]
    ) -> None:
        """Add one microbatch's gradients; the first to arrive for a parameter is copied.

        `received` has the parameters that got a gradient earlier in this step, and is extended.
        """
        sums = self.gradients(unit, slot)
        for name, gradient in gradients.items():
            if name in received:
                sums[name].add_(gradient)
            else:
                sums[name].copy_(gradient)
                received.add(name)

    def drain(self, unit: str, slot: str, staging: str, *, received: set[str]) -> Tensor:
        """Copy a unit's gradients to the host; the drain lane does this.

        Returns:
            the norm of each gradient, a small tensor on the device; what got no gradient is left
            out, and so is what lies between parameters.
        """
        form = self._server.units[unit].form
        sums = self._gradients[slot]
        wide = form.gradient_layout
        sources = wide.segment_views(sums)
        if self._narrow[slot].numel():
            narrow = form.staging_layout.segment_views(self._narrow[slot])
            for source, rounded in zip(sources, narrow, strict=True):
                rounded.copy_(source)
            sources = narrow
        targets = form.staging_layout.segment_views(self.staging[staging])
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        present = [view for name, view in wide.views(sums).items() if name in received]
        if not present:
            return torch.zeros(1, device=sums.device)
        return torch.stack(torch._foreach_norm(present))

    def close(self) -> None:
        """Give all memory back."""
        for memory in (self._slots, self._gradients, self._narrow, self.staging, self._views):
            memory.clear()

    def bytes_by_place(self) -> dict[str, int]:
        """Bytes reserved, by what for."""
        return {
            "weight slots": sum(slot.numel() for name, slot in self._slots.items() if name != "SO"),
            "gradient slots": sum(
                self._gradients[name].numel() + self._narrow[name].numel()
                for name in self._gradients
                if name != "GO"
            ),
            "outer weights": self._slots["SO"].numel() if "SO" in self._slots else 0,
            "outer gradients": sum(
                slots["GO"].numel() for slots in (self._gradients, self._narrow) if "GO" in slots
            ),
        }

    def gradients(self, unit: str, slot: str) -> dict[str, Tensor]:
        """A unit's gradients as views into the slot where they are added up."""
        key = (unit, slot)
        if key not in self._views:
            layout = self._server.units[unit].form.gradient_layout
            self._views[key] = layout.views(self._gradients[slot])
        return self._views[key]

    def _reserve_slot(self, name: str, nbytes: int) -> None:
        if name not in self._slots:
            self._slots[name] = self._device.empty(nbytes)
            self._states[name] = (SlotState.FREE, None)

    def _reserve_gradient(self, name: str, nbytes: int, narrow_bytes: int) -> None:
        if name not in self._gradients:
            self._gradients[name] = self._device.empty(nbytes)
            # Where gradients leave in 16 bits, they are rounded on the device first.
            self._narrow[name] = self._device.empty(narrow_bytes if narrow_bytes < nbytes else 0)

    def _reserve_staging(self, name: str, nbytes: int) -> None:
        if name not in self.staging:
            self.staging[name] = self._arena.take("staging", nbytes, torch.uint8, registered=True)
