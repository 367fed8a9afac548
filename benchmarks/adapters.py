"""LoRA on a large model: tokens a second within a budget, beside plain PyTorch in memory.

    python benchmarks/adapters.py                    14.8 billion parameters in 8 GiB, and plain
    python benchmarks/adapters.py --budgets 8GiB 16GiB --only ours
    python benchmarks/adapters.py --only ours --base nf4          beside weights in 4 bits (torchao)
    python benchmarks/adapters.py --small --device cpu --compile aot_eager_decomp_partition

Both train the same adapters (on every linear layer but the head) of a model of the shape of Qwen2.5
14B, with random frozen weights in bfloat16, on the same random batch of 16,384 tokens. The engine's
weights are made one by one and are never on the device together; plain PyTorch has them there, and
recomputes its layers. Printed are tokens a second, the device's peak, the time of the first step
(with trial, plan, proof and compilation), the programs that were compiled, and what the plan had
expected. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

LARGE = {"hidden_size": 5120, "intermediate_size": 13_824, "num_hidden_layers": 48,
         "num_attention_heads": 40, "num_key_value_heads": 8, "vocab_size": 152_064}  # fmt: skip
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024}  # fmt: skip
LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained, and on what."""

    shape: dict[str, int]
    rank: int
    dora: bool
    rows: int
    length: int
    steps: int
    device: str

    def model(self, device: str) -> Any:
        """The model with its adapters, on a device; on the meta device without weights."""
        import peft

        settings = {"r": self.rank, "lora_alpha": 2 * self.rank, "use_dora": self.dora}
        adapters = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **settings)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                base = Qwen2ForCausalLM(Qwen2Config(use_cache=False, **self.shape))
        finally:
            torch.set_default_dtype(torch.float32)
        with torch.device(device):
            return peft.get_peft_model(base, adapters).train()

    def batch(self) -> dict[str, torch.Tensor]:
        """Random tokens, in every step the same."""
        words = (self.rows, self.length)
        ids = torch.randint(0, self.shape["vocab_size"], words, generator=torch.manual_seed(1))
        return {"input_ids": ids, "labels": ids}

    def measured(self, step: Callable[[], float]) -> dict[str, Any]:
        """Make steps: the first, one more, and those that are timed."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        losses = [step()]
        first = time.perf_counter() - begin
        losses.append(step())
        marks = [time.perf_counter()]
        for _ in range(self.steps):
            losses.append(step())
            marks.append(time.perf_counter())
        seconds = [later - earlier for earlier, later in pairwise(marks)]
        middle = statistics.median(seconds)
        peak = torch.cuda.max_memory_reserved() / 2**30 if self.device == "cuda" else None
        return {
            "tokens_per_s": round(self.rows * self.length / middle),
            "step_s": round(middle, 3),
            "spread_s": [round(min(seconds), 3), round(max(seconds), 3)],
            "first_s": round(first, 1),
            "peak_GiB": None if peak is None else round(peak, 2),
            "losses": [losses[0], losses[-1]],
        }


def ours(task: Task, budget: str, compiled: str | None, base: str | None) -> dict[str, Any]:
    """The engine, within a budget."""
    import l2l

    begin = time.perf_counter()
    batch = task.batch()
    with l2l.Engine(
        task.model("meta"),
        weights=l2l.RandomInit(seed=0),
        optimizer=l2l.AdamW(lr=LEARNING_RATE),
        device_memory=budget,
        device=task.device,
        compile=compiled,
        base=base,
    ) as engine:
        made = time.perf_counter() - begin
        found = task.measured(lambda: float(engine.step(batch).loss))
        plan = engine.plan
        print(plan, flush=True)
        return found | {
            "made_s": round(made, 1),
            "expected_s": round(plan.predicted_seconds or 0.0, 3),
            "layers_run": dict(plan.choices)["layers run"],
        }


def plain(task: Task, rows: int) -> dict[str, Any]:
    """Plain PyTorch, with accumulation over microbatches of so many rows."""
    model = task.model(task.device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=task.device == "cuda")
    batch = {name: one.to(task.device) for name, one in task.batch().items()}

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for start in range(0, task.rows, rows):
            part = {name: one[start : start + rows] for name, one in batch.items()}
            loss = model(**part).loss * (len(part["labels"]) / task.rows)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return float(total)

    return task.measured(step)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--budgets", nargs="+", default=["8GiB"], metavar="SIZE")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dora", action="store_true")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--layers", type=int, help="fewer of them")
    parser.add_argument("--steps", type=int, default=3, help="that are timed")
    parser.add_argument("--plain-rows", type=int, default=2, help="of a microbatch")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", metavar="BACKEND")
    parser.add_argument("--small", action="store_true", help="a small shape, to see it run")
    parser.add_argument("--base", choices=("nf4", "int8"))
    parser.add_argument("--only", choices=("plain", "ours"))
    given = parser.parse_args()
    shape = dict(SMALL if given.small else LARGE)
    shape["num_hidden_layers"] = given.layers or shape["num_hidden_layers"]
    length = min(given.length, 64) if given.small else given.length
    task = Task(shape, given.rank, given.dora, given.rows, length, given.steps, given.device)
    logging.basicConfig(level=logging.INFO)
    warnings.simplefilter("ignore", FutureWarning)

    runs: dict[str, Callable[[], dict[str, Any]]] = {}
    if given.only != "plain":
        for budget in given.budgets:
            runs[f"ours in {budget}"] = lambda budget=budget: ours(
                task, budget, given.compile, given.base
            )
    if given.only != "ours":
        runs["plain"] = lambda: plain(task, given.plain_rows)
    results = []
    for system, run in runs.items():
        try:
            found = run()
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:1500]}
        results.append({"system": system, **found})
        print(json.dumps(results[-1]), flush=True)
        gc.collect()
        if given.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
