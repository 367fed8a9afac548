"""An engine's disk: what is refused, and how much goes there from the beginning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from l2l.device import Disk, DiskFolder
from l2l.distributed import World
from l2l.parameter_server import (
    Arena,
    HostBudget,
    HostOptimizer,
    Inventory,
    StateOnDisk,
    host_bytes,
)
from l2l.planner import DiskTier, first_on_disk, layers_on_disk, most_on_disk, refuse_disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """What an engine has of a disk, if any."""

    state: StateOnDisk | None = None
    first: tuple[str, ...] = ()
    """Layers whose state is there from the beginning."""
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
    if overrides.get("num_on_disk"):
        raise ValueError("num_on_disk is overridden, but there is no disk. Give disk=FOLDER.")
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
    """Take a disk's folder, and say which layers' state goes there at once.

    Raises:
        ValueError: the folder cannot be used, or neither memory nor disk have room.
    """
    disk = Disk.of(disk)
    if disk is None:
        return Tier()
    forms = inventory.forms
    folder, by_name = DiskFolder(disk), {form.name: form for form in forms}
    try:
        if "num_on_disk" in overrides:
            first = layers_on_disk(by_name)[: overrides["num_on_disk"]]
        else:
            needed = host_bytes(forms, inventory.policy)
            first = first_on_disk(by_name, needed, budget, room_bytes=folder.limit_bytes)
        layers = [by_name[name] for name in layers_on_disk(by_name)]
        state = StateOnDisk(folder, arena=arena, forms=layers)
    except BaseException:
        folder.close()
        raise
    small = arena.device.torch_device.type == "cpu"
    measured = partial(DiskTier.of_folder, folder, disk.rates, small=small)
    return Tier(state=state, first=first, measured=measured)
