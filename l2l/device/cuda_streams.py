"""Streams of CUDA: events on them, whose turn it is, and numbers of the host that they wait for."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, final

import torch

from l2l.device.pages import PAGE_BYTES, anonymous_pages
from l2l.device.worker import WorkerEvent


@final
class CudaEvent:
    """An event on a stream."""

    def __init__(self, *, after: WorkerEvent | None) -> None:
        self.event = torch.cuda.Event(blocking=True)  # who waits on the host, sleeps
        self.after = after  # the last host work that its lane has waited for

    def synchronize(self) -> None:
        """Sleep until the stream has come so far."""
        self.event.synchronize()


@final
class Turn:
    """A stream's turn to be the current one; torch's own looks up five times what is known here."""

    __slots__ = ("_after", "_stream")

    def __init__(self, stream: torch.cuda.Stream, after: torch.cuda.Stream) -> None:
        self._stream = stream
        self._after = after

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._after)


@final
class StreamCounter:
    """A number in host memory that a stream can wait for: how the device waits for the host.

    The worker thread writes the number of each event it completes; a stream that waits for an
    event holds until the number is that large. So a lane can wait for an update without the thread
    that submits work having to block. Where the driver does not offer this, that thread blocks.
    """

    def __init__(self) -> None:
        self._memory, self._pages = anonymous_pages(PAGE_BYTES)
        cudart = torch.cuda.cudart()
        self._registered = not int(cudart.cudaHostRegister(self._memory.data_ptr(), PAGE_BYTES, 0))
        self._word = ctypes.c_uint32.from_address(self._memory.data_ptr())
        self._wait_value: Any = None
        if self._registered:
            with contextlib.suppress(OSError, AttributeError):
                self._wait_value = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2

    def advance(self, number: int) -> None:
        """All events up to this number are complete."""
        self._word.value = number

    def wait(self, stream: torch.cuda.Stream, event: WorkerEvent) -> None:
        """Hold a stream until an event is complete."""
        if self._wait_value is not None:
            error = self._wait_value(
                ctypes.c_void_p(stream.cuda_stream),
                ctypes.c_uint64(self._memory.data_ptr()),
                ctypes.c_uint32(event.number),
                ctypes.c_uint(0),  # until the word is equal or greater
            )
            if error == 0:
                return
            self._wait_value = None
        event.synchronize()

    def close(self) -> None:
        """Give the memory back."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._registered = False
