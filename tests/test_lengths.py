"""Rows of different length share microbatches by tokens: the same results, and less is computed."""

import copy
from typing import Any

import inside
import pytest
import torch
from families import IGNORED, VOCABULARY, build_bert, build_llama
from reference import reference_gradients
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import l2l
from l2l.model.lengths import Group, group_by_tokens, padded_pair

LENGTHS = (5, 40, 7, 6, 33, 9, 12, 5, 6, 8, 38, 4)
LENGTH = 48


def padded(side: str = "right", *, lengths=LENGTHS, seed: int = 0, **entries: Tensor) -> Any:
    """A batch of rows of these lengths, padded on a side."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (len(lengths), LENGTH), generator=generator)
    at, widths = torch.arange(LENGTH), torch.tensor(lengths)[:, None]
    mask = (at < widths if side == "right" else at >= LENGTH - widths).long()
    ids = ids * mask
    labels = ids.masked_fill(mask == 0, IGNORED)
    if side == "left":  # the first word has no prediction
        labels[torch.arange(len(lengths)), LENGTH - widths[:, 0]] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels} | entries


def classified(side: str = "right") -> Any:
    return padded(side, labels=torch.arange(len(LENGTHS)) % 2)


def positions_of(batch: Any) -> Tensor:
    return (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)


# --------------------------------------------------------------------------------------------------
# Which rows go where


def test_rows_of_similar_length_share_microbatches() -> None:
    batch = padded(lengths=(8, 40, 3, 38, 8, 7))
    found = group_by_tokens(batch, 96)
    assert found is not None
    assert found.groups == (Group((1, 3), 0, 48), Group((0, 2, 4, 5), 0, 16))
    assert (found.num_needed, found.num_tokens) == (104, 2 * 48 + 4 * 16)
    assert found.sides == {"right"}
    first, second = found.take(batch)
    assert torch.equal(first["input_ids"], batch["input_ids"][[1, 3]])
    assert torch.equal(second["labels"], batch["labels"][[0, 2, 4, 5], :16])


@pytest.mark.parametrize("tokens", [16, 100, 400])
@pytest.mark.parametrize("seed", range(3))
def test_every_row_is_in_one_microbatch_with_all_it_needs(tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LENGTH, (50,), generator=generator).tolist()
    for side in ("left", "right"):
        batch = padded(side, lengths=lengths)
        found = group_by_tokens(batch, tokens)
        assert found is not None
        assert sorted(row for group in found.groups for row in group.rows) == [*range(50)]
        for group, rows in zip(found.groups, found.take(batch), strict=True):
            assert len(group.rows) == 1 or group.num_tokens <= tokens
            assert rows["attention_mask"].sum() == sum(lengths[row] for row in group.rows)
            counted = (batch["labels"][list(group.rows)] != IGNORED).sum()
            assert (rows["labels"] != IGNORED).sum() == counted


def test_a_label_that_counts_is_never_left_out() -> None:
    """Nor the position in which a causal model predicts it."""
    batch = padded("left", lengths=(4,) * 8)
    batch["labels"][:, LENGTH - 4] = 1
    found = group_by_tokens(batch, 64)
    assert found is not None
    assert {group.end for group in found.groups} == {LENGTH}
    assert max(group.start for group in found.groups) <= LENGTH - 5
    batch = padded(lengths=(4,) * 8)
    batch["labels"][3, LENGTH - 1] = 1
    found = group_by_tokens(batch, 64)
    assert found is not None
    assert next(one for one in found.groups if 3 in one.rows).end == LENGTH


@pytest.mark.parametrize(
    "change",
    [
        {"attention_mask": torch.ones(len(LENGTHS), LENGTH, dtype=torch.int64)},
        {"attention_mask": torch.rand(len(LENGTHS), LENGTH)},
        {"attention_mask": torch.ones(len(LENGTHS), 1, LENGTH, LENGTH)},
        {"weights": torch.ones(len(LENGTHS), LENGTH)},
        {"labels": torch.zeros(len(LENGTHS), LENGTH)},
        {"labels": torch.zeros(len(LENGTHS), LENGTH, LENGTH)},
        {"pixel_values": torch.zeros(3, 4)},
    ],
)
def test_what_is_not_known_is_left_as_it_is(change: dict[str, Tensor]) -> None:
    assert group_by_tokens(padded(), 96) is not None
    assert group_by_tokens(padded(**change), 96) is None
    assert group_by_tokens([padded()], 96) is None


def test_a_trial_has_much_padding_that_none_of_its_rows_needs() -> None:
    for side in ("left", "right"):
        pair = padded_pair(padded(side), side)
        assert pair is not None
        wide, narrow = (one["attention_mask"] for one in pair)
        assert wide.shape == (2, 48)
        assert 12 <= narrow.shape[1] <= 13
        assert wide.sum() == narrow.sum()
        other = "left" if side == "right" else "right"
        assert padded_pair(padded(side), other) is None


# --------------------------------------------------------------------------------------------------
# Steps


class Pooled(nn.Module):
    """A classifier of the mean over all positions, padding included, or of those with a mask."""

    def __init__(self, *, looks_at_mask: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(Tanh() for _ in range(2))
        self.head = nn.Linear(16, 2)
        self.looks_at_mask = looks_at_mask

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Any]:
        hidden = self.words(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        weights = attention_mask[..., None] if self.looks_at_mask else torch.ones_like(hidden)
        logits = self.head((hidden * weights).sum(1) / weights.sum(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.up(hidden))


def step_of(model: nn.Module, batch: Any, **settings: Any) -> tuple[Any, dict[str, Tensor], Any]:
    """A step's report, the gradients that SGD has applied, and the plan."""
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    rate = 1000.0  # so large that nothing of a gradient is rounded off
    settings = {"overrides": {"microbatch_tokens": 96}, **settings}
    with inside.engine(
        model, device="cpu", precision="float32", optimizer=l2l.SGD(lr=rate), **settings
    ) as engine:
        report = engine.step(batch)
        assert engine.step_number == 1
        plan, after = engine.plan, engine.state_dict()
        return report, {name: (before[name] - after[name]) / rate for name in before}, plan


