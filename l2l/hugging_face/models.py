"""What is known of Hugging Face libraries: models without weights, names on disk, adapters.

Nothing else in the package knows transformers or peft; both are looked for when they are needed.

    folder     `empty_model` and `tokenizer_of` read what a model folder holds, without its weights
    loading    tensors on disk have other names than those of the model, or other shapes (experts
               one by one that the model keeps in one tensor). `recipes_for_loading` asks
               transformers which of them make which tensor of the model
    saving     `recipes_for_saving` is the way back: what `from_pretrained` expects on disk
    filling    `fillings` are the model's own ways to give values to tensors that no file has
    adapters   the base of a `peft.PeftModel` is loaded as if there were no adapter, and the adapter
               is written by peft

A recipe asks for its sources by name, one by one. Asked with tensors on the meta device it says
which shapes will come, so that everything is checked before anything is read.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TASKS = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
TOKENIZER_TABLES = (  # that are JSON objects
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
PLAIN_ADAPTER = (True, False, "gaussian")  # beginnings of an adapter that do not need the weights

POOLERS = ("pooler",)  # parts of a head that are in the model without it

Read = Callable[[str], Tensor]


class UnknownMappingError(Exception):
    """This transformers does not say how it maps names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How tensors become others: of a checkpoint those of a model, or the other way round."""

    sources: tuple[str, ...]
    make: Callable[[Read], dict[str, Tensor]]
    """Reads the sources by name; gives tensors by their new names."""


def plain_recipe(source: str, *targets: str) -> Recipe:
    """A tensor under other names."""
    return Recipe(sources=(source,), make=lambda read: dict.fromkeys(targets, read(source)))


def is_transformers(model: nn.Module) -> bool:
    """Whether a model is one of transformers'."""
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(model).__mro__
    )


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is a `peft.PeftModel`."""
    return any(
        kind.__name__ == "PeftModel" and kind.__module__.startswith("peft.")
        for kind in type(model).__mro__
    )


def base_of(model: nn.Module) -> Any:
    """The model without its adapter; it has the adapter's modules in it nevertheless."""
    base: Any = model
    return base.get_base_model() if is_adapted(model) else base


def base_name(model: nn.Module, name: str) -> str | None:
    """What a tensor is called in the model without its adapter; None if it is the adapter's."""
    if not is_adapted(model):
        return name
    adapted: Any = model
    inside = name.removeprefix("base_model.model.")
    prefix = getattr(adapted.base_model, "prefix", "lora_")
    if any(part.startswith(prefix) for part in inside.split(".")):
        return None
    return WRAPPED.sub("", inside)


def library() -> Any:
    """The transformers library.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(
            f"models and tokenizers of a folder are made by transformers, which cannot be imported "
            f"({error}). Install it with: pip install 'transformers>=5'"
        ) from error


def described(error: BaseException) -> str:
    """What an error of transformers says, with its kind if that is needed to understand it."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else first_line(error)
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"


