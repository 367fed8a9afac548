"""Tasks of preferences: losses as their papers have them, whole runs, data, what is kept."""

import copy
import itertools
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_training import (
    ROOT,
    TEXTS,
    Record,
    assert_equal_runs,
    metrics_of,
    train,
    train_until,
    write_lines,
    write_settings,
    write_tiny,
)
from torch import Tensor

from l2l.distributed import World
from l2l.train import Training, TrainingError
from l2l.train.data import (
    PLAIN_TEMPLATE,
    Batches,
    DataError,
    Examples,
    Form,
    make_examples,
    padded_length,
    read_records,
)
from l2l.train.reference import References
from l2l.train.settings import Settings, SettingsError

PAIRS = ("dpo", "orpo", "simpo", "reward")
REST = ("orpo", "simpo", "reward")
ROWS = 4


@pytest.fixture(scope="session")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights, with dropout, and data for every task."""
    tiny = write_tiny(tmp_path_factory.mktemp("judged"))
    drawn = random.Random(1)
    names = [drawn.choice(list(TEXTS)) for _ in range(26)]
    pairs = []
    for number, name in enumerate(names):
        words = TEXTS[name].split()
        shuffled = drawn.sample(words, len(words))
        worse = " ".join(shuffled[: drawn.randint(2, len(words))])
        pairs.append({"prompt": f"say {name} {number}:", "chosen": f" {TEXTS[name]}"})
        pairs[-1]["rejected"] = f" {worse}"
    for task in PAIRS:
        write_lines(tiny / f"{task}.jsonl", pairs)
    single = [
        {"prompt": one["prompt"], "completion": one[role], "label": role == "chosen"}
        for one in pairs
        for role in drawn.choice([("chosen", "rejected"), ("rejected", "chosen"), ("chosen",)])
    ]
    write_lines(tiny / "kto.jsonl", single)
    return tiny


def settings_of(judged: Path, folder: Path, task: str, **more: Any) -> Path:
    training = {"rows": ROWS, "length": 64, **more.pop("training", {})}
    return write_settings(judged, folder, task=task, training=training, **more)


@pytest.fixture(scope="session")
def weighed(judged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with weights, without dropout."""
    folder = tmp_path_factory.mktemp("weighed")
    for path in (judged / "model").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = transformers.AutoConfig.from_pretrained(folder, attention_dropout=0.0)
    config.initializer_range = 0.3  # so that gradients are not tiny
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


# --------------------------------------------------------------------------------------------------
# Losses and rewards from their papers


def answers_of(batch: Mapping[str, Tensor]) -> Tensor:
    return batch["labels"][:, 1:] != -100


