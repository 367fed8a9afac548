"""Tests run many tiny operators: one thread each is fastest, and leaves a core for updates."""

import torch

torch.set_num_threads(1)
