"""Any optimizer of torch's kind that updates parameters one by one, as a guest of the server.

The user's own optimizer object does the arithmetic, in PyTorch on the host, for one parameter at a
time: it is given a float32 master, its gradient, and the state that the server keeps for it. What
it keeps is found by trying it on a few numbers, in two ways: as it is, over some parameters and
steps, and as a guest. Where both agree, nothing is lost: each update depends on its parameter, its
gradient and its own state alone.

If besides it treats every element by itself, and keeps nothing but numbers for each element, rows
of tables are updated apart, and ranks may hold pieces. Else a parameter is updated as a whole.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from l2l.parameter_server.optimizer import HostOptimizer, Settings, StateKind, Update

NOT_SETTINGS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})
STEP = "step"
ROWS, COLUMNS = 4, 6  # of what is tried for single elements
NUM_TRIED = 3  # steps
TRIED_RATE = 0.1  # a learning rate with which differences are seen
# Sizes that stand for larger ones where a whole parameter is tried, by its number of dimensions.
STANDING: Mapping[int, Sequence[int]] = {1: (1009,), 2: (257, 263), 3: (41, 43, 47)}
STANDING_FOR_MORE = (13, 17, 19, 23, 29, 31)
NUMBERS: Mapping[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""As what state is kept that is no tensor."""

State = dict[str, Any]
Kinds = dict[str, tuple[StateKind, type]]  # what is kept, and of which type an optimizer has it


@final
@dataclass(frozen=True, kw_only=True)
class Guest(HostOptimizer):
    """Runs another optimizer, parameter by parameter."""

    has_halves: ClassVar[bool] = False
    template: torch.optim.Optimizer  # the user's object, which has taken no step
    kinds: tuple[str, ...] = ()  # what it keeps for each element
    counts_in: type = Tensor  # how it counts steps, if it does
    # Whether it looks at whole parameters, or keeps something else; all that it keeps is by
    # parameter then, also its count of steps.
    is_whole: bool = False
    begins: Mapping[str, float] = field(default_factory=dict)  # state that is there before a step
    known: Mapping[str, Any] = field(default_factory=dict)  # settings and their defaults
    tried: dict[Any, Kinds] = field(default_factory=dict)  # of whole parameters

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Guest:
        """What can be found out about an optimizer.

        Raises:
            ValueError: it does not update parameters one by one, or keeps what cannot be kept; says
                what, as an end of a sentence.
        """
        begins = _beginning(optimizer)
        groups = [(_settings(one), one["params"]) for one in optimizer.param_groups]
        found = [_by_elements(optimizer, settings, begins) for settings, _ in groups]
        states = [one for one in found if one is not None]
        counts = {type(kept[STEP]) for kept in states if STEP in kept}
        guest = cls(
            template=optimizer,
            kinds=tuple(sorted({name for kept in states for name in kept if name != STEP})),
            counts_in=next(iter(counts), Tensor),
            is_whole=len(states) < len(groups),
            begins=begins,
            known=_settings(optimizer.defaults),
        )
        for settings, parameters in groups if guest.is_whole else ():
            for parameter in parameters:
                guest.kept(settings, tuple(parameter.shape))
        return guest

    @property
    @override
    def name(self) -> str:
        return type(self.template).__name__

    @property
    @override
    def defaults(self) -> dict[str, Any]:
        return dict(self.known)

    @property
    @override
    def is_by_parameter(self) -> bool:
        return self.is_whole

    @override
    def needs_whole(self, settings: Settings) -> bool:
        return self.is_whole

    @override
    def state_kinds(self, settings: Settings) -> dict[str, StateKind]:
        return {} if self.is_whole else {name: StateKind() for name in self.kinds}

    @override
    def kept(self, settings: Settings, shape: tuple[int, ...]) -> dict[str, StateKind]:
        if not self.is_whole:
            return self.state_kinds(settings)
        return {name: kind for name, (kind, _) in self._kinds_of(settings, shape).items()}

    def _kinds_of(self, settings: Settings, shape: tuple[int, ...]) -> Kinds:
        """What is kept of a whole parameter."""
        # What is kept may depend on what is switched off; numbers change from step to step.
        key = shape, tuple(bool(settings.get(name)) for name in self.known if name != "lr")
        if key not in self.tried:
            self.tried[key] = _kinds_of(self.template, settings, self.begins, shape)
        return self.tried[key]

    @override
    def arithmetic(self, weight: Tensor, gradient: Tensor, update: Update) -> None:
        state = _filled(self.begins, weight.view(update.shape))
        shapes = {**dict.fromkeys(update.state, update.shape), **update.state_shapes}
        kinds = self._kinds_of(update.settings, update.shape) if self.is_whole else None
        if update.step > 1:  # before, it makes its own, which need not be zeros
            state = {name: one.view(shapes[name]) for name, one in update.state.items()}
            if kinds is not None:
                state = {name: _given(one, kinds[name][1]) for name, one in state.items()}
            else:
                before = torch.tensor(float(update.step - 1))
                state[STEP] = before if self.counts_in is Tensor else update.step - 1
        value, later = _stepped(
            self.template,
            update.settings,
            weight.view(update.shape),
            gradient.view(update.shape),
            state,
        )
        found = {name: _shape_of(one) for name, one in later.items()}
        if self.is_whole and found != shapes:
            raise ValueError(
                f"the optimizer {self.name} keeps {found} for {update.name!r}. Expected {shapes}, "
                "as when it was tried: what it keeps must follow from the parameter's shape."
            )
        weight.copy_(value.reshape(-1))
        for name, one in update.state.items():
            if name in later:
                one.copy_(torch.as_tensor(later[name], dtype=one.dtype).reshape(-1))


