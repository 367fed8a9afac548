"""What an engine saves and loads: which tensors, which numbers, and what is checked.

Saving begins at a moment when device and host have nothing left to do of the last step; from there
it goes on beside training (`parameter_server.snapshot`). Loading checks every file before it
changes anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from l2l.checkpoint.checkpoint import (
    BUFFERS,
    MANIFEST,
    Checkpoint,
    CheckpointError,
    OtherCheckpointError,
    Saving,
    file_name,
    measure_disk,
    plain,
    refuse_foreign,
)
from l2l.checkpoint.manifest import MOST, is_number
from l2l.checkpoint.saved_model import COMPANIONS, SavedModel
from l2l.device import format_bytes
from l2l.distributed import Share
from l2l.model import Partition
from l2l.parameter_server import (
    ALIGNMENT_ELEMENTS,
    HostOptimizer,
    LossScale,
    Optimizer,
    ParameterServer,
    ServerOptimizer,
    Snapshot,
    UnitForm,
    kinds_in,
)

logger = logging.getLogger("l2l")

TensorKind = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a checkpoint must hold."""

    forms: Mapping[str, UnitForm]  # by unit, in the precision that it was saved with
    outer_buffers: Mapping[str, Tensor]  # those around the layers
    layer_buffers: Mapping[str, Tensor]  # which it has once more if training changes them


