"""A LightningModule, with automatic or manual optimization, whose model is streamed by a strategy.

    python examples/trainers/lightning_module.py [--plain] [--manual] [--output runs/lightning]

Without `--plain` one line is another: `strategy`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import tiny
import torch
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling

import l2l


class LanguageModel(lightning.LightningModule):  # type: ignore[misc]
    """A language model, its optimizer and its schedule."""

    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        self.model = tiny.language_model()
        self.automatic_optimization = not manual
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Any], batch_index: int) -> Any:
        """One batch; in manual mode also its backward pass and the update."""
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            scheduler: Any = self.lr_schedulers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()
            scheduler.step()
        return loss

    def validation_step(self, batch: dict[str, Any], batch_index: int) -> None:
        """One batch that is not trained with."""
        self.log("held_out", self.model(**batch).loss, batch_size=len(batch["input_ids"]))

    def configure_optimizers(self) -> Any:
        """AdamW, with a rate that falls."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        fall = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 40)
        return [optimizer], [{"scheduler": fall, "interval": "step"}]


def rows(number: int = tiny.ROWS) -> DataLoader[Any]:
    """Batches of 8 sentences."""
    encode = tiny.tokenizer()
    found = [{"input_ids": encode(one).input_ids} for one in tiny.sentences(number)]
    return DataLoader(
        found,  # type: ignore[arg-type]
        batch_size=8,
        collate_fn=lambda some: dict(DataCollatorForLanguageModeling(encode, mlm=False)(some)),
    )


def make(*, plain: bool, folder: str | Path, manual: bool = False, **more: Any) -> Any:
    """A trainer that is ready to fit a `LanguageModel`."""
    strategy = "auto" if plain else l2l.loops.lightning_strategy()
    options: dict[str, Any] = {"max_steps": tiny.STEPS, "logger": False, **more}
    if not manual:
        options.setdefault("gradient_clip_val", 1.0)
    return lightning.Trainer(
        strategy=strategy, default_root_dir=folder, enable_progress_bar=False, **options
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="as it is, without L2L")
    parser.add_argument("--manual", action="store_true", help="manual optimization")
    parser.add_argument("--output", type=Path, default=Path("runs/lightning"), help="folder")
    options = parser.parse_args()
    module = LanguageModel(manual=options.manual)
    make(plain=options.plain, folder=options.output, manual=options.manual).fit(module, rows())
    print(json.dumps({"losses": module.losses}))
