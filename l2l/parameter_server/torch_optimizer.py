"""The optimizer's face to PyTorch: groups taken from it, and an object its schedulers can drive.

`ServerOptimizer` is what `engine.optimizer` returns: a `torch.optim.Optimizer` with `param_groups`
that any learning-rate scheduler can drive. The numbers of a step are read from it when the step
begins (`settings`), so a scheduler may run while updates of the last step still wait.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from l2l.parameter_server.guest import NOT_SETTINGS, Guest
from l2l.parameter_server.muon import Muon
from l2l.parameter_server.optimizer import Optimizer, Settings
from l2l.parameter_server.optimizers import SGD, AdamW

Groups = list[dict[str, Any]]
GivenOptimizer = Optimizer | torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None

logger = logging.getLogger("l2l")

_OURS: Mapping[type, type[Optimizer]]
_OURS = {
    torch.optim.AdamW: AdamW,
    torch.optim.Adam: AdamW,
    torch.optim.SGD: SGD,
    torch.optim.Muon: Muon,
}
_NOT_ARITHMETIC = NOT_SETTINGS | {"decoupled_weight_decay"}  # which AdamW is


def adopt(optimizer: torch.optim.Optimizer) -> tuple[Optimizer, Groups]:
    """Our description of a torch optimizer, and its groups.

    Raises:
        ValueError: the optimizer cannot work here, or has already stepped.
    """
    kind, groups = type(optimizer), optimizer.param_groups
    problems = {
        "has a learning-rate scheduler, which would have no effect. Create the scheduler on "
        "engine.optimizer instead": any("initial_lr" in group for group in groups),
        "has already taken steps; its state would be lost. Pass a fresh one": any(
            float(state.get("step", 1)) for state in optimizer.state.values()
        ),
    }
    said = f"the optimizer {kind.__module__}.{kind.__qualname__}"
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(f"{said} {problem}.")
    description: Optimizer
    if _is_ours(optimizer):
        description = _OURS[kind]()
    else:
        try:
            description = Guest.of(optimizer)
        except ValueError as error:
            raise ValueError(
                f"{said} {error}, so it cannot run in the parameter server. Expected one of l2l's "
                "optimizers, or one of torch's kind that updates each parameter by itself."
            ) from error
        logger.warning(
            "%s runs in PyTorch on the host, one parameter at a time: slower than l2l's own.", said
        )
    if isinstance(description, Muon):
        ratios = [one["adjust_lr_fn"] or "original" for one in groups]
        groups = [
            {**one, "use_muon": True, "adjust_lr_fn": ratio}
            for one, ratio in zip(groups, ratios, strict=True)
        ]
    return description, [{k: one[k] for k in (*description.defaults, "params")} for one in groups]


def _adopt_several(optimizers: Sequence[Any]) -> tuple[Optimizer, Groups]:
    """The same of Muon and of what updates the rest.

    Raises:
        ValueError: they are something else.
    """
    kinds = [type(one) for one in optimizers]
    if sorted(kind is torch.optim.Muon for kind in kinds) != [False, True]:
        raise ValueError(
            f"optimizer is a list of {', '.join(kind.__name__ for kind in kinds)}. Expected one "
            "optimizer, or torch.optim.Muon and another one for what is no matrix of a layer."
        )
    (matrices, of_matrices), (others, groups) = (
        adopt(one)
        for one in sorted(optimizers, key=lambda one: not isinstance(one, torch.optim.Muon))
    )
    if not isinstance(matrices, Muon) or not isinstance(others, AdamW | SGD):
        raise ValueError(
            f"optimizer is Muon and {others.name}. Beside Muon expected torch.optim.AdamW, SGD, or "
            "Adam without decay."
        )
    rest = [{**group, "use_muon": False} for group in groups]
    return replace(matrices, others=others), [*of_matrices, *rest]


def _is_ours(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one that is fast here: of a known kind, with options that it has."""
    kind = type(optimizer)
    if kind not in _OURS:
        return False
    known = {*_OURS[kind]().defaults, *_NOT_ARITHMETIC}
    odd = any(v for one in optimizer.param_groups for k, v in one.items() if k not in known)
    # Adam adds its decay to gradients. Without any it is AdamW.
    decays = any(group["weight_decay"] for group in optimizer.param_groups)
    return not odd and not (kind is torch.optim.Adam and decays)


