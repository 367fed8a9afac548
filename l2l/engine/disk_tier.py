"""An engine's disk: what is refused, and how much goes there from the beginning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from l2l.device import Disk, DiskFolder
from l2l.distributed import World
from l2l.parameter_server import (
    ALL_PARTS,
    Arena,
    HostBudget,
    HostOptimizer,
    Inventory,
    Part,
    UnitsOnDisk,
    host_bytes,
)
from l2l.planner import DiskTier, first_on_disk, layers_on_disk, most_on_disk, refuse_disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """What an engine has of a disk, if any."""

    units: UnitsOnDisk | None = None
    first: Mapping[Part, tuple[str, ...]] = field(
        default_factory=lambda: dict.fromkeys(ALL_PARTS, ())
    )
    """Layers of which a part is there from the beginning."""
    measured: Callable[[], DiskTier] | None = None


def refuse_without_room(
    disk: Disk | str | Path | None,
    inventory: Inventory,
    budget: HostBudget,
    world: World,
    overrides: Mapping[str, Any],
) -> None:
    """Refuse a model for which host memory has no room, or a disk that cannot be used for it.

    Raises:
        ValueError: with what would fit, or what to do.
    """
    if disk is not None:
        refuse_disk(inventory.optimizer, is_parallel=world.is_parallel)
        return
    for name in ("num_on_disk", "num_weights_on_disk", "stash_values"):
        if overrides.get(name):
            raise ValueError(f"{name} is overridden, but there is no disk. Give disk=FOLDER.")
    forms, others = inventory.forms, dict[str, int]()
    if isinstance(inventory.optimizer, HostOptimizer) and not world.is_parallel:
        needed = host_bytes(forms, inventory.policy)
        others["disk=FOLDER"] = most_on_disk({form.name: form for form in forms}, needed)
    inventory.check(budget, world.share, others=others)


def open_tier(
    disk: Disk | str | Path | None,
    inventory: Inventory,
    budget: HostBudget,
    arena: Arena,
    overrides: Mapping[str, Any],
) -> Tier:
    """Take a disk's folder, and say what of layers goes there at once.

    Raises:
        ValueError: the folder cannot be used, or neither memory nor disk have room.
    """
    disk = Disk.of(disk)
    if disk is None:
        return Tier()
    forms = inventory.forms
    folder, by_name = DiskFolder(disk), {form.name: form for form in forms}
    try:
        numbers = [overrides.get(name) for name in ("num_on_disk", "num_weights_on_disk")]
        if numbers == [None, None]:
            needed = host_bytes(forms, inventory.policy)
            first = first_on_disk(by_name, needed, budget, room_bytes=folder.limit_bytes)
        else:
            chosen = zip(ALL_PARTS, numbers, strict=True)
            first = {part: layers_on_disk(by_name, part)[: number or 0] for part, number in chosen}
        layers = [form for name, form in by_name.items() if name.startswith("L")]
        units = UnitsOnDisk(folder, arena=arena, forms=layers)
        units.reserve(part for part, names in first.items() if names)
    except BaseException:
        folder.close()
        raise
    small = arena.device.torch_device.type == "cpu"
    measured = partial(DiskTier.of_folder, folder, disk.rates, small=small)
    return Tier(units=units, first=first, measured=measured)
