"""Optimizers that run in the parameter server, and the face they show to PyTorch.

`AdamW` and `SGD` here are *descriptions*: frozen, with torch's argument names, handed to `Engine`.
Their `update` is the arithmetic of one parameter's step, written to be read: operation for
operation that of `torch.optim` with `foreach=False`, so it gives the same bits. It stays as the
oracle of the native kernel and as the path taken when that was not built.

`ServerOptimizer` is what `engine.optimizer` returns: a `torch.optim.Optimizer` with `param_groups`
that any learning-rate scheduler can drive. The numbers of a step are read from it when the step
begins (`settings`), so a scheduler may run while updates of the last step still wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

Settings = Mapping[str, Any]
Groups = Callable[[str, nn.Parameter], Mapping[str, Any] | None]


@dataclass(frozen=True, kw_only=True)
class HostOptimizer(ABC):
    """How one parameter is updated from its gradient."""

    groups: Groups | None = None
    """(name, parameter) -> what differs for it, such as `{"weight_decay": 0.0}`; or None."""

    @property
    @abstractmethod
    def defaults(self) -> dict[str, Any]:
        """Settings of a parameter for which `groups` says nothing, under torch's names."""

    @abstractmethod
    def state_names(self, settings: Settings) -> tuple[str, ...]:
        """Names of the float32 tensors kept per parameter, torch's names."""

    @abstractmethod
    def update(
        self,
        weight: Tensor,  # float32, updated in place
        gradient: Tensor,  # float32, same shape
        *,
        name: str,
        state: Mapping[str, Tensor],
        step: int,
        settings: Settings,
    ) -> None:
        """Update one parameter; `step` is 1 at its first update."""


def _check(condition: bool, message: str) -> None:  # noqa: FBT001 (a guard reads best this way)
    if not condition:
        raise ValueError(message)


