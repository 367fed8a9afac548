"""Measurements: this engine beside other systems, the largest model, the host kernel."""

from l2l.bench.comparison import SYSTEMS, compare, list_runs
from l2l.bench.kernel import describe_host, measure_host
from l2l.bench.options import read_options, take_options
from l2l.bench.peers import PLAIN_VARIANTS
from l2l.bench.plot import Curve, PlotError, draw_curves
from l2l.bench.scale import CONFIRMED, LEARNING_RATES, Scale, describe_scale, measure_scales
from l2l.bench.workload import FAILED, SHAPES, Run, Workload
