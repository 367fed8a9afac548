"""Gradients: added up on the device, summed over ranks, drained to the host, shown to a witness."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import final

from torch import Tensor

from l2l.parameter_server import Adafactor
from l2l.run.parts import Parts
from l2l.run.step import Step
from l2l.schedule import Action


@final
class Gradients:
    """Performs the lines of a schedule that concern gradients."""

    def __init__(self, parts: Parts) -> None:
        self._server, self._transfer = parts.server, parts.transfer
        self.lines: dict[str, Callable[[Step, Action], None]] = {
            "reduce U": self.reduce,
            "reduce loss": self.reduce_losses,
            "drain U.grad": self.drain,
            "drain U.norm": self.drain_norms,
        }

    def accumulate(
        self,
        step: Step,
        unit: str,
        slot: str,
        gradients: Mapping[str, Tensor],
        add: Callable[[list[Tensor], list[Tensor]], None] | None = None,
        *,
        continued: Collection[str] = (),
    ) -> None:
        """Add one microbatch's gradients to a unit's sums; `add` is a faster way to do so.

        Those that are `continued` are the new sums: what was there is in them.
        """
        received = step.received.setdefault(unit, set())
        if continued:
            whole = {name: gradients[name] for name in continued}
            self._transfer.accumulate(unit, slot, whole, received=set())
            gradients = {name: one for name, one in gradients.items() if name not in whole}
        if gradients:
            self._transfer.accumulate(unit, slot, gradients, received=received, add=add)

    def drain(self, step: Step, action: Action) -> None:
        """A unit's gradient, and its norms, to the host."""
        self._transfer.drain(action.unit, *action.places)
        self.drain_norms(step, action)

    def drain_norms(self, step: Step, action: Action) -> None:
        """A unit's norms to the host; of several ranks also what got a gradient on any."""
        self.note_norms(step, action.unit, action.places[0], step.reduced.pop(action.unit, None))

    def note_norms(self, step: Step, unit: str, slot: str, reduced: Tensor | None) -> Tensor:
        """The norms of a unit's gradients, on their way to the host; of ranks those of the sums."""
        if reduced is None:
            norms = self._transfer.norms(unit, slot, received=step.received.get(unit, set()))
        else:
            norms = reduced[0]
            step.flags[unit].copy_(reduced[1], non_blocking=True)
        step.norms[unit][: norms.numel()].copy_(norms, non_blocking=True)
        return norms

    def reduce(self, step: Step, action: Action) -> None:
        """A unit's gradients, summed over all ranks."""
        step.reduced[action.unit] = self._transfer.reduce(
            action.unit,
            *action.places,
            received=step.received.get(action.unit, set()),
            all_of_it=isinstance(self._server.optimizer, Adafactor),
        )

    def reduce_losses(self, step: Step, _: Action) -> None:
        """Losses, summed over all ranks."""
        self._server.world.pool(step.device_losses)

    def _show(self, step: Step, unit: str, gradients: Mapping[str, Tensor]) -> None:
        """Show a unit's gradients to the step's witness."""
        if step.witness is not None:
            for owner, gradient in gradients.items():
                if owner in step.received.get(unit, ()):
                    step.witness(owner, gradient)

    def show_summed(self, step: Step, unit: str, slot: str) -> None:
        """The same of gradients on the device: what this rank holds of them."""
        one = self._server.units[unit]
        sums = self._transfer.views(unit, slot) if step.witness is not None else {}
        self._show(
            step,
            unit,
            {o: g.view(-1)[one.form.trained.piece(o, one.share)] for o, g in sums.items()},
        )

    def show_staged(self, step: Step, unit: str, staging: Tensor) -> None:
        """The same of gradients that were drained."""
        if step.witness is not None:
            self._show(step, unit, self._server.units[unit].held.staging_layout.views(staging))
