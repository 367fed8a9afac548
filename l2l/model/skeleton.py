"""Module trees of ours: the skeleton with a stub in the place of every layer, and single layers.

Their tensors are bound from outside, so a tree sees whatever weights are there at the moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, final

from torch import Tensor, nn
from typing_extensions import override

from l2l.model.layer_list import CutError
from l2l.model.structures import attributes_of

Handler = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


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
                    "it runs. Layers run apart from the model: return what the model needs as part "
                    "of the hidden state."
                ) from None
            return getattr(self.__dict__["_layer"], name)

    def __iter__(self) -> NoReturn:
        self._refuse_parts()

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse_parts()

    def _refuse_parts(self) -> NoReturn:
        raise CutError(
            f"the model takes layer {self._index} apart. Expected layers that are called as a "
            "whole: put what belongs together into one module with a forward method."
        )

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_handler") is not None and name != "training":
            raise CutError(
                f"the model sets {name!r} of layer {self._index} while it runs. Layers run "
                "apart from the model: pass it to them as an argument."
            )
        super().__setattr__(name, value)

    def layer_state(self) -> tuple[list[int], dict[tuple[str, str], Any]]:
        """Which modules and tensors the user's layer has now, by identity, and its attributes."""
        layer = layer_of(self)
        found = list(layer.modules())
        registries = [one for module in found for one in (module._parameters, module._buffers)]
        tensors = [tensor for registry in registries for tensor in registry.values()]
        return [*map(id, [*found, *tensors])], attributes_of(layer)

    def note_written(self, names: Collection[str]) -> None:
        """The layer writes these attributes of its own when it runs."""
        self.__dict__["_written"] = frozenset(names)


def layer_of(stub: Stub) -> nn.Module:
    """The user's layer that a stub stands for.

    Not a property: the model's code may ask a stub for any attribute of the layer.
    """
    layer: nn.Module = stub.__dict__["_layer"]
    return layer


@contextlib.contextmanager
def answering(stubs: Sequence[Stub], handler: Handler) -> Iterator[None]:
    """Let calls of the stubs go to `handler` inside the block."""
    for stub in stubs:
        stub.__dict__["_handler"] = handler
    try:
        yield
    finally:
        for stub in stubs:
            stub.__dict__["_handler"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """One place in a module tree where a tensor is looked up."""

    module: nn.Module
    local: str
    owner: str  # the tensor's name in the whole model; tied parameters have one owner
    is_parameter: bool

    @property
    def registry(self) -> dict[str, Any]:
        """Where the module looks the tensor up."""
        return self.module._parameters if self.is_parameter else self.module._buffers


@final
class Part:
    """A module tree of ours whose tensors are bound from outside: the skeleton, or one layer."""

    def __init__(self, module: nn.Module, bindings: tuple[Binding, ...]) -> None:
        self.module = module
        self._bindings = bindings
        self._buffer_bindings = [one for one in bindings if not one.is_parameter]
        self._given_modes = [(child, child.training) for child in module.modules()]

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Let every lookup of the named tensors find these."""
        for binding in self._bindings:
            if binding.owner in tensors:
                binding.registry[binding.local] = tensors[binding.owner]

    def unbind(self) -> None:
        """Let go of every tensor."""
        for binding in self._bindings:
            binding.registry[binding.local] = None

    def buffers(self) -> dict[str, Tensor]:
        """The buffers the tree sees now, by owner."""
        return {
            binding.owner: buffer
            for binding in self._buffer_bindings
            if (buffer := binding.module._buffers[binding.local]) is not None
        }

    def assigned(self, bound: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Buffers that its code has put in the place of those that were bound, by owner.

        Raises:
            ValueError: one has another form than before.
        """
        found = {}
        for binding in self._buffer_bindings:
            before, now = bound.get(binding.owner), binding.module._buffers[binding.local]
            if before is None or now is None or now is before:
                continue
            if now.shape == before.shape and now.dtype is before.dtype:
                found[binding.owner] = now
            elif binding.local not in binding.module._non_persistent_buffers_set:
                raise CutError(
                    f"the model's code replaces buffer {binding.owner!r}, {list(before.shape)} of "
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

    def modes(self) -> list[tuple[nn.Module, bool]]:
        """Every module, and whether the user's was in training mode."""
        return self._given_modes

    def set_training(self, training: bool, *, as_given: bool) -> None:  # noqa: FBT001
        """Set every module's mode; `as_given` restores the modes the user's modules had."""
        for child, given in self._given_modes:
            child.training = given if training and as_given else training


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTensors:
    """The user's tensors that belong to one unit, by owner."""

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]


def bindings_of(tree: nn.Module, owners: Mapping[int, str]) -> tuple[Binding, ...]:
    """Every place in a module tree where a tensor is looked up."""
    found = []
    for module in tree.modules():
        for registry, is_parameter in ((module._parameters, True), (module._buffers, False)):
            found += [
                Binding(
                    module=module, local=local, owner=owners[id(tensor)], is_parameter=is_parameter
                )
                for local, tensor in registry.items()
                if tensor is not None
            ]
    return tuple(found)


def tensors_of(tree: nn.Module, owners: Mapping[int, str]) -> UnitTensors:
    """The tensors of a module tree by owner."""
    return UnitTensors(
        parameters={owners[id(parameter)]: parameter for parameter in tree.parameters()},
        buffers={owners[id(buffer)]: buffer for buffer in tree.buffers()},
    )


def tables_of(tree: nn.Module, owners: Mapping[int, str]) -> tuple[str, ...]:
    """Owners of the weights of embedding modules, each once."""
    found = [
        owners[id(module.weight)] for module in tree.modules() if isinstance(module, nn.Embedding)
    ]
    return tuple(dict.fromkeys(found))
