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
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from l2l import files
from l2l.checkpoint.manifest import (
    BUFFERS,
    MANIFEST,
    CheckpointError,
    FileRecord,
    Manifest,
    OtherCheckpointError,
    file_name,
)
from l2l.model import Format
from l2l.parameter_server import (
    NUM_WRITERS,
    Image,
    ParameterServer,
    Snapshot,
    join_master,
    state_name,
)

LATEST = "latest"
PROBE_BYTES = 64 << 20
STEP = re.compile(r"(step-(\d{1,18}))(|\.partial|\.replaced|\.deleted)", re.ASCII)
COMPANIONS = ("remainders", "masters")
"""What makes a weight its float32 master, or is it."""


# --------------------------------------------------------------------------------------------------
# Writing


@final
class Saving:
    """A checkpoint that is being written."""

    def __init__(
        self,
        folder: Path,
        *,
        manifest: Manifest,
        server: ParameterServer,
        snapshot: Snapshot,
        buffers: Mapping[str, Tensor],
        then: Callable[[], None] | None = None,
    ) -> None:
        """The ranks of a world write it together: each what it holds, the first the rest.

        Args:
            folder: the checkpoint; what is written lies beside it, in a folder that is there.
            manifest: what it says, but for its files.
            server: brings all units to the step, for whoever waits.
            snapshot: where units come from; the server has it until all is written, or failed.
            buffers: tensors of their own, which nobody changes any more.
            then: called once the checkpoint has its name.
        """
        self.folder = folder
        self.failure: CheckpointError | None = None
        self.is_reported = False  # whether somebody was told of the failure
        self.num_bytes = 0
        self.seconds = 0.0
        self.expected_stall_seconds = 0.0
        self._manifest, self._snapshot, self._buffers = manifest, snapshot, buffers
        self._server, self._world, self._then = server, server.world, then
        self._files: dict[str, FileRecord] = {}
        self._lock = threading.Lock()
        self._partial = files.beside(folder)
        self._thread = threading.Thread(target=self._run, name="l2l-save", daemon=True)

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
                self._server.settle_all()
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
            known = isinstance(error, CheckpointError | files.TensorFileError | OSError)
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
            if self._server.snapshot is self._snapshot:
                self._server.snapshot = None

    def _write_all(self) -> None:
        """Write what this rank holds; the first one gives it its name once all have done so."""
        gather = self._world.gather_saved
        gather(None)  # the folder is there
        found = together(gather, self._write_own)
        together(gather, lambda: self._conclude(found) if self._world.rank == 0 else None)

    def _conclude(self, found: Sequence[Mapping[str, FileRecord]]) -> None:
        records = {name: record for own in found for name, record in own.items()}
        replace(self._manifest, files=records).write(self._partial)
        files.replace_folder(self.folder)
        if self._then is not None:
            self._then()

    def _write_own(self) -> Mapping[str, FileRecord]:
        if self._buffers and self._world.rank == 0:
            self._write(BUFFERS, Image(unit=BUFFERS, tensors=self._buffers, steps={}))
        failures: list[BaseException] = []

        def attempt(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as failure:  # raised by `wait`
                failures.append(failure)
                self._snapshot.give_up()  # the others end, too

        work = [self._write_units] * NUM_WRITERS
        work += [self._copy_ahead] if self._snapshot.copies_ahead else []
        # Not a pool: its threads would keep a process alive that ends without waiting for us.
        threads = [threading.Thread(target=attempt, args=(one,), daemon=True) for one in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        if self._snapshot.is_given_up:
            raise CheckpointError("an optimizer update of the step being saved failed.")
        return self._files

    def _copy_ahead(self) -> None:
        while self._snapshot.copy_ahead():
            pass

    def _write_units(self) -> None:
        share = self._world.share
        while (image := self._snapshot.take()) is not None:
            if self._world.rank < share.number:  # others hold copies
                self._write(file_name(image.unit, share), image)
            self._snapshot.written(image)
            del image  # a copy's memory is free now

    def _write(self, name: str, image: Image) -> None:
        path = self._partial / f"{name}.safetensors"
        written = files.write_tensors(path, image.tensors, read=image.value)
        with self._lock:
            self.num_bytes += written.nbytes
            self._files[name] = FileRecord(written.nbytes, written.checksum, dict(image.steps))


def together(gather: Callable[[Any], list[Any]], act: Callable[[], Any]) -> list[Any]:
    """Do something on every rank; returns what each has got of it.

    Raises:
        CheckpointError: it failed on another one. What has failed on this one is raised as it is.
    """
    result, failure = None, None
    try:
        result = act()
    except Exception as error:
        failure = error
    found = gather((result, None if failure is None else str(failure)))
    if failure is not None:
        raise failure
    for rank, (_, reason) in enumerate(found):
        if reason is not None:
            raise CheckpointError(f"rank {rank}: {reason}")
    return [one for one, _ in found]


def refuse_foreign(folder: Path) -> None:
    """Refuse to replace what is not a checkpoint.

    Raises:
        CheckpointError: there is something else.
    """
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_free and not (folder / MANIFEST).exists():
        raise CheckpointError(
            f"{folder} already exists and is not a checkpoint; saving would overwrite it."
        )


def make_folder(folder: Path) -> None:
    """Make the folder in which a checkpoint is written.

    Raises:
        CheckpointError: it cannot be made.
    """
    try:
        files.empty_folder(folder)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"cannot make {files.beside(folder)}: {reason}") from error


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


@contextlib.contextmanager
def _reading(also: str = "") -> Iterator[None]:
    """Whatever is wrong with a file is wrong with its checkpoint."""
    try:
        yield
    except files.TensorFileError as error:
        raise CheckpointError(f"{error}{also}") from error


@final
class Checkpoint:
    """A checkpoint to read."""

    def __init__(self, folder: Path) -> None:
        """Read the manifest.

        Raises:
            CheckpointError: it is missing, damaged or too new.
        """
        self.folder = files.whole_folder(folder)
        self.manifest = Manifest.read(self.folder)

    def check(self, index: int = 0, number: int = 1) -> None:
        """Compare every file, or every so many from one on, with its size and checksum.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        records = sorted(self.manifest.files.items())[index::number]
        expected = {self.path(name): record for name, record in records}
        with _reading(" An older checkpoint may still be intact."):
            for path, record in expected.items():
                files.check_size(path, record)
            with ThreadPoolExecutor(NUM_WRITERS) as pool:
                list(pool.map(files.check_file, expected, expected.values()))

    def path(self, name: str) -> Path:
        """Where a file is."""
        return self.folder / f"{name}.safetensors"

    def kinds(self, name: str) -> dict[str, files.TensorKind]:
        """Names, dtypes and shapes of a file's tensors; none if there is no such file.

        Raises:
            CheckpointError: it cannot be read.
        """
        if name not in self.manifest.files:
            return {}
        with _reading():
            return files.kinds_of(self.path(name))

    def read(self, name: str, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of a file, one by one; each may be gone when the next one comes.

        Raises:
            CheckpointError: it cannot be read.
        """
        read = files.TensorReader(dict.fromkeys(names, self.path(name)))
        for one in names:
            with _reading():
                value = read(one)
            yield one, value

    def steps(self, name: str, parameter: str) -> int:
        """Updates of a parameter so far."""
        steps = self.manifest.files[name].steps
        return int(steps.get("", steps.get(parameter, 0)))


@final
class SavedModel:
    """The weights of a checkpoint, one by one: no engine is made, no optimizer state is read.

    Where several ranks have saved a model together, each file has runs of elements: those of a
    tensor, put together in the order of the ranks, are the tensor.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Find out what is where.

        Raises:
            CheckpointError: a file cannot be read.
        """
        self._checkpoint = checkpoint
        self._files: dict[str, dict[int, str]] = {}  # by tensor and share
        names = [name for name in checkpoint.manifest.files if name != BUFFERS]
        for share in checkpoint.manifest.shares:
            for file in names:
                for name in checkpoint.kinds(file) if file.endswith(file_name("", share)) else ():
                    self._files.setdefault(name, {})[share.index] = file
        # Those of layers once more, as they are now.
        self._files |= {name: {0: BUFFERS} for name in checkpoint.kinds(BUFFERS)}
        self._owners = {name.partition("|")[0] for name in self._files}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def check(self, model: nn.Module) -> None:
        """Refuse a model that has other parameters, or buffers, than the one that was saved.

        Raises:
            OtherCheckpointError: it has.
        """
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        kept = model.state_dict().keys()
        for name, tensor in {**parameters, **buffers}.items():
            there = name in self._owners  # of which there may be several tensors
            if tensor.numel() and not there and (name in parameters or name in kept):
                raise self._refusal(f" lacks {name!r}")
        for name in self._files:
            if "|" not in name and name not in parameters and name not in buffers:
                raise self._refusal(f" also has {name!r}")

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        """A parameter, its float32 master if there is one, or a buffer.

        Raises:
            OtherCheckpointError: there is none of that name and shape.
            CheckpointError: it cannot be read.
        """
        numel = math.prod(shape)
        if not numel:  # ranks do not save what has no elements
            return torch.empty(tuple(shape))
        if name not in self:
            raise self._refusal(f" lacks {name!r}")
        remainders, masters = (state_name(name, kind) for kind in COMPANIONS)
        value = self._whole(masters if masters in self else name)
        if remainders in self:
            lower = self._whole(remainders)
            kinds = [(one.dtype, list(one.shape)) for one in (value, lower)]
            if kinds != [(torch.bfloat16, kinds[0][1]), (torch.int16, kinds[0][1])]:
                file = self._checkpoint.path(next(iter(self._files[name].values())))
                raise OtherCheckpointError(
                    f"{file}: {name!r} and its remainders do not fit: {kinds[0]} and {kinds[1]}."
                )
            value = join_master(value, lower)
        is_cut = len(self._checkpoint.manifest.shares) > 1
        if list(value.shape) not in (list(shape), *([[numel]] if is_cut else [])):
            raise self._refusal(f": {name!r} has shape {list(value.shape)}, expected {list(shape)}")
        return value.view(tuple(shape))

    def read_mean(self, name: str) -> Tensor | None:
        """A parameter's mean, flat; None: there is none, or it was never updated."""
        mean = state_name(name, "average")
        files = self._files.get(mean, {}).values()
        if not any(self._checkpoint.steps(file, name) for file in files):
            return None
        return self._whole(mean)

    def read_format(self, name: str, wanted: Format) -> Tensor:
        """A parameter that is made of several tensors."""
        fields = ((key, shape) for key, shape, _ in wanted.fields)
        return wanted.join({key: self.read(state_name(name, key), shape) for key, shape in fields})

    def _refusal(self, reason: str) -> OtherCheckpointError:
        folder = self._checkpoint.folder
        return OtherCheckpointError(f"{folder}{reason}: it belongs to a different model.")

    def _whole(self, name: str) -> Tensor:
        found = [self._checkpoint.read(file, [name]) for file in self._files[name].values()]
        pieces = [piece for one in found for _, piece in one]
        return pieces[0] if len(pieces) == 1 else torch.cat([piece.view(-1) for piece in pieces])


# --------------------------------------------------------------------------------------------------
# The checkpoints of a run


class Savable(Protocol):
    """An engine, as a checkpoint sees it."""

    @property
    def step_number(self) -> int:
        """Steps so far."""

    @property
    def save(self) -> Callable[..., Saving]:
        """Writes a checkpoint: see `Engine.save`."""


@final
class CheckpointFolder:
    """The checkpoints of a run, newest last."""

    def __init__(self, root: Path, *, keep: int = 2, is_tidy: bool = False) -> None:
        """Keep this many checkpoints; `is_tidy`: somebody else tidies up."""
        if keep < 1:
            raise ValueError(f"keep={keep}; expected at least 1 checkpoint.")
        self.root = root
        self.spared: Path | None = None  # a checkpoint that is kept in any case
        self.best: Path | None = None  # another one
        self._keep = keep
        self._is_tidy = is_tidy

    def tidy(self) -> None:
        """Finish or undo what a killed run was at; `latest` names the latest again.

        For whoever writes here, once: a run that goes on would lose what it is writing.
        """
        self._is_tidy = True
        for name in self._names(*files.SUFFIXES):
            files.recover(self.root / name)
        latest = self.latest()
        with contextlib.suppress(CheckpointError):  # it can be found without it
            if latest is not None:
                self._point_to(latest)

    def _names(self, *suffixes: str) -> set[str]:
        """Checkpoints of which there is a folder with one of these behind its name."""
        found = [STEP.fullmatch(path.name) for path in self.root.glob("step-*")]
        return {match[1] for match in found if match is not None and match[3] in suffixes}

    def all(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        names = self._names("", files.REPLACED)  # the latter if a run was killed then
        found = [files.whole_folder(self.root / name) for name in names]
        whole = [path for path in found if (path / MANIFEST).exists()]
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
            if old not in (self.spared, self.best):
                files.remove_folder(old)

    def _point_to(self, folder: Path) -> None:
        pointer = self.root / LATEST
        try:
            files.write_file(pointer, folder.name + "\n")
        except OSError as error:
            raise CheckpointError(f"cannot write {pointer}: {error.strerror or error}") from error


def step_of(folder: Path) -> int:
    """The step that a checkpoint in a `CheckpointFolder` is of; -1 if its name is another."""
    match = STEP.fullmatch(folder.name)
    return -1 if match is None else int(match[2])
