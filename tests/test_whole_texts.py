"""Tasks of models that see whole texts: hidden tokens, classes of words, several classes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_training import (
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

from l2l.hugging_face import tokenizer_of
from l2l.model import IGNORED
from l2l.train import Settings, Training, TrainingError
from l2l.train.data import Form, make_examples, read_records

NAMES = list(TEXTS)
LABELLED = ("token-classification", "multi-label")
TAGS = {"cat": "ANIMAL", "dog": "ANIMAL", "mat": "THING", "moon": "THING", "hill": "THING"}


@pytest.fixture(scope="module", name="bert")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that sees whole texts, and data for its tasks."""
    folder = write_tiny(tmp_path_factory.mktemp("bert"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(folder / "model")
    transformers.BertConfig(
        vocab_size=320,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    ).save_pretrained(folder / "model")
    rows = [TEXTS[NAMES[number % 3]] for number in range(36)]
    write_lines(
        folder / "token-classification.jsonl",
        [
            {"tokens": row.split(), "ner_tags": [TAGS.get(one, "O") for one in row.split()]}
            for row in rows
        ],
    )
    write_lines(
        folder / "multi-label.jsonl",
        [
            {"text": row, "labels": [one for one in ("the", "dog", "five") if one in row.split()]}
            for row in rows
        ],
    )
    return folder


def settings_of(bert: Path, folder: Path, task: str, **sections: Any) -> Path:
    data = {"source": str(bert / "text.txt")} if task == "masked" else {}
    more = {"data": data, "training": {"steps": 12, "length": 32}}
    return write_settings(bert, folder, task=task, **{**more, **sections})


def plain(folder: Path, kind: Any) -> tuple[Any, Training]:
    """The trained model in plain transformers, and the run, with its data."""
    training = Training(Settings.read(folder / "run" / "run.toml"), display=Record())
    return kind.from_pretrained(folder / "run" / "model").eval(), training


@pytest.mark.parametrize("task", ["masked", "token-classification", "multi-label"])
def test_what_a_run_says_of_its_model_is_what_plain_pytorch_says(
    task: str, bert: Path, tmp_path: Path
) -> None:
    assert train(settings_of(bert, tmp_path, task, training={"microbatch_size": 2, "steps": 12}))
    first, *_, last = metrics_of(tmp_path, "evaluation")
    assert last["loss"] < first["loss"]
    kinds = {
        "masked": transformers.AutoModelForMaskedLM,
        "token-classification": transformers.AutoModelForTokenClassification,
        "multi-label": transformers.AutoModelForSequenceClassification,
    }
    model, training = plain(tmp_path, kinds[task])
    total, count = 0.0, 0
    for batch in training._prepared.evaluation_batches.in_order():
        weight = training._objective.weight(batch)
        with torch.no_grad():
            loss = model(**training._objective.ready(batch, None)).loss.item()
        total, count = total + weight * loss, count + weight
    assert last["loss"] == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize(
    "task",
    ["masked", *(pytest.param(one, marks=pytest.mark.thorough) for one in LABELLED)],
)
def test_such_a_run_goes_on_exactly(task: str, bert: Path, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("whole", "parts")]
    for path in paths:
        path.mkdir()
    whole, parts = (settings_of(bert, path, task, training={"steps": 4}) for path in paths)
    train(whole)
    train_until(parts, 3)
    assert train(parts)
    assert_equal_runs(paths[1], paths[0])


def test_tokens_are_hidden_as_bert_hides_them(bert: Path, tmp_path: Path) -> None:
    more = {"masked_share": 0.3, "source": str(bert / "text.txt")}
    path = settings_of(bert, tmp_path, "masked", data=more)
    training = Training(Settings.read(path), display=Record())
    objective, batches = training._objective, training._prepared.batches
    mask = training._prepared.tokenizer.mask_token_id
    hidden = masked = kept = total = 0
    for step in range(60):
        raw, batch = batches.batch(step), objective.batch(step, batches, None)
        labels, there = batch["labels"], raw["attention_mask"].bool()
        learnt = labels != IGNORED
        assert torch.equal(labels[learnt], raw["input_ids"][learnt])
        assert torch.equal(batch["input_ids"][~learnt], raw["input_ids"][~learnt])
        assert learnt.any(1).all()
        assert not (learnt & ~there).any()
        hidden, total = hidden + int(learnt.sum()), total + int(there.sum())
        masked += int((batch["input_ids"][learnt] == mask).sum())
        kept += int((batch["input_ids"] == raw["input_ids"])[learnt].sum())
    assert hidden / total == pytest.approx(0.3, abs=0.04)
    assert masked / hidden == pytest.approx(0.8, abs=0.05)
    assert kept / hidden == pytest.approx(0.1, abs=0.05)
    again = objective.batch(7, batches, None)
    assert torch.equal(again["input_ids"], objective.batch(7, batches, None)["input_ids"])
    assert not torch.equal(again["labels"], objective.batch(8, batches, None)["labels"])


def test_long_texts_are_cut_into_rows_with_their_ends(bert: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(bert / "model")
    (tmp_path / "long.txt").write_text(" ".join(TEXTS.values()))
    form = Form(task="masked", max_length=16)
    examples = make_examples(read_records(tmp_path / "long.txt"), tokenizer=tokenizer, form=form)
    whole = tokenizer(" ".join(TEXTS.values()))["input_ids"]
    assert len(examples) > 1
    assert int(examples.lengths.max()) <= 16
    assert examples.ids.tolist() == whole


@pytest.mark.parametrize("task", ["causal", "instruct"])
def test_a_model_that_sees_what_follows_learns_no_next_tokens(
    task: str, bert: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=r"each token see those that follow it.*--task masked"):
        train(write_settings(bert, tmp_path, task=task))


def test_a_model_that_writes_texts_finds_no_hidden_tokens(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path)
    path = write_settings(tiny, tmp_path, task="masked", data={"source": str(tiny / "text.txt")})
    with pytest.raises(ValueError, match="makes no model of LlamaConfig for task='masked'"):
        train(path)


def words_of(bert: Path, *rows: dict[str, Any], **form: Any) -> Any:
    write_lines(bert / "words.jsonl", list(rows))
    form = {"task": "token-classification", **form}
    tokenizer = tokenizer_of(bert / "model")
    return make_examples(read_records(bert / "words.jsonl"), tokenizer=tokenizer, form=Form(**form))


def test_the_class_of_a_word_is_learnt_at_its_first_token(bert: Path) -> None:
    row = {"tokens": ["the", "unheardof", "cat"], "ner_tags": ["O", "B", "A"]}
    examples = words_of(bert, row, row, max_length=64)
    assert examples.label_names == ("A", "B", "O")
    tokenizer = tokenizer_of(bert / "model")
    found = tokenizer(row["tokens"], is_split_into_words=True)
    expected, before = [], None
    for word in found.word_ids():
        is_first = word is not None and word != before
        expected.append({0: 2, 1: 1, 2: 0}[word] if is_first else IGNORED)
        before = word
    length = len(expected)
    assert examples.token_targets.tolist() == expected * 2
    assert expected.count(IGNORED) > 0
    cut = words_of(bert, row, row, max_length=3)
    assert cut.token_targets.tolist() == expected[:3] * 2
    assert cut.full_lengths.tolist() == [length] * 2
    renamed = examples.numbered_as(["O", "A", "B"])
    assert [one for one in renamed.token_targets.tolist() if one != IGNORED] == [0, 2, 1] * 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tokens": ["a", "b"], "ner_tags": ["O"]}, "2 words have 1 classes. Expected one for"),
        ({"tokens": "a b", "ner_tags": ["O"]}, "the words are 'a b'. Expected a list of texts"),
        ({"tokens": ["a"], "ner_tags": [1.5]}, "the label is 1.5. Expected a class"),
    ],
)
def test_words_without_their_classes_are_refused(row: dict, said: str, bert: Path) -> None:
    with pytest.raises(ValueError, match=said):
        words_of(bert, row)


def test_several_classes_make_ones_and_zeros(bert: Path) -> None:
    rows = [{"text": "a", "labels": ["x", "y"]}, {"text": "b", "labels": []}]
    rows += [{"text": "c", "labels": ["z", "z"]}]
    examples = words_of(bert, *rows, task="multi-label")
    assert examples.label_names == ("x", "y", "z")
    assert examples.targets.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert examples.numbered_as(["z", "x", "y"]).targets.tolist() == [
        [0, 1, 1],
        [0, 0, 0],
        [1, 0, 0],
    ]
    with pytest.raises(ValueError, match="Expected a list of classes"):
        words_of(bert, {"text": "a", "labels": "x"}, task="multi-label")


def test_classes_have_their_names_in_what_is_exported(bert: Path, tmp_path: Path) -> None:
    train(settings_of(bert, tmp_path, "token-classification", training={"steps": 1}))
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "ANIMAL", "1": "O", "2": "THING"}


@pytest.mark.parametrize("task", ["masked", "token-classification", "multi-label"])
def test_a_dry_run_shows_what_is_learnt(task: str, bert: Path, tmp_path: Path) -> None:
    display = Record()
    path = settings_of(bert, tmp_path, task, training={"steps": 1, "device": "cpu"})
    Training(Settings.read(path), display=display).dry_run()
    said = {"masked": "of which 15% are hidden", "multi-label": "label: ["}
    assert said.get(task, "labels: [") in display.text


def test_a_tokenizer_without_a_mask_is_refused(bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (bert / "model").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = folder / "tokenizer_config.json"
    facts = json.loads(config.read_text())
    del facts["mask_token"]
    config.write_text(json.dumps(facts))
    path = settings_of(bert, tmp_path, "masked", model={"folder": str(folder)})
    with pytest.raises(TrainingError, match="masked needs a token that hides others"):
        train(path)
