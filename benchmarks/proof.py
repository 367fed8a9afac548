"""What the proof of the first step takes: seconds and device memory, and what it compares.

    python benchmarks/proof.py [--shape 3.2b] [--budgets 4GiB 16GiB 80GiB] [--clip-norm 1.0]

For each budget, an engine's first step in a process that has run nothing: seconds of the model's
own code, of the engine on the same rows, and of the whole step; the most device memory in use at
the end of the proof; how far gradients are apart. Then the same with what was proven remembered.
`--compare 2` instead runs the first step in processes of its own, twice with the proof and twice
without in turn: the difference is what the proof adds. The last line is JSON.
"""

import argparse
import cProfile
import gc
import json
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import l2l
import l2l.proof.proof
from l2l.bench.workload import Workload
from l2l.proof import Proof, ProofMemory
from l2l.proof.evidence import _distance, _norm

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import inside

PROFILES = False
seconds: dict[str, float] = {}
apart: dict[str, Any] = {}


def timed(kind: type, name: str, word: str) -> None:
    """Count the seconds of a method."""
    method = getattr(kind, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        torch.accelerator.synchronize()
        began = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            torch.accelerator.synchronize()
            seconds[word] = seconds.get(word, 0.0) + time.perf_counter() - began

    setattr(kind, name, run)


def profiled(kind: type, name: str) -> None:
    """Run a method twice, and print where the time went each time."""
    method = getattr(kind, name)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        for _ in range(2):
            self._theirs = None
            profile = cProfile.Profile()
            began = time.perf_counter()
            profile.runcall(method, self, *args, **kwargs)
            torch.accelerator.synchronize()
            print(f"model's own code, profiled: {time.perf_counter() - began:.2f} s")
            pstats.Stats(profile).sort_stats("tottime").print_stats(14)

    if PROFILES:
        setattr(kind, name, run)


def watch() -> None:
    """Note times, and how far gradients are apart."""
    profiled(Proof, "see")
    timed(Proof, "see", "model's own code")
    timed(Proof, "check", "engine and comparison")
    timed(Proof, "is_done", "key")
    check = l2l.proof.proof.check

    def compared(mine: Any, theirs: Any, **rest: Any) -> None:
        ratios = {
            name: _distance(mine.gradients.get(name), one) / max(_norm(one), 1e-30)
            for name, one in theirs.gradients.items()
        }
        worst = max(ratios, key=lambda name: ratios[name])
        apart.update(
            compared=len(ratios),
            equal=sum(not one for one in ratios.values()),
            worst=f"{worst} {ratios[worst]:.2e}",
            median=f"{sorted(ratios.values())[len(ratios) // 2]:.2e}",
            losses=[mine.losses, theirs.losses],
        )
        check(mine, theirs, **rest)

    l2l.proof.proof.check = compared


def first_step(workload: Workload, budget: str, *, prove: bool = True) -> dict[str, Any]:
    """One engine's first step."""
    seconds.clear()
    apart.clear()
    model = workload.model(torch.device("meta"))
    ids = workload.ids()
    batch = {"input_ids": ids, "labels": ids}
    optimizer = l2l.AdamW(lr=1e-5)
    engine = l2l.Engine(
        model,
        weights=l2l.RandomInit(seed=0),
        optimizer=optimizer,
        clip_norm=workload.clip_norm,
        device_memory=budget,
        prove=prove,
    )
    began = time.perf_counter()
    loss = engine.step(batch).loss
    found = {"budget": budget, "first step": time.perf_counter() - began, "loss": loss}
    found |= {**seconds, **apart, "prove": prove}
    engine.close(give_back=False)
    del engine
    gc.collect()
    found["left on the device"] = torch.accelerator.memory_allocated()
    return found


def compare(budgets: list[str], times: int) -> None:
    """First steps with and without the proof, each in a process of its own."""
    found: list[dict[str, Any]] = []
    for budget in budgets:
        for flags in [[], ["--no-proof"]] * times:
            command = [sys.executable, __file__, "--budgets", budget, *flags]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found += json.loads(output.splitlines()[-1])
            print({key: found[-1][key] for key in ("budget", "prove", "first step")}, flush=True)
    print(json.dumps(found))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", default="3.2b")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--budgets", nargs="+", default=["4GiB", "16GiB", "80GiB"])
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--compare", type=int, default=0, metavar="TIMES")
    parser.add_argument("--no-proof", action="store_true")
    given = parser.parse_args()
    if given.compare:
        compare(given.budgets, given.compare)
        return
    globals()["PROFILES"] = given.profile
    watch()
    workload = Workload(
        shape=given.shape,
        num_layers=given.layers,
        num_tokens=given.tokens,
        clip_norm=given.clip_norm or None,
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        inside.remember_proofs_in(ProofMemory(Path(folder)))
        for budget in given.budgets:
            rows.append(first_step(workload, budget, prove=not given.no_proof))
            print(
                {k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()},
                flush=True,
            )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
