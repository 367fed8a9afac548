"""The shape of a step: the numbers from which its schedule follows.

[Note: stacks] Calls of layers that hand their hidden state straight on are a *stack*. Between two
stacks runs code of the model's own, an *interlude*: from the encoder's last hidden state to the
decoder's first one, say. It is run as the prologue is, and run again for its backward pass. What it
and the code behind it need of earlier stacks travels with the recorded arguments.

[Note: joint] A loss that compares rows with each other, or is no mean over them, cannot be taken
microbatch by microbatch. Then the first `loss` lines only hand over what the layers have made; the
last of them takes the loss of all rows at once; further ones give each microbatch its gradient.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from l2l.schedule.lines import OUTER, Action


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
        """Whether it is on the device for the epilogue only."""
        return self.in_epilogue and not self.in_prologue and not self.device_state


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
    joint: bool = False
    """Whether one loss is taken over all microbatches ([Note: joint])."""
    parallel: bool = False
    """Whether several ranks hold the units together."""

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ValueError("a schedule needs at least one microbatch")
        if list(self.layers) != sorted(set(self.layers)) or min(self.layers, default=0) < 0:
            raise ValueError(f"layers must be strictly increasing, found {self.layers}")
        for name, least in (
            ("num_slots", 1),
            ("num_cells", 3),
            ("num_recorded_cells", 2 if self.stacks else 1),
            ("num_gradient_slots", 1),
            ("num_staging", 1),
            ("num_tail", 0),
            ("num_pieces", 1),
            ("num_whole", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, found {getattr(self, name)}")
        if self.num_tail > len(self.layers):
            raise ValueError(f"num_tail={self.num_tail}, but there are {len(self.layers)} layers")
        last = self.stacks[-1] if self.stacks else 0
        if any(call < last or self.unit(call) in self.repeated for call in self.tail):
            raise ValueError(f"the tail {self.tail} must be in the last stack, each layer once")
        if self.joint and self.num_tail:
            raise ValueError("a joint loss leaves no tail: it waits for all microbatches")
        if not self.device_state <= {*self.tail}:
            raise ValueError(f"device_state={sorted(self.device_state)}: the tail is {self.tail}")
        rows = [unit for unit in self.outer if unit.looked_up]
        if any(unit.in_prologue or unit.device_state for unit in rows):
            raise ValueError("a table that is looked up on the host is not on the device for that")
        if self.device_updates and (self.on_device or any(unit.trained for unit in rows)):
            raise ValueError("device_updates leave nothing: no device_state, no trained lookups")
        if self.parallel and (self.on_device or self.shared or rows):
            raise ValueError("ranks share everything: no device_state, no lookups, nothing lent")

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
    def trains_prologue(self) -> bool:
        """Whether anything before the layers is trained."""
        return any(unit.trained and unit.before_layers for unit in self.outer)

    @property
    def backward_layers(self) -> tuple[int, ...]:
        """Streamed calls that need a backward pass, last first: none below what is trained."""
        if self.trains_prologue:
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
        if self.trains_prologue:
            return (*stacks, 0)
        lowest = self.backward_layers[-1] if self.backward_layers else math.inf
        return tuple(stack for stack in stacks if lowest < self.stacks[stack - 1])

    @property
    def drained_units(self) -> tuple[str, ...]:
        """Units whose gradient leaves for the host, first drained first."""
        outer = [unit for unit in self.outer if unit.trained and not unit.device_state]
        layers = [*self.tail[::-1], *self.backward_layers]
        return (
            *(unit.name for unit in outer if unit.passes and not unit.looked_up),
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
        if not self.training or self.device_updates:
            return ()
        drained = self.drained_units
        late = drained[len(drained) - min(self.num_late, len(drained)) :]
        rows = [unit.name for unit in self.outer if unit.trained and unit.looked_up]
        frozen = {unit.name for unit in self.outer if not unit.trained}
        frozen |= {*self.units_of(self.frozen_layers)}
        return (*(unit for unit in self.on_device if unit not in frozen), *rows, *late)

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
