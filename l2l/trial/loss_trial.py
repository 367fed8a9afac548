"""The loss, tried on a few rows: what it averages over, and whether it may be cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from l2l.device import Device
from l2l.model import (
    IGNORED,
    CutError,
    Head,
    LossFunction,
    Microbatch,
    Partition,
    Rule,
    find_rule,
    move_batch,
    require_loss,
)
from l2l.run import OuterPass, Piece, with_shifted_labels

PROOF_TOLERANCE = 0.02  # of 16-bit losses and gradients
TRIAL_SCALE = 0.5  # a loss is multiplied with something in every step; so it is in the trial


@final
@dataclass(slots=True)
class LossTrial:
    """Runs the model without its layers; all weights around them must be bound."""

    _partition: Partition
    _device: Device
    _outer: OuterPass

    def _hidden(self, batch: Microbatch) -> Tensor:
        """What enters the first layer; here it stands for what leaves the last."""
        hidden = self._partition.prologue(batch).hidden
        assert hidden is not None
        return hidden

    def measure(
        self, function: LossFunction, part: Microbatch, seed: int
    ) -> tuple[float, float, bool]:
        """The user's loss of some rows."""
        self._device.seed(seed)
        part = move_batch(part, self._device.torch_device)
        hidden = self._hidden(part)
        found = function(self._partition.epilogue(part, hidden), part)
        total, weight = found if isinstance(found, tuple) else (found, 1.0)
        return float(total), float(weight), hidden.dtype is torch.float32

    def find_rule(self, trial: Microbatch) -> tuple[Rule, bool]:
        """What the loss averages over, and whether another batch cannot tell more."""
        self._partition.set_training(False)
        function = self._outer.loss_function
        if function is not None:
            found = function(self._partition.epilogue(trial, self._hidden(trial)), trial)
            return (Rule.SUM_AND_WEIGHT if isinstance(found, tuple) else Rule.ROWS), True

        def loss(batch: Microbatch) -> float:
            return float(require_loss(self._partition.epilogue(batch, self._hidden(batch))))

        hidden = self._hidden(trial)
        try:
            return find_rule(trial, loss, is_single=hidden.dtype is torch.float32)
        except IndexError:  # the loss ignores another number than what the trial has put there
            return Rule.UNKNOWN, True

    def pieces_agree(self, trial: Microbatch, rule: Rule) -> bool:
        """Whether the loss, and its gradient, may be taken position by position."""
        labels = trial.get("labels")
        if rule not in (Rule.LABELS, Rule.SHIFTED_LABELS) or self._outer.loss_function:
            return False
        assert isinstance(labels, Tensor)
        self._partition.set_training(False)
        hidden = self._hidden(trial)
        if labels.dim() != 2 or hidden.is_nested or hidden.dim() != 3:
            return False
        length = labels.shape[1]
        if length < 4 or hidden.shape[1] != length:
            return False
        trial = {**trial, "labels": torch.where(labels == IGNORED, 0, labels)}
        whole = trial
        if rule is Rule.SHIFTED_LABELS:
            trial = with_shifted_labels(trial)
        noise = _noise_like(hidden)
        try:
            expected = self._loss_and_gradient(whole, noise)
            total = int((trial["labels"] != IGNORED).sum())
            loss, gradient = torch.zeros(()), torch.zeros_like(noise)
            for row in range(noise.shape[0]):
                for positions in (slice(0, length // 3), slice(length // 3, length)):
                    piece = Piece(slice(row, row + 1), positions)
                    part = piece.cut(trial, length)
                    share = int((part["labels"] != IGNORED).sum()) / total
                    one, own = self._loss_and_gradient(part, piece.of(noise))
                    loss = loss + one.cpu() * share
                    piece.of(gradient).copy_(own * share)
        except Exception:  # the model's code does not take such pieces
            return False
        near = abs(float(loss) - float(expected[0])) <= PROOF_TOLERANCE * abs(float(expected[0]))
        difference = (gradient - expected[1]).float().norm()
        return near and float(difference) <= PROOF_TOLERANCE * float(expected[1].float().norm())

    def putting_off_agrees(self, trial: Microbatch, rule: Rule, matrices: Sequence[Tensor]) -> bool:
        """Whether loss and gradient are the same with logits put off, and any are.

        The gradient of the hidden state shows that of the logits, from which that of the head's
        weight is made too.

        Args:
            trial: a few rows, on the device.
            rule: what the loss averages over.
            matrices: weights that may be the head's.
        """
        if rule is Rule.UNKNOWN or self._outer.loss_function is not None:
            return False
        self._partition.set_training(False)
        hidden = self._hidden(trial)
        noise = _noise_like(hidden)
        used: list[Tensor] = []

        def add(outputs: Tensor, inputs: Tensor) -> None:
            used.append(outputs)

        head = Head(add=add, scale=TRIAL_SCALE, num_rows=5, compiled=False)
        heads = {id(matrix): head for matrix in matrices}
        try:
            expected = self._loss_and_gradient(trial, noise)
            found = self._loss_and_gradient(trial, noise, heads=heads)
        except CutError:
            raise
        except Exception:  # the model's code does something else with its logits
            return False
        return bool(used) and all(map(_close, found, expected))

    def _loss_and_gradient(
        self, batch: Microbatch, hidden: Tensor, *, heads: Mapping[int, Head] | None = None
    ) -> tuple[Tensor, Tensor]:
        leaf = hidden.detach().clone().requires_grad_()
        with torch.enable_grad():
            loss = require_loss(self._outer.run_epilogue(batch, leaf, heads=heads)).float()
            (gradient,) = torch.autograd.grad([loss * TRIAL_SCALE], [leaf])
        return loss.detach(), gradient


def _close(found: Tensor, expected: Tensor) -> bool:
    """Whether two results are the same but for rounding to 16 bits."""
    difference = (found.float() - expected.float()).norm()
    return float(difference) <= PROOF_TOLERANCE * float(expected.float().norm())


def _noise_like(hidden: Tensor) -> Tensor:
    """A hidden state of random numbers, always the same."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(hidden.shape, generator=generator).to(hidden)
