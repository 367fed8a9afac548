"""Tests run many tiny operators: one thread each is fastest, and leaves a core for updates."""

import torch

import l2l.engine.engine
from l2l.proof import ProofMemory

torch.set_num_threads(1)
l2l.engine.engine.PROVEN = ProofMemory(None)  # what a test has proven is nobody else's
