"""Several processes on the CPU beside one, each with as many rows and one core.

    python benchmarks/scaling.py [--ranks 1 2] [--hidden 256] [--layers 6] [--rows 8]

Every process trains with rows of its own, over gloo; together they hold the model once. Prints for
each number of ranks the speed, what of it is linear, and the host memory that a rank holds. What
many accelerators would do is simulated by `l2l plan MODEL --world 64`. The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import l2l

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import inside

VOCABULARY, LENGTH = 2048, 128


def train(options: argparse.Namespace) -> None:
    """One rank; the first one prints what it has found."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.size > 1:
        store = f"file://{options.store}"
        dist.init_process_group("gloo", store, rank=options.rank, world_size=options.size)
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, VOCABULARY, (options.rows, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    with l2l.Engine(
        model,
        device="cpu",
        precision="float32",
        seed=0,
        execution=l2l.Execution(embedding="device"),
    ) as engine:
        for _ in range(2):
            _ = engine.step(batch).loss
        began = time.perf_counter()
        for _ in range(options.steps):
            _ = engine.step(batch).loss
        seconds = (time.perf_counter() - began) / options.steps
        held = sum(
            nbytes
            for name, nbytes in inside.arena(engine).bytes_by_name.items()
            if name in ("weights", "exp_avg", "exp_avg_sq")
        )
    if options.rank == 0:
        tokens = options.size * options.rows * LENGTH
        print(
            json.dumps(
                {"ranks": options.size, "seconds": seconds, "tokens": tokens}
                | {
                    "tokens_per_second": tokens / seconds,
                    "held_bytes": held,
                }
            )
        )


def measure(size: int, arguments: list[str]) -> dict[str, float]:
    """So many ranks, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__)), *arguments, "--store", f"{folder}/store"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--size", str(size)],
                env=environment,
                stdout=subprocess.PIPE if rank == 0 else None,
                text=True,
            )
            for rank in range(size)
        ]
        said, _ = running[0].communicate()
        if any(one.wait() for one in running):
            raise SystemExit(1)
    return json.loads(said.splitlines()[-1])


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        train(options)
        return
    names = ("hidden", "layers", "rows", "steps")
    arguments = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
    found = [measure(size, arguments) for size in options.ranks]
    first = found[0]["tokens_per_second"] / found[0]["ranks"]
    for one in found:
        one["of_linear"] = one["tokens_per_second"] / one["ranks"] / first
        print(
            f"{one['ranks']} ranks: {one['tokens_per_second']:,.0f} tokens/s, "
            f"{one['of_linear']:.0%} of linear, {one['held_bytes'] / 2**20:.1f} MiB a rank"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
