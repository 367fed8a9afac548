"""Sizes and costs of a partitioned model for the planner, counted without running anything.

Layers are counted on the meta device with the arguments that a prologue run has recorded, one layer
of each structure, for some numbers of rows: costs are straight lines in between and beyond.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from l2l.model import (
    LayerInputs,
    Partition,
    Recording,
    backward_layer,
    forward_layer,
    walk_layer,
)
from l2l.parameter_server import HostOptimizer, Optimizer, UnitForm
from l2l.planner.layer_cost import PassCost, count_kept_pass, count_pass
from l2l.planner.problem import CostCurve, LayerCosts, UnitSize

MANY_TOKENS = 8192  # enough for activations to outweigh gradients of weights
Passes = tuple[PassCost, PassCost, PassCost, PassCost]  # as the fields of `LayerCosts`


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
    forms: Sequence[UnitForm],
    recordings: Sequence[Recording],
    *,
    fused: bool,
) -> tuple[LayerCosts, ...]:
    """The costs of every layer, from recordings of one row and of two."""
    known: dict[str, LayerCosts] = {}
    for index, (structure, form) in enumerate(zip(partition.structures, forms, strict=True)):
        if structure not in known:
            count = partial(_count_passes, partition, index, form, fused=fused)
            known[structure] = _costs(count, form, recordings)
    return tuple(known[structure] for structure in partition.structures)


def _costs(
    count: Callable[[Recording], Passes], form: UnitForm, recordings: Sequence[Recording]
) -> LayerCosts:
    """Costs from those for one row, for two, and where that can be told for many."""
    assert recordings[0].hidden is not None
    counted: dict[int, Passes] = {}
    for rows, recording in enumerate(recordings, start=1):
        try:
            counted[rows] = count(recording)
        except Exception:  # a layer whose code looks at values cannot be counted without any
            counted[rows] = _rough_passes(form, recording)
    many = -(-MANY_TOKENS // math.prod(recordings[0].hidden.shape[:-1]))
    if many > len(counted):
        # Not if the layer looks at values, or is told how many rows there are.
        with contextlib.suppress(Exception):
            counted[many] = count(_with_rows(recordings, many))
    kinds = zip(*counted.values(), strict=True)
    return LayerCosts(*(CostCurve(tuple(zip(counted, kind, strict=True))) for kind in kinds))


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
) -> Passes:
    assert recording.hidden is not None
    hidden, layout = recording.hidden.detach().to("meta"), form.weight_layout
    inputs = LayerInputs(
        part=partition.layers[index],
        tensors={
            name: torch.empty(layout.shape_of(name), dtype=layout.dtype_of(name), device="meta")
            for name in layout.names
        },
        trained=form.trained.names,
        call=recording.calls[index],
        hidden=hidden,
        hidden_requires_gradient=True,
        recorded=[tensor.detach().to("meta") for tensor in recording.tensors],
        through=(),
        changes_input=partition.structures[index] in partition.changing_input,
    )
    gradient = torch.empty_like(hidden)
    wanted: list[Tensor] = []

    def backward() -> list[Tensor | None]:
        found = backward_layer(inputs, gradient=gradient)
        return [found.hidden, *found.parameters.values()]

    def walk() -> Tensor:
        walked = walk_layer(inputs)
        wanted.extend(walked.wanted.values())
        return walked.output

    def unwind(edge: GradientEdge) -> Any:
        return torch.autograd.grad([edge], wanted, [gradient], allow_unused=True)

    plain = count_pass(lambda: forward_layer(inputs), fused=fused)
    again = count_pass(backward, fused=fused)
    return plain, again, *count_kept_pass(walk, unwind, fused=fused)


def _rough_passes(form: UnitForm, recording: Recording) -> Passes:
    """Costs as of a transformer layer of this size."""
    assert recording.hidden is not None
    hidden = recording.hidden.nbytes
    tokens = math.prod(recording.hidden.shape[:-1])
    flops = 2.0 * form.weight_layout.numel * tokens

    def cost(passes: int, working: int, *, kept: int = 0) -> PassCost:
        return PassCost(
            matrix_flops=passes * flops,
            moved_bytes=passes * 12 * hidden,
            num_kernels=passes * 20,
            working_bytes=working * hidden + (form.gradient_layout.nbytes if passes > 1 else 0),
            output_bytes=hidden,
            kept_bytes=kept * hidden,
        )

    return cost(1, 12), cost(3, 34), cost(1, 24, kept=24), cost(2, 34)


def head_of(forms: Sequence[UnitForm]) -> tuple[int, int]:
    """Parameters in matrices of these units, and the widest output among them."""
    layouts = [form.weight_layout for form in forms]
    shapes = [layout.shape_of(name) for layout in layouts for name in layout.names]
    shapes = [shape for shape in shapes if len(shape) == 2]
    return sum(map(math.prod, shapes)), max((shape[0] for shape in shapes), default=1)


def update_bytes(optimizer: Optimizer, form: UnitForm) -> float:
    """Host memory traffic of an update, for each parameter."""
    numel = form.trained.padded_numel
    if not isinstance(optimizer, HostOptimizer) or not numel:
        return 0.0
    changed = sum(form.bytes_by_kind().values()) - form.weight_layout.nbytes
    changed += form.trained.nbytes
    return (form.staging_layout.nbytes + 2.0 * changed) / numel
