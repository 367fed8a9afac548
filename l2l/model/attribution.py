"""Finding what of a batch's flat entries belongs to which row, without knowing the model.

A row's tokens hold placeholders for what is shown in it, whose ids the model's config names
(`image_token_id`, `video_token_index`). The processor puts down as many as an image yields tokens,
so rows can be told from counting:

- a *grid* gives the size of every image in patches, integers of [images, 2 or 3], and another entry
  has these patches below each other. A row has as many of the images, in order, as have its number
  of placeholders. All rows must come out even.
- images of one size, [images, channels, ..]: every image has the same number of placeholders. That
  is believed if they stand in as many runs; or if it divides every run, as of images close to each
  other, and the config has this number too (`image_seq_length`, `mm_tokens_per_image`).

If several ids come out and disagree, if an entry is left, or if there are as many images as rows,
some rows have none, and images may have been padded, nothing is certain: the batch is `Whole`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from l2l.model.modules import configs_of
from l2l.model.splitting import (
    Counted,
    CutBatch,
    Given,
    Split,
    Whole,
    has_rows,
    is_rows,
    row_count,
)

PLACEHOLDER = re.compile(r"(image|video|vision|audio|speech|media)_.*token_(id|index)")
NUMBER = re.compile(r".*(seq_len|tokens_per|token_num|num_.*tokens).*")


@final
@dataclass(frozen=True, slots=True)
class Splitting:
    """Sees to it that every batch is cut as it must be."""

    split: Split | None  # the user's
    placeholders: tuple[tuple[str, int], ...]  # of what, and the id
    numbers: frozenset[int] = frozenset()
    """Those that may be of an image's placeholders."""

    @classmethod
    def of_model(cls, model: nn.Module, split: Split | None) -> Splitting:
        """By the user's function, or else by what the model's config names."""
        named = [
            (name, value)
            for config in configs_of(model)
            for name, value in vars(config).items()
            if isinstance(value, int)
        ]
        found = {(m[1], value) for name, value in named if (m := PLACEHOLDER.fullmatch(name))}
        numbers = frozenset(value for name, value in named if NUMBER.fullmatch(name))
        return cls(split, tuple(sorted(found)), numbers)

    def of(self, batch: Any) -> Any:
        """A batch, or each of a list: a `CutBatch` if not all of its tensors have rows first."""
        if isinstance(batch, list | tuple):
            return [self.of(one) for one in batch]
        if isinstance(batch, CutBatch) or not isinstance(batch, Mapping):
            return batch
        if self.split is not None:
            return CutBatch(batch, Given(self.split))
        tensors = {name: value for name, value in batch.items() if has_rows(value)}
        if not row_count(batch)[0]:
            return batch
        return _Search(batch, tensors, self.placeholders, self.numbers).run()


