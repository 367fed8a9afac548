"""What goes from layer to layer while the model's code runs without its layers, and is recorded.

A stub hands on a `HandedOn` tensor, which has the shape of a hidden state and refuses to be
computed with. So a model that does something between its layers, or collects hidden states, is
refused by name instead of being trained wrongly. What the model's code gives its layers besides is
recorded once per microbatch, and given to every pass.

Objects that layers are given besides tensors, and what a layer leaves in them.

A layer that leaves something in an object for others to read (shared keys and values in a dict, a
cache, a counter) hands on more than its hidden state: what it leaves has no graph, and is left once
more when the layer is run again. Whether it is read is tried: with the object as it was before, a
layer that reads it gives something else. What an object merely works out for itself when it is
first asked (a mask, a table of positions) is the same either way.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections import UserDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from l2l.model.captures import Open, open_lists, run_layer
from l2l.model.modules import CutError
from l2l.model.route import Key

METADATA = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_cpu")
} | {Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.stride, Tensor.__len__, Tensor.numel}

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
IN_ORDER = "Expected every layer once, in order."
AS_RETURNED = "Expected each layer to get exactly what the one before it returned."


class HandedOn(Tensor):
    """Stands for the hidden state between two layers; has its shape and refuses to be used."""

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions about shape, refuse everything else."""
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise CutError(
            f"the model computes '{getattr(func, '__name__', func)}' on a hidden state outside its "
            f"layers (between two of them, or by collecting the output of every layer). "
            f"{AS_RETURNED} Turn off options that collect hidden states."
        )


@final
class NotKept:
    """Stands for an entry of a layer's return value besides the hidden state; not to be used."""

    def __init__(self, layer: int, entry: int) -> None:
        self.name = f"entry {entry} of what layer {layer} returns"

    def _refuse(self, *_: object) -> NoReturn:
        raise CutError(
            f"the model uses {self.name}, which it did not use when it was tried. Put what the "
            "loss needs into the hidden state."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __getitem__ = __float__ = _refuse

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to be computed with."""
        found = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, NotKept))
        next(found)._refuse()


@dataclass(frozen=True, slots=True)
class Given:
    """An entry of a return value that is an argument as it was given: its place among these."""

    place: int


@dataclass(frozen=True, slots=True)
class SameAs:
    """An entry that is another entry of the same return value."""

    entry: int


OWN = object()  # an entry that the layer has made


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns:
    """What layers of one structure return ([Note: returns])."""

    spec: pytree.TreeSpec
    entries: tuple[Any, ...]  # for each leaf: `OWN`, `Given`, `SameAs` or its value

    @classmethod
    def learn(cls, value: Any, arguments: Any, *, layer: int) -> Returns:
        """Read the form off a real return value of a layer with these arguments."""
        leaves, spec = pytree.tree_flatten(value)
        if not any(isinstance(leaf, Tensor) for leaf in leaves):
            raise CutError(
                f"layer {layer} returned {type(value).__name__} without any tensor. Expected the "
                "hidden state, alone or first in a tuple."
            )
        given = pytree.tree_leaves(arguments)
        return cls(
            spec=spec, entries=tuple(cls._entry(i, leaves, given) for i in range(len(leaves)))
        )

    @staticmethod
    def _entry(index: int, leaves: list[Any], given: list[Any]) -> Any:
        leaf = leaves[index]
        if not isinstance(leaf, Tensor):
            return leaf
        for earlier in range(index):
            if leaves[earlier] is leaf:
                return SameAs(earlier)
        places = (place for place, one in enumerate(given) if one is leaf)
        place = next(places, None) if index else None
        return OWN if place is None else Given(place)

    def has_left(self, entries: Sequence[int]) -> bool:
        """Whether any of these entries was left besides what the layer returned (`Left`)."""
        number = self.spec.children()[0].num_leaves
        return any(entry >= number for entry in entries)

    @property
    def own(self) -> tuple[int, ...]:
        """Entries that the layer makes."""
        return tuple(i for i, entry in enumerate(self.entries) if entry is OWN)

    def wrap(self, made: Mapping[int, Any], arguments: Any) -> Any:
        """The return value of a layer that has made these entries of these arguments."""
        given = pytree.tree_leaves(arguments)
        leaves: list[Any] = []
        for index, entry in enumerate(self.entries):
            if entry is OWN:
                leaves.append(made[index])
            elif isinstance(entry, SameAs):
                leaves.append(leaves[entry.entry])
            else:
                leaves.append(given[entry.place] if isinstance(entry, Given) else entry)
        return pytree.tree_unflatten(leaves, self.spec)

    @staticmethod
    def unwrap(value: Any, entries: Sequence[int] = (0,)) -> list[Tensor]:
        """Some of the tensors in a layer's return value."""
        leaves = pytree.tree_leaves(value)
        return [leaves[entry] for entry in entries]


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a layer is given first: its hidden state."""
    return args[0] if args else next(iter(kwargs.values()), None)


def plain_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """A call's arguments with handed-on hidden states as the ordinary tensors they stand for."""

    def plain(value: Any) -> Any:
        if isinstance(value, HandedOn):
            with torch._C.DisableTorchFunctionSubclass():
                return value.as_subclass(Tensor)
        # of a tuple, say
        is_inside = any(isinstance(leaf, HandedOn) for leaf in pytree.tree_leaves(value))
        return pytree.tree_map(plain, value) if is_inside else value

    return tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}


