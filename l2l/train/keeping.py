"""The checkpoints of a run while it goes: written beside the steps, the last good one spared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

from l2l.checkpoint import CheckpointError, CheckpointFolder, OtherCheckpointError, Saving
from l2l.device import format_bytes
from l2l.engine import Engine
from l2l.train.display import Display
from l2l.train.folder import RunFolder, TrainingError
from l2l.train.progress import Progress

DIVERGED = "diverged"  # kind of the metrics' line that says that a run was given up
MIN_STALL_SECONDS = 0.05  # that is worth a word


@final
class Keeping:
    """Saves a run, at most one checkpoint at a time."""

    def __init__(
        self,
        folder: RunFolder,
        checkpoints: CheckpointFolder,
        *,
        progress: Progress,
        display: Display,
        saved_step: int,
        prunes: bool,
    ) -> None:
        """`saved_step` has a checkpoint; of several ranks one `prunes`."""
        self._folder = folder
        self._checkpoints = checkpoints
        self._progress = progress
        self._display = display
        self._prunes = prunes
        self._saving: Saving | None = None
        self.saved_step = saved_step

    def note(self, step: int, *, interrupted: bool = False) -> None:
        """Write down that a checkpoint is begun after a step."""
        name = str(self._checkpoints.path_of(step).relative_to(self._folder.root))
        self._progress.checkpoint_begun(step, name, interrupted=interrupted)

    def save(
        self, engine: Engine, *, extra: dict[str, Any], is_last: bool, interrupted: bool
    ) -> None:
        """Begin to save; what was begun before is there when this returns.

        Raises:
            CheckpointError: the one before could not be written.
        """
        progress, checkpoints = self._progress, self._checkpoints
        progress.catch_up()
        self.finish()
        step = engine.step_number
        self.spare_no_longer()
        if not is_last or progress.num_bad:
            checkpoints.spared = self._last_good()
        self.note(step, interrupted=interrupted)
        progress.saving = checkpoints.path_of(step).name
        self._saving = checkpoints.save(engine, extra=extra, background=True)
        self.saved_step = step

    def look(self) -> None:
        """Learn whether the checkpoint that is being written is there.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._saving is not None and self._saving.is_done:
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            CheckpointError: it could not be.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        saving.wait()
        self._progress.saving = ""
        waited = f", {saving.stall_seconds:.1f} s of it waited for"
        self._display.say(
            f"saved {saving.folder.name}: {format_bytes(saving.num_bytes)} in {saving.seconds:.1f} "
            f"s{waited if saving.stall_seconds >= MIN_STALL_SECONDS else ''}"
        )

    def spare_no_longer(self) -> None:
        """Delete the checkpoint that was spared, once there is a newer good one."""
        checkpoints = self._checkpoints
        if checkpoints.spared is None or self._saving is not None or not self._prunes:
            return
        if self._progress.is_good(self.saved_step + 1):
            checkpoints.spared = None
            checkpoints.prune(checkpoints.path_of(self.saved_step))

    def refuse_divergence(self, *, max_bad_steps: int, num_steps: int) -> None:
        """Give up after too many bad steps in a row.

        Raises:
            TrainingError: there were.
        """
        progress = self._progress
        most = min(max_bad_steps, max(1, num_steps // 2))
        if not most or progress.num_bad < most:
            return
        self.finish()
        last, number = progress.last_read, progress.num_bad
        good = self._last_good()
        later = [
            path.name
            for path in self._checkpoints.all()
            if good and _step_of(path) > _step_of(good)
        ]
        progress.note(DIVERGED, last, since=last - number + 1, interrupted=True)
        found = (
            f"{number} steps in a row, {last - number + 1} to {last} of {num_steps}, were "
            "skipped because the loss or a gradient was not finite; their weights were left alone "
            f"({progress.num_skipped} steps were skipped in all). Usual causes: a learning rate "
            "that is too high, no warm-up, data that the loss is not finite for, a precision that "
            "does not hold the model's numbers (try bfloat16 or float32). Nothing was exported. "
        )
        if good is None:
            advice = "There is no checkpoint from before: change the settings and begin anew."
        else:
            gone = f"delete {' and '.join(later)} beside it, " if later else ""
            advice = (
                f"The last good checkpoint is {good}. To go on from it: {gone}change the settings, "
                f"then l2l train {self._folder.root}."
            )
        raise TrainingError(f"{found}{advice} [training] max_bad_steps says how many are too many.")

    def _last_good(self) -> Path | None:
        """The newest checkpoint from which a step was made: it is kept until the next such one.

        The step before a bad one may be what has made the weights useless.
        """
        found = self._checkpoints.all()
        good = [path for path in found if self._progress.is_good(_step_of(path) + 1)]
        return good[-1] if good else None


@contextlib.contextmanager
def naming_older(latest: Path) -> Iterator[None]:
    """Let an error about a damaged checkpoint name the one before it."""
    try:
        yield
    except OtherCheckpointError:  # as all before it are
        raise
    except CheckpointError as error:
        older = CheckpointFolder(latest.parent).before(latest)
        advice = f" To go on from {older[-1]} instead, delete {latest}." if older else ""
        raise CheckpointError(f"{error}{advice}") from error


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
