"""Metrics against closed forms, and against the same sums written out in numpy."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from l2l.train.evaluation import (
    accuracy,
    f1,
    matthews_correlation,
    pearson_correlation,
    perplexity,
    spearman_correlation,
)

PAIRED = (accuracy, f1, matthews_correlation, pearson_correlation, spearman_correlation)


def classes(number: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, number, (200,), generator=generator)
    noise = torch.randint(0, number, (200,), generator=generator)
    keep = torch.rand(200, generator=generator) < 0.6
    return torch.where(keep, labels, noise), labels


def numbers(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randn(100, generator=generator)
    return labels + torch.randn(100, generator=generator), labels


def test_accuracy_and_f1_of_a_case_counted_by_hand() -> None:
    predictions, labels = torch.tensor([1, 1, 1, 0, 0, 0]), torch.tensor([1, 1, 0, 1, 0, 0])
    assert accuracy(predictions, labels) == pytest.approx(4 / 6)
    assert f1(predictions, labels) == pytest.approx(2 / 3)  # 2 of 3 found, 2 of 3 there
    assert f1(predictions[:3], labels[:3]) == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
    assert f1(predictions, labels, positive=0) == pytest.approx(2 / 3)


def test_f1_of_a_class_that_never_occurs_is_zero() -> None:
    assert f1(torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)) == 0.0


def test_matthews_of_two_classes_is_the_form_with_four_counts() -> None:
    predictions, labels = classes(2, seed=1)
    p, t = predictions.numpy().astype(bool), labels.numpy().astype(bool)
    tp, tn, fp, fn = (float(x.sum()) for x in (p & t, ~p & ~t, p & ~t, ~p & t))
    expected = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert 0.2 < expected < 0.9
    assert matthews_correlation(predictions, labels) == pytest.approx(expected, abs=1e-12)


def test_matthews_of_more_classes_is_the_correlation_of_their_indicators() -> None:
    predictions, labels = classes(4, seed=2)
    x, y = (np.eye(4)[one.numpy()] for one in (predictions, labels))
    x, y = x - x.mean(0), y - y.mean(0)
    expected = (x * y).sum() / math.sqrt((x * x).sum() * (y * y).sum())
    assert matthews_correlation(predictions, labels) == pytest.approx(expected, abs=1e-12)


def test_matthews_of_one_answer_for_everything_is_zero() -> None:
    assert matthews_correlation(torch.ones(4), torch.tensor([0.0, 1.0, 1.0, 0.0])) == 0.0


def test_pearson_is_that_of_numpy() -> None:
    predictions, labels = numbers(seed=3)
    expected = np.corrcoef(predictions.double().numpy(), labels.double().numpy())[0, 1]
    assert pearson_correlation(predictions, labels) == pytest.approx(expected, abs=1e-12)
    assert pearson_correlation(3 * labels + 1, labels) == pytest.approx(1)
    assert pearson_correlation(-labels, labels) == pytest.approx(-1)


def test_spearman_without_ties_is_the_form_with_squared_differences_of_ranks() -> None:
    predictions, labels = numbers(seed=4)
    d = (predictions.argsort().argsort() - labels.argsort().argsort()).double()
    expected = 1 - 6 * d.square().sum().item() / (100 * (100**2 - 1))
    assert spearman_correlation(predictions, labels) == pytest.approx(expected, abs=1e-12)
    assert spearman_correlation(labels.exp(), labels) == pytest.approx(1)


def test_spearman_gives_equal_values_the_mean_of_their_ranks() -> None:
    predictions, labels = torch.tensor([10.0, 20.0, 20.0, 5.0]), torch.tensor([1.0, 2.0, 3.0, 3.0])
    ranks = np.array([2, 3.5, 3.5, 1]), np.array([1, 2, 3.5, 3.5])
    expected = np.corrcoef(*ranks)[0, 1]
    assert spearman_correlation(predictions, labels) == pytest.approx(expected, abs=1e-12)


def test_a_constant_has_no_correlation() -> None:
    constant, other = torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
    assert math.isnan(pearson_correlation(constant, other))
    assert math.isnan(spearman_correlation(other, constant))


def test_perplexity_is_the_number_of_equally_likely_words() -> None:
    assert perplexity(math.log(50)) == pytest.approx(50)
    assert perplexity(1e4) == math.inf


@pytest.mark.parametrize("metric", PAIRED, ids=lambda metric: metric.__name__)
def test_predictions_must_match_labels(metric) -> None:
    with pytest.raises(ValueError, match=r"\(3,\), labels \(2,\).*one prediction for each"):
        metric(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="at least one"):
        metric(torch.zeros(0), torch.zeros(0))
