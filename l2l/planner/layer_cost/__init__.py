"""What one pass through a piece of a model costs on the device, without running it there.

`count_pass` runs a function on tensors without data (the meta device, or FakeTensors whose mode was
entered outside) and notes every operator that is dispatched, those of the backward pass too. From
the notes it reckons matrix arithmetic, memory traffic, number of kernels and most memory alive at
once. `seconds` turns that into time on a machine.

[Note: operators] Four kinds. *Matrix* operators (products, convolutions, attention) cost
arithmetic; what they read and write has to be in memory. *Fusable* ones (elementwise, copies,
lookups, and what works row by row: softmax, norms, reductions over the last dimension) can be done
by a compiler in one kernel with their neighbours. *Reductions* over other dimensions can swallow
what they read, and write their result. The rest stands *apart*: reads and writes memory. Views are
free.

[Note: fusion] Not fused, every operator is a kernel that reads its arguments and writes its
results, and memory is what autograd keeps alive. Fused, we do as a compiler does, roughly:

- what nobody needs is not computed (the output of a recomputed layer, and so its last product);
- the result of a fusable operator is written only if a matrix operator or one apart reads it, if it
  is returned, if it is random, or if it depends on many values in memory. Whoever else reads it
  computes it again from the values in memory it depends on, its *sources*;
- results of one size with common sources are written by one kernel, where the order allows it: the
  earlier ones are computed later. That can take more memory, as it does in the compiler;
- a result takes the place of a value of the same size that nothing else needs;
- memory is free after the last kernel that reads it.

A graph that is kept for a later backward pass keeps the written values that the latter will read,
as a compiler that cuts the graph in two does, not all that autograd would save. And nothing costs
more than if it were not fused.

[Note: attention] `scaled_dot_product_attention` without data would take the path that writes all
scores. We take the kernels an accelerator takes: flash attention for 16 bits without a mask, memory
efficient attention otherwise. Flops are those of the full square, causal or not: a causal kernel
does half of them at about half the speed. The backward kernel has memory of its own: the gradient
of the queries in float32 and, where several heads share a key, gradients of each head's key and
value.

[Note: submission] Small layers take as long as the host needs to submit them. Measured on an H200
with layers of BERT, Llama and GPT-2 of hidden size 256 and 512, compiled and not, streamed: a
layer's two passes take 3.6 to 6.3 ms where a small operation is submitted in 7.3 microseconds, and
`submission_seconds` is within a quarter of that (but for GPT-2 compiled, which takes twice as
long). Compiling saves next to nothing of it: fewer kernels, more to do before them.

[Note: calibration] Measured on an H200, compiled, one Llama layer (hidden 3072, MLP 8192, 24 heads,
8 for keys) on 8 x 1024 tokens; tests/test_layer_cost.py holds the figures and how near we come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from l2l.planner.hardware import Hardware
from l2l.planner.layer_cost.costs import PassCost, plain_costs
from l2l.planner.layer_cost.fusion import fused_costs
from l2l.planner.layer_cost.tape import FusedAttention, Tape

MATRIX_EFFICIENCY = 1.04  # of the layer's own products, against `Hardware.matrix_rate`
KERNEL_SECONDS = 3e-6
PASS_LAUNCHES = 70.0  # what a pass costs the host beside its kernels, in small operations
KERNEL_LAUNCHES = 6.0  # what a kernel costs it


def seconds(cost: PassCost, hardware: Hardware) -> float:
    """How long a pass takes on a machine."""
    return (
        cost.matrix_flops / (hardware.matrix_rate * MATRIX_EFFICIENCY)
        + cost.moved_bytes / hardware.memory_rate
        + cost.num_kernels * KERNEL_SECONDS
    )


def submission_seconds(cost: PassCost, hardware: Hardware) -> float:
    """How long the host needs to submit a pass; a pass of little work takes as long."""
    launches = PASS_LAUNCHES + KERNEL_LAUNCHES * cost.num_kernels
    return launches * hardware.launch_seconds


def count_pass(function: Callable[[], Any], *, fused: bool) -> PassCost:
    """The cost of a function on tensors without data.

    Args:
        function: runs the pass; what it takes are inputs, tensors in what it returns are outputs.
        fused: whether it will run compiled ([Note: fusion]).
    """
    tape = Tape()
    with FusedAttention(), tape:
        result = function()
    tape.end_phase(result)
    tape.close()
    return _costs(tape, fused=fused)[0]


def count_kept_pass(
    forward: Callable[[], Tensor], backward: Callable[[GradientEdge], Any], *, fused: bool
) -> tuple[PassCost, PassCost]:
    """The costs of a forward pass whose graph is kept, and of its backward pass.

    Args:
        forward: returns the output with its graph.
        backward: is given the end of the graph, for `torch.autograd.grad`; the output is gone. Its
            working bytes include what the forward pass has kept.
        fused: whether both will run compiled ([Note: fusion]).
    """
    tape = Tape()
    with FusedAttention(), tape:
        output = forward()
        tape.end_phase(output)
        edge = get_gradient_edge(output)
        del output
        result = backward(edge)
        del edge
    tape.end_phase(result)
    tape.close()
    before, after = _costs(tape, fused=fused)
    return before, after


def _costs(tape: Tape, *, fused: bool) -> list[PassCost]:
    """The cost of each phase of a tape."""
    return fused_costs(tape) if fused else plain_costs(tape)
