"""The engine: what users hold. It wires its parts, and lets them do what it is asked for."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, final

import torch
from torch import Tensor, nn

from l2l.checkpoint import Saving
from l2l.device import Device, Disk, open_device
from l2l.distributed import open_world, refuse_different_weights
from l2l.engine.averages import Averages
from l2l.engine.checkpoints import Checkpoints
from l2l.engine.condition import Condition
from l2l.engine.depth import Depth, checked_depth
from l2l.engine.disk_tier import refuse_without_room
from l2l.engine.generation import Generation
from l2l.engine.guard import Guard, guarded
from l2l.engine.layers import Layers
from l2l.engine.loop import Loop
from l2l.engine.network import PLANS
from l2l.engine.proving import Batches
from l2l.engine.resources import Execution, Resources, refuse_loop
from l2l.engine.stepping import Stepping
from l2l.engine.turns import Turns
from l2l.hugging_face import SHARD_BYTES, Incoming, RandomInit
from l2l.model import (
    LossFunction,
    Partition,
    Split,
    TokenLoss,
    bytes_of,
)
from l2l.parameter_server import (
    GivenOptimizer,
    HostBudget,
    Inventory,
    UnitForm,
    lost_weights,
    units_of,
)
from l2l.planner import STATE_ON_HOST, Budget, Plan
from l2l.run import StepReport
from l2l.schedule import Trace


@final
class Engine:
    """Trains a model with one layer on the device at a time, or runs one that is frozen.

    The model's weights move into the parameter server when the engine is made and back when it is
    closed. In between its parameters take no memory. Reading one gives the weights; writing
    to it and calling the model are refused: see `l2l.model.held`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: GivenOptimizer = None,
        loss: LossFunction | TokenLoss | None = None,
        split: Split | None = None,
        weights: Path | str | RandomInit | None = None,
        allow_missing_weights: bool = False,
        device: str | torch.device | Device | None = None,
        device_memory: int | str | Engine | None = None,
        host_memory: int | str | None = None,
        disk: Disk | str | Path | None = None,
        microbatch_size: int | None = None,
        precision: str | torch.dtype = "bfloat16",
        base: str | None = None,
        clip_norm: float | None = None,
        layers: str | Sequence[str] | None = None,
        nonfinite: str = "stop",
        compile: bool | str | None = None,  # noqa: A002 (torch's name for torch's thing)
        seed: int | None = None,
        prove: bool = True,
        depth: Depth | None = None,
        autograd: bool = False,
        execution: Execution | None = None,
    ) -> None:
        """Partition the model and move its weights into the parameter server.

        Args:
            model: any module that runs a list of layers in order, on the CPU; or on the meta
                device, with `weights`.
            optimizer: `l2l.AdamW(...)`, `SGD`, `Lion`, `Muon`, `ScheduleFreeAdamW` or `Adafactor`,
                or a fresh optimizer of torch's kind over the model's parameters, whose groups are
                taken over; a list of two is torch.optim.Muon and one for what is no matrix. None:
                AdamW; or for a model of which no parameter requires a gradient, none: the engine
                takes the bytes of its weights, evaluates, predicts, generates and exports.
            loss: None is the model's own (`outputs.loss`); or (outputs, batch) -> (sum, weight),
                or a scalar, taken as a mean over rows; or `l2l.TokenLoss`, of log-probabilities.
            split: (batch, start, end) -> a dict with these rows of the batch, where its tensors do
                not all have rows as their first dimension; also of what it has returned. Rows are
                counted by its attribute `num_rows`, a function of a batch, or else by `input_ids`
                or `labels`. None: images and the like go with the rows whose placeholders they
                fill; a batch whose rows are not certain is one microbatch.
            weights: for a model on the meta device: a Hugging Face folder or a safetensors file,
                read tensor by tensor, or `l2l.RandomInit(seed=0)`.
            allow_missing_weights: whether weights missing from the files are initialized randomly
                even if they are not a new head.
            device: None is the accelerator if there is one, else the CPU.
            device_memory: how much of the device may be used: bytes, "8GiB", or None: 90% of what
                is free. Counts what the driver does, context and libraries too. What is left is
                used to run faster: layers that stay, results that need not be computed twice.
                Another engine: the memory of that one, which the two use in turns (a student and
                its teacher, say).
            host_memory: how much of the host's memory may be taken, by the parameter server and by
                what steps need besides: bytes, "100GiB", or None: 95% of what is free.
            disk: a folder on a fast drive, or `l2l.Disk(folder, size="2TB")`, for what the host's
                memory has no room for: optimizer state of layers, the stash, weights.
            microbatch_size: rows that pass a layer at once. None: planned.
            precision: "float32", "bfloat16" or "float16": what crosses the link and runs on the
                device. The server keeps a float32 master of what is trained on the host.
            base: "nf4" (4 bits, with double quantization) or "int8": quantize the frozen linear
                weights of layers as they move in, by torchao; an adapter is trained beside them.
            clip_norm: clip gradients by their global norm, as torch.nn.utils.clip_grad_norm_.
            layers: dotted name of the list of layers, where the model has several.
            nonfinite: what happens if a gradient is not finite though the loss is. Where the whole
                gradient is known before the first update, the step is skipped. Else "stop" is an
                error that names the layer, before that is updated; "skip" lets updates wait.
            compile: whether layers go through torch.compile, or the name of a backend for it. None:
                on an accelerator. Compiled layers round differently.
            seed: of dropout, of stochastic rounding, of `depth`, and of a new head that `weights`
                does not have. None: torch's initial seed.
            prove: whether the first step is compared with the model's own code: see `l2l.proof`.
            depth: which layers every training step runs: `l2l.StochasticDepth()`, say. None: all.
            autograd: whether a loop of the user's own works: `model(**batch)`, `loss.backward()`,
                `engine.optimizer.step()`; see loop.py. Takes 4 more bytes a parameter, on the host.
            execution: settings that are rarely needed: see `l2l.Execution`.

        Raises:
            ValueError: an argument is invalid; the model is unchanged.
        """
        # All arguments are checked before the model changes.
        execution = execution or Execution()
        self._guard, world = Guard(), open_world(group_size=execution.group_size)
        execution.check(world, microbatch_size)
        seed = world.gather_facts(torch.initial_seed() if seed is None else seed)[0]
        if autograd:
            refuse_loop(loss=loss, optimizer=optimizer, disk=disk, world=world)
        turns = _turns_of(device_memory)
        if device is None and isinstance(device_memory, Engine):
            device = device_memory.device.torch_device
        incoming = Incoming.of(model, weights, seed=seed, allow_missing=allow_missing_weights)
        refuse_different_weights(world, model)
        inventory = Inventory.of(
            model,
            optimizer=optimizer,
            precision=precision,
            base=base,
            layers=layers,
            clip_norm=clip_norm,
            own_loss=loss is None,
            update=execution.update,
            nonfinite=nonfinite,
            num_shares=world.share.number,
            drains_sums=autograd,
        )
        partition, forms = inventory.partition, inventory.forms
        depth = checked_depth(depth, partition.num_layers)
        self.optimizer = inventory.server_optimizer()
        inventory.precision.warn_of_rounding(model, trained=self.optimizer.settings())
        budget = HostBudget.of(
            host_memory, model_bytes=bytes_of(model.parameters()), num_sharing=world.share.number
        )
        refuse_without_room(disk, inventory, budget, world, execution.overrides)
        on_host = world.is_parallel or depth.skips or autograd
        self._resources = has = Resources.of(
            inventory,
            self.optimizer,
            model=model,
            loss=loss,
            split=split,
            clip_norm=clip_norm,
            microbatch_size=microbatch_size,
            proves=prove,
            world=world,
            host_budget=budget,
            device=device if isinstance(device, Device) else open_device(device),
            turns=turns,
            disk=disk,
            backend=compile,
            seed=seed,
            execution=execution.with_choices(STATE_ON_HOST if on_host else {}),
            plans=PLANS,
        )
        server = has.server
        with _moved_in(has, partition, forms, incoming):
            self._condition = condition = Condition(has, partition, depth=depth, seed=seed)
        server.reader.prepare_with(condition.before_reading)
        self._stepping = Stepping(condition, self._guard)
        self._loop = Loop(condition, self._stepping, self._guard, self.generate)
        self._layers = Layers(condition, self._guard)
        self._averages = Averages(condition, self._guard)
        self._checkpoints = Checkpoints(condition, self._layers, self._guard)
        turns.join(condition, self._guard)
        has.planning.limit_device()  # the model itself may have been on the device

    @guarded("engine.step")
    def step(self, batch: Batches, *, layers: Sequence[int] | None = None) -> StepReport:
        """One optimizer step over a batch: a dict of tensors, or a list of microbatches.

        Args:
            batch: the rows.
            layers: those that run, strictly increasing; the others are left out, and not updated.
                None: what the engine's `depth` chooses.

        Raises:
            ValueError: the batch or the layers are invalid; nothing has changed.
            RuntimeError: every step so far was skipped because of non-finite values.
        """
        condition, settings = self._condition, self.optimizer.settings()
        condition.refuse_if_unusable()
        condition.refuse_unless_training("engine.step")
        condition.skips.refuse()
        choice = condition.drawn() if layers is None else condition.chosen(layers)
        step, _ = self._stepping.perform(batch, choice, settings=settings)
        condition.count()
        self.optimizer.step()
        return StepReport(step)

    @guarded("engine.evaluate")
    def evaluate(self, batch: Batches, *, layers: Sequence[int] | None = None) -> float:
        """The loss of a batch; forward only, in evaluation mode, through all layers or some."""
        return StepReport(self._stepping.perform(batch, self._condition.chosen(layers))[0]).loss

    @guarded("engine.predict")
    def predict(self, batch: Batches, *, layers: Sequence[int] | None = None) -> Any:
        """The model's outputs for a batch, on the host; otherwise as `evaluate`."""
        return self._stepping.predict(batch, self._condition.chosen(layers))

    @guarded("engine.generate")
    def generate(self, *args: Any, **options: Any) -> Any:
        """What the model's own `generate` gives with these arguments, on the host.

        For models of transformers: `engine.generate(input_ids, attention_mask=mask,
        max_new_tokens=128, do_sample=True, temperature=0.7)`. All rows decode together: weights of
        layers that do not fit the device cross the link once a token.

        Raises:
            ValueError: the model does not generate, or the device has no room; nothing has changed.
        """
        return Generation(self._condition).generate(args, options)

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block, running means stand for the weights that `average=` keeps them of.

        So `evaluate`, `predict`, `generate`, `export` and `state_dict` are about the means; steps,
        saving and loading are refused. A parameter that was never updated stays as it is.
        """
        return self._averages.used()

    @property
    def layers(self) -> Layers:
        """The layers as they are now: insert, remove, grow, freeze, thaw: see layers.py."""
        return self._layers

    @property
    def depth(self) -> Depth:
        """Which layers every training step runs; may be set."""
        return self._condition.depth

    @depth.setter
    def depth(self, depth: Depth | None) -> None:
        self._condition.choose_by(depth)

    @property
    def step_number(self) -> int:
        """Steps so far."""
        return self._condition.step_number

    @property
    def state(self) -> Literal["open", "torn", "closed"]:
        """Whether it can be used; torn: a step has failed in its updates, and `load` is needed."""
        return self._condition.state

    def save(
        self,
        folder: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        background: bool = False,
        then: Callable[[], None] | None = None,
    ) -> Saving:
        """Write everything that is needed to go on exactly: see `l2l.checkpoint.checkpoint`.

        Args:
            folder: the checkpoint; an existing one is replaced once the new one is complete.
            extra: anything JSON can hold, for `load` to give back.
            background: return at once and write beside the steps that follow. What is written is
                the state as it is now: units are copied into spare host memory before they change,
                or their update waits.
            then: called once the checkpoint is there, on another thread.

        Raises:
            CheckpointError: it cannot be written. In the background, `Saving.wait` raises that.
        """
        saving = self._checkpoints.save(Path(folder), extra or {}, then, background=background)
        if not background:  # with signals that are not held
            saving.wait()
        return saving

    @property
    def checkpoint_bytes(self) -> int:
        """What a checkpoint takes on the disk, but for its headers: of this rank, its share."""
        return self._checkpoints.num_bytes

    @property
    def disk_written_bytes(self) -> int:
        """What was written to the disk of `disk=` so far, also when the engine was made."""
        disk = self._resources.server.disk
        return 0 if disk is None else disk.folder.num_written_bytes

    @guarded("engine.prepare_saving")
    def prepare_saving(self) -> None:
        """Take the host memory that saving in the background will copy layers into.

        It returns at once. Else the first such save takes that memory, and slows steps beside it.
        """
        self._checkpoints.prepare()

    @guarded("engine.load")
    def load(self, folder: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint, exactly; returns the `extra` it was saved with.

        Every file is checked first. Choices that change the last bits of results (size of
        microbatches, pieces of the epilogue) are those of the checkpoint, unless the engine was
        made with others.

        Raises:
            CheckpointError: it is damaged, or of another model or optimizer; nothing has changed.
        """
        return self._checkpoints.load(Path(folder))

    @guarded("engine.export", holds=False)
    def export(
        self,
        folder: str | Path,
        *,
        dtype: str | None = None,
        tokenizer: Any = None,
        shard_bytes: int = SHARD_BYTES,
        merge: bool = False,
    ) -> None:
        """Write a folder that `from_pretrained` reads, tensor by tensor: see export.py.

        A PEFT model's adapter is written in PEFT's format; of any other module the file
        model.safetensors with the names of its state_dict.

        Args:
            folder: replaced once the new one is whole, if it is an earlier export.
            dtype: "float32", "bfloat16" or "float16"; None: that of the model's parameters.
            tokenizer: to be saved beside the weights.
            shard_bytes: the most bytes in a file.
            merge: write the whole model, with a PEFT model's adapter merged into its weights.

        Raises:
            ValueError: the folder holds something else, or cannot be written.

        Several ranks must do this together; the first one writes.
        """
        with self._guard.held():
            self._condition.refuse_if_unusable()
            self._resources.server.settle_all()
        export = self._condition.network.export
        export(folder, dtype=dtype, tokenizer=tokenizer, shard_bytes=shard_bytes, merge=merge)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and present weights of all parameters, in the model's dtypes, on the CPU.

        One unit is in memory at a time: a layer, a table, or what else is around the layers. A tied
        parameter comes once, under its first name. Several ranks must iterate together, to the end.
        """
        self._condition.refuse_if_unusable()
        self._resources.server.settle_all()
        yield from self._condition.network.named_weights()

    def state_dict(self) -> dict[str, Any]:
        """What `model.state_dict()` of an ordinary model would give: present weights and buffers.

        All tensors are fresh copies on the CPU; tied ones share memory. Several ranks must do this
        together, and each gets all of it.
        """
        weights = dict(self.named_weights())
        self._condition.finish_step()
        return self._condition.network.state_dict(weights)

    @property
    def plan(self) -> Plan:
        """What is placed where, in bytes, and the choices made. Print it."""
        return self._condition.network.plan()

    @property
    def streamed_share(self) -> float:
        """Of the parameters outside tables and heads of words, the share that is in layers."""
        return self._condition.network.partition.layer_share

    @property
    def device(self) -> Device:
        """The device the layers run on, for memory measurements."""
        return self._resources.device

    def trace(self) -> contextlib.AbstractContextManager[Trace]:
        """Collect spans of what runs inside the block, with the schedule's text; see `Trace`."""
        return self._resources.device.tracing()

    @guarded("engine.close")
    def close(self, *, give_back: bool = True) -> None:
        """Move the weights back into the model, which is an ordinary nn.Module again.

        Several ranks must do this together, and each gets all of the model. With `give_back=False`
        the weights are freed and the model's parameters stay without memory.
        """
        _close(self._resources, self._condition, self._loop, give_back=give_back)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Give the weights back if nobody has closed the engine, and say so."""
        condition = self.__dict__.get("_condition")
        if condition is not None and condition.state != "closed" and not sys.is_finalizing():
            self._guard.drop(self.close, alone=not self._resources.world.is_parallel)


def _turns_of(device_memory: int | str | Engine | None) -> Turns:
    """By which an engine has its device memory: alone, or together with another.

    Raises:
        ValueError: the other is closed, or the text is not a size.
    """
    if not isinstance(device_memory, Engine):
        return Turns(Budget.of(device_memory))
    if device_memory.state == "closed":
        raise ValueError("device_memory= is an engine that is closed. Give a size, or an open one.")
    return device_memory._resources.turns


def _close(has: Resources, condition: Condition, loop: Loop, *, give_back: bool) -> None:
    """Let go of everything, and of the weights last: back into the model, or freed."""
    network = condition.network
    if condition.state == "closed":
        return
    condition.refuse_if_averaged("engine.close")
    torn = condition.is_torn
    failure = condition.finish()  # raised once weights are given back, as they are
    if give_back:
        network.give_back()
        failure = failure or lost_weights(has.server)
    loop.detach()
    condition.close()
    has.turns.leave(condition)
    has.server.reader.close("they were let go when their engine was closed")
    network.close()
    if failure is not None:
        raise failure
    if torn and give_back:
        warnings.warn(
            "a step failed after some layers had been updated: the weights returned to "
            "the model are a mix of two steps.",
            stacklevel=3,
        )


@contextlib.contextmanager
def _moved_in(
    has: Resources,
    partition: Partition,
    forms: Sequence[UnitForm],
    incoming: Incoming | None,
) -> Iterator[None]:
    """Move every unit into the server; if that or the block fails, the model is as it was."""
    moved: list[tuple[Mapping[str, nn.Parameter], str]] = []
    try:
        with has.timeline.phase("weights"):
            if incoming is not None:
                incoming.fill_buffers()
            for form, (name, tensors) in zip(forms, units_of(partition), strict=True):
                parts = [part for part, names in has.first_on_disk.items() if form.name in names]
                has.server.add(form, tensors, on_disk=parts)
                moved.append((tensors.parameters, name))
            if incoming is not None:
                incoming.deliver(has.server.set_weight, has.device.torch_device)
        yield
    except BaseException:
        if incoming is not None:
            incoming.undo()
        else:
            for unit in moved:
                has.server.give_back(*unit)
        has.device.close()
        if has.server.disk is not None:
            has.server.disk.close()
        raise
