"""Passes through layers: streamed ones forward and backward, those of the tail with graph.

Layers run through a compiler where they can, else as they are (layer_pass.py in the model room).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import takewhile
from typing import final

import torch
from torch import Tensor

from l2l.model import (
    EVERYTHING,
    BackwardResult,
    Handed,
    LayerInputs,
    Program,
    RecordedTensor,
    Walked,
)
from l2l.run.buffers import ChangingBuffers
from l2l.run.parts import Parts
from l2l.run.seeds import mix_seed
from l2l.run.step import Step
from l2l.run.updates import Updates
from l2l.schedule import NOTHING, Action


@final
class LayerPasses:
    """Runs a microbatch through a layer."""

    def __init__(self, parts: Parts, updates: Updates, buffers: ChangingBuffers) -> None:
        self._partition, self._server, self._device = parts.partition, parts.server, parts.device
        self._transfer, self._stash, self._compiler = parts.transfer, parts.stash, parts.compiler
        self._updates, self._buffers = updates, buffers

    # ----------------------------------------------------------------------------------------------
    # Streamed layers

    def forward(self, step: Step, action: Action) -> None:
        """A microbatch through a layer, without graph; what the compiler keeps goes to a cell."""
        slot, recorded, before, to, kept = action.places
        index, m = action.layer, action.microbatch
        assert m is not None
        changing = self._buffers.enter_layer(step, index, m)
        self._seed(step, index, m)
        hidden = self._stash.get(before, f"h{index} m{m}")[0]
        needs = self._needs_gradient(step, index, m)
        inputs = self._inputs(step, index, m, slot, recorded, hidden, changing, requires=needs)
        program = self._program(step, index, m)
        output, handed = None, None
        if program is not None:
            anchors = self._anchors(slot, recorded, before)
            output, handed = self._try(index, program, inputs, anchors, room=kept != NOTHING)
        if output is None:
            self._seed(step, index, m)
            output = inputs.forward()
        self._buffers.leave_layer(index)
        output = inputs.weighed(output)
        if kept != NOTHING:
            self._stash.put(kept, f"k{index} m{m}", [] if handed is None else handed.packed.kept)
        if handed is not None:
            handed.packed.kept.clear()
            step.handed[index, m] = handed
        self._stash.put(to, f"h{step.program.following[index]} m{m}", [output])

    def backward(self, step: Step, action: Action) -> None:
        """The same backward: the layer is recomputed, its gradients are added to their sums."""
        slot, gradient_slot, recorded, before, kept, gradient_cell, to = action.places
        index, m = action.layer, action.microbatch
        assert m is not None
        following = step.program.following[index]
        gradient, *gathered = self._stash.get(gradient_cell, f"g{following} m{m}")
        self._seed(step, index, m)
        changing = step.buffers_before.pop((index, m), {})
        hidden = self._stash.get(before, f"h{index} m{m}")[0]
        needs = self._needs_gradient(step, index, m)
        inputs = self._inputs(step, index, m, slot, recorded, hidden, changing, requires=needs)
        handed = step.handed.pop((index, m), None)
        if handed is None or not self._compiler.trusts(self._partition.structures[index], handed):
            backward = inputs.backward
        else:
            if kept != NOTHING:
                handed.packed.kept = self._stash.get(kept, f"k{index} m{m}")
            anchors = self._anchors(slot, recorded, before)
            backward = partial(self._compiled_backward, step, index, m, inputs, handed, anchors)
        result = inputs.weigh_gradient(gradient, backward)
        add = self._compiler.gradient_sum(self._partition.structures[index])
        self._updates.accumulate(step, action.unit, gradient_slot, result.parameters, add)
        if to != NOTHING:
            before_it = torch.zeros_like(gradient) if result.hidden is None else result.hidden
            sums = gather_recorded(step, m, gathered, result.recorded)
            self._stash.put(to, f"g{index} m{m}", [before_it, *sums])

    def _program(self, step: Step, index: int, m: int) -> Program | None:
        returning, keep = step.program.returning, step.program.keep
        if not step.training or index not in returning or step.calls[m][index].autocast:
            return None
        return self._compiler.program(self._partition.structures[index], keep=keep)

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
            self._compiler.give_up(structure, error)
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
            result = program.backward(handed, gradient=gradient, anchors=anchors)
        if self._compiler.must_check(structure, handed):
            self._seed(step, index, m)
            expected = inputs.backward(gradient)
            if not self._compiler.check(structure, program, result, expected):
                return expected
        return result

    # ----------------------------------------------------------------------------------------------
    # The tail

    def walk_tail(
        self, step: Step, m: int, recorded: str, hidden: Tensor
    ) -> tuple[list[tuple[LayerInputs, Handed | Walked]], Tensor, bool]:
        """Run the tail with graph; its graphs, its output, and whether that needs a gradient."""
        needs = step.training and self.requires_gradient(step, step.program.shape.streamed, m)
        walks = list[tuple[LayerInputs, Handed | Walked]]()
        for layer in step.program.shape.tail:
            inputs = self._tail_inputs(step, layer, m, recorded, hidden, requires=needs)
            walked, output = self._walk(layer, inputs, step, m)
            hidden = inputs.weighed(output)
            walks.append((inputs, walked))
            needs = needs or self._adds_gradient(step, layer, m)
        return walks, hidden, needs

    def unwind_tail(
        self,
        step: Step,
        m: int,
        walks: list[tuple[LayerInputs, Handed | Walked]],
        gradient: Tensor | None,
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Its backward pass; the gradient of its input, and those of recorded tensors."""
        gathered: list[Tensor] = []
        tail = step.program.shape.tail
        for layer, (inputs, walked) in zip(tail[::-1], walks[::-1], strict=True):
            if gradient is None:
                break
            unwind = partial(self._unwind, inputs, walked)
            result = inputs.weigh_gradient(gradient, unwind)
            if self.trained(f"L{layer}"):
                add = self._compiler.gradient_sum(self._partition.structures[layer])
                self._updates.accumulate(step, f"L{layer}", f"GL{layer}", result.parameters, add)
            gathered = gather_recorded(step, m, gathered, result.recorded)
            passes_on = inputs.hidden_requires_gradient
            gradient = torch.zeros_like(gradient) if result.hidden is None else result.hidden
            gradient = gradient if passes_on else None
        return gradient, gathered

    def forward_tail(self, step: Step, m: int, recorded: str, hidden: Tensor) -> Tensor:
        """Run the tail without graph."""
        for layer in step.program.shape.tail:
            self._seed(step, layer, m)
            inputs = self._tail_inputs(step, layer, m, recorded, hidden, requires=False)
            hidden = inputs.forward()
            self._buffers.leave_layer(layer)
        return hidden

    def _tail_inputs(
        self, step: Step, index: int, m: int, recorded: str, hidden: Tensor, *, requires: bool
    ) -> LayerInputs:
        changing = self._buffers.of_layers.get(index, {})
        slot = f"SL{index}"
        return self._inputs(step, index, m, slot, recorded, hidden, changing, requires=requires)

    def _walk(
        self, index: int, inputs: LayerInputs, step: Step, m: int
    ) -> tuple[Handed | Walked, Tensor]:
        """Run a layer with graph; returns the graph and the output."""
        self._seed(step, index, m)
        program = self._compiler.program(self._partition.structures[index], keep=EVERYTHING)
        if program is not None and not inputs.call.autocast:
            output, handed = self._try(index, program, inputs, None, room=True)
            if output is not None and handed is not None:
                return handed, output
            self._seed(step, index, m)
        walked = inputs.walk()
        self._buffers.leave_layer(index)
        return walked, walked.output.detach()

    def _unwind(
        self, inputs: LayerInputs, walked: Handed | Walked, gradient: Tensor
    ) -> BackwardResult:
        if isinstance(walked, Walked):
            return inputs.unwind(walked, gradient)
        with self._compiler.timed(walked.program):
            return walked.program.backward(walked, gradient=gradient, anchors=None)

    # ----------------------------------------------------------------------------------------------

    def _seed(self, step: Step, index: int, m: int) -> None:
        self._device.seed(mix_seed(step.program.seed, step.number, index, m))

    def _inputs(
        self,
        step: Step,
        index: int,
        m: int,
        slot: str,
        recorded: str,
        hidden: Tensor,
        changing: Mapping[str, Tensor],
        *,
        requires: bool,
    ) -> LayerInputs:
        layer = f"L{index}"
        assert self._transfer.holds(layer, slot), f"{layer} is not in {slot}"
        return LayerInputs(
            part=self._partition.layers[index],
            tensors={**self._transfer.views(layer, slot), **changing},
            trained=self.trained(layer),
            call=step.calls[m][index],
            hidden=hidden,
            hidden_requires_gradient=requires,
            recorded=self._stash.get(recorded, f"r m{m}"),
            through=step.through[m],
            changes_input=self._partition.structures[index] in self._partition.changing_input,
            survival=step.survival.get(index),
        )

    def _needs_gradient(self, step: Step, index: int, m: int) -> bool:
        """Whether the input of a layer requires a gradient."""
        below = takewhile(index.__gt__, step.program.shape.layers)
        return step.training and self.requires_gradient(step, below, m)

    def requires_gradient(self, step: Step, below: Iterable[int], m: int) -> bool:
        """Whether the hidden state after these layers requires a gradient in plain PyTorch."""
        return step.hidden_requires[m] or any(self._adds_gradient(step, i, m) for i in below)

    def _adds_gradient(self, step: Step, index: int, m: int) -> bool:
        """Whether a layer is trained, or is given something recorded that requires a gradient."""
        return bool(self.trained(f"L{index}")) or any(
            isinstance(leaf, RecordedTensor) and leaf.index in step.through[m]
            for leaf in (step.calls[m][index].leaves if step.through[m] else ())
        )

    def trained(self, unit: str) -> tuple[str, ...]:
        """Names of what is trained of a unit."""
        return self._server.units[unit].form.trained.names


def gather_recorded(
    step: Step, m: int, gathered: list[Tensor], recorded: Mapping[int, Tensor]
) -> list[Tensor]:
    """Add a layer's gradients of recorded tensors to those of the layers after it."""
    sums = dict(zip(step.gathered[m], gathered, strict=True))
    for index, gradient in recorded.items():
        wide = gradient.float()
        sums[index] = sums[index] + wide if index in sums else wide
    step.gathered[m] = list(sums)
    return list(sums.values())
