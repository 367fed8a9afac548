"""One step of the optimizer on a unit, in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from l2l.parameter_server.coefficients import Numbers
from l2l.parameter_server.host_kernel import Half, HostKernel
from l2l.parameter_server.optimizer import HostOptimizer, Update
from l2l.parameter_server.unit import Unit
from l2l.parameter_server.waiting import UpdateOrder

MAX_PREPARED = 64  # ways to update a unit that are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUpdate:
    """A unit's update from a gradient in staging."""

    optimizer: HostOptimizer
    unit: Unit
    gradient: Tensor  # staging bytes
    order: UpdateOrder
    owners: Sequence[str]  # parameters that have a gradient
    ranges: Sequence[Tensor | None]  # for each of them the only elements to update; None: all
    half: Half | None  # what alone is to change
    seed: int  # of rounding

    def readably(self) -> float:
        """Do it in PyTorch; the sum of squares of the changes of the float32 masters."""
        change = 0.0
        for update, own in zip(self._updates(), self.ranges, strict=True):
            before = update.master()
            self.optimizer.readable(replace(update, ranges=own))
            change += float((update.master() - before).double().square().sum())
        return change

    def natively(self, kernel: HostKernel, *, num_threads: int) -> float:
        """The same with the native kernel, by a call that is prepared once."""
        unit, gradient = self.unit, self.gradient
        received, address = self.order.received, gradient.data_ptr()
        key = (self.half, received, address, gradient.numel(), *unit.addresses())
        prepared, numbers = unit.prepared.get(key), self._numbers()
        if prepared is None:
            with kernel.preparing() as prepared:
                for update in self._updates():
                    self.optimizer.native(kernel, update, num_threads=num_threads)
            if self.optimizer.may_prepare:
                kept = unit.prepared if len(unit.prepared) < MAX_PREPARED else {}
                unit.prepared = {**kept, key: prepared}
        return prepared.perform(numbers, ranges=self.ranges, num_threads=num_threads)

    def _numbers(self) -> list[Numbers] | None:
        """The numbers of every parameter's update; None if the optimizer has none."""
        found: list[Numbers] = []
        for owner in self.owners:
            one = self.optimizer.numbers(
                self.order.settings[owner],
                step=self.unit.steps[owner],
                factor=self.order.factor,
                seed=self.seed,
            )
            if one is None:
                return None
            found.append(one)
        return found

    def _updates(self) -> Iterator[Update]:
        """The updates of single parameters."""
        unit = self.unit
        for owner in self.owners:
            companion = unit.companion_of(owner)
            yield Update(
                name=owner,
                shape=tuple(unit.weight_of(owner).shape),
                weight=unit.weight_of(owner).view(-1),
                companion=None if companion is None else companion.view(-1),
                gradient=unit.held.staging_layout.view(self.gradient, owner).view(-1),
                state=unit.state_of(owner),
                position=unit.position_of(owner),
                step=unit.steps[owner],
                settings=self.order.settings[owner],
                factor=self.order.factor,
                seed=self.seed,
                half=self.half,
            )
