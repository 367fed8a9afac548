"""A plan for a model that is not there: nothing is allocated, nothing runs.

The model may be on the meta device; of a real one only the shapes are looked at. The code around
the layers runs with weights that take no memory (fake_weights.py). What an engine finds out by
running a few rows is assumed here: that the epilogue does without the prologue, and that a loss
over tokens can be taken in pieces and its logits put off. `Engine.plan` has the facts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from l2l.device import Disk, DiskFolder, num_devices, open_device
from l2l.distributed import Share
from l2l.model import (
    FakeWeights,
    Readers,
    Recording,
    bytes_of,
    fake_weight,
    open_lists,
    trial_batch,
)
from l2l.model import run_layer as call_layer
from l2l.parameter_server import (
    NUM_STAGING,
    GivenOptimizer,
    HostBudget,
    Inventory,
    UnitForm,
    divided,
    formats_in,
    host_bytes,
    load_kernel,
)
from l2l.planner.budget import Budget
from l2l.planner.decisions import STATE_ON_HOST, Plan
from l2l.planner.disk_tier import DiskTier, first_on_disk, refuse_disk
from l2l.planner.hardware import H200, Hardware, known_hardware
from l2l.planner.kept import KeptPlans
from l2l.planner.planning import FREE_SHARE, Planning
from l2l.planner.problem import Together
from l2l.planner.search import DoesNotFitError
from l2l.planner.subject import Findings
from l2l.run import Facts, HeadOfWords, Usage
from l2l.trial import find_route, pointwise_parts, run_through, usage_of

UNLIMITED = 2**62


def plan(
    model: nn.Module,
    batch: Mapping[str, Any] | None = None,
    *,
    num_rows: int = 8,
    length: int = 1024,
    optimizer: GivenOptimizer = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    microbatch_size: int | None = None,
    precision: str | torch.dtype = "bfloat16",
    base: str | None = None,
    clip_norm: float | None = None,
    layers: str | Sequence[str] | None = None,
    compile: bool = True,  # noqa: A002 (torch's name for torch's thing)
    hardware: Hardware | None = None,
    overrides: Mapping[str, Any] | None = None,
    world: Together | None = None,
    disk: Disk | str | None = None,
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
        base: as for the engine.
        clip_norm: as for the engine.
        layers: as for the engine.
        compile: whether layers are compiled.
        hardware: rates to plan with. None: those of this machine's accelerator, measured; without
            one, those of an H200.
        overrides: as for the engine.
        disk: for what host memory has no room for: room and sustained
            rates of reading and writing, such as "2TB@6.5/5GB/s"; or as for the engine, measured.
        world: also say how fast 1, 2, 4, .. and all of these devices would be, each with such a
            batch.

    Raises:
        ValueError: nothing fits, or the model cannot be cut.
    """
    found = look(
        model,
        batch,
        num_rows=num_rows,
        length=length,
        optimizer=optimizer,
        device_memory=device_memory,
        host_memory=host_memory,
        microbatch_size=microbatch_size,
        precision=precision,
        base=base,
        clip_norm=clip_norm,
        layers=layers,
        compile=compile,
        hardware=hardware,
        overrides=overrides,
        disk=disk,
        is_parallel=world is not None,
    )
    planning = found.planned()
    result = found.plan(planning)
    if world is None:
        return result
    numbers = {world.num_ranks, *(2**power for power in range(world.num_ranks.bit_length()))}
    worlds = [replace(world, num_ranks=number) for number in sorted(numbers)]
    return replace(result, scaling=planning.scaling(worlds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A model that is not there, looked at once: it can be planned for with any memory."""

    planning: Planning  # nothing is chosen yet
    batch: Mapping[str, Any]
    findings: Findings
    rows: int | None  # of a microbatch
    inventory: Inventory
    num_parameters: int

    def planned(
        self,
        *,
        budget_bytes: int | None = None,
        host: HostBudget | None = None,
        disk: DiskTier | None = None,
    ) -> Planning:
        """With choices made; None: memory as it was asked for.

        Raises:
            DoesNotFitError: the model does not fit.
            ValueError: it cannot be planned for.
        """
        own = self.planning
        host, tier = host or own.host, disk or own.disk
        try:
            least = _least_on_disk(self.inventory, own.forms, host, tier)
        except ValueError as error:
            raise DoesNotFitError(str(error)) from None
        budget = Budget(budget_bytes or own.budget.given)
        made = replace(own, budget=budget, host=host, disk=tier, least_on_disk=least)
        made.make(self.batch, self.findings, rows=self.rows)
        return made

    def plan(self, planning: Planning) -> Plan:
        """The plan of a `planning` that is made."""
        partition, inventory = planning.partition, self.inventory
        assert planning.hardware is not None
        return planning.plan(
            arena={},
            reserved={},
            choices=(
                ("layers", f"{partition.list_name}, {partition.num_layers} of them"),
                ("parameters", f"{self.num_parameters:,}"),
                ("precision", str(inventory.precision.link).removeprefix("torch.")),
                *formats_in(inventory.forms),
                *divided(inventory.optimizer, inventory.settings(), inventory.forms),
                ("microbatch", planning.microbatch(self.rows)),
                ("update", inventory.policy.value),
                ("for", planning.hardware.device_name),
            ),
            peak_bytes=0,
        )


def look(
    model: nn.Module,
    batch: Mapping[str, Any] | None = None,
    *,
    num_rows: int = 8,
    length: int = 1024,
    optimizer: GivenOptimizer = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    microbatch_size: int | None = None,
    precision: str | torch.dtype = "bfloat16",
    base: str | None = None,
    clip_norm: float | None = None,
    layers: str | Sequence[str] | None = None,
    compile: bool = True,  # noqa: A002 (torch's name for torch's thing)
    hardware: Hardware | None = None,
    overrides: Mapping[str, Any] | None = None,
    disk: Disk | str | None = None,
    is_parallel: bool = False,
    kept: KeptPlans | None = None,
) -> Preview:
    """What there is to plan for; arguments as for `plan`, and where plans are kept.

    Raises:
        ValueError: the model cannot be cut.
    """
    if microbatch_size is not None and microbatch_size < 1:
        raise ValueError(f"microbatch_size={microbatch_size}; expected at least 1 row, or None.")
    inventory = Inventory.of(
        model,
        optimizer=optimizer,
        precision=precision,
        base=base,
        layers=layers,
        clip_norm=clip_norm,
    )
    by_name = {form.name: form for form in inventory.forms}
    host = HostBudget(limit_bytes=UNLIMITED, rule="not limited")
    if host_memory is not None or (hardware is None and num_devices()):
        host = HostBudget.of(host_memory, model_bytes=bytes_of(model.parameters()))
    tier = None if disk is None else _tier(disk)
    if tier is not None:
        refuse_disk(inventory.optimizer, is_parallel=is_parallel)
    hardware = hardware or measured_hardware() or H200
    if batch is None:
        ids = torch.empty((num_rows, length), dtype=torch.int64, device="meta")
        batch = {"input_ids": ids, "labels": ids}
    planning = Planning(
        partition=inventory.partition,
        forms=by_name,
        disk=tier,
        optimizer=inventory.optimizer,
        policy=inventory.policy,
        budget=Budget(Budget.of(device_memory).given or int(FREE_SHARE * hardware.device_bytes)),
        host=host,
        compiled=compile,
        overrides=overrides or {},
        hardware=hardware,
        kept=kept or KeptPlans(None),
    )
    return Preview(
        planning=planning,
        batch=batch,
        findings=_look_at(planning, batch),
        rows=microbatch_size,
        inventory=inventory,
        num_parameters=sum(p.numel() for p in model.parameters()),
    )


def _least_on_disk(
    inventory: Inventory,
    forms: Mapping[str, UnitForm],
    host: HostBudget,
    tier: DiskTier | Callable[[], DiskTier] | None,
) -> tuple[int, int]:
    """How many layers have no room for their optimizer state, and weights, in host memory.

    Raises:
        ValueError: there is no room for the rest, or for all of it.
    """
    if not isinstance(tier, DiskTier):
        inventory.check(host, Share())
        return 0, 0
    needed = host_bytes(inventory.forms, inventory.policy)
    first = first_on_disk(forms, needed, host, room_bytes=tier.size_bytes)
    return len(first["state"]), len(first["weights"])


def _tier(disk: Disk | str) -> DiskTier:
    """A disk as it is described, or measured."""
    if isinstance(disk, str) and "@" in disk:
        return DiskTier.of_text(disk)
    given = disk if isinstance(disk, Disk) else Disk(disk)
    folder = DiskFolder(given)
    try:
        return DiskTier.of_folder(folder, given.rates, small=False)
    finally:
        folder.close()


def measured_hardware() -> Hardware | None:
    """What this machine's accelerator can do, measured once; None if there is none."""
    return known_hardware(open_device(None), load_kernel()) if num_devices() else None


def _look_at(planning: Planning, batch: Mapping[str, Any]) -> Findings:
    """What a preview can know: code around the layers runs with weights that take no memory."""
    partition, forms = planning.partition, planning.forms
    outer = [form for name, form in forms.items() if not name.startswith("L")]
    weights = {name: tensor for form in outer for name, tensor in _tensors(form).items()}
    partition.set_training(True)
    partition.skeleton.bind(weights)
    buffers = partition.outer_tensors.buffers
    buffer_bytes = sum(buffer.nbytes for buffer in buffers.values())
    partition.skeleton.bind(_with_values(buffers))

    @contextlib.contextmanager
    def bound(index: int) -> Iterator[None]:
        partition.layers[index].bind(_tensors(forms[f"L{index}"]))
        yield

    def run_layer(index: int, args: Any, kwargs: Any) -> Any:
        with bound(index):
            return call_layer(partition.layers[index].module, args, kwargs, open_lists())

    trial = _with_values(trial_batch(batch, cut=True))
    with torch.no_grad(), FakeWeights():
        try:
            route = find_route(partition, trial, run_layer)
        except RuntimeError:  # a model of fixed length cannot run a few tokens
            trial = _with_values(trial_batch(batch, cut=False))
            route = find_route(partition, trial, run_layer)
        before, after = Readers(weights), Readers(weights)
        after.watching = False
        with before:
            _, delivered = run_through(partition, trial, route, bound)
        with after:
            start = partial(setattr, after, "watching", True)
            partition.epilogue(trial, delivered, route, on_delivery=start)
        pointwise = {}
        if planning.may_tile(batch):
            pointwise = pointwise_parts(partition, trial, route, bound, tries=False)

    def record(microbatch: dict[str, Any]) -> list[Recording]:
        with torch.no_grad(), FakeWeights():
            return run_through(partition, _with_values(microbatch), route, bound)[0]

    usage = usage_of(forms, trial, before, after)
    labels = batch.get("labels")
    tokens = isinstance(labels, Tensor) and labels.dim() == 2
    modules = [module for part in partition.layers for module in part.module.modules()]
    dropouts = [one for one in modules if isinstance(one, nn.modules.dropout._DropoutNd)]
    return Findings(
        facts=Facts(
            route=route,
            usage=usage,
            alone=True,
            within_rows=tokens,
            puts_off=tokens,
            pointwise=pointwise,
            head=_head_in(usage, forms) if tokens else None,
        ),
        record=record,
        buffer_bytes=buffer_bytes,
        draws_random_numbers=any(one.training and one.p > 0 for one in dropouts),
    )


def _head_in(usage: Mapping[str, Usage], forms: Mapping[str, UnitForm]) -> HeadOfWords | None:
    """The matrix with a row for every word that is read after the layers."""
    names = (name for name, one in usage.items() if one.after and name.startswith("T"))
    return next((HeadOfWords(forms[name].weight_layout.names[0]) for name in names), None)


def _with_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with tensors on the CPU; zeros for one that has no values."""

    def with_values(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.zeros_like(value, device="cpu") if value.is_meta else value.detach().cpu()

    return {name: with_values(value) for name, value in values.items()}


def _tensors(form: UnitForm) -> dict[str, Tensor]:
    """A unit's tensors, without memory if they are large."""
    views = {
        field.name: fake_weight(field.shape, segment.dtype)
        for segment in form.weight_layout.segments
        for field in segment.fields
    }
    return form.of_views(views)


# What takes least memory: on the host a straight line in the number of layers, constant on the
# device.
STREAMED = {**STATE_ON_HOST, "num_tail": 0, "num_late": 0, "keep": 0.0, "num_kept_cells": 0}


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
