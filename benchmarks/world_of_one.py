"""What the collectives cost: one rank with none, beside one that goes through all of them.

    python benchmarks/world_of_one.py [--shape 3.2b] [--tokens 65536] [--device-memory 16GiB]

Three processes, one after another: without a process group; with a process group of one rank, which
the engine then leaves alone; and with `group_size=1`, where weights are gathered and gradients
reduced as among many, over NCCL on a CUDA device. There is nothing on the wire: what is measured is
the schedule of many devices and its launches. The last line is JSON.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import l2l
from l2l.bench import child_process
from l2l.bench.workload import SHAPES, Workload

KINDS = {"none": "no process group", "left": "a group of one", "used": "the same, with collectives"}


def train(options: argparse.Namespace) -> None:
    """One process; prints what it has found."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.kind != "none":
        backend = "nccl" if device.type == "cuda" else "gloo"
        with tempfile.NamedTemporaryFile(delete=False) as store:
            path = store.name
        os.unlink(path)
        dist.init_process_group(backend, f"file://{path}", rank=0, world_size=1)
    workload = Workload(
        shape=options.shape,
        num_layers=options.layers,
        num_tokens=options.tokens,
        length=options.length,
    )
    model = workload.model(device)
    ids = torch.randint(0, 1000, (options.tokens // options.length, options.length))
    batch = {"input_ids": ids, "labels": ids}
    with l2l.Engine(
        model,
        optimizer=l2l.AdamW(lr=1e-5),
        clip_norm=1.0,
        device=device.type,
        device_memory=options.device_memory,
        execution=l2l.Execution(group_size=1 if options.kind == "used" else None),
    ) as engine:
        losses = [engine.step(batch).loss for _ in range(2)]
        began = time.perf_counter()
        losses += [engine.step(batch).loss for _ in range(options.steps)]
        seconds = (time.perf_counter() - began) / options.steps
        found = {"kind": options.kind, "seconds": seconds, "losses": losses}
        found |= {"peak_bytes": engine.device.peak_bytes(), "bound": engine.plan.bound}
    print(json.dumps(found))


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="3.2b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--device-memory", default=None)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--kind", choices=KINDS, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind is not None:
        train(options)
        return
    results = []
    for kind, words in KINDS.items():
        command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--kind", kind]
        with child_process.started(command) as process:
            output = process.communicate()[0]
        if process.returncode != 0:
            raise SystemExit(process.returncode)
        results.append(json.loads(output.splitlines()[-1]))
        one, first = results[-1], results[0]
        print(
            f"{words}: {one['seconds']:.3f} s a step, {options.tokens / one['seconds']:,.0f} "
            f"tokens/s ({one['seconds'] / first['seconds'] - 1:+.1%}), "
            f"loss {one['losses'][-1]:.4f}",
            flush=True,
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
