"""A head in slices: the same losses, gradients and weights as with the whole head on the device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
import transformers
from families import FAMILIES, IGNORED, LENGTH, VOCABULARY, build_llama
from reference import counts, reference_gradients, split
from torch import Tensor, nn

import l2l
import l2l.model.partition
from l2l.run import Facts

ROWS = 6
SLICED = ("llama_tied", "llama_untied", "qwen3", "gpt2", "gemma3", "opt")
SLICES = {"num_head_slices": 3}


@pytest.mark.parametrize("size", [6, 2])
@pytest.mark.parametrize("name", SLICED)
def test_gradients_are_those_of_plain_pytorch(name: str, size: int) -> None:
    family = FAMILIES[name]
    batch, recorder = family.batch(ROWS), l2l.RecordGradients()
    with inside.engine(
        family.build(),
        optimizer=recorder,
        precision="float32",
        device="cpu",
        microbatch_size=size,
        embedding="host",
        overrides=SLICES,
    ) as engine:
        loss = engine.step(batch).loss
        assert inside.facts(engine).head is not None
        schedule = list(inside.schedules(engine).values())[-1]
        assert schedule.count("forward U:p m") == 3 * len(split(batch, size))
        evaluated = engine.evaluate(batch)
    parts = split(batch, size)
    numbers = [counts(family.rule, one) for one in parts]
    expected_loss, expected = reference_gradients(family.build(), parts, numbers)
    assert loss == pytest.approx(float(expected_loss), rel=1e-6)
    assert evaluated == pytest.approx(float(expected_loss), rel=1e-6)
    largest = max(float(one.abs().max()) for one in expected.values() if one is not None)
    for key, gradient in expected.items():
        if gradient is not None:
            distance = float((recorder.gradients[key] - gradient).abs().max())
            assert distance <= 1e-6 * largest, key


def build_capped() -> nn.Module:
    """Its logits are capped softly, by division, tanh and product."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        final_logit_softcapping=2.0,
        attn_implementation="eager",
    )
    return transformers.Gemma2ForCausalLM(config).float()


def build_biased() -> nn.Module:
    """Its head has a bias."""
    torch.manual_seed(0)
    config = transformers.PhiConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
    )
    model = transformers.PhiForCausalLM(config).float()
    with torch.no_grad():
        model.lm_head.bias.normal_()
    return model


def frozen_head() -> nn.Module:
    model = build_llama()
    model.lm_head.weight.requires_grad_(False)
    return model


def frozen_but_for_the_head() -> nn.Module:
    model = build_llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    return model


BUILD: dict[str, Callable[[], nn.Module]] = {
    "capped": build_capped,
    "biased": build_biased,
    "frozen head": frozen_head,
    "frozen but for the head": frozen_but_for_the_head,
    "untied": build_llama,
    "tied": FAMILIES["llama_tied"].build,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "clipped": {"clip_norm": 0.1},
    "at once": {"update": "eager"},
    "in halves": {"clip_norm": 0.1, "overrides": {"halves": True}},
    "8-bit moments": {"optimizer": l2l.AdamW(lr=0.01, moments="8bit")},
    "one slot": {"overrides": {"num_slots": 1, "num_gradient_slots": 1, "num_cells": 4}},
    "lent state": {"clip_norm": 0.1, "overrides": {"num_shared": 1, "num_pieces": 2}},
    "compiled": {"compile": "aot_eager"},
}


