"""Steps that left the weights alone because something was not finite.

Each is said once, as soon as it is known: when its report is read, or when the engine has waited
for it anyway, two steps later. If nothing but such steps was seen, training has not begun, and the
engine waits for the third and stops.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import final

from l2l.device import UpdateFailedError
from l2l.run.step import Step

logger = logging.getLogger("l2l")

MAX_AT_FIRST = 3  # steps that may be skipped before any that is not


def say_if_skipped(step: Step) -> str | None:
    """Why a step was skipped, with a warning the first time; its numbers must be on the host."""
    reason = step.skip_reason()
    if reason is not None and not step.is_said:
        step.is_said = True
        logger.warning("step %d was skipped, nothing is updated: %s.", step.number, reason)
    return reason


@final
class Skips:
    """Watches how steps went."""

    def __init__(self) -> None:
        self._unknown: deque[Step] = deque()
        self._num_skipped = 0
        self._is_begun = False  # whether a step was not skipped
        self._reason = ""

    def begin_anew(self) -> None:
        """Go on from another state."""
        self._unknown.clear()
        self._num_skipped, self._is_begun = 0, False

    def add(self, step: Step) -> None:
        """A step was submitted."""
        self._unknown.append(step)

    def learn(self, last: Step) -> None:
        """A step, and all before it, has ended on the device.

        Raises:
            UpdateFailedError: a gradient was not finite where updates do not wait for that.
        """
        while self._unknown and self._unknown[0].number <= last.number:
            step = self._unknown.popleft()
            for event in (step.reported, step.drained, step.collected):
                if event is not None:
                    event.synchronize()
            self._count(step)

    def learn_all(self) -> None:
        """The same of all steps; waits for them."""
        if self._unknown:
            self.learn(self._unknown[-1])

    def refuse(self) -> None:
        """Refuse to go on if nothing was trained so far; may wait only if that seems so.

        Raises:
            RuntimeError: with why steps were skipped.
        """
        if self._is_begun or self._num_skipped + len(self._unknown) < MAX_AT_FIRST:
            return
        self.learn_all()
        if self._num_skipped < MAX_AT_FIRST:
            return
        number, self._num_skipped = self._num_skipped, 0
        raise RuntimeError(
            f"the first {number} steps were all skipped, the last because {self._reason}. Nothing "
            "was trained, and nothing has changed. Look for NaN in the weights and in the data, "
            "for labels that are out of range, for a learning rate that is too large, and for "
            "a layer or loss that reads weights not on the device (for instance another layer's)."
        )

    def _count(self, step: Step) -> None:
        reason = say_if_skipped(step)
        if reason is None:
            self._is_begun = True
            if not step.checks_norms and not math.isfinite(step.gradient_norm()):
                raise UpdateFailedError(step.bad_news())
        elif step.loss_scale <= 1.0 or not math.isfinite(step.loss()):
            self._num_skipped, self._reason = self._num_skipped + 1, reason
        # Else float16 is looking for its loss scale.
