"""The relay: performs the lines of a schedule, and chooses nothing.

    for line in schedule:  submit its work to its lane, or let a lane wait

What each kind of line does is in a table, and done by a part that owns what it is about: passes
(layer_passes.py, around_layers.py), gradients and updates (updates.py), slots (transfer.py),
boundary tensors (stash.py). What belongs to one step only is in a `Step` object that is made for it
and captured by its work, so that work of one step that is still queued never meets the next step's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import final

import torch

from l2l.device import Event, Work
from l2l.parameter_server import UnitsOnDisk
from l2l.run.around_layers import AroundLayers
from l2l.run.buffers import ChangingBuffers
from l2l.run.head import HeadPasses
from l2l.run.layer_passes import LayerPasses
from l2l.run.outer_pass import OuterPass
from l2l.run.output_passes import OutputPasses
from l2l.run.parts import Parts
from l2l.run.step import Step
from l2l.run.updates import Updates
from l2l.schedule import Action, Lane, Wait, WaitLast, carried, late_staging

Performed = Callable[[Step, Action], None]
UPDATING = ("update U host", "order U", "drain U free")
"""Lines, besides some that drain pieces, after which something of this step is updated."""


@final
class Relay:
    """Walks schedules over the partition."""

    def __init__(
        self, parts: Parts, outer: OuterPass, scale_of: Callable[[Step], float] | None
    ) -> None:
        """Make all that performs lines; `scale_of` gives the loss scale of a float16 step."""
        self._server, self._device, self._outer = parts.server, parts.device, outer
        self._transfer, self._stash = transfer, stash = parts.transfer, parts.stash
        self._updates = updates = Updates(parts)
        self.buffers = ChangingBuffers(parts.partition)
        layers = LayerPasses(parts, updates, self.buffers)
        self._around = AroundLayers(parts, outer, layers, updates, self.buffers, scale_of)
        head = HeadPasses(parts, outer, self._around, self.buffers)
        outputs = OutputPasses(parts, outer, self._around, self.buffers)
        self._drained: Event | None = None  # of the last step that had gradients
        self._readers: dict[str, Event] = {}  # staging -> the last update that reads it
        self._perform: dict[str, Performed] = {
            "take": lambda _, a: transfer.take(*a.places),
            "release": self._release,
            "release U": lambda _, a: transfer.release(*a.places),
            "fetch U": lambda _, a: transfer.fetch(a.unit, *a.places),
            "fetch v m": lambda _, a: stash.unstash(a.value, *a.places),
            "drain U free": self._drain_and_free,
            "drain v m": lambda s, a: stash.stash(
                a.value, *a.places, apart=_is_first(s) or s.keeps
            ),
            "drain loss": self._drain_losses,
            "fetch U.state": self._read,
            "fetch U.weights": self._read,
            "drain U.state": self._write,
            "drain U.weights": self._write,
            "gather U": lambda _, a: transfer.gather(a.unit, *a.places),
            "forward Pro m": self._around.prologue,
            "forward U m": layers.forward,
            "forward Int m": self._around.interlude,
            "loss m": self._around.loss,
            "backward U m": layers.backward,
            "backward Pro m": self._around.prologue_backward,
            "backward Int m": self._around.interlude_backward,
            **head.lines,
            **updates.lines,
        }
        self._perform_on_sides = {**self._perform, **outputs.lines}
        self._prepare: dict[str, Callable[[Step, Action], Work]] = {
            **updates.prepared,
            "fetch v.stash m": lambda s, a: stash.reading(*_place_on_disk(s, a)),
            "drain v.stash m": lambda s, a: stash.writing(*_place_on_disk(s, a)),
        }

    def show_waiting(self, step: Step) -> None:
        """Show the gradients of all updates that a step has left to its witness."""
        self._updates.show_waiting(step)

    def close(self) -> None:
        """Give the buffers that layers change back."""
        self.buffers.of_layers.clear()
        self._outer.close()

    def run(self, step: Step, *, between: Callable[[], None] | None = None) -> None:
        """Submit every line of a step's program. Device work may go on when this returns.

        Args:
            step: its program, and what that works on. From `updates_submitted` on it must go to its
                end.
            between: called between lines until then; may raise.
        """
        if self._server.disk is not None:
            self._server.disk.put_away()  # what somebody has read or changed in between
        device, events, schedule = self._device, dict[Action, Event](), step.program.schedule
        awaited = {line.action for line in schedule.lines if isinstance(line, Wait)}
        last = self._last_events()
        self._adopt_rows(step)
        left = self._resume(step)
        device.begin()
        self.buffers.note_all(step)
        with device.private_random_state():
            for line in schedule.lines:
                if between is not None and not step.updates_submitted:
                    between()
                if isinstance(line, Wait):
                    device.wait(line.lane, events[line.action])
                elif isinstance(line, WaitLast):
                    if line.what in last:
                        device.wait(line.lane, last[line.what])
                else:
                    self._before(line, step)
                    device.submit(line.lane, line.text, self._work(line, step))
                    if line in awaited:
                        events[line] = device.record(line.lane)
                    self._after(line, step)
            device.finish()
        side = schedule.shape.side
        # Those that are left to the next step, at least.
        step.updates_submitted = step.training and not side
        self._drained = step.drained or step.reported or self._drained
        self._park(step, left)
        self._stash.end_step()
        self._updates.leave(schedule, step)
        self._updates.taken = []
        if side in ("", "backward"):
            step.forget_inputs()

    def abandon(self, step: Step | None) -> None:
        """Clear up after a run that failed; may be called again if that fails.

        Updates of the step before are done or wait again. If nothing of this step was updated,
        all is as if it had not been.
        """
        if self._server.snapshot is not None:
            self._server.snapshot.let_go()
        self._device.abort()
        self._stash.end_step()
        written = [] if self._server.disk is None else self._server.disk.abandon()
        if written is None:
            self._server.unfinished.add("disk")
        self._updates.put_back()
        for name in written or ():
            if name not in self._server.waiting:
                self._server.after_update(name)
        self._transfer.abandon()
        if step is not None and not step.updates_submitted:
            self.buffers.put_back(step)

    def _last_events(self) -> Mapping[str, Event]:
        """What lines of a step may wait for that earlier steps did ([Note: steps])."""
        found = {n: u.pending for n, u in self._server.units.items() if u.pending is not None}
        found |= self._readers
        found |= {} if self._server.disk is None else self._server.disk.last
        return found if self._drained is None else {**found, "drain": self._drained}

    def _adopt_rows(self, step: Step) -> None:
        if step.rows is not None:
            for m, one in enumerate(step.rows.microbatches):
                self._stash.adopt(f"e m{m}", one.form, one.rows)
                self._stash.adopt(f"x m{m}", one.form, one.gradients)

    def _resume(self, step: Step) -> frozenset[str]:
        """Go on with what the forward side of a step has left: these values."""
        if step.parked is None:
            return frozenset()
        step.move(self._device.torch_device)
        if step.program.shape.fused and step.staged is not None:
            self._transfer.put_back(step.staged, keeps=step.keeps)
        names = frozenset(step.parked.kept)
        self._stash.resume(step.parked)
        return names

    def _park(self, step: Step, left: frozenset[str]) -> None:
        """Leave to other sides of a step what they need; `left` is what this one has found."""
        shape, parked, step.parked = step.program.shape, step.parked, None
        if step.keeps and parked is not None:
            self._stash.park_again(left, parked)
        if shape.asks_inputs and shape.side == "backward":
            step.of_inputs = self._stash.park([f"i m{m}" for m in range(shape.num_microbatches)])
        if shape.side in ("forward", "outputs"):
            step.joined.clear()  # they are gradients now, and left as such
            step.move(torch.device("cpu"))
            step.parked = self._stash.park(left or carried(shape))
        if _is_first(step) and shape.fused:
            own = [unit.name for unit in shape.outer if unit.passes and unit.trained]
            step.staged = self._transfer.set_aside(map(late_staging, own))

    def _work(self, action: Action, step: Step) -> Work:
        prepare = self._prepare.get(action.kind)
        if prepare is not None:  # goes on with what the step before has left
            return prepare(step, action)
        perform = self._perform_on_sides if step.program.shape.side else self._perform
        return partial(perform[action.kind], step, action)

    def _before(self, action: Action, step: Step) -> None:
        """Note what changes when a line is done, before it is submitted."""
        if action.kind in ("drain U free", "drain U.all:p"):
            self._server.before_change(action.unit)
        is_own = action.kind == "drain U.all:p" and action.unit in step.program.redone
        if action.kind in UPDATING or is_own:
            step.updates_submitted = True

    def _after(self, action: Action, step: Step) -> None:
        """Note when a line is done, for whoever waits for that outside the schedule."""
        kind, device = action.kind, self._device
        if action.lane is Lane.UPDATE and action.unit:
            event = device.record(Lane.UPDATE)
            self._server.units[action.unit].pending = event
            if kind == "order U":
                self._server.waiting[action.unit].drained = event  # its numbers are there
            elif kind == "collect U m":
                step.collected = event
            elif action.verb in ("update", "collect"):
                self._readers[action.places[0]] = event
        elif action.lane is Lane.WRITE and action.unit:
            self._on_disk.note(device.record(Lane.WRITE), action.places[0], action.text.split()[1])
        elif kind == "fetch U" and len(action.places) > 1:
            self._on_disk.note(device.record(Lane.FETCH), "fetch")
        elif kind == "drain loss":
            step.reported = device.record(Lane.DRAIN)
        elif kind in ("drain U.grad", "drain U.grad:p", "drain U.norm"):
            step.drained = device.record(Lane.DRAIN)
        elif kind == "update U device":  # which measures, too
            step.drained = device.record(Lane.COMPUTE)
        elif kind in ("drain U", "drain U free", "drain U.all:p"):
            self._server.units[action.unit].pending = device.record(Lane.DRAIN)

    def _release(self, _: Step, action: Action) -> None:
        (place,) = action.places
        if place.startswith("S"):
            self._around.let_go()
        self._transfer.drop(place)

    def _drain_and_free(self, _: Step, action: Action) -> None:
        self._transfer.drain_weights(action.unit, *action.places)
        self._transfer.release(*action.places)

    @property
    def _on_disk(self) -> UnitsOnDisk:
        assert self._server.disk is not None
        return self._server.disk

    def _read(self, _: Step, action: Action) -> None:
        self._on_disk.fetch(self._server.units[action.unit], *action.places)

    def _write(self, _: Step, action: Action) -> None:
        unit = self._server.units[action.unit]
        self._on_disk.drain(unit, *action.places)
        if not unit.changed:
            self._server.after_update(action.unit)

    def _drain_losses(self, step: Step, _: Action) -> None:
        step.losses.copy_(step.device_losses, non_blocking=True)


def _place_on_disk(step: Step, action: Action) -> tuple[str, str, int]:
    """A boundary tensor, the buffer through which it goes, and its number on disk."""
    return action.value, action.places[0], step.program.stash_numbers[action.value]


def _is_first(step: Step) -> bool:
    """Whether this is the first side of a step in two."""
    return step.program.shape.side == "forward"
