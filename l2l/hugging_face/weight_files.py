"""The safetensors files of a model: which there are, and what their headers say."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from l2l.files import TensorFileError, kinds_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
QUANTIZED = ".quant_state.bitsandbytes__"
MAX_NAMES = 20  # in a message


@final
class WeightFiles:
    """The safetensors files of a model."""

    def __init__(self, path: Path) -> None:
        """Find the files and read their headers.

        Raises:
            ValueError: there are none, or they are broken; the message names the file.
        """
        self.folder = path if path.is_dir() else path.parent
        self.shapes: dict[str, tuple[int, ...]] = {}  # of all tensors, file by file
        self.place_of: dict[str, Path] = {}  # the file that has a tensor
        for file, names in sorted(_files(path).items()):
            kinds = kinds_of(file)
            lost = [name for name in names or () if name not in kinds]
            if lost:
                raise TensorFileError(
                    f"{file} does not have {listed(lost)}, which {INDEX} names. Get it again."
                )
            for name in names or kinds:
                self.shapes[name], self.place_of[name] = kinds[name][1], file
        self.quantized = {
            weight: tuple(one for one in self.shapes if one.startswith(f"{weight}."))
            for weight, mark, _ in (name.partition(QUANTIZED) for name in self.shapes)
            if mark
        }
        """Weights in 4 bits of bitsandbytes, and names of what they are made of besides."""
        for beside in self.quantized.values():
            for name in beside:
                del self.shapes[name]

    def empty(self, name: str) -> Tensor:
        """A tensor's shape, without values."""
        return torch.empty(self.shapes[name], device="meta")


def _files(path: Path) -> dict[Path, list[str] | None]:
    """The files, and which of their tensors count; None: all."""
    if path.is_dir():
        single, index = path / SINGLE, path / INDEX
        if single.is_file():
            return {single: None}
        if index.is_file():
            return _indexed(index)
        found = joined(sorted(child.name for child in path.iterdir())) or "nothing"
        raise TensorFileError(
            f"{path} has no weights: expected {SINGLE} or {INDEX}, found {found}. Others such "
            "as pytorch_model.bin are not read: load them and call model.save_pretrained."
        )
    if not path.is_file():
        raise TensorFileError(
            f"{path} does not exist. Expected a folder with {SINGLE} or {INDEX}, or such a file."
        )
    return _indexed(path) if path.suffix == ".json" else {path: None}


def _indexed(index: Path) -> dict[Path, list[str] | None]:
    files: dict[Path, list[str]] = defaultdict(list)
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TensorFileError(
            f"{index} cannot be read: {error!r}. Expected a JSON object with a weight_map."
        ) from error
    if not names:
        raise TensorFileError(f"{index} names no tensor. Expected a weight_map: get it again.")
    for name, file in names.items():
        if Path(file).name != file:
            raise TensorFileError(f"{index} names the file {file!r}. Expected a file beside it.")
        files[index.parent / file].append(name)
    lost = [file.name for file in files if not file.is_file()]
    if lost:
        raise TensorFileError(
            f"{index.parent} is incomplete: {listed(lost)} of {INDEX} not found. Get it again."
        )
    return dict(files)


def listed(names: Sequence[str]) -> str:
    """Names in a message."""
    return joined([repr(name) for name in names])


def joined(texts: Sequence[str]) -> str:
    """Texts in a message, not too many."""
    shown = ", ".join(texts[:MAX_NAMES])
    return shown if len(texts) <= MAX_NAMES else f"{shown} and {len(texts) - MAX_NAMES} more"
