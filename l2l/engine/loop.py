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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from l2l.engine.condition import Condition
from l2l.engine.guard import Guard, guarded
from l2l.engine.stepping import Stepping
from l2l.model import Rule, join_outputs, late, move_batch, require_loss, take_rows
from l2l.parameter_server import (
    HostGradients,
    UpdateOrder,
    WaitingUpdate,
    check_settings,
)
from l2l.run import Outline, Step, tensors_in
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
        with _as_the_engine_casts():
            batch = self._batch(args, kwargs)
            number = self._divisor(batch)
            outputs = self._outputs(batch)
            if number is None:
                return outputs
            rule = self._condition.network.facts.rule or Rule.UNKNOWN
            return _multiplied(outputs, rule.total([batch]) / number)

    def _outputs(self, batch: dict[str, Any]) -> Any:
        if not (self._model.training and torch.is_grad_enabled()):
            return self._plain(batch)
        call = self._begin(batch)
        anchor = torch.empty(0, requires_grad=True)
        return call.fill(_Outputs.apply(call, anchor))  # type: ignore[no-untyped-call]

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
        for name, value in found.items():
            leaves = pytree.tree_leaves(value) if torch.is_grad_enabled() else []
            if any(isinstance(one, Tensor) and one.requires_grad for one in leaves):
                raise ValueError(
                    f"{name!r} requires a gradient, and an engine gives none to what the model is "
                    "called with. Pass it with .detach(), or close the engine for this."
                )
        return found

    @guarded("model(...)")
    def _plain(self, batch: dict[str, Any]) -> Any:
        """What `engine.predict` gives, where the batch is."""
        found = self._stepping.predict(move_batch(batch, "cpu"), self._condition.chosen())
        device = _device_of(batch)
        return pytree.tree_map_only(Tensor, lambda one: one.to(device), found)

    @guarded("model(...)")
    def _begin(self, batch: dict[str, Any]) -> Call:
        """The forward side."""
        condition, has = self._condition, self._condition.has
        condition.refuse_if_unusable()
        condition.refuse_unless_training("calling model(...) with gradients")
        has_labels = "labels" in batch
        step, own = self._stepping.perform(
            move_batch(batch, "cpu"),
            condition.drawn(),
            settings=has.optimizer.settings(),
            needs_loss=has_labels,
            keep_outputs=not has_labels,
            side="forward",
        )
        condition.finish_step()
        shares = (condition.network.facts.rule or Rule.UNKNOWN).output_shares(own)
        if has_labels and step.keep_outputs and any(map(math.isnan, shares)):
            raise ValueError(
                f"the model's own loss is not made of those of {len(own)} microbatches. Give the "
                "engine microbatch_size=all rows of a batch; or leave the labels out, and take a "
                "loss of your own from the outputs."
            )
        return Call(self, step, shares, _device_of(batch), condition.era)

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
    def backward(self, call: Call, side: str) -> None:
        """The backward side."""
        condition = self._condition
        condition.refuse_if_unusable()
        if call.era != condition.era:
            raise RuntimeError(
                "loss.backward() comes after the weights have changed (optimizer.step(), "
                "engine.step or engine.load) since model(...) was called. Call backward first, or "
                "the model again."
            )
        condition.has.server.settle_all()
        self._gradients.bring_back_all()
        try:
            self._stepping.follow(call.step, side)
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
    return method


def _device_of(values: Any) -> torch.device:
    """Where the tensors are that a model is called with."""
    leaves = pytree.tree_leaves(dict(values) if isinstance(values, Mapping) else values)
    return next((one.device for one in leaves if isinstance(one, Tensor)), torch.device("cpu"))


def _as_the_engine_casts() -> contextlib.AbstractContextManager[object]:
    """Inside the block torch.autocast does nothing: the engine's precision says what is cast."""
    off = contextlib.ExitStack()
    for kind in ("cpu", "cuda"):
        off.enter_context(torch.autocast(kind, enabled=False))
    return off


def _multiplied(outputs: Any, factor: Any) -> Any:
    """Outputs with their loss multiplied."""
    loss, (flat, form) = require_loss(outputs), pytree.tree_flatten(outputs)
    return pytree.tree_unflatten([one * factor if one is loss else one for one in flat], form)


