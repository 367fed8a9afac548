"""Before the first step: learn from a few rows what no inspection of the model can tell.

On two rows, with the real weights, on the device:

- how layers of each structure return their hidden state, by running one of each;
- which buffers the prologue and the layers change when training;
- what the model's loss averages over ([Note: counting rule] in loss.py).

Buffers that layers change stay on the device from then on, in the relay; all other buffers of a
layer travel with its weights.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from l2l.batch import Microbatch
from l2l.carving import CarvedModel
from l2l.device import Device
from l2l.layer_list import CutError
from l2l.loss import Rule, find_rule, require_loss, trial_batch
from l2l.parameter_server import ParameterServer
from l2l.relay import Relay
from l2l.schedule import OUTER
from l2l.transfer import Transfer


@final
class Rehearsal:
    """Runs the parts of the model once, slowly, and remembers what was learnt."""

    def __init__(
        self,
        *,
        carved: CarvedModel,
        server: ParameterServer,
        device: Device,
        transfer: Transfer,
        relay: Relay,
    ) -> None:
        self._carved = carved
        self._server = server
        self._device = device
        self._transfer = transfer
        self._relay = relay
        self._changing: dict[str, list[int]] = {}  # structure -> positions among buffers
        self.done = False
        self.rule: Rule | None = None
        self.rule_is_final = False

    def run(self, microbatch: Microbatch, *, needs_loss: bool) -> None:
        """Learn what is not known yet; `needs_loss` asks for the counting rule too."""
        wants_rule = needs_loss and not self.rule_is_final
        if self.done and not wants_rule:
            return
        self._server.settle_all()
        self._transfer.fetch(OUTER, "SO")
        with self._device.private_random_state(), torch.no_grad():
            self._carved.skeleton.bind(self._transfer.weights(OUTER, "SO"))
            try:
                self._learn(trial_batch(microbatch, cut=True), wants_rule=wants_rule)
            except CutError:
                raise
            except Exception:  # a model of fixed length cannot run a few tokens
                self._learn(trial_batch(microbatch, cut=False), wants_rule=wants_rule)
        self._transfer.release(OUTER, "SO")
        self.done = True

    def _learn(self, trial: Microbatch, *, wants_rule: bool) -> None:
        trial = {
            name: value.to(self._device.torch_device) if isinstance(value, Tensor) else value
            for name, value in trial.items()
        }
        if not self.done:
            self._learn_layers(trial)
        if wants_rule:
            self.rule, self.rule_is_final = self._learn_rule(trial)

    def present_buffers(self) -> dict[str, Tensor]:
        """Buffers on the device, as training has left them."""
        found = dict(self._carved.skeleton.buffers())
        for buffers in self._relay.layer_buffers.values():
            found |= buffers
        return found

    def resident_buffer_bytes(self) -> int:
        """Bytes of `present_buffers`."""
        return sum(buffer.nbytes for buffer in self.present_buffers().values())

    def _learn_layers(self, trial: Microbatch) -> None:
        outer = self._carved.skeleton.buffers()
        before = {name: buffer.clone() for name, buffer in outer.items()}
        self._carved.set_training(True)
        self._carved.prologue(trial, learn=self._run_layer)
        self._relay.outer_changing = frozenset(
            name for name, buffer in outer.items() if not torch.equal(buffer, before[name])
        )
        for name in self._relay.outer_changing:
            outer[name].copy_(before[name])
        for index, structure in enumerate(self._carved.structures):
            tensors = self._carved.layer_tensors[index].buffers
            owners = list(tensors)
            changing = [owners[position] for position in self._changing.get(structure, [])]
            if changing:
                self._relay.layer_buffers[index] = {
                    owner: tensors[owner].detach().to(self._device.torch_device, copy=True)
                    for owner in changing
                }

    def _run_layer(self, index: int, args: Any, kwargs: Any) -> Any:
        unit, part = f"L{index}", self._carved.layers[index]
        self._transfer.fetch(unit, "S0")
        part.bind({name: t.clone() for name, t in self._transfer.weights(unit, "S0").items()})
        before = [buffer.clone() for buffer in part.buffers().values()]
        value = part.module(*args, **kwargs)
        after = part.buffers().values()
        self._changing[self._carved.structures[index]] = [
            position
            for position, (old, new) in enumerate(zip(before, after, strict=True))
            if not torch.equal(old, new)
        ]
        self._transfer.release(unit, "S0")
        return value

    def _learn_rule(self, trial: Microbatch) -> tuple[Rule, bool]:
        self._carved.set_training(False)
        if self._relay.loss_function is not None:
            hidden = self._carved.prologue(trial).hidden
            assert hidden is not None
            found = self._relay.loss_function(self._carved.epilogue(trial, hidden), trial)
            return (Rule.SUM_AND_WEIGHT if isinstance(found, tuple) else Rule.ROWS), True

        def loss(batch: Microbatch) -> float:
            hidden = self._carved.prologue(batch).hidden
            assert hidden is not None
            return float(require_loss(self._carved.epilogue(batch, hidden)))

        return find_rule(trial, loss)
