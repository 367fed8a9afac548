"""The first step proves itself: the engine's gradients against those of the model's own code.

Before the first update, and again after a change of layers or of what a plan has other code do, two
small microbatches go through both: through the engine as it will train, with updates left out, and
through the model's own `forward` as plain PyTorch would run it (proof.py). Losses, every
parameter's gradient and every buffer must agree (evidence.py). If they do not, the step is refused
with the first parameter that differs, before anything has changed.

What has passed is remembered (memory.py) under a hash of all that it depends on.
"""

from l2l.proof.evidence import Evidence, ProofError
from l2l.proof.memory import ProofMemory
from l2l.proof.proof import FLOAT16_SCALE, Proof
