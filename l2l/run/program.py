"""A program: everything a step runs by, decided before it runs. A new plan is a new program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from l2l.schedule import Schedule, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The lines of a step, and the plan's choices that are not in them."""

    schedule: Schedule
    seed: int
    keep: float = 0.0
    """How much of its intermediate results a streamed layer may keep."""
    piece_tokens: int | None = None
    """Tokens that pass the epilogue at once; None: those of a microbatch."""
    part_tokens: int | None = None
    """The same where logits are put off."""
    compiles_loss: bool = False
    following: Mapping[int, str] = field(init=False)
    """After each streamed layer: the next one, or E."""
    returning: frozenset[int] = field(init=False)
    """Streamed layers with a backward pass."""
    redone: frozenset[str] = field(init=False)
    """Units that are updated on the device under this step's own backward passes."""

    def __post_init__(self) -> None:
        streamed = self.shape.streamed
        following = dict(zip(streamed, [*map(str, streamed[1:]), "E"], strict=False))
        object.__setattr__(self, "following", following)
        object.__setattr__(self, "returning", frozenset(self.shape.backward_layers))
        object.__setattr__(self, "redone", frozenset(self.shape.redone))

    @property
    def shape(self) -> Shape:
        """The shape of its schedule."""
        return self.schedule.shape
