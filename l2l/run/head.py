"""Passes through an epilogue whose head comes in slices: [Note: slices] in shape.py of `schedule`.

The arithmetic is in head.py of `model`. What the head is given (`y`) and the labels are known once
the model's code has asked for its loss. It is run again for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from l2l.model import (
    Question,
    Words,
    add_words,
    coefficients,
    first_sums,
    log_probabilities,
    take_gradients,
    unwind_words,
)
from l2l.run.around_layers import AroundLayers
from l2l.run.buffers import ChangingBuffers
from l2l.run.outer_pass import Outer, OuterPass
from l2l.run.parts import Parts
from l2l.run.program import HeadOfWords
from l2l.run.step import Step
from l2l.schedule import NOTHING, Action


@final
class HeadPasses:
    """Runs microbatches up to the head, through its slices, and back."""

    def __init__(
        self, parts: Parts, outer: OuterPass, around: AroundLayers, buffers: ChangingBuffers
    ) -> None:
        self._server, self._transfer, self._stash = parts.server, parts.transfer, parts.stash
        self._outer, self._around, self._buffers = outer, around, buffers
        self.lines: dict[str, Callable[[Step, Action], None]] = {
            "fetch U:p": self.fetch,
            "release U:p": lambda _, a: self._transfer.release(*a.places),
            "drain U.grad:p": self.drain,
            "forward Epi m": self.forward,
            "forward U:p m": self.forward_slice,
            "loss Epi m": self.loss,
            "backward U:p m": self.backward_slice,
            "backward Epi m": self.backward,
        }

    def fetch(self, step: Step, action: Action) -> None:
        """The rows of a slice to the device."""
        head, rows = _head(step), self._rows(step, action)
        self._transfer.fetch_rows(action.name, head.owner, rows, *action.places)

    def drain(self, step: Step, action: Action) -> None:
        """The gradient of a slice to the host; with the last one, the norm of all."""
        unit, owner, rows = action.unit, _head(step).owner, self._rows(step, action)
        gradient, staging = action.places
        sums = self._transfer.rows_in(gradient, unit, owner, rows)
        self._transfer.drain_rows(sums, unit, owner, rows, staging)
        square = torch.linalg.vector_norm(sums).square()
        step.squares[unit] = square + step.squares.get(unit, 0.0)
        if action.piece == 0:
            step.norms[unit][:1].copy_(step.squares[unit].sqrt(), non_blocking=True)

    def forward(self, step: Step, action: Action) -> None:
        """The model's code after the layers, without its head."""
        slots, recorded, cell, given, sums = action.places
        m = _microbatch(action)
        with self._buffers.rewound(step, m, stacks=step.program.route.num_stacks):
            _, question, _ = self._reach(step, m, slots, recorded, cell)
        is_own = self._outer.loss_function is None
        counts = question.counts(step.share(step.microbatches[m]) if is_own else 1.0)
        step.pointwise = question.pointwise
        self._stash.put(given, f"y m{m}", [question.given.detach(), question.labels])
        self._stash.put(sums, f"s0 m{m}", [first_sums(counts)])

    def _reach(
        self, step: Step, m: int, slots: str, recorded: str, cell: str
    ) -> tuple[Outer, Question, dict[str, Tensor]]:
        """Run that code; what it was given, what it asked for, and the weights that it saw."""
        ends = self._stash.get(cell, f"hE m{m}")
        outer = self._around.delivered(step, m, step.program.route.num_stacks, recorded, ends)
        bound = self._outer.bind(slots)
        self._around.seed(step, m)
        with torch.set_grad_enabled(step.training):
            inputs = self._around.inputs(step, m)
            return outer, self._outer.ask(step, m, outer, inputs), bound

    def forward_slice(self, step: Step, action: Action) -> None:
        """What the words of a slice add to the sums of every token."""
        slot, beside, given, before, after = action.places
        m, words = _microbatch(action), self._words(step, action, slot, beside)
        assert action.piece is not None
        rows, labels = self._stash.get(given, f"y m{m}")
        (sums,) = self._stash.get(before, f"s{action.piece} m{m}")
        with torch.no_grad():
            found = add_words(words, rows, labels, sums)
        self._stash.put(after, f"s{action.piece + 1} m{m}", [found])

    def loss(self, step: Step, action: Action) -> None:
        """The loss of a microbatch, once all words were seen."""
        sums, to = action.places
        m, head = _microbatch(action), step.program.shape.head
        assert head is not None
        (total,) = self._stash.get(sums, f"s{head.num_slices} m{m}")
        found, norm = log_probabilities(total)
        counts, scale = total[-1], self._around.scale(step) if to != NOTHING else 1.0
        found = torch.where(counts != 0, found, 0)
        if self._outer.loss_function is None:
            step.device_losses[m, 0] -= (found * counts).sum()
            step.device_losses[m, 1] += 1.0
            of_tokens = -counts * scale
        else:
            of_tokens = self._differentiate(step, m, found, scale if to != NOTHING else None)
        if to != NOTHING:
            self._stash.put(to, f"c m{m}", [coefficients(norm, of_tokens * (counts != 0))])

    def _differentiate(self, step: Step, m: int, found: Tensor, scale: float | None) -> Tensor:
        """Take the user's loss of log-probabilities; its derivative by these, if it is wanted."""
        leaf, share = found.requires_grad_(scale is not None), step.share(step.microbatches[m])
        with torch.set_grad_enabled(scale is not None):
            own = leaf.clone()  # it may write into it
            loss = self._outer.take_loss(step, m, own, self._around.inputs(step, m), share)
        if scale is None or not loss.requires_grad:
            return torch.zeros_like(found)
        taken = take_gradients([loss.float() * scale], [torch.ones_like(loss).float()], {0: leaf})
        return taken.get(0, torch.zeros_like(found))

    def backward_slice(self, step: Step, action: Action) -> None:
        """Gradients of a slice's words, and of what the head was given as far as they know it."""
        slot, beside, gradient, beside_sums, given, by, so_far, to = action.places
        m, words = _microbatch(action), self._words(step, action, slot, beside)
        assert action.piece is not None
        rows, labels = self._stash.get(given, f"y m{m}")
        (of_tokens,) = self._stash.get(by, f"c m{m}")
        later = None
        if so_far != NOTHING:
            (later,) = self._stash.get(so_far, f"d{action.piece + 1} m{m}")
        head, own, add = _head(step), self._rows(step, action), None
        if gradient != NOTHING:
            total = self._transfer.rows_in(gradient, action.unit, head.owner, own)
            add = self._transfer.adding(
                total, action.name, step.received.setdefault(action.name, set())
            )
            step.received.setdefault(action.unit, set()).add(head.owner)
        with torch.no_grad():
            found = unwind_words(
                words,
                rows,
                labels,
                of_tokens,
                so_far=later,
                wants_given=to != NOTHING,
                add=add,
                of_bias=self._sum_of_bias(step, head.bias, own, beside_sums),
            )
        if to != NOTHING:
            assert found is not None
            self._stash.put(to, f"d{action.piece} m{m}", [found])

    def backward(self, step: Step, action: Action) -> None:
        """The model's code without its head again, with a graph, and back."""
        slots, gradients, recorded, cell, given, to = action.places
        m = _microbatch(action)
        (gradient,) = self._stash.get(given, f"d0 m{m}")
        with self._buffers.rewound(step, m, stacks=step.program.route.num_stacks):
            outer, question, bound = self._reach(step, m, slots, recorded, cell)
            taken = self._around.take(
                step, m, [question.given], [gradient], gradients, bound=bound, outer=outer
            )
        arrived = self._around.arrived(step, m, outer, taken)
        if to != NOTHING:
            self._stash.put(to, f"gE m{m}", arrived)

    # ----------------------------------------------------------------------------------------------

    def _rows(self, step: Step, action: Action) -> slice:
        """The rows of the head that a line is about."""
        head = step.program.shape.head
        assert head is not None
        assert action.piece is not None
        form = self._server.units[action.unit].form
        return form.rows(action.piece, head.num_slices)

    def _words(self, step: Step, action: Action, slot: str, beside: str) -> Words:
        head, rows = _head(step), self._rows(step, action)
        assert self._transfer.holds(action.name, slot), f"{action.name} is not in {slot}"
        return Words(
            weight=self._transfer.rows_in(slot, action.unit, head.owner, rows),
            first=rows.start,
            bias=None if head.bias is None else self._view(head.bias, "S", beside)[rows],
            pointwise=step.pointwise,
            compiled=step.program.compiles_loss,
        )

    def _sum_of_bias(self, step: Step, bias: str | None, rows: slice, slots: str) -> Tensor | None:
        """Where the gradient of a slice's bias is added up; None: nobody wants it."""
        unit = None if bias is None else self._unit_of(bias, "G", slots)
        if unit is None or bias not in self._server.units[unit].form.trained.names:
            return None
        total, received = self._view(bias, "G", slots), step.received.setdefault(unit, set())
        if bias not in received:
            total.zero_()
            received.add(bias)
        return total[rows]

    def _view(self, owner: str, kind: str, slots: str) -> Tensor:
        unit = self._unit_of(owner, kind, slots)
        assert unit is not None, owner
        return self._transfer.views(unit, f"{kind}{unit}")[owner]

    def _unit_of(self, owner: str, kind: str, slots: str) -> str | None:
        """Which of the units in these slots has a parameter."""
        units = [slot.removeprefix(kind) for slot in slots.split(",") if slot != NOTHING]
        layouts = ((unit, self._server.units[unit].form.weight_layout) for unit in units)
        return next((unit for unit, layout in layouts if owner in layout.names), None)


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch


def _head(step: Step) -> HeadOfWords:
    assert step.program.facts.head is not None
    return step.program.facts.head
