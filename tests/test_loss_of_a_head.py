"""What a model makes of its head's loss: whether the head is whole, put off or in slices."""

from collections.abc import Callable
from typing import Any

import inside
import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, VOCABULARY, build_llama
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import l2l

ROWS = 6
BATCH = FAMILIES["llama_tied"].batch(ROWS)
WORDS = {name: BATCH[name] for name in ("input_ids", "labels")}
WAYS = ("whole", "put off", "in slices")
TOLERANCE = 2e-6


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.inner(hidden))


class Scored(nn.Module):
    """Makes something of its cross-entropy."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.kind = nn.Embedding(VOCABULARY, 16), kind
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.words(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden).view(-1, VOCABULARY)
        loss = F.cross_entropy(logits, labels.flatten())
        made = {
            "as it is": lambda: loss,
            "times a number": lambda: loss * 1.5,
            "nearly the same": lambda: loss * 1.01,
            "and a little more": lambda: loss + 0.003 * hidden.square().mean(),
            "and a number": lambda: loss + 0.001,
            "squared": lambda: loss.square(),
            "and of logits": lambda: loss + 0.003 * logits.square().mean(),
        }
        return {"loss": made[self.kind]()}


def gradients(
    model: nn.Module, *batches: Any, way: str, size: int = ROWS, **settings: Any
) -> tuple[float, dict[str, Tensor], Any]:
    """Loss and gradients of the last batch, and what the trial has found."""
    recorder = l2l.RecordGradients()
    overrides = {"num_head_slices": 3} if way == "in slices" else {}
    with inside.engine(
        model,
        optimizer=recorder,
        precision="float32",
        device="cpu",
        microbatch_size=size,
        overrides=overrides,
        prove=False,  # it must be right by itself
        **settings,
    ) as engine:
        inside.outer(engine).may_put_off = way == "put off"
        losses = [engine.step(one).loss for one in batches]
        facts = inside.facts(engine)
    return losses[-1], dict(recorder.gradients), facts


def assert_those_of_plain_pytorch(
    found: tuple[float, dict[str, Tensor], Any], model: nn.Module, batch: Any
) -> None:
    loss = model(**batch)["loss"]
    loss.backward()
    assert found[0] == pytest.approx(float(loss.detach()), rel=TOLERANCE)
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        distance = float((found[1][name] - parameter.grad).abs().max())
        assert distance <= TOLERANCE * largest, name


PRODUCTS = ("as it is", "times a number", "nearly the same")
MORE = ("and a little more", "and a number", "and of logits")
OTHERS = ("squared",)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_product_of_it_is_taken_in_every_way(kind: str, way: str) -> None:
    found = gradients(Scored(kind), WORDS, way=way)
    assert found[2].puts_off == (way == "put off")
    assert found[2].head is not None
    assert_those_of_plain_pytorch(found, Scored(kind), WORDS)


@pytest.mark.parametrize("kind", MORE)
def test_what_is_added_to_it_keeps_the_head_from_coming_in_slices(kind: str) -> None:
    for way in ("whole", "put off"):
        found = gradients(Scored(kind), WORDS, way=way)
        assert found[2].puts_off == (way == "put off")
        assert found[2].head is None
        assert_those_of_plain_pytorch(found, Scored(kind), WORDS)
    with pytest.raises(ValueError, match=r"num_head_slices=3, but .* cannot come in slices"):
        gradients(Scored(kind), WORDS, way="in slices")


@pytest.mark.parametrize("kind", OTHERS)
def test_a_head_whose_loss_is_something_else_stays_whole(kind: str) -> None:
    for way in ("whole", "put off"):
        found = gradients(Scored(kind), WORDS, way=way)
        assert (found[2].puts_off, found[2].head) == (False, None)
        assert_those_of_plain_pytorch(found, Scored(kind), WORDS)
    with pytest.raises(ValueError, match=r"num_head_slices=3, but .* cannot come in slices"):
        gradients(Scored(kind), WORDS, way="in slices")


@pytest.mark.parametrize("size", [ROWS, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_later_batch_may_say_by_what_its_loss_is_divided(way: str, size: int) -> None:
    """As transformers' trainer does: that is another loss than the first batch's."""
    counted = {**BATCH, "num_items_in_batch": torch.tensor(100)}
    found = gradients(build_llama(), BATCH, counted, way=way, size=size)
    assert_those_of_plain_pytorch(found, build_llama(), counted)
    found = gradients(build_llama(), BATCH, counted, BATCH, way=way, size=size)
    assert_those_of_plain_pytorch(found, build_llama(), BATCH)


def test_batches_of_one_loss_are_of_one_kind() -> None:
    """Nothing leaves the device when one follows the other."""
    positions = {**BATCH, "position_ids": torch.arange(BATCH["labels"].shape[1]).expand(ROWS, -1)}
    with inside.engine(build_llama(), precision="float32", device="cpu") as engine:
        engine.step(BATCH)
        engine.step(positions)
        facts, schedules = inside.facts(engine), inside.schedules(engine)
        kept = list(schedules.values())
        for batch in (BATCH, positions, WORDS):
            engine.step(batch)
            assert inside.facts(engine) is facts
        assert all(one in schedules.values() for one in kept)


def normed_head(model: Scored) -> None:
    model.head = parametrizations.weight_norm(model.head)


def orthogonal_head(model: Scored) -> None:
    model.head = parametrizations.orthogonal(model.head)


def bounded_words(model: Scored) -> None:
    """Its estimate changes whenever the weight is read, and is far from good yet."""
    model.words = parametrizations.spectral_norm(model.words)
    with torch.no_grad():
        for one in model.words.buffers():
            one.copy_(F.normalize(torch.randn_like(one), dim=0))


def named_otherwise(model: Scored) -> None:
    class Map(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            return F.linear(value, self.matrix)

    model.head = Map(16, VOCABULARY, bias=False)
    model.head.matrix = nn.Parameter(model.head.weight.detach().clone())
    del model.head.weight


@pytest.mark.parametrize("change", [normed_head, orthogonal_head, bounded_words, named_otherwise])
def test_weights_that_are_computed_whenever_they_are_read(
    change: Callable[[Scored], None],
) -> None:
    def build() -> Scored:
        torch.manual_seed(0)
        model = Scored("as it is")
        change(model)
        return model

    model, plain = build(), build()
    found = gradients(model, WORDS, way="whole")
    assert found[2].head is None or change is bounded_words
    assert_those_of_plain_pytorch(found, plain, WORDS)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
