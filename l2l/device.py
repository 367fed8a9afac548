"""The seam to the hardware: lanes, waits, memory and random numbers of one device.

This is the only module that knows `torch.cuda`. It offers what the relay needs and no more: submit
work to a lane, record an event after it, let a lane wait for an event, take device memory, take
host memory the device can reach directly, seed the generators.

Two devices implement it.

`CudaDevice`: a lane is a stream, an event a CUDA event, work is launched as it is submitted. The
update lane is a host thread: it waits for drains by blocking itself, and a lane that waits for an
update blocks the submitting thread, which is ahead of the device by design.

`CheckingDevice`: the same engine on the CPU, made to find ordering bugs. Work is only *queued*; a
queued copy runs as late as the waits allow, when somebody waits for it. Memory is NaN until
written, and a released slot becomes NaN again. So a missing wait shows up as wrong numbers in an
ordinary CPU test instead of as a rare race on the accelerator.

[Note: hostile order] With `first=lane` everything is queued, then that lane runs ahead of all
others as far as its waits allow, pulling only what it waits for. If a wait is missing between line
A and line B of lane b, the order with `first=b` runs B before A. So running a schedule once per
lane tries, for every missing wait, an order in which it matters.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from l2l.schedule import Lane
from l2l.trace import Span, Trace

Work = Callable[[], object]
PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
COPIES_AHEAD = 16
WAITING = "wait"  # what the worker thread does between updates


class UpdateFailedError(RuntimeError):
    """Work on the update lane failed; what it was to change is not as it should be."""


class Event(ABC):
    """The end of some submitted work."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until the work is done."""


class Device(ABC):
    """Lanes, waits, memory and random numbers of one device."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    @abstractmethod
    def submit(self, lane: Lane, text: str, work: Work) -> None:
        """Append work to a lane. `text` is the schedule's line, for traces and errors."""

    @abstractmethod
    def record(self, lane: Lane) -> Event:
        """An event that completes with the work submitted to the lane so far."""

    @abstractmethod
    def wait(self, lane: Lane, event: Event) -> None:
        """Hold what is submitted to the lane from now on until the event is complete."""

    @abstractmethod
    def begin(self) -> None:
        """Start a schedule: every lane but the update lane goes on after all earlier work."""

    @abstractmethod
    def finish(self) -> None:
        """End a schedule: later work of every lane but the update lane follows all of it."""

    @abstractmethod
    def empty(self, nbytes: int) -> Tensor:
        """Device memory, as bytes; NaN in every floating dtype on the checking device."""

    @abstractmethod
    def host_empty(self, nbytes: int, *, registered: bool) -> Tensor:
        """Host memory, as bytes; lanes copy from and to registered memory without the host."""

    @abstractmethod
    def host_record(self, *shape: int) -> Tensor:
        """A few float32 numbers on the host for a lane to write; NaN until it does."""

    @abstractmethod
    def pinned(self, tensor: Tensor) -> Tensor:
        """A host tensor as one that can be copied to the device without the host's help."""

    @abstractmethod
    def abort(self) -> None:
        """Drop or finish what was submitted to all lanes but the update lane, after an error."""

    @abstractmethod
    def poison(self, buffer: Tensor) -> None:
        """Declare the contents of device memory dead."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Start a new peak measurement."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """Most device memory in use at once since `reset_peak`."""

    @abstractmethod
    def close(self) -> None:
        """Finish all work and give back threads and host memory."""

    @abstractmethod
    def tracing(self) -> contextlib.AbstractContextManager[Trace]:
        """Collect a span for every action inside the block; they are there when it ends."""

    @contextlib.contextmanager
    def private_random_state(self) -> Iterator[None]:
        """Leave the caller's random generators as they were."""
        devices = [self.torch_device] if self.torch_device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            yield

    def seed(self, seed: int) -> None:
        """Seed the generators that the layers' own code draws from."""
        torch.default_generator.manual_seed(seed)


