"""The example of distillation: a student learns in an engine what it learns in plain PyTorch."""

import importlib
import json
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
import torch.nn.functional as F
from test_scripts import run
from torch import Tensor

import l2l

ROOT = Path(__file__).parents[1]
STEPS, ROWS, WORDS = 20, 4, 256


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("distillation")


def batches(number: int = STEPS) -> list[dict[str, Tensor]]:
    """Rows of which some labels are ignored, not as many in each."""
    found = []
    for seed in range(number):
        ids = torch.randint(WORDS, (ROWS, 16), generator=torch.Generator().manual_seed(seed))
        labels = torch.where(torch.arange(16) < torch.arange(2, 10, 2)[:, None], -100, ids)
        found.append({"input_ids": ids, "labels": labels})
    return found


def distilled(example: Any, *, plain: bool, **settings: Any) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    teacher, student = example.make_model(3, 32), example.make_model(2, 16)
    model = example.Distilled(student, teacher.lm_head, temperature=2.0, share=0.5)
    losses = example.distil(model, teacher, batches(), plain=plain, **settings)
    return losses, model


@pytest.mark.usefixtures("as_h200")
@pytest.mark.parametrize(
    "settings",
    [{"microbatch_size": ROWS}, {"microbatch_size": 1}, {"device_memory": "200MiB"}],
    ids=["all rows", "row by row", "in a budget"],
)
def test_a_student_has_the_losses_of_plain_pytorch(example: Any, settings: dict[str, Any]) -> None:
    expected, plain = distilled(example, plain=True)
    found, model = distilled(example, plain=False, precision="float32", **settings)
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=1e-6)
    for name, one in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], one, rtol=1e-3, atol=1e-4)


def test_layers_of_both_are_streamed_and_words_are_those_of_a_microbatch(
    example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    teacher, student = example.make_model(3, 32), example.make_model(2, 16)
    model = example.Distilled(student, teacher.lm_head, temperature=2.0, share=0.5)
    settings: dict[str, Any] = {"precision": "float32", "microbatch_size": 1}
    with (
        l2l.Engine(model, **settings) as engine,
        l2l.Engine(teacher.model.requires_grad_(False), device_memory=engine, **settings) as other,
    ):
        for batch in batches(2):
            with other.trace() as of_teacher:
                taught = other.predict({"input_ids": batch["input_ids"]}).last_hidden_state
            assert taught.shape == (ROWS, 16, 32)
            with engine.trace() as of_student, monkeypatch.context() as patch:
                number = tokens_of_words(patch)
                engine.step({**batch, "taught": taught})
        for one, trace in ((other, of_teacher), (engine, of_student)):
            fetched = {span.text.split()[1] for span in trace.spans if span.text[:7] == "fetch L"}
            assert fetched == {f"L{i}" for i in range(inside.partition(one).num_layers)}
    assert set(number) == {16}  # of one row


def tokens_of_words(patch: pytest.MonkeyPatch) -> list[int]:
    """Of how many tokens there are words of the teacher at once; is filled as they are made."""
    found: list[int] = []
    distance = F.kl_div

    def noted(own: Tensor, *others: Any, **how: Any) -> Tensor:
        found.append(own.shape[:-1].numel())
        return distance(own, *others, **how)

    patch.setattr(F, "kl_div", noted)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("plain", [[], ["--plain"]])
def test_the_example_runs_to_its_end(plain: list[str], tmp_path: Path) -> None:
    words = ("--steps", "2", "--teacher-steps", "2", "--rows", "2", *plain)
    found = run(ROOT / "examples" / "distillation.py", *words, folder=tmp_path)
    assert found.returncode == 0, found.stderr
    last = json.loads(found.stdout.splitlines()[-1])
    assert last["after"] < last["before"]
