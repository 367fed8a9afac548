"""Gradients that are added to their sums, through a compiler where that is faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from l2l.model.beside import NotCompiledYetError, must_wait
from l2l.model.compiling import quietly, with_own_code


def _sum(sums: list[Tensor], gradients: list[Tensor]) -> None:
    torch._foreach_add_(sums, gradients)


@final
class GradientSum:
    """Adds one structure's gradients to its sums, in one pass over memory.

    Torch's own kernel for 16-bit gradients and float32 sums reaches little more than half of a
    device's memory rate, the compiled one nearly all of it: 0.24 instead of 0.40 ms for a layer of
    100 million parameters on an H200. The sums are the same bit by bit.
    """

    def __init__(self, *, backend: str) -> None:
        self._function: Callable[..., None] = torch.compile(
            with_own_code(_sum), backend=quietly(backend), fullgraph=True, dynamic=False
        )
        self._num_gradients = 0  # what it was compiled for; 0: not yet
        self._has_added = False
        self._is_refused = False

    def __call__(self, sums: list[Tensor], gradients: list[Tensor]) -> None:
        """Add each gradient to its sum."""
        # Compiled once: for the number that comes first, nearly always that of all parameters.
        number = self._num_gradients or len(sums)
        mixed = any(a.dtype is not b.dtype for a, b in zip(sums, gradients, strict=True))
        if self._is_refused or not mixed or len(sums) != number or must_wait():
            return _sum(sums, gradients)
        self._num_gradients = number
        try:
            self._function(sums, gradients)
        except NotCompiledYetError:
            _sum(sums, gradients)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # whatever a compiler may raise, before anything was added
            if self._has_added:
                raise
            self._is_refused = True
            _sum(sums, gradients)
        else:
            self._has_added = True
