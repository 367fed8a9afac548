"""`l2l bench`: the host optimizers, training steps beside other systems, the largest model."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from l2l.bench import (
    CONFIRMED,
    FAILED,
    LEARNING_RATES,
    PLAIN_VARIANTS,
    SYSTEMS,
    Run,
    Scale,
    Workload,
    compare,
    describe_host,
    describe_scale,
    list_runs,
    measure_host,
    measure_scales,
    read_options,
    take_options,
)
from l2l.parameter_server import load_kernel

HOST_HELP = """Time the host optimizers against this machine's copy bandwidth, torch's fused AdamW
and, where it is installed, DeepSpeed's CPUAdam: alone, and while the link to the accelerator copies
both ways. Prints a table; the last line is JSON."""

STEP_HELP = """Train one model for a few steps with this engine and, in the same run, with other
systems: plain PyTorch with everything on the device, FSDP2, DeepSpeed and RoundPipe, the last two
where they are installed. Each runs in a process of its own. Prints a table; the last line is JSON.
Ends with status 1 if a run failed."""

SCALE_HELP = f"""Train a model of a given size, or the largest that fits this machine
({CONFIRMED:.0%} of what the planner says), for a few steps on real text, with random weights that
are made layer by layer. Prints the plan, a line for each step, and how busy each lane was; the last
line is JSON. Several optimizers are tried one after the other, each in a process of its own."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `l2l bench` takes."""
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    host = subjects.add_parser("host", help="the host optimizers", description=HOST_HELP)
    host.add_argument(
        "--parameters", type=float, default=256e6, help="how many to update (default: 256e6)"
    )
    host.add_argument("--threads", type=int, help="default: all of torch's")
    host.add_argument("--level", help="instructions: portable, avx2, avx512")
    step = subjects.add_parser("step", help="training steps", description=STEP_HELP)
    take_options(step, Workload)
    take_options(step, Run)
    words = "budgets of the engine, such as 4GiB 16GiB: a run for each (default: its own)"
    step.add_argument("--device-memory", nargs="+", default=[], metavar="SIZE", help=words)
    _take_several(step, "--systems", SYSTEMS, ["engine", "plain"])
    _take_several(step, "--plain-variants", PLAIN_VARIANTS, list(PLAIN_VARIANTS))
    words = "for results.json, speed.svg, the engine's traces and what each process printed"
    step.add_argument("--folder", type=Path, help=words)
    words = "for each system (default: 600)"
    step.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS", help=words)
    scale = subjects.add_parser("scale", help="the largest model", description=SCALE_HELP)
    take_options(scale, Scale)
    _take_several(scale, "--optimizer", LEARNING_RATES, ["adafactor"])
    for subject, measure in ((host, bench_host), (step, bench_step), (scale, bench_scale)):
        subject.set_defaults(parser=subject, measure=measure)


def _take_several(
    parser: argparse.ArgumentParser, flag: str, choices: Iterable[str], default: list[str]
) -> None:
    names = list(choices)
    usual = "all" if default == names else " ".join(default)
    words = f"of {', '.join(names)} (default: {usual})"
    parser.add_argument(flag, nargs="+", choices=names, default=default, metavar="NAME", help=words)


def run(parsed: argparse.Namespace) -> int:
    """`l2l bench`; returns the exit status."""
    return int(parsed.measure(parsed))


def bench_host(parsed: argparse.Namespace) -> int:
    """`l2l bench host`."""
    kernel = load_kernel()
    if kernel is None:
        print("the native host kernel was not built. Build it with 'make kernel'.", file=sys.stderr)
        return 1
    if parsed.threads is not None:
        torch.set_num_threads(parsed.threads)
    if parsed.level is not None:
        kernel.set_level(parsed.level)
    number, threads = int(parsed.parameters), torch.get_num_threads()
    found = measure_host(kernel, num_parameters=number, num_threads=threads)
    print(f"{describe_host(found)}\n{json.dumps(found)}")
    return 0


def bench_step(parsed: argparse.Namespace) -> int:
    """`l2l bench step`."""
    parsed.clip_norm = parsed.clip_norm or None
    runs = list_runs(
        read_options(Run, parsed, workload=read_options(Workload, parsed)),
        systems=parsed.systems,
        plain_variants=parsed.plain_variants,
        device_memory=parsed.device_memory,
    )
    tell = partial(print, file=sys.stderr, flush=True)
    tell(f"{len(runs)} runs, the first: {runs[0].label}")
    table, found = compare(
        runs, time_limit_seconds=parsed.time_limit, folder=parsed.folder, tell=tell
    )
    print(f"{table}\n{json.dumps(found)}")
    return 1 if any(one["status"] == FAILED for one in found["results"]) else 0


def bench_scale(parsed: argparse.Namespace) -> int:
    """`l2l bench scale`."""
    started_at = time.time()
    scales = [
        read_options(Scale, parsed, optimizer=optimizer, started_at=started_at)
        for optimizer in parsed.optimizer
    ]
    results = measure_scales(scales, tell=partial(print, flush=True))
    print(f"{describe_scale(results)}\n{json.dumps(results)}")
    return 0 if len(results) == len(scales) else 1
