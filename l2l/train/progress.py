"""What happens in a run, passed on to a display, `metrics.jsonl` and TensorBoard.

`metrics.jsonl` has one JSON object a line, in the order of the run:

    {"kind": "step", "step": 7, "loss": 2.31, "learning_rate": 2e-05, "gradient_norm": 1.2, ...}
    {"kind": "evaluation", "step": 7, "loss": 2.4, "perplexity": 11.02, "seconds": 3.1}
    {"kind": "checkpoint", "step": 7, "folder": "checkpoints/step-00000007"}

A checkpoint's line, and all lines before it, are written before the checkpoint is begun. A run that
goes on from step 7 drops what was written after it, so that the file of a run that was interrupted
any number of times is that of an uninterrupted one, but for what is about time and memory:
`seconds`, and, where there is a plan, the lane that is its `bound`, the `share_of_bound` that the
step reaches, and the device's `peak_bytes`, where they have grown. About `NUM_DETAILED` steps of a
run have `layer_norms`, those of the gradients of all layers, null where a layer did not run.
Steps that ran layers as they are, because these were not compiled yet, have `"compiled": false`.

`Progress` is told of every step, evaluation and checkpoint. Reading a step's numbers may wait for
the device, so a step is read only when `NUM_BEHIND` more have been handed to the device: by then it
has ended, and nothing waits.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, final

from l2l.files import write_file
from l2l.run import StepReport
from l2l.train.best import Best
from l2l.train.display import Display, Status
from l2l.train.folder import RunFolder
from l2l.train.measures import NOT_MEASURED, Measured

NUM_BEHIND = 2  # steps that are submitted before a step's numbers are read
WINDOW = 20  # steps over which speed is averaged
NUM_DETAILED = 1000  # steps of a run whose lines have what takes much room
DIGITS = 4  # of a norm that is one of many
INTERRUPTED = "interrupted"  # key of lines that a run which goes on from there drops again
NOT_METRICS = ("kind", "step", "seconds")  # keys of an evaluation's line that everybody knows

Record = dict[str, Any]


def read_metrics(path: Path) -> list[Record]:
    """The lines of a `metrics.jsonl`, none if it is not there; a last one that is torn is left out.

    Raises:
        ValueError: a line is not JSON.
    """
    records: list[Record] = []
    lines = path.read_bytes().split(b"\n") if path.exists() else []
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


class _Unread(NamedTuple):
    """A step that was handed to the device."""

    step: int
    report: StepReport
    measured: Measured  # what the loss has noted
    learning_rate: float
    seconds: float  # until the device took it, which it does when it has finished an earlier one
    written: int  # bytes, to a disk tier


@final
class Progress:
    """Passes on what happens in a run."""

    def __init__(
        self,
        folder: RunFolder,
        display: Display,
        step: int,
        num_steps: int,
        *,
        tensorboard: bool,
        steps_an_epoch: float = math.inf,
        best: Best | None = None,
    ) -> None:
        """The run goes on after `step` of `num_steps`: lines after it go.

        So do those before it that are about interruptions.

        Raises:
            ValueError: the metrics that are there are none.
        """
        self.display = display
        self.folder = folder
        self._steps_an_epoch, self.best = steps_an_epoch, best
        self._unread: deque[_Unread] = deque()
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # tokens, seconds
        self._has_read = False
        self._mark = time.perf_counter()
        self.status = Status(step=step, num_steps=num_steps)  # as of the last step that was read
        self._peak_bytes = 0  # that was written down
        self._bad_steps: set[int] = set()
        self._notes: set[tuple[str, int]] = set()  # lines that are of no step
        before = read_metrics(folder.metrics_file) if step else []
        kept = [one for one in before if one["step"] <= step and INTERRUPTED not in one]
        for record in kept:
            self._count(record)
        write_file(folder.metrics_file, "".join(map(line_of, kept)))
        self._events = open_events(folder.events, step=step) if tensorboard else None
        self._file = folder.metrics_file.open("a")

    def step_begun(
        self,
        step: int,
        report: StepReport,
        *,
        learning_rate: float,
        measured: Measured = NOT_MEASURED,
        written: int = 0,
    ) -> None:
        """A step was handed to the device; its number counts from 1.

        `written`: bytes that were written to the disk tier since the step before.
        """
        noted = _Unread(step, report, measured, learning_rate, self.lap(), written)
        self._unread.append(noted)
        while len(self._unread) > NUM_BEHIND:
            self._read_one()

    def catch_up(self) -> None:
        """Wait for all steps and write them down."""
        if self._unread:
            last = self._unread[-1]
            last.report.gradient_norm  # noqa: B018 (reading it waits)
            self._unread[-1] = last._replace(seconds=last.seconds + self.lap())
        while self._unread:
            self._read_one()

    def is_good(self, step: int) -> bool:
        """Whether a step was read, and was made: the loss and all gradients were finite."""
        return step <= self.status.step and step not in self._bad_steps

    @property
    def num_bad(self) -> int:
        """Steps that were not made, in a row, up to the last one that was read."""
        found = 0
        while self.status.step - found in self._bad_steps:
            found += 1
        return found

    def has(self, kind: str, step: int) -> bool:
        """Whether something of a kind has happened after a step."""
        return (kind, step) in self._notes

    def evaluated(self, step: int, metrics: Mapping[str, float], *, seconds: float) -> None:
        """The model was evaluated after a step."""
        found = {name: _finite(value) for name, value in metrics.items()}
        record = {"kind": "evaluation", "step": step, **found, "seconds": round(seconds, 3)}
        self._write(record)
        self.display.say(f"evaluation {self.status.evaluation}")
        if self._has_read:
            self.display.show(replace(self.status))
        self._scalars(step, {f"evaluation/{name}": value for name, value in metrics.items()})
        self.lap()

    def note(self, kind: str, step: int, **facts: Any) -> None:
        """Anything else that happened; it is known even after a power cut, with all before it."""
        self._write({"kind": kind, "step": step, **facts})
        os.fsync(self._file.fileno())

    def lap(self) -> float:
        """Seconds since it was asked for before; a step's time begins there."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        return seconds

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def _count(self, record: Record) -> None:
        """Know what a line says."""
        self.status.num_skipped += bool(record.get("skipped"))
        if is_bad(record):
            self._bad_steps.add(record["step"])
        if record["kind"] != "step":
            self._notes.add((record["kind"], record["step"]))
        if self.best is not None:
            self.best.see(record)
        if record["kind"] == "evaluation":
            values = {name: value for name, value in record.items() if name not in NOT_METRICS}
            words = (
                f"{name} {'not finite' if value is None else format(value, '.4f')}"
                for name, value in values.items()
            )
            self.status.evaluation = f"after step {record['step']}: {', '.join(words)}"

    def _write(self, record: Record) -> None:
        """Append a line; it is there even if this process is killed afterwards."""
        self._count(record)
        self._file.write(line_of(record))
        self._file.flush()

    def _read_one(self) -> None:
        step, report, measured, learning_rate, seconds, written = self._unread.popleft()
        loss, norm, tokens = report.loss, report.gradient_norm, report.num_tokens
        measures = measured.means()
        record: Record = {
            "kind": "step",
            "step": step,
            "loss": _finite(loss),
            "learning_rate": learning_rate,
            "gradient_norm": _finite(norm),
            **{name: _finite(value) for name, value in measures.items()},
            "tokens": tokens,
            "seconds": round(seconds, 4),
        }
        every = max(1, self.status.num_steps // NUM_DETAILED)
        if step == 1 or step % every == 0:
            record |= _norms(report.layer_norms)
        if self.status.peak_bytes > self._peak_bytes:
            record["peak_bytes"] = self._peak_bytes = self.status.peak_bytes
        if report.compiled is False:
            record["compiled"] = False
        if self.status.bounds is not None and seconds:
            record["bound"] = self.status.bounds.lane
            record["share_of_bound"] = round(self.status.bounds.share(seconds), 4)
        if report.loss_scale != 1.0:
            record["loss_scale"] = report.loss_scale
        if report.skipped:
            record["skipped"] = True
        if written:
            record["disk_written"] = written
        self._write(record)
        if self._has_read:  # the first one is planned, and perhaps compiled
            self._recent.append((tokens, seconds))
        self._has_read = True
        status = self.status
        status.step, status.loss, status.measures = step, loss, measures
        status.learning_rate, status.gradient_norm = learning_rate, norm
        status.epoch = step / self._steps_an_epoch
        speed = tokens / max(seconds, 1e-9)
        numbers = {"loss": loss, "learning_rate": learning_rate, "gradient_norm": norm}
        numbers |= {"tokens_per_second": speed, **measures}
        self._scalars(step, {f"training/{name}": value for name, value in numbers.items()})
        took = sum(seconds for _, seconds in self._recent)
        if took:
            status.tokens_per_second = sum(tokens for tokens, _ in self._recent) / took
            status.step_seconds = took / len(self._recent)
            status.seconds_left = (status.num_steps - step) * took / len(self._recent)
        self.display.show(replace(status))

    def _scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)


def is_bad(record: Record) -> bool:
    """Whether a line is of a step that could not be made; the search for a loss scale is none.

    In float16 a gradient that is not finite halves the scale. If it still is with a scale of 1, it
    is not because of the scale; and a loss that is not finite never is.
    """
    return bool(record.get("skipped")) and (
        record["loss"] is None or record.get("loss_scale", 1.0) <= 1.0
    )


def line_of(record: Record) -> str:
    """A record as a line of a file."""
    return json.dumps(record, allow_nan=False) + "\n"


def _finite(value: float) -> float | None:
    """A number as JSON can have it."""
    return value if math.isfinite(value) else None


def _norms(norms: Mapping[int, float]) -> Record:
    """What a line has of the norms of layers: as many digits as one sees."""
    if not norms:
        return {}
    told = {layer: _finite(float(f"{norm:.{DIGITS}g}")) for layer, norm in norms.items()}
    return {"layer_norms": [told.get(layer) for layer in range(max(told) + 1)]}


def open_events(folder: Path, *, step: int) -> Any:
    """TensorBoard's events after a step; None if tensorboard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1)
