"""Passes through layers: streamed ones forward and backward, those of the tail with graph.

Layers run through a compiler where they can, else as they are (layer_pass.py in the model room).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, final

import torch
from torch import Tensor

from l2l.model import (
    EVERYTHING,
    HIDDEN,
    BackwardResult,
    Call,
    Gradients,
    Handed,
    LayerInputs,
    NotCompiledYetError,
    Program,
    RecordedTensor,
    Tiles,
    Walked,
)
from l2l.run.buffers import ChangingBuffers
from l2l.run.parts import Parts
from l2l.run.seeds import mix_seed
from l2l.run.step import Step
from l2l.run.updates import Updates
from l2l.schedule import NOTHING, Action
from l2l.schedule import recorded as recorded_name


@final
class LayerPasses:
    """Runs a microbatch through a layer."""

    def __init__(self, parts: Parts, updates: Updates, buffers: ChangingBuffers) -> None:
        self._partition, self._server, self._device = parts.partition, parts.server, parts.device
        self._transfer, self._stash, self._compiler = parts.transfer, parts.stash, parts.compiler
        self._updates, self._buffers = updates, buffers
        self._on_host = parts.device.torch_device.type == "cpu"

    # ----------------------------------------------------------------------------------------------
    # Streamed layers

    def forward(self, step: Step, action: Action) -> None:
        """A microbatch through a layer, without graph; what the compiler keeps goes to a cell."""
        slot, recorded, before, to, kept = action.places
        call, m = step.program.shape.call_of(action), action.microbatch
        assert m is not None
        layer = action.layer
        changing = self._buffers.enter_layer(step, layer, call, m)
        self._seed(step, call, m)
        handed_on = self._stash.get(before, f"h{call} m{m}")
        needs = self._needs_gradient(step, call, m)
        inputs = self._inputs(step, call, m, slot, recorded, handed_on, changing, requires=needs)
        program = self._program(step, call, m)
        outputs, handed = None, None
        if program is not None:
            anchors = self._anchors(slot, recorded, before)
            outputs, handed = self._try(layer, program, inputs, anchors, room=kept != NOTHING)
        if outputs is None:
            self._seed(step, call, m)
            bits_come_first = self._on_host or self._compiler.is_paused  # as in a proof
            outputs = inputs.forward(with_graph=step.training and bits_come_first)
        self._buffers.leave_layer(layer)
        outputs = inputs.weighed(outputs)
        if kept != NOTHING:
            self._stash.put(kept, f"k{call} m{m}", [] if handed is None else handed.packed.kept)
        if handed is not None:
            handed.packed.kept.clear()
            step.handed[call, m] = handed
        given = self._keep_asides(step, call, m, outputs)
        self._stash.put(to, f"h{step.program.following[call]} m{m}", given)

    def backward(self, step: Step, action: Action) -> None:
        """The same backward: the layer is recomputed, its gradients are added to their sums."""
        slot, gradient_slot, recorded, before, kept, gradient_cell, to = action.places
        call, m = step.program.shape.call_of(action), action.microbatch
        assert m is not None
        arrived = self._stash.get(gradient_cell, f"g{step.program.following[call]} m{m}")
        gradients, gathered = self._split_gradients(step, call, m, arrived)
        self._seed(step, call, m)
        changing = step.buffers_before.pop((call, m), {})
        handed_on = self._stash.get(before, f"h{call} m{m}")
        needs = self._needs_gradient(step, call, m)
        inputs = self._inputs(step, call, m, slot, recorded, handed_on, changing, requires=needs)
        sums = self._sums(step, call, m, inputs, gathered)
        sums |= self._sums_of(step, action.unit, gradient_slot)
        inputs = replace(inputs, sums=sums)
        handed = step.handed.pop((call, m), None)
        structure = self._partition.structures[action.layer]
        if all(one is None for one in gradients) and not sums and not gathered:
            result = BackwardResult(hidden=None, parameters={}, recorded={})  # nothing uses it
        elif handed is None or not self._compiler.trusts(structure, handed):
            result = inputs.weigh_gradient(gradients, inputs.backward)
        else:
            if kept != NOTHING:
                handed.packed.kept = self._stash.get(kept, f"k{call} m{m}")
            anchors = self._anchors(slot, recorded, before)
            again = partial(self._compiled_backward, step, call, m, inputs, handed, anchors)
            result = inputs.weigh_gradient(gradients, again)
        add = self._compiler.gradient_sum(structure)
        continued = {name for name in result.parameters if name in sums}
        self._updates.accumulate(
            step, action.unit, gradient_slot, result.parameters, add, continued=continued
        )
        self._compiler.note_backward()
        if to != NOTHING:
            found = [result.hidden, *(result.beside.get(i) for i in range(1, len(handed_on)))]
            rest = gather_recorded(
                step, self._stack(step, call), m, gathered, result.recorded, sums
            )
            self._stash.put(to, f"g{call} m{m}", [*map(or_nothing, found, handed_on), *rest])

    def _stack(self, step: Step, call: int) -> int:
        return step.program.shape.stack_of(call)

    def _keep_asides(self, step: Step, call: int, m: int, outputs: list[Tensor]) -> list[Tensor]:
        """Note what later code needs of a layer's outputs; returns what is handed on."""
        route = step.program.route
        entries = route.entries(call)
        for entry in route.asides.get(call, ()):
            # A copy: a layer may return a view of its input, and that cell has other contents soon.
            step.asides[(call, entry), m] = outputs[entries.index(entry)].clone()
        return outputs[: len(route.gives[call])]

    def _split_gradients(
        self, step: Step, call: int, m: int, arrived: list[Tensor]
    ) -> tuple[list[Tensor | None], dict[int, Tensor]]:
        """Gradients of a layer's outputs, and those of recorded tensors so far."""
        route, stack = step.program.route, self._stack(step, call)
        number = len(route.gives[call])
        gradients: list[Tensor | None] = [one if one.numel() else None for one in arrived[:number]]
        entries, gives = route.entries(call), route.gives[call]
        gradients += [None] * (len(entries) - number)
        for entry in route.asides.get(call, ()):
            other = step.aside_gradients.pop(((call, entry), m), None)
            place = entries.index(entry)
            mine = gradients[place]
            if other is not None:  # what comes later in the model's code is added first
                gradients[place] = other if mine is None else other + mine
        assert len(gives) == number
        return gradients, dict(zip(step.gathered[stack, m], arrived[number:], strict=True))

    def _sums(
        self, step: Step, call: int, m: int, inputs: LayerInputs, gathered: Mapping[int, Tensor]
    ) -> dict[Any, Tensor]:
        """Gradients that later code has found for what a layer was given: it goes on adding."""
        sums, route = inputs.sums_of(gathered), step.program.route
        before = () if route.is_first(call) else route.gives[call - 1]
        for place, entry in enumerate(before):
            other = step.aside_gradients.pop(((call - 1, entry), m), None)
            if other is not None:
                sums[HIDDEN.index - place] = other
        return sums

    def _sums_of(self, step: Step, unit: str, gradient_slot: str) -> dict[Any, Tensor]:
        """What other calls of the same layer have found for its parameters ([Note: sums])."""
        shape = step.program.shape
        if gradient_slot == NOTHING or unit not in shape.repeated or shape.num_microbatches > 1:
            return {}
        received, views = step.received.get(unit, set()), self._transfer.views(unit, gradient_slot)
        weights = self._server.units[unit].form.weight_layout
        return {
            name: views[name] for name in received if weights.dtype_of(name) is views[name].dtype
        }

    def _program(self, step: Step, call: int, m: int) -> Program | None:
        keep, layer = step.program.keep, self._layer(step, call)
        returns = step.training and call in step.program.returning
        returns &= step.mode == "usual"  # in which it was compiled
        if not returns or not self._is_plain(step, call, step.calls[m][call]):
            return None
        return self._compiler.program(self._partition.structures[layer], keep=keep)

    def _is_plain(self, step: Step, call: int, how: Call) -> bool:
        """Whether a compiled layer may stand for this one."""
        entries = step.program.route.entries(call)
        is_plain = not how.autocast and not how.lists and how.has_graph
        is_plain &= self._tiles(step, call, how) is None
        return is_plain and not self._partition.has_left(self._layer(step, call), entries)

    def _try(
        self,
        index: int,
        program: Program,
        inputs: LayerInputs,
        anchors: Mapping[str, Tensor] | None,
        *,
        room: bool,
    ) -> tuple[list[Tensor] | None, Handed | None]:
        """A compiled pass, or nothing if the layer turns out not to compile."""
        structure = self._partition.structures[index]
        try:
            with self._compiler.timed(program):
                outputs, handed = program.forward(
                    self._partition.templates[index], inputs, anchors=anchors
                )
        except torch.OutOfMemoryError:
            raise
        except NotCompiledYetError:
            self._compiler.note_waiting()
            return None, None
        except Exception as error:  # whatever a compiler may raise
            self._compiler.give_up(structure, error)
            return None, None
        if handed.packed.kept and anchors is not None and not room:
            self._compiler.give_up(structure, "its backward pass needs more than its inputs")
            return None, None
        return outputs, handed

    def _anchors(self, slot: str, recorded: str, before: str) -> dict[str, Tensor]:
        return {
            "weights": self._transfer.slot(slot),
            "recorded": self._stash.cell(recorded),
            "hidden": self._stash.cell(before),
        }

    def _compiled_backward(
        self,
        step: Step,
        call: int,
        m: int,
        inputs: LayerInputs,
        handed: Handed,
        anchors: Mapping[str, Tensor],
        gradients: Gradients,
    ) -> BackwardResult:
        structure = self._partition.structures[self._layer(step, call)]
        program = handed.program
        with self._compiler.timed(program):
            result = program.backward(
                handed, gradients=gradients, anchors=anchors, sums=inputs.sums
            )
        if self._compiler.must_check(structure, handed):
            self._seed(step, call, m)
            expected = inputs.backward(gradients)
            if not self._compiler.check(structure, program, result, expected):
                return expected
        return result

    # ----------------------------------------------------------------------------------------------
    # The tail

    def walk_tail(
        self, step: Step, m: int, recorded: str, handed_on: list[Tensor]
    ) -> tuple[list[tuple[LayerInputs, Handed | Walked]], list[Tensor]]:
        """Run the tail with graph; its graphs and its output."""
        shape = step.program.shape
        stack = len(shape.stacks)
        needs = step.training and self.requires_gradient(step, shape.parts[-1], m, stack=stack)
        walks = list[tuple[LayerInputs, Handed | Walked]]()
        for call in shape.tail:
            inputs = self._tail_inputs(step, call, m, recorded, handed_on, requires=needs)
            walked, outputs = self._walk(call, inputs, step, m)
            handed_on = self._keep_asides(step, call, m, inputs.weighed(outputs))
            walks.append((inputs, walked))
            needs = self._passes_gradient(step, call, m, needs)
        return walks, handed_on

    def unwind_tail(
        self,
        step: Step,
        m: int,
        walks: list[tuple[LayerInputs, Handed | Walked]],
        arrived: list[Tensor],
    ) -> list[Tensor]:
        """Its backward pass, from the gradients of its outputs to those of its inputs."""
        shape = step.program.shape
        stack, tail = len(shape.stacks), shape.tail
        for call, (inputs, walked) in zip(tail[::-1], walks[::-1], strict=True):
            gradients, gathered = self._split_gradients(step, call, m, arrived)
            inputs = replace(inputs, sums=self._sums(step, call, m, inputs, gathered))
            unit = shape.unit(call)
            if all(one is None for one in gradients) and not inputs.sums and not gathered:
                result = BackwardResult(hidden=None, parameters={}, recorded={})
            else:
                unwind = partial(self._unwind, inputs, walked)
                result = inputs.weigh_gradient(gradients, unwind)
            if self.trained(unit):
                add = self._compiler.gradient_sum(self._partition.structures[int(unit[1:])])
                self._updates.accumulate(step, unit, f"G{unit}", result.parameters, add)
            rest = gather_recorded(step, stack, m, gathered, result.recorded, inputs.sums)
            handed_on = (inputs.hidden, *inputs.beside)
            found = [result.hidden, *(result.beside.get(i) for i in range(1, len(handed_on)))]
            if not inputs.hidden_requires_gradient:
                found = [None] * len(handed_on)
            arrived = [*map(or_nothing, found, handed_on), *rest]
        return arrived

    def forward_tail(
        self, step: Step, m: int, recorded: str, handed_on: list[Tensor]
    ) -> list[Tensor]:
        """Run the tail without graph."""
        shape = step.program.shape
        for call in shape.tail:
            self._seed(step, call, m)
            inputs = self._tail_inputs(step, call, m, recorded, handed_on, requires=False)
            handed_on = self._keep_asides(step, call, m, inputs.forward())
            self._buffers.leave_layer(self._layer(step, call))
        return handed_on

    def _tail_inputs(
        self,
        step: Step,
        call: int,
        m: int,
        recorded: str,
        handed_on: list[Tensor],
        *,
        requires: bool,
    ) -> LayerInputs:
        changing = self._buffers.of_layers.get(self._layer(step, call), {})
        slot = f"S{step.program.shape.unit(call)}"
        return self._inputs(step, call, m, slot, recorded, handed_on, changing, requires=requires)

    def _walk(
        self, call: int, inputs: LayerInputs, step: Step, m: int
    ) -> tuple[Handed | Walked, list[Tensor]]:
        """Run a layer with graph; returns the graph and the outputs."""
        self._seed(step, call, m)
        layer = self._layer(step, call)
        program = self._compiler.program(self._partition.structures[layer], keep=EVERYTHING)
        if program is not None and self._is_plain(step, call, inputs.call):
            outputs, handed = self._try(layer, program, inputs, None, room=True)
            if outputs is not None and handed is not None:
                return handed, outputs
            self._seed(step, call, m)
        walked = inputs.walk()
        self._buffers.leave_layer(layer)
        return walked, [one.detach() for one in walked.outputs]

    def _unwind(
        self, inputs: LayerInputs, walked: Handed | Walked, gradients: Gradients
    ) -> BackwardResult:
        if isinstance(walked, Walked):
            return inputs.unwind(walked, gradients)
        with self._compiler.timed(walked.program):
            return walked.program.backward(
                walked, gradients=gradients, anchors=None, sums=inputs.sums
            )

    # ----------------------------------------------------------------------------------------------

    def _tiles(self, step: Step, call: int, how: Call) -> Tiles | None:
        if how.autocast or how.lists:
            return None
        return step.program.tiles(self._partition.structures[self._layer(step, call)])

    def _layer(self, step: Step, call: int) -> int:
        return step.program.route.layers[call]

    def _seed(self, step: Step, call: int, m: int) -> None:
        self._device.seed(mix_seed(step.program.seed, step.number, call, m))

    def _inputs(
        self,
        step: Step,
        call: int,
        m: int,
        slot: str,
        recorded: str,
        handed_on: list[Tensor],
        changing: Mapping[str, Tensor],
        *,
        requires: bool,
    ) -> LayerInputs:
        index, stack = self._layer(step, call), self._stack(step, call)
        layer = f"L{index}"
        assert self._transfer.holds(layer, slot), f"{layer} is not in {slot}"
        hidden, *beside = handed_on
        return LayerInputs(
            part=self._partition.layers[index],
            tensors={**self._transfer.views(layer, slot), **changing},
            trained=self.trained(layer),
            call=step.calls[m][call],
            hidden=hidden,
            beside=beside,
            entries=step.program.route.entries(call),
            constant=step.program.route.constant_beside(call),
            hidden_requires_gradient=requires,
            recorded=self._stash.get(recorded, f"{recorded_name(stack)} m{m}"),
            through=step.through[stack, m],
            changes_input=self._partition.structures[index] in self._partition.changing_input,
            survival=step.survival.get(index),
            tiles=self._tiles(step, call, step.calls[m][call]),
        )

    def _needs_gradient(self, step: Step, call: int, m: int) -> bool:
        """Whether the input of a layer requires a gradient."""
        stack = self._stack(step, call)
        below = takewhile(call.__gt__, step.program.calls[stack])
        return step.training and self.requires_gradient(step, below, m, stack=stack)

    def requires_gradient(self, step: Step, below: Iterable[int], m: int, *, stack: int) -> bool:
        """Whether the hidden state after these layers of a stack requires a gradient."""
        requires = step.hidden_requires[stack, m]
        for call in below:
            requires = self._passes_gradient(step, call, m, requires)
        return requires

    def _passes_gradient(self, step: Step, call: int, m: int, requires: bool) -> bool:  # noqa: FBT001
        """Whether the hidden state after a layer requires one, if that before it does or not."""
        has_graph = step.calls[m][call].has_graph
        return has_graph and (requires or self._adds_gradient(step, call, m))

    def _adds_gradient(self, step: Step, call: int, m: int) -> bool:
        """Whether a layer is trained, or is given something recorded that requires a gradient."""
        through = step.through[self._stack(step, call), m]
        return bool(self.trained(step.program.shape.unit(call))) or any(
            isinstance(leaf, RecordedTensor) and leaf.index in through
            for leaf in (step.calls[m][call].leaves if through else ())
        )

    def trained(self, unit: str) -> tuple[str, ...]:
        """Names of what is trained of a unit."""
        return self._server.units[unit].form.trained.names


def or_nothing(gradient: Tensor | None, like: Tensor) -> Tensor:
    """A gradient, or an empty tensor where there is none."""
    return like.new_empty(0) if gradient is None else gradient


def gather_recorded(
    step: Step,
    stack: int,
    m: int,
    gathered: Mapping[int, Tensor],
    recorded: Mapping[int, Tensor],
    continued: Container[Any] = (),
) -> list[Tensor]:
    """Add a layer's gradients of recorded tensors to those of the layers after it.

    Those that are `continued` have the others in them.
    """
    sums = dict(gathered)
    for index, gradient in recorded.items():
        wide = gradient.float()
        is_all = index not in sums or index in continued
        sums[index] = wide if is_all else sums[index] + wide
    step.gathered[stack, m] = list(sums)
    return list(sums.values())
