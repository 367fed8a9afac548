"""A plan for a model that is not there: nothing is allocated, nothing runs.

The model may be on the meta device; of a real one only the shapes are looked at. The code around
the layers runs with weights that take no memory (fake_weights.py). What an engine finds out by
running a few rows is assumed here: that the epilogue does without the prologue, and that a loss
over tokens can be taken in pieces and its logits put off. `Engine.plan` has the facts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from l2l.device import num_devices, open_device
from l2l.distributed import World
from l2l.model import (
    FakeWeights,
    Microbatch,
    Partition,
    Readers,
    Recording,
    fake_weight,
    trial_batch,
)
from l2l.parameter_server import (
    NUM_STAGING,
    HostBudget,
    Optimizer,
    PrecisionPolicy,
    ServerOptimizer,
    UnitForm,
    UpdatePolicy,
    alternatives,
    forms_of,
    groups_of,
    host_bytes,
    load_kernel,
)
from l2l.planner.decisions import Plan
from l2l.planner.hardware import H200, Hardware, known_hardware
from l2l.planner.planning import FREE_SHARE, Planning, parse_budget
from l2l.planner.problem import Together
from l2l.planner.search import DoesNotFitError
from l2l.run import Facts, Usage
from l2l.trial import usage_of

UNLIMITED = 2**62


def plan(
    model: nn.Module,
    batch: Mapping[str, Any] | None = None,
    *,
    num_rows: int = 8,
    length: int = 1024,
    optimizer: Optimizer | torch.optim.Optimizer | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    microbatch_size: int | None = None,
    precision: str | torch.dtype = "bfloat16",
    clip_norm: float | None = None,
    layers: str | None = None,
    compile: bool = True,  # noqa: A002 (torch's name for torch's thing)
    hardware: Hardware | None = None,
    overrides: Mapping[str, Any] | None = None,
    world: Together | None = None,
) -> Plan:
    """The plan that an engine would make, without allocating anything.

    Args:
        model: any model an engine takes, also on the meta device.
        batch: one step's tensors, on any device, also the meta device; None: `num_rows` rows of
            `length` tokens.
        num_rows: of the batch.
        length: of a row, in tokens.
        optimizer: as for the engine.
        device_memory: as for the engine; None: 90% of the device's.
        host_memory: for the parameter server and the stash. None: as for the engine if the plan is
            for this machine, else not limited.
        microbatch_size: as for the engine.
        precision: as for the engine.
        clip_norm: as for the engine.
        layers: as for the engine.
        compile: whether layers are compiled.
        hardware: rates to plan with. None: those of this machine's accelerator, measured; without
            one, those of an H200.
        overrides: as for the engine.
        world: also say how fast 1, 2, 4, .. and all of these devices would be, each with such a
            batch.

    Raises:
        ValueError: nothing fits, or the model cannot be cut.
    """
    if microbatch_size is not None and microbatch_size < 1:
        raise ValueError(f"microbatch_size={microbatch_size}; expected at least 1 row, or None.")
    policy_of = PrecisionPolicy.for_model(model, precision=precision)
    partition = Partition(model, layers=layers)
    description, groups = groups_of(optimizer, model)
    policy = UpdatePolicy.choose(
        None, optimizer=description, clip_norm=clip_norm, link=policy_of.link
    )
    names = {parameter: name for name, parameter in model.named_parameters()}
    settings = ServerOptimizer(groups, description.defaults, names=names).settings()

    def forms_with(optimizer: Optimizer) -> list[UnitForm]:
        own = settings
        if optimizer.defaults.keys() != description.defaults.keys():
            own = dict.fromkeys(settings, optimizer.defaults)
        return forms_of(partition, optimizer=optimizer, settings=own, precision=policy_of)

    host = _host_budget(host_memory, model, is_elsewhere=hardware is not None)
    found = forms_with(description)
    needed = host_bytes(found, policy)
    if needed > host.limit_bytes:
        try:
            host.check(needed, alternatives=alternatives(forms_with, policy, policy_of.link))
        except ValueError as error:
            raise DoesNotFitError(str(error)) from None
    forms = {form.name: form for form in found}
    hardware = hardware or measured_hardware() or H200
    if batch is None:
        ids = torch.empty((num_rows, length), dtype=torch.int64, device="meta")
        batch = {"input_ids": ids, "labels": ids}
    planning = Planning(
        partition=partition,
        forms=forms,
        device=None,
        optimizer=description,
        policy=policy,
        kernel=None,
        budget=parse_budget(device_memory) or int(FREE_SHARE * hardware.device_bytes),
        host=host,
        world=World(),
        compiled=compile,
        overrides=overrides or {},
        hardware=hardware,
    )
    _make(planning, _Preview(partition, forms, batch), batch, rows=microbatch_size)
    result = planning.plan(
        arena={},
        reserved={},
        choices=(
            ("layers", f"{partition.list_name}, {partition.num_layers} of them"),
            ("parameters", f"{sum(p.numel() for p in model.parameters()):,}"),
            ("precision", str(policy_of.link).removeprefix("torch.")),
            ("microbatch", planning.microbatch(microbatch_size)),
            ("update", policy.value),
            ("for", hardware.device_name),
        ),
        peak_bytes=0,
    )
    if world is not None:
        result = replace(result, scaling=planning.scaling(_smaller_worlds(world)))
    return result


def _smaller_worlds(world: Together) -> list[Together]:
    """One device, then twice as many each time, and all of them."""
    numbers = [2**power for power in range(world.num_ranks.bit_length())]
    return [replace(world, num_ranks=one) for one in dict.fromkeys([*numbers, world.num_ranks])]


def measured_hardware() -> Hardware | None:
    """What this machine's accelerator can do, measured once; None if there is none."""
    return known_hardware(open_device(None), load_kernel()) if num_devices() else None


