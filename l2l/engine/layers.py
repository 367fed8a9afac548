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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import nn
from typing_extensions import override

from l2l.checkpoint import Expected
from l2l.engine.condition import Condition
from l2l.engine.guard import Guard, guarded
from l2l.engine.resources import expect, server_bytes
from l2l.model import LayerList, Partition, UnitTensors, format_of, mean, own_numbers
from l2l.parameter_server import Members, Move, PrecisionPolicy, UnitForm, nothing_like

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

    def __init__(self, condition: Condition, guard: Guard) -> None:
        """Nothing happens yet."""
        self._condition, self._guard = condition, guard
        self._given = [len(self), list(self.frozen)]

    def _modules(self) -> list[nn.Module]:
        paths = self._condition.network.partition.layer_paths
        return [self._condition.has.model.get_submodule(path) for path in paths]

    def __len__(self) -> int:
        return len(self._modules())

    @override
    def __repr__(self) -> str:
        frozen = self.frozen
        also = f", frozen: {', '.join(map(str, frozen))}" if frozen else ""
        return f"<{len(self)} layers{also}>"

    @property
    def frozen(self) -> tuple[int, ...]:
        """Layers of which nothing is trained."""
        layers = enumerate(self._modules())
        return tuple(i for i, one in layers if not any(p.requires_grad for p in one.parameters()))

    @property
    def origins(self) -> tuple[int | None, ...]:
        """See [Note: origins]."""
        return self._condition.origins

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
        if (module is None) == (copy_of is None):
            raise ValueError("insert takes either a module or copy_of=, the index of a layer.")
        if not 0 <= position <= len(self):
            raise ValueError(f"position={position}; expected 0 to {len(self)}.")
        if copy_of is not None:
            place = self._copy(self._index(copy_of, "copy_of"), moments)
        else:
            assert module is not None
            _refuse_stranger(module, self._modules())
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
        copies = tuple(self._copy(index, moments) for index in range(len(self)))
        self._change(self._layout() + (factor - 1) * copies)

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
        origins, frozen, own = state["origins"], state["frozen"], self.state()
        is_here = (list(origins), list(frozen)) == (own["origins"], own["frozen"])
        if is_here or list(state["given"]) != self._given:
            return None
        present = {origin: index for index, origin in reversed(list(enumerate(self.origins)))}
        unknown = [i for i, origin in enumerate(origins) if origin is None or origin not in present]
        if unknown:
            raise ValueError(
                f"it has {len(origins)} layers, and layer {unknown[0]} is not a copy of any layer "
                "of this engine. Insert the same modules as before the save, then load."
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
        layout = list(self._layout())
        for index in [layers] if isinstance(layers, int) else layers:
            place = layout[self._index(index, "layer")]
            layout[index] = replace(place, frozen=frozen)
        self._change(tuple(layout))

    def _layout(self) -> Layout:
        return tuple(Place(source=i, origin=origin) for i, origin in enumerate(self.origins))

    def _copy(self, index: int, moments: str) -> Place:
        expect("moments", moments, "copied", "fresh")
        keeps = moments == "copied"
        return Place(source=index, is_copy=True, keeps_state=keeps, origin=self.origins[index])

    def _index(self, index: int, name: str) -> int:
        if not 0 <= index < len(self):
            raise ValueError(f"{name}={index}, but there are layers 0 to {len(self) - 1}.")
        return index

    @guarded("a change of engine.layers")
    def _change(self, layout: Layout) -> None:
        change(self._condition, layout)


# --------------------------------------------------------------------------------------------------
# The engine


def change(condition: Condition, layout: Layout) -> None:
    """Bring an engine to other layers, between steps; if that cannot be, nothing has changed.

    Raises:
        ValueError: it cannot be.
    """
    has, network, old = condition.has, condition.network, condition.network.partition
    condition.refuse_if_unusable()
    condition.refuse_if_averaged("a change of engine.layers")
    _refuse(condition, layout)
    network.persistence.finish()
    condition.finish_step()
    network.leave()
    network.give_back_buffers()
    with changed_model(has.model, old.lists, layout):
        partition, members, forms = _with_layers(condition, layout, has.precision)
        has.host_budget.check(server_bytes(forms, has.policy, has.world), alternatives={})
        has.transfer.let_go_of_staging()
        units = zip(layout, forms, partition.layer_tensors, strict=False)  # layers come first
        has.server.rearrange([_move_to(*unit, old) for unit in units])
    # The model and the server have the new layers now; everything else follows.
    has.optimizer.regroup(members)
    condition.follow(partition, tuple(place.origin for place in layout))
    has.planning.adapt(partition, {form.name: form for form in forms})


def expected_with(condition: Condition, layout: Layout | None, *, link: str) -> Expected:
    """What a checkpoint of a precision must hold if the engine had these layers.

    Raises:
        ValueError: it cannot have them.
    """
    has, partition = condition.has, condition.network.partition
    forms = [unit.form for unit in has.server.units.values()]
    precision = PrecisionPolicy.for_model(has.model, precision=link)
    if layout is not None:
        _refuse(condition, layout)
        with changed_model(has.model, partition.lists, layout, keep=False):
            partition, _, forms = _with_layers(condition, layout, precision)
    elif precision != has.precision:
        known = {form.name: form for form in forms}
        forms = [
            replace(
                form,
                state_kinds=known[form.name].state_kinds,
                state_layouts=known[form.name].state_layouts,
            )
            for form in has.forms(partition, precision)
        ]
    return Expected(
        forms={form.name: form for form in forms},
        outer_buffers=condition.network.partition.skeleton.buffers(),
        layer_buffers={k: v for one in partition.layer_tensors for k, v in one.buffers.items()},
    )


def _refuse(condition: Condition, layout: Layout) -> None:
    """Refuse layers that the engine cannot have."""
    condition.depth.check(len(layout))
    if condition.has.server.disk is not None:
        raise ValueError(
            "layers cannot be changed while optimizer state may be on disk. Make the engine "
            "without disk=, or from a model that has these layers."
        )
    condition.has.turns.take(condition)
    is_shared, network = condition.has.world.share.number > 1, condition.network
    if is_shared and any(place.frozen is not None for place in layout):
        raise ValueError(
            "layers cannot be frozen or thawed now: several ranks hold shares of them, which "
            "depend on what is frozen. Freeze them before creating the engine."
        )
    for position, place in enumerate(layout):
        if place.module is not None and network.facts.rows:  # else nothing is known of its place
            network.trial.refuse_layer(place.module, position, network.facts.rows)


def _with_layers(
    condition: Condition, layout: Layout, precision: PrecisionPolicy
) -> tuple[Partition, Members, list[UnitForm]]:
    """What the model, which has these layers now, is made of."""
    has, old = condition.has, condition.network.partition
    names = [one.name for one in old.lists]
    new = Partition(
        has.model,
        layers=names,
        old=old,
        own_loss=has.loss is None,
        gradient_hooks=has.gradients is not None,
    )
    # For the parameters of the new layers, those that they are alike, if any.
    like: dict[nn.Parameter, nn.Parameter | None] = {}
    for place, tensors in zip(layout, new.layer_tensors, strict=True):
        like |= dict.fromkeys(tensors.parameters.values())
        if place.source is not None:
            theirs = old.layer_tensors[place.source].parameters.values()
            like |= zip(tensors.parameters.values(), theirs, strict=True)
    members = has.optimizer.members_of(has.model, like)
    return new, members, has.forms(new, precision, members)


def _move_to(place: Place, form: UnitForm, tensors: UnitTensors, old: Partition) -> Move:
    """What becomes of a layer's unit when the layers change."""
    names: dict[str, str] = {}
    if place.source is not None:
        theirs = old.layer_tensors[place.source]
        names = dict(zip(tensors.parameters, theirs.parameters, strict=True))
        names |= zip(tensors.buffers, theirs.buffers, strict=True)
    return Move(
        form=form,
        source=None if place.source is None else f"L{place.source}",
        is_copy=place.is_copy,
        keeps_state=place.keeps_state,
        names=names,
        tensors=tensors,
    )


def _refuse_stranger(module: nn.Module, others: list[nn.Module]) -> None:
    """Refuse a module that cannot be called as the layers are, or that is one of them."""
    if any(module is one for one in others):
        raise ValueError("the module is in the model already. Use copy_of= for a copy of it.")
    hollow = [name for name, p in module.named_parameters() if p.is_meta]
    if hollow:
        raise ValueError(f"parameter {hollow[0]!r} is on the meta device. Initialize its weights.")
    wanted = inspect.signature(others[0].forward).parameters
    found = inspect.signature(module.forward).parameters
    if any(one.kind is one.VAR_KEYWORD for one in found.values()):
        return
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [name for name, one in list(wanted.items())[1:] if one.kind in plain]
    missing = [name for name in named if name not in found]
    if missing:
        raise ValueError(
            f"{type(module).__name__}.forward takes ({', '.join(found)}), layers are called with "
            f"({', '.join(wanted)}). Expected it to take {', '.join(missing)}, too, or **kwargs."
        )


# --------------------------------------------------------------------------------------------------
# The model


@contextlib.contextmanager
def changed_model(
    model: nn.Module, lists: Sequence[LayerList], layout: Layout, *, keep: bool = True
) -> Iterator[None]:
    """The model with other layers: inside the block, and after it if it is kept and has not failed.

    Raises:
        ValueError: it cannot have them.
    """
    modules = [model.get_submodule(path) for one in lists for path in one.paths]
    numbering, made = own_numbers(modules), [_module_for(place, modules) for place in layout]
    changes: list[tuple[Any, str, Any]] = []
    if made != modules:
        container = _container(model, lists)
        changes = _config_changes(model, len(modules), layout)
        changes.append((container, "_modules", {str(i): module for i, module in enumerate(made)}))
    with contextlib.ExitStack() as undo:
        for owner, name, value in changes:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        if made != modules:
            undo.callback(_number, modules, numbering)
            _number(made, numbering)
        for place, module in zip(layout, made, strict=True):
            for parameter in module.parameters() if place.frozen is not None else ():
                undo.callback(_set_flag, parameter, parameter.requires_grad)
                _set_flag(parameter, not place.frozen and parameter.is_floating_point())
        yield
        if keep:
            undo.pop_all()


def _container(model: nn.Module, lists: Sequence[LayerList]) -> nn.Module:
    """The list that layers come into and go from."""
    if len(lists) == 1:
        found = model.get_submodule(lists[0].name)
        if isinstance(found, nn.ModuleList | nn.Sequential):
            return found
    raise ValueError(
        "layers can be inserted and removed where the model has one list of them; this one has "
        f"{', '.join(one.name for one in lists)}. Change the model, then make a new engine."
    )


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
    memo: dict[int, Any] = {id(one): _hollow_like(one) for one in module.parameters()}
    shared = [value for child in module.modules() for value in vars(child).values()]
    memo |= {id(value): value for value in shared if _is_shared(value)}
    return copy.deepcopy(module, memo)


def _hollow_like(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(nothing_like(parameter), requires_grad=parameter.requires_grad)
    mean(made, format_of(parameter))
    return made


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


def _config_changes(
    model: nn.Module, number: int, layout: Layout
) -> list[tuple[object, str, object]]:
    """Configs that must have the new number of layers, or a list with an entry for each.

    Raises:
        ValueError: a list has different entries, and it is not known which is a new module's.
    """
    changes: list[tuple[object, str, object]] = []
    found = {id(one): one for module in model.modules() if (one := getattr(module, "config", None))}
    for config in found.values():
        for name, value in vars(config).items():
            if name in COUNTS and value == number:
                changes.append((config, name, len(layout)))
            elif isinstance(value, list) and len(value) == number and not name.startswith("_"):
                changes.append((config, name, [_entry(name, value, place) for place in layout]))
    return changes


def _entry(name: str, entries: list[Any], place: Place) -> Any:
    """What a config's list says of a layer."""
    if place.source is not None:
        return entries[place.source]
    assert place.module is not None
    for child in place.module.modules() if name == "layer_types" else ():
        for key in ("layer_type", "attention_type"):
            if key in vars(child):
                return vars(child)[key]
    if any(one != entries[0] for one in entries):
        raise ValueError(
            f"config.{name} has one value per layer, and there is no value for a new "
            f"{type(place.module).__name__}. Insert a copy of an existing layer instead (copy_of=)."
        )
    return entries[0]