def _given(stored: Tensor, kind: type) -> Any:
    """State as an optimizer had left it."""
    return stored if kind is Tensor else kind(stored.item())


def _shape_of(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _beginning(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """State that an optimizer has before its first step: the same number for every element.

    Raises:
        ValueError: they differ, or have another shape.
    """
    found: dict[str, set[float]] = defaultdict(set)
    for parameter, state in optimizer.state.items():
        for name, one in state.items():
            if name != STEP and _shape_of(one) != tuple(parameter.shape):
                raise ValueError(f"begins with {name}, which is not a number for each element")
            ends = (one.min(), one.max()) if isinstance(one, Tensor) else (one, one)
            found[name] |= {float(end) for end in ends}
    odd = [name for name, numbers in found.items() if len(numbers) > 1]
    if odd:
        raise ValueError(f"begins with different numbers in {', '.join(odd)}")
    return {name: next(iter(numbers)) for name, numbers in found.items()}


def _filled(begins: Mapping[str, float], like: Tensor) -> State:
    """The state before the first step."""
    found: State = {k: torch.full_like(like, v) for k, v in begins.items() if k != STEP}
    return {**found, STEP: torch.tensor(begins[STEP])} if STEP in begins else found


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in NOT_SETTINGS}


def _over(
    parameters: Sequence[nn.Parameter], template: torch.optim.Optimizer, settings: Settings
) -> torch.optim.Optimizer:
    """An optimizer like this one, over other parameters, which has taken no step."""
    one = object.__new__(type(template))
    one.__dict__.update(template.__dict__)
    as_usual: dict[str, Any] = dict.fromkeys(NOT_SETTINGS & template.defaults.keys(), False)
    group = {**template.defaults, **as_usual, **settings, "params": list(parameters)}
    one.param_groups, one.state = [group], defaultdict(dict)
    return one


def _step(one: torch.optim.Optimizer, gradients: Sequence[Tensor]) -> None:
    """A step, as in a training loop."""
    for parameter, gradient in zip(one.param_groups[0]["params"], gradients, strict=True):
        parameter.grad = gradient.clone()
    with torch.enable_grad():
        one.step()


def _stepped(
    template: torch.optim.Optimizer,
    settings: Settings,
    weight: Tensor,
    gradient: Tensor,
    state: State,
) -> tuple[Tensor, State]:
    """One step of an optimizer like this one; the weight after it, and the state."""
    parameter = nn.Parameter(weight.detach().clone())
    one = _over([parameter], template, settings)
    if state:
        one.state[parameter] = state
    _step(one, [gradient])
    return parameter.detach(), dict(one.state[parameter])


# --------------------------------------------------------------------------------------------------
# Trying


def _copied(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer with all that it holds, but for the user's parameters and their state."""
    made = object.__new__(type(optimizer))
    large = (optimizer.state, optimizer.param_groups)
    large += tuple(one for group in optimizer.param_groups for one in group["params"])
    made.__dict__.update(copy.deepcopy(optimizer.__dict__, {id(one): one for one in large}))
    return made


def _as_guest(
    template: torch.optim.Optimizer,
    settings: Settings,
    begins: Mapping[str, float],
    numbers: Sequence[Sequence[Tensor]],
) -> list[tuple[Tensor, State]]:
    """Weights and states after some steps, parameter by parameter.

    Args:
        template: what runs.
        settings: of the parameters.
        begins: state before the first step.
        numbers: of every parameter its weight, and a gradient for each step.
    """
    found = [(weight, _filled(begins, weight)) for weight, *_ in numbers]
    for step in range(1, len(numbers[0])):
        for index, own in enumerate(numbers):
            weight, state = found[index]
            found[index] = _stepped(template, settings, weight, own[step], state)
    return found


def _numbers(shape: tuple[int, ...]) -> list[list[Tensor]]:
    """Weight and gradients of two parameters."""
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(shape, generator=generator) for _ in range(1 + NUM_TRIED)] for _ in range(2)
    ]


