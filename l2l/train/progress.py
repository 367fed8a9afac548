"""What a run shows and writes down while it goes: a display, `metrics.jsonl`, TensorBoard events.

`Progress` is told of every step, evaluation and checkpoint, and passes it on to all three. Reading
a step's numbers may wait for the device, so a step is read only when `NUM_BEHIND` more have been
handed to the device: by then it has ended, and nothing waits.

`metrics.jsonl` has one JSON object a line, in the order of the run:

    {"kind": "step", "step": 7, "loss": 2.31, "learning_rate": 2e-05, "gradient_norm": 1.2, ...}
    {"kind": "evaluation", "step": 7, "loss": 2.4, "perplexity": 11.02, "seconds": 3.1}
    {"kind": "checkpoint", "step": 7, "folder": "checkpoints/step-00000007"}

A checkpoint's line, and all lines before it, are written before the checkpoint is begun. A run that
goes on from step 7 drops what was written after it, so that the file of a run that was interrupted
any number of times is that of an uninterrupted one, but for `seconds`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TextIO, final

from typing_extensions import override

from l2l.device import format_bytes
from l2l.files import write_file

NUM_BEHIND = 2  # steps that are submitted before a step's numbers are read
WINDOW = 20  # steps over which speed is averaged
LONGEST_SILENCE_SECONDS = 60.0  # between plain lines
REFRESH_SECONDS = 0.2  # of the live display
INTERRUPTED = "interrupted"

Record = dict[str, Any]


# --------------------------------------------------------------------------------------------------
# Displays


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


@final
class LiveDisplay(Display):
    """A bar and a table that are redrawn in place, by rich."""

    def __init__(self, stream: TextIO) -> None:
        """Nothing is drawn before the first step."""
        self._console = _rich("console").Console(file=stream)
        self._live: Any = None
        self._last = 0.0

    @override
    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @override
    def show(self, status: Status) -> None:
        ends = status.step == status.num_steps
        if self._live is None:
            self._live = _rich("live").Live(console=self._console, auto_refresh=False)
            self._live.start()
        elif not ends and time.monotonic() - self._last < REFRESH_SECONDS:
            return
        self._last = time.monotonic()
        self._live.update(_drawn(status), refresh=True)

    @override
    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def open_display(stream: TextIO, *, every_steps: int) -> Display:
    """A live display if the stream is a terminal and rich is installed, else plain lines."""
    if stream.isatty() and importlib.util.find_spec("rich") is not None:
        return LiveDisplay(stream)
    return PlainDisplay(stream, every_steps=every_steps)


def _rich(name: str) -> Any:
    importlib.import_module("rich")
    return importlib.import_module(f"rich.{name}")


def _drawn(status: Status) -> Any:
    table = _rich("table").Table.grid(padding=(0, 2))
    bar = _rich("progress_bar").ProgressBar(total=status.num_steps, completed=status.step, width=40)
    table.add_row(f"step {status.step}/{status.num_steps}", bar)
    for name, value in status.parts():
        table.add_row(name, _rich("text").Text(value))
    return table


def format_seconds(seconds: float) -> str:
    """A time for people: `about 2 h 5 min`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"about {seconds:.0f} s"
    return f"about {minutes} min" if minutes < 90 else f"about {minutes // 60} h {minutes % 60} min"


# --------------------------------------------------------------------------------------------------
# What is written


def read_metrics(path: Path) -> list[Record]:
    """The lines of a `metrics.jsonl`; a last one that is torn is left out.

    Raises:
        ValueError: a line is not JSON.
    """
    records: list[Record] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                record = json.loads(line.decode())
                if not isinstance(record, dict) or not {"kind", "step"} <= record.keys():
                    raise ValueError("found no object with kind and step")
                records.append(record)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # it had no end: the run was killed while it was written
                break
            raise ValueError(
                f"{path}, line {number}, is not JSON as l2l train writes it: {error}. Delete the "
                "line, or the file: training does not need it."
            ) from error
    return records


@final
class MetricsFile:
    """`metrics.jsonl`, appended to line by line."""

    def __init__(self, path: Path, *, step: int) -> None:
        """Go on after a step: lines after it, and about interruptions before it, go.

        Raises:
            ValueError: what is there is not such a file.
        """
        before = read_metrics(path) if step and path.exists() else []
        kept = [one for one in before if one["step"] <= step and INTERRUPTED not in one]
        self.num_skipped = sum(bool(record.get("skipped")) for record in kept)
        self.bad_steps = {record["step"] for record in kept if is_bad(record)}
        self.notes = [record for record in kept if record["kind"] != "step"]
        write_file(path, "".join(map(_line, kept)))
        self._file = path.open("a")

    def write(self, record: Record) -> None:
        """Append a line; it is there even if this process is killed afterwards."""
        if record["kind"] != "step":
            self.notes.append(record)
        self.num_skipped += bool(record.get("skipped"))
        if is_bad(record):
            self.bad_steps.add(record["step"])
        self._file.write(_line(record))
        self._file.flush()

    def sync(self) -> None:
        """Make what was written outlast the machine's end too."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def is_bad(record: Record) -> bool:
    """Whether a line is of a step that could not be made; the search for a loss scale is none.

    In float16 a gradient that is not finite halves the scale. If it still is with a scale of 1, it
    is not because of the scale; and a loss that is not finite never is.
    """
    return bool(record.get("skipped")) and (
        record["loss"] is None or record.get("loss_scale", 1.0) <= 1.0
    )


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


class Events(Protocol):
    """What is used of torch's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """A point of a curve."""

    def close(self) -> None:
        """Write what is left."""


def open_events(folder: Path, *, step: int) -> Events | None:
    """TensorBoard's events after a step; None if tensorboard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    found: Events = SummaryWriter(str(folder), purge_step=step + 1)
    return found


# --------------------------------------------------------------------------------------------------
# Progress


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
