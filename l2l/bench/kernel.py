"""Measurements that users can repeat: a table for people, or one line of JSON for scripts.

`measure_host` times the host optimizers, which are bound by memory traffic: parameters/s times the
bytes each moves per parameter, beside what a plain copy moves on the same machine in the same run.
The second round runs while the link copies both ways, as it does during training.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from l2l.bench.options import Tell
from l2l.device import busy_link
from l2l.parameter_server import (
    SGD,
    AdamW,
    HostKernel,
    HostOptimizer,
    Lion,
    ScheduleFreeAdamW,
    Update,
    load_kernel,
    num_blocks,
)

HELP = """Time the host optimizers against this machine's copy bandwidth, torch's fused AdamW
and, where it is installed, DeepSpeed's CPUAdam: alone, and while the link to the accelerator copies
both ways. Prints a table."""

Step = Callable[[], Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `l2l bench host` takes."""
    words = "number of parameters to update (default: 256e6)"
    parser.add_argument("--parameters", type=float, default=256e6, help=words)
    parser.add_argument("--threads", type=int, help="default: all of torch's")
    parser.add_argument("--level", help="instructions: portable, avx2, avx512")


def run(parsed: argparse.Namespace, _: Tell) -> tuple[str, Any, int]:
    """`l2l bench host`.

    Raises:
        ValueError: there is no kernel, or none of that level.
    """
    kernel = load_kernel()
    if kernel is None:
        raise ValueError("the native host kernel was not built. Build it with 'make kernel'.")
    if parsed.threads is not None:
        torch.set_num_threads(parsed.threads)
    if parsed.level is not None:
        kernel.set_level(parsed.level)
    number, threads = int(parsed.parameters), torch.get_num_threads()
    found = measure_host(kernel, num_parameters=number, num_threads=threads)
    return describe_host(found), found, 0


def measure_host(
    kernel: HostKernel, *, num_parameters: int, num_threads: int, rounds: int = 5
) -> dict[str, Any]:
    """Time every optimizer of the kernel, torch's fused AdamW and, if installed, DeepSpeed's."""
    results = []
    for name, nbytes, step in _contestants(kernel, num_parameters, num_threads):
        alone = _rate(step, num_parameters, rounds)
        with busy_link() as is_busy:
            under = _rate(step, num_parameters, rounds) if is_busy else None
        results.append(
            {
                "name": name,
                "bytes_per_parameter": nbytes,
                "parameters_per_second": alone,
                "under_link": under,  # parameters/s while the link runs both ways
                "bytes_per_second": nbytes * alone,  # memory traffic
            }
        )
        del step  # and all its memory, before the next is made
    return {
        "machine": platform.processor() or platform.machine(),
        "num_parameters": num_parameters,
        "num_threads": num_threads,
        "level": kernel.level,
        "results": results,
    }


def describe_host(found: dict[str, Any]) -> str:
    """The table of what was measured."""
    lines = [
        f"{found['num_parameters']:,} parameters, {found['num_threads']} threads, instructions "
        f"{found['level']}, gradients bfloat16",
        f"{'':<34}{'bytes/par.':>11}{'G par./s':>10}{'GB/s':>8}{'G par./s, link busy':>21}",
    ]
    for one in found["results"]:
        under = "-" if one["under_link"] is None else f"{one['under_link'] / 1e9:.2f}"
        rate, traffic = one["parameters_per_second"] / 1e9, one["bytes_per_second"] / 1e9
        numbers = f"{one['bytes_per_parameter']:>11.1f}{rate:>10.2f}{traffic:>8.0f}{under:>21}"
        lines.append(f"{one['name']:<34}{numbers}")
    return "\n".join(lines)


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
) -> Iterator[tuple[str, float, Step]]:
    """Names, bytes moved per parameter, and steps, each made when it is asked for."""

    def copy() -> Step:
        source, target = (torch.ones(numel * 8, dtype=torch.uint8) for _ in range(2))
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

    yield "copy (8 bytes read, 8 written)", 16, copy()
    yield "AdamW, exact", 26, update(AdamW(lr=1e-4))
    yield "AdamW, 8-bit moments", 14.1, update(AdamW(lr=1e-4, moments="8bit"))
    yield "SGD with momentum", 18, update(SGD(lr=1e-4, momentum=0.9))
    yield "Lion", 18, update(Lion(lr=1e-5, weight_decay=0.01))
    yield "AdamW without a schedule", 26, update(ScheduleFreeAdamW(lr=1e-4))
    yield "torch fused AdamW, float32", 28, _torch_fused(numel, casts=False)
    yield "torch fused AdamW, and its casts", 40, _torch_fused(numel, casts=True)
    if importlib.util.find_spec("deepspeed") is not None:
        adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        settings = {"lr": 1e-4, "adamw_mode": True, "fp32_optimizer_states": True}
        optimizer = adam([_parameter(numel, torch.bfloat16)], **settings)
        yield "DeepSpeed CPUAdam, no master", 22, optimizer.step


def _torch_fused(numel: int, *, casts: bool) -> Step:
    """Torch's fused AdamW; with casts: gradient from bfloat16 before, weight to it after."""
    parameter = _parameter(numel, torch.float32)
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
    gradient, weight = (torch.randn(numel).to(torch.bfloat16) for _ in range(2))

    def step() -> None:
        assert parameter.grad is not None
        if casts:
            parameter.grad.copy_(gradient)
        optimizer.step()
        if casts:
            weight.copy_(parameter.data)

    return step


def _parameter(numel: int, dtype: torch.dtype) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.randn(numel).to(dtype))
    parameter.grad = torch.randn(numel).to(dtype)
    return parameter
