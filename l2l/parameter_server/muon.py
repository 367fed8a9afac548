"""Muon: matrices of layers step along the orthogonal factor of their momentum.

The arithmetic and the arguments are those of `torch.optim.Muon`: a running mean of gradients, which
a few Newton-Schulz iterations in bfloat16 bring near a matrix whose singular values are all 1. That
is for matrices inside a network. Embeddings, heads, norms and biases are updated by another
optimizer; which of both updates a parameter is one of its settings, `use_muon`.

An iteration is three products of matrices: too much for a host. So where layers come to a device,
their updates are done there, with state that is lent, matrix by matrix (`Muon.revise`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from l2l.parameter_server.device_update import store_if
from l2l.parameter_server.eight_bit import cuts
from l2l.parameter_server.forms import UnitForm
from l2l.parameter_server.optimizer import (
    NUMBERS,
    DeviceWork,
    FlatUnit,
    HostOptimizer,
    Optimizer,
    Settings,
    StateKind,
    Update,
)
from l2l.parameter_server.optimizers import SGD, AdamW, Lion
from l2l.parameter_server.precision import master_of

MAX_STEPS = 100  # of Newton-Schulz
PIECE = 1 << 23  # elements of a matrix worked on at once on the device
PIECE_BYTES = 24  # for each of them
RATIOS = ("original", "match_rms_adamw")


@final
@dataclass(frozen=True, kw_only=True)
class Muon(HostOptimizer):
    """Muon as `torch.optim.Muon`, for the matrices of layers; `others` updates everything else.

    With `adjust_lr_fn="match_rms_adamw"` its steps are as large as those of AdamW, whose learning
    rates and decays then are right for it. `groups` may return `use_muon` for a parameter.
    """

    has_halves: ClassVar[bool] = False
    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: str | None = "original"
    others: HostOptimizer = field(default_factory=AdamW)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lr", "weight_decay", "momentum"):
            self.check(name, "must not be negative", holds=getattr(self, name) >= 0)
        self.check("ns_steps", "must lie in [0, 100)", holds=0 <= self.ns_steps < MAX_STEPS)
        known = self.adjust_lr_fn in (None, *RATIOS)
        self.check("adjust_lr_fn", f"must be one of {RATIOS}, or None", holds=known)
        self.check("ns_coefficients", "must be three", holds=len(self.ns_coefficients) == 3)
        is_plain = isinstance(self.others, AdamW | SGD | Lion)
        is_plain &= self.others.groups is None and not self.others.keeps_means
        rule = "must be l2l.AdamW, SGD or Lion, without groups= and average= of its own"
        self.check("others", rule, holds=is_plain)

    @property
    @override
    def defaults(self) -> dict[str, Any]:
        ratio = self.adjust_lr_fn or "original"
        return {**super().defaults, "adjust_lr_fn": ratio, "use_muon": True}

    @override
    def defaults_for(
        self, parameter: nn.Parameter, chosen: Mapping[str, Any], *, in_layer: bool
    ) -> dict[str, Any]:
        if not chosen.get("use_muon", in_layer and parameter.dim() == 2):
            return {**self.others.defaults, "use_muon": False}
        if parameter.dim() != 2:
            shape = tuple(parameter.shape)
            raise ValueError(f"use_muon is for matrices, found a parameter of shape {shape}")
        return self.defaults

    @property
    @override
    def is_by_parameter(self) -> bool:
        return True

    @override
    def one_for(self, settings: Settings) -> HostOptimizer:
        return self if settings["use_muon"] else self.others

    @override
    def needs_whole(self, settings: Settings) -> bool:
        return bool(settings["use_muon"])

    @property
    @override
    def may_run_on_device(self) -> bool:
        return self.average is None and self.others.may_run_on_device

    @override
    def state_kinds(self, settings: Settings) -> dict[str, StateKind]:
        if not settings["use_muon"]:
            return self.others.state_kinds(settings)
        return {"momentum_buffer": StateKind()}

    @override
    def native_number(self, settings: Settings) -> int | None:
        return None if settings["use_muon"] else self.others.native_number(settings)

    @override
    def coefficients(self, settings: Settings, step: int) -> dict[str, float]:
        if not settings["use_muon"]:
            return self.others.coefficients(settings, step)
        return {
            "decay": 1 - settings["lr"] * settings["weight_decay"],
            "rate": settings["lr"],
            "keep_first": settings["momentum"],
            "blend_first": 1 - settings["momentum"],
        }

    @override
    def arithmetic(self, weight: Tensor, gradient: Tensor, update: Update) -> None:
        settings = update.settings
        if not settings["use_muon"]:
            self.others.arithmetic(weight, gradient, update)
            return
        momentum, keep = update.state["momentum_buffer"], settings["momentum"]
        momentum.lerp_(gradient, 1 - keep)
        ahead = gradient.lerp(momentum, keep) if settings["nesterov"] else momentum
        direction = orthogonal(ahead.view(update.shape).to(torch.bfloat16, copy=True), settings)
        weight.mul_(1 - settings["lr"] * settings["weight_decay"])
        rate = settings["lr"] * ratio_of(settings, update.shape)
        weight.view(update.shape).add_(direction, alpha=-rate)

    @override
    def device_work(self, settings: Settings, shape: tuple[int, ...]) -> DeviceWork:
        if not settings["use_muon"]:
            return DeviceWork()
        if len(shape) != 2:
            raise ValueError(f"Muon updates matrices, found a parameter of shape {shape}.")
        short, long = sorted(shape)
        products = 4.0 * short * short * long + 2.0 * short**3  # of one iteration
        # The matrix before and after an iteration and as it was, and what lies between, in 16 bits.
        matrices = 2 * (3 * short * long + 3 * short * short)
        return DeviceWork(
            matrix_flops=settings["ns_steps"] * products,
            working_bytes=matrices + PIECE_BYTES * min(PIECE, short * long),
        )

    @staticmethod
    def revise(
        unit: FlatUnit, shape: tuple[int, ...], numbers: Tensor, *, settings: Settings
    ) -> None:
        """The update of a whole matrix on the device, in place, unless the step does not count.

        All that is done element by element is done some at a time, so that little lies between.

        Args:
            unit: The matrix, with its gradient and its momentum.
            shape: Of the matrix.
            numbers: As for `device_update.update`.
            settings: What no number says.
        """
        named = dict(zip(NUMBERS, numbers.unbind(), strict=True))
        counts, momentum = named["apply"] != 0, unit.state["momentum_buffer"]
        matrix = torch.empty(shape, dtype=torch.bfloat16, device=unit.weight.device)
        for span in cuts(matrix.numel(), PIECE):
            gradient = unit.gradient[span].to(torch.float32) * named["factor"]
            later = torch.lerp(momentum[span], gradient, named["blend_first"])
            ahead = torch.lerp(gradient, later, named["keep_first"])
            matrix.view(-1)[span].copy_(ahead if settings["nesterov"] else later)
            momentum[span].copy_(torch.where(counts, later, momentum[span]))
        direction = orthogonal(matrix, settings).reshape(-1)
        rate = named["rate"] * ratio_of(settings, shape)
        for span in cuts(matrix.numel(), PIECE):
            part = unit.cut(span.start, span.stop)
            master = master_of(part.weight, part.companion) * named["decay"]
            step = direction[span].to(torch.float32)
            store_if(counts, torch.addcmul(master, step, -rate), part)


def divided(
    optimizer: Optimizer,
    settings: Mapping[str, Settings],
    forms: Iterable[UnitForm],
) -> tuple[tuple[str, str], ...]:
    """A line for a plan: which parameters are updated how; nothing if that is not divided."""
    if not isinstance(optimizer, Muon):
        return ()
    shapes = {owner: shape for form in forms for owner, shape in form.trained.shapes().items()}
    own = [math.prod(shapes[name]) for name, one in settings.items() if one["use_muon"]]
    rest = sum(map(math.prod, shapes.values())) - sum(own)
    words = f"{len(own):,} matrices with {sum(own):,} parameters, {optimizer.others.name} {rest:,}"
    return (("muon", words),)


def orthogonal(matrix: Tensor, settings: Settings) -> Tensor:
    """A matrix near the closest one with orthogonal rows or columns: singular values of about 1.

    The matrix, in bfloat16, is overwritten.
    """
    first, second, third = settings["ns_coefficients"]
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if is_tall else matrix
    found.div_(found.norm().clamp(min=settings["eps"]))
    for _ in range(settings["ns_steps"]):
        product = found @ found.T
        polynomial = torch.addmm(product, product, product, beta=second, alpha=third)
        found = torch.addmm(found, polynomial, found, beta=first)
    return found.T if is_tall else found


def ratio_of(settings: Mapping[str, Any], shape: tuple[int, ...]) -> float:
    """By what the learning rate of a matrix differs."""
    rows, columns = shape
    if settings["adjust_lr_fn"] == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
