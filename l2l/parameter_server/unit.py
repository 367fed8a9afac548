"""Units of the model: their host memory, and what becomes of it when layers change."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from l2l.device import Block, Event
from l2l.distributed import Share, World
from l2l.model import UnitTensors, format_of, is_held, mean, reason_for, release
from l2l.parameter_server.eight_bit import cut, num_blocks
from l2l.parameter_server.forms import UnitForm, state_name, without_memory
from l2l.parameter_server.host_kernel import HostKernel, PreparedUpdates
from l2l.parameter_server.host_memory import Arena
from l2l.parameter_server.layout import ALIGNMENT_BYTES, FlatLayout, round_up
from l2l.parameter_server.optimizer import FlatUnit, Half, Update, UpdateOrder
from l2l.parameter_server.precision import COMPANION, master_of, store_master

MAX_PREPARED = 64  # ways to update a unit that are remembered
Part = Literal["state", "weights"]
"""Of a unit: weights, or what an update needs besides."""


@dataclass(slots=True, kw_only=True)
class Unit:
    """Host memory of one unit, or of this rank's share of it."""

    form: UnitForm  # of all of it
    held: UnitForm  # of what is here
    share: Share
    weights: Tensor  # bytes, registered
    companion: Tensor | None
    state: dict[str, Tensor]
    steps: dict[str, int]  # trained parameter -> updates so far
    blocks: dict[Part, Block] = field(default_factory=dict)  # parts on disk: see units_on_disk.py
    changed: set[Part] = field(default_factory=set)  # of these, what is not there as it is here
    pending: Event | None = None
    prepared: dict[Any, PreparedUpdates] = field(default_factory=dict)  # see `prepared_for`

    @classmethod
    def empty(cls, form: UnitForm, share: Share, take: Callable[..., Tensor]) -> Unit:
        """Memory for a unit, zeros; `take` is `Arena.take`."""
        held = form.held(share)
        weights = take("weights", held.weight_layout.nbytes, torch.uint8, registered=True).zero_()
        kept = {
            name: take(name, numel, dtype, registered=False)
            for name, (dtype, numel) in held.kept().items()
        }
        return cls(
            form=form,
            held=held,
            share=share,
            weights=weights,
            companion=kept.pop(form.companion_name, None),
            state=kept,
            steps=dict.fromkeys(form.trained.names, 0),
        )

    def kept(self) -> dict[str, Tensor]:
        """Its buffers besides the weights: companion and state."""
        companion = {} if self.companion is None else {self.form.companion_name: self.companion}
        return {**companion, **self.state}

    def let_go(self) -> None:
        """Hold no memory any more, whoever holds the unit."""
        self.weights, self.companion, self.state = self.weights.new_empty(0), None, {}

    def weight_of(self, owner: str) -> Tensor:
        """A parameter's link weight, shaped; of a share, the piece that is here."""
        layout, form = self.held.weight_layout, self.held
        if owner not in form.formats:
            return layout.view(self.weights, owner)
        views = {name: layout.view(self.weights, name) for name in form.fields_of(owner)}
        return form.joined(owner, views)

    def piece_of(self, owner: str, value: Tensor) -> Tensor:
        """The piece of a whole tensor that is here."""
        if self.share.number == 1:
            return value
        return value.reshape(-1)[self.form.weight_layout.piece(owner, self.share)]

    def companion_of(self, owner: str) -> Tensor | None:
        """What completes a parameter's link weight, shaped; None if nothing does."""
        if owner not in self.held.trained.names:
            return None
        layout = self.held.weight_layout
        found = self._companion(self.held.trained.span(owner), layout.dtype_of(owner))
        return None if found is None else found.view(layout.shapes()[owner])

    def value(self, owner: str) -> Tensor:
        """The float32 master if there is one, else the link weight."""
        weight, companion = self.weight_of(owner), self.companion_of(owner)
        return master_of(weight, None if companion is None else companion.to(weight.device))

    def set_value(self, owner: str, value: Tensor, kernel: HostKernel | None) -> None:
        """Overwrite a parameter, or the piece of it that is here; `value` is all of it."""
        if owner in self.held.formats:
            self._set_parts(owner, value)
            return
        if owner not in self.held.weight_layout.names:
            return
        value = self.piece_of(owner, value)
        weight, companion = self.weight_of(owner), self.companion_of(owner)
        if companion is None or weight.dtype is not torch.bfloat16:
            store_master(value, weight, companion)
        elif value.dtype is torch.bfloat16:
            weight.copy_(value)
            companion.zero_()
        else:
            master = value.to(torch.float32).cpu()
            if kernel is None:
                store_master(master, weight, companion)
                return
            flat = (master.reshape(-1), weight.view(-1), companion.view(-1))
            kernel.split(*flat, num_threads=torch.get_num_threads())

    def exchange_averages(self) -> None:
        """Let weights and their running means change places: twice, and all is as it was."""
        for owner in self.held.trained.names:
            average = self.state_of(owner).get("average")
            if average is not None and self.steps[owner]:
                weight, companion = self.weight_of(owner), self.companion_of(owner)
                master = master_of(weight, companion).clone()
                store_master(average.view(weight.shape), weight, companion)
                average.copy_(master.view(-1))

    def _set_parts(self, owner: str, value: Tensor) -> None:
        """Overwrite a parameter that is made of several tensors, by plain values or such a one."""
        wanted = self.held.formats[owner]
        if format_of(value) is None and wanted.make is not None:
            value = wanted.make(value)
        for name, part in wanted.take_apart(value).items():
            self.weight_of(state_name(owner, name)).copy_(part)

    def set_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Overwrite the buffers, or the pieces of them that are here."""
        for key, value in buffers.items():
            if key in self.held.weight_layout.names:
                self.weight_of(key).copy_(self.piece_of(key, value))

    def tensors(self, *, but: Collection[Part] = ()) -> dict[str, Tensor]:
        """All that is here, without copying: weights by name, the rest as `owner|what`.

        `but`: parts that are on disk, and left out.
        """
        found = dict[str, Tensor]()
        if "weights" not in but:
            found = {owner: self.weight_of(owner) for owner in self.held.weight_layout.names}
        for owner in self.held.trained.names if "state" not in but else ():
            companion = self.companion_of(owner)
            if companion is not None:
                found[state_name(owner, self.form.companion_name)] = companion
            found |= {state_name(owner, kind): one for kind, one in self.state_of(owner).items()}
        return found

    def updates(
        self,
        owners: Sequence[str],
        gradient: Tensor,  # staging bytes
        order: UpdateOrder,
        *,
        half: Half | None,
        seed: int,
    ) -> Iterator[Update]:
        """The updates of single parameters on the host."""
        for owner in owners:
            weight, whole = self.weight_of(owner), self.form.trained
            span = self.held.trained.span(owner)
            yield Update(
                name=owner,
                shape=tuple(weight.shape),
                weight=weight.view(-1),
                companion=self._companion(span, weight.dtype),
                gradient=self.held.staging_layout.view(gradient, owner).view(-1),
                state=self.state_of(owner),
                state_shapes=self._odd_shapes(owner),
                position=whole.span(owner).start + whole.piece(owner, self.share).start,
                step=self.steps[owner],
                settings=order.settings[owner],
                factor=order.factor,
                seed=seed,
                half=half,
            )

    def prepared_for(
        self,
        kinds: Mapping[str, int | None],
        make: Callable[[Sequence[Update]], PreparedUpdates],
        gradient: Tensor,
        order: UpdateOrder,
        half: Half | None,
        seed: int,
    ) -> tuple[PreparedUpdates, list[str]]:
        """Updates in the native kernel, made before or now, and of which parameters they are.

        Args:
            kinds: which update of the kernel that of a parameter is, if any.
            make: prepares updates.
            gradient: staging bytes.
            order: the numbers of the step.
            half: what alone is to change.
            seed: of rounding.
        """
        owners = [owner for owner, kind in kinds.items() if kind is not None]
        addresses = (one.data_ptr() for one in (gradient, self.weights, *self.kept().values()))
        key = (half, *kinds.items(), *addresses)  # what was made for other memory is of no use
        if key not in self.prepared:
            kept = self.prepared if len(self.prepared) < MAX_PREPARED else {}
            updates = self.updates(owners, gradient, order, half=half, seed=seed)
            self.prepared = {**kept, key: make(list(updates))}
        return self.prepared[key], owners

    def flat(self, owners: tuple[str, ...], *, weights: Tensor, gradients: Tensor) -> FlatUnit:
        """Parameters that lie in one row, from the first to the last, with state on the device.

        Args:
            owners: the parameters.
            weights: flat buffer of the unit's weights, there.
            gradients: flat buffer of the sums of their gradients.
        """
        form = self.held
        first, last = form.trained.span(owners[0]), form.trained.span(owners[-1])
        span = slice(first.start, last.stop)
        of_first = (
            form.weight_layout.view(weights, owners[0]),
            form.gradient_layout.view(gradients, owners[0]),
        )
        numel = span.stop - span.start
        return self._run(span, *(one.as_strided((numel,), (1,)) for one in of_first))

    def part(self, span: slice, gradients: Tensor | None = None) -> FlatUnit:
        """Some elements of a unit that is one row, here on the host; for copies to and fro.

        Without gradients here, of the type in which they cross the link, nothing stands for them.
        """
        weight = self.held.weight_layout.segment_views(self.weights)[0][span]
        staged = self.held.staging_layout
        if gradients is None:
            nothing = weight.new_empty(1, dtype=staged.segments[0].dtype)
            return self._run(span, weight, nothing.expand(weight.shape))
        return self._run(span, weight, staged.segment_views(gradients)[0][span])

    def _run(self, span: slice, weight: Tensor, gradient: Tensor) -> FlatUnit:
        return FlatUnit(
            weight=weight,
            companion=self._companion(span, weight.dtype),
            gradient=gradient,
            state=self._state_in(span),
            position=span.start,
        )

    def _state_in(self, span: slice) -> dict[str, Tensor]:
        """State of elements; where it is kept by parameter, of one that is just these."""
        if not self.held.state_layouts:
            return cut(self.state, span)
        if span.start == span.stop:
            return {}
        return self.state_of(self.held.trained.by_start[span.start])

    def state_of(self, owner: str) -> dict[str, Tensor]:
        """A parameter's state, flat."""
        layouts = self.held.state_layouts
        if not layouts:
            return cut(self.state, self.held.trained.span(owner))
        return {
            name: layouts[name].view(buffer.view(torch.uint8), owner).view(-1)
            for name, buffer in self.state.items()
            if layouts[name].shape_of(owner) is not None
        }

    def _odd_shapes(self, owner: str) -> dict[str, tuple[int, ...]]:
        """Shapes of a parameter's state that has not an entry for every element, or block."""
        own = self.held.trained.shape_of(owner) or ()
        usual = {False: own, True: (num_blocks(math.prod(own)),)}
        found = {name: one.shape_of(owner) for name, one in self.held.state_layouts.items()}
        return {
            name: shape
            for name, shape in found.items()
            if shape is not None and shape != usual[name.endswith("_unit")]
        }

    def shown_state(self, owner: str) -> dict[str, Any]:
        """A parameter's optimizer state as views, torch's names; empty before its first step."""
        prefix = state_name(owner, "")
        names = [name for name in self.form.weight_layout.names if name.startswith(prefix)]
        if names:  # it rides with the weights
            found = {name.removeprefix(prefix): self.weight_of(name) for name in names}
            return found if float(found["step"]) else {}
        if not self.steps.get(owner):
            return {}
        shape, odd = self.weight_of(owner).shape, self._odd_shapes(owner)
        views = {
            name: flat.view(odd.get(name, shape if flat.numel() == shape.numel() else (-1,)))
            for name, flat in self.state_of(owner).items()
        }
        return {"step": torch.tensor(float(self.steps[owner])), **views}

    def set_state(self, owner: str, state: Mapping[str, Any]) -> None:
        """Overwrite a parameter's optimizer state, as `shown_state` shows it; nothing: none yet."""
        own = self.state_of(owner)
        if state and state.keys() != {"step", *own}:
            raise ValueError(
                f"the optimizer state of {owner!r} has {sorted(state)}; expected "
                f"{sorted(['step', *own])}, as engine.optimizer.state_dict() gives it."
            )
        self.steps[owner] = int(state.get("step", 0))
        for name, flat in own.items():
            if state:
                flat.copy_(state[name].reshape(-1))
            else:
                flat.zero_()

    def _companion(self, span: slice, dtype: torch.dtype | None) -> Tensor | None:
        if self.companion is None or dtype not in COMPANION:
            return None
        return self.companion[span]

    def whole(self, world: World) -> Unit:
        """The unit with all of its weights, without its state; its ranks must ask together."""
        if self.share.number == 1:
            return self
        form, held, companion = self.form, self.held, self.companion
        weights = _joined(world, held.weight_layout, self.weights, form.weight_layout.nbytes)
        if companion is not None:
            dtype = companion.dtype
            layout = held.trained.astype({one.dtype: dtype for one in form.trained.segments})
            nbytes = form.trained.padded_numel * dtype.itemsize
            companion = _joined(world, layout, companion.view(torch.uint8), nbytes).view(dtype)
        return replace(
            self, held=form, share=Share(), weights=weights, companion=companion, state={}
        )


