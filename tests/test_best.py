"""The best model is kept and exported; a run that does not become better ends; more to hold out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_training import (
    Record,
    assert_equal_runs,
    metrics_of,
    train,
    train_until,
    weights_of,
    write_settings,
    write_tiny,
)

from l2l import cli
from l2l.checkpoint import CheckpointFolder
from l2l.train import RunFolder, TrainingError
from l2l.train import steps as steps_module
from l2l.train.best import Best
from l2l.train.settings import Settings

LOSSES = {0: 9.0, 2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5}  # by step: the best is that of step 4


@pytest.fixture(scope="module", name="tiny")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """What evaluations find, by step."""
    losses = dict(LOSSES)

    def evaluate(engine: Any, *_: Any, **__: Any) -> dict[str, float]:
        return {"loss": losses[engine.step_number], "f1": -losses[engine.step_number]}

    monkeypatch.setattr(steps_module, "evaluate", evaluate)
    return losses


def settings_of(tiny: Path, folder: Path, **sections: Any) -> Path:
    given: dict[str, dict[str, Any]] = {
        "checkpoint": {"every_steps": 0, "keep": 1, "best": True},
        "evaluation": {"every_steps": 2},
    }
    return write_settings(tiny, folder, **{**given, **sections})


def checkpoints_of(folder: Path) -> list[str]:
    found = CheckpointFolder(RunFolder(folder / "run").checkpoints).all()
    return [path.name for path in found]


def test_the_best_model_is_kept_and_exported(
    tiny: Path,
    tmp_path: Path,
    evaluations: dict[int, float],
) -> None:
    display = Record()
    (tmp_path / "best").mkdir()
    assert train(settings_of(tiny, tmp_path / "best"), display)
    assert checkpoints_of(tmp_path / "best") == ["step-00000004", "step-00000008"]
    assert "run/model (step 4: loss 1.0000)" in display.text
    (tmp_path / "short").mkdir()  # the same steps, of which the last is the best
    short = settings_of(tiny, tmp_path / "short", checkpoint={"every_steps": 4, "keep": 3})
    train(short)
    path = tmp_path / "short" / "run" / "checkpoints" / "step-00000004"
    assert cli.main(["export", str(path), str(tmp_path / "four")]) == 0
    expected = load_file(tmp_path / "four" / "model.safetensors")
    found = weights_of(tmp_path / "best")
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert not torch.equal(
        found["lm_head.weight"], weights_of(tmp_path / "short")["lm_head.weight"]
    )


def test_the_last_model_is_exported_if_it_is_the_best(
    tiny: Path,
    tmp_path: Path,
    evaluations: dict[int, float],
) -> None:
    evaluations[8] = 0.5
    assert train(settings_of(tiny, tmp_path))
    assert checkpoints_of(tmp_path) == ["step-00000008"]


def test_a_run_that_does_not_become_better_ends(
    tiny: Path,
    tmp_path: Path,
    evaluations: dict[int, float],
) -> None:
    display = Record()
    settings = settings_of(tiny, tmp_path, evaluation={"every_steps": 2, "patience": 1})
    assert train(settings, display)
    assert [record["step"] for record in metrics_of(tmp_path, "step")] == list(range(1, 7))
    assert "ended after step 6: 1 evaluations were no better (step 4: loss 1.0000)" in display.text
    again = Record()
    assert train(settings, again), "it is at its end"
    assert "is at its end, step 6" in again.text
    assert len(metrics_of(tmp_path, "step")) == 6
    more = settings_of(tiny, tmp_path, evaluation={"every_steps": 2, "patience": 3})
    assert train(more, again)
    assert len(metrics_of(tmp_path, "step")) == 8, "with more patience it goes on"


def test_a_run_that_was_stopped_finds_the_same_best(
    tiny: Path,
    tmp_path: Path,
    evaluations: dict[int, float],
) -> None:
    paths = [tmp_path / name for name in ("whole", "parts")]
    for path in paths:
        path.mkdir()
    whole, parts = (settings_of(tiny, path) for path in paths)
    train(whole)
    train_until(parts, 5)
    train_until(parts, 7)
    assert train(parts)
    assert_equal_runs(paths[1], paths[0])
    assert checkpoints_of(paths[1]) == checkpoints_of(paths[0])


def test_what_better_means_may_be_said(
    tiny: Path,
    tmp_path: Path,
    evaluations: dict[int, float],
) -> None:
    more = {"every_steps": 2, "metric": "f1"}
    assert train(settings_of(tiny, tmp_path, evaluation=more))
    assert checkpoints_of(tmp_path) == ["step-00000004", "step-00000008"]
    wrong = settings_of(tiny, tmp_path, evaluation={"every_steps": 2, "metric": "bleu"})
    with pytest.raises(TrainingError, match="evaluations have loss, f1"):
        train(wrong, resume=False)


def seen(*values: float | None, **settings: Any) -> Best:
    best = Best("loss", more_is_better=False, **settings)
    for step, value in enumerate(values):
        best.see({"kind": "evaluation", "step": step, "loss": value})
    return best


def test_the_first_evaluation_is_of_what_nobody_trained() -> None:
    assert seen(0.1).step is None
    assert (seen(0.1, 3, 2, 2.5).step, seen(0.1, 3, 2, 2.5).num_since) == (2, 1)


def test_what_is_not_finite_is_never_better() -> None:
    assert (seen(9, None, 3, None).step, seen(9, None, 3, None).num_since) == (2, 1)


def test_a_gain_may_be_too_small_to_count() -> None:
    best = seen(9, 3, 2.9, 2.8, least_gain=0.15)
    assert (best.step, best.num_since) == (3, 0)
    assert seen(9, 3, 2.9, 2.87, least_gain=0.15).is_given_up(2)
    assert not seen(9, 3, 2.9, 2.87, least_gain=0.15).is_given_up(None)


def test_a_share_may_be_held_out(tiny: Path, tmp_path: Path) -> None:
    display = Record()
    train(write_settings(tiny, tmp_path, data={"hold_out": 0.25}, training={"steps": 1}), display)
    assert "27 examples" in display.text
    assert "evaluation: 9 examples" in display.text
    path = write_settings(tiny, tmp_path, data={"hold_out": 2.5})
    with pytest.raises(ValueError, match="a number of examples, or a share between 0 and 1"):
        Settings.read(path)


def test_what_needs_evaluations_is_refused_without(tiny: Path, tmp_path: Path) -> None:
    path = write_settings(tiny, tmp_path, checkpoint={"best": True})
    path.write_text(path.read_text().replace("hold_out = 6\n", ""))
    with pytest.raises(ValueError, match="best is set, but there is nothing to evaluate on"):
        Settings.read(path)


def test_a_checkpoint_is_also_made_when_time_has_passed(
    tiny: Path,
    tmp_path: Path,
) -> None:
    more = {"every_steps": 0, "every_minutes": 1e-9, "keep": 20}
    assert train(write_settings(tiny, tmp_path, checkpoint=more, training={"steps": 3}))
    assert checkpoints_of(tmp_path) == [f"step-0000000{number}" for number in (1, 2, 3)]
