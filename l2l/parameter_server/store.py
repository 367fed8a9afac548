"""The parameter server: the one owner of weights, gradients that wait, and optimizer state.

Everything of a unit (a layer, or the outer parameters) lies in a few flat buffers in host memory:

    weights     what crosses the link, in the link dtype, registered for DMA; also buffers, frozen
                parameters, and the state of an optimizer that runs on the device
    companion   what makes a 16-bit link weight a float32 master: the 16 bits that a bfloat16 weight
                lacks ([Note: split master] in precision.py), or, since a float16 cannot be half of
                a float32, a whole float32 master beside a float16 weight; nothing for float32
    state       one buffer per optimizer state (moments)

Bytes per trained parameter, without staging: 12 with AdamW and bfloat16 (2 + 2 + 8), 12 with
float32 (4 + 8), 14 with float16 (2 + 4 + 8); 6.1 with 8-bit moments; 2 with Adafactor.

All but `weights` cover the trained parameters only, at the element offsets of `Unit.trained`. A
flat buffer can be cut at any multiple of the alignment: there it will be divided over ranks.

How updates wait for a later step: [Note: updates that wait] in waiting.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from l2l.device import Device, DiskError
from l2l.distributed import World
from l2l.model import Reader, UnitTensors, format_of, hold, mean
from l2l.parameter_server.forms import UnitForm
from l2l.parameter_server.host_kernel import HostKernel, PreparedUpdates, working_threads
from l2l.parameter_server.host_memory import Arena, SparePages, copy_bytes
from l2l.parameter_server.optimizer import Half, HostOptimizer, Optimizer, Settings, UpdateOrder
from l2l.parameter_server.snapshot import WRITING_CORES, Image, Snapshot
from l2l.parameter_server.unit import Move, Unit, exchange, nothing_like, rearranged
from l2l.parameter_server.units_on_disk import Part, UnitsOnDisk
from l2l.parameter_server.waiting import WaitingUpdate

logger = logging.getLogger("l2l")

NAN_BYTE = 0xFF  # many of which are NaN in every type


@final
class ParameterServer:
    """Weights, companions and optimizer state of every unit."""

    def __init__(
        self,
        *,
        arena: Arena,
        optimizer: Optimizer,
        kernel: HostKernel | None,
        seed: int,
        world: World | None = None,
        disk: UnitsOnDisk | None = None,
    ) -> None:
        self.disk = disk
        self.world = world or World()
        self._arena = arena
        self.optimizer = optimizer
        self._kernel = kernel
        self.reseed(seed)
        self.units: dict[str, Unit] = {}
        self.waiting: dict[str, WaitingUpdate] = {}  # by unit
        self.snapshot: Snapshot | None = None  # one that is being written
        self.spare = SparePages()  # for its copies
        self.lost: list[str] = []  # units whose weights went with the disk
        # Units of which a part may be updated, by a thread that can be interrupted.
        self.unfinished: set[str] = set()
        self._unit_of: dict[str, Unit] = {}
        self.reader = Reader(self._read)  # for whoever reads the user's parameters

    @property
    def is_torn(self) -> bool:
        """Whether an update was interrupted here."""
        return bool(self.unfinished)

    def forget_updates(self) -> None:
        """All that is here is to be replaced."""
        self.waiting.clear()
        self.unfinished.clear()
        if self.disk is not None:
            self.disk.forget()

    def close(self) -> None:
        """Let go of all memory at once, not only when Python collects cycles."""
        self.spare.close()
        self.forget_updates()
        if self.disk is not None:
            self.disk.close()
        for unit in self.units.values():
            unit.let_go()

    def reseed(self, seed: int) -> None:
        """Round by the random numbers of another seed."""
        self.seed = seed & 0xFFFFFFFF

    def add(self, form: UnitForm, tensors: UnitTensors, *, on_disk: Collection[Part] = ()) -> None:
        """Move a unit in, parts of it perhaps to disk: copy its tensors, hollow out the parameters.

        A hollow parameter keeps its shape and holds NaN without memory, until `give_back`. One that
        is on the meta device has nothing to copy: `set_weight` follows, and `give_back` leaves it
        on the CPU.
        """
        empty = partial(Unit.empty, form, self.world.share)
        if on_disk and self.disk is not None:
            unit = self.disk.make(form, on_disk, empty)
        else:
            unit = empty(self._arena.take)
        # Nothing of the model has been touched so far; from here on nothing can fail for memory.
        self.units[form.name] = unit
        self._unit_of.update(dict.fromkeys(tensors.parameters, unit))
        self._fill(unit, tensors)

    def _fill(self, unit: Unit, tensors: UnitTensors) -> None:
        """Copy tensors into a unit, and hollow out the parameters."""
        unit.set_buffers(tensors.buffers)
        for owner, parameter in tensors.parameters.items():
            if not parameter.is_meta:
                is_made = owner in tensors.formats and format_of(parameter) is not None
                self.set_weight(owner, parameter if is_made else parameter.data)
        for owner, parameter in tensors.parameters.items():
            known = unit.form.formats.get(owner)
            exchange(parameter, nothing_like(parameter))
            mean(parameter, known)
            hold(parameter, owner, self.reader)

    def rearrange(self, moves: Sequence[Move]) -> None:
        """Let the layers be these, in this order; units around them stay.

        All updates must have been done, and nobody may read a unit meanwhile. A unit that only gets
        another name keeps its memory. If memory is short nothing has changed.
        """
        self.units = rearranged(self.units, moves, self.world.share, self._arena)
        self._unit_of = {o: u for o, u in self._unit_of.items() if not u.form.name.startswith("L")}
        places = self.reader.places.items()
        self.reader.places = {owner: one for owner, one in places if owner in self._unit_of}
        self.reader.forget()
        for move in moves:
            unit = self.units[move.form.name]
            self._unit_of.update(dict.fromkeys(move.tensors.parameters, unit))
            if move.source is None:
                self._fill(unit, move.tensors)
                continue
            unit.set_buffers(move.tensors.buffers)
            for owner, parameter in move.tensors.parameters.items():
                hold(parameter, owner, self.reader)

    def give_back(self, parameters: Mapping[str, nn.Parameter], name: str) -> None:
        """Move a unit's weights into the parameters again and drop its host memory.

        Several ranks that hold it together must do this together.
        """
        try:
            unit = self.with_masters(name)
        except DiskError as error:
            unit = self.units[name]
            if "weights" in unit.blocks:
                self.lost.append(name)
                unit.weights = _only_nan(unit.held.weight_layout.nbytes)
            else:
                logger.warning("weights of %s come back rounded: %s", name, error)
        for owner, parameter in parameters.items():
            weight, known = unit.value(owner), unit.form.formats.get(owner)
            if known is not None:
                own = known.copy(weight, parameter.device)
                mean(parameter, None)
                exchange(parameter, own)
            else:
                own = weight.to(device=parameter.device, dtype=parameter.dtype)
                exchange(parameter, own.clone() if own.data_ptr() == weight.data_ptr() else own)
            del self._unit_of[owner]
        gone = self.units.pop(name)
        if self.disk is not None:
            self.disk.let_go(gone)
        gone.let_go()

    def whole(self, name: str) -> Unit:
        """A unit with all of its weights, without its state; its ranks must ask together."""
        if self.disk is not None:
            self.disk.bring(self.units[name], parts=["weights"])
        return self.units[name].whole(self.world)

    def with_masters(self, name: str) -> Unit:
        """The same, for its values: what completes its weights is at hand, too."""
        self.bring(name)
        return self.whole(name)

    def bring(self, name: str, *, changes: bool = False) -> None:
        """Let all of a unit be at hand, if anything of it is on disk."""
        if self.disk is not None:
            self.disk.bring(self.units[name], changes=changes)

    def _brought(self, owner: str, *, changes: bool = False) -> Unit:
        """A parameter's unit, after that."""
        self.bring(self.unit_of(owner), changes=changes)
        return self._unit_of[owner]

    def unit_of(self, owner: str) -> str:
        """The name of the unit that a parameter is in."""
        return self._unit_of[owner].form.name

    def weight(self, owner: str) -> Tensor:
        """A parameter's present value, or this rank's piece of it."""
        return self._brought(owner).value(owner)

    def _read(self, owner: str) -> Tensor:
        """A parameter's present value, all of it, after the updates that wait.

        Raises:
            RuntimeError: several ranks hold it together.
        """
        if self.world.share.number > 1:
            raise RuntimeError(
                f"{owner!r} is held by several ranks together, so one of them cannot read it "
                "alone. Call engine.state_dict(), engine.named_weights() or engine.export(...) on "
                "all ranks together, or close the engine first."
            )
        self.settle_all()
        return self.weight(owner)

    def set_weight(self, owner: str, value: Tensor) -> None:
        """Overwrite a parameter's value; `value` is all of it."""
        unit = self._brought(owner, changes=True)
        if owner in unit.form.formats:
            _quantize(unit, owner, value, self._arena)
        else:
            unit.set_value(owner, value, self._kernel)

    def state_of(self, owner: str) -> dict[str, Any]:
        """A parameter's optimizer state as views, torch's names; empty before its first step.

        Raises:
            RuntimeError: several ranks hold it together.
        """
        if self.world.is_parallel:
            raise RuntimeError(
                "each rank holds a share of the optimizer's state. engine.save writes all of it, "
                "for any number of ranks to read."
            )
        self.settle_all()
        unit = self._brought(owner)
        return {k: v.clone() if unit.blocks else v for k, v in unit.shown_state(owner).items()}

    def set_state(self, owner: str, state: Mapping[str, Any]) -> None:
        """Overwrite a parameter's optimizer state with what `state_of` has given."""
        self.settle_all()
        unit = self._brought(owner, changes=True)
        self.before_change(unit.form.name)
        unit.set_state(owner, state)

    def update(
        self,
        name: str,
        gradient: Tensor,
        order: UpdateOrder,
        ranges: Mapping[str, Tensor] | None = None,
        *,
        count_step: bool = True,
        half: Half | None = None,
    ) -> None:
        """Apply one step's gradient to a unit.

        Args:
            name: The unit.
            gradient: Staging bytes.
            order: The numbers of the step. The size of the change is added to its `changes`.
            ranges: By parameter, the only elements to update (`Update.ranges`). A parameter that is
                not named is updated whole.
            count_step: Whether this is a step of its own, not another part of the last one.
            half: What alone is to change.
        """
        self.before_change(name)
        unit, optimizer = self.units[name], self.optimizer
        assert isinstance(optimizer, HostOptimizer)
        unit.changed |= unit.blocks.keys()
        if count_step:
            for owner in order.received:
                unit.steps[owner] += 1
        kinds = {
            owner: optimizer.native_number(order.settings[owner]) if self._kernel else None
            for owner in unit.held.trained.names
            if owner in order.received
        }
        slow = [owner for owner, kind in kinds.items() if kind is None]
        change = 0.0
        if self._kernel is not None and len(slow) < len(kinds):
            num_threads = working_threads()
            if self.snapshot is not None:  # its writers need cores, and would take them anyway
                num_threads = max(1, num_threads - WRITING_CORES)
            made = partial(PreparedUpdates, self._kernel, optimizer)
            prepared, owners = unit.prepared_for(kinds, made, gradient, order, half, self.seed)
            numbers = [
                optimizer.numbers(order.settings[owner], unit.steps[owner], order.factor, self.seed)
                for owner in owners
            ]
            own = [None if ranges is None else ranges.get(owner) for owner in owners]
            change = prepared.perform(numbers, ranges=own, num_threads=num_threads)
        for update in unit.updates(slow, gradient, order, half=half, seed=self.seed):
            chosen = None if ranges is None else ranges.get(update.name)
            if chosen is not None and optimizer.needs_whole(update.settings):
                if not len(chosen):  # it was done as a whole
                    continue
                chosen = None
            change += optimizer.readable(replace(update, ranges=chosen))
        if order.changes is not None:
            order.changes[name] = order.changes.get(name, 0.0) + change

    def register(self, name: str, device: Device) -> None:
        """Let the device copy from and to a unit's companion and state without the host."""
        for tensor in self.units[name].kept().values():
            if tensor.device.type == "cpu":
                device.register(tensor)

    def place_state(self, name: str, device: torch.device) -> None:
        """Move a unit's companion and state to a device, or back to the host."""
        unit = self.units[name]
        if all(tensor.device == device for tensor in unit.kept().values()):
            return
        self.before_change(name)  # writers must not find it on the device
        sign = 1 if device.type == "cpu" else -1
        for key, tensor in unit.kept().items():
            self._arena.count(key, sign * tensor.nbytes)
        if unit.companion is not None:
            unit.companion = unit.companion.to(device)
        unit.state = {key: state.to(device) for key, state in unit.state.items()}

    def before_change(self, name: str) -> None:
        """Called before a unit's host memory changes: see snapshot.py."""
        snapshot = self.snapshot  # which writers forget when they are done
        if snapshot is not None:
            snapshot.before(name)

    def after_update(self, name: str) -> None:
        """Called when an update that was left is done, and written where that is on disk."""
        snapshot = self.snapshot
        if snapshot is not None:
            snapshot.complete(name)

    def image(self, name: str) -> Image:
        """All that a unit holds, without copying: weights by name, the rest as `owner|what`."""
        unit = self.units[name]
        if not unit.blocks or self.disk is None:
            return Image(unit=name, tensors=unit.tensors(), steps=unit.steps)
        here = unit.tensors(but=unit.blocks)
        there, read = self.disk.tensors(unit)
        return Image(unit=name, tensors={**here, **there}, steps=unit.steps, read=read)

    def at_hand(self, name: str) -> dict[str, Tensor]:
        """The same to be overwritten, all of it in memory until that of another unit is asked for.

        Nothing may run.
        """
        self.bring(name, changes=True)
        return self.units[name].tensors()

    def begin_snapshot(
        self,
        order: Sequence[str],
        *,
        at_once: Collection[str],
        spare_bytes: int,
        copies_ahead: bool,
    ) -> Snapshot:
        """Begin to write every unit as it is after the last step.

        The device and the update lane must have nothing left to do.

        Args:
            order: units, those first that the next step changes first.
            at_once: units whose update is not left to the next step: the device would do it.
            spare_bytes: host memory that copies may take.
            copies_ahead: whether units will change meanwhile, and are better copied before.
        """
        for name in [name for name in self.waiting if name in at_once]:
            self._settle(name)
        if self.disk is not None:
            self.disk.finish()  # writers read what is on disk
        self.spare.reclaim()  # what an earlier one that failed has left
        self.snapshot = Snapshot(
            order,
            image_of=self.image,
            copy_of=self._copy,
            awaited=frozenset(self.waiting),
            changing=frozenset(name for name in order if self._may_copy(name)),
            spare_bytes=spare_bytes,
            copies_ahead=copies_ahead,
            release=self._release,
        )
        return self.snapshot

    def _may_copy(self, name: str) -> bool:
        """Whether a unit changes, and may be copied before: one on disk waits until it is saved."""
        unit = self.units[name]
        return bool(unit.form.trained.names) and not unit.blocks

    def units_on_device(self) -> list[str]:
        """Units whose optimizer state is on the device."""
        return [
            name
            for name, unit in self.units.items()
            if any(tensor.device.type != "cpu" for tensor in unit.kept().values())
        ]

    def _copy(self, tensors: Mapping[str, Tensor], urgent: bool) -> dict[str, Tensor]:  # noqa: FBT001
        """Copies in one block of spare pages."""
        return self.spare.copies(tensors, kernel=self._kernel, urgent=urgent)

    def _release(self, copy: Image) -> None:
        if copy.nbytes:
            self.spare.give_back(next(iter(copy.tensors.values())).data_ptr())

    def fill_spare(self, order: Sequence[str], *, most_bytes: int) -> None:
        """Make the pages that copies of units will need, beside whatever else happens."""
        sizes: list[int] = []
        for name in order:
            nbytes = copy_bytes(self.image(name).tensors)
            if self._may_copy(name) and sum(sizes) + nbytes <= most_bytes:
                sizes.append(nbytes)
        self.spare.fill(sizes)

    def settle_all(self) -> None:
        """Bring every unit to the last step, on the calling thread."""
        for unit in self.units.values():
            if unit.pending is not None:
                unit.pending.synchronize()
                unit.pending = None
        if self.disk is not None:
            self.disk.finish()
        for name in list(self.waiting):
            self._settle(name)

    def _settle(self, name: str) -> None:
        waiting = self.waiting[name]
        waiting.drained.synchronize()
        self.bring(name)
        self.unfinished.add(name)  # and it stays there if this is interrupted
        waiting.perform(self)
        if self.disk is not None and self.units[name].blocks:
            self.disk.put_away()
            self.after_update(name)
        self.unfinished.discard(name)
        del self.waiting[name]


