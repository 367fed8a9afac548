"""Measurements: this engine beside other systems, the largest model, the host kernel."""

from l2l.bench import comparison, kernel, scale
from l2l.bench.plot import Curve, PlotError, draw_curves
from l2l.bench.workload import SHAPES, Workload
