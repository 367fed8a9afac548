"""The relay: performs the lines of a schedule, one small method per verb, and chooses nothing.

    for line in schedule:  submit its work to its lane, or let a lane wait

State has owners elsewhere (weights: parameter server; slots: transfer; boundary tensors: stash).
What belongs to one step only is in a `Step` object that is made for it and captured by its work, so
that work of one step that is still queued never meets the next step's.

Layers run through a compiler where they can (compiled_layer.py), else as they are (layer_pass.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import takewhile
from typing import final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2l.device import Device, Event, Work
from l2l.model import (
    EVERYTHING,
    BackwardResult,
    Compiler,
    Handed,
    LayerInputs,
    Microbatch,
    Partition,
    Program,
    RecordedTensor,
    Recording,
    Walked,
    backward_layer,
    forward_layer,
    take_gradients,
    unwind_layer,
    walk_layer,
    weigh_gradient,
    weighed,
)
from l2l.parameter_server import LossScale, ParameterServer
from l2l.run.outer_pass import OuterPass
from l2l.run.stash import Stash
from l2l.run.step import Step
from l2l.run.transfer import Transfer
from l2l.run.updates import PROLOGUE_SEED, Updates, mix_seed
from l2l.schedule import NOTHING, Action, Lane, Schedule, Shape, Wait

UPDATING = ("update", "assign", "return")
"""Lines, besides some that repay, after which something of this step is updated, or will be."""
HOST_VERBS = ("update", "settle", "advance", "complete", "refresh", "order", "assign", "collect")
"""Lines after which a unit's host memory has changed, or will."""


@final
class Scaler:
    """Gives every float16 step its loss scale, once the step before it is known."""

    def __init__(self) -> None:
        self.scale = LossScale()
        self.unobserved: Step | None = None

    def scale_of(self, step: Step) -> float:
        """The scale of a step; waits for the norms of the one before."""
        if step.witness is not None:
            return step.loss_scale
        previous = self.unobserved
        if previous is not None and previous is not step:
            self.observe()
        return self.scale.value

    def observe(self) -> None:
        """Learn how the last step went; waits for its norms."""
        previous, self.unobserved = self.unobserved, None
        if previous is not None:
            for event in (previous.drained, previous.collected):
                if event is not None:
                    event.synchronize()
            self.scale.observe(finite=previous.is_finite())


