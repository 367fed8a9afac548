"""What the examples share: a tokenizer, models and data made on the spot, and what they print.

Nothing is downloaded. In a script of your own, `model` is the name of a model on the Hub, and the
datasets are yours.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

ROWS = 160  # of every dataset: 20 steps of 8 rows
STEPS = 20
WORDS = [
    "layers",
    "come",
    "and",
    "go",
    "while",
    "the",
    "device",
    "keeps",
    "only",
    "what",
    "runs",
    "now",
    "and",
    "what",
    "runs",
    "next",
]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and two of its own."""
    special = ["<pad>", "<eos>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*special, *alphabet])}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", model_max_length=128
    )


def _config(**more: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        **more,
    )


def language_model(seed: int = 0) -> LlamaForCausalLM:
    """A Llama of three layers, with random weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(_config())


def classifier(seed: int = 0, *, num_labels: int = 2) -> LlamaForSequenceClassification:
    """The same with a head for labels; with one label, a reward."""
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(_config(num_labels=num_labels))


def sentences(rows: int = ROWS) -> list[str]:
    """Sentences of different lengths."""
    return [" ".join(WORDS[row % 7 : row % 7 + 2 + row % 5]) for row in range(rows)]


def texts(rows: int = ROWS) -> Dataset:
    """For language models."""
    return Dataset.from_dict({"text": sentences(rows)})


def pairs(rows: int = ROWS) -> Dataset:
    """Prompts with a chosen and a rejected answer."""
    said = sentences(rows)
    return Dataset.from_dict(
        {
            "prompt": [text[:8] for text in said],
            "chosen": [text[8:] + " now" for text in said],
            "rejected": [text[8:][::-1] for text in said],
        }
    )


def settings(folder: str | Path, **more: Any) -> dict[str, Any]:
    """What all trainers are told: 20 steps, in float32, every one logged."""
    return {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **more,
    }


def run(description: str | None, make: Callable[..., Any]) -> None:
    """Make a trainer as the command line says, train, and print the losses as JSON."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--plain", action="store_true", help="as it is, without L2L")
    parser.add_argument("--output", type=Path, default=Path("runs/trainers"), help="folder")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps")
    options = parser.parse_args()
    trainer = make(plain=options.plain, folder=options.output, max_steps=options.steps)
    trainer.train()
    logs = [one for one in trainer.state.log_history if "loss" in one]
    print(json.dumps({"losses": [one["loss"] for one in logs]}))
