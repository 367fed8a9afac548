"""`l2l export`: the model of a checkpoint, as a folder that `from_pretrained` reads."""

from __future__ import annotations

import argparse
from pathlib import Path

from l2l.train import export_checkpoint

HELP = """Write the model of a checkpoint as a Hugging Face folder: configuration, tokenizer, and
weights in safetensors files; of a run with [lora] the adapter, or with --merge the whole model with
the adapter in its weights. It needs no accelerator, and host memory for one tensor at a time."""

EXAMPLES = """examples:
  l2l export runs/alpaca exported                                    its last checkpoint
  l2l export runs/alpaca/checkpoints/step-00000200 exported --dtype float32
  l2l export runs/chats merged --merge                               an adapter in its model"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `l2l export` takes."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, or a checkpoint")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="the folder to write")
    words = "of the weights (default: as the run's settings say; merged: the model's own)"
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help=words)
    words = "write the whole model, with the adapter merged into its weights"
    parser.add_argument("--merge", action="store_true", help=words)
    words = "where configuration and tokenizer are (default: where they were in training)"
    parser.add_argument("--model", type=Path, metavar="FOLDER", help=words)


def run(parsed: argparse.Namespace) -> int:
    """`l2l export`; returns the exit status."""
    made = export_checkpoint(
        parsed.run,
        parsed.output,
        dtype=parsed.dtype,
        model_folder=parsed.model,
        merge=parsed.merge,
    )
    print(f"{made} is now a model folder: {parsed.output}")
    return 0
