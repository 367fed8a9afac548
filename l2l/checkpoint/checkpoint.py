"""Checkpoints: everything that is needed to go on exactly, in safetensors files and a manifest.

A checkpoint is a folder:

    manifest.json           version, step, choices, sizes and checksums of all files, its own too
    L0.safetensors, ...     one file for every unit of the parameter server: weights, what makes
                            them float32 masters, optimizer state, by parameter. Where several ranks
                            hold a unit, one for each: L0-1of4.safetensors, with the pieces it holds
    buffers.safetensors     buffers that the model changes as it trains

It is written to a folder beside, through to the disk, and renamed: a checkpoint that has its name
is whole. In a `CheckpointFolder` the file `latest` says which one to go on with; it is switched
last. Nothing is pickled, and nothing depends on the device or on how much memory there is.

docs/checkpoint_format.md describes the format.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor

from l2l.checkpoint.manifest import BUFFERS as BUFFERS
from l2l.checkpoint.manifest import MANIFEST as MANIFEST
from l2l.checkpoint.manifest import CheckpointError as CheckpointError
from l2l.checkpoint.manifest import FileRecord as FileRecord
from l2l.checkpoint.manifest import Manifest as Manifest
from l2l.checkpoint.manifest import OtherCheckpointError as OtherCheckpointError
from l2l.checkpoint.manifest import plain as plain
from l2l.distributed import Share, World
from l2l.files import (
    DELETED,
    PARTIAL,
    REPLACED,
    Entry,
    TensorFile,
    TensorFileError,
    Written,
    beside,
    check_file,
    check_size,
    empty_folder,
    recover,
    remove_folder,
    replace_folder,
    whole_folder,
    write_file,
    write_tensors,
)
from l2l.parameter_server import NUM_WRITERS, Image, Snapshot

LATEST = "latest"
PROBE_BYTES = 64 << 20


# --------------------------------------------------------------------------------------------------
# Writing


@final
class Saving:
    """A checkpoint that is being written."""

    def __init__(
        self,
        folder: Path,
        *,
        snapshot: Snapshot,
        buffers: Mapping[str, Tensor],
        step: int,
        state: Mapping[str, Any],
        extra: Mapping[str, Any],
        finish: Callable[[], None],
        settle: Callable[[], None],
        world: World | None = None,
    ) -> None:
        """Begin to write.

        Args:
            folder: the checkpoint.
            snapshot: where units come from.
            buffers: tensors of their own, which nobody changes any more.
            step: the step that all of it is of.
            state: what the engine needs besides.
            extra: what the caller wants back.
            finish: called once the checkpoint has its name, or could not be written.
            settle: brings all units to the step, for whoever waits.
            world: whose ranks write it together: each what it holds, the first the rest.

        Raises:
            CheckpointError: the folder cannot be made.
        """
        self.folder = folder
        self.failure: CheckpointError | None = None
        self.is_reported = False  # whether somebody was told of the failure
        self.after: list[Callable[[], None]] = []  # called once the checkpoint has its name
        self.num_bytes = 0
        self.seconds = 0.0
        self.expected_stall_seconds = 0.0
        self._snapshot = snapshot
        self._buffers = buffers
        self._step, self._state, self._extra = step, state, extra
        self._finish = finish
        self._settle = settle
        self._world = world or World()
        self._files: dict[str, FileRecord] = {}
        self._lock = threading.Lock()
        self._partial = beside(folder)
        self._thread = threading.Thread(target=self._run, name="l2l-save", daemon=True)
        if self._world.rank == 0:
            self._make_folder()

    def _make_folder(self) -> None:
        try:
            empty_folder(self.folder)
        except OSError as error:
            reason = error.strerror or error
            raise CheckpointError(f"cannot make {self._partial}: {reason}") from error

    def start(self) -> None:
        """Let the writers begin."""
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether the checkpoint is there, or has failed."""
        return not self._thread.is_alive()

    @property
    def stall_seconds(self) -> float:
        """How long updates have waited for writers."""
        return self._snapshot.stall_seconds

    def wait(self) -> None:
        """Wait until the checkpoint is there.

        Raises:
            CheckpointError: it could not be written; the one before it is still there.
        """
        cause: Exception | None = None
        try:
            if not self.is_done and self._snapshot.awaits:
                self._settle()
        except Exception as error:  # what it waits for will never come
            cause = error
            self._snapshot.give_up()
        self._thread.join()
        if self.failure is not None:
            self.is_reported = True
            raise self.failure from cause or self.failure.__cause__

    def _run(self) -> None:
        began = time.perf_counter()
        try:
            self._write_all()
        except BaseException as error:  # raised by `wait`
            known = isinstance(error, CheckpointError | TensorFileError | OSError)
            reason = str(error) if known else repr(error)
            self.failure = CheckpointError(f"the checkpoint {self.folder} was not saved: {reason}")
            self.failure.__cause__ = error
            self._snapshot.give_up()
            if not isinstance(error, Exception):
                raise
            if self._world.rank == 0:
                shutil.rmtree(self._partial, ignore_errors=True)
        finally:
            self.seconds = time.perf_counter() - began
            self._finish()

    def _write_all(self) -> None:
        """Write what this rank holds; the first one gives it its name once all have done so."""
        world, failure = self._world, None
        world.gather_saved(None)  # the folder is there
        try:
            self._write_own()
        except (CheckpointError, TensorFileError, OSError) as error:
            failure = error
        found = world.gather_saved((self._files, None if failure is None else str(failure)))
        if failure is not None:
            raise failure
        self._raise_any([reason for _, reason in found])
        try:
            if world.rank == 0:
                self._conclude({name: one for files, _ in found for name, one in files.items()})
        except Exception as error:
            world.gather_saved(str(error))
            raise
        self._raise_any(world.gather_saved(None))

    @staticmethod
    def _raise_any(reasons: Sequence[str | None]) -> None:
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise CheckpointError(f"rank {rank}: {reason}")

    def _conclude(self, files: Mapping[str, FileRecord]) -> None:
        manifest = Manifest(step=self._step, state=self._state, files=files, extra=self._extra)
        manifest.write(self._partial)
        replace_folder(self.folder)
        for action in self.after:
            action()

    def _write_own(self) -> None:
        if self._buffers and self._world.rank == 0:
            self._write(Image(unit=BUFFERS, tensors=self._buffers, steps={}))
        # Not a pool: its threads would keep a process alive that ends without waiting for us.
        failures: list[BaseException] = []
        writers = [
            threading.Thread(target=self._write_some, args=(failures,), daemon=True)
            for _ in range(NUM_WRITERS)
        ]
        if self._snapshot.copies_ahead:
            writers.append(threading.Thread(target=self._copy_ahead, args=(failures,), daemon=True))
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        if failures:
            raise failures[0]
        if self._snapshot.is_given_up:
            raise CheckpointError("an update of its step has failed.")

    def _write_some(self, failures: list[BaseException]) -> None:
        try:
            self._write_units()
        except BaseException as failure:  # raised by `wait`
            failures.append(failure)

    def _copy_ahead(self, failures: list[BaseException]) -> None:
        try:
            while self._snapshot.copy_ahead():
                pass
        except BaseException as failure:  # raised by `wait`
            failures.append(failure)
            self._snapshot.give_up()

    def _write_units(self) -> None:
        try:
            while (image := self._snapshot.take()) is not None:
                if self._world.rank < self._world.share.number:  # others hold copies
                    self._write(image)
                self._snapshot.written(image)
                del image  # a copy's memory is free now
        except BaseException:
            self._snapshot.give_up()  # the other writers end, too
            raise

    def _write(self, image: Image) -> None:
        entries = [
            Entry(
                name=name,
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                read=lambda tensor=tensor: tensor.detach().cpu(),  # type: ignore[misc]
            )
            for name, tensor in image.tensors.items()
        ]
        name = image.unit if image.unit == BUFFERS else file_name(image.unit, self._world.share)
        written = write_tensors(_path(self._partial, name), entries)
        with self._lock:
            self.num_bytes += written.nbytes
            self._files[name] = FileRecord(
                nbytes=written.nbytes, checksum=written.checksum, steps=dict(image.steps)
            )


