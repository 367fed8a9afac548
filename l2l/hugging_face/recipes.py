"""From the names of tensors on disk to those of the model, and back.

    loading    tensors on disk have other names than those of the model, or other shapes (experts
               one by one that the model keeps in one tensor). `recipes_for_loading` asks
               transformers which of them make which tensor of the model
    saving     `recipes_for_saving` is the way back: what `from_pretrained` expects on disk

A recipe asks for its sources by name, one by one. Asked with tensors on the meta device it says
which shapes will come, so that everything is checked before anything is read.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from l2l.hugging_face.folder import base_name, base_of, is_transformers, read_json

POOLERS = ("pooler",)  # parts of a head that are in the model without it

UNKNOWN_MAPPING = (ImportError, AttributeError, TypeError)
"""What `recipes_for_loading` raises if this transformers does not say how it maps names."""

Read = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How tensors become others: of a checkpoint those of a model, or the other way round."""

    sources: tuple[str, ...]
    make: Callable[[Read], dict[str, Tensor]]
    """Reads the sources by name; gives tensors by their new names."""


def plain_recipe(source: str, *targets: str) -> Recipe:
    """A tensor under other names."""
    return Recipe((source,), lambda read: dict.fromkeys(targets, read(source)))


@final
class Tensors:
    """The tensors of a model, by name; one that is tied is known by its first name."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self.all: dict[str, Tensor] = {**self.parameters, **self.buffers}
        self.saved = set(model.state_dict())
        first = {id(tensor): name for name, tensor in self.all.items()}
        self.owner = {
            name: first[id(tensor)]
            for named in (model.named_parameters, model.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        }


def recipes_for_loading(
    model: nn.Module, names: Iterable[str]
) -> tuple[list[Recipe], tuple[str, ...]]:
    """How the tensors of a checkpoint become those of a model, and which of them do not.

    Raises:
        UNKNOWN_MAPPING: ask for the `whole_model` instead.
    """
    loading = importlib.import_module("transformers.core_model_loading")
    conversion = importlib.import_module("transformers.conversion_mapping")
    base = base_of(model)
    mapping = conversion.get_model_conversion_mapping(base)
    renamings = [entry for entry in mapping if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    places = _places(model)
    is_ignored = _ignored(base)
    groups: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    unexpected = []
    for source in sorted(names, key=loading.dot_natural_key):
        prefix = base.base_model_prefix
        target, pattern = loading.rename_source_key(source, renamings, converters, prefix, places)
        if target not in places and source in places:  # it has its new name already
            target, pattern = source, None
        if target in places:
            groups[target].append((source, pattern))
        elif not is_ignored(source) and not is_ignored(target):
            unexpected.append(source)

    def recipe_of(target: str, parts: list[tuple[str, str | None]]) -> Recipe:
        first = parts[0][1]
        if first is None:
            return plain_recipe(parts[0][0], *places[target])
        sources = {source: pattern for source, pattern in parts if pattern is not None}
        convert = partial(_convert, by_pattern[first], target, base)
        rows = _stacked_rows(by_pattern[first], sources)

        def make(read: Read) -> dict[str, Tensor]:
            made = convert(sources, read) if rows is None else _stack(convert, rows, read)
            return {place: one for name, one in made.items() for place in places.get(name, ())}

        return Recipe(tuple(sources), make)

    return [recipe_of(*one) for one in groups.items()], tuple(unexpected)


def _places(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """By the name that a checkpoint may have: the model's names."""
    places: dict[str, tuple[str, ...]] = {}
    for name in model.state_dict():
        base = base_name(model, name)
        if base is not None:
            places[base] = (*places.get(base, ()), name)
    return places


def may_be_missing(model: nn.Module, name: str) -> bool:
    """Whether a tensor is one that files need not have: an adapter's, or tied, or computed."""
    inside = base_name(model, name)
    if inside is None:
        return True
    patterns = getattr(base_of(model), "_keys_to_ignore_on_load_missing", None) or ()
    return any(re.search(pattern, inside) for pattern in patterns)


def new_head(
    model: nn.Module, names: Iterable[str], missing: Container[str], *, folder: Path
) -> set[str]:
    """Tensors of heads that a checkpoint of another class does not have: each is missing whole.

    Args:
        model: to be filled.
        names: of its tensors that files must have.
        missing: those that they do not have.
        folder: of the checkpoint; its config.json says what it is a checkpoint of.
    """
    base = base_of(model)
    if not is_transformers(base) or not hasattr(base, base.base_model_prefix or " "):
        return set()  # there is nothing that a head could be added to
    config = folder / "config.json" if folder.is_dir() else folder.parent / "config.json"
    said = read_json(config).get("architectures") if config.is_file() else None
    if isinstance(said, list) and type(base).__name__ in said:
        return set()
    parts: dict[str, list[str]] = defaultdict(list)
    for name in names:
        words = (base_name(model, name) or name).split(".")
        is_inside = words[0] == base.base_model_prefix
        if not is_inside or words[1] in POOLERS:
            parts[".".join(words[: 1 + is_inside])].append(name)
    whole = [part for part in parts.values() if all(name in missing for name in part)]
    return {name for part in whole for name in part}


