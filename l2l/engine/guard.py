"""Who may use an engine, and when: one process, one thread at a time, and signals between lines.

[Note: interrupts] A signal's handler may raise, as Ctrl-C does, between any two instructions: also
where a unit was updated and nobody has noted it. So in the main thread, signals whose handlers are
Python functions are *held* while an operation runs. Of a step, handlers are called between two
lines of the schedule as long as nothing of the step was updated: it is given up, and the engine is
as it was. After that the step goes to its end and is counted, then they are called. A second Ctrl-C
does not wait.

That one, and exceptions that another thread injects, can still come anywhere. Therefore an engine
counts as torn before the first line that updates anything is submitted, and as whole only when the
step is counted; nothing needs to happen in between for that to be right. The same holds here: an
operation runs if its frame is on a stack, whatever its lock says.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, TypeVar, cast, final

import torch
from torch import overrides
from torch.utils import _python_dispatch

HELD = (signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
INSISTING = (signal.SIGINT, signal.SIGTERM)  # a second one does not wait

MODES: tuple[Any, ...] = (overrides, _python_dispatch)
Handler = Callable[[int, FrameType | None], Any]
Method = TypeVar("Method", bound=Callable[..., Any])


def guarded(
    name: str, *, holds: bool = True, within: str | None = None
) -> Callable[[Method], Method]:
    """Make a method of an object that has a `_guard` an operation of it, which runs alone.

    Args:
        name: what it is called in errors.
        holds: whether signals are held while it runs.
        within: the operation that may use it.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def operation(owner: Any, /, *args: Any, **kwargs: Any) -> Any:
            guard: Guard = owner._guard
            if within is not None and guard.is_within(within):
                return method(owner, *args, **kwargs)
            guard.enter(name, holds=holds)
            try:
                with _outside_inference():
                    return method(owner, *args, **kwargs)
            except BaseException:
                guard.restore_torch()
                raise
            finally:
                guard.leave()

        _CODES.add(getattr(operation, "__code__"))  # noqa: B009 (mypy knows no such thing of it)
        return cast(Method, operation)

    return decorate


def _outside_inference() -> contextlib.AbstractContextManager[object]:
    """Tensors that an engine keeps are to be of use outside of `torch.inference_mode()`, too."""
    if not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    left = contextlib.ExitStack()
    left.enter_context(torch.inference_mode(mode=False))
    left.enter_context(torch.no_grad())
    return left


_CODES: set[CodeType] = set()  # of operations: all the same one


