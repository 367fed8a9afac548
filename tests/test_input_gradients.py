"""What a model is called with gets its gradient, as in plain PyTorch, whatever of it is trained.

In float32 on the CPU it is the same bits where one microbatch holds all rows.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import VOCABULARY, build_bert, build_llama, causal_batch, classification_batch
from test_loop import MODELS, ROWS, build_lora, build_t5, engine_of, translation_batch
from torch import Tensor, nn

import l2l

Found = list[Tensor | None]
Run = Callable[[nn.Module], Found]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).requires_grad_()


def embeddings(model: Any, length: int, seed: int = 0) -> Tensor:
    return numbers(ROWS, length, model.get_input_embeddings().embedding_dim, seed=seed)


def compare(build: Callable[[], nn.Module], run: Run, *, tolerance: float, **settings: Any) -> None:
    """What the loop says, and gradients of parameters, with and without an engine."""

    def results(model: nn.Module) -> Found:
        said = run(model)
        return [*said, *(one.grad for one in model.parameters())]

    expected, model = results(build().train()), build().train()
    optimizer = l2l.AdamW() if any(one.requires_grad for one in model.parameters()) else None
    with engine_of(model, optimizer=optimizer, **settings):
        found = [None if one is None else one.clone() for one in results(model)]
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance / 10)


def one_microbatch_and_several(build: Callable[[], nn.Module], run: Run) -> None:
    compare(build, run, tolerance=0.0)
    compare(build, run, tolerance=1e-5, microbatch_size=3)


def rows_of(name: str) -> Run:
    """The model's own loss; of rows that are given as embeddings."""

    def run(model: nn.Module) -> Found:
        batch = MODELS[name][1](ROWS, 0)
        ids = batch.pop("input_ids")
        rows = embeddings(model, ids.shape[1])
        loss = model(inputs_embeds=rows, **batch).loss
        (loss / 2).backward()
        return [loss, rows.grad]

    return run


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "lora"])
def test_embeddings_get_the_bits_of_plain_pytorch(name: str) -> None:
    one_microbatch_and_several(MODELS[name][0], rows_of(name))