def assert_same_step(model: nn.Module, batch: Any, tolerance: float = 2e-6) -> tuple[Any, l2l.Plan]:
    model.eval()  # no dropout
    torch.manual_seed(0)
    plain = copy.deepcopy(model)
    loss, gradients = reference_gradients(plain, [batch], [1])
    report, found, plan = step_of(model, batch)
    assert report.loss == pytest.approx(float(loss), rel=1e-6)
    scale = max(float(one.norm()) for one in gradients.values() if one is not None)
    for name, one in gradients.items():
        if one is not None:
            assert float((found[name] - one).norm()) <= tolerance * scale, name
    return report, plan


def gpt2() -> nn.Module:
    settings = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
    dropouts = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **settings, **dropouts))


def bert() -> nn.Module:
    return build_bert(max_position_embeddings=LENGTH)


CASES = {
    "causal, right": (build_llama, lambda: padded("right")),
    "causal, left": (build_llama, lambda: padded("left")),
    "causal, left, positions given": (
        gpt2,
        lambda: padded("left", position_ids=positions_of(padded("left"))),
    ),
    "classified": (bert, classified),
    "pooled by the mask": (lambda: Pooled(looks_at_mask=True), classified),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_the_whole_batch_and_computes_less(case: str) -> None:
    build, make = CASES[case]
    batch = make()
    report, plan = assert_same_step(build(), batch)
    assert report.num_tokens < 0.6 * batch["input_ids"].numel()
    assert "by tokens" in dict(plan.choices)["rows of different length"]


REFUSED = {
    "positions counted from the left": (gpt2, lambda: padded("left")),
    "pooled over padding": (lambda: Pooled(looks_at_mask=False), classified),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_for_which_padding_matters_is_given_all_of_it(case: str) -> None:
    build, make = REFUSED[case]
    batch = make()
    report, plan = assert_same_step(build(), batch, 1e-5)
    assert report.num_tokens == batch["input_ids"].numel()
    assert "rows of different length" not in dict(plan.choices)


@pytest.mark.parametrize("case", CASES | REFUSED)
def test_sixteen_bits_are_enough_to_see_whether_padding_matters(case: str) -> None:
    build, make = (CASES | REFUSED)[case]
    settings = {"overrides": {"microbatch_tokens": 96}, "optimizer": l2l.SGD(lr=0.0)}
    batch = make()
    with inside.engine(build(), device="cpu", **settings) as engine:
        found = engine.step(batch).num_tokens
    assert (found < batch["input_ids"].numel()) is (case in CASES)


def test_predictions_are_of_all_positions_in_the_users_order() -> None:
    torch.manual_seed(0)
    model, batch = build_llama().eval(), padded()
    expected = model(**batch, use_cache=False)
    settings = {"overrides": {"microbatch_tokens": 96}, "precision": "float32"}
    with inside.engine(model, device="cpu", **settings) as engine:
        assert engine.evaluate(batch) == pytest.approx(expected.loss.item(), rel=1e-6)
        found = engine.predict(batch)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)


def test_a_number_of_rows_that_was_asked_for_holds() -> None:
    report, _, plan = step_of(build_llama(), padded(), microbatch_size=4)
    assert report.num_tokens == len(LENGTHS) * LENGTH
    assert "rows of different length" not in dict(plan.choices)


@pytest.mark.parametrize("case", REFUSED)
def test_these_models_would_compute_something_else(case: str, monkeypatch) -> None:
    build, make = REFUSED[case]
    expected, _, _ = step_of(build(), make())
    monkeypatch.setattr("l2l.engine.lengths.Lengths._try", lambda *_: True)
    report, _, _ = step_of(build(), make())
    assert report.loss != pytest.approx(expected.loss, rel=1e-4)


@pytest.mark.usefixtures("as_h200")
def test_a_plan_for_whole_rows_is_not_compared_with_steps_of_fewer_positions() -> None:
    def plan(lengths: tuple[int, ...]) -> l2l.Plan:
        settings = {"overrides": {"microbatch_tokens": 96}, "device_memory": "200MiB"}
        with inside.engine(build_llama(), device="cpu", **settings) as engine:
            for _ in range(6):
                engine.step(padded(lengths=lengths))
            return engine.plan

    whole, cut = plan((LENGTH,) * 12), plan(LENGTHS)
    assert whole.bounds is not None
    assert cut.bounds is None
    assert "than expected" in whole.measured[0]
    assert "than expected" not in cut.measured[0]
