"""The engine: what users hold. A thin front, and behind it a part for each purpose."""

from l2l.engine.depth import (
    AllLayers,
    Choice,
    Depth,
    ProgressiveLayerDropping,
    SampledArchitecture,
    StochasticDepth,
)
from l2l.engine.engine import Engine
from l2l.engine.resources import Execution
