"""The user's own training loop: the model itself is called, and `loss.backward()` works.

    outputs = model(**batch)      the forward side of a step; outputs carry a graph of one node
    loss = ...                    whatever the user computes from them
    loss.backward()               the backward side: gradients are added to `.grad` of parameters
    engine.optimizer.step()       the update, by what is in `.grad` then
    engine.optimizer.zero_grad()

[Note: sides] in shape.py of `schedule` says what runs. Between the two nothing of a step is on the
device: what the backward side needs waits on the host, and is let go of with the graph. So a
forward without a backward costs nothing in the end, several forwards may come before their
backwards, and other calls (a reference under `torch.no_grad()`) may come in between.

The model keeps its class. Its `forward` and its `generate` are attributes of the object while the
engine is open; they are of no effect for copies of it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import types
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from l2l.engine.call import Call, as_the_engine_casts
from l2l.engine.condition import Condition
from l2l.engine.guard import Guard, guarded
from l2l.engine.stepping import Stepping
from l2l.model import (
    Mode,
    Rule,
    asking_in,
    move_batch,
    require_loss,
    take_rows,
    without_graph,
)
from l2l.parameter_server import (
    HostGradients,
    UpdateOrder,
    WaitingUpdate,
    check_settings,
)
from l2l.run import Step
from l2l.schedule import Lane


@final
class Loop:
    """Runs calls of the user's model, their backward passes, and the updates."""

    def __init__(
        self, condition: Condition, stepping: Stepping, guard: Guard, generate: Callable[..., Any]
    ) -> None:
        """Nothing was called yet; `generate` is what the model's own becomes."""
        self._condition, self._stepping, self._guard = condition, stepping, guard
        self._generate = generate
        self._model = condition.has.model
        has_loop = condition.has.gradients is not None
        condition.has.optimizer.connect(
            self.state_of,
            update=self.update if has_loop else None,
            set_state=self.set_state if has_loop else None,
        )
        if has_loop:
            self._attach()
        self._divides: dict[frozenset[str], bool] = {}  # by entries of a batch
        self._have_losses: set[frozenset[str]] = set()  # batches without labels that have a loss
        self._own: dict[str, Any] = {}  # attributes of the model that ours stand in for

    # ----------------------------------------------------------------------------------------------
    # The model

    def _attach(self) -> None:
        """Let calls of the model come here, and gradients to its parameters."""
        model, loop = self._model, weakref.ref(self)
        reader = self._condition.has.server.reader
        reader.has_gradients, reader.gradients = True, self._gradients
        attributes = model.__dict__
        self._own = {name: attributes[name] for name in CALLS if name in attributes}
        for name in CALLS:
            if hasattr(model, name):
                attributes[name] = types.MethodType(_calling(model, name, loop), model)

    @guarded("engine.optimizer", within="engine.step")
    def state_of(self, owner: str) -> dict[str, Any]:
        """A parameter's state in the server."""
        self._condition.clean_up()
        return self._condition.has.server.state_of(owner)

    @guarded("engine.optimizer.load_state_dict")
    def set_state(self, owner: str, state: Mapping[str, Any]) -> None:
        """Overwrite a parameter's state in the server."""
        self._condition.refuse_if_unusable()
        self._condition.has.server.set_state(owner, state)

    @property
    def is_running(self) -> bool:
        """Whether this thread runs the model's own code for the engine."""
        return self._guard.runs_here

    def detach(self) -> None:
        """Let the model be called as any other again."""
        if self._condition.has.gradients is None:
            return
        self._gradients.bring_back_all()
        for name in CALLS:
            self._model.__dict__.pop(name, None)
        self._model.__dict__.update(self._own)

    def generate(self, *args: Any, **options: Any) -> Any:
        """What `engine.generate` gives, where the prompts are."""
        device = _device_of((args, options))
        found = self._generate(*args, **options)
        return pytree.tree_map_only(Tensor, lambda one: one.to(device), found)

    def to(self, *args: Any, **kwargs: Any) -> nn.Module:
        """The model, which stays where it is: its weights come to the device by themselves.

        Raises:
            RuntimeError: it is to have another type.
        """
        dtype: torch.dtype | None = torch._C._nn._parse_to(*args, **kwargs)[1]
        found = {one.dtype for one in self._model.parameters() if one.is_floating_point()}
        if dtype is not None and found != {dtype}:
            raise RuntimeError(
                f"model.to({dtype}) while its weights are in an engine. Close the engine first, or "
                "make it with the precision that layers are to run in: precision=."
            )
        return self._model

    def cuda(self, device: object = None) -> nn.Module:
        """The model, likewise."""
        return self._model

    cpu = cuda

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs, with a graph if it is training and gradients are on."""
        with as_the_engine_casts():
            batch = self._batch(args, kwargs)
            number = self._divisor(batch)
            outputs = self._outputs(batch)
            if number is None:
                return outputs
            rule = self._condition.network.facts.rule or Rule.UNKNOWN
            return _multiplied(outputs, rule.total([batch]) / number)

    def _outputs(self, batch: dict[str, Any]) -> Any:
        asking = asking_in(batch)
        is_frozen = self._condition.has.is_frozen and not asking and not self._model.training
        if is_frozen or not torch.is_grad_enabled():
            return self._plain(batch)
        modes = self._condition.network.modes
        modes.tell_of_hooks()
        call = self._begin(without_graph(batch), modes.now())
        return call.outputs(list(asking.values()))

    def _divisor(self, batch: dict[str, Any]) -> Any:
        """What the loss is divided by instead of the number of its labels: taken from the batch.

        Trainers of transformers give that number, of labels in all batches of a step. Without it
        the loss is a mean, which microbatches can be weighed by; so it is taken into account
        afterwards. Whether a model uses it is tried once, on a row.

        Raises:
            ValueError: it divides a part of the loss only, beside a loss of routers, say.
        """
        if DIVISOR not in batch or "labels" not in batch:
            return None
        kind = frozenset(batch)
        if kind not in self._divides:
            row = take_rows(move_batch(batch, "cpu"), 0, 1)
            first, second = (self._try_loss({**row, DIVISOR: one}) for one in (1, MANY_ITEMS))
            divides = math.isclose(first, MANY_ITEMS * second, rel_tol=1e-2)
            if not divides and not math.isclose(first, second, rel_tol=1e-2):
                raise ValueError(
                    f"the model divides a part of its loss by {DIVISOR}, and not all of it: it "
                    f"is {first:.6g} for 1 item and {second:.6g} for {MANY_ITEMS:,}. Call the "
                    f"model without {DIVISOR}, or without what it adds (output_router_logits=False "
                    "in the config of a mixture model), and divide the loss yourself."
                )
            self._divides[kind] = divides
        number = batch.pop(DIVISOR)
        return number if self._divides[kind] else None

    @guarded("model(...)")
    def _try_loss(self, row: dict[str, Any]) -> float:
        """The loss of a row; nothing is learnt from it of what losses average over."""
        chosen = self._condition.chosen()
        step, _ = self._stepping.perform(row, chosen, needs_loss=False, keep_outputs=True)
        return float(require_loss(step.outputs[0]))

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What the model was called with, by the names of its arguments."""
        signature = inspect.signature(self._model.forward)
        found: dict[str, Any] = {}
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            kind, default = signature.parameters[name].kind, signature.parameters[name].default
            if kind is inspect.Parameter.VAR_POSITIONAL:
                raise TypeError(
                    f"{type(self._model).__name__} takes {name!r} without names. Call it with "
                    "arguments by name while its weights are in an engine."
                )
            if kind is inspect.Parameter.VAR_KEYWORD:
                found.update({key: one for key, one in value.items() if one is not None})
            elif value is not None or default is not None:
                found[name] = value
        if self._model.training:
            found.pop("use_cache", None)  # of no use without a next token
        if torch.is_grad_enabled():
            _refuse_hidden_sources(found)
        return found

    @guarded("model(...)")
    def _plain(self, batch: dict[str, Any]) -> Any:
        """What `engine.predict` gives, where the batch is."""
        found = self._stepping.predict(move_batch(batch, "cpu"), self._condition.chosen())
        device = _device_of(batch)
        return pytree.tree_map_only(Tensor, lambda one: one.to(device), found)

    @guarded("model(...)")
    def _begin(self, batch: dict[str, Any], mode: Mode) -> Call:
        """The forward side; what the batch asks gradients for are leaves."""
        return self._begun(batch, mode)

    def _begun(self, batch: dict[str, Any], mode: Mode) -> Call:
        condition, has = self._condition, self._condition.has
        condition.refuse_if_unusable()
        sources = list(asking_in(batch).values())
        if not sources:
            condition.refuse_unless_training("calling model(...) with gradients")
        condition.refuse_if_averaged("calling model(...) with gradients")
        has_labels = "labels" in batch or frozenset(batch) in self._have_losses
        step, own = self._stepping.perform(
            move_batch(batch, "cpu"),
            condition.chosen() if mode == "evaluation" else condition.drawn(),
            mode=mode,
            settings=has.optimizer.settings(),
            needs_loss=has_labels,
            keep_outputs=not has_labels,
            side="forward",
        )
        condition.finish_step()
        condition.network.show_buffers()  # which nobody sees being read
        shares = (condition.network.facts.rule or Rule.UNKNOWN).output_shares(own)
        is_known = not any(map(math.isnan, shares))
        if not has_labels and not is_known and self._has_loss(step):
            self._have_losses.add(frozenset(batch))
            return self._begun(batch, mode)
        if has_labels and step.keep_outputs and not is_known:
            raise ValueError(
                f"the model's own loss is not made of those of {len(own)} microbatches. Give the "
                "engine microbatch_size=all rows of a batch; or leave the labels out, and take a "
                "loss of your own from the outputs."
            )
        return Call(self, step, shares, _device_of(batch), condition.era, sources)

    def _has_loss(self, step: Step) -> bool:
        """Whether there is a loss in the outputs of a batch without labels.

        Raises:
            ValueError: there is another number, of each microbatch: nobody knows that of all.
        """
        outputs = step.outputs[0]
        with contextlib.suppress(ValueError):
            require_loss(outputs)
            return True
        for place, one in enumerate(pytree.tree_leaves(outputs)):
            if isinstance(one, Tensor) and one.is_floating_point() and not one.dim():
                raise ValueError(
                    f"the model returns a number, as output {place}, and nobody knows how those of "
                    f"{len(step.outputs)} microbatches make that of the batch. Return it as 'loss' "
                    "in a dict, or first in a tuple, if it is the loss; or give the engine "
                    "microbatch_size=all rows of a batch."
                )
        return False

    @guarded("outputs of model(...)")
    def make_outputs(self, call: Call) -> None:
        """Outputs of a call that has only taken the loss so far."""
        if call.is_spent or call.era != self._condition.era:
            raise RuntimeError(
                "an output of model(...) is used that nobody had asked for when loss.backward() "
                "was called, or the weights changed; it cannot be made any more. Ask for it before "
                "(a .clone() of it will do), or call the model again under torch.no_grad()."
            )
        self._stepping.follow(call.step, "outputs")

    @guarded("loss.backward()")
    def backward(self, step: Step, era: int, side: str) -> None:
        """The backward side, of a step that weights of some era have begun."""
        condition = self._condition
        condition.refuse_if_unusable()
        if era != condition.era:
            raise RuntimeError(
                "loss.backward() comes after the weights have changed (optimizer.step(), "
                "engine.step or engine.load) since model(...) was called. Call backward first, or "
                "the model again."
            )
        condition.has.server.settle_all()
        self._gradients.bring_back_all()
        try:
            self._stepping.follow(step, side)
        except BaseException:
            self._gradients.forget_new()
            raise

    def note_scale(self, scale: float) -> None:
        """The loss will be multiplied with about this again: small gradients are not lost then."""
        if 0.0 < scale < math.inf:
            self._condition.seed_scale = scale

    def publish(self) -> None:
        """Show the gradients; hooks may use the engine."""
        self._gradients.publish()

    @property
    def _gradients(self) -> HostGradients:
        found = self._condition.has.gradients
        assert found is not None
        return found

    # ----------------------------------------------------------------------------------------------
    # The optimizer

    @guarded("engine.optimizer.step", within="engine.step")
    def update(self) -> None:
        """Update every parameter that has a gradient, by what that is now."""
        if self._guard.is_within("engine.step"):  # which has done it
            return
        condition, has = self._condition, self._condition.has
        condition.refuse_if_unusable()
        settings = has.optimizer.settings()
        check_settings(has.server, settings)
        with condition.network.running():
            condition.finish_step()
            has.server.settle_all()
            self._gradients.bring_back_all()
            factor = 1.0
            if has.clip_norm is not None:
                factor = min(1.0, has.clip_norm / (self._gradients.norm() + 1e-6))
            done = has.device.record(Lane.DRAIN)
            try:
                for unit, gradient, received in self._gradients.present():
                    order = UpdateOrder(settings=settings, received=received, factor=factor)
                    if self._gradients.send_away(unit, received):
                        has.server.waiting[unit] = WaitingUpdate(
                            unit=unit, order=partial(_same, order), drained=done, gradient=gradient
                        )
                    else:
                        has.server.update(unit, gradient, order)
            except BaseException:
                condition.tear()
                raise
            condition.count()