@final
class Relay:
    """Walks schedules over the partition."""

    def __init__(
        self,
        *,
        partition: Partition,
        server: ParameterServer,
        device: Device,
        transfer: Transfer,
        stash: Stash,
        outer: OuterPass,
        updates: Updates,
        compiler: Compiler,
        seed: int,
        scale_of: Callable[[Step], float] | None,
    ) -> None:
        self._partition = partition
        self._server = server
        self._device = device
        self._transfer = transfer
        self._stash = stash
        self._outer = outer
        self._updates = updates
        self._compiler = compiler
        self._seed = seed
        self._scale_of = scale_of  # the loss scale of a float16 step
        self.keep = 0.0  # how much of its intermediate results a streamed layer may keep
        self.layer_buffers: dict[int, dict[str, Tensor]] = {}  # those that layers change
        self._schedule: Schedule | None = None
        self._following: dict[int, str] = {}  # after a streamed layer: the next one, or E
        self._returning: frozenset[int] = frozenset()  # streamed layers with a backward pass
        self._perform: dict[str, Callable[..., None]] = {
            "take": lambda _, place: self._transfer.take(place),
            "drop": self._drop,
            "fetch": lambda _, unit, slot: self._transfer.fetch(unit, slot),
            "gather": lambda _, unit, slot: self._transfer.gather(unit, slot),
            "release": lambda _, unit, slot: self._transfer.release(unit, slot),
            "lookup": self._updates.gather,
            "prologue": self._prologue,
            "forward": self._forward,
            "epilogue": self._epilogue,
            "score": self._score,
            "report": self._report,
            "backward": self._backward,
            "regress": self._regress,
            "pool": self._updates.pool,
            "reduce": self._updates.reduce,
            "drain": self._updates.drain,
            "measure": self._updates.measure,
            "collect": self._updates.collect,
            "update": self._updates.update,
            "renew": self._updates.renew,
            "mirror": self._updates.mirror,
            "borrow": self._updates.borrow,
            "rework": self._updates.rework,
            "repay": self._updates.repay,
            "lease": self._updates.lease,
            "redo": self._updates.redo,
            "revise": self._updates.revise,
            "return": lambda _, unit, slot: self._transfer.give_back(unit, slot),
            "stash": lambda _, value, m, cell: self._stash.stash(f"{value} {m}", cell),
            "unstash": lambda _, value, m, cell: self._stash.unstash(f"{value} {m}", cell),
        }

    def reseed(self, seed: int) -> None:
        """Go on with another seed."""
        self._seed = self._updates.seed = seed

    def follow(self, keep: float, *, num_pieces: int) -> None:
        """Take over what a plan has chosen."""
        self.keep = keep
        self._updates.num_pieces = num_pieces

    def show_waiting(self, step: Step) -> None:
        """Show the gradients of all updates that a step has left to its witness."""
        self._updates.show_waiting(step)

    def close(self) -> None:
        """Give the buffers that layers change back."""
        self.layer_buffers.clear()
        self._outer.close()

    def run(
        self, schedule: Schedule, step: Step, *, between: Callable[[], None] | None = None
    ) -> None:
        """Submit every line of a schedule. Device work may go on when this returns.

        Args:
            schedule: the lines.
            step: what they work on. From `updates_submitted` on it must go to its end.
            between: called between lines until then; may raise.
        """
        device, events = self._device, dict[Action, Event]()
        awaited = {line.action for line in schedule.lines if isinstance(line, Wait)}
        pending = {name: unit.pending for name, unit in self._server.units.items()}
        self._schedule, streamed = schedule, schedule.shape.streamed
        self._following = dict(zip(streamed, [*map(str, streamed[1:]), "E"], strict=False))
        self._returning = frozenset(schedule.shape.backward_layers)
        self._adopt_rows(step)
        own = {*schedule.shape.redone}
        device.begin()
        self._note_all_buffers(step)
        with device.private_random_state():
            for line in schedule.lines:
                if between is not None and not step.updates_submitted:
                    between()
                if isinstance(line, Wait):
                    device.wait(line.lane, events[line.action])
                    continue
                if line.verb == "fetch" and (update := pending[line.operands[0]]) is not None:
                    device.wait(Lane.FETCH, update)
                if line.verb in UPDATING or (line.verb == "repay" and line.operands[0] in own):
                    step.updates_submitted = True
                if line.verb in ("return", "repay"):
                    self._server.before_change(line.operands[0])
                device.submit(line.lane, str(line), self._work(line, step))
                if line in awaited:
                    events[line] = device.record(line.lane)
                self._after(line, step)
            device.finish()
        step.updates_submitted = step.training  # those that are left to the next step, at least
        self._stash.end_step()
        self._updates.leave(schedule, step)
        self._updates.taken = []
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
        self._updates.put_back()
        self._transfer.abandon()
        if step is not None and not step.updates_submitted:
            for name, (buffer, before) in step.outer_at_first.items():
                buffer.copy_(before)
                self._partition.skeleton.bind({name: buffer})
            self.layer_buffers.update(step.buffers_at_first)

    def _adopt_rows(self, step: Step) -> None:
        if step.rows is not None:
            for m, one in enumerate(step.rows.microbatches):
                self._stash.adopt(f"e m{m}", one.form, one.rows)
                self._stash.adopt(f"x m{m}", one.form, one.gradients)

    def _work(self, action: Action, step: Step) -> Work:
        if action.verb in ("settle", "complete"):  # of the step before, with that step's numbers
            return self._updates.settle(action.operands[0])
        if action.verb == "advance":
            return self._updates.advance(action.operands[0])
        if action.verb == "refresh":
            halves = step.training and self._shape.halves and not self._shape.whole_tables
            return self._updates.refresh(step, *action.operands[:2], halves=halves)
        if action.verb in ("order", "assign"):
            work: Work = getattr(self._updates, action.verb)(step, action.operands[0])
            return work
        return partial(self._perform[action.verb], step, *action.operands)

    def _after(self, action: Action, step: Step) -> None:
        if action.verb == "report":
            step.reported = self._device.record(Lane.DRAIN)
        elif action.verb in ("drain", "measure"):
            step.drained = self._device.record(Lane.DRAIN)
        elif action.verb == "revise":  # which measures, too
            step.drained = self._device.record(Lane.COMPUTE)
        elif action.verb in HOST_VERBS:
            event = self._device.record(Lane.UPDATE)
            self._server.note_pending(action.operands[0], event)
            if action.verb == "assign":
                self._server.waiting[action.operands[0]].drained = event  # its numbers are there
            step.collected = event if action.verb == "collect" else step.collected
        elif action.verb in ("return", "mirror", "repay"):
            self._server.note_pending(action.operands[0], self._device.record(Lane.DRAIN))

    # ----------------------------------------------------------------------------------------------
    # Prologue and epilogue

    def _drop(self, _: Step, place: str) -> None:
        if place.startswith("S"):
            self._outer.bind_only({})  # the model's code would keep the memory alive
        self._transfer.drop(place)

    def _prologue(
        self, step: Step, microbatch: str, slots: str, recorded: str, rows: str, cell: str
    ) -> None:
        m = int(microbatch[1:])
        changing = self._outer.facts.changing
        buffers = self._partition.skeleton.buffers()
        self._note_buffers(step, PROLOGUE_SEED, m, {n: buffers[n] for n in changing})
        self._outer.bind(slots)
        recording = self._run_prologue(step, m, self._rows(step, microbatch, rows))
        self._partition.skeleton.take_over(buffers)
        assert recording.hidden is not None
        hidden = recording.hidden
        step.calls[m] = recording.calls
        step.through[m] = [i for i, tensor in enumerate(recording.tensors) if tensor.requires_grad]
        step.gathered[m] = []
        step.hidden_requires[m] = hidden.requires_grad
        if step.num_own is None or m < step.num_own:
            step.num_tokens += math.prod(hidden.shape[:-1])
        self._stash.put(recorded, f"r {microbatch}", [t.detach() for t in recording.tensors])
        self._stash.put(cell, f"{self._shape.first_value} {microbatch}", [hidden.detach()])

    def _rows(self, step: Step, microbatch: str, cell: str) -> list[Tensor]:
        """A microbatch's looked-up rows, as leaves where their table is trained."""
        if cell == NOTHING:
            return []
        return [
            rows.detach().requires_grad_(
                step.training and lookup.owner in self._trained(lookup.unit)
            )
            for lookup, rows in zip(
                self._outer.facts.lookups, self._stash.get(cell, f"e {microbatch}"), strict=True
            )
        ]

    def _run_prologue(self, step: Step, m: int, rows: list[Tensor]) -> Recording:
        self._device.seed(mix_seed(self._seed, step.number, PROLOGUE_SEED, m))
        inputs, host = self._inputs(step, m), step.microbatches[m]
        return self._outer.prologue(inputs, host, rows, training=step.training)

    def _epilogue(
        self,
        step: Step,
        microbatch: str,
        slots: str,
        gradients: str,
        recorded: str,
        cell: str,
        gradient_cell: str,
    ) -> None:
        """The tail, the loss, and both backward ([Note: tail])."""
        m = int(microbatch[1:])
        hidden = self._stash.get(cell, f"hE {microbatch}")[0].detach()
        below = self._below(step, m)
        walks = list[tuple[LayerInputs, Handed | Walked]]()
        for layer in self._shape.tail:
            inputs = self._tail_inputs(step, layer, m, recorded, hidden, requires=below)
            walked, output = self._walk(layer, inputs, step, m)
            hidden = weighed(hidden, output, step.survival.get(layer))
            walks.append((inputs, walked))
            below = below or self._adds_gradient(step, layer, m)
        bound = self._outer.bind(slots)
        if self._scale_of is not None:
            step.loss_scale = self._scale_of(step)
        self._device.seed(mix_seed(self._seed, step.number, PROLOGUE_SEED, m))
        buffers = self._partition.skeleton.buffers()
        after = self._rewind_buffers(step, m)
        with torch.enable_grad():
            gradient = self._outer.epilogue(
                step,
                m,
                hidden,
                inputs=self._inputs(step, m),
                bound=bound,
                slots=slots,
                gradients=gradients,
                needs_gradient=below,
                loss_scale=step.loss_scale,
            )
        self._partition.skeleton.take_over(buffers)
        self._restore_buffers(after)
        gathered: list[Tensor] = []
        for layer, (inputs, walked) in zip(self._shape.tail[::-1], walks[::-1], strict=True):
            if gradient is None:
                break
            unwind = partial(self._unwind, layer, inputs, walked)
            result = weigh_gradient(gradient, step.survival.get(layer), unwind)
            if self._trained(f"L{layer}"):
                add = self._compiler.gradient_sum(self._partition.structures[layer])
                self._updates.accumulate(step, f"L{layer}", f"GL{layer}", result.parameters, add)
            gathered = self._gather(step, m, gathered, result.recorded)
            passes_on = inputs.hidden_requires_gradient
            gradient = torch.zeros_like(gradient) if result.hidden is None else result.hidden
            gradient = gradient if passes_on else None
        if gradient_cell != NOTHING:
            gradient = torch.zeros_like(hidden) if gradient is None else gradient
            self._stash.put(gradient_cell, f"gE {microbatch}", [gradient, *gathered])

    def _below(self, step: Step, m: int) -> bool:
        """Whether the hidden state that enters the epilogue requires a gradient."""
        return step.training and self._requires(step, self._shape.streamed, m)

    def _score(self, step: Step, microbatch: str, slots: str, recorded: str, cell: str) -> None:
        m = int(microbatch[1:])
        hidden = self._stash.get(cell, f"hE {microbatch}")[0]
        for layer in self._shape.tail:
            self._device.seed(mix_seed(self._seed, step.number, layer, m))
            walked = self._tail_inputs(step, layer, m, recorded, hidden, requires=False)
            hidden = forward_layer(walked)
            self._take_over(layer)
        bound = self._outer.bind(slots)
        self._device.seed(mix_seed(self._seed, step.number, PROLOGUE_SEED, m))
        inputs = self._inputs(step, m)
        buffers = self._partition.skeleton.buffers()
        after = self._rewind_buffers(step, m)
        with torch.no_grad():
            if step.keep_outputs:
                outputs = self._outer.run_epilogue(inputs, hidden, host=step.microbatches[m])
                step.outputs[m] = pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), outputs)
            else:
                self._outer.score(step, m, hidden, inputs=inputs, bound=bound, slots=slots)
        self._partition.skeleton.take_over(buffers)
        self._restore_buffers(after)

    def _report(self, step: Step) -> None:
        step.losses.copy_(step.device_losses, non_blocking=True)

    def _regress(
        self, step: Step, microbatch: str, slots: str, gradients: str, cell: str, rows: str, to: str
    ) -> None:
        m = int(microbatch[1:])
        found = self._stash.get(cell, f"g{self._shape.first_value[1:]} {microbatch}")
        buffers = self._partition.skeleton.buffers()
        after = self._rewind_buffers(step, m)
        bound = self._outer.bind(slots)
        leaves = self._rows(step, microbatch, rows)
        recording = self._run_prologue(step, m, leaves)
        assert recording.hidden is not None
        outputs = [recording.hidden, *(recording.tensors[i] for i in step.gathered[m])]
        matching = [g.to(o.dtype) for o, g in zip(outputs, found, strict=True)]
        wanted: dict[object, Tensor] = {
            owner: bound[owner]
            for slot in gradients.split(",")
            if slot != NOTHING
            for owner in self._trained(slot[1:])
        }
        wanted |= {("row", i): leaf for i, leaf in enumerate(leaves) if leaf.requires_grad}
        taken = take_gradients(outputs, matching, wanted)
        for slot in gradients.split(","):
            if slot != NOTHING:
                own = {name: taken[name] for name in self._trained(slot[1:]) if name in taken}
                self._updates.accumulate(step, slot[1:], slot, own)
        if to != NOTHING:
            of_rows = [taken.get(("row", i)) for i in range(len(leaves))]
            self._stash.put(
                to,
                f"x {microbatch}",
                [
                    torch.zeros_like(leaf) if gradient is None else gradient
                    for leaf, gradient in zip(leaves, of_rows, strict=True)
                ],
            )
        self._partition.skeleton.take_over(buffers)
        self._restore_buffers(after)  # only now: the graph has used them

    # ----------------------------------------------------------------------------------------------
    # Streamed layers

    def _forward(
        self,
        step: Step,
        layer: str,
        microbatch: str,
        slot: str,
        recorded: str,
        before: str,
        to: str,
        kept: str,
    ) -> None:
        index, m = int(layer[1:]), int(microbatch[1:])
        changing = self.layer_buffers.get(index, {})
        self._note_buffers(step, index, m, changing)
        self._device.seed(mix_seed(self._seed, step.number, index, m))
        inputs = self._streamed_inputs(step, index, m, slot, recorded, before, changing)
        program = self._program(step, index, m)
        output, handed = None, None
        if program is not None:
            anchors = self._anchors(slot, recorded, before)
            output, handed = self._try(index, program, inputs, anchors, room=kept != NOTHING)
        if output is None:
            self._device.seed(mix_seed(self._seed, step.number, index, m))
            output = forward_layer(inputs)
        self._take_over(index)
        output = weighed(inputs.hidden, output, step.survival.get(index))
        if kept != NOTHING:
            self._stash.put(
                kept, f"k{index} {microbatch}", [] if handed is None else handed.packed.kept
            )
        if handed is not None:
            handed.packed.kept.clear()
            step.handed[index, m] = handed
        self._stash.put(to, f"h{self._following[index]} {microbatch}", [output])

    def _program(self, step: Step, index: int, m: int) -> Program | None:
        if not step.training or index not in self._returning or step.calls[m][index].autocast:
            return None
        return self._compiler.program(self._partition.structures[index], keep=self.keep)

    def _try(
        self,
        index: int,
        program: Program,
        inputs: LayerInputs,
        anchors: Mapping[str, Tensor] | None,
        *,
        room: bool,
    ) -> tuple[Tensor | None, Handed | None]:
        """A compiled pass, or nothing if the layer turns out not to compile."""
        structure = self._partition.structures[index]
        try:
            with self._compiler.timed(program):
                output, handed = program.forward(
                    self._partition.templates[index], inputs, anchors=anchors
                )
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler may raise
            reason = str(error).strip().splitlines() or [type(error).__name__]
            self._compiler.give_up(structure, reason[0])
            return None, None
        if handed.packed.kept and anchors is not None and not room:
            self._compiler.give_up(structure, "its backward pass needs more than its inputs")
            return None, None
        return output, handed

    def _anchors(self, slot: str, recorded: str, before: str) -> dict[str, Tensor]:
        return {
            "weights": self._transfer.slot(slot),
            "recorded": self._stash.cell(recorded),
            "hidden": self._stash.cell(before),
        }

    def _backward(
        self,
        step: Step,
        layer: str,
        microbatch: str,
        slot: str,
        gradient_slot: str,
        recorded: str,
        before: str,
        kept: str,
        gradient_cell: str,
        to: str,
    ) -> None:
        index, m = int(layer[1:]), int(microbatch[1:])
        gradient, *gathered = self._stash.get(
            gradient_cell, f"g{self._following[index]} {microbatch}"
        )
        self._device.seed(mix_seed(self._seed, step.number, index, m))
        changing = step.buffers_before.pop((index, m), {})
        inputs = self._streamed_inputs(step, index, m, slot, recorded, before, changing)
        handed = step.handed.pop((index, m), None)
        if handed is None or not self._compiler.trusts(self._partition.structures[index], handed):
            backward = partial(backward_layer, inputs)
        else:
            if kept != NOTHING:
                handed.packed.kept = self._stash.get(kept, f"k{index} {microbatch}")
            anchors = self._anchors(slot, recorded, before)
            backward = partial(self._compiled_backward, step, index, m, inputs, handed, anchors)
        result = weigh_gradient(gradient, step.survival.get(index), backward)
        add = self._compiler.gradient_sum(self._partition.structures[index])
        self._updates.accumulate(step, layer, gradient_slot, result.parameters, add)
        if to != NOTHING:
            hidden = torch.zeros_like(gradient) if result.hidden is None else result.hidden
            sums = self._gather(step, m, gathered, result.recorded)
            self._stash.put(to, f"g{index} {microbatch}", [hidden, *sums])

    def _compiled_backward(
        self,
        step: Step,
        index: int,
        m: int,
        inputs: LayerInputs,
        handed: Handed,
        anchors: Mapping[str, Tensor],
        gradient: Tensor,
    ) -> BackwardResult:
        structure = self._partition.structures[index]
        program = handed.program
        with self._compiler.timed(program):
            result = program.backward(inputs, handed, gradient=gradient, anchors=anchors)
        if self._compiler.must_check(structure, handed):
            self._device.seed(mix_seed(self._seed, step.number, index, m))
            expected = backward_layer(inputs, gradient=gradient)
            if not self._compiler.check(structure, program, result, expected):
                return expected
        return result

    def _streamed_inputs(
        self,
        step: Step,
        index: int,
        m: int,
        slot: str,
        recorded: str,
        before: str,
        changing: Mapping[str, Tensor],
    ) -> LayerInputs:
        below = takewhile(index.__gt__, self._shape.layers)
        return self._layer_inputs(
            step,
            index,
            m,
            slot=slot,
            recorded=self._stash.get(recorded, f"r m{m}"),
            hidden=self._stash.get(before, f"h{index} m{m}")[0],
            requires=step.training and self._requires(step, below, m),
            changing=changing,
        )

    # ----------------------------------------------------------------------------------------------
    # The tail

    def _tail_inputs(
        self, step: Step, index: int, m: int, recorded: str, hidden: Tensor, *, requires: bool
    ) -> LayerInputs:
        return self._layer_inputs(
            step,
            index,
            m,
            slot=f"SL{index}",
            recorded=self._stash.get(recorded, f"r m{m}"),
            hidden=hidden,
            requires=requires,
            changing=self.layer_buffers.get(index, {}),
        )

    def _walk(
        self, index: int, inputs: LayerInputs, step: Step, m: int
    ) -> tuple[Handed | Walked, Tensor]:
        """Run a layer with graph; returns the graph and the output."""
        self._device.seed(mix_seed(self._seed, step.number, index, m))
        program = self._compiler.program(self._partition.structures[index], keep=EVERYTHING)
        if program is not None and not inputs.call.autocast:
            output, handed = self._try(index, program, inputs, None, room=True)
            if output is not None and handed is not None:
                return handed, output
            self._device.seed(mix_seed(self._seed, step.number, index, m))
        walked = walk_layer(inputs)
        self._take_over(index)
        return walked, walked.output.detach()

    def _unwind(
        self, index: int, inputs: LayerInputs, walked: Handed | Walked, gradient: Tensor
    ) -> BackwardResult:
        if isinstance(walked, Walked):
            return unwind_layer(inputs, walked, gradient=gradient)
        with self._compiler.timed(walked.program):
            return walked.program.backward(inputs, walked, gradient=gradient, anchors=None)

    # ----------------------------------------------------------------------------------------------
    # Small things

    @property
    def _shape(self) -> Shape:
        assert self._schedule is not None
        return self._schedule.shape

    def _layer_inputs(
        self,
        step: Step,
        index: int,
        m: int,
        *,
        slot: str,
        recorded: list[Tensor],
        hidden: Tensor,
        requires: bool,
        changing: Mapping[str, Tensor],
    ) -> LayerInputs:
        layer = f"L{index}"
        assert self._transfer.holds(layer, slot), f"{layer} is not in {slot}"
        return LayerInputs(
            part=self._partition.layers[index],
            tensors={**self._transfer.weights(layer, slot), **changing},
            trained=self._trained(layer),
            call=step.calls[m][index],
            hidden=hidden,
            hidden_requires_gradient=requires,
            recorded=recorded,
            through=step.through[m],
            changes_input=self._partition.structures[index] in self._partition.changing_input,
        )

    @staticmethod
    def _gather(
        step: Step, m: int, gathered: list[Tensor], recorded: Mapping[int, Tensor]
    ) -> list[Tensor]:
        """Add a layer's gradients of recorded tensors to those of the layers after it."""
        sums = dict(zip(step.gathered[m], gathered, strict=True))
        for index, gradient in recorded.items():
            wide = gradient.float()
            sums[index] = sums[index] + wide if index in sums else wide
        step.gathered[m] = list(sums)
        return list(sums.values())

    def _requires(self, step: Step, below: Iterable[int], m: int) -> bool:
        """Whether the hidden state after these layers requires a gradient in plain PyTorch."""
        return step.hidden_requires[m] or any(self._adds_gradient(step, i, m) for i in below)

    def _adds_gradient(self, step: Step, index: int, m: int) -> bool:
        """Whether a layer is trained, or is given something recorded that requires a gradient."""
        return bool(self._trained(f"L{index}")) or any(
            isinstance(leaf, RecordedTensor) and leaf.index in step.through[m]
            for leaf in (step.calls[m][index].leaves if step.through[m] else ())
        )

    def _trained(self, unit: str) -> tuple[str, ...]:
        return self._server.units[unit].form.trained.names

    def _inputs(self, step: Step, m: int) -> Microbatch:
        device = self._device.torch_device
        return {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in step.microbatches[m].items()
        }

    def _take_over(self, index: int) -> None:
        """Keep the buffers that a layer's forward pass has put in the place of those it had."""
        kept = self.layer_buffers.get(index)
        if kept:
            for owner, buffer in self._partition.layers[index].assigned(kept).items():
                kept[owner] = buffer.detach().clone()  # what a graph has used stays as it was

    def _note_all_buffers(self, step: Step) -> None:
        """Keep buffers that training changes as they are before the step."""
        if step.training:
            outer = self._partition.skeleton.buffers() if self._outer.facts.changing else {}
            step.outer_at_first = {
                name: (outer[name], outer[name].clone()) for name in self._outer.facts.changing
            }
            step.buffers_at_first = {
                index: {owner: buffer.clone() for owner, buffer in buffers.items()}
                for index, buffers in self.layer_buffers.items()
            }

    @staticmethod
    def _note_buffers(step: Step, part: int, m: int, changing: Mapping[str, Tensor]) -> None:
        if changing and step.training:
            step.buffers_before[part, m] = {name: b.clone() for name, b in changing.items()}

    def _rewind_buffers(self, step: Step, m: int) -> dict[str, Tensor]:
        """Put outer buffers back to what they were before a prologue run; returns what is now."""
        before = step.buffers_before.get((PROLOGUE_SEED, m), {})
        buffers = self._partition.skeleton.buffers() if before else {}
        after = {name: buffers[name].clone() for name in before}
        for name, value in before.items():
            buffers[name].copy_(value)
        return after

    def _restore_buffers(self, after: Mapping[str, Tensor]) -> None:
        buffers = self._partition.skeleton.buffers() if after else {}
        for name, value in after.items():
            buffers[name].copy_(value)