def make_groups(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], in_layers: Collection[str]
) -> Groups:
    """Parameter groups by the overrides that `optimizer.groups` gives, in order of appearance.

    Args:
        optimizer: whose they are.
        parameters: to be trained, by name.
        in_layers: names of those that are in layers.

    Raises:
        ValueError: an override names a setting the optimizer does not have.
    """
    groups: dict[Any, tuple[dict[str, Any], list[nn.Parameter]]] = {}
    for name, parameter in parameters.items():
        overrides = (optimizer.groups(name, parameter) if optimizer.groups else None) or {}
        try:
            own = optimizer.defaults_for(parameter, overrides, in_layer=name in in_layers)
        except ValueError as error:
            raise ValueError(f"groups() returned {overrides} for {name!r}: {error}.") from error
        unknown = sorted(set(overrides) - set(own))
        if unknown:
            raise ValueError(
                f"groups() returned {unknown} for {name!r}; {type(optimizer).__name__} has "
                f"{sorted(own)}."
            )
        key = tuple(sorted(overrides.items())), tuple(own.items())
        groups.setdefault(key, ({**own, **overrides}, []))[1].append(parameter)
    return [{**own, "params": members} for own, members in groups.values()]


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
        groups: Groups,
        defaults: dict[str, Any],
        *,
        names: Mapping[nn.Parameter, str],
        state_of: Callable[[str], dict[str, Any]] = lambda _: {},
    ) -> None:
        """Wrap groups whose parameters live in the server under `names`, with their state."""
        self._names, self._state_of = names, state_of
        self._update: Callable[[], None] | None = None
        self._set_state: Callable[[str, Mapping[str, Any]], None] | None = None
        super().__init__(groups, defaults)

    def connect(
        self,
        state_of: Callable[[str], dict[str, Any]],
        *,
        update: Callable[[], None] | None,
        set_state: Callable[[str, Mapping[str, Any]], None] | None,
    ) -> None:
        """Work with a server.

        Args:
            state_of: gives the state of a parameter.
            update: what a step does where the user's own loop calls it.
            set_state: writes the state of a parameter, there.
        """
        self._state_of, self._update, self._set_state = state_of, update, set_state

    @override
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """The update of a loop of the user's own; else nothing.

        `engine.step` calls it, too, so that schedulers see steps in the order they expect.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._update is not None:
            self._update()
        return loss

    def settings(self, members: Members | None = None) -> dict[str, Settings]:
        """The numbers of every parameter's group, by name, as they are now; or of other members."""
        given = Members(groups=[one["params"] for one in self.param_groups], names=self._names)
        members = members or given
        numbers = [_numbers(group) for group in self.param_groups]
        pairs = zip(numbers, members.groups, strict=True)
        return {members.names[one]: own for own, parameters in pairs for one in parameters}

    def members_of(
        self, model: nn.Module, like: Mapping[nn.Parameter, nn.Parameter | None]
    ) -> Members:
        """The groups of a model whose layers have changed.

        Args:
            model: with its new layers.
            like: for parameters that are in no group, one whose group they join; None: the first
                that takes them.

        Raises:
            ValueError: nothing would be trained.
        """
        names = {parameter: name for name, parameter in model.named_parameters()}
        group_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        groups: list[list[nn.Parameter]] = [[] for _ in self.param_groups]
        for parameter in names:
            if parameter.requires_grad and (parameter in group_of or parameter in like):
                other = parameter if parameter in group_of else like[parameter]
                own = None if other is None else group_of.get(other)
                groups[self._group_for(parameter) if own is None else own].append(parameter)
        if not any(groups):
            raise ValueError("no parameter of the model would be trained any more.")
        return Members(groups=groups, names=names)

    def _group_for(self, parameter: nn.Parameter) -> int:
        """The group that a parameter joins which is like no other: the first that takes it."""
        kinds = [group.get("use_muon") for group in self.param_groups]
        is_matrix = parameter.dim() == 2
        return next((i for i, kind in enumerate(kinds) if kind in (None, is_matrix)), 0)

    def regroup(self, members: Members) -> None:
        """Take over the groups of a model whose layers have changed."""
        self._names = members.names
        for group, parameters in zip(self.param_groups, members.groups, strict=True):
            group["params"] = parameters
        self.state.clear()

    def numbers(self) -> Groups:
        """What every group has besides its parameters, as JSON."""
        kinds = (bool, int, float, str, tuple)
        every = (_numbers(group).items() for group in self.param_groups)
        return [{key: one for key, one in items if isinstance(one, kinds)} for items in every]

    def restore_numbers(self, groups: Groups) -> bool:
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
        if self._set_state is None:
            raise RuntimeError(
                "optimizer state is held by the engine and cannot be loaded through "
                "engine.optimizer. Use engine.load."
            )
        groups = [dict(group) for group in state_dict["param_groups"]]
        given = [group.pop("params") for group in groups]
        own = [group["params"] for group in self.param_groups]
        if list(map(len, given)) != list(map(len, own)) or not self.restore_numbers(groups):
            raise ValueError(
                f"the state is of an optimizer with groups of {list(map(len, given))} parameters; "
                f"expected groups of {list(map(len, own))}, with the settings of this one."
            )
        for numbers, parameters in zip(given, own, strict=True):
            for number, parameter in zip(numbers, parameters, strict=True):
                state = state_dict["state"].get(number, {})
                self._set_state(self._names[parameter], state)
        self.state.clear()


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group has besides its parameters."""
    found = {key: value for key, value in group.items() if key != "params"}
    return {k: float(value) if isinstance(value, Tensor) else value for k, value in found.items()}


def groups_of(
    optimizer: GivenOptimizer,
    model: nn.Module,
    in_layers: Collection[str],
) -> tuple[Optimizer, Groups]:
    """The optimizer's description and its groups over the parameters that are trained.

    Without an optimizer a model may be frozen: then there is one group, with nothing in it.

    Args:
        optimizer: described, or torch's.
        model: what it is for.
        in_layers: names of parameters in layers.

    Raises:
        ValueError: there is an optimizer and nothing to train, or it does not fit the model.
    """
    parameters = dict(model.named_parameters()).items()
    trained = {n: one for n, one in parameters if one.requires_grad and one.is_floating_point()}
    if not trained and optimizer is None:
        unused = AdamW()
        return unused, [{**unused.defaults, "params": []}]
    if not trained:
        raise ValueError(
            "there is an optimizer, but no parameter of the model requires a gradient. Thaw what "
            "is to be trained, or pass no optimizer: a frozen model can be evaluated, predict and "
            "generate."
        )
    if optimizer is None or isinstance(optimizer, Optimizer):
        description = AdamW() if optimizer is None else optimizer
        return description, make_groups(description, trained, in_layers)
    several: Sequence[Any] = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    for one in several:
        if not isinstance(one, torch.optim.Optimizer):
            raise ValueError(
                f"optimizer is {type(one).__name__}. Expected l2l.AdamW(...), SGD, Lion, Muon, "
                "ScheduleFreeAdamW or Adafactor, or a torch optimizer over the model's parameters."
            )
    description, groups = adopt(several[0]) if len(several) == 1 else _adopt_several(several)
    known, given = set(trained.values()), {one for group in groups for one in group["params"]}
    if given - known:
        raise ValueError(
            f"the optimizer holds {len(given - known)} parameters that the model does not train, "
            f"one of shape {tuple((given - known).pop().shape)}. Expected an optimizer over "
            "model.parameters()."
        )
    if known - given:
        warnings.warn(
            f"{len(known - given)} parameters require a gradient but are not in the optimizer; "
            "they stay as they are.",
            stacklevel=4,
        )
    return description, groups
