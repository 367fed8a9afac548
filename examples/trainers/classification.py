"""Sentences with labels, with transformers' Trainer: does a sentence speak of the device?

    python examples/trainers/classification.py [--plain] [--steps 20] [--output runs/classification]

Without `--plain` one line is another: `Trainer`. The model is then streamed layer by layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    TrainingArguments,
)
from transformers import Trainer as PlainTrainer

import l2l


def model() -> BertForSequenceClassification:
    """A BERT of three layers, with random weights."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    )
    return BertForSequenceClassification(config)


def labelled(rows: int = tiny.ROWS) -> Dataset:
    """Sentences, as tokens, with their labels."""
    sentences = tiny.sentences(rows)
    found: dict[str, Any] = dict(tiny.tokenizer()(sentences, return_token_type_ids=False))
    return Dataset.from_dict({**found, "label": [int("device" in one) for one in sentences]})


def accuracy(seen: EvalPrediction) -> dict[str, float]:
    """Of the labels with the highest logits."""
    return {"accuracy": float((seen.predictions.argmax(-1) == seen.label_ids).mean())}


def make(*, plain: bool, folder: str | Path, **more: Any) -> Any:
    """A trainer that is ready to train."""
    Trainer = PlainTrainer if plain else l2l.loops.streamed(PlainTrainer)  # noqa: N806
    return Trainer(
        model=model(),
        args=TrainingArguments(**tiny.settings(folder, **more)),
        train_dataset=labelled(),
        eval_dataset=labelled(16),
        processing_class=tiny.tokenizer(),
        data_collator=DataCollatorWithPadding(tiny.tokenizer()),
        compute_metrics=accuracy,
    )


if __name__ == "__main__":
    tiny.run(__doc__, make)