def _joined(world: World, layout: FlatLayout, own: Tensor, nbytes: int) -> Tensor:
    """The shares of all ranks, segment by segment, in one buffer."""
    parts = [world.gather_host(view.view(torch.uint8)) for view in layout.segment_views(own)]
    found, start = torch.zeros(nbytes, dtype=torch.uint8), 0
    for part in parts:
        found[start : start + part.numel()] = part
        start = round_up(start + part.numel(), ALIGNMENT_BYTES)
    return found


def without_values(form: UnitForm, share: Share) -> dict[str, Tensor]:
    """What `Unit.tensors` has of a share, on the meta device."""

    def take(name: str, numel: int, dtype: torch.dtype, *, registered: bool) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="meta")

    return Unit.empty(form.cut_for(share.number), share, take).tensors()


def kinds_in(form: UnitForm, share: Share) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Names, dtypes and shapes of `Unit.tensors` of a share."""
    found = without_values(form, share).items()
    return {name: (one.dtype, tuple(one.shape)) for name, one in found}


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One unit that is to be."""

    form: UnitForm
    source: str | None  # the unit that it is, or is copied from; None: it is new
    is_copy: bool
    keeps_state: bool
    names: Mapping[str, str]  # of its tensors, to those of the source
    tensors: UnitTensors


