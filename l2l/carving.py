"""Cutting a model where it runs its list of layers, without knowing the model.

The model's own `forward` is the program. We copy the module tree shallowly (the *skeleton*), put a
stub in the place of every layer, and run it:

    model(**batch)          prologue            layers              epilogue
    -------------           --------            ------              --------
    embeddings, masks  -->  runs; the stubs     run by the relay    runs again; the last stub
    layer 0 .. n-1          record what each    with the recorded   delivers the relay's hidden
    norm, head, loss        layer was given     arguments           state: norm, head and loss
                            and stop the run                        are the model's own code

There is no table of model families. What a model must satisfy is checked while its stubs run: each
layer is called once, in order; a layer is handed exactly what the layer before it returned; nothing
but the next layer looks at that. A stub hands on a `HandedOn` tensor, which refuses to be computed
with, so a model that does something between layers, or collects hidden states, is refused by name
instead of being trained wrongly.

[Note: skip paths] The epilogue run repeats the prologue's computation with the same random numbers
and with gradients on. If the epilogue uses something of the prologue besides the hidden state, the
gradient of that path is found there, and nothing is lost.

[Note: returns] Some layers return a tensor, some a tuple. Before the first step one real layer of
each structure runs on a few rows (rehearsal.py); its return value tells how to wrap a hidden state.
Entries besides the hidden state are handed on as `NotKept`, and a layer that consumes one (T5's
position bias) is refused.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from l2l.layer_list import CutError, find_layers

Batch = Mapping[str, Any]
RunLayer = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]


class LayersDone(BaseException):
    """Raised by the last stub of a prologue run; not an error, so not an `Exception`."""


# --------------------------------------------------------------------------------------------------
# What the stubs hand on


METADATA = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_cpu")
} | {Tensor.size, Tensor.dim, Tensor.is_floating_point, Tensor.stride, Tensor.__len__, Tensor.numel}


class HandedOn(Tensor):
    """Stands for the hidden state between two layers; has its shape and refuses to be used."""

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about shape, refuse everything else."""
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise CutError(
            f"the model computes '{getattr(func, '__name__', func)}' on a hidden state outside its "
            "layers (between two of them, or by collecting the output of every layer). Expected "
            "each layer to get exactly what the one before it returned. Such models cannot be "
            "streamed layer by layer; turn off options that collect hidden states."
        )


@final
class NotKept:
    """Stands for an entry of a layer's return value besides the hidden state; not to be used."""

    def __init__(self, layer: int, entry: int) -> None:
        self.layer = layer
        self.entry = entry

    def _refuse(self, *_: object) -> NoReturn:
        raise CutError(
            f"the model uses entry {self.entry} of what layer {self.layer} returns. Only the "
            "hidden state, the first, goes from layer to layer: put what the loss needs into it."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __getitem__ = __float__ = _refuse

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """Refuse to be computed with."""
        del func, types
        found = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, NotKept))
        next(found)._refuse()


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns:
    """How layers of one structure wrap their hidden state ([Note: returns])."""

    spec: pytree.TreeSpec
    constants: tuple[Any, ...]  # for each leaf after the first: its value, or NotKept if a tensor

    @classmethod
    def learn(cls, value: Any, *, layer: int) -> Returns:
        """Read the form off a real return value."""
        leaves, spec = pytree.tree_flatten(value)
        if not leaves or not isinstance(leaves[0], Tensor):
            raise CutError(
                f"layer {layer} returned {type(value).__name__} that does not begin with a tensor. "
                "Expected the hidden state, alone or first in a tuple."
            )
        constants = tuple(
            NotKept(layer, entry) if isinstance(leaf, Tensor) else leaf
            for entry, leaf in enumerate(leaves[1:], start=1)
        )
        return cls(spec=spec, constants=constants)

    def wrap(self, hidden: Tensor) -> Any:
        """The return value of a layer whose hidden state is `hidden`."""
        return pytree.tree_unflatten([hidden, *self.constants], self.spec)

    @staticmethod
    def unwrap(value: Any) -> Tensor:
        """The hidden state in a layer's return value."""
        hidden = pytree.tree_leaves(value)[0]
        assert isinstance(hidden, Tensor)
        return hidden


# --------------------------------------------------------------------------------------------------
# What the stubs record


HIDDEN = object()


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """A tensor argument, by its place in the microbatch's list of recorded tensors."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How one layer was called: `HIDDEN`, recorded tensors and constants in their places."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    def arguments(
        self, hidden: Tensor, recorded: list[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with the tensors filled in."""
        filled = [
            hidden
            if leaf is HIDDEN
            else recorded[leaf.index]
            if isinstance(leaf, RecordedTensor)
            else leaf
            for leaf in self.leaves
        ]
        args, kwargs = pytree.tree_unflatten(filled, self.spec)
        return tuple(args), kwargs


