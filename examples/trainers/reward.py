"""A reward model with TRL: one number for each answer, higher for the chosen ones.

    python examples/trainers/reward.py [--plain] [--steps 20] [--output runs/reward]

Without `--plain` one line is another: `Trainer`. The model is then streamed layer by layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import trl

import l2l


def make(*, plain: bool, folder: str | Path, **more: Any) -> Any:
    """A trainer that is ready to train."""
    Trainer = trl.RewardTrainer if plain else l2l.loops.streamed(trl.RewardTrainer)  # noqa: N806
    return Trainer(
        model=tiny.classifier(num_labels=1),
        args=trl.RewardConfig(**tiny.settings(folder, bf16=False, **more)),
        train_dataset=tiny.pairs(),
        eval_dataset=tiny.pairs(16),
        processing_class=tiny.tokenizer(),
    )


if __name__ == "__main__":
    tiny.run(__doc__, make)
