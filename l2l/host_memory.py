"""Host memory: anonymous pages, touched by all cores, registered for DMA, accounted by name.

Torch's pinned allocator is not used for the model: it takes about 2 GiB/s and rounds every block up
to a power of two. Anonymous memory with transparent huge pages, written once by all cores and then
registered, is an order of magnitude faster and has exactly the size that was asked for
(docs/benchmarks.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from l2l.byte_size import format_bytes, parse_bytes
from l2l.device import Device

CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def available_bytes() -> int:
    """Host memory that can be taken now without pushing anything out."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 2**63
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
    available = int(found[1]) * 1024 if found else 2**63
    for limit, used in CGROUPS:  # a container may have less than its machine
        if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
            available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBudget:
    """How much host memory may be taken."""

    limit_bytes: int
    rule: str

    @classmethod
    def of(cls, host_memory: int | str | None, *, model_bytes: int) -> HostBudget:
        """The user's limit; None is 95% of what is free once the model's own tensors are moved."""
        if host_memory is not None:
            limit = parse_bytes(host_memory, name="host_memory")
            return cls(limit_bytes=limit, rule=f"host_memory={host_memory!r}")
        limit = int(0.95 * available_bytes()) + model_bytes
        return cls(limit_bytes=limit, rule="95% of what is free, and the model's own memory")

    def check(self, needed_bytes: int, *, alternatives: dict[str, int]) -> None:
        """Refuse what does not fit, before anything is allocated.

        Raises:
            ValueError: with the bytes needed, the bytes there, and what would fit.
        """
        if needed_bytes <= self.limit_bytes:
            return
        fitting = [
            f"{name} ({format_bytes(nbytes)})"
            for name, nbytes in alternatives.items()
            if nbytes <= self.limit_bytes
        ]
        advice = " or ".join(fitting) if fitting else "a host with more memory, or a smaller model"
        raise ValueError(
            f"the parameter server needs {format_bytes(needed_bytes)} of host memory, found "
            f"{format_bytes(self.limit_bytes)} ({self.rule}). What would fit: {advice}."
        )


@final
class Arena:
    """Takes host memory and remembers what for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.bytes_by_name: dict[str, int] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype, *, registered: bool) -> Tensor:
        """Memory for `numel` elements, zeros; registered memory is what lanes copy from and to."""
        nbytes = numel * dtype.itemsize
        self.count(name, nbytes)
        return self._device.host_empty(nbytes, registered=registered).view(dtype)

    def count(self, name: str, nbytes: int) -> None:
        """Note that so many bytes more, or fewer, are taken for something."""
        self.bytes_by_name[name] = self.bytes_by_name.get(name, 0) + nbytes
