"""Numbers that a loss makes on its way, such as rewards: of every row, read when a step has ended.

A loss is called for each microbatch of a step, on the device, and before for some rows that are
tried, on several ranks those of the first. So what it notes says of which row it is; what is noted
last of a row holds. Nothing waits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, final

import torch
from torch import Tensor

from l2l.distributed import World

CHOSEN, REJECTED = "rewards/chosen", "rewards/rejected"
NOTHING: Mapping[str, float] = MappingProxyType({})
Noted = tuple[Tensor, Mapping[str, Tensor]]
Sums = dict[str, tuple[float, int]]
"""By name: the sum of some numbers, and how many they are."""


@final
@dataclass(frozen=True, slots=True)
class Measured:
    """What was noted of the rows of a batch."""

    noted: Sequence[Noted]
    places: Sequence[int]  # of this rank's rows
    facts: Mapping[str, float]  # what is known of the whole batch
    world: World

    def of_rows(self, name: str) -> Tensor:
        """The numbers of this rank's rows, in their order, on the host."""
        found: dict[int, Any] = {}
        for places, values in self.noted:
            found.update(zip(places.tolist(), values[name].tolist(), strict=True))
        return torch.tensor([found[place] for place in self.places])

    def sums(self) -> Sums:
        """Of all ranks; what is NaN is of none. All ranks must ask together."""
        names = [*self.noted[0][1]] if self.noted else []
        own: Sums = {}
        for name in names:
            values = [one for one in self.of_rows(name).tolist() if not math.isnan(one)]
            own[name] = (math.fsum(values), len(values))
        return added(self.world.gather_facts(own))

    def means(self) -> dict[str, float]:
        """Of all ranks, by name; what no row has is left out. All ranks must ask together."""
        return {**self.facts, **means_of(self.sums())}


NOT_MEASURED = Measured((), (), NOTHING, World())


@final
@dataclass(slots=True)
class Measures:
    """Collects what is noted of a batch's rows."""

    world: World
    _noted: list[Noted] = field(default_factory=list)
    _places: list[int] = field(default_factory=list)
    _facts: Mapping[str, float] = field(default_factory=dict)

    def begin(self, places: Tensor, facts: Mapping[str, float] = NOTHING) -> None:
        """Rows at these places of a batch are next; what was noted before is forgotten."""
        self._noted, self._places, self._facts = [], places.tolist(), facts

    def note(self, places: Tensor, values: Mapping[str, Tensor]) -> None:
        """Numbers of some rows, which are at these places of the batch, by name."""
        self._noted.append((places, {name: one.detach() for name, one in values.items()}))

    def taken(self) -> Measured:
        """What was noted since it was begun."""
        noted, self._noted = self._noted, []
        return Measured(noted, self._places, self._facts, self.world)


def added(parts: Sequence[Sums]) -> Sums:
    """The sums of all parts."""
    found: Sums = {}
    for part in parts:
        for name, (total, number) in part.items():
            before, counted = found.get(name, (0.0, 0))
            found[name] = (before + total, counted + number)
    return found


def means_of(sums: Sums) -> dict[str, float]:
    """By name; what nothing was counted of is left out. Between both rewards there is a margin."""
    found = {name: total / number for name, (total, number) in sums.items() if number}
    if {CHOSEN, REJECTED} <= found.keys():
        found["rewards/margins"] = found[CHOSEN] - found[REJECTED]
    return found
