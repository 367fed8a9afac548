"""What a model's weights are divided into: a unit for each layer, each table, and the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from l2l.carving import CarvedModel, UnitTensors
from l2l.layers import Layout
from l2l.parameter_server import Move, Optimizer, ParameterServer, UnitForm
from l2l.precision import PrecisionPolicy
from l2l.schedule import OUTER


def units_of(carved: CarvedModel) -> list[tuple[str, UnitTensors]]:
    """What moves into the server; the outer buffers stay with the skeleton, on the device."""
    layers = [(f"L{index}", one) for index, one in enumerate(carved.layer_tensors)]
    outer, tables = carved.outer_tensors.parameters, carved.tables
    rest = {owner: value for owner, value in outer.items() if owner not in tables}
    units = [
        (f"T{index}", UnitTensors(parameters={owner: outer[owner]}, buffers={}))
        for index, owner in enumerate(tables)
    ]
    return [*layers, *units, (OUTER, UnitTensors(parameters=rest, buffers={}))]


def forms_of(
    carved: CarvedModel,
    *,
    optimizer: Optimizer,
    settings: Mapping[str, Mapping[str, Any]],
    precision: PrecisionPolicy,
    num_shares: int = 1,
) -> list[UnitForm]:
    """What every unit is made of with an optimizer; `settings` has those of what is trained."""
    return [
        ParameterServer.form(
            name,
            parameters=tensors.parameters,
            buffers=tensors.buffers,
            settings=settings,
            precision=precision,
            optimizer=optimizer,
            num_shares=num_shares,
        )
        for name, tensors in units_of(carved)
    ]


def moves_for(
    layout: Layout, old: CarvedModel, new: CarvedModel, forms: Sequence[UnitForm]
) -> list[Move]:
    """What becomes of the layers' units when the layers change."""
    moves = []
    for place, tensors, form in zip(layout, new.layer_tensors, forms, strict=False):
        names: dict[str, str] = {}
        if place.source is not None:
            theirs = old.layer_tensors[place.source]
            names = dict(zip(tensors.parameters, theirs.parameters, strict=True))
            names |= zip(tensors.buffers, theirs.buffers, strict=True)
        moves.append(
            Move(
                form=form,
                source=None if place.source is None else f"L{place.source}",
                is_copy=place.is_copy,
                keeps_state=place.keeps_state,
                names=names,
                parameters=tensors.parameters,
                buffers=tensors.buffers,
            )
        )
    return moves


def models_for(
    layout: Layout, old: CarvedModel, new: CarvedModel
) -> dict[nn.Parameter, nn.Parameter | None]:
    """For the parameters of the new layers, those that they are alike, if any."""
    found: dict[nn.Parameter, nn.Parameter | None] = {}
    for place, tensors in zip(layout, new.layer_tensors, strict=True):
        if place.source is None:
            found |= dict.fromkeys(tensors.parameters.values())
        else:
            theirs = old.layer_tensors[place.source].parameters.values()
            found |= zip(tensors.parameters.values(), theirs, strict=True)
    return found
