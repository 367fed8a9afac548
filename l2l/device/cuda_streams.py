"""Streams of CUDA: events on them, whose turn it is, and numbers of the host that they wait for."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch

from l2l.device.pages import PAGE_BYTES, anonymous_pages
from l2l.device.worker import Worker, WorkerEvent
from l2l.schedule import Lane

MAX_LAUNCHES = 512  # the driver queues 1,024


@final
class CudaEvent:
    """An event on a stream."""

    def __init__(self, *, after: Sequence[WorkerEvent], sources: Sequence[Worker]) -> None:
        """`sources`: host threads from which streams have what they compute with."""
        self.event = torch.cuda.Event(blocking=True)  # who waits on the host, sleeps
        self.after = after  # the last host work that its lane has waited for, of each thread
        self._sources = sources

    def synchronize(self) -> None:
        """Sleep until the stream has come so far; raises why what it has is worth nothing."""
        self.event.synchronize()
        for worker in self._sources:
            worker.raise_failure()


@final
class HostWork:
    """What host work lanes have waited for that is perhaps not done, and what queues behind it.

    See [Note: the interpreter's lock] in cuda.py.
    """

    def __init__(self) -> None:
        self._after: dict[Lane, dict[Worker, WorkerEvent]] = {lane: {} for lane in Lane}
        self._num_launches = dict.fromkeys(Lane, 0)  # queued since then

    def of(self, lane: Lane) -> tuple[WorkerEvent, ...]:
        """The last such work of each thread."""
        return tuple(self._after[lane].values())

    def follow(self, lane: Lane, events: Iterable[WorkerEvent]) -> None:
        """A lane has waited for these, too."""
        own = self._after[lane]
        for event in events:
            known = own.get(event.worker)
            if event.is_done or (known is not None and known.number >= event.number):
                continue
            if all(one.is_done for one in own.values()):
                self._num_launches[lane] = 0
            own[event.worker] = event

    def launch(self, lane: Lane, num_launches: int) -> None:
        """So many are to be queued; waits for what is before them if they are too many."""
        own = self._after[lane]
        for worker in [worker for worker, event in own.items() if event.is_done]:
            del own[worker]
        if not own:
            return
        self._num_launches[lane] += num_launches
        if self._num_launches[lane] > MAX_LAUNCHES:
            for event in own.values():
                event.wait()


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

    A worker thread writes the number of each event it completes; a stream that waits for an
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
