"""The plan: what is placed where, in bytes, and the choices that led there; frozen data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from l2l.device import describe_wear, format_bytes
from l2l.model import Route
from l2l.parameter_server import NUM_STAGING, PLACES, Part, UpdatePolicy
from l2l.planner.bounds import Bounds
from l2l.planner.hardware import Hardware
from l2l.planner.problem import Problem, UnitSize, disk_order
from l2l.schedule import OuterUnit, Shape

ALWAYS = "always"

PART_TOKENS = 4096  # with fewer, the host may be slower than the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What a plan decides. The defaults take least memory and need no measurement."""

    microbatch_tokens: int = 8192
    num_slots: int = 2
    num_cells: int = 6
    num_gradient_slots: int = 2
    num_tail: int = 0  # layers, the last of them, that stay on the device for the whole step
    num_device_states: int = 0  # of these, how many have their optimizer state on the device
    # Positions that pass the epilogue at once; None: all of a microbatch.
    piece_tokens: int | None = None
    # Positions that pass at once what of a layer is pointwise; None: all of a microbatch.
    tile_tokens: int | None = None
    # Share of its intermediate results that a streamed layer keeps instead of recomputing.
    keep: float = 0.0
    num_kept_cells: int = 0
    # Units whose update is left to the next step although it could be done in its own.
    num_late: int = 0
    # Streamed layers whose updates the device does, with state brought over the link.
    num_shared: int = 0
    num_pieces: int = 16  # in which the state of such a layer is lent
    # Whether late updates do weights before they are needed and moments afterwards.
    halves: bool = False
    # Layers, of those needed last, whose late update is done at once nevertheless.
    num_whole: int = 0
    shares_memory: bool = False  # whether head and layers' gradients take turns in the same memory
    # Whether what is around the layers stays on the device with its optimizer state.
    outer_state: bool = False
    num_head_slices: int = 0  # in which a head comes like a layer; 0: it comes whole
    num_on_disk: int = 0  # layers whose optimizer state is on disk
    num_weights_on_disk: int = 0  # layers whose weights are on disk
    # Layers of whose boundary tensors the host has room for; others go to disk. None: of all.
    stash_values: int | None = None

    def rows(self, problem: Problem) -> int:
        """Of a microbatch."""
        return max(1, self.microbatch_tokens // problem.length)

    def num_microbatches(self, problem: Problem) -> int:
        """Of a step."""
        return -(-problem.num_rows // self.rows(problem))

    def mean_rows(self, problem: Problem) -> float:
        """Of the microbatches of a step."""
        return problem.num_rows / self.num_microbatches(problem)

    def shared_layers(self, num_layers: int) -> frozenset[int]:
        """Which layers these are: spread evenly over those that are streamed."""
        streamed = num_layers - self.num_tail
        number = min(self.num_shared, streamed)
        return frozenset(int((i + 0.5) * streamed / number) for i in range(number))

    @property
    def kept_share(self) -> float:
        """Of its intermediate results, what a streamed layer keeps: none without cells for it."""
        return self.keep if self.num_kept_cells else 0.0

    @property
    def part_tokens(self) -> int | None:
        """Positions that pass at once what of the epilogue is not in pieces; None: all of them."""
        return None if self.piece_tokens is None else max(self.piece_tokens, PART_TOKENS)

    def num_recorded_cells(self, num_microbatches: int, num_stacks: int = 1) -> int:
        """Cells for what layers are given besides hidden states: for all, where these stay too.

        Else one for the running pass and one for the next. Small as they are, they would queue
        behind weights that arrive. An interlude reads those of one stack and writes the next's.
        """
        number = num_microbatches if num_microbatches + 2 <= self.num_cells else 2
        return number + (num_stacks > 1)

    @property
    def is_refused(self) -> bool:
        """Whether there are choices among these that do not go together."""
        return self.num_head_slices > 0 and (self.num_tail > 0 or self.shares_memory)

    def outer_unit(self, unit: OuterUnit) -> OuterUnit:
        """A unit around the layers, placed as decided."""
        if self.num_head_slices and unit.may_be_sliced:
            return replace(unit, num_slices=self.num_head_slices)
        if not self.outer_state or not unit.trained:
            return unit
        before = unit.in_prologue or unit.looked_up
        return replace(unit, in_prologue=before, looked_up=False, device_state=True)

    def shape(
        self,
        *,
        num_microbatches: int,
        layers: Sequence[UnitSize],
        route: Route,
        outer: Iterable[OuterUnit],
        update: UpdatePolicy,
        has_halves: bool,
        parallel: bool,
        training: bool = True,
        joint: bool = False,
        whole_head: bool = False,
        side: str = "",
        asks_inputs: bool = False,
        before: tuple[frozenset[str], tuple[str, ...]] | None = None,
    ) -> Shape:
        """The shape of a step; whoever runs or simulates one has it from here.

        Args:
            num_microbatches: of the step.
            layers: of every call of one.
            route: which calls these are.
            outer: units around the layers, not placed yet.
            update: when units are updated.
            has_halves: whether late updates can be done in two.
            parallel: whether ranks talk to each other.
            training: whether it ends in updates.
            joint: whether one loss is taken over all microbatches.
            whole_head: whether all logits are wanted.
            side: of a step in two sides, which one; it leaves no tail and keeps no results.
            asks_inputs: whether gradients are wanted of what the model is called with.
            before: units that the step before has left on the device, and those whose update it has
                left; None: as every step of a run leaves them.
        """
        num_layers, trains = len(layers), [bool(unit.num_trained) for unit in layers]
        whole = replace(self, num_head_slices=0) if joint or whole_head else self
        outer = tuple(map(whole.outer_unit, outer))
        just_in_time = update is UpdatePolicy.JUST_IN_TIME
        num_tail = (
            0 if joint or side else min(self.num_tail, route.max_tail)
        )  # it may have been chosen for more
        first = num_layers - min(self.num_device_states, num_tail)
        again = {i for i, layer in enumerate(route.layers) if layer in route.repeated}
        shared = self.shared_layers(num_layers) - again
        in_order = route.layers == tuple(range(num_layers))
        shape = Shape(
            layers=tuple(range(num_layers)),
            units=() if in_order else route.layers,
            stacks=route.stacks,
            num_microbatches=num_microbatches,
            num_slots=max(1, min(self.num_slots, num_layers - num_tail)),
            num_cells=self.num_cells,
            num_recorded_cells=self.num_recorded_cells(num_microbatches, route.num_stacks),
            num_kept_cells=0 if side else self.num_kept_cells,
            num_gradient_slots=self.num_gradient_slots,
            num_staging=NUM_STAGING,
            frozen_layers=frozenset(i for i, one in enumerate(trains) if not one),
            outer=outer,
            num_tail=num_tail,
            device_state=frozenset(i for i in range(first, num_layers) if trains[i]),
            num_late=num_layers + len(outer) if just_in_time else self.num_late,
            device_updates=update is UpdatePolicy.ON_DEVICE,
            shared=frozenset(index for index in shared if layers[index].is_one_run),
            num_pieces=self.num_pieces,
            halves=self.halves and has_halves,
            num_whole=self.num_whole,
            shares_memory=self.shares_memory,
            side=side,
            fused=bool(side) and not whole_head,
            asks_inputs=asks_inputs,
            training=training,
            joint=joint,
            parallel=parallel,
        )
        held, pending = before or (frozenset(shape.on_device), shape.late_units)
        elsewhere = {*shape.device_state, *shape.shared}

        def on_disk(part: Part) -> frozenset[str]:
            able = disk_order(route, layers, part, but=elsewhere)
            return frozenset(map(shape.unit, able[: self.num_parts(part)]))

        return replace(
            shape,
            held=held,
            pending=pending,
            on_disk=on_disk("state"),
            num_disk_buffers=len(PLACES["state"]),
            weights_on_disk=on_disk("weights"),
            num_weight_buffers=len(PLACES["weights"]),
            num_stash_buffers=0 if side else (self.stash_values or 0) * num_microbatches,
        )

    def num_parts(self, part: Part) -> int:
        """How many layers have a part on disk."""
        return self.num_weights_on_disk if part == "weights" else self.num_on_disk

    def with_parts(self, state: int, weights: int) -> Decisions:
        """The same with state, and weights, of so many layers on disk."""
        return replace(self, num_on_disk=state, num_weights_on_disk=weights)

    def override(self, choices: Mapping[str, Any]) -> Decisions:
        """The same with some choices made otherwise.

        Raises:
            ValueError: there is no such choice.
        """
        unknown = set(choices) - set(self.__slots__)
        if unknown:
            raise ValueError(
                f"overrides contains unknown choices {sorted(unknown)}. Expected names "
                f"from {', '.join(self.__slots__)}."
            )
        return replace(self, **choices)

    def _of_head(self) -> str:
        if self.num_head_slices:
            return f"that of layers: it comes in {self.num_head_slices} slices of the vocabulary"
        return "shared with gradients" if self.shares_memory else "its own"

    def describe(self, num_layers: int, policy: UpdatePolicy) -> tuple[tuple[str, str], ...]:
        """Choices for people."""
        tail = "none: all layers are streamed"
        if self.num_tail:
            tail = f"the last {self.num_tail} of {num_layers} layers stay on the device"
            if self.num_device_states:
                tail += f", {self.num_device_states} of them with their optimizer state"
        piece = f"in pieces of {self.piece_tokens:,} tokens" if self.piece_tokens else None
        tiles = f"in tiles of {self.tile_tokens or 0:,} tokens, not compiled"
        kept = f"{self.keep:.0%} of what a layer makes" if self.num_kept_cells else "nothing"
        late = f"{self.num_late} units in the next step" if self.num_late else "none"
        if policy is UpdatePolicy.JUST_IN_TIME:
            late = "all to the next step"
        updates = "by the host alone"
        if self.num_shared:
            updates = f"by the host; of {self.num_shared} layers by the device, state lent"
        if self.halves:
            updates += ", weights first and moments afterwards"
            number = "layer" if self.num_whole == 1 else f"{self.num_whole} layers"
            updates += f" but for the last {number}" if self.num_whole else ""
        on_disk = f"that of {self.num_on_disk} of {num_layers} layers"
        stash = f"that of {self.stash_values} layers in memory, the rest on disk"
        weights = f"those of {self.num_weights_on_disk} of {num_layers} layers"
        around = "stays on the device with its state" if self.outer_state else "comes when needed"
        return (
            ("tail", tail),
            ("epilogue", piece or "a microbatch at once"),
            *((("pointwise in layers", tiles),) if self.tile_tokens else ()),
            *((("optimizer state on disk", on_disk),) if self.num_on_disk else ()),
            *((("weights on disk", weights),) if self.num_weights_on_disk else ()),
            *((("stash", stash),) if self.stash_values is not None else ()),
            ("kept, not recomputed", kept),
            ("updates left", late),
            ("late updates", updates),
            ("around the layers", around),
            ("memory of the head", self._of_head()),
        )


# Choices where all optimizer state stays in host memory: several ranks hold it together, or layers
# may be left out of a step.
STATE_ON_HOST: Final = {"num_device_states": 0, "num_shared": 0, "outer_state": False}


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """Bytes for one purpose in one place."""

    place: str  # "device" or "host"
    purpose: str
    nbytes: int
    phase: str = ALWAYS


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """A step of so many devices, each with the rows of one."""

    num_ranks: int
    seconds: float
    bound: str
    host_bytes: int  # of the parameter server, for each rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The ledger, the choices, and what is to be expected of them."""

    ledger: tuple[LedgerLine, ...]
    choices: tuple[tuple[str, str], ...]
    budget_bytes: int | None = None
    predicted_seconds: float | None = None  # of a step
    bound: str | None = None  # "compute", "link", "host" or "disk"
    bounds: Bounds | None = None  # what a step takes at best
    num_tokens: int | None = None  # of a step
    disk_read_bytes: int = 0  # in every step
    disk_written_bytes: int = 0
    machine: Hardware | None = None  # that it is for
    host_limit_bytes: int | None = None  # of host memory, as far as it may be taken
    first_step: tuple[tuple[str, float], ...] = ()  # seconds by phase, until it was handed over
    measured: tuple[str, ...] = ()  # lines about the first steps
    scaling: tuple[ScalingPoint, ...] = ()  # one device first

    def phases(self) -> dict[str, int]:
        """Device bytes in each phase of a step, with what is there always."""
        own = [line for line in self.ledger if line.place == "device"]
        always = sum(line.nbytes for line in own if line.phase == ALWAYS)
        found: dict[str, int] = {}
        for line in own:
            if line.phase != ALWAYS:
                found[line.phase] = found.get(line.phase, always) + line.nbytes
        return found or {ALWAYS: always}

    def total_bytes(self, place: str) -> int:
        """Bytes of a place; of the device those of the phase that takes most."""
        if place == "device":
            return max(self.phases().values())
        return sum(line.nbytes for line in self.ledger if line.place == place)

    def sentence(self) -> str:
        """The plan in a line."""
        choices = dict(self.choices)
        tail, kept = choices["tail"].removeprefix("none: "), choices["kept, not recomputed"]
        limit = f" of {format_bytes(self.budget_bytes)}" if self.budget_bytes else ""
        parts = [
            f"{choices['precision']}, {tail}",
            f"microbatches of {choices['microbatch']}",
            *([] if kept == "nothing" else [f"{kept} is kept"]),
            f"{format_bytes(self.total_bytes('device'))}{limit} of the device",
            f"{format_bytes(self.total_bytes('host'))} of host memory",
        ]
        return "; ".join(parts) + (f"; {self.bound} bound" if self.bound else "")

    def __str__(self) -> str:
        labels = [line.purpose for line in self.ledger] + [name for name, _ in self.choices]
        width = max(map(len, labels), default=0) + 2

        def lines(place: str, phase: str, indent: str = "  ") -> list[str]:
            own = [one for one in self.ledger if (one.place, one.phase) == (place, phase)]
            return [f"{indent}{one.purpose:<{width}}{format_bytes(one.nbytes):>12}" for one in own]

        limit = f" of {format_bytes(self.budget_bytes)}" if self.budget_bytes else ""
        rows = [f"device: {format_bytes(self.total_bytes('device'))}{limit}"]
        rows += lines("device", ALWAYS)
        for phase, nbytes in self.phases().items():
            if phase != ALWAYS:
                rows.append(f"  {phase}: {format_bytes(nbytes)} with the above")
                rows += lines("device", phase, "    ")
        rows += [f"host: {format_bytes(self.total_bytes('host'))}", *lines("host", ALWAYS)]
        rows += ["choices:", *(f"  {name + ':':<{width}}{value}" for name, value in self.choices)]
        step, number = self.predicted_seconds, self.num_tokens or 0
        if step is not None:
            speed = f", {number / step:,.0f} tokens/s" if number else ""
            rows.append(f"expected: {step:.3f} s a step{speed}; {self.bound} bound")
            if self.bounds is not None:
                rows.append(f"of its bounds: {self.bounds.describe(step)}")
        if self.first_step:
            phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.first_step)
            rows.append(f"until the first step was handed over, in seconds: {phases}")
        if self.disk_read_bytes:
            wear = "nothing written"
            if self.disk_written_bytes:
                wear = describe_wear(self.disk_written_bytes)
            rows.append(f"disk: {format_bytes(self.disk_read_bytes)} read and {wear}")
        rows += self.measured
        if self.scaling:
            rows += [
                "devices  tokens/s       of linear  s a step  bound    parameter server, a rank"
            ]
        for one in self.scaling:
            speed = f"{one.num_ranks * number / one.seconds:>13,.0f}"
            speed += f"  {self.scaling[0].seconds / one.seconds:>8.0%}  {one.seconds:>8.3f}"
            taken = format_bytes(one.host_bytes)
            rows.append(f"{one.num_ranks:>7,}  {speed}  {one.bound:<7}  {taken:>12}")
        return "\n".join(rows)
