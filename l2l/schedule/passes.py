"""What the device computes in a step, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

from l2l.schedule.lines import NOTHING
from l2l.schedule.shape import Shape


@dataclass(frozen=True, slots=True)
class Pass:
    """One microbatch through one part of the model, in one direction; not yet placed."""

    verb: str  # forward, loss or backward
    microbatch: int
    layer: int | None = None  # a call, of forward and backward; None: the code before a stack
    reads: tuple[str, ...] = ()  # boundary values, "h1" or "g1"
    writes: str = NOTHING
    recorded: bool = False  # whether it reads recorded arguments
    kept: bool = False  # whether a forward pass writes, or a backward pass reads, what was kept
    stack: int = 0  # that it is in, or before


def compute_order(shape: Shape) -> list[Pass]:
    """What the device computes: for each layer all microbatches, forward, then backward."""
    passes = [one for stack in range(len(shape.parts)) for one in _forward(shape, stack)]
    microbatches, last = range(shape.num_microbatches), len(shape.stacks)
    walks = shape.num_tail > 0 or last > 0
    backward_layers = shape.backward_layers if shape.training else ()
    needs = shape.training and (bool(backward_layers) or shape.trains_prologue)
    gradient = "gE" if needs else NOTHING
    at_once = NOTHING if shape.joint else gradient
    passes += [
        Pass("loss", m, None, ("hE",), at_once, recorded=walks, stack=last) for m in microbatches
    ]
    if shape.joint and needs:
        passes += [Pass("loss", m, None, (), gradient, stack=last) for m in microbatches]
    if shape.training:
        for stack in range(last, -1, -1):
            passes += _backward(shape, stack)
    return passes


def _rows(shape: Shape) -> tuple[str, ...]:
    """Rows that the prologue reads, if any."""
    return ("e",) if any(unit.looked_up for unit in shape.outer) else ()


def _forward(shape: Shape, stack: int) -> list[Pass]:
    """The code before a stack, then its layers."""
    microbatches, following = range(shape.num_microbatches), shape.following
    reads = (shape.last_value(stack - 1),) if stack else _rows(shape)
    first, has_ends = shape.first_value(stack), stack > 0
    before = [
        Pass("forward", m, None, reads, first, recorded=has_ends, stack=stack) for m in microbatches
    ]
    passes: list[Pass] = []
    returning = shape.backward_layers if shape.training else ()
    for layer in shape.parts[stack]:
        keeps, to = shape.num_kept_cells > 0 and layer in returning, f"h{following[layer]}"
        passes += [
            Pass("forward", m, layer, (f"h{layer}",), to, recorded=True, kept=keeps, stack=stack)
            for m in microbatches
        ]
    if not stack and reads and passes:
        # Rows of a microbatch may be late: the first layer does not wait for all.
        opening = zip(before, passes[: len(before)], strict=True)
        return [one for pair in opening for one in pair] + passes[len(before) :]
    return before + passes


def _backward(shape: Shape, stack: int) -> list[Pass]:
    """The layers of a stack backward, then the code before it."""
    microbatches, following = range(shape.num_microbatches), shape.following
    passes: list[Pass] = []
    lowest = None if shape.trains_prologue else shape.backward_layers[-1:]
    for layer in (one for one in shape.backward_layers if shape.stack_of(one) == stack):
        out = NOTHING if lowest == (layer,) else f"g{layer}"
        both, kept = (f"h{layer}", f"g{following[layer]}"), shape.num_kept_cells > 0
        passes += [
            Pass("backward", m, layer, both, out, recorded=True, kept=kept, stack=stack)
            for m in microbatches
        ]
    if stack not in shape.backward_stacks:
        return passes
    gradient = "g" + shape.first_value(stack)[1:]
    reads: tuple[str, ...]
    if stack:
        before = shape.last_value(stack - 1)
        reads, out = (before, gradient), "g" + before[1:]
    else:
        reads = (gradient, *_rows(shape))
        out = "x" if any(unit.looked_up and unit.trained for unit in shape.outer) else NOTHING
    has_ends = stack > 0
    return passes + [
        Pass("backward", m, None, reads, out, recorded=has_ends, stack=stack) for m in microbatches
    ]
