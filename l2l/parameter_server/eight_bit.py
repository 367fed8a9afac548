"""The code of 8-bit moments, in PyTorch: on the host the oracle of the native kernel, bit by bit.

A moment is a code times a unit that 128 elements share: the square of the code, with its sign.
Codes are rounded at random, by a hash of the element's place and a seed. [Note: 8-bit moments] in
host_kernel.cpp has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

BLOCK_SIZE = 128  # elements that share a unit
_LARGEST_FIRST_CODE = 127
_LARGEST_SECOND_CODE = 255
_SMALLEST_SECOND_CODE = 4
_GOLDEN_RATIO = 0x9E3779B1  # of 2^32
_MODULUS = 0xFFFFFFFF


def num_blocks(numel: int) -> int:
    """Number of units that 8-bit moments of `numel` elements need, for each moment."""
    return -(-numel // BLOCK_SIZE)


def cut(tensors: Mapping[str, Tensor], span: slice) -> dict[str, Tensor]:
    """Elements of flat tensors; `span` begins with a block. Names of units end in `_unit`."""
    blocks = slice(span.start // BLOCK_SIZE, num_blocks(span.stop))
    return {n: one[blocks if n.endswith("_unit") else span] for n, one in tensors.items()}


def cuts(numel: int, piece: int) -> Iterator[slice]:
    """Cut a flat run into pieces of whole blocks, and what is left over."""
    whole = numel // BLOCK_SIZE * BLOCK_SIZE
    for start in range(0, whole, piece):
        yield slice(start, min(start + piece, whole))
    if whole < numel:
        yield slice(whole, numel)


def in_rows(tensors: Mapping[str, Tensor], span: slice) -> dict[str, Tensor]:
    """A piece of flat tensors as views, in rows of a block each; what is left over is one row."""
    width = min(span.stop - span.start, BLOCK_SIZE) or BLOCK_SIZE
    found = cut(tensors, span).items()
    return {name: one.view(-1, 1 if name.endswith("_unit") else width) for name, one in found}


def rounding_seed(seed: int, *, step: int) -> int:
    """The 32-bit seed from which an update of 8-bit moments rounds."""
    return (seed * 0x85EBCA6B + step * _GOLDEN_RATIO) & _MODULUS


def decoded(state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The first moment and the root of the second, in float32."""
    first_code, root_code = state["exp_avg"].float(), state["exp_avg_sq"].float()
    first = first_code * first_code.abs() * state["exp_avg_unit"]
    return first, root_code * root_code * state["exp_avg_sq_unit"]


def decode(state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The same of a flat run."""
    numel, units = state["exp_avg"].numel(), ("exp_avg_unit", "exp_avg_sq_unit")
    wide = {name: state[name].repeat_interleave(BLOCK_SIZE)[:numel] for name in units}
    return decoded({**state, **wide})


def encode(
    state: Mapping[str, Tensor], first: Tensor, root: Tensor, *, position: int, seed: int
) -> None:
    """Let a flat run that begins at a position be this first moment and root of a second."""
    tensors = {**state, "first": first, "root": root}
    for span in cuts(first.numel(), max(BLOCK_SIZE, first.numel())):
        rows, first_block = in_rows(tensors, span), (position + span.start) // BLOCK_SIZE
        made = encoded(rows["first"], rows["root"], torch.tensor(first_block), torch.tensor(seed))
        for name, value in made.items():
            rows[name].copy_(value)


def encoded(first: Tensor, root: Tensor, first_block: Tensor, seed: Tensor) -> dict[str, Tensor]:
    """A first moment and the root of a second, in rows of a block each, in 8 bits.

    Compiled on CUDA, a code in ten million may round the other way.
    """
    random, others = _random_numbers(first, first_block, seed)
    magnitude = first.abs()
    first_unit = _units(magnitude, largest_code=_LARGEST_FIRST_CODE)
    root_unit = _units(root, largest_code=_LARGEST_SECOND_CODE)
    smallest = torch.where(root_unit > 0, float(_SMALLEST_SECOND_CODE), 0.0)
    first_code = _codes(_scaled(magnitude, first_unit), random, smallest=torch.zeros_like(smallest))
    return {
        "exp_avg": torch.where(first < 0, -first_code, first_code).to(torch.int8),
        "exp_avg_sq": _codes(_scaled(root, root_unit), others, smallest=smallest).to(torch.uint8),
        "exp_avg_unit": first_unit,
        "exp_avg_sq_unit": root_unit,
    }


def _random_numbers(like: Tensor, first_block: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    """In rows of int32, 16 uniform bits per element, and those of the element half a block away."""
    rows, width = like.shape
    block = torch.arange(rows, device=like.device).view(-1, 1) + first_block
    x = ((block & _MODULUS) ^ seed) * _GOLDEN_RATIO & _MODULUS
    x = (x ^ (x >> 15)) * 0x85EBCA6B & _MODULUS
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _MODULUS
    x = x ^ (x >> 16)
    within = torch.arange(width, dtype=torch.int32, device=like.device)
    return _upper_half(x, within), _upper_half(x, within ^ (BLOCK_SIZE // 2))


def _upper_half(hashed: Tensor, within: Tensor) -> Tensor:
    """Of the sum of a hash and a multiple of the golden ratio; nothing overflows 32 bits."""
    low = (hashed & 0xFFFF).int() + within * (_GOLDEN_RATIO & 0xFFFF)
    high = (hashed >> 16).int() + within * (_GOLDEN_RATIO >> 16) + (low >> 16)
    return high & 0xFFFF


def _units(magnitude: Tensor, *, largest_code: int) -> Tensor:  # float32, one per row
    largest = magnitude.amax(1, keepdim=True)
    # Divided by a tensor: by a number, CUDA would multiply with its inverse.
    units = largest / torch.full_like(largest, largest_code**2)
    units = torch.where(largest < 1e-18, 0.0, units)
    return torch.where(largest.isfinite(), units, torch.nan)


def _scaled(magnitude: Tensor, unit: Tensor) -> Tensor:
    """Magnitudes in units; of a unit that is zero or not a number, nothing."""
    inverse = torch.where(unit > 0, torch.full_like(unit, 0.9999997) / unit, 0.0)
    return magnitude * inverse


def _codes(scaled: Tensor, random: Tensor, *, smallest: Tensor) -> Tensor:  # float32
    scaled = torch.where(scaled.isnan(), 0.0, scaled)
    u = random.float() * 2.0**-16
    low = torch.maximum((_rough_root(scaled) - u).round(), smallest)
    return low + (scaled > low * (low + u + u) + u)


def _rough_root(values: Tensor) -> Tensor:
    """The square root to 0.0009 of itself, for codes: a guess and a Newton step."""
    guess = (0x5F0B4000 - (values.view(torch.int32) >> 1)).view(torch.float32)
    product = values * guess
    return product * (1.891 - product * guess)
