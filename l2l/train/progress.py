"""What happens in a run, passed on to a display, `metrics.jsonl` and TensorBoard.

`Progress` is told of every step, evaluation and checkpoint. Reading a step's numbers may wait for
the device, so a step is read only when `NUM_BEHIND` more have been handed to the device: by then it
has ended, and nothing waits.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

from l2l.train.display import Display, Status
from l2l.train.metrics_file import INTERRUPTED, Events, MetricsFile, Record

NUM_BEHIND = 2  # steps that are submitted before a step's numbers are read
WINDOW = 20  # steps over which speed is averaged


class Report(Protocol):
    """What is read of a step's report."""

    @property
    def loss(self) -> float:
        """Of the whole batch."""

    @property
    def gradient_norm(self) -> float:
        """Before clipping."""

    @property
    def num_tokens(self) -> int:
        """Of the step."""

    @property
    def skipped(self) -> bool:
        """Whether the weights were left alone."""

    @property
    def loss_scale(self) -> float:
        """1 unless the precision is float16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the engine knows of its own."""

    peak_bytes: int | None = None
    budget_bytes: int | None = None
    bound: str | None = None


@dataclass(frozen=True, slots=True)
class _Unread:
    """A step that was handed to the device."""

    step: int
    report: Report
    learning_rate: float
    seconds: float  # until the device took it, which it does when it has finished an earlier one


@final
class Progress:
    """Passes on what happens in a run."""

    def __init__(
        self,
        *,
        display: Display,
        metrics: MetricsFile,
        events: Events | None,
        step: int,
        num_steps: int,
    ) -> None:
        """The run goes on after `step` of `num_steps`."""
        self._display = display
        self._metrics = metrics
        self._events = events
        self._num_steps = num_steps
        self._step = step
        self._unread: deque[_Unread] = deque()
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # tokens, seconds
        self._num_read = 0
        self._loss = math.nan
        self._mark = time.perf_counter()
        self.facts = Facts()
        self.saving = ""
        done = [record for record in metrics.notes if record["kind"] == "evaluation"]
        self._evaluation = _evaluation_text(done[-1]) if done else ""

    def step_begun(self, step: int, report: Report, *, learning_rate: float) -> None:
        """A step was handed to the device; its number counts from 1."""
        seconds = self._lap()
        self._unread.append(_Unread(step, report, learning_rate, seconds))
        while len(self._unread) > NUM_BEHIND:
            self._read_one()

    def catch_up(self) -> None:
        """Wait for all steps and write them down."""
        if self._unread:
            last = self._unread[-1]
            last.report.gradient_norm  # noqa: B018 (reading it waits)
            self._unread[-1] = replace(last, seconds=last.seconds + self._lap())
        while self._unread:
            self._read_one()

    @property
    def num_skipped(self) -> int:
        """Steps that left the weights alone."""
        return self._metrics.num_skipped

    def is_bad(self, step: int) -> bool:
        """Whether a step that was read could not be made: the loss or a gradient was not finite."""
        return step in self._metrics.bad_steps

    def is_good(self, step: int) -> bool:
        """Whether a step was read, and was made."""
        return step <= self._step and not self.is_bad(step)

    @property
    def num_bad(self) -> int:
        """Bad steps in a row, up to the last one that was read."""
        found = 0
        while self.is_bad(self._step - found):
            found += 1
        return found

    @property
    def last_read(self) -> int:
        """The last step whose numbers are known."""
        return self._step

    def has_evaluation(self, step: int) -> bool:
        """Whether there was one after a step."""
        return self._has("evaluation", step)

    def evaluated(self, step: int, metrics: Mapping[str, float], *, seconds: float) -> None:
        """The model was evaluated after a step."""
        record: Record = {"kind": "evaluation", "step": step}
        record |= {name: _finite(value) for name, value in metrics.items()}
        record["seconds"] = round(seconds, 3)
        self._metrics.write(record)
        self._evaluation = _evaluation_text(record)
        self._display.say(f"evaluation {self._evaluation}")
        if self._num_read:
            self._display.show(self._status())
        self._scalars(step, {f"evaluation/{name}": value for name, value in metrics.items()})
        self.resume_clock()

    def has_checkpoint(self, step: int) -> bool:
        """Whether one was begun after a step."""
        return self._has("checkpoint", step)

    def checkpoint_begun(self, step: int, folder: str, *, interrupted: bool = False) -> None:
        """A checkpoint is about to be written; all steps up to it were.

        Args:
            step: the last one.
            folder: of the checkpoint, in the run folder.
            interrupted: whether that is only because the run is stopped: a run that goes on from
                here drops the line again.
        """
        record: Record = {"kind": "checkpoint", "step": step, "folder": folder}
        if interrupted:
            record[INTERRUPTED] = True
        self._metrics.write(record)
        self._metrics.sync()

    def note(self, kind: str, step: int, **facts: Any) -> None:
        """Anything else that happened."""
        self._metrics.write({"kind": kind, "step": step, **facts})

    def resume_clock(self) -> None:
        """What happened since the last step is not counted as the next one's time."""
        self._lap()

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()
        if self._events is not None:
            self._events.close()

    def _has(self, kind: str, step: int) -> bool:
        return any((one["kind"], one["step"]) == (kind, step) for one in self._metrics.notes)

    def _lap(self) -> float:
        """Seconds since it was asked for before."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        return seconds

    def _read_one(self) -> None:
        one = self._unread.popleft()
        step, report, seconds = one.step, one.report, one.seconds
        loss, norm, tokens = report.loss, report.gradient_norm, report.num_tokens
        record: Record = {
            "kind": "step",
            "step": step,
            "loss": _finite(loss),
            "learning_rate": one.learning_rate,
            "gradient_norm": _finite(norm),
            "tokens": tokens,
            "seconds": round(seconds, 4),
        }
        if report.loss_scale != 1.0:
            record["loss_scale"] = report.loss_scale
        if report.skipped:
            record["skipped"] = True
        self._metrics.write(record)
        self._num_read += 1
        if self._num_read > 1:  # the first one is planned, and perhaps compiled
            self._recent.append((tokens, seconds))
        self._loss, self._step = loss, step
        self._scalars(
            step,
            {
                "training/loss": loss,
                "training/learning_rate": one.learning_rate,
                "training/gradient_norm": norm,
                "training/tokens_per_second": tokens / max(seconds, 1e-9),
            },
        )
        self._display.show(self._status())

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)

    def _status(self) -> Status:
        tokens = sum(tokens for tokens, _ in self._recent)
        seconds = sum(seconds for _, seconds in self._recent)
        left = (self._num_steps - self._step) * seconds / max(1, len(self._recent))
        return Status(
            step=self._step,
            num_steps=self._num_steps,
            loss=self._loss,
            tokens_per_second=tokens / seconds if seconds else None,
            seconds_left=left if seconds else None,
            peak_bytes=self.facts.peak_bytes,
            budget_bytes=self.facts.budget_bytes,
            bound=self.facts.bound,
            num_skipped=self.num_skipped,
            evaluation=self._evaluation,
            saving=self.saving,
        )


def _finite(value: float) -> float | None:
    """A number as JSON can have it."""
    return value if math.isfinite(value) else None


def _evaluation_text(record: Record) -> str:
    parts = [
        f"{name} {'not finite' if value is None else format(value, '.4f')}"
        for name, value in record.items()
        if name not in ("kind", "step", "seconds")
    ]
    return f"after step {record['step']}: {', '.join(parts)}"