def file_name(unit: str, share: Share) -> str:
    """The name, without suffix, of the file with a share of a unit."""
    return unit if share.number == 1 else f"{unit}-{share.index + 1}of{share.number}"


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def refuse_foreign(folder: Path) -> None:
    """Refuse to replace what is not a checkpoint.

    Raises:
        CheckpointError: there is something else.
    """
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_free and not (folder / MANIFEST).exists():
        raise CheckpointError(
            f"{folder} is there already and is not a checkpoint; saving would replace it. Name a "
            "folder of its own for every checkpoint."
        )


def measure_disk(folder: Path) -> float:
    """Bytes a second that the disk takes, measured by writing a little.

    Raises:
        CheckpointError: nothing can be written there.
    """
    path = folder / "probe.partial"
    data = os.urandom(1 << 20)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(PROBE_BYTES // len(data)):
                file.write(data)
            os.fsync(file.fileno())
        return PROBE_BYTES / (time.perf_counter() - began)
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------
# Reading


@final
class Checkpoint:
    """A checkpoint to read."""

    def __init__(self, folder: Path) -> None:
        """Read the manifest.

        Raises:
            CheckpointError: it is missing, damaged or too new.
        """
        self.folder = whole_folder(folder)
        self.manifest = Manifest.read(self.folder)

    @property
    def shares(self) -> list[Share]:
        """The shares of units that it has, each in a file of its own."""
        number = self.manifest.num_shares
        return [Share(index=index, number=number) for index in range(number)]

    def check(self, *, share: Share | None = None) -> None:
        """Compare every file, or a share of them, with its size and checksum.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        share = share or Share()
        records = sorted(self.manifest.files.items())[share.index :: share.number]
        expected = {
            _path(self.folder, name): Written(one.nbytes, one.checksum) for name, one in records
        }
        try:
            for path, one in expected.items():
                check_size(path, one)
            with ThreadPoolExecutor(NUM_WRITERS) as pool:
                list(pool.map(check_file, expected, expected.values()))
        except TensorFileError as error:
            raise CheckpointError(f"{error} An older checkpoint may still be whole.") from error

    def path(self, name: str) -> Path:
        """Where a file is."""
        return _path(self.folder, name)

    def kinds(self, name: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Names, dtypes and shapes of a file's tensors.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            return TensorFile(_path(self.folder, name)).kinds()
        except TensorFileError as error:
            raise CheckpointError(str(error)) from error

    def read(self, name: str, names: Sequence[str], receive: Callable[[str, Tensor], None]) -> None:
        """Hand over tensors of a file, one by one.

        Raises:
            CheckpointError: it cannot be read.
        """
        try:
            TensorFile(_path(self.folder, name)).read(names, receive)
        except TensorFileError as error:
            raise CheckpointError(str(error)) from error

    def steps(self, name: str, parameter: str) -> int:
        """Updates of a parameter so far."""
        steps = self.manifest.files[name].steps
        return int(steps.get("", steps.get(parameter, 0)))


class Savable(Protocol):
    """An engine, as a checkpoint sees it."""

    @property
    def step_number(self) -> int:
        """Steps so far."""

    def save(
        self,
        folder: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        background: bool = False,
        then: Callable[[], None] | None = None,
    ) -> Saving:
        """Write a checkpoint."""


@final
class CheckpointFolder:
    """The checkpoints of a run, newest last."""

    def __init__(self, root: Path, *, keep: int = 2, is_tidy: bool = False) -> None:
        """Keep this many checkpoints; `is_tidy`: somebody else tidies up."""
        if keep < 1:
            raise ValueError(f"keep={keep}; expected at least 1 checkpoint.")
        self.root = root
        self.spared: Path | None = None  # a checkpoint that is kept in any case
        self._keep = keep
        self._is_tidy = is_tidy

    def tidy(self) -> None:
        """Finish or undo what a killed run was at; `latest` names the latest again.

        For whoever writes here, once: a run that goes on would lose what it is writing.
        """
        self._is_tidy = True
        for suffix in (PARTIAL, REPLACED, DELETED):
            for left in self._folders(suffix):
                recover(left.with_name(left.name.removesuffix(suffix)))
        with contextlib.suppress(OSError):
            beside(self.root / LATEST).unlink(missing_ok=True)
        latest = self.latest()
        with contextlib.suppress(OSError, CheckpointError):  # it can be found without it
            if latest is not None and not self._is_pointed_to(latest):
                self._point_to(latest)

    def _is_pointed_to(self, folder: Path) -> bool:
        with contextlib.suppress(OSError):
            return (self.root / LATEST).read_bytes() == f"{folder.name}\n".encode()
        return False

    def _folders(self, suffix: str = "") -> list[Path]:
        """Folders of steps, by number, with this behind it."""
        found = [path for path in self.root.glob(f"step-*{suffix}") if _step_of(path, suffix) >= 0]
        return sorted(found, key=lambda path: (_step_of(path, suffix), path.name))

    def all(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        names = {path.name.removesuffix(REPLACED) for path in self._folders(REPLACED)}
        aside = [whole_folder(self.root / name) for name in names]  # if a run was killed then
        found = {path.name.removesuffix(REPLACED): path for path in [*aside, *self._folders()]}
        whole = [path for path in found.values() if (path / MANIFEST).exists()]
        return sorted(whole, key=lambda path: (step_of(path), path.name))

    def before(self, folder: Path) -> list[Path]:
        """Whole checkpoints of steps before that of one of them, oldest first."""
        return [path for path in self.all() if step_of(path) < step_of(folder)]

    def latest(self) -> Path | None:
        """The checkpoint to go on with."""
        found = self.all()  # each is whole; `latest` may be behind if the run was killed
        return found[-1] if found else None

    def save(
        self, engine: Savable, *, extra: Mapping[str, Any] | None = None, background: bool = False
    ) -> Saving:
        """Save an engine's state as the checkpoint of its last step.

        Raises:
            CheckpointError: it cannot be written; in the background, `Saving.wait` says so.
        """
        if not self._is_tidy:
            self.tidy()
        folder = self.path_of(engine.step_number)
        return engine.save(
            folder, extra=extra, background=background, then=lambda: self.conclude(folder)
        )

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.root / f"step-{step:08d}"

    def conclude(self, folder: Path) -> None:
        """A checkpoint is whole: go on with it from now on, and delete the oldest.

        Raises:
            CheckpointError: `latest` cannot be written.
        """
        self._point_to(folder)
        self.prune(folder)

    def prune(self, newest: Path) -> None:
        """Delete the oldest checkpoints, all but as many as are kept, of which this is one."""
        others = [path for path in self.all() if path != newest]
        for old in others[: max(0, len(others) + 1 - self._keep)]:
            if old != self.spared:
                remove_folder(old)

    def _point_to(self, folder: Path) -> None:
        pointer = self.root / LATEST
        try:
            write_file(pointer, folder.name + "\n")
        except OSError as error:
            raise CheckpointError(f"cannot write {pointer}: {error.strerror or error}") from error


def step_of(folder: Path) -> int:
    """The step that a checkpoint in a `CheckpointFolder` is of; -1 if its name is another."""
    return _step_of(folder, REPLACED if folder.name.endswith(REPLACED) else "")


def _step_of(folder: Path, suffix: str) -> int:
    match = re.fullmatch(rf"step-(\d{{1,18}}){re.escape(suffix)}", folder.name, re.ASCII)
    return -1 if match is None else int(match[1])
