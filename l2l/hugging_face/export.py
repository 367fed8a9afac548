"""A model's weights as a folder that others read: what `from_pretrained` expects, tensor by tensor.

    config.json, generation_config.json       of a transformers model, with the dtype of the weights
    model.safetensors                         or, above `shard_bytes`, model-00001-of-00003... with
    model.safetensors.index.json              an index
    tokenizer files                           if there is a tokenizer
    adapter_config.json, adapter_model...     of a PEFT model, and nothing else of it, unless it is
                                              to be merged
    l2l_export.json                           says that the folder is ours, and what is in it

The weights come from a function, one by one: from the parameter server, or from wherever they are.
Everything is written into a folder beside and renamed, so what has the name is whole. A folder that
is there is replaced only if an earlier export wrote all that is in it.
"""

from __future__ import annotations

import copy
import importlib
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from l2l import files
from l2l.hugging_face.folder import first_line, is_adapted, is_transformers
from l2l.hugging_face.merging import Merged
from l2l.hugging_face.recipes import Read, Recipe, Tensors, plain_recipe, recipes_for_saving
from l2l.model import copy_tree
from l2l.parameter_server import DTYPES, PrecisionPolicy

QUANTIZED = "quantization_config"
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
    merge: bool = False,
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
        merge: write the whole model with its adapter in the weights, instead of the adapter.

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
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            "the model has an adapter that was added with model.add_adapter. Expected an adapter "
            "of peft.get_peft_model(model, ...), which is exported in PEFT's format."
        )
    if merge and not is_adapted(model):
        raise ValueError("merge=True, but the model has no adapter. Expected a peft.PeftModel.")
    target = Path(folder).expanduser().absolute()
    files.recover(target)
    refuse_foreign(target)
    tensors = Tensors(model)
    policy = None if dtype is None else PrecisionPolicy.for_model(model, precision=dtype)
    present = {**tensors.buffers, **(buffers or {})}
    if merge:
        merged = Merged(model, weight_of, present)
        model, tensors, weight_of, present = merged.model, Tensors(merged.model), merged.value, {}
    source = _Source(tensors, weight_of, present, policy)
    try:
        made = files.empty_folder(target)
        if is_adapted(model):
            _write_adapter(model, made, source.read)
        else:
            _write_model(model, made, source, shard_bytes)
        if tokenizer is not None:
            tokenizer.save_pretrained(made)
        mark = {"format": "l2l export", "version": 1, "files": _contents(made)}
        (made / MARK).write_text(json.dumps(mark, indent=2) + "\n")
        files.replace_folder(target)
    except OSError as error:
        reason = error.strerror or error
        raise files.TensorFileError(f"cannot write {target}: {reason}") from error
    finally:
        shutil.rmtree(files.beside(target), ignore_errors=True)


