"""What a plan is about, but for the batch: a model's units, and how they are updated.

With what is known of the model by trying it, and a batch, that is a `Problem`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch

from l2l.device import Device
from l2l.distributed import World
from l2l.model import Partition, Recording, Rule, take_rows, token_length, trial_batch
from l2l.parameter_server import (
    AdamW,
    HostBudget,
    HostOptimizer,
    Optimizer,
    UnitForm,
    UpdatePolicy,
    device_update,
    host_bytes,
)
from l2l.planner.problem import (
    Problem,
    UnitSize,
    head_of,
    layer_costs,
    passed_on,
    unit_size,
    update_bytes,
)
from l2l.run import Facts, Usage
from l2l.schedule import OuterUnit

LARGE_UNIT_BYTES = 16 << 20  # a smaller table is not worth a lookup on the host
# For each logit of a piece: values of its own type and float32 values that are there at once, bytes
# that the loss reads and writes.
LOGITS = {"plain": (1.0, 3.1, 40.0), "put off": (1.0, 1.1, 40.0), "compiled": (1.05, 0.0, 10.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What is known of a model by trying it, or by looking at it."""

    facts: Facts
    record: Callable[[dict[str, Any]], Sequence[Recording]]
    buffer_bytes: int
    # Such layers keep none of their results: the rest might not be computed again as it was ([Note:
    # random numbers] in layer_pass.py).
    draws_random_numbers: bool


