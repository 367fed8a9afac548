"""Whether the disk takes what a run will write, asked before its first step."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from l2l.device import format_bytes
from l2l.train.folder import RunFolder, TrainingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """What a run is still to write."""

    checkpoint_bytes: int
    num_present: int  # checkpoints that are there
    num_saves: int  # that are still to come
    keep: int
    export_bytes: int

    @property
    def num_more(self) -> int:
        """Checkpoints that there will be at most, besides those that are there.

        One is whole before another is deleted.
        """
        most = min(self.keep + 1, self.num_present + self.num_saves)
        return max(1, most - self.num_present) if self.num_saves else 0

    @property
    def num_more_at_last(self) -> int:
        """The same when the model is exported."""
        return min(self.keep, self.num_present + self.num_saves) - self.num_present

    def check(self, folder: RunFolder) -> None:
        """Refuse a disk that is too small for it.

        Raises:
            TrainingError: it is.
        """
        checkpoints, model = (_existing(path) for path in (folder.checkpoints, folder.model))
        saving, exporting = self.num_more * self.checkpoint_bytes, self.export_bytes
        if os.stat(checkpoints).st_dev != os.stat(model).st_dev:
            needs = [(checkpoints, saving), (model, exporting)]
        else:
            at_last = self.num_more_at_last * self.checkpoint_bytes + exporting
            needs = [(checkpoints, max(saving, at_last))]
        for path, needed in needs:
            free = shutil.disk_usage(path).free
            if needed > free:
                raise TrainingError(
                    f"the disk is too small for this run: {format_bytes(needed)} are needed at "
                    f"{path}, {format_bytes(free)} are free. {self._described} Free some space, "
                    "name a folder on another disk with --output, or write less: fewer "
                    "[checkpoint] keep, [output] export = false."
                )

    @property
    def _described(self) -> str:
        export = format_bytes(self.export_bytes) if self.export_bytes else "nothing"
        return (
            f"A checkpoint takes {format_bytes(self.checkpoint_bytes)}, and there will be up to "
            f"{self.num_more} more ([checkpoint] keep = {self.keep}, and one is written before "
            f"another is deleted; {self.num_present} are there now); the exported model takes "
            f"{export}."
        )


def _existing(path: Path) -> Path:
    """A folder, or the nearest one around it that is there."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())
