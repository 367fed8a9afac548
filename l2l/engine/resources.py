"""What an engine is made with and keeps to its end, whatever becomes of its layers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from l2l.device import Device
from l2l.distributed import World
from l2l.model import Compiler, LossFunction, Partition
from l2l.parameter_server import (
    Arena,
    HostBudget,
    HostKernel,
    HostOptimizer,
    Optimizer,
    ParameterServer,
    PrecisionPolicy,
    ServerOptimizer,
    UnitForm,
    UpdatePolicy,
    alternatives,
    available_bytes,
    forms_of,
    host_bytes,
    load_kernel,
)
from l2l.planner import Planning
from l2l.run import HostRows, Scaler, Stash, Transfer
from l2l.trial import LARGE_UNIT_BYTES


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What the parts of an engine share. None of it is ever replaced."""

    model: nn.Module
    loss: LossFunction | None  # None: the model's own
    optimizer: ServerOptimizer
    precision: PrecisionPolicy
    policy: UpdatePolicy
    clip_norm: float | None
    microbatch_size: int | None  # None: planned
    embedding: str | None  # where rows are looked up; None: on the host for large tables
    world: World
    host_budget: HostBudget
    device: Device
    compiler: Compiler
    scaler: Scaler | None  # of losses, in float16
    arena: Arena
    server: ParameterServer
    transfer: Transfer
    stash: Stash
    rows: HostRows
    planning: Planning

    def looks_up(self, unit: str) -> bool:
        """Whether the rows of a table are gathered on the host."""
        if self.world.is_parallel:  # a table that ranks hold together is gathered like a layer
            return False
        if self.embedding is not None or self.policy is UpdatePolicy.ON_DEVICE:
            return self.embedding == "host" and self.policy is not UpdatePolicy.ON_DEVICE
        return self.server.units[unit].form.weight_layout.nbytes >= LARGE_UNIT_BYTES

    def norm_records(self) -> dict[str, Tensor]:
        """Room on the host for the norm of every trained parameter, by unit."""
        counts = {name: max(1, len(u.form.trained.names)) for name, u in self.server.units.items()}
        record = self.device.host_record(sum(counts.values())).zero_()
        return dict(zip(counts, torch.split(record, list(counts.values())), strict=True))

    def spare_bytes(self) -> int:
        """How much host memory may be taken besides what is."""
        return min(
            self.host_budget.limit_bytes - sum(self.arena.bytes_by_name.values()),
            available_bytes() + self.server.spare.free_bytes,
        )


def fit_host(
    host_memory: int | str | None,
    description: Optimizer,
    *,
    model: nn.Module,
    partition: Partition,
    optimizer: ServerOptimizer,
    precision: PrecisionPolicy,
    policy: UpdatePolicy,
    world: World,
) -> tuple[HostBudget, list[UnitForm]]:
    """The host memory that may be taken, and what every unit is made of there.

    Raises:
        ValueError: there is too little; with optimizers that would need less.
    """

    def forms_with(other: Optimizer) -> list[UnitForm]:
        settings = optimizer.settings()
        if optimizer.defaults.keys() != other.defaults.keys():
            settings = dict.fromkeys(settings, other.defaults)
        number = world.share.number
        return forms_of(
            partition, optimizer=other, settings=settings, precision=precision, num_shares=number
        )

    forms = forms_with(description)
    model_bytes = sum(p.nbytes for p in model.parameters() if not p.is_meta)
    budget = HostBudget.of(host_memory, model_bytes=model_bytes, num_sharing=world.share.number)
    others = alternatives(forms_with, policy, precision.link)
    budget.check(server_bytes(forms, policy, world), alternatives=others)
    return budget, forms


def server_bytes(forms: Sequence[UnitForm], policy: UpdatePolicy, world: World) -> int:
    """What the units of a model take of this rank's host memory."""
    return host_bytes([form.held(world.share) for form in forms], policy)


def checked_rows(microbatch_size: int | None) -> int | None:
    """The rows of a microbatch, if they were given.

    Raises:
        ValueError: there are none.
    """
    if microbatch_size is not None and microbatch_size < 1:
        raise ValueError(f"microbatch_size={microbatch_size}; expected at least 1 row, or None.")
    return microbatch_size


def parse_embedding(word: str | None, *, alone: bool) -> str | None:
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


def find_kernel(word: str, optimizer: Optimizer) -> HostKernel | None:
    """The native code that updates on the host; None: PyTorch does it.

    Raises:
        ValueError: the word is not known.
    """
    if word not in ("native", "readable"):
        raise ValueError(f"kernel={word!r} is not known. Expected 'native' or 'readable'.")
    if word == "readable" or not isinstance(optimizer, HostOptimizer):
        return None
    found = load_kernel()
    if found is None:
        warnings.warn(
            "the native host kernel was not built, so updates take the slow path. Build it with "
            "'make kernel' (needs g++), or say kernel='readable' to silence this.",
            stacklevel=3,  # whoever makes the engine
        )
    return found
