"""Before the first step: learn from a few rows what no inspection of the model can tell.

On two rows, with the real weights, on the device:

- how layers of each structure return their hidden state, by running one of each, and whether they
  draw random numbers;
- which buffers the prologue and the layers change when training;
- which units around the layers are read before them, which after, and which tables by lookup of an
  entry of the batch alone (interception.py);
- whether the epilogue does without the prologue: it must give the same bits with nothing of the
  prologue's units there. If it does not, all units around the layers stay for the whole step;
- what the model's loss averages over ([Note: counting rule] in batch.py), and whether it may be
  taken over positions of a row, piece by piece ([Note: pieces] in outer_pass.py).

Buffers that layers change stay on the device from then on, in the relay; all other buffers of a
layer travel with its weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from l2l.device import Device, format_bytes
from l2l.model import (
    Compiler,
    CutError,
    Microbatch,
    Partition,
    Recording,
    Returns,
    Rule,
    compare_cut_loss,
    move_batch,
    num_rows,
    take_rows,
    token_length,
    trial_batch,
)
from l2l.parameter_server import ParameterServer
from l2l.run import OuterFacts, OuterPass, Relay
from l2l.schedule import OuterUnit
from l2l.trial.layer_trial import LayerTrial
from l2l.trial.loss_trial import LossTrial
from l2l.trial.outer_trial import OuterTrial
from l2l.trial.repeating import KeptBuffers
from l2l.trial.usage import Usage, outer_units

TRIAL_MARGIN = 1.5  # of weights, for what is computed with them


@final
class Trial:
    """Runs the parts of the model once, slowly, and remembers what was learnt."""

    def __init__(
        self,
        *,
        partition: Partition,
        server: ParameterServer,
        device: Device,
        relay: Relay,
        outer: OuterPass,
        compiler: Compiler,
    ) -> None:
        self._partition = partition
        self._server = server
        self._device = device
        self._relay = relay
        self._outer = outer
        self._compiler = compiler
        self._layers = LayerTrial(partition, server, device, compiler)
        self._around = OuterTrial(partition, server, device, outer)
        self._loss = LossTrial(partition, device, outer)
        self._checked_rows = {0}  # of microbatches that a given loss may be cut into; 0: of one
        self.usage: dict[str, Usage] = {}
        self.alone = False
        self.done = False
        self.trial: Microbatch | None = None  # a few rows, on the host, once there were any
        self.cut = True  # whether a few tokens of a row were enough
        self.rule: Rule | None = None
        self.rule_is_final = False

    def run(self, microbatch: Microbatch, *, needs_loss: bool) -> None:
        """Learn what is not known yet; `needs_loss` asks for the counting rule too."""
        wants_rule = needs_loss and not self.rule_is_final
        if self.done and not wants_rule:
            return
        self._server.settle_all()
        self.trial = move_batch(trial_batch(microbatch, cut=False), "cpu")
        if self._server.world.is_parallel:  # all ranks learn the same: from rows of the first
            rows = take_rows(move_batch(microbatch, "cpu"), 0, 2)
            microbatch = self._server.world.gather_facts(rows)[0]
        few, whole = trial_batch(microbatch, cut=True), trial_batch(microbatch, cut=False)
        with self._device.private_random_state(), torch.no_grad():
            try:
                self._learn(few, wants_rule=wants_rule)
            except torch.OutOfMemoryError as error:
                self._outer.bind_only({})
                raise ValueError(self._needs()) from error
            except Exception as error:  # a model of fixed length cannot run a few tokens
                if isinstance(error, CutError) and token_length(few) == token_length(whole):
                    raise
                self.cut = False
                self._learn(whole, wants_rule=wants_rule)
        self._outer.bind_only({})  # let go of the copies on the device
        self.done = True

    def _needs(self) -> str:
        """What a device must have room for, of which this one has too little."""
        sizes = {name: unit.form.weight_layout.nbytes for name, unit in self._server.units.items()}
        around = sum(nbytes for name, nbytes in sizes.items() if not name.startswith("L"))
        largest = max(nbytes for name, nbytes in sizes.items() if name.startswith("L"))
        least = round(TRIAL_MARGIN * (around + largest)) + self._device.growth_bytes
        return (
            "the device has too little memory to try the model on a few rows: weights around the "
            f"layers take {format_bytes(around)}, the largest layer {format_bytes(largest)}. Give "
            f"device_memory={format_bytes(least)} or more, if the device has it."
        )

    def record(self, microbatch: Microbatch) -> Recording:
        """What a prologue run yields for these rows, on the device."""
        self._server.settle_all()
        with self._device.private_random_state(), torch.no_grad(), self._untouched():
            self._partition.set_training(True)
            self._partition.skeleton.bind(self._weights())
            found = self._partition.prologue(self._on_device(microbatch))
        self._outer.bind_only({})
        return found

    def why_not_cut(self, microbatches: Sequence[Microbatch]) -> str | None:
        """Why a given loss over these microbatches is not that of the batch; None: it is.

        As with the model's own ([Note: counting rule] in batch.py), the layers are left out.
        """
        function, rule = self._outer.loss_function, self.rule
        if function is None or rule is None:
            return None
        rows = num_rows(microbatches[0]) if len(microbatches) > 1 else 0
        is_known = rows in self._checked_rows
        if all(self._server.world.gather_facts(is_known)):  # ranks bring their weights together
            return None
        self._server.settle_all()

        with self._device.private_random_state(), torch.no_grad(), self._untouched():
            self._partition.set_training(False)
            self._partition.skeleton.bind(self._weights())
            loss = partial(self._loss.measure, function)
            verdict = None if is_known else compare_cut_loss(rule, microbatches, loss)
        self._outer.bind_only({})
        if verdict is None:
            self._checked_rows.add(rows)
        return verdict

    def outer_units(self, looked_up: Callable[[str], bool]) -> tuple[OuterUnit, ...]:
        """Units around the layers, with the tables for which `looked_up` says so on the host."""
        forms = {name: unit.form for name, unit in self._server.units.items()}
        return outer_units(forms, self.usage, looked_up)

    def refuse_layer(self, module: nn.Module, position: int) -> None:
        """Refuse a module that does not run where a layer runs; nothing is known before a step.

        Raises:
            ValueError: it fails there, or returns something else than a hidden state.
        """
        if self.trial is None:
            return
        recording = self.record(self.trial)
        index = min(position, self._partition.num_layers - 1)
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)

        def given(tensor: Tensor) -> Tensor:
            return tensor.cpu().to(dtype) if tensor.is_floating_point() else tensor.cpu()

        assert recording.hidden is not None
        hidden, recorded = given(recording.hidden), [given(one) for one in recording.tensors]
        args, kwargs = recording.calls[index].arguments(hidden, recorded)
        try:
            with self._device.private_random_state(), torch.no_grad():
                output = Returns.unwrap(module(*args, **kwargs))
        except Exception as error:
            raise ValueError(
                f"{type(module).__name__} does not run in the place of layer {index}, whose hidden "
                f"state is {list(hidden.shape)}: {error}"
            ) from error
        if output.shape != hidden.shape:
            raise ValueError(
                f"{type(module).__name__} returns {list(output.shape)} where layer {index} is "
                f"given {list(hidden.shape)}. Expected the same shape."
            )

    def present_buffers(self) -> dict[str, Tensor]:
        """Buffers on the device, as training has left them."""
        found = dict(self._partition.skeleton.buffers())
        for buffers in self._relay.layer_buffers.values():
            found |= buffers
        return found

    def resident_buffer_bytes(self) -> int:
        """Bytes of `present_buffers`."""
        return sum(buffer.nbytes for buffer in self.present_buffers().values())

    # ----------------------------------------------------------------------------------------------

    def _weights(self) -> dict[str, Tensor]:
        """Copies of the weights around the layers, on the device."""
        found: dict[str, Tensor] = {}
        for name, unit in self._server.units.items():
            if not name.startswith("L"):
                whole = self._server.whole(name).weights
                weights = whole.to(self._device.torch_device, copy=True)
                found |= unit.form.weight_layout.views(weights)
        return found

    def _on_device(self, microbatch: Microbatch) -> Microbatch:
        return move_batch(microbatch, self._device.torch_device)

    def _learn(self, trial: Microbatch, *, wants_rule: bool) -> None:
        trial = self._on_device(trial)
        weights = self._weights()
        self._partition.skeleton.bind(weights)
        with self._untouched():
            if not self.done:
                self._learn_layers(trial)
                usage = self._around.learn_usage(trial, weights)
                self.alone = usage is not None
                if usage is not None:
                    self.usage = usage
            if wants_rule:
                self._learn_rule(trial, weights)

    def _learn_rule(self, trial: Microbatch, weights: Mapping[str, Tensor]) -> None:
        """Learn what the loss averages over, and how the epilogue may be cut."""
        rule, self.rule_is_final = self._loss.find_rule(trial)
        self.rule = rule
        within_rows = self.alone and self._loss.pieces_agree(trial, rule)
        matrices = [
            weights[owner]
            for name, one in self.usage.items()
            if one.after
            for owner in self._server.units[name].form.weight_layout.names
            if weights[owner].dim() == 2
        ]
        puts_off = (
            self.alone
            and self._outer.may_put_off
            and self._loss.putting_off_agrees(trial, rule, matrices)
        )
        self._outer.facts = replace(self._outer.facts, within_rows=within_rows, puts_off=puts_off)

    @contextlib.contextmanager
    def _untouched(self) -> Iterator[None]:
        """Leave buffers around the layers, and attributes, as they were, whatever happens."""
        kept = KeptBuffers(self._partition)
        try:
            with self._partition.attributes_kept():
                yield
        finally:
            kept.put_back()

    def _learn_layers(self, trial: Microbatch) -> None:
        kept = KeptBuffers(self._partition)
        self._partition.set_training(True)
        self._layers.begin()
        try:
            with torch.enable_grad():  # nothing requires gradients: to see whether that is undone
                self._partition.prologue(trial, learn=self._layers.run, meet=self._layers.meet)
        except BaseException:
            self._partition.forget()  # what was learnt: the next batch is to be tried as the first
            raise
        for structure in self._partition.changing_input:  # it would write into a cell
            self._compiler.uncompiled.add(structure)
        changing = kept.changed()
        kept.put_back()
        self._outer.facts = OuterFacts(changing=changing)
        device = self._device.torch_device
        for index in range(self._partition.num_layers):
            own = self._layers.changing_buffers(index)
            if own:
                self._relay.layer_buffers[index] = {
                    owner: buffer.detach().to(device, copy=True) for owner, buffer in own.items()
                }
