"""What an engine is made with and keeps to its end, whatever becomes of its layers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from l2l.device import Device, Disk
from l2l.distributed import World
from l2l.engine.disk_tier import open_tier
from l2l.engine.timeline import Timeline
from l2l.engine.turns import Turns
from l2l.model import Beside, Compiler, LossFunction, Partition, Split, TokenLoss, parse_backend
from l2l.parameter_server import (
    Adafactor,
    Arena,
    HostBudget,
    HostGradients,
    HostKernel,
    HostOptimizer,
    Inventory,
    Members,
    Optimizer,
    ParameterServer,
    Part,
    PrecisionPolicy,
    ServerOptimizer,
    UnitForm,
    UpdatePolicy,
    available_bytes,
    forms_of,
    host_bytes,
    load_kernel,
)
from l2l.planner import STATE_ON_HOST, Decisions, KeptPlans, Planning
from l2l.run import HostRows, Scaler, Stash, Transfer, parse_policy

logger = logging.getLogger("l2l")


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
    compile_ahead: str = "wait"
    """"wait" compiles layers in the first step; "background" on a thread, while steps run layers as
    they are: from which step on they run compiled depends on the machine's speed (`report.compiled`
    says it), and so do the last bits. Meanwhile nothing else in the process should be compiled.
    Several ranks wait, and so does a plan whose memory is enough for compiled layers only."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Overrides of the plan's choices, by name: see `l2l.planner`."""
    group_size: int | None = None
    """Number of ranks that share one copy of the model, if torch.distributed is initialised (all
    ranks train together, each on its own rows). None: those of a node if there are several
    nodes, else all."""

    def check(self, world: World, microbatch_size: int | None) -> None:
        """Refuse settings that cannot be.

        Raises:
            ValueError: with what is expected.
        """
        if microbatch_size is not None and microbatch_size < 1:
            raise ValueError(
                f"microbatch_size={microbatch_size}; expected at least 1 row, or None."
            )
        expect("compile_ahead", self.compile_ahead, "wait", "background")
        expect("embedding", self.embedding, "host", "device", None)
        if self.embedding == "host" and world.is_parallel:
            raise ValueError(
                "embedding='host', but several ranks hold the tables together. Expected 'device' "
                "or None: they are gathered like layers."
            )
        parse_policy(self.stash)
        Decisions().override(self.overrides)

    def with_choices(self, choices: Mapping[str, Any]) -> Execution:
        """The same with some choices of the plan made."""
        return replace(self, overrides={**self.overrides, **choices})

    def compiler(self, backend: str | None, device: Device, world: World) -> Compiler:
        """What compiles layers, beside steps or where they are met."""
        is_beside = self.compile_ahead == "background" and backend and not world.is_parallel
        return Compiler(backend=backend, beside=Beside(device) if is_beside else None)


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
    turns: Turns  # by which engines share the device's memory
    timeline: Timeline = field(default_factory=Timeline)
    gradients: HostGradients | None  # that wait for the user's own code
    first_on_disk: Mapping[Part, tuple[str, ...]]  # layers of which a part is there at first

    @classmethod
    def of(
        cls,
        inventory: Inventory,
        optimizer: ServerOptimizer,
        *,
        model: nn.Module,
        loss: LossFunction | TokenLoss | None,
        device: Device,
        turns: Turns,
        disk: Disk | str | Path | None,
        backend: bool | str | None,
        seed: int,
        world: World,
        host_budget: HostBudget,
        execution: Execution,
        plans: KeptPlans,
        **others: Any,
    ) -> Resources:
        """All of them, empty; arguments are the engine's, and are in order."""
        turns.check(device, world=world, stash=execution.stash)
        kernel = find_kernel(execution.kernel, inventory.optimizer)
        compiler = execution.compiler(parse_backend(backend, device), device, world)
        of_server = kernel
        if any(form.device_work.matrix_flops for form in inventory.forms):
            device.long_lines.add("update")
            _warn_of_products(inventory.optimizer, device, execution)
            # Products in 16 bits make much of a last bit, and on the CPU they take the time anyway.
            of_server = None if device.torch_device.type == "cpu" else kernel
        arena = Arena(device)
        tier = open_tier(disk, inventory, host_budget, arena, execution.overrides)
        server = ParameterServer(
            arena=arena,
            optimizer=inventory.optimizer,
            kernel=of_server,
            seed=seed,
            world=world,
            disk=tier.units,
        )
        return cls(
            model=model,
            loss=loss,
            optimizer=optimizer,
            precision=inventory.precision,
            policy=inventory.policy,
            world=world,
            host_budget=host_budget,
            device=device,
            compiler=compiler,
            scaler=Scaler() if inventory.precision.link is torch.float16 else None,
            arena=arena,
            server=server,
            transfer=Transfer(device=device, arena=arena, server=server),
            stash=Stash(
                device=device,
                arena=arena,
                policy=parse_policy(execution.stash),
                folder=None if tier.units is None else tier.units.folder,
            ),
            rows=HostRows(arena=arena, server=server, kernel=kernel),
            planning=Planning(
                partition=inventory.partition,
                forms={form.name: form for form in inventory.forms},
                device=device,
                optimizer=inventory.optimizer,
                policy=inventory.policy,
                kernel=kernel,
                budget=turns.budget,
                host=host_budget,
                world=world,
                compiled=compiler.is_on,
                overrides=execution.overrides,
                embedding=execution.embedding,
                needs_slices=isinstance(loss, TokenLoss),
                kept=plans,
                disk=tier.measured,
                spills=execution.stash == "host",
                least_on_disk=(len(tier.first["state"]), len(tier.first["weights"])),
            ),
            turns=turns,
            first_on_disk=tier.first,
            gradients=HostGradients(arena, server) if inventory.drains_sums else None,
            **others,
        )

    @property
    def is_frozen(self) -> bool:
        """Whether nothing is trained: the model is only run."""
        return not any(group["params"] for group in self.optimizer.param_groups)

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
            drains_sums=self.gradients is not None,
        )


def server_bytes(forms: Sequence[UnitForm], policy: UpdatePolicy, world: World) -> int:
    """What the units of a model take of this rank's host memory."""
    return host_bytes([form.held(world.share) for form in forms], policy)


def refuse_loop(*, loss: object, optimizer: object, disk: object, world: World) -> None:
    """Refuse what a loop of the user's own cannot be combined with.

    Raises:
        ValueError: with what to do instead.
    """
    problems = {
        "loss= is for engine.step: a loop of your own takes its loss from the model's outputs. "
        "Leave loss= out.": loss is not None,
        "Adafactor updates layers on the device as soon as their gradient is there, which "
        "no code sees then. Use l2l.AdamW(moments='8bit'), say.": isinstance(optimizer, Adafactor),
        "disk= is for engine.step: updates of a loop of your own find their state in memory. Leave "
        "disk= out.": disk is not None,
        "several ranks hold the model together, and gradients of a loop of your own are not summed "
        "over them. Use engine.step, or one process.": world.is_parallel,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(f"autograd=True cannot be combined with this: {problem}")


def _warn_of_products(optimizer: Optimizer, device: Device, execution: Execution) -> None:
    """Say that the host makes updates that are slow there, though there is an accelerator."""
    on_host = execution.overrides.keys() >= STATE_ON_HOST.keys()
    if on_host and device.torch_device.type != "cpu":
        logger.warning(
            "%s multiplies matrices, and here the host makes all updates, which is slow: several "
            "ranks train together, layers may be left out, or a loop of your own runs.",
            optimizer.name,
        )


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
