"""The rows of docs/benchmarks.md in one process, and what single choices of a plan give.

    python benchmarks/rows.py                               every row, as planned
    python benchmarks/rows.py --rows 8GiB-8k 8GiB-8k-8bit
    python benchmarks/rows.py --rows 4GiB --without halves  the row with and without
    python benchmarks/rows.py --compare OLD NEW --times 3   two checkouts, in turn

Unless their names say otherwise, rows train one Llama shape of 3.2 billion parameters on random
tokens in rows of 1,024, with AdamW and float32 masters. For each: seconds until the first step had
ended, the median of the timed steps (the time between two readings of the loss), the device's peak
(by torch, and by nvidia-smi beside the run, context and libraries included) and what the plan had
expected. The last line is JSON. With `--compare`, each run is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Row:
    """What is trained, within which budget."""

    budget: str
    num_tokens: int
    clip_norm: float | None = None
    moments: str = "float32"
    length: int = 1024
    timed: int = 3  # steps
    shape: tuple[tuple[str, Any], ...] = ()  # what differs from the usual one


LARGER = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # layers of the 8B shape


def long_row(budget: str, num_tokens: int, num_layers: int) -> Row:
    """A step over one row."""
    shape = tuple({**LARGER, "num_hidden_layers": num_layers}.items())
    return Row(budget, num_tokens, length=num_tokens, timed=1, shape=shape)


ROWS = {
    "2GiB": Row("2GiB", 65_536, clip_norm=1.0),
    "2.25GiB": Row("2.25GiB", 65_536, clip_norm=1.0),
    "2GiB-words-32000": Row("2GiB", 16_384, clip_norm=1.0, shape=(("vocab_size", 32_000),)),
    "2GiB-words-262144": Row("2GiB", 16_384, clip_norm=1.0, shape=(("vocab_size", 262_144),)),
    "24GiB-one-131072": long_row("24GiB", 131_072, 8),
    "80GiB-one-524288": long_row("80GiB", 524_288, 4),
    "4GiB": Row("4GiB", 65_536, clip_norm=1.0),
    "16GiB": Row("16GiB", 65_536, clip_norm=1.0),
    "80GiB": Row("80GiB", 65_536, clip_norm=1.0),
    "8GiB-8k": Row("8GiB", 8_192, timed=10),
    "8GiB-8k-8bit": Row("8GiB", 8_192, moments="8bit", timed=10),
    "8GiB-8k-clipped": Row("8GiB", 8_192, clip_norm=1.0, timed=10),
    "8GiB-8k-8bit-clipped": Row("8GiB", 8_192, clip_norm=1.0, moments="8bit", timed=10),
}
WITHOUT: dict[str, dict[str, Any]] = {  # choices of a plan, made otherwise
    "halves": {"halves": False, "num_whole": 0},
    "lending": {"num_shared": 0},
    "keep": {"keep": 0.0, "num_kept_cells": 0},
    "whole": {"num_whole": 0},
    "sharing memory": {"shares_memory": False},
}
MADE: dict[Any, Any] = {}  # the last model


def make_model(row: Row, num_layers: int) -> Any:
    """The shape, with random weights made on the device, in host memory."""
    if row.shape in MADE:
        return MADE[row.shape]
    MADE.clear()
    torch.cuda.set_per_process_memory_fraction(1.0)
    import transformers

    shape: dict[str, Any] = {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "tie_word_embeddings": True,
        **dict(row.shape),
    }
    longest = max(one.length for one in ROWS.values())
    config = transformers.LlamaConfig(
        max_position_embeddings=longest, head_dim=128, use_cache=False, **shape
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    MADE[row.shape] = model.to("cpu")
    torch.cuda.empty_cache()
    return model


class Watched:
    """The most memory that nvidia-smi shows inside the block, beside what it showed at first."""

    def __init__(self) -> None:
        """Before this process has touched the device."""
        self.idle, self.most = self._shown(), 0

    def _command(self, *more: str) -> list[str]:
        return ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", *more]

    def _shown(self) -> int:
        return int(subprocess.check_output(self._command(), text=True).split()[0])

    def __enter__(self) -> Watched:
        self.most = 0
        command = self._command("--loop-ms=100")
        self._running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def _read(self) -> None:
        assert self._running.stdout is not None
        for line in self._running.stdout:
            self.most = max(self.most, int(line))

    def __exit__(self, *_: object) -> None:
        self._running.terminate()
        self._reader.join()

    @property
    def gibibytes(self) -> float:
        """The most that was seen."""
        return round((self.most - self.idle) / 1024, 2)


def measure(model: Any, row: Row, choices: dict[str, Any]) -> dict[str, Any]:
    """A few steps of a row, on the package that is on the path."""
    import l2l

    settings: dict[str, Any] = {}
    if choices:
        new = hasattr(l2l, "Execution")
        settings = (
            {"execution": l2l.Execution(overrides=choices)} if new else {"overrides": choices}
        )
    optimizer = l2l.AdamW(lr=1e-5, **({"moments": "8bit"} if row.moments == "8bit" else {}))
    shape = (row.num_tokens // row.length, row.length)
    words = model.config.vocab_size
    tokens = torch.randint(words, shape, generator=torch.manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    engine = l2l.Engine(
        model,
        optimizer=optimizer,
        device_memory=row.budget,
        clip_norm=row.clip_norm,
        **settings,
    )
    made = time.perf_counter()
    losses = [engine.step(batch).loss]
    first = time.perf_counter()
    losses += [engine.step(batch).loss for _ in range(min(2, row.timed))]
    marks = [time.perf_counter()]
    for _ in range(row.timed):
        losses.append(engine.step(batch).loss)
        marks.append(time.perf_counter())
    expected = engine.plan.predicted_seconds
    seconds = [later - earlier for earlier, later in pairwise(marks)]
    found = {
        "engine_s": round(made - begin, 2),
        "first_step_s": round(first - made, 2),
        "step_s": round(statistics.median(seconds), 4),
        "expected_s": expected,
        "tokens_per_s": round(row.num_tokens / statistics.median(seconds)),
        "peak_GiB": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "losses": [losses[0], losses[-1]],
        "late updates": dict(engine.plan.choices).get("late updates"),
    }
    began = time.perf_counter()
    engine.close()
    return found | {"close_s": round(time.perf_counter() - began, 2)}


def run_rows(names: list[str], without: list[str], num_layers: int) -> None:
    """Every row as planned, and without each of the choices."""
    results, watched = [], Watched()
    for name in names:
        for left_out in ["", *without]:
            found: dict[str, Any]
            try:
                model = make_model(ROWS[name], num_layers)
                with watched:
                    found = measure(model, ROWS[name], WITHOUT[left_out] if left_out else {})
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:300]}
            found["nvidia_smi_GiB"] = watched.gibibytes
            results.append({"row": name, "without": left_out, **found})
            print(json.dumps(results[-1]), flush=True)
    print(json.dumps(results), flush=True)


def compare(folders: list[str], names: list[str], times: int, seconds: float) -> None:
    """Two checkouts in turn, each run in a process of its own, within so many seconds."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    end = time.monotonic() + seconds
    turns = [folders if turn % 2 == 0 else folders[::-1] for turn in range(times)]
    for folder in (one for turn in turns for one in turn):
        with subprocess.Popen(
            [sys.executable, __file__, "--rows", *names],
            env={**os.environ, "PYTHONPATH": folder},
            stdout=subprocess.PIPE,
            text=True,
        ) as running:
            assert running.stdout is not None
            stop = threading.Timer(max(0.0, end - time.monotonic()), running.kill)
            stop.start()
            for line in running.stdout:
                if line.startswith("{"):
                    one = json.loads(line)
                    found.setdefault((one["row"], folder), []).append(one)
                    print(round(end - time.monotonic()), folder, line.strip(), flush=True)
            stop.cancel()
    print(f"{'row':24}{'checkout':28}{'tokens/s':>10}  of each run; first step; peak")
    for (name, folder), runs in sorted(found.items()):
        good = [one for one in runs if "error" not in one]
        if good:
            speeds = [one["tokens_per_s"] for one in good]
            print(
                f"{name:24}{folder:28}{statistics.median(speeds):>10,.0f}  {speeds} "
                f"{[one['first_step_s'] for one in good]} {[one['peak_GiB'] for one in good]}"
            )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--without", nargs="+", choices=WITHOUT, default=[])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--compare", nargs=2, metavar="CHECKOUT")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3600.0, help="all of a comparison")
    given = parser.parse_args()
    if given.compare:
        compare(given.compare, given.rows, given.times, given.seconds)
    else:
        run_rows(given.rows, given.without, given.layers)


if __name__ == "__main__":
    main()