@final
@dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """What a plan is about; `Planning` says what its fields are."""

    partition: Partition
    forms: Mapping[str, UnitForm]
    optimizer: Optimizer
    policy: UpdatePolicy
    host: HostBudget
    compiled: bool
    device: Device | None
    world: World
    embedding: str | None
    needs_slices: bool

    @property
    def has_halves(self) -> bool:
        """Whether late updates can be done in two."""
        return isinstance(self.optimizer, HostOptimizer) and self.optimizer.has_halves

    @cached_property
    def layers(self) -> tuple[UnitSize, ...]:
        """Sizes of all layers."""
        return tuple(unit_size(self.forms[f"L{i}"]) for i in range(self.partition.num_layers))

    def outer_units(self, facts: Facts) -> tuple[OuterUnit, ...]:
        """Units around the layers, before anything is decided.

        The host looks up in tables where it was told to, or in large ones. A table that ranks hold
        together is gathered like a layer. With several stacks, what any code before them reads
        stays for the whole step.
        """
        is_one_stack = facts.route is None or facts.route.num_stacks == 1
        on_device = self.world.is_parallel or self.policy is UpdatePolicy.ON_DEVICE
        is_told, may_look_up = self.embedding == "host", self.embedding != "device"
        found = []
        for name, form in self.forms.items():
            if name.startswith("L"):
                continue
            usage = facts.usage.get(name, Usage(before=True, after=True))
            pays = is_told or form.weight_layout.nbytes >= LARGE_UNIT_BYTES
            looks_up = bool(usage.lookups) and not usage.before
            looked_up = looks_up and pays and may_look_up and not on_device
            before = usage.before or (bool(usage.lookups) and not looked_up)
            found.append(
                OuterUnit(
                    name=name,
                    in_prologue=before,
                    in_epilogue=usage.after or (before and not is_one_stack),
                    looked_up=looked_up,
                    trained=bool(form.trained.names),
                    may_be_sliced=_is_head(form, facts) and not on_device and not before,
                )
            )
        return tuple(found)

    def refuse_slices(self, facts: Facts, chosen: int | None) -> None:
        """Refuse slices of a head, where they were chosen or are needed and there is no such head.

        Raises:
            ValueError: with what such a head is.
        """
        if any(unit.may_be_sliced for unit in self.outer_units(facts)):
            return
        if facts.rule is not None and (chosen or self.needs_slices):
            asked = "loss=l2l.TokenLoss" if self.needs_slices else f"num_head_slices={chosen}"
            raise ValueError(
                f"{asked}, but the head of this model cannot come in slices. Expected a model "
                "whose own loss is a plain cross-entropy of a head's logits with the batch's "
                "labels, row by row, a host optimizer, and one rank."
            )

    def problem(
        self,
        longest: Mapping[str, Any],
        total: int,
        found: Findings,
        tile_tokens: int | None,
    ) -> Problem:
        """What to plan for, in batches of so many rows, at most as long as the longest."""
        one = take_rows(longest, 0, 1)
        recordings = [found.record(one), found.record(trial_batch(one, cut=False))]
        forms, facts, optimizer, sizes = self.forms, found.facts, self.optimizer, self.layers
        route = facts.route or self.partition.straight
        collects = any(call.lists for each in recordings[0] for call in each.calls.values())
        handed = [values for each in recordings[0] for values in passed_on(each)]
        hidden = max((values[0] for values in handed), key=lambda one: one.nbytes)
        outer = self.outer_units(facts)
        layers = [forms[f"L{i}"] for i in range(self.partition.num_layers)]
        head = [forms[unit.name] for unit in outer if unit.in_epilogue]
        head_parameters, head_width = head_of(head)
        wholes = device_update.supports(optimizer) and any(one.wholes for one in sizes)
        on_host = [forms[unit.name] for unit in outer if unit.trained] if wholes else []
        updated = max([layers[-1], *on_host], key=lambda form: form.trained.numel)
        kind = "plain" if not facts.puts_off else "compiled" if self.compiled else "put off"
        own, wide, moved = LOGITS[kind]
        looked_up = [facts.usage[unit.name] for unit in outer if unit.looked_up]
        lookups = [lookup for usage in looked_up for lookup in usage.lookups]
        return Problem(
            layers=tuple(sizes[layer] for layer in route.layers),
            route=route,
            costs=layer_costs(
                self.partition,
                layers,
                recordings,
                route,
                fused=self.compiled and not collects and not tile_tokens,
                tiles=facts.tiles(tile_tokens),
            ),
            tile_tokens=tile_tokens,
            outer=tuple((unit, unit_size(forms[unit.name])) for unit in outer),
            num_rows=total,
            length=token_length(longest),
            hidden_bytes=max(sum(one.nbytes for one in values) for values in handed),
            recorded_bytes=max(
                sum(tensor.nbytes for tensor in each.tensors) for each in recordings[0]
            ),
            aside_bytes=sum(each.aside_bytes for each in recordings[0]),
            joint=facts.rule is Rule.UNKNOWN and self.policy is not UpdatePolicy.ON_DEVICE,
            looked_up_bytes=sum(
                one[lookup.name].numel() * forms[lookup.unit].row_bytes(lookup.owner)
                for lookup in lookups
            ),
            head_parameters=head_parameters,
            head_width=head_width,
            logit_bytes=own * hidden.element_size() + wide * 4,
            logit_moved_bytes=moved,
            may_cut_rows=facts.alone and not any(facts.changing) and route.is_straight,
            may_cut_positions=facts.within_rows or facts.puts_off,
            may_keep=self.compiled and not found.draws_random_numbers and not tile_tokens,
            policy=self.policy,
            update_bytes=update_bytes(optimizer, updated),
            eight_bit=isinstance(optimizer, AdamW) and optimizer.moments == "8bit",
            has_halves=self.has_halves,
            may_update_on_device=device_update.supports(optimizer),
            updates_wholes=wholes,
            is_single=hidden.dtype is torch.float32,
            needs_slices=self.needs_slices and facts.rule is not None,
            buffer_bytes=found.buffer_bytes + (self.device.growth_bytes if self.device else 0),
            server_bytes=host_bytes(
                [one.held(self.world.share) for one in forms.values()], self.policy
            ),
            parallel=self.world.is_parallel,
            host_limit_bytes=self.host.limit_bytes,
        )


def _is_head(form: UnitForm, facts: Facts) -> bool:
    """Whether a unit is the head that the trial has found, and nothing else."""
    return facts.head is not None and form.weight_layout.names == (facts.head.owner,)
