"""Buffers that training changes, such as running statistics: each pass finds them as it should.

A pass that is recomputed must find the buffers that its forward pass found, and a step that fails
must leave them as it found them. So they are noted before a step, and before each pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from l2l.model import Partition
from l2l.run.seeds import PROLOGUE_SEED
from l2l.run.step import Step


@final
class ChangingBuffers:
    """Owner of the layers' buffers that training changes; those around them are the skeleton's."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self.of_layers: dict[int, dict[str, Tensor]] = {}

    def keep(self, changing: Mapping[int, Sequence[str]], device: torch.device) -> None:
        """Keep these buffers of layers on the device from here on, beginning with the model's.

        Those that are kept already stay as training has left them.
        """
        new = {index: owners for index, owners in changing.items() if index not in self.of_layers}
        for index, owners in new.items():
            given = self._partition.layer_tensors[index].buffers
            copies = {name: given[name].detach().to(device, copy=True) for name in owners}
            self.of_layers[index] = copies

    def present(self) -> dict[str, Tensor]:
        """All that are on the device, as training has left them."""
        found = dict(self._partition.skeleton.buffers())
        for buffers in self.of_layers.values():
            found |= buffers
        return found

    def note_all(self, step: Step) -> None:
        """Keep all of them as they are before the step."""
        if step.training:
            changing = frozenset[str]().union(*step.program.facts.changing)
            outer = self._partition.skeleton.buffers() if changing else {}
            step.outer_at_first = {name: (outer[name], outer[name].clone()) for name in changing}
            step.buffers_at_first = {
                index: {owner: buffer.clone() for owner, buffer in buffers.items()}
                for index, buffers in self.of_layers.items()
            }

    def put_back(self, step: Step) -> None:
        """Let them be what they were before a step that failed."""
        for name, (buffer, before) in step.outer_at_first.items():
            buffer.copy_(before)
            self._partition.skeleton.bind({name: buffer})
        self.of_layers.update(step.buffers_at_first)

    def enter_layer(self, step: Step, layer: int, call: int, m: int) -> Mapping[str, Tensor]:
        """A layer's buffers, noted as its forward pass finds them."""
        changing = self.of_layers.get(layer, {})
        self._note(step, call, m, changing)
        return changing

    def leave_layer(self, index: int) -> None:
        """Keep the buffers that a layer's forward pass has put in the place of those it had."""
        kept = self.of_layers.get(index)
        if kept:
            for owner, buffer in self._partition.layers[index].assigned(kept).items():
                kept[owner] = buffer.detach().clone()  # what a graph has used stays as it was

    def enter_outer(self, step: Step, stack: int, m: int) -> None:
        """Note the buffers that the code before a stack changes, as it finds them."""
        changing = step.program.facts.changing
        buffers = self._partition.skeleton.buffers() if changing else {}
        own = changing[stack] if changing else ()
        self._note(step, PROLOGUE_SEED - stack, m, {name: buffers[name] for name in own})

    @staticmethod
    def _note(step: Step, part: int, m: int, changing: Mapping[str, Tensor]) -> None:
        if changing and step.training:
            step.buffers_before[part, m] = {name: b.clone() for name, b in changing.items()}

    @contextlib.contextmanager
    def rewound(self, step: Step, m: int, *, stacks: int) -> Iterator[None]:
        """Inside the block those around the layers are what the code before so many stacks found.

        After it they are what they were, but for those that only later code changes: what that has
        made of them, or put in their place, stays.
        """
        skeleton, before = self._partition.skeleton, dict[str, Tensor]()
        for stack in reversed(range(stacks)):
            before |= step.buffers_before.get((PROLOGUE_SEED - stack, m), {})
        buffers = skeleton.buffers()
        after = {name: buffers[name].clone() for name in before}
        for name, value in before.items():
            buffers[name].copy_(value)
        yield
        skeleton.take_over(buffers)
        for name, value in after.items():
            buffers[name].copy_(value)
