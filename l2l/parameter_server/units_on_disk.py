"""What of units is on disk, and the host buffers through which it comes and goes.

What an update needs besides weights and gradient, the optimizer's state and what makes a weight its
master, is needed once a step; weights are needed twice. Of some units the first, or both, lie on
disk: two *parts*, "state" and "weights", each in one block of whole pages. A part is *at hand* in a
buffer only while lines of a schedule need it: then the unit's companion and state, or its weights,
are views of that buffer. In between the unit has none.

Whoever needs them outside of a schedule asks for them (`bring`): they stay at hand in the first
buffers until another unit's are asked for, or `put_away`, before the next schedule runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, final

import torch
from torch import Tensor

from l2l.device import PAGE_BYTES, DiskError, DiskFolder, Event
from l2l.parameter_server.forms import UnitForm, state_name
from l2l.parameter_server.host_memory import Arena
from l2l.parameter_server.layout import round_up
from l2l.parameter_server.unit import Part, Unit, without_values

logger = logging.getLogger("l2l")

ALL_PARTS: Final[tuple[Part, ...]] = ("state", "weights")
BUFFERS: Final = "buffers for the disk"  # in a ledger
PLACES: Final[Mapping[Part, tuple[str, ...]]] = {
    "state": ("B0", "B1"),
    "weights": ("D0", "D1", "D2"),
}
"""Names of the buffers; docs/log.md says why there are no more."""


def block_bytes(form: UnitForm, part: Part) -> int:
    """Bytes on disk of what is kept of a unit besides its weights, or of these: whole pages."""
    if part == "weights":
        return round_up(form.weight_layout.nbytes, PAGE_BYTES)
    return sum(nbytes for _, _, nbytes in _places(form).values())


def written_bytes(form: UnitForm, part: Part) -> int:
    """How much of that a step writes: of weights those that are trained, which come first."""
    if part == "state":
        return block_bytes(form, part)
    last = form.weight_layout.segments[: len(form.trained.segments)][-1:]
    return sum(round_up(one.offset_bytes + one.nbytes, PAGE_BYTES) for one in last)


def buffer_bytes(forms: Iterable[UnitForm], parts: Collection[Part]) -> int:
    """Host memory for the buffers of these parts, of units that may be on disk."""
    forms = list(forms)
    return sum(len(PLACES[part]) * _largest(forms, part) for part in parts)


def _largest(forms: Iterable[UnitForm], part: Part) -> int:
    return max((block_bytes(form, part) for form in forms), default=0)


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


def _part_in(place: str) -> Part:
    return "state" if place.startswith("B") else "weights"


@final
class UnitsOnDisk:
    """Owner of units' blocks on a disk, and of the buffers."""

    def __init__(self, folder: DiskFolder, *, arena: Arena, forms: Iterable[UnitForm]) -> None:
        """Nothing is on disk yet. `forms`: of all units that may be."""
        self.folder, self._arena, self._device = folder, arena, arena.device
        self._forms = tuple(forms)
        self._buffers: dict[str, Tensor] = {}
        self.last: dict[str, Event] = {}  # what earlier steps did to a part, a buffer, all buffers
        self._at_hand: dict[str, Unit] = {}  # by buffer
        self._lent: Unit | None = None  # whom somebody has asked for

    # ----------------------------------------------------------------------------------------------
    # Lines of a schedule

    def fetch(self, unit: Unit, place: str) -> None:
        """Read a part of a unit into a buffer; the read lane does this."""
        part = _part_in(place)
        assert part in unit.blocks, f"{part} of {unit.form.name} are not on disk"
        block = unit.blocks[part]
        if part == "weights" and place in self._at_hand:  # of which nobody needs them any more
            self._leave(self._at_hand[place], place)
        self.folder.read(block, self._buffers[place][: block.nbytes])
        self._hand(unit, place)

    def drain(self, unit: Unit, place: str, *, all_of_it: bool = False) -> None:
        """Write it, if it has changed, and leave the buffer; the write lane does this."""
        part = _part_in(place)
        assert self._at_hand.get(place) is unit, f"{part} of {unit.form.name} are not in {place}"
        if part in unit.changed:
            block = unit.blocks[part]
            nbytes = block.nbytes if all_of_it else written_bytes(unit.held, part)
            self.folder.write(block, self._buffers[place][:nbytes])
            unit.changed.discard(part)
        self._leave(unit, place)

    def note(self, event: Event, *what: str) -> None:
        """A line has done something for which those of later steps may have to wait."""
        self.last |= dict.fromkeys(what, event)

    def weights_in(self, place: str, unit: Unit) -> Tensor:
        """Where a unit's weights are once they have been read into a buffer."""
        return self._buffers[place][: unit.held.weight_layout.nbytes]

    def _hand(self, unit: Unit, place: str) -> None:
        if _part_in(place) == "weights":
            for other in [other for other, one in self._at_hand.items() if one is unit]:
                if _part_in(other) == "weights":
                    del self._at_hand[other]
            unit.weights = self.weights_in(place, unit)
        else:
            views = _views(unit.held, self._buffers[place])
            unit.companion = views.pop(unit.form.companion_name, None)
            unit.state = views
        unit.changed.discard(_part_in(place))
        self._at_hand[place] = unit

    def _leave(self, unit: Unit, place: str) -> None:
        if _part_in(place) == "weights":
            unit.weights = unit.weights.new_empty(0)
        else:
            unit.companion, unit.state = None, {}
        unit.changed.discard(_part_in(place))
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
        self._forget_all()
        self._lent = None

    def _forget_all(self) -> None:
        for place, unit in list(self._at_hand.items()):
            self._leave(unit, place)

    # ----------------------------------------------------------------------------------------------
    # For others, while no schedule runs

    def bring(
        self, unit: Unit, *, changes: bool = False, parts: Collection[Part] = ALL_PARTS
    ) -> None:
        """Let parts of a unit be at hand until another's are asked for; `changes`: they may change.

        Raises:
            DiskError: they cannot be read, or those of the one before not be written.
        """
        own = [part for part in parts if part in unit.blocks]
        if own and self._lent is not unit:
            self.finish()
            self._forget_all()
            self._lent = unit
        for part in own:
            if PLACES[part][0] not in self._at_hand:
                self.fetch(unit, PLACES[part][0])
        if changes:
            unit.changed |= {*own}

    def finish(self) -> None:
        """Wait until schedules need no buffer any more, and put away what was asked for.

        Raises:
            DiskError: what they have changed could not be written.
        """
        for event in self.last.values():
            event.synchronize()
        self.put_away()

    def put_away(self) -> None:
        """Write what was asked for, if it has changed.

        Raises:
            DiskError: that is not possible.
        """
        if self._lent is not None:
            for place in [place for place, one in self._at_hand.items() if one is self._lent]:
                self.drain(self._lent, place, all_of_it=True)
            self._lent = None

    def reserve(self, parts: Iterable[Part]) -> None:
        """Take memory for the buffers of these parts, and give that of others back."""
        parts = set(parts)
        for part, places in PLACES.items():
            nbytes = _largest(self._forms, part)
            for place in places:
                if part in parts and place not in self._buffers:
                    take, registered = self._arena.take, part == "weights"
                    self._buffers[place] = take(BUFFERS, nbytes, torch.uint8, registered=registered)
                elif part not in parts and place in self._buffers:
                    self._arena.give_back(BUFFERS, self._buffers.pop(place))

    def make(self, form: UnitForm, parts: Collection[Part], empty: Callable[..., Unit]) -> Unit:
        """A new unit with these parts on disk: zeros, which are at hand.

        `empty` makes it with memory from what it is given, as `Arena.take` gives it.
        """
        self.finish()
        self._forget_all()

        def take(name: str, numel: int, dtype: torch.dtype, *, registered: bool) -> Tensor:
            own: Part = "weights" if name == "weights" else "state"
            number = 0 if own in parts else numel
            return self._arena.take(name, number, dtype, registered=registered)

        unit = empty(take)
        for part in parts:
            place = PLACES[part][0]
            self._buffers[place].zero_()
            unit.blocks[part] = self.folder.make(block_bytes(form, part))
            self._hand(unit, place)
        self._lent = unit
        unit.changed |= unit.blocks.keys()
        return unit

    def _put(self, unit: Unit, part: Part) -> None:
        """Move a part of a unit from host memory to disk.

        Raises:
            DiskError: there is no room; the unit is as it was.
        """
        kept = {"weights": unit.weights} if part == "weights" else unit.kept()
        if part in unit.blocks or not kept:
            return
        self.finish()
        self._forget_all()
        place = PLACES[part][0]
        buffer = self._buffers[place]
        block = self.folder.make(block_bytes(unit.held, part))
        in_buffer = _views(unit.held, buffer)
        if part == "weights":
            in_buffer = {"weights": self.weights_in(place, unit)}
        for name, tensor in kept.items():
            in_buffer[name].copy_(tensor)
        try:
            self.folder.write(block, buffer[: block.nbytes])
        except DiskError:
            self.folder.remove(block)
            raise
        unit.blocks[part] = block
        self._hand(unit, place)
        for name, tensor in kept.items():
            self._arena.give_back(name, tensor)
        self._leave(unit, place)

    def _bring_back(self, unit: Unit, part: Part) -> None:
        """Move a part of a unit back to host memory.

        Raises:
            DiskError: it cannot be read; the unit is as it was.
        """
        if part not in unit.blocks:
            return
        self.bring(unit, parts=[part])
        theirs = {"weights": unit.weights} if part == "weights" else unit.kept()
        own = {
            name: self._arena.take(
                name, one.numel(), one.dtype, registered=part == "weights"
            ).copy_(one)
            for name, one in theirs.items()
        }
        self.put_away()
        self.folder.remove(unit.blocks.pop(part))
        if part == "weights":
            unit.weights = own["weights"]
        else:
            unit.companion = own.pop(unit.form.companion_name, None)
            unit.state = own

    def place(
        self,
        units: Mapping[str, Unit],
        wanted: Mapping[Part, Collection[str]],
        before_change: Callable[[str], None],
    ) -> None:
        """Let these parts of these units be on disk, and no others; nothing may run.

        Raises:
            DiskError: there is no room, or the disk fails.
        """
        present: set[Part] = {part for unit in units.values() for part in unit.blocks}
        self.reserve({part for part, names in wanted.items() if names} | present)
        for part, names in wanted.items():
            for name in names:  # first: that makes room in memory
                before_change(name)
                self._put(units[name], part)
        for part, names in wanted.items():
            for name, unit in units.items():
                if part in unit.blocks and name not in names:
                    before_change(name)
                    self._bring_back(unit, part)
        self.put_away()
        self.reserve(part for part, names in wanted.items() if names)

    def let_go(self, unit: Unit) -> None:
        """A unit goes: its blocks, too."""
        for place in [place for place, one in self._at_hand.items() if one is unit]:
            self._leave(unit, place)
        self._lent = None if self._lent is unit else self._lent
        for block in unit.blocks.values():
            self.folder.remove(block)
        unit.blocks.clear()

    def tensors(self, unit: Unit) -> tuple[dict[str, Tensor], Callable[[str], Tensor]]:
        """Without values, names and kinds of all of a unit that is on disk; who reads.

        Reading is for any thread while the unit does not change. It takes memory for one tensor at
        a time.
        """
        starts, start = dict[str, int](), 0
        for name, (_, _, nbytes) in _places(unit.held).items():
            starts[name], start = start, start + nbytes
        weights = unit.held.weight_layout
        every = without_values(unit.form, unit.share)
        found = {
            name: one
            for name, one in every.items()
            if ("weights" if name in weights.names else "state") in unit.blocks
        }

        def read(name: str) -> Tensor:
            like = found[name]
            if name in weights.names:
                block, begin = unit.blocks["weights"], weights.start_of(name)
            else:
                owner, _, kind = name.rpartition("|")
                assert name == state_name(owner, kind)
                block = unit.blocks["state"]
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