def _tried(
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    begins: Mapping[str, float],
    shape: tuple[int, ...],
) -> State:
    """What an optimizer keeps for a parameter of this shape.

    Raises:
        ValueError: it cannot be a guest.
    """
    numbers, settings = _numbers(shape), _seen(settings)
    try:
        alone = _as_guest(_copied(optimizer), settings, begins, numbers)
        own = [nn.Parameter(weight.clone()) for weight, *_ in numbers]
        one = _over(own, _copied(optimizer), settings)
        for parameter in own if begins else ():
            one.state[parameter] = _filled(begins, parameter.detach())
        for step in range(1, 1 + NUM_TRIED):
            _step(one, [gradients[step] for gradients in numbers])
    except Exception as error:  # whatever it expects that it does not find
        raise ValueError(
            f"cannot update one parameter at a time ({type(error).__name__}: {error})"
        ) from error
    group = one.param_groups[0]
    pairs = ((optimizer.__dict__, one.__dict__), ({**optimizer.defaults, **settings}, group))
    changed = [k for before, after in pairs for k, v in _plain(after).items() if before.get(k) != v]
    if changed:
        raise ValueError(f"changes its own {', '.join(changed)}, outside of any parameter's state")
    values = ((parameter.detach(), value) for parameter, (value, _) in zip(own, alone, strict=True))
    if not all(torch.allclose(*pair, rtol=1e-5, equal_nan=True) for pair in values):
        raise ValueError("mixes parameters, or keeps something outside of their state")
    return alone[0][1]


def _seen(settings: Settings) -> Settings:
    """The same with a learning rate with which differences are seen."""
    return {**settings, "lr": TRIED_RATE} if "lr" in settings else settings


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and words among values."""
    plain = {k: one for k, one in values.items() if isinstance(one, bool | int | float | str)}
    return _settings(plain)


def _by_elements(
    optimizer: torch.optim.Optimizer, settings: Settings, begins: Mapping[str, float]
) -> State | None:
    """What an optimizer keeps for a parameter if it treats every element by itself, else None.

    Raises:
        ValueError: it cannot be a guest.
    """
    shape, numbers = (ROWS, COLUMNS), _numbers((ROWS, COLUMNS))[:1]
    settings = _seen(settings)
    halves = [[one.reshape(-1)[i::2] for one in numbers[0]] for i in range(2)]
    try:
        ((whole, state),) = _as_guest(_copied(optimizer), settings, begins, numbers)
        parts = [part for part, _ in _as_guest(_copied(optimizer), settings, begins, halves)]
    except Exception:  # perhaps it wants matrices
        return None
    kept = {name: one for name, one in state.items() if name != STEP}
    is_plain = all(
        _shape_of(one) == shape and one.dtype is torch.float32 and not name.endswith("_unit")
        for name, one in kept.items()
    )
    pairs = ((whole.reshape(-1)[i::2], part) for i, part in enumerate(parts))
    if not is_plain or not all(torch.allclose(one, other, rtol=1e-5) for one, other in pairs):
        return None
    return _tried(optimizer, settings, begins, shape)


def _kinds_of(
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    begins: Mapping[str, float],
    shape: tuple[int, ...],
) -> Kinds:
    """What an optimizer keeps for a whole parameter, tried on a smaller one.

    Raises:
        ValueError: it cannot be a guest.
    """
    standing, sizes = list(shape), STANDING.get(len(shape), STANDING_FOR_MORE)
    for place, size in zip(sorted(range(len(shape)), key=shape.__getitem__), sizes, strict=False):
        standing[place] = min(shape[place], size)
    # State of such a size, or of a product of them, has that of the parameter.
    real = {1: 1}
    for small, large in zip(standing, shape, strict=True):
        real |= {number * small: other * large for number, other in real.items()}
    found: Kinds = {}
    kept = _tried(optimizer, settings, begins, tuple(standing))
    once = [one[:2] for one in _numbers(tuple(standing))][:1]
    ((_, first),) = _as_guest(_copied(optimizer), _seen(settings), begins, once)
    for name, one in kept.items():
        if name not in first or _shape_of(first[name]) != _shape_of(one):
            raise ValueError(f"keeps {name}, whose shape changes from step to step")
        if isinstance(one, Tensor):
            own = tuple(real.get(size, size) for size in one.shape)
            found[name] = StateKind(dtype=one.dtype, shape=own), Tensor
        elif type(one) in NUMBERS:
            found[name] = StateKind(dtype=NUMBERS[type(one)], shape=()), type(one)
        else:
            kind = type(one).__name__
            raise ValueError(f"keeps {name}, which is a {kind}: no tensor and no number")
    return found
