"""What a model's configs ask for: caches, and what single layers return."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from l2l.model.layer_list import CutError


def configs_of(model: nn.Module) -> list[Any]:
    """Configs of a model, of its parts and inside these (`text_config`), each once."""
    found: dict[int, Any] = {}

    def note(holder: object, depth: int) -> None:
        for name, value in vars(holder).items():
            is_config = name.endswith("config") and hasattr(value, "__dict__")
            if is_config and not isinstance(value, nn.Module | type) and id(value) not in found:
                found[id(value)] = value
                if depth:
                    note(value, depth - 1)

    for module in model.modules():
        note(module, 3)
    return list(found.values())


@contextlib.contextmanager
def without_cache(configs: Iterable[Any]) -> Iterator[None]:
    """Let no part of a model make a cache inside the block: every pass would append to it."""
    caching = [(one, one.use_cache) for one in configs if getattr(one, "use_cache", False)]
    try:
        for config, _ in caching:
            config.use_cache = False
        yield
    finally:
        for config, before in caching:
            config.use_cache = before


def takes_use_cache(model: nn.Module) -> bool:
    """Whether the model makes a cache unless told not to; both passes would append to it.

    A wrapper, such as an adapter's, hands the argument on to the module inside that takes it.
    """
    parameters = inspect.signature(model.forward).parameters
    if "use_cache" in parameters:
        return True
    hands_on = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return (
        hands_on
        and bool(getattr(getattr(model, "config", None), "use_cache", False))
        and any("use_cache" in inspect.signature(m.forward).parameters for m in model.modules())
    )


def refuse_router_losses(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Refuse a model that is asked to collect router losses from its layers.

    Raises:
        ValueError: its config or the batch asks for them.
    """
    config = getattr(model, "config", None)
    configs = [config, getattr(config, "text_config", None)]
    asked = bool(batch.get("output_router_logits")) or any(
        getattr(one, "output_router_logits", False) for one in configs
    )
    if asked:
        raise CutError(
            f"{type(model).__name__} is set to collect router losses from all layers "
            "(output_router_logits). The relay does not keep what single layers return; set "
            "output_router_logits=False."
        )


def collected(holders: Iterable[nn.Module], batch: Mapping[str, Any]) -> str | None:
    """The option by which a batch, or the config of a module, asks for what layers return."""
    configs = [getattr(one, "config", None) for one in holders]
    for name in ("output_hidden_states", "output_attentions"):
        asked = batch.get(name)
        if asked or (asked is None and any(getattr(one, name, False) for one in configs)):
            return name
    return None
