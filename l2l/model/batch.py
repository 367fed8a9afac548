"""A batch, its microbatches and their outputs: checked, cut along the rows, joined, compared.

A batch is a dict of tensors that share their first dimension (entries that are not tensors, or are
scalars, go to every microbatch), or a list of such dicts, each of which is one microbatch with a
length of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Microbatch = dict[str, Any]


def has_rows(value: Any) -> bool:
    """Whether an entry of a batch has rows of its own."""
    return isinstance(value, Tensor) and value.dim() > 0


def num_rows(batch: Mapping[str, Any]) -> int:
    """The common first dimension of a batch's tensors.

    Raises:
        ValueError: there is no tensor, the tensors disagree, or there are no rows.
    """
    rows: dict[str, int] = {
        name: value.shape[0] for name, value in batch.items() if has_rows(value)
    }
    if len(set(rows.values())) != 1 or 0 in rows.values():
        raise ValueError(
            f"of the entries {sorted(batch)} of the batch, these have rows: {rows}. Expected a "
            "dict such as {'input_ids': tensor of [rows, length], 'labels': ...}, with the same "
            "number of rows in each tensor, and at least one."
        )
    return next(iter(rows.values()))


def token_length(batch: Mapping[str, Any]) -> int:
    """Positions in a row: the second dimension of the batch's tensors of two."""
    lengths = [v.shape[1] for v in batch.values() if isinstance(v, Tensor) and v.dim() == 2]
    return max(lengths, default=1) or 1


def take_rows(batch: Mapping[str, Any], start: int, end: int) -> Microbatch:
    """Rows `start` to `end` of every tensor that has rows."""
    return {name: value[start:end] if has_rows(value) else value for name, value in batch.items()}


def map_batch(change: Callable[[Tensor], Tensor], batch: Mapping[str, Any]) -> Microbatch:
    """The batch with its tensors changed."""
    return {n: change(v) if isinstance(v, Tensor) else v for n, v in batch.items()}


def move_batch(batch: Mapping[str, Any], device: torch.device | str) -> Microbatch:
    """The batch with its tensors on a device."""
    return map_batch(lambda tensor: tensor.to(device), batch)


def split_batch(batch: Any, *, microbatch_size: int) -> list[Microbatch]:
    """The microbatches of a batch, in order; the last of a dict may be smaller.

    Raises:
        ValueError: as `num_rows`, or the batch is neither a dict nor a list of dicts.
    """
    if isinstance(batch, Mapping):
        starts = range(0, num_rows(batch), microbatch_size)
        return [take_rows(batch, start, start + microbatch_size) for start in starts]
    is_list = isinstance(batch, list | tuple) and len(batch) > 0
    if not is_list or not all(isinstance(one, Mapping) for one in batch):
        kinds = sorted({type(one).__name__ for one in batch}) if is_list else "nothing"
        raise ValueError(
            f"the batch is a {type(batch).__name__} of {kinds}. Expected a dict of tensors, or a "
            "list of dicts, each its own microbatch."
        )
    for one in batch:
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
        ends = [rows * index // parts for index in range(parts + 1)]
        found = [take_rows(batch, ends[i], ends[i + 1]) for i in range(parts)]
    return [*found, *(dict(found[-1]) for _ in range(number - len(found)))], len(found)


def no_rows(outputs: Any) -> Any:
    """Outputs without their rows; scalars are zero."""
    return pytree.tree_map_only(
        Tensor, lambda one: one[:0] if one.dim() else torch.zeros_like(one), outputs
    )


def join_outputs(outputs: list[Any], shares: list[float]) -> Any:
    """One set of outputs for the whole batch: rows joined, scalars averaged by the shares.

    Raises:
        ValueError: the outputs hold something whose rows cannot be joined.
    """

    def join(first: Any, *others: Any) -> Any:
        leaves = [first, *others]
        if not isinstance(first, Tensor | bool | int | float | str | None):
            raise ValueError(
                f"the model returns {type(first).__name__}, whose rows cannot be joined over the "
                "microbatches. Return a dict, a tuple or a ModelOutput, or let one microbatch hold "
                "all rows."
            )
        if not isinstance(first, Tensor):
            return first
        if first.dim() == 0:
            weighted = [leaf * share for leaf, share in zip(leaves, shares, strict=True)]
            return torch.stack(weighted).sum()
        if len({leaf.shape[1:] for leaf in leaves}) > 1:
            raise ValueError(
                "the outputs of the microbatches have different lengths and cannot be joined. "
                "Call predict for each, or pad them to one length."
            )
        return torch.cat(leaves)

    return outputs[0] if len(outputs) == 1 else pytree.tree_map(join, *outputs)


def same(first: Any, second: Any) -> bool:
    """Whether two nested values have the same tensors in them, wherever these are.

    NaN is like NaN, and what is no tensor is like anything else that is none.
    """
    pairs = [pytree.tree_leaves(first), pytree.tree_leaves(second)]
    return len(pairs[0]) == len(pairs[1]) and all(map(_same_tensor, *pairs))


def _same_tensor(first: Any, second: Any) -> bool:
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return isinstance(first, Tensor) == isinstance(second, Tensor)
    if first.shape != second.shape or first.dtype is not second.dtype:
        return False
    second = second.to(first.device)
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(
        first.nan_to_num(), second.nan_to_num()
    )
