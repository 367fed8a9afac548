"""Whole runs of tiny models: every task, any interruption, what is refused, report and export."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from typing_extensions import override

from l2l import cli
from l2l.checkpoint.checkpoint import CheckpointError, CheckpointFolder
from l2l.checkpoint.manifest import checksum_of
from l2l.cli import train as train_module
from l2l.engine import Engine
from l2l.hugging_face import RandomInit
from l2l.planner import planning
from l2l.train import RunFolder, Training, TrainingError, export_checkpoint, prepared
from l2l.train import run as run_module
from l2l.train import steps as steps_module
from l2l.train.data import Batches
from l2l.train.display import Display, Level, Status
from l2l.train.folder import checkpoints_to_come
from l2l.train.progress import read_metrics
from l2l.train.settings import Settings, SettingsError, to_toml
from l2l.train.steps import Steps

pytestmark = pytest.mark.usefixtures("no_garbage")  # displays show what any engine says

ROOT = Path(__file__).parent.parent
TEXTS = {
    "cat": "the cat sat on the mat and looked at the moon",
    "dog": "a dog ran over the hill to see the sea",
    "count": "we count one two three four five six seven",
}


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights, with dropout, and data for every task."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def write_tiny(folder: Path) -> Path:
    """Write the model and the data into a folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXTS.values(),
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder / "model")
    transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=300,
        max_position_embeddings=128,
        attention_dropout=0.1,
        bos_token_id=0,
        eos_token_id=1,
    ).save_pretrained(folder / "model")
    drawn = random.Random(0)
    names = [drawn.choice(list(TEXTS)) for _ in range(36)]
    (folder / "text.txt").write_text("\n\n".join(TEXTS[name] for name in names))
    write_lines(
        folder / "instruct.jsonl",
        [{"prompt": f"say {name}", "completion": TEXTS[name]} for name in names],
    )
    write_lines(
        folder / "classification.jsonl", [{"text": TEXTS[name], "label": name} for name in names]
    )
    write_lines(
        folder / "regression.jsonl",
        [{"text": TEXTS[name], "label": len(name) / 2} for name in names],
    )
    return folder


class Record(Display):
    """Remembers what is said, and calls back after every step that is shown."""

    def __init__(self, then: Callable[[int], None] = lambda _: None) -> None:
        self.said: list[str] = []
        self._then = then

    @override
    def say(self, text: str, level: Level = Level.USUAL) -> None:
        self.said.append(text)

    @override
    def say_passing(self, text: str) -> None:
        pass

    @override
    def show(self, status: Status) -> None:
        self._then(status.step)

    @override
    def close(self) -> None:
        pass

    @property
    def text(self) -> str:
        return "\n".join(self.said)


def write_settings(
    tiny: Path, folder: Path, *, task: str = "causal", **sections: dict[str, Any]
) -> Path:
    """A TOML file for a short run; sections add to what it has."""
    source = "text.txt" if task == "causal" else f"{task}.jsonl"
    table: dict[str, dict[str, Any]] = {
        "model": {"folder": str(tiny / "model"), "random_init": True},
        "data": {"source": str(tiny / source), "task": task, "hold_out": 6},
        "training": {"steps": 8, "rows": 4, "length": 32, "precision": "float32"},
        "optimizer": {"learning_rate": 1e-2},
        "evaluation": {"every_steps": 4},
        "checkpoint": {"every_steps": 2},
        "output": {"folder": str(folder / "run"), "tensorboard": False},
    }
    for section, values in sections.items():
        table[section] = {**table.get(section, {}), **values}
    path = folder / "settings.toml"
    path.write_text(
        "\n".join(
            "\n".join([f"[{name}]", *(f"{key} = {to_toml(value)}" for key, value in one.items())])
            for name, one in table.items()
        )
    )
    return path


def train(path: Path, display: Display | None = None, *, resume: bool = True) -> bool:
    return Training(Settings.read(path), display=display or Record(), resume=resume).run()


def train_until(path: Path, step: int) -> Record:
    """Train, and ask to stop while a step is being made, from the second on."""
    display = Record()
    training = Training(Settings.read(path), display=display)
    make = Batches.batch

    def batch(batches: Batches, number: int) -> dict[str, torch.Tensor]:
        if number == step - 1:
            training.stop()
        return make(batches, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "batch", batch)
        assert not training.run()
    assert f"stopped after step {step} of " in display.said[-1]
    return display


OF_TIME = ("seconds", "bound", "share_of_bound", "peak_bytes")


def metrics_of(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Lines of a run's metrics, without what is about time and memory."""
    records = read_metrics(RunFolder(folder / "run").metrics_file)
    return [
        {key: value for key, value in record.items() if key not in OF_TIME}
        for record in records
        if kind in (None, record["kind"])
    ]


def kinds_of(folder: Path) -> list[tuple[str, int]]:
    return [(record["kind"], record["step"]) for record in metrics_of(folder)]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(RunFolder(folder / "run").model / "model.safetensors")


def assert_equal_runs(found: Path, expected: Path) -> None:
    assert metrics_of(found) == metrics_of(expected)
    weights = weights_of(expected)
    assert weights_of(found).keys() == weights.keys()
    for name, weight in weights_of(found).items():
        assert torch.equal(weight, weights[name]), name


# --------------------------------------------------------------------------------------------------
# Tasks


def predictions(model: Any, folder: Path) -> tuple[Any, torch.Tensor]:
    """Outputs of a plain model for what a run has held out, and the labels."""
    training = Training(Settings.read(folder / "run" / "run.toml"), display=Record())
    assert training._prepared.held_out is not None
    batches = Batches(training._prepared.held_out, pad_id=1, rows=6, length=64, packing=False)
    (batch,) = batches.in_order()
    with torch.no_grad():
        return model.eval()(**batch), batch["labels"]


@pytest.mark.parametrize("task", ["causal", "instruct"])
def test_a_language_model_learns_and_is_read_by_others(
    task: str, tiny: Path, tmp_path: Path
) -> None:
    display = Record()
    assert train(write_settings(tiny, tmp_path, task=task), display)
    evaluations = metrics_of(tmp_path, "evaluation")
    assert [record["step"] for record in evaluations] == [0, 4, 8]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"] - 0.5
    assert evaluations[0]["perplexity"] == pytest.approx(300, rel=0.1)
    assert [record["step"] for record in metrics_of(tmp_path, "step")] == list(range(1, 9))
    assert "30 examples" in display.text
    assert "packed" in display.text
    assert "choices:" in display.text  # the plan

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    outputs, _ = predictions(model, tmp_path)
    assert outputs.loss.item() == pytest.approx(evaluations[-1]["loss"], abs=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert (tokenizer.chat_template is not None) == (task == "instruct")


def test_a_classifier_learns_and_keeps_the_names_of_its_classes(tiny: Path, tmp_path: Path) -> None:
    assert train(write_settings(tiny, tmp_path, task="classification", training={"steps": 12}))
    first, *_, last = metrics_of(tmp_path, "evaluation")
    assert set(last) == {"kind", "step", "loss", "accuracy", "f1", "matthews"}
    assert last["loss"] < first["loss"] - 0.1
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "run" / "model"
    )
    outputs, labels = predictions(model, tmp_path)
    assert last["loss"] == pytest.approx(outputs.loss.item(), abs=1e-5)
    accuracy = (outputs.logits.argmax(-1) == labels).float().mean().item()
    assert last["accuracy"] == pytest.approx(accuracy)
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "cat", "1": "count", "2": "dog"}
    assert config["pad_token_id"] == 1


