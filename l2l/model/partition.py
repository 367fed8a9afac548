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
but the next layer looks at that (passing.py).

[Note: skip paths] The epilogue run repeats the prologue's computation with the same random numbers
and with gradients on. If the epilogue uses something of the prologue besides the hidden state, the
gradient of that path is found there, and nothing is lost.

[Note: returns] Some layers return a tensor, some a tuple. Before the first step one real layer of
each structure runs on a few rows (trial.py); its return value tells how to wrap a hidden state.
Entries besides the hidden state are handed on as `NotKept`, and a layer that consumes one (T5's
position bias) is refused.

Module trees of ours: the skeleton with a stub in the place of every layer, and single layers.

Their tensors are bound from outside, so a tree sees whatever weights are there at the moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree
from typing_extensions import override

from l2l.model.modules import (
    CutError,
    Template,
    asked_for,
    attributes_of,
    configs_of,
    copy_tree,
    find_layers,
    modules_kept,
    own_numbers,
    structure_of,
    takes_use_cache,
    without_cache,
)
from l2l.model.passing import Chain, HandedOn, NotKept, Recording, Returns, plain_arguments

Batch = Mapping[str, Any]
Handler = Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
"""What a stub's call becomes: the layer's number, and what it is given."""


class LayersDone(BaseException):
    """Raised by the last stub of a prologue run; not an error, so not an `Exception`."""


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
        tensors = [*model.named_parameters(), *model.named_buffers()]
        owners = {id(tensor): name for name, tensor in tensors}
        self.stubs = [Stub(index, layer) for index, layer in enumerate(originals)]
        stubs: dict[int, nn.Module] = {id(layer_of(stub)): stub for stub in self.stubs}
        self.skeleton = Part(copy_tree(model, stubs), owners)
        self.outer_tensors = self.skeleton.tensors
        embeddings = [m for m in self.skeleton.module.modules() if isinstance(m, nn.Embedding)]
        self.tables = tuple(dict.fromkeys(owners[id(one.weight)] for one in embeddings))
        copies = [copy_tree(layer, {}) for layer in originals]
        numbering = own_numbers(copies)
        self.layers = [Part(copy, owners) for copy in copies]
        self.layer_tensors = [part.tensors for part in self.layers]
        self.structures = [structure_of(copy, numbering) for copy in copies]
        pairs = () if like is None else zip(like.structures, like.templates, strict=True)
        modules = {structure: template.module for structure, template in pairs}
        self.templates: list[Template] = []
        for index, part in enumerate(self.layers):
            module = modules.setdefault(self.structures[index], part.module)
            numbered = sorted(numbering & attributes_of(module).keys())
            numbers = tuple((module.get_submodule(path), name) for path, name in numbered)
            self.templates.append(Template(module, part.names, index, numbers))
        self._refuse_shared_weights()
        self.returns: dict[str, Returns] = {}
        self.changing_input: set[str] = set()  # structures that write into their hidden state
        self._modes_as_given = model.training
        self._takes_use_cache = takes_use_cache(self.skeleton.module)
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

    def attributes_kept(self) -> contextlib.AbstractContextManager[None]:
        """Put back what the model's code sets on its modules and layers inside the block."""
        trees = [part.module for part in (self.skeleton, *self.layers)]
        trees += map(layer_of, self.stubs)
        modules = (module for tree in trees for module in tree.modules())
        return modules_kept(module for module in modules if not isinstance(module, Stub))

    def batch_statistics(self) -> str | None:
        """A module that, in training, normalizes by statistics of the rows it is given."""
        for part in (self.skeleton, *self.layers):
            for module, given in part.given_modes:
                if isinstance(module, _BatchNorm) and (given or not self._modes_as_given):
                    return type(module).__name__
        return None

    def collected(self, batch: Batch) -> str | None:
        """The option by which a batch, or a config, asks for what single layers return."""
        configs = [getattr(one, "config", None) for one in (self.skeleton.module, self._around)]
        return asked_for(("output_hidden_states", "output_attentions"), configs, batch)

    def close(self) -> None:
        """Let go of all tensors; the parts cannot run any more."""
        for part in (self.skeleton, *self.layers):
            part.unbind()

    def forget(self) -> None:
        """Forget what running layers has shown."""
        self.returns.clear()
        self.changing_input.clear()

    def prologue(
        self, batch: Batch, *, learn: Handler | None = None, meet: Handler | None = None
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

        def visit(index: int, args: Any, kwargs: Any, hidden: Tensor) -> None:
            if has_graph and not torch.is_grad_enabled():
                raise CutError(
                    f"the model runs layer {index} under torch.no_grad(). To leave layers "
                    "untrained, freeze their parameters instead: requires_grad_(False)."
                )
            if states is not None and self.stubs[index].layer_state() != states[index]:
                raise CutError(
                    f"the model modifies layer {index} before calling it, or calls it with other "
                    f"weights than its own (torch.func.functional_call). {APART}, as they were and "
                    "with their own parameters: pass them what they need as an argument."
                )
            recording.add(index, args, kwargs, hidden)
            if meet is not None:
                meet(index, *plain_arguments(args, kwargs, hidden))
            if learn is not None and self.structures[index] not in self.returns:
                self._learn(index, learn, *plain_arguments(args, kwargs, hidden))
            if index == self.num_layers - 1:
                raise LayersDone

        with contextlib.suppress(LayersDone):
            self._walk(batch, visit)
        return recording

    def _learn(self, index: int, run: Handler, args: Any, kwargs: Any) -> None:
        """Run a real layer; note the form of what it returns, and whether it writes into inputs."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in tensors]
        value, structure = run(index, args, kwargs), self.structures[index]
        if versions != [tensor._version for tensor in tensors]:
            self.changing_input.add(structure)
        self.returns[structure] = Returns.learn(value, layer=index)

    def epilogue(
        self, batch: Batch, hidden: Tensor, *, on_delivery: Callable[[], None] | None = None
    ) -> Any:
        """Run the model with `hidden` as the output of its last layer; returns its outputs.

        `on_delivery` is called when the code after the layers begins.
        """

        def visit(index: int, args: Any, kwargs: Any, given: Tensor) -> Any:
            if index < self.num_layers - 1:
                return None
            if on_delivery is not None:
                on_delivery()
            return self._wrap(index, hidden)

        outputs = self._walk(batch, visit)
        if any(isinstance(leaf, HandedOn | NotKept) for leaf in pytree.tree_leaves(outputs)):
            raise CutError(
                "the model's outputs contain what single layers returned (hidden states or "
                "attentions), which the relay does not keep. Turn output_hidden_states and "
                "output_attentions off."
            )
        return outputs

    def _walk(self, batch: Batch, visit: Callable[[int, Any, Any, Tensor], Any]) -> Any:
        """Run the model without its layers; `visit` sees each call, and may say what it returns."""
        chain = Chain(self.num_layers, self._wrap)

        def handler(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = chain.receive(index, args, kwargs)
            found = visit(index, args, kwargs, hidden)
            return chain.hand_on(index, hidden) if found is None else found

        for stub in self.stubs:
            stub.__dict__["_handler"] = handler
        try:
            outputs = self.run(self.skeleton.module, batch)
        finally:
            for stub in self.stubs:
                stub.__dict__["_handler"] = None
        chain.refuse_incomplete()
        return outputs

    def _wrap(self, index: int, hidden: Tensor) -> Any:
        return self.returns[self.structures[index]].wrap(hidden)

    def run(self, model: nn.Module, batch: Batch) -> Any:
        """What the model, or its skeleton, returns; without a cache, unless the batch asks for one.

        A cache is of no use in training, and some models attend otherwise where they make one.
        """
        if "use_cache" in batch:
            return model(**batch)
        extra = {"use_cache": False} if self._takes_use_cache else {}
        with without_cache(self._configs):
            return model(**batch, **extra)

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


def _refuse_router_losses(model: nn.Module, batch: Batch) -> None:
    """Refuse a model whose config, or a batch that, asks for router losses of the layers."""
    config = getattr(model, "config", None)
    configs = [config, getattr(config, "text_config", None)]
    if batch.get("output_router_logits") or asked_for(["output_router_logits"], configs, {}):
        raise CutError(
            f"{type(model).__name__} is set to collect router losses from all layers "
            "(output_router_logits). The relay does not keep what single layers return; set "
            "output_router_logits=False."
        )


def _refuse_gradient_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CutError(
                f"parameter {name!r} has a hook for its gradient, which would never be called: "
                "gradients are made in the engine and go to its own optimizer. Remove the hook; a "
                "hook of a module that changes what it computes does run."
            )


# --------------------------------------------------------------------------------------------------
# Module trees of ours


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


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTensors:
    """The user's tensors that belong to one unit, by owner."""

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]


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
        self._buffers = [place for place in self._places if place[1] is place[0]._buffers]

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Let every lookup of the named tensors find these."""
        for _, registry, local, owner in self._places:
            if owner in tensors:
                registry[local] = tensors[owner]

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
