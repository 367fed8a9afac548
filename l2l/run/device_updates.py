"""Updates on the device: of state that stays there, of lent pieces, or in a unit's slot.

The host orders an update: it writes its coefficients, which are there when the device gets to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, final

import torch
from torch import Tensor

from l2l.device import Work
from l2l.parameter_server import (
    Adafactor,
    FlatUnit,
    HostOptimizer,
    Muon,
    Progress,
    UpdateOrder,
    WaitingUpdate,
    device_update,
    state_name,
)
from l2l.run.gradients import Gradients
from l2l.run.parts import Parts
from l2l.run.seeds import DEVICE_UPDATE_SEED, mix_seed, position
from l2l.run.step import Step
from l2l.schedule import Action, Lane


@final
class DeviceUpdates:
    """Performs the lines of a schedule that concern updates on the device."""

    def __init__(self, parts: Parts, gradients: Gradients) -> None:
        self._server, self._device = parts.server, parts.device
        self._transfer, self._gradients = parts.transfer, gradients
        self._compiler = parts.compiler
        self.lines: dict[str, Callable[[Step, Action], None]] = {
            # at once
            "update U device": self.update_in_slot,
            "fetch U.state:p": self.fetch_state,
            "update U:p device": self.update_piece,
            # left by the step before
            "update U device late": self.update_device_state,
            "drain U": self.drain_weights,
            "fetch U.all:p": self.fetch_all,
            "update U:p device late": self.update_lent_piece,
            "drain U.all:p": self.drain_all,
        }
        self.prepared: dict[str, Callable[[Step, Action], Work]] = {
            "order U": self.order,
            "order U late": self.order_late,
        }

    def order_late(self, _: Step, action: Action) -> Work:
        """The numbers of an update on the device that was left, into host memory.

        The update waits until its weights are drained: if the step fails before, it is not lost.
        """
        return self._numbers(self._server.waiting[action.unit])

    def _numbers(self, waiting: WaitingUpdate) -> Work:
        if waiting.numbers is None:
            trained = self._server.units[waiting.unit].form.trained.names
            record = self._device.host_record(len(trained), device_update.NUM_NUMBERS)
            waiting.numbers = record.zero_()  # which changes nothing, if they are never written
        return partial(self._write_numbers, waiting, waiting.numbers)

    def order(self, step: Step, action: Action) -> Work:
        """The same, for an update under this step's backward passes.

        Which parameters get gradients is not known yet: all, until `update_piece` knows better.
        """
        unit = action.unit
        assert step.reported is not None
        names = frozenset(self._server.units[unit].form.trained.names)

        def numbers() -> UpdateOrder | None:
            found = step.order(unit)
            return None if found is None else replace(found, received=names)

        waiting = WaitingUpdate(unit=unit, order=numbers, drained=step.reported, step=step)
        self._server.waiting[unit] = waiting
        return self._numbers(waiting)

    def _write_numbers(self, waiting: WaitingUpdate, record: Tensor) -> None:
        if waiting.progress is Progress.ORDERED:  # a step that failed has ordered it
            return
        self._server.before_change(waiting.unit)  # numbers of steps now, the rest soon
        unit, order = self._server.units[waiting.unit], waiting.order()
        optimizer = self._server.optimizer
        assert isinstance(optimizer, HostOptimizer)
        rows = []
        for owner in unit.form.trained.names:
            applies = order is not None and owner in order.received
            unit.steps[owner] += applies
            rows.append(
                device_update.numbers(
                    optimizer,
                    order.settings[owner] if order is not None else optimizer.defaults,
                    step=max(1, unit.steps[owner]),
                    factor=order.factor if order is not None else 1.0,
                    apply=applies,
                    seed=self._server.seed,
                )
            )
        record.copy_(torch.tensor(rows))
        waiting.become(Progress.ORDERED)

    def update_device_state(self, _: Step, action: Action) -> None:
        """An update on the device, with the numbers that the host has written."""
        unit, (slot, gradient_slot) = action.unit, action.places
        waiting = self._server.waiting[unit]
        if waiting.renewed:
            return
        assert waiting.numbers is not None
        numbers = waiting.numbers.to(self._device.torch_device, non_blocking=True)
        self._server.unfinished.add(unit)
        self._apply(waiting.step, unit, slot, gradient_slot, numbers)
        waiting.renewed = True
        self._server.unfinished.discard(unit)

    def drain_weights(self, _: Step, action: Action) -> None:
        """The weights of an update on the device to the host: it waits no longer."""
        self._transfer.drain_weights(action.unit, *action.places)
        waiting = self._server.waiting.get(action.unit)
        if waiting is not None and waiting.renewed:
            del self._server.waiting[action.unit]

    def fetch_all(self, step: Step, action: Action) -> None:
        """Gradient, weights and state of a piece to the device."""
        self._transfer.fetch_all(action.unit, self._piece(step, action), *action.places)

    def update_lent_piece(self, step: Step, action: Action) -> None:
        """The update of a piece that was brought with its gradient and its state."""
        unit, place = action.unit, action.places[-1]
        waiting = self._server.waiting[unit]
        assert waiting.numbers is not None
        numbers = waiting.numbers.to(self._device.torch_device, non_blocking=True)
        if unit in step.finite:  # nobody has looked at the gradient yet
            numbers = numbers.clone()
            numbers[:, device_update.APPLY] *= step.finite[unit]
        spans, form = self._piece(step, action), self._server.units[unit].form
        runs, trained = self._runs(waiting.step, unit), form.trained
        if form.state_layouts:  # each of these is one parameter
            own = {trained.by_start[span.start] for span in spans}
            runs = [run for run in runs if run[1][0] in own]
        lent = self._transfer.lent(unit, spans, place, waiting.gradient)
        for (row, owners), (span, one) in product(runs, zip(spans, lent, strict=True)):
            first, last = (trained.span(owner) for owner in (owners[0], owners[-1]))
            start, end = max(first.start, span.start), min(last.stop, span.stop)
            if start < end:
                part = one.cut(start - span.start, end - span.start)
                self._update(waiting.step, unit, owners[0], part, numbers[row])

    def fetch_state(self, step: Step, action: Action) -> None:
        """State of a piece to the device."""
        self._transfer.fetch_state(action.unit, self._piece(step, action), *action.places)

    def update_piece(self, step: Step, action: Action) -> None:
        """The update of a piece whose weights and gradients are on the device."""
        unit, (slot, gradient_slot, place) = action.unit, action.places
        if action.piece == 0:
            self._gradients.show_summed(step, unit, gradient_slot)
            self._withdraw(step, unit)
            norms = self._transfer.norms(
                unit, gradient_slot, received=step.received.get(unit, set())
            )
            step.finite[unit] = norms.isfinite().all()
        self._transfer.join(unit, self._piece(step, action), slot, gradient_slot, place)
        self.update_lent_piece(step, action)

    def _withdraw(self, step: Step, name: str) -> None:
        """Take back what was assigned to parameters that got no gradient: hardly ever any."""
        unit, waiting = self._server.units[name], self._server.waiting[name]
        names = unit.form.trained.names
        without = [owner for owner in names if owner not in step.received.get(name, ())]
        if not without:
            return
        waiting.drained.synchronize()
        assert waiting.numbers is not None
        if waiting.order() is not None:
            for owner in without:
                unit.steps[owner] -= 1
                waiting.numbers[names.index(owner), device_update.APPLY] = 0.0

    def drain_all(self, step: Step, action: Action) -> None:
        """Weights and state of a piece to the host; after the last the update waits no longer."""
        unit = action.unit
        self._server.unfinished.add(unit)
        self._transfer.drain_all(unit, self._piece(step, action), *action.places)
        # Of a small unit the last pieces are empty.
        if action.piece == step.program.shape.num_pieces - 1:
            self._server.waiting.pop(unit, None)
            self._server.unfinished.discard(unit)

    def _piece(self, step: Step, action: Action) -> tuple[slice, ...]:
        assert action.piece is not None
        form = self._server.units[action.unit].form
        return form.piece(action.piece, step.program.shape.num_pieces)

    def _apply(self, step: Step, name: str, slot: str, gradient_slot: str, numbers: Tensor) -> None:
        """Update a unit with the gradients of a step."""
        weights = self._transfer.slot(slot)
        gradients = self._transfer.slot(gradient_slot)
        for row, run in self._runs(step, name):
            part = self._server.units[name].flat(run, weights=weights, gradients=gradients)
            self._update(step, name, run[0], part, numbers[row])

    def _update(self, step: Step, name: str, owner: str, part: FlatUnit, numbers: Tensor) -> None:
        """Update a run of parameters, of which this is the first."""
        optimizer, settings = self._server.optimizer, step.settings
        assert isinstance(optimizer, HostOptimizer)
        assert settings is not None
        if not part.weight.numel():
            return
        one = optimizer.one_for(settings[owner])
        if isinstance(one, Muon):
            shape = self._server.units[name].form.trained.shapes()[owner]
            one.revise(part, shape, numbers, settings=settings[owner])
        else:
            device_update.update(one, part, numbers, compiled=self._compiler.is_ready)

    def _runs(self, step: Step, name: str) -> list[tuple[int, tuple[str, ...]]]:
        """A unit's parameters, together if their update is the same, each with its row of numbers.

        A long run is one kernel; parameter by parameter the launches would take longer.
        """
        unit, settings = self._server.units[name], step.settings
        names = unit.form.trained.names
        assert settings is not None
        received = step.received.get(name, set())
        # What lies between parameters is not zero, and would count in the units of their blocks.
        blocks = any(kind.per_block for kind in unit.form.state_kinds.values())
        together = (
            unit.form.is_one_run
            and not unit.form.state_layouts
            and all(owner in received for owner in names)
            and all(settings[owner] == settings[names[0]] for owner in names)
            and len({unit.steps[owner] for owner in names}) == 1
            and not (blocks and unit.form.trained.padded_numel > unit.form.trained.numel)
        )
        return [(0, names)] if together else [(row, (one,)) for row, one in enumerate(names)]

    def update_now(self, waiting: WaitingUpdate) -> None:
        """The same, at once, for whoever needs the weights on the host."""
        name = waiting.unit
        if waiting.numbers is None:
            trained = self._server.units[name].form.trained.names
            waiting.numbers = torch.zeros(len(trained), device_update.NUM_NUMBERS)
        self._write_numbers(waiting, waiting.numbers)
        if not waiting.renewed:
            numbers = waiting.numbers.to(self._device.torch_device)
            self._apply(waiting.step, name, f"S{name}", f"G{name}", numbers)
            waiting.renewed = True
        self._transfer.drain_weights(name, f"S{name}")
        self._device.record(Lane.COMPUTE).synchronize()

    def update_in_slot(self, step: Step, action: Action) -> None:
        """Update a unit on the device, in its slot ([Note: device updates])."""
        unit, (slot, gradient_slot) = action.unit, action.places
        optimizer, settings = self._server.optimizer, step.settings
        assert isinstance(optimizer, Adafactor)
        assert settings is not None
        weights = self._transfer.views(unit, slot)
        gradients = self._transfer.views(unit, gradient_slot)
        loss, weight = step.device_losses.sum(0)
        finite = (loss / weight if step.divide_by_weight else loss).isfinite()
        self._gradients.show_summed(step, unit, gradient_slot)
        if step.witness is not None:
            return
        reduced = step.reduced.pop(unit, None)
        norms = self._gradients.note_norms(step, unit, gradient_slot, reduced)
        finite = finite & norms.isfinite().all()
        generator = torch.Generator(self._device.torch_device)
        generator.manual_seed(
            mix_seed(step.program.seed, step.number, position(unit), DEVICE_UPDATE_SEED)
        )
        for row, owner in enumerate(self._server.units[unit].form.trained.names):
            if reduced is None and owner not in step.received.get(unit, ()):
                continue
            applies = finite if reduced is None else finite & (reduced[1, row] > 0)
            gradient = gradients[owner]
            if step.divide_by_weight:
                gradient.div_(weight)
            shape = tuple(weights[owner].shape)
            state: dict[str, Any] = {
                n: weights[state_name(owner, n)] for n in optimizer.state_shapes(shape)
            }
            optimizer.revise(
                weights[owner],
                gradient,
                state,
                settings=settings[owner],
                finite=applies,
                generator=generator,
            )
