"""Writing tensors to safetensors files one by one, and reading them back with their checksums.

The format is that of the safetensors library, which reads these files: the length of a header, the
header (a JSON object: name -> dtype, shape, where its bytes are), the bytes. The library's own
writer wants all tensors of a file in memory at once; ours asks for them one after the other, so
that a file of any size costs one tensor's memory, or none where the tensor lies there already.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

DTYPES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 8  # of the first byte after the header
PIECE_BYTES = 4 << 20
BLOCK_BYTES = 4096  # writes past the page cache are whole blocks


class TensorFileError(ValueError):
    """A file is missing, broken, or cannot be written; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """Called when its turn comes; gives a contiguous tensor on the CPU."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Written:
    """What a file must be to be whole."""

    nbytes: int
    checksum: int  # CRC-32 of the whole file


def write_tensors(
    path: Path, entries: Sequence[Entry], *, metadata: Mapping[str, str] | None = None
) -> Written:
    """Write a file, through to the disk.

    Raises:
        TensorFileError: the file cannot be written: with its name and the reason.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for entry in entries:
        if entry.dtype not in DTYPES:
            raise TensorFileError(
                f"cannot write {path}: {entry.name!r} is of {entry.dtype}, which the format lacks."
            )
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    head = bytearray(len(text).to_bytes(8, "little") + text)
    try:
        with _Output.opened(path) as output:
            output.write(torch.frombuffer(head, dtype=torch.uint8))
            for entry in entries:
                tensor = entry.read()
                assert tensor.dtype is entry.dtype, entry.name
                assert tuple(tensor.shape) == entry.shape, entry.name
                output.write(tensor)
            output.finish()
    except OSError as error:
        raise TensorFileError(f"cannot write {path}: {error.strerror or error}") from error
    return Written(nbytes=len(head) + offset, checksum=output.checksum)


def check_file(path: Path, expected: Written) -> None:
    """Read a file and compare it with what was written.

    Raises:
        TensorFileError: it is not there, has another size, or other contents.
    """
    check_size(path, expected)
    checksum = 0
    try:
        with open_to_read(path) as file:
            piece = bytearray(PIECE_BYTES)
            while number := file.readinto(piece):  # type: ignore[attr-defined]
                checksum = zlib.crc32(memoryview(piece)[:number], checksum)
    except OSError as error:
        raise TensorFileError(f"cannot read {path}: {error.strerror or error}") from error
    if checksum != expected.checksum:
        raise TensorFileError(
            f"{path} is damaged: found checksum {checksum:08x}, expected {expected.checksum:08x}."
        )


def check_size(path: Path, expected: Written) -> None:
    """Compare a file's size with what was written.

    Raises:
        TensorFileError: it is not there, or has another size.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise TensorFileError(f"cannot read {path}: {error.strerror or error}") from error
    _refuse_other_kinds(path, status)
    found = status.st_size
    if found != expected.nbytes:
        raise TensorFileError(
            f"{path} is not whole: found {found:,} bytes, expected {expected.nbytes:,}."
        )


def open_to_read(path: Path) -> BinaryIO:
    """A file to read from, not buffered; nobody waits for who writes to a pipe.

    Raises:
        OSError: it cannot be opened.
        TensorFileError: it is a pipe, a device, or the like.
    """
    file = open(path, "rb", buffering=0, opener=_open_at_once)  # noqa: SIM115 (for the caller)
    try:
        _refuse_other_kinds(path, os.fstat(file.fileno()))
    except BaseException:
        file.close()
        raise
    return file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _refuse_other_kinds(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kinds = {
            stat.S_IFDIR: "a folder",
            stat.S_IFIFO: "a pipe",
            stat.S_IFSOCK: "a socket",
        }
        found = kinds.get(stat.S_IFMT(status.st_mode), "a device")
        raise TensorFileError(f"cannot read {path}: it is {found}. Expected a file.")


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file to read from, tensor by tensor."""

    path: Path

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its tensors.

        Raises:
            TensorFileError: it cannot be read.
        """
        return {name: shape for name, (_, shape) in self._described().items()}

    def kinds(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Names, dtypes and shapes of its tensors.

        Raises:
            TensorFileError: it cannot be read, or has a dtype that is not among `DTYPES`.
        """
        known, found = {word: dtype for dtype, word in DTYPES.items()}, self._described()
        for name, (word, _) in found.items():
            if word not in known:
                raise TensorFileError(f"cannot read {self.path}: {name!r} is of dtype {word!r}.")
        return {name: (known[word], shape) for name, (word, shape) in found.items()}

    def _described(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        with self._opened() as file:
            pieces = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            return {k: (one.get_dtype(), tuple(one.get_shape())) for k, one in pieces.items()}

    def read(self, names: Sequence[str], receive: Callable[[str, Tensor], None]) -> None:
        """Hand over tensors one by one; each may be gone when the next one comes.

        Raises:
            TensorFileError: it cannot be read, or has no such tensor.
        """
        with self._opened() as file:
            for name in names:
                receive(name, file.get_tensor(name))

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        try:
            _refuse_other_kinds(self.path, self.path.stat())
            with safe_open(self.path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise TensorFileError(f"cannot read {self.path}: {error}") from error


@final
class _Output:
    """A file that is written from its beginning to its end.

    Past the page cache, where the file system can do that: nobody reads it soon, and copying it
    there would take host memory's time while updates need it. What is written past the cache must
    lie at whole pages, so tensors pass through a piece of memory that is small enough to stay in
    the processor's cache.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(-1, PIECE_BYTES)
        self._piece = torch.frombuffer(self._memory, dtype=torch.uint8).numpy()
        self._num_filled = 0
        self.checksum = 0

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[_Output]:
        """The file, empty; closed in the end."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            descriptor = os.open(path, flags, 0o666)
        try:
            yield cls(descriptor)
        finally:
            os.close(descriptor)

    def write(self, tensor: Tensor) -> None:
        """Write a tensor's bytes."""
        data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        start = 0
        while start < len(data):
            number = min(len(data) - start, len(self._piece) - self._num_filled)
            # Of the ways to copy, numpy's lets other threads have the interpreter's lock, and
            # starts none.
            filled = self._num_filled + number
            self._piece[self._num_filled : filled] = data[start : start + number]
            start, self._num_filled = start + number, filled
            if filled == len(self._piece):
                self._write_piece()

    def finish(self) -> None:
        """Write what is left, through to the disk."""
        self._write_piece()
        os.fsync(self._descriptor)
        if hasattr(os, "posix_fadvise"):  # where it went through the cache: leave it to others
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def _write_piece(self) -> None:
        data = memoryview(self._memory)[: self._num_filled]
        self.checksum = zlib.crc32(data, self.checksum)
        self._num_filled = 0
        if len(data) % BLOCK_BYTES:
            self._go_through_the_cache()
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except OSError as error:  # blocks may be larger than we know
                if error.errno != errno.EINVAL or not self._go_through_the_cache():
                    raise

    def _go_through_the_cache(self) -> bool:
        """From now on; False if it did so before."""
        direct = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~direct)
        return bool(flags & direct)
