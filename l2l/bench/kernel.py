"""Measurements that users can repeat: a table for people, and last one line of JSON for scripts.

`measure_host` times the host optimizers, which are bound by memory traffic: parameters/s times the
bytes each moves per parameter, beside what a plain copy moves on the same machine in the same run.
The second round runs while the link copies both ways, as it does during training.
"""

from __future__ import annotations

import contextlib
import importlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from l2l.device import busy_link
from l2l.parameter_server import (
    SGD,
    AdamW,
    HostKernel,
    HostOptimizer,
    Lion,
    Update,
    num_blocks,
)

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResult:
    """Speed of one way to update, or of a copy."""

    name: str
    bytes_per_parameter: float
    parameters_per_second: float
    under_link: float | None  # parameters/s while the link runs both ways

    @property
    def bytes_per_second(self) -> float:
        """Memory traffic."""
        return self.bytes_per_parameter * self.parameters_per_second


def measure_host(
    kernel: HostKernel, *, num_parameters: int, num_threads: int, rounds: int = 5
) -> list[HostResult]:
    """Time every optimizer of the kernel, torch's fused AdamW and, if installed, DeepSpeed's."""
    results = []
    for name, nbytes, make in _contestants(kernel, num_parameters, num_threads):
        step = make()
        if step is None:
            continue
        alone = _rate(step, num_parameters, rounds)
        under = None
        with contextlib.ExitStack() as stack:
            if stack.enter_context(busy_link()):
                under = _rate(step, num_parameters, rounds)
        results.append(
            HostResult(
                name=name,
                bytes_per_parameter=nbytes,
                parameters_per_second=alone,
                under_link=under,
            )
        )
        del step
    return results


def describe_host(
    results: list[HostResult], *, kernel: HostKernel, num_parameters: int, num_threads: int
) -> tuple[str, dict[str, Any]]:
    """The table, and the same as data."""
    lines = [
        f"{num_parameters:,} parameters, {num_threads} threads, instructions {kernel.level}, "
        f"gradients bfloat16",
        f"{'':<34}{'bytes/par.':>11}{'G par./s':>10}{'GB/s':>8}{'G par./s, link busy':>21}",
    ]
    for one in results:
        under = "-" if one.under_link is None else f"{one.under_link / 1e9:.2f}"
        lines.append(
            f"{one.name:<34}{one.bytes_per_parameter:>11.1f}"
            f"{one.parameters_per_second / 1e9:>10.2f}{one.bytes_per_second / 1e9:>8.0f}{under:>21}"
        )
    data = {
        "machine": platform.processor() or platform.machine(),
        "num_parameters": num_parameters,
        "num_threads": num_threads,
        "level": kernel.level,
        "results": [asdict(one) | {"bytes_per_second": one.bytes_per_second} for one in results],
    }
    return "\n".join(lines), data


def _rate(step: Step, num_parameters: int, rounds: int) -> float:
    step()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return num_parameters / statistics.median(seconds)


def _contestants(
    kernel: HostKernel, numel: int, num_threads: int
) -> Iterator[tuple[str, float, Callable[[], Step | None]]]:
    def copy() -> Step:
        source, target = (
            torch.ones(numel * 8, dtype=torch.uint8),
            torch.ones(numel * 8, dtype=torch.uint8),
        )
        return lambda: kernel.copy(target, source, num_threads=num_threads)

    def update(optimizer: HostOptimizer) -> Step:
        kinds = optimizer.state_kinds(optimizer.defaults).items()
        one = Update(
            name="weight",
            shape=(numel,),
            weight=torch.randn(numel).to(torch.bfloat16),
            companion=torch.zeros(numel, dtype=torch.int16),
            gradient=torch.randn(numel).to(torch.bfloat16),
            state={
                name: torch.zeros(num_blocks(numel) if kind.per_block else numel, dtype=kind.dtype)
                for name, kind in kinds
            },
            position=0,
            step=5,
            settings=optimizer.defaults,
            factor=1.0,
            seed=0,
        )
        return lambda: kernel.update(optimizer, one, num_threads=num_threads)

    yield "copy (8 bytes read, 8 written)", 16, copy
    yield "AdamW, exact", 26, lambda: update(AdamW(lr=1e-4))
    yield "AdamW, 8-bit moments", 14.1, lambda: update(AdamW(lr=1e-4, moments="8bit"))
    yield "SGD with momentum", 18, lambda: update(SGD(lr=1e-4, momentum=0.9))
    yield "Lion", 18, lambda: update(Lion(lr=1e-5, weight_decay=0.01))
    yield "torch fused AdamW, float32", 28, lambda: _torch_fused(numel, casts=False)
    yield "torch fused AdamW, and its casts", 40, lambda: _torch_fused(numel, casts=True)
    yield "DeepSpeed CPUAdam, no master", 22, lambda: _deepspeed(numel)


def _torch_fused(numel: int, *, casts: bool) -> Step:
    """Torch's fused AdamW; with casts: gradient from bfloat16 before, weight to it after."""
    parameter = torch.nn.Parameter(torch.randn(numel))
    parameter.grad = torch.randn(numel)
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
    if not casts:
        return lambda: optimizer.step()
    gradient = parameter.grad.to(torch.bfloat16)
    weight = torch.zeros(numel, dtype=torch.bfloat16)

    def step() -> None:
        assert parameter.grad is not None
        parameter.grad.copy_(gradient)
        optimizer.step()
        weight.copy_(parameter.data)

    return step


def _deepspeed(numel: int) -> Step | None:
    try:
        adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    except ImportError:
        return None
    parameter = torch.nn.Parameter(torch.randn(numel).to(torch.bfloat16))
    parameter.grad = torch.randn(numel).to(torch.bfloat16)
    optimizer = adam([parameter], lr=1e-4, adamw_mode=True, fp32_optimizer_states=True)
    return lambda: optimizer.step()
