"""The relay: performs the lines of a schedule, one small method per verb, and chooses nothing.

    for line in schedule:  submit its work to its lane, or let a lane wait

State has owners elsewhere (weights: parameter server; slots: transfer; boundary tensors: stash).
What belongs to one step only is in a `Step` object that is made for it and captured by its work, so
that work of one step that is still queued never meets the next step's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2l.batch import Microbatch
from l2l.carving import Call, CarvedModel, Recording
from l2l.device import Device, Event, Work
from l2l.layer_pass import LayerInputs, backward_layer, forward_layer, leaves, take_gradients
from l2l.loss import LossFunction, require_loss
from l2l.parameter_server import (
    Adafactor,
    ParameterServer,
    UpdateOrder,
    WaitingUpdate,
    state_name,
)
from l2l.precision import LossScale
from l2l.schedule import NOTHING, OUTER, Action, Lane, Schedule, Wait, late_staging
from l2l.stash import Stash
from l2l.transfer import Transfer

PROLOGUE_SEED = -1  # in the place of a layer's number
REVISE_SEED = -2  # in the place of a microbatch's number


@dataclass(slots=True, kw_only=True)
class Step:
    """Everything that belongs to one run of a schedule and to nothing after it."""

    number: int
    layers: tuple[int, ...]
    microbatches: list[Microbatch]  # on the host
    scales: list[float]
    device_losses: Tensor  # [microbatches, 2] on the device: loss times scale, weight
    losses: Tensor  # the same on the host; NaN until reported
    norms: dict[str, Tensor]  # per unit, on the host: norm of each gradient
    settings: Mapping[str, Mapping[str, Any]] | None = None  # of the optimizer; None: no training
    clip_norm: float | None = None
    keep_outputs: bool = False
    divide_by_weight: bool = False
    checks_norms: bool = False  # whether a gradient that is not finite skips the step
    loss_scale: float = 1.0
    calls: dict[int, dict[int, Call]] = field(default_factory=dict)
    through: dict[int, list[int]] = field(default_factory=dict)  # recorded that require gradients
    hidden_requires: dict[int, bool] = field(default_factory=dict)
    gathered: dict[int, list[int]] = field(default_factory=dict)  # of these, with a gradient so far
    received: dict[str, set[str]] = field(default_factory=dict)  # unit -> parameters
    buffers_before: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    num_tokens: int = 0
    reported: Event | None = None
    drained: Event | None = None
    updates_submitted: bool = False

    @property
    def training(self) -> bool:
        """Whether this run ends in updates."""
        return self.settings is not None

    def forget_inputs(self) -> None:
        """Let go of what only the passes need; a report keeps the rest of a step alive."""
        for kept in (self.microbatches, self.calls, self.through, self.gathered):
            kept.clear()
        self.hidden_requires.clear()
        self.buffers_before.clear()

    def following(self, layer: int) -> str:
        """What comes after a layer: the next one's number, or E for the epilogue."""
        after = self.layers.index(layer) + 1
        return str(self.layers[after]) if after < len(self.layers) else "E"

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
        norms = torch.cat(list(self.norms.values()))
        return float(torch.linalg.vector_norm(norms)) * self.plain_factor(scaled=True)

    def is_finite(self) -> bool:
        """Whether the step counts; if not, nothing is updated."""
        if not math.isfinite(self.loss()):
            return False
        return not self.checks_norms or math.isfinite(self.gradient_norm())

    def order(self, unit: str) -> UpdateOrder | None:
        """The numbers of a unit's update, or None if the step is skipped."""
        if self.settings is None or not self.is_finite():
            return None
        factor = self.plain_factor(scaled=True)
        if self.clip_norm is not None:
            ratio = self.clip_norm / (self.gradient_norm() + 1e-6)
            factor *= 1.0 if ratio >= 1.0 else ratio  # as torch: NaN stays NaN
        received = frozenset(self.received.get(unit, ()))
        return UpdateOrder(settings=self.settings, received=received, factor=factor)


