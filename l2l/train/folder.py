"""The folder of a run: where everything is, who may write there, whether the disk takes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import final

from l2l.device import format_bytes
from l2l.files import sync

LOCK = ".lock"


class TrainingError(ValueError):
    """A run cannot go on; the message says why and what can be done."""


@final
class RunFolder:
    """Where everything of a run is."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.settings_file = root / "run.toml"  # the settings in force
        self.metrics_file = root / "metrics.jsonl"  # what happened
        self.samples_file = root / "samples.jsonl"  # what the model said on the way
        self.plan_file = root / "plan.json"  # what is placed where, and what to expect of it
        self.events = root / "events"  # the same for TensorBoard
        self.checkpoints = root / "checkpoints"  # to go on from
        self.model = root / "model"  # what was trained

    def set_aside(self) -> Path | None:
        """Give what is there another name; None if nothing is."""
        files = (self.settings_file, self.metrics_file, self.samples_file, self.plan_file)
        parts = (*files, self.checkpoints, self.model)
        if not any(part.exists() for part in parts):
            return None
        names = (self.root.with_name(f"{self.root.name}-{n}") for n in range(1, 10**6))
        free = next(name for name in names if not name.exists())
        self.root.rename(free)
        sync(self.root.parent)
        return free

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep others from training in this folder at the same time.

        Raises:
            TrainingError: somebody does, or the folder cannot be written to.
        """
        with contextlib.ExitStack() as holding:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                lock = holding.enter_context((self.root / LOCK).open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TrainingError(
                    f"another process trains in {self.root}. Wait for it, or name another folder "
                    "with --output."
                ) from error
            except OSError as error:
                raise TrainingError(
                    f"cannot write to the run folder {self.root}: {error.strerror or error}. Name "
                    "another one with --output."
                ) from error
            holding.callback(self.forget_if_empty)
            yield

    def forget_if_empty(self) -> None:
        """Leave nothing where nothing was written."""
        with contextlib.suppress(OSError):
            if [path.name for path in self.root.iterdir()] == [LOCK]:
                (self.root / LOCK).unlink()
                self.root.rmdir()

    def check_disk(
        self, nbytes: int, export_bytes: int, *, present: int, saves: int, keep: int
    ) -> None:
        """Refuse a disk that is too small for what a run is still to write.

        Args:
            nbytes: of a checkpoint.
            export_bytes: of the exported model; 0: none is.
            present: checkpoints that are there.
            saves: checkpoints that are still to come.
            keep: how many are kept.

        Raises:
            TrainingError: it is.
        """
        more, more_at_last = checkpoints_to_come(present, saves, keep)
        checkpoints, model = (_existing(path) for path in (self.checkpoints, self.model))
        needs = {checkpoints: more * nbytes, model: export_bytes}
        if os.stat(checkpoints).st_dev == os.stat(model).st_dev:
            needs = {checkpoints: max(more * nbytes, more_at_last * nbytes + export_bytes)}
        for path, needed in needs.items():
            free = shutil.disk_usage(path).free
            if needed > free:
                raise TrainingError(
                    f"the disk is too small for this run: {format_bytes(needed)} are needed at "
                    f"{path}, {format_bytes(free)} are free. A checkpoint takes "
                    f"{format_bytes(nbytes)}, and there will be up to {more} more ([checkpoint] "
                    f"keep = {keep}, and one is written before another is deleted; {present} are "
                    f"there now); the exported model takes {format_bytes(export_bytes)}. Free some "
                    "space, name a folder on another disk with --output, or write less: fewer "
                    "[checkpoint] keep, [output] export = false."
                )


def checkpoints_to_come(present: int, saves: int, keep: int) -> tuple[int, int]:
    """Checkpoints that there will be at most besides those present, and when a model is exported.

    One is whole before another is deleted.
    """
    more = max(1, min(keep + 1 - present, saves)) if saves else 0
    return more, min(keep - present, saves)


def _existing(path: Path) -> Path:
    """A folder, or the nearest one around it that is there."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())
