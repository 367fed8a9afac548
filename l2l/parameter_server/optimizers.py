"""The optimizers that work on the host, element by element.

A new one is a class here and a name in `named.OPTIMIZERS`. `state_kinds` and `arithmetic` are
enough for it to train; the native kernel and the device are faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor
from typing_extensions import override

from l2l.parameter_server.optimizer import (
    HostOptimizer,
    Settings,
    StateKind,
    Tensors,
    Update,
)


@final
@dataclass(frozen=True, kw_only=True)
class AdamW(HostOptimizer):
    """AdamW with decoupled weight decay, as `torch.optim.AdamW`.

    With `moments="8bit"` both moments are kept in 8 bits, block by block: 2 bytes a parameter
    instead of 8, at the price of exactness.
    """

    has_halves = True
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    moments: Literal["float32", "8bit"] = "float32"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("lr", "must not be negative", holds=self.lr >= 0)
        self.check("betas", "must lie in [0, 1)", holds=all(0 <= beta < 1 for beta in self.betas))
        self.check("eps", "must not be negative", holds=self.eps >= 0)
        known = self.moments in ("float32", "8bit")
        self.check("moments", "must be 'float32' or '8bit'", holds=known)

    @override
    def state_kinds(self, settings: Settings) -> dict[str, StateKind]:
        if self.moments == "float32":
            return {"exp_avg": StateKind(), "exp_avg_sq": StateKind()}
        return {
            "exp_avg": StateKind(dtype=torch.int8),
            "exp_avg_sq": StateKind(dtype=torch.uint8),
            "exp_avg_unit": StateKind(per_block=True),
            "exp_avg_sq_unit": StateKind(per_block=True),
        }

    @override
    def arithmetic(self, weight: Tensor, gradient: Tensor, update: Update) -> None:
        settings, step = update.settings, update.step
        learning_rate, (beta1, beta2) = settings["lr"], settings["betas"]
        first_moment, second_moment = update.state["exp_avg"], update.state["exp_avg_sq"]
        weight.mul_(1 - learning_rate * settings["weight_decay"])
        first_moment.lerp_(gradient, 1 - beta1)
        second_moment.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        bias_correction1 = 1 - beta1**step
        bias_correction2 = 1 - beta2**step
        denominator = (second_moment.sqrt() / bias_correction2**0.5).add_(settings["eps"])
        weight.addcdiv_(first_moment, denominator, value=-(learning_rate / bias_correction1))

    @override
    def coefficients(self, settings: Settings, step: int) -> dict[str, float]:
        beta1, beta2 = settings["betas"]
        return {
            "decay": 1 - settings["lr"] * settings["weight_decay"],
            "rate": settings["lr"] / (1 - beta1**step),
            "blend_first": 1 - beta1,
            "keep_second": beta2,
            "blend_second": 1 - beta2,
            "root_correction": (1 - beta2**step) ** 0.5,
            "epsilon": settings["eps"],
        }

    @override
    def native_number(self, settings: Settings) -> int:
        return 1 if self.moments == "8bit" else 0

    @staticmethod
    @override
    def on_device(master: Tensor, gradient: Tensor, state: Tensors, numbers: Tensors) -> Tensors:
        first = torch.lerp(state["exp_avg"], gradient, numbers["blend_first"])
        kept = state["exp_avg_sq"] * numbers["keep_second"]
        second = torch.addcmul(kept, gradient * numbers["blend_second"], gradient)
        denominator = second.sqrt() / numbers["root_correction"] + numbers["epsilon"]
        stepped = torch.addcdiv(master * numbers["decay"], first * -numbers["rate"], denominator)
        return {"master": stepped, "exp_avg": first, "exp_avg_sq": second}


@final
@dataclass(frozen=True, kw_only=True)
class SGD(HostOptimizer):
    """Stochastic gradient descent with momentum, as `torch.optim.SGD`."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("lr", "must not be negative", holds=self.lr >= 0)
        self.check("momentum", "must not be negative", holds=self.momentum >= 0)
        may_look_ahead = self.momentum > 0 and self.dampening == 0
        rule = "needs momentum > 0 and dampening = 0"
        self.check("nesterov", rule, holds=may_look_ahead or not self.nesterov)

    @override
    def state_kinds(self, settings: Settings) -> dict[str, StateKind]:
        return {"momentum_buffer": StateKind()} if settings["momentum"] else {}

    @override
    def arithmetic(self, weight: Tensor, gradient: Tensor, update: Update) -> None:
        settings = update.settings
        if settings["weight_decay"]:
            gradient = gradient.add(weight, alpha=settings["weight_decay"])
        if settings["momentum"]:
            momentum = update.state["momentum_buffer"]
            if update.step == 1:
                momentum.copy_(gradient)
            else:
                momentum.mul_(settings["momentum"]).add_(gradient, alpha=1 - settings["dampening"])
            if settings["nesterov"]:
                gradient = gradient.add(momentum, alpha=settings["momentum"])
            else:
                gradient = momentum
        weight.add_(gradient, alpha=-settings["lr"])

    @override
    def coefficients(self, settings: Settings, step: int) -> dict[str, float]:
        return {
            "decay": settings["weight_decay"],
            "rate": settings["lr"],
            "keep_first": settings["momentum"],
            "blend_first": 1 - settings["dampening"],
            "first_step": step == 1,
            "nesterov": settings["nesterov"],
        }

    @override
    def native_number(self, settings: Settings) -> int:
        return 3 if settings["momentum"] else 2

    @staticmethod
    @override
    def on_device(master: Tensor, gradient: Tensor, state: Tensors, numbers: Tensors) -> Tensors:
        # Without decay the weight does not enter: zero times infinity is NaN.
        decayed = torch.where(
            numbers["decay"] != 0, torch.addcmul(gradient, master, numbers["decay"]), gradient
        )
        if "momentum_buffer" not in state:
            return {"master": torch.addcmul(master, decayed, -numbers["rate"])}
        before = state["momentum_buffer"]
        momentum = torch.addcmul(before * numbers["keep_first"], decayed, numbers["blend_first"])
        momentum = torch.where(numbers["first_step"] != 0, decayed, momentum)
        ahead = torch.addcmul(decayed, momentum, numbers["keep_first"])
        ahead = torch.where(numbers["nesterov"] != 0, ahead, momentum)
        # A group without momentum may share its unit with one that has it.
        has_momentum = numbers["keep_first"] != 0
        direction = torch.where(has_momentum, ahead, decayed)
        return {
            "master": torch.addcmul(master, direction, -numbers["rate"]),
            "momentum_buffer": torch.where(has_momentum, momentum, before),
        }


