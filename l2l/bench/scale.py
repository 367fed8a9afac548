"""How large a model this machine trains: `l2l bench scale`.

A Llama shape with as many layers as were asked for, or as the planner says will fit, is trained for
a few steps on real text: the sources of Python's standard library, which are on every machine, cut
into words. Weights are random and made layer by layer on the device, straight into the parameter
server; the model never exists anywhere else.

Everything happens in this process, which is to end afterwards: closing the engine would give the
weights back to the model, and there is no memory for both.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from l2l.bench import child_process
from l2l.bench.options import Tell, as_words, option, read_options, take_options, take_several
from l2l.bench.workload import SHAPES, Workload, busy_lanes, host_peak_bytes
from l2l.device import format_bytes, parse_bytes
from l2l.engine import Engine
from l2l.hugging_face import RandomInit
from l2l.parameter_server import OPTIMIZERS, Optimizer
from l2l.planner import largest_model

LEARNING_RATES = {"adafactor": 1e-3, "adamw": 1e-5, "adamw-8bit": 1e-5}
CONFIRMED = 0.95  # of the largest model: what is trained to confirm it
WORDS = re.compile(r"\w+|[^\w\s]|\n")
TEXT_BYTES = 64  # of text for a token, at most

HELP = f"""Train a model of a given size, or the largest that fits this machine
({CONFIRMED:.0%} of what the planner says), for a few steps on real text, with random weights that
are made layer by layer. Prints the plan, a line for each step, and how busy each lane was; the last
line is JSON. Several optimizers are tried one after the other, each in a process of its own."""

ScaleResult = dict[str, Any]  # what came of it, as JSON has it: `_measure` has the names


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(Workload):
    """What to train."""

    shape: str = option("--shape", "50b", choices=list(SHAPES))
    num_layers: int | None = None  # what fits, or has so many parameters
    num_parameters: float | None = option(
        "--parameters", None, "such as 50e9 (default: as many as fit)"
    )
    optimizer: str = "adafactor"
    device_memory: str | None = option("--device-memory", None, "such as 16GiB", metavar="SIZE")
    host_memory: str | None = option("--host-memory", None, "such as 120GiB", metavar="SIZE")
    num_tokens: int = option("--tokens", 16384, "a step")
    clip_norm: float | None = None
    num_warm_up: int = 1  # what takes longer is not counted
    num_steps: int = option("--steps", 5)
    started_at: float = 0.0  # when the process was, in seconds since the epoch

    @override
    def __post_init__(self) -> None:
        Workload.__post_init__(self)
        for flag, size in (("device", self.device_memory), ("host", self.host_memory)):
            if size is not None:
                parse_bytes(size, name=f"--{flag}-memory")

    def with_layers(self, number: int) -> nn.Module:
        """The model with so many layers, without weights."""
        return replace(self, num_layers=number).model(torch.device("meta"))

    def make_optimizer(self) -> Optimizer:
        """The optimizer that was named."""
        return OPTIMIZERS[self.optimizer](lr=LEARNING_RATES[self.optimizer])

    def count(self, num_layers: int) -> int:
        """Parameters of a model with so many layers."""
        return sum(parameter.numel() for parameter in self.with_layers(num_layers).parameters())

    def least_layers(self, num_parameters: float) -> int:
        """The least layers with so many parameters.

        Raises:
            ValueError: all of them are around the layers.
        """
        one, two = self.count(1), self.count(2)
        number = 1 + math.ceil((num_parameters - one) / (two - one))
        if number < 1:
            raise ValueError(
                f"--parameters {num_parameters:g}: the shape {self.shape} has {one:,} with a "
                "single layer. Give more, or a smaller --shape."
            )
        return number

    def most_layers(self) -> int:
        """The most layers that fit host and device.

        Raises:
            ValueError: not even a few do.
        """
        found = largest_model(
            self.with_layers,
            host_memory=self.host_memory,
            num_rows=self.num_rows,
            length=self.length,
            device_memory=self.device_memory,
            optimizer=self.make_optimizer(),
        )
        if found is None:
            raise ValueError(
                f"nothing of the shape {self.shape} fits {self.device_memory or 'the device'}. "
                "Give more --device-memory, fewer --tokens or a smaller --shape."
            )
        return found[0]


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `l2l bench scale` takes."""
    take_options(parser, Scale)
    take_several(parser, "--optimizer", LEARNING_RATES, ["adafactor"])


def run(parsed: argparse.Namespace, tell: Tell) -> tuple[str, Any, int]:
    """`l2l bench scale`.

    Raises:
        ValueError: there is no such model, or a single one does not fit.
    """
    make = partial(read_options, Scale, parsed, started_at=time.time())
    results = measure_scales([make(optimizer=name) for name in parsed.optimizer], tell)
    return describe_scale(results), results, int(len(results) < len(parsed.optimizer))


def measure_scales(scales: Sequence[Scale], tell: Tell) -> list[ScaleResult]:
    """Train some steps of each; `tell` is given a line for each thing that happens.

    Several are measured in a process each, since only its end gives the memory back; those that
    fail are left out.

    Raises:
        ValueError: a single one does not fit.
    """
    if len(scales) == 1:
        return [_measure(scales[0], tell)]
    results = []
    for scale in scales:
        words = [*as_words(scale), "--optimizer", scale.optimizer, "--json"]
        command = [sys.executable, "-m", "l2l", "bench", "scale", *words]
        with child_process.started(command) as process:
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                if last:
                    tell(last)
                last = line.rstrip()
        if process.returncode == 0:
            results += json.loads(last)
    return results


