"""What an engine saves and loads: which tensors, which numbers, and what is checked.

Saving begins at a moment when device and host have nothing left to do of the last step; from there
it goes on beside training (`parameter_server.snapshot`). Loading checks every file before it
changes anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from l2l.checkpoint.checkpoint import (
    COMPANIONS,
    Checkpoint,
    SavedModel,
    Saving,
    make_folder,
    measure_disk,
    refuse_foreign,
    together,
)
from l2l.checkpoint.manifest import (
    BUFFERS,
    MANIFEST,
    MOST,
    CheckpointError,
    Manifest,
    OtherCheckpointError,
    file_name,
    is_number,
    plain,
)
from l2l.device import format_bytes
from l2l.distributed import Share
from l2l.files import TensorKind
from l2l.model import Partition
from l2l.parameter_server import (
    ALIGNMENT_ELEMENTS,
    OUTER,
    HostOptimizer,
    LossScale,
    ParameterServer,
    ServerOptimizer,
    Unit,
    UnitForm,
    kinds_in,
)

logger = logging.getLogger("l2l")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a checkpoint must hold."""

    forms: Mapping[str, UnitForm]  # by unit, in the precision that it was saved with
    outer_buffers: Mapping[str, Tensor]  # those around the layers
    layer_buffers: Mapping[str, Tensor]  # which it has once more if training changes them


