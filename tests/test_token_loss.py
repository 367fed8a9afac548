"""Losses of log-probabilities: those of plain PyTorch, without whole logits."""

from collections.abc import Mapping
from typing import Any

import inside
import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, IGNORED, VOCABULARY, build_llama
from torch import Tensor, nn

import l2l
from l2l.model import num_rows, take_rows, token_length
from l2l.model.splitting import CutBatch, Given

ROWS = 6
BETA = 0.5
FAMILY = FAMILIES["llama_untied"]


def plain_logps(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Log-probabilities of labels, a position ahead, 0 where there is none."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    found = torch.log_softmax(logits.float(), -1)
    picked = found.gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    return torch.where(labels == IGNORED, 0, picked)


def entropy(logps: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """A cross-entropy over all labels."""
    return -logps.sum(), (batch["labels"][:, 1:] != IGNORED).sum()


def preference(logps: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
    """The loss of direct preference optimization: rows are chosen and rejected in turn."""
    ratios = logps.sum(1) - batch["reference"]
    return -F.logsigmoid(BETA * (ratios[0::2] - ratios[1::2])).sum(), len(ratios) // 2


def pairs(batch: Mapping[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    return {name: one[2 * start : 2 * end] for name, one in batch.items()}


pairs.num_rows = lambda batch: len(batch["labels"]) // 2


def batch_of(rows: int = ROWS, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        **FAMILY.batch(rows, seed=seed),
        "reference": -20 - 10 * torch.rand(rows, generator=generator),
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "entropy": {"loss": l2l.TokenLoss(entropy)},
    "preference": {"loss": l2l.TokenLoss(preference), "split": pairs},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("slices", [1, 4])
def test_loss_and_gradients_are_those_of_plain_pytorch(name: str, size: int, slices: int) -> None:
    batch, recorder = batch_of(), l2l.RecordGradients()
    with inside.engine(
        build_llama(),
        optimizer=recorder,
        precision="float32",
        device="cpu",
        microbatch_size=size,
        overrides={"num_head_slices": slices},
        **SETTINGS[name],
    ) as engine:
        loss = engine.step(batch).loss
        assert engine.evaluate(batch) == pytest.approx(loss, rel=1e-6)
        kinds = {a.kind for one in inside.schedules(engine).values() for a in one.actions}
        assert "forward U:p m" in kinds
        assert "loss m" not in kinds
    model = build_llama()
    total, weight = SETTINGS[name]["loss"].function(plain_logps(model, batch), batch)
    expected = total / weight
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for key, parameter in model.named_parameters():
        distance = float((recorder.gradients[key] - parameter.grad).abs().max())
        assert distance <= 2e-6 * largest, key


def test_the_plan_puts_the_head_in_slices_whatever_the_budget() -> None:
    for budget in ("200MiB", "2GiB"):
        with inside.engine(
            build_llama(hidden_size=64),
            device="cpu",
            device_memory=budget,
            **SETTINGS["preference"],
        ) as engine:
            engine.step(batch_of())
            assert inside.planning(engine).decisions.num_head_slices > 0


def test_what_only_the_loss_reads_does_not_reach_the_model() -> None:
    seen: list[set[str]] = []

    def loss(logps: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        seen.append({*batch})
        return entropy(logps, batch)

    with inside.engine(build_llama(), device="cpu", loss=l2l.TokenLoss(loss)) as engine:
        engine.step(batch_of())
    assert all("reference" in names for names in seen)


class Silent(nn.Module):
    """Takes no cross-entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.words(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return {"loss": self.head(hidden).square().mean()}


def test_refusals() -> None:
    batch = batch_of()
    with (
        inside.engine(Silent(), device="cpu", loss=l2l.TokenLoss(entropy)) as engine,
        pytest.raises(ValueError, match=r"needs a model whose own loss is a plain cross-entropy"),
    ):
        engine.step({name: batch[name] for name in ("input_ids", "labels")})
    adafactor = {"optimizer": l2l.Adafactor(lr=0.1), "loss": l2l.TokenLoss(entropy)}
    with (
        inside.engine(build_llama(), device="cpu", **adafactor) as engine,
        pytest.raises(ValueError, match=r"loss=l2l.TokenLoss, but .* a host optimizer"),
    ):
        engine.step(batch)


def trained_by(function: Any, batch: Mapping[str, Any], **settings: Any) -> float:
    with inside.engine(
        build_llama(), device="cpu", precision="float32", loss=l2l.TokenLoss(function), **settings
    ) as engine:
        return engine.step(batch).loss


WRONG: dict[str, Any] = {
    r"a tensor of shape \[2\], float32": lambda found, _: -found.sum(1),
    r"\(a tensor of shape \[1\], float32, int\)": lambda found, _: (-found.sum().view(1), 3),
    r"\(a tensor of shape \[\], float32, a tensor of shape \[2, 12\], int64\)": (
        lambda found, batch: (-found.sum(), batch["labels"])
    ),
    "float": lambda found, _: -float(found.sum()),
    "NoneType": lambda *_: None,
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_loss_is_refused_by_what_it_is(name: str) -> None:
    with pytest.raises(ValueError, match=rf"loss= returns {name}\. Expected \(sum, weight\)"):
        trained_by(WRONG[name], batch_of())


def test_a_loss_that_requires_no_gradient_is_told(caplog: pytest.LogCaptureFixture) -> None:
    trained_by(lambda found, batch: entropy(found.detach(), batch), batch_of())
    assert "requires no gradient" in caplog.text


def test_a_function_may_write_into_what_it_is_given() -> None:
    def double(found: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        return entropy(found.mul_(2), batch)

    expected = 2 * trained_by(entropy, batch_of())
    assert trained_by(double, batch_of()) == pytest.approx(expected, rel=1e-6)


def test_it_is_taken_over_one_microbatch_at_a_time() -> None:
    def of_all(found: Tensor, _: Any) -> Tensor:
        return torch.logsumexp(found.sum(1) / 10, 0)

    trained_by(of_all, batch_of(), microbatch_size=ROWS)
    with pytest.raises(ValueError, match=r"cannot be cut into microbatches of 2 rows"):
        trained_by(of_all, batch_of(), microbatch_size=2)


def test_a_prediction_may_come_first() -> None:
    words = {name: batch_of()[name] for name in ("input_ids", "attention_mask")}
    with inside.engine(build_llama(), device="cpu", loss=l2l.TokenLoss(entropy)) as engine:
        assert engine.predict(words).logits.shape[-1] == VOCABULARY
        engine.step(batch_of())
        kinds = {a.kind for one in inside.schedules(engine).values() for a in one.actions}
        assert "forward U:p m" in kinds
    with inside.engine(Silent(), device="cpu", loss=l2l.TokenLoss(entropy)) as engine:
        batch = {name: batch_of()[name] for name in ("input_ids", "labels")}
        with pytest.raises(ValueError, match="plain cross-entropy"):
            engine.evaluate(batch)


class Chosen(nn.Module):
    """Makes logits of the words with a label only, in the order of positions, not of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16)) for _ in range(3))
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.words(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        chosen = self.head(hidden.transpose(0, 1).flatten(0, 1))
        return {"loss": F.cross_entropy(chosen, labels.T.flatten())}


def test_labels_in_another_order_are_refused() -> None:
    batch = {name: batch_of()[name] for name in ("input_ids", "labels")}
    with (
        inside.engine(Chosen(), device="cpu", loss=l2l.TokenLoss(entropy)) as engine,
        pytest.raises(ValueError, match="row by row"),
    ):
        engine.step(batch)


def test_a_later_batch_whose_head_cannot_come_in_slices_is_refused() -> None:
    class Sometimes(Silent):
        def forward(
            self, input_ids: Tensor, labels: Tensor, smoothed: Tensor | None = None
        ) -> dict[str, Tensor]:
            hidden = self.words(input_ids)
            for layer in self.layers:
                hidden = layer(hidden)
            logits = self.head(hidden).view(-1, VOCABULARY)
            logits = logits if smoothed is None else logits.softmax(-1).log()
            return {"loss": F.cross_entropy(logits, labels.flatten())}

    batch = {name: batch_of()[name] for name in ("input_ids", "labels")}
    with inside.engine(Sometimes(), device="cpu", loss=l2l.TokenLoss(entropy)) as engine:
        engine.step(batch)
        with pytest.raises(ValueError, match="cannot come in slices"):
            engine.step({**batch, "smoothed": torch.ones(ROWS)})
        engine.step(batch)


def test_labels_may_all_be_ignored_in_the_rows_that_are_tried() -> None:
    """As those of long prompts are; what is tried has few tokens of them."""
    ids = torch.randint(3, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    batch["labels"][:, :24] = IGNORED
    with inside.engine(
        build_llama(), device="cpu", precision="float32", loss=l2l.TokenLoss(entropy)
    ) as engine:
        loss = engine.step(batch).loss
    total, weight = entropy(plain_logps(build_llama(), batch), batch)
    assert loss == pytest.approx(float((total / weight).detach()), rel=1e-6)


def test_a_pair_counts_as_the_positions_of_both_of_its_rows() -> None:
    """So that microbatches are as large as those of single rows."""
    batch = CutBatch(batch_of(), Given(pairs))
    length = batch["input_ids"].shape[1]
    assert num_rows(batch) == ROWS // 2
    assert token_length(batch) == 2 * length
    assert token_length(take_rows(batch, 0, 1)) == 2 * length
