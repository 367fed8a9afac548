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
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
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
MAPPED_BYTES = 256 << 20  # of a file that are read before its memory is given back
DIRECT = getattr(os, "O_DIRECT", 0)
AT_ONCE = getattr(os, "O_NONBLOCK", 0)
OTHERS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}

TensorKind = tuple[torch.dtype | None, tuple[int, ...]]
"""Dtype and shape; None is a dtype that is not among `DTYPES`."""


class TensorFileError(ValueError):
    """A file is missing, broken, or cannot be written; the message names it."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a file must be to be whole."""

    nbytes: int
    checksum: int  # CRC-32 of the whole file


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    read: Callable[[str], Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Write a file, through to the disk.

    Args:
        path: of the file.
        tensors: by name, in their order; perhaps without values, on the meta device.
        read: gives a tensor's value by its name, when its turn comes. None: they have their values.
        metadata: texts for the header.

    Raises:
        TensorFileError: the file cannot be written: with its name and the reason.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise TensorFileError(
                f"cannot write {path}: {name!r} is of {tensor.dtype}, which the format lacks."
            )
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    head = bytearray(len(text).to_bytes(8, "little") + text)
    try:
        with closing(_Output(path)) as output:
            output.write(torch.frombuffer(head, dtype=torch.uint8))
            for name, tensor in tensors.items():
                value = tensor.cpu() if read is None else read(name)
                assert (value.dtype, value.shape) == (tensor.dtype, tensor.shape), name
                output.write(value)
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
    checksum, piece = 0, bytearray(PIECE_BYTES)
    with open_to_read(path) as file:
        while number := file.readinto(piece):  # type: ignore[attr-defined]
            checksum = zlib.crc32(memoryview(piece)[:number], checksum)
    if checksum != expected.checksum:
        raise TensorFileError(
            f"{path} is damaged: found checksum {checksum:08x}, expected {expected.checksum:08x}."
        )


def check_size(path: Path, expected: Written) -> None:
    """Compare a file's size with what was written.

    Raises:
        TensorFileError: it is not there, or has another size.
    """
    with open_to_read(path) as file:
        found = os.fstat(file.fileno()).st_size
    if found != expected.nbytes:
        raise TensorFileError(
            f"{path} has the wrong size: found {found:,} bytes, expected {expected.nbytes:,}."
        )


@contextmanager
def open_to_read(path: Path) -> Iterator[BinaryIO]:
    """A file to read from, not buffered; nobody waits for who writes to a pipe.

    Raises:
        TensorFileError: it, or what is read of it in the block, cannot be read: with its name.
    """
    try:
        with open(
            path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | AT_ONCE)
        ) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                found = OTHERS.get(stat.S_IFMT(mode), "a device")
                raise TensorFileError(f"cannot read {path}: it is {found}, expected a file")
            yield file
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TensorFileError(f"cannot read {path}: {reason}") from error


def kinds_of(path: Path) -> dict[str, TensorKind]:
    """Names, dtypes and shapes of a file's tensors.

    Raises:
        TensorFileError: it cannot be read.
    """
    known = {word: dtype for dtype, word in DTYPES.items()}
    with open_to_read(path), safe_open(path, framework="pt") as file:
        pieces = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        return {k: (known.get(v.get_dtype()), tuple(v.get_shape())) for k, v in pieces.items()}


@final
class TensorReader:
    """Reads tensors, each as pages of its file, which belong to this process while it is mapped.

    So a file is opened anew after some bytes: what has been read and dropped takes no memory.
    """

    def __init__(self, file_of: Mapping[str, Path]) -> None:
        """Read tensors of these names, each in the file that has it."""
        self._file_of = file_of
        self._path: Path | None = None
        self._file: Any = None
        self._num_bytes = 0

    def __call__(self, name: str) -> Tensor:
        """The tensor of a name.

        Raises:
            TensorFileError: its file cannot be read, or has no such tensor.
        """
        path = self._file_of[name]
        with open_to_read(path):
            if path != self._path or self._num_bytes > MAPPED_BYTES:
                self._file = safe_open(path, framework="pt")
                self._path, self._num_bytes = path, 0
            tensor: Tensor = self._file.get_tensor(name)
        self._num_bytes += tensor.nbytes
        return tensor


@final
class _Output:
    """A file that is written from its beginning to its end.

    Past the page cache, where the file system can do that: nobody reads it soon, and copying it
    there would take host memory's time while updates need it. What is written past the cache must
    lie at whole pages, so tensors pass through a piece of memory that is small enough to stay in
    the processor's cache.
    """

    def __init__(self, path: Path) -> None:
        self._memory = mmap.mmap(-1, PIECE_BYTES)
        self._piece = torch.frombuffer(self._memory, dtype=torch.uint8).numpy()
        self._num_filled = 0
        self.checksum = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._descriptor = os.open(path, flags | DIRECT, 0o666)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._descriptor = os.open(path, flags, 0o666)

    def close(self) -> None:
        os.close(self._descriptor)

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
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~DIRECT)
        return bool(flags & DIRECT)