@final
@dataclass(eq=False, kw_only=True)
class Persistence:
    """Saves an engine's state and loads it."""

    server: ParameterServer
    partition: Partition
    optimizer: ServerOptimizer
    loss_scale: LossScale | None
    link: torch.dtype
    spare_bytes: Callable[[], int]  # host memory that copies may take
    saving: Saving | None = None

    @property
    def _link(self) -> str:
        return str(self.link).removeprefix("torch.")

    @property
    def num_bytes(self) -> int:
        """Bytes of all units, as `save` writes them."""
        return sum(self.server.image(name).nbytes for name in self.server.units)

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
        server, optimizer = self.server, self.server.optimizer
        try:
            extra = plain(extra)  # the caller may go on changing it
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"cannot save {folder}: extra is not JSON: {error}") from error
        refuse_foreign(folder)
        total, spare, stall = self.num_bytes, self.spare_bytes(), 0.0
        if background and spare < total:
            stall = _announce_stall(folder, total, spare, step_seconds or 0.0)
        numbers = {
            **state,
            "link": self._link,
            "optimizer": optimizer.name,
            "moments": getattr(optimizer, "moments", None),
            "groups": self.optimizer.numbers(),
            "loss_scale": None if self.loss_scale is None else asdict(self.loss_scale),
            "num_shares": server.world.share.number,
        }
        copies = {name: buffer.detach().cpu().clone() for name, buffer in buffers.items()}
        if server.world.rank == 0:
            make_folder(folder)
        snapshot = server.begin_snapshot(
            order, at_once=at_once, spare_bytes=spare, copies_ahead=background
        )
        manifest = Manifest(step=step, state=numbers, files={}, extra=extra)
        self.saving = saving = Saving(
            folder, manifest=manifest, server=server, snapshot=snapshot, buffers=copies, then=then
        )
        saving.expected_stall_seconds = stall
        saving.start()
        for name in server.units_on_device():
            snapshot.before(name)  # nothing tells when the device changes them
        return saving

    def prepare(self, order: Sequence[str]) -> None:
        """Make spare memory ready for `save` in the background; does not wait for it."""
        self.server.fill_spare(order, most_bytes=self.spare_bytes())

    def give_up(self) -> None:
        """What is being written will not be whole: nobody waits for it."""
        if self.server.snapshot is not None:
            self.server.snapshot.give_up()

    def finish(self) -> None:
        """Wait for a checkpoint that is being written.

        Raises:
            CheckpointError: it could not be written, and nobody was told so far.
        """
        saving = self.saving
        if saving is None:
            return
        try:
            if not saving.is_reported:
                saving.wait()
        finally:  # one that still runs, because the wait was interrupted, is not forgotten
            if saving.is_done:
                self.saving = None

    # ----------------------------------------------------------------------------------------------

    def check_files(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint that is damaged.

        Raises:
            CheckpointError: with the file.
        """
        world = self.server.world
        together(world.gather_facts, lambda: checkpoint.check(world.rank, world.size))

    def check(self, checkpoint: Checkpoint, expected: Expected) -> None:
        """Refuse a checkpoint that is not of this model and optimizer.

        Raises:
            OtherCheckpointError: with the file, and what does not fit.
        """
        manifest, folder, own = checkpoint.manifest, checkpoint.folder, self.server.optimizer
        mine = _called(own.name, getattr(own, "moments", None))
        found = _called(manifest.state["optimizer"], manifest.state["moments"])
        if mine != found:
            raise OtherCheckpointError(
                f"{folder} was saved with the optimizer {found}; the engine has {mine}."
            )
        several = self.server.world.is_parallel or len(manifest.shares) > 1
        if several and manifest.state["link"] != self._link:
            raise OtherCheckpointError(
                f"{folder} is of another precision. Keep it, or save and load in a single process."
            )
        forms, among = expected.forms, _among_others(checkpoint, expected.forms)
        wanted = {
            file_name(name, one): (form, one)
            for name, form in forms.items()
            for one in manifest.shares
            if name not in among
        }
        also = [form for name, form in forms.items() if name in among]
        for file in dict.fromkeys((*wanted, *manifest.files)):
            if file in wanted and file in manifest.files:
                beside = also if file == OUTER else ()
                self._compare_unit(checkpoint, file, *wanted[file], also=beside)
            elif file != BUFFERS:
                number = sum(unit.startswith("L") for unit in forms)
                has = "no" if file in wanted else "a"
                raise OtherCheckpointError(
                    f"{folder} has {has} unit {file}: of another model, expected {number} layers."
                )
        outer, layers = (
            {name: (one.dtype, tuple(one.shape)) for name, one in buffers.items()}
            for buffers in (expected.outer_buffers, expected.layer_buffers)
        )
        _compare(checkpoint.path(BUFFERS), checkpoint.kinds(BUFFERS), outer, also=layers)
        self._check_groups(checkpoint, forms)

    @staticmethod
    def _compare_unit(
        checkpoint: Checkpoint,
        file: str,
        form: UnitForm,
        share: Share,
        *,
        also: Sequence[UnitForm] = (),
    ) -> None:
        """Compare a file with what it must have of a unit, and of others that are in it."""
        kinds = {k: v for one in (form, *also) for k, v in kinds_in(one, share).items()}
        _compare(checkpoint.path(file), checkpoint.kinds(file), kinds)
        files = checkpoint.manifest.files
        steps, first = files[file].steps, files[file_name(form.name, Share(number=share.number))]
        names = {name for one in (form, *also) for name in one.trained.names}
        if set(steps) not in ({""}, names) or steps != first.steps:
            raise OtherCheckpointError(
                f"{checkpoint.folder / MANIFEST}: the update counts of {file} do not match its "
                "trained parameters: the checkpoint belongs to a different model."
            )

    def _check_groups(self, checkpoint: Checkpoint, forms: Mapping[str, UnitForm]) -> None:
        """Refuse numbers of parameter groups that no optimizer of this kind has."""
        path, optimizer = checkpoint.folder / MANIFEST, self.server.optimizer
        own = dict(self.optimizer.defaults)
        given = {one.name: one.default for one in fields(optimizer) if one.default is not MISSING}
        own |= {name: value for name, value in given.items() if name in own}
        kinds = {kind for form in forms.values() for kind in form.state_kinds}
        for index, group in enumerate(checkpoint.manifest.state["groups"]):
            for name, value in group.items():
                if not (_is_like(value, own[name]) if name in own else _is_plain(value)):
                    raise CheckpointError(
                        f"{path} is damaged: {name} of parameter group {index} is "
                        f"{str(value)[:40]!r}; expected a value like {own.get(name)!r}."
                    )
            if isinstance(optimizer, HostOptimizer) and own.keys() <= group.keys():
                missing = set(optimizer.state_kinds(group)) - kinds
                if missing and kinds:
                    raise OtherCheckpointError(
                        f"{path}: parameter group {index} needs {sorted(missing)}, not there."
                    )

    # ----------------------------------------------------------------------------------------------

    def load(self, checkpoint: Checkpoint) -> None:
        """Take over the tensors and numbers of a checkpoint that was checked."""
        state, shares, saved = checkpoint.manifest.state, checkpoint.manifest.shares, None
        if state["link"] != self._link:
            said = "%s was saved with precision %s; this engine has %s, so results differ from "
            said += "those of the run that was saved."
            logger.warning(said, checkpoint.folder, state["link"], self._link)
            saved = SavedModel(checkpoint)
        self.server.waiting.clear()
        among = _among_others(checkpoint, {k: one.form for k, one in self.server.units.items()})
        for name, unit in self.server.units.items():
            targets = self.server.at_hand(name)
            source = OUTER if name in among else name
            if saved is not None:
                self._load_converted(checkpoint, saved, source, targets)
            else:
                for share in shares:
                    self._load_share(checkpoint, unit, file_name(source, share), share, targets)
            for owner in unit.steps:
                unit.steps[owner] = checkpoint.steps(file_name(source, shares[0]), owner)
        if self.loss_scale is not None:
            for key, value in (state["loss_scale"] or {}).items():
                setattr(self.loss_scale, key, value)
        if not self.optimizer.restore_numbers(state["groups"]):
            said = "%s has other parameter groups; the engine keeps its own learning rates."
            logger.warning(said, checkpoint.folder)

    @staticmethod
    def _load_share(
        checkpoint: Checkpoint,
        unit: Unit,
        file: str,
        share: Share,
        targets: Mapping[str, Tensor],
    ) -> None:
        """Load what is needed here of the share that one rank has saved of a unit."""
        if share.number == unit.share.number == 1:
            for key, value in checkpoint.read(file, targets):
                targets[key].copy_(value)
            return
        layout = unit.form.weight_layout
        saved = layout.cut_for(share.number)
        places: dict[str, tuple[slice, slice]] = {}
        for key in targets:
            owner, _, kind = key.partition("|")
            owner = key if key in layout.names else owner
            theirs, mine = saved.piece(owner, share), layout.piece(owner, unit.share)
            start, stop = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
            state = unit.form.state_kinds.get(kind) if owner != key else None
            block = ALIGNMENT_ELEMENTS if state is not None and state.per_block else 1
            if start < stop:
                places[key] = (
                    slice((start - mine.start) // block, -(-(stop - mine.start) // block)),
                    slice((start - theirs.start) // block, -(-(stop - theirs.start) // block)),
                )
        for key, value in checkpoint.read(file, places):
            here, there = places[key]
            targets[key].view(-1)[here].copy_(value.reshape(-1)[there])

    def _load_converted(
        self, checkpoint: Checkpoint, saved: SavedModel, name: str, targets: Mapping[str, Tensor]
    ) -> None:
        """Load tensors of another precision: masters are joined there and split here."""
        trained = {owner for unit in self.server.units.values() for owner in unit.steps}
        others = [key for key in targets if key not in trained]
        as_they_are = [key for key in others if key.rpartition("|")[2] not in COMPANIONS]
        for key, value in checkpoint.read(name, as_they_are):
            targets[key].copy_(value)
        for owner in trained & targets.keys():
            self.server.set_weight(owner, saved.read(owner, targets[owner].shape))

    def load_buffers(self, checkpoint: Checkpoint, present: Mapping[str, Tensor]) -> None:
        """Buffers as they were; `present` are those on the device."""
        own: dict[str, Tensor] = {}
        loaded: list[tuple[str, Tensor]] = []
        # Those of layers are with the layers as they were at first, and once more if they changed.
        for index, tensors in enumerate(self.partition.layer_tensors):
            own |= tensors.buffers
            unit = self.server.units[f"L{index}"]
            loaded += [(owner, unit.weight_of(owner)) for owner in tensors.buffers]
        for name, value in chain(loaded, checkpoint.read(BUFFERS, checkpoint.kinds(BUFFERS))):
            for target in (own.get(name), present.get(name)):
                if target is not None:
                    target.copy_(value)


def _among_others(checkpoint: Checkpoint, forms: Mapping[str, UnitForm]) -> frozenset[str]:
    """Units that a checkpoint of earlier days has with what else is around the layers: heads."""
    files = checkpoint.manifest.files
    if OUTER not in files or OUTER not in forms:  # several ranks have saved it
        return frozenset()
    there = checkpoint.kinds(OUTER)
    missing = [name for name in forms if name.startswith("T") and name not in files]
    return frozenset(n for n in missing if {*forms[n].weight_layout.names} <= there.keys())


def _announce_stall(folder: Path, total: int, spare: int, step_seconds: float) -> float:
    """Say how long training will wait for the disk."""
    rate = measure_disk(folder.parent)
    stall = max(0.0, (total - spare) / rate - step_seconds)
    shown = [format_bytes(one) for one in (total, int(rate), max(0, spare), total - spare)]
    logger.warning(
        "saving %s to a disk that takes %s/s, with %s of spare host memory: training will wait for "
        "about %.0f s. With %s more (host_memory) it would not.",
        *(*shown[:3], stall, shown[3]),
    )
    return stall


def _compare(
    path: Path,
    found: Mapping[str, TensorKind],
    wanted: Mapping[str, TensorKind],
    *,
    also: Mapping[str, TensorKind] | None = None,
) -> None:
    """Compare the tensors of a file with those that it must have, and those that it may have."""
    known = {**(also or {}), **wanted}
    for name in dict.fromkeys((*wanted, *found)):
        if name not in found or name not in known:
            raise OtherCheckpointError(
                f"{path} {'also has' if name in found else 'lacks'} {name!r}: it is of another "
                "model, or of one in which other parameters are trained."
            )
        for what, one, other in zip(("dtype", "shape"), found[name], known[name], strict=True):
            if one != other:
                has, expected = (list(v) if isinstance(v, tuple) else v for v in (one, other))
                raise OtherCheckpointError(
                    f"{path}: {name!r} has {what} {has}, expected {expected}: of another model."
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