@final
class Persistence:
    """Saves an engine's state and loads it."""

    def __init__(
        self,
        *,
        server: ParameterServer,
        partition: Partition,
        optimizer: ServerOptimizer,
        loss_scale: LossScale | None,
        link: torch.dtype,
        spare_bytes: Callable[[], int],
    ) -> None:
        """Nothing happens yet; `spare_bytes` says how much host memory copies may take."""
        self._server = server
        self._partition = partition
        self._optimizer = optimizer
        self._loss_scale = loss_scale
        self._link = link
        self._spare_bytes = spare_bytes
        self.saving: Saving | None = None

    @property
    def _description(self) -> Optimizer:
        return self._server.optimizer

    @property
    def num_bytes(self) -> int:
        """Bytes of all units, as `save` writes them."""
        return sum(self._server.image(name).nbytes for name in self._server.units)

    # ----------------------------------------------------------------------------------------------

    def save(
        self,
        folder: Path,
        *,
        step: int,
        state: Mapping[str, Any],
        buffers: Mapping[str, Tensor],
        order: Sequence[str],
        at_once: frozenset[str],
        extra: Mapping[str, Any],
        then: Callable[[], None] | None,
        step_seconds: float | None,
        background: bool,
    ) -> Saving:
        """Begin to write a checkpoint; nothing else may be running.

        Args:
            folder: where to.
            step: number of the last step.
            state: choices of the engine.
            buffers: as training has left them.
            order: units in the order in which the next step changes them.
            at_once: units whose update the next step would do on the device.
            extra: what the caller wants back.
            then: called once the checkpoint is there.
            step_seconds: how long a step takes, if that is known.
            background: whether steps go on meanwhile.

        Raises:
            CheckpointError: the folder cannot be made, or `extra` is not JSON.
        """
        try:
            extra = plain(extra)  # the caller may go on changing it
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"cannot save {folder}: extra is not JSON: {error}") from error
        refuse_foreign(folder)
        total = sum(self._server.image(name).nbytes for name in order)
        spare = self._spare_bytes()
        stall = 0.0
        if background and spare < total:
            stall = self._announce_stall(folder, total, spare, step_seconds or 0.0)
        numbers = {
            **state,
            "link": str(self._link).removeprefix("torch."),
            "optimizer": type(self._description).__name__,
            "moments": getattr(self._description, "moments", None),
            "groups": self._optimizer.numbers(),
            "loss_scale": None if self._loss_scale is None else asdict(self._loss_scale),
            "num_shares": self._server.world.share.number,
        }
        snapshot = self._server.begin_snapshot(
            order, at_once=at_once, spare_bytes=spare, copies_ahead=background
        )
        try:
            saving = Saving(
                folder,
                snapshot=snapshot,
                buffers={name: buffer.detach().cpu().clone() for name, buffer in buffers.items()},
                step=step,
                state=numbers,
                extra=extra,
                finish=partial(self._end_snapshot, snapshot),
                settle=self._server.settle_all,
                world=self._server.world,
            )
        except BaseException:
            self._end_snapshot(snapshot)
            raise
        if then is not None:
            saving.after.append(then)
        self.saving = saving
        saving.expected_stall_seconds = stall
        saving.start()
        for name in self._server.units_on_device():
            snapshot.before(name)  # nothing tells when the device changes them
        return saving

    def prepare(self, order: Sequence[str]) -> None:
        """Make spare memory ready for `save` in the background; does not wait for it."""
        self._server.fill_spare(order, most_bytes=self._spare_bytes())

    def _end_snapshot(self, snapshot: Snapshot) -> None:
        if self._server.snapshot is snapshot:
            self._server.snapshot = None

    @staticmethod
    def _announce_stall(folder: Path, total: int, spare: int, step_seconds: float) -> float:
        """Say how long training will wait for the disk."""
        rate = measure_disk(folder.parent)
        stall = max(0.0, (total - spare) / rate - step_seconds)
        logger.warning(
            "saving %s to a disk that takes %s/s, with %s of spare host memory: training will wait "
            "for about %.0f s. With %s more (host_memory) it would not.",
            format_bytes(total),
            format_bytes(int(rate)),
            format_bytes(max(0, spare)),
            stall,
            format_bytes(total - spare),
        )
        return stall

    def give_up(self) -> None:
        """What is being written will not be whole: nobody waits for it."""
        if self._server.snapshot is not None:
            self._server.snapshot.give_up()

    def finish(self) -> None:
        """Wait for a checkpoint that is being written.

        Raises:
            CheckpointError: it could not be written, and nobody was told so far.
        """
        saving = self.saving
        try:
            if saving is not None and not saving.is_reported:
                saving.wait()
        finally:  # one that still runs, because the wait was interrupted, is not forgotten
            if saving is not None and saving.is_done:
                self.saving = None

    # ----------------------------------------------------------------------------------------------

    def check_files(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint that is damaged.

        Raises:
            CheckpointError: with the file.
        """
        world = self._server.world
        failure: CheckpointError | None = None
        try:
            checkpoint.check(share=Share(index=world.rank, number=world.size))
        except CheckpointError as error:
            failure = error
        reasons = world.gather_facts(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise CheckpointError(f"rank {rank}: {reason}")

    def check(self, checkpoint: Checkpoint, expected: Expected) -> None:
        """Refuse a checkpoint that is not of this model and optimizer.

        Raises:
            OtherCheckpointError: with the file, and what does not fit.
        """
        state, folder = checkpoint.manifest.state, checkpoint.folder
        mine = (type(self._description).__name__, getattr(self._description, "moments", None))
        found = (state["optimizer"], state["moments"])
        if mine != found:
            raise OtherCheckpointError(
                f"{folder} was saved with the optimizer {_called(*found)}; the engine has "
                f"{_called(*mine)}. Expected the same one."
            )
        files, shares = checkpoint.manifest.files, checkpoint.shares
        several = self._server.world.is_parallel or len(shares) > 1
        if several and not self._is_same_link(checkpoint):
            raise OtherCheckpointError(
                f"{folder} was saved with another precision. Load it in a single process, as a "
                "single process has saved it, or keep the precision."
            )
        forms = expected.forms
        wanted = {
            file_name(unit, one): (form, one) for unit, form in forms.items() for one in shares
        }
        for file in dict.fromkeys((*wanted, *files)):
            if file in wanted and file in files:
                self._compare_unit(checkpoint, file, *wanted[file])
            elif file != BUFFERS:
                number = sum(unit.startswith("L") for unit in forms)
                raise OtherCheckpointError(
                    f"{folder} has {'no' if file in wanted else 'a'} unit {file}: it is of "
                    f"another model, expected one with {number} layers."
                )
        self._compare_buffers(checkpoint, expected)
        self._check_groups(checkpoint, forms)

    def _compare_unit(
        self, checkpoint: Checkpoint, file: str, form: UnitForm, share: Share
    ) -> None:
        """Compare a file with what it must have of a unit."""
        path = checkpoint.path(file)
        wanted, found = kinds_in(form, share), checkpoint.kinds(file)
        for name in dict.fromkeys((*wanted, *found)):
            if name not in found or name not in wanted:
                has = "lacks" if name in wanted else "also has"
                raise OtherCheckpointError(
                    f"{path} {has} {name!r}: it is of another model, or of one in which other "
                    "parameters are trained."
                )
            _refuse_other_kind(path, name, found[name], wanted[name])
        steps = checkpoint.manifest.files[file].steps
        first = checkpoint.manifest.files[file_name(form.name, Share(number=share.number))].steps
        if set(steps) not in ({""}, set(form.trained.names)) or steps != first:
            raise OtherCheckpointError(
                f"{checkpoint.folder / MANIFEST}: the numbers of updates of {file} are not those "
                "of its trained parameters: it is of another model."
            )

    @staticmethod
    def _compare_buffers(checkpoint: Checkpoint, expected: Expected) -> None:
        """Compare the file of buffers with what it must have, and may have."""
        path = checkpoint.path(BUFFERS)
        found = checkpoint.kinds(BUFFERS) if BUFFERS in checkpoint.manifest.files else {}
        missing = [name for name in expected.outer_buffers if name not in found]
        if missing:
            raise OtherCheckpointError(f"{path} lacks {missing[0]!r}: it is of another model.")
        known = {**expected.layer_buffers, **expected.outer_buffers}
        for name, kind in found.items():
            if name not in known:
                raise OtherCheckpointError(f"{path} also has {name!r}: it is of another model.")
            _refuse_other_kind(path, name, kind, (known[name].dtype, tuple(known[name].shape)))

    def _check_groups(self, checkpoint: Checkpoint, forms: Mapping[str, UnitForm]) -> None:
        """Refuse numbers of parameter groups that no optimizer of this kind has."""
        path, own = checkpoint.folder / MANIFEST, dict(self._optimizer.defaults)
        own |= {
            one.name: one.default
            for one in fields(self._description)
            if one.name in own and one.default is not MISSING
        }
        kinds = {kind for form in forms.values() for kind in form.state_kinds}
        for index, group in enumerate(checkpoint.manifest.state["groups"]):
            for name, value in group.items():
                if not (_is_like(value, own[name]) if name in own else _is_plain(value)):
                    raise CheckpointError(
                        f"{path} is damaged: {name} of parameter group {index} is "
                        f"{str(value)[:40]!r}; expected a value like {own.get(name)!r}."
                    )
            if isinstance(self._description, HostOptimizer) and own.keys() <= group.keys():
                missing = set(self._description.state_kinds(group)) - kinds
                if missing and kinds:
                    raise OtherCheckpointError(
                        f"{path}: parameter group {index} needs {sorted(missing)}, which the "
                        "engine was not made with."
                    )

    def _is_same_link(self, checkpoint: Checkpoint) -> bool:
        return bool(checkpoint.manifest.state["link"] == str(self._link).removeprefix("torch."))

    def load(self, checkpoint: Checkpoint) -> None:
        """Take over the tensors and numbers of a checkpoint that was checked."""
        manifest = checkpoint.manifest
        same = self._is_same_link(checkpoint)
        if not same:
            logger.warning(
                "%s was saved with precision %s; this engine has %s, so results differ from those "
                "of the run that was saved.",
                checkpoint.folder,
                manifest.state["link"],
                str(self._link).removeprefix("torch."),
            )
        shares, saved = checkpoint.shares, None if same else SavedModel(checkpoint)
        self._server.waiting.clear()
        for name, unit in self._server.units.items():
            targets = dict(self._server.image(name).tensors)
            if saved is None:
                for share in shares:
                    self._load_share(checkpoint, name, share, targets)
            else:
                self._load_converted(checkpoint, saved, name, targets)
            for owner in unit.steps:
                unit.steps[owner] = checkpoint.steps(file_name(name, shares[0]), owner)
        if self._loss_scale is not None and manifest.state["loss_scale"] is not None:
            for key, value in manifest.state["loss_scale"].items():
                setattr(self._loss_scale, key, value)
        if not self._optimizer.restore_numbers(manifest.state["groups"]):
            logger.warning(
                "%s has other parameter groups; the engine keeps its own learning rates.",
                checkpoint.folder,
            )

    def _load_share(
        self, checkpoint: Checkpoint, name: str, share: Share, targets: Mapping[str, Tensor]
    ) -> None:
        """Load what is needed here of the share that one rank has saved of a unit."""
        file, unit = file_name(name, share), self._server.units[name]
        if share.number == unit.share.number == 1:
            checkpoint.read(file, list(targets), _into(targets))
            return
        saved = unit.form.weight_layout.cut_for(share.number)
        places: dict[str, tuple[slice, slice]] = {}
        for key in targets:
            owner, _, kind = key.partition("|")
            owner = key if key in unit.form.weight_layout.names else owner
            theirs = saved.piece(owner, share)
            mine = unit.form.weight_layout.piece(owner, unit.share)
            start, stop = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
            if start >= stop:
                continue
            state = unit.form.state_kinds.get(kind) if owner != key else None
            block = ALIGNMENT_ELEMENTS if state is not None and state.per_block else 1
            places[key] = (
                slice((start - mine.start) // block, -(-(stop - mine.start) // block)),
                slice((start - theirs.start) // block, -(-(stop - theirs.start) // block)),
            )

        def receive(key: str, value: Tensor) -> None:
            mine, theirs = places[key]
            targets[key].view(-1)[mine].copy_(value.reshape(-1)[theirs])

        if places:
            checkpoint.read(file, list(places), receive)

    def _load_converted(
        self, checkpoint: Checkpoint, saved: SavedModel, name: str, targets: Mapping[str, Tensor]
    ) -> None:
        """Load tensors of another precision: masters are joined there and split here."""
        trained = self._server.units[name].form.trained.names
        as_it_is = [key for key in targets if key not in trained and not _is_companion(key)]
        checkpoint.read(name, as_it_is, _into(targets))
        for owner in trained:
            self._server.set_weight(owner, saved.read(owner, targets[owner].shape))

    def load_buffers(self, checkpoint: Checkpoint, present: Mapping[str, Tensor]) -> None:
        """Buffers as they were; `present` are those on the device."""
        own: dict[str, Tensor] = {}

        def receive(name: str, value: Tensor) -> None:
            for target in (own.get(name), present.get(name)):
                if target is not None:
                    target.copy_(value)

        # Those of layers are with the layers as they were at first, and once more if they changed.
        for index, tensors in enumerate(self._partition.layer_tensors):
            own |= tensors.buffers
            for owner in tensors.buffers:
                receive(owner, self._server.units[f"L{index}"].weight_of(owner))
        if BUFFERS in checkpoint.manifest.files:
            checkpoint.read(BUFFERS, list(checkpoint.kinds(BUFFERS)), receive)


def _into(targets: Mapping[str, Tensor]) -> Callable[[str, Tensor], None]:
    def receive(name: str, value: Tensor) -> None:
        targets[name].copy_(value)

    return receive


def _is_companion(name: str) -> bool:
    return name.rpartition("|")[2] in COMPANIONS


def _refuse_other_kind(path: Path, name: str, found: TensorKind, wanted: TensorKind) -> None:
    for what, one, other in zip(("dtype", "shape"), found, wanted, strict=True):
        if one != other:
            has, expected = (list(v) if isinstance(v, tuple) else v for v in (one, other))
            raise OtherCheckpointError(
                f"{path}: {name!r} has {what} {has}, expected {expected}: it is of another model."
            )


def _is_like(value: Any, own: Any) -> bool:
    """Whether a value of JSON may stand for one of an optimizer's own numbers."""
    if value is None or isinstance(own, str):
        return type(value) is type(own)
    if isinstance(own, tuple | list):
        return (
            isinstance(value, list)
            and len(value) == len(own)
            and all(_is_like(*pair) for pair in zip(value, own, strict=True))
        )
    return _is_plain(value) and not isinstance(value, list | str)


def _is_plain(value: Any) -> bool:
    """Whether a value of JSON is one that a parameter group may have."""
    if isinstance(value, list):
        return all(_is_plain(one) for one in value)
    return isinstance(value, bool | str | float) or is_number(value, least=-MOST)


def _called(name: str, moments: str | None) -> str:
    return name if moments is None else f"{name} with {moments} moments"
