"""A small architecture search: which kind of attention at which depth.

Three positions, three candidate layers at each: attention to everything before, with rotary
positions ("full") or without any ("bare"), and attention to the last 16 bytes alone ("window").
Every step trains one candidate of each position, drawn anew (`l2l.SampledArchitecture`), so all 27
architectures share nine layers. Then each of them is evaluated with `engine.evaluate(...,
layers=...)`. All have equally many parameters; what differs is the cache of keys and values that
one who writes text with the model must keep, and that has a price. The cheapest at its loss stays:
the other candidates are removed, it is trained on, and exported. The kinds are such as one Hugging
Face config can describe, so `AutoModelForCausalLM` loads the folder.

At the end the chosen architecture, the last in the ranking and the ordinary one (full everywhere)
are trained from nothing, alone: do shared layers rank as layers of one's own do?

    python examples/search.py [--steps 800] [--price 0.05] [--output runs/search]

Prints the candidates with the norms of their gradients and updates, the ranking, and the loss of
the exported model beside the engine's; leaves search.svg, results.json and the model. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from byte_text import LENGTH, divided, set_learning_rate
from torch import Tensor
from transformers import AutoModelForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

import l2l

ROWS, WINDOW = 8, 16
KINDS = {  # whether there are rotary positions, what it attends to, what it must cache
    "full": (1, "full_attention", LENGTH),
    "bare": (0, "full_attention", LENGTH),
    "window": (1, "sliding_attention", WINDOW),
}
NUM_POSITIONS = 3
SEARCH_SHARE = 0.75  # of the steps; the others train what was found
Architecture = tuple[str, ...]  # a kind for each position


def make_model(kinds: Sequence[str]) -> SmolLM3ForCausalLM:
    """A small language model over bytes with layers of these kinds."""
    config = SmolLM3Config(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=len(kinds),
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        initializer_range=0.06,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        use_sliding_window=True,
        sliding_window=WINDOW,
        no_rope_layers=[KINDS[kind][0] for kind in kinds],
        layer_types=[KINDS[kind][1] for kind in kinds],
    )
    return SmolLM3ForCausalLM(config)


def make_engine(
    kinds: Sequence[str], arguments: argparse.Namespace, depth: l2l.Depth | None = None
) -> l2l.Engine:
    """An engine for layers of these kinds."""
    torch.manual_seed(arguments.seed)
    optimizer = l2l.AdamW(lr=arguments.learning_rate, weight_decay=0.01)
    settings = {"device": "cpu", "precision": "float32", "microbatch_size": ROWS}
    return l2l.Engine(
        make_model(kinds), optimizer=optimizer, seed=arguments.seed, depth=depth, **settings
    )


def train(
    engine: l2l.Engine, stream: Iterator[dict[str, Tensor]], *, until: int, total: int, peak: float
) -> Iterator[l2l.StepReport]:
    """Steps of a run of `total`; the learning rate goes up, then down to a tenth."""
    for number in range(engine.step_number, until):
        set_learning_rate(engine, peak, number / total)
        yield engine.step(next(stream))


def cache_share(architecture: Architecture) -> float:
    """Its cache of keys and values, as a share of that with full attention everywhere."""
    return mean(KINDS[kind][2] for kind in architecture) / LENGTH


def draw(found: dict[Architecture, float], chosen: Architecture) -> str:
    """Held-out loss over size of the cache, one dot for each architecture, as SVG."""
    low, high = min(found.values()), max(found.values())
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="800" height="460" viewBox="0 0 800 460" '
        'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="12" fill="#1f2937">',
        '<rect width="800" height="460" fill="#ffffff"/>',
        '<path d="M70 40V400H760" fill="none" stroke="#6b7280"/>',
        '<text x="415" y="440" text-anchor="middle">cache, of the largest</text>',
        '<text transform="translate(20 220) rotate(-90)" text-anchor="middle">held-out loss</text>',
    ]
    for share in sorted({round(cache_share(one), 6) for one in found}):
        x = 70 + share * 600
        parts.append(f'<text x="{x:.0f}" y="418" text-anchor="middle">{share:.0%}</text>')
    for loss in (low, high):
        y = 390 - (loss - low) / (high - low) * 340
        parts.append(f'<text x="62" y="{y + 4:.0f}" text-anchor="end">{loss:.3f}</text>')
    for architecture, loss in found.items():
        x, y = 70 + cache_share(architecture) * 600, 390 - (loss - low) / (high - low) * 340
        colour = "#c2410c" if architecture == chosen else "#475569"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        if architecture == chosen:
            words = " ".join(architecture)
            parts.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{colour}">{words}</text>')
    return "\n".join([*parts, "</svg>", ""])


def print_candidates(
    reports: list[l2l.StepReport], layers: Sequence[str], found: dict[Architecture, float]
) -> None:
    """How each candidate was trained, and the mean loss of the architectures that have it."""
    gradients, updates = defaultdict(list), defaultdict(list)
    for report in reports:
        for layer, norm in report.layer_norms.items():
            gradients[layer].append(norm)
            updates[layer].append(report.update_norms[layer])
    print("position kind    steps  gradient  update  mean held out")
    for layer, kind in enumerate(layers):
        position = layer // len(KINDS)
        loss = mean(value for one, value in found.items() if one[position] == kind)
        norms = [f"{mean(one[layer] or [0.0]):.4f}" for one in (gradients, updates)]
        print(
            f"{position:>8} {kind:<7} {len(gradients[layer]):>5} {norms[0]:>9} {norms[1]:>7} "
            f"{loss:>14.4f}"
        )


def search(
    arguments: argparse.Namespace, stream: Iterator[dict[str, Tensor]], held_out: dict[str, Tensor]
) -> dict[str, Any]:
    """Search, choose, train what was found, export it; the ranking has the best first."""
    layers = list(KINDS) * NUM_POSITIONS
    indices = [range(n, n + len(KINDS)) for n in range(0, len(layers), len(KINDS))]
    run = {"total": arguments.steps, "peak": arguments.learning_rate}
    with make_engine(layers, arguments, l2l.SampledArchitecture(indices)) as engine:
        until = int(arguments.steps * SEARCH_SHARE)
        reports = list(train(engine, stream, until=until, **run))
        losses = {one: engine.evaluate(held_out, layers=one) for one in itertools.product(*indices)}
        found = {tuple(layers[i] for i in one): loss for one, loss in losses.items()}
        print_candidates(reports, layers, found)
        price = {one: loss + arguments.price * cache_share(one) for one, loss in found.items()}
        ranking = sorted(price, key=price.__getitem__)
        chosen = {indices[n][list(KINDS).index(kind)] for n, kind in enumerate(ranking[0])}
        engine.depth = None
        for layer in sorted(set(range(len(layers))) - chosen, reverse=True):
            engine.layers.remove(layer)
        for report in train(engine, stream, until=arguments.steps, **run):
            assert len(report.layers) == NUM_POSITIONS
        trained = engine.evaluate(held_out)
        engine.export(arguments.output / "model")
    print("\nplace architecture           cache  held out   with its price")
    for place, one in [*enumerate(ranking[:5], 1), (len(ranking), ranking[-1])]:
        print(
            f"{place:>5} {' '.join(one):<22} {cache_share(one):>5.0%} {found[one]:>9.4f} "
            f"{price[one]:>16.4f}"
        )
    (arguments.output / "search.svg").write_text(draw(found, ranking[0]))
    return {"held_out": trained, "ranking": [(one, found[one], price[one]) for one in ranking]}


def main() -> None:
    """The search, and its checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800, help="of the search and after it")
    parser.add_argument("--output", type=Path, default=Path("runs/search"))
    parser.add_argument(
        "--price", type=float, default=0.05, help="loss that a whole cache is worth"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="the highest")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small gain nothing from more
    arguments.output.mkdir(parents=True, exist_ok=True)
    stream, held_out = divided(rows=ROWS, seed=arguments.seed)
    found = search(arguments, stream, held_out)
    first, last = found["ranking"][0][0], found["ranking"][-1][0]

    loaded = AutoModelForCausalLM.from_pretrained(arguments.output / "model").eval()
    with torch.no_grad():
        exported = float(loaded(**held_out).loss)
    print(f"\n{' '.join(first)}, trained on: held out {found['held_out']:.6f}")
    print(f"exported and loaded with from_pretrained: {exported:.6f}\n")

    alone, total = {}, max(1, arguments.steps // 3)
    for name, one in (("first", first), ("last", last), ("ordinary", ("full",) * NUM_POSITIONS)):
        with make_engine(one, arguments) as engine:
            stream, _ = divided(rows=ROWS, seed=arguments.seed)
            for _ in train(engine, stream, until=total, total=total, peak=arguments.learning_rate):
                pass
            alone[name] = engine.evaluate(held_out)
        with_price = alone[name] + arguments.price * cache_share(one)
        print(
            f"from nothing, {total} steps: {name} ({' '.join(one)}), held out {alone[name]:.4f}, "
            f"{with_price:.4f} with its price"
        )
    results = {"seed": arguments.seed, "steps": arguments.steps, **found}
    results |= {"chosen": first, "exported": exported, "alone": alone}
    (arguments.output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps({key: value for key, value in results.items() if key != "ranking"}))


if __name__ == "__main__":
    main()