def _same(order: UpdateOrder) -> UpdateOrder:
    return order


CALLS = ("forward", "generate", "to", "cuda", "cpu")
DIVISOR = "num_items_in_batch"
MANY_ITEMS = 1 << 20  # by which hardly anything is left of what is divided


def _calling(model: nn.Module, name: str, loop: weakref.ref[Loop]) -> Callable[..., Any]:
    """A method that is the loop's for this model, but not for copies of it.

    While the engine runs the model's own code on this thread, as in a proof, that is what runs.
    """
    own = getattr(model.__dict__.get(name), "__func__", None) or getattr(type(model), name)

    @functools.wraps(own)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        found = loop()
        if self is not model_of() or found is None or found.is_running:
            return own(self, *args, **kwargs)
        return getattr(found, name)(*args, **kwargs)

    model_of = weakref.ref(model)
    apart: Any = torch.compiler.disable  # else a compiler would look into the engine
    disabled: Callable[..., Any] = apart(method)
    return disabled


def _device_of(values: Any) -> torch.device:
    """Where the tensors are that a model is called with."""
    leaves = pytree.tree_leaves(dict(values) if isinstance(values, Mapping) else values)
    return next((one.device for one in leaves if isinstance(one, Tensor)), torch.device("cpu"))


def _refuse_hidden_sources(batch: Mapping[str, Any]) -> None:
    """Refuse what requires a gradient inside of other objects, where nobody cuts it into rows.

    Raises:
        ValueError: with what to do instead.
    """
    for name, value in batch.items():
        leaves = (one for one in pytree.tree_leaves(value) if isinstance(one, Tensor))
        if any(one.requires_grad for one in leaves) and not asking_in({name: value}):
            raise ValueError(
                f"{name!r} holds a tensor that requires a gradient, in a "
                f"{type(value).__name__}. Expected it to be an argument of its own, or in a "
                "list of rows; or pass it with .detach()."
            )


def _multiplied(outputs: Any, factor: Any) -> Any:
    """Outputs with their loss multiplied."""
    loss, (flat, form) = require_loss(outputs), pytree.tree_flatten(outputs)
    return pytree.tree_unflatten([one * factor if one is loss else one for one in flat], form)