def log_probabilities(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Of every token but the first."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    return torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2)


def sums_of(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    return (log_probabilities(model, batch) * answers_of(batch)).sum(1)


def plain_dpo(model: Any, reference: Any, batch: Mapping[str, Tensor], kind: str) -> Tensor:
    with torch.no_grad():
        ratios = -sums_of(reference, batch)
    ratios = ratios + sums_of(model, batch)
    if kind == "ipo":
        ratios = ratios / answers_of(batch).sum(1)
        return ((ratios[0::2] - ratios[1::2] - 1 / (2 * 0.1)) ** 2).mean()
    margins = 0.1 * (ratios[0::2] - ratios[1::2])
    if kind == "hinge":
        return (1 - margins).clamp(min=0).mean()
    return -(0.9 * margins.sigmoid().log() + 0.1 * (1 - margins.sigmoid()).log()).mean()


def plain_simpo(model: Any, reference: Any, batch: Mapping[str, Tensor], kind: str) -> Tensor:
    means = sums_of(model, batch) / answers_of(batch).sum(1)
    return -(2.0 * (means[0::2] - means[1::2]) - 1.0).sigmoid().log().mean()


def plain_orpo(model: Any, reference: Any, batch: Mapping[str, Tensor], kind: str) -> Tensor:
    probabilities = (sums_of(model, batch) / answers_of(batch).sum(1)).exp()
    odds = probabilities / (1 - probabilities)
    there = batch["attention_mask"][0::2, 1:]
    entropy = -(log_probabilities(model, batch)[0::2] * there).sum() / there.sum()
    return entropy - 0.1 * (odds[0::2] / odds[1::2]).log().sigmoid().log().mean()


def plain_kto(model: Any, reference: Any, batch: Mapping[str, Tensor], kind: str) -> Tensor:
    own, unrelated = ({k: v[at::2] for k, v in batch.items()} for at in (0, 1))
    with torch.no_grad():
        moved = (sums_of(model, unrelated) - sums_of(reference, unrelated)).mean().clamp(min=0)
        before = sums_of(reference, own)
    values = 0.1 * (sums_of(model, own) - before - moved)
    good = own["desirable"] > 0
    return torch.where(good, 1.5 * (1 - values.sigmoid()), 1 - (-values).sigmoid()).mean()


def plain_reward(model: Any, reference: Any, batch: Mapping[str, Tensor], kind: str) -> Tensor:
    scores = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    better, worse = scores[0::2, 0], scores[1::2, 0]
    return (0.01 * (better + worse) ** 2 - (better - worse).sigmoid().log()).mean()


PLAIN: dict[str, Any] = {
    "dpo": (plain_dpo, {"label_smoothing": 0.1}),
    "dpo ipo": (plain_dpo, {"loss": "ipo"}),
    "dpo hinge": (plain_dpo, {"loss": "hinge"}),
    "simpo": (plain_simpo, {}),
    "orpo": (plain_orpo, {}),
    "kto": (plain_kto, {"desirable_weight": 1.5}),
    "reward": (plain_reward, {"center_rewards": 0.01}),
}


def plain_losses(path: Path, name: str, model: Any) -> tuple[list[float], float]:
    """Losses of every step of plain PyTorch, and that of what is held out, at the end."""
    prepared = Training(Settings.read(path), display=Record())._prepared
    settings, formula, kind = prepared.settings, PLAIN[name][0], name.partition(" ")[2]
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    found = []
    for step in range(prepared.num_steps):
        factor = settings.schedule.factor(step, total=prepared.num_steps)
        optimizer.param_groups[0]["lr"] = settings.optimizer.learning_rate * factor
        loss = formula(model, reference, prepared.batches.batch(step), kind)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(float(loss.detach()))
    with torch.no_grad():
        parts = [
            (formula(model, reference, batch, kind), len(batch["input_ids"]))
            for batch in prepared.evaluation_batches.in_order()
        ]
    total = sum(number for _, number in parts)
    return found, sum(float(loss) * number for loss, number in parts) / total


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, 1) for name in PLAIN), pytest.param("dpo", 3, marks=pytest.mark.thorough)],
)
def test_every_loss_of_a_run_is_that_of_plain_pytorch(
    name: str, size: int, judged: Path, weighed: Path, tmp_path: Path
) -> None:
    task = name.partition(" ")[0]
    path = settings_of(
        judged,
        tmp_path,
        task,
        model={"folder": str(weighed), "random_init": False},
        training={"microbatch_size": size, "steps": 4},
        optimizer={"weight_decay": 0.0},
        evaluation={"every_steps": 0},
        checkpoint={"every_steps": 0},
        output={"export": False},
        preference=PLAIN[name][1],
    )
    kind = transformers.AutoModelForCausalLM
    if task == "reward":
        kind = transformers.AutoModelForSequenceClassification
        path.write_text(path.read_text().replace(str(weighed), str(with_head(weighed, tmp_path))))
    model = kind.from_pretrained(Settings.read(path).model.folder).eval()
    assert train(path)
    losses = [record["loss"] for record in metrics_of(tmp_path, "step")]
    expected, judged_at_last = plain_losses(path, name, model)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] != pytest.approx(losses[0], rel=1e-3)
    if task == "kto":
        assert max(record["kl"] for record in metrics_of(tmp_path, "step")) > 0.1
    assert metrics_of(tmp_path, "evaluation")[-1]["loss"] == pytest.approx(judged_at_last, rel=1e-5)


def with_head(weighed: Path, folder: Path) -> Path:
    """The model with a head for scores, and a token for padding."""
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(weighed, num_labels=1, pad_token_id=1)
    model.save_pretrained(folder / "scored")
    transformers.AutoTokenizer.from_pretrained(weighed).save_pretrained(folder / "scored")
    return folder / "scored"


# --------------------------------------------------------------------------------------------------
# Data


def examples_of(
    judged: Path, folder: Path, task: str, records: list[dict[str, Any]], **form: Any
) -> tuple[Examples, Any]:
    write_lines(folder / "data.jsonl", records)
    tokenizer = transformers.AutoTokenizer.from_pretrained(judged / "model")
    tokenizer.chat_template = PLAIN_TEMPLATE
    form = Form(task=task, **form)
    return make_examples(
        read_records(folder / "data.jsonl"), tokenizer=tokenizer, form=form
    ), tokenizer


def read_again(examples: Examples, tokenizer: Any) -> list[tuple[str, str]]:
    """Prompt and completion of every row."""
    found = []
    for start, end in itertools.pairwise(examples.offsets.tolist()):
        ids, answers = examples.ids[start:end], examples.answers[start:end]
        found.append((tokenizer.decode(ids[~answers]), tokenizer.decode(ids[answers])))
    return found


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ASKED = "<s>User: say cat\n\nAssistant:"
CHATS = [
    {"prompt": [user("say cat")], "chosen": [assistant("the cat")], "rejected": [assistant("dog")]},
    {"prompt": "say cat", "chosen": [assistant("the cat")], "rejected": [assistant("dog")]},
    {
        "chosen": [user("say cat"), assistant("the cat")],
        "rejected": [user("say cat"), assistant("dog")],
    },
    {
        "prompt": "say cat",
        "chosen": [user("say cat"), assistant("the cat")],
        "rejected": [user("say cat"), assistant("dog")],
    },
]


