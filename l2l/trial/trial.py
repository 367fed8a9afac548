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

All of it is one frozen value, `Facts`, by which programs are made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

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
    Route,
    Rule,
    compare_cut_loss,
    compare_parts,
    has_masks,
    join_rows,
    leaves,
    move_batch,
    num_rows,
    require_loss,
    shortened,
    some_rows,
    token_length,
    trial_batch,
)
from l2l.parameter_server import ParameterServer
from l2l.run import Facts, OuterPass
from l2l.trial.discovery import Discovery, own_loss
from l2l.trial.layer_trial import LayerTrial
from l2l.trial.outer_trial import KeptBuffers, OuterTrial

TRIAL_MARGIN = 1.5  # of weights, for what is computed with them


def require_own_loss(outputs: Any, _: Mapping[str, Any]) -> Tensor:
    """The loss in a model's outputs."""
    return require_loss(outputs)


@final
@dataclass(frozen=True, eq=False)
class Trial:
    """Runs the parts of the model once, slowly."""

    partition: Partition
    server: ParameterServer
    device: Device
    outer: OuterPass
    compiler: Compiler
    _verdicts: dict[int, str | None] = field(default_factory=lambda: {0: None})
    """By rows of microbatches, why a given loss may not be cut into them; 0: of one."""
    _obstacles: dict[frozenset[str], str | None] = field(default_factory=dict)
    """By entries of batches, why no loss may be joint."""

    def run(self, microbatch: Microbatch, known: Facts, *, needs_loss: bool) -> Facts:
        """Learn what is not known yet; `needs_loss` asks for the counting rule too.

        Raises:
            ValueError: the model cannot be run layer by layer, or the device has no room.
        """
        wants_rule = needs_loss and not known.rule_is_final
        if known.rows and not wants_rule:
            return known
        rows = move_batch(trial_batch(microbatch, cut=False), "cpu")
        if self.server.world.is_parallel:  # all ranks learn the same: from rows with all entries
            microbatch = max(self.server.world.gather_facts(rows), key=len)
        few, whole = trial_batch(microbatch, cut=True), trial_batch(microbatch, cut=False)
        try:
            found = self._learn(few, known, wants_rule=wants_rule)
        except torch.OutOfMemoryError as error:
            raise ValueError(self._needs()) from error
        except Exception as error:  # a model of fixed length cannot run a few tokens
            if isinstance(error, CutError) and token_length(few) == token_length(whole):
                raise
            found = replace(self._learn(whole, known, wants_rule=wants_rule), cut=False)
        return replace(found, rows=rows)

    def _needs(self) -> str:
        """What a device must have room for, of which this one has too little."""
        sizes = {name: unit.form.weight_layout.nbytes for name, unit in self.server.units.items()}
        around = sum(nbytes for name, nbytes in sizes.items() if not name.startswith("L"))
        largest = max(nbytes for name, nbytes in sizes.items() if name.startswith("L"))
        least = round(TRIAL_MARGIN * (around + largest)) + self.device.growth_bytes
        return (
            "the device has too little memory to try the model on a few rows: weights around the "
            f"layers take {format_bytes(around)}, the largest layer {format_bytes(largest)}. Give "
            f"device_memory={format_bytes(least)} or more, if the device has it."
        )

    def record(self, microbatch: Microbatch, route: Route) -> list[Recording]:
        """What runs of the code before every stack yield for these rows, on the device."""
        with self._with_weights(training=True):
            rows = move_batch(microbatch, self.device.torch_device)
            return self._layers.through(rows, route)[0]

    def why_not_cut(
        self, rule: Rule, microbatches: Sequence[Microbatch], route: Route
    ) -> str | None:
        """Why a loss over these microbatches is not that of the batch; None: it is.

        Losses that count labels are known by the rule that was found ([Note: counting rule] in
        batch.py); as there, layers that hand on a hidden state alone are left out.
        """
        function, is_own = self.outer.loss_function, self.outer.loss_function is None
        if is_own and (rule is not Rule.ROWS or len(microbatches) < 2):
            return None
        if is_own and any(map(has_masks, microbatches)):
            return "the loss may count what a mask among the batch leaves, not rows"
        rows = num_rows(microbatches[0]) if len(microbatches) > 1 else 0
        is_known = rows in self._verdicts
        if not all(self.server.world.gather_facts(is_known)):  # ranks bring their weights together
            with self._with_weights(training=False):
                loss = partial(self._around_by(route).measure, function or require_own_loss)
                compare = compare_parts if is_own else compare_cut_loss
                if not is_known:  # what is true of one batch is true of the next, too
                    self._verdicts[rows] = compare(rule, microbatches, loss)
        return self._verdicts[rows]

    def why_not_joint(self, microbatches: Sequence[Microbatch], facts: Facts) -> str | None:
        """Why no loss may be taken over what the layers make of all microbatches; None: it may."""
        assert facts.route is not None
        kind = frozenset(facts.rows)
        if kind not in self._obstacles:
            rows = some_rows(join_rows(microbatches[:2]))
            rows = move_batch(shortened(rows) if facts.cut else rows, self.device.torch_device)
            with self._with_weights(training=False):
                around = self._around_by(facts.route)
                self._obstacles[kind] = around.why_not_joint(rows, facts.row_dimensions)
        return self._obstacles[kind]

    def refuse_layer(self, module: nn.Module, position: int, rows: Microbatch) -> None:
        """Refuse a module that does not run, on these rows, where a layer runs.

        Raises:
            ValueError: it fails there, or returns something else than a hidden state.
        """
        (recording,) = self.record(rows, self.partition.straight)
        index = min(position, self.partition.num_layers - 1)
        dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)

        def given(tensor: Tensor) -> Tensor:
            return tensor.cpu().to(dtype) if tensor.is_floating_point() else tensor.cpu()

        assert recording.hidden is not None
        hidden, recorded = given(recording.hidden), [given(one) for one in recording.tensors]
        args, kwargs = recording.calls[index].arguments(hidden, recorded)
        try:
            with self.device.private_random_state(), torch.no_grad():
                (output,) = Returns.unwrap(module(*args, **kwargs))
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

    # ----------------------------------------------------------------------------------------------

    @property
    def _layers(self) -> LayerTrial:
        return LayerTrial(self.partition, self.server, self.device, self.compiler)

    def _around_by(self, route: Route) -> OuterTrial:
        return OuterTrial(self.partition, self.server, self.device, self.outer, self._layers, route)

    @contextlib.contextmanager
    def _with_weights(self, *, training: bool) -> Iterator[Mapping[str, Tensor]]:
        """Copies of the weights around the layers, bound in the block; it leaves all as it was."""
        self.server.settle_all()
        try:
            weights = self._weights()
            with (
                self.device.private_random_state(),
                torch.no_grad(),
                self.partition.attributes_kept(),
            ):
                kept = KeptBuffers(self.partition)
                self.partition.set_training(training)
                self.partition.skeleton.bind(weights)
                try:
                    yield weights
                finally:
                    kept.put_back()
        finally:
            self.outer.bind_only({})  # let go of the copies on the device

    def _weights(self) -> dict[str, Tensor]:
        """Copies of the weights around the layers, on the device."""
        found: dict[str, Tensor] = {}
        for name, unit in self.server.units.items():
            if not name.startswith("L"):
                whole = self.server.whole(name).weights
                weights = whole.to(self.device.torch_device, copy=True)
                found |= unit.form.weight_layout.views(weights)
        return found

    def _learn(self, rows: Microbatch, known: Facts, *, wants_rule: bool) -> Facts:
        trial = move_batch(rows, self.device.torch_device)
        with self._with_weights(training=True) as weights:
            facts = known
            if not known.rows:
                with self.partition.learning():
                    facts = self._learn_model(trial, weights)
            if not wants_rule:
                return facts
            self.partition.set_training(False)
            try:
                return self._learn_rule(trial, weights, facts)
            except (CutError, torch.OutOfMemoryError):
                raise
            except Exception:  # some models return something else in evaluation mode
                self.partition.set_training(True)
                return self._learn_rule(trial, weights, facts)

    def _learn_model(self, trial: Microbatch, weights: Mapping[str, Tensor]) -> Facts:
        """Learn what the layers do, and the code around them.

        Most models hand their hidden state straight on: that takes a layer of each structure. What
        others do is found by running all layers.
        """
        reason: Exception | None = None
        if len(self.partition.lists) == 1:
            try:
                return self._learn_straight(trial, weights)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # it does something else
                self.partition.forget()
                reason = error
        try:
            return self._discover(trial, weights)
        except (CutError, torch.OutOfMemoryError) as error:
            raise error from reason
        except Exception as error:
            raise CutError(
                f"the model's code raises {type(error).__name__} on two rows: {error}. "
                "If it runs in plain PyTorch, it does something that cannot be done with layers "
                "that run apart from it, and more than once: such as taking gradients itself, or "
                "keeping things from layer to layer in objects."
            ) from error

    def _learn_straight(self, trial: Microbatch, weights: Mapping[str, Tensor]) -> Facts:
        kept, layers = KeptBuffers(self.partition), self._layers
        try:
            with torch.enable_grad():  # nothing requires gradients: to see whether that is undone
                self.partition.prologue(trial, learn=layers.run, meet=layers.meet)
        finally:
            kept.put_back()
        if layers.reshaped is not None:
            raise CutError(f"{layers.reshaped}. Expected layers that keep its shape.")
        straight = self.partition.straight
        return self._facts(trial, weights, layers, straight, straight)

    def _discover(self, trial: Microbatch, weights: Mapping[str, Tensor]) -> Facts:
        kept, layers = KeptBuffers(self.partition), self._layers
        discovery = Discovery(self.partition, layers.see)
        units = self.server.units.items()
        trained = [n for k, unit in units if k[0] != "L" for n in unit.form.trained.names]
        self.partition.skeleton.bind(leaves(weights, trained))
        try:
            with torch.enable_grad():
                routes = discovery.run(trial, self.outer.loss_function or own_loss)
        finally:
            self.partition.skeleton.bind(weights)
            kept.put_back()
        return self._facts(trial, weights, layers, *routes)

    def _facts(
        self,
        trial: Microbatch,
        weights: Mapping[str, Tensor],
        layers: LayerTrial,
        route: Route,
        whole_route: Route,
    ) -> Facts:
        """What the code around the layers does, which run by these routes."""
        for structure in self.partition.changing_input:  # it would write into a cell
            self.compiler.uncompiled.add(structure)
        around = self._around_by(route)
        changing = around.changing(trial)
        usage = around.learn_usage(trial, weights, frozenset[str]().union(*changing))
        mixes_rows, dimensions = around.rows_in(trial)
        return Facts(
            mixes_rows=mixes_rows or layers.mixes_rows,
            row_dimensions=dimensions,
            route=route,
            whole_route=whole_route,
            usage=usage or {},
            alone=usage is not None,
            changing=changing if any(changing) else (),
            changing_in_layers=layers.changing(),
        )

    def _learn_rule(self, trial: Microbatch, weights: Mapping[str, Tensor], facts: Facts) -> Facts:
        """Learn what the loss averages over, and how the epilogue may be cut."""
        assert facts.route is not None
        around, alone = self._around_by(facts.route), facts.alone
        rule, is_final = around.find_rule(trial)
        heads = [weights[owner] for owner in around.read_after(facts.usage)]
        matrices = [weight for weight in heads if weight.dim() == 2]
        may_put_off = alone and self.outer.may_put_off
        return replace(
            facts,
            rule=rule,
            rule_is_final=is_final,
            within_rows=alone and around.pieces_agree(trial, rule),
            puts_off=may_put_off and around.putting_off_agrees(trial, rule, matrices),
        )
