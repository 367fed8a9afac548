"""Graphs that are compiled beside the steps, on a thread of their own, while layers run uncompiled.

    first step   code is traced where it is met, on the thread of the step, which takes little; what
                 was traced is queued, and the pass runs as it is
    begin        once a backward pass has met nothing new, a thread compiles all that is queued
    settle       at the beginning of a step: if the thread is done, its programs are used from here
                 on; until then no compiled program runs at all

So a step runs compiled or uncompiled as a whole, but for one that meets new code. Only graphs of
fixed sizes wait: those of any size may find, while they are compiled, what they need of the sizes,
which whoever traced them has to look at before every call. They are compiled where they are met.

[Note: two traces] While torch traces, `nn.Module.__call__` is one of its own, for all threads, and
whoever calls what was compiled is told that this cannot be traced. Modules run as before. Two
traces at once would leave one's function behind for ever, so the thread holds the lock that torch
holds while it compiles; and in a step, which may run code that others have compiled, torch is told
that it is not traced.

[Note: what a thread has] Settings of torch belong to a thread: the compiling one runs in a copy of
the context that has queued the graph. Torch leaves random numbers as they were before it compiled;
so that these are nobody else's, the thread has generators of its own (`Device.beside`). What torch
warns of itself is left out where it comes from this thread: `warnings.catch_warnings` is one for
all threads. Loading a kernel may wait for the device with the interpreter's lock held: meanwhile no
stream waits for the host ([Note: the interpreter's lock] in device/cuda.py).
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor

from l2l.device import Device

Graph = Callable[..., Any]
Make = Callable[[Sequence[Any]], Graph]  # compiles, given examples of the inputs

THREAD: Final = "l2l compiles"
_current: contextvars.ContextVar[Beside | None] = contextvars.ContextVar("beside", default=None)
_threads: list[threading.Thread] = []  # of all engines, that compile now


class NotCompiledYetError(Exception):
    """A program is being compiled: run what it was made of."""


@final
@dataclass(slots=True, eq=False)
class Pending:
    """A graph that is used once its program is ready, from the beginning of a step on."""

    make: Make
    inputs: Sequence[Any]
    on_ready: Callable[[], None]
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    made: Graph | None = None  # on the thread
    failure: str = ""  # words: an exception would keep alive whatever raises it again
    program: Graph | None = None
    is_dropped: bool = False  # its engine was closed before: whoever needs it compiles it

    def compile(self) -> None:
        """On the thread: make the program; what goes wrong is raised to whoever calls it."""
        try:
            self.made = self.context.run(_traced, self.make, self.inputs)
        except BaseException as error:
            self.failure = str(error) or repr(error)

    def __call__(self, *inputs: Any) -> Any:
        """Run the program, if it is there."""
        if self.is_dropped:
            self.is_dropped = False
            self.compile()
            self.program = self.made
        if self.program is not None:
            return self.program(*inputs)
        if self.failure:
            raise RuntimeError(self.failure)
        raise NotCompiledYetError


@final
class Beside:
    """Compiles for one engine."""

    def __init__(self, device: Device) -> None:
        """Nothing is queued."""
        self._device = device
        self._queued: list[Pending] = []
        self._running: list[Pending] = []
        self._thread: threading.Thread | None = None
        self._num_met = 0  # graphs that were queued when the last backward pass ended
        self._is_closed = False
        self.seconds = 0.0  # of the thread
        self.has_waited = False  # whether a pass of this step ran uncompiled because of this
        self.has_settled = False  # whether what the first step has met is ready

    @property
    def is_busy(self) -> bool:
        """Whether programs are being made, and none is to run."""
        return self._thread is not None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A step: graphs that are traced inside the block are queued."""
        from torch._dynamo import config

        self.has_waited = False
        traced = "force_compile_during_fx_trace"  # [Note: two traces]
        told = config.patch({traced: True}) if hasattr(config, traced) else contextlib.nullcontext()
        token = _current.set(self)
        try:
            with told:
                yield
        finally:
            _current.reset(token)
        self.has_settled |= not self._queued and self._thread is None
        self.begin()

    def take(self, make: Make, inputs: Sequence[Any], on_ready: Callable[[], None]) -> Graph:
        """Queue a graph."""
        found = Pending(make, inputs, on_ready)
        self._queued.append(found)
        return found

    def note_backward(self) -> None:
        """A backward pass has ended: begin, if it has met nothing new."""
        if self._queued and len(self._queued) == self._num_met:
            self.begin()
        self._num_met = len(self._queued)

    def begin(self) -> None:
        """Compile what is queued, if nothing is being compiled."""
        if self._thread is not None or not self._queued or self._is_closed:
            return
        self._running, self._queued = self._queued, []
        self._device.hold_back(True)
        # Not a daemon: such a thread is stopped in the middle of torch's code when Python ends.
        self._thread = threading.Thread(target=self._compile, name=THREAD)
        _threads.append(self._thread)
        self._thread.start()

    def _compile(self) -> None:
        from torch._dynamo.convert_frame import compile_lock

        began = time.perf_counter()
        with _without_warnings(), compile_lock, self._device.beside():
            for one in self._running:
                if not self._is_closed:
                    one.compile()
        self.seconds += time.perf_counter() - began

    def settle(self) -> bool:
        """A step begins: use what is ready, if all of it is. Returns whether there is something."""
        self.has_waited = False
        if self._thread is None or self._thread.is_alive():
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Wait until all that is being compiled is ready, and use it."""
        if self._thread is None:
            return
        self._thread.join()
        _threads.remove(self._thread)
        self._device.hold_back(False)
        for one in self._running:
            one.program, one.made = one.made, None
            one.is_dropped = one.program is None and not one.failure
            if one.program is not None:
                one.on_ready()
        self._running, self._thread, self._num_met = [], None, 0
        self.has_settled = True

    def close(self) -> None:
        """Drop what is queued, and wait for what is being compiled: it cannot be stopped."""
        self._is_closed = True
        for one in self._queued:
            one.is_dropped = True
        self._queued.clear()
        self.finish()


def current() -> Beside | None:
    """That of the step that runs on this thread, if it has one."""
    return _current.get()


def must_wait() -> bool:
    """Whether no compiled program may run in this step now."""
    beside = current()
    if beside is None or not beside.is_busy:
        return False
    beside.has_waited = True
    return True


def wait_for_others() -> None:
    """Wait for what other engines compile: a program may run while nothing is traced."""
    for thread in [*_threads]:
        thread.join()


def may_wait(inputs: Sequence[Any]) -> bool:
    """Whether a graph with these inputs is of fixed sizes, and of plain tensors."""
    from torch._subclasses import FakeTensor

    return all(
        type(one) in (Tensor, torch.nn.Parameter, FakeTensor)
        and all(type(size) is int for size in (*one.shape, *one.stride(), one.storage_offset()))
        for one in inputs
    )


def _traced(make: Make, inputs: Sequence[Tensor]) -> Graph:
    """Compile for tensors such as these, of which there is no data.

    In a context as torch has one while it traces: what it keeps on the disk is looked for there.
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        examples = [
            torch.empty_strided(
                one.shape, one.stride(), dtype=one.dtype, device=one.device
            ).requires_grad_(one.requires_grad)
            for one in inputs
        ]
    with tracing(TracingContext(mode)):
        return make(examples)


class _OfThread:
    """What warnings of one thread match: any text."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def match(self, _: str) -> bool:
        return threading.get_ident() == self._thread


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Inside the block this thread warns of nothing."""
    entry: Any = ("ignore", _OfThread(), Warning, None, 0)
    warnings.filters.insert(0, entry)  # type: ignore[attr-defined]
    warnings._filters_mutated()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # somebody has put earlier filters back
            warnings.filters.remove(entry)  # type: ignore[attr-defined]
        warnings._filters_mutated()  # type: ignore[attr-defined]
