"""Whether what two runs gave is the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def same(first: Any, second: Any) -> bool:
    """Whether two tensors have the same values, wherever they are; NaN is like NaN.

    What is no tensor is like anything else that is none.
    """
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return isinstance(first, Tensor) == isinstance(second, Tensor)
    if first.shape != second.shape or first.dtype is not second.dtype:
        return False
    second = second.to(first.device)
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(
        first.nan_to_num(), second.nan_to_num()
    )


def same_leaves(first: Any, second: Any) -> bool:
    """Whether two nested values have the same tensors in them."""
    one, other = pytree.tree_leaves(first), pytree.tree_leaves(second)
    return len(one) == len(other) and all(map(same, one, other))
