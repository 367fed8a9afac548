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
each structure runs on a few rows (trial.py); its return value tells how to wrap a hidden state.
Entries besides the hidden state are handed on as `NotKept`, and a layer that consumes one (T5's
position bias) is refused.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from typing_extensions import override

from l2l.model.layer_list import CutError, find_layers

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

Autocast = tuple[str, bool, torch.dtype]
"""State of torch.autocast for one type of device: its name, whether it is on, and to what."""


def autocast_state() -> tuple[Autocast, ...]:
    """What torch.autocast does here, for every type of device that layers may run on."""
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )


@dataclass(frozen=True, slots=True)
class RecordedTensor:
    """A tensor argument, by its place in the microbatch's list of recorded tensors."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """How one layer was called: `HIDDEN`, recorded tensors and constants in their places."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    autocast: tuple[Autocast, ...] = ()  # where the model's own code has set it around the layer

    def autocasting(self) -> contextlib.AbstractContextManager[object]:
        """What torch.autocast did where the layer was called; the layer runs inside it."""
        stack = contextlib.ExitStack()
        for kind, is_on, dtype in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_on))
        return stack

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
    _outside: tuple[Autocast, ...] = field(default_factory=autocast_state)
    _last: tuple[Any, Any, Tensor] | None = None

    def add(self, layer: int, args: Any, kwargs: Any, hidden: Tensor) -> None:
        """Note the arguments of a layer; `hidden` is found among them by identity."""
        if self.hidden is None:
            self.hidden = hidden
        if self._repeats(args, kwargs, hidden):
            self.calls[layer] = self.calls[layer - 1]
        else:
            self._add(layer, args, kwargs, hidden)
        self._last = (args, kwargs, hidden)
        autocast = tuple(one for one in autocast_state() if one not in self._outside)
        if autocast != self.calls[layer].autocast:
            self.calls[layer] = replace(self.calls[layer], autocast=autocast)

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
            other is last_hidden
            if one is hidden
            else one is other and not _may_change(one) and not _holds(one, last_hidden)
            for one, other in pairs
        )

    def _add(self, layer: int, args: Any, kwargs: Any, hidden: Tensor) -> None:
        leaves, spec = pytree.tree_flatten((list(args), dict(kwargs)))
        noted: list[Any] = []
        for leaf in leaves:
            if leaf is hidden:
                noted.append(HIDDEN)
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
        if tensor is self.hidden:
            self._tell_apart(RecordedTensor(len(self.tensors) - 1))
        return len(self.tensors) - 1

    def _tell_apart(self, recorded: RecordedTensor) -> None:
        """What enters the first layer is given to later ones too, beside their hidden state.

        If the first one is given it twice, only the first of these is its hidden state: plain
        PyTorch adds the gradient of the other to those of the later layers.
        """
        call = self.calls[0]
        first = next(place for place, leaf in enumerate(call.leaves) if leaf is HIDDEN)
        others = (recorded if leaf is HIDDEN else leaf for leaf in call.leaves[first + 1 :])
        self.calls[0] = replace(call, leaves=(*call.leaves[: first + 1], *others))


def _may_change(value: Any) -> bool:
    """Whether a layer, or the model between two of them, can change what is in there."""
    if isinstance(value, tuple):
        return any(map(_may_change, value))
    return isinstance(value, dict | list | deque)


def _holds(value: Any, tensor: Tensor) -> bool:
    return value is tensor or (
        isinstance(value, tuple) and any(leaf is tensor for leaf in pytree.tree_leaves(value))
    )


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

    def layer_state(self) -> tuple[list[int], dict[tuple[str, str], Any]]:
        """Which modules and tensors the user's layer has now, by identity, and its attributes."""
        layer: nn.Module = self.__dict__["_layer"]
        found = list(layer.modules())
        registries = [one for module in found for one in (module._parameters, module._buffers)]
        tensors = [tensor for registry in registries for tensor in registry.values()]
        return [*map(id, [*found, *tensors])], attributes_of(layer)

    def note_written(self, names: Collection[str]) -> None:
        """The layer writes these attributes of its own when it runs."""
        self.__dict__["_written"] = frozenset(names)


