"""A sample of the census of transformers' models: see tests/census and docs/models.md."""

import copy
import dataclasses
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from census import compare, run, table
from census.batches import IGNORED, ROWS, ragged, words
from census.cases import ALL_KINDS, Case, cases

import l2l

EXACT = [  # with all rows in one microbatch; rows singly are exact or close
    ("causal", "GPT2LMHeadModel"),
    ("causal", "LlamaForCausalLM"),
    ("causal", "MambaForCausalLM"),
    ("causal", "MixtralForCausalLM"),
    ("causal", "OPTForCausalLM"),
    ("masked", "BertForMaskedLM"),
    ("sequence", "DistilBertForSequenceClassification"),
    ("sequence", "Qwen3ForSequenceClassification"),
    ("token", "RobertaForTokenClassification"),
    ("image", "ViTForImageClassification"),
    ("video", "VideoMAEForVideoClassification"),
    ("audio", "ASTForAudioClassification"),
    ("other", "BertForQuestionAnswering"),
]


def find(kind: str, name: str) -> Case:
    return next(case for case in cases(kind) if case.name == name)


@pytest.mark.parametrize(("kind", "name"), EXACT, ids=[name for _, name in EXACT])
def test_a_class_trains_exactly(kind: str, name: str) -> None:
    found = compare.examine(find(kind, name))
    assert found["plain"] == "runs"
    assert found["whole"]["verdict"] == "exact", found["whole"]
    assert found["rows"]["verdict"] in ("exact", "close"), found["rows"]
    assert found["rows"]["adds_up"]


def test_an_engine_that_trains_otherwise_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = compare.engine_of
    monkeypatch.setattr(
        compare, "engine_of", lambda model, rate, size: right(model, 1.001 * rate, size)
    )
    found = compare.examine(find("causal", "LlamaForCausalLM"))
    assert {found["whole"]["verdict"], found["rows"]["verdict"]} == {"wrong"}


def test_a_refusal_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = partial(l2l.Engine, device="cpu", layers="nowhere")
    monkeypatch.setattr(compare, "engine_of", lambda model, rate, size: refusing(model))
    found = compare.examine(find("causal", "LlamaForCausalLM"))["whole"]
    assert found["verdict"] == "refused"
    assert "nowhere" in found["why"]
    assert not found["by_proof"]


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_an_error_of_other_code_is_a_crash(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise error("not ours")

    monkeypatch.setattr(compare, "engine_of", fail)
    found = compare.examine(find("causal", "LlamaForCausalLM"))["whole"]
    assert found["verdict"] == "crash"
    assert "not ours" in found["why"]


# ----------------------------------------------------------------------------------------------
# The census itself


def test_every_case_is_there_once() -> None:
    keys = [case.key for kind in ALL_KINDS for case in cases(kind)]
    assert len(keys) == len(set(keys)) > 800


def test_rows_have_different_numbers_of_labels() -> None:
    labels = ragged({"labels": words(0)})["labels"]
    assert len(set((labels != IGNORED).sum(1).tolist())) == ROWS


def trained() -> compare.Trained:
    return [1.5, 1.25], {"weight": torch.linspace(0.5, 1.0, 5), "count": torch.tensor(3)}


BEFORE = {"weight": torch.zeros(5), "count": torch.tensor(0)}
WRONG = {
    "a weight": lambda losses, state: state["weight"].add_(1e-5),
    "a count": lambda losses, state: state["count"].add_(1),
    "NaN": lambda losses, state: state["weight"].fill_(torch.nan),
    "a loss": lambda losses, state: losses.__setitem__(1, 1.2501),
    "another name": lambda losses, state: state.update(other=state.pop("weight")),
}


def judge(found: compare.Trained, before: dict[str, Any] = BEFORE) -> str:
    return compare.verdict(found, [trained()], before, compare.TOLERANCE, None)["verdict"]


def test_equal_bits_are_exact_and_rounding_is_close() -> None:
    losses, state = trained()
    assert judge((losses, state)) == "exact"
    state["weight"][0] += 1e-7
    assert judge((losses, state)) == "close"


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_what_differs_is_wrong(change: Any) -> None:
    losses, state = trained()
    change(losses, state)
    assert judge((losses, state)) == "wrong"


def test_a_small_change_that_is_missing_is_wrong() -> None:
    """Training changes the weight by less than the tolerance, and the engine does not."""
    before = copy.deepcopy(trained()[1])
    before["weight"] -= 6e-7
    assert judge((trained()[0], before), before) == "wrong"


def stuck(model: Any, config: Any, seed: int) -> Any:
    time.sleep(60)


def dying(model: Any, config: Any, seed: int) -> Any:
    os._exit(3)


@pytest.mark.filterwarnings("ignore")  # about a fork beside threads
@pytest.mark.parametrize(("maker", "verdict"), [(stuck, "hang"), (dying, "crash")])
def test_a_case_that_hangs_or_dies_is_noted_and_not_run_again(
    maker: Any, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = dataclasses.replace(find("causal", "LlamaForCausalLM"), maker=maker)
    for _ in range(2):
        run.run(tmp_path / "out.jsonl", [case], limit=1.0)
    assert capsys.readouterr().out.count(f"whole: {verdict}") == 1


def row(name: str, **found: Any) -> dict[str, Any]:
    return {
        "kind": "causal",
        "class": f"{name}ForCausalLM",
        "variant": "",
        "plain": "runs",
        **found,
    }


def test_a_page_gets_tables_between_its_markers(tmp_path: Path) -> None:
    exact = {"verdict": "exact", "streamed": 0.63}
    refused = {"verdict": "refused", "why": "Third is odd. Expected even.", "by_proof": True}
    alone = {"verdict": "exact", "said": ["all rows run as one microbatch."]}
    rows = [
        row("First", whole=exact, rows=exact),
        row("Second", whole=exact, rows=alone),
        row("Third", whole=refused, rows=refused),
        row("Fourth") | {"plain": "ImportError"},
    ]
    page = tmp_path / "page.md"
    page.write_text(f"above\n{table.BEGIN}\nold\n{table.END}\nbelow\n")
    table.write_into(page, table.tables(rows))
    text = page.read_text()
    assert text.startswith("above")
    assert text.endswith("below\n")
    assert "old" not in text
    assert "First 63%" in text
    assert "| exact | exact, in one microbatch after all |  | Second 63% |" in text
    assert "| refused by the proof | refused by the proof | the model is odd. | Third |" in text
    assert "not tested" in text
