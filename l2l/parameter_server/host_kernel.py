"""The native host kernel, called from Python: updates of flat buffers, one pass over memory each.

Also rows of tables that stay on the host: `HostKernel.gather` and `.add_groups`.

`host_kernel.cpp` holds the arithmetic and its reasons ([Note: split master], [Note: 8-bit moments]
and [Note: subnormals] are there); this module checks tensors and calls the library with an
optimizer's coefficients. The interpreter's lock is released meanwhile, so updates run beside the
relay. Nothing is decided here: which range, when, and with how many threads is the caller's choice,
and no result depends on the last.

Bytes read and written per parameter, which is what an update costs (gradients in bfloat16):

    exact AdamW         weight and remainder 8, moments 16, gradient 2     26
    8-bit moments       weight and remainder 8, moments 4 + 1/8, gradient 2     14.1
    Lion, momentum SGD  weight and remainder 8, moment 8, gradient 2     18
    half of exact AdamW     weights or moments read only     18
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from l2l.parameter_server.eight_bit import BLOCK_SIZE
from l2l.parameter_server.optimizer import NUMBERS, HostOptimizer, Update
from l2l.parameter_server.precision import COMPANION
from l2l.parameter_server.table_rows import RowGroups, check_rows

LIBRARY = Path(__file__).with_name("libhost_kernel.so")
LEVELS = ("portable", "avx2", "avx512")
# How the library numbers what it is given.
WEIGHTS = {torch.bfloat16: 0, torch.float32: 1, torch.float16: 2}
GRADIENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
HALVES = {None: 0, "weights": 5, "moments": 7}  # beyond the number of the optimizer
STATE = ("first", "second", "first_unit", "second_unit")  # in the order of `state_kinds`
AVERAGE = "average"


def address_of(tensor: Tensor, name: str, dtypes: Collection[torch.dtype]) -> int:
    """Where a tensor begins; ValueError if it is nothing the library can walk through."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be in host memory, found it on {tensor.device}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be {expected}, found {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, found strides {tensor.stride()}")
    return tensor.data_ptr()


class _Coefficients(ctypes.Structure):
    """`struct Coefficients` of the library; what each means is said there, and in `NUMBERS`."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        *((name, ctypes.c_float) for name in NUMBERS[1:10]),
        ("seed", ctypes.c_uint32),
        ("first_step", ctypes.c_int32),
        ("nesterov", ctypes.c_int32),
        ("blend_average", ctypes.c_float),
    ]


class _Job(ctypes.Structure):
    """`struct Job` of the library."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        *((name, ctypes.c_void_p) for name in ("weight", "companion", "gradient", *STATE, AVERAGE)),
        ("load_gradient", ctypes.c_void_p),
        ("first_block", ctypes.c_int64),
        ("coefficients", _Coefficients),
    ]


class _Call(ctypes.Structure):
    """`struct Call` of the library."""

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [
        *((name, ctypes.c_int32) for name in ("optimizer", "weight", "gradient", "unused")),
        ("job", ctypes.POINTER(_Job)),
        ("ranges", ctypes.c_void_p),
        ("num_ranges", ctypes.c_int64),
    ]


@final
class HostKernel:
    """The loaded library. Its methods may be called from several threads, on different memory."""

    def __init__(self, library: Path) -> None:
        """Load the library at a path; `load` looks for the usual one."""
        self._library = ctypes.CDLL(str(library))
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "job_bytes": (int64, []),
            "call_bytes": (int64, []),
            "level": (int32, []),
            "highest_level": (int32, []),
            "set_level": (None, [int32]),
            "updates": (ctypes.c_double, [ctypes.POINTER(_Call), int64, int32]),
            "split": (None, [pointer, pointer, pointer, int64, int32]),
            "check_split": (int64, [int32]),
            "copy": (None, [pointer, pointer, int64, int32]),
            "gather": (None, [pointer, pointer, pointer, int64, int64, int32]),
            "add_rows": (ctypes.c_double, [int32, int32, *[pointer] * 5, int64, int64, int32]),
        }
        try:
            for name, (result, arguments) in signatures.items():
                function = self._function(name)
                function.restype = result
                function.argtypes = arguments
            sizes = (self._library.host_kernel_job_bytes(), self._library.host_kernel_call_bytes())
        except AttributeError:
            sizes = (0, 0)
        if sizes != (ctypes.sizeof(_Job), ctypes.sizeof(_Call)):
            raise OSError(f"{library} is of another version. Build it again with 'make kernel'.")

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

    def update(self, optimizer: HostOptimizer, update: Update, *, num_threads: int) -> float:
        """One update, in place; the result is that of `PreparedUpdates.perform`."""
        numbers = optimizer.numbers(update.settings, update.step, update.factor, update.seed)
        prepared = PreparedUpdates(self, optimizer, [update])
        return prepared.perform([numbers], ranges=[update.ranges], num_threads=num_threads)

    def split(self, master: Tensor, weight: Tensor, remainder: Tensor, *, num_threads: int) -> None:
        """Write a float32 master as weight and remainder, without loss."""
        assert master.numel() == weight.numel() == remainder.numel()
        addresses = (
            address_of(master, "master", [torch.float32]),
            address_of(weight, "weight", [torch.bfloat16]),
            address_of(remainder, "remainder", [torch.int16]),
        )
        self._call("split", *addresses, master.numel(), num_threads=num_threads)

    def check_split_all(self, *, num_threads: int) -> int:
        """Try the split master on all 2^32 patterns; the number that fail."""
        return int(self._call("check_split", num_threads=num_threads))

    def copy(self, target: Tensor, source: Tensor, *, num_threads: int) -> None:
        """Copy memory: contiguous tensors of the same size, which must not overlap."""
        assert target.nbytes == source.nbytes
        addresses = (target.data_ptr(), source.data_ptr())
        self._call("copy", *addresses, source.nbytes, num_threads=num_threads)

    def gather(self, table: Tensor, ids: Tensor, out: Tensor, *, num_threads: int) -> None:
        """Copy the rows `ids` of a table to `out`; as `table_rows.gather`."""
        check_rows(table, ids, out)
        addresses = (
            address_of(table, "table", [table.dtype]),
            address_of(ids, "ids", [torch.int64]),
            address_of(out, "out", [table.dtype]),
        )
        row_bytes = table.shape[1] * table.element_size()
        self._call("gather", *addresses, len(ids), row_bytes, num_threads=num_threads)

    def add_groups(
        self,
        target: Tensor,  # float32 or bfloat16 [rows, width]
        groups: RowGroups,
        source: Tensor,  # float32, bfloat16 or float16 [n, width]
        *,
        num_threads: int,
    ) -> float:
        """Add rows of `source` to the rows of `target` that their groups say.

        The source rows of one target row are summed in float32 first, in their order, and the sum
        is added to the target, in float32, and rounded to the target's dtype: to nearest, ties to
        even.

        Returns:
            The sum of squares that the target gained, in float64, as if it had not been rounded;
            the same bits for any number of threads.
        """
        addresses = (
            address_of(target, "target", (torch.float32, torch.bfloat16)),
            address_of(source, "source", GRADIENTS),
            *(one.data_ptr() for one in (groups.rows, groups.starts, groups.positions)),
        )
        forms, sizes = (
            (GRADIENTS[t.dtype] for t in (target, source)),
            (len(groups.rows), target.shape[1]),
        )
        return float(self._call("add_rows", *forms, *addresses, *sizes, num_threads=num_threads))


