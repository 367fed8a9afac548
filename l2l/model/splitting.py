"""How a batch is cut into rows where these are not the first dimension of all of its tensors.

Patches of all images below each other, one entry per image, ends of packed sequences, nodes of
graphs: such entries are *flat*. A batch that has some, or that has lists of rows, is made a
`CutBatch`, which knows what of them belongs to which row:

- `Given`: by the user's `split`.
- `Counted`: by the placeholders of images, videos or sounds among a row's tokens (attribution.py).
- `Whole`: nobody knows. It counts as one row, and is one microbatch.
"""

from __future__ import annotations

import abc
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

Split = Callable[[Mapping[str, Any], int, int], Mapping[str, Any]]
"""A user's: of a batch, or of what it has returned itself, the rows from a start to an end."""


def has_rows(value: Any) -> bool:
    """Whether an entry of a batch has rows of its own."""
    return isinstance(value, Tensor) and value.dim() > 0


def is_rows(value: Any) -> bool:
    """Whether it may be a list of rows: tensors of their own lengths, or dicts of tensors."""
    is_list = isinstance(value, list) and bool(value)
    return is_list and all(any(map(has_rows, pytree.tree_leaves(one))) for one in value)


def longest(tensors: Mapping[str, Any], *, rows: int) -> int:
    """The second dimension of tensors that have two, and so many rows."""
    found = (v for v in tensors.values() if has_rows(v) and v.dim() == 2 and v.shape[0] == rows)
    return max((one.shape[1] for one in found), default=1) or 1


def has_flat_numbers(batch: Mapping[str, Any], *, rows: int) -> bool:
    """Whether there are values, not merely places, that are no rows: pixels, say."""
    tensors = (value for value in batch.values() if has_rows(value))
    return any(one.is_floating_point() and one.shape[0] != rows for one in tensors)


@final
class CutBatch(dict[str, Any]):
    """A batch, or a part of one, that knows how it is cut."""

    def __init__(self, entries: Mapping[str, Any], cutting: Cutting) -> None:
        super().__init__(entries)
        self.cutting = cutting

    @override
    def __reduce__(self) -> tuple[type[CutBatch], tuple[dict[str, Any], Cutting]]:
        """For another rank, to which a function may not be sent."""
        return CutBatch, (dict(self), self.cutting.sent(self))


class Cutting(abc.ABC):
    """How a batch is cut."""

    __slots__ = ()

    @abc.abstractmethod
    def num_rows(self, batch: Mapping[str, Any]) -> int:
        """How many rows it may be cut into."""

    def num_counted(self, batch: Mapping[str, Any]) -> int:
        """How many rows a loss averages over."""
        return self.num_rows(batch)

    def length(self, batch: Mapping[str, Any]) -> int:
        """Positions in a row."""
        return longest(batch, rows=self.num_rows(batch))

    @abc.abstractmethod
    def take(self, batch: CutBatch, start: int, end: int) -> CutBatch:
        """Some of its rows."""

    def some(self, batch: CutBatch) -> CutBatch:
        """Two of its rows, if possible such that no entry is missing."""
        return self.take(batch, 0, min(2, self.num_rows(batch)))

    def of_changed(self) -> Cutting:
        """How the batch is cut once its values have changed."""
        return self

    def sent(self, batch: CutBatch) -> Cutting:
        """How another rank cuts it."""
        return self


@final
@dataclass(frozen=True, slots=True)
class Given(Cutting):
    """By the user's function."""

    split: Split
    origin: tuple[CutBatch, int] | None = None
    """The batch it was cut from, and its first row there."""

    @override
    def num_rows(self, batch: Mapping[str, Any]) -> int:
        count = getattr(self.split, "num_rows", None)
        return row_count(batch)[0] if count is None else int(count(batch))

    @override
    def length(self, batch: Mapping[str, Any]) -> int:
        """Positions in a row, which may be several rows of tensors: a pair, say."""
        each, certain = row_count(batch)
        number = self.num_rows(batch)
        if not certain or not number or each % number:
            return longest(batch, rows=number)
        return each // number * longest(batch, rows=each)

    @override
    def take(self, batch: CutBatch, start: int, end: int) -> CutBatch:
        total = self.num_rows(batch)
        start, end = min(start, total), min(end, total)
        found: Any = self.split(batch, start, end)
        if not isinstance(found, Mapping) or self.num_rows(found) != end - start:
            is_batch = isinstance(found, Mapping)
            number = f"{self.num_rows(found)} rows" if is_batch else type(found).__name__
            raise ValueError(
                f"split= was asked for rows {start} to {end} of {total} and returned {number}. "
                "Expected a dict of tensors with these rows. They are counted by input_ids, by "
                "labels or by the most common first dimension: give the function an attribute "
                "num_rows, a function of a batch, if that is something else."
            )
        base, first = self.origin or (batch, 0)
        return CutBatch(found, replace(self, origin=(base, first + start)))

    @override
    def of_changed(self) -> Cutting:
        return replace(self, origin=None)

    @override
    def sent(self, batch: CutBatch) -> Cutting:
        try:
            pickle.dumps(self.split)
        except Exception:  # pickle raises what it likes
            return Whole(self.num_rows(batch), "", is_sure=True)
        return self.of_changed()


