"""What a plan is made for: sizes and costs of a model's parts, a batch, and what was asked for."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from l2l.model import LayerInputs, Partition, Recording, Route, Tiles
from l2l.parameter_server import (
    DeviceWork,
    HostOptimizer,
    Optimizer,
    Part,
    UnitForm,
    UpdatePolicy,
    block_bytes,
    gathered,
    rows_of_slice,
    written_bytes,
)
from l2l.planner.disk_tier import DiskTier, spread
from l2l.planner.layer_cost import PassCost, count_kept_pass, count_pass
from l2l.schedule import OuterUnit

COLLECTIVE_SECONDS = 30e-6  # that ranks need to begin to talk
MANY_TOKENS = 8192  # enough for activations to outweigh gradients of weights
MEMORY = (  # of a `PassCost`
    "working_bytes",
    "output_bytes",
    "kept_bytes",
    "plain_working_bytes",
    "plain_kept_bytes",
)
ROUGH = ((1, 12, 0), (3, 34, 0), (1, 24, 24), (2, 34, 0))  # passes; hidden states at work; kept
Passes = tuple[PassCost, ...]  # as the fields of `LayerCosts`


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """Bytes of a unit, by where they may be."""

    weight_bytes: int
    gradient_bytes: int  # sums, in float32
    staging_bytes: int  # as gradients cross the link
    state_bytes: int  # optimizer state, and what completes the master
    num_trained: int  # parameters
    state_block_bytes: int = 0  # of the same on disk
    weights_block_bytes: int = 0
    weights_written_bytes: int = 0  # of these, what a step changes
    is_one_run: bool = True  # whether these lie in one row, so that their state can be lent
    num_rows: int = 0  # of a table, which is all there is; 0: it is something else
    wholes: tuple[int, ...] = ()  # elements of its parameters, if these are updated as wholes
    work: DeviceWork = field(default_factory=DeviceWork)  # of an update on the device

    @property
    def lent_bytes(self) -> int:
        """What is copied to the device for an update there."""
        return self.state_bytes + self.staging_bytes + self.weight_bytes

    def block_bytes(self, part: Part) -> int:
        """What a part takes on disk."""
        return self.weights_block_bytes if part == "weights" else self.state_block_bytes

    def part_bytes(self, part: Part) -> int:
        """What a part takes of host memory."""
        return self.weight_bytes if part == "weights" else self.state_bytes

    def largest_piece(self, num_pieces: int) -> float:
        """What the largest of so many pieces is of it."""
        if not self.wholes:
            return 1 / num_pieces
        pieces = (sum(self.wholes[piece]) for piece in gathered(self.wholes, num_pieces))
        return max(pieces) / sum(self.wholes)

    def slice(self, num_slices: int) -> UnitSize:
        """The largest of so many slices of a table."""
        rows = rows_of_slice(self.num_rows, num_slices)
        share = rows / self.num_rows
        names = ("weight_bytes", "gradient_bytes", "staging_bytes", "state_bytes", "num_trained")
        cut = {name: math.ceil(share * getattr(self, name)) for name in names}
        return replace(self, num_rows=rows, **cut)


@dataclass(frozen=True, eq=False)
class CostCurve:
    """The cost of a pass for any number of rows, from those for some; only equal to itself.

    Arithmetic and traffic grow by a line. Memory is that of the worst moment, and each moment's
    grows by a line of its own: for few rows the worst is the end, when all gradients of weights are
    there, for many some place in the middle. Hence it is nowhere above the straight line between
    two numbers of rows, and beyond the last not above what is in proportion to it.
    """

    counted: tuple[tuple[int, PassCost], ...]  # for one row, for two, and perhaps for many

    def at(self, rows: float) -> PassCost:
        """The cost for so many rows."""
        (_, one), (_, two), *_ = self.counted
        return PassCost(
            matrix_flops=_line(one.matrix_flops, two.matrix_flops, rows - 1),
            moved_bytes=_line(one.moved_bytes, two.moved_bytes, rows - 1),
            num_kernels=max(one.num_kernels, two.num_kernels),
            **{name: self._memory(name, rows) for name in MEMORY},
        )

    @property
    def plain(self) -> CostCurve:
        """The same with the memory of passes that are not compiled."""
        return CostCurve(tuple((rows, _plain(cost)) for rows, cost in self.counted))

    def _memory(self, name: str, rows: float) -> int:
        last, most = self.counted[-1]
        if rows > last and len(self.counted) > 2:
            return int(getattr(most, name) * rows / last)
        pairs = list(pairwise(self.counted))
        (low, few), (high, many) = next((p for p in pairs if rows <= p[1][0]), pairs[-1])
        return int(_line(getattr(few, name), getattr(many, name), (rows - low) / (high - low)))


def _plain(cost: PassCost) -> PassCost:
    working, kept = cost.plain_working_bytes, cost.plain_kept_bytes
    return replace(cost, working_bytes=working, kept_bytes=kept) if working else cost


def _line(first: float, second: float, share: float) -> float:
    return max(0.0, first + (second - first) * share)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The passes of one layer."""

    forward: CostCurve
    backward: CostCurve  # recomputation and backward
    kept_forward: CostCurve  # keeping everything, as layers of the tail do
    kept_backward: CostCurve

    @property
    def plain(self) -> LayerCosts:
        """Those of passes that are not compiled, as far as memory is concerned."""
        curves = (self.forward, self.backward, self.kept_forward, self.kept_backward)
        return LayerCosts(*(one.plain for one in curves))


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Ranks that train one model, a device each, and what joins them.

    Those of one host hold the model together; other hosts hold copies of it. Every device has a
    link of its own; memory and cores are their host's.
    """

    num_ranks: int = 1
    per_host: int = 1  # at most
    near_rate: float = math.inf  # bytes/s in and out of a device, from and to others of its host
    far_rate: float = math.inf  # the same across hosts
    # Of a host, beside that of one device as it was measured. None: as many times as devices.
    host_speed: float | None = None

    @property
    def num_shares(self) -> int:
        """Ranks that hold a copy of the model together."""
        return min(self.num_ranks, self.per_host)

    @property
    def num_copies(self) -> int:
        """Copies of the model."""
        return -(-self.num_ranks // self.num_shares)

    @property
    def contention(self) -> float:
        """How much longer the host needs for a share because others update theirs meanwhile."""
        speed = self.num_shares if self.host_speed is None else self.host_speed
        return max(1.0, self.num_shares / speed)

    def gather_seconds(self, nbytes: float) -> float:
        """To get what others hold of so many bytes; or to give them their sums of as many."""
        number = self.num_shares
        return COLLECTIVE_SECONDS + nbytes * (number - 1) / number / self.near_rate

    def reduce_seconds(self, nbytes: float) -> float:
        """To sum so many bytes over all ranks, each its share."""
        copies, own = self.num_copies, nbytes / self.num_shares
        across = 2 * own * (copies - 1) / copies / self.far_rate
        return self.gather_seconds(nbytes) + across + (COLLECTIVE_SECONDS if copies > 1 else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything a plan depends on but the machine and the budget."""

    layers: tuple[UnitSize, ...]  # of every call of one
    costs: tuple[LayerCosts, ...]  # for each of these
    route: Route
    outer: tuple[tuple[OuterUnit, UnitSize], ...]
    num_rows: int  # of a batch
    length: int  # positions in a row
    tile_tokens: int | None = None  # that pass at once what of a layer is pointwise
    hidden_bytes: int  # of one row
    recorded_bytes: int  # of one row, about
    aside_bytes: int = 0  # of one row
    joint: bool = False  # whether one loss is taken over all microbatches
    looked_up_bytes: int  # of one row
    head_parameters: int  # in matrices of the epilogue
    head_width: int  # its widest output: words
    logit_bytes: float  # of a piece's memory, for each of its logits
    logit_moved_bytes: float  # read and written by the loss, for each logit
    may_cut_rows: bool  # whether the epilogue may run on some rows of a microbatch
    may_cut_positions: bool
    may_keep: bool  # whether streamed layers can keep some of their results
    policy: UpdatePolicy
    update_bytes: float  # host memory traffic of an update, for each parameter
    eight_bit: bool
    has_halves: bool  # whether late updates can be done in two
    # Whether updates are products of matrices: then the device makes all those of layers.
    updates_wholes: bool = False
    may_update_on_device: bool
    is_single: bool  # whether layers compute in float32
    needs_slices: bool = False  # whether the head must come in slices, or in one
    buffer_bytes: int
    context_bytes: int = 0  # on the device, beside tensors
    server_bytes: int  # of the parameter server, on the host
    disk: DiskTier | None = None  # to which what the host has no room for may go
    spills: bool = False  # whether the stash may, too
    least_on_disk: tuple[int, int] = (0, 0)  # layers for whose state, and weights, is no room
    host_limit_bytes: int
    together: Together = Together()
    parallel: bool = False  # whether ranks talk to each other, whatever joins them

    @property
    def plain(self) -> Problem:
        """The same while layers are not compiled yet."""
        known = {id(one): one.plain for one in self.costs}
        return replace(self, costs=tuple(known[id(one)] for one in self.costs))

    @property
    def head(self) -> UnitSize | None:
        """A head that may come in slices."""
        if self.joint:
            return None
        return next((size for unit, size in self.outer if unit.may_be_sliced), None)


