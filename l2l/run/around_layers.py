"""Passes through the code around the layers: the prologue, the loss, and the prologue backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2l.model import Microbatch, Recording, map_batch, take_gradients
from l2l.run.buffers import ChangingBuffers
from l2l.run.layer_passes import LayerPasses
from l2l.run.outer_pass import OuterPass
from l2l.run.parts import Parts
from l2l.run.seeds import PROLOGUE_SEED, mix_seed
from l2l.run.step import Step
from l2l.run.updates import Updates
from l2l.schedule import NOTHING, Action


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
        buffers = self._partition.skeleton.buffers()
        self._buffers.enter_prologue(step, m)
        self._outer.bind(slots)
        recording = self._run_prologue(step, m, self._rows(step, m, rows))
        self._partition.skeleton.take_over(buffers)
        assert recording.hidden is not None
        hidden = recording.hidden
        step.calls[m] = recording.calls
        step.through[m] = [i for i, tensor in enumerate(recording.tensors) if tensor.requires_grad]
        step.gathered[m] = []
        step.hidden_requires[m] = hidden.requires_grad
        if step.num_own is None or m < step.num_own:
            step.num_tokens += math.prod(hidden.shape[:-1])
        self._stash.put(recorded, f"r m{m}", [t.detach() for t in recording.tensors])
        self._stash.put(cell, f"{step.program.shape.first_value} m{m}", [hidden.detach()])

    def loss(self, step: Step, action: Action) -> None:
        """The tail and the epilogue; in training, both backward ([Note: tail])."""
        slots, gradients, recorded, cell, gradient_cell = action.places
        m = action.microbatch
        assert m is not None
        hidden = self._stash.get(cell, f"hE m{m}")[0]
        if not step.training:
            self._evaluate(step, m, slots, self._layers.forward_tail(step, m, recorded, hidden))
            return
        walks, hidden, needs = self._layers.walk_tail(step, m, recorded, hidden.detach())
        bound = self._outer.bind(slots)
        if self._scale_of is not None:
            step.loss_scale = self._scale_of(step)
        self._seed(step, m)
        buffers = self._partition.skeleton.buffers()
        after = self._buffers.rewind(step, m)
        with torch.enable_grad():
            gradient = self._outer.epilogue(
                step,
                m,
                hidden,
                inputs=self._inputs(step, m),
                bound=bound,
                slots=slots,
                gradients=gradients,
                needs_gradient=needs,
                loss_scale=step.loss_scale,
            )
        self._partition.skeleton.take_over(buffers)
        self._buffers.restore(after)
        gradient, gathered = self._layers.unwind_tail(step, m, walks, gradient)
        if gradient_cell != NOTHING:
            gradient = torch.zeros_like(hidden) if gradient is None else gradient
            self._stash.put(gradient_cell, f"gE m{m}", [gradient, *gathered])

    def _evaluate(self, step: Step, m: int, slots: str, hidden: Tensor) -> None:
        """The loss alone, or all outputs."""
        bound = self._outer.bind(slots)
        self._seed(step, m)
        inputs = self._inputs(step, m)
        buffers = self._partition.skeleton.buffers()
        after = self._buffers.rewind(step, m)
        with torch.no_grad():
            if step.keep_outputs:
                outputs = self._outer.run_epilogue(
                    inputs, hidden, alone=step.program.facts.alone, host=step.microbatches[m]
                )
                step.outputs[m] = pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), outputs)
            else:
                self._outer.score(step, m, hidden, inputs=inputs, bound=bound, slots=slots)
        self._partition.skeleton.take_over(buffers)
        self._buffers.restore(after)

    def prologue_backward(self, step: Step, action: Action) -> None:
        """The prologue with graph, and back: gradients of its units and of looked-up rows."""
        slots, gradients, _, rows, _, cell, to = action.places
        m = action.microbatch
        assert m is not None
        found = self._stash.get(cell, f"g{step.program.shape.first_value[1:]} m{m}")
        buffers = self._partition.skeleton.buffers()
        after = self._buffers.rewind(step, m)
        bound = self._outer.bind(slots)
        leaves = self._rows(step, m, rows)
        recording = self._run_prologue(step, m, leaves)
        assert recording.hidden is not None
        outputs = [recording.hidden, *(recording.tensors[i] for i in step.gathered[m])]
        matching = [g.to(o.dtype) for o, g in zip(outputs, found, strict=True)]
        sums = [slot for slot in gradients.split(",") if slot != NOTHING]
        wanted: dict[object, Tensor] = {
            owner: bound[owner] for slot in sums for owner in self._layers.trained(slot[1:])
        }
        wanted |= {("row", i): leaf for i, leaf in enumerate(leaves) if leaf.requires_grad}
        taken = take_gradients(outputs, matching, wanted)
        for slot in sums:
            own = {name: taken[name] for name in self._layers.trained(slot[1:]) if name in taken}
            self._updates.accumulate(step, slot[1:], slot, own)
        if to != NOTHING:
            of_rows = [taken.get(("row", i)) for i in range(len(leaves))]
            self._stash.put(
                to,
                f"x m{m}",
                [
                    torch.zeros_like(leaf) if gradient is None else gradient
                    for leaf, gradient in zip(leaves, of_rows, strict=True)
                ],
            )
        self._partition.skeleton.take_over(buffers)
        self._buffers.restore(after)  # only now: the graph has used them

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

    def _run_prologue(self, step: Step, m: int, rows: list[Tensor]) -> Recording:
        self._seed(step, m)
        inputs, host = self._inputs(step, m), step.microbatches[m]
        return self._outer.prologue(step, inputs, host, rows)

    def _seed(self, step: Step, m: int) -> None:
        self._device.seed(mix_seed(step.program.seed, step.number, PROLOGUE_SEED, m))

    def _inputs(self, step: Step, m: int) -> Microbatch:
        device = self._device.torch_device
        return map_batch(lambda one: one.to(device, non_blocking=True), step.microbatches[m])
