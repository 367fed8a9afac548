"""The model as it is cut now, and what works on it: both are new when its layers have changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor, nn

from l2l.checkpoint import Persistence
from l2l.engine.depth import Choice, Depth, checked_layers
from l2l.engine.resources import Resources
from l2l.hugging_face import Incoming, export_model
from l2l.model import Partition, UnitTensors
from l2l.parameter_server import UnitForm, units_of
from l2l.proof import Proof, ProofMemory
from l2l.run import OuterPass, Relay, Updates
from l2l.trial import Trial

PROVEN = ProofMemory.of_user()
RANK_SEED = 0x9E3779B9  # ranks draw different random numbers


@final
class Network:
    """Owner of the parts that belong to the present layers, and of what is chosen among these."""

    def __init__(self, resources: Resources, partition: Partition, *, depth: Depth) -> None:
        """The weights are still in the model: see `move_in`."""
        self._resources = resources
        self._model = resources.model
        self._server, self._device = resources.server, resources.device
        self.depth = depth
        self.build(partition)

    def build(self, partition: Partition) -> None:
        """Make what works on a partition; of its layers nothing is known yet."""
        has = self._resources
        scaler, device, server, compiler = has.scaler, has.device, has.server, has.compiler
        self.partition = partition
        self.outer = OuterPass(
            partition=partition,
            device=device,
            server=server,
            transfer=has.transfer,
            loss_function=has.loss,
        )
        updates = Updates(
            server=server,
            device=device,
            transfer=has.transfer,
            rows=has.rows,
            compiled=compiler.is_on,
        )
        self.relay = Relay(
            partition=partition,
            server=server,
            device=device,
            transfer=has.transfer,
            stash=has.stash,
            outer=self.outer,
            updates=updates,
            compiler=compiler,
            scale_of=None if scaler is None else scaler.scale_of,
        )
        self.trial = Trial(
            partition=partition,
            server=server,
            device=device,
            relay=self.relay,
            outer=self.outer,
            compiler=compiler,
        )
        self.persistence = Persistence(
            server=server,
            partition=partition,
            optimizer=has.optimizer,
            loss_scale=None if scaler is None else scaler.scale,
            link=has.precision.link,
            spare_bytes=has.spare_bytes,
        )
        self.proof = Proof(
            model=has.model,
            partition=partition,
            server=server,
            device=device,
            loss_function=has.loss,
            link=has.precision.link,
            memory=PROVEN,
        )

    def move_in(self, forms: Sequence[UnitForm], incoming: Incoming | None) -> None:
        """Move every unit into the server; if one does not fit, the model is as it was."""
        moved: list[tuple[str, UnitTensors]] = []
        try:
            if incoming is not None:
                incoming.fill_buffers()
            for form, (name, tensors) in zip(forms, units_of(self.partition), strict=True):
                self._server.add(form, tensors)
                moved.append((name, tensors))
            if incoming is not None:
                incoming.deliver(self._server.set_weight, self._device.torch_device)
        except BaseException:
            for name, tensors in moved if incoming is None else ():
                self._server.give_back(tensors.parameters, name)
            if incoming is not None:
                incoming.undo()
            self._device.close()
            raise

    def bind(self) -> None:
        """Let the code around the layers see buffers on the device; note the model's parameters."""
        self._server.reader.watch(self._model)
        self.partition.skeleton.bind(
            {
                owner: buffer.detach().to(self._device.torch_device, copy=True)
                for owner, buffer in self.partition.outer_tensors.buffers.items()
            }
        )

    def running(self) -> AbstractContextManager[None]:
        """While the block runs, nobody reads the model's own parameters; it has those it had."""
        return self._server.reader.running()

    def seed_of_rank(self, seed: int) -> int:
        """Ranks draw different random numbers."""
        return seed + self._resources.world.rank * RANK_SEED

    # ----------------------------------------------------------------------------------------------
    # Layers

    def layer_list(self) -> nn.Module:
        """The model's list of layers."""
        return self._model.get_submodule(self.partition.list_name)

    def drawn(self, *, step: int, seed: int) -> Choice:
        """What the policy chooses for a step, which may be no layer at all."""
        number = self.partition.num_layers
        found = self.depth.choose(step=step, num_layers=number, seed=seed)
        if found.layers:
            checked_layers(found.layers, number)
        return found

    def chosen(self, layers: Sequence[int] | None) -> Choice:
        """The layers that were asked for; None: all."""
        number = self.partition.num_layers
        return Choice(tuple(range(number)) if layers is None else checked_layers(layers, number))

    # ----------------------------------------------------------------------------------------------
    # Weights and buffers, for others

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and weights of all parameters, once all updates are done, unit by unit."""
        for name, tensors in units_of(self.partition):
            value = self._server.whole(name).value
            for owner, parameter in tensors.parameters.items():
                weight = value(owner).detach()
                yield owner, weight.to(device="cpu", dtype=parameter.dtype, copy=True)

    def state_dict(self, weights: dict[str, Tensor]) -> dict[str, Any]:
        """What the model's own would be with these weights, and with the present buffers."""
        buffers = {id(buffer): name for name, buffer in self._model.named_buffers()}
        present = self.trial.present_buffers()
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        found: dict[str, Any] = {}
        for key, value in self._model.state_dict(keep_vars=True).items():
            if id(value) in names:
                value = weights[names[id(value)]]
            elif isinstance(value, Tensor):
                value = present.get(buffers.get(id(value), ""), value).detach()
                value = value.to(device="cpu", copy=True)
            found[key] = value
        return found

    def export(self, folder: Any, **options: Any) -> None:
        """Write a folder that others read, once all updates are done: see `export_model`."""
        with self._server.values() as weight_of:
            if weight_of is None:  # another rank writes
                return
            buffers = self.trial.present_buffers()
            with torch._C.DisableTorchFunctionSubclass():  # of the model, names and shapes only
                export_model(self._model, folder, weight_of=weight_of, buffers=buffers, **options)

    def give_back(self) -> None:
        """Move all weights and buffers back into the model."""
        for name, tensors in units_of(self.partition):
            self._server.give_back(tensors.parameters, name)
        self.give_back_buffers()

    def give_back_buffers(self) -> None:
        """Let the model's own buffers be as training has left them."""
        for owner, buffer in self.trial.present_buffers().items():
            module, _, local = owner.rpartition(".")
            target = self._model.get_submodule(module)._buffers[local]
            if target is not None:
                target.copy_(buffer)

    def close(self) -> None:
        """Let go of everything, the device too."""
        has = self._resources
        for part in (self.partition, has.transfer, has.stash, self.relay, has.device):
            part.close()
        has.server.spare.close()
