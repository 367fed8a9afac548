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
from l2l.bench.plot import Curve, PlotError, draw, draw_curves
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
