"""The native host kernel, called from Python: updates of flat buffers, one pass over memory each.

Also rows of tables that stay on the host: `HostKernel.gather` and `.add_rows`, with the functions
`gather` and `add_rows` to say in PyTorch what they do, and to do it where the kernel was not built.

`host_kernel.cpp` holds the arithmetic and its reasons ([Note: split master], [Note: 8-bit moments]
and [Note: subnormals] are there); this module checks tensors, turns an optimizer's numbers into
coefficients (in float64, rounded to float32 once) and calls the library. The interpreter's lock is
released meanwhile, so updates run beside the relay. Nothing is decided here: which range, when, and
with how many threads is the caller's choice, and no result depends on the last.

Bytes read and written per parameter, which is what an update costs (gradients in bfloat16):

    exact AdamW         weight and remainder 8, moments 16, gradient 2     26
    8-bit moments       weight and remainder 8, moments 4 + 1/8, gradient 2     14.1
    Lion, momentum SGD  weight and remainder 8, moment 8, gradient 2     18
    half of exact AdamW     weights or moments read only     18

The weight of a parameter comes in one of three forms, which are types: `SplitWeight`,
`Float32Weight`, `Float16Weight`. So do moments: `Moments`, `EightBitMoments`.

`EightBitMoments.encode` and `.decode` say in PyTorch, bit by bit, what the library does with 8-bit
moments. They are its oracle, and serve to take moments from elsewhere and to show them.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

LIBRARY = Path(__file__).with_name("libhost_kernel.so")
LEVELS = ("portable", "avx2", "avx512")
BLOCK_SIZE = 128  # elements that share a unit, in 8-bit moments

Half = Literal["weights", "moments"]  # of an update: see [Note: halves] in the source

_GRADIENT_FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_TARGET_FORMS = {torch.float32: 0, torch.bfloat16: 1}
_LARGEST_FIRST_CODE = 127
_LARGEST_SECOND_CODE = 255
_SMALLEST_SECOND_CODE = 4
_GOLDEN_RATIO = 0x9E3779B1  # of 2^32
_MODULUS = 0xFFFFFFFF


@final
class _Coefficients(ctypes.Structure):
    """`struct Coefficients` of the library; what each means is said there."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        ("factor", ctypes.c_float),
        ("decay", ctypes.c_float),
        ("rate", ctypes.c_float),
        ("keep_first", ctypes.c_float),
        ("blend_first", ctypes.c_float),
        ("keep_second", ctypes.c_float),
        ("blend_second", ctypes.c_float),
        ("root_correction", ctypes.c_float),
        ("epsilon", ctypes.c_float),
        ("seed", ctypes.c_uint32),
        ("first_step", ctypes.c_int32),
        ("nesterov", ctypes.c_int32),
    ]


@final
class _Job(ctypes.Structure):
    """`struct Job` of the library."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        ("weight", ctypes.c_void_p),
        ("companion", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("first_unit", ctypes.c_void_p),
        ("second_unit", ctypes.c_void_p),
        ("partial_sums", ctypes.c_void_p),
        ("load_gradient", ctypes.c_void_p),
        ("first_block", ctypes.c_int64),
        ("coefficients", _Coefficients),
    ]


@final
class _Call(ctypes.Structure):
    """`struct Call` of the library."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        ("optimizer", ctypes.c_int32),
        ("weight_form", ctypes.c_int32),
        ("gradient_form", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("job", ctypes.POINTER(_Job)),
        ("ranges", ctypes.c_void_p),
        ("num_ranges", ctypes.c_int64),
    ]


