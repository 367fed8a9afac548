"""The native host kernel, called from Python: updates of flat buffers, one pass over memory each.

Also rows of tables that stay on the host: `HostKernel.gather` and `.add_rows`.

`host_kernel.cpp` holds the arithmetic and its reasons ([Note: split master], [Note: 8-bit moments]
and [Note: subnormals] are there); this module checks tensors and calls the library with an
optimizer's coefficients (coefficients.py). The interpreter's lock is
released meanwhile, so updates run beside the relay. Nothing is decided here: which range, when, and
with how many threads is the caller's choice, and no result depends on the last.

Bytes read and written per parameter, which is what an update costs (gradients in bfloat16):

    exact AdamW         weight and remainder 8, moments 16, gradient 2     26
    8-bit moments       weight and remainder 8, moments 4 + 1/8, gradient 2     14.1
    Lion, momentum SGD  weight and remainder 8, moment 8, gradient 2     18
    half of exact AdamW     weights or moments read only     18

The weight of a parameter comes in one of three forms, which are types: `SplitWeight`,
`Float32Weight`, `Float16Weight`. So do moments: `Moments`, `EightBitMoments` (operands.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor

from l2l.parameter_server.coefficients import AdamWUpdate, LionUpdate, Numbers, SGDUpdate
from l2l.parameter_server.eight_bit import BLOCK_SIZE
from l2l.parameter_server.operands import (
    GRADIENT_FORMS,
    TARGET_FORMS,
    EightBitMoments,
    Float16Weight,
    Float32Weight,
    Moments,
    RowGroups,
    SplitWeight,
    Weight,
    check_add_rows,
    check_gather,
    check_tensor,
    checked_ranges,
)

LIBRARY = Path(__file__).with_name("libhost_kernel.so")
LEVELS = ("portable", "avx2", "avx512")

Half = Literal["weights", "moments"]  # of an update: see [Note: halves] in the source


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


@final
class HostKernel:
    """The loaded library. Its methods may be called from several threads, on different memory."""

    def __init__(self, library: Path) -> None:
        """Load the library at a path; `load` looks for the usual one."""
        self._library = ctypes.CDLL(str(library))
        pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self._local = threading.local()  # what this thread prepares
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "job_bytes": (int64, []),
            "call_bytes": (int64, []),
            "level": (int32, []),
            "highest_level": (int32, []),
            "set_level": (None, [int32]),
            "updates": (ctypes.c_double, [ctypes.POINTER(_Call), int64, int32]),
            "sum_of_squares": (ctypes.c_double, [int32, pointer, int64, int32]),
            "split": (None, [pointer, pointer, pointer, int64, int32]),
            "join": (None, [pointer, pointer, pointer, int64, int32]),
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
            coefficients=_Coefficients(**update.coefficients()),
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
        job = _Job(coefficients=_Coefficients(**update.coefficients()))
        if momentum is not None:
            numel = weight.weight.numel()
            check_tensor(momentum, name="momentum", dtypes=(torch.float32,), numel=numel)
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
        check_tensor(momentum, name="momentum", dtypes=(torch.float32,), numel=numel)
        job = _Job(first=momentum.data_ptr(), coefficients=_Coefficients(**update.coefficients()))
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
        check_tensor(gradient, name="gradient", dtypes=tuple(GRADIENT_FORMS), numel=numel)
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
        forms = (optimizer, form, GRADIENT_FORMS[gradient.dtype])
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
        check_tensor(gradient, name="gradient", dtypes=tuple(GRADIENT_FORMS))
        form = GRADIENT_FORMS[gradient.dtype]
        arguments = (form, gradient.data_ptr(), gradient.numel())
        return float(self._call("sum_of_squares", *arguments, num_threads=num_threads))

    def split(self, master: Tensor, *, weight: SplitWeight, num_threads: int) -> None:
        """Write a float32 master as weight and remainder, without loss."""
        numel = weight.weight.numel()
        check_tensor(master, name="master", dtypes=(torch.float32,), numel=numel)
        pointers = (master.data_ptr(), weight.weight.data_ptr(), weight.remainder.data_ptr())
        self._call("split", *pointers, numel, num_threads=num_threads)

    def join(self, weight: SplitWeight, *, master: Tensor, num_threads: int) -> None:
        """Write weight and remainder as the float32 master they are."""
        numel = weight.weight.numel()
        check_tensor(master, name="master", dtypes=(torch.float32,), numel=numel)
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
        check_gather(table, ids, out)
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
        check_add_rows(target, ids, source)
        groups = RowGroups.of(ids, without=without)
        return self.add_groups(target, groups, source, num_threads=num_threads)

    def add_groups(
        self, target: Tensor, groups: RowGroups, source: Tensor, *, num_threads: int
    ) -> float:
        """`add_rows` for ids that were grouped, and checked, before."""
        rows = groups.rows
        forms = (TARGET_FORMS[target.dtype], GRADIENT_FORMS[source.dtype])
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

    def perform(
        self,
        numbers: Sequence[Numbers] | None = None,
        *,
        ranges: Sequence[Tensor | None] | None = None,
        num_threads: int,
    ) -> float:
        """Perform all of them, in no order.

        Args:
            numbers: One for each, if they are not those it was prepared with.
            ranges: One for each, as `checked_ranges` returns them, where they are not those it was
                prepared with.
            num_threads: How many threads to take.

        Returns:
            The sum of squares of all changes of weights, of the float32 masters, to about 1e-7 of
            itself ([Note: changes] in the source); the same bits for any number of threads.
        """
        if numbers is not None:
            for job, one in zip(self._jobs, numbers, strict=True):
                job.coefficients = _Coefficients(**one.coefficients())
        if self._array is None:
            self._array = (_Call * len(self._calls))(*self._calls)
        given = itertools.repeat(None) if ranges is None else ranges
        for call, usual, other in zip(self._array, self._ranges, given, strict=False):
            chosen = usual if other is None else other
            call.ranges, call.num_ranges = chosen.data_ptr(), len(chosen)
        if not self._calls:
            return 0.0
        arguments = (self._array, len(self._calls))
        return float(self._kernel._call("updates", *arguments, num_threads=num_threads))


def working_threads() -> int:
    """Threads for work beside a running device: all but one, which submits the device's work."""
    return max(1, torch.get_num_threads() - 1)


def load(library: Path = LIBRARY) -> HostKernel | None:
    """The kernel, or None if it was not built; the caller then warns and takes the slow path.

    Raises:
        OSError: the library is there but cannot be loaded (built for another machine, say).
    """
    return HostKernel(library) if library.exists() else None
