"""Cutting a model where it runs its list of layers, without knowing the model.

The model's own `forward` is the program. We copy the module tree shallowly (the *skeleton*), put a
stub in the place of every layer, and run it:

    model(**batch)          prologue            layers              epilogue
    -------------           --------            ------              --------
    embeddings, masks  -->  runs; the stubs     run by the relay    runs again; the last stub
    layer 0 .. n-1          record what each    with the recorded   delivers the relay's hidden
    norm, head, loss        layer was given     arguments           state: norm, head and loss
                            and stop the run                        are the model's own code

There is no table of model families. What is assumed of a model, its `Route`, is checked while its
stubs run: layers are called in this order; a layer is handed exactly what the layer before it
returned; nothing but the next layer looks at that (passing.py). Of most models the route is
straight; of others a trial finds it (route.py). Code between two stacks of layers is run like the
prologue, with what earlier stacks returned delivered by their last stubs.

[Note: skip paths] The epilogue run repeats the prologue's computation with the same random numbers
and with gradients on. If the epilogue uses something of the prologue besides the hidden state, the
gradient of that path is found there, and nothing is lost.

[Note: returns] Some layers return a tensor, some a tuple. Before the first step one real layer of
each structure runs on a few rows (trial.py); its return value tells how to wrap a hidden state.
Entries that nobody has used in the trial are handed on as `NotKept`.

"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from l2l.model.captures import (
    COLLECTING,
    emit,
    hooked_copy,
    leaves_more,
    open_lists,
    stores_of,
    take_hooks_off,
)
from l2l.model.format import format_of, refuse_unusable
from l2l.model.modes import Mode
from l2l.model.modules import (
    CutError,
    argument_names,
    asked_for,
    configs_of,
    copy_tree,
    find_layers,
    modules_kept,
    refuse_unsupported,
    takes_use_cache,
    weights_of,
    without_cache,
)
from l2l.model.passing import (
    AS_RETURNED,
    IN_ORDER,
    HandedOn,
    NotKept,
    Recording,
    Returns,
    first_argument,
    plain_arguments,
)
from l2l.model.route import Key, Route
from l2l.model.splitting import like
from l2l.model.structures import Likeness, Template
from l2l.model.trees import APART, Handler, Part, Stub, layer_of

Batch = Mapping[str, Any]


class LayersDone(BaseException):
    """Raised by the last stub of a prologue run; not an error, so not an `Exception`."""


@final
class Partition:
    """A model cut into prologue, layers and epilogue; the user's modules are only read."""

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: str | Sequence[str] | None,
        old: Partition | None = None,
        own_loss: bool = True,
        gradient_hooks: bool = False,
    ) -> None:
        """Cut `model` at the lists called `layers`, or at those that hold most parameters.

        Args:
            model: the user's.
            layers: names of lists.
            old: layers of a structure that it has run through its modules: these may be compiled.
            gradient_hooks: whether hooks for gradients of parameters are called.
            own_loss: whether the loss is the model's. Else entries of a batch whose names the
                model's code does not have are for the user's loss alone.

        Raises:
            ValueError: the model cannot be cut; the message says what was seen.
        """
        self.lists = find_layers(model, layers)
        self.list_name = ", ".join(one.name or "the model itself" for one in self.lists)
        refuse_unsupported(model)
        refuse_unusable(model)
        if not gradient_hooks:
            _refuse_gradient_hooks(model)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        model = hooked_copy(model, lambda one: copy_tree(one, {}))
        self.layer_paths = tuple(path for one in self.lists for path in one.paths)
        originals = [model.get_submodule(path) for path in self.layer_paths]
        self.num_layers = len(originals)
        self.straight = Route.straight(self.num_layers)
        owners = {id(tensor): name for name, tensor in tensors}
        self.stubs = [Stub(index, layer) for index, layer in enumerate(originals)]
        stubs: dict[int, nn.Module] = {id(layer_of(stub)): stub for stub in self.stubs}
        self.skeleton = Part(copy_tree(model, stubs), owners)
        self.outer_tensors = self.skeleton.tensors
        self.tables = tuple(owners[id(one)] for one in _tables(self.skeleton.module))
        copies = [copy_tree(layer, {}) for layer in originals]
        for copy in copies:
            take_hooks_off(copy)
        in_list = [number for one in self.lists for number in range(len(one.paths))]
        self.layers = [Part(copy, owners) for copy in copies]
        self.layer_tensors = [part.tensors for part in self.layers]
        self.likeness = Likeness(copies, paths=self.layer_paths, numbers=in_list)
        self.structures = self.likeness.structures
        pairs = () if old is None else zip(old.structures, old.templates, strict=True)
        modules = {structure: template.module for structure, template in pairs}
        self.templates: list[Template] = []
        for index, part in enumerate(self.layers):
            module = modules.setdefault(self.structures[index], part.module)
            own = self.likeness.own(index, module)
            self.templates.append(Template(module, part.names, own))
        self._refuse_shared_weights()
        self.returns: dict[str, Returns] = {}  # by `form`
        self._leaving: dict[int, list[Returns]] = {}  # of layers that may leave something besides
        self.changing_input: set[str] = set()  # structures that write into their hidden state
        self._modes_as_given, self._configs = model.training, configs_of(model)
        self._takes_use_cache = takes_use_cache(self.skeleton.module)
        self._taken = None if own_loss else argument_names(model)
        self._around = model.get_submodule(self.layer_paths[0].rpartition(".")[0])

    def set_training(self, training: bool, *, mode: Mode = "usual") -> None:  # noqa: FBT001
        """Put every part in training or evaluation mode.

        A model handed over in training mode keeps the modes of its modules (a frozen BatchNorm
        stays in evaluation mode); one handed over in evaluation mode, as `from_pretrained` returns
        it, trains everywhere. In a loop of the user's own, training may have another `mode`.
        """
        training &= mode != "evaluation"
        for part in (self.skeleton, *self.layers):
            as_given = self._modes_as_given and mode == "usual"
            part.set_training(training, as_given=as_given)

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
        """The option by which a batch asks for what single layers return."""
        return asked_for(COLLECTING, [], batch)

    @property
    def layer_share(self) -> float:
        """Of the parameters outside tables and heads, the share that is in layers."""
        around = self.outer_tensors.parameters.items()
        rest = sum(p.numel() for owner, p in around if owner not in self.tables)
        own = sum(p.numel() for one in self.layer_tensors for p in one.parameters.values())
        return own / max(1, own + rest)

    def close(self) -> None:
        """Let go of all tensors; the parts cannot run any more."""
        for part in (self.skeleton, *self.layers):
            part.unbind()

    def forget(self) -> None:
        """Forget what running layers has shown."""
        self.returns.clear()
        self._leaving.clear()
        self.changing_input.clear()

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """All is learnt anew inside the block; what was known of other batches is there after it.

        If the block fails, nothing else is.
        """
        returns, leaving = dict(self.returns), dict(self._leaving)
        changing = set(self.changing_input)
        self.forget()
        try:
            yield
        except BaseException:
            self.forget()
            raise
        finally:
            self.returns = returns | self.returns
            for index, own in leaving.items():
                self._leaving[index] = own + self._leaving.get(index, [])
            self.changing_input |= changing

    def prologue(
        self,
        batch: Batch,
        route: Route | None = None,
        *,
        stack: int = 0,
        delivered: Mapping[Key, Tensor] | None = None,
        learn: Handler | None = None,
        meet: Handler | None = None,
    ) -> Recording:
        """Run the model up to the last layer of a stack; record what its layers are given.

        Args:
            batch: the rows.
            route: how the model runs its layers; None: straight.
            stack: before which the code runs that is wanted.
            delivered: what earlier stacks have returned, as far as that code needs it.
            learn: runs a real layer of a structure whose form of return value is not known yet
                ([Note: returns]).
            meet: is told what every layer is given.

        Raises:
            ValueError: the model does not run its layers as the route says.
        """
        route, delivered = route or self.straight, delivered or {}
        recording, has_graph = Recording(), torch.is_grad_enabled()
        states = None if learn is None else self.layer_states()

        def visit(call: int, args: Any, kwargs: Any, handed: Sequence[Tensor]) -> None:
            index = route.layers[call]
            if learn is not None and has_graph and not torch.is_grad_enabled():
                raise CutError(f"the model runs layer {index} under torch.no_grad().")
            if states is not None:
                self.refuse_changed(index, states)
            args, kwargs = self._as_before(route, call, args, kwargs, delivered)
            recording.add(call, args, kwargs, handed)
            if meet is not None:
                meet(index, *plain_arguments(args, kwargs))
            if learn is not None and self.form(index, args, kwargs) not in self.returns:
                self.learn(index, learn, *plain_arguments(args, kwargs))
            if call == route.end(stack):
                raise LayersDone

        with contextlib.suppress(LayersDone):
            self._walk(batch, Walk(self, route, stack, delivered, visit))
        for key in route.rides(stack):
            recording.ride(delivered.get(key), key)
        return recording

    def layer_states(self) -> list[Any]:
        """What the user's layers are now, for `refuse_changed`."""
        return [stub.layer_state() for stub in self.stubs]

    def refuse_changed(self, index: int, states: Sequence[Any]) -> None:
        """Refuse a layer that is not what it was."""
        if self.stubs[index].layer_state() != states[index]:
            raise CutError(
                f"the model modifies layer {index} before calling it, or calls it with other "
                f"weights than its own (torch.func.functional_call). {APART}, as they were and "
                "with their own parameters: pass them what they need as an argument."
            )

    @staticmethod
    def _as_before(
        route: Route, call: int, args: Any, kwargs: Any, delivered: Mapping[Key, Tensor]
    ) -> tuple[Any, Any]:
        """A call's arguments, with those that a layer was given before as they were there."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        again = route.again
        known = {
            place: again[call, -1 - place]
            for place in range(len(leaves))
            if (call, -1 - place) in again
        }
        earlier = {place: delivered[key] for place, key in known.items() if key in delivered}
        if not earlier:
            return args, kwargs
        leaves = [earlier.get(place, leaf) for place, leaf in enumerate(leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return args, kwargs

    def learn(self, index: int, run: Handler, args: Any, kwargs: Any) -> Any:
        """Run a real layer; note the form of what it returns, and whether it writes into inputs."""
        # Copies: a hidden state may be the user's own batch, and a layer write into it.
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (args, kwargs))
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in tensors]
        form, structure = self.form(index, args, kwargs), self.structures[index]
        value = run(index, args, kwargs)
        if versions != [tensor._version for tensor in tensors]:
            self.changing_input.add(structure)
        found = Returns.learn(value, (list(args), dict(kwargs)), layer=index)
        self.returns[form] = found
        if leaves_more(args, kwargs):
            self._leaving.setdefault(index, []).append(found)
        return value

    def has_left(self, index: int, entries: Sequence[int]) -> bool:
        """Whether a layer leaves any of these entries besides what it returns."""
        return any(one.has_left(entries) for one in self._leaving.get(index, ()))

    def form(self, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """By what it is known what a layer returns, where it is called so.

        That is its structure; of one that may leave something besides (captures.py) also its number
        and what is there already: the first hidden state that hooks collect, say, comes with what
        the first layer was given.
        """
        if not leaves_more(args, kwargs):
            return self.structures[index]
        stores = {name: list(store) for name, store in stores_of(args, kwargs).items()}
        return f"{self.structures[index]} {index} {open_lists()} {stores}"

    def returned_by(self, index: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Returns:
        """What a layer returns that is called so.

        Raises:
            ValueError: nothing is known of such calls.
        """
        found = self.returns.get(self.form(index, args, kwargs))
        if found is None:
            raise CutError(
                f"layer {index} is called with other entries in its dicts than when the model was "
                "tried, or other outputs of it are collected. Set output_hidden_states and the "
                "like in the model's config, before the first batch."
            )
        return found

    def epilogue(
        self,
        batch: Batch,
        hidden: Tensor | Mapping[Key, Tensor],
        route: Route | None = None,
        *,
        on_delivery: Callable[[], None] | None = None,
    ) -> Any:
        """Run the model with `hidden` as the output of its last layer; returns its outputs.

        Args:
            batch: the rows.
            hidden: what the last layer has returned; or whatever earlier code has returned that the
                code after the layers needs.
            route: how the model runs its layers; None: straight.
            on_delivery: called when the code after the layers begins.
        """
        route = route or self.straight
        if isinstance(hidden, Tensor):
            hidden = dict.fromkeys(route.ends(route.num_stacks - 1), hidden)
        walk = Walk(self, route, route.num_stacks, hidden, None, on_delivery)
        outputs = self._walk(batch, walk)
        if any(isinstance(leaf, HandedOn | NotKept) for leaf in pytree.tree_leaves(outputs)):
            raise CutError(
                "the model's outputs contain what single layers returned (hidden states or "
                "attentions), which they did not when it was tried. Turn output_hidden_states and "
                "output_attentions off."
            )
        return outputs

    def walk_with(self, batch: Batch, handler: Handler) -> Any:
        """Run the model's code; every call of a layer becomes one of the handler."""
        with self.called_by(handler):
            return self.run(self.skeleton.module, batch)

    @contextlib.contextmanager
    def called_by(self, handler: Handler) -> Iterator[None]:
        """Inside the block every call of a layer becomes one of the handler."""
        for stub in self.stubs:
            stub.__dict__["_handler"] = handler
        try:
            yield
        finally:
            for stub in self.stubs:
                stub.__dict__["_handler"] = None

    def _walk(self, batch: Batch, walk: Walk) -> Any:
        """Run the model without its layers."""
        outputs = self.walk_with(batch, walk.call)
        walk.refuse_incomplete()
        return outputs

    def run(self, model: nn.Module, batch: Batch) -> Any:
        """What the model, or its skeleton, returns; without a cache, unless the batch asks for one.

        A cache is of no use in training, and some models attend otherwise where they make one.
        """
        batch = self.taken(batch)
        if "use_cache" in batch:
            return model(**batch)
        extra = {"use_cache": False} if self._takes_use_cache else {}
        with without_cache(self._configs):
            return model(**batch, **extra)

    def taken(self, batch: Batch) -> dict[str, Any]:
        """The entries of a batch that the model's code takes; others only the user's loss reads."""
        names = self._taken
        return like(batch, {k: v for k, v in batch.items() if names is None or k in names})

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


