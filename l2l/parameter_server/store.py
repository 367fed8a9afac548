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

[Note: updates that wait] An update belongs to its step and carries that step's numbers (learning
rate, decay, clip factor: `UpdateOrder`), however late it runs. An update submitted to the update
lane is *pending*: the fetch lane waits for its event before it reads the weights. An update left to
the next step is *waiting*, its gradient in staging; the next schedule settles it before the fetch.
The host settles both before it reads. So nobody sees stale weights.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor, nn

from l2l.device import Device, Event
from l2l.distributed import Alone, Share, World
from l2l.model import Reader, hold
from l2l.parameter_server import moving
from l2l.parameter_server.adafactor import Adafactor
from l2l.parameter_server.host_kernel import (
    Half,
    HostKernel,
    Numbers,
    working_threads,
)
from l2l.parameter_server.host_memory import Arena, SparePages
from l2l.parameter_server.layout import ALIGNMENT_BYTES, ALIGNMENT_ELEMENTS, FlatLayout, round_up
from l2l.parameter_server.moving import Move
from l2l.parameter_server.operands import SplitWeight
from l2l.parameter_server.optimizer import HostOptimizer, Optimizer, Settings, StateKind, Update
from l2l.parameter_server.precision import PrecisionPolicy, join_master, split_master
from l2l.parameter_server.snapshot import WRITING_CORES, Image, Snapshot
from l2l.parameter_server.unit import (
    COMPANION,
    Unit,
    UnitForm,
    exchange,
    nothing_like,
    other_rows,
    row_ranges,
    shapes_of,
    state_name,
)

MOST_PREPARED = 64  # ways to update a unit that are remembered
COPY_ALIGNMENT = 64
COPYING_THREADS = 4  # that copy what nobody waits for


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOrder:
    """The numbers of an update: those of its own step."""

    settings: Mapping[str, Settings]  # by parameter name
    received: frozenset[str]  # parameters that got a gradient in this step
    factor: float = 1.0  # what gradients are multiplied with
    changes: dict[str, float] | None = None
    """By unit, the sum of squares of what updates have changed: they add to it."""