def disk_order(
    route: Route, layers: Sequence[UnitSize], part: Part, *, but: Collection[int]
) -> list[int]:
    """Calls whose layers may have this part on disk, in the order in which it goes there.

    Args:
        route: which layers they are of.
        layers: of every call.
        part: state or weights.
        but: calls whose layers' state is elsewhere.
    """
    first = {layer: call for call, layer in reversed([*enumerate(route.layers)])}
    calls = (first[layer] for layer in spread(first))
    return [call for call in calls if layers[call].block_bytes(part) and call not in but]


# --------------------------------------------------------------------------------------------------
# Counted without running anything. Layers are counted on the meta device with the arguments that a
# prologue run has recorded, one layer of each structure, for some numbers of rows: costs are
# straight lines in between and beyond.


def unit_size(form: UnitForm) -> UnitSize:
    """Bytes of a unit."""
    weight_bytes, shapes = form.weight_layout.nbytes, list(form.shapes().values())
    return UnitSize(
        weight_bytes=weight_bytes,
        gradient_bytes=form.gradient_layout.nbytes,
        staging_bytes=form.staging_layout.nbytes,
        state_bytes=sum(form.bytes_by_kind().values()) - weight_bytes,
        state_block_bytes=block_bytes(form, "state"),
        weights_block_bytes=block_bytes(form, "weights"),
        weights_written_bytes=written_bytes(form, "weights"),
        num_trained=form.trained.numel,
        is_one_run=form.is_one_run,
        num_rows=0 if form.name.startswith("L") or len(shapes) != 1 else shapes[0][0],
        wholes=tuple(map(math.prod, form.trained.shapes().values())) if form.state_layouts else (),
        work=form.device_work,
    )


