"""Layer-to-layer execution: exact training of models that do not fit the device."""

from l2l.engine import Engine as Engine
from l2l.parameter_server import SGD as SGD
from l2l.parameter_server import Adafactor as Adafactor
from l2l.parameter_server import AdamW as AdamW
from l2l.parameter_server import Lion as Lion
from l2l.parameter_server import RecordGradients as RecordGradients
from l2l.planner import Plan as Plan
from l2l.preview import plan as plan
from l2l.report import StepReport as StepReport

__all__ = [
    "SGD",
    "Adafactor",
    "AdamW",
    "Engine",
    "Lion",
    "Plan",
    "RecordGradients",
    "StepReport",
    "plan",
]