@final
class Scaler:
    """Gives every float16 step its loss scale, once the step before it is known."""

    def __init__(self) -> None:
        self.scale = LossScale()
        self.unobserved: Step | None = None

    def scale_of(self, step: Step) -> float:
        """The scale of a step; waits for the norms of the one before."""
        previous = self.unobserved
        if previous is not None and previous is not step:
            if previous.drained is not None:
                previous.drained.synchronize()
            self.scale.observe(finite=previous.is_finite())
            self.unobserved = None
        return self.scale.value


def mix_seed(*numbers: int) -> int:
    """A 63-bit seed that depends on all the numbers (splitmix64, folded)."""
    state = 0
    for number in numbers:
        state = (state ^ (number & (2**64 - 1))) + 0x9E3779B97F4A7C15 & (2**64 - 1)
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
        state ^= state >> 31
    return state >> 1


@final
class Relay:
    """Walks schedules over the carved model."""

    def __init__(
        self,
        *,
        carved: CarvedModel,
        server: ParameterServer,
        device: Device,
        transfer: Transfer,
        stash: Stash,
        seed: int,
        loss_function: LossFunction | None,
        scale_of: Callable[[Step], float] | None,
    ) -> None:
        self._carved = carved
        self._server = server
        self._device = device
        self._transfer = transfer
        self._stash = stash
        self._seed = seed
        self.loss_function = loss_function
        self.scale_of = scale_of  # the loss scale of a float16 step
        self.outer_changing: frozenset[str] = frozenset()  # buffers that the prologue changes
        self.layer_buffers: dict[int, dict[str, Tensor]] = {}  # those that layers change
        self._perform: dict[str, Callable[..., None]] = {
            "fetch": lambda _, unit, slot: self._transfer.fetch(unit, slot),
            "release": lambda _, unit, slot: self._transfer.release(unit, slot),
            "prologue": self._prologue,
            "forward": self._forward,
            "epilogue": self._epilogue,
            "score": self._score,
            "report": self._report,
            "backward": self._backward,
            "regress": self._regress,
            "drain": self._drain,
            "update": self._update,
            "revise": self._revise,
            "return": lambda _, unit, slot: self._transfer.give_back(unit, slot),
            "stash": lambda _, value, m, cell: self._stash.stash(f"{value} {m}", cell),
            "unstash": lambda _, value, m, cell: self._stash.unstash(f"{value} {m}", cell),
        }

    def close(self) -> None:
        """Give the buffers that layers change back."""
        self.layer_buffers.clear()

    def run(self, schedule: Schedule, step: Step) -> None:
        """Submit every line of a schedule. Device work may go on when this returns."""
        device, events = self._device, dict[Action, Event]()
        awaited = {line.action for line in schedule.lines if isinstance(line, Wait)}
        pending = {name: unit.pending for name, unit in self._server.units.items()}
        device.begin()
        with device.private_random_state():
            for line in schedule.lines:
                if isinstance(line, Wait):
                    device.wait(line.lane, events[line.action])
                    continue
                if line.verb == "fetch" and (update := pending[line.operands[0]]) is not None:
                    device.wait(Lane.FETCH, update)
                device.submit(line.lane, str(line), self._work(line, step))
                if line in awaited:
                    events[line] = device.record(line.lane)
                self._after(line, step)
            device.finish()
        self._stash.end_step()
        for unit in schedule.shape.late_units:
            assert step.drained is not None
            self._server.leave(
                WaitingUpdate(
                    unit=unit,
                    gradient=self._transfer.staging[late_staging(unit)],
                    order=partial(step.order, unit),
                    drained=step.drained,
                )
            )
        step.forget_inputs()

    def _work(self, action: Action, step: Step) -> Work:
        if action.verb == "settle":  # an update of the step before, with that step's numbers
            waiting = self._server.take_waiting(action.operands[0])
            self._device.wait(Lane.UPDATE, waiting.drained)
            return partial(self._server.perform, waiting)
        return partial(self._perform[action.verb], step, *action.operands)

    def _after(self, action: Action, step: Step) -> None:
        if action.verb == "report":
            step.reported = self._device.record(Lane.DRAIN)
        elif action.verb == "drain":
            step.drained = self._device.record(Lane.DRAIN)
        elif action.verb in ("update", "settle"):
            self._server.note_pending(action.operands[0], self._device.record(Lane.UPDATE))
        elif action.verb == "return":
            self._server.note_pending(action.operands[0], self._device.record(Lane.DRAIN))
        if action.verb in ("update", "return"):
            step.updates_submitted = True

    # ----------------------------------------------------------------------------------------------
    # Prologue and epilogue

    def _prologue(self, step: Step, microbatch: str, recorded_cell: str, cell: str) -> None:
        m = int(microbatch[1:])
        buffers = self._carved.skeleton.buffers() if self.outer_changing else {}
        self._note_buffers(step, PROLOGUE_SEED, m, {n: buffers[n] for n in self.outer_changing})
        recording = self._run_prologue(step, m, self._outer_leaves())
        assert recording.hidden is not None
        hidden = recording.hidden
        step.calls[m] = recording.calls
        step.through[m] = [i for i, tensor in enumerate(recording.tensors) if tensor.requires_grad]
        step.gathered[m] = []
        step.hidden_requires[m] = hidden.requires_grad
        step.num_tokens += math.prod(hidden.shape[:-1])
        self._stash.put(recorded_cell, f"r {microbatch}", [t.detach() for t in recording.tensors])
        self._stash.put(cell, f"h{step.layers[0]} {microbatch}", [hidden.detach()])

    def _run_prologue(self, step: Step, m: int, outer: Mapping[str, Tensor]) -> Recording:
        """Run the prologue, with graph when training: what is recorded shows what requires one."""
        self._device.seed(mix_seed(self._seed, step.number, PROLOGUE_SEED, m))
        self._carved.skeleton.bind(outer)
        with torch.set_grad_enabled(step.training):
            return self._carved.prologue(self._inputs(step, m))

    def _epilogue(self, step: Step, microbatch: str, cell: str, gradient_cell: str) -> None:
        m = int(microbatch[1:])
        hidden = self._stash.get(cell, f"hE {microbatch}")[0].detach()
        gradient: Tensor | None = None
        if step.scales[m] != 0.0:  # a microbatch without labels has a loss of 0/0 and no part in N
            hidden.requires_grad_(gradient_cell != NOTHING)
            outer = self._outer_leaves()
            loss = self._loss(step, m, hidden, outer)
            if self.scale_of is not None:
                step.loss_scale = self.scale_of(step)
                loss = loss.float() * step.loss_scale  # a float16 cannot hold the product
            inputs: dict[Any, Tensor] = {name: outer[name] for name in self._trained(OUTER)}
            if gradient_cell != NOTHING:
                inputs["hidden", 0] = hidden
            found = take_gradients([loss], [None], inputs)
            gradient = found.pop(("hidden", 0), None)
            self._accumulate(step, OUTER, "GO", found)
        if gradient_cell != NOTHING:
            gradient = torch.zeros_like(hidden) if gradient is None else gradient
            self._stash.put(gradient_cell, f"gE {microbatch}", [gradient])

    def _loss(self, step: Step, m: int, hidden: Tensor, outer: Mapping[str, Tensor]) -> Tensor:
        """Run the epilogue; note the loss; return what is to be differentiated."""
        outputs, inputs = self._run_epilogue(step, m, hidden, outer)
        weight: Any = 1.0
        found = (
            require_loss(outputs)
            if self.loss_function is None
            else (self.loss_function(outputs, inputs))
        )
        if isinstance(found, tuple):
            loss, weight = found
            if not step.divide_by_weight:
                loss, weight = loss / weight, 1.0
        else:
            loss = found
        scaled = loss * step.scales[m]
        step.device_losses[m, 0] = scaled.detach()
        step.device_losses[m, 1] = weight.detach() if isinstance(weight, Tensor) else weight
        return scaled

    def _run_epilogue(
        self, step: Step, m: int, hidden: Tensor, outer: Mapping[str, Tensor]
    ) -> tuple[Any, Microbatch]:
        inputs = self._inputs(step, m)
        self._device.seed(mix_seed(self._seed, step.number, PROLOGUE_SEED, m))
        self._carved.skeleton.bind(outer)
        after = self._rewind_buffers(step, m)
        with torch.set_grad_enabled(step.training):
            outputs = self._carved.epilogue(inputs, hidden)
        self._restore_buffers(after)
        return outputs, inputs

    def _score(self, step: Step, microbatch: str, cell: str) -> None:
        m = int(microbatch[1:])
        hidden = self._stash.get(cell, f"hE {microbatch}")[0]
        outer = self._outer_leaves()
        if step.keep_outputs:
            outputs, _ = self._run_epilogue(step, m, hidden, outer)
            step.outputs[m] = pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), outputs)
        elif step.scales[m] != 0.0:
            self._loss(step, m, hidden, outer)

    def _report(self, step: Step) -> None:
        step.losses.copy_(step.device_losses, non_blocking=True)

    def _regress(self, step: Step, microbatch: str, cell: str) -> None:
        m = int(microbatch[1:])
        gradients = self._stash.get(cell, f"g{step.layers[0]} {microbatch}")
        after = self._rewind_buffers(step, m)
        outer = self._outer_leaves()
        recording = self._run_prologue(step, m, outer)
        assert recording.hidden is not None
        outputs = [recording.hidden, *(recording.tensors[i] for i in step.gathered[m])]
        matching = [g.to(o.dtype) for o, g in zip(outputs, gradients, strict=True)]
        inputs = {name: outer[name] for name in self._trained(OUTER)}
        self._accumulate(step, OUTER, "GO", take_gradients(outputs, matching, inputs))
        self._restore_buffers(after)  # only now: the graph has used them

    # ----------------------------------------------------------------------------------------------
    # Layers

    def _forward(
        self,
        step: Step,
        layer: str,
        microbatch: str,
        slot: str,
        recorded: str,
        before: str,
        to: str,
    ) -> None:
        index, m = int(layer[1:]), int(microbatch[1:])
        changing = self.layer_buffers.get(index, {})
        self._note_buffers(step, index, m, changing)
        self._device.seed(mix_seed(self._seed, step.number, index, m))
        output = forward_layer(self._layer_inputs(step, index, m, slot, recorded, before, changing))
        self._stash.put(to, f"h{step.following(index)} {microbatch}", [output])

    def _backward(
        self,
        step: Step,
        layer: str,
        microbatch: str,
        slot: str,
        gradient_slot: str,
        recorded: str,
        before: str,
        gradient_cell: str,
        to: str,
    ) -> None:
        index, m = int(layer[1:]), int(microbatch[1:])
        gradient, *gathered = self._stash.get(
            gradient_cell, f"g{step.following(index)} {microbatch}"
        )
        self._device.seed(mix_seed(self._seed, step.number, index, m))
        changing = step.buffers_before.pop((index, m), {})
        result = backward_layer(
            self._layer_inputs(step, index, m, slot, recorded, before, changing),
            gradient=gradient,
        )
        self._accumulate(step, layer, gradient_slot, result.parameters)
        if to != NOTHING:
            hidden = torch.zeros_like(gradient) if result.hidden is None else result.hidden
            sums = self._gather(step, m, gathered, result.recorded)
            self._stash.put(to, f"g{index} {microbatch}", [hidden, *sums])

    def _layer_inputs(
        self,
        step: Step,
        index: int,
        m: int,
        slot: str,
        recorded: str,
        before: str,
        changing: Mapping[str, Tensor],
    ) -> LayerInputs:
        layer = f"L{index}"
        assert self._transfer.holds(layer, slot), f"{layer} is not in {slot}"
        below = any(self._trained(f"L{i}") for i in step.layers[: step.layers.index(index)])
        return LayerInputs(
            part=self._carved.layers[index],
            tensors={**self._transfer.weights(layer, slot), **changing},
            trained=self._trained(layer),
            call=step.calls[m][index],
            hidden=self._stash.get(before, f"h{index} m{m}")[0],
            hidden_requires_gradient=step.training and (below or step.hidden_requires[m]),
            recorded=self._stash.get(recorded, f"r m{m}"),
            through=step.through[m],
            changes_input=self._carved.structures[index] in self._carved.changing_input,
        )

    @staticmethod
    def _gather(
        step: Step, m: int, gathered: list[Tensor], recorded: Mapping[int, Tensor]
    ) -> list[Tensor]:
        """Add a layer's gradients of recorded tensors to those of the layers after it."""
        sums = dict(zip(step.gathered[m], gathered, strict=True))
        for index, gradient in recorded.items():
            wide = gradient.float()
            sums[index] = sums[index] + wide if index in sums else wide
        step.gathered[m] = list(sums)
        return list(sums.values())

    # ----------------------------------------------------------------------------------------------
    # Gradients and updates

    def _accumulate(
        self, step: Step, unit: str, slot: str, gradients: Mapping[str, Tensor]
    ) -> None:
        received = step.received.setdefault(unit, set())
        if gradients:
            self._transfer.accumulate(unit, slot, gradients, received=received)

    def _drain(self, step: Step, unit: str, slot: str, staging: str) -> None:
        received = step.received.get(unit, set())
        norms = self._transfer.drain(unit, slot, staging, received=received)
        step.norms[unit][: norms.numel()].copy_(norms, non_blocking=True)

    def _update(self, step: Step, unit: str, staging: str) -> None:
        order = step.order(unit)
        if order is not None:
            self._server.update(unit, self._transfer.staging[staging], order)

    def _revise(self, step: Step, unit: str, slot: str, gradient_slot: str) -> None:
        """Update a unit on the device, in its slot ([Note: device updates])."""
        optimizer, settings = self._server.optimizer, step.settings
        assert isinstance(optimizer, Adafactor)
        assert settings is not None
        weights = self._transfer.weights(unit, slot)
        gradients = self._transfer.gradients(unit, gradient_slot)
        loss, weight = step.device_losses.sum(0)
        finite = (loss / weight if step.divide_by_weight else loss).isfinite()
        position = PROLOGUE_SEED if unit == OUTER else int(unit[1:])
        generator = torch.Generator(self._device.torch_device)
        generator.manual_seed(mix_seed(self._seed, step.number, position, REVISE_SEED))
        for owner in self._trained(unit):
            if owner not in step.received.get(unit, ()):
                continue
            gradient = gradients[owner]
            if step.divide_by_weight:
                gradient = gradient / weight
            shape = tuple(weights[owner].shape)
            state = {n: weights[state_name(owner, n)] for n in optimizer.state_shapes(shape)}
            optimizer.revise(
                weights[owner],
                gradient,
                state,
                settings=settings[owner],
                finite=finite,
                generator=generator,
            )

    # ----------------------------------------------------------------------------------------------
    # Small things

    def _trained(self, unit: str) -> tuple[str, ...]:
        return self._server.units[unit].form.trained.names

    def _outer_leaves(self) -> dict[str, Tensor]:
        return leaves(self._transfer.weights(OUTER, "SO"), self._trained(OUTER))

    def _inputs(self, step: Step, m: int) -> Microbatch:
        device = self._device.torch_device
        return {
            name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in step.microbatches[m].items()
        }

    @staticmethod
    def _note_buffers(step: Step, part: int, m: int, changing: Mapping[str, Tensor]) -> None:
        if changing and step.training:
            step.buffers_before[part, m] = {name: b.clone() for name, b in changing.items()}

    def _rewind_buffers(self, step: Step, m: int) -> dict[str, Tensor]:
        """Put outer buffers back to what they were before a prologue run; returns what is now."""
        before = step.buffers_before.get((PROLOGUE_SEED, m), {})
        buffers = self._carved.skeleton.buffers() if before else {}
        after = {name: buffers[name].clone() for name in before}
        for name, value in before.items():
            buffers[name].copy_(value)
        return after

    def _restore_buffers(self, after: Mapping[str, Tensor]) -> None:
        buffers = self._carved.skeleton.buffers() if after else {}
        for name, value in after.items():
            buffers[name].copy_(value)
