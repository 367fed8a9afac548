"""Folders whose weights are quantized: those in 4 bits of bitsandbytes are read tensor by tensor.

Beside the numbers of such a weight its file has what else it is made of: scales, their scales,
tables, and a few words. So the format of every weight is known before any is read: the model is
made with modules of bitsandbytes, on the meta device, whose weights are meant for these formats.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from l2l.files import TensorReader
from l2l.hugging_face.weight_files import WeightFiles
from l2l.model import format_of, mean


def is_readable(quantization: Mapping[str, Any]) -> bool:
    """Whether a quantization_config is one of weights that are read."""
    method = str(quantization.get("quant_method", ""))
    return method == "bitsandbytes" and bool(quantization.get("load_in_4bit"))


def place_quantized(model: Any, folder: Path, quantization: Mapping[str, Any]) -> None:
    """Put modules of bitsandbytes where a folder has weights in 4 bits.

    Raises:
        ValueError: the library is not there, or the folder has other modules.
    """
    try:
        library: Any = importlib.import_module("bitsandbytes")
    except ImportError as error:
        raise ValueError(
            f"the weights in {folder} are in 4 bits of bitsandbytes, which cannot be imported "
            f"({error}). Install it with: pip install bitsandbytes"
        ) from error
    files = WeightFiles(folder)
    read = TensorReader(files.place_of)
    word = str(quantization.get("bnb_4bit_compute_dtype", "float32")).removeprefix("torch.")
    for name, beside in files.quantized.items():
        path, _, local = name.rpartition(".")
        module = dict(model.named_modules()).get(path)
        if not isinstance(module, nn.Linear) or local != "weight":
            raise ValueError(
                f"{folder} has {name!r} in 4 bits, which is no linear module of "
                f"{type(model).__name__}. Load it with transformers (from_pretrained) and give the "
                "engine that model."
            )
        shape = files.shapes[name]
        make = partial(_made, library, read, name, beside)
        weight = make(torch.empty(shape, dtype=torch.uint8, device="meta"))
        with torch.device("meta"):
            size = module.in_features, module.out_features, module.bias is not None
            settings = {"compute_dtype": getattr(torch, word), "quant_type": weight.quant_type}
            found = library.nn.Linear4bit(*size, **settings)
        found.bias, found.weight = module.bias, weight
        known = format_of(weight)
        assert known is not None
        mean(weight, known.made_by(make))
        # Of what a weight is made of besides, a thirtieth of it, the model has copies: code asks.
        weight.quant_state = make(torch.empty(0, dtype=torch.uint8, device="cpu")).quant_state
        model.set_submodule(path, found)
    model.is_loaded_in_4bit = True  # peft asks


def _made(
    library: Any, read: TensorReader, name: str, beside: tuple[str, ...], numbers: Tensor
) -> Any:
    """A weight of its numbers and of what its file has beside them."""
    start = f"{name}."
    found = {one.removeprefix(start): read(one) for one in beside}
    with torch.device("cpu"):  # whatever the model is made on
        return library.nn.Params4bit.from_prequantized(numbers, found, device=numbers.device)
