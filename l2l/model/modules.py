"""The user's tree of modules: searched, copied, kept as it is."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class CutError(ValueError):
    """The model cannot be cut into prologue, layers and epilogue."""


WORTH = 0.1  # of a model's parameters, that a list holds to be streamed as a matter of course
ENOUGH = 0.9  # of them; as long as less is streamed, smaller lists are, too
LEAST = 0.01
CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # that only hold others, and are never called


def refuse_unsupported(model: nn.Module) -> None:
    """Refuse a model with something that the engine would not train.

    Raises:
        ValueError: with its name and the remedy.
    """
    if isinstance(model, torch.fx.GraphModule | torch.jit.ScriptModule):
        raise CutError(
            f"the model is a {type(model).__name__}, whose layers are not modules that its code "
            "calls. Give the engine the model that it was made of."
        )
    for name, parameter in model.named_parameters():
        if parameter.is_complex() or parameter.dtype is torch.float64:
            remedy = "torch.view_as_real" if parameter.is_complex() else "model.float()"
            raise CutError(
                f"parameter {name!r} is {str(parameter.dtype).removeprefix('torch.')}. Expected "
                f"parameters of 16 or 32 bits: use {remedy}."
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise CutError(
                f"{name!r} has sparse gradients. Expected sparse=False: rows that a batch does not "
                "look up are not sent anyway."
            )


@dataclass(frozen=True, slots=True)
class LayerList:
    """Modules that a model runs as layers: a list, or siblings such as `layer1`, `layer2`."""

    name: str
    paths: tuple[str, ...]

    def holds(self, path: str) -> bool:
        """Whether a module is one of these layers, or inside one."""
        return any(f"{path}.".startswith(f"{own}.") for own in self.paths)


def find_layers(model: nn.Module, names: str | Sequence[str] | None) -> tuple[LayerList, ...]:
    """The lists of layers as named, or all that hold a worthwhile share of the parameters.

    Raises:
        ValueError: there is none, or a name given is not one of a list.
    """
    lists = {one.name: one for one in _lists(model) if one.paths}
    lists = lists or {one.name: one for one in _single(model)}
    sizes = {name: _size(model, one) for name, one in lists.items()}
    total = sum(parameter.numel() for parameter in model.parameters())
    largest = sorted(sizes, key=lambda name: (-sizes[name], name.count("."), len(name)))
    if names is not None:
        wanted = [names] if isinstance(names, str) else [*names]
    else:
        wanted = _worthwhile(model, [lists[name] for name in largest], sizes)
    problem = None
    if not wanted:
        problem = f"has no list of layers among {[name for name, _ in model.named_children()]}"
    elif missing := [name for name in wanted if name not in lists]:
        problem = f"has no list of layers {missing[0]!r}"
    if problem is not None:
        seen = "".join(
            f"\n    {name}: {len(lists[name].paths)} modules, {sizes[name]:,} of {total:,} "
            "parameters"
            for name in largest[:12]
        )
        raise CutError(
            f"{type(model).__name__} {problem}. Expected layers='dotted.name' of an nn.ModuleList, "
            f"nn.Sequential or nn.ModuleDict, or several such names. Seen:{seen or ' none'}"
        )
    order = {name: place for place, name in enumerate(lists)}
    return tuple(lists[name] for name in sorted(wanted, key=order.__getitem__))


def weights_of(model: nn.Module, kind: type[nn.Module]) -> list[Tensor]:
    """The weights of modules of a kind, but for those that are computed whenever they are read.

    To read one of these may change buffers, as with a spectral norm.
    """
    found = (one._parameters.get("weight") for one in model.modules() if isinstance(one, kind))
    return [one for one in found if one is not None]


def _worthwhile(
    model: nn.Module, largest: Sequence[LayerList], sizes: Mapping[str, int]
) -> list[str]:
    """Lists to be streamed, none inside another: of the largest, until most is streamed."""
    tables = {id(one) for one in weights_of(model, nn.Embedding)}
    total = sum(p.numel() for p in model.parameters() if id(p) not in tables)
    chosen: list[LayerList] = []
    for one in largest:
        share = sum(sizes[other.name] for other in chosen) / max(1, total)
        kinds = {type(model.get_submodule(path)) for path in one.paths}
        are_alike = len(kinds) == 1 and len(one.paths) > 2  # not a head, say
        least = WORTH if share >= ENOUGH and not are_alike else LEAST
        inside = any(a.holds(path) for other in chosen for a, path in _pairs(one, other))
        if not inside and (not chosen or sizes[one.name] > least * total):
            chosen.append(one)
    return [one.name for one in chosen]


def _pairs(one: LayerList, other: LayerList) -> Iterator[tuple[LayerList, str]]:
    yield from ((other, path) for path in one.paths)
    yield from ((one, path) for path in other.paths)


def _lists(model: nn.Module) -> Iterator[LayerList]:
    """Whatever may be a list of layers, in the order of the model."""
    for path, module in model.named_modules():
        inside = f"{path}." if path else ""
        children = {
            n: m for n, m in module.named_children() if next(m.parameters(), None) is not None
        }
        if isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            is_list = isinstance(module, nn.ModuleList) or len(children) > 1
            holds_lists = any(isinstance(one, CONTAINERS) for one in children.values())
            if children and is_list and not holds_lists:
                layers = (n for n, m in module.named_children() if not isinstance(m, nn.Embedding))
                yield LayerList(path, tuple(inside + name for name in layers))
            continue
        groups: dict[str, list[str]] = {}
        for name, one in children.items():
            stem = name.rstrip("0123456789")
            if stem != name and not isinstance(one, (*CONTAINERS, nn.Embedding)):
                groups.setdefault(stem, []).append(name)
        for stem, names in groups.items():
            are_blocks = all(next(children[name].children(), None) is not None for name in names)
            if len(names) > (1 if are_blocks else 2):
                yield LayerList(f"{inside}{stem}*", tuple(inside + name for name in names))


def _single(model: nn.Module) -> Iterator[LayerList]:
    """The part of a model without lists that holds most, as the only layer of its list."""
    parts = {
        name: LayerList(name, (name,))
        for name, part in model.named_children()
        if not isinstance(part, nn.Embedding) and next(part.parameters(), None) is not None
    }
    yield from sorted(parts.values(), key=lambda one: -_size(model, one))[:1]


def _size(model: nn.Module, layers: LayerList) -> int:
    found = {
        id(p): p.numel() for path in layers.paths for p in model.get_submodule(path).parameters()
    }
    return sum(found.values())


# --------------------------------------------------------------------------------------------------
# Configs


def configs_of(model: nn.Module) -> list[Any]:
    """Configs of a model, of its parts and inside these (`text_config`), each once."""
    found: dict[int, Any] = {}

    def note(holder: object, depth: int) -> None:
        for name, value in vars(holder).items():
            is_config = name.endswith("config") and hasattr(value, "__dict__")
            if is_config and not isinstance(value, nn.Module | type) and id(value) not in found:
                found[id(value)] = value
                if depth:
                    note(value, depth - 1)

    for module in model.modules():
        note(module, 3)
    return list(found.values())


@contextlib.contextmanager
def without_cache(configs: Iterable[Any]) -> Iterator[None]:
    """Let no part of a model make a cache inside the block: every pass would append to it."""
    caching = [(one, one.use_cache) for one in configs if getattr(one, "use_cache", False)]
    try:
        for config, _ in caching:
            config.use_cache = False
        yield
    finally:
        for config, before in caching:
            config.use_cache = before


def takes_use_cache(model: nn.Module) -> bool:
    """Whether the model makes a cache unless told not to; both passes would append to it.

    A wrapper, such as an adapter's, hands the argument on to the module inside that takes it.
    """
    parameters = inspect.signature(model.forward).parameters
    if "use_cache" in parameters:
        return True
    hands_on = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    asked = getattr(getattr(model, "config", None), "use_cache", False)
    inner = (inspect.signature(module.forward).parameters for module in model.modules())
    return bool(hands_on and asked and any("use_cache" in one for one in inner))


def argument_names(model: nn.Module) -> frozenset[str]:
    """What the model's code calls its arguments.

    A model that takes any may hand them on to the modules inside.
    """
    own = inspect.signature(model.forward).parameters.values()
    if not any(one.kind is one.VAR_KEYWORD for one in own):
        return frozenset(one.name for one in own)
    inner = (inspect.signature(module.forward).parameters for module in model.modules())
    return frozenset(name for parameters in inner for name in parameters)


def asked_for(names: Iterable[str], configs: Iterable[Any], batch: Mapping[str, Any]) -> str | None:
    """The option that a batch turns on, or leaves to a config that does."""
    configs = list(configs)
    for name in names:
        asked = batch.get(name)
        if asked or (asked is None and any(getattr(one, name, False) for one in configs)):
            return name
    return None


# --------------------------------------------------------------------------------------------------
# Kept as it is


@contextlib.contextmanager
def modules_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put back what code sets on these modules, or in their dicts and sets; tensors are left."""
    before = {id(module): (module, dict(vars(module))) for module in modules}.values()
    containers = [
        (value, value.copy())
        for _, attributes in before
        for name, value in attributes.items()
        if type(value) in (dict, OrderedDict, set) and name not in ("_parameters", "_buffers")
    ]
    try:
        yield
    finally:
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for container, contents in containers:
            container.clear()
            container.update(contents)


