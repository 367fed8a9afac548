"""What a model says while it is trained: samples, and answers that are exactly right."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_training import (
    Record,
    assert_equal_runs,
    metrics_of,
    train,
    train_until,
    write_lines,
    write_settings,
    write_tiny,
)

from l2l.train import Training
from l2l.train.settings import Settings, SettingsError

SAMPLES = {"prompts": ["say cat", "the dog"], "every_steps": 4, "max_new_tokens": 5}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose own settings of generating are others than those of samples."""
    folder = write_tiny(tmp_path_factory.mktemp("tiny"))
    others = {"do_sample": True, "temperature": 0.6, "top_k": 3, "repetition_penalty": 3.0}
    (folder / "model" / "generation_config.json").write_text(json.dumps(others))
    return folder


def samples_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_samples_are_what_the_model_says(tiny: Path, tmp_path: Path) -> None:
    """Greedily, through the template with instruct; the last ones are the exported model's."""
    display = Record()
    train(write_settings(tiny, tmp_path, task="instruct", samples=SAMPLES), display)
    found = samples_of(tmp_path)
    assert [one["step"] for one in found] == [0, 0, 4, 4, 8, 8]
    assert "sample after step 8: 'say cat' -> " in display.text
    folder = tmp_path / "run" / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for prompt, one in zip(SAMPLES["prompts"], found[-2:], strict=True):
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        model.generation_config = transformers.GenerationConfig(eos_token_id=1)
        ids = model.generate(**asked, do_sample=False, max_new_tokens=5, pad_token_id=1)[0]
        said = tokenizer.decode(ids[asked["input_ids"].shape[1] :], skip_special_tokens=True)
        assert one["prompt"] == prompt
        assert one["completion"] == said


def test_samples_of_a_run_that_was_interrupted_are_the_same(tiny: Path, tmp_path: Path) -> None:
    more = {"samples": {**SAMPLES, "temperature": 1.0, "top_p": 0.9}}
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        path = write_settings(tiny, tmp_path / name, **more)
        if name == "parts":
            train_until(path, 5)
        train(path)
    assert_equal_runs(tmp_path / "parts", tmp_path / "whole")
    assert samples_of(tmp_path / "parts") == samples_of(tmp_path / "whole")
    without = tmp_path / "without"
    without.mkdir()
    train(write_settings(tiny, without))
    assert metrics_of(without) == metrics_of(tmp_path / "whole")
    assert len({one["completion"] for one in samples_of(tmp_path / "whole")}) > 2


def test_exact_matches_are_counted(tiny: Path, tmp_path: Path) -> None:
    """Only what follows the marker has to be right."""
    sums = [{"prompt": f"{a} + 1 =", "completion": f"so # {a + 1}"} for a in range(2)]
    write_lines(tmp_path / "sums.jsonl", sums * 12)
    more = {
        "data": {"source": str(tmp_path / "sums.jsonl"), "hold_out": 6},
        "training": {"steps": 100, "length": 64, "rows": 6},
        "optimizer": {"learning_rate": 3e-2},
        "evaluation": {"every_steps": 0, "answer_marker": "#", "max_new_tokens": 16},
        "checkpoint": {"every_steps": 0},
    }
    path = write_settings(tiny, tmp_path, task="instruct", **more)
    train(path)
    first, *_, last = (one["exact_match"] for one in metrics_of(tmp_path, "evaluation"))
    assert first == 0.0
    assert last >= 0.5
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert last == pytest.approx(share_right(model, path))


def share_right(model: Any, path: Path) -> float:
    """The same with plain PyTorch, a prompt at a time."""
    prepared = Training(Settings.read(path), display=Record())._prepared
    examples, tokenizer = prepared.held_out, prepared.tokenizer
    right = 0
    for start, end in itertools.pairwise(examples.offsets.tolist()):
        ids, answers = examples.ids[start:end], examples.answers[start:end]
        asked = ids[~answers][None].long()
        model.generation_config = transformers.GenerationConfig(eos_token_id=1)
        options = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 1}
        said = model.generate(asked, attention_mask=torch.ones_like(asked), **options)
        text = tokenizer.decode(said[0, asked.shape[1] :], skip_special_tokens=True)
        wanted = tokenizer.decode(ids[answers], skip_special_tokens=True)
        right += "#" in text and text.split("#")[-1].strip() == wanted.split("#")[-1].strip()
    return right / len(examples)


def test_a_marker_is_for_answers(tiny: Path, tmp_path: Path) -> None:
    more = {"evaluation": {"answer_marker": "#"}}
    with pytest.raises(SettingsError, match="answer_marker is for instruct, not causal"):
        Settings.read(write_settings(tiny, tmp_path, **more))
