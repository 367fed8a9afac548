"""What a step tells about itself. Reading a number may wait for the device."""

from __future__ import annotations

import math
from typing import final

from typing_extensions import override

from l2l.run.skips import say_if_skipped
from l2l.run.step import Step


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
        """The global norm of the gradients before clipping; 0 if nothing is trained."""
        self._synchronize()
        return self._step.gradient_norm() if self._has_gradients else 0.0

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that ran."""
        return self._step.layers

    @property
    def layer_norms(self) -> dict[int, float]:
        """The norm of the gradient of every layer that ran and is trained, before clipping."""
        self._synchronize()
        return self._step.layer_norms() if self._has_gradients else {}

    @property
    def update_norms(self) -> dict[int, float]:
        """How far this step has moved the weights of every layer: the norm of the change.

        Of updates on the host that are done; with clipping they are done in the next step.
        """
        found = dict(self._step.changes)
        return {int(u[1:]): math.sqrt(found[u]) for u in sorted(found) if u.startswith("L")}

    @property
    def num_tokens(self) -> int:
        """Positions that passed the layers, padding included."""
        return self._step.num_tokens + self._step.num_tokens_elsewhere

    @property
    def compiled(self) -> bool | None:
        """Whether what of the layers is to be compiled was; None: nothing is to be.

        With `Execution(compile_ahead="background")` first steps run layers as they are.
        """
        return None if not self._step.compiles else not self._step.waited_for_compiler

    @property
    def skipped(self) -> bool:
        """Whether the weights were left alone: something is not finite."""
        return self.skip_reason is not None

    @property
    def skip_reason(self) -> str | None:
        """Why the weights were left alone: a loss that is not finite, or a gradient.

        A gradient where the whole of it is known before the first update: with clipping, in
        float16, with `nonfinite="skip"`. Elsewhere it is an error.
        """
        if self._step.checks_norms:
            self._synchronize()
        assert self._step.reported is not None
        self._step.reported.synchronize()
        return say_if_skipped(self._step)

    @property
    def loss_scale(self) -> float:
        """What the loss was multiplied with; 1 unless the precision is float16."""
        return self._step.loss_scale

    @property
    def _has_gradients(self) -> bool:
        return self._step.drained is not None or self._step.collected is not None

    def _synchronize(self) -> None:
        for event in (self._step.drained, self._step.collected):
            if event is not None:
                event.synchronize()

    @override
    def __repr__(self) -> str:
        return (
            f"StepReport(loss={self.loss:.6g}, gradient_norm={self.gradient_norm:.6g}, "
            f"num_tokens={self.num_tokens}, skipped={self.skipped})"
        )
