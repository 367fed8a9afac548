"""What the model's code gives its layers: recorded once per microbatch, given to every pass."""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2l.model.layer_list import CutError
from l2l.model.passing import HandedOn, NotKept

HIDDEN = object()

Autocast = tuple[str, bool, torch.dtype]
"""State of torch.autocast for one type of device: its name, whether it is on, and to what."""


def autocast_state() -> tuple[Autocast, ...]:
    """What torch.autocast does here, for every type of device that layers may run on."""
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """A tensor argument, by its place in the microbatch's list of recorded tensors."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How one layer was called: `HIDDEN`, recorded tensors and constants in their places."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    autocast: tuple[Autocast, ...] = ()  # where the model's own code has set it around the layer

    def autocasting(self) -> contextlib.AbstractContextManager[object]:
        """What torch.autocast did where the layer was called; the layer runs inside it."""
        stack = contextlib.ExitStack()
        for kind, is_on, dtype in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on))
        return stack

    def arguments(
        self, hidden: Tensor, recorded: list[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with the tensors filled in."""
        filled = [
            hidden
            if leaf is HIDDEN
            else recorded[leaf.index]
            if isinstance(leaf, RecordedTensor)
            else leaf
            for leaf in self.leaves
        ]
        args, kwargs = pytree.tree_unflatten(filled, self.spec)
        return tuple(args), kwargs


@dataclass(slots=True)
class Recording:
    """What a prologue run yields for one microbatch."""

    hidden: Tensor | None = None
    tensors: list[Tensor] = field(default_factory=list)  # each once, whatever the number of layers
    calls: dict[int, Call] = field(default_factory=dict)
    _outside: tuple[Autocast, ...] = field(default_factory=autocast_state)
    _last: tuple[Any, Any, Tensor] | None = None

    def add(self, layer: int, args: Any, kwargs: Any, hidden: Tensor) -> None:
        """Note the arguments of a layer; `hidden` is found among them by identity."""
        if self.hidden is None:
            self.hidden = hidden
        if self._repeats(args, kwargs, hidden):
            self.calls[layer] = self.calls[layer - 1]
        else:
            self._add(layer, args, kwargs, hidden)
        self._last = (args, kwargs, hidden)
        autocast = tuple(one for one in autocast_state() if one not in self._outside)
        if autocast != self.calls[layer].autocast:
            self.calls[layer] = replace(self.calls[layer], autocast=autocast)

    def _repeats(self, args: Any, kwargs: Any, hidden: Tensor) -> bool:
        """Whether a layer is called just as the one before it, but for the hidden state."""
        if self._last is None:
            return False
        last_args, last_kwargs, last_hidden = self._last
        if len(args) != len(last_args) or kwargs.keys() != last_kwargs.keys():
            return False
        pairs = [*zip(args, last_args, strict=True)]
        pairs += [(value, last_kwargs[name]) for name, value in kwargs.items()]
        return all(
            other is last_hidden
            if one is hidden
            else one is other and not _may_change(one) and not _holds(one, last_hidden)
            for one, other in pairs
        )

    def _add(self, layer: int, args: Any, kwargs: Any, hidden: Tensor) -> None:
        leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
        noted: list[Any] = []
        for leaf in leaves:
            if leaf is hidden:
                noted.append(HIDDEN)
            elif isinstance(leaf, HandedOn):
                raise CutError(
                    f"layer {layer} is given the output of another layer besides its hidden state. "
                    "Expected each layer to get exactly what the one before it returned."
                )
            elif isinstance(leaf, Tensor):
                noted.append(RecordedTensor(self._index(leaf)))
            elif isinstance(leaf, NotKept):
                raise CutError(
                    f"layer {layer} consumes more than the hidden state: entry {leaf.entry} of "
                    f"what layer {leaf.layer} returns (as T5's layers do with their position "
                    "bias). Such models cannot be streamed yet."
                )
            else:
                noted.append(leaf)
        self.calls[layer] = Call(leaves=tuple(noted), spec=spec)

    def _index(self, tensor: Tensor) -> int:
        for index, known in enumerate(self.tensors):
            if known is tensor:
                return index
        self.tensors.append(tensor)
        if tensor is self.hidden:
            self._tell_apart(RecordedTensor(len(self.tensors) - 1))
        return len(self.tensors) - 1

    def _tell_apart(self, recorded: RecordedTensor) -> None:
        """What enters the first layer is given to later ones too, beside their hidden state.

        If the first one is given it twice, only the first of these is its hidden state: plain
        PyTorch adds the gradient of the other to those of the later layers.
        """
        call = self.calls[0]
        first = next(place for place, leaf in enumerate(call.leaves) if leaf is HIDDEN)
        others = (recorded if leaf is HIDDEN else leaf for leaf in call.leaves[first + 1 :])
        self.calls[0] = replace(call, leaves=(*call.leaves[: first + 1], *others))


def _may_change(value: Any) -> bool:
    """Whether a layer, or the model between two of them, can change what is in there."""
    if isinstance(value, tuple):
        return any(map(_may_change, value))
    return isinstance(value, dict | list | deque)


def _holds(value: Any, tensor: Tensor) -> bool:
    return value is tensor or (
        isinstance(value, tuple) and any(leaf is tensor for leaf in pytree.tree_leaves(value))
    )
