"""Updates that are left to a later step, and how far each of them is.

[Note: updates that wait] An update belongs to its step and carries that step's numbers (learning
rate, decay, clip factor: `UpdateOrder`), however late it runs. An update submitted to the update
lane is *pending*: the fetch lane waits for its event before it reads the weights. An update left to
the next step is *waiting*, its gradient in staging; the next schedule settles it before the fetch.
The host settles both before it reads. So nobody sees stale weights.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from l2l.device import Event
from l2l.parameter_server.layout import ALIGNMENT_ELEMENTS
from l2l.parameter_server.optimizer import Half, HostOptimizer, UpdateOrder
from l2l.parameter_server.table_rows import TableRows

if TYPE_CHECKING:
    from l2l.parameter_server.store import ParameterServer


class Progress(enum.Enum):
    """How much of a waiting update the host has done."""

    WAITING = "nothing is done"
    ORDERED = "its numbers are written for the device, and its step is counted"
    ROWS = "some rows of a table are done"
    ROW_WEIGHTS = "the weights of some rows of a table are done, their moments are not"
    WEIGHTS = "all weights are done, no moment is"
    REST_WEIGHTS = "some rows are done, and the weights of all others"
    DONE = "everything is done"


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
    # Called when the update is done; for one on the device, does it.
    finish: Callable[[WaitingUpdate], None] | None = None
    step: Any = None  # whose update it is, where that is done on the device
    numbers: Tensor | None = None  # of an update on the device; zero until they are written
    renewed: bool = False  # whether that update is submitted, so that the host's weights are old
    progress: Progress = Progress.WAITING
    _rows: list[Tensor] = field(default_factory=list)  # of a table, that are done already
    _refresher: object = None  # whose rows these are: those of one step are distinct

    def become(self, later: Progress) -> None:
        """Note how much is done now."""
        assert later in _FOLLOWING[self.progress], f"{self.unit}: {self.progress} to {later}"
        self.progress = later

    def refresh(
        self, server: ParameterServer, rows: TableRows, *, halves: bool, refresher: object
    ) -> None:
        """Do the part of a table's update that changes these rows; `perform` does the rest.

        Args:
            server: Whose table it is.
            rows: None that the same refresher has refreshed before.
            halves: Whether to change their weights only, if these are the first rows; later ones
                are done alike.
            refresher: Whose rows these are. Another one comes if a step has failed in between.
        """
        order, optimizer = self.order(), server.optimizer
        if order is None or self.progress in (Progress.WEIGHTS, Progress.REST_WEIGHTS):
            return
        assert isinstance(optimizer, HostOptimizer)
        trained, first = server.units[self.unit].form.trained, not self._rows
        shapes = trained.shapes().values()
        is_whole = any(optimizer.needs_whole(order.settings[owner]) for owner in trained.names)
        if is_whole or any(shape[-1] % ALIGNMENT_ELEMENTS for shape in shapes):
            # Rows that do not begin at a block are not updated apart: all are done at first.
            every = torch.arange(max(shape[0] for shape in shapes) if first else 0)
            rows = TableRows.of(trained, every)
        if not first and self._refresher is not refresher:
            fresh = ~torch.isin(rows.rows, torch.cat(self._rows))
            rows = TableRows.of(trained, rows.rows[fresh])
        self._refresher = refresher
        later = self.progress  # later rows are done as the first were
        if first:
            later = Progress.ROW_WEIGHTS if halves else Progress.ROWS
        self._do(server, rows, "weights" if later is Progress.ROW_WEIGHTS else None)
        self._rows.append(rows.rows)
        self.become(later)

    def advance(self, server: ParameterServer) -> None:
        """Do all weights that are not done; `perform` follows."""
        if self.progress in (Progress.WEIGHTS, Progress.REST_WEIGHTS):
            return
        self._do(server, self._other_rows(server), "weights")
        rows_are_done = self.progress is Progress.ROWS
        self.become(Progress.REST_WEIGHTS if rows_are_done else Progress.WEIGHTS)

    def perform(self, server: ParameterServer) -> None:
        """Do the update, or what `refresh` and `advance` have left of it."""
        match self.progress:
            case Progress.DONE:
                return
            case Progress.WEIGHTS:
                self._do(server, None, "moments")
            case Progress.REST_WEIGHTS:
                self._do(server, self._other_rows(server), "moments")
            case Progress.ROW_WEIGHTS:
                self._do(server, self._other_rows(server), None)
                rows = torch.cat(self._rows).sort().values
                trained = server.units[self.unit].form.trained
                self._do(server, TableRows.of(trained, rows), "moments")
            case _:
                self._do(server, self._other_rows(server), None)
        if self.finish is not None:
            self.finish(self)
        self.become(Progress.DONE)
        if not server.units[self.unit].blocks:  # else once it is written
            server.after_update(self.unit)

    def _do(self, server: ParameterServer, rows: TableRows | None, half: Half | None) -> None:
        """The update, or half of it, of some rows; None: of all."""
        order = self.order()
        if order is not None and self.gradient is not None:
            ranges = None if rows is None else rows.ranges
            first = self.progress is Progress.WAITING
            server.update(self.unit, self.gradient, order, ranges, count_step=first, half=half)

    def _other_rows(self, server: ParameterServer) -> TableRows | None:
        """All but the rows that were refreshed; None: there are none."""
        if not self._rows:
            return None
        return TableRows.without(server.units[self.unit].form.trained, torch.cat(self._rows))
