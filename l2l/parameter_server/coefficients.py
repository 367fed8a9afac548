"""The numbers of one update of an optimizer, and the coefficients that follow from them.

Both the native kernel and updates on the device take coefficients: reckoned here in float64, and
rounded to float32 once, there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from l2l.parameter_server.eight_bit import rounding_seed


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWUpdate:
    """The numbers of one AdamW update, under torch's names."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    """1 at the first update."""
    factor: float = 1.0
    """Multiplies the gradient first: clipping, the inverse of a loss scale."""
    seed: int = 0
    """Rounding of 8-bit moments follows from it and `step`; differ it by layer."""

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step must be 1 at the first update, found {self.step}")

    def coefficients(self) -> dict[str, float]:
        """By the names of the native kernel."""
        beta1, beta2 = self.betas
        return {
            "factor": self.factor,
            "decay": 1 - self.lr * self.weight_decay,
            "rate": self.lr / (1 - beta1**self.step),
            "blend_first": 1 - beta1,
            "keep_second": beta2,
            "blend_second": 1 - beta2,
            "root_correction": (1 - beta2**self.step) ** 0.5,
            "epsilon": self.eps,
            "seed": rounding_seed(self.seed, step=self.step),
        }


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SGDUpdate:
    """The numbers of one update by gradient descent, under torch's names."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    step: int
    """1 at the first update, which takes the gradient for the momentum."""
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step must be 1 at the first update, found {self.step}")

    def coefficients(self) -> dict[str, float]:
        """By the names of the native kernel."""
        return {
            "factor": self.factor,
            "decay": self.weight_decay,
            "rate": self.lr,
            "keep_first": self.momentum,
            "blend_first": 1 - self.dampening,
            "first_step": self.step == 1,
            "nesterov": self.nesterov,
        }


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LionUpdate:
    """The numbers of one Lion update."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    factor: float = 1.0

    def coefficients(self) -> dict[str, float]:
        """By the names of the native kernel."""
        beta1, beta2 = self.betas
        return {
            "factor": self.factor,
            "decay": 1 - self.lr * self.weight_decay,
            "rate": self.lr,
            "keep_first": beta1,
            "blend_first": 1 - beta1,
            "keep_second": beta2,
            "blend_second": 1 - beta2,
        }


Numbers = AdamWUpdate | SGDUpdate | LionUpdate