def _check(
    tensor: Tensor, *, name: str, dtypes: tuple[torch.dtype, ...], numel: int | None = None
) -> None:
    """Raise ValueError unless `tensor` is something the library can walk through."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be in host memory, found it on {tensor.device}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be {expected}, found {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, found shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}"
        )
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name} must have {numel} elements, found {tensor.numel()}")


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SplitWeight:
    """A float32 master as the bfloat16 that crosses the link, and the 16 bits that are missing."""

    weight: Tensor  # bfloat16 [numel]
    remainder: Tensor  # int16 [numel]

    def __post_init__(self) -> None:
        _check(self.weight, name="weight", dtypes=(torch.bfloat16,))
        numel = self.weight.numel()
        _check(self.remainder, name="remainder", dtypes=(torch.int16,), numel=numel)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Float32Weight:
    """A weight that crosses the link in float32 and is its own master."""

    weight: Tensor  # float32 [numel]

    def __post_init__(self) -> None:
        _check(self.weight, name="weight", dtypes=(torch.float32,))


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Float16Weight:
    """A float32 master, and the float16 copy that crosses the link (nearest even; may overflow)."""

    weight: Tensor  # float16 [numel], only written
    master: Tensor  # float32 [numel]

    def __post_init__(self) -> None:
        _check(self.weight, name="weight", dtypes=(torch.float16,))
        _check(self.master, name="master", dtypes=(torch.float32,), numel=self.weight.numel())


Weight = SplitWeight | Float32Weight | Float16Weight


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Moments:
    """Both moments of AdamW in float32."""

    first: Tensor  # float32 [numel]
    second: Tensor  # float32 [numel]

    def __post_init__(self) -> None:
        _check(self.first, name="first", dtypes=(torch.float32,))
        _check(self.second, name="second", dtypes=(torch.float32,), numel=self.first.numel())


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EightBitMoments:
    """Both moments of AdamW in 8 bits, with a unit for every 128 elements. All zeros is fresh.

    `position` is that of the first element in its layer's flat buffer. Together with the seed of an
    update it determines the rounding: a range updated in pieces gives the bits of the whole.
    """

    first: Tensor  # int8 [numel]
    second: Tensor  # uint8 [numel], codes of the second moment's root
    first_unit: Tensor  # float32 [ceil(numel / 128)]
    second_unit: Tensor  # float32 [ceil(numel / 128)]
    position: int = 0

    def __post_init__(self) -> None:
        _check(self.first, name="first", dtypes=(torch.int8,))
        numel = self.first.numel()
        _check(self.second, name="second", dtypes=(torch.uint8,), numel=numel)
        units = num_blocks(numel)
        _check(self.first_unit, name="first_unit", dtypes=(torch.float32,), numel=units)
        _check(self.second_unit, name="second_unit", dtypes=(torch.float32,), numel=units)
        if self.position < 0 or self.position % BLOCK_SIZE:
            raise ValueError(
                f"position must be a multiple of {BLOCK_SIZE}, so that units belong to whole "
                f"blocks; found {self.position}"
            )

    @classmethod
    def zeros(cls, numel: int, *, position: int = 0) -> EightBitMoments:
        """Fresh moments."""
        return cls(
            first=torch.zeros(numel, dtype=torch.int8),
            second=torch.zeros(numel, dtype=torch.uint8),
            first_unit=torch.zeros(num_blocks(numel)),
            second_unit=torch.zeros(num_blocks(numel)),
            position=position,
        )

    def decode(self) -> tuple[Tensor, Tensor]:
        """The first moment and the root of the second, float32 [numel] each."""
        first_code, second_code = self.first.float(), self.second.float()
        first = first_code * first_code.abs() * _per_element(self.first_unit, self.first.numel())
        root = second_code * second_code * _per_element(self.second_unit, self.first.numel())
        return first, root

    def encode(self, first: Tensor, root: Tensor, *, seed: int) -> None:
        """Take over a first moment and the root of a second, rounded by `seed`."""
        numel = self.first.numel()
        _check(first, name="first", dtypes=(torch.float32,), numel=numel)
        _check(root, name="root", dtypes=(torch.float32,), numel=numel)
        random = _random_bits(numel, seed=seed, position=self.position)
        self.first_unit.copy_(_units(first, largest_code=_LARGEST_FIRST_CODE))
        self.second_unit.copy_(_units(root, largest_code=_LARGEST_SECOND_CODE))
        zero = torch.tensor(0.0)
        smallest = torch.where(self.second_unit > 0, float(_SMALLEST_SECOND_CODE), zero)
        first_scaled = first.abs() * _inverses(self.first_unit, numel)
        root_scaled = root * _inverses(self.second_unit, numel)
        first_code = _codes(first_scaled, random >> 16, smallest=zero)
        second_code = _codes(root_scaled, random & 0xFFFF, smallest=_per_element(smallest, numel))
        self.first.copy_(torch.where(first < 0, -first_code, first_code))
        self.second.copy_(second_code)


def checked_ranges(ranges: Tensor, *, numel: int) -> Tensor:  # int64 [n, 2]
    """Ranges of elements in increasing order.

    Args:
        ranges: int64 [n, 2], begin and end of each, in any order.
        numel: what they are ranges of.

    Raises:
        ValueError: two overlap, or one is not made of whole blocks of `numel` elements (the last
            block may be a part of one).
    """
    if ranges.dim() != 2 or ranges.shape[1] != 2:
        raise ValueError(f"ranges must have shape [n, 2], found {tuple(ranges.shape)}")
    _check(ranges, name="ranges", dtypes=(torch.int64,))
    begins, ends = ranges.unbind(1)
    at_block = ((ranges % BLOCK_SIZE == 0) | (ranges == numel)).all(1)
    wrong = ~(at_block & (begins >= 0) & (begins <= ends) & (ends <= numel))
    if wrong.any():
        raise ValueError(
            f"ranges must be of whole blocks of {BLOCK_SIZE} within {numel} elements, found "
            f"{ranges[wrong][0].tolist()}"
        )
    if (begins[1:] >= ends[:-1]).all():  # as they usually come
        return ranges
    ranges = ranges[begins < ends]
    ranges = ranges[ranges[:, 0].argsort()]
    overlapping = (ranges[:-1, 1] > ranges[1:, 0]).nonzero()
    if len(overlapping):
        first = int(overlapping[0])
        raise ValueError(f"ranges must not overlap, found {ranges[first : first + 2].tolist()}")
    return ranges


def _check_rows(table: Tensor, ids: Tensor, rows: Tensor, *, names: tuple[str, str]) -> None:
    """Raise ValueError unless `rows` are like those of `table` and it has the ids."""
    table_name, rows_name = names
    if table.dim() != 2:
        raise ValueError(f"{table_name} must have two dimensions, found {tuple(table.shape)}")
    if ids.dim() != 1:
        raise ValueError(f"ids must have one dimension, found {tuple(ids.shape)}")
    _check(ids, name="ids", dtypes=(torch.int64,))
    expected = (len(ids), table.shape[1])
    if tuple(rows.shape) != expected:
        raise ValueError(f"{rows_name} must have shape {expected}, found {tuple(rows.shape)}")
    if len(ids):
        smallest, largest = (int(limit) for limit in ids.aminmax())
        if smallest < 0 or largest >= len(table):
            raise ValueError(
                f"ids must lie in [0, {len(table)}), found {smallest if smallest < 0 else largest}"
            )


def _check_gather(table: Tensor, ids: Tensor, out: Tensor) -> None:
    _check(table, name="table", dtypes=(table.dtype,))
    _check(out, name="out", dtypes=(table.dtype,))
    _check_rows(table, ids, out, names=("table", "out"))


def _check_add_rows(target: Tensor, ids: Tensor, source: Tensor) -> None:
    _check(target, name="target", dtypes=tuple(_TARGET_FORMS))
    _check(source, name="source", dtypes=tuple(_GRADIENT_FORMS))
    _check_rows(target, ids, source, names=("target", "source"))


def gather(table: Tensor, ids: Tensor, out: Tensor) -> None:
    """`HostKernel.gather` in PyTorch."""
    _check_gather(table, ids, out)
    torch.index_select(table, 0, ids, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroups:
    """Which of many rows are to be added to which: the rows of each distinct id, in their order."""

    rows: Tensor  # distinct ids, ascending
    starts: Tensor  # of each id's positions, and the end of the last
    positions: Tensor

    @classmethod
    def of(cls, ids: Tensor, *, without: int | None) -> RowGroups:
        """Group ids, leaving one out."""
        ordered, positions = ids.sort(stable=True)
        if without is not None:
            counted = ordered != without
            ordered, positions = ordered[counted], positions[counted]
        rows, counts = torch.unique_consecutive(ordered, return_counts=True)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return cls(rows=rows, starts=starts, positions=positions)

    def by_last_position(self, ends: Tensor) -> list[RowGroups]:
        """The groups in several: those whose last position is below the first end, and so on."""
        counts = self.starts.diff()
        last = self.positions[self.starts[1:] - 1]
        part = torch.bucketize(last, ends, right=True)
        part_of_position = part.repeat_interleave(counts)
        found = []
        for number in range(len(ends)):
            own = part == number
            starts = torch.cat([counts.new_zeros(1), counts[own].cumsum(0)])
            positions = self.positions[part_of_position == number]
            found.append(RowGroups(rows=self.rows[own], starts=starts, positions=positions))
        return found

    def ids(self) -> Tensor:
        """The id of each position."""
        return self.rows.repeat_interleave(self.starts.diff())


def add_rows(target: Tensor, ids: Tensor, source: Tensor, *, without: int | None = None) -> float:
    """`HostKernel.add_rows` in PyTorch: the same target, and the same result but for rounding."""
    _check_add_rows(target, ids, source)
    if without is not None:
        ids, source = ids[ids != without], source[ids != without]
    distinct, group = torch.unique(ids, return_inverse=True)
    sums = torch.zeros(len(distinct), target.shape[1]).index_add_(0, group, source.float())
    before = target[distinct].float()
    after = before + sums
    target[distinct] = after.to(target.dtype)
    return float((after.double().square() - before.double().square()).sum())


def num_blocks(numel: int) -> int:
    """Number of units that 8-bit moments of `numel` elements need, for each moment."""
    return -(-numel // BLOCK_SIZE)


def correctly_rounded_root(values: Tensor) -> Tensor:
    """The float32 square root as the processor computes it; torch's may be off by one bit."""
    return values.double().sqrt().float()


