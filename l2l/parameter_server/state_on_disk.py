"""What of units is on disk, and the host buffers through which it comes and goes.

What an update needs besides weights and gradient, the optimizer's state and what makes a weight its
master, is needed once a step. Of some units it lies on disk, in one block of whole pages, and is
*at hand* in a buffer only from `fetch` to `drain`: then the unit's companion and state are views of
that buffer. In between the unit has none.

Whoever needs them outside of a schedule asks for them (`bring`): they stay at hand in the first
buffer until another unit's are asked for, or `put_away`, before the next schedule runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import final

import torch
from torch import Tensor

from l2l.device import PAGE_BYTES, DiskError, DiskFolder, Event
from l2l.parameter_server.forms import UnitForm, state_name
from l2l.parameter_server.host_memory import Arena
from l2l.parameter_server.layout import round_up
from l2l.parameter_server.unit import Unit, without_values

logger = logging.getLogger("l2l")

NUM_BUFFERS = 3
BUFFERS = "buffers for the disk"  # in a ledger


def block_bytes(form: UnitForm) -> int:
    """Bytes on disk of what is kept of a unit besides its weights: whole pages."""
    return sum(nbytes for _, _, nbytes in _places(form).values())


def _places(form: UnitForm) -> dict[str, tuple[torch.dtype, int, int]]:
    """Type, number of elements and bytes, padding included, of all that is kept, as it lies."""
    return {
        name: (dtype, numel, round_up(numel * dtype.itemsize, PAGE_BYTES))
        for name, (dtype, numel) in form.kept().items()
    }


def _views(form: UnitForm, buffer: Tensor) -> dict[str, Tensor]:
    """All that is kept, in a buffer."""
    found, start = dict[str, Tensor](), 0
    for name, (dtype, numel, nbytes) in _places(form).items():
        found[name] = buffer[start : start + numel * dtype.itemsize].view(dtype)
        start += nbytes
    return found


@final
class StateOnDisk:
    """Owner of units' blocks on a disk, and of the buffers."""

    def __init__(self, folder: DiskFolder, *, arena: Arena, forms: Iterable[UnitForm]) -> None:
        """Nothing is on disk yet. `forms`: of all units that may be."""
        self.folder, self._arena, self._device = folder, arena, arena.device
        nbytes = max((block_bytes(form) for form in forms), default=0)
        take = arena.take
        self._buffers = {
            f"B{index}": take(BUFFERS, nbytes, torch.uint8, registered=False)
            for index in range(NUM_BUFFERS)
        }
        self.written: dict[str, Event] = {}  # the last drain of each state, and of each buffer
        self._at_hand: dict[str, Unit] = {}  # by buffer
        self._lent: Unit | None = None  # whom somebody has asked for

    # ----------------------------------------------------------------------------------------------
    # Lines of a schedule

    def fetch(self, unit: Unit, place: str) -> None:
        """Read a unit's state into a buffer; the read lane does this."""
        assert unit.block is not None, f"{unit.form.name} is not on disk"
        buffer = self._buffers[place][: unit.block.nbytes]
        self.folder.read(unit.block, buffer)
        self._hand(unit, place)

    def drain(self, unit: Unit, place: str) -> None:
        """Write it, if it has changed, and leave the buffer; the write lane does this."""
        assert self._at_hand.get(place) is unit, f"{unit.form.name} is not in {place}"
        if unit.is_changed:
            assert unit.block is not None
            self.folder.write(unit.block, self._buffers[place][: unit.block.nbytes])
        self._leave(unit, place)

    def _hand(self, unit: Unit, place: str) -> None:
        views = _views(unit.held, self._buffers[place])
        unit.companion = views.pop(unit.form.companion_name, None)
        unit.state, unit.is_changed = views, False
        self._at_hand[place] = unit

    def _leave(self, unit: Unit, place: str) -> None:
        unit.companion, unit.state, unit.is_changed = None, {}, False
        del self._at_hand[place]
        self._device.poison(self._buffers[place])

    def abandon(self) -> list[str] | None:
        """A schedule was given up: what it had changed is written.

        Returns:
            the units that were at hand; None: they could not be written.
        """
        left = list(self._at_hand.items())
        try:
            for place, unit in left:
                self.drain(unit, place)
        except DiskError as error:
            logger.warning("%s", error)
            return None
        self._lent = None
        return [unit.form.name for _, unit in left]

    def forget(self) -> None:
        """All that is here is to be replaced."""
        for place, unit in list(self._at_hand.items()):
            self._leave(unit, place)
        self._lent = None

    # ----------------------------------------------------------------------------------------------
    # For others, while no schedule runs

    def bring(self, unit: Unit, *, changes: bool) -> None:
        """Let a unit's state be at hand until another's is asked for; `changes`: it may change.

        Raises:
            DiskError: it cannot be read, or that of the one before not be written.
        """
        if unit.block is None:
            return
        if self._lent is not unit:
            self.finish()
            self.fetch(unit, "B0")
            self._lent = unit
        unit.is_changed |= changes

    def finish(self) -> None:
        """Wait until all is written that schedules have changed, and put away what was asked for.

        Raises:
            DiskError: it could not be written.
        """
        for event in self.written.values():
            event.synchronize()
        self.put_away()

    def put_away(self) -> None:
        """Write what was asked for, if it has changed.

        Raises:
            DiskError: that is not possible.
        """
        if self._lent is not None:
            self.drain(self._lent, "B0")
            self._lent = None

    def take(self, name: str, numel: int, dtype: torch.dtype, *, registered: bool) -> Tensor:
        """Memory for a unit that is made on disk: what is kept of it lies in the first buffer."""
        return self._arena.take(name, numel if registered else 0, dtype, registered=registered)

    def make(self, unit: Unit) -> None:
        """Let a new unit's state be on disk: zeros, which are at hand."""
        self.finish()
        self._buffers["B0"].zero_()
        unit.block = self.folder.make(block_bytes(unit.held))
        self._hand(unit, "B0")
        self._lent, unit.is_changed = unit, True

    def put(self, unit: Unit) -> None:
        """Move a unit's state from host memory to disk.

        Raises:
            DiskError: there is no room; the unit is as it was.
        """
        kept = unit.kept()
        if unit.block is not None or not kept:
            return
        self.finish()
        block = self.folder.make(block_bytes(unit.held))
        views = _views(unit.held, self._buffers["B0"])
        for name, tensor in kept.items():
            views[name].copy_(tensor)
        try:
            self.folder.write(block, self._buffers["B0"][: block.nbytes])
        except DiskError:
            self.folder.remove(block)
            raise
        unit.block, unit.companion, unit.state = block, None, {}
        for name, tensor in kept.items():
            self._arena.give_back(name, tensor)
        self._device.poison(self._buffers["B0"])

    def bring_back(self, unit: Unit) -> None:
        """Move a unit's state back to host memory.

        Raises:
            DiskError: it cannot be read; the unit is as it was.
        """
        if unit.block is None:
            return
        self.bring(unit, changes=False)
        kept = {
            name: self._arena.take(name, tensor.numel(), tensor.dtype, registered=False)
            for name, tensor in unit.kept().items()
        }
        for name, tensor in unit.kept().items():
            kept[name].copy_(tensor)
        block = unit.block
        self.put_away()
        unit.companion, unit.block = kept.pop(unit.form.companion_name, None), None
        unit.state = kept
        self.folder.remove(block)

    def place(
        self,
        units: Mapping[str, Unit],
        wanted: Collection[str],
        before_change: Callable[[str], None],
    ) -> None:
        """Let the state of these units be on disk, and of no others; nothing may run.

        Raises:
            DiskError: there is no room, or the disk fails.
        """
        for name, unit in units.items():  # first: that makes room in memory
            if unit.block is None and name in wanted:
                before_change(name)
                self.put(unit)
        for name, unit in units.items():
            if unit.block is not None and name not in wanted:
                before_change(name)
                self.bring_back(unit)
        self.put_away()

    def let_go(self, unit: Unit) -> None:
        """A unit goes: its block, too."""
        if unit.block is not None:
            for place in [place for place, one in self._at_hand.items() if one is unit]:
                self._leave(unit, place)
            self._lent = None if self._lent is unit else self._lent
            self.folder.remove(unit.block)
            unit.block = None

    def tensors(self, unit: Unit) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
        """Without values, names and kinds of all that is kept of a unit, by parameter; who reads.

        Reading is for any thread while the unit's state does not change. It takes memory for one
        tensor at a time.
        """
        block, starts, start = unit.block, dict[str, int](), 0
        assert block is not None
        for name, (_, _, nbytes) in _places(unit.held).items():
            starts[name], start = start, start + nbytes
        weights = unit.held.weight_layout.names
        every = without_values(unit.form, unit.share).items()
        found = {name: one for name, one in every if name not in weights}

        def read(name: str) -> Tensor:
            like, (owner, _, kind) = found[name], name.rpartition("|")
            assert name == state_name(owner, kind)
            begin = starts[kind] + int(like.storage_offset()) * like.itemsize
            first = begin // PAGE_BYTES * PAGE_BYTES
            memory = _pages(round_up(begin + like.nbytes, PAGE_BYTES) - first)
            self.folder.read(block, memory, start=first)
            return memory[begin - first :][: like.nbytes].view(like.dtype).view(like.shape)

        return found, read

    def close(self) -> None:
        """Let go of everything."""
        self._at_hand.clear()
        self._buffers.clear()
        self.folder.close()


def _pages(nbytes: int) -> Tensor:
    """Memory at whole pages."""
    memory = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + nbytes]
