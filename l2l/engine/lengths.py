"""The engine's side of rows of different length: whether a model computes the same without padding.

That is tried, once for a side of the rows: two short rows of the batch with three times their
length of padding, and without, through the engine's own forward pass. Outputs where the rows need
them must be the same, and the loss. A model that pools over all positions, takes the last one,
counts positions from an end, or looks at padding, is given whole rows, as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2l.engine.condition import Condition
from l2l.engine.proving import Batches
from l2l.model import Grouping, Microbatch, Rule, group_by_tokens, padded_pair

logger = logging.getLogger("l2l")

MASK = "attention_mask"
SINGLE_TOLERANCE = 1e-5  # of what was computed in float32
HALF_TOLERANCE = 2e-2  # in 16 bits; what is made of padding would be several times as large
Predict = Callable[[Microbatch], Any]


@final
class Lengths:
    """Decides how the rows of a batch share microbatches, and remembers what was tried."""

    def __init__(self, condition: Condition, predict: Predict) -> None:
        """Nothing was tried; `predict` gives the outputs of some rows in evaluation mode."""
        self._condition, self._predict = condition, predict
        self._network = condition.network  # of which it was tried
        self._tried: dict[tuple[frozenset[str], str], bool] = {}
        self._is_trying = False

    def grouping(self, batch: Batches, rule: Rule) -> Grouping | None:
        """Which rows go where; None: a fixed number of rows, as they come."""
        has, network = self._condition.has, self._condition.network
        network.lengths, has.planning.computed_share = None, 1.0
        if self._is_trying or has.microbatch_size is not None or has.world.is_parallel:
            return None
        facts, route = network.facts, network.route
        counted = rule in (Rule.LABELS, Rule.SHIFTED_LABELS, Rule.ROWS) and has.loss is None
        is_plain = facts.cut and not facts.mixes_rows and route.num_stacks == 1
        if not counted or not is_plain or not isinstance(batch, Mapping):
            return None
        found = group_by_tokens(batch, has.planning.decisions.microbatch_tokens)
        if found is None or not all(self._holds(batch, side) for side in sorted(found.sides)):
            return None
        network.lengths, has.planning.computed_share = found.describe(), found.computed_share
        return found

    def _holds(self, batch: Mapping[str, Any], side: str) -> bool:
        key = (frozenset(batch), side)
        if self._network is not self._condition.network:  # other layers
            self._network = self._condition.network
            self._tried.clear()
        if key not in self._tried:
            self._is_trying = True
            try:
                self._tried[key] = self._try(batch, side)
            finally:
                self._is_trying = False
            if not self._tried[key]:
                logger.info(
                    "the model computes something else without the padding on the %s of rows: all "
                    "positions are computed.",
                    side,
                )
        return self._tried[key]

    def _try(self, batch: Mapping[str, Any], side: str) -> bool:
        pair = padded_pair(batch, side)
        if pair is None:
            return False
        try:
            padded, trimmed = map(self._predict, pair)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a model may have against such rows
            return False
        is_single = self._condition.has.precision.link is torch.float32
        tolerance = SINGLE_TOLERANCE if is_single else HALF_TOLERANCE
        wide, narrow = (one[MASK] != 0 for one in pair)
        return _same_where_needed(padded, trimmed, wide, narrow, tolerance)


def _same_where_needed(
    padded: Any, trimmed: Any, wide: Tensor, narrow: Tensor, tolerance: float
) -> bool:
    """Whether outputs are the same: by position where a mask is set, others as they are."""
    first, second = (
        [leaf for leaf in pytree.tree_leaves(one) if isinstance(leaf, Tensor)]
        for one in (padded, trimmed)
    )
    if len(first) != len(second) or not any(one.dim() > 1 for one in first):
        return False
    for one, other in zip(first, second, strict=True):
        if one.dim() > 1 and one.shape[:2] == wide.shape and other.shape[:2] == narrow.shape:
            one, other = one.cpu()[wide], other.cpu()[narrow]
        if one.shape != other.shape:
            return False
        distance = float((one.cpu().float() - other.cpu().float()).norm())
        if not distance <= tolerance * float(one.float().norm()) + 1e-12:
            return False
    return True