def _let_go(unit: Unit, arena: Arena) -> None:
    """Give a unit's memory back."""
    for name, buffer in {"weights": unit.weights, **unit.kept()}.items():
        arena.give_back(name, buffer)


def rearranged(
    units: Mapping[str, Unit], moves: Sequence[Move], share: Share, arena: Arena
) -> dict[str, Unit]:
    """The units with these layers, in this order; those around the layers stay.

    A unit that only gets another name keeps its memory; memory of layers that are gone is given
    back. If memory is short, nothing has changed.
    """
    made: dict[str, Unit] = {}
    taken: list[Unit] = []
    try:
        for move in moves:
            source = None if move.source is None else units[move.source]
            if source is not None and not move.is_copy and _alike(source.form, move.form):
                made[move.form.name] = _renamed(source, move)
                continue
            unit = Unit.empty(move.form, share, arena.take)
            taken.append(unit)
            made[move.form.name] = unit
            if source is not None:
                _copy(source, unit, move)
    except BaseException:
        for unit in taken:
            _let_go(unit, arena)
        raise
    kept = {unit.weights.data_ptr() for unit in made.values()}
    for name, unit in units.items():
        if not name.startswith("L"):
            made[name] = unit
        elif unit.weights.data_ptr() not in kept:
            _let_go(unit, arena)
    return made