@dataclass(slots=True, kw_only=True)
class WaitingUpdate:
    """An update left to a later step."""

    unit: str
    order: Callable[[], UpdateOrder | None]  # None: the step is skipped
    drained: Event
    gradient: Tensor | None = None  # staging bytes; None: it is on the device
    finish: Callable[[WaitingUpdate], None] | None = None
    """Called when the update is done; for one on the device, does it."""
    refreshed: list[Tensor] = field(default_factory=list)  # rows that are done already
    refresher: object = None  # whose rows these are: those of one step are distinct
    halves: bool = False  # of these rows only the weights are done
    advanced: bool = False  # all weights are done, the moments are not
    step: Any = None  # whose update it is, where that is done on the device
    numbers: Tensor | None = None  # of an update on the device; zero until they are written
    ordered: bool = False  # whether they are written, and the step is counted
    renewed: bool = False  # whether that update is done, so that the host's weights are old
    performed: bool = False  # whether nothing is left to do


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """Rows of a table, ascending, and where they are in each of its unit's parameters."""

    rows: Tensor
    ranges: Mapping[str, Tensor]  # by parameter

    def __len__(self) -> int:
        return len(self.rows)


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
    ) -> None:
        self.world = world or Alone()
        self._arena = arena
        self.optimizer = optimizer
        self._kernel = kernel
        self.seed = seed & 0xFFFFFFFF  # of rounding
        self.units: dict[str, Unit] = {}
        self.waiting: dict[str, WaitingUpdate] = {}  # by unit
        self.snapshot: Snapshot | None = None  # one that is being written
        self.spare = SparePages()  # for its copies
        self.unfinished: set[str] = set()
        """Units of which a part may be updated, by a thread that can be interrupted."""
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

    @property
    def has_halves(self) -> bool:
        """Whether an update can be done in two: `advance`, then `perform`."""
        return isinstance(self.optimizer, HostOptimizer) and self.optimizer.has_halves

    @staticmethod
    def form(
        name: str,
        *,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        settings: Mapping[str, Settings],
        precision: PrecisionPolicy,
        optimizer: Optimizer,
        num_shares: int = 1,
    ) -> UnitForm:
        """What a unit is made of; `settings` has those of the parameters that are trained.

        What is trained comes first in its weights, as in everything else, so that whoever holds a
        share of the gradient holds the same share of the weights.
        """
        described = [
            (owner, tuple(parameter.shape), precision.link_dtype(owner, parameter.dtype))
            for owner, parameter in parameters.items()
        ]
        trained = FlatLayout.of(
            (entry for entry in described if entry[0] in settings), num_shares=num_shares
        )
        riding = list[tuple[str, tuple[int, ...], torch.dtype]]()
        kinds: dict[str, StateKind] = {}
        companions = {COMPANION[s.dtype] for s in trained.segments if s.dtype in COMPANION}
        if isinstance(optimizer, HostOptimizer):
            for owner in trained.names:
                kinds |= optimizer.state_kinds(settings[owner])
        elif isinstance(optimizer, Adafactor):
            companions = set()
            riding = [
                (state_name(owner, state), state_shape, torch.float32)
                for owner, shape, _ in described
                if owner in settings
                for state, state_shape in optimizer.state_shapes(shape).items()
            ]
        kept = [(key, tuple(value.shape), value.dtype) for key, value in buffers.items()]
        frozen = [entry for entry in described if entry[0] not in settings]
        rest = FlatLayout.of(frozen + kept + riding, num_shares=num_shares)
        return UnitForm(
            name=name,
            weight_layout=FlatLayout.joined(trained, rest),
            trained=trained,
            state_kinds=kinds,
            companion_dtype=next(iter(companions), None),
        )

    def add(
        self,
        form: UnitForm,
        *,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
    ) -> None:
        """Move a unit in: copy its tensors to host memory and hollow out the parameters.

        A hollow parameter keeps its shape and holds NaN without memory, until `give_back`. One that
        is on the meta device has nothing to copy: `set_weight` follows, and `give_back` leaves it
        on the CPU.
        """
        unit = moving.empty_unit(form, self.world.share, self._arena)
        # Nothing of the model has been touched so far; from here on nothing can fail for memory.
        self.units[form.name] = unit
        self._unit_of.update(dict.fromkeys(parameters, unit))
        self._fill(unit, parameters, buffers)

    def _fill(
        self, unit: Unit, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]
    ) -> None:
        """Copy tensors into a unit, and hollow out the parameters."""
        self._set_buffers(unit, buffers)
        for owner, parameter in parameters.items():
            if not parameter.is_meta:
                self.set_weight(owner, parameter.data)
        for owner, parameter in parameters.items():
            exchange(parameter, nothing_like(parameter))
            hold(parameter, owner, self.reader)

    @staticmethod
    def _set_buffers(unit: Unit, buffers: Mapping[str, Tensor]) -> None:
        for key, value in buffers.items():
            if key in unit.held.weight_layout.names:
                unit.weight_of(key).copy_(unit.piece_of(key, value))

    def rearrange(self, moves: Sequence[Move]) -> None:
        """Let the layers be these, in this order; units around them stay.

        All updates must have been done, and nobody may read a unit meanwhile. A unit that only gets
        another name keeps its memory. If memory is short nothing has changed.
        """
        made: dict[str, Unit] = {}
        taken: list[Unit] = []
        try:
            for move in moves:
                source = None if move.source is None else self.units[move.source]
                if source is not None and not move.is_copy and moving.is_alike(source, move.form):
                    made[move.form.name] = moving.renamed(source, move)
                    continue
                if source is None:
                    unit = moving.empty_unit(move.form, self.world.share, self._arena)
                else:
                    unit = moving.copied(source, move, self._arena)
                taken.append(unit)
                made[move.form.name] = unit
        except BaseException:
            for unit in taken:
                moving.let_go(unit, self._arena)
            raise
        kept = {unit.weights.data_ptr() for unit in made.values()}
        for name, unit in self.units.items():
            if not name.startswith("L"):
                made[name] = unit
            elif unit.weights.data_ptr() not in kept:
                moving.let_go(unit, self._arena)
        old, self.units = self.units, made
        gone = {id(unit) for name, unit in old.items() if name.startswith("L")}
        left = {o for o, u in self._unit_of.items() if id(u) in gone}
        self._unit_of = {o: u for o, u in self._unit_of.items() if o not in left}
        self.reader.places = {o: p for o, p in self.reader.places.items() if o not in left}
        self.reader.forget()
        for move in moves:
            unit = made[move.form.name]
            self._unit_of.update(dict.fromkeys(move.parameters, unit))
            if move.source is None:
                self._fill(unit, move.parameters, move.buffers)
                continue
            self._set_buffers(unit, move.buffers)
            for owner, parameter in move.parameters.items():
                hold(parameter, owner, self.reader)

    def give_back(self, parameters: Mapping[str, nn.Parameter], name: str) -> None:
        """Move a unit's weights into the parameters again and drop its host memory.

        Several ranks that hold it together must do this together.
        """
        values = self.weights_of(name)
        for owner, parameter in parameters.items():
            weight = values(owner)
            own = weight.to(device=parameter.device, dtype=parameter.dtype)
            exchange(parameter, own.clone() if own.data_ptr() == weight.data_ptr() else own)
            del self._unit_of[owner]
        del self.units[name]

    def whole(self, name: str) -> Unit:
        """A unit with all of its weights, without its state; its ranks must ask together."""
        unit = self.units[name]
        if unit.share.number == 1:
            return unit
        form, companion = unit.form, unit.companion
        weights = self._joined(unit.held.weight_layout, unit.weights, form.weight_layout.nbytes)
        if companion is not None:
            dtype = companion.dtype
            layout = unit.held.trained.astype({one.dtype: dtype for one in form.trained.segments})
            nbytes = form.trained.padded_numel * dtype.itemsize
            companion = self._joined(layout, companion.view(torch.uint8), nbytes).view(dtype)
        return replace(
            unit, held=form, share=Share(), weights=weights, companion=companion, state={}
        )

    def _joined(self, layout: FlatLayout, own: Tensor, nbytes: int) -> Tensor:
        """The shares of all ranks, segment by segment, in one buffer."""
        parts = [
            self.world.gather_host(view.view(torch.uint8)) for view in layout.segment_views(own)
        ]
        found = torch.zeros(nbytes, dtype=torch.uint8)
        start = 0
        for part in parts:
            found[start : start + part.numel()] = part
            start = round_up(start + part.numel(), ALIGNMENT_BYTES)
        return found

    def weights_of(self, name: str) -> Callable[[str], Tensor]:
        """Present values of a unit's parameters, by name; its ranks must ask together."""
        return partial(self._value, self.whole(name))

    @contextlib.contextmanager
    def values(self) -> Iterator[Callable[[str], Tensor] | None]:
        """Present values of all parameters, for one rank: the others help it inside and get None.

        Raises:
            RuntimeError: on the others, if the block has failed on that rank.
        """
        world = self.world
        if not world.is_parallel:
            yield self.weight
            return
        if world.rank:
            while (asked := world.gather_facts("")[0]) in self.units:
                self.whole(asked)
            if asked:
                raise RuntimeError(f"rank 0: {asked}")
            yield None
            return
        names = {id(unit): name for name, unit in self.units.items()}
        last: dict[str, Unit] = {}

        def value(owner: str) -> Tensor:
            name = names[id(self._unit_of[owner])]
            if name not in last:
                last.clear()
                world.gather_facts(name)
                last[name] = self.whole(name)
            return self._value(last[name], owner)

        try:
            yield value
        except Exception as error:
            world.gather_facts(str(error) or repr(error))
            raise
        world.gather_facts("")

    def weight(self, owner: str) -> Tensor:
        """A parameter's present value, or this rank's piece of it."""
        return self._value(self._unit_of[owner], owner)

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

    @staticmethod
    def _value(unit: Unit, owner: str) -> Tensor:
        """The float32 master if there is one, else the link weight."""
        weight, companion = unit.weight_of(owner), unit.companion_of(owner)
        if companion is None:
            return weight
        companion = companion.to(weight.device)
        return join_master(weight, companion) if weight.dtype is torch.bfloat16 else companion

    def set_weight(self, owner: str, value: Tensor) -> None:
        """Overwrite a parameter's value; `value` is all of it."""
        unit = self._unit_of[owner]
        if owner not in unit.held.weight_layout.names:
            return
        value = unit.piece_of(owner, value)
        weight, companion = unit.weight_of(owner), unit.companion_of(owner)
        if companion is None:
            weight.copy_(value)
        elif weight.dtype is not torch.bfloat16:
            weight.copy_(value)
            companion.copy_(value)
        elif value.dtype is torch.bfloat16:
            weight.copy_(value)
            companion.zero_()
        elif self._kernel is None:
            split_master(value.to(torch.float32).cpu(), weight, companion)
        else:
            halves = SplitWeight(weight=weight.view(-1), remainder=companion.view(-1))
            master = value.to(torch.float32).cpu().reshape(-1)
            self._kernel.split(master, weight=halves, num_threads=torch.get_num_threads())

    def state_of(self, owner: str) -> dict[str, Any]:
        """A parameter's optimizer state as views, torch's names; empty before its first step."""
        self.settle_all()
        unit = self._unit_of[owner]
        if isinstance(self.optimizer, Adafactor):
            prefix = state_name(owner, "")
            views = {
                name.removeprefix(prefix): unit.weight_of(name)
                for name in unit.form.weight_layout.names
                if name.startswith(prefix)
            }
            return views if views and float(views["step"]) else {}
        if not unit.steps.get(owner):
            return {}
        shape = unit.weight_of(owner).shape
        views = {
            name: flat.view(shape) if flat.numel() == shape.numel() else flat
            for name, flat in unit.state_of(owner).items()
        }
        return {"step": torch.tensor(float(unit.steps[owner])), **views}

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
            ranges: By parameter, the only elements to update (`operands.checked_ranges`). A
                parameter that is not named is updated whole.
            count_step: Whether this is a step of its own, not another part of the last one.
            half: What alone is to change.
        """
        self.before_change(name)
        unit = self.units[name]
        if count_step:
            for owner in order.received:
                unit.steps[owner] += 1
        owners = [owner for owner in unit.held.trained.names if owner in order.received]
        given = [None if ranges is None else ranges.get(owner) for owner in owners]
        perform = self._update_readably if self._kernel is None else self._update_natively
        change = perform(unit, owners, gradient, order, given, half)
        if order.changes is not None:
            order.changes[name] = order.changes.get(name, 0.0) + change

    def _update_readably(
        self,
        unit: Unit,
        owners: Sequence[str],
        gradient: Tensor,
        order: UpdateOrder,
        ranges: Sequence[Tensor | None],
        half: Half | None,
    ) -> float:
        """`update` in PyTorch; the sum of squares of the changes of the float32 masters."""
        optimizer, change = self.optimizer, 0.0
        assert isinstance(optimizer, HostOptimizer)
        updates = self._updates_of(unit, owners, gradient, order, half)
        for update, own in zip(updates, ranges, strict=True):
            before = update.master()
            optimizer.readable(replace(update, ranges=own))
            change += float((update.master() - before).double().square().sum())
        return change

    def _update_natively(
        self,
        unit: Unit,
        owners: Sequence[str],
        gradient: Tensor,
        order: UpdateOrder,
        ranges: Sequence[Tensor | None],
        half: Half | None,
    ) -> float:
        """The same with the native kernel."""
        optimizer, kernel, num_threads = self.optimizer, self._kernel, working_threads()
        assert isinstance(optimizer, HostOptimizer)
        assert kernel is not None
        if self.snapshot is not None:  # whose writers need cores, and would take them in the middle
            num_threads = max(1, num_threads - WRITING_CORES)
        key = (half, order.received, gradient.data_ptr(), gradient.numel(), *unit.addresses())
        prepared, numbers = unit.prepared.get(key), self._numbers_of(unit, owners, order)
        if prepared is None:
            with kernel.preparing() as prepared:
                for update in self._updates_of(unit, owners, gradient, order, half):
                    optimizer.native(kernel, update, num_threads=num_threads)
            if numbers is not None:
                kept = unit.prepared if len(unit.prepared) < MOST_PREPARED else {}
                unit.prepared = {**kept, key: prepared}
        return prepared.perform(numbers, ranges=ranges, num_threads=num_threads)

    def _numbers_of(
        self, unit: Unit, owners: Sequence[str], order: UpdateOrder
    ) -> list[Numbers] | None:
        """What of updates differs from step to step, by parameter; None if more does."""
        optimizer, steps = self.optimizer, unit.steps
        assert isinstance(optimizer, HostOptimizer)
        found: list[Numbers] = []
        for owner in owners:
            one = optimizer.numbers(
                order.settings[owner], step=steps[owner], factor=order.factor, seed=self.seed
            )
            if one is None:
                return None
            found.append(one)
        return found

    def _updates_of(
        self,
        unit: Unit,
        owners: Sequence[str],
        gradient: Tensor,
        order: UpdateOrder,
        half: Half | None,
    ) -> Iterator[Update]:
        """The updates of a unit's parameters."""
        for owner in owners:
            companion = unit.companion_of(owner)
            yield Update(
                name=owner,
                shape=tuple(unit.weight_of(owner).shape),
                weight=unit.weight_of(owner).view(-1),
                companion=None if companion is None else companion.view(-1),
                gradient=unit.held.staging_layout.view(gradient, owner).view(-1),
                state=unit.state_of(owner),
                position=unit.position_of(owner),
                step=unit.steps[owner],
                settings=order.settings[owner],
                factor=order.factor,
                seed=self.seed,
                half=half,
            )

    def check_settings(self, settings: Mapping[str, Settings]) -> None:
        """Refuse settings that need state which was not set up.

        Raises:
            ValueError: with the parameter and the state.
        """
        if not isinstance(self.optimizer, HostOptimizer):
            return
        for owner, numbers in settings.items():
            missing = set(self.optimizer.state_kinds(numbers)) - set(self._unit_of[owner].state)
            if missing:
                raise ValueError(
                    f"the settings of {owner!r} now need {sorted(missing)}, which was not set up "
                    "when the engine was made. Make the engine with these settings."
                )

    def note_pending(self, name: str, event: Event) -> None:
        """A unit's weights are being changed until the event."""
        self.units[name].pending = event

    def leave(self, update: WaitingUpdate) -> None:
        """Keep an update for later."""
        self.waiting[update.unit] = update

    def take_waiting(self, name: str) -> WaitingUpdate:
        """The update that was left for a unit; the caller performs it."""
        return self.waiting.pop(name)

    def refresh(
        self,
        waiting: WaitingUpdate,
        rows: TableRows,
        *,
        halves: bool = False,
        refresher: object = None,
    ) -> None:
        """Do the part of a table's update that changes these rows; `perform` does the rest.

        Args:
            waiting: The update.
            rows: None that the same refresher has refreshed before.
            halves: Whether to change their weights only, if these are the first rows; later ones
                are done alike.
            refresher: Whose rows these are. Another one comes if a step has failed in between.
        """
        order, form = waiting.order(), self.units[waiting.unit].form
        assert waiting.gradient is not None
        if order is None or waiting.advanced:
            return
        first, shapes = not waiting.refreshed, shapes_of(form)
        if any(shape[-1] % ALIGNMENT_ELEMENTS for shape in shapes):
            # Rows that do not begin at a block are not updated apart: all are done at first.
            every = torch.arange(max(shape[0] for shape in shapes) if first else 0)
            rows = self.table_rows(waiting.unit, every)
        if not first and waiting.refresher is not refresher:
            fresh = ~torch.isin(rows.rows, torch.cat(waiting.refreshed))
            rows = self.table_rows(waiting.unit, rows.rows[fresh])
        waiting.refresher = refresher
        waiting.halves = halves if first else waiting.halves
        half: Half | None = "weights" if waiting.halves else None
        self.update(waiting.unit, waiting.gradient, order, rows.ranges, count_step=first, half=half)
        waiting.refreshed.append(rows.rows)

    def advance(self, waiting: WaitingUpdate) -> None:
        """Do the weights of an update that was left, where `refresh` has not; `perform` follows."""
        if not waiting.advanced:
            self._perform_rest(waiting, half="weights")
            waiting.advanced = True

    def perform(self, waiting: WaitingUpdate) -> None:
        """Do an update that was left, or what `refresh` and `advance` have left of it."""
        if waiting.performed:
            return
        if not waiting.advanced:
            self._perform_rest(waiting)
            if waiting.refreshed and waiting.halves:
                rows = torch.cat(waiting.refreshed).sort().values
                self._complete(waiting, self.table_rows(waiting.unit, rows).ranges)
        elif not waiting.refreshed or waiting.halves:
            self._complete(waiting, None)
        else:
            self._complete(waiting, self._other_ranges(waiting))
        if waiting.finish is not None:
            waiting.finish(waiting)
        waiting.performed = True
        self._after_update(waiting.unit)

    def _perform_rest(self, waiting: WaitingUpdate, *, half: Half | None = None) -> None:
        """The update, or half of it, of all but the rows that were refreshed."""
        order = waiting.order()
        if order is None or waiting.gradient is None:
            return
        first = not waiting.refreshed
        ranges = None if first else self._other_ranges(waiting)
        counted = not first or waiting.ordered  # by a step that failed before the end
        self.update(
            waiting.unit, waiting.gradient, order, ranges, count_step=not counted, half=half
        )

    def _complete(self, waiting: WaitingUpdate, ranges: Mapping[str, Tensor] | None) -> None:
        """The moments of an update whose weights are done."""
        order = waiting.order()
        if order is not None and waiting.gradient is not None:
            self.update(
                waiting.unit, waiting.gradient, order, ranges, count_step=False, half="moments"
            )

    def table_rows(self, unit: str, rows: Tensor) -> TableRows:
        """What `refresh` takes, for ascending rows: made where nobody waits for it."""
        form = self.units[unit].form
        ranges = {
            name: row_ranges(rows, shape[-1])
            for name, shape in zip(form.trained.names, shapes_of(form), strict=True)
        }
        return TableRows(rows=rows, ranges=ranges)

    def _other_ranges(self, waiting: WaitingUpdate) -> dict[str, Tensor]:
        """All but the rows that were refreshed."""
        form, refreshed = self.units[waiting.unit].form, torch.cat(waiting.refreshed)
        return {
            name: row_ranges(other_rows(refreshed, shape[0]), shape[-1])
            for name, shape in zip(form.trained.names, shapes_of(form), strict=True)
        }

    def register(self, name: str, device: Device) -> None:
        """Let the device copy from and to a unit's companion and state without the host."""
        unit = self.units[name]
        for tensor in (unit.companion, *unit.state.values()):
            if tensor is not None and tensor.device.type == "cpu":
                device.register(tensor)

    def place_state(self, name: str, device: torch.device) -> None:
        """Move a unit's companion and state to a device, or back to the host."""
        unit = self.units[name]
        kept = {unit.form.companion_name: unit.companion, **unit.state}
        present = {key: tensor for key, tensor in kept.items() if tensor is not None}
        if all(tensor.device == device for tensor in present.values()):
            return
        self.before_change(name)  # writers must not find it on the device
        sign = 1 if device.type == "cpu" else -1
        for key, tensor in present.items():
            self._arena.count(key, sign * tensor.nbytes)
        if unit.companion is not None:
            unit.companion = unit.companion.to(device)
        unit.state = {key: state.to(device) for key, state in unit.state.items()}

    def before_change(self, name: str) -> None:
        """Called before a unit's host memory changes: see snapshot.py."""
        snapshot = self.snapshot  # which writers forget when they are done
        if snapshot is not None:
            snapshot.before(name)

    def _after_update(self, name: str) -> None:
        snapshot = self.snapshot
        if snapshot is not None:
            snapshot.complete(name)

    def image(self, name: str) -> Image:
        """All that a unit holds, without copying: weights by name, the rest as `owner|what`."""
        unit = self.units[name]
        tensors = {owner: unit.weight_of(owner) for owner in unit.held.weight_layout.names}
        for owner in unit.held.trained.names:
            companion = unit.companion_of(owner)
            if companion is not None:
                tensors[state_name(owner, unit.form.companion_name)] = companion
            tensors |= {
                state_name(owner, kind): tensor for kind, tensor in unit.state_of(owner).items()
            }
        return Image(unit=name, tensors=tensors, steps=unit.steps)

    @staticmethod
    def kinds_in(
        form: UnitForm, share: Share
    ) -> dict[str, tuple[torch.dtype | None, tuple[int, ...]]]:
        """Names, dtypes and shapes of the tensors that `image` has of a share of a unit."""
        weights, trained = (one.cut_for(share.number) for one in (form.weight_layout, form.trained))
        held = replace(form, weight_layout=weights, trained=trained).held(share)
        layout = held.weight_layout
        found = {owner: (layout.dtype_of(owner), layout.shape_of(owner)) for owner in layout.names}
        for owner in held.trained.names:
            shape = held.trained.shape_of(owner)
            numel = math.prod(shape)
            if held.companion_dtype is not None and held.trained.dtype_of(owner) in COMPANION:
                name = state_name(owner, held.companion_name)
                found[name] = (held.companion_dtype, shape)
            for kind, state in held.state_kinds.items():
                number = -(-numel // ALIGNMENT_ELEMENTS) if state.per_block else numel
                found[state_name(owner, kind)] = (state.dtype, (number,))
        return found

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
        self.spare.reclaim()  # what an earlier one that failed has left
        snapshot = Snapshot(
            order,
            image_of=self.image,
            copy_of=self._copy,
            awaited=frozenset(self.waiting),
            changing=frozenset(name for name in order if self.units[name].form.trained.names),
            spare_bytes=spare_bytes,
            copies_ahead=copies_ahead,
            release=self._release,
        )
        self.snapshot = snapshot
        return snapshot

    def units_on_device(self) -> list[str]:
        """Units whose optimizer state is on the device."""
        return [
            name
            for name, unit in self.units.items()
            if any(
                tensor is not None and tensor.device.type != "cpu"
                for tensor in (unit.companion, *unit.state.values())
            )
        ]

    def _copy(self, tensors: Mapping[str, Tensor], urgent: bool) -> dict[str, Tensor]:  # noqa: FBT001
        """Copies in one block of spare pages."""
        starts, copies = _copy_starts(tensors), dict[str, Tensor]()
        if not starts[-1]:  # ranks hold nothing of a unit that is smaller than their number
            return {name: tensor.clone() for name, tensor in tensors.items()}
        block = self.spare.take(starts[-1])
        num_threads = working_threads() if urgent else min(COPYING_THREADS, working_threads())
        for start, (name, tensor) in zip(starts, tensors.items(), strict=False):
            copy = block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            if tensor.device.type != "cpu" or self._kernel is None or not tensor.is_contiguous():
                copy.copy_(tensor.detach())
            else:
                self._kernel.copy(
                    copy.data_ptr(),
                    source=tensor.data_ptr(),
                    num_bytes=tensor.nbytes,
                    num_threads=num_threads,
                )
            copies[name] = copy
        return copies

    def _release(self, copy: Image) -> None:
        if copy.nbytes:
            self.spare.give_back(next(iter(copy.tensors.values())).data_ptr())

    def fill_spare(self, order: Sequence[str], *, most_bytes: int) -> None:
        """Make the pages that copies of units will need, beside whatever else happens."""
        sizes: list[int] = []
        for name in order:
            nbytes = _copy_starts(self.image(name).tensors)[-1]
            if self.units[name].form.trained.names and sum(sizes) + nbytes <= most_bytes:
                sizes.append(nbytes)
        self.spare.fill(sizes)

    def settle_all(self) -> None:
        """Bring every unit to the last step, on the calling thread."""
        for unit in self.units.values():
            if unit.pending is not None:
                unit.pending.synchronize()
                unit.pending = None
        for name in list(self.waiting):
            self._settle(name)

    def _settle(self, name: str) -> None:
        waiting = self.waiting[name]
        waiting.drained.synchronize()
        self.unfinished.add(name)  # and it stays there if this is interrupted
        self.perform(waiting)
        self.unfinished.discard(name)
        del self.waiting[name]


def _copy_starts(tensors: Mapping[str, Tensor]) -> list[int]:
    """Where copies of tensors begin in their block, and where the last one ends."""
    return [0, *accumulate(round_up(one.nbytes, COPY_ALIGNMENT) for one in tensors.values())]
