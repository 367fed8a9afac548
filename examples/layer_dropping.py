"""Leave layers out while training: stochastic depth and progressive dropping against full depth.

A byte-level Llama of 12 layers learns the sources of Python's standard library, with the same
batches and the same number of steps: with all layers in every step, with `l2l.StochasticDepth`
(Huang et al., 2016) and with `l2l.ProgressiveLayerDropping` (Zhang and He, 2020). Layers that are
left out are not fetched, computed or updated. A fourth run has all layers and fewer steps: as many
as cost what the progressive run costs. The held-out loss is always that of the whole network. The
runs take turns step by step, so that their seconds compare also on a machine that others use.

    python examples/layer_dropping.py [--steps 250] [--output runs/layer_dropping]

Prints steps, seconds a step, layers run and the held-out loss of each run; leaves dropping.svg and
results.json. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from byte_text import LENGTH, divided, draw, set_learning_rate
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import l2l

ROWS = 4
DEPTH = 12
NUM_MARKS = 10  # evaluations of a run
COLOURS = ("#475569", "#94a3b8", "#c2410c", "#1d4ed8")


def make_model() -> LlamaForCausalLM:
    """A small Llama over bytes."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=DEPTH,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        initializer_range=0.06,
    )
    return LlamaForCausalLM(config)


@dataclass(slots=True)
class Run:
    """One of the runs, and what was measured of it."""

    engine: l2l.Engine
    num_steps: int
    seconds: float = 0.0
    num_layers_run: int = 0
    curve: list[tuple[int, float, float]] = field(default_factory=list)  # steps, seconds, loss

    def step(self, batch: dict[str, Tensor], peak: float) -> None:
        """One step, timed to its end; the learning rate goes up, then down to a tenth."""
        progress = self.engine.step_number / self.num_steps
        set_learning_rate(self.engine, peak, progress)
        started = time.perf_counter()
        report = self.engine.step(batch)
        _ = report.gradient_norm  # reading waits for the step
        self.seconds += time.perf_counter() - started
        self.num_layers_run += len(report.layers)

    def mark(self, held_out: dict[str, Tensor]) -> None:
        """Take the held-out loss of the whole network."""
        loss = self.engine.evaluate(held_out)
        self.curve.append((self.engine.step_number, self.seconds, loss))


def make_engine(depth: l2l.Depth | None, arguments: argparse.Namespace) -> l2l.Engine:
    """An engine with the same weights for every policy."""
    torch.manual_seed(arguments.seed)
    return l2l.Engine(
        make_model(),
        optimizer=l2l.AdamW(lr=arguments.learning_rate, weight_decay=0.01),
        device="cpu",
        precision="float32",
        microbatch_size=ROWS,
        clip_norm=1.0,
        seed=arguments.seed,
        depth=depth,
    )


def train(
    policies: Mapping[str, tuple[l2l.Depth | None, int]], arguments: argparse.Namespace
) -> dict[str, Run]:
    """All runs, in turns."""
    stream, held_out = divided(rows=ROWS, seed=arguments.seed)
    every = max(1, arguments.steps // NUM_MARKS)
    with contextlib.ExitStack() as stack:
        runs = {
            name: Run(stack.enter_context(make_engine(depth, arguments)), num_steps)
            for name, (depth, num_steps) in policies.items()
        }
        for number in range(1, arguments.steps + 1):
            batch = next(stream)
            going = {name: run for name, run in runs.items() if number <= run.num_steps}
            marked = {
                name: run
                for name, run in going.items()
                if number % every == 0 or number == run.num_steps
            }
            for run in going.values():
                run.step(batch, arguments.learning_rate)
            for run in marked.values():
                run.mark(held_out)
            if marked:
                losses = ", ".join(f"{name} {run.curve[-1][2]:.4f}" for name, run in marked.items())
                print(f"  step {number:5}, held out: {losses}", flush=True)
    return runs


def main() -> None:
    """All runs, the table, the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--output", type=Path, default=Path("runs/layer_dropping"))
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="the highest")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small gain nothing from more
    steps = arguments.steps
    progressive = l2l.ProgressiveLayerDropping(final=0.5, rate=10 / steps)
    chosen = [
        progressive.choose(step=step, num_layers=DEPTH, seed=arguments.seed).layers
        for step in range(steps)
    ]
    runs = train(
        {
            "all layers": (None, steps),
            "all layers, fewer steps": (None, max(1, sum(map(len, chosen)) // DEPTH)),
            "stochastic depth": (l2l.StochasticDepth(last=0.5), steps),
            "progressive dropping": (progressive, steps),
        },
        arguments,
    )
    results = {
        name: {
            "steps": run.num_steps,
            "seconds": run.seconds,
            "seconds_a_step": run.seconds / run.num_steps,
            "mean_layers": run.num_layers_run / run.num_steps,
            "held_out": run.curve[-1][2],
            "curve": run.curve,
        }
        for name, run in runs.items()
    }
    print(
        f"\n{'run':<24} {'steps':>5} {'s a step':>9} {'seconds':>8} {'layers':>7} {'held out':>9}"
    )
    for name, found in results.items():
        print(
            f"{name:<24} {found['steps']:>5} {found['seconds_a_step']:>9.4f} "
            f"{found['seconds']:>8.1f} {found['mean_layers']:>7.2f} {found['held_out']:>9.4f}"
        )
    arguments.output.mkdir(parents=True, exist_ok=True)
    panels = {
        "steps": {name: [(n, y) for n, _, y in run.curve] for name, run in runs.items()},
        "seconds": {name: [(x, y) for _, x, y in run.curve] for name, run in runs.items()},
    }
    (arguments.output / "dropping.svg").write_text(draw(panels, width=400, colours=COLOURS))
    (arguments.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    brief = {name: {k: v for k, v in one.items() if k != "curve"} for name, one in results.items()}
    print(json.dumps({"seed": arguments.seed, **brief}))


if __name__ == "__main__":
    main()
