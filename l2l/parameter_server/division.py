"""What a model's weights are divided into: a unit for each layer, each table, and the rest."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from l2l.model import Partition, UnitTensors
from l2l.parameter_server.adafactor import Adafactor
from l2l.parameter_server.layout import FlatLayout
from l2l.parameter_server.optimizer import HostOptimizer, Optimizer, Settings, StateKind
from l2l.parameter_server.precision import COMPANION, PrecisionPolicy
from l2l.parameter_server.unit import UnitForm, state_name
from l2l.schedule import OUTER


def units_of(partition: Partition) -> list[tuple[str, UnitTensors]]:
    """What moves into the server; the outer buffers stay with the skeleton, on the device."""
    layers = [(f"L{index}", one) for index, one in enumerate(partition.layer_tensors)]
    outer, tables = partition.outer_tensors.parameters, partition.tables
    rest = {owner: value for owner, value in outer.items() if owner not in tables}
    units = [
        (f"T{index}", UnitTensors(parameters={owner: outer[owner]}, buffers={}))
        for index, owner in enumerate(tables)
    ]
    return [*layers, *units, (OUTER, UnitTensors(parameters=rest, buffers={}))]


def form_of(
    name: str,
    *,
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    settings: Mapping[str, Settings],
    precision: PrecisionPolicy,
    optimizer: Optimizer,
    num_shares: int = 1,
) -> UnitForm:
    """What a unit is made of; `settings` has those of the parameters that are trained.

    What is trained comes first in its weights, as in everything else, so that whoever holds a share
    of the gradient holds the same share of the weights.
    """
    described = [
        (owner, tuple(parameter.shape), precision.link_dtype(owner, parameter.dtype))
        for owner, parameter in parameters.items()
    ]
    trained = FlatLayout.of(
        (entry for entry in described if entry[0] in settings), num_shares=num_shares
    )
    riding = list[tuple[str, tuple[int, ...], torch.dtype]]()
    kinds: dict[str, StateKind] = {}
    companions = {COMPANION[s.dtype] for s in trained.segments if s.dtype in COMPANION}
    if isinstance(optimizer, HostOptimizer):
        for owner in trained.names:
            kinds |= optimizer.state_kinds(settings[owner])
    elif isinstance(optimizer, Adafactor):
        companions = set()
        riding = [
            (state_name(owner, state), state_shape, torch.float32)
            for owner, shape, _ in described
            if owner in settings
            for state, state_shape in optimizer.state_shapes(shape).items()
        ]
    kept = [(key, tuple(value.shape), value.dtype) for key, value in buffers.items()]
    frozen = [entry for entry in described if entry[0] not in settings]
    rest = FlatLayout.of(frozen + kept + riding, num_shares=num_shares)
    return UnitForm(
        name=name,
        weight_layout=FlatLayout.joined(trained, rest),
        trained=trained,
        state_kinds=kinds,
        companion_dtype=next(iter(companions), None),
    )


def forms_of(
    partition: Partition,
    *,
    optimizer: Optimizer,
    settings: Mapping[str, Settings],
    precision: PrecisionPolicy,
    num_shares: int = 1,
) -> list[UnitForm]:
    """What every unit is made of with an optimizer; `settings` has those of what is trained."""
    return [
        form_of(
            name,
            parameters=tensors.parameters,
            buffers=tensors.buffers,
            settings=settings,
            precision=precision,
            optimizer=optimizer,
            num_shares=num_shares,
        )
        for name, tensors in units_of(partition)
    ]
