"""Updates that are left to a later step, and how far each of them is.

[Note: updates that wait] An update belongs to its step and carries that step's numbers (learning
rate, decay, clip factor: `UpdateOrder`), however late it runs. An update submitted to the update
lane is *pending*: the fetch lane waits for its event before it reads the weights. An update left to
the next step is *waiting*, its gradient in staging; the next schedule settles it before the fetch.
The host settles both before it reads. So nobody sees stale weights.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from l2l.device import Event
from l2l.parameter_server.host_kernel import Half
from l2l.parameter_server.layout import ALIGNMENT_ELEMENTS
from l2l.parameter_server.optimizer import Settings
from l2l.parameter_server.unit import UnitForm, other_rows, row_ranges, shapes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOrder:
    """The numbers of an update: those of its own step."""

    settings: Mapping[str, Settings]  # by parameter name
    received: frozenset[str]  # parameters that got a gradient in this step
    factor: float = 1.0  # what gradients are multiplied with
    changes: dict[str, float] | None = None
    """By unit, the sum of squares of what updates have changed: they add to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """Rows of a table, ascending, and where they are in each of its unit's parameters."""

    rows: Tensor
    ranges: Mapping[str, Tensor]  # by parameter

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, form: UnitForm, rows: Tensor) -> TableRows:
        """Find the ranges of ascending rows."""
        pairs = zip(form.trained.names, shapes_of(form), strict=True)
        return cls(rows=rows, ranges={name: row_ranges(rows, shape[-1]) for name, shape in pairs})


class Progress(enum.Enum):
    """How much of a waiting update the host has done."""

    WAITING = "nothing is done"
    ORDERED = "its numbers are written for the device, and its step is counted"
    ROWS = "some rows of a table are done"
    ROW_WEIGHTS = "the weights of some rows of a table are done, their moments are not"
    WEIGHTS = "all weights are done, no moment is"
    REST_WEIGHTS = "some rows are done, and the weights of all others"
    DONE = "everything is done"

    def may_become(self, later: Progress) -> bool:
        """Whether an update goes from this state to that one."""
        return later in _FOLLOWING[self]


_FOLLOWING = {
    Progress.WAITING: set(Progress) - {Progress.WAITING, Progress.REST_WEIGHTS},
    # A step that failed has ordered it; then the host does it after all.
    Progress.ORDERED: {Progress.WEIGHTS, Progress.DONE},
    Progress.ROWS: {Progress.ROWS, Progress.REST_WEIGHTS, Progress.DONE},
    Progress.ROW_WEIGHTS: {Progress.ROW_WEIGHTS, Progress.WEIGHTS, Progress.DONE},
    Progress.WEIGHTS: {Progress.DONE},
    Progress.REST_WEIGHTS: {Progress.DONE},
    Progress.DONE: set[Progress](),
}


Apply = Callable[..., None]
"""`ParameterServer.update`: applies a gradient, or a part of it, to a unit."""


