"""Passes through the code around the layers: the prologue, interludes, the loss, and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2l.model import Microbatch, Recording, asking_in, join_rows, map_batch, take_gradients
from l2l.run.buffers import ChangingBuffers
from l2l.run.layer_passes import LayerPasses, or_nothing
from l2l.run.outer_pass import Outer, OuterPass, joined, parted
from l2l.run.parts import Parts
from l2l.run.seeds import PROLOGUE_SEED, mix_seed
from l2l.run.step import Step
from l2l.run.updates import Updates
from l2l.schedule import NOTHING, Action
from l2l.schedule import recorded as recorded_name


@final
class AroundLayers:
    """Runs a microbatch through the prologue, or through the tail and the loss, and back."""

    def __init__(
        self,
        parts: Parts,
        outer: OuterPass,
        layers: LayerPasses,
        updates: Updates,
        buffers: ChangingBuffers,
        scale_of: Callable[[Step], float] | None,
    ) -> None:
        self._partition, self._device, self._stash = parts.partition, parts.device, parts.stash
        self._outer, self._layers, self._updates, self._buffers = outer, layers, updates, buffers
        self._scale_of = scale_of

    def prologue(self, step: Step, action: Action) -> None:
        """A microbatch becomes a hidden state and recorded arguments of the layers."""
        slots, recorded, rows, cell = action.places
        m = action.microbatch
        assert m is not None
        self._forward(step, m, slots, recorded, cell, Outer(0, self._rows(step, m, rows)))

    def interlude(self, step: Step, action: Action) -> None:
        """What a stack has made becomes the hidden state and recorded arguments of the next."""
        slots, before, recorded, given, cell = action.places
        m = action.microbatch
        assert m is not None
        outer = self._outer_of(step, m, action.stack, before, given)
        self._forward(step, m, slots, recorded, cell, outer)

    def _forward(
        self, step: Step, m: int, slots: str, recorded: str, cell: str, outer: Outer
    ) -> None:
        stack = outer.stack
        self._buffers.enter_outer(step, stack, m)
        with self._buffers.rewound(step, m, stacks=stack):
            self._outer.bind(slots)
            recording = self._run(step, m, outer)
        assert recording.hidden is not None
        hidden, tensors = recording.hidden, recording.tensors
        step.calls.setdefault(m, {}).update(recording.calls)
        step.through[stack, m] = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
        step.gathered[stack, m], step.rides[stack, m] = [], recording.rides
        step.hidden_requires[stack, m] = hidden.requires_grad
        if stack == 0 and (step.num_own is None or m < step.num_own):
            step.num_tokens += math.prod(hidden.shape[:-1])
        shape = step.program.shape
        self._stash.put(recorded, f"{recorded_name(stack)} m{m}", [t.detach() for t in tensors])
        self._stash.put(cell, f"{shape.first_value(stack)} m{m}", [hidden.detach()])

    def _outer_of(self, step: Step, m: int, stack: int, recorded: str, given: str) -> Outer:
        """What the code before a stack is given: ends of stacks, asides, looked-up rows."""
        shape = step.program.shape
        ends = self._stash.get(given, f"{shape.last_value(stack - 1)} m{m}")
        return self.delivered(step, m, stack, recorded, ends)

    def delivered(
        self, step: Step, m: int, stack: int, recorded: str, ends: Sequence[Tensor]
    ) -> Outer:
        """The same, with the end of the last stack at hand.

        Whatever requires a gradient is a leaf of the graph that is to be made.
        """
        route, before = step.program.route, stack - 1
        outer = Outer(stack)
        needs = step.training and self._layers.requires_gradient(
            step, step.program.calls[before], m, stack=before
        )
        for key, tensor in zip(route.ends(before), ends, strict=True):
            outer.ends[key] = _leaf(tensor, requires=needs and key not in route.constant)
        if rides := step.rides[before, m]:
            found = self._stash.get(recorded, f"{recorded_name(before)} m{m}")
            through = step.through[before, m]
            leaves = [_leaf(found[i], requires=step.training and i in through) for i in rides]
            keys = route.rides(before)
            outer.rides.update(zip(keys, leaves, strict=False))
            outer.rows.extend(leaves[len(keys) :])
        for key in route.needed_asides(stack):
            needs = step.training and key not in route.constant
            outer.asides[key] = _leaf(step.asides[key, m], requires=needs)
        return outer

    def loss(self, step: Step, action: Action) -> None:
        """The tail and the epilogue; in training, both backward ([Note: tail])."""
        slots, gradients, recorded, cell, gradient_cell = action.places
        m = action.microbatch
        assert m is not None
        if cell == NOTHING:  # of a joint loss, which was taken
            self._stash.put(gradient_cell, f"gE m{m}", step.joined[m])
            return
        handed_on = self._stash.get(cell, f"hE m{m}")
        last = step.program.route.num_stacks
        if step.program.shape.joint:
            self._join(step, m, slots, gradients, recorded, handed_on)
            return
        if not step.training:
            ends = self._layers.forward_tail(step, m, recorded, handed_on)
            self._evaluate(step, m, slots, self.delivered(step, m, last, recorded, ends))
            return
        ends = [one.detach() for one in handed_on]
        walks, ends = self._layers.walk_tail(step, m, recorded, ends)
        outer, inputs = self.delivered(step, m, last, recorded, ends), self.inputs(step, m)
        outer.asking = asking_in(inputs)
        bound = self._outer.bind(slots)
        self.scale(step)
        self.seed(step, m)
        with self._buffers.rewound(step, m, stacks=last), torch.enable_grad():
            found = self._outer.epilogue(
                step,
                m,
                outer,
                inputs=inputs,
                bound=bound,
                slots=slots,
                gradients=gradients,
                loss_scale=step.loss_scale,
            )
        arrived = self.arrived(step, m, outer, found)
        arrived = self._layers.unwind_tail(step, m, walks, arrived)
        if gradient_cell != NOTHING:
            self._stash.put(gradient_cell, f"gE m{m}", arrived)

    def _join(
        self,
        step: Step,
        m: int,
        slots: str,
        gradients: str,
        recorded: str,
        handed_on: Sequence[Tensor],
    ) -> None:
        """Keep what a microbatch hands over; after the last one, take the loss of all rows."""
        last, dimensions = step.program.route.num_stacks, step.program.facts.row_dimensions
        ends = [one.clone() for one in handed_on]
        outer = self.delivered(step, m, last, recorded, ends)
        outer.rides = {
            k: _leaf(one.clone(), requires=one.requires_grad) for k, one in outer.rides.items()
        }
        step.joined.append(outer)
        if m + 1 < step.program.shape.num_microbatches:
            return
        outers: list[Outer] = list(step.joined)
        parts = [self.inputs(step, index) for index in range(m + 1)]
        for one, part in zip(outers, parts, strict=True):
            one.asking = asking_in(part)
        with torch.enable_grad():
            inputs = join_rows(parts)
        host = join_rows(step.microbatches)
        bound = self._outer.bind(slots)
        if step.training:
            self.scale(step)
        self.seed(step, 0)
        if not step.training:
            with torch.no_grad():
                whole = joined(outers, dimensions)
                self._outer.score(
                    step, 0, whole, inputs=inputs, bound=bound, slots=slots, host=host
                )
            return
        whole = joined(outers, dimensions)
        with torch.enable_grad():
            found = self._outer.epilogue(
                step,
                0,
                whole,
                inputs=inputs,
                host=host,
                bound=bound,
                slots=slots,
                gradients=gradients,
                loss_scale=step.loss_scale,
            )
        for index, own in enumerate(parted(found, outers, dimensions)):
            step.joined[index] = self.arrived(step, index, outers[index], own)

    def arrived(
        self, step: Step, m: int, outer: Outer, found: Mapping[Any, Tensor]
    ) -> list[Tensor]:
        """Gradients of what was delivered, as the stack before takes them; others are noted."""
        for source in outer.asking:
            if ("input", source) in found:
                step.input_gradients[source, m] = found["input", source].clone()
        for key in outer.asides:
            gradient = found.get(("aside", key))
            if gradient is not None:
                other = step.aside_gradients.get((key, m))
                copy = gradient.clone()  # it may be a view of a cell
                step.aside_gradients[key, m] = copy if other is None else other + copy
        of_ends = [or_nothing(found.get(("end", key)), one) for key, one in outer.ends.items()]
        rides = step.rides[outer.stack - 1, m]
        leaves = [
            *(("ride", key) for key in outer.rides),
            *(("row", i) for i in range(len(outer.rows))),
        ]
        gathered = {
            place: found[leaf] for place, leaf in zip(rides, leaves, strict=True) if leaf in found
        }
        step.gathered[outer.stack - 1, m] = list(gathered)
        return [*of_ends, *(one.float() for one in gathered.values())]

    def _evaluate(self, step: Step, m: int, slots: str, outer: Outer) -> None:
        """The loss alone, or all outputs."""
        bound = self._outer.bind(slots)
        self.seed(step, m)
        inputs = self.inputs(step, m)
        with self._buffers.rewound(step, m, stacks=outer.stack), torch.no_grad():
            if step.keep_outputs:
                outputs = self._outer.run_epilogue(
                    inputs,
                    outer.delivered,
                    step.program.route,
                    alone=step.program.facts.alone,
                    host=step.microbatches[m],
                )
                step.outputs[m] = pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), outputs)
            else:
                self._outer.score(step, m, outer, inputs=inputs, bound=bound, slots=slots)

    def prologue_backward(self, step: Step, action: Action) -> None:
        """The prologue with graph, and back: gradients of its units and of looked-up rows."""
        slots, gradients, _, rows, _, cell, to, *of_inputs = action.places
        m = action.microbatch
        assert m is not None
        outer = Outer(0, self._rows(step, m, rows))
        taken = self._backward(step, m, slots, gradients, cell, outer)
        for place in of_inputs:
            asking = asking_in(step.microbatches[m]).items()
            found = [or_nothing(taken.get(("input", source)), one) for source, one in asking]
            self._stash.put(place, f"i m{m}", found)
        if to != NOTHING:
            of_rows = [taken.get(("row", i)) for i in range(len(outer.rows))]
            self._stash.put(
                to,
                f"x m{m}",
                [
                    torch.zeros_like(leaf) if gradient is None else gradient
                    for leaf, gradient in zip(outer.rows, of_rows, strict=True)
                ],
            )

    def interlude_backward(self, step: Step, action: Action) -> None:
        """An interlude with graph, and back: gradients of what stacks before it have made."""
        slots, gradients, recorded, given, cell, to = action.places
        m = action.microbatch
        assert m is not None
        outer = self._outer_of(step, m, action.stack, recorded, given)
        taken = self._backward(step, m, slots, gradients, cell, outer)
        self._stash.put(to, f"gI{action.stack} m{m}", self.arrived(step, m, outer, taken))

    def _backward(
        self, step: Step, m: int, slots: str, gradients: str, cell: str, outer: Outer
    ) -> dict[Any, Tensor]:
        """Gradients of all that the code before a stack was given; those of units are added."""
        stack, shape = outer.stack, step.program.shape
        found = self._stash.get(cell, f"g{shape.first_value(stack)[1:]} m{m}")
        with self._buffers.rewound(step, m, stacks=stack + 1):  # the graph uses them, too
            bound = self._outer.bind(slots)
            recording = self._run(step, m, outer)
            assert recording.hidden is not None
            outputs = [recording.hidden, *(recording.tensors[i] for i in step.gathered[stack, m])]
            pairs = [(o, g.to(o.dtype)) for o, g in zip(outputs, found, strict=True) if g.numel()]
            ends, given = [o for o, _ in pairs], [g for _, g in pairs]
            return self.take(step, m, ends, given, gradients, bound=bound, outer=outer)

    def take(
        self,
        step: Step,
        m: int,
        ends: Sequence[Tensor],
        given: Sequence[Tensor],
        gradients: str,
        *,
        bound: Mapping[str, Tensor],
        outer: Outer,
    ) -> dict[Any, Tensor]:
        """Gradients of all that code around the layers was given; those of units are added up.

        Args:
            step: whose gradients are added to.
            m: the microbatch.
            ends: what the code has made.
            given: the gradients of that.
            gradients: gradient slots of the units here.
            bound: what the code sees, by owner.
            outer: what it was given besides the batch.
        """
        sums = [slot for slot in gradients.split(",") if slot != NOTHING]
        wanted: dict[Any, Tensor] = {
            owner: bound[owner] for slot in sums for owner in self._layers.trained(slot[1:])
        }
        wanted |= {leaf: one for leaf, one in outer.leaves() if one.requires_grad}
        earlier = {source: step.input_gradients.pop((source, m), None) for source in outer.asking}
        known = {("input", source): one for source, one in earlier.items() if one is not None}
        taken = take_gradients(ends, given, wanted, sums=known)
        for slot in sums:
            own = {name: taken[name] for name in self._layers.trained(slot[1:]) if name in taken}
            self._updates.accumulate(step, slot[1:], slot, own)
        return taken

    def scale(self, step: Step) -> float:
        """What the loss of a step is multiplied with."""
        if self._scale_of is not None and not step.program.shape.side:
            step.loss_scale = self._scale_of(step)
        return step.loss_scale

    def let_go(self) -> None:
        """Let the model's code hold no weights: it would keep their memory alive."""
        self._outer.bind_only({})

    def _rows(self, step: Step, m: int, cell: str) -> list[Tensor]:
        """A microbatch's looked-up rows, as leaves where their table is trained."""
        if cell == NOTHING:
            return []
        return [
            rows.detach().requires_grad_(
                step.training and lookup.owner in self._layers.trained(lookup.unit)
            )
            for lookup, rows in zip(
                step.program.lookups, self._stash.get(cell, f"e m{m}"), strict=True
            )
        ]

    def _run(self, step: Step, m: int, outer: Outer) -> Recording:
        self.seed(step, m)
        host = self._partition.taken(step.microbatches[m])
        inputs = self._on_device(host)
        outer.asking = asking_in(inputs)
        return self._outer.prologue(step, inputs, host, outer)

    def seed(self, step: Step, m: int) -> None:
        """Let the code around the layers draw its random numbers for a microbatch."""
        self._device.seed(mix_seed(step.program.seed, step.number, PROLOGUE_SEED, m))

    def inputs(self, step: Step, m: int) -> Microbatch:
        """A microbatch on the device."""
        return self._on_device(step.microbatches[m])

    def _on_device(self, host: Microbatch) -> Microbatch:
        """A copy there; what asks for a gradient is a leaf of a new graph."""

        def copied(one: Tensor) -> Tensor:
            found = one.to(self._device.torch_device, non_blocking=True)
            return found.detach().requires_grad_() if one.requires_grad else found

        return map_batch(copied, host)


def _leaf(tensor: Tensor, *, requires: bool) -> Tensor:
    return tensor.detach().requires_grad_(requires and tensor.is_floating_point())
