"""What operators are given and return."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among an operator's arguments or results, in order.

    These are nested in nothing but lists, tuples and dictionaries. A device that counts, and a
    plan, look at every operator: the trees of torch, which hold anything, take five times as long.
    """
    if isinstance(values, Tensor):
        return [values]
    found: list[Tensor] = []
    if isinstance(values, list | tuple | dict):
        for one in values.values() if isinstance(values, dict) else values:
            if isinstance(one, Tensor):
                found.append(one)
            elif isinstance(one, list | tuple | dict):
                found += tensors_in(one)
    return found
