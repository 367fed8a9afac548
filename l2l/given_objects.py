"""Objects that layers are given besides tensors, and whether a layer changes them.

A layer that leaves something in an object that later layers are given too (shared keys and values
in a dict, a cache, a counter) hands on more than its hidden state: what it leaves is made without
graph, and once more when the layer is run again. What an object merely works out for itself when it
is first asked (a mask, a table of positions) is no such thing: it does not depend on the layer, and
asking again changes nothing.
"""

from __future__ import annotations

import inspect
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

MOST_DEPTH = 5
MOST_OBJECTS = 1000
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


def _same_value(one: Any, other: Any, depth: int = MOST_DEPTH) -> bool:
    if _is_same(one, other):
        return True
    if type(one) is not type(other) or not depth:
        return False
    if isinstance(one, Tensor):
        alike = one.shape == other.shape and one.dtype is other.dtype
        return alike and torch.equal(one, other)
    first, second = _contents(one), _contents(other)
    if first is None or second is None or first.keys() != second.keys():
        return False
    return all(_same_value(entry, second[key], depth - 1) for key, entry in first.items())


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
    waiting = deque((name, value, False, MOST_DEPTH) for name, value in arguments.items())
    while waiting and len(seen) < MOST_OBJECTS:
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
class _Known:
    """An object as it was."""

    def __init__(self, name: str, value: Any, *, shared: bool) -> None:
        self.name, self.value = name, value
        self.before = _contents(value) or {}
        self._versions = [
            (entry, _version(entry))
            for entry in (self.before.values() if shared else ())
            if isinstance(entry, Tensor)
        ]

    def is_written(self) -> bool:
        """Whether a tensor in it was written into."""
        return any(_version(tensor) != version for tensor, version in self._versions)

    def is_changed(self) -> bool:
        """Whether it holds something else now."""
        now = _contents(self.value) or {}
        return (
            self.is_written()
            or now.keys() != self.before.keys()
            or not all(_is_same(entry, self.before[key]) for key, entry in now.items())
        )


def _version(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return -1 if tensor.is_inference() else tensor._version


@final
class GivenObjects:
    """The objects among a layer's arguments, as they are now."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._known = [_Known(name, v, shared=shared) for name, v, shared in objects_in(arguments)]

    def left(
        self, *, again: Callable[[], None], differently: Callable[[], None]
    ) -> list[tuple[str, Any]]:
        """The objects in which the layer has left something for others, with the argument's name.

        Args:
            again: runs the layer as before.
            differently: with another hidden state, other weights and other random numbers.
        """
        changed = [one for one in self._known if one.is_changed()]
        if not changed or _only_worked_out(changed, again, differently):
            return []
        return [(one.name, one.value) for one in changed]


def _only_worked_out(
    changed: list[_Known], again: Callable[[], None], differently: Callable[[], None]
) -> bool:
    """Whether nothing has changed but what objects work out for themselves when first asked."""
    if any(one.is_written() for one in changed):
        return False
    after = [_Known(one.name, one.value, shared=True) for one in changed]
    try:
        again()
        if any(one.is_changed() for one in after):
            return False
        for one in changed:
            _put_back(one.value, one.before)
        differently()
    except Exception:  # numbers the layer was not made for, or an object that cannot be put back
        return False
    return all(_same_value(one.before, _contents(one.value)) for one in after)