@pytest.mark.parametrize("record", CHATS)
def test_chats_go_through_the_template(record: Any, judged: Path, tmp_path: Path) -> None:
    found = read_again(*examples_of(judged, tmp_path, "dpo", [record]))
    assert found == [(ASKED, " the cat</s>"), (ASKED, " dog</s>")]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "say cat:", "chosen": " the cat", "rejected": " dog"},
        {"chosen": "say cat: the cat", "rejected": "say cat: dog"},
    ],
)
def test_texts_are_taken_as_they_are(record: Any, judged: Path, tmp_path: Path) -> None:
    examples, tokenizer = examples_of(judged, tmp_path, "orpo", [record, record])
    assert read_again(examples, tokenizer)[2:] == [
        ("say cat:", " the cat</s>"),
        ("say cat:", " dog</s>"),
    ]
    assert examples.num_groups == 2
    assert "2 pairs of 2 records" in str(examples)


def test_single_completions_alternate_with_unrelated_ones(judged: Path, tmp_path: Path) -> None:
    """Each with the completion of the record before; cut off where rows end."""
    records = [
        {"prompt": f"{name}:", "completion": f" {TEXTS[name]}", "label": name != "dog"}
        for name in TEXTS
    ]
    examples, tokenizer = examples_of(judged, tmp_path, "kto", records)
    cat, dog, count = (f" {text}</s>" for text in TEXTS.values())
    assert read_again(examples, tokenizer) == [
        ("cat:", cat),
        ("cat:", count),
        ("dog:", dog),
        ("dog:", cat),
        ("count:", count),
        ("count:", dog),
    ]
    assert examples.numbers["desirable"].tolist() == [1, 1, 0, 0, 1, 1]
    short, _ = examples_of(judged, tmp_path, "kto", records, max_length=8)
    assert int(short.lengths.max()) == 8
    kept, held_out = examples.hold_out(1)
    assert len(kept) == 4
    assert len(held_out) == 2
    assert (held_out.numbers["desirable"].diff() == 0).all()


def test_pairs_stay_together_in_every_batch(judged: Path, tmp_path: Path) -> None:
    drawn = random.Random(0)
    records = [
        {"prompt": f"{n}:", "chosen": " a" * drawn.randint(1, 90), "rejected": " b" * (n % 7 + 1)}
        for n in range(23)
    ]
    examples, tokenizer = examples_of(judged, tmp_path, "dpo", records, max_length=100)
    batches = Batches(examples, pad_id=1, rows=4, length=100, packing=False, seed=3)
    seen = []
    for step in range(batches.num_steps(2)):
        ids = batches.batch(step)["input_ids"]
        assert len(ids) == 8
        texts = [tokenizer.decode(row).split(":") for row in ids]
        prompts = [prompt for prompt, _ in texts]
        assert prompts[0::2] == prompts[1::2]
        assert all("a" in text for _, text in texts[0::2])
        assert all("b" in text for _, text in texts[1::2])
        seen += prompts[0::2]
    assert sorted(seen[:23]) == sorted(f"{n}" for n in range(23))
    for n in range(6):
        batch = batches.batch(n)
        longest = int(batch["attention_mask"].sum(1).max())
        assert batch["input_ids"].shape[1] == min(100, padded_length(longest))


