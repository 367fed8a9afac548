"""A host thread of a lane: performs work in order, beside whatever submits it."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol, final

Work = Callable[[], object]

WAITING = "wait"  # what the thread does between updates
LOOKING_SECONDS = 0.05  # between two looks at work that takes long
ENDING_SECONDS = 60.0  # that a process waits for an update under way, when it ends


class UpdateFailedError(RuntimeError):
    """Work on the update lane failed; what it was to change is not as it should be."""


class Event(Protocol):
    """The end of some submitted work."""

    def synchronize(self) -> None:
        """Block the calling thread until the work is done."""


@final
class WorkerEvent:
    """Completion of work on the worker thread."""

    def __init__(self, worker: Worker, number: int) -> None:
        self._worker = worker
        self.number = number
        self.is_done = False  # whether the work is done, failed or not
        # Not a threading.Event: one whose wait is interrupted may break whoever sets it.
        self._gate = threading.Lock()
        self._gate.acquire()

    @property
    def worker(self) -> Worker:
        """Whose work it is."""
        return self._worker

    def set(self) -> None:
        """Mark the work as done."""
        self.is_done = True
        self._gate.release()

    def wait(self) -> None:
        """Wait until the work is done, failed or not."""
        while not self.is_done:
            if self._gate.acquire(timeout=LOOKING_SECONDS):
                self._gate.release()  # for others; if this is interrupted, they look themselves

    def synchronize(self) -> None:
        """Wait until the work is done; raises what broke."""
        self.wait()
        self._worker.raise_failure()


@final
class Worker:
    """One host thread that performs work in order; a failure is raised to whoever waits."""

    def __init__(
        self, name: str = "update", *, on_event: Callable[[int], None] | None = None
    ) -> None:
        """Start the thread; `on_event` is told the number of every event that completes."""
        self._on_event = on_event
        self._num_events = 0
        self._queue: queue.SimpleQueue[tuple[str, Work] | WorkerEvent | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self.times: list[tuple[str, float, float]] | None = None  # of each work, while tracing
        self._is_closed = False
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name=f"l2l-{name}", daemon=True)
        self._thread.start()
        _workers.add(self)

    def submit(self, text: str, work: Work) -> None:
        """Append work. After a failure later work is dropped."""
        self._queue.put((text, work))

    def record(self) -> WorkerEvent:
        """An event after the work submitted so far."""
        self._num_events += 1
        event = WorkerEvent(self, self._num_events)
        self._queue.put(event)
        return event

    def finish(self) -> None:
        """Wait until all that was submitted is done, failed or not."""
        if not self._is_closed and threading.current_thread() is not self._thread:
            self.record().wait()

    def raise_failure(self) -> None:
        """Raise what broke on the thread, if anything did."""
        failure = self._failure
        if isinstance(failure, UpdateFailedError):  # says all there is to say
            raise type(failure)(str(failure)) from failure
        if failure is not None:
            raise UpdateFailedError(f"an update on the host failed: {failure!r}") from failure

    @property
    def has_failed(self) -> bool:
        """Whether something broke on the thread."""
        return self._failure is not None

    def recover(self) -> None:
        """Forget a failure, once nothing is left to do."""
        self.finish()
        self._failure = None

    def dismiss(self) -> None:
        """Let the thread end after what it has, without waiting for that."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.put(None)

    def end(self) -> None:
        """Let the thread end after the work under way, and wait for that: the process ends.

        A thread that is still in torch's code when the interpreter goes aborts the process.
        """
        self._is_ending = True
        self.dismiss()
        self._thread.join(ENDING_SECONDS)

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
            elif self._failure is None and not self._is_ending:
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


_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for worker in list(_workers):
        worker.end()
