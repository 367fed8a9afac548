"""One microbatch through one part of the model: forward, recomputation, backward.

All autograd is here, and nothing of slots, cells or lanes: a pass gets the tensors to work on and
returns tensors. Two cares make a recomputed pass equal to its forward pass:

- random numbers: the pass's own generators (device/random_numbers.py) are seeded by (seed, step,
  layer, microbatch) before either, so dropout draws the same mask in both;
- buffers: what a layer changes in its own buffers (BatchNorm's statistics) it changes once per
  microbatch. The forward pass works on the real buffers and keeps a copy of what they were before;
  the recomputed pass works on that copy, which is then dropped. A buffer that the layer's code
  replaces by assignment is taken over after a forward pass (`Relay._take_over`).

[Note: flags] A pass without graph still marks its inputs as requiring gradients where plain PyTorch
would have them so: matrix products fold their operands differently for a tensor that requires one,
even under `no_grad`, and the output differs in its last bits.

Gradients are taken with `torch.autograd.grad`, so a parameter that took no part has None, and is
skipped as torch would skip it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from l2l.model.passing import Returns
from l2l.model.recording import Call
from l2l.model.skeleton import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardResult:
    """Gradients of one pass."""

    hidden: Tensor | None
    parameters: dict[str, Tensor]  # those that took part
    recorded: dict[int, Tensor]  # by index of the recorded tensor; those that took part


def leaves(tensors: Mapping[str, Tensor], trained: Sequence[str]) -> dict[str, Tensor]:
    """The same tensors, those that are trained as leaves of a new graph."""
    trained_names = set(trained)
    return {
        name: tensor.detach().requires_grad_() if name in trained_names else tensor
        for name, tensor in tensors.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """What a pass through a layer works on, the same in forward and backward."""

    part: Part
    tensors: Mapping[str, Tensor]
    trained: Sequence[str]
    call: Call
    hidden: Tensor
    hidden_requires_gradient: bool
    recorded: list[Tensor]
    through: Sequence[int]  # recorded tensors that require gradients
    changes_input: bool  # whether the layer writes into its hidden state

    def run(self, hidden: Tensor, recorded: list[Tensor]) -> Tensor:
        """The layer's output; a layer that writes into its input gets a copy of it."""
        given = hidden.clone() if self.changes_input else hidden
        args, kwargs = self.call.arguments(given, recorded)
        with self.call.autocasting():
            return Returns.unwrap(self.part.module(*args, **kwargs))

    def leaves(self) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """Hidden state, recorded tensors and parameters as leaves of a new graph."""
        hidden = self.hidden.detach().requires_grad_(self.hidden_requires_gradient)
        recorded = [
            tensor.detach().requires_grad_() if index in self.through else tensor
            for index, tensor in enumerate(self.recorded)
        ]
        return hidden, recorded, leaves(self.tensors, self.trained)

    def marked(self) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """The same, bound to the layer's module ([Note: flags])."""
        hidden, recorded, bound = self.leaves()
        self.part.bind(bound)
        return hidden, recorded, bound

    def wanted(
        self, hidden: Tensor, recorded: list[Tensor], bound: Mapping[str, Tensor]
    ) -> dict[Any, Tensor]:
        """The leaves whose gradients are asked for."""
        wanted: dict[Any, Tensor] = {name: bound[name] for name in self.trained}
        wanted |= {("recorded", index): recorded[index] for index in self.through}
        if self.hidden_requires_gradient:
            wanted["hidden", 0] = hidden
        return wanted

    def result(self, found: Mapping[Any, Tensor]) -> BackwardResult:
        """Gradients by what they are of."""
        return BackwardResult(
            hidden=found.get(("hidden", 0)),
            parameters={name: found[name] for name in self.trained if name in found},
            recorded={
                index: found["recorded", index]
                for index in self.through
                if ("recorded", index) in found
            },
        )


def forward_layer(inputs: LayerInputs) -> Tensor:
    """The layer's output, without graph."""
    hidden, recorded, _ = inputs.marked()
    with torch.no_grad():
        return inputs.run(hidden, recorded)


@dataclass(slots=True)
class Walked:
    """A layer's pass with its graph, waiting for its backward pass."""

    output: Tensor
    wanted: dict[Any, Tensor]


def walk_layer(inputs: LayerInputs) -> Walked:
    """Run the layer with graph."""
    hidden, recorded, bound = inputs.marked()
    with torch.enable_grad():
        output = inputs.run(hidden, recorded)
    return Walked(output, inputs.wanted(hidden, recorded, bound))


def unwind_layer(inputs: LayerInputs, walked: Walked, gradient: Tensor) -> BackwardResult:
    """Take the gradients of a pass with graph."""
    return inputs.result(take_gradients([walked.output], [gradient], walked.wanted))


def backward_layer(inputs: LayerInputs, gradient: Tensor) -> BackwardResult:
    """Run the layer again with graph and take its gradients."""
    return unwind_layer(inputs, walk_layer(inputs), gradient=gradient)


def weighed(hidden: Tensor, output: Tensor, survival: float | None) -> Tensor:
    """What a layer hands on that might have been left out ([Note: survival] in depth.py)."""
    return output if survival is None else hidden + (output - hidden) / survival


def weigh_gradient(
    gradient: Tensor, survival: float | None, backward: Callable[[Tensor], BackwardResult]
) -> BackwardResult:
    """The gradients of `weighed`, from those of the layer."""
    if survival is None:
        return backward(gradient)
    of_layer = gradient / survival
    result, passed = backward(of_layer), gradient - of_layer
    hidden = passed if result.hidden is None else passed + result.hidden
    return replace(result, hidden=hidden)


def take_gradients(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Mapping[Any, Tensor]
) -> dict[Any, Tensor]:
    """Gradients of outputs for the inputs that took part in them."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if output.requires_grad
    ]
    if not inputs or not pairs:
        return {}
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        [output for output, _ in pairs],
        list(inputs.values()),
        [gradient for _, gradient in pairs],
        allow_unused=True,
    )
    return {
        key: gradient for key, gradient in zip(inputs, found, strict=True) if gradient is not None
    }
