"""How good a model is: the metrics of predictions.

A metric is one number, of predictions and labels of equal shape. Classes are integers. All sums are
taken in float64.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor


def accuracy(predictions: Tensor, labels: Tensor) -> float:
    """The share of predictions that are right.

    Raises:
        ValueError: the shapes differ, or are empty.
    """
    predictions, labels = _checked(predictions, labels)
    return (predictions == labels).double().mean().item()


def f1(predictions: Tensor, labels: Tensor, *, positive: int = 1) -> float:
    """Harmonic mean of precision and recall of one class; 0 if it is neither found nor there.

    Raises:
        ValueError: the shapes differ, or are empty.
    """
    predictions, labels = _checked(predictions, labels)
    found, there = predictions == positive, labels == positive
    total = int(found.sum()) + int(there.sum())
    return 2 * int((found & there).sum()) / total if total else 0.0


def matthews_correlation(predictions: Tensor, labels: Tensor) -> float:
    """Correlation of predicted and true classes, for two or more of them; 0 if one is constant.

    With c right of n, and for each class k how often it was predicted (p) and true (t):
    (c n - sum p_k t_k) / sqrt((n^2 - sum p_k^2) (n^2 - sum t_k^2)).

    Raises:
        ValueError: the shapes differ, or are empty.
    """
    predictions, labels = _checked(predictions, labels)
    classes = torch.unique(torch.cat([predictions, labels]))
    predicted = (predictions[:, None] == classes).sum(0).double()
    true = (labels[:, None] == classes).sum(0).double()
    number, right = predictions.numel(), int((predictions == labels).sum())
    spread = (number**2 - predicted.square().sum()) * (number**2 - true.square().sum())
    covariance = number * right - (predicted * true).sum()
    return (covariance / spread.sqrt()).item() if spread > 0 else 0.0


def pearson_correlation(predictions: Tensor, labels: Tensor) -> float:
    """Linear correlation; NaN if one is constant.

    Raises:
        ValueError: the shapes differ, or are empty.
    """
    predictions, labels = _checked(predictions, labels)
    x, y = (one.double() - one.double().mean() for one in (predictions, labels))
    spread = (x.square().sum() * y.square().sum()).sqrt()
    return ((x * y).sum() / spread).clamp(-1, 1).item() if spread > 0 else math.nan


def spearman_correlation(predictions: Tensor, labels: Tensor) -> float:
    """Linear correlation of the ranks, equal values sharing the mean of theirs; NaN if constant.

    Raises:
        ValueError: the shapes differ, or are empty.
    """
    predictions, labels = _checked(predictions, labels)
    return pearson_correlation(_ranks(predictions), _ranks(labels))


def perplexity(loss: float) -> float:
    """Of a mean loss in nats: exp(loss); infinite where that is too large."""
    return math.inf if loss > math.log(sys.float_info.max) else math.exp(loss)


def _checked(predictions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if predictions.shape != labels.shape or not predictions.numel():
        raise ValueError(
            f"predictions have the shape {tuple(predictions.shape)}, labels "
            f"{tuple(labels.shape)}. Expected one prediction for each label, and at least one."
        )
    return predictions.detach().cpu().reshape(-1), labels.detach().cpu().reshape(-1)


def _ranks(values: Tensor) -> Tensor:
    _, places, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()  # the rank of the last of equal values, from 1 on
    ranks: Tensor = last - (counts.double() - 1) / 2
    return ranks[places]