@final
class PreparedUpdates:
    """Updates of certain memory, performed at once, with the numbers of any step.

    No two may touch the same memory, and all of it must outlive this.

    Whatever touches a tensor gives Python's lock away for a moment, and so does every call of the
    library. Where another thread wants it, to feed the device, each time can cost milliseconds: an
    update of forty parameters would wait for the lock longer than it takes. So what does not change
    from step to step is prepared once.
    """

    def __init__(
        self, kernel: HostKernel, optimizer: HostOptimizer, updates: Sequence[Update]
    ) -> None:
        self._kernel = kernel
        self._whole = [torch.tensor([[0, update.weight.numel()]]) for update in updates]
        self._jobs = [_job(optimizer, update) for update in updates]
        calls = (_call(optimizer, *pair) for pair in zip(updates, self._jobs, strict=True))
        self._calls = (_Call * len(updates))(*calls)

    def perform(
        self,
        numbers: Sequence[Mapping[str, float]],
        *,
        ranges: Sequence[Tensor | None],
        num_threads: int,
    ) -> float:
        """Perform all of them, in no order.

        Args:
            numbers: `HostOptimizer.numbers` for each.
            ranges: `Update.ranges` for each.
            num_threads: How many threads to take.

        Returns:
            The sum of squares of all changes of weights, of the float32 masters, to about 1e-7 of
            itself ([Note: changes] in the source); the same bits for any number of threads.
        """
        chosen = [w if r is None else r for w, r in zip(self._whole, ranges, strict=True)]
        rows = zip(self._calls, self._jobs, numbers, chosen, strict=True)
        for call, job, coefficients, own in rows:
            job.coefficients = _Coefficients(**coefficients)
            call.ranges, call.num_ranges = own.data_ptr(), len(own)
        if not self._jobs:
            return 0.0
        arguments = (self._calls, len(self._jobs))
        return float(self._kernel._call("updates", *arguments, num_threads=num_threads))


def _job(optimizer: HostOptimizer, update: Update) -> _Job:
    """Where the library finds an update's tensors."""
    job = _Job(
        weight=address_of(update.weight, "weight", WEIGHTS),
        gradient=address_of(update.gradient, "gradient", GRADIENTS),
        first_block=update.position // BLOCK_SIZE,
    )
    if update.companion is not None:
        job.companion = address_of(update.companion, "companion", COMPANION.values())
    kinds = optimizer.state_kinds(update.settings)
    for place, (name, kind) in zip(STATE, kinds.items(), strict=False):
        setattr(job, place, address_of(update.state[name], name, [kind.dtype]))
    if optimizer.average is not None:
        job.average = address_of(update.state[AVERAGE], AVERAGE, [torch.float32])
    return job


def _call(optimizer: HostOptimizer, update: Update, job: _Job) -> _Call:
    number = optimizer.native_number(update.settings)
    assert number is not None, f"{type(optimizer).__name__} is not in the native kernel"
    forms = (WEIGHTS[update.weight.dtype], GRADIENTS[update.gradient.dtype])
    return _Call(number + HALVES[update.half], *forms, 0, ctypes.pointer(job))


def working_threads() -> int:
    """Threads for work beside a running device: all but one, which submits the device's work."""
    return max(1, torch.get_num_threads() - 1)


def load(library: Path = LIBRARY) -> HostKernel | None:
    """The kernel, or None if it was not built; the caller then warns and takes the slow path.

    Raises:
        OSError: the library is there but cannot be loaded (built for another machine, say).
    """
    return HostKernel(library) if library.exists() else None
