"""Running the model's code more than once: buffers as they were, results compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from l2l.device import Device
from l2l.model import Partition, same

TRIAL_SEED = 1  # of whatever is run again


@final
class KeptBuffers:
    """The buffers around the layers, with the values that they have now."""

    def __init__(self, partition: Partition) -> None:
        self._skeleton = partition.skeleton
        self.buffers = self._skeleton.buffers()
        self.before = self.values()

    def values(self) -> dict[str, Tensor]:
        """Copies of the buffers, by owner."""
        return {owner: buffer.clone() for owner, buffer in self.buffers.items()}

    def put_back(self) -> None:
        """Bind these buffers again, with the values that they had."""
        self._skeleton.bind(self.buffers)
        for owner, buffer in self.before.items():
            self.buffers[owner].copy_(buffer)

    def changed(self, since: Mapping[str, Tensor] | None = None) -> frozenset[str]:
        """Buffers that have other values than before, or than in `since`."""
        values = self.before if since is None else since
        self._skeleton.take_over(self.buffers)
        pairs = self.buffers.items()
        return frozenset(owner for owner, one in pairs if not torch.equal(one, values[owner]))


def repeats(device: Device, first: Any, again: Any) -> bool:
    """Whether two runs from the same seed agree ([Note: others' generators])."""
    agree = same(first, again)
    if not agree:
        device.random_numbers.seeds_defaults = True
    return agree
