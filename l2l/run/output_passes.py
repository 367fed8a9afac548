"""Passes through the epilogue of a step in two sides: [Note: sides] in shape.py of `schedule`.

On the forward side the model's own code after the layers makes its outputs, which the user's code
is given. On the backward side it makes them once more, with the same random numbers, and takes
their gradients back. It runs with a graph both times: that tells what requires a gradient, and
kernels are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2l.model import asking_in
from l2l.run.around_layers import AroundLayers
from l2l.run.buffers import ChangingBuffers
from l2l.run.outer_pass import Outer, OuterPass
from l2l.run.outline import tensors_in
from l2l.run.parts import Parts
from l2l.run.step import Step
from l2l.schedule import NOTHING, Action


@final
class OutputPasses:
    """Runs microbatches through the epilogue for their outputs, and back from their gradients."""

    def __init__(
        self,
        parts: Parts,
        outer: OuterPass,
        around: AroundLayers,
        buffers: ChangingBuffers,
    ) -> None:
        self._partition, self._stash = parts.partition, parts.stash
        self._outer, self._around, self._buffers = outer, around, buffers
        self.lines: dict[str, Callable[[Step, Action], None]] = {
            "forward Epi m": self.forward,
            "backward Epi m": self.backward,
        }

    def forward(self, step: Step, action: Action) -> None:
        """The outputs of a microbatch."""
        slots, recorded, cell, _, _ = action.places
        m = action.microbatch
        assert m is not None
        if not step.program.facts.alone:  # what changes buffers is not
            present = self._partition.skeleton.buffers()
            step.buffers_at_loss[m] = {name: one.clone() for name, one in present.items()}
        _, outputs, _ = self._run(step, m, slots, recorded, cell)
        # Copies: a model may return what is in a cell, which has other contents soon.
        step.outputs[m] = pytree.tree_map_only(Tensor, lambda one: one.detach().clone(), outputs)
        step.differentiable[m] = [one.requires_grad for one in tensors_in(outputs)]

    def backward(self, step: Step, action: Action) -> None:
        """Gradients of what the layers have made, and of what the epilogue trains."""
        slots, gradients, recorded, cell, _, to = action.places
        m = action.microbatch
        assert m is not None
        with self._as_before(step, m):  # until the graph has gone, which uses them
            outer, outputs, bound = self._run(step, m, slots, recorded, cell)
            pairs = [
                (one, given.to(device=one.device, dtype=one.dtype))
                for one, given in zip(tensors_in(outputs), step.output_gradients[m], strict=True)
                if given is not None and one.requires_grad
            ]
            ends, given = [one for one, _ in pairs], [one for _, one in pairs]
            taken = self._around.take(step, m, ends, given, gradients, bound=bound, outer=outer)
        arrived = self._around.arrived(step, m, outer, taken)
        if to != NOTHING:
            self._stash.put(to, f"gE m{m}", arrived)

    def _run(
        self, step: Step, m: int, slots: str, recorded: str, cell: str
    ) -> tuple[Outer, Any, dict[str, Tensor]]:
        """Run the code; what it was given, what it returns, and the weights that it saw."""
        program = step.program
        last = program.route.num_stacks
        ends = [one.detach() for one in self._stash.get(cell, f"hE m{m}")]
        outer = self._around.delivered(step, m, last, recorded, ends)
        bound = self._outer.bind(slots)
        inputs = self._around.inputs(step, m)
        outer.asking = asking_in(inputs)
        self._around.seed(step, m)
        with self._buffers.rewound(step, m, stacks=last), torch.enable_grad():
            outputs = self._outer.run_epilogue(
                inputs,
                outer.delivered,
                program.route,
                alone=program.facts.alone,
                host=step.microbatches[m],
            )
        return outer, outputs, bound

    @contextlib.contextmanager
    def _as_before(self, step: Step, m: int) -> Iterator[None]:
        """Inside the block buffers are what the first run of the epilogue found."""
        found, skeleton = step.buffers_at_loss.pop(m, {}), self._partition.skeleton
        buffers = {name: one for name, one in skeleton.buffers().items() if name in found}
        after = {name: one.clone() for name, one in buffers.items()}
        for name, one in buffers.items():
            one.copy_(found[name])
        yield
        skeleton.bind(buffers)
        for name, one in buffers.items():
            one.copy_(after[name])