def first_line(error: BaseException) -> str:
    """What an error says, in short."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# --------------------------------------------------------------------------------------------------
# What a folder holds


def read_config(folder: Path | str, **settings: Any) -> Any:
    """The configuration in a folder, or in a config.json.

    Raises:
        ValueError: it is not there, or transformers does not know it.
    """
    path = _config_file(folder)
    if not path.is_file():
        raise ValueError(
            f"{path} is not there. Expected a folder with the config.json of a model, or such a "
            "file. Nothing is downloaded: to have a model of the Hugging Face Hub here, say "
            "'hf download NAME --local-dir FOLDER'."
        )
    transformers = library()
    try:
        read_json(path)
        config = transformers.AutoConfig.from_pretrained(
            path if path.name != "config.json" else path.parent, trust_remote_code=False, **settings
        )
        number = getattr(config.get_text_config(), "num_hidden_layers", 1)
    except Exception as error:  # whatever is wrong with a file of the user's
        raise ValueError(
            f"{path} is not a configuration that transformers {transformers.__version__} knows: "
            f"{described(error)} Expected the config.json of a model folder, with its model_type."
        ) from error
    if isinstance(number, int) and number < 1:
        raise ValueError(f"{path}: num_hidden_layers is {number}. Expected at least one layer.")
    return config


def empty_model(
    folder: Path | str,
    *,
    task: str = "causal",
    num_labels: int | None = None,
    attention: str | None = None,
) -> nn.Module:
    """The model of a folder, on the meta device: for `l2l.Engine(model, weights=folder)`.

    Args:
        folder: with a config.json, or that file.
        task: "causal", "masked", "classification" or "regression".
        num_labels: classes, or numbers to predict. None: as many as the configuration has; one for
            regression.
        attention: transformers' attn_implementation. None: its default.

    Raises:
        ValueError: there is no such folder or task, or no model for both.
    """
    if task not in TASKS:
        raise ValueError(
            f"task={task!r} is not known. Expected one of {', '.join(map(repr, TASKS))}."
        )
    if num_labels is not None and (num_labels < 1 or task in ("causal", "masked")):
        raise ValueError(
            f"num_labels={num_labels} with task={task!r}: expected at least one label, of "
            "'classification' or 'regression'."
        )
    config = read_config(folder, **_label_settings(task, num_labels))
    refuse_quantized(Path(folder).expanduser())
    transformers = library()
    options = {} if attention is None else {"attn_implementation": attention}
    try:
        with torch.device("meta"):
            model: Any = getattr(transformers, TASKS[task]).from_config(config, **options)
    except Exception as error:  # whatever the configuration makes it do
        raise ValueError(
            f"{_config_file(folder)}: transformers {transformers.__version__} makes no model of "
            f"{type(config).__name__} for task={task!r}: {described(error)} Expected an "
            "architecture of transformers; code of its own in a model folder is not run."
        ) from error
    _keep_float32(model)
    _read_generation_config(model, Path(folder).expanduser())
    done: nn.Module = model.eval()  # as from_pretrained
    return done


def _config_file(folder: Path | str) -> Path:
    path = Path(folder).expanduser()
    return path / "config.json" if path.is_dir() else path


def _label_settings(task: str, num_labels: int | None) -> dict[str, Any]:
    if task == "regression":
        return {"num_labels": num_labels or 1, "problem_type": "regression"}
    if task == "classification" and num_labels is not None:
        return {"num_labels": num_labels, "problem_type": "single_label_classification"}
    return {} if num_labels is None else {"num_labels": num_labels}


def class_names(folder: Path) -> list[str]:
    """The names of the classes of a model in a folder, in the order of their numbers.

    Raises:
        ValueError: config.json is damaged.
    """
    path = folder / "config.json"
    numbers = read_json(path).get("label2id") or {}
    if not isinstance(numbers, dict) or not all(isinstance(n, int) for n in numbers.values()):
        raise ValueError(
            f"{path}: label2id is {str(numbers)[:60]}. Expected an object: a number for each class."
        )
    return sorted(numbers, key=numbers.__getitem__)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: it cannot be read, or is something else; the message names the file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} cannot be read: {first_line(error)}. Expected a JSON object: get the folder "
            "again."
        ) from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} holds {type(found).__name__} {str(found)[:40]!r}. Expected a JSON object: get "
            "the folder again."
        )
    return found


def refuse_quantized(folder: Path) -> None:
    """Refuse weights that are not numbers as they are.

    Raises:
        ValueError: config.json in the folder says so.
    """
    path = folder / "config.json" if folder.is_dir() else folder
    if path.is_file() and read_json(path).get("quantization_config"):
        raise ValueError(
            f"the weights in {folder} are quantised (quantization_config in {path.name}). Expected "
            "weights in float32, bfloat16 or float16: take the model that this one was made from."
        )


def _keep_float32(model: Any) -> None:
    """Parameters that stay float32 whatever the dtype, as from_pretrained keeps them."""
    words = [word.replace("*", ".*") for word in model._get_dtype_plan(model.dtype)]
    for name, parameter in model.named_parameters():
        if any(re.search(word, name) for word in words):
            parameter.data = parameter.data.float()


def _read_generation_config(model: Any, folder: Path) -> None:
    path = folder / "generation_config.json"
    if not model.can_generate() or not path.is_file():
        return
    read_json(path)
    try:
        model.generation_config = library().GenerationConfig.from_pretrained(folder)
    except Exception as error:  # whatever is wrong with a file of the user's
        raise ValueError(f"{path} cannot be read: {described(error)}") from error


def tokenizer_of(folder: Path | str) -> Any:
    """The tokenizer in a model folder.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ValueError(f"{path} is not there. Expected a folder with a tokenizer.")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        found = ", ".join(sorted(child.name for child in path.iterdir())) or "nothing"
        raise ValueError(
            f"{path} has no tokenizer: expected one of {', '.join(TOKENIZER_FILES)}, found {found}."
        )
    for name in TOKENIZER_TABLES:
        if (path / name).exists():
            read_json(path / name)
    try:
        tokenizer = library().AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        tokenizer.model_max_length > 1  # noqa: B015 (raises if it is no number)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # panics of the tokenizers library are no Exception
        raise ValueError(
            f"the tokenizer in {path} cannot be read: {_culprit(path)}: {described(error)}"
        ) from error
    return tokenizer


