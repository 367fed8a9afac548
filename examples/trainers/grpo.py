"""GRPO with TRL: the model answers, answers are rewarded, and it learns from the better ones.

    python examples/trainers/grpo.py [--plain] [--steps 20] [--output runs/grpo]

Without `--plain` one line is another: `Trainer`. The model is then streamed layer by layer, also
while it answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import trl

import l2l


def vowels(completions: list[str], **_: Any) -> list[float]:
    """A reward: how many of an answer's letters are vowels."""
    return [sum(letter in "aeiou" for letter in text) / 10 for text in completions]


def make(
    *,
    plain: bool,
    folder: str | Path,
    peft_config: Any = None,
    kind: type[Any] = trl.GRPOTrainer,
    **more: Any,
) -> Any:
    """A trainer that is ready to train."""
    Trainer = kind if plain else l2l.loops.streamed(kind)  # noqa: N806
    options = {"num_generations": 4, "max_completion_length": 12, "bf16": False, **more}
    return Trainer(
        model=tiny.language_model(),
        reward_funcs=vowels,
        args=trl.GRPOConfig(**tiny.settings(folder, **options)),
        train_dataset=tiny.pairs().select_columns(["prompt"]),
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
    )


if __name__ == "__main__":
    tiny.run(__doc__, make)
