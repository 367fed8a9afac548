"""Tokenized data are kept: found again exactly, never for other data, and not without end."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training import Record, train, write_lines, write_settings, write_tiny

from l2l.hugging_face import tokenizer_of
from l2l.train import prepared
from l2l.train.data import Examples, Form, KeptExamples, kept
from l2l.train.data.kept import FACTS, TENSORS


@pytest.fixture(scope="module", name="tiny")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every time that data are tokenized."""
    times: list[str] = []
    make = kept.make_examples

    def counted(*args: Any, **settings: Any) -> Examples:
        times.append("made")
        return make(*args, **settings)

    monkeypatch.setattr(kept, "make_examples", counted)
    return times


@pytest.fixture
def own(tiny: Path, tmp_path: Path) -> Path:
    """The tiny model and its data, to be changed."""
    shutil.copytree(tiny, tmp_path / "own")
    return tmp_path / "own"


def make(own: Path, store: KeptExamples, source: str, **form: Any) -> Examples:
    tokenizer = tokenizer_of(own / "model")
    settings = {"documents": "blank lines", "model_folder": own / "model", "tokenizer": tokenizer}
    return store.make([str(own / source)], **settings, form=Form(**form))


def equal(one: Examples, other: Examples) -> bool:
    assert all(getattr(one, name) == getattr(other, name) for name in FACTS)
    for name in TENSORS:
        mine, theirs = getattr(one, name), getattr(other, name)
        assert (mine is None) == (theirs is None), name
        assert mine is None or (torch.equal(mine, theirs) and mine.dtype == theirs.dtype), name
    assert one.numbers.keys() == other.numbers.keys()
    assert all(torch.equal(one.numbers[name], other.numbers[name]) for name in one.numbers)
    return one.fingerprint() == other.fingerprint()


@pytest.mark.parametrize("task", ["causal", "instruct", "classification", "regression", "kto"])
def test_what_was_tokenized_before_is_found_again(
    task: str, own: Path, tmp_path: Path, count: list[str]
) -> None:
    judged = [{"prompt": "say", "completion": "cat dog", "label": n % 2 == 0} for n in range(4)]
    write_lines(own / "kto.jsonl", judged)
    store = KeptExamples(tmp_path / "tokens", least_seconds=0)
    source = "text.txt" if task == "causal" else f"{task}.jsonl"
    made, found = (make(own, store, source, task=task, max_length=25) for _ in range(2))
    assert count == ["made"]
    assert equal(made, found)


def test_anything_else_is_tokenized_anew(own: Path, tmp_path: Path, count: list[str]) -> None:
    store = KeptExamples(tmp_path / "tokens", least_seconds=0)
    made = make(own, store, "text.txt")
    with (own / "text.txt").open("a") as file:
        file.write("\n\nthe dog ran")
    assert len(make(own, store, "text.txt")) == len(made) + 1
    make(own, store, "text.txt", max_length=8)
    shutil.copy(own / "text.txt", own / "text.jsonl.txt")
    tokenizer = own / "model" / "tokenizer.json"
    facts = json.loads(tokenizer.read_text())
    facts["added_tokens"] = [dict(one, special=False) for one in facts["added_tokens"]]
    tokenizer.write_text(json.dumps(facts))
    make(own, store, "text.txt")
    assert len(count) == 4
    make(own, store, "text.txt")
    assert len(count) == 4


def test_data_with_the_same_time_and_size_but_other_bytes_are_other_data(
    own: Path, tmp_path: Path
) -> None:
    store, path = KeptExamples(tmp_path / "tokens", least_seconds=0), own / "text.txt"
    before, state = make(own, store, "text.txt"), path.stat()
    path.write_text(path.read_text().replace("cat", "dog"))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_size == state.st_size
    assert make(own, store, "text.txt").fingerprint() != before.fingerprint()


def test_a_damaged_file_is_made_anew(own: Path, tmp_path: Path, count: list[str]) -> None:
    store = KeptExamples(tmp_path / "tokens", least_seconds=0)
    made = make(own, store, "text.txt")
    (path,) = (tmp_path / "tokens").glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert equal(make(own, store, "text.txt"), made)
    assert len(count) == 2
    (about,) = (tmp_path / "tokens").glob("*.json")
    about.write_text("{")
    assert equal(make(own, store, "text.txt"), made)
    assert len(count) == 3


def test_data_that_change_while_they_are_read_are_not_kept(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize = kept.make_examples

    def slowly(*args: Any, **settings: Any) -> Examples:
        found = tokenize(*args, **settings)
        (own / "text.txt").write_text("something else")
        return found

    monkeypatch.setattr(kept, "make_examples", slowly)
    make(own, KeptExamples(tmp_path / "tokens", least_seconds=0), "text.txt")
    assert not (tmp_path / "tokens").exists()


def test_only_what_was_used_last_is_kept(own: Path, tmp_path: Path, count: list[str]) -> None:
    for number in range(3):
        (own / f"{number}.txt").write_text("\n\n".join(["the cat sat"] * (50 + number)))
    probe = KeptExamples(tmp_path / "probe", least_seconds=0)
    make(own, probe, "2.txt")
    (size,) = (path.stat().st_size for path in (tmp_path / "probe").glob("*.safetensors"))
    store = KeptExamples(tmp_path / "tokens", least_seconds=0, most_bytes=int(2.5 * size))
    count.clear()
    for number, name in enumerate(("0.txt", "1.txt", "0.txt", "2.txt")):  # 1 goes
        make(own, store, name)
        for path in (tmp_path / "tokens").glob("*.json"):
            if path.stat().st_mtime > 10:  # it was used just now
                os.utime(path, (number, number))
    assert len(count) == 3
    assert len(list((tmp_path / "tokens").glob("*.safetensors"))) == 2
    make(own, store, "0.txt")
    assert len(count) == 3
    make(own, store, "1.txt")
    assert len(count) == 4


def test_what_is_quick_and_what_has_no_file_is_not_kept(own: Path, tmp_path: Path) -> None:
    make(own, KeptExamples(tmp_path / "tokens"), "text.txt")
    assert not (tmp_path / "tokens").exists()
    make(own, KeptExamples(None), "text.txt")


def test_warnings_are_said_again(own: Path, tmp_path: Path) -> None:
    store = KeptExamples(tmp_path / "tokens", least_seconds=0)
    config = own / "model" / "tokenizer_config.json"
    facts = json.loads(config.read_text())
    del facts["eos_token"]
    config.write_text(json.dumps(facts))
    for _ in range(2):
        with pytest.warns(UserWarning, match="no end-of-text token"):
            make(own, store, "text.txt")


def test_a_run_begins_with_what_was_tokenized_before(
    own: Path, tmp_path: Path, count: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "KEPT", KeptExamples(tmp_path / "tokens", least_seconds=0))
    settings = write_settings(own, tmp_path, task="classification", training={"steps": 1})
    display = Record()
    train(settings, display)
    first = (tmp_path / "run" / "metrics.jsonl").read_text()
    train(settings, resume=False)
    assert count == ["made"]
    losses = [
        [json.loads(line).get("loss") for line in text.splitlines()]
        for text in (first, (tmp_path / "run" / "metrics.jsonl").read_text())
    ]
    assert losses[0] == losses[1]


def test_all_of_examples_is_kept() -> None:
    """A field that is added to `Examples` is added here."""
    fields = {one.name for one in dataclasses.fields(Examples)}
    assert fields == {*TENSORS, *FACTS, "numbers", "records"}