def rounding_seed(seed: int, *, step: int) -> int:
    """The 32-bit seed from which an update of 8-bit moments rounds."""
    return (seed * 0x85EBCA6B + step * _GOLDEN_RATIO) & _MODULUS


def _per_element(of_blocks: Tensor, numel: int) -> Tensor:
    return of_blocks.repeat_interleave(BLOCK_SIZE)[:numel]


def _random_bits(numel: int, *, seed: int, position: int) -> Tensor:  # int64 [numel]
    """32 uniform bits per element: a hash of its block plus multiples of the golden ratio."""
    block = torch.arange(num_blocks(numel)) + position // BLOCK_SIZE
    x = ((block & _MODULUS) ^ seed) * _GOLDEN_RATIO & _MODULUS
    x = (x ^ (x >> 15)) * 0x85EBCA6B & _MODULUS
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _MODULUS
    within = torch.arange(numel) % BLOCK_SIZE
    return (_per_element(x ^ (x >> 16), numel) + within * _GOLDEN_RATIO) & _MODULUS


def _units(values: Tensor, *, largest_code: int) -> Tensor:  # float32 [blocks]
    blocks = num_blocks(values.numel())
    padded = torch.zeros(blocks * BLOCK_SIZE)
    padded[: values.numel()] = values.abs()
    largest = padded.view(blocks, BLOCK_SIZE).amax(1)
    units = torch.where(largest < 1e-18, 0.0, largest / float(largest_code**2))
    return torch.where(largest.isfinite(), units, torch.nan)


