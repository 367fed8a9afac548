"""What an engine saves and loads: which tensors, which numbers, and what is checked.

Saving begins at a moment when device and host have nothing left to do of the last step; from there
it goes on beside training (`parameter_server.snapshot`). Loading checks every file before it
changes anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from l2l.byte_size import format_bytes
from l2l.carving import CarvedModel
from l2l.checkpoint import (
    BUFFERS,
    Checkpoint,
    CheckpointError,
    OtherCheckpointError,
    Saving,
    file_name,
    measure_disk,
    plain,
    refuse_foreign,
)
from l2l.layout import ALIGNMENT_ELEMENTS, Share
from l2l.parameter_server import (
    Optimizer,
    ParameterServer,
    ServerOptimizer,
    Snapshot,
)
from l2l.precision import LossScale
from l2l.saved_model import COMPANIONS, SavedModel

logger = logging.getLogger("l2l")


@final
class Persistence:
    """Saves an engine's state and loads it."""

    def __init__(
        self,
        *,
        server: ParameterServer,
        carved: CarvedModel,
        optimizer: ServerOptimizer,
        loss_scale: LossScale | None,
        link: torch.dtype,
        spare_bytes: Callable[[], int],
    ) -> None:
        """Nothing happens yet; `spare_bytes` says how much host memory copies may take."""
        self._server = server
        self._carved = carved
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

    def check(self, checkpoint: Checkpoint) -> None:
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
        units, files = self._server.units, checkpoint.manifest.files
        shares = checkpoint.shares
        several = self._server.world.is_parallel or len(shares) > 1
        if several and not self._is_same_link(checkpoint):
            raise OtherCheckpointError(
                f"{folder} was saved with another precision. Load it in a single process, as a "
                "single process has saved it, or keep the precision."
            )
        expected = {file_name(unit, one): (unit, one) for unit in units for one in shares}
        for file in dict.fromkeys((*expected, *files)):
            if file in expected and file in files:
                self._compare(checkpoint, *expected[file])
            elif file != BUFFERS:
                raise OtherCheckpointError(
                    f"{folder} has {'no' if file in expected else 'a'} unit {file}: it is of "
                    f"another model, expected one with {self._carved.num_layers} layers."
                )

    def _compare(self, checkpoint: Checkpoint, unit: str, share: Share) -> None:
        """Compare names and shapes of a unit's tensors, companions only if they are alike."""
        file = file_name(unit, share)
        path = checkpoint.folder / f"{file}.safetensors"
        same = self._is_same_link(checkpoint)
        wanted = self._server.shapes_in(unit, share)
        found = checkpoint.shapes(file)
        for name in dict.fromkeys((*wanted, *found)):
            if not same and _is_companion(name):
                continue
            if name not in found or name not in wanted:
                has = "lacks" if name in wanted else "also has"
                raise OtherCheckpointError(
                    f"{path} {has} {name!r}: it is of another model, or of one in which other "
                    "parameters are trained."
                )
            if found[name] != wanted[name]:
                raise OtherCheckpointError(
                    f"{path}: {name!r} has shape {list(found[name])}, expected "
                    f"{list(wanted[name])}: it is of another model."
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
        for index, tensors in enumerate(self._carved.layer_tensors):
            own |= tensors.buffers
            for owner in tensors.buffers:
                receive(owner, self._server.units[f"L{index}"].weight_of(owner))
        if BUFFERS in checkpoint.manifest.files:
            checkpoint.read(BUFFERS, list(checkpoint.shapes(BUFFERS)), receive)


def _into(targets: Mapping[str, Tensor]) -> Callable[[str, Tensor], None]:
    def receive(name: str, value: Tensor) -> None:
        targets[name].copy_(value)

    return receive


def _is_companion(name: str) -> bool:
    return name.rpartition("|")[2] in COMPANIONS


def _called(name: str, moments: str | None) -> str:
    return name if moments is None else f"{name} with {moments} moments"
