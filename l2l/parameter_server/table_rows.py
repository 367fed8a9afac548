"""Rows of tables on the host: as ranges of elements, grouped by id, gathered and added up.

`gather` and `add_rows` do in PyTorch what the native kernel does, where it was not built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from l2l.parameter_server.layout import FlatLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """Rows of a table, ascending, and where they are in each of its unit's parameters."""

    rows: Tensor
    ranges: Mapping[str, Tensor]  # by parameter, as `Update.ranges`

    @classmethod
    def of(cls, trained: FlatLayout, rows: Tensor) -> TableRows:
        """Find the ranges of ascending rows."""
        widths = {name: shape[-1] for name, shape in trained.shapes().items()}
        return cls(rows=rows, ranges={n: _ranges(rows, width) for n, width in widths.items()})

    @classmethod
    def without(cls, trained: FlatLayout, rows: Tensor) -> TableRows:
        """All rows but these."""
        others = torch.ones(max(shape[0] for shape in trained.shapes().values()), dtype=torch.bool)
        others[rows] = False
        return cls.of(trained, torch.nonzero(others).flatten())


def _ranges(rows: Tensor, width: int) -> Tensor:
    """Ascending rows as element ranges, neighbours joined."""
    if not rows.numel():
        return torch.empty((0, 2), dtype=torch.int64)
    breaks = torch.nonzero(rows[1:] != rows[:-1] + 1).flatten()
    first = torch.cat([rows[:1], rows[breaks + 1]])
    last = torch.cat([rows[breaks], rows[-1:]])
    return torch.stack([first * width, (last + 1) * width], dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroups:
    """Which of many rows are to be added to which: the rows of each distinct id, in their order."""

    rows: Tensor  # distinct ids, ascending
    starts: Tensor  # of each id's positions, and the end of the last
    positions: Tensor

    @classmethod
    def of(cls, ids: Tensor, *, without: int | None) -> RowGroups:
        """Group ids, leaving one out."""
        ordered, positions = ids.sort(stable=True)
        if without is not None:
            counted = ordered != without
            ordered, positions = ordered[counted], positions[counted]
        rows, counts = torch.unique_consecutive(ordered, return_counts=True)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return cls(rows=rows, starts=starts, positions=positions)

    def by_last_position(self, ends: Tensor) -> list[RowGroups]:
        """The groups in several: those whose last position is below the first end, and so on."""
        counts = self.starts.diff()
        last = self.positions[self.starts[1:] - 1]
        part = torch.bucketize(last, ends, right=True)
        part_of_position = part.repeat_interleave(counts)
        found = []
        for number in range(len(ends)):
            own = part == number
            starts = torch.cat([counts.new_zeros(1), counts[own].cumsum(0)])
            positions = self.positions[part_of_position == number]
            found.append(RowGroups(rows=self.rows[own], starts=starts, positions=positions))
        return found

    def ids(self) -> Tensor:
        """The id of each position."""
        return self.rows.repeat_interleave(self.starts.diff())


def check_rows(table: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Raise ValueError unless `rows` are like those of `table` and it has the ids."""
    expected = (*ids.shape, *table.shape[1:])
    if ids.dim() != 1 or table.dim() != 2 or rows.shape != expected:
        found = f"{tuple(table.shape)}, {tuple(ids.shape)}, {tuple(rows.shape)}"
        raise ValueError(f"expected a table [rows, width], ids [n], rows [n, width]; found {found}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(table):
        raise ValueError(f"ids must lie in [0, {len(table)}), found {ids.min()} to {ids.max()}")


def gather(table: Tensor, ids: Tensor, out: Tensor) -> None:
    """Copy the rows `ids` of a table to `out`."""
    check_rows(table, ids, out)
    torch.index_select(table, 0, ids, out=out)


def add_rows(target: Tensor, ids: Tensor, source: Tensor) -> float:
    """`HostKernel.add_groups` in PyTorch: the same target, and the same result but for rounding."""
    check_rows(target, ids, source)
    distinct, group = torch.unique(ids, return_inverse=True)
    sums = torch.zeros(len(distinct), target.shape[1]).index_add_(0, group, source.float())
    before = target[distinct].float()
    after = before + sums
    target[distinct] = after.to(target.dtype)
    return float((after.double().square() - before.double().square()).sum())
