"""A folder on a disk, and the one seam through which bytes of the host's memory get there and back.

What is there belongs to one run and ends with it: a file for each block, made in its full size, so
that nothing of the file system changes while steps run. Bytes go past the page cache where the
file system can do that (`O_DIRECT`), in large requests at whole pages, a few at a time; elsewhere
through the cache, which then is asked to forget them. Whoever uses a folder holds its lock file;
what a run that was killed has left is removed by the next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from torch import Tensor

from l2l.device.byte_size import format_bytes, parse_bytes
from l2l.device.pages import PAGE_BYTES
from l2l.device.worker import UpdateFailedError

REQUEST_BYTES: Final = 8 << 20
NUM_REQUESTS = 4  # at a time, each way
DIRECT: Final = getattr(os, "O_DIRECT", 0)
LOCK: Final = "l2l.lock"
BLOCKS: Final = "block-*.l2l"
LASTS: Final = "Nothing that was saved is lost: go on from the last checkpoint with engine.load"


def read_some(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
    """Read as many bytes as the system gives at once; with the other, the seam to the system."""
    return os.preadv(descriptor, views, offset)


def write_some(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
    """Write as many bytes as the system takes at once. Tests put faults here."""
    return os.pwritev(descriptor, views, offset)


class DiskError(UpdateFailedError):
    """Bytes could not be read from a disk, or written there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """Where optimizer state may be that host memory has no room for.

    Args:
        folder: on a fast drive; made if it is not there. One run at a time may use it.
        size: the most that is taken of it: bytes, or "2TB"; None: what is free.
        rates: at which it reads and writes for hours, such as "6.5/1.5GB/s"; None: measured.
    """

    folder: str | Path = field(kw_only=False)
    size: int | str | None = None
    rates: str | None = None

    def __post_init__(self) -> None:
        if self.size is not None and parse_bytes(self.size, name="size") < 1:
            raise ValueError(f"size={self.size!r}; expected a size above 0, or None.")

    @classmethod
    def of(cls, disk: Disk | str | Path | None) -> Disk | None:
        """What a user has given: a folder alone is enough."""
        return cls(folder=disk) if isinstance(disk, str | Path) else disk


@final
@dataclass(eq=False, kw_only=True)
class Block:
    """Bytes on a disk that move as a whole."""

    path: Path
    descriptor: int
    nbytes: int
    is_direct: bool


@final
class DiskFolder:
    """Owner of a folder: its lock and its blocks."""

    def __init__(self, disk: Disk) -> None:
        """Take the folder.

        Raises:
            ValueError: it cannot be made or written to, or another run uses it.
        """
        self.folder = Path(disk.folder)
        self.num_read_bytes = self.num_written_bytes = 0
        self._counting = threading.Lock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.folder / LOCK)
            for left in self.folder.glob(BLOCKS):  # by a run that was killed
                left.unlink()
            free = os.statvfs(self.folder)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ValueError(f"cannot use disk={str(self.folder)!r}: {reason}.") from error
        self.limit_bytes = free.f_bavail * free.f_frsize
        if disk.size is not None:
            self.limit_bytes = min(self.limit_bytes, parse_bytes(disk.size, name="size"))
        self._blocks: dict[Path, int] = {}  # descriptors
        self._num_made = 0
        self._end = weakref.finalize(self, _end, self._blocks, self._lock, os.getpid())

    def make(self, nbytes: int) -> Block:
        """A block of whole pages, with room on the disk.

        Raises:
            DiskError: there is no room.
        """
        path = self.folder / BLOCKS.replace("*", f"{self._num_made:05}")
        self._num_made += 1
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            try:
                descriptor, is_direct = os.open(path, flags | DIRECT, 0o600), bool(DIRECT)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                path.unlink(missing_ok=True)
                descriptor, is_direct = os.open(path, flags, 0o600), False
            self._blocks[path] = descriptor
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            raise _failure("make", path, error) from error
        return Block(path=path, descriptor=descriptor, nbytes=nbytes, is_direct=is_direct)

    def remove(self, block: Block) -> None:
        """Let go of a block and its room."""
        if self._blocks.pop(block.path, None) is not None:
            _remove(block.path, block.descriptor)

    def read(self, block: Block, memory: Tensor, *, start: int = 0) -> None:
        """Fill memory, of whole pages, with the bytes of a block from there on.

        Raises:
            DiskError: they cannot be read.
        """

        def read(view: memoryview, offset: int) -> int:
            return read_some(block.descriptor, [view], offset)

        self._transfer("read", block, memory, start, read)
        with self._counting:
            self.num_read_bytes += memory.nbytes

    def write(self, block: Block, memory: Tensor, *, start: int = 0) -> None:
        """Write memory, of whole pages, over the bytes of a block from there on.

        Raises:
            DiskError: they cannot be written.
        """

        def write(view: memoryview, offset: int) -> int:
            return write_some(block.descriptor, [view], offset)

        self._transfer("write", block, memory, start, write)
        with self._counting:
            self.num_written_bytes += memory.nbytes

    def close(self) -> None:
        """Remove all blocks, and let others have the folder."""
        self._end()

    def _transfer(
        self, way: str, block: Block, memory: Tensor, start: int, work: Callable[..., int]
    ) -> None:
        """Move bytes in several requests at a time."""
        assert memory.nbytes % PAGE_BYTES == start % PAGE_BYTES == 0
        assert memory.data_ptr() % PAGE_BYTES == 0, "memory for a disk lies at whole pages"
        array: Any = memory.numpy()
        view = memoryview(array)

        def request(offset: int) -> None:
            _complete(block, view[offset : offset + REQUEST_BYTES], start + offset, work)

        try:
            _share_out(request, range(0, memory.nbytes, REQUEST_BYTES))
            if not block.is_direct:
                _forget(block, is_written=way == "write")
        except OSError as error:
            raise _failure(way, block.path, error) from error