def _only_nan(nbytes: int) -> Tensor:
    return torch.full((nbytes,), NAN_BYTE, dtype=torch.uint8)


def lost_weights(server: ParameterServer) -> DiskError | None:
    """What went with the disk, once all weights were given back."""
    if not server.lost:
        return None
    return DiskError(
        f"weights of {', '.join(server.lost)} were on a disk that cannot be read: they are NaN in "
        "the model now. Make a new engine and load the last checkpoint."
    )


def exchange_averages(server: ParameterServer) -> None:
    """Let weights and their running means change places; all updates must have been done."""
    server.reader.forget()
    for name, unit in server.units.items():
        server.before_change(name)
        server.bring(name, changes=True)
        server.unfinished.add(name)  # and it stays there if this is interrupted
        unit.exchange_averages()
        server.unfinished.discard(name)


def _quantize(unit: Unit, owner: str, value: Tensor, arena: Arena) -> None:
    """Write a parameter in its format: on the device, as that is much work, where there is room."""
    try:
        unit.set_value(owner, arena.on_device(value), None)
    except torch.OutOfMemoryError:
        unit.set_value(owner, value.cpu(), None)


@contextlib.contextmanager
def values_of(server: ParameterServer) -> Iterator[Callable[[str], Tensor] | None]:
    """Present values of all parameters, for rank 0: the others help it inside and get None.

    Raises:
        RuntimeError: on the others, if the block has failed on rank 0.
    """
    world = server.world
    if not world.is_parallel:
        yield server.weight  # one by one, of a unit after the other
        return
    if world.rank:
        # Rank 0 says which unit it needs, "" at the end, or why it has failed.
        while (asked := world.gather_facts("")[0]) in server.units:
            server.whole(asked)
        if asked:
            raise RuntimeError(f"rank 0: {asked}")
        yield None
        return
    last: dict[str, Unit] = {}

    def value(owner: str) -> Tensor:
        name = server.unit_of(owner)
        if name not in last:
            last.clear()
            world.gather_facts(name)
            last[name] = server.whole(name)
        return last[name].value(owner)

    try:
        yield value
    except Exception as error:
        world.gather_facts(str(error) or repr(error))
        raise
    world.gather_facts("")


def check_settings(server: ParameterServer, settings: Mapping[str, Settings]) -> None:
    """Refuse settings that need state which was not set up.

    Raises:
        ValueError: with the parameter and the state.
    """
    if not isinstance(server.optimizer, HostOptimizer):
        return
    for owner, numbers in settings.items():
        kinds = server.units[server.unit_of(owner)].form.state_kinds
        missing = set(server.optimizer.state_kinds(numbers)) - set(kinds)
        if missing:
            raise ValueError(
                f"the settings of {owner!r} now need {sorted(missing)}, which was not set up "
                "when the engine was made. Make the engine with these settings."
            )
