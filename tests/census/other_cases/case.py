"""A case of the census: how it is made, and what its cases share: batches and losses.

Models of libraries take no targets, so most losses here make theirs out of what the model is
given. All are means over rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = 4
WIDTH = 8
CLASSES = 5
VOCABULARY = 17
LENGTH = 6
MOST_OF_A_FAMILY = 3

Batch = dict[str, Any]
Loss = Callable[[Any, Batch], Any] | None
Made = tuple[nn.Module, Batch, Loss]


@dataclass(frozen=True)
class Case:
    """One model: `make` gives it with a batch and a loss, or None for the model's own loss."""

    name: str
    family: str
    library: str | None
    make: Callable[[], Made]


CASES: dict[str, Case] = {}


def case(family: str, library: str | None = None) -> Callable[[Callable[[], Made]], Any]:
    """Put a function among the cases, under its own name."""

    def add(make: Callable[[], Made]) -> Callable[[], Made]:
        name = make.__name__
        assert name not in CASES, name
        CASES[name] = Case(name, family, library, make)
        alike = sum(one.family == family for one in CASES.values())
        assert alike <= MOST_OF_A_FAMILY, f"{alike} of {family}"
        return make

    return add


# --------------------------------------------------------------------------------------------------
# Batches


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noise(*shape: int, seed: int = 1) -> Tensor:
    """Numbers of a normal distribution, always the same for a shape and seed."""
    return torch.randn(shape, generator=_generator(seed))


def integers(high: int, *shape: int, seed: int = 2) -> Tensor:
    return torch.randint(0, high, shape, generator=_generator(seed))


def words(length: int = LENGTH, high: int = VOCABULARY, seed: int = 3) -> Tensor:
    return integers(high, ROWS, length, seed=seed)


def images(size: int = 16, channels: int = 3) -> Tensor:
    return noise(ROWS, channels, size, size, seed=4)


def labels(classes: int = CLASSES) -> Tensor:
    return torch.arange(ROWS) % classes


# --------------------------------------------------------------------------------------------------
# Losses


def first(batch: Batch) -> Tensor:
    """The first tensor of numbers that a model is given."""
    return next(one for one in batch.values() if isinstance(one, Tensor) and one.dim())


def _tensor(outputs: Any) -> Tensor:
    """The prediction in a model's outputs."""
    if isinstance(outputs, dict):
        outputs = next(iter(outputs.values()))
    return outputs[0] if isinstance(outputs, tuple | list) else outputs


def classify(outputs: Any, batch: Batch) -> Tensor:
    """Cross-entropy; the class of a row is where the largest of its first numbers is."""
    logits = _tensor(outputs)
    targets = first(batch).flatten(1)[:, : logits.shape[-1]].argmax(dim=1)
    return F.cross_entropy(logits, targets)


def predict_words(outputs: Any, batch: Batch) -> Tensor:
    """Cross-entropy of every word that a model is given, rolled by one."""
    logits = _tensor(outputs)
    return F.cross_entropy(logits.flatten(0, -2), first(batch).roll(1, dims=1).flatten())


def regress(outputs: Any, batch: Batch) -> Tensor:
    """Mean squared distance from a sine of each place, the mean of its row, and its own number."""
    found = _tensor(outputs)
    rows = first(batch).float().flatten(1).mean(dim=1)
    places = torch.arange(found[0].numel()).float().sin().view_as(found[0])
    return (found - places - rows.view(-1, *[1] * (found.dim() - 1))).square().mean()


def reconstruct(outputs: Any, batch: Batch) -> Tensor:
    return F.mse_loss(_tensor(outputs), first(batch))


def with_labels(outputs: Any, batch: Batch) -> Tensor:
    """Cross-entropy against labels of the batch."""
    return F.cross_entropy(_tensor(outputs), batch["labels"])


class Supervised(nn.Module):
    """A model of a library, and the loss that its user puts around it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}
