"""The shape of a step: the numbers from which its schedule follows.

[Note: stacks] Calls of layers that hand their hidden state straight on are a *stack*. Between two
stacks runs code of the model's own, an *interlude*: from the encoder's last hidden state to the
decoder's first one, say. It is run as the prologue is, and run again for its backward pass. What it
and the code behind it need of earlier stacks travels with the recorded arguments.

[Note: slices] A head is a matrix as large as several layers. It may come in slices of its rows, the
words, each of which goes through the slots of layers: `fetch T0:p1 S0`. The epilogue runs up to the
head (`forward Epi`); then every slice adds up, for all microbatches, what the loss needs of its
words (`forward T0:p1`: the largest logit of each token, the sum of exponentials, the label's own).
The loss turns that into a log-probability for each token and a coefficient for its gradient (`loss
Epi`), with which slices make the gradients of their rows and of what the head was given (`backward
T0:p1`); `backward Epi` goes on from there. Logits are never whole.

[Note: joint] A loss that compares rows with each other, or is no mean over them, cannot be taken
microbatch by microbatch. Then the first `loss` lines only hand over what the layers have made; the
last of them takes the loss of all rows at once; further ones give each microbatch its gradient.

[Note: sides] Where the user's own code takes the loss and calls `backward`, a step is two
schedules, the *sides* of it. The forward side ends with the model's outputs (`forward Epi`), and
with everything that the backward side reads on the host; that begins with the gradients of the
outputs (`backward Epi`, which makes the outputs once more) and ends with those of the weights on
the host, where they are added to what is there (`collect L0 H0`): nothing is updated. Between the
two nothing of the step is on the device, so other steps may run there: a frozen reference, or
another forward side.

Where the model itself takes the loss, nobody may ever look at its other outputs, of which logits
are large. Such sides are *fused*: the forward side takes the loss as a whole step does (`loss`),
with the gradient that it has if it is all there is; the backward side begins with the layers, and
what it collects is multiplied with what the user's code makes of the loss. If other outputs are
asked for in between, they are made then (`side="outputs"`), and the backward side is not fused.

What the model is called with may require a gradient itself: embeddings that other code has made,
say. Then the backward side goes on to the very beginning, whatever is trained, and the code before
the layers leaves these gradients on the host (`drain i m0`), where the user's code finds them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from l2l.schedule.lines import OUTER, Action

NUM_HEAD_CELLS = 4
SIDES = ("", "forward", "outputs", "backward")
FUSED_SIDES = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterUnit:
    """Parameters around the layers, and where the step reads them."""

    name: str = OUTER
    in_prologue: bool = True
    """Read on the device before the layers."""
    in_epilogue: bool = True
    looked_up: bool = False
    """Its rows are gathered on the host before the layers."""
    trained: bool = True
    device_state: bool = False
    """Its optimizer state is on the device, where it stays from step to step."""
    may_be_sliced: bool = False
    """Whether it is a head that may come in slices."""
    num_slices: int = 0
    """In which it passes as the head ([Note: slices]); 0: it is on the device as a whole."""

    @property
    def is_read(self) -> bool:
        """Whether any phase reads it on the device."""
        return self.in_prologue or self.in_epilogue

    @property
    def stays(self) -> bool:
        """Whether it is on the device for the whole step."""
        return self.device_state or (self.in_prologue and self.in_epilogue)

    @property
    def before_layers(self) -> bool:
        """Whether the gradient of the first hidden state reaches it."""
        return self.in_prologue or self.looked_up

    @property
    def passes(self) -> bool:
        """Whether it is on the device, as a whole, for the epilogue only."""
        elsewhere = self.in_prologue or self.device_state or self.num_slices > 0
        return self.in_epilogue and not elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers a schedule is made from.

    `layers` are the calls of layers that the step makes. In most models call 0 is that of layer 0,
    and so on; where a layer is called several times, or layers are called in another order than
    the model lists them, `units` says which layer a call is of ([Note: stacks]).
    """

    layers: tuple[int, ...]
    units: tuple[int, ...] = ()
    """The layer of every call of the model; none: its number."""
    stacks: tuple[int, ...] = ()
    """Calls before which the model's own code runs again: each begins a further stack."""
    num_microbatches: int
    num_slots: int = 2
    num_cells: int = 6
    num_recorded_cells: int = 2
    num_head_cells: int = NUM_HEAD_CELLS
    """Cells for what slices of the head add up."""
    num_kept_cells: int = 0
    """Cells for what forward passes keep for their backward passes; 0: everything is recomputed."""
    num_gradient_slots: int = 2
    num_staging: int = 4
    training: bool = True
    frozen_layers: frozenset[int] = frozenset()
    outer: tuple[OuterUnit, ...] = (OuterUnit(),)
    num_tail: int = 0
    """Layers, the last of them, that stay on the device and are walked with the epilogue."""
    device_state: frozenset[int] = frozenset()
    """Layers of the tail whose optimizer state is on the device."""
    held: frozenset[str] = frozenset()
    """Units that are in their slots before the step begins."""
    num_late: int = 0
    """Units, of those drained last, whose update is left to the next step."""
    pending: tuple[str, ...] = ()
    """Units whose update the step before has left."""
    device_updates: bool = False
    shared: frozenset[int] = frozenset()
    """Streamed layers whose update is done on the device, with borrowed state."""
    num_pieces: int = 16
    """In which the state of such a layer is lent."""
    halves: bool = False
    """Whether late updates are done in two: weights before they are needed, moments afterwards."""
    num_whole: int = 0
    """Layers, of those needed last, whose late update is done at once nevertheless."""
    shares_memory: bool = False
    """Whether units of the epilogue and the gradients of layers take turns in the same memory."""
    on_disk: frozenset[str] = frozenset()
    """Units whose optimizer state is on disk ([Note: disk])."""
    num_disk_buffers: int = 2
    """Of host memory, for such state."""
    weights_on_disk: frozenset[str] = frozenset()
    """Units whose weights are on disk, too."""
    num_weight_buffers: int = 3
    """Of host memory, for such weights."""
    num_stash_buffers: int = 0
    """Of host memory, for boundary tensors: those beyond go to disk; 0: none do."""
    joint: bool = False
    """Whether one loss is taken over all microbatches ([Note: joint])."""
    parallel: bool = False
    """Whether several ranks hold the units together."""
    side: str = ""
    """Of a step in two sides ([Note: sides]) the one that this is, or "outputs" of one of which the
    forward side has run; empty: all of it."""
    fused: bool = False
    """Whether its forward side takes the loss."""
    asks_inputs: bool = False
    """Whether gradients are wanted of what the model is called with."""

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ValueError("a schedule needs at least one microbatch")
        if list(self.layers) != sorted(set(self.layers)) or min(self.layers, default=0) < 0:
            raise ValueError(f"layers must be strictly increasing, found {self.layers}")
        for name, least in (
            ("num_slots", 1),
            ("num_cells", 4 if self.asks_inputs else 3),
            ("num_recorded_cells", 2 if self.stacks else 1),
            ("num_head_cells", 2),
            ("num_gradient_slots", 1),
            ("num_staging", 1),
            ("num_tail", 0),
            ("num_pieces", 1),
            ("num_disk_buffers", 1),
            ("num_weight_buffers", 1),
            ("num_stash_buffers", 0),
            ("num_whole", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, found {getattr(self, name)}")
        if self.num_tail > len(self.layers):
            raise ValueError(f"num_tail={self.num_tail}, but there are {len(self.layers)} layers")
        if not self.device_state <= {*self.tail}:
            raise ValueError(f"device_state={sorted(self.device_state)}: the tail is {self.tail}")
        for what, is_so in self._impossible():
            if is_so:
                raise ValueError(what)

    def _impossible(self) -> Iterator[tuple[str, bool]]:
        """Choices that do not go together, each with whether they were made."""
        last = self.stacks[-1] if self.stacks else 0
        yield (
            f"the tail {self.tail} must be in the last stack, each layer once",
            any(call < last or self.unit(call) in self.repeated for call in self.tail),
        )
        yield (
            "a joint loss leaves no tail: it waits for all microbatches",
            self.joint and self.num_tail > 0,
        )
        rows = [unit for unit in self.outer if unit.looked_up]
        yield (
            "a table that is looked up on the host is not on the device for that",
            any(unit.in_prologue or unit.device_state for unit in rows),
        )
        yield (
            "device_updates leave nothing: no device_state, no trained lookups",
            self.device_updates and (bool(self.on_device) or any(unit.trained for unit in rows)),
        )
        yield (
            "ranks share everything: no device_state, no lookups, nothing lent",
            self.parallel and bool(self.on_device or self.shared or rows),
        )
        yield (
            f"side={self.side!r}: expected one of {SIDES}",
            self.side not in SIDES or (self.fused and self.side not in FUSED_SIDES),
        )
        elsewhere = (self.device_updates, self.parallel, bool(self.on_device or self.shared))
        kept = (self.num_tail, self.num_kept_cells, self.head is not None)
        yield (
            "a step in two sides trains; it leaves no tail, keeps no results, has no head in "
            "slices, and all of its gradients are for the host",
            bool(self.side) and (any(kept) or any(elsewhere) or not self.training),
        )
        yield (
            "sides are fused where the gradients of the loss are whole once it is taken; only "
            "fused ones have a joint loss",
            bool(self.side)
            and (
                (self.joint and not self.fused)
                or (self.fused and any(unit.stays and unit.trained for unit in self.outer))
            ),
        )
        yield (
            "between the sides of a step, boundary tensors are in memory",
            bool(self.side) and self.num_stash_buffers > 0,
        )
        yield (
            "gradients of what the model is called with are for a loop of the user's own",
            self.asks_inputs and not self.side,
        )
        on_disk = self.on_disk | self.weights_on_disk
        yield (
            "the host updates layers that are on disk, in one process",
            bool(on_disk & {*self.on_device, *self.units_of(self.shared)})
            or (bool(on_disk) and (self.parallel or self.device_updates)),
        )
        sliced = [unit for unit in self.outer if unit.num_slices]
        ranks = (self.device_updates, self.parallel)
        yield (
            "only one unit that is read after the layers alone passes in slices",
            len(sliced) > 1 or any(unit.stays or not unit.in_epilogue for unit in sliced),
        )
        yield (
            "a head in slices leaves no tail, no joint loss, no shared memory; it is updated on "
            "the host, by one rank",
            bool(sliced) and any((self.num_tail, self.joint, self.shares_memory, *ranks)),
        )

    def only(self, layers: tuple[int, ...]) -> Shape:
        """The same step with some of its layers; those of the tail are walked there."""
        num_tail = len({*self.tail} & {*layers})
        fewer = replace(
            self,
            layers=layers,
            num_tail=num_tail,
            num_slots=max(1, min(self.num_slots, len(layers) - num_tail)),
            device_state=self.device_state & {*layers},
            shared=self.shared & {*layers},
        )
        late = {*self.late_units}  # the same are late: they have staging of their own
        return replace(fewer, num_late=sum(unit in late for unit in fewer.drained_units))

    @property
    def streamed(self) -> tuple[int, ...]:
        """Layers that come and go."""
        return self.layers[: len(self.layers) - self.num_tail]

    @property
    def tail(self) -> tuple[int, ...]:
        """Layers that stay for the whole step."""
        return self.layers[len(self.layers) - self.num_tail :]

    def unit(self, call: int) -> str:
        """The layer that a call is of."""
        return f"L{self.units[call] if self.units else call}"

    def units_of(self, calls: Iterable[int]) -> tuple[str, ...]:
        """The layers of calls, each once."""
        return tuple(dict.fromkeys(map(self.unit, calls)))

    @property
    def repeated(self) -> frozenset[str]:
        """Layers that are called several times."""
        found = Counter(map(self.unit, self.layers)) if self.units else Counter[str]()
        return frozenset(unit for unit, number in found.items() if number > 1)

    def call_of(self, action: Action) -> int:
        """The call that a line about a layer is of."""
        if action.call is not None:
            return action.call
        return self.units.index(action.layer) if self.units else action.layer

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The streamed calls of every stack."""
        ends = [*self.stacks, math.inf]
        starts = [0, *self.stacks]
        return tuple(
            tuple(call for call in self.streamed if start <= call < end)
            for start, end in zip(starts, ends, strict=True)
        )

    def calls(self, stack: int) -> tuple[int, ...]:
        """All calls of a stack, those of the tail too."""
        return (*self.parts[stack], *(self.tail if stack == len(self.stacks) else ()))

    def stack_of(self, call: int) -> int:
        """The stack that a call is in."""
        return bisect_right(self.stacks, call)

    def first_value(self, stack: int = 0) -> str:
        """The hidden state that the code before a stack makes."""
        return f"h{self.parts[stack][0]}" if self.parts[stack] else self.last_value(stack)

    def last_value(self, stack: int) -> str:
        """What the code after a stack is given."""
        return "hE" if stack == len(self.stacks) else f"hI{stack + 1}"

    @property
    def following(self) -> dict[int, str]:
        """After every streamed call: the next one, or the code after its stack."""
        return {
            one: name
            for stack, calls in enumerate(self.parts)
            for one, name in zip(
                calls, [*map(str, calls[1:]), self.last_value(stack)[1:]], strict=False
            )
        }

    @property
    def head(self) -> OuterUnit | None:
        """The unit that passes in slices."""
        return next((unit for unit in self.outer if unit.num_slices), None)

    @property
    def beside_head(self) -> tuple[OuterUnit, ...]:
        """Units that the epilogue reads beside a head in slices."""
        return tuple(unit for unit in self.outer if unit.in_epilogue and not unit.num_slices)

    @property
    def needs_gradient(self) -> bool:
        """Whether anything comes before the epilogue that gets a gradient."""
        return bool(self.backward_layers) or self.returns_to_prologue

    @property
    def trains_epilogue(self) -> bool:
        """Whether the epilogue trains anything but a head in slices."""
        return any(unit.trained for unit in self.beside_head)

    @property
    def returns_to_epilogue(self) -> bool:
        """Whether the code up to a head in slices has a backward pass."""
        return self.needs_gradient or self.trains_epilogue

    @property
    def returns_to_prologue(self) -> bool:
        """Whether anything before the layers gets a gradient."""
        return self.asks_inputs or any(unit.trained and unit.before_layers for unit in self.outer)

    @property
    def backward_layers(self) -> tuple[int, ...]:
        """Streamed calls that need a backward pass, last first: none below what is trained."""
        if self.returns_to_prologue:
            return self.streamed[::-1]
        trained = [layer for layer in self.streamed if layer not in self.frozen_layers]
        return tuple(layer for layer in self.streamed[::-1] if trained and layer >= trained[0])

    @property
    def trained_backward(self) -> tuple[str, ...]:
        """Streamed layers whose gradient a backward pass makes."""
        return self.units_of(i for i in self.backward_layers if i not in self.frozen_layers)

    def _last_visits(self, calls: Sequence[int]) -> Iterator[int]:
        """Of calls in the order of the backward pass, the last one of each layer."""
        last = {self.unit(call): call for call in calls}
        return (call for call in calls if last[self.unit(call)] == call)

    @property
    def backward_stacks(self) -> tuple[int, ...]:
        """Stacks before which the model's own code has a backward pass, last first."""
        stacks = range(len(self.stacks), 0, -1)
        if self.returns_to_prologue:
            return (*stacks, 0)
        lowest = self.backward_layers[-1] if self.backward_layers else math.inf
        return tuple(stack for stack in stacks if lowest < self.stacks[stack - 1])

    @property
    def drained_units(self) -> tuple[str, ...]:
        """Units whose gradient leaves for the host, first drained first."""
        outer = [unit for unit in self.outer if unit.trained and not unit.device_state]
        layers = [*self.tail[::-1], *self.backward_layers]
        return (
            *(u.name for u in outer if (u.passes or u.num_slices) and not u.looked_up),
            *(
                self.unit(layer)
                for layer in self._last_visits(layers)
                if layer not in self.frozen_layers and layer not in self.device_state
            ),
            *(unit.name for unit in outer if unit.in_prologue and not unit.looked_up),
        )

    @property
    def late_units(self) -> tuple[str, ...]:
        """Units whose update this step leaves to the next."""
        if not self.training or self.device_updates or self.side:
            return ()
        drained = self.drained_units
        late = drained[len(drained) - min(self.num_late, len(drained)) :]
        rows = [unit.name for unit in self.outer if unit.trained and unit.looked_up]
        frozen = {unit.name for unit in self.outer if not unit.trained}
        frozen |= {*self.units_of(self.frozen_layers)}
        return (*(unit for unit in self.on_device if unit not in frozen), *rows, *late)

    @property
    def collected(self) -> tuple[str, ...]:
        """Units whose gradient waits on the host for the user's own code."""
        rows = [unit.name for unit in self.outer if unit.trained and unit.looked_up]
        return tuple(dict.fromkeys((*self.drained_units, *rows)))

    @property
    def updated_on_host(self) -> frozenset[str]:
        """Units that the host may have updated in an earlier step."""
        if self.device_updates:
            return frozenset()
        outer = {unit.name for unit in self.outer if unit.trained}
        layers = {*self.units_of(i for i in self.layers if i not in self.frozen_layers)}
        return frozenset(outer | layers) - {*self.on_device}

    @property
    def reworked(self) -> tuple[str, ...]:
        """Units whose update the step before has left and this one does on the device."""
        if not self.training:
            return ()
        lent = self.units_of(i for i in self.streamed if i in self.shared)
        return tuple(unit for unit in lent if unit in self.pending)

    @property
    def redone(self) -> tuple[str, ...]:
        """Units whose update this step does on the device, under its own backward passes."""
        if not self.training or self.device_updates or not self.shared:
            return ()
        late = {*self.late_units}
        own = (i for i in self.backward_layers if i in self.shared - self.frozen_layers)
        return tuple(unit for unit in self.units_of(own) if unit not in late)

    @property
    def on_device(self) -> tuple[str, ...]:
        """Units whose optimizer state is on the device."""
        outer = [unit.name for unit in self.outer if unit.device_state and unit.is_read]
        return (*outer, *self.units_of(i for i in self.tail if i in self.device_state))


def late_staging(unit: str) -> str:
    """The staging buffer of a unit whose update is late."""
    return f"H{unit}"
