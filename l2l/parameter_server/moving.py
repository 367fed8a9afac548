"""Units that get other names, are copied, or go: what becomes of host memory when layers change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from l2l.distributed import Share
from l2l.model import UnitTensors
from l2l.parameter_server.forms import UnitForm
from l2l.parameter_server.host_memory import Arena
from l2l.parameter_server.layout import FlatLayout
from l2l.parameter_server.unit import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One unit that is to be."""

    form: UnitForm
    source: str | None  # the unit that it is, or is copied from; None: it is new
    is_copy: bool
    keeps_state: bool
    names: Mapping[str, str]  # of its tensors, to those of the source
    tensors: UnitTensors


def let_go(unit: Unit, arena: Arena) -> None:
    """Give a unit's memory back."""
    for name, buffer in {"weights": unit.weights, **unit.kept()}.items():
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
            if source is not None and not move.is_copy and _alike(source.form, move.form):
                made[move.form.name] = _renamed(source, move)
                continue
            unit = Unit.empty(move.form, share, arena.take)
            taken.append(unit)
            made[move.form.name] = unit
            if source is not None:
                _copy(source, unit, move)
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


def _alike(one: UnitForm, other: UnitForm) -> bool:
    """Whether two forms need the same memory, but for names."""

    def places(layout: FlatLayout) -> list[Any]:
        return [
            (s.dtype, s.numel, [(f.offset, f.numel) for f in s.fields]) for s in layout.segments
        ]

    layouts = ((one.weight_layout, other.weight_layout), (one.trained, other.trained))
    return one.kept() == other.kept() and all(places(a) == places(b) for a, b in layouts)


def _renamed(unit: Unit, move: Move) -> Unit:
    """The same memory under other names."""
    return replace(
        unit,
        form=move.form,
        held=move.form.held(unit.share),
        steps={owner: unit.steps[move.names[owner]] for owner in move.form.trained.names},
        prepared={},
    )


def _copy(unit: Unit, made: Unit, move: Move) -> None:
    """Let an empty unit have the same weights and, if it is to keep it, the same state."""
    for name in made.held.weight_layout.names:
        owner, bar, state = name.partition("|")
        source = f"{move.names[owner]}{bar}{state}"
        if source in unit.held.weight_layout.names and (not bar or move.keeps_state):
            made.weight_of(name).copy_(unit.weight_of(source))
    for owner in made.held.trained.names:
        source, companion = move.names[owner], made.companion_of(owner)
        theirs = unit.companion_of(source)
        if companion is not None and theirs is not None:
            companion.copy_(theirs.view(companion.shape))
        elif companion is not None and companion.dtype is torch.float32:
            companion.copy_(made.weight_of(owner))  # whose remainder would be zero
        if move.keeps_state and source in unit.held.trained.names:
            for kind, buffer in made.state_of(owner).items():
                buffer.copy_(unit.state_of(source)[kind])
    if move.keeps_state:
        made.steps = {o: unit.steps.get(move.names[o], 0) for o in move.form.trained.names}
