"""Where gradients become updates: on the host here, on the device in device_updates.py.

The schedule says when; the parameter server owns what is changed. Here is what happens in lines
about updates and looked-up rows (`Updates.lines`), and in those in which the host goes on with what
the step before has left, which is taken when they are submitted (`Updates.prepared`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

from l2l.device import Work
from l2l.parameter_server import Progress, WaitingUpdate
from l2l.run.device_updates import DeviceUpdates
from l2l.run.gradients import Gradients
from l2l.run.lookup import RowSet
from l2l.run.parts import Parts
from l2l.run.step import Step
from l2l.schedule import Action, Schedule, Shape, late_staging


@final
class Updates:
    """Performs the lines of a schedule that concern updates, and owns what performs the rest."""

    def __init__(self, parts: Parts) -> None:
        self._server, self._device = parts.server, parts.device
        self._transfer, self._rows, self._waiting = parts.transfer, parts.rows, parts.gradients
        self._gradients = Gradients(parts)
        self._on_device = DeviceUpdates(parts, self._gradients)
        self.accumulate = self._gradients.accumulate
        self.taken: list[WaitingUpdate] = []  # of the step before, by the step that runs
        self.lines: dict[str, Callable[[Step, Action], None]] = {
            "lookup m": self.lookup,
            "collect U m": self.collect,
            "collect U": self.collect_all,
            "update U host": self.update,
            **self._gradients.lines,
            **self._on_device.lines,
        }
        self.prepared: dict[str, Callable[[Step, Action], Work]] = {
            "update U host late": self.update_late,
            "update U host late weights": self.update_late_weights,
            "update U host late moments": self.update_late,
            "update U:m host late": self.update_late_rows,
            "update U:m host late weights": self.update_late_rows,
            **self._on_device.prepared,
        }

    def update(self, step: Step, action: Action) -> None:
        """A unit's update, on the host."""
        staging = self._transfer.staging[action.places[0]]
        self._gradients.show_staged(step, action.unit, staging)
        order = step.order(action.unit)
        if order is not None:
            self._server.update(action.unit, staging, order)

    def collect(self, step: Step, action: Action) -> None:
        """Add the gradients of looked-up rows to a table's."""
        unit, number = action.unit, action.microbatch
        assert step.rows is not None
        assert number is not None
        memory = self._transfer.staging[action.places[0]]
        looked_up = {one.owner for one in step.rows.lookups if one.unit == unit}
        if unit in step.received:  # the epilogue had it; what it gave no gradient is not drained
            layout = self._server.units[unit].form.staging_layout
            for owner in looked_up - step.received[unit]:
                layout.view(memory, owner).zero_()
        grown = self._rows.collect(unit, step.rows, number, memory)
        step.grown[unit] = step.grown.get(unit, 0.0) + grown
        step.received.setdefault(unit, set()).update(looked_up)

    def collect_all(self, step: Step, action: Action) -> None:
        """Add a unit's gradients to those that wait for the user's own code."""
        unit, staging = action.unit, self._transfer.staging[action.places[0]]
        assert self._waiting is not None
        received = step.received.get(unit, ()) if step.collects else ()
        self._waiting.collect(unit, staging, received, step.factor)
        if step.rows is not None and unit in _only_looked_up(step.program.shape):
            self._rows.clear(unit, step.rows, staging)

    def lookup(self, step: Step, action: Action) -> None:
        """Gather a microbatch's rows from their tables."""
        assert step.rows is not None
        assert action.microbatch is not None
        self._rows.gather(step.rows, action.microbatch)

    def show_waiting(self, step: Step) -> None:
        """Show the gradients of all updates that a step has left; those on the device are done."""
        for unit, waiting in list(self._server.waiting.items()):
            waiting.drained.synchronize()
            if waiting.gradient is None:
                self._gradients.show_summed(step, unit, f"G{unit}")
                del self._server.waiting[unit]
            else:
                self._gradients.show_staged(step, unit, waiting.gradient)

    def leave(self, schedule: Schedule, step: Step) -> None:
        """Keep the updates that a step leaves."""
        shape = schedule.shape
        drained = step.drained or step.reported
        only_rows = _only_looked_up(shape)
        for name in shape.late_units:
            assert drained is not None
            waiting = WaitingUpdate(unit=name, order=partial(step.order, name), drained=drained)
            waiting.step = step
            if name in shape.on_device:
                waiting.finish = self._on_device.update_now
            else:
                waiting.gradient = self._transfer.staging[late_staging(name)]
                if name in only_rows and step.rows is not None:
                    waiting.finish = partial(self._clear, step.rows)
            self._server.waiting[name] = waiting

    def put_back(self) -> None:
        """Let updates wait again that a step has taken, which failed before they were done.

        Not if the update lane has failed: a part of one may be done, and nobody may do it again.
        """
        for waiting in self.taken:
            if not (waiting.progress is Progress.DONE or self._device.has_failed):
                self._server.waiting[waiting.unit] = waiting
        self.taken = []

    def update_late(self, _: Step, action: Action) -> Work:
        """An update that was left, or what an earlier line has left of it."""
        waiting = self._server.waiting[action.unit]
        self.taken.append(waiting)
        del self._server.waiting[action.unit]
        return partial(waiting.perform, self._server)

    def update_late_weights(self, _: Step, action: Action) -> Work:
        """The weights of an update that was left; it stays, for its moments."""
        return partial(self._server.waiting[action.unit].advance, self._server)

    def update_late_rows(self, step: Step, action: Action) -> Work:
        """An update that was left, of the rows that a microbatch looks up; the rest stays."""
        rows = step.rows
        assert rows is not None
        assert action.microbatch is not None
        own = rows.first_used[action.unit][action.microbatch]
        return partial(
            self._server.waiting[action.unit].refresh,
            self._server,
            own,
            halves="weights" in action.kind,
            refresher=rows,
        )

    def _clear(self, rows: RowSet, waiting: WaitingUpdate) -> None:
        assert waiting.gradient is not None
        self._rows.clear(waiting.unit, rows, waiting.gradient)


def _only_looked_up(shape: Shape) -> set[str]:
    """Tables whose gradient is of rows alone: no head fills the rest of it."""
    return {unit.name for unit in shape.outer if unit.looked_up and not unit.in_epilogue}
