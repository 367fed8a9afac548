"""Losses of preferences: what each is of the log-probabilities of completions.

Of a completion, s is the sum of the log-probabilities of its tokens, n their number, r the sum
that the reference model gives; + is the chosen one of a pair, - the rejected one.

    dpo, d = (s+ - r+) - (s- - r-)
      sigmoid    -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d)
      ipo        (d - 1 / (2 beta))^2, with s and r divided by n
      hinge      max(0, 1 - beta d)
    simpo        as sigmoid, of beta (s+/n+ - s-/n-) - gamma
    orpo         -w log sigmoid(o+ - o-), with o = s/n - log(1 - exp(s/n)), and beside it the mean
                 cross-entropy of all tokens of the chosen rows, those of prompts too
    kto          1 - sigmoid(beta (s - r - z)) of a desirable completion, else
                 1 - sigmoid(beta (z - s + r)), each with a weight
    reward       -log sigmoid(x+ - x-) + c (x+ + x-)^2, of the scores x

e is `label_smoothing`, w `odds_ratio_weight`, c `center_rewards`. z says how far the model has
moved, max(0, mean of s - r over the unrelated completions of the whole batch), and is a constant.
The *reward* of a completion is beta (s - r), or what is there in its place: beta s/n, w s/n, x.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from l2l.model import IGNORED
from l2l.train.settings import PreferenceSettings

LEAST = 1e-6  # that a log-probability may be below 0, where odds are taken


@dataclass(frozen=True, slots=True)
class Completions:
    """What a loss is given of rows of a batch; each has [rows]."""

    sums: Tensor  # of log-probabilities of the completion
    lengths: Tensor  # its tokens
    whole: Tensor  # sums over all labels, prompts too where these have some

    @classmethod
    def of(cls, found: Tensor, batch: Mapping[str, Any]) -> Completions:
        """Sum log-probabilities, each of which stands a position ahead of its label."""
        answers = batch.get("answers", batch["labels"] != IGNORED)[:, 1:]
        ahead = F.pad(answers, (0, found.shape[1] - answers.shape[1]))
        return cls((found * ahead).sum(1), ahead.sum(1), found.sum(1))

    @property
    def means(self) -> Tensor:
        """Mean log-probabilities."""
        return self.sums / self.lengths.clamp(min=1)


Judgement = tuple[Tensor, Tensor]
"""Losses, [pairs] or [completions], and rewards, [rows]."""


def dpo(rows: Completions, batch: Mapping[str, Any], settings: PreferenceSettings) -> Judgement:
    """Direct preference optimization."""
    ratios = rows.sums - batch.get("reference", 0.0)
    beta = settings.beta or 0.0
    if settings.loss == "ipo":
        better, worse = _in_pairs(ratios / rows.lengths.clamp(min=1))
        return (better - worse - 1 / (2 * beta)).square(), beta * ratios
    better, worse = _in_pairs(ratios)
    margins = beta * (better - worse)
    if settings.loss == "hinge":
        return torch.relu(1 - margins), beta * ratios
    return _smoothed(margins, settings), beta * ratios


def simpo(rows: Completions, batch: Mapping[str, Any], settings: PreferenceSettings) -> Judgement:
    """Simple preference optimization: lengths are divided by, there is no reference."""
    del batch
    rewards = (settings.beta or 0.0) * rows.means
    better, worse = _in_pairs(rewards)
    return _smoothed(better - worse - (settings.gamma or 0.0), settings), rewards


def orpo(rows: Completions, batch: Mapping[str, Any], settings: PreferenceSettings) -> Judgement:
    """Odds ratio preference optimization: beside learning the chosen ones."""
    weight, means = settings.odds_ratio_weight or 0.0, rows.means
    better, worse = _in_pairs(_log_odds(means))
    learnt = rows.whole * batch["learnt_share"]  # pairs / tokens, of the whole batch
    return -weight * F.logsigmoid(better - worse) - _in_pairs(learnt)[0], weight * means


def kto(rows: Completions, batch: Mapping[str, Any], settings: PreferenceSettings) -> Judgement:
    """Kahneman-Tversky optimization: every completion against how far the model has moved."""
    beta, ratios = settings.beta or 0.0, rows.sums - batch["reference"]
    sign = 2 * batch["desirable"] - 1
    good, bad = settings.desirable_weight or 0.0, settings.undesirable_weight or 0.0
    weights = torch.where(sign > 0, good, bad)
    return weights * (1 - torch.sigmoid(sign * beta * (ratios - batch["moved"]))), beta * ratios


def bradley_terry(scores: Tensor, settings: PreferenceSettings) -> Judgement:
    """The loss of a reward model."""
    better, worse = _in_pairs(scores)
    centre = (settings.center_rewards or 0.0) * (better + worse).square()
    return -F.logsigmoid(better - worse) + centre, scores


def _smoothed(margins: Tensor, settings: PreferenceSettings) -> Tensor:
    wrong = settings.label_smoothing or 0.0
    return -(1 - wrong) * F.logsigmoid(margins) - wrong * F.logsigmoid(-margins)


def _log_odds(means: Tensor) -> Tensor:
    """Of a probability by its logarithm: log(p / (1 - p))."""
    below = means.clamp(max=-LEAST)
    small, large = torch.log1p(-below.exp()), torch.log(-torch.expm1(below))
    return below - torch.where(below < -0.7, small, large)


def _in_pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[0::2], rows[1::2]
