"""What the device computes in a step, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from l2l.schedule.lines import NOTHING
from l2l.schedule.shape import Shape


@dataclass(frozen=True, slots=True)
class Pass:
    """One microbatch through one part of the model, in one direction; not yet placed."""

    verb: str  # forward, loss or backward
    microbatch: int
    layer: int | None = None  # of forward and backward; None: the prologue
    reads: tuple[str, ...] = ()  # boundary values, "h1" or "g1"
    writes: str = NOTHING
    recorded: bool = False  # whether it reads the recorded arguments
    kept: bool = False  # whether a forward pass writes, or a backward pass reads, what was kept


def compute_order(shape: Shape) -> list[Pass]:
    """What the device computes: for each layer all microbatches, forward, then backward."""
    passes: list[Pass] = []
    microbatches = range(shape.num_microbatches)
    streamed, kept = shape.streamed, shape.num_kept_cells > 0
    following = {a: f"h{b}" for a, b in pairwise([*streamed, "E"])}
    rows = ("e",) if any(unit.looked_up for unit in shape.outer) else ()
    prologue = [Pass("forward", m, reads=rows, writes=shape.first_value) for m in microbatches]
    backward_layers = shape.backward_layers if shape.training else ()
    for layer in streamed:
        keeps = kept and layer in backward_layers
        passes += [
            Pass("forward", m, layer, (f"h{layer}",), following[layer], recorded=True, kept=keeps)
            for m in microbatches
        ]
    if rows and streamed:  # rows of a microbatch may be late: the first layer does not wait for all
        opening = zip(prologue, passes[: len(prologue)], strict=True)
        passes[: len(prologue)] = [one for pair in opening for one in pair]
    else:
        passes = prologue + passes
    walks = shape.num_tail > 0
    if not shape.training:
        return passes + [Pass("loss", m, reads=("hE",), recorded=walks) for m in microbatches]
    lowest = backward_layers[-1] if backward_layers else None
    needs_gradient = bool(backward_layers) or shape.trains_prologue
    passes += [
        Pass("loss", m, None, ("hE",), "gE" if needs_gradient else NOTHING, recorded=walks)
        for m in microbatches
    ]
    for layer in backward_layers:
        out = NOTHING if layer == lowest and not shape.trains_prologue else f"g{layer}"
        reads = (f"h{layer}", "g" + following[layer][1:])
        passes += [
            Pass("backward", m, layer, reads, out, recorded=True, kept=kept) for m in microbatches
        ]
    if shape.trains_prologue:
        gradient = "g" + shape.first_value[1:]
        out = "x" if any(unit.looked_up and unit.trained for unit in shape.outer) else NOTHING
        passes += [Pass("backward", m, None, (gradient, *rows), out) for m in microbatches]
    return passes
