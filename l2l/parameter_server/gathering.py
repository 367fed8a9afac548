"""Whole weights of units that several ranks hold together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from l2l.distributed import Share, World
from l2l.parameter_server.layout import ALIGNMENT_BYTES, FlatLayout, round_up
from l2l.parameter_server.unit import Unit


def whole(unit: Unit, world: World) -> Unit:
    """A unit with all of its weights, without its state; its ranks must ask together."""
    if unit.share.number == 1:
        return unit
    form, companion = unit.form, unit.companion
    weights = _joined(world, unit.held.weight_layout, unit.weights, form.weight_layout.nbytes)
    if companion is not None:
        dtype = companion.dtype
        layout = unit.held.trained.astype({one.dtype: dtype for one in form.trained.segments})
        nbytes = form.trained.padded_numel * dtype.itemsize
        companion = _joined(world, layout, companion.view(torch.uint8), nbytes).view(dtype)
    return replace(unit, held=form, share=Share(), weights=weights, companion=companion, state={})


def _joined(world: World, layout: FlatLayout, own: Tensor, nbytes: int) -> Tensor:
    """The shares of all ranks, segment by segment, in one buffer."""
    parts = [world.gather_host(view.view(torch.uint8)) for view in layout.segment_views(own)]
    found = torch.zeros(nbytes, dtype=torch.uint8)
    start = 0
    for part in parts:
        found[start : start + part.numel()] = part
        start = round_up(start + part.numel(), ALIGNMENT_BYTES)
    return found


@contextlib.contextmanager
def values(
    units: Mapping[str, Unit], unit_of: Mapping[str, Unit], world: World
) -> Iterator[Callable[[str], Tensor] | None]:
    """Present values of all parameters, for rank 0: the other ranks help it inside and get None.

    Args:
        units: by name.
        unit_of: the unit of each parameter.
        world: the ranks, which must do this together.

    Raises:
        RuntimeError: on the others, if the block has failed on rank 0.
    """
    if not world.is_parallel:
        yield lambda owner: unit_of[owner].value(owner)
        return
    if world.rank:
        # Rank 0 says which unit it needs, "" at the end, or why it has failed.
        while (asked := world.gather_facts("")[0]) in units:
            whole(units[asked], world)
        if asked:
            raise RuntimeError(f"rank 0: {asked}")
        yield None
        return
    names = {id(unit): name for name, unit in units.items()}
    last: dict[str, Unit] = {}

    def value(owner: str) -> Tensor:
        name = names[id(unit_of[owner])]
        if name not in last:
            last.clear()
            world.gather_facts(name)
            last[name] = whole(units[name], world)
        return last[name].value(owner)

    try:
        yield value
    except Exception as error:
        world.gather_facts(str(error) or repr(error))
        raise
    world.gather_facts("")