# --------------------------------------------------------------------------------------------------
# Copies that share the tensors of a tree and run its code


def copy_tree(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    """A copy of a module tree that shares tensors and attributes but owns its registries.

    It runs the code that the modules have: what torch.compile had made of them ran on the originals
    themselves, and so did methods of theirs that they hold as attributes (a `forward` that was
    replaced), which become the copies'.
    """
    known = set(copies)
    tree = _copy_tree(module, copies)
    for copy in [copy for key, copy in copies.items() if key not in known]:
        _rebind(copy, copies)
    return tree


def _copy_tree(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    if id(module) in copies:
        return copies[id(module)]
    original = module._modules.get("_orig_mod")
    if original is not None and type(module).__name__ == "OptimizedModule":  # of torch.compile
        copies[id(module)] = _copy_tree(original, copies)
        return copies[id(module)]
    copy = module.__class__.__new__(module.__class__)
    copies[id(module)] = copy
    copy.__dict__.update(module.__dict__)
    if copy.__dict__.get("_compiled_call_impl") is not None:  # of `module.compile()`
        copy.__dict__["_compiled_call_impl"] = None
    copy.__dict__["_parameters"] = dict(module._parameters)
    copy.__dict__["_buffers"] = dict(module._buffers)
    copy.__dict__["_modules"] = {
        name: None if child is None else _copy_tree(child, copies)
        for name, child in module._modules.items()
    }
    return copy


def _rebind(copy: nn.Module, copies: Mapping[int, nn.Module]) -> None:
    """Let functions that a module holds, and its hooks, work on the copies."""
    attributes = copy.__dict__
    for name, value in list(attributes.items()):
        if name in HOOKS:  # its own: what is hooked into the one is not hooked into the other
            rebound = {key: _translated(hook, copies) for key, hook in value.items()}
            attributes[name] = type(value)(rebound)
        elif callable(value):
            attributes[name] = _translated(value, copies)


def _translated(value: Any, copies: Mapping[int, nn.Module], depth: int = 4) -> Any:
    """A function that works on the copies of the modules that it was bound to, or closes over.

    One that does not touch any of them stays the same object: layers that share it are alike.
    """
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    parts: list[Any] = []
    build: Callable[..., Any] = types.MethodType
    if isinstance(value, types.MethodType):
        parts = [value.__func__, value.__self__]
    elif isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        build = functools.partial(_partial_like, value)
    elif isinstance(value, types.FunctionType):
        parts = [_content(cell, value) for cell in value.__closure__ or ()]
        build = functools.partial(_function_like, value)
    found = [_translated(one, copies, depth - 1) for one in parts] if depth else parts
    return value if all(map(operator.is_, found, parts)) else build(*found)


def _partial_like(value: functools.partial[Any], function: Any, *given: Any) -> Any:
    number = len(value.args)
    named = dict(zip(value.keywords, given[number:], strict=True))
    return functools.partial(function, *given[:number], **named)


def _content(cell: types.CellType, function: types.FunctionType) -> Any:
    """What a function closes over; None: itself, or something that is not set yet."""
    try:
        return None if cell.cell_contents is function else cell.cell_contents
    except ValueError:
        return None


def _function_like(function: types.FunctionType, *contents: Any) -> types.FunctionType:
    """A function that closes over other things."""
    cells = tuple(
        cell if content is _content(cell, function) else types.CellType(content)
        for cell, content in zip(function.__closure__ or (), contents, strict=True)
    )
    code, name = function.__code__, function.__name__
    copy = types.FunctionType(code, function.__globals__, name, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy
