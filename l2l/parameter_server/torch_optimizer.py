"""The optimizer's face to PyTorch: groups taken from it, and an object its schedulers can drive.

`ServerOptimizer` is what `engine.optimizer` returns: a `torch.optim.Optimizer` with `param_groups`
that any learning-rate scheduler can drive. The numbers of a step are read from it when the step
begins (`settings`), so a scheduler may run while updates of the last step still wait.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from l2l.parameter_server.adafactor import Adafactor
from l2l.parameter_server.optimizer import SGD, AdamW, Optimizer, Settings
from l2l.parameter_server.unit import Unit, state_name

_TORCH_OPTIMIZERS: Mapping[type, Callable[..., Optimizer]] = {
    torch.optim.AdamW: AdamW,
    torch.optim.SGD: SGD,
}
_NOT_ARITHMETIC = {"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"}


def adopt(optimizer: torch.optim.Optimizer) -> tuple[Optimizer, list[dict[str, Any]]]:
    """Our description of a torch optimizer, and its groups.

    Raises:
        ValueError: the optimizer is of a kind we do not have, has already stepped, or uses an
            option that changes the arithmetic and is not implemented.
    """
    kind = type(optimizer)
    if kind not in _TORCH_OPTIMIZERS:
        raise ValueError(
            f"optimizer of type {kind.__module__}.{kind.__qualname__} cannot run in the parameter "
            "server. Expected one of l2l's optimizers, torch.optim.AdamW or torch.optim.SGD."
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ValueError(
            f"a learning-rate scheduler holds the {kind.__name__} that is handed over; it would "
            "drive nothing. Make the scheduler on engine.optimizer instead."
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
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Which parameters are in which group, and what they are called."""

    groups: list[list[nn.Parameter]]
    names: Mapping[nn.Parameter, str]


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
        state_of: Callable[[str], dict[str, Any]] = lambda _: {},
    ) -> None:
        """Wrap groups whose parameters live in the server under `names`, with their state."""
        self._names, self._state_of = names, state_of
        super().__init__(groups, defaults)

    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Called by `engine.step`, so that schedulers see steps in the order they expect."""

    def settings(self, members: Members | None = None) -> dict[str, Settings]:
        """The numbers of every parameter's group, by name, as they are now; or of other members."""
        found: dict[str, Settings] = {}
        given = [group["params"] for group in self.param_groups]
        names, lists = (self._names, given) if members is None else (members.names, members.groups)
        for group, parameters in zip(self.param_groups, lists, strict=True):
            numbers = {
                key: float(value) if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            found.update({names[parameter]: numbers for parameter in parameters})
        return found

    def members_of(
        self, model: nn.Module, like: Mapping[nn.Parameter, nn.Parameter | None]
    ) -> Members:
        """The groups of a model whose layers have changed.

        Args:
            model: with its new layers.
            like: for parameters that are in no group, one whose group they join; None: the first.

        Raises:
            ValueError: nothing would be trained.
        """
        names = {parameter: name for name, parameter in model.named_parameters()}
        group_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        groups: list[list[nn.Parameter]] = [[] for _ in self.param_groups]
        for parameter in names:
            if parameter.requires_grad and (parameter in group_of or parameter in like):
                other = parameter if parameter in group_of else like[parameter]
                groups[group_of.get(other, 0) if other is not None else 0].append(parameter)
        if not any(groups):
            raise ValueError("no parameter of the model would be trained any more.")
        return Members(groups=groups, names=names)

    def regroup(self, members: Members) -> None:
        """Take over the groups of a model whose layers have changed."""
        self._names = members.names
        for group, parameters in zip(self.param_groups, members.groups, strict=True):
            group["params"] = parameters
        self.state.clear()

    def numbers(self) -> list[dict[str, Any]]:
        """What every group has besides its parameters, as JSON."""
        return [
            {
                key: float(value) if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params" and isinstance(value, bool | int | float | str | tuple | Tensor)
            }
            for group in self.param_groups
        ]

    def restore_numbers(self, groups: list[dict[str, Any]]) -> bool:
        """Take these numbers over; False if they are of other groups.

        A scheduler may have added numbers of its own, there or here.
        """
        found, own = (
            [sorted(one.keys() & self.defaults.keys()) for one in each]
            for each in (groups, self.numbers())
        )
        if found != own:
            return False
        for group, numbers in zip(self.param_groups, groups, strict=True):
            group.update({k: tuple(v) if isinstance(v, list) else v for k, v in numbers.items()})
        return True

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


def state_of(unit: Unit, owner: str, optimizer: Optimizer) -> dict[str, Any]:
    """A parameter's optimizer state as views, torch's names; empty before its first step."""
    if isinstance(optimizer, Adafactor):
        prefix = state_name(owner, "")
        views = {
            name.removeprefix(prefix): unit.weight_of(name)
            for name in unit.form.weight_layout.names
            if name.startswith(prefix)
        }
        return views if views and float(views["step"]) else {}
    if not unit.steps.get(owner):
        return {}
    shape = unit.weight_of(owner).shape
    views = {
        name: flat.view(shape) if flat.numel() == shape.numel() else flat
        for name, flat in unit.state_of(owner).items()
    }
    return {"step": torch.tensor(float(unit.steps[owner])), **views}


def groups_of(
    optimizer: Optimizer | torch.optim.Optimizer | None, model: nn.Module
) -> tuple[Optimizer, list[dict[str, Any]]]:
    """The optimizer's description and its groups over the parameters that are trained.

    Raises:
        ValueError: nothing is trained, or the optimizer does not fit the model.
    """
    trained = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.is_floating_point()
    }
    if not trained:
        raise ValueError("no parameter of the model requires a gradient, so nothing is trained.")
    if isinstance(optimizer, torch.optim.Optimizer):
        description, groups = adopt(optimizer)
        known = {id(parameter) for parameter in trained.values()}
        strangers = [p.shape for g in groups for p in g["params"] if id(p) not in known]
        if strangers:
            raise ValueError(
                f"the optimizer holds {len(strangers)} parameters that the model does not train, "
                f"the first of shape {tuple(strangers[0])}. Expected an optimizer over "
                "model.parameters()."
            )
        left_out = known - {id(p) for g in groups for p in g["params"]}
        if left_out:
            warnings.warn(
                f"{len(left_out)} parameters require a gradient but are not in the optimizer; "
                "they stay as they are.",
                stacklevel=3,
            )
        return description, groups
    description = AdamW() if optimizer is None else optimizer
    if not isinstance(description, Optimizer):
        raise ValueError(
            f"optimizer is {type(optimizer).__name__}. Expected l2l.AdamW(...), SGD, Lion or "
            "Adafactor, or a torch optimizer over the model's parameters."
        )
    return description, make_groups(description, trained)
