"""The CPU as a device, made to find ordering bugs.

Work is only *queued*; a queued copy runs as late as the waits allow, when somebody waits for it.
Memory is NaN until written, and a released slot becomes NaN again. So a missing wait shows up as
wrong numbers in an ordinary CPU test instead of as a rare race on the accelerator.

[Note: hostile order] With `first=lane` everything is queued, then that lane runs ahead of all
others as far as its waits allow, pulling only what it waits for. If a wait is missing between line
A and line B of lane b, the order with `first=b` runs B before A. So running a schedule once per
lane tries, for every missing wait, an order in which it matters.
"""

from __future__ import annotations

import contextlib
import platform
import re
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from typing_extensions import override

from l2l.device.limits import LIMITS
from l2l.device.operators import tensors_in
from l2l.device.pages import anonymous_pages
from l2l.device.random_numbers import Drawing, RandomNumbers
from l2l.device.worker import WAITING, Event, Work, Worker, WorkerEvent
from l2l.schedule import LASTING, Lane, Span, Trace

AT_ONCE = (Lane.COMPUTE, Lane.GATHER, Lane.REDUCE, *LASTING)
"""Lanes that run what they are given: ranks meet in the order of the schedule."""


@final
@dataclass(frozen=True, slots=True)
class QueuedEvent:
    """A position in a queued lane."""

    device: CheckingDevice
    lane: Lane
    position: int

    def synchronize(self) -> None:
        """Run what comes before."""
        self.device.run_to(self)


@dataclass(slots=True)
class _Queue:
    """What was submitted to a lane and has not run, and how far it has run."""

    waiting: deque[Work | QueuedEvent] = field(default_factory=deque)
    num_submitted: int = 0
    num_done: int = 0
    busy: bool = False

    def append(self, item: Work | QueuedEvent) -> None:
        self.waiting.append(item)
        self.num_submitted += 1