def _inverses(units: Tensor, numel: int) -> Tensor:  # float32 [numel]
    inverses = torch.where(units > 0, torch.tensor(0.9999997) / units, 0.0)
    return _per_element(inverses, numel)


def _rough_root(values: Tensor) -> Tensor:
    """The square root to 0.0009 of itself, for codes: a guess and a Newton step."""
    guess = (0x5F0B4000 - (values.view(torch.int32) >> 1)).view(torch.float32)
    product = values * guess
    return product * (torch.tensor(1.891) - product * guess)


def _codes(scaled: Tensor, random: Tensor, *, smallest: Tensor) -> Tensor:  # int32 [numel]
    scaled = torch.nan_to_num(scaled, nan=0.0)
    u = random.float() * 2.0**-16
    low = torch.maximum((_rough_root(scaled) - u).round(), smallest)
    return (low + (scaled > low * (low + u + u) + u)).int()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWUpdate:
    """The numbers of one AdamW update, under torch's names."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int
    """1 at the first update."""
    factor: float = 1.0
    """Multiplies the gradient first: clipping, the inverse of a loss scale."""
    seed: int = 0
    """Rounding of 8-bit moments follows from it and `step`; differ it by layer."""

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step must be 1 at the first update, found {self.step}")

    def _coefficients(self) -> _Coefficients:
        beta1, beta2 = self.betas
        return _Coefficients(
            factor=self.factor,
            decay=1 - self.lr * self.weight_decay,
            rate=self.lr / (1 - beta1**self.step),
            blend_first=1 - beta1,
            keep_second=beta2,
            blend_second=1 - beta2,
            root_correction=(1 - beta2**self.step) ** 0.5,
            epsilon=self.eps,
            seed=rounding_seed(self.seed, step=self.step),
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SGDUpdate:
    """The numbers of one update by gradient descent, under torch's names."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    step: int
    """1 at the first update, which takes the gradient for the momentum."""
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step must be 1 at the first update, found {self.step}")

    def _coefficients(self) -> _Coefficients:
        return _Coefficients(
            factor=self.factor,
            decay=self.weight_decay,
            rate=self.lr,
            keep_first=self.momentum,
            blend_first=1 - self.dampening,
            first_step=self.step == 1,
            nesterov=self.nesterov,
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LionUpdate:
    """The numbers of one Lion update."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    factor: float = 1.0

    def _coefficients(self) -> _Coefficients:
        beta1, beta2 = self.betas
        return _Coefficients(
            factor=self.factor,
            decay=1 - self.lr * self.weight_decay,
            rate=self.lr,
            keep_first=beta1,
            blend_first=1 - beta1,
            keep_second=beta2,
            blend_second=1 - beta2,
        )


Numbers = AdamWUpdate | SGDUpdate | LionUpdate


@final
class HostKernel:
    """The loaded library. Its methods may be called from several threads, on different memory."""

    def __init__(self, library: Path) -> None:
        """Load the library at a path; `load` looks for the usual one."""
        self._library = ctypes.CDLL(str(library))
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self._local = threading.local()  # what this thread prepares
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "level": (int32, []),
            "highest_level": (int32, []),
            "set_level": (None, [int32]),
            "updates": (None, [ctypes.POINTER(_Call), int64, int32]),
            "sum_of_squares": (ctypes.c_double, [int32, pointer, int64, int32]),
            "split": (None, [pointer, pointer, pointer, int64, int32]),
            "join": (None, [pointer, pointer, pointer, int64, int32]),
            "check_split": (int64, [int32]),
            "copy": (None, [pointer, pointer, int64, int32]),
            "gather": (None, [pointer, pointer, pointer, int64, int64, int32]),
            "add_rows": (ctypes.c_double, [int32, int32, *[pointer] * 5, int64, int64, int32]),
        }
        for name, (result, arguments) in signatures.items():
            function = self._function(name)
            function.restype = result
            function.argtypes = arguments

    def _function(self, name: str) -> Any:
        return getattr(self._library, f"host_kernel_{name}")

    def _call(self, name: str, *arguments: Any, num_threads: int) -> Any:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, found {num_threads}")
        return self._function(name)(*arguments, num_threads)

    @property
    def level(self) -> str:
        """Which of `LEVELS` is in use: the highest the processor has, unless set otherwise."""
        return LEVELS[self._function("level")()]

    @property
    def available_levels(self) -> tuple[str, ...]:
        """The levels this processor can run."""
        return LEVELS[: self._function("highest_level")() + 1]

    def set_level(self, level: str) -> None:
        """Use another level from now on: for tests and benchmarks, as all give the same bits."""
        if level not in self.available_levels:
            raise ValueError(
                f"level {level!r} cannot run here; this processor has "
                f"{', '.join(self.available_levels)}"
            )
        self._function("set_level")(LEVELS.index(level))

    def adamw(
        self,
        update: AdamWUpdate,
        *,
        weight: Weight,
        gradient: Tensor,  # float32, bfloat16 or float16 [numel]
        moments: Moments | EightBitMoments,
        num_threads: int,
        ranges: Tensor | None = None,  # as `checked_ranges` takes them
        half: Half | None = None,
    ) -> None:
        """One step of AdamW, in place; of the elements in `ranges` only, if given.

        With `half` only the weights or only the moments change: weights first, then moments with
        the same gradient and numbers, is one step.
        """
        numel = weight.weight.numel()
        if moments.first.numel() != numel:
            raise ValueError(
                f"moments must have {numel} elements like the weight, found {moments.first.numel()}"
            )
        job = _Job(
            first=moments.first.data_ptr(),
            second=moments.second.data_ptr(),
            coefficients=update._coefficients(),
        )
        if isinstance(moments, EightBitMoments):
            job.first_unit = moments.first_unit.data_ptr()
            job.second_unit = moments.second_unit.data_ptr()
            job.first_block = moments.position // BLOCK_SIZE
        optimizer = 1 if isinstance(moments, EightBitMoments) else 0
        optimizer += {None: 0, "weights": 5, "moments": 7}[half]
        self._update(optimizer, job, weight, gradient, ranges, num_threads=num_threads)

    def sgd(
        self,
        update: SGDUpdate,
        *,
        weight: Weight,
        gradient: Tensor,  # float32, bfloat16 or float16 [numel]
        momentum: Tensor | None = None,  # float32 [numel], if update.momentum is not 0
        num_threads: int,
        ranges: Tensor | None = None,  # as `checked_ranges` takes them
    ) -> None:
        """One step of gradient descent, in place; of the elements in `ranges` only, if given."""
        if (momentum is not None) != (update.momentum != 0):
            raise ValueError(
                f"update.momentum is {update.momentum}: a momentum tensor must be given if and "
                "only if it is not 0"
            )
        job = _Job(coefficients=update._coefficients())
        if momentum is not None:
            numel = weight.weight.numel()
            _check(momentum, name="momentum", dtypes=(torch.float32,), numel=numel)
            job.first = momentum.data_ptr()
        optimizer = 2 if momentum is None else 3
        self._update(optimizer, job, weight, gradient, ranges, num_threads=num_threads)

    def lion(
        self,
        update: LionUpdate,
        *,
        weight: Weight,
        gradient: Tensor,  # float32, bfloat16 or float16 [numel]
        momentum: Tensor,  # float32 [numel]
        num_threads: int,
        ranges: Tensor | None = None,  # as `checked_ranges` takes them
    ) -> None:
        """One step of Lion, in place; of the elements in `ranges` only, if given."""
        numel = weight.weight.numel()
        _check(momentum, name="momentum", dtypes=(torch.float32,), numel=numel)
        job = _Job(first=momentum.data_ptr(), coefficients=update._coefficients())
        self._update(4, job, weight, gradient, ranges, num_threads=num_threads)

    def _update(
        self,
        optimizer: int,
        job: _Job,
        weight: Weight,
        gradient: Tensor,
        ranges: Tensor | None,
        *,
        num_threads: int,
    ) -> None:
        numel = weight.weight.numel()
        _check(gradient, name="gradient", dtypes=tuple(_GRADIENT_FORMS), numel=numel)
        match weight:
            case SplitWeight():
                form, job.companion = 0, weight.remainder.data_ptr()
            case Float32Weight():
                form = 1
            case Float16Weight():
                form, job.companion = 2, weight.master.data_ptr()
        job.weight = weight.weight.data_ptr()
        job.gradient = gradient.data_ptr()
        given = (
            torch.tensor([[0, numel]]) if ranges is None else checked_ranges(ranges, numel=numel)
        )
        forms = (optimizer, form, _GRADIENT_FORMS[gradient.dtype])
        call = _Call(*forms, 0, ctypes.pointer(job), given.data_ptr(), len(given))
        prepared: PreparedUpdates | None = getattr(self._local, "prepared", None)
        if prepared is not None:
            prepared.add(call, job, given)
        else:
            self._call("updates", ctypes.byref(call), 1, num_threads=num_threads)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[PreparedUpdates]:
        """Collect this thread's updates inside the block, instead of performing them."""
        prepared, before = PreparedUpdates(self), getattr(self._local, "prepared", None)
        self._local.prepared = prepared
        try:
            yield prepared
        finally:
            self._local.prepared = before

    def sum_of_squares(self, gradient: Tensor, *, num_threads: int) -> float:
        """Sum of squares in float64, in an order that does not depend on the threads."""
        _check(gradient, name="gradient", dtypes=tuple(_GRADIENT_FORMS))
        form = _GRADIENT_FORMS[gradient.dtype]
        arguments = (form, gradient.data_ptr(), gradient.numel())
        return float(self._call("sum_of_squares", *arguments, num_threads=num_threads))

    def split(self, master: Tensor, *, weight: SplitWeight, num_threads: int) -> None:
        """Write a float32 master as weight and remainder, without loss."""
        numel = weight.weight.numel()
        _check(master, name="master", dtypes=(torch.float32,), numel=numel)
        pointers = (master.data_ptr(), weight.weight.data_ptr(), weight.remainder.data_ptr())
        self._call("split", *pointers, numel, num_threads=num_threads)

    def join(self, weight: SplitWeight, *, master: Tensor, num_threads: int) -> None:
        """Write weight and remainder as the float32 master they are."""
        numel = weight.weight.numel()
        _check(master, name="master", dtypes=(torch.float32,), numel=numel)
        pointers = (weight.weight.data_ptr(), weight.remainder.data_ptr(), master.data_ptr())
        self._call("join", *pointers, numel, num_threads=num_threads)

    def check_split_all(self, *, num_threads: int) -> int:
        """Try the split master on all 2^32 patterns; the number that fail."""
        return int(self._call("check_split", num_threads=num_threads))

    def copy(self, address: int, *, source: int, num_bytes: int, num_threads: int) -> None:
        """Copy memory to `address` from `source`, which must not overlap."""
        self._call("copy", address, source, num_bytes, num_threads=num_threads)

    def gather(
        self,
        table: Tensor,  # [rows, width], any dtype
        ids: Tensor,  # int64 [n]
        out: Tensor,  # [n, width], dtype of the table
        *,
        num_threads: int,
    ) -> None:
        """Copy the rows `ids` of a table to `out`.

        Raises:
            ValueError: the table has no such row; nothing was written then.
        """
        _check_gather(table, ids, out)
        pointers = (table.data_ptr(), ids.data_ptr(), out.data_ptr())
        row_bytes = table.shape[1] * table.element_size()
        self._call("gather", *pointers, len(ids), row_bytes, num_threads=num_threads)

    def add_rows(
        self,
        target: Tensor,  # float32 or bfloat16 [rows, width]
        ids: Tensor,  # int64 [n], a row may come several times
        source: Tensor,  # float32, bfloat16 or float16 [n, width]
        *,
        without: int | None = None,  # a row that nothing is added to
        groups: RowGroups | None = None,  # of these ids, if they are known
        num_threads: int,
    ) -> float:
        """Add each row of `source` to the row of `target` that `ids` says.

        The source rows of one target row are summed in float32 first, in their order, and the sum
        is added to the target, in float32, and rounded to the target's dtype: to nearest, ties to
        even.

        Returns:
            The sum of squares that the target gained, in float64, as if it had not been rounded;
            the same bits for any number of threads.

        Raises:
            ValueError: the target has no such row; nothing was written then.
        """
        _check_add_rows(target, ids, source)
        groups = groups or RowGroups.of(ids, without=without)
        rows = groups.rows
        forms = (_TARGET_FORMS[target.dtype], _GRADIENT_FORMS[source.dtype])
        tensors = (target, source, rows, groups.starts, groups.positions)
        pointers = (tensor.data_ptr() for tensor in tensors)
        sizes = (len(rows), target.shape[1])
        return float(self._call("add_rows", *forms, *pointers, *sizes, num_threads=num_threads))


@final
class PreparedUpdates:
    """Updates of certain memory, performed at once, with the numbers of any step.

    No two may touch the same memory, and all of it must outlive this.

    Whatever touches a tensor gives Python's lock away for a moment, and so does every call of the
    library. Where another thread wants it, to feed the device, each time can cost milliseconds: an
    update of forty parameters would wait for the lock longer than it takes. So what does not change
    from step to step is prepared once.
    """

    def __init__(self, kernel: HostKernel) -> None:
        self._kernel = kernel
        self._calls: list[_Call] = []
        self._jobs: list[_Job] = []
        self._ranges: list[Tensor] = []  # kept for their memory
        self._array: Any = None

    def add(self, call: _Call, job: _Job, ranges: Tensor) -> None:
        """Append an update."""
        self._calls.append(call)
        self._jobs.append(job)
        self._ranges.append(ranges)
        self._array = None

    def perform(self, numbers: Sequence[Numbers] | None = None, *, num_threads: int) -> None:
        """Perform all of them, in no order; with these numbers, if given, one for each."""
        if numbers is not None:
            for job, one in zip(self._jobs, numbers, strict=True):
                job.coefficients = one._coefficients()
        if self._array is None:
            self._array = (_Call * len(self._calls))(*self._calls)
        if self._calls:
            self._kernel._call("updates", self._array, len(self._calls), num_threads=num_threads)


def working_threads() -> int:
    """Threads for work beside a running device: all but one, which submits the device's work."""
    return max(1, torch.get_num_threads() - 1)


def load(library: Path = LIBRARY) -> HostKernel | None:
    """The kernel, or None if it was not built; the caller then warns and takes the slow path.

    Raises:
        OSError: the library is there but cannot be loaded (built for another machine, say).
    """
    return HostKernel(library) if library.exists() else None
