"""The parameter server: the one owner of weights, gradients that wait, and optimizer state.

Everything of a unit (a layer, or the outer parameters) lies in a few flat buffers in host memory:

    weights     what crosses the link, in the link dtype, registered for DMA; also buffers and
                frozen parameters
    remainder   the 16 bits that make a bfloat16 link weight the float32 master ([Note: split
                master] in precision.py); nothing where the link is float32
    state       one float32 buffer per optimizer state (moments)

All but `weights` cover the trained parameters only, at the element offsets of `Unit.trained`. A
flat buffer can be cut at any multiple of the alignment: there it will be divided over ranks.

Updates are submitted with a gradient and run on the update lane. Until an update is done its unit
is *pending*: the fetch lane waits for that event before it reads the unit's weights, and the host
settles the unit before it does. So nobody sees stale weights, however late an update runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from l2l.device import Device, Event
from l2l.layout import FlatLayout
from l2l.parameter_server.optimizer import HostOptimizer, Settings
from l2l.precision import PrecisionPolicy, join_master, split_master

ACCUMULATE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


@dataclass(slots=True, kw_only=True)
class Unit:
    """Host memory of one unit."""

    name: str
    weight_layout: FlatLayout
    trained: FlatLayout  # trained parameters, in the link dtype
    weights: Tensor  # bytes, registered
    remainder: Tensor  # bytes
    state: dict[str, Tensor] = field(default_factory=dict)  # state name -> bytes
    steps: dict[str, int] = field(default_factory=dict)  # parameter -> updates so far
    pending: Event | None = None

    @property
    def gradient_layout(self) -> FlatLayout:
        """Where gradients are added up on the device: float32, the offsets of `trained`."""
        return self.trained.astype(ACCUMULATE)

    @property
    def nbytes(self) -> int:
        """Host bytes of the unit."""
        buffers = (self.weights, self.remainder, *self.state.values())
        return sum(buffer.numel() for buffer in buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOrder:
    """An update that may wait: it carries the numbers of its own step."""

    settings: Mapping[str, Settings]  # by parameter name
    received: frozenset[str]  # parameters that got a gradient in this step
    factor: float = 1.0  # what gradients are multiplied with


@final
class ParameterServer:
    """Weights, remainders and optimizer state of every unit."""

    def __init__(
        self, *, device: Device, precision: PrecisionPolicy, optimizer: HostOptimizer
    ) -> None:
        self._device = device
        self._precision = precision
        self._optimizer = optimizer
        self.units: dict[str, Unit] = {}
        self._unit_of: dict[str, Unit] = {}

    def add(
        self,
        name: str,
        *,
        parameters: Mapping[str, nn.Parameter],
        buffers: Mapping[str, Tensor],
        settings: Mapping[str, Settings],
    ) -> None:
        """Move a unit in: copy its tensors to host memory and hollow out the parameters.

        `settings` has the optimizer's settings of the parameters that are trained; the others are
        frozen. A hollow parameter keeps its shape and holds NaN without memory, until `give_back`.
        """
        trained_first = sorted(parameters, key=lambda owner: owner not in settings)
        described = [
            (owner, tuple(parameters[owner].shape), self._link(owner, parameters[owner]))
            for owner in trained_first
        ]
        trained = FlatLayout.of(entry for entry in described if entry[0] in settings)
        layout = FlatLayout.of(
            described + [(key, tuple(value.shape), value.dtype) for key, value in buffers.items()]
        )
        remainder_bytes = trained.astype({torch.bfloat16: torch.int16}).nbytes
        has_remainder = any(segment.dtype is torch.bfloat16 for segment in trained.segments)
        unit = Unit(
            name=name,
            weight_layout=layout,
            trained=trained,
            weights=self._device.host_empty(layout.nbytes),
            remainder=torch.zeros(remainder_bytes if has_remainder else 0, dtype=torch.uint8),
            steps=dict.fromkeys(trained.names, 0),
        )
        unit.weights.zero_()
        state_names = {s for owner in trained.names for s in self._state_names(settings[owner])}
        state_bytes = unit.trained.astype(ACCUMULATE).nbytes
        for state_name in sorted(state_names):
            unit.state[state_name] = torch.zeros(state_bytes, dtype=torch.uint8)
        self.units[name] = unit
        self._unit_of.update(dict.fromkeys(parameters, unit))
        for key, value in buffers.items():
            layout.views(unit.weights)[key].copy_(value)
        for owner, parameter in parameters.items():
            self.set_weight(owner, parameter.data)
            parameter.data = torch.full((), torch.nan).to(parameter.dtype).expand(parameter.shape)

    def give_back(self, parameters: Mapping[str, nn.Parameter], name: str) -> None:
        """Move a unit's weights into the parameters again and drop its host memory."""
        self.settle(name)
        for owner, parameter in parameters.items():
            weight = self.weight(owner)
            own = weight.to(parameter.dtype)
            parameter.data = own.clone() if own.data_ptr() == weight.data_ptr() else own
            del self._unit_of[owner]
        del self.units[name]

    def weight(self, owner: str) -> Tensor:
        """A parameter's present value: the float32 master if trained, else the link weight."""
        unit = self._unit_of[owner]
        weight = unit.weight_layout.views(unit.weights)[owner]
        if owner not in unit.steps or weight.dtype is not torch.bfloat16:
            return weight
        return join_master(weight, self._remainder(unit)[owner])

    def set_weight(self, owner: str, value: Tensor) -> None:
        """Overwrite a parameter's value."""
        unit = self._unit_of[owner]
        weight = unit.weight_layout.views(unit.weights)[owner]
        if owner in unit.steps and weight.dtype is torch.bfloat16:
            split_master(value.to(torch.float32).cpu(), weight, self._remainder(unit)[owner])
        else:
            weight.copy_(value)

    def state_of(self, owner: str) -> dict[str, Any]:
        """A parameter's optimizer state as views, torch's names; empty before its first step."""
        unit = self._unit_of[owner]
        self.settle(unit.name)
        if not unit.steps.get(owner):
            return {}
        views = {name: self._state_views(unit, name)[owner] for name in unit.state}
        return {"step": torch.tensor(float(unit.steps[owner])), **views}

    def update(self, name: str, gradient: Tensor, order: UpdateOrder) -> None:
        """Apply one step's gradient (bytes, laid out as `Unit.trained`) to a unit."""
        unit = self.units[name]
        gradients = unit.trained.views(gradient)
        weights = unit.weight_layout.views(unit.weights)
        remainders = self._remainder(unit)
        states = {state_name: self._state_views(unit, state_name) for state_name in unit.state}
        for owner in unit.trained.names:
            if owner not in order.received:
                continue
            split = weights[owner].dtype is torch.bfloat16
            master = join_master(weights[owner], remainders[owner]) if split else weights[owner]
            unit.steps[owner] += 1
            self._optimizer.update(
                master,
                scaled(gradients[owner].to(torch.float32), order.factor),
                name=owner,
                state={state_name: views[owner] for state_name, views in states.items()},
                step=unit.steps[owner],
                settings=order.settings[owner],
            )
            if split:
                split_master(master, weights[owner], remainders[owner])

    def settle(self, name: str) -> None:
        """Wait until a unit's weights are those of the last step."""
        unit = self.units[name]
        if unit.pending is not None:
            unit.pending.synchronize()
            unit.pending = None

    def settle_all(self) -> None:
        """Wait until every unit's weights are those of the last step."""
        for name in self.units:
            self.settle(name)

    def bytes_by_kind(self) -> dict[str, int]:
        """Host bytes, by what they hold."""
        units = self.units.values()
        kinds = {
            "weights": sum(unit.weights.numel() for unit in units),
            "remainders": sum(unit.remainder.numel() for unit in units),
        }
        for unit in units:
            for state_name, buffer in unit.state.items():
                kinds[state_name] = kinds.get(state_name, 0) + buffer.numel()
        return kinds

    def _link(self, owner: str, parameter: nn.Parameter) -> torch.dtype:
        return self._precision.link_dtype(owner, parameter.dtype)

    def _state_names(self, settings: Settings) -> Iterable[str]:
        return self._optimizer.state_names(settings)

    @staticmethod
    def _remainder(unit: Unit) -> dict[str, Tensor]:
        if not unit.remainder.numel():
            return {}
        return unit.trained.astype({torch.bfloat16: torch.int16}).views(unit.remainder)

    @staticmethod
    def _state_views(unit: Unit, state_name: str) -> dict[str, Tensor]:
        return unit.trained.astype(ACCUMULATE).views(unit.state[state_name])


def scaled(gradient: Tensor, factor: float) -> Tensor:
    """The gradient times a factor; itself if that is 1."""
    return gradient if factor == 1.0 else gradient * factor
