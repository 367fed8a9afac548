"""What is where on the device from step to step, as the plan says."""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch

from l2l.engine.depth import Choice
from l2l.engine.network import Network
from l2l.engine.resources import Resources
from l2l.planner import Plan
from l2l.run import Program
from l2l.schedule import OuterUnit, Schedule, Shape, make_schedule

MAX_SCHEDULES = 32  # that are kept


@final
class Placement:
    """Owner of what stays on the device between steps, and of the schedules that go by it."""

    def __init__(self, resources: Resources, network: Network) -> None:
        """Nothing is on the device yet."""
        self._resources, self._network = resources, network
        self._server, self._planning = resources.server, resources.planning
        self._held: frozenset[str] = frozenset()  # units that the last step has left there
        self.outer: tuple[OuterUnit, ...] = ()  # units around the layers, as they are placed
        self.schedules: dict[Shape, Schedule] = {}
        self.is_made = False  # whether everything follows the choices

    def outer_units(self) -> tuple[OuterUnit, ...]:
        """Units around the layers, before the plan has placed them."""
        return self._network.trial.outer_units(self._resources.looks_up)

    def leave(self) -> None:
        """Bring everything that stays on the device from step to step back to the host."""
        self.is_made = False
        self._server.settle_all()
        for name in self._server.units:  # also of a plan whose first step has failed
            self._server.place_state(name, torch.device("cpu"))
        self._held = frozenset()
        self._resources.transfer.clear()
        self.schedules.clear()

    def enter(self, outer: tuple[OuterUnit, ...]) -> None:
        """Let everything follow the choices."""
        decisions, has, passes = self._planning.decisions, self._resources, self._network.outer
        self.outer = tuple(decisions.outer_unit(unit) for unit in outer)
        units = {unit.name: unit for unit in self.outer}
        has.rows.lookups = tuple(
            lookup
            for name, usage in self._network.trial.usage.items()
            if units[name].looked_up
            for lookup in usage.lookups
        )
        passes.facts = replace(passes.facts, lookups=has.rows.lookups)
        shape = self.shape(1, training=True)
        for layer in shape.shared:
            self._server.register(f"L{layer}", has.device)
        for name in shape.on_device:
            self._server.place_state(name, has.device.torch_device)
        self.is_made = True

    def note_run(self, schedule: Schedule) -> None:
        """A schedule has run, and has left on the device what it says."""
        self._held = frozenset(schedule.shape.on_device)

    # ----------------------------------------------------------------------------------------------

    def shape(self, num_microbatches: int, *, training: bool) -> Shape:
        """The shape of the next step if it runs all layers."""
        number = self._network.partition.num_layers
        layers = [self._server.units[f"L{i}"].form for i in range(number)]
        shape = self._planning.decisions.shape(
            num_microbatches=num_microbatches,
            trains=[bool(form.trained.names) for form in layers],
            outer=self.outer,
            update=self._resources.policy,
        )
        return replace(
            shape,
            training=training,
            shared=frozenset(index for index in shape.shared if layers[index].is_one_run),
            halves=shape.halves and self._server.optimizer.has_halves,
            held=self._held,
            pending=tuple(self._server.waiting),
            parallel=self._resources.world.is_parallel,
        )

    def program(
        self, num_microbatches: int, choice: Choice, *, training: bool, seed: int
    ) -> Program:
        """What the next step runs by."""
        decisions = self._planning.decisions
        return Program(
            schedule=self._schedule(num_microbatches, choice, training=training),
            seed=seed,
            keep=decisions.keep,
            piece_tokens=decisions.piece_tokens,
            part_tokens=decisions.part_tokens,
            compiles_loss=self._resources.compiler.is_on,
        )

    def _schedule(self, num_microbatches: int, choice: Choice, *, training: bool) -> Schedule:
        """The schedule of the next step; kept for steps of the same shape."""
        shape = self.shape(num_microbatches, training=training)
        if choice.layers != shape.layers:
            shape = shape.only(choice.layers)
        if shape not in self.schedules:
            if len(self.schedules) == MAX_SCHEDULES:
                del self.schedules[next(iter(self.schedules))]  # the oldest
            self.schedules[shape] = make_schedule(shape)
        return self.schedules[shape]

    def order_of_change(self) -> list[str]:
        """Units, those first that a step changes first."""
        shape = self.shape(1, training=True)
        rows = [unit.name for unit in shape.outer if unit.looked_up]
        first = [*rows, *shape.late_units[::-1], *shape.drained_units]
        return list(dict.fromkeys([*first, *self._server.units]))

    def updated_on_device(self) -> frozenset[str]:
        """Units whose update a step does there."""
        shape = self.shape(1, training=True)
        return frozenset([*shape.on_device, *(f"L{layer}" for layer in shape.shared)])

    def plan(self) -> Plan:
        """What is placed where, in bytes, and the choices made."""
        has, partition, trial = self._resources, self._network.partition, self._network.trial
        return self._planning.plan(
            arena=has.arena.bytes_by_name,
            reserved={
                **has.transfer.bytes_by_place(),
                "boundary cells": has.stash.cell_bytes(),
                "buffers": trial.resident_buffer_bytes(),
            },
            choices=(
                ("layers", f"{partition.list_name}, {partition.num_layers} of them"),
                ("precision", str(has.precision.link).removeprefix("torch.")),
                ("microbatch", self._planning.microbatch(has.microbatch_size)),
                ("stash", has.stash.policy),
                ("update", has.policy.value),
                ("loss averages over", trial.rule.value if trial.rule else "?"),
                ("layers run", has.compiler.describe()),
            ),
            peak_bytes=has.device.peak_bytes(),
        )
