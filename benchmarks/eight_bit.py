"""A real training run with exact and with 8-bit moments: the losses must end within 1%.

A byte-level language model on the standard library's sources, a few thousand steps, the same seeds
and batches for both. Prints the mean training loss of the last tenth and the held-out loss.

    python benchmarks/eight_bit.py [--steps 3000] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

import torch

import l2l

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from demo import ByteModel, batches, standard_library_text


def train(moments: str, *, steps: int, device: str | None, seed: int) -> dict[str, float]:
    """One run."""
    torch.manual_seed(seed)
    model = ByteModel(hidden=96, heads=4, layers=3)
    text = standard_library_text()
    optimizer = l2l.AdamW(lr=2e-3, weight_decay=0.01, moments=moments)
    held_out = list(islice(batches(text, seed=10_000, rows=32), 4))
    with l2l.Engine(model, optimizer=optimizer, device=device, microbatch_size=8) as engine:
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            engine.optimizer, max_lr=2e-3, total_steps=steps + 1, pct_start=0.1
        )
        losses = []
        for batch in islice(batches(text, seed=seed, rows=8), steps):
            losses.append(engine.step(batch).loss)
            schedule.step()
        last = losses[-steps // 10 :]
        found = sum(engine.evaluate(batch) for batch in held_out) / len(held_out)
    return {"training": sum(last) / len(last), "held_out": found, "first": losses[0]}


def main() -> None:
    """Both runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--device", default=None)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    results = {
        moments: train(moments, steps=arguments.steps, device=arguments.device, seed=arguments.seed)
        for moments in ("float32", "8bit")
    }
    for moments, found in results.items():
        print(
            f"{moments:<8} first loss {found['first']:.4f}, last tenth {found['training']:.4f}, "
            f"held out {found['held_out']:.4f}"
        )
    for kind in ("training", "held_out"):
        ratio = results["8bit"][kind] / results["float32"][kind] - 1
        print(f"{kind}: 8-bit is {ratio:+.2%} of exact")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
