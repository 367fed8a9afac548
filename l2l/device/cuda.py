"""One CUDA device; with cuda_streams.py the only file of the package that knows `torch.cuda`.

A lane is a stream, an event a CUDA event, work is launched as it is submitted. The update lane is a
host thread (worker.py): it waits for drains by blocking itself, and a stream waits for an update by
watching a number in host memory. So are the lanes of the disk. Where one of these fails, streams go
on with whatever is there, and who waits for their results hears of it.

[Note: the interpreter's lock] Compiled code launches kernels with the lock held. A launch blocks
while too many others are queued, and loading a new kernel blocks until the device is done with all
of them. If these queue behind a stream that waits for the host thread, and that waits for the lock,
nothing ever goes on. So whoever submits waits for host threads first, without the lock: before
anything is compiled, and before more than `MAX_LAUNCHES` are queued behind one. For the latter
every event carries the last pieces of host work that it comes after (`HostWork`). And where the
allocator must tidy up, it waits for the whole device; torch lets go of the lock meanwhile, but not
for compiled code, which is therefore given another function to allocate with.

Another thread that compiles (`hold_back`) may load a kernel at any time. Meanwhile nothing at all
is queued behind the host thread: whoever submits waits for it each time, without the lock.

Short of that, the host thread would wait for the lock whenever launches block: so a line is
submitted to the compute lane only while about `MAX_LAUNCHES` or fewer are queued there. And the
host thread, which waits for the lock after each piece of its work, gets it within `SWITCH_SECONDS`
during a step, not within Python's five milliseconds.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor
from typing_extensions import override

from l2l.device.cuda_streams import MAX_LAUNCHES, CudaEvent, HostWork, StreamCounter, Turn
from l2l.device.limits import LIMITS
from l2l.device.pages import PAGE_BYTES, anonymous_pages
from l2l.device.random_numbers import Drawing, RandomNumbers, current
from l2l.device.worker import WAITING, Event, Work, Worker, WorkerEvent
from l2l.schedule import LASTING, Lane, Span, Trace

COPIES_AHEAD = 16
SEGMENT_GROWTH = 20 << 20  # bytes
LEAST_MEMORY = 64 << 20  # that the allocator is left, whatever the limit
MAX_CONTEXT = 1 << 30  # what else is taken when a device is opened, others have taken
LITTLE_MEMORY = 1 << 30
LITTLE_CACHE = 4 << 20
MARKED_LAUNCHES = 128  # between two marks, by which it is known how many are done
SWITCH_SECONDS = 0.0002
NOTHING_TO_DO: Final = contextlib.nullcontext()
LAUNCHES: Final[Mapping[str, int]] = {"forward": 40, "backward": 80, "loss": MAX_LAUNCHES}
"""Kernels that compiled lines launch, at most: a layer makes about 15 and 50; other lines: 8."""


def _finish_before_compiling(workers: Sequence[weakref.ref[Worker]], _: object) -> None:
    for worker in workers:
        found = worker()
        if found is not None:
            found.finish()


def _forget_callback(callback: Callable[..., None]) -> None:
    from torch._dynamo.callback import callback_handler

    with contextlib.suppress(ValueError):  # torch was reset
        callback_handler.remove_start_callback(callback)


def _unregister(buffers: list[tuple[int, object]]) -> None:
    for address, _ in buffers:
        torch.cuda.cudart().cudaHostUnregister(address)
    buffers.clear()


def _allocate_without_the_lock() -> None:
    """See [Note: the interpreter's lock]."""
    guards: Any = torch._C._dynamo.guards
    if hasattr(guards, "_empty_strided_cuda"):
        guards._empty_strided_cuda = _empty_strided


def _empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    with torch._C.DisableTorchFunction():
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _redirect_states() -> None:
    """See [Note: state] in random_numbers.py: these are of the thread's own generators, if any."""
    if getattr(torch.cuda.get_rng_state, "__name__", "") == "_get_rng_state":
        return
    get_state, set_state = torch.cuda.get_rng_state, torch.cuda.set_rng_state
    seed_one, seed_all = torch.cuda.manual_seed, torch.cuda.manual_seed_all

    def _get_rng_state(device: int | str | torch.device = "cuda") -> Tensor:
        own = _own_generator(device)
        return get_state(device) if own is None else own.get_state()

    def _set_rng_state(new_state: Tensor, device: int | str | torch.device = "cuda") -> None:
        own = _own_generator(device)
        if own is None:
            set_state(new_state, device)
        else:
            own.set_state(new_state)

    def _manual_seed(seed: int) -> None:
        own = _own_generator("cuda")
        (seed_one if own is None else own.manual_seed)(int(seed))

    def _manual_seed_all(seed: int) -> None:
        (seed_all if current() is None else _manual_seed)(int(seed))

    for module in (torch.cuda, torch.cuda.random):
        vars(module).update(get_rng_state=_get_rng_state, set_rng_state=_set_rng_state)
        vars(module).update(manual_seed=_manual_seed, manual_seed_all=_manual_seed_all)


def _own_generator(device: int | str | torch.device) -> torch.Generator | None:
    """The generator that stands for that of a device in this thread, if any does."""
    numbers = current()
    if numbers is None:
        return None
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return numbers.generator(torch.device("cuda", _number_of(found)))


def _number_of(device: torch.device) -> int:
    index: int | None = device.index  # None for plain "cuda"
    return torch.cuda.current_device() if index is None else index


@final
class CudaDevice(Drawing):
    """Streams of one CUDA device."""

    growth_bytes = SEGMENT_GROWTH
    sums_products = True

    def __init__(self, torch_device: torch.device) -> None:
        torch.cuda.init()  # before it there are no generators
        number = _number_of(torch_device)
        super().__init__(
            torch.device("cuda", number),
            RandomNumbers([torch.default_generator, torch.cuda.default_generators[number]]),
        )
        _redirect_states()
        self._others_bytes = max(0, self._beside_bytes() - MAX_CONTEXT)
        # The update lane comes last: it fails because those of the disk have.
        counters = {lane: StreamCounter() for lane in (Lane.WRITE, Lane.READ, Lane.UPDATE)}
        self._workers = {
            lane: Worker(lane.value, on_event=one.advance) for lane, one in counters.items()
        }
        self._worker = self._workers[Lane.UPDATE]
        self._counters = {self._workers[lane]: one for lane, one in counters.items()}
        self._sources = (self._workers[Lane.WRITE], self._workers[Lane.READ])
        # The compute lane is the caller's stream: libraries keep a workspace for every stream they
        # ever saw. Copies are short and the kernels that wait for them long: copies go first. State
        # that is lent comes after weights that a pass waits for.
        self._streams: dict[Lane, torch.cuda.Stream] = {
            lane: torch.cuda.Stream(self.torch_device, priority=0 if lane is Lane.LEND else -1)
            for lane in Lane
            if lane is not Lane.COMPUTE and lane not in LASTING
        }
        self._streams[Lane.COMPUTE] = torch.cuda.current_stream(self.torch_device)
        self._host_buffers: list[tuple[int, object]] = []  # address, and what owns the memory
        self._host_work = HostWork()
        self._launched: deque[torch.cuda.Event] = deque()  # marks on the compute lane
        self._num_unmarked = 0  # launches there since the last mark
        # During a step: the stream that was the current one, and Python's own switch interval.
        self._callers: tuple[torch.cuda.Stream, float] | None = None
        self._waited: Event | None = None  # what the host thread has waited for, or will, last
        self._marks: list[tuple[Lane, str, torch.cuda.Event, torch.cuda.Event]] | None = None
        self._holds_back = False  # whether another thread compiles
        self._before_compiling = partial(
            _finish_before_compiling, [weakref.ref(one) for one in self._workers.values()]
        )
        self._watch_compilation()
        _allocate_without_the_lock()
        # For a device that is dropped without `close`.
        for worker in self._workers.values():
            weakref.finalize(self, worker.dismiss).atexit = False
        for counter in self._counters.values():
            weakref.finalize(self, counter.close).atexit = False
        weakref.finalize(self, _unregister, self._host_buffers).atexit = False
        weakref.finalize(self, _forget_callback, self._before_compiling).atexit = False

    def _watch_compilation(self) -> None:
        """See [Note: the interpreter's lock]."""
        # The import takes a second, which is lost only where something will be compiled.
        from torch._dynamo.callback import callback_handler

        if self._before_compiling not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._before_compiling)

    def submit(self, lane: Lane, text: str, work: Work) -> None:
        """Launch work on the stream of its lane, once few enough launches are queued."""
        if lane in self._workers:
            self._workers[lane].submit(text, work)
            return
        verb = text.partition(" ")[0]
        num_launches = MAX_LAUNCHES if verb in self.long_lines else LAUNCHES.get(verb, 8)
        self._host_work.launch(lane, num_launches)
        stream = self._streams[lane]
        if lane is Lane.COMPUTE:
            self._keep_short(stream, num_launches)
        looks = torch._C._autograd._profiler_enabled()  # torch's profiler
        named = torch.profiler.record_function(text) if looks else NOTHING_TO_DO
        with named, self._on(stream):
            if self._marks is None:
                work()
                return
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            work()
            end.record(stream)
            self._marks.append((lane, text, start, end))

    def _on(self, stream: torch.cuda.Stream) -> contextlib.AbstractContextManager[object]:
        """Makes a stream the current one; within a step that is the compute lane's already."""
        if self._callers is None:
            return torch.cuda.stream(stream)
        compute = self._streams[Lane.COMPUTE]
        return NOTHING_TO_DO if stream is compute else Turn(stream, compute)

    def _leave(self) -> None:
        """Let stream and switch interval be those from before the step."""
        if self._callers is not None:
            stream, switch_seconds = self._callers
            torch.cuda.set_stream(stream)
            sys.setswitchinterval(switch_seconds)
            self._callers = None

    def _keep_short(self, stream: torch.cuda.Stream, num_launches: int) -> None:
        """Wait, without the interpreter's lock, until the compute lane's queue is short enough."""
        if self._num_unmarked >= MARKED_LAUNCHES:
            mark = torch.cuda.Event(blocking=True)
            mark.record(stream)
            self._launched.append(mark)
            self._num_unmarked = 0
        self._num_unmarked += num_launches
        while len(self._launched) > MAX_LAUNCHES // MARKED_LAUNCHES:
            self._launched.popleft().synchronize()

    @contextlib.contextmanager
    def tracing(self) -> Iterator[Trace]:
        """Measure what streams and the host thread do inside the block."""
        trace = Trace()
        torch.cuda.synchronize(self.torch_device)
        origin, began = torch.cuda.Event(enable_timing=True), time.perf_counter()
        origin.record(self._streams[Lane.COMPUTE])
        marks = self._marks = []
        times = {lane: list[tuple[str, float, float]]() for lane in LASTING}
        for lane, worker in self._workers.items():
            worker.times = times[lane]
        try:
            yield trace
            torch.cuda.synchronize(self.torch_device)
            for worker in self._workers.values():
                worker.record().synchronize()
        finally:
            self._marks = None
            for worker in self._workers.values():
                worker.times = None
        for lane, text, *events in marks:
            start, end = (origin.elapsed_time(event) / 1e3 for event in events)
            trace.spans.append(Span(lane.value, text, start, end))
        trace.spans += [
            Span(lane.value, text, start - began, end - began)
            for lane, spans in times.items()
            for text, start, end in spans
            if text != WAITING
        ]

    def record(self, lane: Lane) -> Event:
        """An event on the stream of a lane, or on the host thread."""
        if lane in self._workers:
            return self._workers[lane].record()
        event = CudaEvent(after=self._host_work.of(lane), sources=self._sources)
        event.event.record(self._streams[lane])
        return event

    def wait(self, lane: Lane, event: Event) -> None:
        """Hold a stream, or the host thread."""
        if lane is Lane.UPDATE:
            if event is not self._waited:
                self._worker.submit(WAITING, event.synchronize)
                self._waited = event
        elif lane in self._workers:
            self._workers[lane].submit(WAITING, event.synchronize)
        elif isinstance(event, CudaEvent):
            self._host_work.follow(lane, event.after)
            self._streams[lane].wait_event(event.event)
        elif self._holds_back:
            assert isinstance(event, WorkerEvent), type(event)
            event.synchronize()
        else:
            assert isinstance(event, WorkerEvent), type(event)
            self._host_work.follow(lane, (event,))
            self._counters[event.worker].wait(self._streams[lane], event)

    @override
    def hold_back(self, is_compiled: bool) -> None:
        """See [Note: the interpreter's lock]; what waits already, waits no longer than this."""
        if is_compiled:
            for worker in self._workers.values():
                worker.finish()
        self._holds_back = is_compiled

    @override
    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """The thread's device is this one."""
        with torch.cuda.device(self.torch_device), super().beside():
            yield

    def begin(self) -> None:
        """Let all streams follow the current one, and the compute lane be that."""
        for worker in self._workers.values():
            worker.raise_failure()
        self._watch_compilation()  # again, if torch was reset
        current = torch.cuda.current_stream(self.torch_device)
        for lane, stream in self._streams.items():
            self._host_work.follow(lane, self._host_work.of(Lane.COMPUTE))
            stream.wait_stream(current)
        if self._callers is None:
            self._callers = current, sys.getswitchinterval()
            sys.setswitchinterval(min(SWITCH_SECONDS, self._callers[1]))
            torch.cuda.set_stream(self._streams[Lane.COMPUTE])

    def finish(self) -> None:
        """Let the caller's stream follow all others."""
        self._leave()
        current = torch.cuda.current_stream(self.torch_device)
        for lane, stream in self._streams.items():
            self._host_work.follow(Lane.COMPUTE, self._host_work.of(lane))
            current.wait_stream(stream)

    def empty(self, nbytes: int) -> Tensor:
        """Memory from the pool of the stream that asks, which is the first to write it."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def host_empty(self, nbytes: int, *, registered: bool) -> Tensor:
        """Anonymous memory with huge pages, touched by all cores.

        The least has a page of its own, to be registered: what is not is read when a copy is
        submitted, whatever its stream waits for.
        """
        buffer, pages = anonymous_pages(max(nbytes, PAGE_BYTES))
        if registered:
            self._register(buffer, pages)
        return buffer[:nbytes]

    def register(self, buffer: Tensor) -> None:
        """Register memory, if that was not done."""
        known = {address for address, _ in self._host_buffers}
        if buffer.nbytes and buffer.data_ptr() not in known:
            self._register(buffer, buffer)

    def forget(self, buffer: Tensor) -> None:
        """Undo that."""
        kept = [one for one in self._host_buffers if one[0] != buffer.data_ptr()]
        if len(kept) < len(self._host_buffers):
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
            self._host_buffers[:] = kept  # the list that is given back at the end

    def _register(self, buffer: Tensor, owner: object) -> None:
        error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
        if int(error) != 0:
            raise RuntimeError(
                f"the driver refused to register {buffer.nbytes} bytes of host memory (error "
                f"{int(error)}). Expected enough lockable memory: see 'ulimit -l'."
            )
        self._host_buffers.append((buffer.data_ptr(), owner))

    def host_record(self, *shape: int) -> Tensor:
        """Pinned memory, NaN."""
        return torch.full(shape, torch.nan, pin_memory=True)

    def pinned(self, tensor: Tensor) -> Tensor:
        """A pinned copy, also of what is pinned: the caller may fill that anew too early."""
        if tensor.is_cuda:
            return tensor
        return tensor.clone().pin_memory() if tensor.is_pinned() else tensor.pin_memory()

    @property
    def has_failed(self) -> bool:
        """Whether a host thread has failed."""
        return any(worker.has_failed for worker in self._workers.values())

    def recover(self) -> None:
        """Forget what has failed on host threads."""
        for worker in self._workers.values():
            worker.finish()
        for worker in self._workers.values():
            worker.recover()
        self._waited = None  # or what was dropped

    def abort(self) -> None:
        """Wait for all streams and for host threads."""
        self._leave()
        torch.cuda.synchronize(self.torch_device)
        for worker in self._workers.values():
            worker.finish()
        self._waited = None

    def poison(self, buffer: Tensor) -> None:
        """Memory is left as it is."""

    @property
    def name(self) -> str:
        """The driver's."""
        return torch.cuda.get_device_name(self.torch_device)

    def _beside_bytes(self) -> int:
        """What is taken of the device, by whomever, beside what torch has reserved."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return total - free - torch.cuda.memory_reserved(self.torch_device)

    def context_bytes(self) -> int:
        """What the driver counts for this process beside what torch has reserved.

        That is its context, libraries, and kernels that were loaded so far. What other processes
        had when the device was opened is not counted, as far as that can be told apart.
        """
        return max(0, self._beside_bytes() - self._others_bytes)

    def total_bytes(self) -> int:
        """Memory that the driver sees."""
        return torch.cuda.mem_get_info(self.torch_device)[1]

    def free_bytes(self) -> int:
        """What the driver has left, and what torch keeps unused; not what others were promised."""
        free = torch.cuda.mem_get_info(self.torch_device)[0]
        reserved = torch.cuda.memory_reserved(self.torch_device)
        taken = torch.cuda.memory_allocated(self.torch_device)
        promised = max(0, self.promised_bytes() - taken)
        return max(0, free + reserved - taken - promised)

    def promised_bytes(self) -> int:
        """What other engines of this process may take besides."""
        return LIMITS.of_others(self.torch_device, self)

    def give_back(self) -> None:
        """Empty the cache of the allocator."""
        torch.cuda.empty_cache()

    def limit_memory(
        self, nbytes: int | None, *, context_bytes: int = 0, group: object = None
    ) -> None:
        """Limit the allocator to what all engines of the process may take.

        Args:
            nbytes: of an engine, its context among them; None: no limit.
            context_bytes: of these, what is not the allocator's.
            group: of engines that take it in turns.
        """
        # Segments grow by so much at a time, which torch does not count when it looks at the limit.
        if nbytes is not None:
            nbytes = max(nbytes - context_bytes - SEGMENT_GROWTH, LEAST_MEMORY)
        was_limited = LIMITS.total(self.torch_device) is not None
        LIMITS.set(self.torch_device, self, nbytes, group)
        self._apply_limit(was_limited=was_limited)

    def _apply_limit(self, *, was_limited: bool) -> None:
        nbytes = LIMITS.total(self.torch_device)
        if nbytes is None:
            if was_limited:  # else a limit that there may be is the user's own
                torch.cuda.set_per_process_memory_fraction(1.0, self.torch_device)
            return
        # Segments that grow leave no holes between them that a larger tensor does not fit into.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), self.torch_device)
        if nbytes < LITTLE_MEMORY:  # compare kernels without a tensor as large as the cache
            from torch._inductor.runtime.benchmarking import benchmarker

            vars(benchmarker)["L2_cache_size"] = LITTLE_CACHE

    def reset_peak(self) -> None:
        """Begin a new peak of the allocator's."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_bytes(self) -> int:
        """Most bytes that this process has taken: reserved by the allocator, and its context."""
        return torch.cuda.max_memory_reserved(self.torch_device) + self.context_bytes()

    def close(self) -> None:
        """Wait for everything, and give back thread, limit and registered memory."""
        _forget_callback(self._before_compiling)
        for worker in self._workers.values():
            worker.close()
        torch.cuda.synchronize(self.torch_device)
        was_limited = LIMITS.total(self.torch_device) is not None
        LIMITS.drop(self.torch_device, self)
        self._apply_limit(was_limited=was_limited)
        for counter in self._counters.values():
            counter.close()
        _unregister(self._host_buffers)


@contextlib.contextmanager
def busy_link(nbytes: int = 256 << 20) -> Iterator[bool]:
    """Copy both ways without pause meanwhile; yields whether there is a link to keep busy."""
    if not torch.cuda.is_available():
        yield False
        return
    device = CudaDevice(torch.device("cuda"))
    stop, copies = threading.Event(), list[tuple[Lane, Work]]()
    for lane in (Lane.FETCH, Lane.DRAIN):
        source, target = device.host_empty(nbytes, registered=True), device.empty(nbytes)
        if lane is Lane.DRAIN:
            source, target = target, source
        copies.append((lane, partial(target.copy_, source, non_blocking=True)))

    def copy() -> None:
        # Many copies are queued ahead, so that the link stays busy while this thread cannot run.
        queued: deque[Event] = deque()
        while not stop.is_set():
            for lane, work in copies:
                for _ in range(COPIES_AHEAD):
                    device.submit(lane, "copy", work)
                queued.append(device.record(lane))
            while len(queued) > 2 * len(copies):
                queued.popleft().synchronize()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield True
    finally:
        stop.set()
        thread.join()
        device.close()


def num_devices() -> int:
    """How many CUDA devices this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
