"""Supervised fine-tuning with TRL.

    python examples/trainers/sft.py [--plain] [--steps 20] [--output runs/sft]

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
    Trainer = trl.SFTTrainer if plain else l2l.loops.streamed(trl.SFTTrainer)  # noqa: N806
    return Trainer(
        model=tiny.language_model(),
        args=trl.SFTConfig(**tiny.settings(folder, bf16=False, **more)),
        train_dataset=tiny.texts(),
        eval_dataset=tiny.texts(16),
        processing_class=tiny.tokenizer(),
    )


if __name__ == "__main__":
    tiny.run(__doc__, make)
