"""Optimizers that run in the parameter server.

These are *descriptions*: frozen, with torch's argument names, handed to `Engine`. Each says what is
kept per parameter and how one parameter is updated, twice:

- `arithmetic` is written to be read: operation for operation that of `torch.optim` with
  `foreach=False`, so it gives the same bits. It is the oracle of the native kernel, and the path
  taken when that was not built.
- `native` does the same in one pass over memory with the native kernel (host_kernel.py).

Where a parameter's weight is bfloat16 on the link, both work on the float32 master that it and its
remainder are ([Note: split master] in precision.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from l2l.parameter_server import operands
from l2l.parameter_server.coefficients import AdamWUpdate, LionUpdate, Numbers, SGDUpdate
from l2l.parameter_server.eight_bit import BLOCK_SIZE, num_blocks, rounding_seed
from l2l.parameter_server.host_kernel import Half, HostKernel
from l2l.parameter_server.precision import join_master, split_master

Settings = Mapping[str, Any]
Groups = Callable[[str, nn.Parameter], Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKind:
    """A tensor that an optimizer keeps for every parameter."""

    dtype: torch.dtype = torch.float32
    per_block: bool = False  # one entry for every block of `eight_bit.BLOCK_SIZE` elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One parameter, flat, with everything that its update needs."""

    name: str
    shape: tuple[int, ...]
    weight: Tensor  # in the link dtype
    companion: Tensor | None  # int16 remainder of a bfloat16 weight, float32 master of a float16
    gradient: Tensor
    state: Mapping[str, Tensor]
    position: int  # in elements, in the unit's flat buffer
    step: int  # 1 at the first update
    settings: Settings
    factor: float  # what the gradient is multiplied with
    seed: int  # of rounding
    ranges: Tensor | None = None  # the only elements to update (`operands.checked_ranges`)
    half: Half | None = None  # what alone changes, if the optimizer has halves

    def own_numbers(self) -> dict[str, Any]:
        """What `HostOptimizer.numbers` asks for."""
        names = ("settings", "step", "factor", "seed")
        return {name: getattr(self, name) for name in names}

    def native_weight(self) -> operands.Weight:
        """The weight as the native kernel takes it."""
        if self.weight.dtype is torch.float32:
            return operands.Float32Weight(weight=self.weight)
        assert self.companion is not None
        if self.weight.dtype is torch.bfloat16:
            return operands.SplitWeight(weight=self.weight, remainder=self.companion)
        return operands.Float16Weight(weight=self.weight, master=self.companion)

    def master(self) -> Tensor:
        """A copy of the weight as it is known in float32."""
        if self.weight.dtype is torch.bfloat16 and self.companion is not None:
            return join_master(self.weight, self.companion)
        known = self.weight if self.companion is None else self.companion
        return known.to(torch.float32, copy=True)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What all optimizers have: settings by parameter group."""

    groups: Groups | None = None
    """(name, parameter) -> what differs for it, such as `{"weight_decay": 0.0}`; or None."""

    @property
    def defaults(self) -> dict[str, Any]:
        """Settings of a parameter for which `groups` says nothing, under torch's names."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in found.items()
            if name not in ("groups", "moments")
        }