def anonymous_pages(nbytes: int) -> tuple[Tensor, mmap.mmap | None]:
    """Zeros in fresh pages, huge ones where that pays, written by all cores at once."""
    if nbytes < PAGE_BYTES:
        return torch.zeros(nbytes, dtype=torch.uint8), None
    # Private: shared anonymous memory is a file to the kernel, and gets no huge pages.
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_PAGE_BYTES:
        pages.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(pages, dtype=torch.uint8)
    buffer.zero_()
    return buffer, pages


# --------------------------------------------------------------------------------------------------
# The worker thread of the update lane


@final
class WorkerEvent(Event):
    """Completion of work on the worker thread."""

    def __init__(self, worker: Worker, number: int) -> None:
        self._worker = worker
        self.number = number
        self._done = threading.Event()

    def set(self) -> None:
        """Mark the work as done."""
        self._done.set()

    @override
    def synchronize(self) -> None:
        self._done.wait()
        self._worker.raise_failure()


@final
class Worker:
    """One host thread that performs work in order; a failure is raised to whoever waits."""

    def __init__(self, *, on_event: Callable[[int], None] | None = None) -> None:
        """Start the thread; `on_event` is told the number of every event that completes."""
        self._on_event = on_event
        self._num_events = 0
        self._queue: queue.SimpleQueue[tuple[str, Work] | WorkerEvent | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self.times: list[tuple[str, float, float]] | None = None  # of each work, while tracing
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="l2l-update", daemon=True)
        self._thread.start()

    def submit(self, text: str, work: Work) -> None:
        """Append work. After a failure later work is dropped."""
        self._queue.put((text, work))

    def record(self) -> WorkerEvent:
        """An event after the work submitted so far."""
        self._num_events += 1
        event = WorkerEvent(self, self._num_events)
        self._queue.put(event)
        return event

    def raise_failure(self) -> None:
        """Raise what broke on the thread, if anything did."""
        if self._failure is not None:
            raise UpdateFailedError(
                f"an update on the host failed: {self._failure!r}"
            ) from self._failure

    def dismiss(self) -> None:
        """Let the thread end after what it has, without waiting for that."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)

    def close(self) -> None:
        """Let the thread end after what it has, and wait for it."""
        self.dismiss()
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, WorkerEvent):
                item.set()
                if self._on_event is not None:
                    self._on_event(item.number)
            elif self._failure is None:
                self._perform(*item)
            del item  # work refers to the whole engine: an idle thread must not keep it alive

    def _perform(self, text: str, work: Work) -> None:
        start = time.perf_counter()
        try:
            work()
        except BaseException as failure:  # handed to the waiting thread
            self._failure = failure
        if self.times is not None:
            self.times.append((text, start, time.perf_counter()))


# --------------------------------------------------------------------------------------------------
# CUDA


@final
class CudaEvent(Event):
    """An event on a stream."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(blocking=True)  # who waits on the host, sleeps

    @override
    def synchronize(self) -> None:
        self.event.synchronize()


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
        self._wait_value = _driver_function("cuStreamWaitValue32_v2") if self._registered else None

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


def _unregister(buffers: list[tuple[int, mmap.mmap]]) -> None:
    for address, _ in buffers:
        torch.cuda.cudart().cudaHostUnregister(address)
    buffers.clear()


