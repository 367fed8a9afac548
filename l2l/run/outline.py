"""What a model's outputs are made of, without the tensors in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def tensors_in(outputs: Any) -> list[Tensor]:
    """The tensors among a model's outputs, in order."""
    return [one for one in pytree.tree_leaves(outputs) if isinstance(one, Tensor)]


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """Nested values with holes where tensors were."""

    form: pytree.TreeSpec
    values: tuple[Any, ...]  # in order; None in place of tensors
    places: tuple[int, ...]  # of the tensors, among these
    dtypes: tuple[torch.dtype, ...]  # of the tensors
    loss: int | None  # which of the tensors is the loss

    @classmethod
    def of(cls, outputs: Any, loss: Tensor | None = None) -> Outline:
        """The outline of outputs; `loss` is one of them."""
        flat, form = pytree.tree_flatten(outputs)
        places = [index for index, one in enumerate(flat) if isinstance(one, Tensor)]
        return cls(
            form,
            tuple(None if isinstance(one, Tensor) else one for one in flat),
            tuple(places),
            tuple(flat[place].dtype for place in places),
            next((i for i, place in enumerate(places) if flat[place] is loss), None),
        )

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The outputs with these tensors."""
        flat = list(self.values)
        for place, one in zip(self.places, tensors, strict=True):
            flat[place] = one
        return pytree.tree_unflatten(flat, self.form)
