"""What a step tells about itself. Reading a number may wait for the device."""

from __future__ import annotations

import math
from typing import final

from typing_extensions import override

from l2l.relay import Step


@final
class StepReport:
    """The results of one `engine.step`; every property is lazy."""

    def __init__(self, step: Step) -> None:
        self._step = step

    @property
    def loss(self) -> float:
        """The loss of the whole batch."""
        assert self._step.reported is not None
        self._step.reported.synchronize()
        return self._step.loss()

    @property
    def gradient_norm(self) -> float:
        """The global norm of the gradients before clipping.

        It is 0 if no gradient left the device: nothing is trained, or the optimizer is there.
        """
        if self._step.drained is None:
            return 0.0
        self._step.drained.synchronize()
        return self._step.gradient_norm()

    @property
    def num_tokens(self) -> int:
        """Positions that passed the layers, padding included."""
        return self._step.num_tokens

    @property
    def skipped(self) -> bool:
        """Whether the weights were left alone: a loss, or in float16 a gradient, not finite."""
        if self._step.checks_norms and self._step.drained is not None:
            self._step.drained.synchronize()
        return not math.isfinite(self.loss) or not self._step.is_finite()

    @property
    def loss_scale(self) -> float:
        """What the loss was multiplied with; 1 unless the precision is float16."""
        return self._step.loss_scale

    @override
    def __repr__(self) -> str:
        return (
            f"StepReport(loss={self.loss:.6g}, gradient_norm={self.gradient_norm:.6g}, "
            f"num_tokens={self.num_tokens}, skipped={self.skipped})"
        )
