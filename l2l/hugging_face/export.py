"""A model's weights as a folder that others read: what `from_pretrained` expects, tensor by tensor.

    config.json, generation_config.json       of a transformers model, with the dtype of the weights
    model.safetensors                         or, above `shard_bytes`, model-00001-of-00003... with
    model.safetensors.index.json              an index
    tokenizer files                           if there is a tokenizer
    adapter_config.json, adapter_model...     of a PEFT model, and nothing else of it
    l2l_export.json                           says that the folder is ours, and what is in it

The weights come from a function, one by one: from the parameter server, or from wherever they are.
Everything is written into a folder beside and renamed, so what has the name is whole. A folder that
is there is replaced only if an earlier export wrote all that is in it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from l2l.files import (
    Entry,
    TensorFileError,
    beside,
    empty_folder,
    recover,
    replace_folder,
    write_tensors,
)
from l2l.hugging_face.libraries import first_line, is_adapted, is_transformers
from l2l.hugging_face.recipes import Read, Recipe, plain_recipe, recipes_for_saving
from l2l.parameter_server import DTYPES, PrecisionPolicy

MARK = "l2l_export.json"
SHARD_BYTES = 5_000_000_000


def export_model(
    model: nn.Module,
    folder: Path | str,
    *,
    weight_of: Callable[[str], Tensor],
    buffers: Mapping[str, Tensor] | None = None,
    dtype: str | None = None,
    tokenizer: Any = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model's folder.

    Args:
        model: says what there is; its own weights are not looked at.
        folder: to write; replaced if it is an earlier export.
        weight_of: gives a parameter's value by its name, the first one if it is tied.
        buffers: present values, by name; what is not there is taken from the model.
        dtype: "float32", "bfloat16" or "float16"; None: each parameter's own.
        tokenizer: to be saved beside the weights.
        shard_bytes: the most bytes of tensors in a file; a larger tensor has a file of its own.

    Raises:
        ValueError: the folder holds something else, or an argument cannot be.
        TensorFileError: it cannot be written; what was there is still there.
    """
    if dtype not in (None, *DTYPES):
        raise ValueError(
            f"dtype={dtype!r} is not known. Expected one of {', '.join(map(repr, DTYPES))} or None."
        )
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes}; expected at least 1.")
    refuse_loose_adapter(model)
    target = Path(folder).expanduser().absolute()
    recover(target)
    refuse_foreign(target)
    source = _Source(model, weight_of, buffers or {}, dtype)
    with _beside(target) as made:
        if is_adapted(model):
            write_adapter(model, made, read=source.read)
        else:
            _write_model(model, made, source, shard_bytes)
        if tokenizer is not None:
            tokenizer.save_pretrained(made)


def refuse_foreign(folder: Path) -> None:
    """Refuse to replace a folder that an export did not write.

    Raises:
        ValueError: it holds something else, by name.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file. Expected the name of a folder to write.")
    found = _contents(folder)
    if not found:
        return
    try:
        own = set(json.loads((folder / MARK).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        own = set()
    strange = [name for name in found if name not in {*own, MARK}] if own else found
    if strange:
        shown = ", ".join(strange[:5]) + (" and others" if len(strange) > 5 else "")
        raise ValueError(
            f"{folder} is not empty, and what is in it is not all of an earlier export: {shown}. "
            "Expected a new folder, an empty one, or an export. Choose another name, or remove it."
        )


# --------------------------------------------------------------------------------------------------
# The folder


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A folder beside another one, which takes its place if the block succeeds."""
    try:
        made = empty_folder(target)
        yield made
        mark = {"format": "l2l export", "version": 1, "files": _contents(made)}
        (made / MARK).write_text(json.dumps(mark, indent=2) + "\n")
        replace_folder(target)
    except OSError as error:
        raise TensorFileError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside(target), ignore_errors=True)


def _contents(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()
    )


# --------------------------------------------------------------------------------------------------
# The weights


