"""Generating with a model that is larger than the device: tokens a second against the link.

    python benchmarks/generate.py                                           8B shape
    python benchmarks/generate.py --small --device cpu --budgets 128MiB     to see it run

Greedy, all rows at once. The bound of the link is the bytes of the layers that do not stay, once a
token, over the rate that this machine's link was measured with. Plain PyTorch is the same model in
device memory, through the same `generate`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
import transformers as tf

import l2l
from l2l.planner import measured_hardware

SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256},
    "small": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024},
}  # fmt: skip


def config(shape: str) -> tf.LlamaConfig:
    """One without words that end a text: every row runs to its end."""
    return tf.LlamaConfig(
        **SHAPES[shape], tie_word_embeddings=False, eos_token_id=None, pad_token_id=0
    )


def timed(generate: Any, ids: torch.Tensor, new: int) -> tuple[float, torch.Tensor]:
    """Seconds of generating so many tokens for every row, and what came of it."""
    generate(ids[:, :4], max_new_tokens=2, do_sample=False)
    start = time.perf_counter()
    found = generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
    ).cpu()
    return time.perf_counter() - start, found


def fetches(engine: l2l.Engine, ids: torch.Tensor, new: int) -> int:
    """How often layers are fetched for so many tokens."""
    with engine.trace() as trace:
        engine.generate(ids[:, :4], max_new_tokens=new, do_sample=False)
    return sum(span.text.startswith("fetch L") for span in trace.spans)


def of_engine(options: argparse.Namespace, ids: torch.Tensor, budget: str) -> dict[str, Any]:
    """Layer by layer."""
    with torch.device("meta"):
        model = tf.LlamaForCausalLM(config(options.shape)).requires_grad_(False)
    with l2l.Engine(
        model, weights=l2l.RandomInit(0), device=options.device, device_memory=budget
    ) as engine:
        seconds, found = timed(engine.generate, ids, options.new)
        each = (fetches(engine, ids, 6) - fetches(engine, ids, 2)) / 4
        layer = sum(p.numel() for p in model.model.layers[0].parameters()) * 2
        hardware = measured_hardware()
        rate = hardware.fetch_rate if hardware else float("nan")
        bound = each * options.new * layer / rate
        result = {
            "what": f"engine, {budget}",
            "tokens_per_s": round(ids.shape[0] * options.new / seconds, 1),
            "seconds": round(seconds, 2),
            "layers_fetched_a_token": each,
            "of_the_link": round(bound / seconds, 3),
            "peak_gib": round(engine.device.peak_bytes() / 2**30, 2),
        }
        engine.close(give_back=False)
    return result | {"tokens": found}


def plain(options: argparse.Namespace, ids: torch.Tensor) -> dict[str, Any]:
    """The same model in device memory."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(options.device):
        model = tf.LlamaForCausalLM(config(options.shape)).eval()
    torch.set_default_dtype(torch.float32)
    seconds, found = timed(model.generate, ids.to(options.device), options.new)
    return {
        "what": "plain PyTorch, in memory",
        "tokens_per_s": round(ids.shape[0] * options.new / seconds, 1),
        "seconds": round(seconds, 2),
        "tokens": found,
    }


def main() -> None:
    """Every row of the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--budgets", nargs="*", default=["8GiB", "24GiB"])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--no-plain", action="store_true")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    options.shape = "small" if options.small else "8b"
    if options.small:
        options.rows, options.new = min(options.rows, 8), min(options.new, 8)
    generator = torch.Generator().manual_seed(0)
    shape = (options.rows, options.prompt)
    ids = torch.randint(3, SHAPES[options.shape]["vocab_size"], shape, generator=generator)
    found = [of_engine(options, ids, budget) for budget in options.budgets]
    found += [] if options.no_plain else [plain(options, ids)]
    for one in found:
        del one["tokens"]
        print("  ".join(f"{name}: {value}" for name, value in one.items()), flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
