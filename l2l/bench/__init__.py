"""Measurements: this engine beside other systems, the largest model, the host kernel."""

from l2l.bench.comparison import (
    PLAIN_VARIANTS,
    SYSTEMS,
    Outcome,
    compare,
    describe,
    list_runs,
    plot_points,
)
from l2l.bench.kernel import describe_host, measure_host
from l2l.bench.plot import BOTTOM, FONT_SIZE, HEIGHT, LEFT, RIGHT, TOP, WIDTH, draw
from l2l.bench.scale import (
    CONFIRMED,
    LEARNING_RATES,
    Scale,
    ScaleResult,
    StepFacts,
    describe_scale,
    measure_scale,
)
from l2l.bench.workload import FAILED, SHAPES, Run, Workload

__all__ = [
    "BOTTOM",
    "CONFIRMED",
    "FAILED",
    "FONT_SIZE",
    "HEIGHT",
    "LEARNING_RATES",
    "LEFT",
    "PLAIN_VARIANTS",
    "RIGHT",
    "SHAPES",
    "SYSTEMS",
    "TOP",
    "WIDTH",
    "Outcome",
    "Run",
    "Scale",
    "ScaleResult",
    "StepFacts",
    "Workload",
    "compare",
    "describe",
    "describe_host",
    "describe_scale",
    "draw",
    "list_runs",
    "measure_host",
    "measure_scale",
    "plot_points",
]
