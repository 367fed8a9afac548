"""Embedding tables that stay on the host: rows go to the device, their gradients come back.

A step needs the rows of its own tokens only, which are fewer bytes than the table as soon as the
table has more rows than the step has tokens. The host gathers them (`gather`) into memory that is
copied to the device like any boundary tensor, as value `e m0`; the gradients of these rows come
back as value `x m0`, and the host adds them to the table's gradient (`collect`): for a table that
is the head too, to what the head's backward pass has left there.

[Note: two sets] The host may run ahead of the device by a step, and the thread of the update lane
behind it by one. So there are two sets of memory, used in turn: before a step begins, the step
before the last one has ended on the device, and its rows were collected before the last one was
settled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from l2l.parameter_server import (
    ALIGNMENT_BYTES,
    Arena,
    HostKernel,
    ParameterServer,
    TableRows,
    host_kernel,
    round_up,
    table_rows,
)
from l2l.run.stash import Form

NUM_SETS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLookup:
    """One lookup of the prologue: which table, by which entry of the batch."""

    unit: str
    owner: str
    name: str  # of the batch's entry that holds the ids
    padding_idx: int | None


@dataclass(slots=True, kw_only=True)
class Rows:
    """The lookups of one microbatch."""

    ids: list[Tensor]  # one for each lookup, int64, flat
    form: Form
    rows: Tensor  # bytes, registered
    gradients: Tensor  # the same form


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSum:
    """Gradients of rows that a microbatch completes, to be added to a table's."""

    groups: table_rows.RowGroups  # of all rows of the sources
    sources: list[Tensor]  # below each other


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSet:
    """The lookups of one step.

    Everything here is made by the thread that begins the step, which has time. On the one that
    gathers and collects, the device waits for each operation.
    """

    lookups: tuple[TableLookup, ...]
    microbatches: list[Rows]
    sums: list[list[RowSum]]  # for each lookup, by microbatch
    first_used: Mapping[str, list[TableRows]]
    """Rows of each unit, by the microbatch that is the first to look them up."""