def _ignored(base: Any) -> Callable[[str], bool]:
    """Whether transformers would not say that it does not expect a name."""
    patterns = list(base._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in base.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):  # once saved, now computed
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def _convert(
    template: Any, target: str, base: Any, sources: Mapping[str, str], read: Read
) -> dict[str, Tensor]:
    """What transformers makes of some tensors; `sources` says which pattern each one met."""
    converter = copy.deepcopy(template)
    for source, pattern in sources.items():
        converter.add_tensor(target, source, pattern, partial(read, source))
    made = converter.convert(target, model=base, config=base.config)
    return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def _stacked_rows(template: Any, sources: Mapping[str, str]) -> list[dict[str, str]] | None:
    """What of the sources makes each row of a stack.

    None: the conversion does not stack them along a new first dimension and leave that alone.
    """
    first, *rest = template.operations
    grouped: dict[str, list[str]] = defaultdict(list)
    for source, pattern in sources.items():
        grouped[pattern].append(source)
    if (
        type(first).__name__ != "MergeModulelist"
        or first.dim != 0
        or any(type(one).__name__ != "Concatenate" or one.dim < 1 for one in rest)
        or len({len(found) for found in grouped.values()}) != 1
    ):
        return None
    rows = zip(*grouped.values(), strict=True)
    return [dict(zip(row, grouped, strict=True)) for row in rows]


def _stack(convert: Any, rows: list[dict[str, str]], read: Read) -> dict[str, Tensor]:
    """What is stacked is made one by one, so that it is in memory once, not three times.

    Transformers' own way holds the experts, their stacks and what is made of these together.
    """
    whole: dict[str, Tensor] = {}
    for index, row in enumerate(rows):
        for name, one in convert(row, read).items():
            if index == 0:
                whole[name] = one.new_empty((len(rows), *one.shape[1:]))
            whole[name][index] = one[0]
    return whole


def whole_model(model: nn.Module, folder: Path) -> tuple[list[Recipe], Read]:
    """All weights, as `from_pretrained` reads them: needs memory for the whole model."""
    base = base_of(model)
    whole = type(base).from_pretrained(folder, config=copy.deepcopy(base.config), dtype=base.dtype)
    tensors: dict[str, Tensor] = whole.state_dict()
    places = _places(model)
    recipes = [plain_recipe(name, *places[name]) for name in tensors if name in places]
    return recipes, tensors.__getitem__


def recipes_for_saving(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[Recipe]:
    """How a model's tensors become what `from_pretrained` reads.

    Args:
        model: of transformers.
        tensors: by the model's names, on the meta device.

    Raises:
        ValueError: transformers converts the weights back in a way that cannot be streamed.
    """
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        revert = partial(loading.revert_weight_conversion, model)
    except (ImportError, AttributeError):  # before there were conversions
        return [plain_recipe(name, name) for name in tensors]
    expected: dict[str, Tensor] = revert(dict(tensors))
    source_of = {id(tensor): name for name, tensor in tensors.items()}
    recipes = [
        plain_recipe(source_of[id(tensor)], name)
        for name, tensor in expected.items()
        if id(tensor) in source_of
    ]
    kept = {recipe.sources[0] for recipe in recipes}
    left = {name: tensor for name, tensor in tensors.items() if name not in kept}
    shapes = {name: one.shape for name, one in expected.items() if id(one) not in source_of}
    together: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in left.items():
        if _agrees(revert, {name: tensor}, shapes):
            recipes.append(_reverting(revert, (name,)))
        else:
            layer = re.match(r".*?\.\d+(?=\.)", name)
            together[layer[0] if layer else ""][name] = tensor
    for group in together.values():
        if not _agrees(revert, group, shapes):
            raise ValueError(
                f"transformers makes {sorted(shapes)[0]!r} and others of tensors that are not all "
                "in one layer. Close the engine and call model.save_pretrained."
            )
        recipes.append(_reverting(revert, tuple(group)))
    order = {name: index for index, name in enumerate(tensors)}
    return sorted(recipes, key=lambda recipe: order[recipe.sources[0]])


def _agrees(revert: Any, part: dict[str, Tensor], shapes: Mapping[str, torch.Size]) -> bool:
    """Whether tensors alone become what they become among all others."""
    try:
        made = revert(part)
    except (ValueError, RuntimeError, KeyError, IndexError, TypeError):
        return False
    return all(shapes.get(name) == tensor.shape for name, tensor in made.items())


def _reverting(revert: Any, names: tuple[str, ...]) -> Recipe:
    return Recipe(names, lambda read: dict(revert({name: read(name) for name in names})))
