"""Layers that come and go between steps: what a network is made of is data.

    engine.layers.insert(3, copy_of=2)     a copy of layer 2, with its optimizer state, before 3
    engine.layers.insert(3, module)        a module of one's own
    engine.layers.remove(0)
    engine.layers.grow(2)                  0 1 2 becomes 0 1 2 0 1 2
    engine.layers.freeze([0, 1])           no gradients, no moments; thaw() trains them again

Each of these is one `Layout`: for every place of the new network, where its layer comes from. The
model follows (its list of modules, the numbers that layers have of themselves, its config), then
the parameter server, whose units move to their new names without being copied, then the plan. A
change that cannot be is refused before anything has changed.

[Note: origins] A checkpoint names, for every layer, the layer of the given model that it was copied
from. An engine that is made anew from that model can so be brought to the same layers before the
tensors are loaded. A module that was inserted has no origin there: it must be inserted again first.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn
from typing_extensions import override

from l2l.model import own_numbers
from l2l.parameter_server import nothing_like

COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "decoder_layers")
"""What configs call the number of layers."""
NUMBERS = ("idx", "index", "layer_id", "number", "depth")
"""What is in the names of attributes in which layers keep their own number."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One layer of a network to be."""

    source: int | None  # the present layer that it is, or is copied from; None: a new module
    is_copy: bool = False
    keeps_state: bool = True  # whether a copy has the optimizer state of what it is copied from
    module: nn.Module | None = None
    frozen: bool | None = None  # None: as it is
    origin: int | None = None  # see [Note: origins]


Layout = tuple[Place, ...]