@final
@dataclass(frozen=True, kw_only=True)
class AdamW(HostOptimizer):
    """AdamW with decoupled weight decay, as `torch.optim.AdamW`."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        _check(self.lr >= 0, f"AdamW: lr must not be negative, found {self.lr}")
        _check(
            all(0 <= beta < 1 for beta in self.betas),
            f"AdamW: betas must lie in [0, 1), found {self.betas}",
        )
        _check(self.eps >= 0, f"AdamW: eps must not be negative, found {self.eps}")

    @property
    @override
    def defaults(self) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "betas": tuple(self.betas),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }

    @override
    def state_names(self, settings: Settings) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    @override
    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        *,
        name: str,
        state: Mapping[str, Tensor],
        step: int,
        settings: Settings,
    ) -> None:
        learning_rate, (beta1, beta2) = float(settings["lr"]), settings["betas"]
        first_moment, second_moment = state["exp_avg"], state["exp_avg_sq"]
        weight.mul_(1 - learning_rate * settings["weight_decay"])
        first_moment.lerp_(gradient, 1 - beta1)
        second_moment.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        bias_correction1 = 1 - beta1**step
        bias_correction2 = 1 - beta2**step
        denominator = (second_moment.sqrt() / bias_correction2**0.5).add_(settings["eps"])
        weight.addcdiv_(first_moment, denominator, value=-(learning_rate / bias_correction1))


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
        _check(self.lr >= 0, f"SGD: lr must not be negative, found {self.lr}")
        _check(self.momentum >= 0, f"SGD: momentum must not be negative, found {self.momentum}")
        _check(
            not self.nesterov or (self.momentum > 0 and self.dampening == 0),
            "SGD: nesterov needs momentum > 0 and dampening = 0",
        )

    @property
    @override
    def defaults(self) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "momentum": self.momentum,
            "dampening": self.dampening,
            "weight_decay": self.weight_decay,
            "nesterov": self.nesterov,
        }

    @override
    def state_names(self, settings: Settings) -> tuple[str, ...]:
        return ("momentum_buffer",) if settings["momentum"] else ()

    @override
    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        *,
        name: str,
        state: Mapping[str, Tensor],
        step: int,
        settings: Settings,
    ) -> None:
        if settings["weight_decay"]:
            gradient = gradient.add(weight, alpha=settings["weight_decay"])
        if settings["momentum"]:
            momentum = state["momentum_buffer"]
            if step == 1:
                momentum.copy_(gradient)
            else:
                momentum.mul_(settings["momentum"]).add_(gradient, alpha=1 - settings["dampening"])
            if settings["nesterov"]:
                gradient = gradient.add(momentum, alpha=settings["momentum"])
            else:
                gradient = momentum
        weight.add_(gradient, alpha=-float(settings["lr"]))


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
    def state_names(self, settings: Settings) -> tuple[str, ...]:
        return ()

    @override
    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        *,
        name: str,
        state: Mapping[str, Tensor],
        step: int,
        settings: Settings,
    ) -> None:
        self.gradients[name] = gradient.clone()


_TORCH_OPTIMIZERS: Mapping[type, Callable[..., HostOptimizer]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.SGD: SGD,
}
_NOT_ARITHMETIC = {"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"}


def adopt(optimizer: torch.optim.Optimizer) -> tuple[HostOptimizer, list[dict[str, Any]]]:
    """Our description of a torch optimizer, and its groups.

    Raises:
        ValueError: the optimizer is of a kind we do not have, has already stepped, or uses an
            option that changes the arithmetic and is not implemented.
    """
    kind = type(optimizer)
    if kind not in _TORCH_OPTIMIZERS:
        raise ValueError(
            f"optimizer of type {kind.__module__}.{kind.__qualname__} cannot run in the parameter "
            "server. Expected l2l.AdamW, l2l.SGD, torch.optim.AdamW or torch.optim.SGD."
        )
    if optimizer.state:
        raise ValueError(
            f"the {kind.__name__} handed over has already stepped; its state would be lost. "
            "Hand over a fresh one."
        )
    description = _TORCH_OPTIMIZERS[kind]()
    known = set(description.defaults)
    groups = []
    for group in optimizer.param_groups:
        odd = {
            key: value
            for key, value in group.items()
            if key not in known | _NOT_ARITHMETIC | {"decoupled_weight_decay"} and value
        }
        if odd:
            raise ValueError(
                f"{kind.__name__}: the options {odd} are not implemented in the parameter server. "
                "Leave them at torch's defaults."
            )
        groups.append({key: group[key] for key in (*description.defaults, "params")})
    return description, groups


def make_groups(
    optimizer: HostOptimizer, parameters: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """Parameter groups by the overrides that `optimizer.groups` gives, in order of appearance.

    Raises:
        ValueError: an override names a setting the optimizer does not have.
    """
    groups: dict[tuple[tuple[str, Any], ...], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        overrides = (optimizer.groups(name, parameter) if optimizer.groups else None) or {}
        unknown = sorted(set(overrides) - set(optimizer.defaults))
        if unknown:
            raise ValueError(
                f"groups() returned {unknown} for {name!r}; {type(optimizer).__name__} has "
                f"{sorted(optimizer.defaults)}."
            )
        groups.setdefault(tuple(sorted(overrides.items())), []).append(parameter)
    return [
        {**optimizer.defaults, **dict(overrides), "params": parameters}
        for overrides, parameters in groups.items()
    ]


@final
class ServerOptimizer(torch.optim.Optimizer):
    """The parameter server's optimizer as PyTorch sees it.

    `engine.step` calls `step`; the update itself happens in the server. `state_dict` shows the
    server's state as views under torch's names.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        *,
        names: Mapping[nn.Parameter, str],
        state_of: Callable[[str], dict[str, Any]],
    ) -> None:
        """Wrap groups whose parameters live in the server under `names`."""
        self._names = names
        self._state_of = state_of
        super().__init__(groups, defaults)

    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Called by `engine.step`, so that schedulers see steps in the order they expect."""

    def settings(self) -> dict[str, Settings]:
        """The numbers of every parameter's group, by name, as they are now."""
        found: dict[str, Settings] = {}
        for group in self.param_groups:
            numbers = {
                key: float(value) if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            found.update({self._names[parameter]: numbers for parameter in group["params"]})
        return found

    @override
    def state_dict(self) -> dict[str, Any]:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self._state_of(self._names[parameter])
                if state:
                    self.state[parameter] = state
        return super().state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise RuntimeError(
            "the optimizer's state belongs to the engine's parameter server and is not loaded "
            "through engine.optimizer."
        )
