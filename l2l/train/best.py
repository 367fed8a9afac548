"""Which evaluation of a run was the best so far, and for how long none was better.

That follows from the lines of `metrics.jsonl` alone, so a run that goes on knows it too. The
evaluation before the first step does not count: nothing was trained yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from l2l.train.folder import TrainingError


@final
class Best:
    """Sees evaluations; the best one so far has a step and a value."""

    def __init__(self, metric: str, *, more_is_better: bool, least_gain: float = 0.0) -> None:
        """Nothing was seen yet."""
        self.metric = metric
        self.step: int | None = None
        self.value = math.nan
        self.num_since = 0  # evaluations after it that were no better, by the least gain
        self._sign, self._least_gain = (1.0 if more_is_better else -1.0), least_gain

    def see(self, record: Mapping[str, Any]) -> None:
        """A line of the metrics.

        Raises:
            TrainingError: an evaluation has no such metric.
        """
        if record["kind"] != "evaluation":
            return
        if self.metric not in record:
            there = [name for name in record if name not in ("kind", "step", "seconds")]
            raise TrainingError(
                f"[evaluation] metric = {self.metric!r}, but evaluations have "
                f"{', '.join(there)}. Expected one of these."
            )
        value = math.nan if record[self.metric] is None else float(record[self.metric])
        if not record["step"]:
            return
        gain = self._sign * (value - self.value)
        if (
            self.step is None
            or gain > self._least_gain
            or math.isnan(self.value) > math.isnan(value)
        ):
            self.step, self.value, self.num_since = record["step"], value, 0
        else:
            self.num_since += 1

    def is_given_up(self, patience: int | None) -> bool:
        """Whether so many evaluations in a row were no better than the best."""
        return patience is not None and self.num_since >= patience