def trained(
    build: Callable[[], nn.Module], *, slices: int, overrides: Any = None, **settings: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two steps and an evaluation, and the weights then."""
    model, batch = build(), FAMILIES["llama_tied"].batch
    settings = {"optimizer": l2l.AdamW(lr=0.01), "precision": "float32", **settings}
    with inside.engine(
        model,
        device="cpu",
        microbatch_size=4,
        embedding="host",
        overrides={"num_head_slices": slices, **(overrides or {})},
        **settings,
    ) as engine:
        losses = [engine.step(batch(ROWS, seed=seed)).loss for seed in range(2)]
        losses.append(engine.evaluate(batch(ROWS, seed=4)))
        kinds = {a.kind for one in inside.schedules(engine).values() for a in one.actions}
        assert ("forward U:p m" in kinds) == bool(slices)
    return losses, model.state_dict()


@pytest.mark.parametrize("name", BUILD)
def test_training_is_the_same_whatever_the_number_of_slices(name: str) -> None:
    expected = trained(BUILD[name], slices=0)
    for slices in (1, 3, 67) if "tied" in name else (2,):
        assert_alike(trained(BUILD[name], slices=slices), expected)


SLOW = {"compiled": pytest.mark.thorough}


@pytest.mark.parametrize("name", [pytest.param(one, marks=SLOW.get(one, ())) for one in SETTINGS])
def test_training_is_the_same_with_other_settings(name: str) -> None:
    settings = SETTINGS[name]
    build = BUILD["untied" if name == "at once" else "tied"]
    found, expected = (trained(build, slices=number, **settings) for number in (3, 0))
    if name == "8-bit moments":  # which make much of the last bits of a gradient
        assert found[0] == pytest.approx(expected[0], rel=1e-3)
    else:
        assert_alike(found, expected)


def assert_alike(
    found: tuple[list[float], dict[str, Tensor]], expected: tuple[list[float], dict[str, Tensor]]
) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for key, value in expected[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_in_16_bits_it_is_the_same_but_for_rounding(precision: str) -> None:
    settings = {"precision": precision, "optimizer": l2l.SGD(lr=0.01)}
    found, expected = (trained(build_llama, slices=n, **settings) for n in (3, 0))
    assert found[0] == pytest.approx(expected[0], rel=0.02)


def test_a_checkpoint_goes_on_in_slices(tmp_path) -> None:
    batch = FAMILIES["llama_tied"].batch(ROWS)

    def engine(**settings: Any) -> l2l.Engine:
        model = FAMILIES["llama_tied"].build()
        return inside.engine(model, precision="float32", device="cpu", embedding="host", **settings)

    with engine(overrides=SLICES) as one:
        one.step(batch)
        one.save(tmp_path / "one")
        expected = one.step(batch).loss
    with engine() as other:
        other.load(tmp_path / "one")
        assert other.step(batch).loss == expected


def test_all_outputs_are_given_by_the_whole_head() -> None:
    model, batch = build_llama(), FAMILIES["llama_tied"].batch(ROWS)
    expected = model(**batch).logits.detach()
    with inside.engine(model, precision="float32", device="cpu", overrides=SLICES) as engine:
        engine.step(batch)
        assert engine.predict(batch).logits.shape == (ROWS, LENGTH, VOCABULARY)
    with inside.engine(build_llama(), precision="float32", device="cpu", overrides=SLICES) as one:
        torch.testing.assert_close(one.predict(batch).logits, expected)


def test_a_trial_on_the_host_finds_the_same() -> None:
    batch = FAMILIES["llama_tied"].batch(ROWS)
    with inside.engine(build_llama(), precision="float32", device="cpu") as engine:
        engine.step(batch)
        facts = inside.facts(engine)
        found = inside.trial(engine).on_host().run(batch, Facts(), needs_loss=True)
    for name in ("usage", "alone", "within_rows", "rule", "rule_is_final", "head", "route", "cut"):
        assert getattr(found, name) == getattr(facts, name), name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_checkpoint_of_earlier_days_has_the_head_elsewhere(
    tmp_path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """Heads that are not tied were with what else is around the layers."""
    batch = FAMILIES["llama_tied"].batch(ROWS)

    def engine() -> l2l.Engine:
        return inside.engine(build_llama(), precision="float32", device="cpu")

    def of_embeddings(model: nn.Module) -> list[Tensor]:
        return [one.weight for one in model.modules() if isinstance(one, nn.Embedding)]

    with monkeypatch.context() as patched:
        patched.setattr(l2l.model.partition, "_tables", of_embeddings)
        with inside.engine(build_llama(), precision=precision, device="cpu") as one:
            one.step(batch)
            one.save(tmp_path / "one")
            expected = one.state_dict()
            later = one.step(batch).loss
    assert not (tmp_path / "one" / "T1.safetensors").exists()
    with engine() as other:
        assert "T1" in inside.server(other).units
        other.load(tmp_path / "one")
        assert all(torch.equal(value, expected[key]) for key, value in other.state_dict().items())
        within = 1e-6 if precision == "float32" else 0.05
        assert other.step(batch).loss == pytest.approx(later, rel=within)


@pytest.mark.parametrize("label", [-1, VOCABULARY])
def test_labels_that_are_no_words_are_refused_as_torch_refuses_them(label: int) -> None:
    batch = FAMILIES["llama_tied"].batch(ROWS)
    wrong = {**batch, "labels": batch["labels"].clone()}
    wrong["labels"][0, 5] = label
    model = build_llama()
    with inside.engine(model, precision="float32", device="cpu", overrides=SLICES) as engine:
        engine.step(batch)
        before = engine.state_dict()
        with pytest.raises(RuntimeError, match="out of bounds"):
            engine.step(wrong)
        assert all(torch.equal(one, before[key]) for key, one in engine.state_dict().items())


def test_words_that_are_ruled_out_may_be_a_slice_of_their_own() -> None:
    """Vocabularies are padded: with a bias of minus infinity."""

    def build() -> nn.Module:
        model = build_biased()
        with torch.no_grad():
            model.lm_head.bias[-3:] = -torch.inf
        return model

    batch, found = FAMILIES["llama_tied"].batch(ROWS), list[float]()
    batch["labels"] = torch.where(batch["labels"] >= VOCABULARY - 3, IGNORED, batch["labels"])
    for slices in (0, VOCABULARY):
        settings = {"optimizer": l2l.SGD(lr=0.1), "overrides": {"num_head_slices": slices}}
        with inside.engine(build(), precision="float32", device="cpu", **settings) as engine:
            found.append(engine.step(batch).loss)
            assert not engine.step(batch).skipped
    assert found[1] == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize(("first", "second"), [(0, 3), (3, 0), (3, 5), (0, VOCABULARY)])
@pytest.mark.parametrize("name", ["untied", "tied", "biased", "frozen head"])
def test_a_checkpoint_is_the_same_whatever_the_slices(
    name: str, first: int, second: int, tmp_path: Path
) -> None:
    """Saved under one plan, loaded under another and saved again: every byte of it."""
    for slices, folder in ((first, "one"), (second, "two")):
        with inside.engine(
            BUILD[name](),
            precision="float32",
            device="cpu",
            embedding="host",
            overrides={"num_head_slices": slices},
        ) as engine:
            if folder == "one":
                engine.step(FAMILIES["llama_tied"].batch(ROWS))
            else:
                engine.load(tmp_path / "one")
            engine.save(tmp_path / folder)
    files = sorted(one.name for one in (tmp_path / "one").glob("*.safetensors"))
    assert files == sorted(one.name for one in (tmp_path / "two").glob("*.safetensors"))
    for file in files:
        found, expected = ((tmp_path / one / file).read_bytes() for one in ("two", "one"))
        assert found == expected, file