def _tables(model: nn.Module) -> list[Tensor]:
    """Matrices with a row for every word: of embeddings, and of heads."""
    embeddings, linear = (weights_of(model, kind) for kind in (nn.Embedding, nn.Linear))
    numbers = {len(one) for one in embeddings}
    heads = [one for one in linear if len(one) in numbers and len(one) > one.shape[1]]
    found = {id(one): one for one in (*embeddings, *heads) if format_of(one) is None}
    return list(found.values())


def _refuse_gradient_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CutError(
                f"parameter {name!r} has a hook for its gradient, which would never be called: "
                "gradients are made in the engine and go to its own optimizer. Remove the hook; a "
                "hook of a module that changes what it computes does run."
            )


@final
class Walk:
    """One run of the model's code with stubs: checks every call, and says what it returns."""

    def __init__(
        self,
        partition: Partition,
        route: Route,
        stack: int,
        delivered: Mapping[Key, Tensor],
        visit: Callable[[int, Any, Any, Sequence[Tensor]], None] | None,
        on_delivery: Callable[[], None] | None = None,
    ) -> None:
        """Calls of this stack are visited; those of earlier ones return what is delivered."""
        self._partition, self._route, self._stack = partition, route, stack
        self._delivered, self._visit, self._on_delivery = delivered, visit, on_delivery
        self._handed: list[Tensor] = []  # what the last call has handed on
        self._number = 0

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A layer is called."""
        number, route = self._number, self._route
        if number >= len(route.layers) or route.layers[number] != index:
            self._refuse_order(index)
        handed = self._received(number, index, args, kwargs)
        self._number += 1
        stack = route.stack_of(number)
        if stack == self._stack and self._visit is not None:
            self._visit(number, args, kwargs, handed)
        returns = self._partition.returned_by(index, args, kwargs)
        is_past = stack < self._stack
        stands_for = self._past if is_past else self._present
        made = {entry: stands_for(number, entry, handed[0]) for entry in returns.own}
        if not {*route.gives[number]} <= made.keys():
            raise CutError(
                f"layer {index} returns something that does not begin with a tensor of its own. "
                "Expected the hidden state, alone or first in a tuple."
            )
        self._handed = [made[entry] for entry in route.gives[number]]
        if is_past and number == len(route.layers) - 1 and self._on_delivery is not None:
            self._on_delivery()
        value = returns.wrap(made, (list(args), dict(kwargs)))
        if leaves_more(args, kwargs):
            value, left = value
            emit(left, args, kwargs)
        return value

    def refuse_incomplete(self) -> None:
        """Refuse a run that ended before the last layer."""
        number = len(self._route.layers)
        if self._number < number:
            found = f"{self._number} of its {number} layers"
            raise CutError(f"the model ran only {found}. {IN_ORDER}")

    def _refuse_order(self, index: int) -> None:
        calls = self._route.layers[: self._number]
        expected = self._route.layers[self._number : self._number + 1]
        before = expected[0] if expected else "the code after the layers"
        word = "a second time" if index in calls else f"before {before}"
        raise CutError(
            f"layer {index} is called {word}. {IN_ORDER} If layers are skipped at random "
            "(layerdrop), set that to 0."
        )

    def _received(self, number: int, index: int, args: Any, kwargs: Any) -> Sequence[Tensor]:
        """What a layer is handed on, among its arguments; of the first one the first tensor."""
        leaves = pytree.tree_leaves((args, kwargs))
        if self._route.is_first(number):
            first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
            if first is None:
                kind = type(first_argument(args, kwargs)).__name__
                raise CutError(
                    f"layer {index} is called with {kind} first. Expected the hidden state, a "
                    "tensor, as its first argument."
                )
            return [first]
        if not all(any(one is leaf for leaf in leaves) for one in self._handed):
            raise CutError(
                f"layer {index} is not given what layer {self._route.layers[number - 1]} returned: "
                f"the model does something between them. {AS_RETURNED}"
            )
        return self._handed

    def _present(self, call: int, entry: int, hidden: Tensor) -> Any:
        """What stands for something that a layer of the present stack returns."""
        if entry not in self._route.entries(call):
            return NotKept(self._route.layers[call], entry)
        with torch._C.DisableTorchFunctionSubclass():
            # A fresh object each time, so that identity tells which layer it came from.
            return hidden.detach().as_subclass(HandedOn)

    def _past(self, call: int, entry: int, hidden: Tensor) -> Any:
        """What a layer of an earlier stack has returned; if nobody needs it, NaN."""
        found = self._delivered.get((call, entry))
        if found is not None:
            return found.clone() if (call, entry) in self._route.written else found
        if (call, entry) not in self._route.seen:
            return self._present(call, entry, hidden)
        with torch._C.DisableTorchFunctionSubclass():
            one = hidden if hidden.is_floating_point() else hidden.float()
            return torch.full_like(one, torch.nan)
