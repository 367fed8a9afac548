"""What an optimizer is, and what it works on.

Optimizers are *descriptions*: frozen, with torch's argument names, handed to `Engine`. Those that
work on the host (`HostOptimizer`) say what is kept per parameter and how it is updated:

- `arithmetic` is written to be read: operation for operation that of `torch.optim` with
  `foreach=False`, so it gives the same bits. It is the oracle of the native kernel, and the path
  taken when that was not built, or does not have the optimizer.
- `native_number` says which of the native kernel's updates does the same in one pass over memory
  (host_kernel.py), and `on_device` what does it on the device (device_update.py). Both take
  `coefficients`: reckoned in float64, and rounded to float32 once, there.

Where a parameter's weight is bfloat16 on the link, all work on the float32 master that it and its
remainder are ([Note: split master] in precision.py).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from l2l.parameter_server import eight_bit
from l2l.parameter_server.eight_bit import BLOCK_SIZE, cut, num_blocks, rounding_seed
from l2l.parameter_server.layout import ALIGNMENT_BYTES, round_up
from l2l.parameter_server.precision import COMPANION, master_of, store_master

Settings = Mapping[str, Any]
Groups = Callable[[str, nn.Parameter], Mapping[str, Any] | None]
Half = Literal["weights", "moments"]  # of an update: see [Note: halves] in host_kernel.cpp
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKind:
    """A tensor that an optimizer keeps for every parameter."""

    dtype: torch.dtype = torch.float32
    # Whether it has one entry for every block of `eight_bit.BLOCK_SIZE` elements; its name ends in
    # `_unit` then.
    per_block: bool = False
    # That of the tensor; None: it has one entry for every element of the parameter, or for every
    # block. Only for an optimizer that keeps its state by parameter.
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOrder:
    """The numbers of an update: those of its own step."""

    settings: Mapping[str, Settings]  # by parameter name
    received: frozenset[str]  # parameters that got a gradient in this step
    factor: float = 1.0  # what gradients are multiplied with
    # By unit, the sum of squares of what updates have changed: they add to it.
    changes: dict[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatUnit:
    """A flat run of elements, on one device, all of equal length.

    Where it spans padding, gradient and state are zero there.
    """

    weight: Tensor  # bfloat16, float16 or float32
    companion: Tensor | None  # int16 remainder of a bfloat16 weight, float32 master of a float16
    gradient: Tensor  # float32, bfloat16 or float16
    state: Tensors  # as `HostOptimizer.state_kinds` names them
    position: int  # of the first element in its unit's flat buffer, a multiple of 128
    # Of state that has not one entry for every element, or for every block.
    state_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        companion = None if self.companion is None else self.companion.dtype
        if COMPANION.get(self.weight.dtype) is not companion:
            raise ValueError(
                f"a weight of {self.weight.dtype} cannot have a companion of {companion}"
            )
        if self.position < 0 or self.position % BLOCK_SIZE:
            raise ValueError(f"position must be a multiple of {BLOCK_SIZE}, found {self.position}")
        numel = self.weight.numel()
        for name, tensor in self.named().items():
            expected = num_blocks(numel) if name.endswith("_unit") else numel
            if name in self.state_shapes:
                expected = math.prod(self.state_shapes[name])
            if tensor.dim() != 1 or tensor.numel() != expected:
                raise ValueError(
                    f"{name} must have the shape ({expected},), found {tuple(tensor.shape)}"
                )

    def named(self) -> Tensors:
        """All of it by name; the gradient last."""
        companion = {} if self.companion is None else {"companion": self.companion}
        return {"weight": self.weight, **companion, **self.state, "gradient": self.gradient}

    @property
    def tensors(self) -> list[Tensor]:
        """All of it."""
        return list(self.named().values())

    @property
    def changed(self) -> list[Tensor]:
        """What an update changes."""
        return self.tensors[:-1]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a buffer for all of it."""
        return sum(round_up(tensor.nbytes, ALIGNMENT_BYTES) for tensor in self.tensors)

    def in_buffer(self, buffer: Tensor) -> FlatUnit:
        """The same run in a byte buffer, each tensor after the other."""
        found, start = Tensors(), 0
        for name, tensor in self.named().items():
            found[name] = buffer[start : start + tensor.nbytes].view(tensor.dtype)
            start += round_up(tensor.nbytes, ALIGNMENT_BYTES)
        return self._with(found, self.position)

    def cut(self, start: int, end: int) -> FlatUnit:
        """Elements `start` to `end` of the run; `start` is a multiple of 128."""
        return self._with(cut(self.named(), slice(start, end)), self.position + start)

    def _with(self, tensors: Tensors, position: int) -> FlatUnit:
        return FlatUnit(
            weight=tensors["weight"],
            companion=tensors.get("companion"),
            gradient=tensors["gradient"],
            state={name: tensors[name] for name in self.state},
            position=position,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(FlatUnit):
    """One parameter, flat, with everything that its update needs."""

    name: str
    shape: tuple[int, ...]
    step: int  # 1 at the first update
    settings: Settings
    factor: float  # what the gradient is multiplied with
    seed: int  # of rounding
    # The only elements to update: int64 [n, 2], begin and end of each, at blocks, none twice.
    ranges: Tensor | None = None
    half: Half | None = None  # what alone changes, if the optimizer has halves


NUMBERS = (
    "apply",  # 0: the step does not count, all stays as it was
    "factor",  # what the gradient is multiplied with
    # From here on what an optimizer means by it: `HostOptimizer.coefficients`.
    *("decay", "rate", "keep_first", "blend_first", "keep_second", "blend_second"),
    *("root_correction", "epsilon", "first_step", "nesterov"),
    *("seed_high", "seed_low"),  # 16 bits each of the seed of rounding: float32 holds them
)
"""What an update on the device is given besides tensors; the native kernel is given the same."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What all optimizers have: settings by parameter group."""

    # Whether weights can be updated first, and moments later from the same gradient.
    has_halves: ClassVar[bool] = False
    # (name, parameter) -> what differs for it, such as `{"weight_decay": 0.0}`; or None.
    groups: Groups | None = None

    @property
    def name(self) -> str:
        """What it is called in checkpoints."""
        return type(self).__name__

    @property
    def defaults(self) -> dict[str, Any]:
        """Settings of a parameter for which `groups` says nothing, under torch's names."""
        apart = ("groups", "moments", "average", "others")  # the same for all parameters
        names = [one.name for one in fields(self) if one.name not in apart]
        found = {name: getattr(self, name) for name in names}
        return {k: tuple(value) if isinstance(value, list) else value for k, value in found.items()}

    def defaults_for(
        self, parameter: nn.Parameter, chosen: Mapping[str, Any], *, in_layer: bool
    ) -> dict[str, Any]:
        """Settings of a parameter beside those that `groups` has chosen for it.

        Raises:
            ValueError: what was chosen cannot be.
        """
        return self.defaults

    def check(self, name: str, rule: str, *, holds: bool) -> None:
        """Refuse a setting.

        Raises:
            ValueError: its rule does not hold.
        """
        if not holds:
            found = getattr(self, name)
            raise ValueError(f"{type(self).__name__}: {name} {rule}, found {found!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """What updates on the device take, beside passes over memory."""

    matrix_flops: float = 0.0
    working_bytes: int = 0  # at once

    @classmethod
    def of(cls, several: Iterable[DeviceWork]) -> DeviceWork:
        """That of updates one after the other."""
        found = list(several)
        return cls(
            matrix_flops=sum(one.matrix_flops for one in found),
            working_bytes=max((one.working_bytes for one in found), default=0),
        )


@dataclass(frozen=True, kw_only=True)
class HostOptimizer(Optimizer, ABC):
    """An optimizer whose state and arithmetic are on the host."""

    # Of a running mean of the weights: the share of itself that it keeps in every step. None: there
    # is no such mean.
    average: float | None = None

    def __post_init__(self) -> None:
        """Refuse settings that make no sense; whoever has more of them calls this, too."""
        is_share = self.average is None or 0 <= self.average < 1
        self.check("average", "must lie in [0, 1), or be None", holds=is_share)

    def kept(self, settings: Settings, shape: tuple[int, ...]) -> dict[str, StateKind]:
        """All that is kept of a parameter of this shape."""
        mean = {} if self.average is None else {"average": StateKind()}
        return {**self.state_kinds(settings), **mean}

    @property
    def keeps_means(self) -> bool:
        """Whether there are means that may stand for the weights: state of the name "average"."""
        return self.average is not None

    @property
    def is_by_parameter(self) -> bool:
        """Whether state is kept for each parameter by itself, not for all elements of a unit.

        Then no rank can hold a piece of it.
        """
        return False

    def one_for(self, settings: Settings) -> HostOptimizer:
        """Which optimizer updates a parameter with these settings: this one, or one inside it."""
        return self

    def needs_whole(self, settings: Settings) -> bool:
        """Whether a parameter cannot be updated in parts, such as rows of a table."""
        return False

    @property
    def may_run_on_device(self) -> bool:
        """Whether the device can do the update."""
        return self.average is None and type(self).on_device is not HostOptimizer.on_device

    def device_work(self, settings: Settings, shape: tuple[int, ...]) -> DeviceWork:
        """What an update of such a parameter takes there, beside passes over memory."""
        return DeviceWork()

    def blend_average(self, step: int) -> float:
        """How much closer a running mean comes to its weight: at first, it becomes the weight."""
        return 1.0 if step == 1 else 1.0 - (self.average or 0.0)

    @abstractmethod
    def state_kinds(self, settings: Settings) -> dict[str, StateKind]:
        """What is kept per parameter, under torch's names, in the order of the native kernel."""

    @abstractmethod
    def arithmetic(self, weight: Tensor, gradient: Tensor, update: Update) -> None:
        """Update a float32 weight in place from its float32 gradient, readably."""

    def coefficients(self, settings: Settings, step: int) -> dict[str, float]:
        """What follows from settings and step, by the names of `NUMBERS`."""
        return {}

    def native_number(self, settings: Settings) -> int | None:
        """Which update of the native kernel is this one; None: it has none."""
        return None

    @staticmethod
    def on_device(master: Tensor, gradient: Tensor, state: Tensors, numbers: Tensors) -> Tensors:
        """What the device makes of a master ("master") and of exact state, in float32.

        Args:
            master: Of a weight.
            gradient: As it counts.
            state: By name.
            numbers: Scalars that `coefficients` has given, or 0.
        """
        raise NotImplementedError

    def numbers(self, settings: Settings, step: int, factor: float, seed: int) -> dict[str, float]:
        """The coefficients of an update, with those that all optimizers have."""
        if step < 1:
            raise ValueError(f"step must be 1 at the first update, found {step}")
        rounding = rounding_seed(seed, step=step)
        found = {"factor": factor, "seed": rounding, **self.coefficients(settings, step)}
        if self.average is not None:
            found["blend_average"] = self.blend_average(step)
        return found

    def readable(self, update: Update) -> float:
        """The update in PyTorch; the sum of squares of what it changes the float32 master by."""
        before = master_of(update.weight, update.companion).clone()
        if update.ranges is None and update.half is None:
            self._update_whole(update)
        else:
            self._update_part(update)
        after = master_of(update.weight, update.companion)
        return float((after - before).double().square().sum())

    def _update_whole(self, update: Update) -> None:
        """Join the master, do the arithmetic, split it again."""
        gradient = update.gradient.to(torch.float32)
        if update.factor != 1.0:
            gradient = gradient * update.factor
        master, exact = master_of(update.weight, update.companion), update
        if "exp_avg_unit" in update.state:
            first, root = eight_bit.decode(update.state)
            exact = replace(update, state={"exp_avg": first, "exp_avg_sq": root.square()})
        self.arithmetic(master, gradient, exact)
        store_master(master, update.weight, update.companion)
        if self.average is not None:
            average = update.state["average"]
            average.add_((master - average) * self.blend_average(update.step))
        if exact is not update:
            seed = rounding_seed(update.seed, step=update.step)
            first, root = exact.state["exp_avg"], exact.state["exp_avg_sq"].sqrt()
            eight_bit.encode(update.state, first, root, position=update.position, seed=seed)

    def _update_part(self, update: Update) -> None:
        """Update a copy of everything and keep what lies in the ranges, and in the half.

        Arithmetic on parts of tensors would be cheaper, but torch does not promise the same bits:
        it may round differently in a vector loop and in the loop over what that leaves.
        """
        numel = update.weight.numel()
        blocks = torch.zeros(num_blocks(numel), dtype=torch.bool)
        for start, end in [[0, numel]] if update.ranges is None else update.ranges.tolist():
            blocks[start // BLOCK_SIZE : num_blocks(end)] = True
        elements = blocks.repeat_interleave(BLOCK_SIZE)[:numel]
        copy = replace(
            update,
            weight=update.weight.clone(),
            companion=None if update.companion is None else update.companion.clone(),
            state={name: tensor.clone() for name, tensor in update.state.items()},
        )
        self._update_whole(copy)
        updated = copy.named()
        for name, kept in update.named().items():
            half = "weights" if name in ("weight", "companion", "average") else "moments"
            if name != "gradient" and update.half in (None, half):
                chosen = elements if kept.numel() == numel else blocks
                kept[chosen] = updated[name][chosen]
