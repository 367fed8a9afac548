"""Layer-to-layer execution: exact training of models that do not fit the device."""

from l2l.checkpoint import CheckpointError as CheckpointError
from l2l.checkpoint import CheckpointFolder as CheckpointFolder
from l2l.depth import AllLayers as AllLayers
from l2l.depth import Choice as Choice
from l2l.depth import Depth as Depth
from l2l.depth import ProgressiveLayerDropping as ProgressiveLayerDropping
from l2l.depth import SampledArchitecture as SampledArchitecture
from l2l.depth import StochasticDepth as StochasticDepth
from l2l.engine import Engine as Engine
from l2l.parameter_server import SGD as SGD
from l2l.parameter_server import Adafactor as Adafactor
from l2l.parameter_server import AdamW as AdamW
from l2l.parameter_server import Lion as Lion
from l2l.parameter_server import RecordGradients as RecordGradients
from l2l.planner import Plan as Plan
from l2l.preview import plan as plan
from l2l.report import StepReport as StepReport
from l2l.weights import RandomInit as RandomInit

__all__ = [
    "SGD",
    "Adafactor",
    "AdamW",
    "AllLayers",
    "CheckpointError",
    "CheckpointFolder",
    "Choice",
    "Depth",
    "Engine",
    "Lion",
    "Plan",
    "ProgressiveLayerDropping",
    "RandomInit",
    "RecordGradients",
    "SampledArchitecture",
    "StepReport",
    "StochasticDepth",
    "plan",
]