def copy_tree(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    """A copy of a module tree that shares tensors and attributes but owns its registries.

    It runs the code that the modules have: what torch.compile had made of them ran on the originals
    themselves, and so did methods of theirs that they hold as attributes (a `forward` that was
    replaced), which become the copies'.
    """
    known = set(copies)
    tree = _copy_tree(module, copies)
    for copy in [copy for key, copy in copies.items() if key not in known]:
        _rebind(copy, copies)
    return tree


def _copy_tree(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    if id(module) in copies:
        return copies[id(module)]
    if (original := _uncompiled(module)) is not module:
        copies[id(module)] = _copy_tree(original, copies)
        return copies[id(module)]
    copy = module.__class__.__new__(module.__class__)
    copies[id(module)] = copy
    copy.__dict__.update(module.__dict__)
    if copy.__dict__.get("_compiled_call_impl") is not None:  # of `module.compile()`
        copy.__dict__["_compiled_call_impl"] = None
    copy.__dict__["_parameters"] = dict(module._parameters)
    copy.__dict__["_buffers"] = dict(module._buffers)
    copy.__dict__["_modules"] = {
        name: None if child is None else _copy_tree(child, copies)
        for name, child in module._modules.items()
    }
    return copy


def _uncompiled(module: nn.Module) -> nn.Module:
    """What was given to torch.compile, or the module itself."""
    original = module._modules.get("_orig_mod")
    if original is not None and type(module).__name__ == "OptimizedModule":
        return _uncompiled(original)
    return module


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _rebind(copy: nn.Module, copies: Mapping[int, nn.Module]) -> None:
    """Let functions that a module holds, and its hooks, work on the copies."""
    attributes = copy.__dict__
    for name, value in list(attributes.items()):
        if name in HOOKS:  # its own: what is hooked into the one is not hooked into the other
            rebound = {key: _translated(hook, copies) for key, hook in value.items()}
            attributes[name] = type(value)(rebound)
        elif callable(value):
            attributes[name] = _translated(value, copies)


def _translated(value: Any, copies: Mapping[int, nn.Module], depth: int = 4) -> Any:
    """A function that works on the copies of the modules that it was bound to, or closes over."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if depth and isinstance(value, types.MethodType):
        owner = _translated(value.__self__, copies, depth - 1)
        function = _translated(value.__func__, copies, depth - 1)
        changed = owner is not value.__self__ or function is not value.__func__
        return types.MethodType(function, owner) if changed else value
    if depth and isinstance(value, functools.partial):
        given = (value.func, *value.args, *value.keywords.values())
        found = [_translated(one, copies, depth - 1) for one in given]
        if all(one is other for one, other in zip(found, given, strict=True)):
            return value
        number = len(value.args) + 1
        named = dict(zip(value.keywords, found[number:], strict=True))
        return functools.partial(found[0], *found[1:number], **named)
    if depth and isinstance(value, types.FunctionType) and value.__closure__:
        return _translated_closure(value, copies, depth - 1)
    return value


def _translated_closure(
    function: types.FunctionType, copies: Mapping[int, nn.Module], depth: int
) -> types.FunctionType:
    cells = []
    for cell in function.__closure__ or ():
        try:
            inside = cell.cell_contents
        except ValueError:  # not set yet
            cells.append(cell)
            continue
        if inside is function:
            cells.append(cell)
            continue
        found = _translated(inside, copies, depth)
        cells.append(cell if found is inside else types.CellType(found))
    if all(one is other for one, other in zip(cells, function.__closure__ or (), strict=True)):
        return function
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells),
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
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
        self._buffer_bindings = [one for one in bindings if not one.is_parameter]
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
                    "keep their shape and dtype; those that are no state are registered with "
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
class Partition:
    """A model cut into prologue, layers and epilogue; the user's modules are only read."""

    def __init__(
        self, model: nn.Module, *, layers: str | None, like: Partition | None = None
    ) -> None:
        """Cut `model` at the list called `layers`, or at the one that holds most parameters.

        Layers of a structure that `like` has run through its modules: these may be compiled.

        Raises:
            ValueError: the model cannot be cut; the message says what was seen.
        """
        self.list_name = find_layers(model, layers)
        _refuse_router_losses(model, {})
        _refuse_gradient_hooks(model)
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
        layer_copies = [copy_tree(layer, {}) for layer in originals]
        numbering = own_numbers(layer_copies)
        for copy in layer_copies:
            self.layers.append(Part(copy, _bindings(copy, owners)))
            self.layer_tensors.append(_tensors_of(copy, owners))
            self.structures.append(_structure(copy, numbering))
        known = {} if like is None else like.templates_by_structure()
        self.templates = self._make_templates(numbering, owners, known)
        self._refuse_shared_weights()
        self.returns: dict[str, Returns] = {}
        self.changing_input: set[str] = set()  # structures that write into their hidden state
        self._modes_as_given = model.training
        self._takes_use_cache = takes_use_cache(skeleton)
        self._configs = configs_of(model)
        self._around = model.get_submodule(self.list_name.rpartition(".")[0])

    def set_training(self, training: bool) -> None:  # noqa: FBT001
        """Put every part in training or evaluation mode.

        A model handed over in training mode keeps the modes of its modules (a frozen BatchNorm
        stays in evaluation mode); one handed over in evaluation mode, as `from_pretrained` returns
        it, trains everywhere.
        """
        for part in (self.skeleton, *self.layers):
            part.set_training(training, as_given=self._modes_as_given)

    @contextlib.contextmanager
    def attributes_kept(self) -> Iterator[None]:
        """Put back what the model's code sets on its modules and layers inside the block."""
        trees = [self.skeleton.module, *(part.module for part in self.layers)]
        trees += [stub.__dict__["_layer"] for stub in self.stubs]
        modules = {id(module): module for tree in trees for module in tree.modules()}
        before = [(module, own_attributes(module)) for module in modules.values()]
        children = [(module._modules, dict(module._modules)) for module in modules.values()]
        try:
            yield
        finally:
            for registry, found in children:
                if registry != found:
                    registry.clear()
                    registry.update(found)
            for module, attributes in before:
                for name in own_attributes(module).keys() - attributes.keys():
                    del module.__dict__[name]
                module.__dict__.update(attributes)

    def batch_statistics(self) -> str | None:
        """A module that, in training, normalizes by statistics of the rows it is given."""
        for part in (self.skeleton, *self.layers):
            for module, given in part.modes():
                if isinstance(module, _BatchNorm) and (given or not self._modes_as_given):
                    return type(module).__name__
        return None

    def collected(self, batch: Batch) -> str | None:
        """The word by which a batch, or a config, asks for what single layers return."""
        configs = [getattr(one, "config", None) for one in (self.skeleton.module, self._around)]
        for name in ("output_hidden_states", "output_attentions"):
            asked = batch.get(name)
            if asked or (asked is None and any(getattr(one, name, False) for one in configs)):
                return name
        return None

    def close(self) -> None:
        """Let go of all tensors; the parts cannot run any more."""
        for part in (self.skeleton, *self.layers):
            part.unbind()

    def forget(self) -> None:
        """Forget what running layers has shown."""
        self.returns.clear()
        self.changing_input.clear()

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

    def prologue(
        self,
        batch: Batch,
        *,
        learn: RunLayer | None = None,
        meet: Callable[[int, tuple[Any, ...], dict[str, Any]], None] | None = None,
    ) -> Recording:
        """Run the model up to its last layer; record what each layer is given.

        `learn` runs a real layer of a structure whose form of return value is not known yet
        ([Note: returns]); `meet` is told what every layer is given.

        Raises:
            ValueError: the model does not run its layers once each and in order.
        """
        _refuse_router_losses(self.skeleton.module, batch)
        recording, has_graph = Recording(), torch.is_grad_enabled()
        states = None if learn is None else [stub.layer_state() for stub in self.stubs]

        def handler(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if has_graph and not torch.is_grad_enabled():
                raise CutError(
                    f"the model runs layer {index} under torch.no_grad(). What is not to be "
                    "trained is frozen instead: requires_grad_(False) for its parameters."
                )
            if states is not None and self.stubs[index].layer_state() != states[index]:
                raise CutError(
                    f"the model changes layer {index} before it calls it, or calls it with other "
                    "weights than its own (torch.func.functional_call with generated ones). Layers "
                    "run elsewhere, as they were and with their own parameters: give them what "
                    "they need as an argument."
                )
            hidden = chain.receive(index, args, kwargs)
            recording.add(index, args, kwargs, hidden)
            if meet is not None:
                meet(index, *_plain(args, kwargs, hidden))
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
        if "use_cache" in batch:
            return self.skeleton.module(**batch)
        extra = {"use_cache": False} if self._takes_use_cache else {}
        with without_cache(self._configs):
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
        first = first_argument(args, kwargs)
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


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a layer is given first: its hidden state."""
    return args[0] if args else next(iter(kwargs.values()), None)


def _plain(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with a handed-on hidden state as the ordinary tensor it stands for."""
    with torch._C.DisableTorchFunctionSubclass():
        ordinary = hidden.as_subclass(Tensor)

    def plain(value: Any) -> Any:
        return ordinary if value is hidden else value

    held = [value for value in (*args, *kwargs.values()) if not isinstance(value, Tensor)]
    if any(leaf is hidden for leaf in pytree.tree_leaves(held)):  # inside a tuple, say
        args, kwargs = pytree.tree_map(plain, (args, kwargs), is_leaf=lambda one: one is hidden)
    return tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}


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


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """What one module carries besides tensors and modules."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training"
    }


def attributes_of(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """What modules of a layer carry besides tensors and modules: plain values, or identities."""
    return {
        (path, name): _comparable(value)
        for path, module in layer.named_modules()
        for name, value in own_attributes(module).items()
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


def _refuse_gradient_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CutError(
                f"parameter {name!r} has a hook for its gradient, which would never be called: "
                "gradients are made in the engine and go to its own optimizer. Remove the hook; a "
                "hook of a module that changes what it computes does run."
            )


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
