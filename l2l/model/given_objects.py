"""Objects that layers are given besides tensors, and what a layer leaves in them.

A layer that leaves something in an object for others to read (shared keys and values in a dict, a
cache, a counter) hands on more than its hidden state: what it leaves has no graph, and is left once
more when the layer is run again. Whether it is read is tried: with the object as it was before, a
layer that reads it gives something else. What an object merely works out for itself when it is
first asked (a mask, a table of positions) is the same either way.
"""

from __future__ import annotations

import inspect
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

MAX_DEPTH = 5
MAX_OBJECTS = 1000
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
OPAQUE = (nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)

Contents = dict[Any, Any]


def _contents(value: Any) -> Contents | None:
    """What an object holds, by place; None: nothing that can be seen."""
    if isinstance(value, (*PLAIN, *OPAQUE, Tensor)):
        return None
    found: Contents = {}
    if isinstance(value, dict):
        found |= {("entry", key): entry for key, entry in value.items()}
    elif isinstance(value, list | tuple | deque):
        found |= {("entry", place): entry for place, entry in enumerate(value)}
    elif isinstance(value, set):
        found |= {("member", member): None for member in value}
    if hasattr(value, "__dict__"):
        found |= {("attribute", name): entry for name, entry in vars(value).items()}
    for name in getattr(type(value), "__slots__", ()):
        if isinstance(name, str) and hasattr(value, name):
            found["attribute", name] = getattr(value, name)
    return found


def _put_back(value: Any, contents: Contents) -> None:
    entries = {key[1]: entry for key, entry in contents.items() if key[0] == "entry"}
    if isinstance(value, dict):
        value.clear()
        value.update(entries)
    elif isinstance(value, list | deque):
        value.clear()
        value.extend(entries.values())
    elif isinstance(value, set):
        value.clear()
        value.update(key[1] for key in contents if key[0] == "member")
    attributes = {key[1]: entry for key, entry in contents.items() if key[0] == "attribute"}
    if hasattr(value, "__dict__"):
        vars(value).clear()
    for name, entry in attributes.items():
        object.__setattr__(value, name, entry)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, PLAIN) and type(one) is type(other) and one == other)


def named_arguments(module: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Contents:
    """A layer's arguments by name."""
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        names = []
    positional = {
        names[place] if place < len(names) else f"number {place}": value
        for place, value in enumerate(args)
    }
    return {**positional, **kwargs}


def objects_in(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Every object that can be seen through these arguments.

    Yields:
        the argument's name, the object, and whether layers share it: a dict, list or tuple is made
        anew for every layer from what was recorded.
    """
    seen: set[int] = set()
    waiting = deque((name, value, False, MAX_DEPTH) for name, value in arguments.items())
    while waiting and len(seen) < MAX_OBJECTS:
        name, value, shared, depth = waiting.popleft()
        contents = _contents(value) if id(value) not in seen else None
        if contents is None:
            continue
        seen.add(id(value))
        shared = shared or pytree.tree_is_leaf(value)
        yield name, value, shared
        if depth:
            waiting.extend((name, entry, shared, depth - 1) for entry in contents.values())


@final
class State:
    """An object as it is now."""

    def __init__(self, name: str, value: Any, *, shared: bool) -> None:
        self.name, self.value, self._shared = name, value, shared
        self._contents = _contents(value) or {}
        held = self._contents.values() if shared else ()
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._tensors = [
                (one, one._version, one.clone())
                for one in held
                if isinstance(one, Tensor) and not one.is_inference()
            ]

    def is_past(self) -> bool:
        """Whether the object holds something else now."""
        now = _contents(self.value) or {}
        with torch._C.DisableTorchFunctionSubclass():
            return (
                any(tensor._version != version for tensor, version, _ in self._tensors)
                or now.keys() != self._contents.keys()
                or not all(_is_same(entry, self._contents[key]) for key, entry in now.items())
            )

    def now(self) -> State:
        """The same object as it is now."""
        return State(self.name, self.value, shared=self._shared)

    def restore(self) -> None:
        """Let the object be as it was."""
        if not isinstance(self.value, tuple):
            _put_back(self.value, self._contents)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for tensor, _, values in self._tensors:
                tensor.copy_(values)


def states_of(arguments: Mapping[str, Any]) -> list[State]:
    """The objects among a layer's arguments, as they are now."""
    return [State(name, value, shared=shared) for name, value, shared in objects_in(arguments)]
