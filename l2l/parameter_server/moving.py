"""Units that get other names, are copied, or go: what becomes of host memory when layers change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from l2l.distributed import Share
from l2l.parameter_server.host_memory import Arena
from l2l.parameter_server.layout import FlatLayout
from l2l.parameter_server.unit import Unit, UnitForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One unit that is to be."""

    form: UnitForm
    source: str | None  # the unit that it is, or is copied from; None: it is new
    is_copy: bool
    keeps_state: bool
    names: Mapping[str, str]  # of its tensors, to those of the source
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]


def empty_unit(form: UnitForm, share: Share, arena: Arena) -> Unit:
    """Memory for a unit, zeros."""
    held = form.held(share)
    take, numel = arena.take, held.trained.padded_numel
    unit = Unit(
        form=form,
        held=held,
        share=share,
        weights=take("weights", held.weight_layout.nbytes, torch.uint8, registered=True),
        companion=None
        if held.companion_dtype is None
        else take(held.companion_name, numel, held.companion_dtype, registered=False),
        state={
            name: take(name, held.state_numel(kind), kind.dtype, registered=False)
            for name, kind in held.state_kinds.items()
        },
        steps=dict.fromkeys(form.trained.names, 0),
    )
    unit.weights.zero_()
    return unit


def let_go(unit: Unit, arena: Arena) -> None:
    """Give a unit's memory back."""
    arena.give_back("weights", unit.weights)
    if unit.companion is not None:
        arena.give_back(unit.held.companion_name, unit.companion)
    for name, buffer in unit.state.items():
        arena.give_back(name, buffer)


def rearranged(
    units: Mapping[str, Unit], moves: Sequence[Move], share: Share, arena: Arena
) -> dict[str, Unit]:
    """The units with these layers, in this order; those around the layers stay.

    A unit that only gets another name keeps its memory; memory of layers that are gone is given
    back. If memory is short, nothing has changed.
    """
    made: dict[str, Unit] = {}
    taken: list[Unit] = []
    try:
        for move in moves:
            source = None if move.source is None else units[move.source]
            if source is not None and not move.is_copy and is_alike(source, move.form):
                made[move.form.name] = renamed(source, move)
                continue
            if source is None:
                unit = empty_unit(move.form, share, arena)
            else:
                unit = copied(source, move, arena)
            taken.append(unit)
            made[move.form.name] = unit
    except BaseException:
        for unit in taken:
            let_go(unit, arena)
        raise
    kept = {unit.weights.data_ptr() for unit in made.values()}
    for name, unit in units.items():
        if not name.startswith("L"):
            made[name] = unit
        elif unit.weights.data_ptr() not in kept:
            let_go(unit, arena)
    return made


def is_alike(unit: Unit, form: UnitForm) -> bool:
    """Whether a unit's memory is what a form needs, but for names."""
    mine = unit.form
    return (
        _shapes(mine.weight_layout) == _shapes(form.weight_layout)
        and _shapes(mine.trained) == _shapes(form.trained)
        and dict(mine.state_kinds) == dict(form.state_kinds)
        and mine.companion_dtype == form.companion_dtype
    )


def renamed(unit: Unit, move: Move) -> Unit:
    """The same memory under other names."""
    return replace(
        unit,
        form=move.form,
        held=move.form.held(unit.share),
        steps={owner: unit.steps[move.names[owner]] for owner in move.form.trained.names},
        prepared={},
    )


def copied(unit: Unit, move: Move, arena: Arena) -> Unit:
    """A unit of its own with the same weights and, if it is to keep it, the same state."""
    made = empty_unit(move.form, unit.share, arena)
    for name in made.held.weight_layout.names:
        owner, bar, state = name.partition("|")
        source = f"{move.names[owner]}{bar}{state}"
        if source in unit.held.weight_layout.names and (not bar or move.keeps_state):
            made.weight_of(name).copy_(unit.weight_of(source))
    known = unit.held.trained.names
    for owner in made.held.trained.names:
        source = move.names[owner]
        _complete(made, owner, unit.companion_of(source) if source in known else None)
        if move.keeps_state and source in known:
            theirs = unit.state_of(source)
            for kind, buffer in made.state_of(owner).items():
                buffer.copy_(theirs[kind])
    if move.keeps_state:
        made.steps = {o: unit.steps.get(move.names[o], 0) for o in move.form.trained.names}
    return made


def _complete(unit: Unit, owner: str, other: Tensor | None) -> None:
    """Write what completes a link weight: as another unit has it, or for exactly this weight."""
    companion = unit.companion_of(owner)
    if companion is None:
        return
    if other is not None:
        companion.copy_(other.view(companion.shape))
    elif companion.dtype is torch.int16:
        companion.zero_()
    else:
        companion.copy_(unit.weight_of(owner))


def _shapes(layout: FlatLayout) -> list[tuple[torch.dtype, int, tuple[tuple[int, int], ...]]]:
    return [
        (
            segment.dtype,
            segment.numel,
            tuple((field.offset, math.prod(field.shape)) for field in segment.fields),
        )
        for segment in layout.segments
    ]
