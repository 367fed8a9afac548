"""What the parameter server costs: host bytes a parameter, and step time with and without updates.

A Llama shape of 3.2 billion parameters (hidden 3072, 28 layers, 24 heads, 8 key-value heads,
perceptron 8192, vocabulary 128,256, tied), random tokens, sequences of 1,024, bfloat16 on the
device. For each way to update: seconds a step, growth of the process's resident memory from before
`Engine(...)` to after the fifth step without the stash, and from a trace of two steps how much of
the host's update time lies under device compute. Prints a table, then one line of JSON.

    python benchmarks/parameter_server.py [--tokens 65536] [--layers 28] [--cases eager clipped ...]
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import l2l
from l2l.parameter_server import HostOptimizer
from l2l.parameter_server.optimizer import Settings, StateKind, Update

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import inside

LENGTH, ROWS = 1024, 8
ALL_STREAMED = {"num_tail": 0, "num_device_states": 0, "num_shared": 0, "outer_state": False}


@dataclass(frozen=True, kw_only=True)
class NoUpdate(HostOptimizer):
    """The step with its update left out."""

    @property
    def defaults(self) -> dict[str, Any]:
        """No settings but a rate."""
        return {"lr": 0.0}

    def state_kinds(self, settings: Settings) -> dict[str, StateKind]:
        """No state."""
        return {}

    def arithmetic(self, weight: torch.Tensor, gradient: torch.Tensor, update: Update) -> None:
        """Nothing."""

    def readable(self, update: Update) -> float:
        """Nothing."""
        return 0.0


CASES: dict[str, dict[str, Any]] = {
    "update left out": {"optimizer": NoUpdate()},
    "AdamW, eager": {"optimizer": l2l.AdamW(lr=1e-5)},
    "AdamW, clipped": {"optimizer": l2l.AdamW(lr=1e-5), "clip_norm": 1.0},
    "8-bit, eager": {"optimizer": l2l.AdamW(lr=1e-5, moments="8bit")},
    "8-bit, clipped": {"optimizer": l2l.AdamW(lr=1e-5, moments="8bit"), "clip_norm": 1.0},
    "Adafactor, on the device": {"optimizer": l2l.Adafactor(lr=1e-5)},
}


def resident_bytes() -> int:
    """Resident memory of this process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def measure(
    model: torch.nn.Module, name: str, batch: dict[str, torch.Tensor], folder: Path | None
) -> dict[str, Any]:
    """One case."""
    gc.collect()
    torch.cuda.empty_cache()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    before = resident_bytes()
    started = time.perf_counter()
    engine = l2l.Engine(
        model,
        microbatch_size=ROWS,
        compile=False,
        execution=l2l.Execution(overrides=ALL_STREAMED),
        **CASES[name],
    )
    built = time.perf_counter() - started
    engine.device.reset_peak()
    losses = [engine.step(batch).loss for _ in range(2)]
    torch.cuda.synchronize()
    mark = time.perf_counter()
    for _ in range(3):
        losses.append(engine.step(batch).loss)  # the loss of a step comes after its forward
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - mark) / 3
    stash = inside.arena(engine).bytes_by_name["stash"]
    growth = resident_bytes() - before - stash
    peak = engine.device.peak_bytes()
    with engine.trace() as trace:
        for _ in range(2):
            engine.step(batch)
    if folder is not None:
        trace.write(folder / f"{name.replace(' ', '-').replace(',', '')}.json")
    plan = str(engine.plan)
    engine.close()
    return {
        "case": name,
        "build_seconds": round(built, 2),
        "step_seconds": round(seconds, 3),
        "tokens_per_second": round(batch["input_ids"].numel() / seconds),
        "host_bytes_per_parameter": round(growth / num_parameters, 2),
        "stash_GiB": round(stash / 2**30, 2),
        "device_peak_GiB": round(peak / 2**30, 2),
        "update_seconds": round(trace.busy_seconds("update") / 2, 3),
        "under_device_seconds": round(trace.overlap_seconds("update", "compute") / 2, 3),
        "busy": {
            lane: round(trace.busy_seconds(lane) / trace.seconds, 3)
            for lane in ("compute", "fetch", "drain", "stash", "unstash", "update")
        },
        "losses": [round(loss, 4) for loss in losses],
        "plan": plan,
    }


def main() -> None:
    """Measure the cases one after the other, on one model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65536, help="tokens a step")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--threads", type=int, default=None, help="of the host optimizer")
    parser.add_argument("--folder", type=Path, default=None, help="for Chrome traces")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    config = LlamaConfig(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=arguments.layers,
        num_attention_heads=24,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    ids = torch.randint(0, config.vocab_size, (arguments.tokens // LENGTH, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.tokens} tokens")
    print("| case | step | tokens/s | host bytes a parameter | updates | of them under compute |")
    print("|---|---|---|---|---|---|")
    results = []
    for name in arguments.cases:
        found = measure(model, name, batch, arguments.folder)
        results.append(found)
        print(
            f"| {name} | {found['step_seconds']:.3f} s | {found['tokens_per_second']:,} | "
            f"{found['host_bytes_per_parameter']:.2f} | {found['update_seconds']:.2f} s | "
            f"{found['under_device_seconds']:.2f} s |  built in {found['build_seconds']} s, "
            f"device peak {found['device_peak_GiB']} GiB, busy {found['busy']}",
            flush=True,
        )
    print(results[1 if len(results) > 1 else 0]["plan"])
    print(json.dumps([{k: v for k, v in one.items() if k != "plan"} for one in results]))


if __name__ == "__main__":
    main()
