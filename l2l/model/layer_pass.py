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
from torch.autograd.graph import GradientEdge

from l2l.model.passing import Call, Returns
from l2l.model.skeleton import Part

HIDDEN_STATE = ("hidden", 0)  # beside names of parameters, and ("recorded", index)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardResult:
    """Gradients of one pass."""

    hidden: Tensor | None
    parameters: dict[str, Tensor]  # those that took part
    recorded: dict[int, Tensor]  # by index of the recorded tensor; those that took part


def leaves(tensors: Mapping[str, Tensor], trained: Sequence[str]) -> dict[str, Tensor]:
    """The same tensors, those that are trained as leaves of a new graph."""
    names = set(trained)
    return {n: t.detach().requires_grad_() if n in names else t for n, t in tensors.items()}


@dataclass(frozen=True, slots=True)
class Leaves:
    """What a pass works on, as leaves of a new graph."""

    hidden: Tensor
    recorded: list[Tensor]
    parameters: dict[str, Tensor]
    wanted: dict[Any, Tensor]  # those whose gradients are asked for


@dataclass(slots=True)
class Walked:
    """A layer's pass with its graph, waiting for its backward pass."""

    output: Tensor
    wanted: dict[Any, Tensor]


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

    def leaves(self) -> Leaves:
        """Hidden state, recorded tensors and parameters as leaves of a new graph."""
        hidden = self.hidden.detach().requires_grad_(self.hidden_requires_gradient)
        recorded = [
            tensor.detach().requires_grad_() if index in self.through else tensor
            for index, tensor in enumerate(self.recorded)
        ]
        bound = leaves(self.tensors, self.trained)
        wanted: dict[Any, Tensor] = {name: bound[name] for name in self.trained}
        wanted |= {("recorded", index): recorded[index] for index in self.through}
        if self.hidden_requires_gradient:
            wanted[HIDDEN_STATE] = hidden
        return Leaves(hidden, recorded, bound, wanted)

    def walk(self, *, with_graph: bool = True) -> Walked:
        """Run the layer ([Note: flags]); one that writes into its input gets a copy of it."""
        given = self.leaves()
        self.part.bind(given.parameters)
        with torch.set_grad_enabled(with_graph), self.call.autocasting():
            hidden = given.hidden.clone() if self.changes_input else given.hidden
            args, kwargs = self.call.arguments(hidden, given.recorded)
            return Walked(Returns.unwrap(self.part.module(*args, **kwargs)), given.wanted)

    def forward(self) -> Tensor:
        """The layer's output, without graph."""
        return self.walk(with_graph=False).output

    def unwind(self, walked: Walked, gradient: Tensor) -> BackwardResult:
        """Take the gradients of a pass with graph."""
        return self.result(take_gradients([walked.output], [gradient], walked.wanted))

    def backward(self, gradient: Tensor) -> BackwardResult:
        """Run the layer again with graph and take its gradients."""
        return self.unwind(self.walk(), gradient)

    def result(self, found: Mapping[Any, Tensor]) -> BackwardResult:
        """Gradients by what they are of."""
        recorded = {index: found.get(("recorded", index)) for index in self.through}
        return BackwardResult(
            hidden=found.get(HIDDEN_STATE),
            parameters={name: found[name] for name in self.trained if name in found},
            recorded={index: one for index, one in recorded.items() if one is not None},
        )


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
    outputs: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor | None],
    inputs: Mapping[Any, Tensor],
) -> dict[Any, Tensor]:
    """Gradients of outputs, or of edges of a graph, for the inputs that took part in them."""
    pairs = [
        pair
        for pair in zip(outputs, gradients, strict=True)
        if isinstance(pair[0], GradientEdge) or pair[0].requires_grad
    ]
    if not inputs or not pairs:
        return {}
    ends, given = zip(*pairs, strict=True)
    found: Sequence[Tensor | None] = torch.autograd.grad(
        ends, list(inputs.values()), given, allow_unused=True
    )
    return {key: one for key, one in zip(inputs, found, strict=True) if one is not None}