@final
class _Source:
    """The tensors to be written, by the names they have in the model."""

    def __init__(
        self,
        model: nn.Module,
        weight_of: Callable[[str], Tensor],
        buffers: Mapping[str, Tensor],
        dtype: str | None,
    ) -> None:
        self._weight_of = weight_of
        parameters, given = dict(model.named_parameters()), dict(model.named_buffers())
        self._buffers = {**given, **buffers}
        first = {id(one): name for name, one in [*parameters.items(), *given.items()]}
        self._owner = {
            name: first[id(tensor)]
            for named in (model.named_parameters, model.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        }
        self._tensors: dict[str, Tensor] = {**parameters, **given}
        self._policy = None if dtype is None else PrecisionPolicy.for_model(model, precision=dtype)
        saved = set(model.state_dict())
        self.names = [name for name in self._owner if name in saved]

    def dtype(self, name: str) -> torch.dtype:
        """What a tensor is written as."""
        owner = self._owner[name]
        dtype = self._tensors[owner].dtype
        if self._policy is None or owner in self._buffers:
            return dtype
        return self._policy.link_dtype(owner, dtype)

    def empty(self, name: str) -> Tensor:
        """A tensor's shape and dtype."""
        shape = self._tensors[self._owner[name]].shape
        return torch.empty(shape, dtype=self.dtype(name), device="meta")

    def read(self, name: str) -> Tensor:
        """A tensor as it is written."""
        owner = self._owner[name]
        value = self._buffers[owner] if owner in self._buffers else self._weight_of(owner)
        return value.detach().to("cpu", self.dtype(name))


@final
class _Cook:
    """Makes the results of recipes one by one, and keeps those of one recipe at most."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._recipe: Recipe | None = None
        self._made: dict[str, Tensor] = {}

    def take(self, recipe: Recipe, name: str) -> Tensor:
        if recipe is not self._recipe or name not in self._made:
            self._made.clear()
            self._recipe, self._made = recipe, recipe.make(self._source.read)
        return self._made.pop(name).contiguous()


def _write_model(model: nn.Module, folder: Path, source: _Source, shard_bytes: int) -> None:
    names = source.names
    if is_transformers(model):
        dropped = tied_names(model)
        empty = {name: source.empty(name) for name in names if name not in dropped}
        main = next((one.dtype for one in empty.values() if one.is_floating_point()), torch.float32)
        write_config(model, folder, dtype=main)
        recipes = recipes_for_saving(model, empty)
    else:
        recipes = [plain_recipe(name, name) for name in names]
    shards = _shards(_entries(recipes, source), shard_bytes)
    number = len(shards)
    weight_map: dict[str, str] = {}
    for index, entries in enumerate(shards, start=1):
        many = f"model-{index:05}-of-{number:05}.safetensors"
        file = many if number > 1 else "model.safetensors"
        write_tensors(folder / file, entries, metadata={"format": "pt"})
        weight_map |= {entry.name: file for entry in entries}
    if number > 1:
        total = sum(entry.nbytes for entries in shards for entry in entries)
        described = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(described, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text)


def _entries(recipes: Sequence[Recipe], source: _Source) -> Iterable[Entry]:
    cook = _Cook(source)
    for recipe in recipes:
        for name, tensor in recipe.make(source.empty).items():
            yield Entry(
                name=name,
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                read=partial(cook.take, recipe, name),
            )


def _shards(entries: Iterable[Entry], shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.nbytes
    return shards


def tied_names(model: nn.Module) -> frozenset[str]:
    """Names that are not saved, because loading ties them to others."""
    base: Any = model
    return frozenset(base.all_tied_weights_keys) | frozenset(base._keys_to_ignore_on_save or ())


def write_config(model: nn.Module, folder: Path, *, dtype: torch.dtype) -> None:
    """What is beside the weights: config.json, and generation_config.json if text is generated."""
    given: Any = model
    config = copy.deepcopy(given.config)
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    for one in (config, *inner):
        if one is not None:
            one.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if not given.can_generate():
        return
    try:
        given.generation_config.save_pretrained(folder)
    except ValueError as error:
        warnings.warn(
            f"generation_config.json is left out, transformers refuses to write it: "
            f"{first_line(error)}",
            stacklevel=2,
        )


def refuse_loose_adapter(model: nn.Module) -> None:
    """Refuse a transformers model with an adapter that is not a `peft.PeftModel`.

    Raises:
        ValueError: it is one.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            "the model has an adapter that was added with model.add_adapter. Expected an adapter "
            "of peft.get_peft_model(model, ...), which is exported in PEFT's format."
        )


def write_adapter(model: nn.Module, folder: Path, *, read: Read) -> None:
    """A PEFT model's active adapter, as its own `save_pretrained` writes it."""
    peft = importlib.import_module("peft")
    adapted: Any = model
    adapter = adapted.active_adapter
    empty = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in adapted.state_dict().items()
    }
    chosen = peft.get_peft_model_state_dict(adapted, state_dict=dict(empty), adapter_name=adapter)
    wanted = {id(tensor) for tensor in chosen.values()}
    tensors = {name: read(name) if id(one) in wanted else one for name, one in empty.items()}
    adapted.save_pretrained(folder, state_dict=tensors, selected_adapters=[adapter])
