"""A disk to plan with: how much room it has, how fast it is, and which layers go there.

The rates are those of a long run: many drives take some gigabytes at once and then fall to a third.
So a measurement is of what the drive does for a second or two; who knows better says so
(`l2l.Disk(folder, rates="6.5/1.5GB/s")`), and with figures alone, reads and writes at the same time
are taken to share the drive: each gets half of its rate.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from l2l.device import PAGE_BYTES, DiskFolder, format_bytes, parse_bytes
from l2l.files import write_file
from l2l.parameter_server import (
    ALL_PARTS,
    HostBudget,
    HostOptimizer,
    Optimizer,
    Part,
    UnitForm,
    block_bytes,
    buffer_bytes,
)

LARGE_BYTES, SMALL_BYTES = 512 << 20, 4 << 20  # of a measurement
RATES = re.compile(r"\s*([0-9.]+)\s*/\s*([0-9.]+)\s*([kKMGT]i?B)/s\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTier:
    """Room in bytes and sustained rates in bytes/s."""

    size_bytes: int
    read_rate: float
    write_rate: float
    both_read_rate: float  # while it also writes
    both_write_rate: float

    def seconds(self, num_read: float, num_written: float) -> float:
        """How long so many bytes take at best."""
        both = min(num_read / self.both_read_rate, num_written / self.both_write_rate)
        alone = num_read - both * self.both_read_rate, num_written - both * self.both_write_rate
        return both + alone[0] / self.read_rate + alone[1] / self.write_rate

    @classmethod
    def of_rates(cls, text: str, *, size_bytes: int) -> DiskTier:
        """A disk that reads and writes at rates such as "6.5/5GB/s".

        Raises:
            ValueError: the text is something else.
        """
        found = RATES.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text!r} are no rates of a disk. Expected those of reading and of writing, such "
                "as '6.5/5GB/s'."
            )
        unit = parse_bytes(f"1{found[3]}", name="rates")
        read, write = (float(number) * unit for number in found.groups()[:2])
        if not (read > 0 and write > 0):
            raise ValueError(f"{text!r} are no rates of a disk. Expected numbers above 0.")
        return cls(
            size_bytes=size_bytes,
            read_rate=read,
            write_rate=write,
            both_read_rate=read / 2,
            both_write_rate=write / 2,
        )

    @classmethod
    def of_text(cls, text: str) -> DiskTier:
        """A disk as the command line names it: "2TB@6.5/5GB/s".

        Raises:
            ValueError: the text is something else.
        """
        size, _, rates = text.partition("@")
        return cls.of_rates(rates, size_bytes=parse_bytes(size, name="disk"))

    @classmethod
    def of_folder(cls, folder: DiskFolder, rates: str | None, *, small: bool) -> DiskTier:
        """The disk of a folder: with the user's rates, those measured before, or measured now."""
        if rates is not None:
            return cls.of_rates(rates, size_bytes=folder.limit_bytes)
        path = _path_of(folder.folder)
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            known = None if path is None or small else json.loads(path.read_text())
            if known is not None:
                return cls(size_bytes=folder.limit_bytes, **known)
        found = _measured(folder, SMALL_BYTES if small else LARGE_BYTES)
        if path is not None and not small:
            known = {name: one for name, one in asdict(found).items() if name != "size_bytes"}
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, json.dumps(known, indent=2), shared=True)
        return found


def spread(layers: Iterable[int]) -> list[int]:
    """Layers in the order in which they go to disk: any number of them lies evenly among all.

    So reads have time while the host updates others. The first layer goes last: a step that updates
    late would begin with waiting for it.
    """

    def reversed_bits(number: int) -> int:
        return int(f"{number:016b}"[::-1], 2)

    return sorted(layers, key=lambda layer: (layer == 0, reversed_bits(layer)))


def first_on_disk(
    forms: Mapping[str, UnitForm], needed_bytes: int, host: HostBudget, *, room_bytes: int
) -> dict[Part, tuple[str, ...]]:
    """Layers for which the parameter server has no room, before any is taken.

    Their optimizer state goes first, which is read once a step; then their weights.

    Args:
        forms: of all units.
        needed_bytes: what they take in host memory together.
        host: what there is.
        room_bytes: on the disk.

    Raises:
        ValueError: neither host nor disk have room.
    """
    found: dict[Part, tuple[str, ...]] = {}
    total = 0
    for part in ALL_PARTS:
        able, number = _worthwhile(forms, part), 0
        if needed_bytes > host.limit_bytes and able:
            needed_bytes += _buffers_for(forms, part)
        while needed_bytes > host.limit_bytes and number < len(able):
            needed_bytes -= _part_bytes(forms[able[number]], part)
            total += block_bytes(forms[able[number]], part)
            number += 1
        found[part] = able[:number]
    host.check(needed_bytes, alternatives={})
    if total > room_bytes:
        raise ValueError(no_room(total, room_bytes))
    return found


