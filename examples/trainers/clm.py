"""A causal language model with transformers' Trainer, on text in blocks of one length.

    python examples/trainers/clm.py [--plain] [--steps 20] [--output runs/clm]

Without `--plain` one line is another: `Trainer`. The model is then streamed layer by layer, and the
microbatches of a step (`gradient_accumulation_steps`) pass each layer while it is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, TrainingArguments
from transformers import Trainer as PlainTrainer

import l2l

BLOCK = 32  # tokens


def blocks() -> Dataset:
    """The text, cut into rows of one length."""
    numbers = tiny.tokenizer()(" ".join(tiny.sentences(1000))).input_ids
    rows = [numbers[start : start + BLOCK] for start in range(0, tiny.ROWS * BLOCK, BLOCK)]
    return Dataset.from_dict({"input_ids": rows})


def make(*, plain: bool, folder: str | Path, **more: Any) -> Any:
    """A trainer that is ready to train."""
    Trainer = PlainTrainer if plain else l2l.loops.streamed(PlainTrainer)  # noqa: N806
    rows = blocks()
    return Trainer(
        model=tiny.language_model(),
        args=TrainingArguments(**tiny.settings(folder, **more)),
        train_dataset=rows,
        eval_dataset=rows.select(range(16)),
        processing_class=tiny.tokenizer(),
        data_collator=DataCollatorForLanguageModeling(tiny.tokenizer(), mlm=False),
    )


if __name__ == "__main__":
    tiny.run(__doc__, make)
