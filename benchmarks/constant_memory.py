"""Device memory against depth and against the number of microbatches: both must leave it alone.

BERT-Large-shaped layers (hidden 1024, perceptron 4096, 16 heads), sequences of 512, bfloat16 on the
device, AdamW on the host, a budget of 1 GiB: with more, the plan would use it. Then a thousand
small layers (hidden 256, sequences of 128). Weights are random, made layer by layer. Prints a
table, then one line of JSON.

    python benchmarks/constant_memory.py [--layers 12 24 48 96 192 384] [--microbatches 1 8 64]
                                         [--small-layers 1000]
"""

from __future__ import annotations

import argparse
import gc
import json
import time

import torch
from transformers import BertConfig, BertForSequenceClassification

import l2l

ROWS, BUDGET = 4, "1GiB"


def measure(num_layers: int, num_microbatches: int, *, small: bool = False) -> dict[str, float]:
    """Peak and time of a step."""
    gc.collect()
    torch.cuda.empty_cache()
    length, hidden = (128, 256) if small else (512, 1024)
    config = BertConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=hidden // 64,
        num_hidden_layers=num_layers,
        num_labels=2,
    )
    with torch.device("meta"):
        model = BertForSequenceClassification(config)
    rows = ROWS * num_microbatches
    batch = {
        "input_ids": torch.randint(0, config.vocab_size, (rows, length)),
        "labels": torch.randint(0, 2, (rows,)),
    }
    with l2l.Engine(
        model,
        optimizer=l2l.AdamW(lr=1e-5),
        weights=l2l.RandomInit(0),
        microbatch_size=ROWS,
        device_memory=BUDGET,
        # Few layers would stay on the device.
        execution=l2l.Execution(overrides={"num_tail": 0}),
    ) as engine:
        engine.device.reset_peak()
        losses = [engine.step(batch).loss]
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(engine.step(batch).loss)
        engine.evaluate({name: value[:ROWS] for name, value in batch.items()})
        seconds = time.perf_counter() - start
        return {
            "layers": num_layers,
            "microbatches": num_microbatches,
            "parameters": sum(p.numel() for p in model.parameters()),
            "reserved_MiB": torch.cuda.max_memory_reserved() / 2**20,
            "allocated_MiB": torch.cuda.max_memory_allocated() / 2**20,
            "step_seconds": round(seconds, 3),
            "loss_first": losses[0],
            "loss_second": losses[1],
        }


def main() -> None:
    """Every depth at 8 microbatches, every number of them at 24 layers, small layers at 2."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96, 192, 384])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--small-layers", type=int, nargs="*", default=[100, 1000])
    arguments = parser.parse_args()
    cases = [(layers, 8, False) for layers in arguments.layers]
    cases += [(24, number, False) for number in arguments.microbatches if number != 8]
    cases += [(layers, 2, True) for layers in arguments.small_layers]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| layers | microbatches | parameters | device peak, reserved | allocated | step |")
    print("|---|---|---|---|---|---|")
    results = []
    for layers, number, small in cases:
        found = measure(layers, number, small=small)
        results.append(found)
        print(
            f"| {layers}{' small' if small else ''} | {number} | "
            f"{found['parameters'] / 1e6:,.0f}M | "
            f"{found['reserved_MiB']:,.0f} MiB | {found['allocated_MiB']:,.1f} MiB | "
            f"{found['step_seconds']:.2f} s |",
            flush=True,
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