def _culprit(folder: Path) -> str:
    """The file because of which a tokenizer cannot be read.

    Raises:
        ValueError: it is config.json.
    """
    if (folder / "config.json").is_file():
        read_config(folder)
    whole, settings = (folder / name for name in ("tokenizer.json", "tokenizer_config.json"))
    if whole.is_file() and settings.is_file():
        try:
            library().PreTrainedTokenizerFast(tokenizer_file=str(whole))
        except BaseException:
            return whole.name
        return settings.name
    found = [name for name in (*TOKENIZER_FILES, settings.name) if (folder / name).is_file()]
    return " or ".join(found)


# --------------------------------------------------------------------------------------------------
# From the names on disk to those of the model


def recipes_for_loading(
    model: nn.Module, names: Iterable[str]
) -> tuple[list[Recipe], tuple[str, ...]]:
    """How the tensors of a checkpoint become those of a model, and which of them do not.

    Raises:
        UnknownMappingError: ask for the `whole_model` instead.
    """
    try:
        return _recipes_for_loading(model, names)
    except (ImportError, AttributeError, TypeError) as error:
        raise UnknownMappingError(first_line(error)) from error


def _recipes_for_loading(
    model: nn.Module, names: Iterable[str]
) -> tuple[list[Recipe], tuple[str, ...]]:
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
    recipes = []
    for target, parts in groups.items():
        pattern = parts[0][1]
        if pattern is None:
            recipes.append(plain_recipe(parts[0][0], *places[target]))
            continue
        sources = {source: pattern for source, pattern in parts if pattern is not None}
        convert = partial(_convert, by_pattern[pattern], target, base)
        recipes.append(
            Recipe(
                sources=tuple(sources),
                make=partial(_placed, places, partial(_convert_all, convert, sources)),
            )
        )
    return recipes, tuple(unexpected)


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


def _placed(
    places: Mapping[str, tuple[str, ...]],
    make: Callable[[Read], dict[str, Tensor]],
    read: Read,
) -> dict[str, Tensor]:
    return {place: one for name, one in make(read).items() for place in places.get(name, ())}


