"""Layer-to-layer execution: exact training of models that do not fit the device.

What is shown here, and what it needs, is imported when it is asked for: torch takes seconds, and
the command line must answer a signal before that.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from l2l.checkpoint import CheckpointError as CheckpointError
    from l2l.checkpoint import CheckpointFolder as CheckpointFolder
    from l2l.device import Disk as Disk
    from l2l.engine import AllLayers as AllLayers
    from l2l.engine import Choice as Choice
    from l2l.engine import Depth as Depth
    from l2l.engine import Engine as Engine
    from l2l.engine import Execution as Execution
    from l2l.engine import ProgressiveLayerDropping as ProgressiveLayerDropping
    from l2l.engine import SampledArchitecture as SampledArchitecture
    from l2l.engine import StochasticDepth as StochasticDepth
    from l2l.hugging_face import RandomInit as RandomInit
    from l2l.model import TokenLoss as TokenLoss
    from l2l.parameter_server import SGD as SGD
    from l2l.parameter_server import Adafactor as Adafactor
    from l2l.parameter_server import AdamW as AdamW
    from l2l.parameter_server import Lion as Lion
    from l2l.parameter_server import Muon as Muon
    from l2l.parameter_server import RecordGradients as RecordGradients
    from l2l.parameter_server import ScheduleFreeAdamW as ScheduleFreeAdamW
    from l2l.planner import Plan as Plan
    from l2l.planner import plan as plan
    from l2l.run import StepReport as StepReport

__all__ = [
    "SGD",
    "Adafactor",
    "AdamW",
    "AllLayers",
    "CheckpointError",
    "CheckpointFolder",
    "Choice",
    "Depth",
    "Disk",
    "Engine",
    "Execution",
    "Lion",
    "Muon",
    "Plan",
    "ProgressiveLayerDropping",
    "RandomInit",
    "RecordGradients",
    "SampledArchitecture",
    "ScheduleFreeAdamW",
    "StepReport",
    "StochasticDepth",
    "TokenLoss",
    "plan",
]

_HOMES = {
    "CheckpointError": "checkpoint",
    "CheckpointFolder": "checkpoint",
    "Disk": "device",
    "AllLayers": "engine",
    "Choice": "engine",
    "Depth": "engine",
    "ProgressiveLayerDropping": "engine",
    "SampledArchitecture": "engine",
    "StochasticDepth": "engine",
    "Engine": "engine",
    "Execution": "engine",
    "SGD": "parameter_server",
    "Adafactor": "parameter_server",
    "AdamW": "parameter_server",
    "Lion": "parameter_server",
    "Muon": "parameter_server",
    "RecordGradients": "parameter_server",
    "ScheduleFreeAdamW": "parameter_server",
    "Plan": "planner",
    "plan": "planner",
    "StepReport": "run",
    "RandomInit": "hugging_face",
    "TokenLoss": "model",
}


def __getattr__(name: str) -> Any:
    """What is shown here, or a module of the package."""
    if name in _HOMES:
        found = getattr(importlib.import_module(f"l2l.{_HOMES[name]}"), name)
        globals()[name] = found
        return found
    try:
        return importlib.import_module(f"l2l.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"l2l.{name}":
            raise
        raise AttributeError(f"module 'l2l' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
