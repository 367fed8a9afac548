"""What the engines of this process may take of a device: torch knows one limit for all of them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Final, final

import torch


@final
class MemoryLimits:
    """Owner of the process's limits: of each device, those of the engines that use it now.

    Engines of one *group* use the same memory in turns: it counts once.
    """

    def __init__(self) -> None:
        self._limits: dict[torch.device, weakref.WeakKeyDictionary[object, Limit]] = {}

    def set(
        self, device: torch.device, owner: object, nbytes: int | None, group: object = None
    ) -> None:
        """Note what one of them may take; None: whatever is free, until it has planned."""
        limits = self._limits.setdefault(device, weakref.WeakKeyDictionary())
        limits[owner] = Limit(nbytes, id(owner if group is None else group))

    def drop(self, device: torch.device, owner: object) -> None:
        """Forget one that takes nothing any more."""
        self._limits.get(device, weakref.WeakKeyDictionary()).pop(owner, None)

    def total(self, device: torch.device) -> int | None:
        """What all of them may take together; None: there is no limit."""
        found = self._of_groups(device)
        known = [nbytes for nbytes in found.values() if nbytes is not None]
        return sum(known) if known and len(known) == len(found) else None

    def of_others(self, device: torch.device, owner: object) -> int:
        """What those were promised that are not in the group of this one."""
        limits = self._limits.get(device, weakref.WeakKeyDictionary())
        found, own = self._of_groups(device), limits.get(owner)
        without = None if own is None else own.group
        return sum(nbytes or 0 for group, nbytes in found.items() if group != without)

    def _of_groups(self, device: torch.device) -> dict[int, int | None]:
        """What each group may take: the least that is known of one of it."""
        found: dict[int, list[int]] = {}
        for one in self._limits.get(device, weakref.WeakKeyDictionary()).values():
            found.setdefault(one.group, []).extend([] if one.nbytes is None else [one.nbytes])
        return {group: min(known, default=None) for group, known in found.items()}


@dataclass(frozen=True, slots=True)
class Limit:
    """What an engine may take."""

    nbytes: int | None
    group: int


LIMITS: Final = MemoryLimits()
