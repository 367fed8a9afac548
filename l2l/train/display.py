"""What people see of a run: plain lines, or what is redrawn in place (live_display.py)."""

from __future__ import annotations

import importlib.util
import math
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TextIO, final

from typing_extensions import override

from l2l.device import format_bytes

LONGEST_SILENCE_SECONDS = 60.0  # between plain lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where a run stands, for people."""

    step: int
    num_steps: int
    loss: float = math.nan
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    peak_bytes: int | None = None  # of device memory
    budget_bytes: int | None = None
    bound: str | None = None
    num_skipped: int = 0
    evaluation: str = ""  # the last one
    saving: str = ""

    def parts(self) -> list[tuple[str, str]]:
        """Names and values of what is known."""
        found = [("loss", f"{self.loss:.4f}")]
        if self.tokens_per_second is not None:
            found.append(("speed", f"{self.tokens_per_second:,.0f} tokens/s"))
        if self.seconds_left:
            found.append(("left", format_seconds(self.seconds_left)))
        if self.peak_bytes is not None:
            limit = f" of {format_bytes(self.budget_bytes)}" if self.budget_bytes else ""
            found.append(("device", f"{format_bytes(self.peak_bytes)}{limit}"))
        if self.bound is not None:
            found.append(("bound by", self.bound))
        if self.num_skipped:
            found.append(("skipped", f"{self.num_skipped} steps, not finite"))
        if self.evaluation:
            found.append(("evaluation", self.evaluation))
        if self.saving:
            found.append(("saving", self.saving))
        return found


class Display(ABC):
    """Shows how a run goes."""

    @abstractmethod
    def say(self, text: str) -> None:
        """A text that stays."""

    @abstractmethod
    def show(self, status: Status) -> None:
        """Where the run stands now."""

    @abstractmethod
    def close(self) -> None:
        """Leave the terminal as it was."""


@final
class PlainDisplay(Display):
    """A line every few steps, or when nothing was said for a while."""

    def __init__(self, stream: TextIO, *, every_steps: int) -> None:
        self._stream = stream
        self._every_steps = every_steps
        self._last = time.monotonic()
        self._last_step = 0

    @override
    def say(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    @override
    def show(self, status: Status) -> None:
        silence = time.monotonic() - self._last
        due = status.step % self._every_steps == 0 or status.step == status.num_steps
        due = due or silence >= LONGEST_SILENCE_SECONDS
        if not due or status.step == self._last_step:
            return
        self._last, self._last_step = time.monotonic(), status.step
        shown = [
            value if name in ("speed", "left") else f"{name} {value}"
            for name, value in status.parts()
            if name not in ("evaluation", "saving")  # each had a line of its own
        ]
        shown = [f"{text} left" if text.startswith("about") else text for text in shown]
        self.say("  ".join([f"step {status.step}/{status.num_steps}", *shown]))

    @override
    def close(self) -> None:
        self._stream.flush()


def open_display(stream: TextIO, *, every_steps: int) -> Display:
    """A live display if the stream is a terminal and rich is installed, else plain lines."""
    if stream.isatty() and importlib.util.find_spec("rich") is not None:
        from l2l.train.live_display import LiveDisplay

        return LiveDisplay(stream)
    return PlainDisplay(stream, every_steps=every_steps)


def format_seconds(seconds: float) -> str:
    """A time for people: `about 2 h 5 min`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {minutes} min" if minutes < 90 else f"about {minutes // 60} h {minutes % 60} min"