@dataclass(slots=True, kw_only=True)
class WaitingUpdate:
    """An update left to a later step.

    `progress` belongs to whoever updates on the host, one at a time. `renewed` is apart from it
    because it belongs to the thread that submits work to the device, which may get there before
    the host has written the numbers.
    """

    unit: str
    order: Callable[[], UpdateOrder | None]  # None: the step is skipped
    drained: Event
    gradient: Tensor | None = None  # staging bytes; None: it is on the device
    finish: Callable[[WaitingUpdate], None] | None = None
    """Called when the update is done; for one on the device, does it."""
    step: Any = None  # whose update it is, where that is done on the device
    numbers: Tensor | None = None  # of an update on the device; zero until they are written
    renewed: bool = False  # whether that update is submitted, so that the host's weights are old
    progress: Progress = Progress.WAITING
    _rows: list[Tensor] = field(default_factory=list)  # of a table, that are done already
    _refresher: object = None  # whose rows these are: those of one step are distinct

    @property
    def performed(self) -> bool:
        """Whether nothing is left to do."""
        return self.progress is Progress.DONE

    @property
    def ordered(self) -> bool:
        """Whether the numbers for the device are written, and the step is counted."""
        return self.progress is Progress.ORDERED

    @ordered.setter
    def ordered(self, is_ordered: bool) -> None:
        assert is_ordered, "what is written cannot be taken back"
        self._become(Progress.ORDERED)

    def _become(self, later: Progress) -> None:
        assert self.progress.may_become(later), f"{self.unit}: from {self.progress} to {later}"
        self.progress = later

    def refresh(
        self, form: UnitForm, apply: Apply, rows: TableRows, *, halves: bool, refresher: object
    ) -> None:
        """Do these rows of a table, or their weights; `ParameterServer.refresh` says more."""
        order = self.order()
        assert self.gradient is not None
        if order is None or self.progress in (Progress.WEIGHTS, Progress.REST_WEIGHTS):
            return
        first, shapes = not self._rows, shapes_of(form)
        if any(shape[-1] % ALIGNMENT_ELEMENTS for shape in shapes):
            # Rows that do not begin at a block are not updated apart: all are done at first.
            every = torch.arange(max(shape[0] for shape in shapes) if first else 0)
            rows = TableRows.of(form, every)
        if not first and self._refresher is not refresher:
            fresh = ~torch.isin(rows.rows, torch.cat(self._rows))
            rows = TableRows.of(form, rows.rows[fresh])
        self._refresher = refresher
        later = self.progress  # later rows are done as the first were
        if first:
            later = Progress.ROW_WEIGHTS if halves else Progress.ROWS
        half: Half | None = "weights" if later is Progress.ROW_WEIGHTS else None
        apply(self.unit, self.gradient, order, rows.ranges, count_step=first, half=half)
        self._rows.append(rows.rows)
        self._become(later)

    def advance(self, form: UnitForm, apply: Apply) -> None:
        """Do all weights that are not done."""
        if self.progress in (Progress.WEIGHTS, Progress.REST_WEIGHTS):
            return
        self._do_rest(form, apply, half="weights")
        rows_are_done = self.progress is Progress.ROWS
        self._become(Progress.REST_WEIGHTS if rows_are_done else Progress.WEIGHTS)

    def perform(self, form: UnitForm, apply: Apply) -> None:
        """Do what is left."""
        match self.progress:
            case Progress.WEIGHTS:
                self._do(apply, None, half="moments")
            case Progress.REST_WEIGHTS:
                self._do(apply, self._other_ranges(form), half="moments")
            case Progress.ROW_WEIGHTS:
                self._do_rest(form, apply)
                rows = torch.cat(self._rows).sort().values
                self._do(apply, TableRows.of(form, rows).ranges, half="moments")
            case _:
                self._do_rest(form, apply)
        if self.finish is not None:
            self.finish(self)
        self._become(Progress.DONE)

    def _do_rest(self, form: UnitForm, apply: Apply, *, half: Half | None = None) -> None:
        """The update, or half of it, of all but the rows that were refreshed."""
        ranges = self._other_ranges(form) if self._rows else None
        self._do(apply, ranges, count_step=self.progress is Progress.WAITING, half=half)

    def _do(
        self,
        apply: Apply,
        ranges: Mapping[str, Tensor] | None,
        *,
        half: Half | None,
        count_step: bool = False,
    ) -> None:
        order = self.order()
        if order is not None and self.gradient is not None:
            apply(self.unit, self.gradient, order, ranges, count_step=count_step, half=half)

    def _other_ranges(self, form: UnitForm) -> dict[str, Tensor]:
        """All but the rows that were refreshed."""
        refreshed = torch.cat(self._rows)
        return {
            name: row_ranges(other_rows(refreshed, shape[0]), shape[-1])
            for name, shape in zip(form.trained.names, shapes_of(form), strict=True)
        }
