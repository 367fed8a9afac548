"""What a run writes down: `metrics.jsonl`, and events for TensorBoard.

`metrics.jsonl` has one JSON object a line, in the order of the run:

    {"kind": "step", "step": 7, "loss": 2.31, "learning_rate": 2e-05, "gradient_norm": 1.2, ...}
    {"kind": "evaluation", "step": 7, "loss": 2.4, "perplexity": 11.02, "seconds": 3.1}
    {"kind": "checkpoint", "step": 7, "folder": "checkpoints/step-00000007"}

A checkpoint's line, and all lines before it, are written before the checkpoint is begun. A run that
goes on from step 7 drops what was written after it, so that the file of a run that was interrupted
any number of times is that of an uninterrupted one, but for `seconds`.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any, Protocol, final

from l2l.files import write_file

INTERRUPTED = "interrupted"

Record = dict[str, Any]


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
