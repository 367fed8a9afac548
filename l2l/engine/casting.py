"""The numbers of a batch in the type that a model's code takes.

Code that multiplies numbers of the batch with weights wants both in one type. Much code casts them
itself, the rest leaves that to whoever made the weights 16 bits wide: here, the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, final

import torch
from torch.utils import _pytree as pytree

from l2l.model import map_batch

logger = logging.getLogger("l2l")

Batches = Mapping[str, Any] | Sequence[Mapping[str, Any]]
Found = TypeVar("Found")
TARGETS = "label"  # entries whose name begins so are read by losses, which take any type


@final
class Casting:
    """Owner of which entries are cast, in whatever batch they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Nothing is known yet; `dtype` is that of the weights."""
        self._dtype = dtype
        self._names: frozenset[str] = frozenset()

    def cast(self, batch: Batches) -> Batches:
        """A batch as the model takes it."""
        if isinstance(batch, Mapping):
            return self._changed(batch, self._names)
        return [self._changed(one, self._names) for one in batch]

    def try_rows(
        self, rows: Mapping[str, Any], learn: Callable[[Mapping[str, Any]], Found]
    ) -> Found:
        """What is learnt of some rows: as they are, or else with their numbers cast.

        Raises:
            ValueError: the model does not run in either way.
        """
        refusal: ValueError | None = None
        for names in self._ways(rows):
            try:
                found = learn(self._changed(rows, names))
            except ValueError as error:
                refusal = error
                continue
            if names - self._names:
                self._tell(names)
            self._names |= names
            return found
        assert refusal is not None
        raise refusal

    def _ways(self, rows: Mapping[str, Any]) -> Iterator[frozenset[str]]:
        """Entries that may be cast: as before, what the model is given, targets of losses too."""
        numbers = frozenset(name for name, value in rows.items() if self._is_other(value))
        inputs = frozenset(name for name in numbers if not name.startswith(TARGETS))
        yield from dict.fromkeys([self._names & numbers, inputs, numbers])

    def _is_other(self, value: Any) -> bool:
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        return any(one.is_floating_point() and one.dtype is not self._dtype for one in tensors)

    def _changed(self, rows: Mapping[str, Any], names: frozenset[str]) -> Mapping[str, Any]:
        if not names:
            return rows
        cast = map_batch(lambda one: one.to(self._dtype) if one.is_floating_point() else one, rows)
        cast.update({name: value for name, value in rows.items() if name not in names})
        return cast

    def _tell(self, names: frozenset[str]) -> None:
        dtype = str(self._dtype).removeprefix("torch.")
        logger.warning(
            "the model multiplies %s of the batch with weights, which are %s: they are cast to "
            "that, as the model does not take them otherwise.%s",
            " and ".join(map(repr, sorted(names))),
            dtype,
            "" if dtype == "float32" else " precision='float32' keeps those of 32 bits.",
        )