def test_classes_are_numbered_as_the_model_numbers_them(tiny: Path, tmp_path: Path) -> None:
    """A head that was trained before knows them by its own numbers, not by the alphabet's."""
    (tmp_path / "model").mkdir()
    for path in (tiny / "model").iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    lines = (tiny / "classification.jsonl").read_text().splitlines()
    names = sorted({json.loads(line)["label"] for line in lines})
    config["label2id"] = {name: number for number, name in enumerate(reversed(names))}
    config["id2label"] = dict(enumerate(reversed(names)))
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    model = {"folder": str(tmp_path / "model")}
    train(write_settings(tiny, tmp_path, task="classification", model=model))
    found = json.loads((tmp_path / "run" / "model" / "config.json").read_text())["label2id"]
    assert found == config["label2id"]


def test_a_run_without_checkpoints_is_kept_too(tiny: Path, tmp_path: Path) -> None:
    settings = write_settings(tiny, tmp_path, training={"steps": 2})
    train(settings)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    train(settings, resume=False)
    assert (tmp_path / "run-1" / "model" / "model.safetensors").exists()


def test_data_may_be_named_more_than_once(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--model", str(tiny / "model"), "--random-init", "--dry-run"]
    one = ["--data", str(tiny / "text.txt")]
    words += ["--steps", "2", "--rows", "2", "--length", "16", "--output", str(tmp_path / "run")]
    said = []
    for more in (one, one + one):
        assert cli.main([*words, *more]) == 0
        found = re.search(r"([\d,]+) examples", capsys.readouterr().out)
        said.append(int(found[1].replace(",", "")))
    assert said[1] == 2 * said[0]


def test_a_regression_is_judged_by_correlation(tiny: Path, tmp_path: Path) -> None:
    settings = write_settings(tiny, tmp_path, task="regression", training={"steps": 12})
    assert train(settings)
    first, *_, last = metrics_of(tmp_path, "evaluation")
    assert last["loss"] < first["loss"] / 2
    assert set(last) == {"kind", "step", "loss", "pearson", "spearman"}


def test_the_learning_rate_follows_the_schedule(tiny: Path, tmp_path: Path) -> None:
    more = {"shape": "linear", "warm_up_steps": 2}
    train(write_settings(tiny, tmp_path, schedule=more, training={"steps": 4}))
    rates = [record["learning_rate"] for record in metrics_of(tmp_path, "step")]
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.005])


