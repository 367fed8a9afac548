"""Which units around the layers are read before them, which after, and which by lookup alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from l2l.model import Readers, Reading
from l2l.parameter_server import UnitForm, UpdatePolicy
from l2l.run import TableLookup, Usage
from l2l.schedule import OuterUnit

LARGE_UNIT_BYTES = 16 << 20  # a smaller table is not worth a lookup on the host


def outer_units(
    forms: Mapping[str, UnitForm],
    usage: Mapping[str, Usage],
    *,
    embedding: str | None,
    policy: UpdatePolicy,
    parallel: bool,
) -> tuple[OuterUnit, ...]:
    """Units around the layers; the host looks up in tables where it was told to, or large ones.

    A table that ranks hold together is gathered like a layer.
    """
    may_look_up = not parallel and policy is not UpdatePolicy.ON_DEVICE and embedding != "device"
    found = []
    for name, form in forms.items():
        if name.startswith("L"):
            continue
        one = usage.get(name, Usage(before=True, after=True))
        pays = embedding == "host" or form.weight_layout.nbytes >= LARGE_UNIT_BYTES
        on_host = may_look_up and pays and bool(one.lookups) and not one.before
        found.append(
            OuterUnit(
                name=name,
                in_prologue=one.before or (bool(one.lookups) and not on_host),
                in_epilogue=one.after,
                looked_up=on_host,
                trained=bool(form.trained.names),
            )
        )
    return tuple(found)


def usage_of(
    forms: Mapping[str, UnitForm], batch: Mapping[str, Any], before: Readers, after: Readers
) -> dict[str, Usage]:
    """How every unit around the layers was read before and after them."""
    found = {}
    for unit, form in forms.items():
        if unit.startswith("L"):
            continue
        owners, lookups = form.weight_layout.names, list[TableLookup]()
        readings = {owner: before.readings.get(owner, Reading()) for owner in owners}
        otherwise = any(reading.otherwise for reading in readings.values())
        for owner, lookup in ((o, one) for o, r in readings.items() for one in r.lookups):
            entries = [(k, v) for k, v in batch.items() if isinstance(v, Tensor)]
            entries.sort(key=lambda entry: entry[1] is not lookup.ids)  # they may share memory
            name = next((name for name, value in entries if lookup.is_by(value)), None)
            if name is None:
                otherwise = True
            else:
                padding = lookup.padding_idx
                lookups.append(TableLookup(unit=unit, owner=owner, name=name, padding_idx=padding))
        after_too = any(owner in after.readings for owner in owners)
        found[unit] = Usage(before=otherwise, after=after_too, lookups=tuple(lookups))
    return found
