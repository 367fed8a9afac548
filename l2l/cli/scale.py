"""`l2l bench scale`: how large a model this machine trains."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from l2l.bench import (
    CONFIRMED,
    LEARNING_RATES,
    SHAPES,
    Scale,
    ScaleResult,
    StepFacts,
    child_process,
    describe_scale,
    measure_scale,
)

DESCRIPTION = """Train a model of a given size, or the largest that fits this machine (%(most)s of
what the planner says), for a few steps on real text, with random weights that are made layer by
layer. Prints the plan, a line for each step, and how busy each lane was; the last line is JSON.
Several optimizers are tried one after the other, each in a process of its own."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.description = DESCRIPTION % {"most": f"{CONFIRMED:.0%}"}
    parser.add_argument("--shape", choices=list(SHAPES), default="50b", help="default: 50b")
    parser.add_argument(
        "--parameters", type=float, default=None, help="such as 50e9 (default: as many as fit)"
    )
    parser.add_argument(
        "--optimizer",
        nargs="+",
        choices=list(LEARNING_RATES),
        default=["adafactor"],
        metavar="NAME",
        help=f"of {', '.join(LEARNING_RATES)} (default: adafactor)",
    )
    parser.add_argument("--device-memory", default=None, metavar="SIZE", help="such as 16GiB")
    parser.add_argument("--host-memory", default=None, metavar="SIZE", help="such as 120GiB")
    parser.add_argument("--tokens", type=int, default=16384, help="a step (default: 16384)")
    parser.add_argument("--length", type=int, default=1024, help="of a row (default: 1024)")
    parser.add_argument("--steps", type=int, default=5, help="default: 5")


def run(parsed: argparse.Namespace) -> int:
    """The verb; returns the exit status."""
    started_at = time.time()
    try:
        scales = [
            Scale(
                shape=parsed.shape,
                num_parameters=parsed.parameters,
                optimizer=optimizer,
                device_memory=parsed.device_memory,
                host_memory=parsed.host_memory,
                num_tokens=parsed.tokens,
                length=parsed.length,
                num_steps=parsed.steps,
                started_at=started_at,
            )
            for optimizer in parsed.optimizer
        ]
        results = [measure_scale(scales[0], tell=_tell)] if len(scales) == 1 else _apart(scales)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if len(scales) == 1:
        print(results[0].plan)
        shares = ", ".join(f"{lane} {share:.0%}" for lane, share in results[0].busy.items())
        print(f"busy in the last step: {shares}")
    print(describe_scale(results))
    print(json.dumps([asdict(one) for one in results]))
    return 0 if len(results) == len(scales) else 1


def _tell(line: str) -> None:
    print(line, flush=True)


def _apart(scales: Sequence[Scale]) -> list[ScaleResult]:
    """Each optimizer in a process of its own: only its end gives the memory back."""
    results = []
    for scale in scales:
        options = {
            "--shape": scale.shape,
            "--parameters": scale.num_parameters,
            "--optimizer": scale.optimizer,
            "--device-memory": scale.device_memory,
            "--host-memory": scale.host_memory,
            "--tokens": scale.num_tokens,
            "--length": scale.length,
            "--steps": scale.num_steps,
        }
        words = [str(word) for pair in options.items() if pair[1] is not None for word in pair]
        command = [sys.executable, "-m", "l2l", "bench", "scale", *words]
        with child_process.started(command) as process:
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                if last:
                    _tell(last)
                last = line.rstrip()
        if process.returncode == 0:
            results.append(_read(json.loads(last)[0]))
    return results


def _read(data: dict[str, Any]) -> ScaleResult:
    return ScaleResult(**{**data, "steps": [StepFacts(**one) for one in data["steps"]]})
