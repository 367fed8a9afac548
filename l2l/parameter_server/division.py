"""What a model's weights are divided into: a unit for each layer, each table, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from l2l.model import Partition, UnitTensors
from l2l.parameter_server.optimizer import Optimizer
from l2l.parameter_server.precision import PrecisionPolicy
from l2l.parameter_server.store import ParameterServer
from l2l.parameter_server.unit import UnitForm
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


def forms_of(
    partition: Partition,
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
        for name, tensors in units_of(partition)
    ]
