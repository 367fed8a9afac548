"""What both devices are made of: events, random numbers, pages of host memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from l2l.device.random_numbers import RandomNumbers

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
