"""A head in slices of its words: losses and gradients are those of whole logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from l2l.model import (
    Words,
    add_words,
    coefficients,
    first_sums,
    log_probabilities,
    unwind_words,
)

TOKENS, HIDDEN, WORDS = 300, 16, 61


def cap(logits: Tensor) -> Tensor:
    return torch.tanh(logits / 2.0) * 2.0


@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_loss_and_gradients_are_those_of_whole_logits(
    number: int, capped: bool, biased: bool
) -> None:
    torch.manual_seed(0)
    given = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = torch.randn(WORDS, HIDDEN, requires_grad=True)
    bias = torch.randn(WORDS, requires_grad=True) if biased else None
    labels = torch.randint(0, WORDS, (TOKENS,))
    labels[::7] = -1
    counts = (labels >= 0) * 0.37
    logits = F.linear(given, weight, bias)
    losses = F.cross_entropy(
        cap(logits) if capped else logits, labels, ignore_index=-1, reduction="none"
    )
    (losses * counts).sum().backward()

    step = -(-WORDS // number)
    starts = range(0, WORDS, step)
    with torch.no_grad():
        slices = [
            Words(
                weight[start : start + step].detach(),
                start,
                None if bias is None else bias[start : start + step].detach(),
                (lambda x: x / 2.0, torch.tanh, lambda x: x * 2.0) if capped else (),
            )
            for start in starts
        ]
        sums = first_sums(counts)
        for words in slices:
            sums = add_words(words, given.detach(), labels, sums)
        logp, norm = log_probabilities(sums)
        assert torch.allclose(-logp[labels >= 0], losses.detach()[labels >= 0], atol=1e-5)
        of_tokens = coefficients(norm, -counts)
        found, of_weight = None, torch.zeros(WORDS, HIDDEN)
        of_bias = torch.zeros(WORDS)
        for words, start in reversed([*zip(slices, starts, strict=True)]):
            rows = slice(start, start + step)
            found = unwind_words(
                words,
                given.detach(),
                labels,
                of_tokens,
                so_far=found,
                wants_given=True,
                add=lambda outputs, inputs, rows=rows: of_weight[rows].addmm_(outputs.t(), inputs),
                of_bias=of_bias[rows] if biased else None,
            )
    assert torch.allclose(found, given.grad, atol=1e-6)
    assert torch.allclose(of_weight, weight.grad, atol=1e-5)
    if bias is not None:
        assert torch.allclose(of_bias, bias.grad, atol=1e-5)
