"""Numbers of a batch are cast where the model does not take them otherwise, and only there."""

import copy
import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import l2l

ROWS, WIDTH = 6, 8


class Perceptron(nn.Module):
    """Takes numbers; `casts`: whether its own code casts them, as many models do."""

    def __init__(self, *, casts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.casts = casts
        self.first = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, numbers: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.first(numbers.to(self.first.weight.dtype) if self.casts else numbers)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        found = self.last(hidden).flatten()
        if labels is None:
            return {"found": found}
        return {"loss": F.mse_loss(found.float(), labels.float()), "found": found}


def batch(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"numbers": torch.randn(ROWS, 4, dtype=dtype), "labels": torch.randn(ROWS)}


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_numbers_are_cast_to_the_type_of_the_weights(
    precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows = batch(torch.float64)
    dtype = getattr(torch, precision)
    plain = copy.deepcopy(Perceptron()).to(dtype)
    expected = plain(rows["numbers"].to(dtype), rows["labels"])
    with (
        caplog.at_level(logging.WARNING),
        l2l.Engine(Perceptron(), precision=precision, microbatch_size=2) as engine,
    ):
        assert engine.evaluate(rows) == pytest.approx(float(expected["loss"]), rel=1e-6)
        assert torch.equal(engine.predict(rows)["found"], expected["found"])
        engine.step(rows)
        engine.step([rows])
    said = [one.message for one in caplog.records if "'numbers'" in one.message]
    assert len(said) == 1
    assert "labels" not in said[0]
    assert rows["numbers"].dtype is torch.float64, "the user's own batch is left alone"


def test_a_model_that_casts_is_given_what_it_is_given_in_plain_pytorch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = []

    class Watched(Perceptron):
        def forward(self, numbers: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            given.append(numbers.dtype)
            return super().forward(numbers, labels)

    with caplog.at_level(logging.WARNING), l2l.Engine(Watched(casts=True)) as engine:
        engine.step(batch())
    assert set(given) == {torch.float32}
    assert not [one for one in caplog.records if "'numbers'" in one.message]


def test_a_model_that_runs_in_no_way_says_why_it_does_not_with_cast_numbers() -> None:
    wrong = {**batch(), "numbers": torch.randn(ROWS, 5)}
    with l2l.Engine(Perceptron()) as engine, pytest.raises(ValueError, match="shapes cannot"):
        engine.step(wrong)


def test_what_is_cast_is_cast_in_batches_with_other_entries_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is tried of these, as all is known of the model."""
    rows, words = batch(), {"numbers": batch()["numbers"]}
    with (
        caplog.at_level(logging.WARNING),
        l2l.Engine(Perceptron(), optimizer=l2l.SGD(lr=0.0)) as one,
    ):
        one.step(rows)
        expected = one.predict(rows)["found"]
        assert torch.equal(one.predict(words)["found"], expected)
        one.step([rows, {**rows, "numbers": rows["numbers"].double()}])
    with l2l.Engine(Perceptron(), optimizer=l2l.SGD(lr=0.0)) as other:
        assert torch.equal(other.predict(words)["found"], expected)
        other.step(rows)
    assert len([one for one in caplog.records if "'numbers'" in one.message]) == 2
