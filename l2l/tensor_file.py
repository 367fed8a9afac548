"""Writing tensors to safetensors files one by one, and reading them back with their checksums.

The format is that of the safetensors library, which reads these files: the length of a header, the
header (a JSON object: name -> dtype, shape, where its bytes are), the bytes. The library's own
writer wants all tensors of a file in memory at once; ours asks for them one after the other, so
that a file of any size costs one tensor's memory, or none where the tensor lies there already.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
PIECE_BYTES = 16 << 20


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
    try:
        with path.open("wb", buffering=0) as file:
            checksum = _write(file.fileno(), len(text).to_bytes(8, "little") + text, 0)
            for entry in entries:
                tensor = entry.read()
                assert tensor.dtype is entry.dtype, entry.name
                assert tuple(tensor.shape) == entry.shape, entry.name
                checksum = _write(file.fileno(), _bytes_of(tensor), checksum)
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):  # nobody reads it soon: leave the memory to others
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise TensorFileError(f"cannot write {path}: {error.strerror or error}") from error
    return Written(nbytes=8 + len(text) + offset, checksum=checksum)


def check_file(path: Path, expected: Written) -> None:
    """Read a file and compare it with what was written.

    Raises:
        TensorFileError: it is not there, has another size, or other contents.
    """
    check_size(path, expected)
    checksum = 0
    try:
        with path.open("rb", buffering=0) as file:
            piece = bytearray(PIECE_BYTES)
            while number := file.readinto(piece):
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
        found = path.stat().st_size
    except OSError as error:
        raise TensorFileError(f"cannot read {path}: {error.strerror or error}") from error
    if found != expected.nbytes:
        raise TensorFileError(
            f"{path} is not whole: found {found:,} bytes, expected {expected.nbytes:,}."
        )


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A safetensors file to read from, tensor by tensor."""

    path: Path

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of its tensors.

        Raises:
            TensorFileError: it cannot be read.
        """
        try:
            with safe_open(self.path, framework="pt") as file:
                return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError) as error:
            raise TensorFileError(f"cannot read {self.path}: {error}") from error

    def read(self, names: Sequence[str], receive: Callable[[str, Tensor], None]) -> None:
        """Hand over tensors one by one; each may be gone when the next one comes.

        Raises:
            TensorFileError: it cannot be read, or has no such tensor.
        """
        try:
            with safe_open(self.path, framework="pt") as file:
                for name in names:
                    receive(name, file.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise TensorFileError(f"cannot read {self.path}: {error}") from error


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy().data)


def _write(descriptor: int, data: bytes | memoryview, checksum: int) -> int:
    """Write all of it; returns the checksum with it."""
    view = memoryview(data)
    for start in range(0, len(view), PIECE_BYTES):
        piece = view[start : start + PIECE_BYTES]
        checksum = zlib.crc32(piece, checksum)
        while piece:
            piece = piece[os.write(descriptor, piece) :]
    return checksum


def sync_folder(path: Path) -> None:
    """Make what was created or renamed in a folder last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