def _driver_function(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None


@final
class CudaDevice(Device):
    """Streams of one CUDA device."""

    def __init__(self, torch_device: torch.device) -> None:
        index: int | None = torch_device.index  # None for plain "cuda"
        super().__init__(
            torch.device("cuda", torch.cuda.current_device() if index is None else index)
        )
        self._counter = StreamCounter()
        self._worker = Worker(on_event=self._counter.advance)
        # The compute lane is the caller's stream: libraries keep a workspace for every stream they
        # ever saw. Copies are short and the kernels that wait for them long: copies go first.
        self._streams: dict[Lane, torch.cuda.Stream] = {
            lane: torch.cuda.Stream(self.torch_device, priority=-1)
            for lane in Lane
            if lane not in (Lane.COMPUTE, Lane.UPDATE)
        }
        self._streams[Lane.COMPUTE] = torch.cuda.current_stream(self.torch_device)
        self._host_buffers: list[tuple[int, mmap.mmap]] = []
        self._marks: list[tuple[Lane, str, torch.cuda.Event, torch.cuda.Event]] | None = None
        # For a device that is dropped without `close`.
        weakref.finalize(self, self._worker.dismiss).atexit = False
        weakref.finalize(self, _unregister, self._host_buffers).atexit = False

    @override
    def submit(self, lane: Lane, text: str, work: Work) -> None:
        if lane is Lane.UPDATE:
            self._worker.submit(text, work)
            return
        stream = self._streams[lane]
        with torch.cuda.stream(stream), torch.profiler.record_function(text):
            if self._marks is None:
                work()
                return
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            work()
            end.record(stream)
            self._marks.append((lane, text, start, end))

    @override
    @contextlib.contextmanager
    def tracing(self) -> Iterator[Trace]:
        trace = Trace()
        torch.cuda.synchronize(self.torch_device)
        origin, began = torch.cuda.Event(enable_timing=True), time.perf_counter()
        origin.record(self._streams[Lane.COMPUTE])
        marks = self._marks = []
        times = self._worker.times = []
        try:
            yield trace
            torch.cuda.synchronize(self.torch_device)
            self._worker.record().synchronize()
        finally:
            self._marks, self._worker.times = None, None
        for lane, text, *events in marks:
            start, end = (origin.elapsed_time(event) / 1e3 for event in events)
            trace.spans.append(Span(lane.value, text, start, end))
        trace.spans += _worker_spans(times, began)

    @override
    def record(self, lane: Lane) -> Event:
        if lane is Lane.UPDATE:
            return self._worker.record()
        event = CudaEvent()
        event.event.record(self._streams[lane])
        return event

    @override
    def wait(self, lane: Lane, event: Event) -> None:
        if lane is Lane.UPDATE:
            self._worker.submit(WAITING, event.synchronize)
        elif isinstance(event, CudaEvent):
            self._streams[lane].wait_event(event.event)
        else:
            assert isinstance(event, WorkerEvent), type(event)
            self._counter.wait(self._streams[lane], event)

    @override
    def begin(self) -> None:
        self._worker.raise_failure()
        current = torch.cuda.current_stream(self.torch_device)
        for stream in self._streams.values():
            stream.wait_stream(current)

    @override
    def finish(self) -> None:
        current = torch.cuda.current_stream(self.torch_device)
        for stream in self._streams.values():
            current.wait_stream(stream)

    @override
    def empty(self, nbytes: int) -> Tensor:
        # From the pool of the stream that asks, which is the first to write the memory.
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    @override
    def host_empty(self, nbytes: int, *, registered: bool) -> Tensor:
        """Anonymous memory with huge pages, touched by all cores."""
        buffer, pages = anonymous_pages(nbytes)
        if not registered or pages is None:
            return buffer
        error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), nbytes, 0)
        if int(error) != 0:
            raise RuntimeError(
                f"the driver refused to register {nbytes} bytes of host memory (error "
                f"{int(error)}). Expected enough lockable memory: see 'ulimit -l'."
            )
        self._host_buffers.append((buffer.data_ptr(), pages))
        return buffer

    @override
    def host_record(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, pin_memory=True)

    @override
    def pinned(self, tensor: Tensor) -> Tensor:
        if tensor.is_cuda:
            return tensor
        # The step may still read it when the caller fills a pinned batch anew.
        return tensor.clone().pin_memory() if tensor.is_pinned() else tensor.pin_memory()

    @override
    def abort(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    @override
    def poison(self, buffer: Tensor) -> None:
        pass

    @override
    def seed(self, seed: int) -> None:
        super().seed(seed)
        torch.cuda.default_generators[self.torch_device.index].manual_seed(seed)

    @override
    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    @override
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.torch_device)

    @override
    def close(self) -> None:
        self._worker.close()
        torch.cuda.synchronize(self.torch_device)
        self._counter.close()
        _unregister(self._host_buffers)


