"""LoRA for a model on the meta device, through peft."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from l2l.model import copy_tree

ALL_LINEAR = "all-linear"
PRINTED = r"\(\n.*\n\)"  # what torch prints of a module, beside its kind
TASK_TYPES = {
    "causal": "CAUSAL_LM",
    **dict.fromkeys(("classification", "multi-label", "regression"), "SEQ_CLS"),
    "token-classification": "TOKEN_CLS",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """What peft's LoraConfig is told."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: Sequence[str] = (ALL_LINEAR,)  # ends of names of modules
    rslora: bool = False
    dora: bool = False
    modules_to_save: Sequence[str] = ()


def with_lora(model: nn.Module, lora: Lora, *, task: str) -> nn.Module:
    """The model with an adapter, as peft makes it; its own weights are frozen.

    Args:
        model: on the meta device.
        lora: the adapter.
        task: of `empty_model`.

    Raises:
        ValueError: peft is not installed, or makes no such adapter of the model.
    """
    try:
        peft = importlib.import_module("peft")
    except ImportError as error:
        raise ValueError(
            f"LoRA needs peft, which cannot be imported ({error}). Install it with: pip install "
            "peft"
        ) from error
    is_all = tuple(lora.targets) == (ALL_LINEAR,)
    if not is_all:
        _refuse_unknown(model, "targets", lora.targets)
    _refuse_unknown(model, "modules_to_save", lora.modules_to_save)
    try:
        config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=ALL_LINEAR if is_all else list(lora.targets),
            use_rslora=lora.rslora,
            use_dora=lora.dora,
            modules_to_save=list(lora.modules_to_save) or None,
            task_type=TASK_TYPES.get(task),
        )
        with torch.device("meta"):
            made: nn.Module = peft.get_peft_model(model, config)
    except ValueError as error:
        raise ValueError(
            f"peft {peft.__version__} makes no such adapter of {type(model).__name__}: "
            f"{re.sub(PRINTED, '', str(error), flags=re.DOTALL)}"
        ) from error
    return made.eval()  # as from_pretrained


def _refuse_unknown(model: nn.Module, setting: str, words: Iterable[str]) -> None:
    names = [name for name, _ in model.named_modules()]
    for word in words:
        if not any(f".{name}".endswith(f".{word}") for name in names):
            ends = dict.fromkeys(name.split(".")[-2] for name, _ in model.named_parameters())
            also = f"{ALL_LINEAR!r}, or " if setting == "targets" else ""
            raise ValueError(
                f"{setting}: {type(model).__name__} has no module {word!r}. Expected {also}ends of "
                f"names of modules, such as {', '.join(ends)}."
            )


# --------------------------------------------------------------------------------------------------
# What an adapter begins with


Follower = tuple[str, Callable[[Tensor], Tensor]]
"""The name of a tensor, and how it is made of another one's value."""


def followers(model: nn.Module) -> dict[str, list[Follower]]:
    """What follows from a weight of the base, by that weight's name: magnitudes of DoRA."""
    found: dict[str, list[Follower]] = {}
    for path, module in model.named_modules():
        for adapter in getattr(module, "lora_magnitude_vector", ()):
            name = f"{path}.lora_magnitude_vector.{adapter}.weight"
            make = partial(_magnitude, module, adapter)
            found.setdefault(f"{path}.base_layer.weight", []).append((name, make))
    return found


def _magnitude(module: Any, adapter: str, weight: Tensor) -> Tensor:
    """What peft computes of a weight, as long as the product of A and B is zero."""
    base = copy_tree(module.get_base_layer(), {})
    base._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    pairs = ((module.lora_A, module.lora_B), (module.lora_embedding_A, module.lora_embedding_B))
    a, b = next((one[adapter], two[adapter]) for one, two in pairs if adapter in one)
    a, b = (getattr(one, "weight", one) for one in (a, b))
    zeros = {
        "lora_A": torch.zeros_like(a, device=weight.device),
        "lora_B": torch.zeros_like(b, device=weight.device),
    }
    made: Any = copy_tree(module.lora_magnitude_vector[adapter], {})
    with torch.no_grad():
        made.update_layer(base_layer=base, scaling=module.scaling[adapter], **zeros)
    value: Tensor = made.weight.detach()
    return value
