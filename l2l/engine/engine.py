"""The engine: wires partition, parameter server, slots, stash and relay, and only wires."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, final

import torch
from torch import Tensor, nn

from l2l.checkpoint import Checkpoint, CheckpointError, Expected, Persistence, Saving
from l2l.device import Device, Event, UpdateFailedError, open_device
from l2l.distributed import open_world, refuse_different_weights
from l2l.engine.depth import Choice, Depth, checked_depth, checked_layers
from l2l.engine.guard import Guard, guarded
from l2l.engine.layers import Layers, Layout, changed_model
from l2l.engine.moves import models_for, moves_for
from l2l.hugging_face import SHARD_BYTES, Incoming, RandomInit, export_model
from l2l.model import (
    Compiler,
    LossFunction,
    Microbatch,
    Partition,
    Rule,
    UnitTensors,
    ignored_targets,
    join_outputs,
    no_rows,
    num_rows,
    output_shares,
    parse_backend,
    refuse_replaced,
    refuse_uncountable,
    registered,
    split_batch,
    split_into,
    take_rows,
    token_length,
    total_count,
)
from l2l.parameter_server import (
    Arena,
    HostBudget,
    HostKernel,
    HostOptimizer,
    Members,
    Optimizer,
    ParameterServer,
    PrecisionPolicy,
    ServerOptimizer,
    UnitForm,
    UpdatePolicy,
    alternatives,
    available_bytes,
    forms_of,
    groups_of,
    host_bytes,
    load_kernel,
    units_of,
)
from l2l.planner import STATE_ON_HOST, Decisions, Plan, Planning, parse_budget
from l2l.proof import FLOAT16_SCALE, Evidence, Proof, ProofMemory
from l2l.run import (
    PROLOGUE_SEED,
    HostRows,
    OuterPass,
    Relay,
    Scaler,
    Skips,
    Stash,
    Step,
    StepReport,
    Transfer,
    Updates,
    mix_seed,
    parse_policy,
)
from l2l.schedule import Lane, OuterUnit, Schedule, Shape, Trace, make_schedule
from l2l.trial import LARGE_UNIT_BYTES, Trial

logger = logging.getLogger("l2l")

PLACED = (
    "num_tail",
    "num_device_states",
    "num_shared",
    "keep",
    "num_kept_cells",
    "outer_state",
)
"""Choices by which a layer is computed, or updated, by other code: the same but for last bits."""
PROVEN = ProofMemory.of_user()
RANK_SEED = 0x9E3779B9  # ranks draw different random numbers
MOST_SCHEDULES = 32  # that are kept
MOST_STEPS_AHEAD = 2  # how far the host may run ahead of the device

Batches = Mapping[str, Any] | Sequence[Mapping[str, Any]]
P = ParamSpec("P")
R = TypeVar("R")


def _refusing_readers(
    method: Callable[Concatenate[Engine, P], R],
) -> Callable[Concatenate[Engine, P], R]:
    """While the method runs, nobody reads the model's own parameters; it has those it had."""

    @functools.wraps(method)
    def run(self: Engine, /, *args: P.args, **kwargs: P.kwargs) -> R:
        refuse_replaced(self._registered)
        with self._server.reader.running():
            return method(self, *args, **kwargs)

    return run


