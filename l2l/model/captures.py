"""What transformers collects from inside layers: router logits, hidden states, attentions.

Its models collect with hooks on modules inside their layers, into lists that are open while the
model's own code runs. A layer of ours runs at another time. So its run gets lists of its own, and
what the hooks have put there counts as part of what the layer returns; a stub puts it into the
lists of the code around it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

COLLECTING = ("output_hidden_states", "output_attentions", "output_router_logits")
HOOK = "output_capturing_hook"
Open = tuple[tuple[str, Any], ...]
"""Lists that were open where a layer was called: their names, and how much was in them."""


def _module() -> Any:
    return sys.modules.get("transformers.utils.output_capturing")


def hooked_copy(model: nn.Module, copy: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """A copy of a model of transformers whose modules collect, as it would have them do itself."""
    # A model of transformers has these modules loaded; nobody else needs them.
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if _module() is None or kind is None:
        return model
    if not any(isinstance(module, kind) for module in model.modules()):
        return model
    made = copy(model)
    for module in made.modules():  # a part that has run may have its hooks already
        module.__dict__.pop("_output_capturing_hooks_installed", None)
        _take_off(module)
    for module in made.modules():
        if isinstance(module, kind):
            _module().maybe_install_capturing_hooks(module)
    return made


def _take_off(module: nn.Module) -> dict[int, Any]:
    """A module's hooks that collect, which it has no more."""
    mine = {k: h for k, h in module._forward_hooks.items() if getattr(h, "__name__", "") == HOOK}
    for key in mine:
        del module._forward_hooks[key]
    return mine


def take_hooks_off(layer: nn.Module) -> None:
    """Let a layer run without its hooks that collect, but where lists are open."""
    found = ((module, _take_off(module)) for module in layer.modules())
    layer.__dict__["_collecting"] = [(module, mine) for module, mine in found if mine]


def open_lists() -> Open:
    """The lists that are open here."""
    found = _module()
    lists = None if found is None else found._active_collector.get()
    if not lists:
        return ()
    return tuple((k, len(v) if isinstance(v, list) else v) for k, v in lists.items())


def emit(captured: dict[str, list[Any]]) -> None:
    """Put what a layer's hooks have collected into the lists that are open here."""
    lists = _module()._active_collector.get() or {}
    for name, tensors in captured.items():
        lists[name].extend(tensors)


@contextlib.contextmanager
def collecting(layer: nn.Module, lists: Open) -> Iterator[dict[str, list[Any]]]:
    """Let a layer's hooks inside the block find such lists; gives what they add to them."""
    mine: dict[str, Any] = {k: [None] * n if isinstance(n, int) else n for k, n in lists}
    captured: dict[str, list[Any]] = {}
    collector = _module()._active_collector
    hooks = layer.__dict__.get("_collecting", ())
    token = collector.set(mine)
    try:
        for module, own in hooks:
            module._forward_hooks.update(own)
        yield captured
    finally:
        collector.reset(token)
        for module, own in hooks:
            for key in own:
                module._forward_hooks.pop(key, None)
    captured |= {k: mine[k][n:] for k, n in lists if isinstance(n, int)}
