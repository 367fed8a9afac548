"""Pages of host memory."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20


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
        raise MemoryError(f"cannot allocate {nbytes} bytes of host memory: {error}") from error


def _map_pages(nbytes: int) -> mmap.mmap:
    # Private: shared anonymous memory is a file to the kernel, and gets no huge pages.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_PAGE_BYTES:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
