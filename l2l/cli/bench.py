"""`l2l bench`: the host optimizers, training steps beside other systems, the largest model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from l2l.bench import (
    FAILED,
    PLAIN_VARIANTS,
    SHAPES,
    SYSTEMS,
    Outcome,
    PlotError,
    Run,
    Workload,
    compare,
    describe,
    describe_host,
    draw,
    list_runs,
    measure_host,
    plot_points,
)
from l2l.cli import scale
from l2l.parameter_server import load_kernel

HOST_HELP = """Time the host optimizers against this machine's copy bandwidth, torch's fused AdamW
and, where it is installed, DeepSpeed's CPUAdam: alone, and while the link to the accelerator copies
both ways. Prints a table; the last line is JSON."""

STEP_HELP = """Train one model for a few steps with this engine and, in the same run, with other
systems: plain PyTorch with everything on the device, FSDP2, DeepSpeed and RoundPipe, the last two
where they are installed. Each runs in a process of its own. Prints a table; the last line is JSON.
Ends with status 1 if a run failed."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `l2l bench` takes."""
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    host = subjects.add_parser("host", help="the host optimizers", description=HOST_HELP)
    host.add_argument(
        "--parameters", type=float, default=256e6, help="how many to update (default: 256e6)"
    )
    host.add_argument("--threads", type=int, default=None, help="default: all of torch's")
    host.add_argument("--level", default=None, help="instructions: portable, avx2, avx512")
    _add_step_options(subjects.add_parser("step", help="training steps", description=STEP_HELP))
    scale.add_options(subjects.add_parser("scale", help="the largest model"))
    for subject in subjects.choices.values():
        subject.set_defaults(parser=subject)


def run(parsed: argparse.Namespace) -> int:
    """`l2l bench`; returns the exit status."""
    if parsed.subject == "scale":
        return scale.run(parsed)
    if parsed.subject == "step":
        try:
            runs = _runs_of(parsed)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        return bench_step(runs, folder=parsed.folder, time_limit_seconds=parsed.time_limit)
    return bench_host(
        num_parameters=int(parsed.parameters), num_threads=parsed.threads, level=parsed.level
    )


def bench_host(*, num_parameters: int, num_threads: int | None, level: str | None) -> int:
    """`l2l bench host`."""
    kernel = load_kernel()
    if kernel is None:
        print("the native host kernel was not built. Build it with 'make kernel'.", file=sys.stderr)
        return 1
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    threads = torch.get_num_threads()
    if level is not None:
        try:
            kernel.set_level(level)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    results = measure_host(kernel, num_parameters=num_parameters, num_threads=threads)
    table, data = describe_host(
        results, kernel=kernel, num_parameters=num_parameters, num_threads=threads
    )
    print(table)
    print(json.dumps(data))
    return 0


def bench_step(runs: Sequence[Run], *, folder: Path | None, time_limit_seconds: float) -> int:
    """`l2l bench step`."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    print(f"{len(runs)} runs, the first: {runs[0].label}", file=sys.stderr, flush=True)
    for outcome in compare(runs, time_limit_seconds=time_limit_seconds, folder=folder):
        outcomes.append(outcome)
        found = outcome.measurement
        shown = f"{found.tokens_per_second:,.0f} tokens/s" if found else outcome.status
        print(f"{outcome.run.label}: {shown}", file=sys.stderr, flush=True)
        table, data = describe(outcomes)
        if folder is not None:  # after each, so that nothing is lost if this is stopped
            (folder / "results.json").write_text(json.dumps(data, indent=1))
            title = table.splitlines()[0]
            try:
                (folder / "speed.svg").write_text(draw(plot_points(outcomes), title=title))
            except PlotError as error:
                print(f"no speed.svg: {error}", file=sys.stderr, flush=True)
    print(table)
    print(json.dumps(data))
    return 1 if any(outcome.status == FAILED for outcome in outcomes) else 0


def _runs_of(parsed: argparse.Namespace) -> list[Run]:
    workload = Workload(
        shape=parsed.shape,
        num_layers=parsed.layers,
        num_tokens=parsed.tokens,
        length=parsed.length,
        clip_norm=parsed.clip_norm or None,
        num_warm_up=parsed.warm_up,
        num_steps=parsed.steps,
    )
    return list_runs(
        workload,
        systems=parsed.systems,
        plain_variants=parsed.plain_variants,
        device_memory=parsed.device_memory,
        microbatch_size=parsed.microbatch_size,
        moments=parsed.moments,
    )


def _add_step_options(step: argparse.ArgumentParser) -> None:
    step.add_argument("--shape", choices=list(SHAPES), default="3.2b", help="default: 3.2b")
    step.add_argument("--layers", type=int, default=None, help="default: those of the shape")
    step.add_argument("--tokens", type=int, default=65536, help="a step (default: 65536)")
    step.add_argument("--length", type=int, default=1024, help="of a row (default: 1024)")
    step.add_argument(
        "--microbatch-size",
        type=int,
        default=None,
        metavar="ROWS",
        help="default: planned by the engine, 8 for the others",
    )
    step.add_argument(
        "--device-memory",
        nargs="+",
        default=[],
        metavar="SIZE",
        help="budgets of the engine, such as 4GiB 16GiB: a run for each (default: its own)",
    )
    step.add_argument("--clip-norm", type=float, default=1.0, help="0: off (default: 1.0)")
    step.add_argument(
        "--moments",
        choices=["float32", "8bit"],
        default="float32",
        help="of the engine's AdamW (default: float32)",
    )
    step.add_argument("--steps", type=int, default=3, help="that are timed (default: 3)")
    step.add_argument("--warm-up", type=int, default=2, help="steps before them (default: 2)")
    step.add_argument(
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        default=["engine", "plain"],
        metavar="SYSTEM",
        help=f"of {', '.join(SYSTEMS)} (default: engine plain)",
    )
    step.add_argument(
        "--plain-variants",
        nargs="+",
        choices=PLAIN_VARIANTS,
        default=list(PLAIN_VARIANTS),
        metavar="VARIANT",
        help=f"of {', '.join(PLAIN_VARIANTS)} (default: all)",
    )
    step.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="for results.json, speed.svg, the engine's traces and what each process printed",
    )
    step.add_argument(
        "--time-limit",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="for each system (default: 600)",
    )