@final
@dataclass(frozen=True, slots=True)
class Counted(Cutting):
    """By how much of each flat entry is a row's; rows that have none of it do without the entry."""

    rows: int
    sizes: Mapping[str, tuple[int, ...]]
    second: frozenset[str] = frozenset()
    """Entries whose second dimension is the rows: positions of several kinds."""

    @override
    def num_rows(self, batch: Mapping[str, Any]) -> int:
        return self.rows

    @override
    def length(self, batch: Mapping[str, Any]) -> int:
        others = {name: value for name, value in batch.items() if name not in self.sizes}
        return longest(others, rows=self.rows)

    @override
    def take(self, batch: CutBatch, start: int, end: int) -> CutBatch:
        start, end = min(start, self.rows), min(end, self.rows)
        found: dict[str, Any] = {}
        for name, value in batch.items():
            if name in self.sizes:
                ends = [0, *accumulate(self.sizes[name])]
                if ends[end] > ends[start]:
                    found[name] = value[ends[start] : ends[end]]
            elif name in self.second:
                found[name] = value[:, start:end]
            else:
                found[name] = value[start:end] if has_rows(value) else value
        sizes = {name: own[start:end] for name, own in self.sizes.items()}
        return CutBatch(found, replace(self, rows=end - start, sizes=sizes))

    @override
    def some(self, batch: CutBatch) -> CutBatch:
        def kinds(*rows: int) -> int:
            return sum(any(own[row] for row in rows) for own in self.sizes.values())

        rows = range(self.rows)
        first = max(rows, key=kinds)
        others = [row for row in rows if row != first]
        chosen = sorted({first, max(others, key=lambda row: kinds(first, row), default=first)})
        return join_cut([self.take(batch, row, row + 1) for row in chosen])


@final
@dataclass(frozen=True, slots=True)
class Whole(Cutting):
    """Not at all."""

    rows: int  # as far as they can be told
    entry: str  # because of which
    is_sure: bool  # whether the rows can be told

    @override
    def num_rows(self, batch: Mapping[str, Any]) -> int:
        return 1

    @override
    def num_counted(self, batch: Mapping[str, Any]) -> int:
        return self.rows

    @override
    def length(self, batch: Mapping[str, Any]) -> int:
        return self.rows * longest(batch, rows=self.rows)

    @override
    def take(self, batch: CutBatch, start: int, end: int) -> CutBatch:
        if start > 0 or end < 1:
            raise ValueError(f"rows {start} to {end} of a batch that cannot be cut")
        return CutBatch(batch, self)

    def reason(self, batch: Mapping[str, Any]) -> str:
        """Why it is not cut."""
        number = len(batch[self.entry])
        return (
            f"the batch has {self.rows} rows, but {self.entry!r} has {number} entries, of which "
            "it is not certain which belong to which row"
        )


def row_count(batch: Mapping[str, Any]) -> tuple[int, bool]:
    """The rows of a batch, and whether that is certain rather than the most common dimension."""
    tensors = {name: value for name, value in batch.items() if has_rows(value)}
    for name in ("input_ids", "labels"):
        if name in tensors:
            return tensors[name].shape[0], True
    lists = [len(value) for value in batch.values() if is_rows(value)]
    words = [one for one in tensors.values() if one.dim() == 2 and not one.is_floating_point()]
    sizes = [one.shape[0] for one in words or tensors.values()] or lists
    return max(sizes, key=sizes.count, default=0), False


def cutting_of(batch: Mapping[str, Any]) -> Cutting | None:
    """How it is cut; None: along the first dimension of all tensors."""
    return batch.cutting if isinstance(batch, CutBatch) else None


def like(batch: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Other values of a batch's entries, to be cut as it is."""
    cutting = cutting_of(batch)
    return dict(entries) if cutting is None else CutBatch(entries, cutting.of_changed())


def join_cut(parts: Sequence[Mapping[str, Any]]) -> CutBatch:
    """The rows of all parts, of which one at least is a `CutBatch`.

    Raises:
        ValueError: they cannot be joined.
    """
    cuttings = [cutting_of(part) for part in parts]
    if all(isinstance(one, Given) for one in cuttings):
        return _join_given(parts)
    known: list[Counted] = []
    for part, cutting in zip(parts, cuttings, strict=True):
        if isinstance(cutting, Given | Whole):
            raise ValueError("parts of batches that cannot be cut cannot be joined")
        assert cutting is None or isinstance(cutting, Counted)
        known.append(cutting or Counted(row_count(part)[0], {}))
    flat = {name for one in known for name in one.sizes}
    second = frozenset(name for one in known for name in one.second)
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part or name not in flat]
        if has_rows(values[0]):
            found[name] = torch.cat(values, dim=int(name in second))
        else:
            found[name] = [one for value in values for one in value] if name in flat else values[0]
    sizes = {
        name: tuple(
            size
            for part, one in zip(parts, known, strict=True)
            for size in one.sizes.get(name, (int(name in part),) * one.rows)
        )
        for name in flat
    }
    return CutBatch(found, Counted(sum(one.rows for one in known), sizes, second))


def _join_given(parts: Sequence[Mapping[str, Any]]) -> CutBatch:
    """Parts that a user's function has cut side by side out of one batch."""
    first = cutting_of(parts[0])
    assert isinstance(first, Given)
    base, start = first.origin or (None, 0)
    end = start
    for part in parts:
        cutting = cutting_of(part)
        assert isinstance(cutting, Given)
        if base is None or cutting.origin is None or cutting.origin[0] is not base:
            raise ValueError("parts of different batches cannot be joined")
        if cutting.origin[1] != end:
            raise ValueError("parts that are not side by side cannot be joined")
        end += cutting.num_rows(part)
    assert base is not None
    return replace(first, origin=None).take(base, start, end)