@final
class Engine:
    """Trains a model with one layer on the device at a time.

    The model's weights move into the parameter server when the engine is made and back when it is
    closed. In between its parameters take no memory. Reading one gives the weights; writing
    to it and calling the model are refused: see `l2l.model.held`.
    """

    _running: Step | None = None  # one whose end was not reached, or not noted
    _is_placed = False  # whether everything follows the choices
    _is_warned = False  # of statistics over microbatches

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Optimizer | torch.optim.Optimizer | None = None,
        loss: LossFunction | None = None,
        weights: Path | str | RandomInit | None = None,
        allow_missing_weights: bool = False,
        device: str | torch.device | Device | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        microbatch_size: int | None = None,
        precision: str | torch.dtype = "bfloat16",
        clip_norm: float | None = None,
        layers: str | None = None,
        stash: str = "host",
        update: str | None = None,
        nonfinite: str = "stop",
        compile: bool | str | None = None,  # noqa: A002 (torch's name for torch's thing)
        embedding: str | None = None,
        kernel: str = "native",
        seed: int | None = None,
        prove: bool = True,
        depth: Depth | None = None,
        overrides: Mapping[str, Any] | None = None,
        group_size: int | None = None,
    ) -> None:
        """Cut the model and move its weights into the parameter server.

        Args:
            model: any module that runs a list of layers in order, on the CPU; or on the meta
                device, with `weights`.
            optimizer: `l2l.AdamW(...)`, `SGD`, `Lion` or `Adafactor`, or a fresh torch.optim.AdamW
                or SGD over the model's parameters, whose groups are taken over. None: AdamW.
            loss: None is the model's own (`outputs.loss`); or (outputs, batch) -> (sum, weight),
                or a scalar, taken as a mean over rows.
            weights: for a model on the meta device: a Hugging Face folder or a safetensors file,
                read tensor by tensor, or `l2l.RandomInit(seed=0)`.
            allow_missing_weights: whether what the files lack may begin with random values even if
                it is no new head.
            device: None is the accelerator if there is one, else the CPU.
            device_memory: how much of the device may be used: bytes, "8GiB", or None: 90% of what
                is free. Counts all memory that torch has reserved there. What is left over is used
                to be faster: layers that stay, results that need not be computed twice.
            host_memory: how much of the host's memory may be taken, by the parameter server and by
                what steps need besides: bytes, "100GiB", or None: 95% of what is free.
            microbatch_size: rows that pass a layer at once. None: planned.
            precision: "float32", "bfloat16" or "float16": what crosses the link and runs on the
                device. The server keeps a float32 master of what is trained on the host.
            clip_norm: clip gradients by their global norm, as torch.nn.utils.clip_grad_norm_.
            layers: dotted name of the list of layers, where the model has several.
            stash: "host" (device memory constant in depth and batch) or "device".
            update: "eager", "just in time", or None: eager unless the whole gradient must be known
                first (clipping, float16). Both give the same results.
            nonfinite: what happens if a gradient is not finite though the loss is. Where the whole
                gradient is known before the first update, the step is skipped. Else "stop" is an
                error that names the layer, before that is updated; "skip" lets updates wait.
            compile: whether layers go through torch.compile, or the name of a backend for it. None:
                on an accelerator. Compiled layers round differently.
            embedding: "host" gathers the rows of embedding tables there, "device" brings whole
                tables; None: on the host for tables of 16 MiB and more.
            kernel: "native", or "readable" for the slow PyTorch version with the same arithmetic.
            seed: of dropout, of stochastic rounding, of `depth`, and of a new head that `weights`
                does not have. None: torch's initial seed.
            prove: whether the first step is preceded by a comparison with the model's own code, on
                a few tokens: see `l2l.proof`.
            depth: which layers every training step runs: `l2l.StochasticDepth()`, say. None: all.
            overrides: choices of the plan to be made otherwise, by name: see `l2l.planner`.
            group_size: where torch.distributed is initialised, all its ranks train together, each
                with rows of its own; so many of them hold one copy of the model. None: those of a
                node if there are several nodes, else all.

        Raises:
            ValueError: something above cannot be; nothing has been changed then.
        """
        if microbatch_size is not None and microbatch_size < 1:
            raise ValueError(
                f"microbatch_size={microbatch_size}; expected at least 1 row, or None."
            )
        self._guard, self._skips = Guard(), Skips()
        self._world = open_world(group_size=group_size)
        seed = self._world.gather_facts(torch.initial_seed() if seed is None else seed)[0]
        incoming = Incoming.of(model, weights, seed=seed, allow_missing=allow_missing_weights)
        self._precision = PrecisionPolicy.for_model(model, precision=precision)
        stash_policy = parse_policy(stash)
        refuse_different_weights(self._world, model)
        self._model = model
        self._partition = Partition(model, layers=layers)
        self._depth = checked_depth(depth, self._partition.num_layers)
        description, groups = groups_of(optimizer, model)
        self._policy = UpdatePolicy.choose(
            update,
            optimizer=description,
            clip_norm=clip_norm,
            link=self._precision.link,
            nonfinite=nonfinite,
        )
        self.optimizer = ServerOptimizer(
            groups,
            description.defaults,
            names={parameter: name for name, parameter in model.named_parameters()},
        )
        self._precision.warn_of_rounding(model, trained=self.optimizer.settings())
        forms = self._forms(description)
        budget = HostBudget.of(
            host_memory,
            model_bytes=sum(p.nbytes for p in model.parameters() if not p.is_meta),
            num_sharing=self._world.share.number,
        )
        budget.check(
            host_bytes([form.held(self._world.share) for form in forms], self._policy),
            alternatives=alternatives(self._forms, self._policy, self._precision.link),
        )
        native = _kernel(kernel, description)
        self._embedding = parse_embedding(embedding, alone=not self._world.is_parallel)
        overrides = self._checked(overrides or {})
        self._scaler = Scaler() if self._precision.link is torch.float16 else None
        self._device = device if isinstance(device, Device) else open_device(device)
        self._compiler = Compiler(backend=parse_backend(compile, self._device))
        self._arena = Arena(self._device)
        self._server = ParameterServer(
            arena=self._arena,
            optimizer=description,
            kernel=native,
            seed=seed,
            world=self._world,
        )
        self.optimizer.state_of = self._state_of
        self._loss, self._host_budget, self._seed, self._proves = loss, budget, seed, prove
        self._make_memory(stash_policy, native)
        self._make_parts()
        self._microbatch_size, self._clip_norm = microbatch_size, clip_norm
        self._planning = Planning(
            partition=self._partition,
            forms={form.name: form for form in forms},
            device=self._device,
            optimizer=description,
            policy=self._policy,
            kernel=native,
            budget=parse_budget(device_memory),
            host=budget,
            share=self._world.share,
            compiled=self._compiler.is_on,
            overrides=overrides,
        )
        self._placed, self._held = tuple[OuterUnit, ...](), frozenset[str]()
        self._schedules: dict[Shape, Schedule] = {}
        self._step_ends: deque[tuple[Event, Step]] = deque()
        self._home = (os.getpid(), threading.get_ident())
        self._step_number, self._state = 0, "open"
        self._move_in(forms, incoming)

    @guarded("engine.step")
    def step(self, batch: Batches, *, layers: Sequence[int] | None = None) -> StepReport:
        """One optimizer step over a batch: a dict of tensors, or a list of microbatches.

        Args:
            batch: the rows.
            layers: those that run, strictly increasing; the others are left out, and not updated.
                None: what the engine's `depth` chooses.

        Raises:
            ValueError: the batch or the layers cannot be; nothing has been changed then.
            RuntimeError: nothing was trained so far, because nothing was finite.
        """
        self._refuse_if_unusable()
        self._skips.refuse()
        choice = self._drawn() if layers is None else self._chosen(layers)
        step, _ = self._perform(batch, choice, settings=self.optimizer.settings())
        self._step_number += 1
        self._running = None  # only now it is whole again: [Note: interrupts] in guard.py
        self.optimizer.step()
        return StepReport(step)

    @guarded("engine.evaluate")
    def evaluate(self, batch: Batches, *, layers: Sequence[int] | None = None) -> float:
        """The loss of a batch; forward only, in evaluation mode, through all layers or some."""
        step, _ = self._perform(batch, self._chosen(layers), settings=None)
        return StepReport(step).loss

    @guarded("engine.predict")
    def predict(self, batch: Batches, *, layers: Sequence[int] | None = None) -> Any:
        """The model's outputs for a batch, on the host; otherwise as `evaluate`."""
        first = batch if isinstance(batch, Mapping) else batch[0]
        labelled = "labels" in first
        if (word := self._partition.collected(first)) is not None:
            raise ValueError(
                f"{word} asks for what single layers return, which the relay does not keep. Turn "
                "it off, in the batch or in the model's config."
            )
        step, microbatches = self._perform(
            batch, self._chosen(layers), settings=None, needs_loss=labelled, keep_outputs=True
        )
        own = microbatches[: step.num_own]
        if not own:  # this rank has no rows
            return no_rows(step.outputs[0])
        shares = output_shares(self._trial.rule, own)
        return join_outputs([step.outputs[m] for m in range(len(own))], shares)

    @property
    def layers(self) -> Layers:
        """The layers as they are now: insert, remove, grow, freeze, thaw: see layers.py."""
        return self._layers

    @property
    def depth(self) -> Depth:
        """Which layers every training step runs; may be set."""
        return self._depth

    @depth.setter
    def depth(self, depth: Depth | None) -> None:
        self._depth = checked_depth(depth, self._partition.num_layers)

    @property
    def step_number(self) -> int:
        """Steps so far."""
        return self._step_number

    @property
    def state(self) -> Literal["open", "torn", "closed"]:
        """Whether it can be used; torn: a step has failed in its updates, and `load` is needed."""
        if self._state == "closed":
            return "closed"
        return "torn" if self._is_torn or self._device.has_failed else "open"

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
            folder: the checkpoint; what has this name is replaced once the new one is whole.
            extra: anything JSON can hold, for `load` to give back.
            background: return at once and write beside the steps that follow. What is written is
                the state as it is now: units are copied into spare host memory before they change,
                or their update waits.
            then: called once the checkpoint is there, on another thread.

        Raises:
            CheckpointError: it cannot be written. In the background, `Saving.wait` raises that.
        """
        saving = self._begin_saving(Path(folder), extra, then, background=background)
        if not background:
            saving.wait()
        return saving

    @guarded("engine.save")
    def _begin_saving(
        self,
        folder: Path,
        extra: Mapping[str, Any] | None,
        then: Callable[[], None] | None,
        *,
        background: bool,
    ) -> Saving:
        self._refuse_if_unusable()
        self._persistence.finish()
        self._finish_step()
        saving = self._persistence.save(
            folder,
            step=self._step_number,
            state={
                "seed": self._seed,
                "choices": self._choices(),
                "layers": self._layers.state(),
            },
            buffers=self._trial.present_buffers(),
            order=self._order_of_change(),
            at_once=self._updated_on_device(),
            extra=extra or {},
            then=then,
            step_seconds=self._planning.step_seconds(),
            background=background,
        )
        if not background:  # whoever waits does not do it, with signals that are not held
            self._server.settle_all()
        return saving

    @property
    def checkpoint_bytes(self) -> int:
        """What a checkpoint takes on the disk, but for its headers: of this rank, its share."""
        return self._persistence.num_bytes + sum(
            buffer.nbytes for buffer in self._trial.present_buffers().values()
        )

    @guarded("engine.prepare_saving")
    def prepare_saving(self) -> None:
        """Take the host memory that saving in the background will copy layers into.

        Returns at once: fresh memory is slow, and is made ready beside the steps that follow. Else
        the first save in the background takes it, and the steps beside that are longer.
        """
        self._refuse_if_unusable()
        self._persistence.prepare(self._order_of_change())

    @guarded("engine.load")
    def load(self, folder: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint, exactly; returns the `extra` it was saved with.

        Every file is checked first. Choices that change the last bits of results (size of
        microbatches, pieces of the epilogue) are those of the checkpoint, unless the engine was
        made with others.

        Raises:
            CheckpointError: it is damaged, or of another model or optimizer; nothing has changed.
        """
        if self._state == "closed":
            raise RuntimeError("the engine is closed. Make a new one from the model.")
        if self._running is not None:
            self._clean_up()
        try:
            self._persistence.finish()
        except CheckpointError as error:
            logger.warning("%s", error)
        checkpoint = Checkpoint(Path(folder))
        self._persistence.check_files(checkpoint)
        layout = self._checked_layout(checkpoint)
        if layout is not None:
            self._follow_layers(layout, checkpoint)
        self._state = "torn"  # until all is there
        self._relay.abandon(self._running)
        self._device.recover()
        self._skips.begin_anew()
        self._finish_step()
        self._server.forget_updates()
        self._step_ends.clear()
        self._running = None
        self._leave_device()
        try:
            self._persistence.load(checkpoint)
            self._persistence.load_buffers(checkpoint, self._trial.present_buffers())
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} Some of it was loaded already: load this checkpoint again, or another."
            ) from error
        self._adopt(checkpoint.manifest.state)
        self._step_number, self._state = checkpoint.manifest.step, "open"
        self._server.reader.forget()
        return dict(checkpoint.manifest.extra)

    def _checked_layout(self, checkpoint: Checkpoint) -> Layout | None:
        """The layers to have before a checkpoint is loaded; None: as they are. Changes nothing.

        Raises:
            CheckpointError: the engine would not be one that it fits.
        """
        found = checkpoint.manifest.state.get("layers")
        if self.state != "open":
            found = None
        try:
            layout = None if found is None else self._layers.layout_of(found)
            expected = self._expected(layout, link=checkpoint.manifest.state["link"])
        except ValueError as error:
            raise CheckpointError(f"{checkpoint.folder}: {error}") from error
        self._persistence.check(checkpoint, expected)
        return layout

    def _expected(self, layout: Layout | None, *, link: str) -> Expected:
        """What a checkpoint of a precision must hold if the engine had these layers.

        Raises:
            ValueError: it cannot have them.
        """
        partition, forms = self._partition, [unit.form for unit in self._server.units.values()]
        precision = PrecisionPolicy.for_model(self._model, precision=link)
        if layout is not None:
            self._refuse_layout(layout)
            with changed_model(self._model, partition.list_name, layout, keep=False):
                partition, _, forms = self._with_layers(layout, precision)
        elif precision != self._precision:
            kinds = {form.name: form.state_kinds for form in forms}
            forms = [
                replace(form, state_kinds=kinds[form.name])
                for form in forms_of(
                    partition,
                    optimizer=self._server.optimizer,
                    settings=self.optimizer.settings(),
                    precision=precision,
                    num_shares=self._world.share.number,
                )
            ]
        return Expected(
            forms={form.name: form for form in forms},
            outer_buffers=self._partition.skeleton.buffers(),
            layer_buffers={k: v for one in partition.layer_tensors for k, v in one.buffers.items()},
        )

    def _follow_layers(self, layout: Layout, checkpoint: Checkpoint) -> None:
        """Have the layers that a checkpoint has."""
        units = self._server.units
        try:
            self._change_layers(layout)
        except BaseException as error:
            if self._server.units is not units:
                self._state = "torn"
            if isinstance(error, ValueError):
                raise CheckpointError(f"{checkpoint.folder}: {error}") from error
            raise
        logger.info("%s: the engine now has %s.", checkpoint.folder, self._layers)

    @guarded("engine.export", holds=False)
    def export(
        self,
        folder: str | Path,
        *,
        dtype: str | None = None,
        tokenizer: Any = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Write a folder that `from_pretrained` reads, tensor by tensor: see export.py.

        A PEFT model's adapter is written in PEFT's format; of any other module the file
        model.safetensors with the names of its state_dict.

        Args:
            folder: replaced once the new one is whole, if it is an earlier export.
            dtype: "float32", "bfloat16" or "float16"; None: that of the model's parameters.
            tokenizer: to be saved beside the weights.
            shard_bytes: the most bytes in a file.

        Raises:
            ValueError: the folder holds something else, or cannot be written.

        Several ranks must do this together; the first one writes.
        """
        with self._guard.held():
            self._refuse_if_unusable()
            self._server.settle_all()
        with self._server.values() as weight_of:
            if weight_of is None:  # another rank writes
                return
            with torch._C.DisableTorchFunctionSubclass():  # of the model, names and shapes only
                export_model(
                    self._model,
                    folder,
                    weight_of=weight_of,
                    buffers=self._trial.present_buffers(),
                    dtype=dtype,
                    tokenizer=tokenizer,
                    shard_bytes=shard_bytes,
                )

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and present weights of all parameters, in the model's dtypes, on the CPU.

        One unit is in memory at a time: a layer, a table, or what else is around the layers. A tied
        parameter comes once, under its first name. Several ranks must iterate together, to the end.
        """
        self._refuse_if_unusable()
        self._server.settle_all()
        for name, tensors in units_of(self._partition):
            value = self._server.weights_of(name)
            for owner, parameter in tensors.parameters.items():
                weight = value(owner).detach()
                yield owner, weight.to(device="cpu", dtype=parameter.dtype, copy=True)

    def state_dict(self) -> dict[str, Any]:
        """What `model.state_dict()` of an ordinary model would give: present weights and buffers.

        All tensors are fresh copies on the CPU; tied ones share memory. Several ranks must do this
        together, and each gets all of it.
        """
        weights = dict(self.named_weights())
        self._finish_step()
        buffers = {id(buffer): name for name, buffer in self._model.named_buffers()}
        present = self._trial.present_buffers()
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

    @property
    def plan(self) -> Plan:
        """What is placed where, in bytes, and the choices made. Print it."""
        return self._planning.plan(
            arena=self._arena.bytes_by_name,
            reserved={
                **self._transfer.bytes_by_place(),
                "boundary cells": self._stash.cell_bytes(),
                "buffers": self._trial.resident_buffer_bytes(),
            },
            choices=(
                ("layers", f"{self._partition.list_name}, {self._partition.num_layers} of them"),
                ("precision", str(self._precision.link).removeprefix("torch.")),
                ("microbatch", self._planning.microbatch(self._microbatch_size)),
                ("stash", self._stash.policy),
                ("update", self._policy.value),
                ("loss averages over", self._trial.rule.value if self._trial.rule else "?"),
                ("layers run", self._compiler.describe()),
            ),
            peak_bytes=self._device.peak_bytes(),
        )

    @property
    def device(self) -> Device:
        """The device the layers run on, for memory measurements."""
        return self._device

    def trace(self) -> contextlib.AbstractContextManager[Trace]:
        """Collect spans of what runs inside the block, with the schedule's text; see `Trace`."""
        return self._device.tracing()

    @guarded("engine.close")
    def close(self, *, give_back: bool = True) -> None:
        """Move the weights back into the model, which is an ordinary nn.Module again.

        Several ranks must do this together, and each gets all of the model. With `give_back=False`
        the weights are let go, and the model stays hollow.
        """
        if self._state == "closed":
            return
        torn = self._is_torn
        if self._running is not None:
            self._clean_up()
        failure: Exception | None = None  # raised once weights are given back
        for finish in (self._server.settle_all, self._persistence.finish, self._skips.learn_all):
            try:
                finish()
            except Exception as error:  # weights are given back as they are
                self._persistence.give_up()
                if failure is None:
                    failure = error
                else:
                    logger.warning("%s", error)
        for name, tensors in units_of(self._partition) if give_back else ():
            self._server.give_back(tensors.parameters, name)
        if give_back:
            self._give_back_buffers()
        self._state = "closed"
        self._server.reader.close("they were let go when their engine was closed")
        for part in (self._partition, self._transfer, self._stash, self._relay, self._device):
            part.close()
        self._server.spare.close()
        if failure is not None:
            raise failure
        if torn and give_back:
            warnings.warn(
                "a step failed after some layers had been updated: the weights given back are of "
                "two steps.",
                stacklevel=2,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Give the weights back if nobody has closed the engine, and say so."""
        if self.__dict__.get("_state", "closed") == "closed" or sys.is_finalizing():
            return
        process, thread = self._home
        if os.getpid() != process:  # of a fork, which has no threads
            return
        if threading.get_ident() == thread:
            self._drop()
        else:  # perhaps a thread of the engine's own, which closing waits for
            threading.Thread(target=self._drop, name="l2l-drop").start()

    # ----------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        """Close an engine that nobody refers to any more."""
        said = "an l2l.Engine was dropped without engine.close()"
        try:
            if self._world.is_parallel:  # others are elsewhere
                raise RuntimeError("several ranks hold them together")
            with warnings.catch_warnings(record=True) as noted:
                self.close()
        except Exception as error:
            said += f". Its model has lost weights ({error}): go on from a checkpoint."
        else:
            said += "; the weights were given back to its model now."
            said += "".join(f" Also, {one.message}" for one in noted)
        warnings.warn(f"{said} Close engines, or use them in a with block.", stacklevel=3)

    def _before_reading(self) -> None:
        """Called before somebody reads the model's own parameters; its buffers follow then."""
        self._refuse_if_unusable()
        self._finish_step()
        self._give_back_buffers()

    def _finish_step(self) -> None:
        """Wait until nothing runs; updates that were left to the next step still wait."""
        for lane in Lane:
            self._device.record(lane).synchronize()
        if self._scaler is not None:
            self._scaler.observe()
        self._skips.learn_all()

    def _order_of_change(self) -> list[str]:
        """Units, those first that a step changes first."""
        shape = self._shape(1, training=True)
        rows = [unit.name for unit in shape.outer if unit.looked_up]
        first = dict.fromkeys([*rows, *shape.late_units[::-1], *shape.drained_units])
        return list(dict.fromkeys([*first, *self._server.units]))

    def _updated_on_device(self) -> frozenset[str]:
        shape = self._shape(1, training=True)
        return frozenset([*shape.on_device, *(f"L{layer}" for layer in shape.shared)])

    def _choices(self) -> dict[str, Any]:
        """Choices that change the last bits of results."""
        decisions = self._planning.decisions
        return {
            "microbatch_size": self._microbatch_size,
            "microbatch_tokens": decisions.microbatch_tokens,
            "piece_tokens": decisions.piece_tokens,
            "compiled": self._compiler.is_on,
            "looked_up": sorted({lookup.unit for lookup in self._rows.lookups}),
            "device_memory": self._planning.given_budget,
            "depth": repr(self._depth),
            **{name: getattr(decisions, name) for name in PLACED},
        }

    def _adopt(self, state: Mapping[str, Any]) -> None:
        """Go on with the choices of a checkpoint, and say where that is not possible."""
        choices, own = state["choices"], self._choices()
        self._seed = state["seed"]
        self._relay.reseed(self._seed + self._world.rank * RANK_SEED)
        self._server.seed = self._seed & 0xFFFFFFFF
        for name in ("microbatch_size", "compiled"):
            if choices[name] != own[name]:
                logger.warning(
                    "the checkpoint was made with %s=%s, this engine has %s: results may differ "
                    "in their last bits.",
                    name,
                    choices[name],
                    own[name],
                )
        if choices.get("depth", own["depth"]) != own["depth"]:
            logger.warning(
                "the checkpoint was made with depth=%s, this engine has %s.",
                choices["depth"],
                own["depth"],
            )
        names = ["piece_tokens"] if self._microbatch_size else ["microbatch_tokens", "piece_tokens"]
        if choices.get("device_memory") == own["device_memory"]:
            names += [name for name in PLACED if name in choices]
        elif self._compiler.is_on:
            logger.warning(
                "the checkpoint was made with device_memory=%s, this engine has %s. Layers are "
                "placed anew, so results may differ in their last bits.",
                choices.get("device_memory"),
                own["device_memory"],
            )
        self._planning.adopt({name: choices[name] for name in names})

    def _refuse_if_unusable(self) -> None:
        if self._state == "closed":
            raise RuntimeError("the engine is closed. Make a new one from the model.")
        if self._is_torn:
            raise RuntimeError(
                "an earlier step failed after some layers had been updated, so the weights are of "
                "two steps. Go on from a checkpoint with engine.load, or make a new engine."
            )
        if self._running is not None:
            self._clean_up()  # an interrupt has kept it from being done

    @property
    def _is_torn(self) -> bool:
        """Whether a step has failed in its updates, or has got there and not to its end."""
        running = self._running
        return (
            self._state == "torn"
            or self._server.is_torn
            or (running is not None and running.updates_submitted)
        )

    def _clean_up(self) -> None:
        """After a step that failed: see [Note: interrupts] in guard.py."""
        self._relay.abandon(self._running)
        if self._is_torn:
            self._state = "torn"
        self._running = None

    @guarded("engine.optimizer", within="engine.step")
    def _state_of(self, owner: str) -> dict[str, Any]:
        """A parameter's state in the server."""
        if self._running is not None:
            self._clean_up()
        return self._server.state_of(owner)

    def _checked(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Choices of the plan that are made already."""
        on_host = self._world.is_parallel or self._depth.skips
        found = {**overrides, **(STATE_ON_HOST if on_host else {})}
        Decisions().override(found)
        return found

    def _make_memory(
        self, stash_policy: Literal["host", "device"], native: HostKernel | None
    ) -> None:
        """What moves the units of the parameter server, and boundary tensors."""
        self._server.reader.prepare_with(self._before_reading)
        self._transfer = Transfer(device=self._device, arena=self._arena, server=self._server)
        self._stash = Stash(device=self._device, arena=self._arena, policy=stash_policy)
        self._rows = HostRows(arena=self._arena, server=self._server, kernel=native)
        self._layers = Layers(
            lambda: self._model.get_submodule(self._partition.list_name), self._change_layers
        )

    def _make_parts(self) -> None:
        """What works on the partition."""
        self._outer = OuterPass(
            partition=self._partition,
            device=self._device,
            server=self._server,
            transfer=self._transfer,
            loss_function=self._loss,
        )
        self._relay = self._make_relay(self._seed + self._world.rank * RANK_SEED)
        self._trial = Trial(
            partition=self._partition,
            server=self._server,
            device=self._device,
            relay=self._relay,
            outer=self._outer,
            compiler=self._compiler,
        )
        self._persistence = Persistence(
            server=self._server,
            partition=self._partition,
            optimizer=self.optimizer,
            loss_scale=None if self._scaler is None else self._scaler.scale,
            link=self._precision.link,
            spare_bytes=lambda: min(
                self._host_budget.limit_bytes - sum(self._arena.bytes_by_name.values()),
                available_bytes() + self._server.spare.free_bytes,
            ),
        )

        self._proof = Proof(
            model=self._model,
            partition=self._partition,
            server=self._server,
            device=self._device,
            loss_function=self._loss,
            link=self._precision.link,
            memory=PROVEN,
        )

    def _make_relay(self, seed: int) -> Relay:
        return Relay(
            partition=self._partition,
            server=self._server,
            device=self._device,
            transfer=self._transfer,
            stash=self._stash,
            outer=self._outer,
            updates=Updates(
                server=self._server,
                device=self._device,
                transfer=self._transfer,
                rows=self._rows,
                compiled=self._compiler.is_on,
            ),
            compiler=self._compiler,
            seed=seed,
            scale_of=None if self._scaler is None else self._scaler.scale_of,
        )

    def _move_in(self, forms: list[UnitForm], incoming: Incoming | None) -> None:
        """Move every unit into the server; if one does not fit, the model is as it was."""
        moved: list[tuple[str, UnitTensors]] = []
        try:
            if incoming is not None:
                incoming.fill_buffers()
            for form, (name, tensors) in zip(forms, units_of(self._partition), strict=True):
                self._server.add(form, parameters=tensors.parameters, buffers=tensors.buffers)
                moved.append((name, tensors))
            if incoming is not None:
                incoming.deliver(self._server.set_weight, self._device.torch_device)
        except BaseException:
            for name, tensors in moved if incoming is None else ():
                self._server.give_back(tensors.parameters, name)
            if incoming is not None:
                incoming.undo()
            self._device.close()
            self._state = "closed"
            raise
        self._bind_buffers()
        self._registered = registered(self._model)
        self._planning.limit_device()  # the model itself may have been on the device

    def _bind_buffers(self) -> None:
        """Let the code around the layers see buffers on the device."""
        self._partition.skeleton.bind(
            {
                owner: buffer.detach().to(self._device.torch_device, copy=True)
                for owner, buffer in self._partition.outer_tensors.buffers.items()
            }
        )

    @guarded("a change of engine.layers", within="engine.load")
    def _change_layers(self, layout: Layout) -> None:
        """Become an engine with other layers; if that cannot be, nothing has changed."""
        self._refuse_if_unusable()
        self._refuse_layout(layout)
        self._persistence.finish()
        self._finish_step()
        self._leave_device()
        self._give_back_buffers()
        with changed_model(self._model, self._partition.list_name, layout):
            partition, members, forms = self._with_layers(layout, self._precision)
            self._host_budget.check(
                host_bytes([form.held(self._world.share) for form in forms], self._policy),
                alternatives={},
            )
            self._transfer.let_go_of_staging()
            self._server.rearrange(moves_for(layout, self._partition, partition, forms))
        self.optimizer.regroup(members)
        self._layers.origins = tuple(place.origin for place in layout)
        self._partition, self._registered = partition, registered(self._model)
        self._make_parts()
        self._bind_buffers()
        self._planning.adapt(partition, {form.name: form for form in forms})

    def _refuse_layout(self, layout: Layout) -> None:
        """Refuse layers that the engine cannot have."""
        self._depth.check(len(layout))
        if self._world.share.number > 1 and any(place.frozen is not None for place in layout):
            raise ValueError(
                "several ranks hold the layers together, cut where nothing was frozen. Freeze "
                "them before the engine is made."
            )
        for position, place in enumerate(layout):
            if place.module is not None:
                self._trial.refuse_layer(place.module, position)

    def _with_layers(
        self, layout: Layout, precision: PrecisionPolicy
    ) -> tuple[Partition, Members, list[UnitForm]]:
        """What the model, which has these layers now, is made of."""
        partition = Partition(self._model, layers=self._partition.list_name, like=self._partition)
        members = self.optimizer.members_of(
            self._model, models_for(layout, self._partition, partition)
        )
        forms = forms_of(
            partition,
            optimizer=self._server.optimizer,
            settings=self.optimizer.settings(members),
            precision=precision,
            num_shares=self._world.share.number,
        )
        return partition, members, forms

    def _give_back_buffers(self) -> None:
        for owner, buffer in self._trial.present_buffers().items():
            module, _, local = owner.rpartition(".")
            target = self._model.get_submodule(module)._buffers[local]
            if target is not None:
                target.copy_(buffer)

    def _prepare(
        self,
        batch: Batches,
        choice: Choice,
        *,
        training: bool,
        needs_loss: bool,
        keep_outputs: bool,
    ) -> _Cut:
        """Check the engine and the batch, cut it, and try two rows if this is the first."""
        self._refuse_if_unusable()
        given = batch
        batch = self._with_rows(batch)
        first = batch if isinstance(batch, Mapping) else split_batch(batch, microbatch_size=1)[0]
        num_rows(first)
        self._trial.run(dict(first), needs_loss=needs_loss)
        proves = training and self._proves
        self._decide(batch, proves=proves)
        rows = self._rows_of(batch)
        rule = self._trial.rule or Rule.ROWS
        own = split_batch(batch, microbatch_size=rows) if batch is given else []
        counted = total_count(rule, own) if own and not keep_outputs else 0
        ignored = None if keep_outputs else ignored_targets(rule, own)
        tokens = sum(num_rows(one) * token_length(one) for one in own)
        why_not_cut = None if keep_outputs else self._trial.why_not_cut(own)
        facts = self._world.gather_facts(
            (len(own), counted, tokens, choice.layers, ignored, why_not_cut)
        )
        for rank, fact in enumerate(facts):
            if fact[3] != facts[0][3]:
                raise ValueError(
                    f"rank 0 runs layers {facts[0][3]}, rank {rank} layers {fact[3]}. Expected the "
                    "same on all ranks."
                )
            if fact[5] is not None:
                raise ValueError(fact[5])
        if training and sum(fact[0] for fact in facts) > 1:
            self._warn_of_batch_statistics()
        number = max(1, *(fact[0] for fact in facts))
        total = 1 if keep_outputs else sum(fact[1] for fact in facts)
        if not keep_outputs:
            refuse_uncountable(
                rule,
                num_microbatches=sum(fact[0] for fact in facts),
                total=total,
                ignored=next((fact[4] for fact in facts if fact[4] is not None), None),
            )
        microbatches, num_own = split_into(batch, number, microbatch_size=rows)
        self._transfer.reserve(self._shape(len(microbatches), training=training))
        if proves and not self._proof.is_done(batch, self._path()):
            self._proof.check(rule, self._path(), self._prove, self._trial.present_buffers)
        return _Cut(
            microbatches=[
                {k: self._device.pinned(v) if isinstance(v, Tensor) else v for k, v in one.items()}
                for one in microbatches
            ],
            num_own=num_own if batch is given else 0,
            rule=rule,
            total=total,
            num_tokens_elsewhere=sum(fact[2] for fact in facts) - tokens,
        )

    def _warn_of_batch_statistics(self) -> None:
        kind = None if self._is_warned else self._partition.batch_statistics()
        self._is_warned = True
        if kind is not None:
            logger.warning(
                "the model has %s: in training it normalizes by the statistics of the rows of each "
                "microbatch, not of the whole batch, as with gradient accumulation in PyTorch. "
                "Give microbatch_size=all rows of a batch for those of the whole, or put these "
                "modules into evaluation mode.",
                kind,
            )

    def _with_rows(self, batch: Batches) -> Batches:
        """The batch; for a rank that has no rows, while others have, one of theirs."""
        if not self._world.is_parallel or not isinstance(batch, Mapping):
            return batch
        rows = [v.shape[0] for v in batch.values() if isinstance(v, Tensor) and v.dim()]
        is_empty = bool(rows) and not any(rows)
        if not any(self._world.gather_facts(is_empty)):
            return batch
        own = {
            k: v.cpu() if isinstance(v, Tensor) else v for k, v in take_rows(batch, 0, 1).items()
        }
        offered = self._world.gather_facts(None if is_empty else own)
        return next((one for one in offered if one is not None), batch) if is_empty else batch

    def _drawn(self) -> Choice:
        """What the policy chooses, which may be no layer at all."""
        number = self._partition.num_layers
        found = self._depth.choose(step=self._step_number, num_layers=number, seed=self._seed)
        if found.layers:
            checked_layers(found.layers, number)
        return found

    def _chosen(self, layers: Sequence[int] | None) -> Choice:
        number = self._partition.num_layers
        return Choice(tuple(range(number)) if layers is None else checked_layers(layers, number))

    @_refusing_readers
    def _perform(
        self,
        batch: Batches,
        choice: Choice,
        *,
        settings: Mapping[str, Mapping[str, Any]] | None,
        needs_loss: bool = True,
        keep_outputs: bool = False,
    ) -> tuple[Step, list[Microbatch]]:
        """Run a batch; with less memory in use if the device had too little for the plan."""
        training = settings is not None
        if len(choice.layers) < self._partition.num_layers:
            self._refuse_if_unusable()
            self._planning.restrict(STATE_ON_HOST)
        while True:
            cut = self._prepare(
                batch, choice, training=training, needs_loss=needs_loss, keep_outputs=keep_outputs
            )
            if settings is not None:
                self._server.check_settings(settings)
            step = self._new_step(cut, choice, settings=settings, keep_outputs=keep_outputs)
            try:
                self._run(self._schedule(len(cut.microbatches), choice, training=training), step)
            except torch.OutOfMemoryError as error:
                alone = not self._world.is_parallel  # others are in the middle of the step
                if self._is_torn or not alone or not self._planning.tighten(str(error)):
                    raise
                continue
            return step, cut.microbatches

    def _rows_of(self, batch: Batches) -> int:
        """Rows of a microbatch."""
        if self._microbatch_size is not None or not isinstance(batch, Mapping):
            return self._microbatch_size or 1
        return max(1, self._planning.decisions.microbatch_tokens // token_length(batch))

    def _decide(self, batch: Batches, *, proves: bool) -> None:
        """Make the choices for batches like this one, unless they are made.

        While nothing is on the device, the model's own code is run for the proof.
        """
        must_plan = self._planning.must_plan(batch, rows=self._microbatch_size)
        facts = self._world.gather_facts((must_plan, self._is_placed))
        must_plan, is_placed = any(fact[0] for fact in facts), all(fact[1] for fact in facts)
        is_proven = not proves or self._proof.is_done(batch, self._path())
        if not must_plan and is_proven and is_placed:
            return
        self._leave_device()
        outer = self._trial.outer_units(self._is_looked_up)
        try:
            if must_plan:
                self._make_plan(batch, outer)
            if proves and not self._proof.is_done(batch, self._path()):
                self._proof.see(
                    batch,
                    self._trial.rule or Rule.ROWS,
                    cut=self._trial.cut,
                    buffers=self._trial.present_buffers(),
                    seed_of=self._proof_seed,
                    room=self._planning.budget,
                )
        finally:  # if nothing fits, the choices made before hold
            self._enter_device(outer)

    def _make_plan(self, batch: Batches, outer: tuple[OuterUnit, ...]) -> None:
        self._planning.make(
            batch,
            rows=self._microbatch_size,
            outer=outer,
            usage=self._trial.usage,
            facts=self._outer.facts,
            record=self._trial.record,
            buffer_bytes=self._trial.resident_buffer_bytes(),
            draws_random_numbers=self._compiler.draws_random_numbers,
        )
        if self._world.is_parallel:  # all go by the plan of the one with most to do
            number = sum(num_rows(one) * token_length(one) for one in _dicts(batch))
            plans = self._world.gather_facts((number, self._planning.decisions))
            self._planning.decisions = max(plans, key=lambda plan: plan[0])[1]

    def _path(self) -> tuple[object, ...]:
        """What decides which code a step runs, sizes apart."""
        decisions, usage = self._planning.decisions, self._trial.usage
        amounts = {name: bool(getattr(decisions, name)) for name in decisions.__slots__}
        return (
            self._device.torch_device.type,
            self._precision.link,
            self._policy.value,
            self._stash.policy,
            self._world.share.number,
            self._trial.rule,
            sorted(name for name in usage if self._is_looked_up(name)).__repr__(),
            *amounts.items(),
        )

    def _proof_seed(self, layer: int | None, m: int) -> int:
        """The seeds of a proof: of all ranks those of the first, whose rows they run."""
        part = PROLOGUE_SEED if layer is None else layer
        return mix_seed(self._seed, self._step_number, part, m)

    def _prove(self, evidence: Evidence, rows: Sequence[Microbatch], total: int) -> float:
        """Run a step that changes nothing; see `Proof.check`."""
        everything = self._chosen(None)
        cut = _Cut(
            microbatches=[dict(one) for one in rows],
            num_own=len(rows),
            rule=self._trial.rule or Rule.ROWS,
            total=total * self._world.size,
            num_tokens_elsewhere=0,
        )
        step = self._new_step(cut, everything, settings=self.optimizer.settings())
        step.decided, step.witness = (None,), evidence.add
        if self._scaler is not None:
            step.loss_scale = FLOAT16_SCALE
        if self._proof.on_host:
            self._partition.set_training(False)
        self._relay.reseed(self._seed)
        compiled, self._outer.compiled = self._outer.compiled, False
        try:
            self._transfer.reserve(self._shape(len(rows), training=True))
            with self._compiler.paused():
                schedule = self._schedule(len(rows), everything, training=True)
                self._relay.run(schedule, step)
            self._held = frozenset(schedule.shape.on_device)
            for lane in Lane:
                self._device.record(lane).synchronize()
            self._relay.show_waiting(step)
            self._server.settle_all()
        except BaseException:
            self._relay.abandon(step)
            self._device.recover()
            self._server.forget_updates()
            raise
        finally:
            self._outer.compiled = compiled
            self._relay.reseed(self._seed + self._world.rank * RANK_SEED)
        evidence.losses = (step.losses[:, 0] * step.plain_factor(scaled=False)).tolist()
        return step.plain_factor(scaled=True)

    def _leave_device(self) -> None:
        """Bring everything that stays on the device from step to step back to the host."""
        self._is_placed = False
        self._server.settle_all()
        for name in self._server.units:  # also of a plan whose first step has failed
            self._server.place_state(name, torch.device("cpu"))
        self._held = frozenset()
        self._transfer.clear()
        self._schedules.clear()

    def _enter_device(self, outer: tuple[OuterUnit, ...]) -> None:
        """Let everything follow the choices."""
        decisions = self._planning.decisions
        self._placed = tuple(decisions.outer_unit(unit) for unit in outer)
        units = {unit.name: unit for unit in self._placed}
        self._rows.lookups = tuple(
            lookup
            for name, usage in self._trial.usage.items()
            if units[name].looked_up
            for lookup in usage.lookups
        )
        self._outer.facts.lookups = self._rows.lookups
        self._outer.piece_tokens = decisions.piece_tokens
        self._outer.part_tokens = decisions.part_tokens
        self._outer.compiled = self._compiler.is_on
        self._relay.follow(decisions.keep)
        shape = self._shape(1, training=True)
        for layer in shape.shared:
            self._server.register(f"L{layer}", self._device)
        for name in shape.on_device:
            self._server.place_state(name, self._device.torch_device)
        self._is_placed = True

    def _is_looked_up(self, unit: str) -> bool:
        if self._world.is_parallel:  # a table that ranks hold together is gathered like a layer
            return False
        if self._embedding is not None or self._policy is UpdatePolicy.ON_DEVICE:
            return self._embedding == "host" and self._policy is not UpdatePolicy.ON_DEVICE
        return self._server.units[unit].form.weight_layout.nbytes >= LARGE_UNIT_BYTES

    def _new_step(
        self,
        cut: _Cut,
        choice: Choice,
        *,
        settings: Mapping[str, Mapping[str, Any]] | None,
        keep_outputs: bool = False,
    ) -> Step:
        self._partition.set_training(settings is not None)
        number = len(cut.microbatches)
        flags, names = {}, {}
        if settings is not None:
            flags = self._norm_records() if self._world.is_parallel else {}
            names = {name: unit.form.trained.names for name, unit in self._server.units.items()}
        return Step(
            number=self._step_number,
            layers=choice.layers,
            survival=choice.survival,
            microbatches=list(cut.microbatches),
            rule=cut.rule,
            total=cut.total,
            num_own=cut.num_own,
            num_tokens_elsewhere=cut.num_tokens_elsewhere,
            names=names,
            flags=flags,
            device_losses=torch.zeros((number, 2), device=self._device.torch_device),
            losses=self._device.host_record(number, 2),
            norms=self._norm_records() if settings is not None else {},
            settings=settings,
            clip_norm=self._clip_norm,
            checks_norms=self._policy is UpdatePolicy.JUST_IN_TIME,
            keep_outputs=keep_outputs,
            divide_by_weight=cut.rule is Rule.SUM_AND_WEIGHT,
            rows=self._rows.begin(cut.microbatches) if self._rows.lookups else None,
        )

    def _norm_records(self) -> dict[str, Tensor]:
        """Room on the host for the norm of every trained parameter, by unit."""
        counts = {name: max(1, len(u.form.trained.names)) for name, u in self._server.units.items()}
        record = self._device.host_record(sum(counts.values())).zero_()
        return dict(zip(counts, torch.split(record, list(counts.values())), strict=True))

    def _shape(self, num_microbatches: int, *, training: bool) -> Shape:
        layers = [self._server.units[f"L{i}"].form for i in range(self._partition.num_layers)]
        shape = self._planning.decisions.shape(
            num_microbatches=num_microbatches,
            trains=[bool(form.trained.names) for form in layers],
            outer=self._placed,
            update=self._policy,
        )
        return replace(
            shape,
            training=training,
            shared=frozenset(index for index in shape.shared if layers[index].is_one_run),
            halves=shape.halves and self._server.has_halves,
            held=self._held,
            pending=tuple(self._server.waiting),
            parallel=self._world.is_parallel,
        )

    def _schedule(self, num_microbatches: int, choice: Choice, *, training: bool) -> Schedule:
        shape = self._shape(num_microbatches, training=training)
        if choice.layers != shape.layers:
            shape = shape.only(choice.layers)
        if shape not in self._schedules:
            if len(self._schedules) == MOST_SCHEDULES:
                del self._schedules[next(iter(self._schedules))]  # the oldest
            self._schedules[shape] = make_schedule(shape)
        return self._schedules[shape]

    def _run(self, schedule: Schedule, step: Step) -> None:
        # Ranks meet in every step: none gives one up that others go on with.
        between = None if self._world.is_parallel else self._guard.deliver
        self._running = step
        try:
            if len(self._step_ends) == MOST_STEPS_AHEAD:
                end, earlier = self._step_ends.popleft()
                end.synchronize()
                self._skips.learn(earlier)
                whole = len(step.layers) == self._partition.num_layers
                self._planning.mark(training=step.training and whole)
            self._relay.run(schedule, step, between=between)
        except BaseException as error:
            if isinstance(error, UpdateFailedError):
                self._state = "torn"
            self._clean_up()
            raise
        self._held = frozenset(schedule.shape.on_device)
        self._step_ends.append((self._device.record(Lane.COMPUTE), step))
        if step.training:
            self._skips.add(step)
        if self._scaler is not None and step.training:
            self._scaler.unobserved = step
        if not step.training:
            self._running = None

    def _forms(self, optimizer: Optimizer) -> list[UnitForm]:
        """What every unit would be made of with an optimizer."""
        settings = self.optimizer.settings()
        if self.optimizer.defaults.keys() != optimizer.defaults.keys():
            settings = dict.fromkeys(settings, optimizer.defaults)
        return forms_of(
            self._partition,
            optimizer=optimizer,
            settings=settings,
            precision=self._precision,
            num_shares=self._world.share.number,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """A batch in microbatches, and what is to be known of those of other ranks."""

    microbatches: list[Microbatch]  # in memory that lanes copy from
    num_own: int  # those that are not there for the sake of other ranks
    rule: Rule
    total: int  # what the loss averages over, on all ranks
    num_tokens_elsewhere: int


def _dicts(batch: Batches) -> list[Mapping[str, Any]]:
    return [batch] if isinstance(batch, Mapping) else list(batch)


def parse_embedding(word: str | None, *, alone: bool = True) -> str | None:
    """Where embedding rows are looked up.

    Raises:
        ValueError: the word is not known, or cannot be with several ranks.
    """
    if word == "host" and not alone:
        raise ValueError(
            "embedding='host', but several ranks hold the tables together. Expected 'device' or "
            "None: they are gathered like layers."
        )
    if word not in (None, "host", "device"):
        raise ValueError(f"embedding={word!r} is not known. Expected 'host', 'device' or None.")
    return word


def _kernel(word: str, optimizer: Optimizer) -> HostKernel | None:
    if word not in ("native", "readable"):
        raise ValueError(f"kernel={word!r} is not known. Expected 'native' or 'readable'.")
    if word == "readable" or not isinstance(optimizer, HostOptimizer):
        return None
    found = load_kernel()
    if found is None:
        warnings.warn(
            "the native host kernel was not built, so updates take the slow path. Build it with "
            "'make kernel' (needs g++), or say kernel='readable' to silence this.",
            stacklevel=3,
        )
    return found