def no_room(needed_bytes: int, room_bytes: int) -> str:
    """What is said of a disk that is too small."""
    return (
        f"{format_bytes(needed_bytes)} of layers must go to disk, where there is room for "
        f"{format_bytes(room_bytes)}. Give a larger disk, or more host_memory."
    )


def most_on_disk(forms: Mapping[str, UnitForm], needed_bytes: int) -> int:
    """What the parameter server takes of host memory where all that may be is on disk."""
    for part in ALL_PARTS:
        able = _worthwhile(forms, part)
        needed_bytes += _buffers_for(forms, part) if able else 0
        needed_bytes -= sum(_part_bytes(forms[name], part) for name in able)
    return needed_bytes


def _worthwhile(forms: Mapping[str, UnitForm], part: Part) -> tuple[str, ...]:
    """Layers that have such a part to go to disk; none if its buffers would take as much."""
    able = layers_on_disk(forms, part)
    saved = sum(_part_bytes(forms[name], part) for name in able)
    return able if saved > _buffers_for(forms, part) else ()


def _buffers_for(forms: Mapping[str, UnitForm], part: Part) -> int:
    return buffer_bytes((forms[name] for name in layers_on_disk(forms, part)), [part])


def _part_bytes(form: UnitForm, part: Part) -> int:
    """What a part of a unit takes of host memory."""
    kinds = form.bytes_by_kind()
    return kinds["weights"] if part == "weights" else sum(kinds.values()) - kinds["weights"]


def refuse_disk(optimizer: Optimizer, *, is_parallel: bool) -> None:
    """Refuse a disk where nothing may go there.

    Raises:
        ValueError: several ranks share the model, or the device updates all layers.
    """
    if is_parallel:
        raise ValueError("disk= is for a single process; here several ranks train together.")
    if not isinstance(optimizer, HostOptimizer):
        raise ValueError(
            f"disk= is for layers that the host updates; {type(optimizer).__name__} updates them "
            "on the device, and keeps next to no state."
        )


def layers_on_disk(forms: Mapping[str, UnitForm], part: Part) -> tuple[str, ...]:
    """Layers that have such a part to go to disk, in the order in which it goes there."""
    layers = spread(int(name[1:]) for name in forms if name.startswith("L"))
    return tuple(name for name in map("L{}".format, layers) if block_bytes(forms[name], part))


def _path_of(folder: Path) -> Path | None:
    """Where the rates of a folder are kept; None: nobody is at home."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", str(folder.resolve())).strip("-").lower()
    try:
        return Path.home() / ".cache" / "l2l" / f"disk-{name[-100:]}.json"
    except RuntimeError:
        return None


def _measured(folder: DiskFolder, nbytes: int) -> DiskTier:
    """Read and write large blocks, one after the other and then at the same time."""
    nbytes = max(1, min(nbytes, folder.limit_bytes // 4) // PAGE_BYTES) * PAGE_BYTES
    pages = [torch.zeros(nbytes + PAGE_BYTES, dtype=torch.uint8) for _ in range(2)]
    memory = [one[-one.data_ptr() % PAGE_BYTES :][:nbytes] for one in pages]
    memory[1].random_(generator=torch.Generator().manual_seed(0))  # some drives pack zeros
    blocks = [folder.make(nbytes) for _ in range(2)]
    counts = folder.num_read_bytes, folder.num_written_bytes
    try:
        folder.write(blocks[0], memory[1])  # its room is made

        def write() -> None:
            folder.write(blocks[0], memory[1])

        def read() -> None:
            folder.read(blocks[1], memory[0])

        folder.write(blocks[1], memory[1])
        alone = [nbytes / _seconds(work) for work in (read, write)]
        both = [0.0, 0.0]

        def note(way: int, work: Callable[[], None]) -> None:
            both[way] = nbytes / _seconds(work)

        threads = [
            threading.Thread(target=note, args=(way, work))
            for way, work in enumerate((read, write))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for block in blocks:
            folder.remove(block)
        folder.num_read_bytes, folder.num_written_bytes = counts
    slower = [one or rate / 2 for one, rate in zip(both, alone, strict=True)]
    return DiskTier(
        size_bytes=folder.limit_bytes,
        read_rate=alone[0],
        write_rate=alone[1],
        both_read_rate=min(slower[0], alone[0]),
        both_write_rate=min(slower[1], alone[1]),
    )


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return max(time.perf_counter() - start, 1e-9)