@final
class HostRows:
    """Gathers rows of tables and collects their gradients, on the thread of the update lane."""

    def __init__(self, *, arena: Arena, server: ParameterServer, kernel: HostKernel | None) -> None:
        self._arena = arena
        self._server = server
        self._kernel = kernel
        self._memory: dict[int, Tensor] = {}  # by turn
        self._turn = 0

    def begin(
        self, lookups: tuple[TableLookup, ...], microbatches: Sequence[Mapping[str, Any]]
    ) -> RowSet:
        """Memory for a step's rows; ids are checked."""
        self._turn = (self._turn + 1) % NUM_SETS
        found = [self._rows(lookups, one) for one in microbatches]
        needed = [round_up(one.form.layout.nbytes, ALIGNMENT_BYTES) for one in found]
        total = 2 * sum(needed)
        if self._turn not in self._memory or self._memory[self._turn].numel() < total:
            memory = self._arena.take("rows", total, torch.uint8, registered=True)
            self._memory[self._turn] = memory
        pieces = torch.split(self._memory[self._turn][:total], needed * 2)
        for index, one in enumerate(found):
            one.rows, one.gradients = pieces[index], pieces[index + len(found)]
        return RowSet(
            lookups=lookups,
            microbatches=found,
            sums=[self._sums(one, index, found) for index, one in enumerate(lookups)],
            first_used={
                unit: self._first_used(unit, lookups, found)
                for unit in {lookup.unit for lookup in lookups}
            },
        )

    def _sums(self, lookup: TableLookup, index: int, microbatches: list[Rows]) -> list[RowSum]:
        """What each microbatch adds to a table's gradient.

        In 16 bits, a row that a later microbatch looks up as well waits for that one, so that its
        gradient is rounded once.
        """
        unit, without = self._server.units[lookup.unit], lookup.padding_idx
        dtype = unit.form.staging_layout.dtype_of(lookup.owner)
        if dtype is None:  # it is not trained
            return []
        width = unit.weight_of(lookup.owner).shape[1]
        ids = [one.ids[index] for one in microbatches]
        sources = [one.form.views(one.gradients)[index].view(-1, width) for one in microbatches]
        if len(ids) == 1 or dtype is torch.float32:
            return [
                RowSum(groups=table_rows.RowGroups.of(own, without=without), sources=[source])
                for own, source in zip(ids, sources, strict=True)
            ]
        every = table_rows.RowGroups.of(torch.cat(ids), without=without)
        ends = torch.tensor([own.numel() for own in ids]).cumsum(0)
        joined = _joined(sources)
        return [RowSum(groups=own, sources=joined) for own in every.by_last_position(ends)]

    def _first_used(
        self, unit: str, lookups: tuple[TableLookup, ...], microbatches: list[Rows]
    ) -> list[TableRows]:
        owners = [(i, one.owner) for i, one in enumerate(lookups) if one.unit == unit]
        table = self._server.units[unit].weight_of(owners[0][1])
        trained = self._server.units[unit].form.trained
        fresh = torch.ones(table.shape[0], dtype=torch.bool)
        found: list[TableRows] = []
        for one in microbatches:
            rows = torch.unique(torch.cat([one.ids[index] for index, _ in owners]))
            found.append(TableRows.of(trained, rows[fresh[rows]]))
            fresh[rows] = False
        return found

    def _rows(self, lookups: tuple[TableLookup, ...], microbatch: Mapping[str, Any]) -> Rows:
        ids, described = [], []
        for lookup in lookups:
            given = microbatch.get(lookup.name)
            if not isinstance(given, Tensor):
                raise ValueError(
                    f"the batch has no tensor {lookup.name!r}, by which rows of the table "
                    f"{lookup.owner!r} are looked up. Expected the entries of the first batch."
                )
            table = self._server.units[lookup.unit].weight_of(lookup.owner)
            # A copy: they are needed when the caller may have filled the batch anew.
            flat = given.reshape(-1).to(device="cpu", dtype=torch.int64, copy=True)
            if flat.numel() and (int(flat.min()) < 0 or int(flat.max()) >= table.shape[0]):
                raise ValueError(
                    f"{lookup.name!r} has values from {int(flat.min())} to {int(flat.max())}, but "
                    f"its table {lookup.owner!r} has {table.shape[0]} rows. Expected values from 0 "
                    f"to {table.shape[0] - 1}."
                )
            ids.append(flat)
            described.append(
                torch.empty((*given.shape, table.shape[1]), dtype=table.dtype, device="meta")
            )
        nothing = torch.empty(0, dtype=torch.uint8)
        return Rows(ids=ids, form=Form.of(described), rows=nothing, gradients=nothing)

    def gather(self, rows: RowSet, microbatch: int) -> None:
        """Copy a microbatch's rows out of the tables."""
        own = rows.microbatches[microbatch]
        for lookup, ids, out in zip(rows.lookups, own.ids, own.form.views(own.rows), strict=True):
            table = self._server.units[lookup.unit].weight_of(lookup.owner)
            flat = out.view(-1, table.shape[1])
            if self._kernel is None:
                table_rows.gather(table, ids, flat)
            else:
                self._kernel.gather(table, ids, flat, num_threads=host_kernel.working_threads())

    def collect(self, unit: str, rows: RowSet, microbatch: int, staging: Tensor) -> float:
        """Add gradients of rows to a table's gradient: all that this microbatch completes.

        Returns:
            what the squared norm of the gradient grows by.
        """
        grown = 0.0
        layout = self._server.units[unit].form.staging_layout
        for index, lookup in reversed([*enumerate(rows.lookups)]):  # as autograd adds them
            if lookup.unit != unit:
                continue
            target, own = layout.view(staging, lookup.owner), rows.sums[index][microbatch]
            source = own.sources[0] if len(own.sources) == 1 else torch.cat(own.sources)
            if self._kernel is None:
                groups = own.groups
                grown += table_rows.add_rows(target, groups.ids(), source[groups.positions])
            else:
                num_threads = host_kernel.working_threads()
                grown += self._kernel.add_groups(
                    target, own.groups, source, num_threads=num_threads
                )
        return grown

    def clear(self, unit: str, rows: RowSet, staging: Tensor) -> None:
        """Make the collected rows zero again, in the staging of a table that no head fills."""
        layout = self._server.units[unit].form.staging_layout
        ids = torch.cat([one.rows for one in rows.first_used[unit]])
        for owner in {one.owner for one in rows.lookups if one.unit == unit}:
            layout.view(staging, owner).index_fill_(0, ids, 0)


def _joined(parts: list[Tensor]) -> list[Tensor]:
    """Matrices as a single one, if they lie below each other in memory."""
    first, rows = parts[0], sum(len(part) for part in parts)
    address = first.data_ptr()
    for part in parts:
        if part.data_ptr() != address or not part.is_contiguous():
            return parts
        address += part.nbytes
    return [first.as_strided((rows, first.shape[1]), (first.shape[1], 1))]
