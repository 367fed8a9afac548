"""`l2l bench first`: from a model in memory to the end of the first step, cold and warm.

    python -m l2l.bench.first '{"workload": {"shape": "tiny"}}'

is one such process and prints a line of JSON, last. The first of two has an empty home: nothing was
measured, planned, proven or compiled before. The second has what the first has left there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch

from l2l.bench import child_process
from l2l.bench.options import Tell, option, read_options, take_options
from l2l.bench.peers import LEARNING_RATE
from l2l.bench.workload import Workload, forget_peak
from l2l.device import num_devices
from l2l.engine import Engine, Execution
from l2l.parameter_server import AdamW

HELP = """From a model in memory to the end of the first step: seconds by phase, and ten steps
beside ten steady ones; in a process with an empty home (cold), then in one with what that has left
there (warm). Prints a table. Ends with status 1 if a run failed."""

TEN = 10
MOST_STEPS = 500  # until layers run compiled
SEARCHED = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # where else something may be kept
KINDS = ("cold", "warm")
Measurement = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """What is measured in one process."""

    workload: Workload = field(default_factory=Workload)
    device_memory: str | None = option("--device-memory", None, "budget, such as 4GiB")
    microbatch_size: int | None = option(
        "--microbatch-size", None, "default: planned", metavar="ROWS"
    )
    compile: str | None = option(
        "--compile", None, "a backend of torch.compile (default: on an accelerator, inductor)"
    )
    compile_ahead: str = option(
        "--compile-ahead",
        "wait",
        "compile in the first step, or beside steps",
        choices=["wait", "background"],
    )

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """A run from its fields; those left out have their defaults."""
        fields = json.loads(text)
        return cls(**{**fields, "workload": Workload(**fields.get("workload", {}))})


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `l2l bench first` takes."""
    take_options(parser, Workload)
    take_options(parser, FirstStep)
    words = "for each process (default: 600)"
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS", help=words)


def run(parsed: argparse.Namespace, tell: Tell) -> tuple[str, Any, int]:
    """`l2l bench first`.

    Raises:
        ValueError: an option does not fit the workload.
    """
    parsed.clip_norm = parsed.clip_norm or None
    asked = read_options(FirstStep, parsed, workload=read_options(Workload, parsed))
    found: dict[str, Measurement] = {}
    with tempfile.TemporaryDirectory() as home:
        for kind in KINDS:
            found[kind] = _measured(asked, Path(home), parsed.time_limit)
            tell(f"{kind}: {_told(found[kind])}", file=sys.stderr)
    failed = any("note" in one for one in found.values())
    return describe(found), {"asked": asdict(asked), **found}, int(failed)


def _measured(asked: FirstStep, home: Path, time_limit_seconds: float) -> Measurement:
    """What a process with this home has measured; else a note why not."""
    unset = [word for name in SEARCHED for word in ("-u", name)]
    command = ["env", *unset, f"HOME={home}", sys.executable, "-m", "l2l.bench.first"]
    output, errors, note = child_process.run([*command, asked.to_json()], time_limit_seconds)
    try:
        found: Measurement = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
        return {"note": f"{note}: {last}"}
    return found


def measure(asked: FirstStep) -> Measurement:
    """Make an engine of a model in memory and step, in this process."""
    workload, device = asked.workload, torch.device("cuda" if num_devices() else "cpu")
    model, ids = workload.model(device).cpu(), workload.ids()
    forget_peak(device)
    began = time.perf_counter()
    engine = Engine(
        model,
        optimizer=AdamW(lr=LEARNING_RATE),
        clip_norm=workload.clip_norm,
        device=device,
        device_memory=asked.device_memory,
        microbatch_size=asked.microbatch_size,
        compile=asked.compile,
        execution=Execution(compile_ahead=asked.compile_ahead),
    )
    marks, compiled, losses = [began], list[bool | None](), list[float]()

    def step() -> None:
        report = engine.step({"input_ids": ids, "labels": ids})
        losses.append(report.loss)
        marks.append(time.perf_counter())
        compiled.append(report.compiled)

    while len(losses) < TEN or (compiled[-1] is False and len(losses) < MOST_STEPS):
        step()
    for _ in range(workload.num_warm_up + workload.num_steps):
        step()
    seconds = [later - earlier for earlier, later in pairwise(marks)]
    plan = engine.plan
    found = {
        "first_step_seconds": seconds[0],
        "ten_steps_seconds": marks[TEN] - began,
        "steady_seconds": statistics.median(seconds[-workload.num_steps :]),
        "phases": dict(plan.first_step),
        "compiled_from": compiled.index(True) + 1 if True in compiled else None,
        "losses": losses,
        "plan": str(plan),
        "device": engine.device.name,
        "torch_version": torch.__version__,
    }
    engine.close(give_back=False)
    return found


# ---- the table ----------------------------------------------------------------------------------


def _told(found: Measurement) -> str:
    return found.get("note") or f"first step after {found['first_step_seconds']:.1f} s"


def describe(found: dict[str, Measurement]) -> str:
    """Seconds of each kind of run, one below the other."""
    measured = {kind: one for kind, one in found.items() if "note" not in one}
    lines = [f"{kind}: failed, {one['note']}" for kind, one in found.items() if "note" in one]
    if not measured:
        return "\n".join(lines)
    names = dict.fromkeys(name for one in measured.values() for name in one["phases"])
    rows = {f"  {name}": [one["phases"].get(name) for one in measured.values()] for name in names}
    rows["  on the device, after that"] = [
        one["first_step_seconds"] - sum(one["phases"].values()) for one in measured.values()
    ]
    rows["to the end of the first step"] = [one["first_step_seconds"] for one in measured.values()]
    rows["to the end of ten steps"] = [one["ten_steps_seconds"] for one in measured.values()]
    rows["ten steady steps"] = [TEN * one["steady_seconds"] for one in measured.values()]
    rows["ten steps beyond ten steady ones"] = [
        one["ten_steps_seconds"] - TEN * one["steady_seconds"] for one in measured.values()
    ]
    first = next(iter(measured.values()))
    lines.append(
        f"seconds from a model in memory; {first['device']}, torch {first['torch_version']}"
    )
    lines.append(f"{'':<34}" + "".join(f"{kind:>10}" for kind in measured))
    for name, row in rows.items():
        cells = "".join(f"{'-' if one is None else format(one, '.2f'):>10}" for one in row)
        lines.append(f"{name:<34}{cells}")
    steps = (one["compiled_from"] for one in measured.values())
    cells = "".join(f"{'never' if one is None else one:>10}" for one in steps)
    return "\n".join([*lines, f"{'layers run compiled from step':<34}{cells}"])


def main(arguments: Sequence[str]) -> int:
    """Measure one run, given as JSON; the last line printed is JSON too."""
    print(json.dumps(measure(FirstStep.from_json(arguments[0]))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
