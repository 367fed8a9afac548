"""What people see of a run: plain lines, or what is redrawn in place (live_display.py)."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TextIO

from l2l.device import format_bytes
from l2l.planner import Bounds

SHOWN = (
    "rewards/accuracies",
    "rewards/margins",
    "reward",
    "kl",
)  # measures that are worth the room
LONGEST_SILENCE_SECONDS = 60.0  # between plain lines
PASSING_SECONDS = 5.0  # between two lines about the same work


class Level(IntEnum):
    """How much is said: a display shows what is at most at its own."""

    NEEDED = 0  # what somebody has to know or do
    USUAL = 1
    DETAIL = 2


@dataclass(slots=True, kw_only=True)
class Status:
    """Where a run stands, for people; what is 0 or empty is not known, or not so."""

    step: int
    num_steps: int
    loss: float = math.nan
    learning_rate: float = 0.0
    gradient_norm: float = math.nan
    epoch: float = 0.0  # passes over the data so far
    measures: Mapping[str, float] = field(default_factory=dict)  # what the loss has noted
    tokens_per_second: float = 0.0
    seconds_left: float = 0.0
    peak_bytes: int = 0  # of device memory
    budget_bytes: int = 0
    bounds: Bounds | None = None
    step_seconds: float = 0.0
    num_skipped: int = 0
    evaluation: str = ""  # the last one
    saving: str = ""

    def parts(self) -> list[tuple[str, str]]:
        """Names and values of what is known."""
        memory = [format_bytes(size) for size in (self.peak_bytes, self.budget_bytes) if size]
        parts = {
            "epoch": f"{self.epoch:.2f}" if self.epoch else "",
            "loss": f"{self.loss:.4f}",
            **{name: f"{self.measures[name]:.3f}" for name in SHOWN if name in self.measures},
            "learning rate": f"{self.learning_rate:.2e}" if self.learning_rate else "",
            "gradient norm": "" if math.isnan(self.gradient_norm) else f"{self.gradient_norm:.3f}",
            "speed": f"{self.tokens_per_second:,.0f} tokens/s" if self.tokens_per_second else "",
            "bound by": self._bound_by(),
            "left": format_seconds(self.seconds_left) if self.seconds_left else "",
            "device": " of ".join(memory),
            "skipped": f"{self.num_skipped} steps, not finite" if self.num_skipped else "",
            "evaluation": self.evaluation,
            "saving": self.saving,
        }
        return [(name, value) for name, value in parts.items() if value]

    def _bound_by(self) -> str:
        """The lane that binds, and what share of its rate it reaches."""
        if self.bounds is None:
            return ""
        share = f" at {self.bounds.share(self.step_seconds):.0%}" if self.step_seconds else ""
        return f"{self.bounds.lane}{share}"


class Display:
    """Shows how a run goes: a line every few steps, or when nothing was said for a while."""

    def __init__(self, stream: TextIO, *, every_steps: int, level: Level = Level.USUAL) -> None:
        self._stream = stream
        self._every_steps = every_steps
        self._level = level
        self._last = time.monotonic()
        self._passed: float | None = None  # when work was told of before
        self._last_step = 0

    def say(self, text: str, level: Level = Level.USUAL) -> None:
        """A text that stays, if so much is to be said."""
        if level <= self._level:
            self._write(text)

    def say_passing(self, text: str) -> None:
        """How far some work is that takes a while: now and then such a text is said."""
        now = time.monotonic()
        if self._passed is not None and now - self._passed < PASSING_SECONDS:
            return
        if self._passed is not None:
            self.say(text)
        self._passed = now

    def _write(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def show(self, status: Status) -> None:
        """Where the run stands now."""
        if self._level < Level.USUAL:
            return
        due = status.step % self._every_steps == 0 or status.step == status.num_steps
        due = due or time.monotonic() - self._last >= LONGEST_SILENCE_SECONDS
        if not due or status.step == self._last_step:
            return
        self._last, self._last_step = time.monotonic(), status.step
        shown = [f"step {status.step}/{status.num_steps}"]
        for name, value in status.parts():
            if name not in ("evaluation", "saving"):  # each had a line of its own
                shown.append({"speed": value, "left": f"{value} left"}.get(name, f"{name} {value}"))
        self.say("  ".join(shown))

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._stream.flush()


def open_display(stream: TextIO, *, every_steps: int, level: Level = Level.USUAL) -> Display:
    """A live display if the stream is a terminal and rich is installed, else plain lines."""
    is_live = stream.isatty() and level >= Level.USUAL
    if is_live and importlib.util.find_spec("rich") is not None:
        from l2l.train.live_display import LiveDisplay

        return LiveDisplay(stream, level=level)
    return Display(stream, every_steps=every_steps, level=level)


def near(path: Path) -> Path:
    """A path as short as it is from where one is."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def format_seconds(seconds: float) -> str:
    """A time for people: `about 2 h 5 min`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {minutes} min" if minutes < 90 else f"about {minutes // 60} h {minutes % 60} min"
