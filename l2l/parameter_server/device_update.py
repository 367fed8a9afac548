"""The updates of host optimizers, done on the accelerator.

For units whose optimizer state lives on the device or is streamed through it. The arithmetic is
that of the readable versions in optimizer.py, in float32, written as functions of flat tensors:
they run anywhere, eagerly or through `torch.compile`, and then in one pass over memory.

[Note: numbers] All that changes from step to step (what follows from the learning rate, bias
corrections, the clip factor, whether the step counts at all, the seed of rounding) arrives as one
small float32 tensor on the device: nothing is synchronised and nothing is compiled again. The host
computes them in float64 and rounds once. The readable versions, too, have such numbers rounded to
float32 when they meet a tensor, so results agree but for the last bits: which products and sums are
fused differs by device, and the division of a compiled function is a little rough on CUDA.

[Note: rows of blocks] A flat run is worked on as rows of 128 elements, the blocks of 8-bit moments.
The number of rows is the only dynamic size. That a row is 128 long is known when the function is
compiled: a unit of 8-bit moments is then the maximum of a row, and all loads are whole vectors.
What is left over is one shorter row, and updated eagerly.

[Note: separate storages] A unit's tensors may be views of one buffer in several dtypes, and
`torch.compile` refuses to write to such (it cannot say how they overlap; here they do not). So a
compiled function gets every tensor through DLPack, which makes it look like one with its own
storage.

[Note: NaN on the device] CUDA computes 0x7fffffff for NaN, whose upper half in a split master would
be zero ([Note: split master] in precision.py). As in the native kernel, every NaN in a split master
is stored as 0x7fc00000.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import dlpack

from l2l.parameter_server.eight_bit import BLOCK_SIZE, decoded, encoded, num_blocks
from l2l.parameter_server.layout import ALIGNMENT_BYTES, round_up
from l2l.parameter_server.optimizer import SGD, AdamW, HostOptimizer, Lion, Settings
from l2l.parameter_server.precision import COMPANION, join_master

PIECE = 1 << 22  # elements updated at once eagerly, to bound the memory for what lies between
FALLBACK_PIECE = 1 << 20  # the same where compilation failed, for which no memory was foreseen
COMPILED_PIECE = 1 << 30  # elements updated at once when compiled: positions fit 32 bits

_NAN_BITS = 0x7FC00000
_EXAMPLE_ROWS = 2048  # what a function is compiled with

_COMPANION = {**COMPANION, torch.float32: None}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatUnit:
    """A flat run of elements with the same settings, on one device, all of equal length.

    Where it spans padding, gradient and state are zero there.
    """

    weight: Tensor  # bfloat16, float16 or float32
    companion: Tensor | None  # int16 remainder of a bfloat16 weight, float32 master of a float16
    gradient: Tensor  # float32, bfloat16 or float16
    state: dict[str, Tensor]  # as `HostOptimizer.state_kinds` names them
    position: int  # of the first element in its unit's flat buffer, a multiple of 128

    @property
    def changed(self) -> list[Tensor]:
        """What an update changes."""
        companion = [] if self.companion is None else [self.companion]
        return [self.weight, *companion, *self.state.values()]

    @property
    def tensors(self) -> list[Tensor]:
        """All of it."""
        return [*self.changed, self.gradient]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a buffer for all of it."""
        return sum(round_up(tensor.nbytes, ALIGNMENT_BYTES) for tensor in self.tensors)

    def in_buffer(self, buffer: Tensor) -> FlatUnit:
        """The same run in a byte buffer, each tensor after the other."""
        found, start = list[Tensor](), 0
        for tensor in self.tensors:
            found.append(buffer[start : start + tensor.nbytes].view(tensor.dtype))
            start += round_up(tensor.nbytes, ALIGNMENT_BYTES)
        weight, *rest, gradient = found
        companion = None if self.companion is None else rest.pop(0)
        return FlatUnit(
            weight=weight,
            companion=companion,
            gradient=gradient,
            state=dict(zip(self.state, rest, strict=True)),
            position=self.position,
        )

    def cut(self, start: int, end: int) -> FlatUnit:
        """Elements `start` to `end` of the run; `start` is a multiple of 128."""
        span, blocks = slice(start, end), slice(start // BLOCK_SIZE, -(-end // BLOCK_SIZE))
        whole = self.weight.numel()
        return FlatUnit(
            weight=self.weight[span],
            companion=None if self.companion is None else self.companion[span],
            gradient=self.gradient[span],
            state={
                name: state[span if state.numel() == whole else blocks]
                for name, state in self.state.items()
            },
            position=self.position + start,
        )

    def __post_init__(self) -> None:
        companion = None if self.companion is None else self.companion.dtype
        if _COMPANION.get(self.weight.dtype, torch.bool) is not companion:
            raise ValueError(
                f"a weight of {self.weight.dtype} cannot have a companion of {companion}"
            )
        if self.position < 0 or self.position % BLOCK_SIZE:
            raise ValueError(f"position must be a multiple of {BLOCK_SIZE}, found {self.position}")
        numel = self.weight.numel()
        for name, tensor in _named(self).items():
            expected = num_blocks(numel) if name.endswith("_unit") else numel
            if tensor.dim() != 1 or tensor.numel() != expected:
                raise ValueError(
                    f"{name} must have the shape ({expected},), found {tuple(tensor.shape)}"
                )


class _Numbers(NamedTuple):
    """What a function is given besides its unit ([Note: numbers]): float32 scalars, 0 if unused."""

    apply: Tensor  # 0: the step does not count, all stays as it was
    factor: Tensor  # what the gradient is multiplied with
    decay: Tensor  # AdamW, Lion: 1 - lr * weight_decay; SGD: weight_decay
    rate: Tensor  # AdamW: lr / bias_correction1; SGD, Lion: lr
    keep_first: Tensor  # Lion: beta1; SGD: momentum
    blend_first: Tensor  # AdamW, Lion: 1 - beta1; SGD: 1 - dampening
    keep_second: Tensor  # AdamW, Lion: beta2
    blend_second: Tensor  # AdamW, Lion: 1 - beta2
    root_correction: Tensor  # AdamW: sqrt(bias_correction2)
    epsilon: Tensor  # AdamW
    first_step: Tensor  # SGD: the momentum becomes this step's gradient
    nesterov: Tensor  # SGD
    seed_high: Tensor  # 8-bit AdamW: the upper 16 bits of the seed
    seed_low: Tensor  # and the lower: whole numbers that float32 holds


NUM_NUMBERS = len(_Numbers._fields)
APPLY = _Numbers._fields.index("apply")  # of a step that does not count, 0

Tensors = dict[str, Tensor]  # weight, companion if there is one, gradient and state, in rows
Function = Callable[[Tensors, Tensor], None]


def supports(optimizer: object) -> bool:
    """Whether `update` can do what this optimizer does."""
    return isinstance(optimizer, AdamW | SGD | Lion)


def numbers(
    optimizer: HostOptimizer,
    settings: Settings,
    *,
    step: int,  # 1 at the first update
    factor: float,
    apply: bool,
    seed: int = 0,  # of rounding, as `Update.seed`
) -> list[float]:
    """The numbers of one step for a group of parameters, exact in float32.

    Raises:
        ValueError: the optimizer is not supported, or the step is below 1.
    """
    if step < 1:
        raise ValueError(f"step must be 1 at the first update, found {step}")
    found = None
    if supports(optimizer):
        found = optimizer.numbers(settings, step=step, factor=factor, seed=seed)
    if found is None:
        raise ValueError(f"{type(optimizer).__name__} cannot update on the device")
    values = found.coefficients()
    rounding = int(values.pop("seed", 0))
    values |= {"apply": apply, "seed_high": rounding >> 16, "seed_low": rounding & 0xFFFF}
    ordered = [float(values.get(name, 0.0)) for name in _Numbers._fields]
    return [float(value) for value in torch.tensor(ordered, dtype=torch.float32).tolist()]


@torch.no_grad()
def update(
    optimizer: HostOptimizer,
    unit: FlatUnit,
    numbers: Tensor,  # float32 [NUM_NUMBERS], on the device
    *,
    compiled: bool,
    piece: int = PIECE,
) -> None:
    """One step of an optimizer, in place; without effect if the step does not count.

    Args:
        optimizer: One that is supported.
        unit: What is updated.
        numbers: What the function of that name gives.
        compiled: Use `torch.compile`, and where that fails warn once and run eagerly.
        piece: Elements to update at once if not compiled, a multiple of 128.

    Raises:
        ValueError: the optimizer is not supported, or `piece` or `numbers` has the wrong size.
    """
    if piece < BLOCK_SIZE or piece % BLOCK_SIZE:
        raise ValueError(f"piece must be a multiple of {BLOCK_SIZE}, found {piece}")
    if numbers.shape != (NUM_NUMBERS,) or numbers.dtype is not torch.float32:
        raise ValueError(
            f"numbers must be float32 [{NUM_NUMBERS}], found {numbers.dtype} {list(numbers.shape)}"
        )
    function = _function(optimizer, unit)
    in_one_pass: Function | None = None
    if compiled:
        in_one_pass = _compiled(function, _rows(unit, 0, 0))
        piece = min(piece, FALLBACK_PIECE) if in_one_pass is None else COMPILED_PIECE
    for start, stop in _cuts(unit.weight.numel(), piece):
        rows = _rows(unit, start, stop)
        # A single row would be compiled apart: one is never a dynamic size.
        if in_one_pass is None or stop - start < 2 * BLOCK_SIZE:
            function(rows, numbers)
            continue
        with torch.accelerator.device_index(numbers.device.index):  # DLPack wants the current one
            in_one_pass({name: _alone(tensor) for name, tensor in rows.items()}, _alone(numbers))


def working_bytes(optimizer: HostOptimizer, *, compiled: bool, piece: int = PIECE) -> int:
    """An upper estimate of the device memory that an update takes for a while."""
    eight_bit = isinstance(optimizer, AdamW) and optimizer.moments == "8bit"
    bytes_per_element = 56 if eight_bit else 36
    return bytes_per_element * (min(piece, FALLBACK_PIECE) if compiled else piece)


def _named(unit: FlatUnit) -> Tensors:
    """A unit's tensors by name."""
    companion = {} if unit.companion is None else {"companion": unit.companion}
    return {"weight": unit.weight, **companion, "gradient": unit.gradient, **unit.state}


def _function(optimizer: HostOptimizer, unit: FlatUnit) -> Function:
    match optimizer:
        case AdamW(moments="8bit"):
            return _eight_bit_adamw
        case AdamW():
            return _adamw
        case SGD():
            return _momentum_sgd if unit.state else _sgd
        case Lion():
            return _lion
        case _:
            raise ValueError(f"{type(optimizer).__name__} cannot update on the device")


def _cuts(numel: int, piece: int) -> Iterator[tuple[int, int]]:
    """Cut a run into pieces of whole blocks and what is left over."""
    whole = numel // BLOCK_SIZE * BLOCK_SIZE
    for start in range(0, whole, piece):
        yield start, min(start + piece, whole)
    if whole < numel:
        yield whole, numel


def _rows(unit: FlatUnit, start: int, stop: int) -> Tensors:
    """A piece of a unit as views ([Note: rows of blocks]), 16-bit weights as their bits."""
    blocks = slice(start // BLOCK_SIZE, num_blocks(stop))
    width = min(stop - start, BLOCK_SIZE) or BLOCK_SIZE
    rows = {
        name: tensor[blocks].view(-1, 1)
        if name.endswith("_unit")
        else tensor[start:stop].view(-1, width)
        for name, tensor in _named(unit).items()
    }
    if unit.companion is not None:
        rows["weight"] = rows["weight"].view(torch.int16)
    if "exp_avg_unit" in rows:
        first_block = unit.position // BLOCK_SIZE + blocks.start
        # A kernel that fills it: a copy from the host might wait for the device.
        rows["first_block"] = torch.full((1, 1), first_block, device=unit.weight.device)
    return rows


def _alone(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own ([Note: separate storages]); -1: no stream waits."""
    return dlpack.from_dlpack(tensor.__dlpack__(stream=-1))


_lock = threading.Lock()
_functions: dict[tuple[object, ...], Function | None] = {}


def _compiled(function: Function, rows: Tensors) -> Function | None:
    """The function compiled for tensors of these dtypes; None if that failed once."""
    device = rows["weight"].device
    key = (function, device, *((name, tensor.dtype) for name, tensor in rows.items()))
    with _lock:
        if key not in _functions:
            _functions[key] = _compile(function, rows)
        return _functions[key]


def _compile(function: Function, rows: Tensors) -> Function | None:
    """Compile by a call with an example, in which nothing of value is lost if it fails."""
    example = {}
    for name, tensor in rows.items():
        if name == "first_block":
            example[name] = torch.zeros_like(tensor)
            continue
        example[name] = tensor.new_zeros(_EXAMPLE_ROWS, tensor.shape[1])
        torch._dynamo.mark_dynamic(example[name], 0)
    compiled: Function = torch.compile(function, fullgraph=True)
    try:
        # One compilation for each combination of dtypes; the usual limit is less than there are.
        # And torch, while compiling, warns of itself.
        with torch._dynamo.config.patch(recompile_limit=64), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled(example, torch.zeros(NUM_NUMBERS, device=rows["weight"].device))
    except Exception as error:
        if None not in _functions.values():
            warnings.warn(
                "updates on the device could not be compiled and run eagerly, which is slower: "
                f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",
                stacklevel=4,
            )
        return None
    return compiled


def _gradient(tensors: Tensors, named: _Numbers) -> Tensor:
    """The gradient as it counts, in float32."""
    return tensors["gradient"].to(torch.float32) * named.factor


def _master(tensors: Tensors) -> Tensor:
    """The float32 master of the weight."""
    companion = tensors.get("companion")
    if companion is None:
        return tensors["weight"]
    if companion.dtype is torch.float32:
        return companion
    return join_master(tensors["weight"], companion)


def _write(target: Tensor, value: Tensor, named: _Numbers) -> None:
    """Overwrite a tensor if the step counts."""
    target.copy_(torch.where(named.apply != 0, value.to(target.dtype), target))


def _write_master(tensors: Tensors, master: Tensor, named: _Numbers) -> None:
    """Write a float32 master as weight and companion."""
    weight, companion = tensors["weight"], tensors.get("companion")
    if companion is None:
        _write(weight, master, named)
    elif companion.dtype is torch.float32:
        _write(companion, master, named)
        _write(weight, master.to(torch.float16).view(torch.int16), named)
    else:
        # See [Note: NaN on the device].
        bits = torch.where(master.isnan(), _NAN_BITS, master.view(torch.int32))
        upper = (bits + 0x8000) >> 16
        _write(weight, upper, named)
        _write(companion, bits - (upper << 16), named)


def _adamw(tensors: Tensors, numbers: Tensor) -> None:
    named = _Numbers(*numbers.unbind())
    before = tensors["exp_avg"], tensors["exp_avg_sq"]
    first, second = _moments(*before, _gradient(tensors, named), named)
    _write_master(tensors, _stepped(_master(tensors), first, second.sqrt(), named), named)
    _write(tensors["exp_avg"], first, named)
    _write(tensors["exp_avg_sq"], second, named)


def _eight_bit_adamw(tensors: Tensors, numbers: Tensor) -> None:
    named = _Numbers(*numbers.unbind())
    first, root = _eight_bit_moments(tensors, named)
    _write_master(tensors, _stepped(_master(tensors), first, root, named), named)
    seed = (named.seed_high.to(torch.int64) << 16) + named.seed_low.to(torch.int64)
    for name, value in encoded(first, root, first_block=tensors["first_block"], seed=seed).items():
        _write(tensors[name], value, named)


def _eight_bit_moments(tensors: Tensors, named: _Numbers) -> tuple[Tensor, Tensor]:
    """The next first moment of AdamW and the root of the next second, from 8-bit moments."""
    names = ("exp_avg", "exp_avg_sq", "exp_avg_unit", "exp_avg_sq_unit")
    first, root = decoded(*(tensors[name] for name in names))
    first, second = _moments(first, root.square(), _gradient(tensors, named), named)
    return first, second.sqrt()


def _moments(
    first: Tensor, second: Tensor, gradient: Tensor, named: _Numbers
) -> tuple[Tensor, Tensor]:
    """The next moments of AdamW."""
    first = torch.lerp(first, gradient, named.blend_first)
    second = torch.addcmul(second * named.keep_second, gradient * named.blend_second, gradient)
    return first, second


def _stepped(master: Tensor, first: Tensor, root: Tensor, named: _Numbers) -> Tensor:
    """The next master of AdamW."""
    denominator = root / named.root_correction + named.epsilon
    return torch.addcdiv(master * named.decay, first * -named.rate, denominator)


def _sgd(tensors: Tensors, numbers: Tensor) -> None:
    named = _Numbers(*numbers.unbind())
    master = _master(tensors)
    gradient = _decayed_gradient(tensors, master, named)
    _write_master(tensors, torch.addcmul(master, gradient, -named.rate), named)


def _momentum_sgd(tensors: Tensors, numbers: Tensor) -> None:
    named = _Numbers(*numbers.unbind())
    master = _master(tensors)
    direction, momentum = _direction_and_momentum(tensors, master, named)
    _write(tensors["momentum_buffer"], momentum, named)
    _write_master(tensors, torch.addcmul(master, direction, -named.rate), named)


def _direction_and_momentum(
    tensors: Tensors, master: Tensor, named: _Numbers
) -> tuple[Tensor, Tensor]:
    """Where gradient descent goes, and its next momentum."""
    before, gradient = tensors["momentum_buffer"], _decayed_gradient(tensors, master, named)
    later = torch.addcmul(before * named.keep_first, gradient, named.blend_first)
    momentum = torch.where(named.first_step != 0, gradient, later)
    ahead = torch.addcmul(gradient, momentum, named.keep_first)
    direction = torch.where(named.nesterov != 0, ahead, momentum)
    # A group without momentum may share its unit with one that has it.
    has_momentum = named.keep_first != 0
    return (
        torch.where(has_momentum, direction, gradient),
        torch.where(has_momentum, momentum, before),
    )


def _decayed_gradient(tensors: Tensors, master: Tensor, named: _Numbers) -> Tensor:
    """The gradient of gradient descent with weight decay.

    Without decay the weight does not enter: zero times infinity is NaN.
    """
    gradient = _gradient(tensors, named)
    return torch.where(named.decay != 0, torch.addcmul(gradient, master, named.decay), gradient)


def _lion(tensors: Tensors, numbers: Tensor) -> None:
    named = _Numbers(*numbers.unbind())
    sign, momentum = _sign_and_momentum(tensors, named)
    _write(tensors["exp_avg"], momentum, named)
    stepped = torch.addcmul(_master(tensors) * named.decay, sign, -named.rate)
    _write_master(tensors, stepped, named)


def _sign_and_momentum(tensors: Tensors, named: _Numbers) -> tuple[Tensor, Tensor]:
    """Where Lion goes, and its next momentum."""
    momentum, gradient = tensors["exp_avg"], _gradient(tensors, named)
    mixed = torch.addcmul(momentum * named.keep_first, gradient, named.blend_first)
    later = torch.addcmul(momentum * named.keep_second, gradient, named.blend_second)
    return mixed.sign(), later
