"""Benchmarks run each system in a process of its own, which ends with ours whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import FrameType


@contextlib.contextmanager
def started(
    command: Sequence[str], *, errors: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process whose output can be read; it and what it has started are killed if we are.

    Args:
        command: what to run.
        errors: where its errors go, as in `subprocess`; None: to ours.
    """
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            start_new_session=True,  # what it starts itself can be ended with it
        ) as process:
            try:
                yield process
            except BaseException:
                kill(process)
                raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _: FrameType | None) -> None:
    """Let SIGTERM be an exception, as Ctrl-C is."""
    sys.exit(128 + number)


def kill(process: subprocess.Popen[str]) -> str:
    """End a process that was `started`, and those it has started; returns what it printed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[0]


def run(command: Sequence[str], time_limit_seconds: float) -> tuple[str, str, str]:
    """Run a process to its end; returns what it printed, its errors, and how it ended."""
    with started(command, errors=subprocess.PIPE) as process:
        try:
            output, errors = process.communicate(timeout=time_limit_seconds)
        except subprocess.TimeoutExpired:
            return kill(process), "", f"not done after {time_limit_seconds:g} s (--time-limit)"
    return output, errors, f"exit status {process.returncode}"
