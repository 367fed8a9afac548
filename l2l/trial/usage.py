"""Which units around the layers are read before them, which after, and which by lookup alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from l2l.model import Readers, Reading
from l2l.parameter_server import UnitForm
from l2l.run import TableLookup
from l2l.schedule import OuterUnit

LARGE_UNIT_BYTES = 16 << 20  # a smaller table is not worth a lookup on the host


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How one unit around the layers is read."""

    before: bool  # the layers, other than by lookup
    after: bool
    lookups: tuple[TableLookup, ...] = ()


def outer_units(
    forms: Mapping[str, UnitForm], usage: Mapping[str, Usage], looked_up: Callable[[str], bool]
) -> tuple[OuterUnit, ...]:
    """Units around the layers, with the tables for which `looked_up` says so on the host."""
    found = []
    for name, form in forms.items():
        if name.startswith("L"):
            continue
        one = usage.get(name, Usage(before=True, after=True))
        on_host = bool(one.lookups) and not one.before and looked_up(name)
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
    return {
        name: _usage(name, form.weight_layout.names, batch, before, after)
        for name, form in forms.items()
        if not name.startswith("L")
    }


def _usage(
    unit: str,
    owners: tuple[str, ...],
    batch: Mapping[str, Any],
    before: Readers,
    after: Readers,
) -> Usage:
    lookups: list[TableLookup] = []
    otherwise = False
    for owner in owners:
        reading = before.readings.get(owner, Reading())
        otherwise |= reading.otherwise
        for lookup in reading.lookups:
            names = [
                name
                for name, value in batch.items()
                if isinstance(value, Tensor) and lookup.is_by(value)
            ]
            names.sort(key=lambda name: batch[name] is not lookup.ids)  # entries may share memory
            otherwise |= not names
            lookups += [
                TableLookup(unit=unit, owner=owner, name=name, padding_idx=lookup.padding_idx)
                for name in names[:1]
            ]
    return Usage(
        before=otherwise,
        after=any(owner in after.readings for owner in owners),
        lookups=tuple(lookups),
    )
