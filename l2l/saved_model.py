"""The weights of a checkpoint, one by one: no engine is made, and no optimizer state is read.

Where several ranks have saved a model together, each file has runs of elements: those of a tensor,
put together in the order of the ranks, are the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from l2l.checkpoint import BUFFERS, Checkpoint, CheckpointError, file_name
from l2l.parameter_server import state_name
from l2l.precision import join_master

COMPANIONS = ("remainders", "masters")
"""What makes a weight its float32 master, or is it."""


@final
class SavedModel:
    """The parameters and buffers that a checkpoint holds."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Find out what is where.

        Raises:
            CheckpointError: a file cannot be read.
        """
        self._checkpoint = checkpoint
        self._files: dict[str, list[str]] = {}  # by tensor, in the order of the shares
        names = [name for name in checkpoint.manifest.files if name != BUFFERS]
        for share in checkpoint.shares:
            for file in names:
                for name in checkpoint.shapes(file) if file.endswith(file_name("", share)) else ():
                    self._files.setdefault(name, []).append(file)
        if BUFFERS in checkpoint.manifest.files:  # those of layers once more, as they are now
            self._files |= {name: [BUFFERS] for name in checkpoint.shapes(BUFFERS)}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        """A parameter, its float32 master if there is one, or a buffer.

        Raises:
            CheckpointError: there is none of that name and size, or it cannot be read.
        """
        if name not in self:
            raise CheckpointError(f"{self._checkpoint.folder} has no {name!r}: of another model.")
        remainders, masters = (state_name(name, kind) for kind in COMPANIONS)
        value = self._whole(masters if masters in self else name)
        if remainders in self:
            value = join_master(value, self._whole(remainders))
        if value.numel() != math.prod(shape):
            raise CheckpointError(
                f"{self._checkpoint.folder}: {name!r} has {value.numel():,} elements, expected "
                f"{math.prod(shape):,}: it is of another model."
            )
        return value.view(tuple(shape))

    def _whole(self, name: str) -> Tensor:
        pieces: list[Tensor] = []
        for file in self._files[name]:
            self._checkpoint.read(file, [name], lambda _, piece: pieces.append(piece))
        return pieces[0] if len(pieces) == 1 else torch.cat([piece.view(-1) for piece in pieces])
