"""A PEFT model whose adapter can be turned off for a call, while its weights are in an engine.

Trainers of preferences take the reference's log-probabilities from the base model: they turn the
adapter off around a call. PEFT does that by setting attributes of the modules, and whether their
parameters require gradients, which an engine knows as they were when it was made. What a LoRA adds
is multiplied by its scaling, in a dict that the engine's modules share: with zeros in there, the
base model is what runs, to the bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

OFF = "disable_adapter"  # PEFT's name of the method


def refuse_copies(model: nn.Module) -> None:
    """Refuse a model with an adapter that TRL would turn to as a reference.

    Raises:
        ValueError: with the remedy.
    """
    if "ref" in getattr(model, "peft_config", {}):
        raise ValueError(
            "the model came with its adapter, and TRL has added a copy of that as a reference "
            "('ref'), which an engine cannot turn to. Give the trainer the model without adapter "
            "and peft_config=...; or ref_model=..., a model of its own."
        )


def with_switch(model: nn.Module) -> Callable[[], None]:
    """Let `model.disable_adapter()` work while an engine holds the weights; undone by the result.

    Models without PEFT's method stay as they are. Where the adapter is none that can be turned off
    so, the method refuses.
    """
    if not hasattr(model, OFF):
        return lambda: None
    scalings, reason = _scalings(model)

    @contextlib.contextmanager
    def switched_off() -> Iterator[None]:
        if reason is not None:
            raise RuntimeError(
                f"the adapter cannot be turned off while its weights are in an engine: {reason}. "
                "Give the trainer a reference of its own: ref_model=the model without adapter."
            )
        before = [dict(scaling) for scaling in scalings]
        for scaling in scalings:
            scaling.update(dict.fromkeys(scaling, 0.0))
        try:
            yield
        finally:
            for scaling, values in zip(scalings, before, strict=True):
                scaling.update(values)

    model.__dict__[OFF] = switched_off

    def undo() -> None:
        model.__dict__.pop(OFF, None)

    return undo


def _scalings(model: nn.Module) -> tuple[list[dict[str, float]], str | None]:
    """Of all layers of the adapter; or why they are not enough."""
    found, reason = [], None
    for name, module in model.named_modules():
        if not hasattr(module, "_disable_adapters"):  # a layer of PEFT
            continue
        if not isinstance(getattr(module, "scaling", None), dict):
            reason = f"{name!r} is {type(module).__name__}, which has no scaling"
        elif getattr(module, "lora_variant", None):
            reason = f"{name!r} has a variant of LoRA, such as DoRA"
        else:
            found.append(module.scaling)
    configs: Any = getattr(model, "peft_config", {})
    if len(configs) > 1:
        reason = f"there are several adapters: {sorted(configs)}"
    return found, reason