@dataclass(slots=True)
class Recording:
    """What a prologue run yields for one microbatch."""

    hidden: Tensor | None = None
    tensors: list[Tensor] = field(default_factory=list)  # each once, whatever the number of layers
    calls: dict[int, Call] = field(default_factory=dict)
    _last: tuple[Any, Any, Tensor] | None = None

    def add(self, layer: int, args: Any, kwargs: Any, hidden: Tensor) -> None:
        """Note the arguments of a layer; `hidden` is found among them by identity."""
        if self._repeats(args, kwargs, hidden):
            self.calls[layer] = self.calls[layer - 1]
        else:
            self._add(layer, args, kwargs, hidden)
        self._last = (args, kwargs, hidden)

    def _repeats(self, args: Any, kwargs: Any, hidden: Tensor) -> bool:
        """Whether a layer is called just as the one before it, but for the hidden state."""
        if self._last is None:
            return False
        last_args, last_kwargs, last_hidden = self._last
        if len(args) != len(last_args) or kwargs.keys() != last_kwargs.keys():
            return False
        pairs = [*zip(args, last_args, strict=True)]
        pairs += [(value, last_kwargs[name]) for name, value in kwargs.items()]
        return all(
            (one is other and not isinstance(one, dict | list))  # which may have changed
            or (one is hidden and other is last_hidden)
            for one, other in pairs
        )

    def _add(self, layer: int, args: Any, kwargs: Any, hidden: Tensor) -> None:
        leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
        noted: list[Any] = []
        seen_hidden = False
        for leaf in leaves:
            if leaf is hidden and not seen_hidden:
                noted.append(HIDDEN)
                seen_hidden = True
            elif isinstance(leaf, HandedOn):
                raise CutError(
                    f"layer {layer} is given the output of another layer besides its hidden state. "
                    "Expected each layer to get exactly what the one before it returned."
                )
            elif isinstance(leaf, Tensor):
                noted.append(RecordedTensor(self._index(leaf)))
            elif isinstance(leaf, NotKept):
                raise CutError(
                    f"layer {layer} consumes more than the hidden state: entry {leaf.entry} of "
                    f"what layer {leaf.layer} returns (T5 passes its position bias so). Such "
                    "models cannot be streamed yet."
                )
            else:
                noted.append(leaf)
        self.calls[layer] = Call(leaves=tuple(noted), spec=spec)

    def _index(self, tensor: Tensor) -> int:
        for index, known in enumerate(self.tensors):
            if known is tensor:
                return index
        self.tensors.append(tensor)
        return len(self.tensors) - 1


# --------------------------------------------------------------------------------------------------
# The skeleton

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
                    "it runs. Layers run elsewhere: let them return what the model needs of them, "
                    "as part of the hidden state."
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
                "elsewhere: give it to them as an argument."
            )
        super().__setattr__(name, value)

    def note_written(self, names: Collection[str]) -> None:
        """The layer writes these attributes of its own when it runs."""
        self.__dict__["_written"] = frozenset(names)


