"""The rows that a proof runs: a few tokens, in two microbatches that differ where they can."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from l2l.model import IGNORED, Microbatch, Rule, count, move_batch, num_rows, take_rows, trial_batch

Batches = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def proof_rows(batch: Batches, rule: Rule, *, cut: bool) -> list[Microbatch]:
    """Two microbatches of two rows; of a loss that cannot be put together, one.

    Args:
        batch: as a step is given it.
        rule: what the loss averages over.
        cut: whether rows of tokens are cut short.
    """
    if isinstance(batch, Mapping):
        first, second = take_rows(batch, 0, 2), take_rows(batch, 2, 4)
        if num_rows(batch) < 4:  # the same rows, the other way round
            second = {n: v.flip(0) if _has_rows(v) else v for n, v in first.items()}
    else:
        first, second = dict(batch[0]), dict(batch[-1])
    parts = [first] if rule is Rule.UNKNOWN else [first, second]
    found = [_with_labels(trial_batch(part, cut=cut), rule) for part in parts]
    return [move_batch(one, "cpu") for one in found]


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _with_labels(rows: Microbatch, rule: Rule) -> Microbatch:
    """The rows with something to learn from, also if the first tokens are a prompt."""
    labels = rows.get("labels")
    if rule in (Rule.LABELS, Rule.SHIFTED_LABELS) and isinstance(labels, Tensor):
        if not count(rule, rows):
            labels = torch.where(labels == IGNORED, 0, labels)
        return {**rows, "labels": labels}
    return rows
