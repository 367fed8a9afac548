"""Logits that are put off: never more of them than a piece's, and the same losses and gradients.

Accelerators do this by themselves; here it is switched on.
"""

from collections.abc import Callable
from typing import Any

import inside
import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, LENGTH, VOCABULARY
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import l2l
import l2l.planner.decisions
from l2l.model.head import EVEN_ROWS, Head, differentiate

ROWS, SIZE, PIECE, PART = 6, 4, 5, 2 * LENGTH
PUTTING_OFF = ("llama_tied", "llama_untied", "qwen3", "gpt2", "falcon", "opt", "phi3")
TOLERANCE = 1e-6


class LogitsMade(TorchDispatchMode):
    """Notes how many rows of logits the largest tensor has that is made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor) and one.dim() > 1 and one.shape[-1] == VOCABULARY:
                # Neither a stand-in, one number that is seen many times, nor a weight turned round.
                real = one.is_contiguous() and one.untyped_storage().nbytes() >= one.nbytes
                self.most = max(self.most, one.numel() // VOCABULARY if real else 0)
        return found


def freeze_head(model: nn.Module) -> None:
    model.get_output_embeddings().weight.requires_grad_(False)


def freeze_layers(model: nn.Module) -> None:
    """And what is before them: nothing below the head wants a gradient."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)


Trained = tuple[list[float], dict[str, Tensor], int]


def trained(
    name: str, *, puts_off: bool, change: Callable[[nn.Module], None] | None = None, **settings: Any
) -> Trained:
    """Losses of two steps and an evaluation, the weights then, and the most logits made at once."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = family.build()
    if change is not None:
        change(model)
    with inside.engine(
        model,
        layers=family.layers,
        optimizer=l2l.SGD(lr=0.1),
        precision="float32",
        device="cpu",
        microbatch_size=SIZE,
        overrides={"piece_tokens": PIECE},
        **settings,
    ) as engine:
        inside.outer(engine).may_put_off = puts_off
        losses = [engine.step(family.batch(ROWS, seed=1)).loss]
        assert inside.facts(engine).puts_off == puts_off
        with LogitsMade() as made:
            losses.append(engine.step(family.batch(ROWS, seed=2)).loss)
            losses.append(engine.evaluate(family.batch(ROWS, seed=3)))
    return losses, model.state_dict(), made.most


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(l2l.planner.decisions, "PART_TOKENS", PART)


def assert_alike(found: Trained, expected: Trained) -> None:
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCE)
    for key, value in expected[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-5, atol=TOLERANCE)


@pytest.mark.parametrize("name", PUTTING_OFF)
def test_training_is_the_same_and_no_more_logits_than_a_piece(name: str):
    found = trained(name, puts_off=True)
    assert_alike(found, trained(name, puts_off=False))
    assert 0 < found[2] <= PIECE


@pytest.mark.parametrize("change", [freeze_head, freeze_layers], ids=["head", "layers"])
def test_with_frozen_weights_too(change: Callable[[nn.Module], None]):
    """Adapters leave the head as it is: its logits are no smaller for that."""
    found = trained("llama_untied", puts_off=True, change=change)
    assert_alike(found, trained("llama_untied", puts_off=False, change=change))
    assert 0 < found[2] <= PIECE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_gradient_takes_the_place_of_the_logits(dtype: torch.dtype, reduction: str):
    torch.manual_seed(0)
    logits = (4 * torch.randn(9, 500)).to(dtype)
    columns = torch.randint(0, 500, (9,))
    leaf = logits.double().requires_grad_()
    F.cross_entropy(leaf, columns, reduction=reduction).backward()
    factor = 1.0 if reduction == "sum" else 1.0 / 9
    address = logits.data_ptr()
    losses = differentiate(logits, columns, torch.full((9,), factor))
    expected = F.cross_entropy(leaf.detach(), columns, reduction="none")
    torch.testing.assert_close(losses, expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits, leaf.grad.to(dtype), rtol=8e-3, atol=1e-6)
    assert logits.data_ptr() == address


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 1000, 2048, 8192])
@pytest.mark.parametrize("most", [5, 128, 384, 768, 1536, 8192])
def test_pieces_are_few_even_and_complete(num_tokens: int, most: int):
    head = Head(add=None, scale=1.0, num_rows=most, compiled=False)
    sizes = [len(range(*piece.indices(num_tokens))) for piece in head.pieces(num_tokens)]
    assert sum(sizes) == num_tokens
    assert max(sizes) <= most
    assert len(sizes) == -(-num_tokens // most)
    assert len(set(sizes[:-1])) <= 1
    if len(sizes) > 1 and most >= EVEN_ROWS:
        assert sizes[0] % EVEN_ROWS == 0


def test_more_pieces_where_rows_do_not_fill_them():
    """768 at a time, of 2,048: three, as even as multiples of 128 allow."""
    head = Head(add=None, scale=1.0, num_rows=768, compiled=False)
    assert [piece.start for piece in head.pieces(2048)] == [0, 768, 1536]
    head = Head(add=None, scale=1.0, num_rows=1536, compiled=False)
    assert [piece.start for piece in head.pieces(2048)] == [0, 1024]
