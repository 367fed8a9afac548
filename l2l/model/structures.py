"""Which layers are alike: those that run the same code on tensors of the same shapes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, str, type(None), torch.dtype)


def is_plain(value: Any) -> bool:
    """Whether a value is numbers, words and containers of them."""
    if isinstance(value, dict):
        return all(is_plain(entry) for pair in value.items() for entry in pair)
    if isinstance(value, tuple | list | set | frozenset):
        return all(is_plain(entry) for entry in value)
    return isinstance(value, PLAIN)


def _comparable(value: Any) -> Any:
    """A plain value as it is, a function by what it does, anything else by its identity."""
    if isinstance(value, functools.partial):
        return (id(value.func), _comparable(value.args), _comparable(value.keywords))
    return value if is_plain(value) else id(value)


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """What one module carries besides tensors and modules."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training"
    }


def attributes_of(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """What modules of a layer carry besides tensors and modules: plain values, or identities."""
    return {
        (path, name): _comparable(value)
        for path, module in layer.named_modules()
        for name, value in own_attributes(module).items()
    }


def own_numbers(layers: list[nn.Module]) -> frozenset[tuple[str, str]]:
    """Attributes that hold the layer's own number, in every layer that has them."""
    found: dict[tuple[str, str], list[bool]] = {}
    for index, layer in enumerate(layers):
        for key, value in attributes_of(layer).items():
            found.setdefault(key, []).append(type(value) is int and value == index)
    return frozenset(
        key for key, own in found.items() if all(own) and (len(own) > 1 or key[1] == "layer_idx")
    )


def structure_of(layer: nn.Module, numbering: frozenset[tuple[str, str]]) -> str:
    """A text that is equal for layers that run the same code on tensors of the same shapes."""
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return "; ".join(
        [
            f"{name}:{type(module).__qualname__}:{module.training}"
            for name, module in layer.named_modules()
        ]
        + [f"{name}:{tuple(tensor.shape)}:{tensor.requires_grad}" for name, tensor in tensors]
        + [f"{key}={v}" for key, v in attributes_of(layer).items() if key not in numbering]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The one module that runs all layers of a structure, and what is a layer's own in it.

    A compiler sees the same module whatever the layer, so it compiles once for any depth. Where
    modules know the number of their layer, that is set before each call; compiled code looks at it
    only if the layer's code does.
    """

    module: nn.Module
    names: Mapping[str, str]  # name in the module -> owner
    index: int
    numbers: tuple[tuple[nn.Module, str], ...]

    def tensors(self, by_owner: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A layer's tensors by their names in the module; sets the layer's number."""
        for module, name in self.numbers:
            module.__dict__[name] = self.index
        return {name: by_owner[owner] for name, owner in self.names.items()}


@contextlib.contextmanager
def attributes_kept(trees: Iterable[nn.Module]) -> Iterator[None]:
    """Put back what code sets on the modules of these trees inside the block."""
    modules = {id(module): module for tree in trees for module in tree.modules()}
    before = [(module, own_attributes(module)) for module in modules.values()]
    children = [(module._modules, dict(module._modules)) for module in modules.values()]
    try:
        yield
    finally:
        for registry, found in children:
            if registry != found:
                registry.clear()
                registry.update(found)
        for module, attributes in before:
            for name in own_attributes(module).keys() - attributes.keys():
                del module.__dict__[name]
            module.__dict__.update(attributes)