def refuse_foreign(folder: Path) -> None:
    """Refuse to replace a folder that an export did not write.

    Raises:
        ValueError: it holds something else, by name.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file. Expected the name of a folder to write.")
    try:
        own = set(json.loads((folder / MARK).read_text())["files"]) | {MARK}
    except (OSError, ValueError, KeyError, TypeError):
        own = set()
    strange = [name for name in _contents(folder) if name not in own]
    if strange:
        shown = ", ".join(strange[:5]) + (" and others" if len(strange) > 5 else "")
        raise ValueError(
            f"{folder} contains files that are not from an earlier export: {shown}. Expected a "
            "new or empty folder, or an earlier export. Choose another folder, or remove it."
        )


def _contents(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()
    )


@final
@dataclass(frozen=True, slots=True)
class _Source:
    """The tensors to be written, by the names they have in the model."""

    tensors: Tensors
    weight_of: Callable[[str], Tensor]
    buffers: Mapping[str, Tensor]  # present values
    policy: PrecisionPolicy | None

    def empty(self, name: str) -> Tensor:
        """The shape and dtype in which a tensor is written."""
        owner = self.tensors.owner[name]
        tensor = self.tensors.all[owner]
        dtype = tensor.dtype
        if self.policy is not None and owner not in self.tensors.buffers:
            dtype = self.policy.link_dtype(owner, dtype)
        return torch.empty(tensor.shape, dtype=dtype, device="meta")

    def read(self, name: str) -> Tensor:
        """A tensor as it is written."""
        owner = self.tensors.owner[name]
        value = self.buffers[owner] if owner in self.buffers else self.weight_of(owner)
        return value.detach().to("cpu", self.empty(name).dtype)


def _write_model(model: nn.Module, folder: Path, source: _Source, shard_bytes: int) -> None:
    names = [name for name in source.tensors.owner if name in source.tensors.saved]
    recipes = [plain_recipe(name, name) for name in names]
    if is_transformers(model):
        model = base = _unquantized(model)
        tied = {*base.all_tied_weights_keys, *(base._keys_to_ignore_on_save or ())}
        empty = {name: source.empty(name) for name in names if name not in tied}
        main = next((one.dtype for one in empty.values() if one.is_floating_point()), torch.float32)
        write_config(model, folder, dtype=main)
        recipes = recipes_for_saving(model, empty)
    recipe_of: dict[str, Recipe] = {}
    made: dict[str, Tensor] = {}  # by one recipe

    def read(name: str) -> Tensor:
        if name not in made:
            made.clear()
            made.update(recipe_of[name].make(source.read))
        return made.pop(name).contiguous()

    shards: list[dict[str, Tensor]] = [{}]
    filled = total = 0
    for recipe in recipes:
        for name, tensor in recipe.make(source.empty).items():
            if shards[-1] and filled + tensor.nbytes > shard_bytes:
                shards.append({})
                filled = 0
            shards[-1][name], recipe_of[name] = tensor, recipe
            filled, total = filled + tensor.nbytes, total + tensor.nbytes
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        many = f"model-{index:05}-of-{len(shards):05}.safetensors"
        file = many if len(shards) > 1 else "model.safetensors"
        files.write_tensors(folder / file, shard, read=read, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        described = {"metadata": {"total_size": total}, "weight_map": weight_map}
        text = json.dumps(described, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text)


def _unquantized(model: Any) -> Any:
    """The model without what only says that it was quantized: its weights are written plain."""
    if getattr(model.config, QUANTIZED, None) is None:
        return model
    made: Any = copy_tree(model, {})
    made.__dict__["config"] = copy.deepcopy(model.config)
    delattr(made.config, QUANTIZED)
    conversions = getattr(model, "_weight_conversions", None) or ()
    made.__dict__["_weight_conversions"] = [one for one in conversions if _is_reversible(one)]
    return made


def _is_reversible(conversion: Any) -> bool:
    """Whether what was done to weights when they were read can be undone: not a quantizer's."""
    try:
        conversion.reverse_transform()
    except (NotImplementedError, ValueError):
        return False
    return True


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
    try:
        if given.can_generate():
            given.generation_config.save_pretrained(folder)
    except ValueError as error:
        said = "generation_config.json is left out, transformers refuses to write it: "
        warnings.warn(said + first_line(error), stacklevel=2)


def _write_adapter(model: nn.Module, folder: Path, read: Read) -> None:
    """A PEFT model's active adapter, as its own `save_pretrained` writes it."""
    peft = importlib.import_module("peft")
    adapted: Any = copy_tree(model, {})
    for path, module in adapted.named_modules():  # what peft computes from prompts is saved
        if path.startswith("prompt_encoder."):
            for local in module._parameters:
                value = nn.Parameter(read(f"{path}.{local}"), requires_grad=False)
                module._parameters[local] = value
    adapter = adapted.active_adapter
    saved = adapted.state_dict()
    empty = {name: torch.empty_like(one, device="meta") for name, one in saved.items()}
    chosen = peft.get_peft_model_state_dict(adapted, state_dict=dict(empty), adapter_name=adapter)
    wanted = {id(tensor) for tensor in chosen.values()}
    tensors = {name: read(name) if id(one) in wanted else one for name, one in empty.items()}
    adapted.save_pretrained(folder, state_dict=tensors, selected_adapters=[adapter])