def _alike(one: UnitForm, other: UnitForm) -> bool:
    """Whether two forms need the same memory, but for names."""

    def places(layout: FlatLayout) -> list[Any]:
        return [
            (s.dtype, s.numel, [(f.offset, f.numel) for f in s.fields]) for s in layout.segments
        ]

    layouts = [(one.weight_layout, other.weight_layout), (one.trained, other.trained)]
    if one.state_layouts.keys() != other.state_layouts.keys():
        return False
    layouts += [(own, other.state_layouts[kind]) for kind, own in one.state_layouts.items()]
    return one.kept() == other.kept() and all(places(a) == places(b) for a, b in layouts)


def _renamed(unit: Unit, move: Move) -> Unit:
    """The same memory under other names."""
    return replace(
        unit,
        form=move.form,
        held=move.form.held(unit.share),
        steps={owner: unit.steps[move.names[owner]] for owner in move.form.trained.names},
        prepared={},
    )


def _copy(unit: Unit, made: Unit, move: Move) -> None:
    """Let an empty unit have the same weights and, if it is to keep it, the same state."""
    for name in made.held.weight_layout.names:
        owner, bar, state = name.partition("|")
        source, is_state = (
            f"{move.names[owner]}{bar}{state}",
            owner not in made.held.formats and bar,
        )
        if source in unit.held.weight_layout.names and (not is_state or move.keeps_state):
            made.weight_of(name).copy_(unit.weight_of(source))
    for owner in made.held.trained.names:
        source, companion = move.names[owner], made.companion_of(owner)
        theirs = unit.companion_of(source)
        if companion is not None and theirs is not None:
            companion.copy_(theirs.view(companion.shape))
        elif companion is not None and companion.dtype is torch.float32:
            companion.copy_(made.weight_of(owner))  # whose remainder would be zero
        if move.keeps_state and source in unit.held.trained.names:
            for kind, buffer in made.state_of(owner).items():
                buffer.copy_(unit.state_of(source)[kind])
    if move.keeps_state:
        made.steps = {o: unit.steps.get(move.names[o], 0) for o in move.form.trained.names}


