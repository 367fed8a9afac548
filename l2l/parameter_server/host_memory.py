"""Host memory: anonymous pages, touched by all cores, registered for DMA, accounted by name.

Torch's pinned allocator is not used for the model: it takes about 2 GiB/s and rounds every block up
to a power of two. Anonymous memory with transparent huge pages, written once by all cores and then
registered, is an order of magnitude faster and has exactly the size that was asked for
(docs/benchmarks.md).
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from l2l.device import Device, format_bytes, parse_bytes, untouched_pages
from l2l.parameter_server.host_kernel import HostKernel, working_threads
from l2l.parameter_server.layout import round_up

TOUCHED_AT_ONCE = 64 << 20  # bytes
COPY_ALIGNMENT = 64
COPYING_THREADS = 4  # that copy what nobody waits for
CGROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def available_bytes() -> int:
    """Host memory that can be taken now without pushing anything out."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return 2**63
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
    available = int(found[1]) * 1024 if found else 2**63
    for names in CGROUPS:  # a container may have less than its machine
        limit, used = (Path("/sys/fs/cgroup") / name for name in names)
        if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
            available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBudget:
    """How much host memory may be taken."""

    limit_bytes: int
    rule: str

    @classmethod
    def of(
        cls, host_memory: int | str | None, *, model_bytes: int, num_sharing: int = 1
    ) -> HostBudget:
        """The user's limit; None is 95% of what is free once the model's own tensors are moved.

        Ranks of one host share that.
        """
        if host_memory is not None:
            limit = parse_bytes(host_memory, name="host_memory")
            return cls(limit_bytes=limit, rule=f"host_memory={host_memory!r}")
        limit = int(0.95 * available_bytes()) // num_sharing + model_bytes
        shared = f", shared by {num_sharing} ranks" if num_sharing > 1 else ""
        rule = f"95% of what is free{shared}, and the model's own memory"
        return cls(limit_bytes=limit, rule=rule)

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
        self.device = device
        self.bytes_by_name: dict[str, int] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype, *, registered: bool) -> Tensor:
        """Memory for `numel` elements, zeros; registered memory is what lanes copy from and to."""
        nbytes = numel * dtype.itemsize
        self.count(name, nbytes)
        return self.device.host_empty(nbytes, registered=registered).view(dtype)

    def give_back(self, name: str, memory: Tensor) -> None:
        """Let go of memory that `take` gave."""
        self.count(name, -memory.nbytes)
        self.device.forget(memory)

    def on_device(self, value: Tensor) -> Tensor:
        """A value where arithmetic is fast."""
        return value.to(self.device.torch_device)

    def count(self, name: str, nbytes: int) -> None:
        """Note that so many bytes more, or fewer, are taken for something."""
        self.bytes_by_name[name] = self.bytes_by_name.get(name, 0) + nbytes


def copy_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of a block for copies of tensors."""
    return sum(round_up(tensor.nbytes, COPY_ALIGNMENT) for tensor in tensors.values())


@final
class SparePages:
    """Blocks of host memory that are taken once and used again; from any thread.

    To write to a page for the first time takes far longer than to copy something there: one core of
    a virtual machine got 0.5 to 2.7 GB/s of fresh pages, and copied about 12 GB/s into others. So
    blocks that are given back are kept, and `fill` makes some beforehand, on a thread of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}  # by address
        self._unmade: list[int] = []  # sizes of blocks that are yet to be made
        self._filling: threading.Thread | None = None
        self._is_ended = threading.Event()

    @property
    def free_bytes(self) -> int:
        """Bytes of blocks that nobody uses."""
        with self._lock:
            return sum(block.numel() for block in self._free)

    def take(self, nbytes: int) -> Tensor:
        """A block of bytes, with any contents; perhaps a little larger.

        Raises:
            MemoryError: there is no memory.
        """
        with self._lock:
            fitting = [one for one in self._free if nbytes <= one.numel() <= nbytes + nbytes // 4]
            block = min(fitting, key=Tensor.numel, default=None)
            if block is not None:
                self._free = [one for one in self._free if one is not block]
            elif nbytes in self._unmade:
                self._unmade.remove(nbytes)  # it becomes one of those that were to be made
        if block is None:
            block = untouched_pages(nbytes)
        with self._lock:
            self._taken[block.data_ptr()] = block
        return block

    def copies(
        self, tensors: Mapping[str, Tensor], *, kernel: HostKernel | None, urgent: bool
    ) -> dict[str, Tensor]:
        """Copies in one block; urgent ones with all threads."""
        nbytes = copy_bytes(tensors)
        if not nbytes:  # ranks hold nothing of a unit that is smaller than their number
            return {name: tensor.clone() for name, tensor in tensors.items()}
        block, found, start = self.take(nbytes), dict[str, Tensor](), 0
        num_threads = working_threads() if urgent else min(COPYING_THREADS, working_threads())
        for name, tensor in tensors.items():
            copy = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            if tensor.device.type != "cpu" or kernel is None or not tensor.is_contiguous():
                copy.copy_(tensor.detach())
            else:
                kernel.copy(copy, tensor, num_threads=num_threads)
            found[name] = copy
            start += round_up(tensor.nbytes, COPY_ALIGNMENT)
        return found

    def give_back(self, address: int) -> None:
        """Nobody uses the block that begins here any more."""
        with self._lock:
            self._free.append(self._taken.pop(address))

    def reclaim(self) -> None:
        """Nobody uses any block any more."""
        with self._lock:
            self._free += self._taken.values()
            self._taken.clear()

    def fill(self, sizes: Iterable[int]) -> None:
        """Begin to make free blocks of these sizes, once; does not wait."""
        if self._filling is None:
            self._unmade = list(reversed(list(sizes)))
            self._filling = threading.Thread(target=self._fill, daemon=True)
            self._filling.start()

    def wait(self) -> None:
        """Wait until they are made."""
        if self._filling is not None:
            self._filling.join()

    def close(self) -> None:
        """Let go of all free blocks."""
        self._is_ended.set()
        self.wait()
        with self._lock:
            self._free.clear()

    def _fill(self) -> None:
        while True:
            with self._lock:
                if not self._unmade:
                    return
                nbytes = self._unmade.pop()
            try:
                block = untouched_pages(nbytes)
            except MemoryError:
                return
            for start in range(0, nbytes, TOUCHED_AT_ONCE):
                if self._is_ended.is_set():
                    return
                ctypes.memset(block.data_ptr() + start, 0, min(TOUCHED_AT_ONCE, nbytes - start))
            with self._lock:
                self._free.append(block)
