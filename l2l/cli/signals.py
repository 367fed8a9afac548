"""SIGINT and SIGTERM: who handles them, and what they do while there is nothing to lose.

Python turns Ctrl-C into an exception wherever it happens to be. Libraries that are being imported
swallow it, or make a long traceback of it. So until something is there to be saved the process ends
in the handler itself, with one line and the status that shells expect.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STANDARD_ERROR = 2


class Interrupted(KeyboardInterrupt):
    """A signal has come; its argument is the signal's number."""


Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


def handle(handler: Handler) -> list[Any]:
    """Let one handler have both signals; returns those before. Other threads change nothing."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [signal.signal(number, handler) for number in SIGNALS]


@contextmanager
def handled(handler: Handler) -> Iterator[None]:
    """The same for the time of a block."""
    before = handle(handler)
    try:
        yield
    finally:
        for number, earlier in zip(SIGNALS, before, strict=False):
            signal.signal(number, earlier)


def end_at_once(number: int, *_: object) -> None:
    """A handler, while nothing was written."""
    end(number, "interrupted; nothing was written")


def interrupt(number: int, *_: object) -> None:
    """A handler, where what runs puts in order what it leaves.

    Raises:
        Interrupted: always.
    """
    raise Interrupted(number)


def end(number: int, words: str) -> None:
    """End this process as a signal ends others, with one line. Nothing here may wait."""
    handle(signal.SIG_IGN)
    os.write(STANDARD_ERROR, f"{words}\n".encode())
    os._exit(status_of(number))


def status_of(number: int) -> int:
    """The exit status that shells expect of what a signal has ended."""
    return 128 + number


def let_end() -> None:
    """From now on a signal just ends this process: nothing is left to be put in order."""
    handle(signal.SIG_DFL)
