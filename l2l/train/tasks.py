"""What is known of every task before anything is read: one row of `KINDS` for each.

How its data become examples is in `l2l.train.data`; what `[preference]` it takes in the settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from l2l.train.best import Best
from l2l.train.data import Task
from l2l.train.grpo import Grpo
from l2l.train.objective import (
    Classification,
    Dpo,
    Kto,
    Language,
    Masked,
    MultiLabel,
    Objective,
    Orpo,
    Regression,
    Reward,
    Simpo,
    WordClassification,
)
from l2l.train.settings import Settings

LESS_IS_BETTER = ("loss", "perplexity")


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known of a task before anything is read."""

    objective: type[Objective]
    head: str = "causal"  # what the model ends in, as `empty_model` calls it
    best: str = "loss"  # the metric that says how good a model is
    more_is_better: bool = False


KINDS: Mapping[Task, Kind] = {
    "causal": Kind(Language),
    "instruct": Kind(Language),
    "classification": Kind(Classification, "classification", "accuracy", more_is_better=True),
    "masked": Kind(Masked, "masked"),
    "multi-label": Kind(MultiLabel, "multi-label", "f1", more_is_better=True),
    "token-classification": Kind(
        WordClassification, "token-classification", "f1", more_is_better=True
    ),
    "regression": Kind(Regression, "regression", "pearson", more_is_better=True),
    "dpo": Kind(Dpo),
    "orpo": Kind(Orpo),
    "simpo": Kind(Simpo),
    "kto": Kind(Kto),
    "grpo": Kind(Grpo, best="reward", more_is_better=True),
    "reward": Kind(Reward, "regression", "rewards/accuracies", more_is_better=True),
}


def best_of(settings: Settings, records: Iterable[Mapping[str, Any]] = ()) -> Best:
    """The best evaluation by what the settings say, of the lines of a run's metrics so far."""
    kind, metric = KINDS[settings.data.task], settings.evaluation.metric
    more = kind.more_is_better if metric is None else metric not in LESS_IS_BETTER
    gain = settings.evaluation.least_gain or 0.0
    found = Best(metric or kind.best, more_is_better=more, least_gain=gain)
    for record in records:
        found.see(record)
    return found