@final
class Layers:
    """The layers of an engine, as they are now: `engine.layers`."""

    def __init__(self, modules: Callable[[], nn.Module], change: Callable[[Layout], None]) -> None:
        """Nothing happens yet.

        Args:
            modules: the model's list of layers.
            change: brings the engine to other layers.
        """
        self._modules = modules
        self._change = change
        self.origins: tuple[int | None, ...] = tuple(range(len(self)))
        self._given = [len(self), list(self.frozen)]

    def __len__(self) -> int:
        return len(list(self._modules().children()))

    @override
    def __repr__(self) -> str:
        frozen = self.frozen
        also = f", frozen: {', '.join(map(str, frozen))}" if frozen else ""
        return f"<{len(self)} layers{also}>"

    @property
    def frozen(self) -> tuple[int, ...]:
        """Layers of which nothing is trained."""
        children = enumerate(self._modules().children())
        return tuple(i for i, one in children if not any(p.requires_grad for p in one.parameters()))

    def insert(
        self,
        position: int,
        module: nn.Module | None = None,
        *,
        copy_of: int | None = None,
        moments: str = "copied",
    ) -> None:
        """Put a layer before the one that is now at `position`, or after the last.

        Args:
            position: from 0 to the number of layers.
            module: a layer with weights, called as the others are.
            copy_of: the index of a layer to copy instead.
            moments: "copied" or "fresh": the optimizer state of a copy.

        Raises:
            ValueError: it cannot be; nothing has changed.
        """
        number = len(self)
        if (module is None) == (copy_of is None):
            raise ValueError("insert takes either a module or copy_of=, the index of a layer.")
        if not 0 <= position <= number:
            raise ValueError(f"position={position}; expected 0 to {number}.")
        if copy_of is not None:
            place = self._copy(self._index(copy_of, "copy_of"), moments)
        else:
            assert module is not None
            _refuse_stranger(module, list(self._modules().children()))
            place = Place(source=None, module=module)
        own = self._layout()
        self._change((*own[:position], place, *own[position:]))

    def remove(self, position: int) -> None:
        """Drop a layer, its weights and its optimizer state.

        Raises:
            ValueError: there is no such layer, or no other.
        """
        position, own = self._index(position, "position"), self._layout()
        if len(own) == 1:
            raise ValueError("the only layer cannot be removed. Expected one to be left.")
        self._change((*own[:position], *own[position + 1 :]))

    def grow(self, factor: int = 2, *, moments: str = "copied") -> None:
        """Stack the network on top of itself so many times.

        Args:
            factor: how many times as many layers there will be.
            moments: "copied" or "fresh": the optimizer state of the copies.

        Raises:
            ValueError: the factor is below 2.
        """
        if factor < 2:
            raise ValueError(f"factor={factor}; expected at least 2.")
        own = self._layout()
        copies = tuple(self._copy(index, moments) for index in range(len(own)))
        self._change(own + (factor - 1) * copies)

    def freeze(self, layers: int | Iterable[int]) -> None:
        """Train some layers no longer: they keep their weights in the link's precision, no state.

        Raises:
            ValueError: there is no such layer.
        """
        self._set_frozen(layers, frozen=True)

    def thaw(self, layers: int | Iterable[int]) -> None:
        """Train some layers again, all of their parameters, with fresh optimizer state.

        Raises:
            ValueError: there is no such layer.
        """
        self._set_frozen(layers, frozen=False)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: see [Note: origins]."""
        return {"origins": list(self.origins), "frozen": list(self.frozen), "given": self._given}

    def layout_of(self, state: Mapping[str, Any]) -> Layout | None:
        """What a checkpoint has: copies of layers whose contents will be loaded.

        Returns:
            None: there is nothing to do, or the checkpoint began with another model.

        Raises:
            ValueError: a layer has no origin here ([Note: origins]).
        """
        origins, frozen = state["origins"], state["frozen"]
        is_here = list(origins) == list(self.origins) and list(frozen) == list(self.frozen)
        if is_here or list(state["given"]) != self._given:
            return None
        present = {origin: index for index, origin in reversed(list(enumerate(self.origins)))}
        unknown = [i for i, origin in enumerate(origins) if origin is None or origin not in present]
        if unknown:
            raise ValueError(
                f"it has {len(origins)} layers, of which layer {unknown[0]} is no copy of one that "
                "this engine has. Insert the same modules as before it was saved, then load."
            )
        sources = [present[origin] for origin in origins]
        return tuple(
            Place(
                source=source,
                is_copy=source in sources[:index],
                # None also where only some parameters of a layer are trained
                frozen=None if (index in frozen) == (source in self.frozen) else index in frozen,
                origin=origins[index],
            )
            for index, source in enumerate(sources)
        )

    def _set_frozen(self, layers: int | Iterable[int], *, frozen: bool) -> None:
        given = [layers] if isinstance(layers, int) else list(layers)
        chosen = {self._index(index, "layer") for index in given}
        own = self._layout()
        self._change(
            tuple(
                replace(place, frozen=frozen) if index in chosen else place
                for index, place in enumerate(own)
            )
        )

    def _layout(self) -> Layout:
        return tuple(Place(source=i, origin=origin) for i, origin in enumerate(self.origins))

    def _copy(self, index: int, moments: str) -> Place:
        if moments not in ("copied", "fresh"):
            raise ValueError(f"moments={moments!r} is not known. Expected 'copied' or 'fresh'.")
        keeps = moments == "copied"
        return Place(source=index, is_copy=True, keeps_state=keeps, origin=self.origins[index])

    def _index(self, index: int, name: str) -> int:
        if not 0 <= index < len(self):
            raise ValueError(f"{name}={index}, but there are layers 0 to {len(self) - 1}.")
        return index


def _refuse_stranger(module: nn.Module, others: list[nn.Module]) -> None:
    """Refuse a module that cannot be called as the layers are, or that is one of them."""
    if any(module is one for one in others):
        raise ValueError("the module is in the model already. Use copy_of= for a copy of it.")
    hollow = [name for name, p in module.named_parameters() if p.is_meta]
    if hollow:
        raise ValueError(f"the module's {hollow[0]!r} is on the meta device. Expected weights.")
    wanted = inspect.signature(others[0].forward).parameters
    found = inspect.signature(module.forward).parameters
    if any(one.kind is one.VAR_KEYWORD for one in found.values()):
        return
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    missing = [name for name, one in list(wanted.items())[1:] if one.kind in plain]
    missing = [name for name in missing if name not in found]
    if missing:
        raise ValueError(
            f"{type(module).__name__}.forward takes ({', '.join(found)}), the model's layers are "
            f"called with ({', '.join(wanted)}). Expected it to take {', '.join(missing)}, too, or "
            "**kwargs."
        )


# --------------------------------------------------------------------------------------------------
# The model


@contextlib.contextmanager
def changed_model(
    model: nn.Module, list_name: str, layout: Layout, *, keep: bool = True
) -> Iterator[list[nn.Module]]:
    """The model with other layers: inside the block, and after it if it is kept and has not failed.

    Raises:
        ValueError: it cannot have them.
    """
    container = model.get_submodule(list_name)
    old = dict(container._modules)
    modules = [one for one in old.values() if one is not None]
    numbering = own_numbers(modules)
    made = [_module_for(place, modules) for place in layout]
    flags = {p: p.requires_grad for module in modules for p in module.parameters()}
    restore = _changed_config(model, len(modules), layout)
    container._modules = {str(index): module for index, module in enumerate(made)}
    _number(made, numbering)
    for place, module in zip(layout, made, strict=True):
        if place.frozen is not None:
            for parameter in module.parameters():
                _set_flag(parameter, not place.frozen and parameter.is_floating_point())
    try:
        yield made
    except BaseException:
        keep = False
        raise
    finally:
        if not keep:
            container._modules = old
            _number(modules, numbering)
            restore()
            for parameter, requires in flags.items():
                _set_flag(parameter, requires)


def _set_flag(parameter: nn.Parameter, requires_grad: bool) -> None:  # noqa: FBT001
    with torch._C.DisableTorchFunctionSubclass():  # held parameters refuse this to everybody else
        parameter.requires_grad_(requires_grad)


def _module_for(place: Place, modules: list[nn.Module]) -> nn.Module:
    if place.source is None:
        assert place.module is not None
        return place.module
    module = modules[place.source]
    if not place.is_copy:
        return module
    # Weights are in the server. Configs and the like are one for all layers.
    memo: dict[int, Any] = {
        id(one): nn.Parameter(nothing_like(one), requires_grad=one.requires_grad)
        for one in module.parameters()
    }
    shared = [value for child in module.modules() for value in vars(child).values()]
    memo |= {id(value): value for value in shared if _is_shared(value)}
    return copy.deepcopy(module, memo)


def _is_shared(value: object) -> bool:
    """Whether copies of a layer use the very same object: one of a class that is not torch's."""
    plain = (nn.Module, torch.Tensor, dict, list, tuple, set, str, int, float, type(None))
    return not isinstance(value, plain)


