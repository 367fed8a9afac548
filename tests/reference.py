"""Plain PyTorch, the truth the engine is held to.

A step over a batch is gradient accumulation over its microbatches, in order. The loss of the step
is that of the whole batch: a microbatch whose loss averages over n of the batch's N labels (or
rows) counts n / N. The arithmetic is written out so that "equal" can mean bit by bit:

    loss     = sum over m of  loss_m * (n_m / N)          in float32, in order
    gradient = sum over m of  gradient of that term       as autograd accumulates it
"""

import inspect
from collections.abc import Iterable, Sequence

import torch
from families import IGNORED, Batch, Rule
from torch import Tensor, nn

Gradients = dict[str, Tensor | None]


def split(batch: Batch, size: int) -> list[Batch]:
    """Cut a batch into microbatches of `size` rows; the last may be smaller."""
    rows = len(next(iter(batch.values())))
    return [
        {name: tensor[start : start + size] for name, tensor in batch.items()}
        for start in range(0, rows, size)
    ]


def counts(rule: Rule, microbatch: Batch) -> int:
    """How many labels, or rows, the loss of this microbatch averages over."""
    labels = microbatch["labels"]
    if rule == "rows":
        return len(labels)
    if rule == "shifted":
        labels = labels[:, 1:]
    return int((labels != IGNORED).sum())


def loss_of(model: nn.Module, microbatch: Batch) -> Tensor:
    """The model's own loss, without a cache where the model takes that word."""
    words = inspect.signature(model.forward).parameters
    settings = {"use_cache": False} if "use_cache" in words else {}
    return model(**microbatch, **settings)["loss"]


def accumulate(model: nn.Module, microbatches: Sequence[Batch], numbers: Sequence[int]) -> Tensor:
    """Add the gradients of one step to `.grad` of the parameters; give the loss of the step.

    `numbers` says how many labels, or rows, the loss of each microbatch averages over.
    """
    total = torch.zeros(())
    for microbatch, number in zip(microbatches, numbers, strict=True):
        share = number / sum(numbers)
        loss = loss_of(model, microbatch)
        (loss * share).backward()
        total = total + loss.detach() * share
    return total


def reference_gradients(
    model: nn.Module, microbatches: Sequence[Batch], numbers: Sequence[int]
) -> tuple[Tensor, Gradients]:
    """Loss and gradient of one step; None where plain PyTorch leaves none."""
    model.zero_grad()
    loss = accumulate(model, microbatches, numbers)
    gradients: Gradients = {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    model.zero_grad()
    return loss, gradients


def train_plain(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    optimizer: torch.optim.Optimizer,
    rule: Rule,
    size: int,
) -> list[float]:
    """One optimizer step per batch, in microbatches of `size` rows; the losses."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        microbatches = split(batch, size)
        numbers = [counts(rule, microbatch) for microbatch in microbatches]
        losses.append(float(accumulate(model, microbatches, numbers)))
        optimizer.step()
    return losses


def shared_embeddings(model: nn.Module) -> set[str]:
    """Names of embedding weights that are also used elsewhere: prologue and epilogue meet there.

    Their gradient is a sum over two places. Plain PyTorch adds both places of one microbatch
    before the next microbatch; an engine may add all microbatches of one place first, which
    rounds differently unless there is one microbatch.
    """
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    places = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    return {
        name
        for name, parameter in model.named_parameters()
        if id(parameter) in embeddings and places.count(id(parameter)) > 1
    }
