"""The command line: each verb parses, calls one function, prints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

import torch

from l2l.benchmark import describe_host, measure_host
from l2l.parameter_server import load_kernel

HOST_HELP = """Time the host optimizers against this machine's copy bandwidth, torch's fused AdamW
and, where it is installed, DeepSpeed's CPUAdam: alone, and while the link to the accelerator copies
both ways. Prints a table; the last line is JSON."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="l2l", description="Layer-to-layer training: models that do not fit the device."
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    bench = verbs.add_parser("bench", help="measure this machine")
    subjects = bench.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    host = subjects.add_parser("host", help="the host optimizers", description=HOST_HELP)
    host.add_argument(
        "--parameters", type=float, default=256e6, help="how many to update (default: 256e6)"
    )
    host.add_argument("--threads", type=int, default=None, help="default: all of torch's")
    host.add_argument("--level", default=None, help="instructions: portable, avx2, avx512")
    parsed = parser.parse_args(arguments)
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