@final
class Call:
    """One call of the model: what its graph holds."""

    def __init__(
        self, loop: Loop, step: Step, shares: Sequence[float], device: torch.device, era: int
    ) -> None:
        """The forward side has run.

        Args:
            loop: whose it is.
            step: that has run.
            shares: what each microbatch's own loss counts.
            device: where the user's tensors are.
            era: of the weights.
        """
        self._loop, self.step, self._shares, self._device, self.era = (
            loop,
            step,
            shares,
            device,
            era,
        )
        self.is_spent = False
        self.is_fused = not step.keep_outputs
        self.whole: Whole | None = None if self.is_fused else self._whole()
        self._of_whole: Sequence[Tensor | None] = ()  # gradients of all outputs but the loss

    def loss(self) -> Tensor:
        """The loss that a fused step has taken."""
        return torch.tensor(self.step.loss(), dtype=torch.float32, device=self._device)

    def fill(self, results: Sequence[Tensor]) -> Any:
        """The outputs, made of what hangs on the graph; what nobody has made yet comes late."""
        if self.whole is not None:
            return self.whole.outline.filled(results)
        outline = self.step.outline
        assert outline is not None
        loss, handle = results
        made: list[Sequence[Tensor]] = []

        def make() -> Sequence[Tensor]:
            if not made:
                with torch.enable_grad():
                    made.append(_LateOutputs.apply(self, handle))  # type: ignore[no-untyped-call]
            return made[0]

        found = [
            loss if place == outline.loss else late(partial(_nth, make, place), dtype)
            for place, dtype in enumerate(outline.dtypes)
        ]
        return outline.filled(found)

    def make(self) -> Whole:
        """All outputs of a fused step."""
        with _as_the_engine_casts():
            self._loop.make_outputs(self)
        self.whole = self._whole()
        return self.whole

    def note(self, gradients: Sequence[Tensor | None]) -> None:
        """Gradients have come of outputs that were made late."""
        self._of_whole = gradients

    def _whole(self) -> Whole:
        step = self.step
        parts = [step.outputs[m] for m in sorted(step.outputs)]
        flags = [step.differentiable[m] for m in sorted(step.outputs)]
        step.outputs.clear()
        return Whole.of(parts, flags, self._shares, self._device)

    def backward(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of the outputs to the weights."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) asks for gradients of gradients, which an engine "
                "does not make. Leave create_graph out."
            )
        if self.is_spent:
            raise RuntimeError(
                "backward() a second time through the same outputs of model(...): what it needs "
                "was let go of (retain_graph has no effect on it). Add the losses and call "
                "backward once, or call the model again."
            )
        side, step = "backward", self.step
        if self.is_fused:
            factor = gradients[0]
            if all(one is None for one in self._of_whole):
                if factor is None:
                    return
                side, step.factor = "fused", float(factor) / step.loss_scale
                self._loop.note_scale(float(factor))
            else:
                gradients = self._with_loss(factor)
                step.begin_anew()
        if side == "backward":
            assert self.whole is not None
            step.output_gradients = self.whole.parted(gradients, self._shares)
        self.is_spent = True
        with _as_the_engine_casts():
            self._loop.backward(self, side)
        self._loop.publish()

    def _with_loss(self, of_loss: Tensor | None) -> Sequence[Tensor | None]:
        """Gradients of all outputs that were made late, with that of the loss among them."""
        outline, gradients = self.step.outline, list(self._of_whole)
        assert outline is not None
        assert outline.loss is not None
        mine = gradients[outline.loss]
        if of_loss is not None:
            gradients[outline.loss] = of_loss if mine is None else mine + of_loss
        return gradients


@final
@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """All outputs of a call."""

    outline: Outline
    tensors: list[Tensor]
    rows: list[list[int]]
    """For each of them, how many of its rows are of each microbatch; none: it is a scalar."""
    differentiable: list[bool]

    @classmethod
    def of(
        cls,
        parts: list[Any],
        flags: Sequence[Sequence[bool]],
        shares: Sequence[float],
        device: torch.device,
    ) -> Whole:
        """Those of all microbatches, joined, where the user's tensors are."""
        outputs = join_outputs(parts, list(shares))
        each = list(zip(*map(tensors_in, parts), strict=True))
        return cls(
            Outline.of(outputs),
            [one.to(device) for one in tensors_in(outputs)],
            [[len(one) for one in same] if same[0].dim() else [] for same in each],
            [
                any(own) and same[0].is_floating_point()
                for own, same in zip(zip(*flags, strict=True), each, strict=True)
            ],
        )

    def parted(
        self, gradients: Sequence[Tensor | None], shares: Sequence[float]
    ) -> dict[int, list[Tensor | None]]:
        """The gradients of the outputs of each microbatch."""
        found: dict[int, list[Tensor | None]] = {m: [] for m in range(len(shares))}
        for rows, given in zip(self.rows, gradients, strict=True):
            own: Sequence[Tensor | None] = [given] * len(shares)
            if given is not None and len(shares) > 1:
                own = torch.split(given, rows) if rows else [given * share for share in shares]
            for m, one in enumerate(own):
                found[m].append(one)
        return found


def _nth(make: Callable[[], Sequence[Tensor]], place: int) -> Tensor:
    return make()[place]


def _return(ctx: Any, tensors: Sequence[Tensor], differentiable: Sequence[bool]) -> Any:
    """What the forward of a node returns."""
    ctx.set_materialize_grads(False)
    pairs = zip(tensors, differentiable, strict=True)
    ctx.mark_non_differentiable(*(one for one, flag in pairs if not flag))
    return tuple(tensors)


@final
class _Outputs(torch.autograd.Function):
    """The node that outputs of the model hang on, or its loss and what others hang on."""

    @staticmethod
    @override
    def forward(ctx: Any, call: Call, anchor: Tensor) -> Any:
        ctx.call, whole = call, call.whole
        if whole is None:
            return _return(ctx, [call.loss(), torch.empty(0)], [True, True])
        found = _return(ctx, whole.tensors, whole.differentiable)
        whole.tensors.clear()
        return found

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.call.backward(gradients)
        return None, None


@final
class _LateOutputs(torch.autograd.Function):
    """The node that outputs hang on which were made when somebody used them."""

    @staticmethod
    @override
    def forward(ctx: Any, call: Call, handle: Tensor) -> Any:
        ctx.call, whole = call, call.make()
        found = _return(ctx, whole.tensors, whole.differentiable)
        whole.tensors.clear()
        return found

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.call.note(gradients)
        return None, torch.zeros(0)
