"""A batch and its microbatches: checked, and cut along the rows.

A batch is a dict of tensors that share their first dimension (entries that are not tensors, or are
scalars, go to every microbatch), or a list of such dicts, each of which is one microbatch with a
length of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Microbatch = dict[str, Any]


def num_rows(batch: Mapping[str, Any]) -> int:
    """The common first dimension of a batch's tensors.

    Raises:
        ValueError: there is no tensor, the tensors disagree, or there are no rows.
    """
    rows = {
        name: value.shape[0]
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.dim() > 0
    }
    if not rows:
        raise ValueError(
            f"the batch has no tensor with rows; found {sorted(batch)}. Expected a dict such as "
            "{'input_ids': tensor of [rows, length], 'labels': ...}."
        )
    if len(set(rows.values())) > 1:
        raise ValueError(
            f"the batch's tensors have unequal first dimensions: {rows}. Expected the same number "
            "of rows in each."
        )
    count = next(iter(rows.values()))
    if count == 0:
        raise ValueError(f"the batch has zero rows: {rows}. Expected at least one.")
    return count


def token_length(batch: Mapping[str, Any]) -> int:
    """Positions in a row: the second dimension of the batch's tensors of two."""
    lengths = [v.shape[1] for v in batch.values() if isinstance(v, Tensor) and v.dim() == 2]
    return max(1, *lengths, 1)


def take_rows(batch: Mapping[str, Any], start: int, end: int) -> Microbatch:
    """Rows `start` to `end` of every tensor that has rows."""
    return {
        name: value[start:end] if isinstance(value, Tensor) and value.dim() > 0 else value
        for name, value in batch.items()
    }


def move_batch(batch: Mapping[str, Any], device: torch.device | str) -> Microbatch:
    """The batch with its tensors on a device."""
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def split_batch(batch: Any, *, microbatch_size: int) -> list[Microbatch]:
    """The microbatches of a batch, in order; the last of a dict may be smaller.

    Raises:
        ValueError: as `num_rows`, or the batch is neither a dict nor a list of dicts.
    """
    if isinstance(batch, Mapping):
        rows = num_rows(batch)
        return [
            take_rows(batch, start, min(start + microbatch_size, rows))
            for start in range(0, rows, microbatch_size)
        ]
    if not isinstance(batch, list | tuple) or not batch:
        raise ValueError(
            f"the batch is {'an empty ' if batch == [] else ''}{type(batch).__name__}. Expected a "
            "dict of tensors, or a list of dicts, each its own microbatch."
        )
    for one in batch:
        if not isinstance(one, Mapping):
            raise ValueError(f"the list of microbatches holds {type(one).__name__}; expected dicts")
        num_rows(one)
    return [dict(one) for one in batch]


def split_into(batch: Any, number: int, *, microbatch_size: int) -> tuple[list[Microbatch], int]:
    """A batch in exactly so many microbatches, and how many of them are real.

    Other ranks have more rows. With too few of its own, a rank goes through its last microbatch
    once more for each that is missing; what comes of it counts nothing.
    """
    found = split_batch(batch, microbatch_size=microbatch_size)
    if len(found) < number and isinstance(batch, Mapping):
        rows = num_rows(batch)
        parts = min(rows, number)
        ends = [rows * (index + 1) // parts for index in range(parts)]
        starts = [0, *ends[:-1]]
        found = [take_rows(batch, a, b) for a, b in zip(starts, ends, strict=True)]
    return [*found, *(dict(found[-1]) for _ in range(number - len(found)))], len(found)


def no_rows(outputs: Any) -> Any:
    """Outputs without their rows; scalars are zero."""

    def emptied(tensor: Tensor) -> Tensor:
        return tensor[:0] if tensor.dim() else torch.zeros_like(tensor)

    return pytree.tree_map_only(Tensor, emptied, outputs)


def join_outputs(outputs: list[Any], shares: list[float]) -> Any:
    """One set of outputs for the whole batch: rows joined, scalars averaged by the shares.

    Raises:
        ValueError: the outputs hold something whose rows cannot be joined.
    """
    if len(outputs) == 1:
        return outputs[0]
    flat = [pytree.tree_flatten(one) for one in outputs]
    joined: list[Any] = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        first = leaves[0]
        if isinstance(first, Tensor) and first.dim() == 0:
            weighted = [leaf * share for leaf, share in zip(leaves, shares, strict=True)]
            joined.append(torch.stack(weighted).sum())
        elif isinstance(first, Tensor):
            if len({leaf.shape[1:] for leaf in leaves}) > 1:
                raise ValueError(
                    "the outputs of the microbatches have different lengths and cannot be joined. "
                    "Call predict for each, or pad them to one length."
                )
            joined.append(torch.cat(leaves))
        elif first is None or isinstance(first, bool | int | float | str):
            joined.append(first)
        else:
            raise ValueError(
                f"the model returns {type(first).__name__}, whose rows cannot be joined over the "
                "microbatches. Return a dict, a tuple or a ModelOutput, or let one microbatch hold "
                "all rows."
            )
    return pytree.tree_unflatten(joined, flat[0][1])
