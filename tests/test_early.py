"""What is said before the first step, with what to do about it."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from test_training import Record, train, write_settings, write_tiny

from l2l.train import TrainingError


@pytest.fixture(scope="module", name="tiny")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def with_model(tiny: Path, folder: Path, config: Any) -> Path:
    """The tiny tokenizer beside another configuration."""
    (folder / "model").mkdir()
    for path in (tiny / "model").iterdir():
        (folder / "model" / path.name).write_bytes(path.read_bytes())
    config.save_pretrained(folder / "model")
    return folder / "model"


SMALL = {"vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}


def test_more_positions_than_were_learnt_are_refused(tiny: Path, tmp_path: Path) -> None:
    model = {"folder": str(with_model(tiny, tmp_path, transformers.GPT2Config(**SMALL)))}
    settings = write_settings(tiny, tmp_path, model=model, training={"length": 18, "steps": 1})
    with pytest.raises(TrainingError, match=r"learnt positions for 16 .*Expected --length 16"):
        train(settings)
    settings = write_settings(tiny, tmp_path, model=model, training={"length": 16, "steps": 1})
    assert train(settings)


def test_positions_that_padding_takes_are_not_counted(tiny: Path, tmp_path: Path) -> None:
    config = transformers.RobertaConfig(
        vocab_size=300,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=18,
        pad_token_id=1,
    )
    model = {"folder": str(with_model(tiny, tmp_path, config))}
    more: dict[str, Any] = {"task": "classification", "model": model}
    settings = write_settings(tiny, tmp_path, **more, training={"length": 17, "steps": 1})
    with pytest.raises(TrainingError, match="learnt positions for 16 "):
        train(settings)


def test_a_warm_up_that_is_longer_than_the_run_is_said(tiny: Path, tmp_path: Path) -> None:
    display = Record()
    more = {"warm_up_steps": 100}
    train(write_settings(tiny, tmp_path, schedule=more, training={"steps": 2}), display)
    assert "warm_up_steps = 100, but the run has 2 steps" in display.text
    assert "warm_up_share" in display.text


def test_rows_beyond_what_the_model_is_made_for_are_said(tiny: Path, tmp_path: Path) -> None:
    display = Record()
    train(write_settings(tiny, tmp_path, training={"length": 256, "steps": 1}), display)
    assert "the model is made for 128: --length 128 keeps within that" in display.text


def test_the_exported_tokenizer_fills_rows(tiny: Path, tmp_path: Path) -> None:
    display = Record()
    train(write_settings(tiny, tmp_path, task="classification", training={"steps": 1}), display)
    assert "rows are filled with </s>: the tokenizer has no padding token" in display.text
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "run" / "model"
    )
    rows = tokenizer(["a cat", "the dog ran over the hill"], padding=True, return_tensors="pt")
    assert model(**rows).logits.shape == (2, 3)


def test_a_head_of_other_classes_may_be_made_anew(tiny: Path, tmp_path: Path) -> None:
    train(write_settings(tiny, tmp_path, task="classification", training={"steps": 1}))
    model = {"folder": str(tmp_path / "run" / "model"), "random_init": False}
    (tmp_path / "other.csv").write_text("text,label\n" + "a cat,yes\nthe dog,no\n" * 8)
    data = {"source": str(tmp_path / "other.csv"), "hold_out": 2}
    more: dict[str, Any] = {"task": "classification", "data": data, "training": {"steps": 1}}
    output = {"folder": str(tmp_path / "second")}
    path = write_settings(tiny, tmp_path, model=model, output=output, **more)
    with pytest.raises(ValueError, match=r"For a head of other classes .*--allow-missing-weights"):
        train(path)
    allowed = {**model, "allow_missing_weights": True}
    path = write_settings(tiny, tmp_path, model=allowed, output=output, **more)
    with pytest.warns(UserWarning, match="begin with random values.*score.weight"):
        assert train(path)
    old, new = (
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / name / "model")
        for name in ("run", "second")
    )
    assert (old.config.num_labels, new.config.num_labels) == (3, 2)
    assert new.config.id2label == {0: "no", 1: "yes"}
    change = (old.model.embed_tokens.weight - new.model.embed_tokens.weight).abs().max()
    assert change < 0.02, "all but the head is what it was, but for a step"


def test_classes_that_do_not_occur_are_said_and_kept(tiny: Path, tmp_path: Path) -> None:
    train(write_settings(tiny, tmp_path, task="classification", training={"steps": 1}))
    lines = (tiny / "classification.jsonl").read_text().splitlines()
    (tmp_path / "two.jsonl").write_text("\n".join(one for one in lines if '"dog"' not in one))
    model = {"folder": str(tmp_path / "run" / "model"), "random_init": False}
    data = {"source": str(tmp_path / "two.jsonl"), "hold_out": 2}
    output = {"folder": str(tmp_path / "second")}
    more: dict[str, Any] = {"model": model, "data": data, "output": output}
    display = Record()
    train(
        write_settings(tiny, tmp_path, task="classification", training={"steps": 1}, **more),
        display,
    )
    assert "note: no example has the model's classes 'dog'; its head keeps them" in display.text
    config = transformers.AutoConfig.from_pretrained(tmp_path / "second" / "model")
    assert config.id2label == {0: "cat", 1: "count", 2: "dog"}
