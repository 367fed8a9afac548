"""Adafactor, updated on the device: 2 bytes a parameter in the host and nothing else.

The second moment is factored into row and column means, there is no first moment, and the update
is clipped per tensor: the arithmetic and the argument names of `torch.optim.Adafactor`. So little
state rides in the unit's flat buffer beside the weights: it is fetched with them, and after the
update in the slot both are copied back ([Note: device updates] in schedule/). No gradient leaves
the device, which is why clipping by the global norm is impossible: when the norm is known, the
gradients are gone.

There is no float32 master. A bfloat16 weight is rounded *stochastically*: up or down with the
probability that makes the expected value right, from random numbers that depend on (seed, step,
unit) alone. Small updates are then not lost, as they would be in rounding to nearest.

Everything is a tensor on the device, the count of steps too: a step whose loss is not finite leaves
weights and state as they were, without the host having to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from l2l.parameter_server.optimizer import Optimizer, Settings

REVISED_PIECE = 1 << 23  # elements updated at once
REVISED_BYTES = 24  # for each of them, and what rounding takes


@final
@dataclass(frozen=True, kw_only=True)
class Adafactor(Optimizer):
    """Adafactor as `torch.optim.Adafactor`, on the device."""

    lr: float = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float | None, float] = (None, 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        self.check("lr", "must not be negative", holds=self.lr >= 0)
        self.check("beta2_decay", "must not be above 0", holds=self.beta2_decay <= 0)
        self.check("d", "must be at least 1", holds=self.d >= 1)

    @staticmethod
    def state_shapes(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Float32 tensors kept for a parameter of this shape, under torch's names."""
        if len(shape) < 2:
            return {"step": (), "variance": shape}
        rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
        return {"step": (), "row_var": rows, "col_var": columns}

    def revise(
        self,
        weight: Tensor,
        gradient: Tensor,  # float32, used up
        state: Mapping[str, Tensor],
        *,
        settings: Settings,
        finite: Tensor,  # bool, on the device: whether this step counts
        generator: torch.Generator,
    ) -> None:
        """Update a weight and its state in place, unless the step does not count.

        The gradient is used up: its memory holds the change. All else is done some rows at a time,
        so that the largest matrix of a model needs no more memory than a small one.
        """
        eps1 = settings["eps"][0]
        eps1 = torch.finfo(torch.float32).eps if eps1 is None else eps1
        step = state["step"] + 1
        blend = step.pow(settings["beta2_decay"])
        rho = torch.clamp(step.rsqrt(), max=float(settings["lr"]))
        pieces = pieces_of(weight)
        norms = [weight[piece].float().norm(2) for piece in pieces]
        norm = norms[0] if len(norms) == 1 else torch.stack(norms).norm(2)
        alpha = (norm / weight.numel() ** 0.5).clamp(min=settings["eps"][1]) * rho
        fresh = _moments(gradient, state, blend)
        for piece in pieces:
            variance = _estimate(fresh, piece, eps1)
            gradient[piece].mul_(variance.clamp_(min=eps1 * eps1).rsqrt_())
        size = gradient.norm(2) / (gradient.numel() ** 0.5 * settings["d"])
        factor = alpha / size.clamp(min=1.0)
        for piece in pieces:
            master = weight[piece].float()
            if settings["weight_decay"]:
                master = master * (1 - float(settings["lr"]) * settings["weight_decay"])
            changed = master - gradient[piece].mul_(factor)
            store(weight[piece], changed, finite=finite, generator=generator)
        for name, value in {**fresh, "step": step}.items():
            state[name].copy_(torch.where(finite, value, state[name]))


def pieces_of(weight: Tensor) -> list[Any]:
    """Indices of some rows each."""
    if not weight.dim():
        return [...]
    rows = max(1, REVISED_PIECE * weight.size(0) // max(1, weight.numel()))
    return [slice(start, start + rows) for start in range(0, weight.size(0), rows)]


def _moments(gradient: Tensor, state: Mapping[str, Tensor], blend: Tensor) -> dict[str, Tensor]:
    """The next second moment, as it is kept."""
    if gradient.dim() < 2:
        return {"variance": torch.lerp(state["variance"], gradient.square(), blend)}
    row_mean = gradient.norm(dim=-1, keepdim=True).square_().div_(gradient.size(-1))
    column_mean = gradient.norm(dim=-2, keepdim=True).square_().div_(gradient.size(-2))
    return {
        "row_var": torch.lerp(state["row_var"], row_mean, blend),
        "col_var": torch.lerp(state["col_var"], column_mean, blend),
    }


def _estimate(moments: Mapping[str, Tensor], piece: Any, eps1: float) -> Tensor:
    """The second moment of every element of some rows."""
    if "variance" in moments:
        return moments["variance"][piece].clone()
    row, column = moments["row_var"], moments["col_var"]
    mean = row.mean(dim=-2, keepdim=True).clamp_(min=eps1)
    if row.dim() > 2:  # rows are matrices
        column, mean = column[piece], mean[piece]
    estimate: Tensor = row[piece] @ column
    return estimate.div_(mean)


def store(weight: Tensor, master: Tensor, *, finite: Tensor, generator: torch.Generator) -> None:
    """Write a float32 value into a weight, rounded stochastically if that is bfloat16."""
    if weight.dtype is torch.bfloat16:
        bits = master.view(torch.int32)
        noise = torch.randint(
            0, 1 << 16, bits.shape, generator=generator, device=bits.device, dtype=torch.int32
        )
        # Adding up to 65,535 to the lower half carries into the upper with the right probability.
        # An infinity or NaN must not be carried into something else.
        rounded = torch.where(master.isfinite(), bits + noise, bits) & -65536
        master = rounded.view(torch.float32)
    weight.copy_(torch.where(finite, master.to(weight.dtype), weight))
