"""The numbers of a pass, and how they follow from a tape if nothing is fused."""

from __future__ import annotations

from dataclasses import dataclass

from l2l.planner.layer_cost.tape import Kind, Tape

BALANCE = 175.0  # flops for each byte below which a matrix operator waits for memory


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """What one pass costs."""

    matrix_flops: float
    """Matrix products, convolutions and attention."""
    moved_bytes: float
    """Read and written by everything else, and by matrix products too small to hide theirs."""
    num_kernels: int
    working_bytes: int
    """Most memory alive at once, beyond inputs; outputs included."""
    output_bytes: int
    kept_bytes: int
    """Alive afterwards besides the outputs: what a later backward pass needs."""


def moved_bytes(kind: Kind, *, nbytes: float, flops: float) -> float:
    """Of bytes read and written, those that do not pass under matrix arithmetic."""
    return max(0.0, nbytes - flops / BALANCE) if kind is Kind.MATRIX else nbytes


def plain_costs(tape: Tape) -> list[PassCost]:
    """The cost of each phase of a tape, every operator a kernel."""
    costs, start = [], 0
    for phase in tape.phases:
        operations = tape.operations[start : phase.num_operations]
        start, moved = phase.num_operations, 0.0
        for one in operations:
            nbytes = sum(one.reads.values()) + sum(one.writes.values())
            moved += moved_bytes(one.kind, nbytes=nbytes, flops=one.flops)
        output_bytes = sum(tape.buffers[buffer].nbytes for buffer in phase.outputs)
        alive_bytes = sum(tape.buffers[buffer].nbytes for buffer in phase.alive)
        costs.append(
            PassCost(
                matrix_flops=sum(one.flops for one in operations),
                moved_bytes=moved,
                num_kernels=len(operations),
                working_bytes=phase.peak_bytes,
                output_bytes=output_bytes,
                kept_bytes=alive_bytes - output_bytes,
            )
        )
    return costs
