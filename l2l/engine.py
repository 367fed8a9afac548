"""The engine: wires carved model, parameter server, slots, stash and relay, and only wires."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from l2l.batch import Microbatch, num_rows, split_batch
from l2l.carving import CarvedModel, UnitTensors
from l2l.device import Device, Event, open_device
from l2l.host_memory import Arena, HostBudget
from l2l.loss import LossFunction, Rule, scales
from l2l.parameter_server import (
    Adafactor,
    AdamW,
    HostKernel,
    HostOptimizer,
    Optimizer,
    ParameterServer,
    ServerOptimizer,
    UnitForm,
    UpdatePolicy,
    adopt,
    load_kernel,
    make_groups,
)
from l2l.planner import LedgerLine, Plan
from l2l.precision import PrecisionPolicy
from l2l.rehearsal import Rehearsal
from l2l.relay import Relay, Scaler, Step
from l2l.report import StepReport
from l2l.schedule import OUTER, Lane, Schedule, Shape, make_schedule
from l2l.stash import Stash, parse_policy
from l2l.trace import Trace
from l2l.transfer import Transfer

NUM_STAGING = 4
MOST_STEPS_AHEAD = 2  # how far the host may run ahead of the device

Batches = Mapping[str, Any] | Sequence[Mapping[str, Any]]


@final
class Engine:
    """Trains a model with one layer on the device at a time.

    The model's weights move into the parameter server when the engine is made and back when it is
    closed; in between the model's parameters are hollow (NaN, without memory).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Optimizer | torch.optim.Optimizer | None = None,
        loss: LossFunction | None = None,
        device: str | torch.device | Device | None = None,
        host_memory: int | str | None = None,
        microbatch_size: int | None = None,
        precision: str | torch.dtype = "bfloat16",
        clip_norm: float | None = None,
        layers: str | None = None,
        stash: str = "host",
        update: str | None = None,
        kernel: str = "native",
        seed: int | None = None,
    ) -> None:
        """Cut the model and move its weights into the parameter server.

        Args:
            model: any module that runs a list of layers in order, on the CPU.
            optimizer: `l2l.AdamW(...)`, `SGD`, `Lion` or `Adafactor`, or a fresh torch.optim.AdamW
                or SGD over the model's parameters, whose groups are taken over. None: AdamW.
            loss: None is the model's own (`outputs.loss`); or (outputs, batch) -> (sum, weight),
                or a scalar, taken as a mean over rows.
            device: None is the accelerator if there is one, else the CPU.
            host_memory: how much the parameter server may take: bytes, "100GiB", or None: 95% of
                what is free.
            microbatch_size: rows that pass a layer at once. None: about 8,192 tokens.
            precision: "float32", "bfloat16" or "float16": what crosses the link and runs on the
                device. The server keeps float32 in every case.
            clip_norm: clip gradients by their global norm, as torch.nn.utils.clip_grad_norm_.
            layers: dotted name of the list of layers, where the model has several.
            stash: "host" (device memory constant in depth and batch) or "device".
            update: "eager", "just in time", or None: eager unless the whole gradient must be known
                first (clipping, float16). Both give the same results.
            kernel: "native", or "readable" for the slow PyTorch version with the same arithmetic.
            seed: of dropout and of stochastic rounding. None: torch's initial seed.

        Raises:
            ValueError: something above cannot be; nothing has been changed then.
        """
        if microbatch_size is not None and microbatch_size < 1:
            raise ValueError(
                f"microbatch_size={microbatch_size}; expected at least 1 row, or None."
            )
        _refuse_without_weights(model)
        self._precision = PrecisionPolicy.for_model(model, precision=precision)
        stash_policy = parse_policy(stash)
        self._model = model
        self._carved = CarvedModel(model, layers=layers)
        description, groups = _groups_of(optimizer, model)
        self._policy = UpdatePolicy.choose(
            update, optimizer=description, clip_norm=clip_norm, link=self._precision.link
        )
        self._clip_norm = clip_norm
        seed = torch.initial_seed() if seed is None else seed
        self._device = device if isinstance(device, Device) else open_device(device)
        arena = Arena(self._device)
        self._server = ParameterServer(
            device=self._device,
            arena=arena,
            precision=self._precision,
            optimizer=description,
            kernel=_kernel(kernel, description),
            seed=seed,
        )
        self.optimizer = ServerOptimizer(
            groups,
            description.defaults,
            names={parameter: name for name, parameter in model.named_parameters()},
            state_of=self._server.state_of,
        )
        self._transfer = Transfer(device=self._device, arena=arena, server=self._server)
        self._stash = Stash(device=self._device, arena=arena, policy=stash_policy)
        self._relay = Relay(
            carved=self._carved,
            server=self._server,
            device=self._device,
            transfer=self._transfer,
            stash=self._stash,
            seed=seed,
        )
        self._relay.loss_function = loss
        self._rehearsal = Rehearsal(
            carved=self._carved,
            server=self._server,
            device=self._device,
            transfer=self._transfer,
            relay=self._relay,
        )
        self._scaler = Scaler() if self._precision.link is torch.float16 else None
        self._relay.scale_of = self._scaler.scale_of if self._scaler is not None else None
        self._microbatch_size = microbatch_size
        self._schedules: dict[Shape, Schedule] = {}
        self._step_ends: deque[Event] = deque()
        self._step_number = 0
        self._state = "open"
        forms = self._forms(description)
        model_bytes = sum(parameter.nbytes for parameter in model.parameters())
        budget = HostBudget.of(host_memory, model_bytes=model_bytes)
        budget.check(self._host_bytes(forms), alternatives=self._alternatives(description))
        for form, (_, tensors) in zip(forms, self._units(), strict=True):
            self._server.add(form, parameters=tensors.parameters, buffers=tensors.buffers)
        self._carved.skeleton.bind(
            {
                owner: buffer.detach().to(self._device.torch_device, copy=True)
                for owner, buffer in self._carved.outer_tensors.buffers.items()
            }
        )

    def step(self, batch: Batches) -> StepReport:
        """One optimizer step over a batch: a dict of tensors, or a list of microbatches."""
        settings = self.optimizer.settings()
        microbatches = self._prepare(batch, needs_loss=True)
        self._server.check_settings(settings)
        step = self._new_step(microbatches, settings=settings)
        self._run(self._schedule(len(microbatches), training=True), step)
        self.optimizer.step()
        self._step_number += 1
        return StepReport(step)

    def evaluate(self, batch: Batches) -> float:
        """The loss of a batch; forward only, in evaluation mode."""
        microbatches = self._prepare(batch, needs_loss=True)
        step = self._new_step(microbatches, settings=None)
        self._run(self._schedule(len(microbatches), training=False), step)
        return StepReport(step).loss

    def predict(self, batch: Batches) -> Any:
        """The model's outputs for a batch, on the host; forward only, in evaluation mode."""
        microbatches = self._prepare(batch, needs_loss=False)
        step = self._new_step(microbatches, settings=None, keep_outputs=True)
        self._run(self._schedule(len(microbatches), training=False), step)
        return _join_outputs([step.outputs[m] for m in range(len(microbatches))], microbatches)

    @property
    def plan(self) -> Plan:
        """What is placed where, in bytes, and the choices made. Print it."""
        device_places = {k: v for k, v in self._transfer.bytes_by_place().items() if k != "staging"}
        stash = self._stash.bytes_by_place()
        device_places["boundary cells"] = stash.pop("cells")
        device_places["buffers"] = self._rehearsal.resident_buffer_bytes()
        host_places = self._server.bytes_by_kind()
        host_places["gradient staging"] = self._transfer.bytes_by_place()["staging"]
        for policy, nbytes in stash.items():
            (device_places if policy == "device" else host_places)["stash"] = nbytes
        ledger = [LedgerLine(place="device", purpose=k, nbytes=v) for k, v in device_places.items()]
        ledger += [LedgerLine(place="host", purpose=k, nbytes=v) for k, v in host_places.items()]
        rows = self._microbatch_size
        choices = (
            ("layers", f"{self._carved.list_name}, {self._carved.num_layers} of them"),
            ("precision", str(self._precision.link).removeprefix("torch.")),
            ("microbatch", f"{rows} rows" if rows else "rows for about 8,192 tokens"),
            ("stash", self._stash.policy),
            ("update", self._policy.value),
            ("loss averages over", self._rehearsal.rule.value if self._rehearsal.rule else "?"),
        )
        return Plan(ledger=tuple(ledger), choices=choices)

    @property
    def device(self) -> Device:
        """The device the layers run on, for memory measurements."""
        return self._device

    def trace(self) -> contextlib.AbstractContextManager[Trace]:
        """Collect spans of what runs inside the block, with the schedule's text; see `Trace`."""
        return self._device.tracing()

    def close(self) -> None:
        """Move the weights back into the model, which is an ordinary nn.Module again."""
        if self._state == "closed":
            return
        failure: RuntimeError | None = None
        try:
            self._server.settle_all()
        except RuntimeError as error:  # the weights are given back as they are, then it is raised
            failure = error
        for name, tensors in self._units():
            self._server.give_back(tensors.parameters, name)
        for owner, buffer in self._rehearsal.present_buffers().items():
            module, _, local = owner.rpartition(".")
            target = self._model.get_submodule(module)._buffers[local]
            if target is not None:
                target.copy_(buffer)
        self._state = "closed"
        self._carved.close()
        self._transfer.close()
        self._stash.close()
        self._relay.layer_buffers.clear()
        self._device.close()
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------

    def _units(self) -> list[tuple[str, UnitTensors]]:
        """What moves into the server; the outer buffers stay with the skeleton, on the device."""
        layers = [(f"L{index}", one) for index, one in enumerate(self._carved.layer_tensors)]
        outer = UnitTensors(parameters=self._carved.outer_tensors.parameters, buffers={})
        return [*layers, (OUTER, outer)]

    def _prepare(self, batch: Batches, *, needs_loss: bool) -> list[Microbatch]:
        """Check the engine and the batch, cut it, and rehearse if this is the first."""
        if self._state == "closed":
            raise RuntimeError("the engine is closed. Make a new one from the model.")
        if self._state == "torn":
            raise RuntimeError(
                "an earlier step failed after some layers had been updated, so the weights are of "
                "two steps. Make a new engine from weights saved before."
            )
        microbatches = split_batch(batch, microbatch_size=self._microbatch_size)
        self._transfer.reserve(self._shape(len(microbatches), training=needs_loss))
        self._rehearsal.run(microbatches[0], needs_loss=needs_loss)
        if self._device.torch_device.type != "cpu":
            microbatches = [
                {k: self._device.pinned(v) if isinstance(v, Tensor) else v for k, v in one.items()}
                for one in microbatches
            ]
        return microbatches

    def _new_step(
        self,
        microbatches: list[Microbatch],
        *,
        settings: Mapping[str, Mapping[str, Any]] | None,
        keep_outputs: bool = False,
    ) -> Step:
        rule = self._rehearsal.rule or Rule.ROWS
        weights = [1.0] * len(microbatches) if keep_outputs else scales(rule, microbatches)
        self._carved.set_training(settings is not None)
        device_losses = torch.zeros((len(microbatches), 2), device=self._device.torch_device)
        return Step(
            number=self._step_number,
            layers=tuple(range(self._carved.num_layers)),
            microbatches=microbatches,
            scales=weights,
            device_losses=device_losses,
            losses=self._device.host_record(len(microbatches), 2),
            norms={
                name: self._device.host_record(max(1, len(unit.form.trained.names))).zero_()
                for name, unit in (self._server.units.items() if settings is not None else ())
            },
            settings=settings,
            clip_norm=self._clip_norm,
            checks_norms=self._scaler is not None,
            keep_outputs=keep_outputs,
            divide_by_weight=rule is Rule.SUM_AND_WEIGHT and len(microbatches) > 1,
        )

    def _shape(self, num_microbatches: int, *, training: bool) -> Shape:
        trained = {name for name, unit in self._server.units.items() if unit.form.trained.names}
        num_layers = self._carved.num_layers
        return Shape(
            layers=tuple(range(num_layers)),
            num_microbatches=num_microbatches,
            num_slots=min(2, num_layers),
            training=training,
            frozen_layers=frozenset(i for i in range(num_layers) if f"L{i}" not in trained),
            frozen_outer=OUTER not in trained,
            num_late=len(trained) if self._policy is UpdatePolicy.JUST_IN_TIME else 0,
            pending=tuple(self._server.waiting),
            num_staging=NUM_STAGING,
            device_updates=self._policy is UpdatePolicy.ON_DEVICE,
        )

    def _schedule(self, num_microbatches: int, *, training: bool) -> Schedule:
        shape = self._shape(num_microbatches, training=training)
        if shape not in self._schedules:
            self._schedules[shape] = make_schedule(shape)
        return self._schedules[shape]

    def _run(self, schedule: Schedule, step: Step) -> None:
        if len(self._step_ends) == MOST_STEPS_AHEAD:
            self._step_ends.popleft().synchronize()
        try:
            self._relay.run(schedule, step)
        except BaseException:
            self._device.abort()
            self._stash.end_step()
            if step.updates_submitted:
                self._state = "torn"
            raise
        self._step_ends.append(self._device.record(Lane.COMPUTE))
        if self._scaler is not None and step.training:
            self._scaler.unobserved = step

    def _forms(self, optimizer: Optimizer) -> list[UnitForm]:
        settings = self.optimizer.settings()
        if type(optimizer) is not type(self._server.optimizer):
            settings = dict.fromkeys(settings, optimizer.defaults)
        return [
            ParameterServer.form(
                name,
                parameters=tensors.parameters,
                buffers=tensors.buffers,
                settings=settings,
                precision=self._precision,
                optimizer=optimizer,
            )
            for name, tensors in self._units()
        ]

    def _host_bytes(self, forms: list[UnitForm]) -> int:
        """Host memory of the parameter server with its staging; the stash comes on top."""
        total = sum(sum(form.bytes_by_kind().values()) for form in forms)
        staging = [form.staging_layout.nbytes for form in forms]
        if self._policy is UpdatePolicy.JUST_IN_TIME:
            return total + sum(staging)
        if self._policy is UpdatePolicy.ON_DEVICE:
            return total
        return total + staging[-1] + max(staging[:-1]) * min(NUM_STAGING, len(staging) - 1)

    def _alternatives(self, optimizer: Optimizer) -> dict[str, int]:
        """Host memory that other settings would need."""
        eight_bit = AdamW(moments="8bit")
        found = {"optimizer=l2l.AdamW(moments='8bit')": self._host_bytes(self._forms(eight_bit))}
        if self._clip_norm is None and self._precision.link is torch.bfloat16:
            forms = self._forms(Adafactor())
            found["optimizer=l2l.Adafactor()"] = sum(
                sum(form.bytes_by_kind().values()) for form in forms
            )
        return found


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