def test_parameters_may_have_a_learning_rate_of_their_own(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a rate of 0 stay; the others learn as if there were nothing else."""
    groups = [
        {"parameters": "layers", "learning_rate": 0.0, "weight_decay": 0.0},
        {"parameters": r"^lm_head\.", "learning_rate": 0.02, "weight_decay": 0.5},
    ]
    made, make = [], run_module.make_engine
    monkeypatch.setattr(run_module, "make_engine", lambda *a: made.append(make(*a)) or made[-1])
    optimizer = {"learning_rate": 1e-2, "groups": groups}
    schedule = {"shape": "linear", "warm_up_steps": 2}
    path = write_settings(
        tiny, tmp_path, optimizer=optimizer, schedule=schedule, training={"steps": 4}
    )
    begin = {name: one.clone() for name, one in weights_at_first(tiny).items()}
    train_until(path, 2)
    assert train(path)
    rates = {(one["lr"], one["weight_decay"]) for one in made[-1].optimizer.param_groups}
    assert rates == {(0.0, 0.0), (0.01, 0.5), (0.005, 0.01), (0.005, 0.0)}  # half of the top
    for name, weight in weights_of(tmp_path).items():
        assert torch.equal(weight, begin[name]) == (".layers." in name), name
    settings = Settings.read(tmp_path / "run" / "run.toml")
    assert [one.parameters for one in settings.optimizer.groups] == ["layers", r"^lm_head\."]
    optimizer["groups"] = [{"parameters": "moon", "learning_rate": 1.0}]
    with pytest.raises(TrainingError, match="'moon' is in the name of no parameter"):
        train(write_settings(tiny, tmp_path, optimizer=optimizer), resume=False)
    optimizer["groups"] = [{"parameters": "(", "learning_rate": 1.0}]
    with pytest.raises(SettingsError, match="no regular expression"):
        train(write_settings(tiny, tmp_path, optimizer=optimizer), resume=False)


def weights_at_first(tiny: Path) -> dict[str, torch.Tensor]:
    """What random_init gives."""
    model = prepared.empty_model(tiny / "model")
    with Engine(model, weights=RandomInit(0), precision="float32", seed=0) as engine:
        return engine.state_dict()


def test_rates_of_muon_and_of_the_rest_follow_the_schedule(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = []
    step = Engine.step

    def noted(engine: Engine, batch: Any) -> Any:
        rates.append({g["use_muon"]: g["lr"] for g in engine.optimizer.param_groups})
        return step(engine, batch)

    monkeypatch.setattr(Engine, "step", noted)
    optimizer = {"name": "muon", "others_learning_rate": 1e-3}
    schedule = {"shape": "linear", "warm_up_steps": 2}
    settings = {"schedule": schedule, "optimizer": optimizer, "training": {"steps": 4}}
    path = write_settings(tiny, tmp_path, **settings)
    train_until(path, 2)
    assert train(path)
    assert [one[True] for one in rates] == pytest.approx([0.005, 0.01, 0.01, 0.005])
    assert [one[False] for one in rates] == pytest.approx([0.0005, 0.001, 0.001, 0.0005])
    whole = tmp_path / "whole"
    whole.mkdir()
    assert train(write_settings(tiny, whole, **settings))
    assert_equal_runs(tmp_path, whole)


def test_means_are_evaluated_and_exported(tiny: Path, tmp_path: Path) -> None:
    optimizer = {"name": "schedule-free", "warmup_steps": 3}
    path = write_settings(tiny, tmp_path, optimizer=optimizer)
    train_until(path, 5)
    assert train(path)
    whole = tmp_path / "whole"
    whole.mkdir()
    assert train(write_settings(tiny, whole, optimizer=optimizer))
    assert_equal_runs(tmp_path, whole)
    run = RunFolder(tmp_path / "run")
    export_checkpoint(run.root, tmp_path / "exported")
    found = load_file(tmp_path / "exported" / "model.safetensors")
    expected = weights_of(tmp_path)
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    saved = load_file(CheckpointFolder(run.checkpoints).latest() / "L0.safetensors")
    for name, one in saved.items():
        if f"{name}|average" in saved:
            assert torch.equal(expected[name].flatten(), saved[f"{name}|average"])
            assert not torch.equal(expected[name], one)
    losses = [one["loss"] for one in metrics_of(tmp_path, "evaluation")]
    assert losses[-1] < losses[0]


def test_an_evaluation_may_be_of_some_batches_only(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    monkeypatch.setattr(
        steps_module,
        "evaluate",
        lambda _, batches, **__: sizes.append([len(b["labels"]) for b in batches]) or {"loss": 1.0},
    )
    data, more = {"packing": False}, {"rows": 2, "most_batches": 2, "every_steps": 0}
    train(write_settings(tiny, tmp_path, data=data, evaluation=more, training={"steps": 2}))
    assert sizes == [[2, 2], [2, 2]]  # before the first step and after the last, of 6 rows


def test_epochs_are_as_many_steps_as_they_need(tiny: Path, tmp_path: Path) -> None:
    settings = write_settings(tiny, tmp_path, data={"packing": False})
    settings.write_text(settings.read_text().replace("steps = 8", "epochs = 0.5"))
    train(settings)
    assert len(metrics_of(tmp_path, "step")) == 4  # 30 rows, 4 a step
    assert json.loads(to_toml(Settings.read(tmp_path / "run" / "run.toml").training.epochs)) == 0.5


def test_what_convolves_over_tokens_is_not_packed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short convolution reaches into the next example, by too little for a loss to show it."""
    make_model = prepared.make_model

    def with_convolution(*args: Any, **settings: Any) -> nn.Module:
        model = make_model(*args, **settings)
        model.short = nn.Conv1d(1, 1, 3, device="meta")
        model.short.requires_grad_(False)
        return model

    monkeypatch.setattr(prepared, "make_model", with_convolution)
    monkeypatch.setattr(run_module, "packing_holds", lambda *_: True)
    display = Record()
    train(write_settings(tiny, tmp_path, training={"steps": 1}), display)
    assert "examples of one row would attend to each other" in display.text


def test_rows_are_padded_where_packing_does_not_hold(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "packing_holds", lambda *_: False)
    display = Record()
    settings = write_settings(tiny, tmp_path)
    train(settings, display)
    assert "rows are padded instead" in display.text
    assert Settings.read(tmp_path / "run" / "run.toml").data.packing is False
    asked = write_settings(tiny, tmp_path, data={"packing": True})
    with pytest.raises(TrainingError, match="Set packing = false"):
        train(asked, resume=False)


def test_a_tokenizer_of_another_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    settings = write_settings(tiny, tmp_path, model={"folder": str(tmp_path / "model")})
    (tmp_path / "model").mkdir()
    for path in (tiny / "model").iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 300', '"vocab_size": 100'))
    with pytest.raises(TrainingError, match="the model has 100 embeddings"):
        train(settings)


# --------------------------------------------------------------------------------------------------
# Runs that come to nothing

DIVERGING = {"name": "sgd", "learning_rate": 1e30}


def diverging(tiny: Path, folder: Path, **training: Any) -> Path:
    """A run whose learning rate makes its weights useless."""
    return write_settings(
        tiny,
        folder,
        training={"steps": 30, "clip_norm": 0.0, **training},
        optimizer=DIVERGING,
        schedule={"shape": "constant", "warm_up_steps": 0},
    )


@pytest.fixture
def gentle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first five steps learn a little; the sixth makes all weights useless."""
    rate = Steps._learning_rate
    monkeypatch.setattr(
        Steps, "_learning_rate", lambda run, step: rate(run, step) if step >= 5 else 1e-2
    )


@pytest.mark.usefixtures("gentle")
def test_a_run_that_diverges_is_given_up(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = diverging(tiny, tmp_path)
    assert cli.main(["train", str(settings)]) == 1
    captured = capsys.readouterr()
    assert "10 steps in a row, 7 to 16 of 30, were skipped" in captured.err
    checkpoints = tmp_path / "run" / "checkpoints"
    good = checkpoints / "step-00000004"  # the sixth step is what has made the weights useless
    assert f"The last good checkpoint is {good}" in captured.err
    assert "delete step-00000014 and step-00000016 beside it" in captured.err
    assert "trained model" not in captured.out
    assert not (tmp_path / "run" / "model").exists()
    assert [path.name for path in CheckpointFolder(checkpoints).all()] == [
        "step-00000004",
        "step-00000014",
        "step-00000016",
    ]
    assert metrics_of(tmp_path)[-1]["kind"] == "diverged"
    assert cli.main(["report", str(tmp_path / "run"), "--json"]) == 0
    shown = capsys.readouterr()
    found, lines = json.loads(shown.out), shown.err.splitlines()
    assert (found["skipped"], found["given_up"]["since"]) == (10, 7)
    assert "given up: no step could be made from 7 on" in lines

    assert cli.main(["train", str(settings)]) == 1, "and again, as it stands"
    assert "7 to 16 of 30" in capsys.readouterr().err
    assert good.is_dir()


@pytest.mark.usefixtures("gentle")
@pytest.mark.parametrize("keep", [1, 2])
def test_a_run_goes_on_from_its_last_good_checkpoint(
    keep: int, tiny: Path, tmp_path: Path, monkeypatch
) -> None:
    """However few are kept."""
    settings = diverging(tiny, tmp_path, steps=14)
    settings.write_text(
        settings.read_text().replace("[checkpoint]", f"[checkpoint]\nkeep = {keep}")
    )
    with pytest.raises(TrainingError, match="in a row, 7 to 14 of 14"):
        train(settings)
    found = CheckpointFolder(tmp_path / "run" / "checkpoints").all()
    assert found[0].name == "step-00000004"
    assert len(found) == keep + 1
    for path in found[1:]:
        shutil.rmtree(path)
    monkeypatch.setattr(Steps, "_learning_rate", lambda *_: 1e-2)
    display = Record()
    assert train(settings, display)
    assert "skipped" not in display.text
    assert f"going on from {found[0]}" in display.text
    assert [step for kind, step in kinds_of(tmp_path) if kind == "step"] == list(range(1, 15))
    assert len(CheckpointFolder(tmp_path / "run" / "checkpoints").all()) == keep


@pytest.mark.usefixtures("gentle")
def test_bad_steps_may_be_allowed(tiny: Path, tmp_path: Path) -> None:
    display = Record()
    assert train(diverging(tiny, tmp_path, steps=10, max_bad_steps=0), display)
    assert "4 steps were skipped" in display.text


@pytest.mark.parametrize(
    ("keep", "present", "saves", "more", "at_last"),
    [
        (2, 0, 4, 3, 2),  # two are kept while a third is written
        (2, 2, 3, 1, 0),  # both are there
        (2, 1, 1, 1, 1),
        (9, 0, 4, 4, 4),  # no more than are saved
        (1, 0, 1, 1, 1),
        (3, 4, 2, 1, -1),  # fewer are kept than before
        (2, 1, 0, 0, 0),
    ],
)
def test_what_a_run_will_write_is_counted(
    keep: int, present: int, saves: int, more: int, at_last: int
) -> None:
    assert checkpoints_to_come(present, saves, keep) == (more, at_last)


@pytest.mark.parametrize("share", [0.9, 1.0])
def test_a_disk_that_is_too_small_is_known_before_the_first_step(
    share: float, tiny: Path, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is said to be needed is what the run takes at most: 3 checkpoints, as measured here."""
    settings = write_settings(tiny, tmp_path, training={"steps": 6})
    sizes = []

    def usage(path: Path) -> Any:
        sizes.append(path)
        return shutil._ntuple_diskusage(10**9, 10**9 - free, free)

    monkeypatch.setattr("l2l.train.folder.shutil.disk_usage", usage)
    free = int(share * 3 * (14_800 * 12 + 32))  # weights, two moments in float32, and a buffer
    status = cli.main(["train", str(settings)])
    shown = capsys.readouterr()
    assert sizes
    if share == 1.0:
        assert status == 0
        checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints").all()
        written = [sum(p.stat().st_size for p in path.iterdir()) for path in checkpoints]
        assert written == pytest.approx([14_800 * 12] * 2, rel=0.15)  # and headers
        return
    assert status == 1
    assert "the disk is too small for this run" in shown.err
    assert "A checkpoint takes 173.47 KiB" in shown.err
    assert "--output" in shown.err
    assert "step 1" not in shown.out
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------
# Interruptions


@pytest.fixture(scope="module")
def uninterrupted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert train(write_settings(tiny, folder))
    return folder


@pytest.mark.parametrize("stops", [(3,), (4,), (5, 6, 7)], ids=str)
def test_a_run_that_is_stopped_and_goes_on_equals_the_uninterrupted_one(
    stops: tuple[int, ...], tiny: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    settings = write_settings(tiny, tmp_path)
    for step in stops:
        display = train_until(settings, step)
        assert f"Go on with: l2l train {tmp_path / 'run'}" in display.text
    assert train(tmp_path / "run" / "run.toml")
    assert_equal_runs(tmp_path, uninterrupted)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_layers_that_are_left_out_are_the_same_when_a_run_goes_on(
    decay: float, tiny: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("straight", "stopped", "whole")]
    for folder in folders:
        folder.mkdir()
    survival = {"survival": 0.4, "survival_decay": decay}
    assert train(write_settings(tiny, folders[0], training=survival))
    settings = write_settings(tiny, folders[1], training=survival)
    train_until(settings, 5)
    assert train(settings)
    assert_equal_runs(folders[1], folders[0])
    assert train(write_settings(tiny, folders[2]))
    losses = [[one["loss"] for one in metrics_of(folder, "step")] for folder in folders]
    assert losses[0] == losses[1] != losses[2]


def test_a_run_that_dies_goes_on_from_its_last_checkpoint(
    tiny: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    settings = write_settings(tiny, tmp_path)

    def die(step: int) -> None:
        if step == 5:
            raise RuntimeError("the plug was pulled")

    with pytest.raises(RuntimeError, match="plug"):
        train(settings, Record(die))
    latest = CheckpointFolder(tmp_path / "run" / "checkpoints").latest()
    assert latest is not None
    assert latest.name in ("step-00000004", "step-00000006")
    display = Record()
    assert train(settings, display)
    assert f"going on from {latest}" in display.said
    assert_equal_runs(tmp_path, uninterrupted)


def test_padded_rows_of_many_lengths_go_on_exactly(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a budget, so that there is a plan: it is made once, for the longest row of all."""
    plans = []
    find = planning.find_plan
    monkeypatch.setattr(planning, "find_plan", lambda *a, **k: plans.append(a) or find(*a, **k))
    folders = [tmp_path / "whole", tmp_path / "parts"]
    long = {"prompt": "say all", "completion": " ".join(TEXTS.values()) * 3}
    short = [json.loads(line) for line in (tiny / "instruct.jsonl").read_text().splitlines()[:9]]
    write_lines(tmp_path / "mixed.jsonl", [*short, long])
    paths = []
    for folder in folders:
        folder.mkdir()
        data = {"source": str(tmp_path / "mixed.jsonl"), "packing": False, "hold_out": 2}
        path = write_settings(
            tiny,
            folder,
            task="instruct",
            data=data,
            training={"length": 128, "rows": 2, "steps": 5},
            memory={"device_memory": "256MiB"},
        )
        paths.append(path)
    assert train(paths[0])
    assert len(plans) == 1
    train_until(paths[1], 2)
    assert train(paths[1])
    assert len(plans) == 3
    lengths = {record["tokens"] for record in metrics_of(folders[0], "step")}
    assert len(lengths) > 1
    assert_equal_runs(folders[1], folders[0])


def test_only_the_last_checkpoints_are_kept(uninterrupted: Path) -> None:
    names = [path.name for path in CheckpointFolder(uninterrupted / "run" / "checkpoints").all()]
    assert names == ["step-00000006", "step-00000008"]


def test_a_run_at_its_end_says_so_and_more_steps_go_on(tiny: Path, tmp_path: Path) -> None:
    settings = write_settings(tiny, tmp_path, training={"steps": 3})
    assert train(settings)
    display = Record()
    assert train(settings, display)
    assert "is at its end, step 3" in display.text
    assert len(display.said) == 1
    train(write_settings(tiny, tmp_path, training={"steps": 2}), display)
    assert "changed:" not in display.text, "as nothing goes on"
    longer = write_settings(tiny, tmp_path, training={"steps": 5})
    assert train(longer, display)
    assert "changed: [training] steps was 3 and is 5 from here" in display.said
    assert [record["step"] for record in metrics_of(tmp_path, "step")] == [1, 2, 3, 4, 5]
    assert [record["step"] for record in metrics_of(tmp_path, "export")] == [3, 5]


def test_a_model_that_was_not_written_in_time_is_written_then(tiny: Path, tmp_path: Path) -> None:
    for steps in (3, 5):  # the second time the model of the first run is still there
        settings = write_settings(tiny, tmp_path, training={"steps": steps})
        train_until(settings, steps)
        assert ("export", steps) not in kinds_of(tmp_path)
        assert train(settings)
        assert (tmp_path / "run" / "model" / "model.safetensors").exists()
        expected = ("step", "evaluation", "checkpoint", "export")
        assert kinds_of(tmp_path)[-4:] == [(kind, steps) for kind in expected]


def test_what_the_settings_say_now_holds_and_is_said(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_until(write_settings(tiny, tmp_path), 3)
    made = []
    make = run_module.make_engine
    monkeypatch.setattr(run_module, "make_engine", lambda *a: made.append(make(*a)) or made[-1])
    optimizer = {"learning_rate": 1e-3, "weight_decay": 0.25}
    display = Record()
    assert train(write_settings(tiny, tmp_path, optimizer=optimizer), display)
    assert [line for line in display.said if line.startswith("changed: ")] == [
        "changed: [optimizer] learning_rate was 0.01 and is 0.001 from here",
        "changed: [optimizer] weight_decay was 0.01 and is 0.25 from here",
    ]
    decays = {group["weight_decay"] for group in made[0].optimizer.param_groups}
    assert decays == {0.25, 0.0}
    assert metrics_of(tmp_path, "step")[-1]["learning_rate"] < 1e-3


def test_a_run_at_its_end_is_not_taken_for_one_of_other_settings(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(write_settings(tiny, tmp_path, training={"steps": 2}))
    other = write_settings(tiny, tmp_path, training={"steps": 2}, optimizer={"learning_rate": 0.5})
    assert cli.main(["train", str(other)]) == 1
    shown = capsys.readouterr()
    assert "nothing was trained" in shown.err
    assert "[optimizer] learning_rate was 0.01 and is 0.5\n" in shown.err
    assert metrics_of(tmp_path, "step")[-1]["learning_rate"] < 0.01


def test_runs_of_different_settings_get_different_folders(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "--model", str(tiny / "model"), "--data", str(tiny / "text.txt")]
    words += ["--random-init", "--rows", "2", "--length", "16", "--set", "output.tensorboard=false"]
    runs = {}
    for rate, steps in (("1e-3", "1"), ("2e-3", "1"), ("1e-3", "2"), ("2e-3", "1")):
        before = {path: path.read_text() for path in tmp_path.glob("runs/*/metrics.jsonl")}
        assert cli.main([*words, "--learning-rate", rate, "--steps", steps]) == 0
        shown = capsys.readouterr().out
        after = {path: path.read_text() for path in tmp_path.glob("runs/*/metrics.jsonl")}
        changed = [path.parent.name for path in after if before.get(path) != after[path]]
        runs[rate, steps, len(runs)] = (changed, "has a run of other settings" in shown)
    assert list(runs.values()) == [
        (["model-text"], False),
        (["model-text-2"], True),
        (["model-text"], False),  # more steps go on
        ([], False),  # it is at its end, with the same settings
    ]
    assert "is at its end" in shown
    capsys.readouterr()
    assert cli.main([*words, "--learning-rate", "3e-3", "--steps", "1"]) == 0
    shown = capsys.readouterr().out
    assert "runs/model-text-2 has a run of other settings: [optimizer] learning_rate was" in shown
    assert "output: runs/model-text-3; " in shown


def test_other_data_and_another_model_are_refused(tiny: Path, tmp_path: Path) -> None:
    train_until(write_settings(tiny, tmp_path), 2)
    other = tmp_path / "other.txt"
    other.write_text((tiny / "text.txt").read_text() + "\n\nand one more")
    with pytest.raises(TrainingError, match="started with the data") as refused:
        train(write_settings(tiny, tmp_path, data={"source": str(other)}))
    assert str(tiny / "text.txt") in str(refused.value)
    assert str(other) in str(refused.value)
    model = tmp_path / "model"
    model.mkdir()
    for path in (tiny / "model").iterdir():
        (model / path.name).write_bytes(path.read_bytes())
    moved = write_settings(tiny, tmp_path, model={"folder": str(model)}, training={"steps": 2})
    assert train(moved)  # the same model in another place is the same model
    config = model / "config.json"
    config.write_text(config.read_text().replace('_layers": 2', '_layers": 3'))
    with pytest.raises(TrainingError, match="started with the model"):
        train(moved)


def test_beginning_anew_keeps_the_run_that_was_there(tiny: Path, tmp_path: Path) -> None:
    settings = write_settings(tiny, tmp_path)
    train_until(settings, 2)
    display = Record()
    assert train(settings, display, resume=False)
    assert f"the run that was there is now {tmp_path / 'run-1'}" in display.said
    assert (tmp_path / "run-1" / "checkpoints" / "latest").exists()
    assert metrics_of(tmp_path, "step")[0]["step"] == 1


def test_two_processes_do_not_train_in_one_folder(tiny: Path, tmp_path: Path) -> None:
    settings = write_settings(tiny, tmp_path)
    with (
        RunFolder(tmp_path / "run").held(),
        pytest.raises(TrainingError, match="another process trains in"),
    ):
        train(settings)


def test_a_damaged_checkpoint_is_named_and_so_is_the_one_before(
    tiny: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    settings = write_settings(tiny, tmp_path)
    train_until(settings, 6)
    first, last = CheckpointFolder(tmp_path / "run" / "checkpoints").all()
    for name, damage in (("L1.safetensors", b"\x00"), ("manifest.json", b"{")):
        whole = (last / name).read_bytes()
        (last / name).write_bytes(whole[: len(whole) // 2] + damage)
        with pytest.raises(CheckpointError, match=name) as refused:
            train(settings)
        assert f"To go on from {first} instead, delete {last}" in str(refused.value)
        (last / name).write_bytes(whole)
    body = json.loads(whole)
    del body["checksum"]
    body["extra"]["settings"] = 3
    (last / name).write_text(json.dumps({**body, "checksum": checksum_of(body)}))
    with pytest.raises(CheckpointError, match=r"manifest\.json .*not what l2l train writes"):
        train(settings)
    last.rename(tmp_path / "deleted")
    assert train(settings)
    assert_equal_runs(tmp_path, uninterrupted)


# --------------------------------------------------------------------------------------------------
# The command line


def test_a_checkpoint_of_another_optimizer_is_refused_without_bad_advice(
    tiny: Path, tmp_path: Path
) -> None:
    """The checkpoints before it are of that optimizer too: there is nothing to delete."""
    train_until(write_settings(tiny, tmp_path), 4)
    path = write_settings(tiny, tmp_path, optimizer={"name": "sgd"})
    with pytest.raises(CheckpointError, match="with the optimizer AdamW") as refused:
        train(path)
    assert "delete" not in str(refused.value)


def test_the_folder_of_the_model_is_not_that_of_a_run(tiny: Path, tmp_path: Path) -> None:
    path = write_settings(tiny, tmp_path, output={"folder": str(tiny / "text" / ".." / "model")})
    with pytest.raises(SettingsError, match="is, or holds, the folder of the model"):
        train(path)


def test_what_cannot_begin_leaves_no_folder(tiny: Path, tmp_path: Path) -> None:
    path = write_settings(tiny, tmp_path, memory={"host_memory": "16KiB"})
    assert cli.main(["train", str(path)]) == 1
    assert not (tmp_path / "run").exists()


def test_a_dry_run_shows_all_and_writes_nothing(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = write_settings(tiny, tmp_path, task="instruct")
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["train", str(settings), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    assert "30 examples" in shown
    assert "Assistant: " in shown
    assert "of which is learnt" in shown
    assert "host:" in shown
    assert "8 steps" in shown
    settings = write_settings(tiny, tmp_path, training={"device": "cpu"})
    assert cli.main(["train", str(settings), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "on the CPU nothing is planned" in shown
    assert "H200" not in shown


def test_flags_alone_train_and_plain_lines_show_it(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "--model", str(tiny / "model"), "--data", str(tiny / "text.txt")]
    words += ["--random-init", "--steps", "10", "--rows", "2", "--length", "16"]
    words += ["--precision", "float32", "--output", "run"]
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(
        re.match(r"step 10/10  epoch 0\.50  loss [\d.]+  learning rate ", line) for line in lines
    )
    assert any(line.startswith("saved step-00000010: ") for line in lines)
    assert lines[-1] == f"the trained model is in {tmp_path / 'run' / 'model'}"
    assert next((tmp_path / "run" / "events").iterdir()).stat().st_size
    settings = Settings.read(tmp_path / "run" / "run.toml")
    assert (settings.training.rows, settings.training.steps) == (2, 10)


def test_five_lines_matter_and_the_rest_comes_if_asked(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = str(write_settings(tiny, tmp_path))
    more = ["--no-resume", "--set", "evaluation.every_steps=0"]
    shown = {}
    for level in ("--quiet", "--set=output.every_steps=10", "--verbose"):
        assert cli.main(["train", settings, *more, level]) == 0
        shown[level] = capsys.readouterr().out
    quiet, usual, verbose = (text.splitlines() for text in shown.values())
    assert quiet == []
    names = [line.partition(":")[0] for line in usual if re.match(r"\w+:\s", line)]
    assert names == ["model", "data", "output", "plan", "time"]
    assert "LlamaForCausalLM, 14,800 parameters, " in usual[1]
    assert "text.txt, causal: 30 examples, 536 tokens, 6 to evaluate on; 4 rows a step" in usual[2]
    assert "8 steps, 1.33 epochs" in usual[2]
    assert usual[3].startswith(f"output: {tmp_path / 'run'}; ")
    assert any("all layers are streamed" in line and "plan:" in line for line in usual)
    assert any(
        re.match(r"time:   about 0 s to the end, .* [5-7] more steps", line) for line in usual
    )
    assert not any("choices:" in line or "exp_avg" in line for line in usual)
    assert {"choices:"} <= set(verbose)
    assert any("columns text" in line for line in verbose)
    both = ["train", settings, "--quiet", "--verbose"]
    with pytest.raises(SystemExit):
        cli.main(both)
    # a run at its end trains nothing, and says so even then
    assert cli.main(["train", settings, "--quiet"]) == 0
    assert "is at its end, step 8" in capsys.readouterr().out


def test_what_goes_wrong_is_said_and_where_only_if_asked(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    settings = write_settings(tiny, tmp_path)

    def fail(*_: object) -> None:
        raise AssertionError("something broke")

    monkeypatch.setattr(run_module, "make_engine", fail)
    assert cli.main(["train", str(settings)]) == 1
    shown = capsys.readouterr().err
    assert "AssertionError: something broke\nWith --debug" in shown
    assert "Traceback" not in shown
    assert cli.main(["train", str(settings), "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_budget_that_is_too_small_is_said(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = write_settings(tiny, tmp_path)
    assert cli.main(["train", str(settings), "--device-memory", "1MiB"]) == 1
    assert "Give device_memory=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["ctrl-c", "sigterm"]
)
def test_a_signal_finishes_the_step_and_saves(
    number: int, status: int, tiny: Path, tmp_path: Path, monkeypatch
) -> None:
    settings = write_settings(tiny, tmp_path)
    display = Record(lambda step: os.kill(os.getpid(), number) if step == 3 else None)
    monkeypatch.setattr("l2l.cli.train.open_display", lambda *_, **__: display)
    before = signal.getsignal(number)
    assert cli.main(["train", str(settings)]) == status
    assert signal.getsignal(number) is before
    assert display.said[-1].endswith(f"Go on with: l2l train {tmp_path / 'run'}")
    latest = CheckpointFolder(tmp_path / "run" / "checkpoints").latest()
    assert latest is not None
    assert latest.name in display.said[-2]


class Ended(BaseException):
    """Instead of the end of this process."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end)


@pytest.mark.usefixtures("ends")
def test_a_second_signal_ends_at_once(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    def interrupt(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("l2l.cli.train.open_display", lambda *_, **__: Record(interrupt))
    with pytest.raises(Ended, match="130"):
        cli.main(["train", str(write_settings(tiny, tmp_path))])


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
@pytest.mark.parametrize(
    "place", ["Settings.read", "started_by_torchrun", "make_tokenizer", "make_engine", "mkdir"]
)
def test_a_signal_before_anything_is_written_ends_at_once(
    place: str, number: int, status: int, tiny: Path, tmp_path: Path, monkeypatch, capfd
) -> None:
    """Whoever swallows exceptions there does not see one, and the run folder is not left."""
    targets: dict[str, tuple[Any, str]] = {
        "Settings.read": (Settings, "read"),
        "started_by_torchrun": (train_module, "started_by_torchrun"),
        "make_tokenizer": (prepared, "make_tokenizer"),
        "mkdir": (Path, "mkdir"),
    }
    owner, name = targets.get(place, (run_module, place))
    settings = write_settings(tiny, tmp_path)
    original = getattr(owner, name)

    def interrupted(*arguments: Any, **settings: Any) -> Any:
        os.kill(os.getpid(), number)
        return original(*arguments, **settings)

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(Ended, match=str(status)):
        cli.main(["train", str(settings)])
    shown = capfd.readouterr().err
    assert shown == "interrupted before the first step; nothing was written\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_a_signal_while_the_first_files_are_written_stops_before_the_first_step(
    number: int, status: int, tiny: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    write = Training._write_settings

    def interrupted(training: Training) -> None:
        os.kill(os.getpid(), number)
        write(training)

    monkeypatch.setattr(Training, "_write_settings", interrupted)
    settings = write_settings(tiny, tmp_path)
    assert cli.main(["train", str(settings)]) == status
    assert capsys.readouterr().err.endswith("step; there was nothing to save\n")
    assert metrics_of(tmp_path, "step") == []
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        ".lock",
        "metrics.jsonl",
        "run.toml",
    ]


@pytest.mark.parametrize(
    ("module", "number"),
    [
        pytest.param("torch", signal.SIGINT, id="torch-ctrl-c"),
        pytest.param("transformers", signal.SIGTERM, id="transformers-sigterm"),
        *(
            pytest.param(module, number, id=f"{module}-{name}", marks=pytest.mark.thorough)
            for module, number, name in (
                ("torch", signal.SIGTERM, "sigterm"),
                ("transformers", signal.SIGINT, "ctrl-c"),
            )
        ),
    ],
)
def test_a_signal_while_libraries_are_imported_is_one_line(
    module: str, number: signal.Signals, tiny: Path, tmp_path: Path
) -> None:
    """It is sent from within the import, which swallows every exception, as some do."""
    program = f"""
import os, sys

class Signal:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), {int(number)})
            except BaseException:
                pass

sys.meta_path.insert(0, Signal())
from l2l.cli import command
sys.argv = ["l2l", "train", {str(write_settings(tiny, tmp_path))!r}]
command()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 128 + number
    assert done.stderr.endswith("nothing was written\n")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_process_that_is_terminated_saves(tiny: Path, tmp_path: Path) -> None:
    settings = write_settings(
        tiny,
        tmp_path,
        training={"steps": 100_000},
        evaluation={"every_steps": 0},
        checkpoint={"every_steps": 0},
        output={"every_steps": 1},
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "l2l", "train", str(settings)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert any(line.startswith("step ") for line in process.stdout)  # reads up to the first
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert f"Go on with: l2l train {tmp_path / 'run'}" in out
    latest = CheckpointFolder(tmp_path / "run" / "checkpoints").latest()
    assert latest is not None
    assert metrics_of(tmp_path, "step")[-1]["step"] == int(latest.name.removeprefix("step-"))


def test_a_report_sums_a_run_up(uninterrupted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(uninterrupted / "run")]) == 0
    shown = capsys.readouterr().out
    assert "{" not in shown
    assert cli.main(["report", str(uninterrupted / "run"), "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == shown
    found = json.loads(said.out)
    steps = metrics_of(uninterrupted, "step")
    evaluations = metrics_of(uninterrupted, "evaluation")
    assert (found["steps"], found["num_steps"]) == (8, 8)
    assert (found["first_loss"], found["last_loss"]) == (steps[0]["loss"], steps[-1]["loss"])
    best = min(evaluations, key=lambda record: record["loss"])
    assert found["best_evaluation"]["step"] == best["step"]
    assert [one["step"] for one in found["checkpoints"]] == [6, 8]
    assert found["tokens"] == sum(record["tokens"] for record in steps)
    assert 'id="training"' in Path(found["plot"]).read_text()
    for word in ("steps: 8 of 8", "best evaluation: loss", "tokens/s", "step-00000008", "adamw"):
        assert word in shown


def test_a_report_without_matplotlib_says_what_to_install(
    uninterrupted: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["report", str(uninterrupted / "run"), "--json"]) == 0
    said = capsys.readouterr()
    found, last = json.loads(said.out), said.err.splitlines()[-1]
    assert (found["steps"], found["plot"]) == (8, None)
    assert "losses: plots need matplotlib" in last
    assert "pip install 'l2l[plot]'" in last


def test_a_report_of_what_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "run.toml" in capsys.readouterr().err


LORA = {"rank": 4, "dropout": 0.1, "targets": ["q_proj", "down_proj"], "modules_to_save": ["norm"]}


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has trained an adapter."""
    pytest.importorskip("peft")
    folder, display = tmp_path_factory.mktemp("adapter"), Record()
    assert train(write_settings(tiny, folder, lora=LORA), display)
    assert "adapter: 720 of them are trained" in display.text
    return folder


def based(tiny: Path, tmp_path: Path, **sections: dict[str, Any]) -> tuple[Path, Path]:
    """A model folder with weights in bfloat16, and settings of a run that begins with these."""
    base = tmp_path / "base"
    shutil.copytree(tiny / "model", base)
    config = transformers.AutoConfig.from_pretrained(base)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(base)
    given = {"folder": str(base), "random_init": False}
    return base, write_settings(tiny, tmp_path, **{"model": given, "lora": LORA, **sections})


def test_an_adapter_is_trained_beside_frozen_weights(tiny: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base, settings = based(tiny, tmp_path, training={"precision": "bfloat16"})
    before = load_file(base / "model.safetensors")
    assert train(settings)
    first, *_, last = metrics_of(tmp_path, "evaluation")
    assert last["loss"] < first["loss"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    found = tmp_path / "run" / "model"
    assert {one.dtype for one in load_file(found / "adapter_model.safetensors").values()} == {
        torch.float32
    }
    model = peft.PeftModel.from_pretrained(plain, found)
    assert model.peft_config["default"].lora_alpha == 8.0, "twice the rank"
    outputs, _ = predictions(model.float(), tmp_path)
    assert outputs.loss.item() == pytest.approx(last["loss"], rel=0.02)
    assert transformers.AutoTokenizer.from_pretrained(found)
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == before.keys()
    changed = {name for name, one in before.items() if not torch.equal(one, merged[name])}
    words = ("q_proj", "down_proj", "norm")  # peft looks at the ends of names
    assert changed == {name for name in before if any(word in name for word in words)}
    assert {one.dtype for one in merged.values()} == {torch.bfloat16}
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    outputs, _ = predictions(whole.float(), tmp_path)
    assert outputs.loss.item() == pytest.approx(last["loss"], rel=0.02)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_an_adapter_is_trained_beside_a_quantized_base(
    kind: str, tiny: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    library: Any = pytest.importorskip("torchao.quantization")
    base, settings = based(tiny, tmp_path, lora={**LORA, "base": kind})
    train_until(settings, 3)
    assert train(tmp_path / "run" / "run.toml")
    last = metrics_of(tmp_path, "evaluation")[-1]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in path:
            weight, scales = module.weight.detach(), module.weight.numel() // 64
            if kind == "nf4" and weight.numel() % 64 == 0:
                quantized = library.NF4Tensor.from_tensor(weight, 64, min(256, scales & -scales))
                module.weight.data = quantized.get_original_weight()
            elif kind == "int8":
                module.weight.data = library.Int8Tensor.from_hp(
                    weight, library.PerRow()
                ).dequantize()
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "run" / "model")
    outputs, _ = predictions(adapted, tmp_path)
    assert outputs.loss.item() == pytest.approx(last["loss"], rel=1e-5)
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    outputs, _ = predictions(whole.float(), tmp_path)
    assert outputs.loss.item() == pytest.approx(last["loss"], rel=0.02)


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_begins_as_its_base(dora: bool, tiny: Path, tmp_path: Path) -> None:
    """DoRA begins with the norms of weights, which are not there when the model is made."""
    pytest.importorskip("peft")
    lora = {**LORA, "dora": dora, "dropout": 0.0}
    base, settings = based(tiny, tmp_path, lora=lora, training={"steps": 1})
    assert train(settings)
    (first, *_) = metrics_of(tmp_path, "evaluation")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    outputs, _ = predictions(model, tmp_path)
    assert outputs.loss.item() == pytest.approx(first["loss"], abs=1e-5)


def test_a_classifier_has_an_adapter_and_a_head(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lora = {"rank": 4}
    assert train(write_settings(tiny, tmp_path, task="classification", lora=lora))
    found = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert "base_model.model.score.weight" in found
    assert sum("lora_A" in name for name in found) == 2 * 7


def test_a_run_of_an_adapter_goes_on_exactly(tiny: Path, tmp_path: Path, adapter: Path) -> None:
    settings = write_settings(tiny, tmp_path, lora=LORA)
    train_until(settings, 3)
    with pytest.raises(TrainingError, match=r"(?s)started with the model .*rank was 4 and is 8"):
        train(write_settings(tiny, tmp_path, lora={**LORA, "rank": 8}))
    assert train(tmp_path / "run" / "run.toml")
    name = "adapter_model.safetensors"
    found, expected = (load_file(one / "run" / "model" / name) for one in (tmp_path, adapter))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], one) for key, one in expected.items())
    assert metrics_of(tmp_path, "step") == metrics_of(adapter, "step")


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (
            {"targets": ["q_proj", "query"]},
            r"targets: LlamaForCausalLM has no module 'query'. Expected 'all-linear', or ends of "
            r"names of modules, such as embed_tokens, q_proj, k_proj",
        ),
        ({"modules_to_save": ["head"]}, r"modules_to_save: .* has no module 'head'.*lm_head"),
        (
            {"targets": ["self_attn"]},
            r"peft .* makes no such .*: Target module LlamaAttention is not",
        ),
    ],
    ids=["target", "saved", "kind"],
)
def test_an_adapter_of_nothing_is_refused(
    lora: dict[str, Any], words: str, tiny: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match=words):
        train(write_settings(tiny, tmp_path, lora=lora))
    assert not (tmp_path / "run").exists()


def test_an_adapter_without_peft_is_refused(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"LoRA needs peft, .*Install it with: pip install peft"):
        train(write_settings(tiny, tmp_path, lora=LORA))


def test_a_checkpoint_of_an_adapter_is_exported_and_merged(adapter: Path, tmp_path: Path) -> None:
    run = str(adapter / "run")
    assert cli.main(["export", run, str(tmp_path / "adapter")]) == 0
    name = "adapter_model.safetensors"
    found = load_file(tmp_path / "adapter" / name)
    expected = load_file(adapter / "run" / "model" / name)
    assert all(torch.equal(found[key], one) for key, one in expected.items())
    assert cli.main(["export", run, str(tmp_path / "merged"), "--merge"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    outputs, _ = predictions(model, adapter)
    assert outputs.loss.item() == pytest.approx(
        metrics_of(adapter, "evaluation")[-1]["loss"], abs=1e-4
    )


def test_a_model_without_adapter_is_not_merged(
    uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, output = str(uninterrupted / "run"), str(tmp_path / "merged")
    assert cli.main(["export", run, output, "--merge"]) == 1
    assert "merge=True, but the model has no adapter" in capsys.readouterr().err


def test_a_checkpoint_is_exported_as_the_run_would(
    uninterrupted: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without an engine: host memory for one tensor is enough."""
    monkeypatch.delattr("l2l.engine.engine.Engine.__init__")
    run, output = uninterrupted / "run", tmp_path / "output"
    assert cli.main(["export", str(run), str(output)]) == 0
    for name, weight in weights_of(uninterrupted).items():
        assert torch.equal(load_file(output / "model.safetensors")[name], weight)
    checkpoint = run / "checkpoints" / "step-00000006"
    assert cli.main(["export", str(checkpoint), str(output), "--dtype", "bfloat16"]) == 0
    older = load_file(output / "model.safetensors")
    assert {weight.dtype for weight in older.values()} == {torch.bfloat16}
    name = "model.norm.weight"
    assert not torch.equal(older[name], weights_of(uninterrupted)[name].bfloat16())
    assert "step-00000006 is now a model folder" in capsys.readouterr().out
    assert cli.main(["export", str(tmp_path), str(output)]) == 1
    assert "is not a run folder" in capsys.readouterr().err
    assert cli.main(["export", str(checkpoint.with_name("step-00000002")), str(output)]) == 1
    assert "step-00000006 or step-00000008" in capsys.readouterr().err, "what there is"
