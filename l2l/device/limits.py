"""What the engines of this process may take of a device: torch knows one limit for all of them."""

from __future__ import annotations

import weakref
from typing import Final, final

import torch


@final
class MemoryLimits:
    """Owner of the process's limits: of each device, those of the engines that use it now."""

    def __init__(self) -> None:
        self._limits: dict[torch.device, weakref.WeakKeyDictionary[object, int | None]] = {}

    def set(self, device: torch.device, owner: object, nbytes: int | None) -> None:
        """Note what one of them may take; None: whatever is free, until it has planned."""
        self._limits.setdefault(device, weakref.WeakKeyDictionary())[owner] = nbytes

    def drop(self, device: torch.device, owner: object) -> None:
        """Forget one that takes nothing any more."""
        self._limits.get(device, weakref.WeakKeyDictionary()).pop(owner, None)

    def total(self, device: torch.device) -> int | None:
        """What all of them may take together; None: there is no limit."""
        found = list(self._limits.get(device, weakref.WeakKeyDictionary()).values())
        known = [nbytes for nbytes in found if nbytes is not None]
        return sum(known) if known and len(known) == len(found) else None

    def of_others(self, device: torch.device, owner: object) -> int:
        """What the others were promised."""
        found = self._limits.get(device, weakref.WeakKeyDictionary())
        return sum(nbytes or 0 for other, nbytes in found.items() if other is not owner)


LIMITS: Final = MemoryLimits()