def layer_costs(
    partition: Partition,
    forms: Sequence[UnitForm],
    recordings: Sequence[Sequence[Recording]],
    route: Route,
    *,
    fused: bool,
    tiles: Mapping[str, Tiles],
) -> tuple[LayerCosts, ...]:
    """The costs of every call of a layer, from recordings of one row and of two.

    Args:
        partition: whose layers are counted.
        forms: of the layers.
        recordings: for one row and for two, of every stack.
        route: which calls there are.
        fused: whether layers are compiled.
        tiles: by structure, what of layers runs in tiles.
    """
    known: dict[tuple[str, int], LayerCosts] = {}
    found = []
    for call, index in enumerate(route.layers):
        stack, form = route.stack_of(call), forms[index]
        key = partition.structures[index], stack
        if key not in known:
            count = partial(
                _count_passes, partition, route, call, form, fused=fused, tiles=tiles.get(key[0])
            )
            known[key] = _costs(count, form, [each[stack] for each in recordings])
        found.append(known[key])
    return tuple(found)


def _costs(
    count: Callable[[Recording], Passes], form: UnitForm, recordings: Sequence[Recording]
) -> LayerCosts:
    """Costs from those for one row, for two, and where that can be told for many."""
    assert recordings[0].hidden is not None
    counted: dict[int, Passes] = {}
    for rows, recording in enumerate(recordings, start=1):
        try:
            counted[rows] = count(recording)
        except Exception:  # a layer whose code looks at values cannot be counted without any
            counted[rows] = _rough_passes(form, recording)
    many = -(-MANY_TOKENS // math.prod(recordings[0].hidden.shape[:-1]))
    if many > len(counted):
        # Not if the layer looks at values, or is told how many rows there are.
        with contextlib.suppress(Exception):
            counted[many] = count(_with_rows(recordings, many))
    kinds = zip(*counted.values(), strict=True)
    return LayerCosts(*(CostCurve(tuple(zip(counted, kind, strict=True))) for kind in kinds))


def _with_rows(recordings: Sequence[Recording], number: int) -> Recording:
    """A recording of so many rows, without data, from those of one row and of two."""

    def grown(one: Tensor, two: Tensor) -> Tensor:
        sizes = [a if a == b else a * number for a, b in zip(one.shape, two.shape, strict=True)]
        return torch.empty(sizes, dtype=one.dtype, device="meta")

    first, second = recordings
    assert first.hidden is not None
    assert second.hidden is not None
    return Recording(
        hidden=grown(first.hidden, second.hidden),
        tensors=[grown(a, b) for a, b in zip(first.tensors, second.tensors, strict=True)],
        calls=first.calls,
        handed={
            call: [grown(a, b) for a, b in zip(one, second.handed[call], strict=True)]
            for call, one in first.handed.items()
        },
    )


def _count_passes(
    partition: Partition,
    route: Route,
    call: int,
    form: UnitForm,
    recording: Recording,
    *,
    fused: bool,
    tiles: Tiles | None,
) -> Passes:
    assert recording.hidden is not None
    index, layout = route.layers[call], form.weight_layout
    handed = recording.handed.get(call, [recording.hidden])
    hidden, *beside = (one.detach().to("meta") for one in handed)
    inputs = LayerInputs(
        part=partition.layers[index],
        tensors=form.of_views(
            {
                name: torch.empty(shape, dtype=layout.dtype_of(name), device="meta")
                for name, shape in layout.shapes().items()
            }
        ),
        trained=form.trained.names,
        call=recording.calls[call],
        hidden=hidden,
        beside=beside,
        entries=route.gives[call],
        hidden_requires_gradient=True,
        recorded=[tensor.detach().to("meta") for tensor in recording.tensors],
        through=(),
        changes_input=partition.structures[index] in partition.changing_input,
        tiles=tiles,
    )
    gradient = torch.empty_like(inputs.forward()[0])  # made here, since it is given to the pass
    wanted: list[Tensor] = []

    def walk() -> Tensor:
        walked = inputs.walk()
        wanted[:] = walked.wanted.values()
        return walked.outputs[0]

    def unwind(end: Tensor | GradientEdge) -> Any:
        return torch.autograd.grad(end, wanted, [gradient], allow_unused=True)

    plain = count_pass(lambda: inputs.forward()[0], fused=fused)
    again = count_pass(lambda: unwind(walk()), fused=fused)
    return plain, again, *count_kept_pass(walk, unwind, fused=fused)


def _rough_passes(form: UnitForm, recording: Recording) -> Passes:
    """Costs as of a transformer layer of this size."""
    assert recording.hidden is not None
    hidden, gradients = recording.hidden.nbytes, form.gradient_layout.nbytes
    numel = sum(map(math.prod, form.shapes().values()))
    flops = 2.0 * numel * math.prod(recording.hidden.shape[:-1])
    return tuple(
        PassCost(
            matrix_flops=passes * flops,
            moved_bytes=passes * 12 * hidden,
            num_kernels=passes * 20,
            working_bytes=working * hidden + (gradients if passes > 1 else 0),
            output_bytes=hidden,
            kept_bytes=kept * hidden,
        )
        for passes, working, kept in ROUGH
    )


def passed_on(recording: Recording) -> list[list[Tensor]]:
    """What enters the calls of a stack, as far as they differ."""
    assert recording.hidden is not None
    return list(recording.handed.values()) or [[recording.hidden]]


def head_of(forms: Sequence[UnitForm]) -> tuple[int, int]:
    """Parameters in matrices of these units, and the widest output among them."""
    shapes = [shape for form in forms for shape in form.shapes().values()]
    shapes = [shape for shape in shapes if len(shape) == 2]
    return sum(map(math.prod, shapes)), max((shape[0] for shape in shapes), default=1)


def update_bytes(optimizer: Optimizer, form: UnitForm) -> float:
    """Host memory traffic of an update, for each parameter."""
    numel = form.trained.padded_numel
    if not isinstance(optimizer, HostOptimizer) or not numel:
        return 0.0
    changed = sum(form.bytes_by_kind().values()) - form.weight_layout.nbytes
    changed += form.trained.nbytes
    return (form.staging_layout.nbytes + 2.0 * changed) / numel