@final
@dataclass
class _Search:
    """Looks for the rows of one batch's flat entries."""

    batch: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    placeholders: tuple[tuple[str, int], ...]
    numbers: frozenset[int]
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    uncertain: list[str] = field(default_factory=list)

    def run(self) -> Mapping[str, Any]:
        """The batch, plain if it is."""
        for grid in self.grids:
            self._by_grid(grid)
        self._by_number()
        for name, value in self.batch.items():
            if isinstance(value, list | tuple) and any(map(has_rows, pytree.tree_leaves(value))):
                if is_rows(value) and len(value) == self.rows:
                    self._note(name, (1,) * self.rows)
                else:
                    self.uncertain.append(name)
        second = frozenset(filter(self._is_second, self.tensors))
        left = [name for name in self.flat if name not in self.sizes and name not in second]
        if any(self._is_mistaken(name) for name in left):
            return self.batch
        if uncertain := [*self.uncertain, *left]:
            return CutBatch(self.batch, Whole(self.rows, uncertain[0], row_count(self.batch)[1]))
        if not self.sizes and not second:
            return self.batch
        return CutBatch(self.batch, Counted(self.rows, self.sizes, second))

    @cached_property
    def rows(self) -> int:
        return row_count({n: v for n, v in self.batch.items() if n not in self.grids})[0]

    @cached_property
    def tokens(self) -> Tensor | None:
        """The first integers of [rows, length], or those called input_ids."""
        names = sorted(self.tensors, key=lambda name: name != "input_ids")
        words = (self.tensors[name] for name in names if name not in self.grids)
        return next((one for one in words if _is_table(one) and len(one) == self.rows), None)

    @cached_property
    def grids(self) -> dict[str, list[int]]:
        """Patches of every image, by the entries that say so."""
        first = {value.shape[0] for value in self.tensors.values() if value.is_floating_point()}
        found = {}
        for name, value in self.tensors.items():
            if _is_table(value) and value.shape[1] in (2, 3) and len(value):
                patches: list[int] = value.prod(1).tolist()
                if min(patches) > 0 and sum(patches) in first:
                    found[name] = patches
        return found

    @cached_property
    def pictures(self) -> list[str]:
        """Values in three dimensions and more."""
        tensors = self.tensors.items()
        return [n for n, one in tensors if one.is_floating_point() and one.dim() > 2]

    @cached_property
    def flat(self) -> list[str]:
        return [name for name, value in self.tensors.items() if value.shape[0] != self.rows]

    def _is_second(self, name: str) -> bool:
        """Whether it is [kinds, rows, length], as positions of several kinds are."""
        value = self.tensors[name]
        if self.tokens is None or value.dim() != 3 or value.is_floating_point():
            return False
        is_flat = value.shape[0] != self.rows or "position" in name
        return is_flat and value.shape[1:] == self.tokens.shape

    def _is_mistaken(self, name: str) -> bool:
        """Whether it should have had rows: it is as long as the tokens."""
        value, tokens = self.tensors[name], self.tokens
        return tokens is not None and _is_table(value) and value.shape[1] == tokens.shape[1]

    def _is_of_rows(self, name: str) -> bool:
        """Whether it has a value for every row or token, whatever else has as many."""
        value, tokens = self.tensors.get(name), self.tokens
        if value is None or tokens is None or value.shape[0] != self.rows:
            return False
        return name == "labels" or value.shape[:2] == tokens.shape

    # ----------------------------------------------------------------------------------------------

    def _by_grid(self, grid: str) -> None:
        patches = self.grids[grid]
        found = self._agreed(grid, lambda one: _by_size(one.by_row, patches))
        if found is None:
            self.uncertain.append(grid)
            return
        ends = [0, *accumulate(patches)]
        of_patches = tuple(ends[b] - ends[a] for a, b in pairwise([0, *accumulate(found)]))
        self._note(grid, found)
        for name, value in self.batch.items():
            if name in self.grids or not _may_be_cut(value) or not self._is_of_grid(name, grid):
                continue
            if len(value) == sum(patches):
                self._note_unless_rows(name, of_patches)
            elif len(value) == len(patches):
                self._note_unless_rows(name, found)

    def _is_of_grid(self, name: str, grid: str) -> bool:
        """Whether it may belong to these images, rather than to rows or to another grid's."""
        if self._is_of_rows(name):
            return False
        own, spoken = self._spoken([grid]), self._spoken([name])
        if spoken or not own:
            return not own or not own.isdisjoint(spoken)
        size, others = len(self.batch[name]), (one for one in self.tensors if one not in self.grids)
        named = (one for one in others if not own.isdisjoint(self._spoken([one])))
        return all(len(self.tensors[one]) != size for one in named)

    def _by_number(self) -> None:
        """Entries of images of one size, and what has a value for each of these."""
        found: dict[int, set[tuple[int, ...] | None]] = {}
        for name in [one for one in self.pictures if one not in self.sizes]:
            number = len(self.tensors[name])
            if number == self.rows:
                self._doubt(name)
            elif number:
                found.setdefault(number, set()).add(self._noted(name))
        for name in self.flat:
            value = self.tensors[name]
            own = found.get(len(value), set())
            if not len(value):
                self._note(name, (0,) * self.rows)
            elif name in self.sizes or not own or not _may_be_cut(value) or self._is_second(name):
                continue
            elif self._spoken([name]):
                self._noted(name)
            elif len(own) == 1 and (only := next(iter(own))) is not None:
                self._note(name, only)

    def _noted(self, name: str) -> tuple[int, ...] | None:
        found = self._shared(name)
        if found is not None:
            self._note(name, found)
        return found

    def _shared(self, name: str) -> tuple[int, ...] | None:
        number = len(self.tensors[name])
        return self._agreed(name, lambda one: one.shared_by(number, self.numbers))

    def _doubt(self, name: str) -> None:
        """As many images as rows: one for each, unless some rows have none.

        Then each must have its own run of placeholders, and nothing else as many values.
        """
        placed = [one for one in self._placed(name) if any(one.by_row)]
        found = self._shared(name)
        if found == (1,) * self.rows or all(all(one.by_row) for one in placed):
            return
        alike = {n for n, v in self.tensors.items() if n != name and len(v) == self.rows}
        is_alone = all(map(self._is_of_rows, alike - self.sizes.keys()))
        is_one = self.tensors[name].dim() < 5 and all(len(one.runs) == self.rows for one in placed)
        if found is not None and is_alone and is_one:
            self._note(name, found)
        else:
            self.uncertain.append(name)

    def _note_unless_rows(self, name: str, sizes: tuple[int, ...]) -> None:
        """What has as many values as there are rows may have one for each of these."""
        value = self.batch[name]
        if len(value) != self.rows or not isinstance(value, Tensor):
            self._note(name, sizes)
        elif set(sizes) != {1}:
            self.uncertain.append(name)

    def _note(self, name: str, sizes: tuple[int, ...]) -> None:
        if self.sizes.setdefault(name, sizes) != sizes:
            self.uncertain.append(name)

    def _placed(self, name: str) -> list[_Placed]:
        """Placeholders that may stand for an entry.

        Those of what its name speaks of, or else of what that of no other picture does.
        """
        if self.tokens is None:
            return []
        every = {kind for kind, _ in self.placeholders}
        others = [one for one in self.pictures if one != name]
        kinds = self._spoken([name]) or every - self._spoken(others)
        ids = {one for kind, one in self.placeholders if kind in kinds}
        return [_Placed.of(self.tokens, one) for one in sorted(ids)]

    def _spoken(self, names: Sequence[str]) -> set[str]:
        """What the names of entries speak of."""
        return {kind for kind, _ in self.placeholders if any(kind in name for name in names)}

    def _agreed(self, name: str, attribute: Attribute) -> tuple[int, ...] | None:
        """What rows have by all placeholders by which they come out even."""
        by_placeholder = map(attribute, self._placed(name))
        found = {one for one in by_placeholder if one is not None}
        return found.pop() if len(found) == 1 else None


