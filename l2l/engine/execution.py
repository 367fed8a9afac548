"""How an engine does what it is asked for: settings that few need, in one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    """Choices of the plan to be made otherwise, by name: see `l2l.planner`."""
    group_size: int | None = None
    """Where torch.distributed is initialised, all its ranks train together, each with rows of its
    own; so many of them hold one copy of the model. None: those of a node if there are several
    nodes, else all."""
