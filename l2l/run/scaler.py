"""The loss scale of float16 steps, each known once the step before it is."""

from __future__ import annotations

from typing import final

from l2l.parameter_server import LossScale
from l2l.run.step import Step


@final
class Scaler:
    """Gives every float16 step its loss scale, once the step before it is known."""

    def __init__(self) -> None:
        self.scale = LossScale()
        self.unobserved: Step | None = None

    def scale_of(self, step: Step) -> float:
        """The scale of a step; waits for the norms of the one before."""
        if step.witness is not None:
            return step.loss_scale
        previous = self.unobserved
        if previous is not None and previous is not step:
            self.observe()
        return self.scale.value

    def note(self, step: Step) -> None:
        """A step that trains was submitted."""
        self.unobserved = step

    def observe(self) -> None:
        """Learn how the last step went; waits for its norms."""
        previous, self.unobserved = self.unobserved, None
        if previous is not None:
            for event in (previous.drained, previous.collected):
                if event is not None:
                    event.synchronize()
            self.scale.observe(finite=previous.is_finite())