# --------------------------------------------------------------------------------------------------
# What layers are given


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


HIDDEN = RecordedTensor(-1)  # of a list that ends with what is handed on, the hidden state last


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How one layer was called: `HIDDEN`, recorded tensors and constants in their places."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    autocast: tuple[Autocast, ...] = ()  # where the model's own code has set it around the layer
    lists: Open = ()  # that were open around the layer (captures.py)
    has_graph: bool = True  # whether the model's own code runs the layer with one

    def autocasting(self) -> contextlib.AbstractContextManager[object]:
        """What torch.autocast did where the layer was called; the layer runs inside it."""
        stack = contextlib.ExitStack()
        for kind, is_on, dtype in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on))
        return stack

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What the layer returns, with what its hooks collect."""
        return run_layer(module, args, kwargs, self.lists)

    def arguments(
        self, hidden: Tensor, recorded: Sequence[Tensor], beside: Sequence[Tensor] = ()
    ) -> Arguments:
        """Positional and keyword arguments with the tensors filled in."""
        tensors = [*recorded, *reversed(beside), hidden]
        args, kwargs = pytree.tree_unflatten(
            [tensors[one.index] if isinstance(one, RecordedTensor) else one for one in self.leaves],
            self.spec,
        )
        return tuple(args), kwargs


@dataclass(slots=True)
class Recording:
    """What a run of the code before a stack yields for one microbatch."""

    hidden: Tensor | None = None
    tensors: list[Tensor] = field(default_factory=list)  # each once, whatever the number of layers
    calls: dict[int, Call] = field(default_factory=dict)
    rides: list[int] = field(default_factory=list)  # of these tensors, what passes by the stack
    handed: dict[int, list[Tensor]] = field(default_factory=dict)
    """What every call was handed on, where layers have run."""
    aside_bytes: int = 0  # of what these layers have left for later code
    _outside: tuple[Autocast, ...] = field(default_factory=autocast_state)
    _has_graph: bool = field(default_factory=torch.is_grad_enabled)
    _last: tuple[int, Any, Any, Sequence[Tensor]] | None = None

    def add(self, call: int, args: Any, kwargs: Any, handed: Sequence[Tensor]) -> None:
        """Note the arguments of a call; what is handed on is found among them by identity."""
        if self.hidden is None:
            self.hidden = handed[0]
        if self._last is not None and self._repeats(args, kwargs, handed):
            self.calls[call] = self.calls[self._last[0]]
        else:
            self._add(call, args, kwargs, handed)
        self._last = (call, args, kwargs, handed)
        autocast = tuple(one for one in autocast_state() if one not in self._outside)
        one, lists = self.calls[call], open_lists()
        has_graph = torch.is_grad_enabled() or not self._has_graph
        if (autocast, lists, has_graph) != (one.autocast, one.lists, one.has_graph):
            self.calls[call] = replace(one, autocast=autocast, lists=lists, has_graph=has_graph)

    def ride(self, tensor: Tensor | None, key: Key | None = None) -> None:
        """Let a tensor pass by the stack, for the code after it; or an argument of a layer here."""
        if tensor is not None:
            self.rides.append(self._index(tensor))
            return
        assert key is not None
        leaf = self.calls[key[0]].leaves[-1 - key[1]]
        self.rides.append(leaf.index)

    def _repeats(self, args: Any, kwargs: Any, handed: Sequence[Tensor]) -> bool:
        """Whether a layer is called just as the one before it, but for the hidden state."""
        assert self._last is not None
        _, last_args, last_kwargs, last_handed = self._last
        if len(args) != len(last_args) or kwargs.keys() != last_kwargs.keys():
            return False
        if len(handed) != 1 or len(last_handed) != 1:
            return False
        (hidden,), (last_hidden,) = handed, last_handed
        pairs = [*zip(args, last_args, strict=True)]
        pairs += [(value, last_kwargs[name]) for name, value in kwargs.items()]
        return all(
            other is last_hidden
            if one is hidden
            else one is other and not _may_change(one) and not _holds(one, last_hidden)
            for one, other in pairs
        )

    def _add(self, call: int, args: Any, kwargs: Any, handed: Sequence[Tensor]) -> None:
        leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
        noted = tuple(self._noted(call, leaf, handed) for leaf in leaves)
        self.calls[call] = Call(leaves=noted, spec=spec)

    def _noted(self, call: int, leaf: Any, handed: Sequence[Tensor]) -> Any:
        for place, one in enumerate(handed):
            if leaf is one:
                return RecordedTensor(HIDDEN.index - place)
        if isinstance(leaf, HandedOn | NotKept):
            found = leaf.name if isinstance(leaf, NotKept) else "the output of another layer"
            raise CutError(
                f"layer {call} consumes more than its hidden state: {found} (as T5's layers do "
                f"with their position bias). {AS_RETURNED}"
            )
        return RecordedTensor(self._index(leaf)) if isinstance(leaf, Tensor) else leaf

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
        number = next(iter(self.calls), None)
        if number is None:  # the first one is being noted
            return
        call = self.calls[number]
        first = next(place for place, leaf in enumerate(call.leaves, 1) if leaf == HIDDEN)
        others = (recorded if leaf == HIDDEN else leaf for leaf in call.leaves[first:])
        self.calls[number] = replace(call, leaves=(*call.leaves[:first], *others))


def _may_change(value: Any) -> bool:
    """Whether a layer, or the model between two of them, can change what is in there."""
    if isinstance(value, tuple):
        return any(map(_may_change, value))
    return isinstance(value, dict | UserDict | list | deque)


def _holds(value: Any, tensor: Tensor) -> bool:
    return value is tensor or (
        isinstance(value, tuple) and any(leaf is tensor for leaf in pytree.tree_leaves(value))
    )


# --------------------------------------------------------------------------------------------------
# Objects that layers are given besides tensors


MAX_DEPTH = 5
MAX_OBJECTS = 1000
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
OPAQUE = (nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)


def _contents(value: Any) -> tuple[dict[Any, Any], dict[str, Any]] | None:
    """Entries and attributes of an object; None: nothing that can be seen."""
    if isinstance(value, (*PLAIN, *OPAQUE, Tensor)):
        return None
    entries: dict[Any, Any] = dict(value) if isinstance(value, dict) else {}
    if isinstance(value, list | tuple | deque | set):
        entries = dict(enumerate(value))
    attributes = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for name in getattr(type(value), "__slots__", ()):
        if isinstance(name, str) and hasattr(value, name):
            attributes[name] = getattr(value, name)
    return entries, attributes


def _are_same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return now.keys() == before.keys() and all(
        one is before[key]
        or (isinstance(one, PLAIN) and type(one) is type(before[key]) and one == before[key])
        for key, one in now.items()
    )


def named_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """A layer's arguments by name."""
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        names = []
    names += [f"number {place}" for place in range(len(names), len(args))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


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
        contents = _contents(value)
        if contents is not None and id(value) not in seen:
            seen.add(id(value))
            shared = shared or pytree.tree_is_leaf(value)
            yield name, value, shared
            inside = [entry for part in contents for entry in part.values()] if depth else []
            waiting.extend((name, entry, shared, depth - 1) for entry in inside)


@final
class State:
    """An object as it is now."""

    def __init__(self, name: str, value: Any, *, shared: bool) -> None:
        self.name, self.value, self._shared = name, value, shared
        self._entries, self._attributes = _contents(value) or ({}, {})
        held = [*self._entries.values(), *self._attributes.values()] if shared else []
        tensors = [one for one in held if isinstance(one, Tensor) and not one.is_inference()]
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._tensors = [(one, one._version, one.clone()) for one in tensors]

    def is_past(self) -> bool:
        """Whether the object holds something else now."""
        entries, attributes = _contents(self.value) or ({}, {})
        with torch._C.DisableTorchFunctionSubclass():
            written = any(tensor._version != version for tensor, version, _ in self._tensors)
        same_entries = _are_same(entries, self._entries)
        return written or not same_entries or not _are_same(attributes, self._attributes)

    def now(self) -> State:
        """The same object as it is now."""
        return State(self.name, self.value, shared=self._shared)

    def restore(self) -> None:
        """Let the object be as it was."""
        if isinstance(self.value, dict | list | deque | set):
            self.value.clear()
        if isinstance(self.value, dict):
            self.value.update(self._entries)
        elif isinstance(self.value, set):
            self.value.update(self._entries.values())
        elif isinstance(self.value, list | deque):
            self.value.extend(self._entries.values())
        if hasattr(self.value, "__dict__"):
            vars(self.value).clear()
        for name, entry in self._attributes.items():
            object.__setattr__(self.value, name, entry)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for tensor, _, values in self._tensors:
                tensor.copy_(values)


def states_of(arguments: Mapping[str, Any]) -> list[State]:
    """The objects among a layer's arguments, as they are now."""
    return [State(name, value, shared=shared) for name, value, shared in objects_in(arguments)]