def copy_tree(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    """A copy of a module tree that shares tensors and attributes but owns its registries."""
    if id(module) in copies:
        return copies[id(module)]
    copy = module.__class__.__new__(module.__class__)
    copies[id(module)] = copy
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_parameters"] = dict(module._parameters)
    copy.__dict__["_buffers"] = dict(module._buffers)
    copy.__dict__["_modules"] = {
        name: None if child is None else copy_tree(child, copies)
        for name, child in module._modules.items()
    }
    return copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """One place in a module tree where a tensor is looked up."""

    module: nn.Module
    local: str
    owner: str  # the tensor's name in the whole model; tied parameters have one owner
    is_parameter: bool

    def set(self, tensor: Tensor) -> None:
        """Let the module see this tensor."""
        registry = self.module._parameters if self.is_parameter else self.module._buffers
        registry[self.local] = tensor  # type: ignore[assignment]


@final
class Part:
    """A module tree of ours whose tensors are bound from outside: the skeleton, or one layer."""

    def __init__(self, module: nn.Module, bindings: tuple[Binding, ...]) -> None:
        self.module = module
        self._bindings = bindings
        self._given_modes = [(child, child.training) for child in module.modules()]

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Let every lookup of the named tensors find these."""
        for binding in self._bindings:
            if binding.owner in tensors:
                binding.set(tensors[binding.owner])

    def unbind(self) -> None:
        """Let go of every tensor."""
        for binding in self._bindings:
            registry = (
                binding.module._parameters if binding.is_parameter else (binding.module._buffers)
            )
            registry[binding.local] = None

    def buffers(self) -> dict[str, Tensor]:
        """The buffers the tree sees now, by owner."""
        return {
            binding.owner: buffer
            for binding in self._bindings
            if not binding.is_parameter
            and (buffer := binding.module._buffers[binding.local]) is not None
        }

    def set_training(self, training: bool, *, as_given: bool) -> None:  # noqa: FBT001
        """Set every module's mode; `as_given` restores the modes the user's modules had."""
        for child, given in self._given_modes:
            child.training = given if training and as_given else training


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """The one module that runs all layers of a structure, and what is a layer's own in it.

    A compiler sees the same module whatever the layer, so it compiles once for any depth. Where
    modules know the number of their layer, that is set before each call; compiled code looks at it
    only if the layer's code does.
    """

    module: nn.Module
    names: Mapping[str, str]  # name in the module -> owner
    index: int
    numbers: tuple[tuple[nn.Module, str], ...]

    def tensors(self, by_owner: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A layer's tensors by their names in the module; sets the layer's number."""
        for module, name in self.numbers:
            module.__dict__[name] = self.index
        return {name: by_owner[owner] for name, owner in self.names.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTensors:
    """The user's tensors that belong to one unit, by owner."""

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]


@final
class CarvedModel:
    """A model cut into prologue, layers and epilogue; the user's modules are only read."""

    def __init__(
        self, model: nn.Module, *, layers: str | None, like: CarvedModel | None = None
    ) -> None:
        """Cut `model` at the list called `layers`, or at the one that holds most parameters.

        Layers of a structure that `like` has run through its modules: these may be compiled.

        Raises:
            ValueError: the model cannot be cut; the message says what was seen.
        """
        self.list_name = find_layers(model, layers)
        _refuse_router_losses(model, {})
        originals = list(model.get_submodule(self.list_name).children())
        self.num_layers = len(originals)
        owners = {
            id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        }
        copies: dict[int, nn.Module] = {}
        self.stubs = [Stub(index, layer) for index, layer in enumerate(originals)]
        copies.update({id(layer): stub for layer, stub in zip(originals, self.stubs, strict=True)})
        skeleton = copy_tree(model, copies)
        self.outer_tensors = _tensors_of(skeleton, owners)
        self.tables = _tables(skeleton, owners)
        self.skeleton = Part(skeleton, _bindings(skeleton, owners))
        self.layers: list[Part] = []
        self.layer_tensors: list[UnitTensors] = []
        self.structures: list[str] = []
        numbering = own_numbers(originals)
        for layer in originals:
            copy = copy_tree(layer, {})
            self.layers.append(Part(copy, _bindings(copy, owners)))
            self.layer_tensors.append(_tensors_of(copy, owners))
            self.structures.append(_structure(layer, numbering))
        known = {} if like is None else like.templates_by_structure()
        self.templates = self._make_templates(numbering, owners, known)
        self._refuse_shared_weights()
        self.returns: dict[str, Returns] = {}
        self.changing_input: set[str] = set()  # structures that write into their hidden state
        self._modes_as_given = model.training
        self._takes_use_cache = _takes_use_cache(model)

    def set_training(self, training: bool) -> None:  # noqa: FBT001
        """Put every part in training or evaluation mode.

        A model handed over in training mode keeps the modes of its modules (a frozen BatchNorm
        stays in evaluation mode); one handed over in evaluation mode, as `from_pretrained` returns
        it, trains everywhere.
        """
        for part in (self.skeleton, *self.layers):
            part.set_training(training, as_given=self._modes_as_given)

    def close(self) -> None:
        """Let go of all tensors; the parts cannot run any more."""
        for part in (self.skeleton, *self.layers):
            part.unbind()

    def templates_by_structure(self) -> dict[str, nn.Module]:
        """The modules that layers run through."""
        pairs = zip(self.structures, self.templates, strict=True)
        return {structure: template.module for structure, template in pairs}

    def _make_templates(
        self,
        numbering: frozenset[tuple[str, str]],
        owners: Mapping[int, str],
        known: Mapping[str, nn.Module],
    ) -> list[Template]:
        """For every layer, the module that stands for its structure and the names in it."""
        modules = dict(known)
        templates = []
        for index, structure in enumerate(self.structures):
            part = self.layers[index]
            module = modules.setdefault(structure, part.module)
            tensors = [
                *part.module.named_parameters(remove_duplicate=False),
                *part.module.named_buffers(remove_duplicate=False),
            ]
            names = {name: owners[id(tensor)] for name, tensor in tensors}
            numbers = tuple(
                (module.get_submodule(path), name)
                for path, name in sorted(numbering & attributes_of(module).keys())
            )
            templates.append(Template(module=module, names=names, index=index, numbers=numbers))
        return templates

    def prologue(self, batch: Batch, *, learn: RunLayer | None = None) -> Recording:
        """Run the model up to its last layer; record what each layer is given.

        `learn` runs a real layer of a structure whose form of return value is not known yet
        ([Note: returns]).

        Raises:
            ValueError: the model does not run its layers once each and in order.
        """
        _refuse_router_losses(self.skeleton.module, batch)
        recording, has_graph = Recording(), torch.is_grad_enabled()

        def handler(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if has_graph and not torch.is_grad_enabled():
                raise CutError(
                    f"the model runs layer {index} under torch.no_grad(). What is not to be "
                    "trained is frozen instead: requires_grad_(False) for its parameters."
                )
            hidden = chain.receive(index, args, kwargs)
            recording.add(index, args, kwargs, hidden)
            if index == 0:
                recording.hidden = hidden
            if learn is not None and self.structures[index] not in self.returns:
                given = _plain(args, kwargs, hidden)
                tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor)]
                versions = [tensor._version for tensor in tensors]
                value = learn(index, *given)
                if versions != [tensor._version for tensor in tensors]:
                    self.changing_input.add(self.structures[index])
                self.returns[self.structures[index]] = Returns.learn(value, layer=index)
            if index == self.num_layers - 1:
                raise LayersDone
            return chain.hand_on(index, hidden)

        chain = _Chain(self.num_layers, self._wrap)
        with self._handling(handler), contextlib.suppress(LayersDone):
            self._run(batch)
            chain.incomplete()
        return recording

    def epilogue(
        self, batch: Batch, hidden: Tensor, *, on_delivery: Callable[[], None] | None = None
    ) -> Any:
        """Run the model with `hidden` as the output of its last layer; returns its outputs.

        `on_delivery` is called when the code after the layers begins.
        """

        def handler(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = chain.receive(index, args, kwargs)
            if index == self.num_layers - 1:
                if on_delivery is not None:
                    on_delivery()
                return self._wrap(index, hidden)
            return chain.hand_on(index, given)

        chain = _Chain(self.num_layers, self._wrap)
        with self._handling(handler):
            outputs = self._run(batch)
        if chain.num_called < self.num_layers:
            chain.incomplete()
        if any(isinstance(leaf, HandedOn | NotKept) for leaf in pytree.tree_leaves(outputs)):
            raise CutError(
                "the model's outputs contain what single layers returned (hidden states or "
                "attentions), which the relay does not keep. Turn output_hidden_states and "
                "output_attentions off."
            )
        return outputs

    def _wrap(self, index: int, hidden: Tensor) -> Any:
        return self.returns[self.structures[index]].wrap(hidden)

    def _run(self, batch: Batch) -> Any:
        extra = {"use_cache": False} if self._takes_use_cache and "use_cache" not in batch else {}
        return self.skeleton.module(**batch, **extra)

    def _handling(self, handler: Handler) -> _Handling:
        return _Handling(self.stubs, handler)

    def _refuse_shared_weights(self) -> None:
        users: dict[str, str] = dict.fromkeys(self.outer_tensors.parameters, "the model around")
        for index, tensors in enumerate(self.layer_tensors):
            for owner in tensors.parameters:
                if owner in users:
                    raise CutError(
                        f"parameter {owner!r} of layer {index} is shared with {users[owner]} the "
                        "layers. Weights shared between layers cannot be streamed yet."
                    )
                users[owner] = f"layer {index} of"


@final
class _Handling:
    """Stubs answer with a handler inside the block."""

    def __init__(self, stubs: list[Stub], handler: Handler) -> None:
        self._stubs = stubs
        self._handler = handler

    def __enter__(self) -> None:
        for stub in self._stubs:
            stub.__dict__["_handler"] = self._handler

    def __exit__(self, *_: object) -> None:
        for stub in self._stubs:
            stub.__dict__["_handler"] = None


@final
class _Chain:
    """Checks that layers are called once each, in order, each with what the last one returned."""

    def __init__(self, num_layers: int, wrap: Callable[[int, Tensor], Any]) -> None:
        self._num_layers = num_layers
        self._wrap = wrap
        self._handed: Tensor | None = None
        self.num_called = 0

    def receive(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The hidden state among a layer's arguments: the first of them."""
        if index < self.num_called:
            raise CutError(
                f"layer {index} of {self._num_layers} is called a second time. Expected every "
                "layer once, in order. Weights shared between layers (ALBERT repeats one layer) "
                "cannot be streamed yet."
            )
        if index > self.num_called:
            raise CutError(
                f"layer {index} is called before layer {self.num_called}. Expected every layer "
                "once, in order. If the model skips layers at random (layerdrop), set that to 0."
            )
        first = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(first, Tensor):
            raise CutError(
                f"layer {index} is called with {type(first).__name__} first. Expected the hidden "
                "state, a tensor, as its first argument."
            )
        if self._handed is not None and first is not self._handed:
            raise CutError(
                f"layer {index} is not given what layer {index - 1} returned: the model does "
                "something between them. Expected each layer to get exactly what the one before it "
                "returned."
            )
        self.num_called += 1
        return first

    def hand_on(self, index: int, hidden: Tensor) -> Any:
        """The return value of a layer that was not run."""
        plain = hidden.detach() if not isinstance(hidden, HandedOn) else hidden
        with torch._C.DisableTorchFunctionSubclass():
            # A fresh object each time, so that identity tells which layer it came from.
            self._handed = plain.detach().as_subclass(HandedOn)
        return self._wrap(index, self._handed)

    def incomplete(self) -> NoReturn:
        """Refuse a run that ended before the last layer."""
        raise CutError(
            f"the model ran only {self.num_called} of its {self._num_layers} layers. Expected "
            "every layer once, in order."
        )


def _plain(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with a handed-on hidden state as the ordinary tensor it stands for."""
    with torch._C.DisableTorchFunctionSubclass():
        ordinary = hidden.as_subclass(Tensor)
    return (
        tuple(ordinary if value is hidden else value for value in args),
        {name: ordinary if value is hidden else value for name, value in kwargs.items()},
    )


def _bindings(tree: nn.Module, owners: Mapping[int, str]) -> tuple[Binding, ...]:
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


def _tensors_of(tree: nn.Module, owners: Mapping[int, str]) -> UnitTensors:
    return UnitTensors(
        parameters={owners[id(parameter)]: parameter for parameter in tree.parameters()},
        buffers={owners[id(buffer)]: buffer for buffer in tree.buffers()},
    )


def _tables(tree: nn.Module, owners: Mapping[int, str]) -> tuple[str, ...]:
    """Owners of the weights of embedding modules, each once."""
    found = [
        owners[id(module.weight)] for module in tree.modules() if isinstance(module, nn.Embedding)
    ]
    return tuple(dict.fromkeys(found))


PLAIN = (bool, int, float, str, type(None), torch.dtype)


def is_plain(value: Any) -> bool:
    """Whether a value is numbers, words and containers of them."""
    if isinstance(value, dict):
        return all(is_plain(entry) for pair in value.items() for entry in pair)
    if isinstance(value, tuple | list | set | frozenset):
        return all(is_plain(entry) for entry in value)
    return isinstance(value, PLAIN)


def _comparable(value: Any) -> Any:
    """A plain value as it is, a function by what it does, anything else by its identity."""
    if isinstance(value, functools.partial):
        return (id(value.func), _comparable(value.args), _comparable(value.keywords))
    return value if is_plain(value) else id(value)


def attributes_of(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """What modules of a layer carry besides tensors and modules: plain values, or identities."""
    return {
        (path, name): _comparable(value)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training"
    }


def own_numbers(layers: list[nn.Module]) -> frozenset[tuple[str, str]]:
    """Attributes that hold the layer's own number, in every layer that has them."""
    found: dict[tuple[str, str], list[bool]] = {}
    for index, layer in enumerate(layers):
        for key, value in attributes_of(layer).items():
            found.setdefault(key, []).append(type(value) is int and value == index)
    return frozenset(
        key for key, own in found.items() if all(own) and (len(own) > 1 or key[1] == "layer_idx")
    )


def _structure(layer: nn.Module, numbering: frozenset[tuple[str, str]]) -> str:
    """A text that is equal for layers that run the same code on tensors of the same shapes."""
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return "; ".join(
        [
            f"{name}:{type(module).__qualname__}:{module.training}"
            for name, module in layer.named_modules()
        ]
        + [f"{name}:{tuple(tensor.shape)}:{tensor.requires_grad}" for name, tensor in tensors]
        + [f"{key}={v}" for key, v in attributes_of(layer).items() if key not in numbering]
    )


def _takes_use_cache(model: nn.Module) -> bool:
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


def _refuse_router_losses(model: nn.Module, batch: Batch) -> None:
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