def nothing_like(parameter: nn.Parameter) -> Tensor:
    """What a hollow parameter holds: NaN in its shape, without memory for it.

    Whoever asks for its address gets an error: kernels that write would go beyond that memory.
    """
    device = torch.device("cpu") if parameter.is_meta else parameter.device
    nothing = without_memory(tuple(parameter.shape), parameter.dtype, device)
    torch._C._set_throw_on_mutable_data_ptr(nothing)
    return nothing


def exchange(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Let a parameter hold another tensor; it stays the same object, also from or to meta.

    Of one that is made of several tensors only the object stays, with the format that is meant.
    """
    release(parameter)
    is_made = type(tensor) not in (Tensor, nn.Parameter)
    leaves_wrapper = is_traceable_wrapper_subclass(parameter)
    if parameter.is_meta == tensor.is_meta and not is_made and not leaves_wrapper:
        parameter.data = tensor
        return
    if isinstance(tensor, nn.Parameter):
        other = tensor
    else:
        other = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    if leaves_wrapper:
        mean(other, format_of(parameter))
    elif not is_made:
        other.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]


def refuse_without_weights(model: nn.Module) -> None:
    """Refuse a model whose parameters have no values.

    Raises:
        ValueError: they are in another engine, or on the meta device.
    """
    hollow = [name for name, parameter in model.named_parameters() if is_held(parameter)]
    if hollow:
        raise ValueError(
            f"the model's parameters hold no values ({hollow[0]!r} and others): "
            f"{reason_for(model.get_parameter(hollow[0]))}"
        )
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        raise ValueError(
            f"{len(on_meta)} parameters are on the meta device (first: {on_meta[0]!r}). Pass a "
            "model with weights on the CPU, or pass weights=: a folder with safetensors, or "
            "l2l.RandomInit(seed=0)."
        )