@pytest.mark.parametrize(
    ("task", "record", "words"),
    [
        ("dpo", {"prompt": "a", "chosen": "b"}, "no column for the rejected"),
        ("kto", {"prompt": "a", "completion": "b", "label": "maybe"}, "Expected true or false"),
        ("dpo", {"chosen": [user("a"), assistant("b")], "rejected": "c"}, "one is a text and one"),
        ("dpo", {"prompt": [user("a")], "chosen": "b", "rejected": "c"}, "Expected two texts"),
        ("reward", {"chosen": "a", "rejected": ""}, "left: 1 empty"),
    ],
)
def test_data_that_are_something_else_are_refused(
    task: str, record: Any, words: str, judged: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        examples_of(judged, tmp_path, task, [record])


# --------------------------------------------------------------------------------------------------
# Runs


@pytest.mark.parametrize(
    "task",
    ["dpo", "kto", *(pytest.param(one, marks=pytest.mark.thorough) for one in REST)],
)
def test_a_run_that_was_interrupted_is_the_same(task: str, judged: Path, tmp_path: Path) -> None:
    """With dropout; bit by bit, measures too."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    more = {"training": {"steps": 6}, "evaluation": {"every_steps": 3}}
    train(settings_of(judged, whole, task, **more))
    path = settings_of(judged, parts, task, **more)
    train_until(path, 3)
    train(path)
    assert_equal_runs(parts, whole)
    first, *_, last = metrics_of(whole, "evaluation")
    assert last["loss"] < first["loss"]
    if task != "kto":
        assert last["rewards/margins"] > first["rewards/margins"]


def kept(folder: Path) -> list[Path]:
    return list((folder / "run").glob("reference-*"))


@pytest.mark.parametrize("task", ["dpo", pytest.param("kto", marks=pytest.mark.thorough)])
def test_the_reference_of_an_adapter_is_the_model_without_it(
    task: str, judged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At first both are alike; it is computed once, and the same if it was lost."""
    path = settings_of(judged, tmp_path, task, lora={"rank": 4}, training={"steps": 4})
    train_until(path, 2)
    (first,) = [r for r in metrics_of(tmp_path, "evaluation") if r["step"] == 0]
    assert first["rewards/chosen"] == pytest.approx(0.0, abs=1e-5)
    assert first["rewards/rejected"] == pytest.approx(0.0, abs=1e-5)
    (file,) = kept(tmp_path)
    before = load_file(file)
    file.unlink()
    train_until(path, 3)
    assert kept(tmp_path) == [file]
    assert all(torch.equal(one, before[name]) for name, one in load_file(file).items())
    monkeypatch.setattr(References, "compute", None)
    train(path)
    assert metrics_of(tmp_path, "step")[-1]["step"] == 4


def test_a_reference_of_other_data_is_replaced(judged: Path, tmp_path: Path) -> None:
    train(settings_of(judged, tmp_path, "dpo", training={"steps": 2}))
    (before,) = kept(tmp_path)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    train(settings_of(judged, tmp_path, "dpo", training={"steps": 2}, data={"hold_out": 4}))
    (after,) = kept(tmp_path)
    assert after != before


def test_what_has_no_reference_keeps_none(judged: Path, tmp_path: Path) -> None:
    more = {"reference_free": True}
    train(settings_of(judged, tmp_path, "dpo", training={"steps": 2}, preference=more))
    assert not kept(tmp_path)
    (first,) = [r for r in metrics_of(tmp_path, "evaluation") if r["step"] == 0]
    assert first["rewards/chosen"] == pytest.approx(0.1 * first["logps/chosen"])


@pytest.mark.parametrize(
    ("task", "preference", "words"),
    [
        ("dpo", {"gamma": 1.0}, "gamma is set, but dpo takes beta, loss"),
        ("causal", {"beta": 1.0}, "causal takes nothing of"),
        ("dpo", {"beta": 0}, "greater than 0"),
        ("dpo", {"loss": "hinge", "label_smoothing": 0.1}, 'only for loss = "sigmoid"'),
    ],
)
def test_settings_that_are_not_for_the_task_are_refused(
    task: str, preference: dict[str, Any], words: str, judged: Path, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=words):
        Settings.read(settings_of(judged, tmp_path, task, preference=preference))


def test_a_run_names_what_is_in_force(judged: Path, tmp_path: Path) -> None:
    found = Settings.read(settings_of(judged, tmp_path, "simpo"))
    assert found.preference.beta == 2.0
    assert "gamma = 1.0" in found.to_toml()
    path = settings_of(judged, tmp_path, "simpo", preference={"gamma": 0.5})
    assert "[preference] gamma was 1.0 and is 0.5 from here" in Settings.read(path).differences(
        found.table()
    )


@pytest.mark.thorough
def test_two_ranks_train_a_reward_model_as_one_process_does(
    judged: Path, weighed: Path, tmp_path: Path
) -> None:
    """Whole pairs for each; measures are of all rows."""
    model = {"folder": str(with_head(weighed, tmp_path)), "random_init": False}
    found, torchrun = [], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for name, start in {"alone": [], "together": torchrun}.items():
        (tmp_path / name).mkdir()
        training = {"steps": 4, "rows": 5}
        path = settings_of(judged, tmp_path / name, "reward", model=model, training=training)
        words = [sys.executable, *start, "-m", "l2l", "train", str(path)]
        subprocess.run(words, check=True, capture_output=True, cwd=ROOT)
        found.append(metrics_of(tmp_path / name))
    for one, other in zip(*found, strict=True):
        numbers = {key: value for key, value in one.items() if isinstance(value, float)}
        assert {key: other[key] for key in numbers} == pytest.approx(numbers, rel=1e-4)


def test_losses_of_log_probabilities_are_for_one_process(judged: Path, tmp_path: Path) -> None:
    settings, world = Settings.read(settings_of(judged, tmp_path, "kto")), World()
    world.size = 2
    with pytest.raises(TrainingError, match="kto is for one process"):
        Training(settings, display=Record(), world=world)
