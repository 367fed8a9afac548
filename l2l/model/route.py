"""How a model's own code runs its layers: which are called when, and what goes from where to where.

Most models hand a hidden state from layer to layer, straight on: one stack. A `Route` says what
others do, as a trial has found it (discovery in trial/):

- layers are called several times, or in another order than the model lists them;
- between two calls runs code that needs what a layer returned: there a further *stack* begins. The
  code is an *interlude*, run as the prologue is, with what earlier layers returned delivered to it;
- a layer hands on several tensors, or leaves some for code that comes much later: *asides*, such as
  router logits for the loss.

What a layer returns is named by the call and the *entry*: its place among the leaves of the return
value. What a later part of the code needs of earlier stacks *rides* along with the recorded
arguments of the stacks in between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import final

Key = tuple[int, int]
"""A call, and an entry of what the layer returned there; or below 0, what it was given: -1 is the
first of its arguments."""


@final
@dataclass(frozen=True, kw_only=True)
class Route:
    """Which layer every call is of, and what becomes of what the layers return."""

    layers: tuple[int, ...]
    gives: tuple[tuple[int, ...], ...]
    """Of every call, the entries that the next call takes, or the code after its stack; the hidden
    state first."""
    stacks: tuple[int, ...] = ()
    """Calls with which further stacks begin."""
    asides: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Of calls inside a stack, entries that later code needs."""
    seen: frozenset[Key] = frozenset()
    """All that code uses which is not a layer of the same stack."""
    needs: tuple[frozenset[Key], ...] = ()
    """For the code before each stack and after the last one: what it needs of earlier calls."""
    again: Mapping[Key, Key] = field(default_factory=dict)
    """Arguments that a layer of an earlier stack was given before, and where. They ride along: made
    once more by the code of the model they would be the same, but their gradient in two parts."""
    shared: frozenset[Key] = frozenset()
    """What has no rows: it is the same for all microbatches."""
    reshaped: frozenset[Key] = frozenset()
    """What has another shape than the hidden state that its stack was given."""
    constant: frozenset[Key] = frozenset()
    """What has no gradient, though all that can be trained is trained."""
    written: frozenset[Key] = frozenset()
    """What the model's code writes into."""

    @classmethod
    def straight(cls, num_layers: int) -> Route:
        """Every layer once, in order, each given what the one before it returned."""
        ends = frozenset({(num_layers - 1, 0)})
        return cls(
            layers=tuple(range(num_layers)),
            gives=((0,),) * num_layers,
            seen=ends,
            needs=(frozenset(), ends),
        )

    def runs_as(self, other: Route) -> bool:
        """Whether layers are called as along another route, and the same is kept for later code."""
        mine, theirs = (
            (one.layers, one.gives, one.stacks, one.asides, one.needs, one.again)
            for one in (self, other)
        )
        return mine == theirs

    @property
    def num_stacks(self) -> int:
        """How many there are."""
        return len(self.stacks) + 1

    @cached_property
    def is_straight(self) -> bool:
        """Whether hidden states alone are handed on, in one stack."""
        return self == Route.straight(len(self.layers))

    @cached_property
    def repeated(self) -> frozenset[int]:
        """Layers that are called several times."""
        return frozenset(one for one in self.layers if self.layers.count(one) > 1)

    @cached_property
    def may_leave_out(self) -> bool:
        """Whether layers may be left out: each hands on its hidden state, and nothing else."""
        plain = all(own == (0,) for own in self.gives)
        return plain and not self.asides and not self.repeated

    @cached_property
    def max_tail(self) -> int:
        """How many of the last calls may stay on the device with the code after them."""
        last = [self.layers[call] for call in self.calls(self.num_stacks - 1)]
        return next((i for i, one in enumerate(last[::-1]) if one in self.repeated), len(last))

    def stack_of(self, call: int) -> int:
        """The stack that a call is in."""
        return bisect_right(self.stacks, call)

    def is_first(self, call: int) -> bool:
        """Whether a stack begins with a call."""
        return call == 0 or call in self.stacks

    def end(self, stack: int) -> int:
        """The last call of a stack."""
        return (self.stacks[stack] if stack < len(self.stacks) else len(self.layers)) - 1

    def calls(self, stack: int) -> range:
        """The calls of a stack."""
        return range(self.stacks[stack - 1] if stack else 0, self.end(stack) + 1)

    def ends(self, stack: int) -> tuple[Key, ...]:
        """What a stack hands to the code after it."""
        call = self.end(stack)
        return tuple((call, entry) for entry in self.gives[call])

    def entries(self, call: int) -> tuple[int, ...]:
        """What is kept of what a layer returns: what is given on, then asides."""
        own = self.gives[call]
        return (*own, *(one for one in self.asides.get(call, ()) if one not in own))

    def constant_beside(self, call: int) -> frozenset[int]:
        """Of what a call is handed on, what has no gradient: places, the hidden state's is 0."""
        before = () if self.is_first(call) else self.gives[call - 1]
        return frozenset(i for i, e in enumerate(before) if (call - 1, e) in self.constant)

    def rides(self, stack: int) -> tuple[Key, ...]:
        """What passes by a stack: ends of earlier ones that code after it needs."""
        later = frozenset[Key]().union(*self.needs[stack + 1 :])
        earlier = [key for before in range(stack) for key in self.ends(before)]
        given = [
            key for key in dict.fromkeys(self.again.values()) if self.stack_of(key[0]) <= stack
        ]
        return tuple(key for key in [*earlier, *given] if key in later)

    def needed_asides(self, stack: int) -> tuple[Key, ...]:
        """Asides that the code before a stack needs (after the last one: its number)."""
        return tuple(
            (call, entry)
            for call, entries in sorted(self.asides.items())
            for entry in entries
            if (call, entry) in self.needs[stack]
        )
