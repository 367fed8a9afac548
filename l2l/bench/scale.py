"""How large a model this machine trains: `l2l bench scale`.

A Llama shape with as many layers as were asked for, or as the planner says will fit, is trained for
a few steps on real text: the sources of Python's standard library, which are on every machine, cut
into words. Weights are random and made layer by layer on the device, straight into the parameter
server; the model never exists anywhere else.

Everything happens in this process, which is to end afterwards: closing the engine would give the
weights back to the model, and there is no memory for both.
"""

from __future__ import annotations

import math
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from l2l.bench.workload import LANES, SHAPES, Workload, host_peak_bytes
from l2l.device import format_bytes, parse_bytes
from l2l.engine import Engine
from l2l.hugging_face import RandomInit
from l2l.parameter_server import OPTIMIZERS, Optimizer
from l2l.planner import largest_model

OptimizerName = Literal["adafactor", "adamw", "adamw-8bit"]
LEARNING_RATES: dict[OptimizerName, float] = {"adafactor": 1e-3, "adamw": 1e-5, "adamw-8bit": 1e-5}
CONFIRMED = 0.95  # of the largest model: what is trained to confirm it
WORDS = re.compile(r"\w+|[^\w\s]|\n")
TEXT_BYTES = 64  # of text for a token, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What to train."""

    shape: str = "50b"
    num_parameters: float | None = None  # None: as many as fit
    optimizer: OptimizerName = "adafactor"
    device_memory: str | None = None
    host_memory: str | None = None
    num_tokens: int = 16384  # a step
    length: int = 1024
    num_steps: int = 5
    started_at: float = 0.0  # when the process was, in seconds since the epoch

    def __post_init__(self) -> None:
        for name, size in (
            ("--device-memory", self.device_memory),
            ("--host-memory", self.host_memory),
        ):
            if size is not None:
                parse_bytes(size, name=name)
        self.workload(1)
        if self.num_parameters is not None and self.num_layers(self.num_parameters) < 1:
            raise ValueError(
                f"--parameters {self.num_parameters:g}: the shape {self.shape} has "
                f"{self.count(1):,} with a single layer. Give more, or a smaller --shape."
            )

    def workload(self, num_layers: int) -> Workload:
        """The shape with so many layers, and the batch."""
        return Workload(
            shape=self.shape,
            num_layers=num_layers,
            num_tokens=self.num_tokens,
            length=self.length,
            clip_norm=None,
            num_steps=self.num_steps,
        )

    def model(self, num_layers: int) -> nn.Module:
        """The model, without weights."""
        return self.workload(num_layers).model(torch.device("meta"))

    def make_optimizer(self) -> Optimizer:
        """The optimizer that was named."""
        return OPTIMIZERS[self.optimizer](lr=LEARNING_RATES[self.optimizer])

    def num_layers(self, num_parameters: float) -> int:
        """The least layers with so many parameters."""
        shape = SHAPES[self.shape]
        around = shape.num_parameters_around
        return max(0, math.ceil((num_parameters - around) / shape.num_parameters_of_layer))

    def count(self, num_layers: int) -> int:
        """Parameters of a model with so many layers."""
        shape = SHAPES[self.shape]
        return shape.num_parameters_around + num_layers * shape.num_parameters_of_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """One step."""

    loss: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleResult:
    """What came of it."""

    optimizer: str
    num_layers: int
    num_parameters: int
    largest_layers: int | None  # that the planner found; None: not asked
    largest_parameters: int | None
    steps: list[StepFacts]
    tokens_per_second: float  # of the fastest step: the first also compiles
    device_peak_bytes: int
    host_peak_bytes: int | None
    busy: dict[str, float]  # share of the last step, by lane
    plan: str
    seconds_to_first_step: float  # from the start of the process
    seconds: float  # from the start of the process to the end of the last step


def find_largest(scale: Scale) -> int:
    """The most layers that fit host and device.

    Raises:
        ValueError: not even a few do.
    """
    found = largest_model(
        scale.model,
        host_memory=scale.host_memory,
        num_rows=scale.num_tokens // scale.length,
        length=scale.length,
        device_memory=scale.device_memory,
        optimizer=scale.make_optimizer(),
        precision="bfloat16",
    )
    if found is None:
        raise ValueError(
            f"nothing of the shape {scale.shape} fits {scale.device_memory or 'the device'}. Give "
            "more --device-memory, fewer --tokens or a smaller --shape."
        )
    return found[0]


