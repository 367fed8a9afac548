"""A program: everything a step runs by, decided before it runs. A new plan is a new program.

trial -> Facts      what the model does
plan  -> Plan       what is chosen
lower -> Schedule   the lines
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from l2l.model import Key, Microbatch, Route, Rule, Tiles
from l2l.run.lookup import TableLookup
from l2l.schedule import Schedule, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How one unit around the layers is read."""

    before: bool  # the layers, other than by lookup
    after: bool
    lookups: tuple[TableLookup, ...] = ()


@dataclass(frozen=True, slots=True)
class HeadOfWords:
    """A head whose loss is a plain cross-entropy, so that it may come in slices of its words."""

    owner: str
    bias: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a model does, as a trial has found; by default nothing is known yet."""

    usage: Mapping[str, Usage] = field(default_factory=dict)
    """Of units around the layers; without it all of them are needed in every phase."""
    route: Route | None = None  # how the model's code runs its layers, where its loss is wanted
    whole_route: Route | None = None  # the same where all of its outputs are
    alone: bool = False  # whether the epilogue does without anything of the prologue
    within_rows: bool = False  # whether positions of a row may be pieces
    puts_off: bool = False  # whether logits are put off
    head: HeadOfWords | None = None  # that may come in slices
    changing: tuple[frozenset[str], ...] = ()
    """Buffers around the layers that training changes, by the stack before which it does."""
    changing_in_layers: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    rule: Rule | None = None  # what the loss averages over; None: nobody has asked
    rule_is_final: bool = False  # whether other rows cannot tell more of it
    row_dimensions: Mapping[Key, int] = field(default_factory=dict)
    """Of what layers return for the code after them; what has no rows is not there."""
    pointwise: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By structure, parts of layers that may run in tiles; found where rows are long."""
    mixes_rows: bool = False  # whether rows are computed with other rows before the loss
    rows: Microbatch = field(
        default_factory=dict
    )  # a few, on the host; none: nothing was tried yet
    cut: bool = True  # whether a few tokens of a row were enough

    def says(self, other: Facts) -> bool:
        """Whether these are the other's, whatever the rows that have shown them."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in self.__slots__
            if name not in ("rows", "pointwise")
        )

    def tiles(self, tokens: int | None) -> dict[str, Tiles]:
        """By structure, what runs in tiles of so many tokens; None: nothing does."""
        parts = self.pointwise.items() if tokens else ()
        return {structure: Tiles(names, tokens or 0) for structure, names in parts if names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The lines of a step, and the plan's choices that are not in them."""

    schedule: Schedule
    seed: int
    facts: Facts
    route: Route
    """How the model's code runs its layers."""
    lookups: tuple[TableLookup, ...] = ()
    """Those of the prologue that the host answers."""
    keep: float = 0.0
    """How much of its intermediate results a streamed layer may keep."""
    tile_tokens: int | None = None
    """Positions that pass at once what of layers is pointwise; None: all of a microbatch."""
    piece_tokens: int | None = None
    """Tokens that pass the epilogue at once; None: those of a microbatch."""
    part_tokens: int | None = None
    """The same where logits are put off."""
    compiles_loss: bool = False
    following: Mapping[int, str] = field(init=False)
    """After each streamed call: the next one, or the code after its stack."""
    calls: tuple[tuple[int, ...], ...] = field(init=False)
    """Of every stack, those of the tail too."""
    returning: frozenset[int] = field(init=False)
    """Streamed layers with a backward pass."""
    redone: frozenset[str] = field(init=False)
    """Units that are updated on the device under this step's own backward passes."""
    stash_numbers: Mapping[str, int] = field(init=False)
    """Boundary tensors that go to disk, numbered."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "following", self.shape.following)
        stacks = range(len(self.shape.stacks) + 1)
        object.__setattr__(self, "calls", tuple(map(self.shape.calls, stacks)))
        object.__setattr__(self, "returning", frozenset(self.shape.backward_layers))
        object.__setattr__(self, "redone", frozenset(self.shape.redone))
        written = [one.value for one in self.schedule.actions if one.kind == "drain v.stash m"]
        object.__setattr__(self, "stash_numbers", {one: i for i, one in enumerate(written)})

    def tiles(self, structure: str) -> Tiles | None:
        """Which parts of such layers run in tiles; None: they run as they are."""
        return self.facts.tiles(self.tile_tokens).get(structure)

    @property
    def shape(self) -> Shape:
        """The shape of its schedule."""
        return self.schedule.shape