def _host_budget(
    host_memory: int | str | None, model: nn.Module, *, is_elsewhere: bool
) -> HostBudget:
    if host_memory is None and (is_elsewhere or not num_devices()):
        return HostBudget(limit_bytes=UNLIMITED, rule="not limited")
    own = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    return HostBudget.of(host_memory, model_bytes=own)


def _make(
    planning: Planning,
    preview: _Preview,
    batch: Mapping[str, Any],
    *,
    rows: int | None,
) -> None:
    """Let the choices be made, from what a preview can know."""
    labels = batch.get("labels")
    tokens = isinstance(labels, Tensor) and labels.dim() == 2
    facts = Facts(usage=preview.usage(), alone=True, within_rows=tokens, puts_off=tokens)
    planning.make(
        batch,
        rows=rows,
        facts=facts,
        record=preview.record,
        buffer_bytes=preview.buffer_bytes,
        draws_random_numbers=preview.draws_random_numbers,
    )


class _Preview:
    """Runs the code around the layers on the CPU, with weights that take no memory."""

    def __init__(
        self, partition: Partition, forms: Mapping[str, UnitForm], batch: Mapping[str, Any]
    ) -> None:
        self.forms = forms
        self._partition = partition
        self._batch = batch
        self._weights = {
            name: tensor
            for unit, form in forms.items()
            if not unit.startswith("L")
            for name, tensor in _tensors(form).items()
        }
        partition.set_training(True)
        partition.skeleton.bind(self._weights)
        buffers = partition.outer_tensors.buffers
        self.buffer_bytes = sum(buffer.nbytes for buffer in buffers.values())
        partition.skeleton.bind({name: _with_values(buffer) for name, buffer in buffers.items()})

    @property
    def draws_random_numbers(self) -> bool:
        """Whether layers do, as far as one can see without running them."""
        return any(
            isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0
            for part in self._partition.layers
            for module in part.module.modules()
        )

    def _run_layer(self, index: int, args: Any, kwargs: Any) -> Any:
        part = self._partition.layers[index]
        part.bind(_tensors(self.forms[f"L{index}"]))
        return part.module(*args, **kwargs)

    def record(self, microbatch: Mapping[str, Any]) -> Recording:
        """What a prologue run yields for rows of this shape."""
        with torch.no_grad(), FakeWeights():
            return self._partition.prologue(_with_all_values(microbatch), learn=self._run_layer)

    def usage(self) -> dict[str, Usage]:
        """Which units are read before the layers, and which after."""
        trial = _with_all_values(trial_batch(self._batch, cut=True))
        before, after = Readers(self._weights), Readers(self._weights)
        with torch.no_grad(), FakeWeights():
            self._partition.prologue(trial, learn=self._run_layer)
            with before:
                hidden = self._partition.prologue(trial).hidden
            assert hidden is not None
            after.watching = False

            def start() -> None:
                after.watching = True

            with after:
                self._partition.epilogue(trial, hidden, on_delivery=start)
        return usage_of(self.forms, trial, before, after)


def _with_all_values(batch: Mapping[str, Any]) -> Microbatch:
    return {
        name: _with_values(value) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def _with_values(tensor: Tensor) -> Tensor:
    """A tensor on the CPU; zeros for one that has no values."""
    return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().cpu()


def _tensors(form: UnitForm) -> dict[str, Tensor]:
    """A unit's tensors, without memory if they are large."""
    return {
        field.name: fake_weight(field.shape, segment.dtype)
        for segment in form.weight_layout.segments
        for field in segment.fields
    }


STREAMED = {
    "num_tail": 0,
    "num_device_states": 0,
    "num_shared": 0,
    "num_late": 0,
    "keep": 0.0,
    "num_kept_cells": 0,
    "outer_state": False,
}
"""What takes least memory: on the host a straight line in the number of layers, constant on the
device."""


def largest_model(
    make: Callable[[int], nn.Module],
    *,
    host_memory: int | str | None = None,
    most_layers: int = 1024,
    period: int = 1,
    **settings: Any,
) -> tuple[int, Plan] | None:
    """The most layers of a shape that can be trained, all of them streamed, and their plan.

    Host memory is a straight line in the number of layers: two plans give the line, a third
    confirms what it says. Nothing is allocated, whatever the number.

    Args:
        make: the model with so many layers, on the meta device.
        host_memory: as for the engine.
        most_layers: where to stop looking.
        period: after how many layers their sizes repeat.
        settings: as for `plan`.

    Returns:
        None if nothing fits.
    """
    limit = HostBudget.of(host_memory, model_bytes=0).limit_bytes
    settings["overrides"] = {**STREAMED, **(settings.get("overrides") or {})}
    settings["hardware"] = settings.get("hardware") or measured_hardware() or H200
    depth = math.ceil(2 * NUM_STAGING / period) * period  # fewer layers have less staging
    try:
        low, high = (
            plan(make(number), **settings).total_bytes("host") for number in (depth, 2 * depth)
        )
    except DoesNotFitError:  # the device, of which fewer layers take as much
        return None
    slope = (high - low) / depth
    number = depth + math.floor((limit - low) / slope)
    fitting: tuple[int, Plan] | None = None
    too_many = most_layers + 1
    while number >= 1:
        number = min(number, too_many - 1)
        found = plan(make(number), **settings)
        spare = limit - found.total_bytes("host")
        if spare >= 0:
            fitting = (number, found)
        else:
            too_many = number
        step = math.floor(spare / slope)
        if fitting and (step < 1 or fitting[0] == too_many - 1):
            break
        number += step
    return fitting
