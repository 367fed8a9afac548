"""Which layers are alike: those that run the same code on tensors of the same shapes.

What their modules carry besides tensors and modules is compared by what it is, not by where it
lies: words and numbers as they are, containers by their entries, functions by their code and what
they close over, objects by their class and what a copy of them would be made of. What tells
nothing of itself (a lock, a tensor, another part of the model), and what several layers hold
together, is like itself alone.

[Note: own] Layers may know their own number, or the name of a layer ("layers.3.mlp.up_proj" stands
in every adapter of peft). Layers that differ in nothing else are alike, and one module runs all of
them: what the layer itself has there is set while it runs. Whatever else is equal but not the same
object is the module's. A layer that changes such a thing when it runs is not compiled: then every
layer runs through modules of its own.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from l2l.model.captures import COLLECTING_HOOKS
from l2l.model.format import format_of
from l2l.model.modules import HOOKS

Attribute = tuple[str, str]
"""The path of a module in its layer, and the attribute's name."""
Numbering = frozenset[Attribute]
"""Attributes that hold the layer's own number."""

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
SEQUENCES = (list, tuple, deque)
SETS = (set, frozenset)
DICTS = (dict, OrderedDict, defaultdict)
ALONE = (nn.Module, Tensor, type, types.ModuleType, types.CodeType)  # like themselves alone
OF_MODULES = frozenset(vars(nn.Module())) | {COLLECTING_HOOKS, "extra_repr"}  # how one is printed
NOTHING = re.compile(r"(?!)")  # what no word has
MAX_DEPTH = 5  # of objects in objects
MAX_OBJECTS = 1000  # of one attribute


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


def attributes_of(layer: nn.Module) -> dict[Attribute, Any]:
    """What modules of a layer carry besides tensors and modules: plain values, or identities."""
    return {
        (path, name): _comparable(value)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training"
    }


def own_numbers(layers: Sequence[nn.Module], numbers: Sequence[int] | None = None) -> Numbering:
    """Attributes that hold the layer's own number, in every layer that has them."""
    found: dict[Attribute, list[bool]] = {}
    for index, layer in zip(numbers or range(len(layers)), layers, strict=True):
        for key, value in attributes_of(layer).items():
            found.setdefault(key, []).append(type(value) is int and value == index)
    return frozenset(
        key for key, own in found.items() if all(own) and (len(own) > 1 or key[1] == "layer_idx")
    )


# --------------------------------------------------------------------------------------------------
# What attributes hold, as text


def _parts_of(value: Any) -> Iterable[Any] | None:
    """What a value is made of; None: that cannot be seen."""
    kind, parts = type(value), None
    if kind in DICTS:
        parts = [part for pair in value.items() for part in pair]
    elif kind in SEQUENCES:
        parts = [*value]
    elif kind in SETS:
        parts = sorted(value, key=repr)
    elif isinstance(value, types.MethodType):
        parts = [value.__func__, value.__self__]
    elif isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords, vars(value)]
    elif isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_set(cell)]
        parts = [value.__code__, cells, value.__defaults__, value.__kwdefaults__, vars(value)]
    elif not isinstance(value, ALONE):
        parts = _state_of(value)
    return parts


