"""What an engine is made with and keeps to its end, whatever becomes of its layers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from l2l.device import Device
from l2l.distributed import World
from l2l.model import Compiler, LossFunction, Partition, Split
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
    available_bytes,
    forms_of,
    host_bytes,
    load_kernel,
)
from l2l.planner import Planning
from l2l.run import HostRows, Scaler, Stash, Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How steps are executed; results are the same, but for the last bits of some `overrides`."""

    stash: str = "host"
    """Where inputs of layers wait: "host", for constant device memory, or "device"."""
    update: str | None = None
    """When the host updates: "eager", "just in time", or None: eager unless the whole gradient must
    be known first (clipping, float16)."""
    embedding: str | None = None
    """"host" gathers the rows of embedding tables there, "device" brings whole tables; None: on the
    host for tables of 16 MiB and more."""
    kernel: str = "native"
    """"native", or "readable" for the slow PyTorch version with the same arithmetic."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of the plan's choices, by name: see `l2l.planner`."""
    group_size: int | None = None
    """Number of ranks that share one copy of the model, if torch.distributed is initialised (all
    ranks train together, each on its own rows). None: those of a node if there are several
    nodes, else all."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What the parts of an engine share. None of it is ever replaced."""

    model: nn.Module
    loss: LossFunction | None  # None: the model's own
    split: Split | None  # None: rows are found in the batch
    optimizer: ServerOptimizer
    precision: PrecisionPolicy
    policy: UpdatePolicy
    clip_norm: float | None
    microbatch_size: int | None  # None: planned
    proves: bool
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

    def forms(
        self, partition: Partition, precision: PrecisionPolicy, members: Members | None = None
    ) -> list[UnitForm]:
        """What the units of a partition are made of."""
        return forms_of(
            partition,
            optimizer=self.server.optimizer,
            settings=self.optimizer.settings(members),
            precision=precision,
            num_shares=self.world.share.number,
        )


def server_bytes(forms: Sequence[UnitForm], policy: UpdatePolicy, world: World) -> int:
    """What the units of a model take of this rank's host memory."""
    return host_bytes([form.held(world.share) for form in forms], policy)


def expect(name: str, value: object, *known: object) -> None:
    """Refuse a word that is not known.

    Raises:
        ValueError: with those that are.
    """
    if value not in known:
        words = f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
        raise ValueError(f"{name}={value!r} is not known. Expected {words}.")


def find_kernel(word: str, optimizer: Optimizer) -> HostKernel | None:
    """The native code that updates on the host; None: PyTorch does it.

    Raises:
        ValueError: the word is not known.
    """
    expect("kernel", word, "native", "readable")
    if word == "readable" or not isinstance(optimizer, HostOptimizer):
        return None
    found = load_kernel()
    if found is None:
        warnings.warn(
            "the native host kernel is not built, so updates are slow. Build it with 'make kernel' "
            "(needs g++), or silence this with execution=l2l.Execution(kernel='readable').",
            stacklevel=3,  # whoever makes the engine
        )
    return found