# --------------------------------------------------------------------------------------------------
# CPU


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
        super().__init__(torch.device("cpu"))
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
        if self._first is None and lane in (Lane.COMPUTE, Lane.UPDATE):
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
    def host_record(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan)

    @override
    def pinned(self, tensor: Tensor) -> Tensor:
        return tensor

    @override
    def abort(self) -> None:
        for lane in Lane:
            if lane is not Lane.UPDATE:
                self._queues[lane].waiting.clear()
                self._queues[lane].num_done = self._queues[lane].num_submitted

    @override
    def poison(self, buffer: Tensor) -> None:
        buffer.fill_(0xFF)  # all bits set is NaN in every floating dtype

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


def _timed(work: Work, lane: str, text: str, trace: Trace, began: float) -> None:
    start = time.perf_counter()
    work()
    trace.spans.append(Span(lane, text, start - began, time.perf_counter() - began))


def _worker_spans(times: list[tuple[str, float, float]], began: float) -> list[Span]:
    return [
        Span(Lane.UPDATE.value, text, start - began, end - began)
        for text, start, end in times
        if text != WAITING
    ]


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


@contextlib.contextmanager
def busy_link(nbytes: int = 256 << 20) -> Iterator[bool]:
    """Copy both ways without pause meanwhile; yields whether there is a link to keep busy."""
    if not torch.cuda.is_available():
        yield False
        return
    device = CudaDevice(torch.device("cuda"))
    lanes = {Lane.FETCH: True, Lane.DRAIN: False}
    buffers = {
        lane: (device.host_empty(nbytes, registered=True), device.empty(nbytes)) for lane in lanes
    }
    stop = threading.Event()

    def copy() -> None:
        # Many copies are queued ahead, so that the link stays busy while this thread cannot run.
        queued: deque[Event] = deque()
        while not stop.is_set():
            for lane, inwards in lanes.items():
                host, on_device = buffers[lane]
                target, source = (on_device, host) if inwards else (host, on_device)
                for _ in range(COPIES_AHEAD):
                    device.submit(lane, "copy", partial(target.copy_, source, non_blocking=True))
                queued.append(device.record(lane))
            while len(queued) > 2 * len(lanes):
                queued.popleft().synchronize()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield True
    finally:
        stop.set()
        thread.join()
        device.close()


def plain_peak_bytes(work: Work, *, held: Iterable[Tensor], device: Device) -> int:
    """Most device memory that a piece of plain PyTorch takes, counted as for an engine.

    Args:
        work: runs on the device.
        held: tensors that are on the device before (a model's parameters).
        device: where.
    """
    if device.torch_device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device.torch_device)
        work()
        return torch.cuda.max_memory_reserved(device.torch_device)
    count = ByteCount()
    for tensor in held:
        count.hold(tensor)
    with CountAllocations(count):
        work()
    return count.peak_bytes


def open_device(device: str | torch.device | None) -> Device:
    """The device named by the user; None is the accelerator if there is one, else the CPU.

    Raises:
        ValueError: the device is not there, or of a kind this engine does not drive.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device={device!r} is not a torch device. Try 'cuda' or 'cpu'."
        ) from error
    if wanted.type == "cpu":
        return CheckingDevice()
    if wanted.type != "cuda":
        raise ValueError(f"device={str(wanted)!r} is not supported. Expected 'cuda' or 'cpu'.")
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (wanted.index or 0) >= num_devices:
        raise ValueError(
            f"device={str(wanted)!r} is not there: this process sees {num_devices} CUDA device(s). "
            "Use device='cpu', or check the driver and CUDA_VISIBLE_DEVICES."
        )
    return CudaDevice(wanted)
