"""Copies of a module tree that share its tensors and run its code."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

from torch import nn


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
    if (original := _uncompiled(module)) is not module:
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


def _uncompiled(module: nn.Module) -> nn.Module:
    """What was given to torch.compile, or the module itself."""
    original = module._modules.get("_orig_mod")
    if original is not None and type(module).__name__ == "OptimizedModule":
        return _uncompiled(original)
    return module


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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
    """A function that works on the copies of the modules that it was bound to, or closes over."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if depth and isinstance(value, types.MethodType):
        owner = _translated(value.__self__, copies, depth - 1)
        function = _translated(value.__func__, copies, depth - 1)
        changed = owner is not value.__self__ or function is not value.__func__
        return types.MethodType(function, owner) if changed else value
    if depth and isinstance(value, functools.partial):
        given = (value.func, *value.args, *value.keywords.values())
        found = [_translated(one, copies, depth - 1) for one in given]
        if all(one is other for one, other in zip(found, given, strict=True)):
            return value
        number = len(value.args) + 1
        named = dict(zip(value.keywords, found[number:], strict=True))
        return functools.partial(found[0], *found[1:number], **named)
    if depth and isinstance(value, types.FunctionType) and value.__closure__:
        return _translated_closure(value, copies, depth - 1)
    return value


def _translated_closure(
    function: types.FunctionType, copies: Mapping[int, nn.Module], depth: int
) -> types.FunctionType:
    cells = []
    for cell in function.__closure__ or ():
        try:
            inside = cell.cell_contents
        except ValueError:  # not set yet
            cells.append(cell)
            continue
        if inside is function:
            cells.append(cell)
            continue
        found = _translated(inside, copies, depth)
        cells.append(cell if found is inside else types.CellType(found))
    if all(one is other for one, other in zip(cells, function.__closure__ or (), strict=True)):
        return function
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells),
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy
