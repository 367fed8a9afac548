"""What is known of transformers and peft models as such; both are looked for when they are needed.

The base of a `peft.PeftModel` is loaded as if there were no adapter.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from torch import nn

WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


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
