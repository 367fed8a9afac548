"""What units are made of, and how much host memory they need, before any is taken.

A model's weights are divided into a unit for each layer, each table, and the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from l2l.distributed import Share
from l2l.model import Format, Partition, UnitTensors
from l2l.parameter_server.adafactor import Adafactor
from l2l.parameter_server.eight_bit import num_blocks
from l2l.parameter_server.layout import (
    ALIGNMENT_ELEMENTS,
    FlatLayout,
    gathered,
    round_up,
    rows_of_slice,
)
from l2l.parameter_server.optimizer import (
    DeviceWork,
    HostOptimizer,
    Optimizer,
    Settings,
    StateKind,
)
from l2l.parameter_server.optimizers import AdamW
from l2l.parameter_server.policy import UpdatePolicy
from l2l.parameter_server.precision import COMPANION, PrecisionPolicy
from l2l.schedule import OUTER

ACCUMULATE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
DRAINED = {torch.float16: torch.float32}  # a sum of scaled gradients may not fit a float16
ROUNDING_BYTES = 32 << 20  # on the device, through which gradients leave in 16 bits
NUM_STAGING = 4  # gradients of layers on their way to an eager update


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
    state_layouts: Mapping[str, FlatLayout] = field(default_factory=dict)
    """Of state that is kept by parameter: where it lies in the buffer of its kind. Of other state
    there is an entry for every element of `trained`, or for every block of these."""
    device_work: DeviceWork = field(default_factory=DeviceWork)
    """What updates on the device take, beside passes over memory."""
    formats: Mapping[str, Format] = field(default_factory=dict)
    """Of parameters that are made of several tensors: each of these has a field."""

    @property
    def owners(self) -> tuple[str, ...]:
        """Names of what it holds: parameters, buffers, state that rides with the weights."""
        inside = {name for owner in self.formats for name in self.fields_of(owner)}
        names = (name for name in self.weight_layout.names if name not in inside)
        return (*names, *self.formats)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """All shapes, by name; of what is made of several tensors that of the whole."""
        plain = self.weight_layout.shapes()
        own = {owner: one.shape for owner, one in self.formats.items()}
        return {owner: own[owner] if owner in own else plain[owner] for owner in self.owners}

    def fields_of(self, owner: str) -> tuple[str, ...]:
        """The fields in which a parameter's values lie."""
        found = self.formats.get(owner)
        return (
            (owner,) if found is None else tuple(state_name(owner, one[0]) for one in found.fields)
        )

    def weights_in(self, buffer: Tensor) -> dict[str, Tensor]:
        """All that it holds as views into a flat buffer of all its weights, by name."""
        return self.of_views(self.weight_layout.views(buffer))

    def of_views(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same of tensors that stand for the fields."""
        found = {owner: self.joined(owner, views) for owner in self.formats}
        return {owner: found[owner] if owner in found else views[owner] for owner in self.owners}

    def joined(self, owner: str, views: Mapping[str, Tensor]) -> Tensor:
        """A parameter that is made of several tensors, of views of its fields."""
        found = self.formats[owner]
        return found.join({name: views[state_name(owner, name)] for name, *_ in found.fields})

    def nothing(self, owner: str, device: torch.device | str) -> Tensor:
        """What stands for a parameter or buffer that nobody looks at, without its memory."""
        found = self.formats.get(owner)
        if found is None:
            shape, dtype = self.weight_layout.shapes()[owner], self.weight_layout.dtype_of(owner)
            assert dtype is not None, owner
            return without_memory(shape, dtype, device)
        parts = {name: without_memory(shape, dtype, device) for name, shape, dtype in found.fields}
        return found.join(parts)

    drains_sums: bool = False
    """Whether gradients leave the device as they were added up, in float32, and wait on the host
    for the user's own code."""

    @property
    def gradient_layout(self) -> FlatLayout:
        """Where gradients are added up on the device: float32, the offsets of `trained`."""
        return self.trained.astype(ACCUMULATE)

    @property
    def staging_layout(self) -> FlatLayout:
        """How gradients arrive on the host."""
        return self.gradient_layout if self.drains_sums else self.trained.astype(DRAINED)

    def held(self, share: Share) -> UnitForm:
        """What one of several ranks holds of it."""
        weights, trained = self.weight_layout.held(share), self.trained.held(share)
        return replace(self, weight_layout=weights, trained=trained)

    def cut_for(self, num_shares: int) -> UnitForm:
        """The same, filled up so that it can be cut evenly into so many shares."""
        weights, trained = (one.cut_for(num_shares) for one in (self.weight_layout, self.trained))
        return replace(self, weight_layout=weights, trained=trained)

    def piece(self, number: int, num_pieces: int) -> tuple[slice, ...]:
        """Elements of one of so many pieces of the trained parameters.

        These are cut at blocks, or between parameters where state is kept by these.
        """
        if self.state_layouts:
            spans = [self.trained.span(owner) for owner in self.trained.by_start.values()]
            groups = gathered([span.stop - span.start for span in spans], num_pieces)
            return tuple(spans[groups[number]]) if number < len(groups) else ()
        total = self.trained.padded_numel
        size = round_up(-(-total // num_pieces), ALIGNMENT_ELEMENTS)
        return (slice(min(total, number * size), min(total, (number + 1) * size)),)

    @property
    def num_rows(self) -> int:
        """Rows of a table, which is all there is."""
        (shape,) = self.weight_layout.shapes().values()
        return shape[0]

    def rows(self, number: int, num_slices: int) -> slice:
        """Those of one of so many slices of a table."""
        size = rows_of_slice(self.num_rows, num_slices)
        return slice(number * size, min((number + 1) * size, self.num_rows))

    def row_bytes(self, owner: str) -> int:
        """Bytes of one row of a table, as it crosses the link."""
        dtype = self.weight_layout.dtype_of(owner)
        assert dtype is not None, owner
        return self.weight_layout.shapes()[owner][1] * dtype.itemsize

    @property
    def companion_name(self) -> str:
        """What the companion is called in a ledger."""
        return "remainders" if self.companion_dtype is torch.int16 else "masters"

    @property
    def is_one_run(self) -> bool:
        """Whether the trained parameters lie in one row, in the weights as in everything else."""
        trained, weights = self.trained.segments, self.weight_layout.segments
        return len(trained) == 1 and bool(weights) and weights[0] == trained[0]

    def kept(self) -> dict[str, tuple[torch.dtype, int]]:
        """Type and number of elements of each buffer besides the weights: companion and state."""
        numel, found = self.trained.padded_numel, dict[str, tuple[torch.dtype, int]]()
        if self.companion_dtype is not None:
            found[self.companion_name] = (self.companion_dtype, numel)
        for name, kind in self.state_kinds.items():
            number = numel // ALIGNMENT_ELEMENTS if kind.per_block else numel
            if name in self.state_layouts:
                number = self.state_layouts[name].padded_numel
            found[name] = (kind.dtype, number)
        return found

    def bytes_by_kind(self) -> dict[str, int]:
        """Host bytes, by what they hold."""
        kept = {name: numel * dtype.itemsize for name, (dtype, numel) in self.kept().items()}
        return {"weights": self.weight_layout.nbytes, **kept}


def units_of(partition: Partition) -> list[tuple[str, UnitTensors]]:
    """What moves into the server; the outer buffers stay with the skeleton, on the device."""
    layers = [(f"L{index}", one) for index, one in enumerate(partition.layer_tensors)]
    outer, tables = partition.outer_tensors.parameters, partition.tables
    rest = {owner: value for owner, value in outer.items() if owner not in tables}
    formats = partition.outer_tensors.formats
    units = [
        (f"T{index}", UnitTensors(parameters={owner: outer[owner]}, buffers={}))
        for index, owner in enumerate(tables)
    ]
    return [*layers, *units, (OUTER, UnitTensors(parameters=rest, buffers={}, formats=formats))]


def form_of(
    name: str,
    tensors: UnitTensors,
    *,
    optimizer: Optimizer,
    settings: Mapping[str, Settings],
    precision: PrecisionPolicy,
    num_shares: int = 1,
    drains_sums: bool = False,
) -> UnitForm:
    """What a unit is made of; `settings` has those of the parameters that are trained.

    What is trained comes first in its weights, as in everything else, so that whoever holds a share
    of the gradient holds the same share of the weights.
    """
    formats = tensors.formats
    described = [
        (owner, tuple(parameter.shape), precision.link_dtype(owner, parameter.dtype))
        for owner, parameter in tensors.parameters.items()
        if owner not in formats
    ]
    trained = FlatLayout.of(
        (entry for entry in described if entry[0] in settings), num_shares=num_shares
    )
    kinds, companion, layouts, work = dict[str, StateKind](), None, {}, DeviceWork()
    rest = [entry for entry in described if entry[0] not in settings]
    rest += [(key, tuple(value.shape), value.dtype) for key, value in tensors.buffers.items()]
    rest += [
        (state_name(owner, name), shape, dtype)
        for owner, one in formats.items()
        for name, shape, dtype in one.fields
    ]
    if isinstance(optimizer, HostOptimizer):
        companions = [COMPANION[one.dtype] for one in trained.segments if one.dtype in COMPANION]
        companion = next(iter(companions), None)
        kept = {o: optimizer.kept(settings[o], one) for o, one in trained.shapes().items()}
        kinds = {kind: one for own in kept.values() for kind, one in own.items()}
        if optimizer.is_by_parameter:
            layouts = {kind: _layout_of(kind, kept, trained) for kind in kinds}
            own = (optimizer.device_work(settings[o], one) for o, one in trained.shapes().items())
            work = DeviceWork.of(own)
    elif isinstance(optimizer, Adafactor):
        rest += [
            (state_name(owner, state), state_shape, torch.float32)
            for owner, shape, _ in described
            if owner in settings
            for state, state_shape in optimizer.state_shapes(shape).items()
        ]
    return UnitForm(
        name=name,
        weight_layout=FlatLayout.joined(trained, FlatLayout.of(rest, num_shares=num_shares)),
        trained=trained,
        state_kinds=kinds,
        companion_dtype=companion,
        state_layouts=layouts,
        device_work=work,
        formats=formats,
        drains_sums=drains_sums,
    )


def _layout_of(
    kind: str, kept: Mapping[str, Mapping[str, StateKind]], trained: FlatLayout
) -> FlatLayout:
    """Where state of a kind lies that is kept by parameter."""

    def shape_of(owner: str, one: StateKind) -> tuple[int, ...]:
        shape = trained.shapes()[owner]
        own = (num_blocks(math.prod(shape)),) if one.per_block else shape
        return own if one.shape is None else one.shape

    having = {owner: own[kind] for owner, own in kept.items() if kind in own}
    found = FlatLayout.of((o, shape_of(o, one), one.dtype) for o, one in having.items())
    if len(found.segments) > 1:
        types = ", ".join(str(one.dtype) for one in found.segments)
        raise ValueError(f"state {kind!r} of several types is not supported, found {types}")
    return found


def without_memory(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """NaN, which shows even through a factor of zero, or zeros, in a shape without its memory."""
    value = torch.nan if dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)


def forms_of(
    partition: Partition,
    *,
    optimizer: Optimizer,
    settings: Mapping[str, Settings],
    precision: PrecisionPolicy,
    num_shares: int = 1,
    drains_sums: bool = False,
) -> list[UnitForm]:
    """What every unit is made of with an optimizer; `settings` has those of what is trained."""
    form = partial(
        form_of,
        optimizer=optimizer,
        settings=settings,
        precision=precision,
        num_shares=num_shares,
        drains_sums=drains_sums,
    )
    return [form(name, tensors) for name, tensors in units_of(partition)]


def formats_in(forms: Iterable[UnitForm]) -> tuple[tuple[str, str], ...]:
    """A line for a plan: formats of weights, and how many weights there are of each."""
    kinds = Counter(one.kind.__name__ for form in forms for one in form.formats.values())
    words = ", ".join(f"{number:,} weights are {kind}" for kind, number in kinds.items())
    return (("quantized", words),) if kinds else ()


def host_bytes(forms: list[UnitForm], policy: UpdatePolicy) -> int:
    """Bytes of the server with its staging; stash and late updates come on top."""
    total = sum(sum(form.bytes_by_kind().values()) for form in forms)
    total += sum(form.gradient_layout.nbytes for form in forms if form.drains_sums)  # `.grad`
    if policy is UpdatePolicy.ON_DEVICE:
        return total
    layers = [form.staging_layout.nbytes for form in forms if form.name.startswith("L")]
    outer = [form.staging_layout.nbytes for form in forms if not form.name.startswith("L")]
    if policy is UpdatePolicy.JUST_IN_TIME:
        return total + sum(layers) + sum(outer)
    return total + sum(outer) + max(layers) * min(NUM_STAGING, len(layers))


def alternatives(
    forms_with: Callable[[Optimizer], list[UnitForm]], policy: UpdatePolicy, link: torch.dtype
) -> dict[str, int]:
    """Bytes that other optimizers would need, by the setting that chooses them."""
    eight_bit = forms_with(AdamW(moments="8bit"))
    found = {"optimizer=l2l.AdamW(moments='8bit')": host_bytes(eight_bit, policy)}
    if policy is not UpdatePolicy.JUST_IN_TIME and link is torch.bfloat16:
        adafactor = forms_with(Adafactor())
        found["optimizer=l2l.Adafactor()"] = host_bytes(adafactor, UpdatePolicy.ON_DEVICE)
    return found
