"""Models of transformers and peft, and what a folder holds of one besides its weights.

Both libraries are looked for when they are needed. The base of a `peft.PeftModel` is loaded as if
there were no adapter.
"""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from l2l.hugging_face.prequantized import is_readable, place_quantized

ADAPTED = "base_model.model."  # how a PEFT model calls what is in its base
WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
TASKS = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "multi-label": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
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


def _is_of(model: nn.Module, library: str, name: str) -> bool:
    kinds = type(model).__mro__
    return any(one.__name__ == name and one.__module__.startswith(library) for one in kinds)


def is_transformers(model: nn.Module) -> bool:
    """Whether a model is one of transformers'."""
    return _is_of(model, "transformers.", "PreTrainedModel")


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is a `peft.PeftModel`."""
    return _is_of(model, "peft.", "PeftModel")


def base_of(model: nn.Module) -> Any:
    """The model without its adapter; it has the adapter's modules in it nevertheless."""
    base: Any = model
    return base.get_base_model() if is_adapted(model) else base


def base_name(model: nn.Module, name: str) -> str | None:
    """What a tensor is called in the model without its adapter; None if it is the adapter's."""
    if not is_adapted(model):
        return name
    adapted: Any = model
    inside = name.removeprefix(ADAPTED)
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
            f"reading models and tokenizers needs transformers, which cannot be imported "
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
# Folders


def read_config(folder: Path | str, **settings: Any) -> Any:
    """The configuration in a folder, or in a config.json.

    Raises:
        ValueError: it is not there, or transformers does not know it.
    """
    path = _config_file(folder)
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist. Expected a folder with the config.json of a model, or that "
            "file. Nothing is downloaded: run 'hf download NAME --local-dir FOLDER' before."
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
        task: "causal", "masked", "classification", "multi-label", "regression" or
            "token-classification".
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
            f"num_labels={num_labels} with task={task!r}: expected 1 or more, of another task."
        )
    config = read_config(folder, **_label_settings(task, num_labels))
    quantization = refuse_quantized(Path(folder).expanduser())
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
    if quantization:
        place_quantized(model, Path(folder).expanduser(), quantization)
    _read_generation_config(model, Path(folder).expanduser())
    done: nn.Module = model.eval()  # as from_pretrained
    return done


def sees_what_follows(model: nn.Module) -> bool:
    """Whether a model with a head for next tokens lets each token see those after it.

    So do models that were made to find hidden tokens, unless their configuration says otherwise.
    """
    config: Any = base_of(model).config
    known: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    is_masked = config.model_type in known.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return is_masked and not getattr(config, "is_decoder", False)


def _config_file(folder: Path | str) -> Path:
    path = Path(folder).expanduser()
    return path / "config.json" if path.is_dir() else path


def _label_settings(task: str, num_labels: int | None) -> dict[str, Any]:
    if task == "regression":
        return {"num_labels": num_labels or 1, "problem_type": "regression"}
    if task in ("classification", "multi-label") and num_labels is not None:
        which = "single" if task == "classification" else "multi"
        return {"num_labels": num_labels, "problem_type": f"{which}_label_classification"}
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
        if isinstance(found, dict):
            return found
        raise ValueError(f"it holds {type(found).__name__} {str(found)[:40]!r}")
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{path} cannot be read: {first_line(error)}."
        raise ValueError(f"{reason} Expected a JSON object: download the folder again.") from error


def refuse_quantized(folder: Path) -> dict[str, Any]:
    """Refuse weights that are quantized in a way that is not read; returns how they are.

    Raises:
        ValueError: config.json in the folder says so.
    """
    path = folder / "config.json" if folder.is_dir() else folder
    found = (read_json(path).get("quantization_config") if path.is_file() else None) or {}
    if found and not is_readable(found):
        method = found.get("quant_method", "an unknown method")
        raise ValueError(
            f"the weights in {folder} are quantized (quantization_config in {path.name}), by "
            f"{method}. Expected weights in float32, bfloat16 or float16, or in 4 bits of "
            "bitsandbytes: use the model that this one was made from, with base='nf4' (l2l train: "
            "--lora --base nf4) if it is to lie in 4 bits; or load this one with transformers and "
            "give the engine that model."
        )
    return found


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
        raise ValueError(f"{path} does not exist. Expected a folder with a tokenizer.")
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