def _measure(scale: Scale, tell: Tell) -> ScaleResult:
    largest = largest_parameters = None
    if scale.num_parameters is not None:
        num_layers = scale.least_layers(scale.num_parameters)
    else:
        largest = scale.most_layers()
        largest_parameters = scale.count(largest)
        tell(f"{scale.optimizer}: {largest} layers would fit, {largest_parameters:,} parameters")
        num_layers = max(1, int(CONFIRMED * largest))
    num_parameters = scale.count(num_layers)
    tell(f"{scale.optimizer}: {num_layers} layers, {num_parameters:,} parameters")
    engine = Engine(
        scale.with_layers(num_layers),
        optimizer=scale.make_optimizer(),
        weights=RandomInit(0),
        device_memory=scale.device_memory,
        host_memory=scale.host_memory,
    )
    tell(f"random weights are there after {time.time() - scale.started_at:.0f} s")
    steps, busy, first = _train(engine, scale, tell)
    tell(str(engine.plan))
    tell(f"busy in the last step: {', '.join(f'{lane} {one:.0%}' for lane, one in busy.items())}")
    return {
        "optimizer": scale.optimizer,
        "num_layers": num_layers,
        "num_parameters": num_parameters,
        "largest_layers": largest,  # that the planner found; None: not asked
        "largest_parameters": largest_parameters,
        "steps": steps,
        # Of the fastest step: the first also compiles.
        "tokens_per_second": scale.num_tokens / min(one["seconds"] for one in steps),
        "device_peak_bytes": engine.device.peak_bytes(),
        "host_peak_bytes": host_peak_bytes(),
        "busy": busy,  # share of the last step, by lane
        "plan": str(engine.plan),
        "seconds_to_first_step": first,  # from the start of the process, as the next
        "seconds": time.time() - scale.started_at,
    }


def _train(
    engine: Engine, scale: Scale, tell: Tell
) -> tuple[list[dict[str, float]], dict[str, float], float]:
    """Loss and seconds of the steps, how busy lanes were in the last, when the first had ended."""
    steps: list[dict[str, float]] = []
    busy, first = dict[str, float](), 0.0
    text = text_ids(scale.num_tokens * scale.num_steps, SHAPES[scale.shape].vocab_size)
    for number, ids in enumerate(text.view(scale.num_steps, -1, scale.length), start=1):
        is_traced = 1 < number == scale.num_steps
        began = time.perf_counter()
        with engine.trace() if is_traced else contextlib.nullcontext() as trace:
            loss = engine.step({"input_ids": ids, "labels": ids}).loss
        seconds = time.perf_counter() - began
        busy = busy_lanes(trace) if trace is not None else busy
        steps.append({"loss": loss, "seconds": seconds})
        first = first or time.time() - scale.started_at
        device, host = engine.device.peak_bytes(), host_peak_bytes() or 0
        tell(
            f"step {number}: loss {loss:.4f}, {seconds:.2f} s, {scale.num_tokens / seconds:,.0f} "
            f"tokens/s; device {format_bytes(device)}, host {format_bytes(host)}"
        )
    return steps, busy, first


def text_ids(number: int, vocabulary_size: int) -> Tensor:
    """So many tokens of the standard library's sources, as int64.

    Words are numbered by how often they occur; those beyond the vocabulary share its last number.
    """
    words = _words(number)
    known = Counter(words).most_common(vocabulary_size - 1)
    numbers = {word: index for index, (word, _) in enumerate(known)}
    return torch.tensor([numbers.get(word, vocabulary_size - 1) for word in words])


def _words(number: int) -> list[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(one for one in folder.rglob("*.py") if "site-packages" not in one.parts)
    words: list[str] = []
    for source in itertools.cycle(sources):  # again from the beginning, if there is less
        text = source.read_text(encoding="utf-8", errors="ignore")
        words += WORDS.findall(text[: TEXT_BYTES * (number - len(words))])
        if len(words) >= number:
            return words[:number]
    raise ValueError(f"no Python sources in {folder}, which serve as text.")


def describe_scale(results: list[ScaleResult]) -> str:
    """A table."""
    lines = [
        "| optimizer | layers | parameters | largest | tokens/s | loss, first to last | "
        "device peak | host peak | first step after | all after |",
        f"|{'---|' * 10}",
    ]
    for one in results:
        first, last = (one["steps"][index]["loss"] for index in (0, -1))
        largest, host = one["largest_parameters"], one["host_peak_bytes"]
        most = f"{largest:,} ({one['largest_layers']} layers)" if largest is not None else "-"
        peaks = [format_bytes(one["device_peak_bytes"]), format_bytes(host) if host else "-"]
        lines.append(
            f"| {one['optimizer']} | {one['num_layers']} | {one['num_parameters']:,} | {most} | "
            f"{one['tokens_per_second']:,.0f} | {first:.3f} to {last:.3f} | {' | '.join(peaks)} | "
            f"{one['seconds_to_first_step']:.0f} s | {one['seconds']:.0f} s |"
        )
    return "\n".join(lines)