@final
@dataclass(frozen=True, kw_only=True)
class Lion(HostOptimizer):
    """Lion: the sign of an interpolated momentum, with decoupled weight decay."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("lr", "must not be negative", holds=self.lr >= 0)
        self.check("betas", "must lie in [0, 1)", holds=all(0 <= beta < 1 for beta in self.betas))

    @override
    def state_kinds(self, settings: Settings) -> dict[str, StateKind]:
        return {"exp_avg": StateKind()}

    @override
    def arithmetic(self, weight: Tensor, gradient: Tensor, update: Update) -> None:
        settings, momentum = update.settings, update.state["exp_avg"]
        learning_rate, (beta1, beta2) = settings["lr"], settings["betas"]
        weight.mul_(1 - learning_rate * settings["weight_decay"])
        direction = momentum.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
        weight.add_(direction, alpha=-learning_rate)
        momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)

    @override
    def coefficients(self, settings: Settings, step: int) -> dict[str, float]:
        beta1, beta2 = settings["betas"]
        return {
            "decay": 1 - settings["lr"] * settings["weight_decay"],
            "rate": settings["lr"],
            "keep_first": beta1,
            "blend_first": 1 - beta1,
            "keep_second": beta2,
            "blend_second": 1 - beta2,
        }

    @override
    def native_number(self, settings: Settings) -> int:
        return 4

    @staticmethod
    @override
    def on_device(master: Tensor, gradient: Tensor, state: Tensors, numbers: Tensors) -> Tensors:
        momentum = state["exp_avg"]
        mixed = torch.addcmul(momentum * numbers["keep_first"], gradient, numbers["blend_first"])
        later = torch.addcmul(momentum * numbers["keep_second"], gradient, numbers["blend_second"])
        stepped = torch.addcmul(master * numbers["decay"], mixed.sign(), -numbers["rate"])
        return {"master": stepped, "exp_avg": later}


@final
@dataclass(frozen=True, kw_only=True)
class ScheduleFreeAdamW(HostOptimizer):
    """AdamW without a schedule of learning rates, as `schedulefree.AdamWScheduleFree`.

    Gradients are of weights y between the iterates z, which step as AdamW's do but for the first
    moment, and their mean x: `y = (1 - beta1) z + beta1 x`. The mean is what is evaluated and
    exported, in `engine.averaged()`. Each step has the weight of its squared learning rate in it.

    Kept are y, as the weight, and x, as its mean; `z = x + (y - x) / (1 - beta1)`. So means and
    weights change places without a trace. Of an iterate so found the last bits are lost, as many
    as `1 / (1 - beta1)` has.
    """

    lr: float = 2.5e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("lr", "must not be negative", holds=self.lr >= 0)
        self.check("betas", "must lie in [0, 1)", holds=all(0 <= beta < 1 for beta in self.betas))
        self.check("eps", "must not be negative", holds=self.eps >= 0)
        self.check("warmup_steps", "must not be negative", holds=self.warmup_steps >= 0)
        self.check("average", "must be None: it keeps a mean as it is", holds=self.average is None)

    @property
    @override
    def keeps_means(self) -> bool:
        return True

    @override
    def state_kinds(self, settings: Settings) -> dict[str, StateKind]:
        return {"average": StateKind(), "exp_avg_sq": StateKind()}

    @staticmethod
    def share(step: int, warmup_steps: int) -> float:
        """What of the mean is the iterate after a step: its squared rate, of all until then.

        Rates rise evenly in the warm-up and stay as they are from then on.
        """
        if step <= warmup_steps:
            return 6 * step / ((step + 1) * (2 * step + 1))
        rising = (warmup_steps + 1) * (2 * warmup_steps + 1) / (6 * max(1, warmup_steps))
        return 1 / (step - warmup_steps + (rising if warmup_steps else 0.0))

    @override
    def arithmetic(self, weight: Tensor, gradient: Tensor, update: Update) -> None:
        settings, step, mean = update.settings, update.step, update.state["average"]
        (beta1, beta2), second_moment = settings["betas"], update.state["exp_avg_sq"]
        rate = settings["lr"] * min(1.0, step / max(1, settings["warmup_steps"]))
        if step == 1:
            mean.copy_(weight)
        second_moment.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (second_moment.sqrt() / (1 - beta2**step) ** 0.5).add_(settings["eps"])
        iterate = mean + (weight - mean) / (1 - beta1)
        iterate.addcdiv_(gradient, denominator, value=-rate)
        iterate.add_(weight, alpha=-rate * settings["weight_decay"])
        mean.add_(iterate - mean, alpha=self.share(step, settings["warmup_steps"]))
        weight.copy_(mean).add_(iterate - mean, alpha=1 - beta1)

    @override
    def coefficients(self, settings: Settings, step: int) -> dict[str, float]:
        beta1, beta2 = settings["betas"]
        rate = settings["lr"] * min(1.0, step / max(1, settings["warmup_steps"]))
        return {
            "decay": rate * settings["weight_decay"],
            "rate": rate,
            "keep_first": self.share(step, settings["warmup_steps"]),
            "blend_first": 1 - beta1,
            "keep_second": beta2,
            "blend_second": 1 - beta2,
            "root_correction": (1 - beta2**step) ** 0.5,
            "epsilon": settings["eps"],
            "first_step": step == 1,
        }

    @override
    def native_number(self, settings: Settings) -> int:
        return 9

    @staticmethod
    @override
    def on_device(master: Tensor, gradient: Tensor, state: Tensors, numbers: Tensors) -> Tensors:
        mean = torch.where(numbers["first_step"] != 0, master, state["average"])
        iterate = torch.addcdiv(mean, master - mean, numbers["blend_first"])
        iterate = torch.addcmul(iterate, master, -numbers["decay"])
        second = state["exp_avg_sq"] * numbers["keep_second"]
        second = torch.addcmul(second, gradient * numbers["blend_second"], gradient)
        denominator = second.sqrt() / numbers["root_correction"] + numbers["epsilon"]
        iterate = torch.addcdiv(iterate, gradient * -numbers["rate"], denominator)
        later = torch.addcmul(mean, iterate - mean, numbers["keep_first"])
        stepped = torch.addcmul(later, iterate - later, numbers["blend_first"])
        return {"master": stepped, "average": later, "exp_avg_sq": second}


@final
@dataclass(frozen=True, kw_only=True)
class RecordGradients(HostOptimizer):
    """Keeps the gradients of the last step in `gradients` and leaves the weights alone."""

    gradients: dict[str, Tensor] = field(default_factory=dict)

    @property
    @override
    def defaults(self) -> dict[str, Any]:
        return {"lr": 0.0}

    @override
    def state_kinds(self, settings: Settings) -> dict[str, StateKind]:
        return {}

    @override
    def arithmetic(self, weight: Tensor, gradient: Tensor, update: Update) -> None:
        self.gradients[update.name] = gradient.view(update.shape).clone()
