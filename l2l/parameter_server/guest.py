"""Any optimizer of torch's kind that looks at single elements, as a guest of the server.

The user's own optimizer object does the arithmetic, in PyTorch on the host, for one parameter at a
time: it is given a float32 master, its gradient, and the state that the server keeps for it. What
it keeps is found by trying it on a few numbers. That also shows whether it can be a guest: whether
it treats every element by itself (the server updates rows of tables apart, and ranks hold pieces),
and keeps nothing but numbers for each element and a count of steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from l2l.parameter_server.optimizer import HostOptimizer, Settings, StateKind, Update

NOT_SETTINGS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
STEP = "step"
ROWS, COLUMNS = 4, 6  # of what it is tried on
NUM_TRIED = 3  # steps


@final
@dataclass(frozen=True, kw_only=True)
class Guest(HostOptimizer):
    """Runs another optimizer, parameter by parameter."""

    has_halves: ClassVar[bool] = False
    template: torch.optim.Optimizer  # the user's object, which has taken no step
    kinds: tuple[str, ...] = ()  # what it keeps for each element
    counts_in: type = Tensor  # how it counts steps, if it does
    begins: Mapping[str, float] = field(default_factory=dict)  # state that is there before a step
    known: Mapping[str, Any] = field(default_factory=dict)  # settings and their defaults

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Guest:
        """What can be found out about an optimizer.

        Raises:
            ValueError: it does not treat every element by itself, or keeps something else; says
                what, as an end of a sentence.
        """
        known = _settings(optimizer.defaults)
        begins = _beginning(optimizer)
        found = [_tried(optimizer, _settings(one), begins) for one in optimizer.param_groups]
        kinds = {name for kept in found for name in kept if name != STEP}
        counts = {type(kept[STEP]) for kept in found if STEP in kept}
        return cls(
            template=optimizer,
            kinds=tuple(sorted(kinds)),
            counts_in=next(iter(counts), Tensor),
            begins=begins,
            known=known,
        )

    @property
    @override
    def name(self) -> str:
        return type(self.template).__name__

    @property
    @override
    def defaults(self) -> dict[str, Any]:
        return dict(self.known)

    @override
    def state_kinds(self, settings: Settings) -> dict[str, StateKind]:
        return {name: StateKind() for name in self.kinds}

    @override
    def arithmetic(self, weight: Tensor, gradient: Tensor, update: Update) -> None:
        state = _filled(self.begins, weight.view(update.shape))
        if update.step > 1:  # before, it makes its own, which need not be zeros
            before = torch.tensor(float(update.step - 1))
            state = {name: one.view(update.shape) for name, one in update.state.items()}
            state = {name: one for name, one in state.items() if name in self.kinds}
            state[STEP] = before if self.counts_in is Tensor else update.step - 1
        value, kept = _stepped(
            self.template,
            update.settings,
            weight.view(update.shape),
            gradient.view(update.shape),
            state,
        )
        weight.copy_(value.reshape(-1))
        for name in self.kinds:
            if name in kept:
                update.state[name].copy_(kept[name].reshape(-1))


def _beginning(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """State that an optimizer has before its first step: the same number for every element.

    Raises:
        ValueError: they differ.
    """
    found: dict[str, set[float]] = defaultdict(set)
    for state in optimizer.state.values():
        for name, one in state.items():
            ends = (one.min(), one.max()) if isinstance(one, Tensor) else (one, one)
            found[name] |= {float(end) for end in ends}
    odd = [name for name, numbers in found.items() if len(numbers) > 1]
    if odd:
        raise ValueError(f"begins with different numbers in {', '.join(odd)}")
    return {name: next(iter(numbers)) for name, numbers in found.items()}


def _filled(begins: Mapping[str, float], like: Tensor) -> dict[str, Any]:
    """The state before the first step."""
    found: dict[str, Any] = {k: torch.full_like(like, v) for k, v in begins.items() if k != STEP}
    return {**found, STEP: torch.tensor(begins[STEP])} if STEP in begins else found


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in NOT_SETTINGS}


def _stepped(
    template: torch.optim.Optimizer,
    settings: Settings,
    weight: Tensor,
    gradient: Tensor,
    state: dict[str, Any],
) -> tuple[Tensor, dict[str, Any]]:
    """One step of an optimizer like this one; the weight after it, and the state."""
    one = object.__new__(type(template))
    one.__dict__.update(template.__dict__)
    parameter = nn.Parameter(weight.detach().clone())
    parameter.grad = gradient.clone()
    as_usual: dict[str, Any] = dict.fromkeys(NOT_SETTINGS & template.defaults.keys(), False)
    one.param_groups = [{**template.defaults, **as_usual, **settings, "params": [parameter]}]
    one.state = defaultdict(dict)
    if state:
        one.state[parameter] = state
    with torch.enable_grad():  # as in a training loop
        one.step()
    return parameter.detach(), dict(one.state[parameter])


def _tried(
    optimizer: torch.optim.Optimizer, settings: Settings, begins: Mapping[str, float]
) -> dict[str, Any]:
    """What an optimizer keeps for a parameter of some elements.

    Raises:
        ValueError: it cannot be a guest.
    """
    generator = torch.Generator().manual_seed(0)

    def numbers() -> Tensor:
        return torch.randn(ROWS, COLUMNS, generator=generator)

    def steps(part: Callable[[Tensor], Tensor]) -> tuple[Tensor, dict[str, Any]]:
        weight = part(start)
        state = _filled(begins, weight)
        for gradient in gradients:
            weight, state = _stepped(optimizer, settings, weight, part(gradient), state)
        return weight, state

    start, gradients = numbers(), [numbers() for _ in range(NUM_TRIED)]
    try:
        whole, state = steps(lambda one: one)
        parts = [steps(lambda one, i=i: one.reshape(-1)[i::2])[0] for i in range(2)]  # type: ignore[misc]
    except Exception as error:  # whatever it expects that it does not find
        raise ValueError(
            f"cannot update one parameter at a time ({type(error).__name__}: {error})"
        ) from error
    odd = [
        name
        for name, one in state.items()
        if name != STEP and not (isinstance(one, Tensor) and one.shape == start.shape)
    ]
    if odd:
        raise ValueError(f"keeps {', '.join(odd)}, which are not numbers for each element")
    if not all(torch.allclose(whole.reshape(-1)[i::2], parts[i], rtol=1e-5) for i in range(2)):
        raise ValueError("does not treat every element by itself")
    return state
