"""Running means in the place of weights: for evaluation, generation and export."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from l2l.engine.condition import Condition
from l2l.engine.guard import Guard, guarded
from l2l.parameter_server import HostOptimizer, exchange_averages


@final
@dataclass(frozen=True, eq=False)
class Averages:
    """Lets an engine work with the means that its optimizer keeps."""

    condition: Condition
    _guard: Guard

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Inside the block, weights are their running means.

        Raises:
            ValueError: the optimizer keeps none.
        """
        condition = self.condition
        optimizer = condition.has.server.optimizer
        if not (isinstance(optimizer, HostOptimizer) and optimizer.keeps_means):
            raise ValueError(
                "the optimizer keeps no running mean of the weights. Expected one that does, such "
                "as l2l.AdamW(..., average=0.999) or l2l.ScheduleFreeAdamW(...)."
            )
        condition.refuse_if_averaged("engine.averaged")
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @guarded("engine.averaged")
    def _exchange(self) -> None:
        condition = self.condition
        condition.refuse_if_unusable()
        condition.finish_step()
        condition.network.leave()  # which settles updates
        exchange_averages(condition.has.server)
        condition.has_averages = not condition.has_averages
