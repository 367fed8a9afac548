"""What layers leave besides what they return.

transformers collects router logits, hidden states and attentions with hooks on modules inside
layers, into lists that are open while the model's own code runs. Other layers write into a dict
that they are given: shared keys and values. A layer of ours runs at another time. So its run gets
lists and dicts of its own, and what was put there counts as part of what the layer returns; a stub
puts it into the lists and dicts of the code around it.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

COLLECTING = ("output_hidden_states", "output_attentions", "output_router_logits")
HOOK = "output_capturing_hook"
COLLECTING_HOOKS = "_collecting"  # the attribute of a layer that has them while they are off
Left = tuple[dict[str, list[Any]], dict[Any, dict[Any, Any]]]
"""By name, what hooks of a layer have collected, and what it has written into dicts."""
Open = tuple[tuple[str, Any], ...]
"""Lists that were open where a layer was called: their names, and how much was in them."""


def _module() -> Any:
    return sys.modules.get("transformers.utils.output_capturing")


def hooked_copy(model: nn.Module, make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """A copy of a model of transformers whose modules collect, as it would have them do itself."""
    # A model of transformers has these modules loaded; nobody else needs them.
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if _module() is None or kind is None:
        return model
    if not any(isinstance(module, kind) for module in model.modules()):
        return model
    made = make(model)
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
    layer.__dict__[COLLECTING_HOOKS] = [(module, mine) for module, mine in found if mine]


def open_lists() -> Open:
    """The lists that are open here."""
    found = _module()
    lists = None if found is None else found._active_collector.get()
    if not lists:
        return ()
    return tuple((k, len(v) if isinstance(v, list) else v) for k, v in lists.items())


def stores_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Any, Any]:
    """Dicts among the arguments of a layer, by place or name."""
    named = [*enumerate(args), *kwargs.items()]
    return {name: value for name, value in named if isinstance(value, dict | UserDict)}


def leaves_more(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a layer that is called here may leave something besides what it returns."""
    return bool(stores_of(args, kwargs)) or bool(open_lists())


def emit(left: Left, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Put what a layer has left into the lists that are open here, and into its arguments."""
    captured, written = left
    lists = _module()._active_collector.get() or {} if captured else {}
    for name, tensors in captured.items():
        lists[name].extend(tensors)
    stores = stores_of(args, kwargs)
    for name, entries in written.items():
        stores[name].update(entries)


def run_layer(layer: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], lists: Open) -> Any:
    """What a layer returns; if it may leave more, with that (`Left`). Its arguments stay."""
    stores = stores_of(args, kwargs)
    if not lists and not stores:
        return layer(*args, **kwargs)
    own = {name: copy.copy(store) for name, store in stores.items()}
    args = [own.get(place, value) for place, value in enumerate(args)]
    kwargs = {name: own.get(name, value) for name, value in kwargs.items()}
    with collecting(layer, lists) as captured:
        value = layer(*args, **kwargs)
    written = {
        name: {k: v for k, v in mine.items() if k not in stores[name] or v is not stores[name][k]}
        for name, mine in own.items()
    }
    return value, (captured, {name: entries for name, entries in written.items() if entries})


@contextlib.contextmanager
def collecting(layer: nn.Module, lists: Open) -> Iterator[dict[str, list[Any]]]:
    """Let a layer's hooks inside the block find such lists; gives what they add to them."""
    mine: dict[str, Any] = {k: [None] * n if isinstance(n, int) else n for k, n in lists}
    captured: dict[str, list[Any]] = {}
    if not lists:
        yield captured
        return
    collector = _module()._active_collector
    hooks = layer.__dict__.get(COLLECTING_HOOKS, ())
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


if UserDict not in pytree.SUPPORTED_NODES:  # what is in one is seen, as what is in a dict
    pytree.register_pytree_node(
        UserDict,
        lambda store: (list(store.values()), list(store)),
        lambda values, names: UserDict(zip(names, values, strict=True)),
    )
