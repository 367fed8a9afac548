"""The folder of a run: where everything is, and who may write there."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from l2l.files import sync

LOCK = ".lock"


class TrainingError(ValueError):
    """A run cannot go on; the message says why and what can be done."""


@final
@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where everything of a run is."""

    root: Path

    @classmethod
    def around(cls, path: Path) -> RunFolder:
        """The run folder that a path is, or is a checkpoint of.

        Raises:
            TrainingError: it is neither.
        """
        for root in (path, path.absolute().parent.parent):
            if cls(root).settings_file.is_file():
                return cls(root)
        raise TrainingError(
            f"{path} is not a run folder, nor a checkpoint in one: there is no run.toml. Expected "
            "what l2l train has written."
        )

    @property
    def settings_file(self) -> Path:
        """The settings in force."""
        return self.root / "run.toml"

    @property
    def metrics_file(self) -> Path:
        """What happened."""
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        """The same for TensorBoard."""
        return self.root / "events"

    @property
    def checkpoints(self) -> Path:
        """To go on from."""
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        """What was trained."""
        return self.root / "model"

    def set_aside(self) -> Path | None:
        """Give what is there another name; None if nothing is."""
        parts = (self.settings_file, self.metrics_file, self.checkpoints, self.model)
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
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            lock = (self.root / LOCK).open("w")
        except OSError as error:
            raise TrainingError(
                f"cannot write to the run folder {self.root}: {error.strerror or error}. Name "
                "another one with --output."
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise TrainingError(
                    f"another process trains in {self.root}. Wait for it, or name another folder "
                    "with --output."
                ) from error
            try:
                yield
            finally:
                self.forget_if_empty()

    def forget_if_empty(self) -> None:
        """Leave nothing where nothing was written."""
        with contextlib.suppress(OSError):
            if [path.name for path in self.root.iterdir()] == [LOCK]:
                (self.root / LOCK).unlink()
                self.root.rmdir()
