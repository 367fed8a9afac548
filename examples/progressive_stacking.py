"""Grow a language model while it learns: 3, 6, then 12 layers, against 12 from the start.

A byte-level Llama learns the sources of Python's standard library. One run has 12 layers in every
step. Another begins with 3, and is stacked on top of itself twice with `engine.layers.grow(2)`
(Gong et al., 2019), weights and moments copied. A third stays at 3, to show what is gained by
growing and what by small steps alone. All may spend the same compute, counted in layers run: a step
with 3 layers costs a quarter of one with 12, so runs with few layers make more steps, and see more
text. The learning rate is the same function of the compute spent in all.

    python examples/progressive_stacking.py [--steps 300] [--output runs/progressive_stacking]

Prints the held-out loss of each at equal compute, what growing did to it, and which was best;
leaves stacking.svg and results.json. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from byte_text import LENGTH, divided, draw, set_learning_rate
from transformers import LlamaConfig, LlamaForCausalLM

import l2l

ROWS = 4
DEPTH = 12  # layers at the end
RUNS = {  # layers, and the share of the compute after which there are more of them
    "12 layers": ((12, 1.0),),
    "3, 6, 12 layers": ((3, 0.25), (6, 0.5), (12, 1.0)),
    "3 layers": ((3, 1.0),),
}
NUM_MARKS = 12  # evaluations of a run
COLOURS = ("#475569", "#c2410c", "#1d4ed8")


def make_model(num_layers: int) -> LlamaForCausalLM:
    """A small Llama over bytes."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        initializer_range=0.06,
    )
    return LlamaForCausalLM(config)


def train(stages: Sequence[tuple[int, float]], arguments: argparse.Namespace) -> dict[str, Any]:
    """One run: what was spent, and the held-out loss along the way."""
    torch.manual_seed(arguments.seed)
    stream, held_out = divided(rows=ROWS, seed=arguments.seed)
    budget = arguments.steps * DEPTH  # layers run, over all steps
    spent, num_steps, seconds = 0, 0, 0.0
    curve: list[tuple[float, float]] = []
    growths: list[dict[str, float]] = []
    with l2l.Engine(
        make_model(stages[0][0]),
        optimizer=l2l.AdamW(lr=arguments.learning_rate, weight_decay=0.01),
        device="cpu",
        precision="float32",
        microbatch_size=ROWS,
        clip_norm=1.0,
        seed=arguments.seed,
    ) as engine:
        curve.append((0.0, engine.evaluate(held_out)))
        for num_layers, until in stages:
            if num_layers > len(engine.layers):
                before = engine.evaluate(held_out)
                engine.layers.grow(num_layers // len(engine.layers))
                after = engine.evaluate(held_out)
                growths.append({"layers": num_layers, "before": before, "after": after})
                curve += [(spent / DEPTH, before), (spent / DEPTH, after)]
            while spent < until * budget:
                set_learning_rate(engine, arguments.learning_rate, spent / budget)
                batch, started = next(stream), time.perf_counter()
                loss = engine.step(batch).loss  # reading waits for the step
                seconds += time.perf_counter() - started
                spent, num_steps = spent + num_layers, num_steps + 1
                if spent * NUM_MARKS // budget > (spent - num_layers) * NUM_MARKS // budget:
                    curve.append((spent / DEPTH, engine.evaluate(held_out)))
                    print(
                        f"  {spent / budget:4.0%} of the compute, {num_layers:2} layers, "
                        f"step {num_steps:5}: loss {loss:.3f}, held out {curve[-1][1]:.4f}",
                        flush=True,
                    )
    return {
        "steps": num_steps,
        "bytes_read": num_steps * ROWS * LENGTH,
        "compute": spent / DEPTH,
        "seconds": seconds,
        "held_out": curve[-1][1],
        "growths": growths,
        "curve": curve,
    }


def main() -> None:
    """All runs, the table, the plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="of the run with all layers")
    parser.add_argument("--output", type=Path, default=Path("runs/progressive_stacking"))
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="the highest")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small gain nothing from more
    results = {}
    for name, stages in RUNS.items():
        print(f"{name}:", flush=True)
        results[name] = train(stages, arguments)
    print(f"\n{'run':<16} {'steps':>6} {'text':>9} {'compute':>8} {'seconds':>8} {'held out':>9}")
    for name, found in results.items():
        print(
            f"{name:<16} {found['steps']:>6} {found['bytes_read'] / 1e6:>6.2f} MB "
            f"{found['compute']:>8.1f} {found['seconds']:>8.1f} {found['held_out']:>9.4f}"
        )
        for one in found["growths"]:
            print(
                f"    grown to {one['layers']} layers: held out {one['before']:.4f} before, "
                f"{one['after']:.4f} after"
            )
    losses = sorted((found["held_out"], name) for name, found in results.items())
    words = ", then ".join(f"'{name}' ({loss:.4f})" for loss, name in losses)
    print(f"\nat equal compute the best is {words}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    curves = {name: found["curve"][1:] for name, found in results.items()}
    picture = draw({"compute, in steps with 12 layers": curves}, width=700, colours=COLOURS)
    (arguments.output / "stacking.svg").write_text(picture)
    (arguments.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    brief = {name: {k: v for k, v in one.items() if k != "curve"} for name, one in results.items()}
    print(json.dumps({"steps": arguments.steps, "seed": arguments.seed, **brief}))


if __name__ == "__main__":
    main()
