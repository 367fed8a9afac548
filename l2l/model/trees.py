"""Module trees of ours: the skeleton with a stub in the place of every layer, and single layers.

Their tensors are bound from outside, so a tree sees whatever weights are there at the moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from l2l.model.format import Format, format_of
from l2l.model.held import is_held
from l2l.model.modules import HOOKS, CutError
from l2l.model.structures import attributes_of

Handler = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""What a stub's call becomes: the layer's number, and what it is given."""
APART = "Layers run apart from the model"


@final
class Stub(nn.Module):
    """Stands where a layer stood; answers questions about the layer's attributes."""

    def __init__(self, index: int, layer: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)
        object.__setattr__(self, "_handler", None)
        object.__setattr__(self, "_written", frozenset())
        self._index = index

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the call to whoever runs the skeleton."""
        handler: Handler = self.__dict__["_handler"]
        return handler(self._index, args, kwargs)

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in self.__dict__["_written"]:
                raise CutError(
                    f"the model reads {name!r} of layer {self._index}, which the layer writes when "
                    f"it runs. {APART}: return what the model needs as part of the hidden state."
                ) from None
            return getattr(self.__dict__["_layer"], name)

    @override
    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """To the model's own code, those of the layer: their weights refuse to be read."""
        if self.__dict__.get("_handler") is None:
            yield from super().named_modules(memo, prefix, remove_duplicate)
        else:
            yield from layer_of(self).named_modules(memo, prefix, remove_duplicate)

    def _refuse_parts(self, *_: object) -> NoReturn:
        raise CutError(
            f"the model iterates over or indexes layer {self._index}. Each layer must be called as "
            "a whole: combine its parts into one module with a forward method."
        )

    __iter__ = __getitem__ = _refuse_parts

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_handler") is not None and name != "training":
            raise CutError(
                f"the model sets {name!r} of layer {self._index} while it runs. {APART}: pass it "
                "to them as an argument."
            )
        super().__setattr__(name, value)

    def layer_state(self) -> tuple[list[int], dict[tuple[str, str], Any]]:
        """Modules, tensors and hooks of the user's layer now, by identity, and its attributes."""
        layer = layer_of(self)
        found = list(layer.modules())
        registries = [one for module in found for one in (module._parameters, module._buffers)]
        registries += [getattr(module, name) for module in found for name in HOOKS]
        held = [one for registry in registries for one in registry.values()]
        return [*map(id, [*found, *held])], attributes_of(layer)

    def note_written(self, names: Collection[str]) -> None:
        """The layer writes these attributes of its own when it runs."""
        self.__dict__["_written"] = frozenset(names)


def layer_of(stub: Stub) -> nn.Module:
    """The user's layer that a stub stands for.

    Not a property: the model's code may ask a stub for any attribute of the layer.
    """
    layer: nn.Module = stub.__dict__["_layer"]
    return layer


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTensors:
    """The user's tensors that belong to one unit, by owner."""

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    formats: dict[str, Format] = field(default_factory=dict)  # of parameters that are not plain


@final
class Part:
    """A module tree of ours whose tensors are bound from outside: the skeleton, or one layer.

    An owner is a tensor's name in the whole model; tied parameters have one owner.
    """

    def __init__(self, module: nn.Module, owners: Mapping[int, str]) -> None:
        """`owners` are by `id` of the tensors that the tree has now."""
        self.module = module
        self.given_modes = [(child, child.training) for child in module.modules()]
        """Every module, and whether the user's was in training mode."""
        self.tensors = UnitTensors(
            parameters={owners[id(parameter)]: parameter for parameter in module.parameters()},
            buffers={owners[id(buffer)]: buffer for buffer in module.buffers()},
        )
        known = ((owner, format_of(one)) for owner, one in self.tensors.parameters.items())
        self.tensors.formats.update({owner: one for owner, one in known if one is not None})
        parameters = module.named_parameters(remove_duplicate=False)
        named = [*parameters, *module.named_buffers(remove_duplicate=False)]
        self.names = {name: owners[id(tensor)] for name, tensor in named}  # in the tree -> owner
        self._places: list[tuple[nn.Module, dict[str, Any], str, str]] = [
            (child, registry, local, owners[id(tensor)])
            for child in module.modules()
            for registry in (child._parameters, child._buffers)
            for local, tensor in registry.items()
            if tensor is not None
        ]
        self._bound: set[str] = set()  # owners
        self._buffers = [place for place in self._places if place[1] is place[0]._buffers]

    def again(self, owner: str, tensor: Tensor) -> Tensor:
        """A tensor of the tree as an object of its own, with the same values."""
        found = self.tensors.formats.get(owner)
        return tensor.data if found is None else found.again(tensor)

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Let every lookup of the named tensors find these."""
        self._bound |= tensors.keys()
        for module, registry, local, owner in self._places:
            if owner in tensors:
                registry[local] = tensors[owner]
                if registry is module._parameters:  # a parametrization leaves it among buffers
                    module._buffers.pop(local, None)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Put back what the tree sees now; inside the block other tensors may be bound.

        Of the user's own parameters, which a compiler cannot look at while an engine holds them,
        only the shapes come back.
        """
        before = [(registry, local, registry[local]) for _, registry, local, _ in self._places]
        try:
            yield
        finally:
            for registry, local, tensor in before:
                is_own = tensor is not None and is_held(tensor)
                registry[local] = _shape_of(tensor) if is_own else tensor

    def let_go(self) -> None:
        """Hold no tensor that was bound: of each, the shape is seen."""
        for _, registry, local, owner in self._places:
            if owner in self._bound and registry[local] is not None:
                registry[local] = _shape_of(registry[local])
        self._bound.clear()

    def unbind(self) -> None:
        """Let go of every tensor."""
        for _, registry, local, _ in self._places:
            registry[local] = None

    def buffers(self) -> dict[str, Tensor]:
        """The buffers the tree sees now, by owner."""
        found = {owner: registry[local] for _, registry, local, owner in self._buffers}
        return {owner: buffer for owner, buffer in found.items() if buffer is not None}

    def assigned(self, bound: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Buffers that its code has put in the place of those that were bound, by owner.

        Raises:
            ValueError: one has another form than before.
        """
        found = {}
        for module, registry, local, owner in self._buffers:
            before, now = bound.get(owner), registry[local]
            if before is None or now is None or now is before:
                continue
            if now.shape == before.shape and now.dtype is before.dtype:
                found[owner] = now
            elif local not in module._non_persistent_buffers_set:
                raise CutError(
                    f"the model's code replaces buffer {owner!r}, {list(before.shape)} of "
                    f"{before.dtype}, by {list(now.shape)} of {now.dtype}. Expected buffers that "
                    "keep their shape and dtype; register those that are not state with "
                    "persistent=False."
                )
        return found

    def take_over(self, kept: Mapping[str, Tensor]) -> None:
        """Bind these buffers again, with the values of what the code has put in their place."""
        assigned = self.assigned(kept)
        for owner, buffer in assigned.items():
            kept[owner].copy_(buffer.detach())
        self.bind({owner: kept[owner] for owner in assigned})

    def set_training(self, training: bool, *, as_given: bool) -> None:  # noqa: FBT001
        """Set every module's mode; `as_given` restores the modes the user's modules had."""
        for child, given in self.given_modes:
            child.training = given if training and as_given else training


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
