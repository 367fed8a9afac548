"""Which weights become quantized as they move into the parameter server, and into what format.

Of the streamed layers every frozen weight of a linear module; norms, biases, embeddings, heads and
whatever is trained stay as they are. A weight is brought into its format by itself, in the type in
which it would have crossed the link: what the library makes of the whole model is the same, bit by
bit, and the model is never in memory in 16 bits.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from l2l.model.format import Format, format_of
from l2l.model.modules import CutError
from l2l.model.trees import Part

BLOCK = 64  # numbers with a scale of their own
SCALE_BLOCK = 256  # scales with a scale of their own
BASES = {"nf4": "NF4Tensor", "int8": "Int8Tensor"}


def quantize(
    layers: Iterable[Part], base: str, *, dtype_of: Callable[[str, torch.dtype], torch.dtype]
) -> None:
    """Let frozen weights of these layers be meant for a format.

    Args:
        layers: the parts.
        base: "nf4" (4 bits, with scales of scales) or "int8" (a scale for each row).
        dtype_of: in which a parameter would cross the link, of its name and dtype.

    Raises:
        ValueError: the word is not known, the library is not there, or nothing can be quantized.
    """
    if base not in BASES:
        words = " or ".join(map(repr, BASES))
        raise ValueError(f"base={base!r} is not known. Expected {words}, or None for 16 bits.")
    make, seen, number = _maker(base), dict[Any, Format](), 0
    for part in layers:
        frozen = {id(one): owner for owner, one in part.tensors.parameters.items()}
        for module in part.module.modules():
            if base == "nf4" and len(getattr(module, "lora_magnitude_vector", ())):
                raise CutError(
                    "the model has an adapter of the kind DoRA, which computes with whole weights, "
                    "and torchao gives none of 4 bits. Use LoRA without use_dora, or base='int8'."
                )
            weight = module.weight if isinstance(module, nn.Linear) else None
            if weight is None or weight.requires_grad or not _can_be(weight, base):
                continue
            owner = frozen[id(weight)]
            key = tuple(weight.shape), dtype_of(owner, weight.dtype)
            if key not in seen:
                seen[key] = _format(partial(_made, make, key[1]), *key)
            part.tensors.formats[owner] = seen[key]
            number += 1
    if not number:
        raise CutError(
            f"base={base!r}, but no layer has a frozen weight of an nn.Linear in 16 or 32 bits. "
            "Expected a model whose own weights are frozen, with an adapter beside them: "
            "peft.get_peft_model(model, peft.LoraConfig(...)), or l2l train --lora."
        )


def plain_values(tensor: Tensor) -> Tensor:
    """The numbers that a tensor stands for, in its own type; as it is if it is a plain one.

    Raises:
        ValueError: its class does not tell them.
    """
    if format_of(tensor) is None:
        return tensor
    own: Any = tensor
    for name in ("get_original_weight", "dequantize"):  # torchao's
        method = getattr(type(tensor), name, None)
        if method is not None and method is not getattr(Tensor, name, None):
            found: Tensor = getattr(own, name)()
            return found
    raise ValueError(
        f"weights of the model are quantized ({type(tensor).__name__}) in a way in which they are "
        "not written as plain ones. Export the adapter without merging, load the base model in 16 "
        "bits with transformers, and merge the two with peft (merge_and_unload)."
    )


def _can_be(weight: Tensor, base: str) -> bool:
    is_plain = format_of(weight) is None and weight.is_floating_point()
    return is_plain and (base != "nf4" or weight.numel() % BLOCK == 0)


def _maker(base: str) -> Callable[[Tensor], Tensor]:
    try:
        library: Any = importlib.import_module("torchao.quantization")
        kind: Any = getattr(library, BASES[base], None)
        if kind is None:  # where earlier versions have it
            kind = getattr(importlib.import_module("torchao.dtypes"), BASES[base])
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"base={base!r} needs torchao, which cannot be imported ({error}). Install it with: "
            "pip install 'torchao>=0.17'"
        ) from error
    if base == "int8":
        return partial(kind.from_hp, granularity=library.PerRow())

    def make(weight: Tensor) -> Tensor:
        scales = weight.numel() // BLOCK
        block = next(size for size in _halves(SCALE_BLOCK) if scales % size == 0)
        made: Tensor = kind.from_tensor(weight, BLOCK, block)
        return made

    return make


def _halves(size: int) -> Iterable[int]:
    while size:
        yield size
        size //= 2


def _made(make: Callable[[Tensor], Tensor], dtype: torch.dtype, value: Tensor) -> Tensor:
    with torch.no_grad():
        return make(value.detach().to(dtype).contiguous())


def _format(make: Callable[[Tensor], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Format:
    """The format of what is made of such values, which need not be there."""
    found = format_of(make(torch.empty(shape, dtype=dtype, device="meta")))
    assert found is not None
    return found.made_by(make)
