"""Learning from rewards: losses of plain PyTorch, a toy that is learnt, rollouts resumed."""

import random
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
    write_lines,
    write_settings,
    write_tiny,
)
from torch import Tensor

from l2l.train import Training, TrainingError
from l2l.train.grpo import Grpo
from l2l.train.settings import Settings, SettingsError

REWARDS = """
def digits(prompts, completions, **columns):
    return [sum(one.isdigit() for one in text) / max(1, len(text)) for text in completions]

def wanted(prompts, completions, letter, **columns):
    assert len(prompts) == len(completions) == len(letter)
    return [None if not text else text.count(one) / len(text)
            for text, one in zip(completions, letter)]

def broken(prompts, completions, **columns):
    return [1.0]
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of other tests, with prompts and rewards."""
    folder = write_tiny(tmp_path_factory.mktemp("tiny"))
    drawn = random.Random(0)
    letters = [drawn.choice("ab") for _ in range(20)]
    write_lines(
        folder / "grpo.jsonl",
        [{"prompt": f"say {one} {n}:", "letter": one} for n, one in enumerate(letters)],
    )
    (folder / "rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture(scope="module")
def weighed(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with weights, without dropout."""
    folder = tmp_path_factory.mktemp("weighed")
    for path in (tiny / "model").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = transformers.AutoConfig.from_pretrained(folder, attention_dropout=0.0)
    config.initializer_range = 0.3
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def settings_of(tiny: Path, folder: Path, grpo: dict[str, Any], **more: Any) -> Path:
    table = {"rewards": [f"{tiny}/rewards.py:digits"], "num_generations": 4, "max_new_tokens": 8}
    training = {"rows": 3, "length": 40, **more.pop("training", {})}
    return write_settings(
        tiny, folder, task="grpo", training=training, grpo={**table, **grpo}, **more
    )


def test_a_reward_is_learnt(tiny: Path, tmp_path: Path) -> None:
    """The share of digits, from one command."""
    display = Record()
    more = {
        "training": {"steps": 20, "rows": 4},
        "schedule": {"shape": "constant"},
        "optimizer": {"learning_rate": 3e-2},
        "evaluation": {"every_steps": 0},
        "checkpoint": {"every_steps": 0},
    }
    train(settings_of(tiny, tmp_path, {"num_generations": 12}, **more), display)
    assert "reward 0." in display.text
    rewards = [one["reward"] for one in metrics_of(tmp_path, "step")]
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-3:]) / 3 > 0.4
    first, last = metrics_of(tmp_path, "evaluation")
    assert first["reward"] < 0.2
    assert last["reward"] > 0.4


# --------------------------------------------------------------------------------------------------
# Losses


def plain_loss(
    model: Any, batch: dict[str, Tensor], old: Tensor | None, reference: Any, grpo: dict[str, Any]
) -> tuple[Tensor, dict[str, float]]:
    """As the papers have it, of the completions of a rollout."""
    found, there = log_probabilities(model, batch, grpo), batch["labels"][:, 1:] != -100
    advantages = advantages_of(batch, there).unsqueeze(1)
    ratio = (found - (found.detach() if old is None else old)).exp()
    clipped = ratio.clamp(1 - 0.05, 1 + 0.1)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    measures = {
        "clip_ratio": float(
            ((clipped * advantages < ratio * advantages) & there).sum() / there.sum()
        )
    }
    if grpo.get("beta"):
        with torch.no_grad():
            less = log_probabilities(reference, batch, grpo)
        distance = (less - found).exp() - (less - found) - 1
        plain = grpo.get("unbiased_distance") is False
        losses = losses + grpo["beta"] * distance * (1 if plain else ratio)
        measures["kl"] = float((distance.detach() * there).sum() / there.sum())
    kind = grpo.get("loss", "bnpo")
    if kind == "grpo":
        return ((losses * there).sum(1) / there.sum(1)).mean(), measures
    by = there.sum() if kind == "bnpo" else there.shape[0] * 8
    return (losses * there).sum() / by, measures


def advantages_of(batch: dict[str, Tensor], there: Tensor) -> Tensor:
    """Completions of a prompt are compared; a prompt comes once in a batch, or its copies do."""
    rows = [
        share_of_digits(ids[1:][one]) for ids, one in zip(batch["input_ids"], there, strict=True)
    ]
    prompts = [
        tuple(ids[:-1][(~one) & (m[1:] > 0)].tolist())
        for ids, one, m in zip(batch["input_ids"], there, batch["attention_mask"], strict=True)
    ]
    found = torch.zeros(len(rows))
    for prompt in set(prompts):
        own = torch.tensor([one == prompt for one in prompts])
        rewards = torch.tensor(rows)[own]
        assert len(rewards) == 4
        found[own] = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    return found


def log_probabilities(model: Any, batch: dict[str, Tensor], grpo: dict[str, Any]) -> Tensor:
    ids, mask = batch["input_ids"], batch["attention_mask"]
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1] / grpo.get("temperature", 1)
    return torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2)


TOKENIZER: list[Any] = []


def share_of_digits(ids: Tensor) -> float:
    text = TOKENIZER[0].decode(ids, skip_special_tokens=True)
    return sum(one.isdigit() for one in text) / max(1, len(text))


@pytest.mark.parametrize(
    "grpo",
    [
        {},
        pytest.param({"loss": "grpo", "num_iterations": 2}, marks=pytest.mark.thorough),
        pytest.param(
            {"loss": "dr_grpo", "num_iterations": 3, "beta": 0.1, "unbiased_distance": False},
            marks=pytest.mark.thorough,
        ),
        {"temperature": 1.4, "num_iterations": 2, "beta": 0.05},
    ],
)
def test_every_loss_of_a_run_is_that_of_plain_pytorch(
    grpo: dict[str, Any],
    tiny: Path,
    weighed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the completions that the run has drawn, microbatches of two of them."""
    seen: list[dict[str, Tensor]] = []
    make = Grpo.batch

    def batch(objective: Grpo, *args: Any) -> dict[str, Tensor]:
        seen.append(make(objective, *args))
        return seen[-1]

    monkeypatch.setattr(Grpo, "batch", batch)
    path = settings_of(
        tiny,
        tmp_path,
        {**grpo, "epsilon": 0.05, "epsilon_high": 0.1},
        model={"folder": str(weighed), "random_init": False},
        training={"microbatch_size": 2, "steps": 6},
        optimizer={"weight_decay": 0.0},
        evaluation={"every_steps": 0},
        checkpoint={"every_steps": 0},
        output={"export": False},
    )
    train(path)
    settings = Settings.read(path)
    TOKENIZER[:] = [transformers.AutoTokenizer.from_pretrained(weighed)]
    model, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(weighed).eval() for _ in range(2)
    )
    optimizer, old = torch.optim.AdamW(model.parameters(), weight_decay=0.0), None
    for step, record in enumerate(metrics_of(tmp_path, "step")):
        if step % grpo.get("num_iterations", 1) == 0:
            with torch.no_grad():
                old = log_probabilities(model, seen[step], grpo)
        factor = settings.schedule.factor(step, total=6)
        optimizer.param_groups[0]["lr"] = settings.optimizer.learning_rate * factor
        loss, measures = plain_loss(model, seen[step], old, reference, grpo)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert record["loss"] == pytest.approx(float(loss.detach()), abs=2e-6)
        assert record["gradient_norm"] == pytest.approx(float(norm), rel=1e-4)
        assert {key: record[key] for key in measures} == pytest.approx(measures, abs=1e-5)
    if grpo:
        assert max(one["clip_ratio"] for one in metrics_of(tmp_path, "step")) > 0


# --------------------------------------------------------------------------------------------------
# Runs


def test_a_run_that_was_interrupted_within_a_rollout_is_the_same(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"training": {"steps": 5}, "evaluation": {"every_steps": 2}}
    make, stops = Grpo.batch, []

    def batch(objective: Grpo, step: int, *args: Any) -> dict[str, Tensor]:
        if stops and step == 2:
            stops.pop()()
        return make(objective, step, *args)

    monkeypatch.setattr(Grpo, "batch", batch)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        path = settings_of(tiny, tmp_path / name, {"num_iterations": 2, "beta": 0.1}, **more)
        if name == "parts":
            training = Training(Settings.read(path), display=Record())
            stops.append(training.stop)
            assert not training.run()
        train(path)
    assert_equal_runs(tmp_path / "parts", tmp_path / "whole")


def test_rewards_are_given_columns_and_chats(tiny: Path, tmp_path: Path) -> None:
    """Several rewards count by their weights; one may have nothing to say."""
    asked = [{"prompt": [{"role": "user", "content": "say a"}], "number": n} for n in range(12)]
    write_lines(tmp_path / "chats.jsonl", asked)
    (tmp_path / "mine.py").write_text(
        "seen = []\n"
        "def number(prompts, completions, completion_ids, number, **columns):\n"
        "    assert not columns\n"
        "    for prompt, completion, ids in zip(prompts, completions, completion_ids):\n"
        "        assert prompt == [{'role': 'user', 'content': 'say a'}]\n"
        "        assert completion[0]['role'] == 'assistant' and len(completion) == 1\n"
        "        assert 1 <= len(ids) <= 8\n"
        "    return [n / 10 for n in number]\n"
        "def odd(number, **_):\n"
        "    return [1.0 if n % 2 else None for n in number]\n"
    )
    grpo = {
        "rewards": [f"{tmp_path}/mine.py:number", f"{tmp_path}/mine.py:odd"],
        "reward_weights": [1.0, 2.0],
    }
    data = {"source": str(tmp_path / "chats.jsonl"), "hold_out": 2}
    path = settings_of(tiny, tmp_path, grpo, data=data, training={"steps": 2, "rows": 10})
    train(path)
    first = metrics_of(tmp_path, "step")[0]
    expected = first["rewards/number"] + 2.0 * sum(
        one["number"] % 2 for one in kept_of(path)
    ) / len(kept_of(path))
    assert first["reward"] == pytest.approx(expected)
    assert first["rewards/odd"] == 1.0


def kept_of(path: Path) -> Any:
    return Training(Settings.read(path), display=Record())._prepared.examples.records


@pytest.mark.parametrize(
    ("grpo", "words"),
    [
        ({"rewards": []}, "rewards is not set. Expected --reward"),
        ({"reward_weights": [1.0, 2.0]}, "found 2 weights, expected 1"),
        ({"max_new_tokens": 40}, "leaves no room for prompts"),
        ({"num_generations": 1}, "greater than or equal to 2"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    grpo: dict[str, Any], words: str, tiny: Path, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=words):
        Settings.read(settings_of(tiny, tmp_path, grpo))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("rewards.py:broken", "has given 1 values for 3 completions"),
        ("rewards.py:nothing", "has no function 'nothing'"),
        ("nowhere.py:digits", "there is no file"),
    ],
)
def test_rewards_that_are_none_are_refused(
    function: str, words: str, tiny: Path, tmp_path: Path
) -> None:
    path = settings_of(tiny, tmp_path, {"rewards": [f"{tiny}/{function}"]})
    with pytest.raises(TrainingError, match=words):
        train(path)