def _share_out(request: Callable[[int], None], offsets: Sequence[int]) -> None:
    """Do requests, several at a time; raises what has failed.

    Threads are made for that: it takes a millisecond of the second that a block takes, and they are
    there whatever the state of the process, which those of a pool are not while it is dropped.
    """
    left, failures = iter(offsets), list[BaseException]()
    taking = threading.Lock()

    def work() -> None:
        while not failures:
            with taking:
                offset = next(left, None)
            if offset is None:
                return
            try:
                request(offset)
            except BaseException as failure:
                failures.append(failure)

    number = min(NUM_REQUESTS, len(offsets)) - 1
    threads = [threading.Thread(target=work, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _complete(block: Block, view: memoryview, offset: int, work: Callable[..., int]) -> None:
    """Move all bytes of a request, however few the system moves at a time."""
    while view:
        try:
            number = work(view, offset)
        except OSError as error:  # pages may be larger than we know
            if error.errno != errno.EINVAL or not block.is_direct:
                raise
            _go_through_the_cache(block)
            continue
        if number <= 0:
            raise OSError(errno.EIO, "no more bytes came")
        if block.is_direct and number % PAGE_BYTES and number < len(view):
            number -= number % PAGE_BYTES
            if not number:
                _go_through_the_cache(block)
                continue
        view, offset = view[number:], offset + number


def _go_through_the_cache(block: Block) -> None:
    """From now on."""
    flags = fcntl.fcntl(block.descriptor, fcntl.F_GETFL)
    fcntl.fcntl(block.descriptor, fcntl.F_SETFL, flags & ~DIRECT)
    block.is_direct = False


def _forget(block: Block, *, is_written: bool) -> None:
    """Let the page cache have nothing of a block: it would take memory that is not planned for."""
    if is_written:
        os.fdatasync(block.descriptor)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(block.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _failure(way: str, path: Path, error: OSError) -> DiskError:
    reason = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        advice = "Make room there, or name another disk"
    else:
        advice = "Look at the drive"
    return DiskError(f"cannot {way} {path} on the disk tier: {reason}. {advice}. {LASTS}.")


def _lock(path: Path) -> int:
    """A descriptor that holds the lock of a folder.

    Raises:
        ValueError: another run holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise ValueError(
            f"disk={str(path.parent)!r} is used by another run (process {holder}). Give each run a "
            "folder of its own."
        ) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _remove(path: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _end(blocks: dict[Path, int], lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork that ends
        return
    for path, descriptor in blocks.items():
        _remove(path, descriptor)
    blocks.clear()
    os.close(lock)


def describe_wear(num_written_bytes: int) -> str:
    """Bytes written a step, for people, and what that means for a drive."""
    steps = ENDURANCE_BYTES // max(1, num_written_bytes)
    written = format_bytes(num_written_bytes)
    return f"{written} written a step: {steps:,} steps use up a drive of 1,200 TB written"


ENDURANCE_BYTES: Final = 1_200 * 10**12
