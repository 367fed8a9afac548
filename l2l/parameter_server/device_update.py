"""The updates of host optimizers, done on the accelerator.

For units whose optimizer state lives on the device or is streamed through it. The arithmetic is
that of the readable versions in optimizers.py, in float32, written as functions of flat tensors:
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
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import dlpack

from l2l.parameter_server.eight_bit import BLOCK_SIZE, cuts, decoded, encoded, in_rows
from l2l.parameter_server.optimizer import NUMBERS, FlatUnit, HostOptimizer, Settings, Tensors
from l2l.parameter_server.precision import master_of

PIECE = 1 << 22  # elements updated at once eagerly, to bound the memory for what lies between
FALLBACK_PIECE = 1 << 20  # the same where compilation failed, for which no memory was foreseen
COMPILED_PIECE = 1 << 30  # elements updated at once when compiled: positions fit 32 bits

_NAN_BITS = 0x7FC00000
_EXAMPLE_ROWS = 2048  # what a function is compiled with

NUM_NUMBERS = len(NUMBERS)
APPLY = NUMBERS.index("apply")  # of a step that does not count, 0

OnDevice = Callable[[Tensor, Tensor, Tensors, Tensors], Tensors]  # `HostOptimizer.on_device`
Function = Callable[[Tensors, Tensor], None]  # of a unit's tensors, in rows, and numbers


def supports(optimizer: object) -> bool:
    """Whether `update` can do what this optimizer does."""
    return isinstance(optimizer, HostOptimizer) and optimizer.may_run_on_device


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
    if not supports(optimizer):
        raise ValueError(f"{type(optimizer).__name__} cannot update on the device")
    values = optimizer.numbers(settings, step, factor, seed)
    rounding = int(values["seed"])
    values |= {"apply": apply, "seed_high": rounding >> 16, "seed_low": rounding & 0xFFFF}
    ordered = [float(values.get(name, 0.0)) for name in NUMBERS]
    return [float(value) for value in torch.tensor(ordered, dtype=torch.float32).tolist()]


@torch.no_grad()
def update(
    optimizer: HostOptimizer,
    unit: FlatUnit,
    numbers: Tensor,  # float32 [NUM_NUMBERS], on the device
    *,
    compiled: bool,
) -> None:
    """One step of an optimizer, in place; without effect if the step does not count.

    Args:
        optimizer: One that is supported.
        unit: What is updated.
        numbers: What the function of that name gives, which refuses other optimizers.
        compiled: Use `torch.compile`, and where that fails warn once and run eagerly.
    """
    function, piece = type(optimizer).on_device, PIECE
    in_one_pass: Function | None = None
    if compiled:
        in_one_pass = _compiled(function, _rows(unit, slice(0, 0)))
        piece = min(piece, FALLBACK_PIECE) if in_one_pass is None else COMPILED_PIECE
    for span in cuts(unit.weight.numel(), piece):
        rows = _rows(unit, span)
        # A single row would be compiled apart: one is never a dynamic size.
        if in_one_pass is None or span.stop - span.start < 2 * BLOCK_SIZE:
            _update_rows(function, rows, numbers)
            continue
        with torch.accelerator.device_index(numbers.device.index):  # DLPack wants the current one
            in_one_pass({name: _alone(tensor) for name, tensor in rows.items()}, _alone(numbers))


def _rows(unit: FlatUnit, span: slice) -> Tensors:
    """A piece of a unit as views ([Note: rows of blocks]), 16-bit weights as their bits."""
    rows = in_rows(unit.named(), span)
    if unit.companion is not None:
        rows["weight"] = rows["weight"].view(torch.int16)
    if "exp_avg_unit" in rows:
        first_block = (unit.position + span.start) // BLOCK_SIZE
        # A kernel that fills it: a copy from the host might wait for the device.
        rows["first_block"] = torch.full((1, 1), first_block, device=unit.weight.device)
    return rows


def _alone(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own ([Note: separate storages]); -1: no stream waits."""
    return dlpack.from_dlpack(tensor.__dlpack__(stream=-1))


_lock = threading.Lock()
_functions: dict[tuple[object, ...], Function | None] = {}


def _compiled(function: OnDevice, rows: Tensors) -> Function | None:
    """The function compiled for tensors of these dtypes; None if that failed once."""
    device = rows["weight"].device
    key = (function, device, *((name, tensor.dtype) for name, tensor in rows.items()))
    with _lock:
        if key not in _functions:
            _functions[key] = _compile(function, rows)
        return _functions[key]


def _compile(function: OnDevice, rows: Tensors) -> Function | None:
    """Compile by a call with an example, in which nothing of value is lost if it fails."""
    example = {}
    for name, tensor in rows.items():
        if name == "first_block":
            example[name] = torch.zeros_like(tensor)
            continue
        example[name] = tensor.new_zeros(_EXAMPLE_ROWS, tensor.shape[1])
        torch._dynamo.mark_dynamic(example[name], 0)

    def update_rows(tensors: Tensors, numbers: Tensor) -> None:
        _update_rows(function, tensors, numbers)

    compiled: Function = torch.compile(update_rows, fullgraph=True)
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


def _update_rows(function: OnDevice, tensors: Tensors, numbers: Tensor) -> None:
    """Overwrite rows with what the function makes of them, if the step counts."""
    named = dict(zip(NUMBERS, numbers.unbind(), strict=True))

    def write(values: Tensors) -> None:
        for name, value in values.items():
            target = tensors[name]
            target.copy_(torch.where(named["apply"] != 0, value.to(target.dtype), target))

    made = _made(function, tensors, named)
    write(_halves(made.pop("master"), tensors.get("companion")))
    if "first_block" in tensors:  # 8-bit moments
        seed = (named["seed_high"].to(torch.int64) << 16) + named["seed_low"].to(torch.int64)
        first, root = made.pop("exp_avg"), made.pop("exp_avg_sq").sqrt()
        made = encoded(first, root, tensors["first_block"], seed)
    write(made)


def _made(function: OnDevice, tensors: Tensors, named: Tensors) -> Tensors:
    """What a function makes of the master, the gradient as it counts, and exact state."""
    gradient = tensors["gradient"].to(torch.float32) * named["factor"]
    state = tensors
    if "first_block" in tensors:
        first, root = decoded(tensors)
        state = {"exp_avg": first, "exp_avg_sq": root.square()}
    return function(master_of(tensors["weight"], tensors.get("companion")), gradient, state, named)


def store_if(counts: Tensor, master: Tensor, unit: FlatUnit) -> None:
    """Write a float32 master into a flat run, if the step counts."""
    tensors = unit.named()
    if unit.companion is not None:
        tensors["weight"] = tensors["weight"].view(torch.int16)
    for name, value in _halves(master, unit.companion).items():
        target = tensors[name]
        target.copy_(torch.where(counts, value.to(target.dtype), target))


def _halves(master: Tensor, companion: Tensor | None) -> Tensors:
    """A float32 master as bits of a weight and what completes it."""
    if companion is None:
        return {"weight": master}
    if companion.dtype is torch.float32:
        return {"companion": master, "weight": master.to(torch.float16).view(torch.int16)}
    # See [Note: NaN on the device].
    bits = torch.where(master.isnan(), _NAN_BITS, master.view(torch.int32))
    upper = (bits + 0x8000) >> 16
    return {"weight": upper, "companion": bits - (upper << 16)}
