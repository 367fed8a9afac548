"""Copies of tensors in spare host memory, for a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from torch import Tensor

from l2l.parameter_server.host_kernel import HostKernel, working_threads
from l2l.parameter_server.host_memory import SparePages
from l2l.parameter_server.layout import round_up

COPY_ALIGNMENT = 64
COPYING_THREADS = 4  # that copy what nobody waits for


def copy_starts(tensors: Mapping[str, Tensor]) -> list[int]:
    """Where copies of tensors begin in their block, and where the last one ends."""
    return [0, *accumulate(round_up(one.nbytes, COPY_ALIGNMENT) for one in tensors.values())]


def copy_into(
    spare: SparePages, tensors: Mapping[str, Tensor], *, kernel: HostKernel | None, urgent: bool
) -> dict[str, Tensor]:
    """Copies in one block of spare pages; urgent ones with all threads."""
    starts, copies = copy_starts(tensors), dict[str, Tensor]()
    if not starts[-1]:  # ranks hold nothing of a unit that is smaller than their number
        return {name: tensor.clone() for name, tensor in tensors.items()}
    block = spare.take(starts[-1])
    num_threads = working_threads() if urgent else min(COPYING_THREADS, working_threads())
    for start, (name, tensor) in zip(starts, tensors.items(), strict=False):
        copy = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if tensor.device.type != "cpu" or kernel is None or not tensor.is_contiguous():
            copy.copy_(tensor.detach())
        else:
            kernel.copy(
                copy.data_ptr(),
                source=tensor.data_ptr(),
                num_bytes=tensor.nbytes,
                num_threads=num_threads,
            )
        copies[name] = copy
    return copies
