"""Sizes and costs of a partitioned model for the planner, counted without running anything.

Layers are counted on the meta device with the arguments that a prologue run has recorded, one layer
of each structure, for some numbers of rows: costs are straight lines in between and beyond.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from l2l.model import (
    LayerInputs,
    Partition,
    Recording,
    Walked,
    backward_layer,
    forward_layer,
    walk_layer,
)
from l2l.parameter_server import AdamW, HostOptimizer, Optimizer, UnitForm
from l2l.planner.layer_cost import PassCost, count_kept_pass, count_pass
from l2l.planner.problem import CostCurve, LayerCosts, UnitSize

MANY_TOKENS = 8192  # enough for activations to outweigh gradients of weights


def unit_size(form: UnitForm) -> UnitSize:
    """Bytes of a unit."""
    kinds = form.bytes_by_kind()
    return UnitSize(
        weight_bytes=form.weight_layout.nbytes,
        gradient_bytes=form.gradient_layout.nbytes,
        staging_bytes=form.staging_layout.nbytes,
        state_bytes=sum(nbytes for kind, nbytes in kinds.items() if kind != "weights"),
        num_trained=form.trained.numel,
    )


def layer_costs(
    partition: Partition,
    forms: Mapping[str, UnitForm],
    recordings: Sequence[Recording],
    *,
    fused: bool,
) -> tuple[LayerCosts, ...]:
    """The costs of every layer, from recordings of one row and of two."""
    known: dict[str, LayerCosts] = {}
    for index, structure in enumerate(partition.structures):
        if structure not in known:
            form = forms[f"L{index}"]
            counted = _count_some(partition, index, form, recordings, fused=fused)
            lines = [
                CostCurve(tuple((rows, passes[kind]) for rows, passes in counted.items()))
                for kind in range(4)
            ]
            known[structure] = LayerCosts(*lines)
    return tuple(known[structure] for structure in partition.structures)


def _count(
    partition: Partition, index: int, form: UnitForm, recording: Recording, *, fused: bool
) -> tuple[PassCost, PassCost, PassCost, PassCost]:
    try:
        return _count_passes(partition, index, form, recording, fused=fused)
    except Exception:  # a layer whose code looks at values cannot be counted without any
        return _rough_passes(form, recording)


def _count_some(
    partition: Partition,
    index: int,
    form: UnitForm,
    recordings: Sequence[Recording],
    *,
    fused: bool,
) -> dict[int, tuple[PassCost, ...]]:
    """Costs for one row, for two, and where that can be told for many."""
    assert recordings[0].hidden is not None
    length = math.prod(recordings[0].hidden.shape[:-1])
    found: dict[int, tuple[PassCost, ...]] = {
        rows: _count(partition, index, form, one, fused=fused)
        for rows, one in enumerate(recordings, start=1)
    }
    many = -(-MANY_TOKENS // length)
    if many > len(found):
        # Not if the layer looks at values, or is told how many rows there are.
        with contextlib.suppress(Exception):
            larger = _with_rows(recordings, many)
            found[many] = _count_passes(partition, index, form, larger, fused=fused)
    return found


def _with_rows(recordings: Sequence[Recording], number: int) -> Recording:
    """A recording of so many rows, without data, from those of one row and of two."""

    def grown(one: Tensor, two: Tensor) -> Tensor:
        sizes = [a if a == b else a * number for a, b in zip(one.shape, two.shape, strict=True)]
        return torch.empty(sizes, dtype=one.dtype, device="meta")

    first, second = recordings
    assert first.hidden is not None
    assert second.hidden is not None
    return Recording(
        hidden=grown(first.hidden, second.hidden),
        tensors=[grown(a, b) for a, b in zip(first.tensors, second.tensors, strict=True)],
        calls=first.calls,
    )


def _count_passes(
    partition: Partition, index: int, form: UnitForm, recording: Recording, *, fused: bool
) -> tuple[PassCost, PassCost, PassCost, PassCost]:
    assert recording.hidden is not None
    hidden = recording.hidden.detach().to("meta")
    fields = [
        (field.name, field.shape, segment.dtype)
        for segment in form.weight_layout.segments
        for field in segment.fields
    ]
    inputs = LayerInputs(
        part=partition.layers[index],
        tensors={name: torch.empty(s, dtype=d, device="meta") for name, s, d in fields},
        trained=form.trained.names,
        call=recording.calls[index],
        hidden=hidden,
        hidden_requires_gradient=True,
        recorded=[tensor.detach().to("meta") for tensor in recording.tensors],
        through=(),
        changes_input=partition.structures[index] in partition.changing_input,
    )
    gradient = torch.empty_like(hidden)

    def backward() -> list[Tensor | None]:
        found = backward_layer(inputs, gradient=gradient)
        return [found.hidden, *found.parameters.values()]

    walked: list[Walked] = []

    def walk() -> Tensor:
        walked.append(walk_layer(inputs))
        return walked[0].output

    def unwind(edge: GradientEdge) -> Any:
        wanted = list(walked[0].wanted.values())
        walked.clear()
        return torch.autograd.grad([edge], wanted, [gradient], allow_unused=True)

    plain = count_pass(lambda: forward_layer(inputs), fused=fused)
    again = count_pass(backward, fused=fused)
    return plain, again, *count_kept_pass(walk, unwind, fused=fused)


def _rough_passes(
    form: UnitForm, recording: Recording
) -> tuple[PassCost, PassCost, PassCost, PassCost]:
    """Costs as of a transformer layer of this size."""
    assert recording.hidden is not None
    tokens = math.prod(recording.hidden.shape[:-1])
    hidden, parameters = recording.hidden.nbytes, form.weight_layout.numel
    flops = 2.0 * parameters * tokens

    def cost(passes: float, working: float, *, kept: float = 0.0) -> PassCost:
        return PassCost(
            matrix_flops=passes * flops,
            moved_bytes=passes * 12 * hidden,
            num_kernels=int(passes * 20),
            working_bytes=int(working * hidden)
            + (form.gradient_layout.nbytes if passes > 1 else 0),
            output_bytes=hidden,
            kept_bytes=int(kept * hidden),
        )

    return cost(1, 12), cost(3, 34), cost(1, 24, kept=24), cost(2, 34)


def head_of(forms: Sequence[UnitForm]) -> tuple[int, int]:
    """Parameters in matrices of these units, and the widest output among them."""
    shapes = [
        field.shape
        for form in forms
        for segment in form.weight_layout.segments
        for field in segment.fields
        if len(field.shape) == 2
    ]
    return sum(math.prod(shape) for shape in shapes), max((shape[0] for shape in shapes), default=1)


def update_bytes(optimizer: Optimizer, form: UnitForm) -> float:
    """Host memory traffic of an update, for each parameter."""
    if not isinstance(optimizer, HostOptimizer) or not form.trained.padded_numel:
        return 0.0
    numel = form.trained.padded_numel
    changed = sum(form.bytes_by_kind().values()) - form.weight_layout.nbytes
    changed += form.trained.nbytes
    return (form.staging_layout.nbytes + 2.0 * changed) / numel


def is_eight_bit(optimizer: Optimizer) -> bool:
    """Whether the optimizer keeps 8-bit moments."""
    return isinstance(optimizer, AdamW) and optimizer.moments == "8bit"
