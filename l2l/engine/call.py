"""A call of the user's model, between its forward side and its backward side.

The graph of its outputs holds it: `_Outputs` is the node that they hang on. Outputs that nobody has
asked for yet are made when they are first used, and hang on a node of their own (`_LateOutputs`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor
from typing_extensions import override

from l2l.model import join_outputs, late
from l2l.run import Outline, Step, tensors_in


class Sides(Protocol):
    """What runs the sides of a call's step."""

    def make_outputs(self, call: Call) -> None:
        """Outputs of a call that has only taken the loss so far."""

    def backward(self, step: Step, era: int, side: str) -> None:
        """The backward side, of a step that weights of some era have begun."""

    def note_scale(self, scale: float) -> None:
        """The loss was multiplied with about this."""

    def publish(self) -> None:
        """Show the gradients."""


@final
class Call:
    """One call of the model: what its graph holds."""

    def __init__(
        self,
        sides: Sides,
        step: Step,
        shares: Sequence[float],
        device: torch.device,
        era: int,
        sources: Sequence[Tensor],
    ) -> None:
        """The forward side has run.

        Args:
            sides: what runs them.
            step: that has run.
            shares: what each microbatch's own loss counts.
            device: where the user's tensors are.
            era: of the weights.
            sources: what the microbatches were cut from, as far as that gets gradients.
        """
        self._sides, self.step, self._shares, self._device = sides, step, shares, device
        self.era, self._sources = era, sources
        self.is_spent = False
        self.is_fused = not step.keep_outputs
        self.whole: Whole | None = None if self.is_fused else self._whole()
        self._of_whole: Sequence[Tensor | None] = ()  # gradients of all outputs but the loss

    def loss(self) -> Tensor:
        """The loss that a fused step has taken."""
        return torch.tensor(self.step.loss(), dtype=torch.float32, device=self._device)

    def outputs(self, given: Sequence[Tensor]) -> Any:
        """The outputs, in a graph that goes back to what the user's code has given."""
        anchor = torch.empty(0, requires_grad=True)
        return self._filled(_Outputs.apply(self, anchor, *given))  # type: ignore[no-untyped-call]

    def _filled(self, results: Sequence[Tensor]) -> Any:
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
        with as_the_engine_casts():
            self._sides.make_outputs(self)
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

    def backward(
        self, gradients: Sequence[Tensor | None], *, collects: bool
    ) -> Sequence[Tensor | None]:
        """Take the gradients of the outputs to the weights.

        Args:
            gradients: of the outputs.
            collects: whether those of weights are wanted.

        Returns:
            those of what the model was called with, as far as they are asked for.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) asks for gradients of gradients, which an engine "
                "does not make. Leave create_graph out."
            )
        if self.is_spent:
            raise RuntimeError(
                "backward() a second time through the same outputs of model(...): what it needs "
                "was let go of. Give retain_graph=True to all backwards but the last, or add the "
                "losses and call backward once."
            )
        keeps = torch._C._autograd._get_current_graph_task_keep_graph()
        side, step = "backward", self.step.again() if keeps else self.step
        of_whole, self._of_whole = self._of_whole, ()
        if self.is_fused:
            factor = gradients[0]
            if all(one is None for one in of_whole):
                if factor is None:
                    return [None for _ in self._sources]
                side, step.factor = "fused", float(factor) / step.loss_scale
                self._sides.note_scale(float(factor))
            else:
                gradients = self._with_loss(factor, of_whole)
                step.begin_anew()
        if side == "backward":
            assert self.whole is not None
            step.output_gradients = self.whole.parted(gradients, self._shares)
        self.is_spent, step.collects = True, collects  # also if it fails
        with as_the_engine_casts():
            self._sides.backward(step, self.era, side)
        self.is_spent = not keeps
        self._sides.publish()
        return self._of_sources(step)

    def _of_sources(self, step: Step) -> Sequence[Tensor | None]:
        """Gradients of what the model was called with, put together from those of microbatches."""
        parked, step.of_inputs = step.of_inputs, None
        if parked is None:
            return [None for _ in self._sources]
        parts, given = list[Tensor](), list[Tensor]()
        for m, sources in enumerate(step.sources):
            for source, found in zip(sources, parked.tensors(f"i m{m}"), strict=True):
                if found.numel():
                    parts.append(source)
                    given.append((found.float() * step.factor).to(source.dtype))
        if not parts:
            return [None for _ in self._sources]
        keeps = step.keeps  # the graph in which they were cut
        return torch.autograd.grad(
            parts, self._sources, given, allow_unused=True, retain_graph=keeps
        )

    def _with_loss(
        self, of_loss: Tensor | None, of_whole: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Gradients of all outputs that were made late, with that of the loss among them."""
        outline, gradients = self.step.outline, list(of_whole)
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


def as_the_engine_casts() -> contextlib.AbstractContextManager[object]:
    """Inside the block torch.autocast does nothing: the engine's precision says what is cast."""
    off = contextlib.ExitStack()
    for kind in ("cpu", "cuda"):
        off.enter_context(torch.autocast(kind, enabled=False))
    return off


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
    def forward(ctx: Any, call: Call, anchor: Tensor, *sources: Tensor) -> Any:
        ctx.call, whole = call, call.whole
        if whole is None:
            return _return(ctx, [call.loss(), torch.empty(0)], [True, True])
        found = _return(ctx, whole.tensors, whole.differentiable)
        whole.tensors.clear()
        return found

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Any) -> Any:
        of_anchor = ctx.next_functions[0][0]  # runs unless only gradients of inputs are asked for
        collects = torch._C._will_engine_execute_node(of_anchor)
        return None, None, *ctx.call.backward(gradients, collects=collects)


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