def _convert(
    template: Any, target: str, base: Any, sources: Mapping[str, str], read: Read
) -> dict[str, Tensor]:
    """What transformers makes of some tensors; `sources` says which pattern each one met."""
    converter = copy.deepcopy(template)
    for source, pattern in sources.items():
        converter.add_tensor(target, source, pattern, partial(read, source))
    made = converter.convert(target, model=base, config=base.config)
    return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def _convert_all(convert: Any, sources: Mapping[str, str], read: Read) -> dict[str, Tensor]:
    """The same; what is stacked is made one by one, so that it is in memory once, not three times.

    Transformers' own way holds the experts, their stacks and what is made of these together.
    """
    template = convert.args[0]
    by_pattern: dict[str, list[str]] = defaultdict(list)
    for source, pattern in sources.items():
        by_pattern[pattern].append(source)
    numbers = {len(found) for found in by_pattern.values()}
    if not _stacks(template) or len(numbers) != 1:
        made: dict[str, Tensor] = convert(sources, read)
        return made
    number = numbers.pop()
    whole: dict[str, Tensor] = {}
    for index in range(number):
        part = {found[index]: pattern for pattern, found in by_pattern.items()}
        for name, one in convert(part, read).items():
            if index == 0:
                whole[name] = one.new_empty((number, *one.shape[1:]))
            whole[name][index] = one[0]
    return whole


def _stacks(template: Any) -> bool:
    """Whether a conversion stacks tensors along a new first dimension and leaves that alone."""
    first, *rest = template.operations
    return (
        type(first).__name__ == "MergeModulelist"
        and first.dim == 0
        and all(type(one).__name__ == "Concatenate" and one.dim >= 1 for one in rest)
    )


def whole_model(model: nn.Module, folder: Path) -> tuple[list[Recipe], Read]:
    """All weights, as `from_pretrained` reads them: needs memory for the whole model."""
    base = base_of(model)
    whole = type(base).from_pretrained(folder, config=copy.deepcopy(base.config), dtype=base.dtype)
    tensors: dict[str, Tensor] = whole.state_dict()
    places = _places(model)
    recipes = [plain_recipe(name, *places[name]) for name in tensors if name in places]
    return recipes, tensors.__getitem__


# --------------------------------------------------------------------------------------------------
# And back


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
                "in one layer. Expected conversions within a layer. Close the engine and call "
                "model.save_pretrained."
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
    return Recipe(
        sources=names, make=lambda read: dict(revert({name: read(name) for name in names}))
    )


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


# --------------------------------------------------------------------------------------------------
# Values for what no file has


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """A way to fill some of a model's tensors, in place."""

    path: str  # of the module that it is for
    run: Callable[[], Any]
    is_last_resort: bool = False  # for what has no other way


def fillings(tree: nn.Module) -> list[Filling]:
    """A model's own ways to fill its tensors, in the order in which they are to be taken.

    A module is filled after those inside it, and may fill these once more. Inside a transformers
    model that is `_init_weights` of the nearest model around a module; elsewhere, and for what that
    leaves alone, it is the module's own way. Adapters of a PEFT model have theirs.
    """
    found: list[Filling] = []
    adapters: Mapping[str, Any] = getattr(tree, "peft_config", {}) if is_adapted(tree) else {}

    def visit(path: str, module: Any, fill: Callable[[nn.Module], Any] | None) -> None:
        fill = module._init_weights if is_transformers(module) else fill
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child, fill)
        for own in ("reset_parameters", "_reset_parameters"):
            if callable(getattr(module, own, None)):
                run = getattr(module, own)
                found.append(Filling(path=path, run=run, is_last_resort=fill is not None))
                break
        if fill is not None:
            found.append(Filling(path=path, run=partial(fill, module)))
        if callable(getattr(module, "reset_lora_parameters", None)):
            for adapter, config in adapters.items():
                run = partial(_reset_adapter, path, module, adapter, config)
                found.append(Filling(path=path, run=run))

    visit("", tree, None)
    return found


def _reset_adapter(path: str, module: Any, adapter: str, config: Any) -> None:
    if config.init_lora_weights not in PLAIN_ADAPTER:
        raise ValueError(
            f"the adapter of {path!r} begins with init_lora_weights={config.init_lora_weights!r}, "
            "which needs the model's weights. Expected True, False or 'gaussian' for a model on "
            "the meta device."
        )
    module.reset_lora_parameters(adapter, config.init_lora_weights)
