"""The cases of the census of models from outside transformers, by theme."""

from . import (  # noqa: F401 they put their cases into CASES
    libraries_diffusion,
    libraries_images,
    libraries_others,
    libraries_torch,
    own_attention,
    own_convolution,
    own_feedforward,
    own_generative,
    own_graph,
    own_loops,
    own_oddities,
    own_sequence,
    own_structure,
)
from .case import CASES as CASES
from .case import Batch as Batch
from .case import Case as Case
from .case import Loss as Loss
