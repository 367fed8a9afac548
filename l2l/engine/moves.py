"""What becomes of units and parameters when the layers of a model change."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from l2l.engine.layers import Layout
from l2l.model import Partition
from l2l.parameter_server import Move, UnitForm


def moves_for(
    layout: Layout, old: Partition, new: Partition, forms: Sequence[UnitForm]
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
    layout: Layout, old: Partition, new: Partition
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