def measure_scale(scale: Scale, *, tell: Callable[[str], None]) -> ScaleResult:
    """Train some steps; `tell` is given a line for each thing that happens.

    Raises:
        ValueError: the model does not fit.
    """
    largest: int | None = None
    if scale.num_parameters is None:
        largest = find_largest(scale)
        tell(f"{scale.optimizer}: {largest} layers would fit, {scale.count(largest):,} parameters")
        num_layers = max(1, int(CONFIRMED * largest))
    else:
        num_layers = scale.num_layers(scale.num_parameters)
    model = scale.model(num_layers)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    tell(f"{scale.optimizer}: {num_layers} layers, {num_parameters:,} parameters")
    engine = Engine(
        model,
        optimizer=scale.make_optimizer(),
        precision="bfloat16",
        weights=RandomInit(0),
        device_memory=scale.device_memory,
        host_memory=scale.host_memory,
    )
    tell(f"random weights are there after {time.time() - scale.started_at:.0f} s")
    steps, busy, first = _train(engine, scale, tell)
    return ScaleResult(
        optimizer=scale.optimizer,
        num_layers=num_layers,
        num_parameters=num_parameters,
        largest_layers=largest,
        largest_parameters=None if largest is None else scale.count(largest),
        steps=steps,
        tokens_per_second=scale.num_tokens / min(one.seconds for one in steps),
        device_peak_bytes=engine.device.peak_bytes(),
        host_peak_bytes=host_peak_bytes(),
        busy=busy,
        plan=str(engine.plan),
        seconds_to_first_step=first,
        seconds=time.time() - scale.started_at,
    )


def _train(
    engine: Engine, scale: Scale, tell: Callable[[str], None]
) -> tuple[list[StepFacts], dict[str, float], float]:
    steps: list[StepFacts] = []
    busy: dict[str, float] = {}
    first = 0.0
    for number, ids in enumerate(_batches(scale)):
        batch = {"input_ids": ids, "labels": ids}
        began = time.perf_counter()
        if number < scale.num_steps - 1 or not number:
            loss = engine.step(batch).loss
        else:
            with engine.trace() as trace:
                loss = engine.step(batch).loss
            busy = {lane: trace.busy_seconds(lane) / max(trace.seconds, 1e-9) for lane in LANES}
        seconds = time.perf_counter() - began
        steps.append(StepFacts(loss=loss, seconds=seconds))
        first = first or time.time() - scale.started_at
        tell(
            f"step {number + 1}: loss {loss:.4f}, {seconds:.2f} s, "
            f"{scale.num_tokens / seconds:,.0f} tokens/s; device "
            f"{format_bytes(engine.device.peak_bytes())}, host "
            f"{format_bytes(host_peak_bytes() or 0)}"
        )
    return steps, busy, first


def _batches(scale: Scale) -> Iterator[Tensor]:
    """Consecutive text, some rows for each step."""
    number = scale.num_tokens * scale.num_steps
    ids = text_ids(number, vocabulary_size=SHAPES[scale.shape].vocabulary_size)
    yield from ids.view(scale.num_steps, -1, scale.length)


def text_ids(number: int, *, vocabulary_size: int) -> Tensor:
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
    while len(words) < number:  # again from the beginning, if more is asked for than there is
        before = len(words)
        for source in sources:
            text = source.read_text(encoding="utf-8", errors="ignore")
            words += WORDS.findall(text[: TEXT_BYTES * (number - len(words))])
            if len(words) >= number:
                break
        if len(words) == before:
            raise ValueError(f"no Python sources in {folder}, which serve as text.")
    return words[:number]


def describe_scale(results: list[ScaleResult]) -> str:
    """A table."""
    lines = [
        "| optimizer | layers | parameters | largest | tokens/s | loss, first to last | "
        "device peak | host peak | first step after | all after |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in results:
        largest = "-"
        if one.largest_parameters is not None:
            largest = f"{one.largest_parameters:,} ({one.largest_layers} layers)"
        host = "-" if one.host_peak_bytes is None else format_bytes(one.host_peak_bytes)
        lines.append(
            f"| {one.optimizer} | {one.num_layers} | {one.num_parameters:,} | {largest} | "
            f"{one.tokens_per_second:,.0f} | {one.steps[0].loss:.3f} to {one.steps[-1].loss:.3f} | "
            f"{format_bytes(one.device_peak_bytes)} | {host} | {one.seconds_to_first_step:.0f} s | "
            f"{one.seconds:.0f} s |"
        )
    return "\n".join(lines)
