"""Before the first step: learn from a few rows what no inspection of the model can tell.

On two rows, with the real weights, on the device (or on the host, where that has no room):

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
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from l2l.device import Device, format_bytes, open_device
from l2l.model import (
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
    map_batch,
    move_batch,
    num_rows,
    require_loss,
    shortened,
    some_rows,
    token_length,
    trial_batch,
    without_graph,
)
from l2l.parameter_server import ParameterServer
from l2l.run import Facts, OuterPass, Parts
from l2l.trial.discovery import Discovery, own_loss
from l2l.trial.layer_trial import LayerTrial
from l2l.trial.outer_trial import KeptBuffers, OuterTrial

logger = logging.getLogger("l2l")
Found = TypeVar("Found")

MARGIN = 1.05  # of the weights, for what the allocator loses
WORKSPACE_BYTES = 128 << 20  # of libraries, and for what is computed of a few tokens
VALUE_BYTES = 16  # of every value in the widest result: it, its loss and their gradients


def require_own_loss(outputs: Any, _: Mapping[str, Any]) -> Tensor:
    """The loss in a model's outputs."""
    return require_loss(outputs)


@final
@dataclass(frozen=True, eq=False)
class Trial:
    """Runs the parts of the model once, slowly.

    That takes all weights around the layers at once. Where the device has no room for them, as that
    of a small budget for a large vocabulary, the trial runs on the host.
    """

    parts: Parts
    outer: OuterPass
    _verdicts: dict[int, str | None] = field(default_factory=lambda: {0: None})
    """By rows of microbatches, why a given loss may not be cut into them; 0: of one."""
    _obstacles: dict[frozenset[str], str | None] = field(default_factory=dict)
    """By entries of batches, why no loss may be joint."""
    _on_host: list[Trial] = field(default_factory=list)
    """The trial that runs there, once the device had no room."""

    @property
    def partition(self) -> Partition:
        """The model."""
        return self.parts.partition

    @property
    def server(self) -> ParameterServer:
        """The owner of its weights."""
        return self.parts.server

    @property
    def device(self) -> Device:
        """Where it runs."""
        return self.parts.device

    def on_host(self) -> Trial:
        """The same trial, on the host."""
        if not self._on_host:
            parts = replace(self.parts, device=open_device("cpu"))
            outer = OuterPass(parts, puts_off=self.outer.may_put_off)
            self._on_host.append(Trial(parts, outer, self._verdicts, self._obstacles))
        return self._on_host[0]

    def _somewhere(self, rows: Microbatch, run: Callable[[Trial], Found]) -> Found:
        """Run something for these rows here, or on the host where the device has no room for it.

        Raises:
            ValueError: the host has none, either.
        """
        if not self._on_host:
            try:
                return run(self)
            except torch.OutOfMemoryError as error:
                if self.device.torch_device.type == "cpu":
                    raise ValueError(self._needs(rows)) from error
                logger.info("the model is tried on the host: the device has too little memory.")
        found = run(self.on_host())
        draws = self.on_host().device.random_numbers.seeds_defaults
        self.device.random_numbers.seeds_defaults |= draws
        return found

    def run(self, microbatch: Microbatch, known: Facts, *, needs_loss: bool) -> Facts:
        """Learn what is not known yet; `needs_loss` asks for the counting rule too.

        Raises:
            ValueError: the model cannot be run layer by layer, or the device has no room.
        """
        if not self.must_run(known, needs_loss=needs_loss):
            return known
        wants_rule = needs_loss and not known.rule_is_final
        rows = map_batch(Tensor.detach, move_batch(trial_batch(microbatch, cut=False), "cpu"))
        if self.server.world.is_parallel:  # all ranks learn the same: from rows with all entries
            microbatch = max(self.server.world.gather_facts(rows), key=len)
        few = trial_batch(microbatch, cut=True)
        learn = partial(Trial._learn_all, microbatch=microbatch, known=known, wants_rule=wants_rule)
        found = self._somewhere(few, learn)
        return replace(found, rows=rows)

    def _learn_all(self, microbatch: Microbatch, known: Facts, *, wants_rule: bool) -> Facts:
        """What is not known yet, from rows that are cut short if the model takes such."""
        few, whole = trial_batch(microbatch, cut=True), trial_batch(microbatch, cut=False)
        try:
            return self._learn(few, known, wants_rule=wants_rule)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model of fixed length cannot run a few tokens
            if isinstance(error, CutError) and token_length(few) == token_length(whole):
                raise
            return replace(self._learn(whole, known, wants_rule=wants_rule), cut=False)

    def must_run(self, known: Facts, *, needs_loss: bool) -> bool:
        """Whether there is something to learn of such rows."""
        return not known.rows or (needs_loss and not known.rule_is_final)

    def _sizes(self) -> tuple[int, int]:
        """Bytes of the weights around the layers, and of the largest layer."""
        sizes = {name: unit.form.weight_layout.nbytes for name, unit in self.server.units.items()}
        around = sum(nbytes for name, nbytes in sizes.items() if not name.startswith("L"))
        return around, max(nbytes for name, nbytes in sizes.items() if name.startswith("L"))

    def least_bytes(self, rows: Microbatch) -> int:
        """What it takes of the device to try these rows."""
        matrices = (
            one for one in self.partition.outer_tensors.parameters.values() if one.dim() > 1
        )
        widest = max((max(one.shape) for one in matrices), default=1)
        around, largest = self._sizes()
        work = max(largest, num_rows(rows) * token_length(rows) * widest * VALUE_BYTES)
        return round(MARGIN * (around + work)) + WORKSPACE_BYTES + self.device.growth_bytes

    def _needs(self, rows: Microbatch) -> str:
        """What a device must have room for, of which this one has too little."""
        around, largest = self._sizes()
        return (
            "there is too little memory to try the model on a few rows: weights around the layers "
            f"take {format_bytes(around)}, the largest layer {format_bytes(largest)}. About "
            f"{format_bytes(self.least_bytes(rows))} are needed, on the device (device_memory) or "
            "else on the host."
        )

    def record(self, microbatch: Microbatch, route: Route) -> list[Recording]:
        """What runs of the code before every stack yield for these rows, on the device."""
        return self._somewhere(microbatch, lambda trial: trial._record(microbatch, route))

    def _record(self, microbatch: Microbatch, route: Route) -> list[Recording]:
        with self._with_weights(training=True):
            rows = move_batch(microbatch, self.device.torch_device)
            return self._layers.through(rows, route)[0]

    def pointwise(self, facts: Facts) -> Facts:
        """The facts, with what of the layers may run in tiles."""
        return self._somewhere(facts.rows, lambda trial: trial._pointwise(facts))

    def _pointwise(self, facts: Facts) -> Facts:
        assert facts.route is not None
        rows = move_batch(some_rows(facts.rows), self.device.torch_device)
        with self._with_weights(training=True):
            rows = shortened(rows) if facts.cut else rows
            return replace(facts, pointwise=self._layers.pointwise(rows, facts.route))

    def why_not_cut(
        self, rule: Rule, microbatches: Sequence[Microbatch], route: Route
    ) -> str | None:
        """Why a loss over these microbatches is not that of the batch; None: it is.

        Losses that count labels are known by the rule that was found ([Note: counting rule] in
        batch.py); as there, layers that hand on a hidden state alone are left out.
        """
        is_own = self.outer.loss_function is None
        if is_own and (rule is not Rule.ROWS or len(microbatches) < 2):
            return None
        if is_own and any(map(has_masks, microbatches)):
            return "the loss may count what a mask among the batch leaves, not rows"
        rows = num_rows(microbatches[0]) if len(microbatches) > 1 else 0
        is_known = rows in self._verdicts
        if not all(self.server.world.gather_facts(is_known)):  # ranks bring their weights together
            compare = compare_parts if is_own else compare_cut_loss
            found = self._somewhere(
                microbatches[0],
                lambda trial: trial._measured(
                    None if is_known else partial(compare, rule, microbatches), route
                ),
            )
            if not is_known:  # what is true of one batch is true of the next, too
                self._verdicts[rows] = found
        return self._verdicts[rows]

    def _measured(self, compare: Callable[[Any], str | None] | None, route: Route) -> str | None:
        """What is found by comparing losses of parts of the model's rows; None: nothing."""
        function = self.outer.loss_function or require_own_loss
        with self._with_weights(training=False):
            loss = partial(self._around_by(route).measure, function)
            return None if compare is None else compare(loss)

    def why_not_joint(self, microbatches: Sequence[Microbatch], facts: Facts) -> str | None:
        """Why no loss may be taken over what the layers make of all microbatches; None: it may."""
        assert facts.route is not None
        kind = frozenset(facts.rows)
        if kind not in self._obstacles:
            self._obstacles[kind] = self._somewhere(
                microbatches[0], lambda trial: trial._find_obstacle(microbatches, facts)
            )
        return self._obstacles[kind]

    def _find_obstacle(self, microbatches: Sequence[Microbatch], facts: Facts) -> str | None:
        assert facts.route is not None
        rows = some_rows(join_rows(microbatches[:2]))
        rows = move_batch(shortened(rows) if facts.cut else rows, self.device.torch_device)
        with self._with_weights(training=False):
            return self._around_by(facts.route).why_not_joint(rows, facts.row_dimensions)

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
        return LayerTrial(self.partition, self.server, self.device, self.parts.compiler)

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
                kept, device = KeptBuffers(self.partition), self.device.torch_device
                self.partition.set_training(training)
                buffers = {owner: one.to(device) for owner, one in kept.buffers.items()}
                self.partition.skeleton.bind({**weights, **buffers})
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
                found |= unit.form.weights_in(weights)
        return found

    def _learn(self, rows: Microbatch, known: Facts, *, wants_rule: bool) -> Facts:
        asking = without_graph(move_batch(rows, self.device.torch_device))
        trial = map_batch(Tensor.detach, asking)
        with self._with_weights(training=True) as weights:
            facts = known
            if not known.rows:
                with self.partition.learning():
                    facts = self._learn_model(trial, weights, asking)
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

    def _learn_model(
        self, trial: Microbatch, weights: Mapping[str, Tensor], asking: Microbatch
    ) -> Facts:
        """Learn what the layers do, and the code around them.

        Most models hand their hidden state straight on: that takes a layer of each structure. What
        others do is found by running all layers; `asking` are the same rows, with those as leaves
        of a graph that gradients are asked for.
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
            return self._discover(trial, weights, asking)
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

    def _discover(
        self, trial: Microbatch, weights: Mapping[str, Tensor], asking: Microbatch
    ) -> Facts:
        kept, layers = KeptBuffers(self.partition), self._layers
        discovery = Discovery(self.partition, layers.see)
        units = self.server.units.items()
        trained = [n for k, unit in units if k[0] != "L" for n in unit.form.trained.names]
        self.partition.skeleton.bind(leaves(weights, trained))
        try:
            with torch.enable_grad():
                routes = discovery.run(asking, self.outer.loss_function or own_loss)
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
            self.parts.compiler.uncompiled.add(structure)
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
        read = {owner: weights[owner] for owner in around.read_after(facts.usage)}
        matrices = [weight for weight in read.values() if weight.dim() == 2]
        may_put_off = alone and self.outer.may_put_off
        return replace(
            facts,
            rule=rule,
            rule_is_final=is_final,
            within_rows=alone and around.pieces_agree(trial, rule),
            puts_off=may_put_off and around.putting_off_agrees(trial, rule, matrices),
            head=around.find_head(trial, read) if alone else None,
        )
