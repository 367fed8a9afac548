"""Everything that belongs to one run of a schedule, and to nothing after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from l2l.device import Event, UpdateFailedError
from l2l.model import Call, Handed, Key, Microbatch, Mode, Pointwise, Rule, Source
from l2l.parameter_server import UpdateOrder
from l2l.run.lookup import RowSet
from l2l.run.outline import Outline
from l2l.run.program import Program
from l2l.run.stash import Parked


@dataclass(slots=True, kw_only=True)
class Step:
    """Everything that belongs to one run of a schedule and to nothing after it."""

    program: Program
    number: int
    layers: tuple[int, ...]  # that run
    microbatches: list[Microbatch]  # on the host
    rule: Rule
    total: int  # what the loss of the whole batch averages over
    device_losses: Tensor  # [microbatches, 2] on the device: loss times scale, weight
    losses: Tensor  # the same on the host; NaN until reported
    norms: dict[str, Tensor]  # per unit, on the host: norm of each gradient
    flags: dict[str, Tensor] = field(default_factory=dict)
    """Of several ranks: per unit, on the host, how many had a gradient of each parameter."""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # per unit, what is trained
    reduced: dict[str, Tensor] = field(default_factory=dict)  # the same on the device, and norms
    finite: dict[str, Tensor] = field(default_factory=dict)
    """On the device: whether a gradient is finite that is used up before the host knows."""
    survival: Mapping[int, float] = field(default_factory=dict)
    """Of layers that might have been left out ([Note: survival] in depth.py)."""
    changes: dict[str, float] = field(default_factory=dict)
    """Per unit, the sum of squares of what its update has changed; of updates that are done."""
    num_own: int | None = None  # microbatches that are not there for the sake of other ranks
    settings: Mapping[str, Mapping[str, Any]] | None = None  # of the optimizer; None: no training
    clip_norm: float | None = None
    keep_outputs: bool = False
    divide_by_weight: bool = False
    checks_norms: bool = False  # whether a gradient that is not finite skips the step
    loss_scale: float = 1.0
    is_said: bool = False  # that it was skipped
    calls: dict[int, dict[int, Call]] = field(default_factory=dict)
    # By stack and microbatch:
    through: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Recorded tensors that require gradients."""
    hidden_requires: dict[tuple[int, int], bool] = field(default_factory=dict)
    gathered: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Of recorded tensors, those with a gradient so far."""
    rides: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Of recorded tensors, those that later code needs."""
    asides: dict[tuple[Key, int], Tensor] = field(default_factory=dict)
    """What layers have left for later code, by microbatch, and below its gradients."""
    aside_gradients: dict[tuple[Key, int], Tensor] = field(default_factory=dict)
    joined: list[Any] = field(default_factory=list)
    """Of a joint loss: what was handed over by every microbatch, then its gradients."""
    pointwise: tuple[Pointwise, ...] = ()
    """What the model's code does with logits of a head in slices before its loss."""
    squares: dict[str, Tensor] = field(default_factory=dict)
    """On the device: of a head in slices, the square of the gradient's norm so far."""
    received: dict[str, set[str]] = field(default_factory=dict)  # unit -> parameters
    rows: RowSet | None = None  # of tables that are looked up on the host
    handed: dict[tuple[int, int], Handed] = field(default_factory=dict)  # layer, microbatch
    grown: dict[str, float] = field(default_factory=dict)  # squared norms the host has added
    buffers_before: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    outer_at_first: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Buffers around the layers that training changes, and what they were before the step."""
    buffers_at_first: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """By layer, what its buffers that training changes were before the step."""
    outputs: dict[int, Any] = field(default_factory=dict)
    compiles: bool = False  # whether layers are to run through a compiler
    waited_for_compiler: bool = False  # whether passes ran as they are since nothing was ready
    differentiable: dict[int, list[bool]] = field(default_factory=dict)
    """By microbatch, which of the tensors in its outputs require a gradient."""
    output_gradients: dict[int, list[Tensor | None]] = field(default_factory=dict)
    """By microbatch, those of the tensors in its outputs, which the user's own code has found."""
    sides: Mapping[str, Program] = field(default_factory=dict)
    """Of a step in two sides, what may follow the first: "outputs", "backward", or "fused"."""
    outline: Outline | None = None  # of the outputs of a fused one
    mode: Mode = "usual"  # of the user's modules
    keeps: bool = False  # whether a backward side leaves all as it was, for another one
    collects: bool = True  # whether anybody wants the gradients of parameters
    factor: float = 1.0  # what its gradients are multiplied with when they are collected
    sources: Sequence[Sequence[Tensor]] = ()
    """By microbatch, what in it requires a gradient, in the graph of the user's own tensors."""
    input_gradients: dict[tuple[Source, int], Tensor] = field(default_factory=dict)
    """Of these, by microbatch, gradients that later code has found; earlier code adds its own."""
    of_inputs: Parked | None = None  # all of them, by microbatch, once the backward side has run
    staged: Parked | None = None  # gradients that its first side has left in staging
    buffers_at_loss: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    """By microbatch, buffers around the layers as the code after them found them."""
    parked: Parked | None = None
    """Of a step in two sides: what the first has left to the second."""
    num_tokens: int = 0
    num_tokens_elsewhere: int = 0  # on other ranks
    reported: Event | None = None
    drained: Event | None = None
    collected: Event | None = None
    updates_submitted: bool = False  # whether anything of this step is updated, or may be
    decided: tuple[float | None] | None = None  # the factor of all updates, once one was asked for
    witness: Callable[[str, Tensor], None] | None = None
    """Is shown every gradient where it would be used: of a step that changes nothing."""

    @property
    def training(self) -> bool:
        """Whether this run ends in updates."""
        return self.settings is not None

    def again(self) -> Step:
        """The same step for a backward side after which there may be another."""
        of_step = ((one.name, getattr(self, one.name)) for one in fields(self))
        own: dict[str, Any] = {n: copy(one) for n, one in of_step if isinstance(one, dict | list)}
        own["received"] = {unit: set(names) for unit, names in self.received.items()}
        own["buffers_before"] = deepcopy(self.buffers_before)  # layers write into them
        own["handed"] = {}  # a graph that is there once
        return replace(self, **own, keeps=True)

    def move(self, device: torch.device) -> None:
        """Let what other sides need, and is in no cell, be on a device, or wait on the host."""
        for kept in (self.asides, self.aside_gradients, self.input_gradients):
            kept.update({key: one.to(device) for key, one in kept.items()})  # type: ignore[misc]

    def begin_anew(self) -> None:
        """Forget the gradients of a loss that was taken: they are made otherwise."""
        self.staged = None
        self.received.clear()
        self.aside_gradients.clear()
        self.input_gradients.clear()
        self.joined.clear()

    def forget_inputs(self) -> None:
        """Let go of what only the passes need; a report keeps the rest of a step alive."""
        for kept in (self.microbatches, self.calls, self.through, self.gathered, self.joined):
            kept.clear()
        for noted in (
            self.outer_at_first,
            self.buffers_at_first,
            self.hidden_requires,
            self.buffers_before,
            self.handed,
            self.rides,
            self.asides,
            self.aside_gradients,
            self.input_gradients,
            self.output_gradients,
            self.buffers_at_loss,
        ):
            noted.clear()

    def share(self, part: Mapping[str, Any]) -> float:
        """What the loss of some rows or positions counts in the step: their n / N."""
        if self.rule in (Rule.SUM_AND_WEIGHT, Rule.UNKNOWN):
            return 1.0
        return self.rule.count(part) / self.total

    # What follows is asked once the losses were reported, and the norms drained, to the host.

    def loss(self) -> float:
        """The loss of the whole batch."""
        total = torch.zeros(())
        for contribution in self.losses[:, 0]:
            total = total + contribution
        return float(total) * self.plain_factor(scaled=False)

    def plain_factor(self, *, scaled: bool) -> float:
        """What sums over the batch must be multiplied with; `scaled`: the loss scale is in them."""
        weight = float(self.losses[:, 1].sum()) if self.divide_by_weight else 1.0
        if weight == 0.0:  # nothing to average over: a loss of 0/0
            return math.nan
        return 1.0 / (weight * self.loss_scale) if scaled else 1.0 / weight

    def gradient_norm(self) -> float:
        """The global norm of the gradients, before clipping."""
        norm = float(torch.linalg.vector_norm(torch.cat(list(self.norms.values()))))
        if self.grown:
            square = norm**2 + sum(self.grown.values())
            norm = 0.0 if square < 0.0 else math.sqrt(square)  # NaN stays NaN
        return norm * self.plain_factor(scaled=True)

    def layer_norms(self) -> dict[int, float]:
        """The norm of every layer's gradient, before clipping."""
        factor = self.plain_factor(scaled=True)
        return {
            layer: float(torch.linalg.vector_norm(self.norms[f"L{layer}"])) * factor
            for layer in self.layers
            if f"L{layer}" in self.received
        }

    def is_finite(self) -> bool:
        """Whether the step counts; if not, nothing is updated."""
        return self.skip_reason() is None

    def skip_reason(self) -> str | None:
        """Why nothing is updated; None: the step counts."""
        loss = self.loss()
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not self.checks_norms or math.isfinite(self.gradient_norm()):
            return None
        return self.bad_gradient() or "the norm of the gradient is not finite"

    def bad_gradient(self) -> str | None:
        """A gradient that is not finite: of the last layer that has one, where it has begun."""
        layers = sorted((u for u in self.norms if u.startswith("L")), key=lambda u: -int(u[1:]))
        others = (unit for unit in self.norms if not unit.startswith("L"))
        return next(filter(None, map(self._bad_gradient_of, (*layers, *others))), None)

    def _bad_gradient_of(self, unit: str) -> str | None:
        if not self._is_bad(unit):
            return None
        received, names = self.received.get(unit, set()), self.names.get(unit, ())
        if unit not in self.flags:  # their norms are left out
            names = tuple(name for name in names if name in received)
        norms = dict(zip(names, self.norms[unit].tolist(), strict=False))
        grown = self.grown.get(unit, 0.0)
        owner, norm = next(
            ((name, norm) for name, norm in norms.items() if not math.isfinite(norm)),
            (next(iter(names), unit), grown),
        )
        where = f"layer {unit[1:]} ({owner})" if unit.startswith("L") else owner
        return f"the gradient of {where} is {norm}"

    def _is_bad(self, unit: str) -> bool:
        """Whether a unit's gradient is not finite, as far as its norms are known."""
        finite = math.isfinite(float(self.norms[unit].max()))
        return not (finite and math.isfinite(self.grown.get(unit, 0.0)))

    def order(self, unit: str) -> UpdateOrder | None:
        """The numbers of a unit's update, or None if the step is skipped."""
        if self.settings is None:
            return None
        if self.decided is None:
            self.decided = (self._factor(),)
        (factor,) = self.decided
        if factor is None:
            return None
        if not self.checks_norms and self._is_bad(unit):
            raise UpdateFailedError(self.bad_news())
        received = frozenset(self.received.get(unit, ()))
        if unit in self.flags:
            flags = self.flags[unit].tolist()
            found = (name for name, flag in zip(self.names[unit], flags, strict=True) if flag)
            received = frozenset(found)
        return UpdateOrder(
            settings=self.settings, received=received, factor=factor, changes=self.changes
        )

    def bad_news(self) -> str:
        """What is said of a gradient that is not finite where others were updated already."""
        return (
            f"step {self.number}: {self.bad_gradient()}, though the loss is {self.loss():.6g}. "
            "It was not updated, but layers after it may have been, so the weights are of two "
            "steps. Go on from a checkpoint with engine.load. With nonfinite='skip', updates wait "
            "until all gradients are known, and such a step is left out."
        )

    def _factor(self) -> float | None:
        """What gradients are multiplied with, or None if the step is skipped."""
        if not self.is_finite():
            return None
        factor = self.plain_factor(scaled=True)
        if self.clip_norm is not None:
            ratio = self.clip_norm / (self.gradient_norm() + 1e-6)
            factor *= min(1.0, ratio)
        return factor
