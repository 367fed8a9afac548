"""A loop of one's own with Accelerate: prepare, accumulate, backward, clip.

    python examples/trainers/accelerate_loop.py [--plain] [--steps 20]

Without `--plain` two lines are others: the engine is made, and its optimizer is the loop's.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import tiny
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, get_scheduler

import l2l


def rows() -> DataLoader[Any]:
    """Batches of 4 sentences."""
    encode = tiny.tokenizer()
    found = [{"input_ids": encode(one).input_ids} for one in tiny.sentences()]
    collate = DataCollatorForLanguageModeling(encode, mlm=False)
    return DataLoader(found, batch_size=4, collate_fn=collate)  # type: ignore[arg-type]


def train(*, plain: bool, steps: int = tiny.STEPS, **more: Any) -> tuple[list[float], Any]:
    """Two batches a step; the losses, and the engine if there is one."""
    accelerator = Accelerator(gradient_accumulation_steps=2, **more)
    model = tiny.language_model()
    engine = None
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not plain:
        engine = l2l.Engine(model, optimizer=optimizer, precision="float32", autograd=True)
        optimizer = engine.optimizer
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=40)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, rows(), scheduler)
    model.train()
    losses: list[float] = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if len(losses) == 2 * steps:
            break
    return losses, engine


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="as it is, without L2L")
    parser.add_argument("--steps", type=int, default=tiny.STEPS, help="optimizer steps")
    options = parser.parse_args()
    found, engine = train(plain=options.plain, steps=options.steps)
    if engine is not None:
        engine.close()
    print(json.dumps({"losses": found}))