@final
@dataclass(frozen=True, slots=True)
class _Placed:
    """Where the tokens have one placeholder."""

    by_row: list[int]
    runs: list[int]  # how many there are without anything between them

    @classmethod
    def of(cls, tokens: Tensor, placeholder: int) -> _Placed:
        is_here = tokens == placeholder
        edges = F.pad(is_here.int(), (1, 1)).diff(dim=1)
        starts, ends = (edges == 1).nonzero()[:, 1], (edges == -1).nonzero()[:, 1]
        return cls(is_here.sum(1).tolist(), (ends - starts).tolist())

    def shared_by(self, number: int, numbers: Collection[int]) -> tuple[int, ...] | None:
        """How many of so many images each row has, if all have as many placeholders.

        Images close to each other share a run. Then their number must be among those known.
        """
        each, rest = divmod(sum(self.by_row), number)
        is_known = each in numbers or len(self.runs) == number
        if not each or rest or not is_known or any(run % each for run in self.runs):
            return None
        return tuple(count // each for count in self.by_row)


def _by_size(by_row: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...] | None:
    """How many images each row has whose placeholders are in proportion to these sizes."""
    if not sum(by_row) or sum(sizes) % sum(by_row):
        return None
    each = sum(sizes) // sum(by_row)
    ends = {end: number for number, end in enumerate(accumulate(sizes, initial=0))}
    counts = [ends.get(end * each) for end in accumulate(by_row, initial=0)]
    if None in counts or any(size % each for size in sizes):
        return None
    found = [0 if one is None else one for one in counts]
    return tuple(b - a for a, b in pairwise(found))


Attribute = Callable[[_Placed], tuple[int, ...] | None]
"""By where a placeholder is, how many images each row has; None: they do not come out even."""


def _is_table(value: Tensor) -> bool:
    """Integers in two dimensions."""
    return value.dim() == 2 and not value.is_floating_point() and value.dtype is not torch.bool


def _may_be_cut(value: Any) -> bool:
    """Whether its values may be images' own: a list of integers may be places, such as ends."""
    if isinstance(value, list):
        return all(isinstance(one, int | float) for one in value)
    return has_rows(value) and (value.is_floating_point() or value.dim() > 1)
