"""The engine: what users hold. It wires the other rooms, and only wires."""

from l2l.engine.depth import (
    AllLayers,
    Choice,
    Depth,
    ProgressiveLayerDropping,
    SampledArchitecture,
    StochasticDepth,
)
from l2l.engine.engine import Engine

__all__ = [
    "AllLayers",
    "Choice",
    "Depth",
    "Engine",
    "ProgressiveLayerDropping",
    "SampledArchitecture",
    "StochasticDepth",
]