def _is_set(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # something that the function's maker has not made
        return False
    return True


def _state_of(value: Any) -> list[Any] | None:
    """What a copy of an object would be made of; None: only the object itself knows."""
    ways = ("__reduce_ex__", "__reduce__", "__getstate__")
    if any(getattr(type(value), way) is not getattr(object, way) for way in ways):
        return None
    try:
        _, made_of, state, entries, pairs = value.__reduce_ex__(2)
    except Exception:  # there is more to it than Python sees
        return None
    return [made_of, state, [*(entries or ())], [*(pairs or ())]]


@final
@dataclass(frozen=True, slots=True)
class _Text:
    """Says what something in a layer holds: equal texts, equal contents."""

    modules: Mapping[int, str]  # the layer's own, by `id`: their paths
    shared: Collection[int]  # objects that several layers hold, by `id`
    names: re.Pattern[str]  # of layers

    def of(self, value: Any) -> str:
        """The text; without the names of layers where they are set while these run."""
        words: list[str] = []
        self._write(words, value, MAX_DEPTH, self.names if is_plain(value) else NOTHING)
        return " ".join(words)

    def _write(self, words: list[str], value: Any, depth: int, names: re.Pattern[str]) -> None:
        if isinstance(value, PLAIN):
            words.append(repr(names.sub("<>", value) if isinstance(value, str) else value))
            return
        known = self.modules.get(id(value)) or (id(value) in self.shared and id(value))
        parts = None if known or not depth or len(words) > MAX_OBJECTS else _parts_of(value)
        words.append(type(value).__qualname__)
        if parts is None:
            words.append(f"at {known or id(value)}")
            return
        words.append("(")
        for one in parts:
            self._write(words, one, depth - 1, names)
        words.append(")")


def _carried(layer: nn.Module) -> Iterator[tuple[Attribute, Any]]:
    """What modules of a layer carry besides tensors, modules and hooks."""
    for path, module in layer.named_modules():
        # What a parameter carries comes with it, and its module may hold it too.
        beside = [one for own in module._parameters.values() for one in _attributes(own)]
        for name, value in vars(module).items():
            is_plain_value = isinstance(value, PLAIN)
            if name not in OF_MODULES and (is_plain_value or not any(value is o for o in beside)):
                yield (path, name), value


def _attributes(parameter: Tensor | None) -> list[Any]:
    return [] if parameter is None else [*getattr(parameter, "__dict__", {}).values()]


def _names_of(paths: Iterable[str]) -> re.Pattern[str]:
    """The names of layers inside words: from the last part of a path on that is no number."""
    found = set()
    for path in paths:
        parts = path.split(".")
        words = [place for place, part in enumerate(parts) if not part.isdigit()]
        if words:
            found.add(re.escape(".".join(parts[words[-1] :])))
    return re.compile(rf"(?<!\w)(?:{'|'.join(sorted(found))})(?!\w)") if found else NOTHING


def _tensor_text(name: str, tensor: Tensor) -> str:
    text = f"{name}:{tuple(tensor.shape)}:{tensor.requires_grad}"
    found = format_of(tensor)
    return text if found is None else f"{text}:{found.kind.__qualname__}:{found.text}"


@final
class Likeness:
    """Tells which of some layers are alike."""

    def __init__(
        self, layers: Sequence[nn.Module], *, paths: Sequence[str], numbers: Sequence[int]
    ) -> None:
        """The layers, their names in the model and their numbers in their lists."""
        self._layers, self._numbering = layers, own_numbers(layers, numbers)
        holders = Counter(
            one for layer in layers for one in {id(v) for _, v in _carried(layer) if _is_object(v)}
        )
        self._shared = frozenset(one for one, number in holders.items() if number > 1)
        self._names = _names_of(paths)
        self.structures = [self._structure(layer) for layer in layers]
        """Of every layer a text, which is equal for layers that are alike."""

    def _structure(self, layer: nn.Module) -> str:
        modules, text = [*layer.named_modules()], self._text(layer)
        tensors = [*layer.named_parameters(), *layer.named_buffers()]
        hooks = [((n, name), [*vars(one)[name].values()]) for n, one in modules for name in HOOKS]
        numbered = ((key, value, key in self._numbering) for key, value in _carried(layer))
        return "; ".join(
            [f"{n}:{type(one).__qualname__}:{one.training}" for n, one in modules]
            + [_tensor_text(name, one) for name, one in tensors]
            + [f"{key}={text.of(value)}" for key, value in hooks if value]
            + [f"{key}={'number' if own else text.of(value)}" for key, value, own in numbered]
        )

    def _text(self, layer: nn.Module) -> _Text:
        modules = {id(one): repr(path) for path, one in layer.named_modules()}
        return _Text(modules, self._shared, self._names)

    def own(self, index: int, module: nn.Module) -> tuple[tuple[nn.Module, str, Any], ...]:
        """What a layer has for itself of what the module carries that runs it ([Note: own])."""
        carried = dict(_carried(module))
        return tuple(
            (module.get_submodule(path), name, value)
            for (path, name), value in _carried(self._layers[index])
            if is_plain(value) and value != carried[path, name]
        )

    def contents(self, index: int) -> dict[Attribute, tuple[Any, str]]:
        """What may change inside what a layer alone holds, and what it is now."""
        layer, others = self._layers[index], set[int]()
        text = self._text(layer)
        for other, structure in zip(self._layers, self.structures, strict=True):
            if other is not layer and structure == self.structures[index]:
                others |= {id(value) for _, value in _carried(other)}
        return {
            key: (value, text.of(value))
            for key, value in _carried(layer)
            if not isinstance(value, PLAIN) and id(value) not in others
        }


def _is_object(value: Any) -> bool:
    """Whether a value is no number, word, function or container: something that may be shared."""
    plain = (*PLAIN, *SEQUENCES, *SETS, *DICTS, types.FunctionType, types.MethodType)
    return not isinstance(value, (*plain, functools.partial))


@final
@dataclass(frozen=True, slots=True)
class Template:
    """The one module that runs all layers of a structure, and what is a layer's own in it.

    A compiler sees the same module whatever the layer, so it compiles once for any depth. Where
    modules know the number or the name of their layer, that is set while the layer runs; compiled
    code looks at it only if the layer's code does.
    """

    module: nn.Module
    names: Mapping[str, str]  # name in the module -> owner
    own: tuple[tuple[nn.Module, str, Any], ...]

    @contextlib.contextmanager
    def tensors(self, by_owner: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """A layer's tensors by their names in the module, which has what is the layer's own."""
        before = [module.__dict__[name] for module, name, _ in self.own]
        try:
            for module, name, value in self.own:
                module.__dict__[name] = value
            yield {name: by_owner[owner] for name, owner in self.names.items()}
        finally:  # the module is also a layer of its own, which may run uncompiled
            for (module, name, _), value in zip(self.own, before, strict=True):
                module.__dict__[name] = value
