"""What a machine can do, measured: its link, its arithmetic, its memory, its host optimizer.

`probe` measures in less than two seconds; `known_hardware` keeps what was measured in a file and
measures once per machine. `H200` has the figures of the machine that docs/benchmarks.md speaks of,
so that plans for it can be made elsewhere.

[Note: own device] A probe works on a device of its own, opened beside the one it is asked about:
memory that it registers belongs to that one and is given back with it, and so is what torch kept of
the device memory, which would count as taken otherwise.

[Note: checking device] The CPU as a device has a copy of memory for a link; there everything is
measured in small, to take no time. The figures are honest and of little use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from l2l.device import Device, Work, open_device
from l2l.files import cache_folder, write_file
from l2l.parameter_server import AdamW, HostKernel, Update, num_blocks, working_threads
from l2l.schedule import Lane

BYTES_PER_PARAMETER = 26  # read and written by exact AdamW
ROUNDS = 3
LONGEST_SECONDS = 0.15  # of the runs that measure one rate
NUM_LAUNCHES = 200
LEAST_ROOM = 1 << 20  # bytes; with less, nothing fits in any case


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Measured facts of one machine; rates per second."""

    device_name: str
    device_bytes: int
    num_threads: int
    fetch_rate: float  # bytes from the host, while nothing goes there
    drain_rate: float  # bytes to the host, while nothing comes from there
    both_ways_rate: float  # bytes in each direction while both are busy
    matrix_rate: float  # floating-point operations of large 16-bit matrix products
    single_rate: float  # of float32 ones, in the precision that torch is set to
    memory_rate: float  # bytes read and written by a large elementwise operation on the device
    launch_seconds: float  # that the host needs to submit a small operation
    host_rate: float  # bytes read and written by exact AdamW on the host
    eight_bit_rate: float  # parameters updated on the host with 8-bit moments
    context_bytes: int  # that a process takes of the device beside its tensors

    def __post_init__(self) -> None:
        kinds: dict[str, Any] = {"str": str, "int": int, "float": (int, float)}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            is_number, least = entry.type != "str", 0 if entry.name == "context_bytes" else 1e-300
            if not isinstance(value, kinds[str(entry.type)]) or (is_number and not value >= least):
                expected = f"{entry.type} above 0" if is_number else "text"
                raise ValueError(f"{entry.name} must be {expected}, found {value!r}")

    @classmethod
    def of_json(cls, text: str) -> Hardware:
        """The facts that `to_json` wrote.

        Raises:
            ValueError: the text is something else.
        """
        found = json.loads(text)
        names = [entry.name for entry in dataclasses.fields(cls)]
        if not isinstance(found, dict) or set(found) != set(names):
            raise ValueError(f"expected an object with entries {', '.join(names)}")
        return cls(**found)

    def to_json(self) -> str:
        """The facts as text."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @override
    def __str__(self) -> str:
        rows = (
            ("device memory", self.device_bytes / 1e9, "GB"),
            ("context and libraries", self.context_bytes / 1e9, "GB"),
            ("link, to the device", self.fetch_rate / 1e9, "GB/s"),
            ("link, to the host", self.drain_rate / 1e9, "GB/s"),
            ("link, each way at once", self.both_ways_rate / 1e9, "GB/s"),
            ("matrix products, 16 bits", self.matrix_rate / 1e12, "Tflop/s"),
            ("matrix products, float32", self.single_rate / 1e12, "Tflop/s"),
            ("device memory, elementwise", self.memory_rate / 1e9, "GB/s"),
            ("a small operation's launch", self.launch_seconds * 1e6, "microseconds"),
            ("host AdamW, exact", self.host_rate / 1e9, "GB/s"),
            ("host AdamW, 8-bit moments", self.eight_bit_rate / 1e9, "G parameters/s"),
        )
        width = max(len(name) for name, _, _ in rows) + 2
        table = [f"  {name:<{width}}{value:>10,.4g} {unit}" for name, value, unit in rows]
        return "\n".join([f"{self.device_name}, {self.num_threads} host threads", *table])


H200 = Hardware(
    device_name="NVIDIA H200",
    device_bytes=150_000_000_000,
    num_threads=16,
    fetch_rate=55e9,
    drain_rate=55e9,
    both_ways_rate=48e9,
    matrix_rate=700e12,
    single_rate=50e12,
    memory_rate=4.0e12,
    launch_seconds=7.3e-6,
    host_rate=136e9,
    eight_bit_rate=5.8e9,
    context_bytes=934_000_000,
)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """How much is copied and computed to measure a rate."""

    piece_bytes: int
    num_pieces: int
    matrix_side: int
    num_products: int
    elementwise_bytes: int
    num_passes: int
    num_parameters: int

    def within(self, nbytes: int) -> _Sizes:
        """Smaller ones, if these would take more device memory at a time than there is."""
        found, nbytes = self, max(nbytes, LEAST_ROOM)
        while found.piece_bytes * 2 > nbytes:
            found = replace(found, piece_bytes=found.piece_bytes // 2)
        while found.elementwise_bytes * 2 > nbytes:
            found = replace(found, elementwise_bytes=found.elementwise_bytes // 2)
        while found.matrix_side**2 * 2 * 3 > nbytes:
            found = replace(found, matrix_side=found.matrix_side // 2)
        return found


_LARGE = _Sizes(64 << 20, 16, 8192, 50, 256 << 20, 20, 32_000_000)
_SMALL = _Sizes(1 << 20, 4, 128, 1, 1 << 20, 2, 100_000)


def known_hardware(
    device: Device, kernel: HostKernel | None, *, room: int | None = None
) -> Hardware:
    """The facts of this machine, from a file if it was measured before.

    Args:
        device: whose.
        kernel: the native optimizer; None measures the readable one.
        room: device memory that measuring may take.
    """
    path = _path_of(device, kernel)
    with contextlib.suppress(OSError, ValueError):
        known = None if path is None else Hardware.of_json(path.read_text())
        if known is not None and known.device_bytes == device.total_bytes():
            return known
    found = probe(device, kernel, room=room)
    if room is None or _LARGE.within(room) == _LARGE:  # else measured roughly: not to be kept
        remember(found, device, kernel)
    return found


def remember(hardware: Hardware, device: Device, kernel: HostKernel | None) -> None:
    """Keep the facts of this machine in their file, if it can be written."""
    path = _path_of(device, kernel)
    if path is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, hardware.to_json(), shared=True)


def _path_of(device: Device, kernel: HostKernel | None) -> Path | None:
    """Where the facts of this machine are kept; None: nobody is at home."""
    level = "no kernel" if kernel is None else kernel.level
    machine = f"{device.name} torch {torch.__version__} {torch.get_num_threads()} threads {level}"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", machine).strip("-").lower()
    folder = cache_folder()
    return None if folder is None else folder / f"hardware-{name}.json"


def probe(device: Device, kernel: HostKernel | None, *, room: int | None = None) -> Hardware:
    """Measure a machine; arguments as those of `known_hardware`."""
    sizes = _SMALL if device.torch_device.type == "cpu" else _LARGE
    sizes = sizes if room is None else sizes.within(room)
    own = open_device(device.torch_device)  # [Note: own device]
    number = sizes.num_parameters if kernel is not None else _SMALL.num_parameters
    try:
        fetch, drain, both_ways = _link_rates(own, sizes)
        return Hardware(
            device_name=device.name,
            device_bytes=device.total_bytes(),
            num_threads=torch.get_num_threads(),
            fetch_rate=fetch,
            drain_rate=drain,
            both_ways_rate=both_ways,
            matrix_rate=_matrix_rate(own, sizes, torch.bfloat16),
            single_rate=_matrix_rate(own, sizes, torch.float32),
            memory_rate=_memory_rate(own, sizes),
            launch_seconds=_launch_seconds(own),
            host_rate=_update_rate(own, kernel, AdamW(), number) * BYTES_PER_PARAMETER,
            eight_bit_rate=_update_rate(own, kernel, AdamW(moments="8bit"), number),
            context_bytes=own.context_bytes(),  # libraries were used by now
        )
    finally:
        own.close()
        own.give_back()


def _best_seconds(work: Callable[[], object]) -> float:
    """The shortest of a few runs, after one that warms up; of one, if that takes long."""
    work()
    seconds: list[float] = []
    while len(seconds) < ROUNDS and sum(seconds) < LONGEST_SECONDS:
        seconds.append(_seconds(work))
    return max(min(seconds), 1e-9)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _lane_seconds(device: Device, times: int, *works: tuple[Lane, Work]) -> float:
    """Of a round of work on lanes at the same time.

    In so many rounds, or in fewer where they take long.
    """

    def work_on_lanes(times: int) -> None:
        for _ in range(times):
            for lane, work in works:
                device.submit(lane, "probe", work)
        for event in [device.record(lane) for lane, _ in works]:
            event.synchronize()

    work_on_lanes(1)  # loads kernels
    one = _seconds(partial(work_on_lanes, 1))
    fewer = max(1, min(times, int(LONGEST_SECONDS / ROUNDS / max(one, 1e-9))))
    return _best_seconds(partial(work_on_lanes, fewer)) / fewer


def _link_rates(device: Device, sizes: _Sizes) -> list[float]:
    """Bytes to the device, to the host, and each way at once."""
    host, other_host = (device.host_empty(sizes.piece_bytes, registered=True) for _ in range(2))
    near, other_near = (device.empty(sizes.piece_bytes) for _ in range(2))
    fetch = (Lane.FETCH, partial(near.copy_, host, non_blocking=True))
    drain = (Lane.DRAIN, partial(other_host.copy_, other_near, non_blocking=True))
    number = sizes.num_pieces
    ways = ([fetch], [drain], [fetch, drain])
    return [sizes.piece_bytes / _lane_seconds(device, number, *one) for one in ways]


def _matrix_rate(device: Device, sizes: _Sizes, dtype: torch.dtype) -> float:
    side, where = 2 * sizes.matrix_side // dtype.itemsize, device.torch_device
    left, right = (torch.randn(side, side, dtype=dtype, device=where) for _ in range(2))
    product = partial(torch.mm, left, right, out=torch.empty_like(left))
    seconds = _lane_seconds(device, sizes.num_products, (Lane.COMPUTE, product))
    return 2 * side**3 / seconds


def _memory_rate(device: Device, sizes: _Sizes) -> float:
    numel, where = sizes.elementwise_bytes // 2, device.torch_device
    source, target = (torch.zeros(numel, dtype=torch.bfloat16, device=where) for _ in range(2))
    negate = partial(torch.neg, source, out=target)
    seconds = _lane_seconds(device, sizes.num_passes, (Lane.COMPUTE, negate))
    return 2 * sizes.elementwise_bytes / seconds


def _launch_seconds(device: Device) -> float:
    number = torch.zeros(1, device=device.torch_device)

    def launch() -> None:
        for _ in range(NUM_LAUNCHES):
            torch.neg(number, out=number)

    return _lane_seconds(device, 1, (Lane.COMPUTE, launch)) / NUM_LAUNCHES


def _update_rate(
    device: Device, kernel: HostKernel | None, optimizer: AdamW, num_parameters: int
) -> float:
    """Parameters/s of the host optimizer, in memory as the parameter server has it."""

    def take(dtype: torch.dtype, numel: int = num_parameters) -> Tensor:
        return device.host_empty(numel * dtype.itemsize, registered=False).view(dtype)

    update = Update(
        name="probe",
        shape=(num_parameters,),
        weight=take(torch.bfloat16),
        companion=take(torch.int16),
        gradient=take(torch.bfloat16),
        state={
            name: take(kind.dtype, num_blocks(num_parameters) if kind.per_block else num_parameters)
            for name, kind in optimizer.state_kinds(optimizer.defaults).items()
        },
        position=0,
        step=1,
        settings=optimizer.defaults,
        factor=1.0,
        seed=0,
    )
    if kernel is None:
        return num_parameters / _best_seconds(partial(optimizer.readable, update))
    native = partial(kernel.update, optimizer, update, num_threads=working_threads())
    return num_parameters / _best_seconds(native)
