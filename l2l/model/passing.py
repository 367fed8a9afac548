"""What goes from layer to layer while the model's code runs without its layers.

A stub hands on a `HandedOn` tensor, which has the shape of a hidden state and refuses to be
computed with. So a model that does something between its layers, or collects hidden states, is
refused by name instead of being trained wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from l2l.model.layer_list import CutError

METADATA = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_cpu")
} | {Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.stride, Tensor.__len__, Tensor.numel}


class HandedOn(Tensor):
    """Stands for the hidden state between two layers; has its shape and refuses to be used."""

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about shape, refuse everything else."""
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise CutError(
            f"the model computes '{getattr(func, '__name__', func)}' on a hidden state outside its "
            "layers (between two of them, or by collecting the output of every layer). Expected "
            "each layer to get exactly what the one before it returned. Such models cannot be "
            "streamed layer by layer; turn off options that collect hidden states."
        )


@final
class NotKept:
    """Stands for an entry of a layer's return value besides the hidden state; not to be used."""

    def __init__(self, layer: int, entry: int) -> None:
        self.layer = layer
        self.entry = entry

    def _refuse(self, *_: object) -> NoReturn:
        raise CutError(
            f"the model uses entry {self.entry} of what layer {self.layer} returns. Only the first "
            "entry, the hidden state, is passed on: put what the loss needs into it."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __getitem__ = __float__ = _refuse

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """Refuse to be computed with."""
        del func, types
        found = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, NotKept))
        next(found)._refuse()


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns:
    """How layers of one structure wrap their hidden state ([Note: returns])."""

    spec: pytree.TreeSpec
    constants: tuple[Any, ...]  # for each leaf after the first: its value, or NotKept if a tensor

    @classmethod
    def learn(cls, value: Any, *, layer: int) -> Returns:
        """Read the form off a real return value."""
        leaves, spec = pytree.tree_flatten(value)
        if not leaves or not isinstance(leaves[0], Tensor):
            raise CutError(
                f"layer {layer} returned {type(value).__name__} that does not begin with a tensor. "
                "Expected the hidden state, alone or first in a tuple."
            )
        constants = tuple(
            NotKept(layer, entry) if isinstance(leaf, Tensor) else leaf
            for entry, leaf in enumerate(leaves[1:], start=1)
        )
        return cls(spec=spec, constants=constants)

    def wrap(self, hidden: Tensor) -> Any:
        """The return value of a layer whose hidden state is `hidden`."""
        return pytree.tree_unflatten([hidden, *self.constants], self.spec)

    @staticmethod
    def unwrap(value: Any) -> Tensor:
        """The hidden state in a layer's return value."""
        hidden = pytree.tree_leaves(value)[0]
        assert isinstance(hidden, Tensor)
        return hidden


@final
class Chain:
    """Checks that layers are called once each, in order, each with what the last one returned."""

    def __init__(self, num_layers: int, wrap: Callable[[int, Tensor], Any]) -> None:
        self._num_layers = num_layers
        self._wrap = wrap
        self._handed: Tensor | None = None
        self.num_called = 0

    def receive(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The hidden state among a layer's arguments: the first of them."""
        if index < self.num_called:
            raise CutError(
                f"layer {index} of {self._num_layers} is called a second time. Expected every "
                "layer once, in order. Weights shared between layers (ALBERT repeats one layer) "
                "cannot be streamed yet."
            )
        if index > self.num_called:
            raise CutError(
                f"layer {index} is called before layer {self.num_called}. Expected every layer "
                "once, in order. If the model skips layers at random (layerdrop), set that to 0."
            )
        first = first_argument(args, kwargs)
        if not isinstance(first, Tensor):
            raise CutError(
                f"layer {index} is called with {type(first).__name__} first. Expected the hidden "
                "state, a tensor, as its first argument."
            )
        if self._handed is not None and first is not self._handed:
            raise CutError(
                f"layer {index} is not given what layer {index - 1} returned: the model does "
                "something between them. Expected each layer to get exactly what the one before it "
                "returned."
            )
        self.num_called += 1
        return first

    def hand_on(self, index: int, hidden: Tensor) -> Any:
        """The return value of a layer that was not run."""
        plain = hidden.detach() if not isinstance(hidden, HandedOn) else hidden
        with torch._C.DisableTorchFunctionSubclass():
            # A fresh object each time, so that identity tells which layer it came from.
            self._handed = plain.detach().as_subclass(HandedOn)
        return self._wrap(index, self._handed)

    def incomplete(self) -> NoReturn:
        """Refuse a run that ended before the last layer."""
        raise CutError(
            f"the model ran only {self.num_called} of its {self._num_layers} layers. Expected "
            "every layer once, in order."
        )


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a layer is given first: its hidden state."""
    return args[0] if args else next(iter(kwargs.values()), None)


def plain_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with a handed-on hidden state as the ordinary tensor it stands for."""
    with torch._C.DisableTorchFunctionSubclass():
        ordinary = hidden.as_subclass(Tensor)

    def plain(value: Any) -> Any:
        return ordinary if value is hidden else value

    held = [value for value in (*args, *kwargs.values()) if not isinstance(value, Tensor)]
    if any(leaf is hidden for leaf in pytree.tree_leaves(held)):  # inside a tuple, say
        args, kwargs = pytree.tree_map(plain, (args, kwargs), is_leaf=lambda one: one is hidden)
    return tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}
