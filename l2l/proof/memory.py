"""What was proven before is not proven again: a hash of all that a proof depends on.

That is our own code, the code of every class in the model, its structure and config, the user's
loss, what a plan has other code do, the kind of batch, the device and the versions of libraries. A
model with code that cannot be read off a file (a patched `forward`, hooks, a loss that closes over
objects) is proven anew by every engine.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import platform
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from l2l.files import cache_folder, own_source
from l2l.model import format_of, is_plain

MAX_DEPTH = 5  # of objects in objects
LIBRARIES = ("torch", "transformers", "peft", "torchao", "accelerate")
FIXED_PACKAGES = ("torch", "builtins", "abc", "typing")


@final
class ProofMemory:
    """Remembers proofs, in this process and in a folder."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` None: in this process only."""
        self._folder = folder
        self._known: set[str | None] = set()

    @classmethod
    def of_user(cls) -> ProofMemory:
        """In the user's cache folder, if there is one."""
        folder = cache_folder()
        return cls(None if folder is None else folder / "proofs")

    def has(self, key: str | None) -> bool:
        """Whether this was proven; None never was."""
        in_folder = key and self._folder and (self._folder / key).is_file()
        return key in self._known or bool(in_folder)

    def add(self, key: str | None) -> None:
        """This is proven; where nothing can be written it is remembered in this process."""
        if key is not None:
            self._known.add(key)
            if self._folder is not None:
                with contextlib.suppress(OSError):
                    self._folder.mkdir(parents=True, exist_ok=True)
                    (self._folder / key).touch()


class _UnknownError(Exception):
    """What code does cannot be known from its text."""


def key_of(
    model: nn.Module,
    *,
    loss_function: Callable[..., Any] | None,
    batch: Mapping[str, Any],
    path: Iterable[object],
) -> str | None:
    """The hash; None: something cannot be known from its text.

    Args:
        model: whose code and structure count.
        loss_function: the user's.
        batch: of which names, types and numbers of dimensions count.
        path: what else decides which code runs; must print alike whenever it is alike.
    """
    words = [own_source(), platform.python_version(), *map(_version, LIBRARIES), *map(str, path)]
    try:
        words += [] if loss_function is None else [_function_text(loss_function)]
        words += _module_texts(model)
    except _UnknownError:
        return None
    words += [
        f"{name} {value.dtype} {value.dim()}" if isinstance(value, Tensor) else f"{name} {value!r}"
        for name, value in sorted(batch.items())
    ]
    return hashlib.sha256("\n".join(words).encode(errors="replace")).hexdigest()


def _module_texts(model: nn.Module) -> Iterator[str]:
    """Classes with their sources, attributes and shapes, of all modules."""
    known: dict[int, str] = {}  # objects that modules share, such as configs
    for name, module in model.named_modules():
        attributes = vars(module)
        kind: type = type(module)
        if "forward" in attributes or any(attributes[k] for k in attributes if k[-6:] == "_hooks"):
            raise _UnknownError
        yield f"{name} {_class_source(kind)}"
        for key, value in attributes.items():
            if key[:1] != "_" or is_plain(value):  # such as which adapter is active
                if id(value) not in known:
                    known[id(value)] = _value_text(value, depth=0)
                yield f"{key} {known[id(value)]}"
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found = format_of(tensor)
        own = "" if found is None else f" {_class_source(found.kind)} {found.text}"
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}{own}"


def _value_text(value: object, depth: int) -> str:
    """A value such that equal texts mean that code does the same with it."""
    if isinstance(value, Tensor):
        return f"{value.shape} {value.dtype}"
    if is_plain(value):
        return repr(value)
    if isinstance(value, type):
        return _class_source(value)
    if isinstance(value, types.FunctionType):
        return _function_text(value)
    if isinstance(value, types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if depth > MAX_DEPTH:
        raise _UnknownError
    return f"({', '.join(_value_text(one, depth + 1) for one in _parts_of(value))})"


def _parts_of(value: object) -> list[object]:
    """What a value is made of; a module outside the tree of modules is not known."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords, *value.keywords.values()]
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple):
        return [*value]
    if isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
        raise _UnknownError
    return [type(value), *vars(value), *vars(value).values()]


@functools.lru_cache(maxsize=4096)
def _class_source(kind: type) -> str:
    """A class by name and the files of it and its bases."""
    if kind.__module__.partition(".")[0] == "torch":
        return kind.__qualname__  # its version counts already
    bases = [one for one in kind.__mro__ if one.__module__.partition(".")[0] not in FIXED_PACKAGES]
    modules = [sys.modules.get(one.__module__) for one in bases]
    files = [_file_hash(getattr(one, "__file__", None) or "") for one in modules]
    return f"{kind.__module__}.{kind.__qualname__} {' '.join(files)}"


def _function_text(function: Callable[..., Any]) -> str:
    """A function by name, file and what it closes over, if that is nothing but plain values."""
    if not isinstance(function, types.FunctionType):
        raise _UnknownError
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    values = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    if not all(map(is_plain, values)):
        raise _UnknownError
    code, file = function.__code__, _file_hash(function.__code__.co_filename)
    return f"{function.__qualname__} {code.co_firstlineno} {code.co_code.hex()} {file} {values!r}"


@functools.lru_cache(maxsize=4096)
def _file_hash(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError as error:
        raise _UnknownError from error


@functools.cache
def _version(library: str) -> str:
    try:
        return f"{library} {importlib.metadata.version(library)} {torch.version.cuda}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {library}"
