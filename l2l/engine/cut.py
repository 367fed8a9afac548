"""A batch in microbatches, and the step that runs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from l2l.engine.depth import Choice
from l2l.engine.resources import Resources
from l2l.model import Microbatch, Rule
from l2l.parameter_server import UpdatePolicy
from l2l.run import Step

Batches = Mapping[str, Any] | Sequence[Mapping[str, Any]]
Settings = Mapping[str, Mapping[str, Any]]
"""Of the optimizer, by parameter."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A batch in microbatches, and what is to be known of those of other ranks."""

    microbatches: list[Microbatch]  # in memory that lanes copy from
    num_own: int  # those that are not there for the sake of other ranks
    rule: Rule
    total: int  # what the loss averages over, on all ranks
    num_tokens_elsewhere: int = 0


def make_step(
    resources: Resources,
    cut: Cut,
    choice: Choice,
    *,
    number: int,
    settings: Settings | None,
    keep_outputs: bool = False,
) -> Step:
    """Everything that one run of a schedule works on; without `settings` it does not train."""
    server, device = resources.server, resources.device
    trains, num_microbatches = settings is not None, len(cut.microbatches)
    names = {name: unit.form.trained.names for name, unit in server.units.items()}
    return Step(
        number=number,
        layers=choice.layers,
        survival=choice.survival,
        microbatches=list(cut.microbatches),
        rule=cut.rule,
        total=cut.total,
        num_own=cut.num_own,
        num_tokens_elsewhere=cut.num_tokens_elsewhere,
        names=names if trains else {},
        flags=resources.norm_records() if trains and resources.world.is_parallel else {},
        device_losses=torch.zeros((num_microbatches, 2), device=device.torch_device),
        losses=device.host_record(num_microbatches, 2),
        norms=resources.norm_records() if trains else {},
        settings=settings,
        clip_norm=resources.clip_norm,
        checks_norms=resources.policy is UpdatePolicy.JUST_IN_TIME,
        keep_outputs=keep_outputs,
        divide_by_weight=cut.rule is Rule.SUM_AND_WEIGHT,
        rows=resources.rows.begin(cut.microbatches) if resources.rows.lookups else None,
    )