@final
class Guard:
    """Lets the operations of one object run one at a time, in the process that made it."""

    def __init__(self) -> None:
        self._process, self._home = os.getpid(), threading.get_ident()
        self._lock = threading.Lock()
        self._name = ""  # of the operation that has the lock
        self._thread = 0  # where that runs
        self._held: dict[int, Handler] = {}  # handlers that are replaced meanwhile
        self._noted: list[int] = []  # signals that came meanwhile
        self._modes: tuple[list[list[Any]], bool] | None = None

    def enter(self, name: str, *, holds: bool) -> None:
        """Begin an operation.

        Raises:
            RuntimeError: this is another process, or another operation runs.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"{name} was called in forked process {os.getpid()}, but the engine was created in "
                f"process {self._process}, with its threads. Use 'spawn', and create one here."
            )
        if not self._lock.acquire(blocking=False):
            frame, where = sys._current_frames().get(self._thread), "on another thread"
            if self._thread == threading.get_ident():
                frame = sys._getframe(2)  # without the operation that asks
                where = "and this is called from inside it (a loss function, say)"
            if self._is_on(frame):
                raise RuntimeError(
                    f"{name} was called while {self._name} is running {where}. An engine is not "
                    "thread-safe: wait for the other call, or use one engine per thread."
                )
        self._name, self._thread = name, threading.get_ident()
        self._modes = _torch_modes(), torch.is_grad_enabled()
        if holds:
            self._hold()

    def leave(self) -> None:
        """End the operation; then signals that came meanwhile are handled."""
        self._thread = 0
        if self._lock.locked():
            self._lock.release()
        self._let_go()

    def is_within(self, name: str) -> bool:
        """Whether this thread is inside an operation."""
        return self._name == name and self._thread == threading.get_ident()

    @property
    def operation(self) -> str:
        """What runs, or ran last."""
        return self._name

    @property
    def runs_here(self) -> bool:
        """Whether this thread is inside any operation."""
        return self._thread == threading.get_ident()

    def deliver(self) -> None:
        """Handle signals that came: nothing is half done now."""
        while self._noted:
            number = self._noted.pop(0)
            handler = self._held.get(number)
            if handler is not None:
                handler(number, sys._getframe(1))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals in the block, in an operation that otherwise does not."""
        self._hold()
        try:
            yield
        finally:
            self._let_go()

    def restore_torch(self) -> None:
        """Give this thread the modes of torch that it had: an interrupt may have left others."""
        if self._modes is None:
            return
        stacks, has_gradients = self._modes
        torch.set_grad_enabled(has_gradients)
        for kind, wanted, found in zip(MODES, stacks, _torch_modes(), strict=True):
            if list(map(id, found)) != list(map(id, wanted)):
                for _ in found:
                    kind._pop_mode()
                for mode in wanted:
                    kind._push_mode(mode)

    def drop(self, close: Callable[[], None], *, alone: bool) -> None:
        """Close the object, which nobody refers to any more, and say so.

        Args:
            close: gives the weights back.
            alone: whether no other rank must do so, too.
        """
        if os.getpid() != self._process:  # of a fork, which has no threads
            return
        if threading.get_ident() == self._home:
            _close_dropped(close, alone=alone)
        else:  # perhaps a thread of the object's own, which closing waits for
            done = functools.partial(_close_dropped, close, alone=alone)
            threading.Thread(target=done, name="l2l-drop").start()

    def _is_on(self, frame: FrameType | None) -> bool:
        """Whether an operation of this object is on a stack."""
        while frame is not None:
            if frame.f_code in _CODES and frame.f_locals.get("guard") is self:
                return True
            frame = frame.f_back
        return False

    def _hold(self) -> None:
        """Replace the handlers of signals, in the main thread: they are handled nowhere else."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._noted.clear()
        for number in HELD:
            handler = signal.getsignal(number)
            if callable(handler) and handler != self._note:
                self._held[number] = handler  # first: `_note` looks for it
                signal.signal(number, self._note)

    def _let_go(self) -> None:
        if not self._held or threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._held.items():
            if signal.getsignal(number) == self._note:  # nobody else has set another
                signal.signal(number, handler)
        noted, handlers = [*self._noted], dict(self._held)
        self._noted.clear()
        self._held.clear()
        for number in noted:
            handlers[number](number, sys._getframe(1))

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler meanwhile."""
        handler = self._held.get(number)
        if handler is None:
            return
        insists = number in INSISTING and number in self._noted
        if insists or not self._is_on(frame):
            if insists:
                self._noted.remove(number)
            else:  # an interrupt has kept `leave` from happening
                signal.signal(number, handler)
                del self._held[number]
            handler(number, frame)
        elif number not in self._noted:
            self._noted.append(number)


def _close_dropped(close: Callable[[], None], *, alone: bool) -> None:
    said = "an l2l.Engine was dropped without engine.close()"
    try:
        if not alone:  # others are elsewhere
            raise RuntimeError("several ranks hold them together")
        with warnings.catch_warnings(record=True) as noted:
            close()
    except Exception as error:
        said += f". Its model has lost weights ({error}): go on from a checkpoint."
    else:
        said += "; the weights were given back to its model now."
        said += "".join(f" Also, {one.message}" for one in noted)
    warnings.warn(f"{said} Close engines, or use them in a with block.", stacklevel=4)


def _torch_modes() -> list[list[Any]]:
    """The modes that this thread has, of `MODES`."""
    functions, dispatches = list[Any](), list[Any]()
    if torch._C._len_torch_function_stack():
        functions = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if torch._C._len_torch_dispatch_stack():
        dispatches = _python_dispatch._get_current_dispatch_mode_stack()
    return [functions, dispatches]
