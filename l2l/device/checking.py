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
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from l2l.device.random_numbers import RandomNumbers
from l2l.device.seam import Device, Event, Work, anonymous_pages
from l2l.device.worker import Worker, WorkerEvent
from l2l.schedule import Lane, Span, Trace

AT_ONCE = (Lane.COMPUTE, Lane.UPDATE, Lane.GATHER, Lane.REDUCE)
"""Lanes that run what they are given: ranks meet in the order of the schedule."""


@final
class QueuedEvent(Event):
    """A position in a queued lane."""

    def __init__(self, device: CheckingDevice, lane: Lane, position: int) -> None:
        self._device = device
        self.lane = lane
        self.position = position

    @override
    def synchronize(self) -> None:
        self._device.run_to(self)


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
class CheckingDevice(Device):
    """The CPU as a device whose copies are as late, or a lane as early, as the waits allow."""

    def __init__(self, *, first: Lane | None = None) -> None:
        """Make the device.

        Args:
            first: None computes at once, does copies when they are waited for, and updates on a
                thread. A lane: [Note: hostile order], for tests; everything runs on this thread.
        """
        super().__init__(torch.device("cpu"), RandomNumbers([torch.default_generator]))
        self._first = first
        self._queues = {lane: _Queue() for lane in Lane}
        self._worker = Worker() if first is None else None
        self._worker_events: dict[int, WorkerEvent] = {}
        self._trace: tuple[Trace, float] | None = None
        if self._worker is not None:
            weakref.finalize(self, self._worker.dismiss).atexit = False
        self._reserved = ByteCount()

    @override
    def submit(self, lane: Lane, text: str, work: Work) -> None:
        if self._trace is not None:
            work = partial(_timed, work, Lane(lane).value, text, *self._trace)
        self._queues[lane].append(work)
        if self._first is None and lane in AT_ONCE:
            self._advance(lane, self._queues[lane].num_submitted)

    @override
    def record(self, lane: Lane) -> Event:
        return QueuedEvent(self, lane, self._queues[lane].num_submitted)

    @override
    def wait(self, lane: Lane, event: Event) -> None:
        assert isinstance(event, QueuedEvent), type(event)
        self._queues[lane].append(event)

    def run_to(self, event: QueuedEvent) -> None:
        """Run what the event covers, and what that waits for."""
        self._advance(event.lane, event.position)
        if event.lane is Lane.UPDATE and self._worker is not None:
            completed = [p for p in self._worker_events if p <= event.position]
            if completed:
                self._worker_events[max(completed)].synchronize()
            for position in completed:
                del self._worker_events[position]

    def _advance(self, lane: Lane, position: int) -> None:
        lane_queue = self._queues[lane]
        while lane_queue.num_done < position:
            if lane_queue.busy:
                raise RuntimeError(f"deadlock: the {lane.value} lane waits for itself")
            lane_queue.busy = True
            item = lane_queue.waiting.popleft()
            try:
                if isinstance(item, QueuedEvent):
                    self.run_to(item)
                else:
                    self._perform(lane, item)
            finally:
                lane_queue.busy = False
                lane_queue.num_done += 1

    def _perform(self, lane: Lane, work: Work) -> None:
        if lane is Lane.UPDATE and self._worker is not None:
            self._worker.submit(lane.value, work)
            self._worker_events[self._queues[lane].num_done + 1] = self._worker.record()
        elif lane is Lane.COMPUTE and self._reserved.counting is not None:
            with self._reserved.counting:
                work()
        else:
            work()

    @override
    @contextlib.contextmanager
    def tracing(self) -> Iterator[Trace]:
        trace = Trace()
        self._trace = (trace, time.perf_counter())
        try:
            yield trace
            self.run_to(QueuedEvent(self, Lane.UPDATE, self._queues[Lane.UPDATE].num_submitted))
        finally:
            self._trace = None

    @override
    def begin(self) -> None:
        if self._worker is not None:
            self._worker.raise_failure()

    @override
    def finish(self) -> None:
        order: list[Lane] = [lane for lane in Lane if lane is not Lane.UPDATE]
        if self._first is not None:
            order.insert(0, self._first)
        for lane in order:
            self._advance(lane, self._queues[lane].num_submitted)

    @override
    def empty(self, nbytes: int) -> Tensor:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._reserved.hold(buffer)
        self.poison(buffer)
        return buffer

    @override
    def host_empty(self, nbytes: int, *, registered: bool) -> Tensor:
        if not registered:
            return anonymous_pages(nbytes)[0]
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.poison(buffer)
        return buffer

    @override
    def register(self, buffer: Tensor) -> None:
        pass

    @override
    def forget(self, buffer: Tensor) -> None:
        pass

    @override
    def host_record(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan)

    @override
    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor

    @property
    @override
    def has_failed(self) -> bool:
        return self._worker is not None and self._worker.has_failed

    @override
    def recover(self) -> None:
        if self._worker is not None:
            self._worker.recover()

    @override
    def abort(self) -> None:
        for lane, one in self._queues.items():
            one.busy = False
            if lane is not Lane.UPDATE or self._worker is not None:
                one.waiting.clear()
                one.num_done = one.num_submitted = max(one.num_done, one.num_submitted)
        if self._worker is not None:
            self._worker.finish()
        else:  # it may have work of earlier steps
            self._advance(Lane.UPDATE, self._queues[Lane.UPDATE].num_submitted)

    @override
    def poison(self, buffer: Tensor) -> None:
        buffer.fill_(0xFF)  # all bits set is NaN in every floating dtype

    @property
    @override
    def name(self) -> str:
        return platform.processor() or platform.machine() or "CPU"

    @override
    def total_bytes(self) -> int:
        return _host_bytes("MemTotal")

    @override
    def free_bytes(self) -> int:
        return _host_bytes("MemAvailable")

    @override
    def give_back(self) -> None:
        pass

    @override
    def limit_memory(self, nbytes: int) -> None:
        pass

    @override
    def reset_peak(self) -> None:
        self._reserved.start()

    @override
    def peak_bytes(self) -> int:
        return self._reserved.peak_bytes

    @override
    def close(self) -> None:
        for lane in Lane:
            self._advance(lane, self._queues[lane].num_submitted)
        if self._worker is not None:
            self._worker.close()


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
class ByteCount:
    """Bytes a real device would hold: reserved memory, and what computing allocates on top."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self.counting: CountAllocations | None = None

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        self.add(storage.nbytes())
        weakref.finalize(storage, self.add, -storage.nbytes())

    def add(self, nbytes: int) -> None:
        """Note that bytes were taken, or given back if negative."""
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def start(self) -> None:
        """Count allocations from now on, from a fresh peak."""
        self.counting = CountAllocations(self)
        self.peak_bytes = self.live_bytes


@final
class CountAllocations(TorchDispatchMode):
    """Counts the storages that operators allocate, until they are freed."""

    def __init__(self, count: ByteCount) -> None:
        super().__init__()
        self._count = count

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {
            leaf.untyped_storage()._cdata
            for leaf in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self._count.hold(leaf)
        return result