def _groups_of(
    optimizer: Optimizer | torch.optim.Optimizer | None, model: nn.Module
) -> tuple[Optimizer, list[dict[str, Any]]]:
    trained = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.is_floating_point()
    }
    if not trained:
        raise ValueError("no parameter of the model requires a gradient, so nothing is trained.")
    if isinstance(optimizer, torch.optim.Optimizer):
        description, groups = adopt(optimizer)
        known = {id(parameter) for parameter in trained.values()}
        strangers = [p.shape for g in groups for p in g["params"] if id(p) not in known]
        if strangers:
            raise ValueError(
                f"the optimizer holds {len(strangers)} parameters that the model does not train, "
                f"the first of shape {tuple(strangers[0])}. Expected an optimizer over "
                "model.parameters()."
            )
        left_out = known - {id(p) for g in groups for p in g["params"]}
        if left_out:
            warnings.warn(
                f"{len(left_out)} parameters require a gradient but are not in the optimizer; "
                "they stay as they are.",
                stacklevel=3,
            )
        return description, groups
    description = AdamW() if optimizer is None else optimizer
    if not isinstance(description, Optimizer):
        raise ValueError(
            f"optimizer is {type(optimizer).__name__}. Expected l2l.AdamW(...), SGD, Lion or "
            "Adafactor, or a torch optimizer over the model's parameters."
        )
    return description, make_groups(description, trained)