@dataclass(frozen=True, kw_only=True)
class HostOptimizer(Optimizer, ABC):
    """An optimizer whose state and arithmetic are on the host."""

    may_prepare: ClassVar[bool] = False
    """Whether native updates of the same memory differ in their numbers only."""
    has_halves: ClassVar[bool] = False
    """Whether weights can be updated first, and moments later from the same gradient."""

    @abstractmethod
    def state_kinds(self, settings: Settings) -> dict[str, StateKind]:
        """What is kept per parameter, under torch's names."""

    @abstractmethod
    def arithmetic(self, weight: Tensor, gradient: Tensor, update: Update) -> None:
        """Update a float32 weight in place from its float32 gradient, readably."""

    @abstractmethod
    def native(self, kernel: HostKernel, update: Update, *, num_threads: int) -> None:
        """The same update with the native kernel, which may do it later: give it no new tensors.

        The size of a change is known only where the kernel makes it.
        """

    def numbers(self, settings: Settings, *, step: int, factor: float, seed: int) -> Numbers | None:
        """The numbers of an update; None if it has none."""
        return None

    def readable(self, update: Update) -> None:
        """The same update in PyTorch: join the master, do the arithmetic, split it again."""
        if update.ranges is not None or update.half is not None:
            self._readable_part(update)
            return
        gradient = update.gradient.to(torch.float32)
        if update.factor != 1.0:
            gradient = gradient * update.factor
        if update.weight.dtype is torch.float32:
            self.arithmetic(update.weight, gradient, update)
            return
        assert update.companion is not None
        if update.weight.dtype is torch.bfloat16:
            master = join_master(update.weight, update.companion)
            self.arithmetic(master, gradient, update)
            split_master(master, update.weight, update.companion)
        else:
            self.arithmetic(update.companion, gradient, update)
            update.weight.copy_(update.companion)

    def _readable_part(self, update: Update) -> None:
        """Update a copy of everything and keep what lies in the ranges, and in the half.

        Arithmetic on parts of tensors would be cheaper, but torch does not promise the same bits:
        it may round differently in a vector loop and in the loop over what that leaves.
        """
        numel = update.weight.numel()
        ranges = torch.tensor([[0, numel]]) if update.ranges is None else update.ranges
        edges = torch.zeros(num_blocks(numel) + 1, dtype=torch.int64)
        begins, ends = operands.checked_ranges(ranges, numel=numel).unbind(1)
        one = torch.ones_like(begins)
        edges.index_add_(0, begins // BLOCK_SIZE, one)
        edges.index_add_(0, -(-ends // BLOCK_SIZE), -one)
        blocks = edges.cumsum(0)[:-1] > 0
        elements = blocks.repeat_interleave(BLOCK_SIZE)[:numel]
        copy = replace(
            update,
            ranges=None,
            half=None,
            weight=update.weight.clone(),
            companion=None if update.companion is None else update.companion.clone(),
            state={name: tensor.clone() for name, tensor in update.state.items()},
        )
        self.readable(copy)
        pairs: list[tuple[Tensor, Tensor]] = []
        if update.half != "weights":
            pairs += [(tensor, copy.state[name]) for name, tensor in update.state.items()]
        if update.half != "moments":
            pairs.append((update.weight, copy.weight))
            if update.companion is not None and copy.companion is not None:
                pairs.append((update.companion, copy.companion))
        for kept, updated in pairs:
            chosen = elements if kept.numel() == numel else blocks
            kept[chosen] = updated[chosen]


def check(condition: bool, message: str) -> None:  # noqa: FBT001 (a guard reads best this way)
    """Refuse settings.

    Raises:
        ValueError: the condition does not hold.
    """
    if not condition:
        raise ValueError(message)


@final
@dataclass(frozen=True, kw_only=True)
class AdamW(HostOptimizer):
    """AdamW with decoupled weight decay, as `torch.optim.AdamW`.

    With `moments="8bit"` both moments are kept in 8 bits, block by block: 2 bytes a parameter
    instead of 8, at the price of exactness.
    """

    may_prepare = has_halves = True
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    moments: Literal["float32", "8bit"] = "float32"

    def __post_init__(self) -> None:
        check(self.lr >= 0, f"AdamW: lr must not be negative, found {self.lr}")
        check(
            all(0 <= beta < 1 for beta in self.betas),
            f"AdamW: betas must lie in [0, 1), found {self.betas}",
        )
        check(self.eps >= 0, f"AdamW: eps must not be negative, found {self.eps}")
        check(
            self.moments in ("float32", "8bit"),
            f"AdamW: moments must be 'float32' or '8bit', found {self.moments!r}",
        )

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
        learning_rate, (beta1, beta2) = float(settings["lr"]), settings["betas"]
        if self.moments == "8bit":
            eight_bit = self._eight_bit(update)
            first_moment, root = eight_bit.decode()
            second_moment = root.square()
        else:
            first_moment, second_moment = update.state["exp_avg"], update.state["exp_avg_sq"]
        weight.mul_(1 - learning_rate * settings["weight_decay"])
        first_moment.lerp_(gradient, 1 - beta1)
        second_moment.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        bias_correction1 = 1 - beta1**step
        bias_correction2 = 1 - beta2**step
        denominator = (second_moment.sqrt() / bias_correction2**0.5).add_(settings["eps"])
        weight.addcdiv_(first_moment, denominator, value=-(learning_rate / bias_correction1))
        if self.moments == "8bit":
            seed = rounding_seed(update.seed, step=step)
            eight_bit.encode(first_moment, second_moment.sqrt(), seed=seed)

    @override
    def numbers(self, settings: Settings, *, step: int, factor: float, seed: int) -> AdamWUpdate:
        return AdamWUpdate(
            lr=float(settings["lr"]),
            betas=settings["betas"],
            eps=settings["eps"],
            weight_decay=settings["weight_decay"],
            step=step,
            factor=factor,
            seed=seed,
        )

    @override
    def native(self, kernel: HostKernel, update: Update, *, num_threads: int) -> None:
        kernel.adamw(
            self.numbers(**update.own_numbers()),
            weight=update.native_weight(),
            gradient=update.gradient,
            moments=self._eight_bit(update)
            if self.moments == "8bit"
            else operands.Moments(first=update.state["exp_avg"], second=update.state["exp_avg_sq"]),
            num_threads=num_threads,
            ranges=update.ranges,
            half=update.half,
        )

    @staticmethod
    def _eight_bit(update: Update) -> operands.EightBitMoments:
        return operands.EightBitMoments(
            first=update.state["exp_avg"],
            second=update.state["exp_avg_sq"],
            first_unit=update.state["exp_avg_unit"],
            second_unit=update.state["exp_avg_sq_unit"],
            position=update.position,
        )


@final
@dataclass(frozen=True, kw_only=True)
class SGD(HostOptimizer):
    """Stochastic gradient descent with momentum, as `torch.optim.SGD`."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check(self.lr >= 0, f"SGD: lr must not be negative, found {self.lr}")
        check(self.momentum >= 0, f"SGD: momentum must not be negative, found {self.momentum}")
        check(
            not self.nesterov or (self.momentum > 0 and self.dampening == 0),
            "SGD: nesterov needs momentum > 0 and dampening = 0",
        )

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
        weight.add_(gradient, alpha=-float(settings["lr"]))

    @override
    def numbers(self, settings: Settings, *, step: int, factor: float, seed: int) -> SGDUpdate:
        return SGDUpdate(
            lr=float(settings["lr"]),
            momentum=settings["momentum"],
            dampening=settings["dampening"],
            weight_decay=settings["weight_decay"],
            nesterov=settings["nesterov"],
            step=step,
            factor=factor,
        )

    @override
    def native(self, kernel: HostKernel, update: Update, *, num_threads: int) -> None:
        numbers = self.numbers(**update.own_numbers())
        kernel.sgd(
            numbers,
            weight=update.native_weight(),
            gradient=update.gradient,
            momentum=update.state["momentum_buffer"] if numbers.momentum else None,
            num_threads=num_threads,
            ranges=update.ranges,
        )


@final
@dataclass(frozen=True, kw_only=True)
class Lion(HostOptimizer):
    """Lion: the sign of an interpolated momentum, with decoupled weight decay."""

    may_prepare = True
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check(self.lr >= 0, f"Lion: lr must not be negative, found {self.lr}")
        check(
            all(0 <= beta < 1 for beta in self.betas),
            f"Lion: betas must lie in [0, 1), found {self.betas}",
        )

    @override
    def state_kinds(self, settings: Settings) -> dict[str, StateKind]:
        return {"exp_avg": StateKind()}

    @override
    def arithmetic(self, weight: Tensor, gradient: Tensor, update: Update) -> None:
        settings, momentum = update.settings, update.state["exp_avg"]
        learning_rate, (beta1, beta2) = float(settings["lr"]), settings["betas"]
        weight.mul_(1 - learning_rate * settings["weight_decay"])
        direction = momentum.mul(beta1).add_(gradient, alpha=1 - beta1).sign_()
        weight.add_(direction, alpha=-learning_rate)
        momentum.mul_(beta2).add_(gradient, alpha=1 - beta2)

    @override
    def numbers(self, settings: Settings, *, step: int, factor: float, seed: int) -> LionUpdate:
        return LionUpdate(
            lr=float(settings["lr"]),
            betas=settings["betas"],
            weight_decay=settings["weight_decay"],
            factor=factor,
        )

    @override
    def native(self, kernel: HostKernel, update: Update, *, num_threads: int) -> None:
        kernel.lion(
            self.numbers(**update.own_numbers()),
            weight=update.native_weight(),
            gradient=update.gradient,
            momentum=update.state["exp_avg"],
            num_threads=num_threads,
            ranges=update.ranges,
        )


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

    @override
    def readable(self, update: Update) -> None:
        super().readable(replace(update, ranges=None))

    @override
    def native(self, kernel: HostKernel, update: Update, *, num_threads: int) -> None:
        self.readable(update)
