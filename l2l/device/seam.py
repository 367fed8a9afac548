"""What the relay needs of a device, and no more: the interface that both devices implement."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from l2l.device.random_numbers import RandomNumbers
from l2l.schedule import Lane, Trace

Work = Callable[[], object]
PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20


class UpdateFailedError(RuntimeError):
    """Work on the update lane failed; what it was to change is not as it should be."""


class Event(Protocol):
    """The end of some submitted work."""

    def synchronize(self) -> None:
        """Block the calling thread until the work is done."""


class Drawing:
    """What devices have in common: random numbers of their own."""

    def __init__(self, torch_device: torch.device, random_numbers: RandomNumbers) -> None:
        self.torch_device = torch_device
        self.random_numbers = random_numbers

    def private_random_state(self) -> AbstractContextManager[None]:
        """Draw from generators of this device's own, and leave the caller's as they are."""
        return self.random_numbers.scope()

    def seed(self, seed: int) -> None:
        """Seed the generators that the layers' own code draws from."""
        self.random_numbers.seed(seed)


@runtime_checkable
class Device(Protocol):
    """Lanes, waits, memory and random numbers of one device."""

    torch_device: torch.device
    random_numbers: RandomNumbers
    growth_bytes: int
    """Bytes of a budget that its allocator cannot give: it grows by so much at a time."""
    sums_products: bool  # whether a product of 16-bit matrices can be added to a float32 one

    def private_random_state(self) -> AbstractContextManager[None]:
        """Draw from generators of this device's own, and leave the caller's as they are."""

    def seed(self, seed: int) -> None:
        """Seed the generators that the layers' own code draws from."""

    def submit(self, lane: Lane, text: str, work: Work) -> None:
        """Append work to a lane. `text` is the schedule's line, for traces and errors."""

    def record(self, lane: Lane) -> Event:
        """An event that completes with the work submitted to the lane so far."""

    def wait(self, lane: Lane, event: Event) -> None:
        """Hold what is submitted to the lane from now on until the event is complete."""

    def begin(self) -> None:
        """Start a schedule: every lane but the update lane goes on after all earlier work."""

    def finish(self) -> None:
        """End a schedule: later work of every lane but the update lane follows all of it."""

    def empty(self, nbytes: int) -> Tensor:
        """Device memory, as bytes; NaN in every floating dtype on the checking device."""

    def host_empty(self, nbytes: int, *, registered: bool) -> Tensor:
        """Host memory, as bytes; lanes copy from and to registered memory without the host."""

    def register(self, buffer: Tensor) -> None:
        """Let lanes copy from and to memory of `host_empty` that was not registered."""

    def forget(self, buffer: Tensor) -> None:
        """Nobody copies from or to memory of `host_empty` any more, and it may go."""

    def host_record(self, *shape: int) -> Tensor:
        """A few float32 numbers on the host for a lane to write; NaN until it does."""

    def pinned(self, tensor: Tensor) -> Tensor:
        """A host tensor as one that can be copied to the device without the host's help."""

    def abort(self) -> None:
        """Drop or finish what was submitted to all lanes, after an error; may be called again.

        Does not raise what has failed on the update lane.
        """

    @property
    def has_failed(self) -> bool:
        """Whether work on the update lane has failed."""

    def recover(self) -> None:
        """Forget that the update lane has failed: its work is to be replaced."""

    def poison(self, buffer: Tensor) -> None:
        """Declare the contents of device memory dead."""

    @property
    def name(self) -> str:
        """What the maker calls it."""

    def total_bytes(self) -> int:
        """Memory of the device."""

    def free_bytes(self) -> int:
        """Device memory that could be taken now; what torch keeps for itself unused counts too."""

    def give_back(self) -> None:
        """Give device memory that torch keeps unused back to the driver."""

    def limit_memory(self, nbytes: int) -> None:
        """Let torch reserve no more device memory than this, and waste none of it."""

    def reset_peak(self) -> None:
        """Start a new peak measurement."""

    def peak_bytes(self) -> int:
        """Most device memory in use at once since `reset_peak`."""

    def close(self) -> None:
        """Finish all work and give back threads and host memory."""

    def tracing(self) -> AbstractContextManager[Trace]:
        """Collect a span for every action inside the block; they are there when it ends."""


def anonymous_pages(nbytes: int) -> tuple[Tensor, mmap.mmap | None]:
    """Zeros in fresh pages, huge ones where that pays, written by all cores at once."""
    if nbytes < PAGE_BYTES:
        return torch.zeros(nbytes, dtype=torch.uint8), None
    pages = _map_pages(nbytes)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    buffer.zero_()
    return buffer, pages


def untouched_pages(nbytes: int) -> Tensor:
    """Bytes in fresh pages, huge ones where that pays, which are taken as they are written.

    Raises:
        MemoryError: there are none.
    """
    try:
        return torch.frombuffer(_map_pages(max(1, nbytes)), dtype=torch.uint8)[:nbytes]
    except OSError as error:
        raise MemoryError(f"no {nbytes} bytes of host memory: {error}") from error


def _map_pages(nbytes: int) -> mmap.mmap:
    # Private: shared anonymous memory is a file to the kernel, and gets no huge pages.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_PAGE_BYTES:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