@final
class CheckingDevice(Drawing):
    """The CPU as a device whose copies are as late, or a lane as early, as the waits allow.

    What each method is there for, on any device, is said here.
    """

    growth_bytes = 0
    """Bytes of a budget that its allocator cannot give: it grows by so much at a time."""
    sums_products = False  # whether a product of 16-bit matrices can be added to a float32 one

    def __init__(self, *, first: Lane | None = None) -> None:
        """Make the device.

        Args:
            first: None computes at once, does copies when they are waited for, and on threads what
                the host and the disk do. A lane: [Note: hostile order], for tests; everything runs
                on this thread.
        """
        super().__init__(torch.device("cpu"), RandomNumbers([torch.default_generator]))
        self._first = first
        self._queues = {lane: _Queue() for lane in Lane}
        threaded = LASTING if first is None else ()
        self._workers = {lane: Worker(lane.value) for lane in threaded}
        self._worker_events: dict[Lane, dict[int, WorkerEvent]] = {one: {} for one in threaded}
        self._trace: tuple[Trace, float] | None = None
        for worker in self._workers.values():
            weakref.finalize(self, worker.dismiss).atexit = False
        self._reserved = ByteCount()
        self._counts = False  # whether what computing allocates is counted as well

    # ----------------------------------------------------------------------------------------------
    # Lanes

    def submit(self, lane: Lane, text: str, work: Work) -> None:
        """Append work to a lane. `text` is the schedule's line, for traces and errors."""
        if self._trace is not None:
            work = partial(_timed, work, Lane(lane).value, text, *self._trace)
        self._queues[lane].append(work)
        if self._first is None and lane in AT_ONCE:
            self._advance(lane)

    def record(self, lane: Lane) -> Event:
        """An event that completes with the work submitted to the lane so far."""
        return QueuedEvent(self, lane, self._queues[lane].num_submitted)

    def wait(self, lane: Lane, event: Event) -> None:
        """Hold what is submitted to the lane from now on until the event is complete."""
        assert isinstance(event, QueuedEvent), type(event)
        self._queues[lane].append(event)

    def run_to(self, event: QueuedEvent) -> None:
        """Run what the event covers, and what that waits for."""
        done = self._on_thread(event)
        if done is not None:
            done.synchronize()

    def _on_thread(self, event: QueuedEvent) -> WorkerEvent | None:
        """Submit what the event covers; the end of that, if it is on a thread and known."""
        self._advance(event.lane, event.position)
        events = self._worker_events.get(event.lane, {})
        known = [position for position in events if position <= event.position]
        done = events[known[-1]] if known else None
        for position in known if done is not None and done.is_done else ():
            del events[position]
        return done

    def _advance(self, lane: Lane, position: int | None = None) -> None:
        """Run a lane up to a position, or all that it has."""
        lane_queue = self._queues[lane]
        position = lane_queue.num_submitted if position is None else position
        while lane_queue.num_done < position:
            if lane_queue.busy:
                raise RuntimeError(f"deadlock: the {lane.value} lane waits for itself")
            lane_queue.busy = True
            item = lane_queue.waiting.popleft()
            try:
                if isinstance(item, QueuedEvent):
                    self._await(lane, item)
                else:
                    self._perform(lane, item)
            finally:
                lane_queue.busy = False
                lane_queue.num_done += 1

    def _await(self, lane: Lane, event: QueuedEvent) -> None:
        """Hold a lane until an event is complete: one thread waits for another by itself."""
        if lane in self._workers and event.lane in self._workers:
            done = self._on_thread(event)
            if done is not None:
                self._workers[lane].submit(WAITING, done.synchronize)
        else:
            self.run_to(event)

    def _perform(self, lane: Lane, work: Work) -> None:
        if lane in self._workers:
            self._workers[lane].submit(lane.value, work)
            events = self._worker_events[lane]
            events[self._queues[lane].num_done + 1] = self._workers[lane].record()
            return
        counting = lane is Lane.COMPUTE and self._counts
        with self._reserved if counting else contextlib.nullcontext():
            work()

    @contextlib.contextmanager
    def tracing(self) -> Iterator[Trace]:
        """Collect a span for every action inside the block; they are there when it ends."""
        trace = Trace()
        self._trace = (trace, time.perf_counter())
        try:
            yield trace
            for lane in LASTING:
                self.record(lane).synchronize()
        finally:
            self._trace = None

    def begin(self) -> None:
        """Start a schedule: every lane that does not last goes on after all earlier work."""
        for worker in self._failed_first():
            worker.raise_failure()

    def finish(self) -> None:
        """End a schedule: later work of every lane that does not last follows all of it."""
        if self._first is not None:
            self._advance(self._first)
        for lane in Lane:
            if lane not in LASTING:
                self._advance(lane)

    def _failed_first(self) -> list[Worker]:
        """Threads; those of the disk first: others fail because these have."""
        return list(self._workers.values())[::-1]

    @property
    def has_failed(self) -> bool:
        """Whether work on a lane that lasts has failed."""
        return any(worker.has_failed for worker in self._workers.values())

    def recover(self) -> None:
        """Forget that such a lane has failed: its work is to be replaced."""
        for worker in self._failed_first():
            worker.finish()
        for worker in self._failed_first():
            worker.recover()

    def abort(self) -> None:
        """Drop or finish what was submitted to all lanes, after an error; may be called again.

        Does not raise what has failed on the update lane.
        """
        for lane, one in self._queues.items():
            one.busy = False
            if lane not in LASTING or self._workers:
                one.waiting.clear()
                one.num_done = one.num_submitted = max(one.num_done, one.num_submitted)
        for worker in self._failed_first():
            worker.finish()
        if not self._workers:  # these may have work of earlier steps
            for lane in LASTING:
                self._advance(lane)

    def close(self) -> None:
        """Finish all work and give back threads and host memory."""
        for lane in Lane:
            self._advance(lane)
        LIMITS.drop(self.torch_device, self)
        for worker in self._workers.values():
            worker.close()

    # ----------------------------------------------------------------------------------------------
    # Memory

    @property
    def name(self) -> str:
        """What the maker calls it."""
        return platform.processor() or platform.machine() or "CPU"

    def empty(self, nbytes: int) -> Tensor:
        """Device memory, as bytes; NaN in every floating dtype on the checking device."""
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._reserved.hold(buffer)
        self.poison(buffer)
        return buffer

    def host_empty(self, nbytes: int, *, registered: bool) -> Tensor:
        """Host memory, as bytes; lanes copy from and to registered memory without the host."""
        buffer, _ = anonymous_pages(nbytes)
        if registered:
            self.poison(buffer)
        return buffer

    def poison(self, buffer: Tensor) -> None:
        """Declare the contents of device memory dead."""
        buffer.fill_(0xFF)  # all bits set is NaN in every floating dtype

    def register(self, buffer: Tensor) -> None:
        """Let lanes copy from and to memory of `host_empty` that was not registered."""

    def forget(self, buffer: Tensor) -> None:
        """Nobody copies from or to memory of `host_empty` any more, and it may go."""

    def host_record(self, *shape: int) -> Tensor:
        """A few float32 numbers on the host for a lane to write; NaN until it does."""
        return torch.full(shape, torch.nan)

    def pinned(self, tensor: Tensor) -> Tensor:
        """A host tensor as one that can be copied to the device without the host's help."""
        return tensor

    def context_bytes(self) -> int:
        """What this process takes of the device beside its tensors: nothing."""
        return 0

    def total_bytes(self) -> int:
        """Memory of the device."""
        return _host_bytes("MemTotal")

    def free_bytes(self) -> int:
        """Device memory that could be taken now; what torch keeps for itself unused counts too."""
        return _host_bytes("MemAvailable")

    def give_back(self) -> None:
        """Give device memory that torch keeps unused back to the driver."""

    def limit_memory(
        self, nbytes: int | None, *, context_bytes: int = 0, group: object = None
    ) -> None:
        """What this engine may take of the device, None: what is free; torch keeps to the sum.

        Engines of one group take it in turns.
        """
        own = None if nbytes is None else nbytes - context_bytes
        LIMITS.set(self.torch_device, self, own, group)

    def promised_bytes(self) -> int:
        """What other engines of this process may take besides."""
        return LIMITS.of_others(self.torch_device, self)

    def reset_peak(self) -> None:
        """Start a new peak measurement."""
        self._counts = True
        self._reserved.peak_bytes = self._reserved.live_bytes

    def peak_bytes(self) -> int:
        """Most device memory in use at once since `reset_peak`."""
        return self._reserved.peak_bytes


def _host_bytes(entry: str) -> int:
    """An entry of the system's account of memory; without one, more than any machine has."""
    account = Path("/proc/meminfo")
    found = re.search(rf"{entry}:\s+(\d+) kB", account.read_text()) if account.exists() else None
    return int(found[1]) * 1024 if found else 2**62


def _timed(work: Work, lane: str, text: str, trace: Trace, began: float) -> None:
    start = time.perf_counter()
    work()
    trace.spans.append(Span(lane, text, start - began, time.perf_counter() - began))


@final
class ByteCount(TorchDispatchMode):
    """Bytes a real device would hold: what is reserved, and inside a block what is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        self._add(storage.nbytes())
        weakref.finalize(storage, self._add, -storage.nbytes())

    def _add(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        taken = tensors_in((args, kwargs))
        if any(map(is_traceable_wrapper_subclass, taken)):
            with self:  # what its class makes of it is counted
                return func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in taken}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            is_memory = tensor.device.type != "meta"
            if is_memory and tensor.untyped_storage()._cdata not in given:
                self.hold(tensor)
        return result
