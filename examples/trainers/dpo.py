"""Preferences with TRL: DPO against a reference that stays as it is.

    python examples/trainers/dpo.py [--plain] [--steps 20] [--output runs/dpo]

Without `--plain` one line is another: `Trainer`. Model and reference are then streamed layer by
layer. With `peft_config` the reference is the base model, without the adapter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import trl

import l2l


def make(*, plain: bool, folder: str | Path, peft_config: Any = None, **more: Any) -> Any:
    """A trainer that is ready to train."""
    Trainer = trl.DPOTrainer if plain else l2l.loops.streamed(trl.DPOTrainer)  # noqa: N806
    return Trainer(
        model=tiny.language_model(),
        ref_model=None if peft_config else tiny.language_model(),
        args=trl.DPOConfig(**tiny.settings(folder, bf16=False, **more)),
        train_dataset=tiny.pairs(),
        eval_dataset=tiny.pairs(16),
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
    )


if __name__ == "__main__":
    tiny.run(__doc__, make)