def _number(modules: list[nn.Module], numbering: Iterable[tuple[str, str]]) -> None:
    """Tell every layer its number, where layers know it."""
    named = [(path, name) for path, name in numbering if any(word in name for word in NUMBERS)]
    for index, module in enumerate(modules):
        for path, name in named:
            with contextlib.suppress(AttributeError):  # a module of another kind
                owner = module.get_submodule(path)
                if name in vars(owner):
                    vars(owner)[name] = index


def _changed_config(model: nn.Module, number: int, layout: Layout) -> Callable[[], None]:
    """Let the config have the new number of layers, and lists with an entry for each; undoes it.

    Raises:
        ValueError: a list has different entries, and it is not known which is a new module's.
    """
    changes: list[tuple[Any, str, Any]] = []
    found = {id(one): one for module in model.modules() if (one := getattr(module, "config", None))}
    for config in found.values():
        for name, value in vars(config).items():
            if name in COUNTS and value == number:
                changes.append((config, name, len(layout)))
            elif isinstance(value, list) and len(value) == number and not name.startswith("_"):
                entries = [_entry(name, value, place) for place in layout]
                changes.append((config, name, entries))
    before = [(config, name, getattr(config, name)) for config, name, _ in changes]
    _set(changes)
    return lambda: _set(before)


def _set(values: Iterable[tuple[Any, str, Any]]) -> None:
    for owner, name, value in values:
        setattr(owner, name, value)


def _entry(name: str, entries: list[Any], place: Place) -> Any:
    """What a config's list says of a layer."""
    if place.source is not None:
        return entries[place.source]
    assert place.module is not None
    known = [vars(child) for child in place.module.modules()] if name == "layer_types" else []
    for own in known:
        for key in ("layer_type", "attention_type"):
            if key in own:
                return own[key]
    if any(one != entries[0] for one in entries):
        raise ValueError(
            f"config.{name} differs from layer to layer, and it is not known what it is for "
            f"{type(place.module).__name__}. Expected a copy of a layer: copy_of=."
        )
    return entries[0]
