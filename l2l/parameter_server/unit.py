"""One unit of the model: its form, its host memory, and rows of tables as ranges of elements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from l2l.device import Event
from l2l.distributed import Share
from l2l.model import is_held, reason_for, release
from l2l.parameter_server import device_update
from l2l.parameter_server.host_kernel import HostKernel, PreparedUpdates
from l2l.parameter_server.layout import ALIGNMENT_ELEMENTS, FlatLayout, round_up
from l2l.parameter_server.operands import SplitWeight
from l2l.parameter_server.optimizer import StateKind
from l2l.parameter_server.precision import COMPANION, join_master, split_master

ACCUMULATE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
DRAINED = {torch.float16: torch.float32}  # a sum of scaled gradients may not fit a float16


def state_name(owner: str, state: str) -> str:
    """The name of a state tensor that rides in a unit's flat buffer."""
    return f"{owner}|{state}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitForm:
    """What a unit is made of, before any memory is taken."""

    name: str
    weight_layout: FlatLayout
    trained: FlatLayout  # trained parameters, in the link dtype
    state_kinds: Mapping[str, StateKind]
    companion_dtype: torch.dtype | None

    @property
    def gradient_layout(self) -> FlatLayout:
        """Where gradients are added up on the device: float32, the offsets of `trained`."""
        return self.trained.astype(ACCUMULATE)

    @property
    def staging_layout(self) -> FlatLayout:
        """How gradients arrive on the host."""
        return self.trained.astype(DRAINED)

    def held(self, share: Share) -> UnitForm:
        """What one of several ranks holds of it."""
        if share.number == 1:
            return self
        layouts = {name: getattr(self, name).held(share) for name in ("weight_layout", "trained")}
        return replace(self, **layouts)

    def piece(self, number: int, num_pieces: int) -> slice:
        """Elements of one of so many pieces of the trained parameters, cut at blocks."""
        total = self.trained.padded_numel
        size = round_up(-(-total // num_pieces), ALIGNMENT_ELEMENTS)
        return slice(min(total, number * size), min(total, (number + 1) * size))

    def row_bytes(self, owner: str) -> int:
        """Bytes of one row of a table, as it crosses the link."""
        for segment in self.weight_layout.segments:
            for one in segment.fields:
                if one.name == owner:
                    return one.shape[1] * segment.dtype.itemsize
        raise KeyError(owner)

    @property
    def companion_name(self) -> str:
        """What the companion is called in a ledger."""
        return "remainders" if self.companion_dtype is torch.int16 else "masters"

    @property
    def is_one_run(self) -> bool:
        """Whether the trained parameters lie in one row, in the weights as in everything else."""
        trained, weights = self.trained.segments, self.weight_layout.segments
        return len(trained) == 1 and bool(weights) and weights[0] == trained[0]

    def kinds_in(self, share: Share) -> dict[str, tuple[torch.dtype | None, tuple[int, ...]]]:
        """Names, dtypes and shapes of `Unit.tensors` of a share."""
        weights, trained = (one.cut_for(share.number) for one in (self.weight_layout, self.trained))
        held = replace(self, weight_layout=weights, trained=trained).held(share)
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

    def state_numel(self, kind: StateKind) -> int:
        """Elements of a state buffer."""
        numel = self.trained.padded_numel
        return numel // ALIGNMENT_ELEMENTS if kind.per_block else numel

    def bytes_by_kind(self) -> dict[str, int]:
        """Host bytes, by what they hold."""
        found = {"weights": self.weight_layout.nbytes}
        if self.companion_dtype is not None:
            found[self.companion_name] = self.trained.padded_numel * self.companion_dtype.itemsize
        for name, kind in self.state_kinds.items():
            found[name] = self.state_numel(kind) * kind.dtype.itemsize
        return found


@dataclass(slots=True, kw_only=True)
class Unit:
    """Host memory of one unit, or of this rank's share of it."""

    form: UnitForm  # of all of it
    held: UnitForm  # of what is here
    share: Share
    weights: Tensor  # bytes, registered
    companion: Tensor | None
    state: dict[str, Tensor]
    steps: dict[str, int] = field(default_factory=dict)  # trained parameter -> updates so far
    pending: Event | None = None
    prepared: dict[Any, PreparedUpdates] = field(default_factory=dict)  # see `addresses`

    def addresses(self) -> tuple[int, ...]:
        """Where the unit's memory lies: what was prepared for other memory is of no use."""
        companion = () if self.companion is None else (self.companion.data_ptr(),)
        state = (tensor.data_ptr() for tensor in self.state.values())
        return (self.weights.data_ptr(), *companion, *state)

    def weight_of(self, owner: str) -> Tensor:
        """A parameter's link weight, shaped; of a share, the piece that is here."""
        return self.held.weight_layout.view(self.weights, owner)

    def piece_of(self, owner: str, value: Tensor) -> Tensor:
        """The piece of a whole tensor that is here."""
        if self.share.number == 1:
            return value
        return value.reshape(-1)[self.form.weight_layout.piece(owner, self.share)]

    def position_of(self, owner: str) -> int:
        """Where a trained parameter, or its piece, begins in the row of all of them."""
        piece = self.form.trained.piece(owner, self.share)
        return int(self.form.trained.span(owner).start + piece.start)

    def companion_of(self, owner: str) -> Tensor | None:
        """What completes a parameter's link weight, shaped; None if nothing does."""
        if self.companion is None or owner not in self.held.trained.names:
            return None
        if self.weight_of(owner).dtype not in COMPANION:
            return None
        return self.companion[self.held.trained.span(owner)].view(self.weight_of(owner).shape)

    def value(self, owner: str) -> Tensor:
        """The float32 master if there is one, else the link weight."""
        weight, companion = self.weight_of(owner), self.companion_of(owner)
        if companion is None:
            return weight
        companion = companion.to(weight.device)
        return join_master(weight, companion) if weight.dtype is torch.bfloat16 else companion

    def set_value(self, owner: str, value: Tensor, kernel: HostKernel | None) -> None:
        """Overwrite a parameter, or the piece of it that is here; `value` is all of it."""
        if owner not in self.held.weight_layout.names:
            return
        value = self.piece_of(owner, value)
        weight, companion = self.weight_of(owner), self.companion_of(owner)
        if companion is None:
            weight.copy_(value)
        elif weight.dtype is not torch.bfloat16:
            weight.copy_(value)
            companion.copy_(value)
        elif value.dtype is torch.bfloat16:
            weight.copy_(value)
            companion.zero_()
        elif kernel is None:
            split_master(value.to(torch.float32).cpu(), weight, companion)
        else:
            halves = SplitWeight(weight=weight.view(-1), remainder=companion.view(-1))
            master = value.to(torch.float32).cpu().reshape(-1)
            kernel.split(master, weight=halves, num_threads=torch.get_num_threads())

    def set_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Overwrite the buffers, or the pieces of them that are here."""
        for key, value in buffers.items():
            if key in self.held.weight_layout.names:
                self.weight_of(key).copy_(self.piece_of(key, value))

    def tensors(self) -> dict[str, Tensor]:
        """All that is here, without copying: weights by name, the rest as `owner|what`."""
        found = {owner: self.weight_of(owner) for owner in self.held.weight_layout.names}
        for owner in self.held.trained.names:
            companion = self.companion_of(owner)
            if companion is not None:
                found[state_name(owner, self.form.companion_name)] = companion
            found |= {state_name(owner, kind): one for kind, one in self.state_of(owner).items()}
        return found

    def flat(
        self, owners: tuple[str, ...], *, weights: Tensor, gradients: Tensor
    ) -> device_update.FlatUnit:
        """Parameters that lie in one row, from the first to the last, with state on the device.

        Args:
            owners: the parameters.
            weights: flat buffer of the unit's weights, there.
            gradients: flat buffer of the sums of their gradients.
        """
        form = self.held
        first, last = form.trained.span(owners[0]), form.trained.span(owners[-1])
        span = slice(first.start, last.stop)
        if len(owners) == 1:
            weight = form.weight_layout.view(weights, owners[0]).view(-1)
        else:
            weight = form.weight_layout.segment_views(weights)[0][span]
        view = form.gradient_layout.view(gradients, owners[0])
        return device_update.FlatUnit(
            weight=weight,
            companion=self._companion(span, weight),
            gradient=view.as_strided((span.stop - span.start,), (1,)),
            state=self._state(span),
            position=span.start,
        )

    def part(self, span: slice, gradients: Tensor | None = None) -> device_update.FlatUnit:
        """Some elements of a unit that is one row, here on the host; for copies to and fro.

        Without gradients here, of the type in which they cross the link, weights stand for them.
        """
        weight = self.held.weight_layout.segment_views(self.weights)[0][span]
        gradient = weight
        if gradients is not None:
            gradient = self.held.staging_layout.segment_views(gradients)[0][span]
        return device_update.FlatUnit(
            weight=weight,
            companion=self._companion(span, weight),
            gradient=gradient,
            state=self._state(span),
            position=span.start,
        )

    def state_of(self, owner: str) -> dict[str, Tensor]:
        """A parameter's state, flat."""
        return self._state(self.held.trained.span(owner))

    def _companion(self, span: slice, weight: Tensor) -> Tensor | None:
        if self.companion is None or weight.dtype not in COMPANION:
            return None
        return self.companion[span]

    def _state(self, span: slice) -> dict[str, Tensor]:
        blocks = slice(span.start // ALIGNMENT_ELEMENTS, -(-span.stop // ALIGNMENT_ELEMENTS))
        kinds = self.held.state_kinds
        return {
            name: buffer[blocks if kinds[name].per_block else span]
            for name, buffer in self.state.items()
        }


def shapes_of(form: UnitForm) -> list[tuple[int, ...]]:
    """Shapes of the trained parameters, in order."""
    return [field.shape for segment in form.trained.segments for field in segment.fields]


def row_ranges(rows: Tensor, width: int) -> Tensor:
    """Ascending rows as element ranges, neighbours joined."""
    if not rows.numel():
        return torch.empty((0, 2), dtype=torch.int64)
    breaks = torch.nonzero(rows[1:] != rows[:-1] + 1).flatten()
    first = torch.cat([rows[:1], rows[breaks + 1]])
    last = torch.cat([rows[breaks], rows[-1:]])
    return torch.stack([first * width, (last + 1) * width], dim=1)


def other_rows(rows: Tensor, num_rows: int) -> Tensor:
    """The rows of a table that are not among these."""
    others = torch.ones(num_rows, dtype=torch.bool)
    others[rows] = False
    return torch.nonzero(others).flatten()


def nothing_like(parameter: nn.Parameter) -> Tensor:
    """What a hollow parameter holds: NaN in its shape, without memory for it.

    Whoever asks for its address gets an error: kernels that write would go beyond that memory.
    """
    device = torch.device("cpu") if parameter.is_meta else parameter.device
    nothing = torch.full((), torch.nan, device=device).to(parameter.dtype).expand(parameter.shape)
    torch._C._set_throw_on_mutable_data_ptr(nothing)
    return nothing


def exchange(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Let a parameter hold another tensor; it stays the same object, also from or to meta."""
    release(parameter)
    if parameter.is_meta == tensor.is_meta:
        parameter.data = tensor
        return
    other = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
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
            f"{len(on_meta)} parameters are on the meta device, the first {on_meta[0]!r}. Expected "
            "a model with weights, on the CPU; or say where they come from: weights=, a folder "
            "with safetensors, or weights=l2l.RandomInit(seed=0)."
        )
