"""What was proven before is not proven again: a hash of all that a proof depends on.

That is our own code, the code of every class in the model, its structure and config, the user's
loss, what a plan has other code do, the kind of batch, the device and the versions of libraries. A
model with code that cannot be read off a file (a patched `forward`, hooks, a loss that closes over
objects) is proven anew by every engine.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from l2l.model import is_plain

MAX_DEPTH = 5  # of objects in objects
LIBRARIES = ("torch", "transformers", "peft", "torchao", "accelerate")


@final
class ProofMemory:
    """Remembers proofs, in this process and in a folder."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` None: in this process only."""
        self._folder = folder
        self._known: set[str] = set()

    @classmethod
    def of_user(cls) -> ProofMemory:
        """In the user's cache folder, if there is one."""
        try:
            return cls(Path.home() / ".cache" / "l2l" / "proofs")
        except RuntimeError:  # nobody's home
            return cls(None)

    def has(self, key: str | None) -> bool:
        """Whether this was proven; None never was."""
        if key is None:
            return False
        if key in self._known:
            return True
        return self._folder is not None and (self._folder / key).is_file()

    def add(self, key: str | None) -> None:
        """This is proven; where nothing can be written it is remembered in this process."""
        if key is None:
            return
        self._known.add(key)
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / key).touch()
            except OSError:
                pass


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
    words = [_own_source(), platform.python_version(), *map(_version, LIBRARIES), *map(str, path)]
    loss = "" if loss_function is None else _function_text(loss_function)
    modules = _modules_text(model)
    if loss is None or modules is None:
        return None
    words += [loss, modules]
    words += [
        f"{name} {value.dtype} {value.dim()}" if isinstance(value, Tensor) else f"{name} {value!r}"
        for name, value in sorted(batch.items())
    ]
    return hashlib.sha256("\n".join(words).encode(errors="replace")).hexdigest()


def _modules_text(model: nn.Module) -> str | None:
    """Classes with their sources, attributes and shapes, of all modules."""
    lines: list[str | None] = []
    known: dict[int, str | None] = {}  # objects that modules share, such as configs
    for name, module in model.named_modules():
        hooked = [value for key, value in vars(module).items() if key.endswith("_hooks") and value]
        if hooked or "forward" in vars(module):
            return None
        kind: type = type(module)
        lines += [name, _class_source(kind)]
        for key, value in vars(module).items():
            if key[:1] != "_":
                if id(value) not in known:
                    known[id(value)] = _value_text(value, depth=0)
                lines += [key, known[id(value)]]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lines += [f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for name, t in tensors]
    return None if None in lines else "\n".join(map(str, lines))


def _value_text(value: object, depth: int) -> str | None:
    """A value such that equal texts mean that code does the same with it; None: not known."""
    if is_plain(value) or isinstance(value, Tensor | torch.device | torch.Size):
        return f"{value.shape} {value.dtype}" if isinstance(value, Tensor) else repr(value)
    if isinstance(value, type):
        return _class_source(value)
    if isinstance(value, types.FunctionType):
        return _function_text(value)
    if isinstance(value, types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    parts = None if depth > MAX_DEPTH else _parts_of(value)
    texts = [None] if parts is None else [_value_text(one, depth + 1) for one in parts]
    return None if None in texts else f"({', '.join(map(str, texts))})"


def _parts_of(value: object) -> list[object] | None:
    """What a value is made of; None: not known, or a module outside the tree of modules."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords, *value.keywords.values()]
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple):
        return [*value]
    if isinstance(value, nn.Module) or not hasattr(value, "__dict__"):
        return None
    return [type(value), *vars(value), *vars(value).values()]


@functools.lru_cache(maxsize=4096)
def _class_source(kind: type) -> str | None:
    """A class by name and the files of it and its bases; None: there is no such file."""
    if kind.__module__.partition(".")[0] == "torch":
        return kind.__qualname__  # its version counts already
    files = []
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing"):
            continue
        module = sys.modules.get(base.__module__)
        file = _file_hash(getattr(module, "__file__", None) or "")
        if file is None:
            return None
        files.append(file)
    return f"{kind.__module__}.{kind.__qualname__} {' '.join(files)}"


def _function_text(function: Callable[..., Any]) -> str | None:
    """A function by name, file and what it closes over; None if that is more than plain values."""
    if not isinstance(function, types.FunctionType):
        return None
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    values = [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    file, code = _file_hash(function.__code__.co_filename), function.__code__
    if file is None or not all(map(is_plain, values)):
        return None
    return f"{function.__qualname__} {code.co_firstlineno} {code.co_code.hex()} {file} {values!r}"


@functools.lru_cache(maxsize=4096)
def _file_hash(file: str) -> str | None:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None


@functools.cache
def _own_source() -> str:
    folder = Path(__file__).parent.parent
    files = sorted(one for one in folder.rglob("*") if one.suffix in (".py", ".cpp"))
    return hashlib.sha256(b"".join(one.read_bytes() for one in files)).hexdigest()


@functools.cache
def _version(library: str) -> str:
    try:
        return f"{library} {importlib.metadata.version(library)} {torch.version.cuda}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {library}"