def frozen(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: build().requires_grad_(False)


@pytest.mark.parametrize("settings", [{}, {"device_memory": "256MiB"}], ids=["plain", "planned"])
def test_nothing_else_needs_to_be_trained(settings: dict[str, Any]) -> None:
    compare(frozen(build_llama), rows_of("llama"), tolerance=0.0, **settings)


def test_of_both_stacks_though_the_first_is_frozen() -> None:
    def run(model: nn.Module) -> Found:
        batch = translation_batch(ROWS, 0)
        before = embeddings(model, batch.pop("input_ids").shape[1])
        after = embeddings(model, batch["labels"].shape[1], seed=1)
        loss = model(**batch, inputs_embeds=before, decoder_inputs_embeds=after).loss
        loss.backward()
        return [loss, before.grad, after.grad]

    def build() -> Any:
        model: Any = build_t5()
        model.encoder.requires_grad_(False)
        return model

    compare(build, run, tolerance=1e-6)
    compare(build, run, tolerance=1e-5, microbatch_size=1)


class EverywhereRead(nn.Module):
    """What it is given is read before the layers, in each of them, and after them; or divides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Gated() for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(
        self, inputs: Tensor, scale: Tensor, unused: Tensor, labels: Tensor | None = None
    ) -> Any:
        hidden = self.entry(inputs) * inputs.sum(-1, keepdim=True)
        for layer in self.layers:
            hidden = layer(hidden, inputs.sin())
        out = self.head(hidden) / scale + inputs * inputs
        return out if labels is None else {"loss": F.mse_loss(out, labels), "out": out}


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        return hidden + torch.tanh(self.inner(hidden)) * gate


@pytest.mark.parametrize("by_labels", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_whatever_reads_it_adds_to_its_gradient(*, by_labels: bool, trains: bool) -> None:
    def run(model: nn.Module) -> Found:
        rows, scale, labels = numbers(ROWS, 8), numbers(seed=1), numbers(ROWS, 8, seed=2)
        unused = numbers(ROWS, 2)
        more = {"labels": labels} if by_labels else {}
        out = model(rows, scale=scale, unused=unused, **more)
        loss = out["loss"] / 4 if by_labels else (out * labels).mean()
        loss.backward()
        return [loss, rows.grad, scale.grad, labels.grad, unused.grad]

    one_microbatch_and_several(EverywhereRead if trains else frozen(EverywhereRead), run)


def test_what_another_module_has_made_trains_that() -> None:
    """A prompt of vectors before words that are looked up elsewhere, and two losses."""

    def run(model: nn.Module) -> Found:
        prompt, table = numbers(2, 32), numbers(VOCABULARY, 32, seed=1)
        ids = causal_batch(ROWS)["input_ids"]
        rows = torch.cat([prompt.expand(ROWS, -1, -1), F.embedding(ids, table)], dim=1)
        outputs = model(inputs_embeds=rows, labels=F.pad(ids, (2, 0), value=-100))
        (outputs.loss + outputs.logits.square().mean()).backward()
        return [outputs.loss, prompt.grad, table.grad]

    compare(build_lora, run, tolerance=0.0)


def test_pixels_beside_words_that_the_host_looks_up() -> None:
    from test_split import IMAGE, build_llava, noise, tokens

    def build() -> nn.Module:
        torch.manual_seed(0)
        return build_llava()

    def run(model: nn.Module) -> Found:
        batch = tokens(*(((IMAGE, 4),) for _ in range(3)))
        pixels = noise(3, 3, 16, 16).requires_grad_()
        loss = model(**batch, pixel_values=pixels).loss
        loss.backward()
        return [loss, pixels.grad]

    one_microbatch_and_several(build, run)


def test_they_alone_may_be_asked_for() -> None:
    """Then parameters get none, as in plain PyTorch."""

    def run(model: nn.Module) -> Found:
        rows, labels = embeddings(model, 6), causal_batch(ROWS)["labels"][:, :6]
        first = torch.autograd.grad(model(inputs_embeds=rows, labels=labels).loss, [rows])
        assert all(one.grad is None for one in model.parameters())
        model(inputs_embeds=rows).logits.square().mean().backward(inputs=[rows])
        assert all(one.grad is None for one in model.parameters())
        model(inputs_embeds=rows, labels=labels).loss.backward()
        return [*first, rows.grad]

    compare(build_llama, run, tolerance=0.0)


def test_in_16_bits_it_has_the_type_of_what_was_given() -> None:
    def of(model: nn.Module) -> Tensor:
        batch = classification_batch(ROWS)
        rows = embeddings(model, batch.pop("input_ids").shape[1])
        (model(inputs_embeds=rows, **batch).loss * 3).backward()
        assert rows.grad is not None
        assert rows.grad.dtype is torch.float32
        return rows.grad

    expected, model = of(build_bert().train()), build_bert().train()
    with engine_of(model, precision="bfloat16", kernel="native"):
        found = of(model)
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_they_are_refused_where_nobody_would_get_them() -> None:
    model = build_llama().train()
    with engine_of(model) as engine:
        rows, ids = embeddings(model, 6), causal_batch(ROWS)["input_ids"]
        batch = {"inputs_embeds": rows, "labels": ids[:, :6]}
        with pytest.raises(ValueError, match=r"'inputs_embeds' of the batch requires a gradient"):
            engine.step(batch)
        assert engine.evaluate(batch) == pytest.approx(float(model(**batch).loss.detach()))
        with torch.no_grad():
            assert not model(**batch).loss.requires_grad
        with pytest.raises(ValueError, match="'past' holds a tensor that requires a gradient"):
            model(inputs_embeds=rows, past=(rows,))
