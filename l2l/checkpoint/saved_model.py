"""The weights of a checkpoint, one by one: no engine is made, and no optimizer state is read.

Where several ranks have saved a model together, each file has runs of elements: those of a tensor,
put together in the order of the ranks, are the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from l2l.checkpoint.checkpoint import BUFFERS, Checkpoint, OtherCheckpointError, file_name
from l2l.parameter_server import join_master, state_name

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
        self._files: dict[str, dict[int, str]] = {}  # by tensor and share
        names = [name for name in checkpoint.manifest.files if name != BUFFERS]
        for share in checkpoint.shares:
            for file in names:
                for name in checkpoint.kinds(file) if file.endswith(file_name("", share)) else ():
                    self._files.setdefault(name, {})[share.index] = file
        if BUFFERS in checkpoint.manifest.files:  # those of layers once more, as they are now
            self._files |= {name: {0: BUFFERS} for name in checkpoint.kinds(BUFFERS)}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def check(self, model: nn.Module) -> None:
        """Refuse a model that has other parameters, or buffers, than the one that was saved.

        Raises:
            OtherCheckpointError: it has.
        """
        folder, kept = self._checkpoint.folder, model.state_dict().keys()
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        needed = {**parameters, **{k: v for k, v in buffers.items() if k in kept}}
        for name, tensor in needed.items():
            if tensor.numel() and name not in self:
                raise OtherCheckpointError(f"{folder} lacks {name!r}: it is of another model.")
        for name in self._files:
            if "|" not in name and name not in parameters and name not in buffers:
                raise OtherCheckpointError(f"{folder} also has {name!r}: it is of another model.")

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        """A parameter, its float32 master if there is one, or a buffer.

        Raises:
            OtherCheckpointError: there is none of that name and shape.
            CheckpointError: it cannot be read.
        """
        if not math.prod(shape):  # ranks do not save what has no elements
            return torch.empty(tuple(shape))
        if name not in self:
            raise OtherCheckpointError(
                f"{self._checkpoint.folder} lacks {name!r}: it is of another model."
            )
        remainders, masters = (state_name(name, kind) for kind in COMPANIONS)
        value = self._whole(masters if masters in self else name)
        if remainders in self:
            lower = self._whole(remainders)
            if (value.dtype, lower.dtype) != (torch.bfloat16, torch.int16) or (
                value.shape != lower.shape
            ):
                file = self._checkpoint.path(next(iter(self._files[name].values())))
                raise OtherCheckpointError(
                    f"{file}: {name!r} and what it was rounded by do not belong together: found "
                    f"{value.dtype} {list(value.shape)} and {lower.dtype} {list(lower.shape)}."
                )
            value = join_master(value, lower)
        found, is_cut = tuple(value.shape), len(self._checkpoint.shares) > 1
        if found != tuple(shape) and not (is_cut and found == (math.prod(shape),)):
            raise OtherCheckpointError(
                f"{self._checkpoint.folder}: {name!r} has shape {list(found)}, expected "
                f"{list(shape)}: it is of another model."
            )
        return value.view(tuple(shape))

    def _whole(self, name: str) -> Tensor:
        pieces: list[Tensor] = []
        for _, file in sorted(self._files[name].items()):
            self._checkpoint.read(file, [name], lambda _, piece: pieces.append(piece))
        return pieces[0] if len(pieces) == 1 else torch.cat([piece.view(-1) for piece in pieces])