def _refuse_without_weights(model: nn.Module) -> None:
    hollow = [
        name
        for name, p in model.named_parameters()
        if p.numel() > 1 and not p.is_meta and p.untyped_storage().nbytes() < p.nbytes
    ]
    if hollow:
        raise ValueError(
            f"the model's parameters are hollow ({hollow[0]!r} and others): its weights are in "
            "another engine. Close that one first."
        )
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        raise ValueError(
            f"{len(on_meta)} parameters are on the meta device, the first {on_meta[0]!r}. Expected "
            "a model with weights, on the CPU."
        )


def _join_outputs(outputs: list[Any], microbatches: list[Microbatch]) -> Any:
    """One set of outputs for the whole batch: rows joined, scalars averaged over rows."""
    if len(outputs) == 1:
        return outputs[0]
    flat = [pytree.tree_flatten(one) for one in outputs]
    rows = [num_rows(microbatch) for microbatch in microbatches]
    joined: list[Any] = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        if not isinstance(leaves[0], Tensor):
            joined.append(leaves[0])
        elif leaves[0].dim() == 0:
            shares = (leaf * (n / sum(rows)) for leaf, n in zip(leaves, rows, strict=True))
            joined.append(torch.stack(list(shares)).sum())
        else:
            joined.append(torch.cat(leaves))
    return pytree.tree_unflatten(joined, flat[0][1])
