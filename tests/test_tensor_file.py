"""Files of tensors: what the safetensors library reads and writes, whole or refused by name."""

import errno
import fcntl
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from l2l.files import tensor_file
from l2l.files.tensor_file import (
    DTYPES,
    TensorFileError,
    TensorReader,
    Written,
    check_file,
    check_size,
    kinds_of,
    open_to_read,
    write_tensors,
)

FULL = Path("/dev/full")


def random_bits(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bit pattern, NaN and subnormal numbers among them."""
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    numel = torch.Size(shape).numel()
    bits = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator)
    return bits.to(torch.uint8).view(dtype).view(shape)


def is_same(one: Tensor, other: Tensor) -> bool:
    """Equal bit by bit, also where it is NaN."""
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)


def read_all(path: Path) -> dict[str, Tensor]:
    read = TensorReader(dict.fromkeys(kinds_of(path), path))
    return {name: read(name) for name in kinds_of(path)}


def read_one(path: Path, name: str) -> Tensor:
    return TensorReader({name: path})(name)


# --------------------------------------------------------------------------------------------------
# The format


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (7,), (), (0,), (4, 0, 2)], ids=str)
def test_the_library_reads_what_we_write_and_we_read_what_it_writes(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
):
    tensor = random_bits(dtype, *shape)
    write_tensors(tmp_path / "ours", {"one": tensor})
    assert is_same(load_file(tmp_path / "ours")["one"], tensor)
    save_file({"one": tensor}, tmp_path / "theirs")
    assert is_same(read_all(tmp_path / "theirs")["one"], tensor)


def test_tensors_of_all_dtypes_and_of_odd_sizes_share_a_file(tmp_path: Path):
    """So that the bytes of most begin where their dtype is not aligned."""
    tensors = {f"{dtype}|{size}": random_bits(dtype, size) for dtype in DTYPES for size in (3, 1)}
    tensors |= {"nothing": torch.empty(0), "a scalar": torch.tensor(3.5)}
    path = tmp_path / "mixed.safetensors"
    written = write_tensors(path, tensors)
    check_file(path, written)
    for found in (load_file(path), read_all(path)):
        assert found.keys() == tensors.keys()
        assert all(is_same(found[name], tensor) for name, tensor in tensors.items())


def test_a_file_without_tensors_is_a_file(tmp_path: Path):
    check_file(tmp_path / "empty", write_tensors(tmp_path / "empty", {}))
    assert load_file(tmp_path / "empty") == {}
    assert kinds_of(tmp_path / "empty") == {}


def test_metadata_and_names_of_any_kind_come_back(tmp_path: Path):
    path = tmp_path / "named"
    tensors = {'a "quoted" name|exp_avg': torch.ones(2), "größer.0": torch.zeros(1)}
    write_tensors(path, tensors, metadata={"format": "pt"})
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors)


def test_views_of_larger_tensors_are_written_as_they_look(tmp_path: Path):
    whole = torch.arange(24.0).view(4, 6)
    tensors = {"rows": whole[1:3], "turned": whole.t(), "every other": whole[:, ::2]}
    write_tensors(tmp_path / "views", tensors)
    found = load_file(tmp_path / "views")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_tensors_are_asked_for_one_by_one_in_their_order(tmp_path: Path):
    asked: list[str] = []

    def read(name: str) -> Tensor:
        asked.append(name)
        return torch.full((3,), float(len(asked)))

    names = ["c", "a", "b"]
    empty = torch.empty(3, device="meta")
    write_tensors(tmp_path / "lazy", dict.fromkeys(names, empty), read=read)
    assert asked == names
    assert {n: t[0].item() for n, t in load_file(tmp_path / "lazy").items()} == {
        "c": 1.0,
        "a": 2.0,
        "b": 3.0,
    }


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, tensor_file.BLOCK_BYTES])
def test_tensors_larger_than_a_piece_are_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
):
    tensors = {"large": random_bits(torch.float32, 2101), "small": random_bits(torch.int8, 3)}
    expected = write_tensors(tmp_path / "at once", tensors)
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", piece_bytes)
    found = write_tensors(tmp_path / "in pieces", tensors)
    assert found == expected
    assert (tmp_path / "in pieces").read_bytes() == (tmp_path / "at once").read_bytes()
    check_file(tmp_path / "in pieces", found)


def test_a_tensor_larger_than_a_piece_as_it_is(tmp_path: Path):
    tensor = torch.arange(tensor_file.PIECE_BYTES // 4 + 1000, dtype=torch.int32)
    written = write_tensors(tmp_path / "large", {"one": tensor})
    check_file(tmp_path / "large", written)
    assert torch.equal(load_file(tmp_path / "large")["one"], tensor)


def test_a_system_that_writes_less_than_asked_for_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = os.write
    tensors = {"one": random_bits(torch.float32, 1000)}
    expected = write_tensors(tmp_path / "at once", tensors)
    monkeypatch.setattr(os, "write", lambda to, data: whole(to, data[: max(1, len(data) // 2)]))
    assert write_tensors(tmp_path / "in halves", tensors) == expected
    assert (tmp_path / "in halves").read_bytes() == (tmp_path / "at once").read_bytes()


@pytest.mark.parametrize("refused", ["open", "write"])
def test_a_file_system_that_cannot_write_past_the_page_cache_writes_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
):
    whole, num_refused = getattr(os, refused), 0

    def is_direct(flags: int) -> bool:
        return bool(flags & os.O_DIRECT)

    def refuse(first: Any, *rest: Any) -> Any:
        nonlocal num_refused
        if is_direct(rest[0] if refused == "open" else fcntl.fcntl(first, fcntl.F_GETFL)):
            num_refused += 1
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return whole(first, *rest)

    tensors = {"one": random_bits(torch.float32, 5000), "two": random_bits(torch.int8, 9000)}
    expected = write_tensors(tmp_path / "past it", tensors)
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 2 * tensor_file.BLOCK_BYTES)
    monkeypatch.setattr(os, refused, refuse)
    assert write_tensors(tmp_path / "through it", tensors) == expected
    assert num_refused == 1
    assert (tmp_path / "through it").read_bytes() == (tmp_path / "past it").read_bytes()


def test_an_argument_that_is_wrong_in_other_ways_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(TensorFileError, match=r"cannot write .*one: Invalid argument"):
        write_tensors(tmp_path / "one", {"one": torch.ones(3)})


def test_size_and_checksum_are_those_of_the_file(tmp_path: Path):
    written = write_tensors(tmp_path / "one", {"one": random_bits(torch.bfloat16, 33)})
    data = (tmp_path / "one").read_bytes()
    assert written == Written(nbytes=len(data), checksum=zlib.crc32(data))
    assert int.from_bytes(data[:8], "little") % tensor_file.ALIGNMENT == 0


# --------------------------------------------------------------------------------------------------
# What is damaged


def test_every_flipped_bit_is_found(tmp_path: Path):
    path = tmp_path / "one.safetensors"
    written = write_tensors(path, {"one": torch.ones(3), "two": torch.zeros(2, dtype=torch.int8)})
    data = path.read_bytes()
    for place in range(len(data)):
        for bit in (0, 3, 7):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(TensorFileError, match=r"one\.safetensors is damaged: found"):
                check_file(path, written)
    path.write_bytes(data)
    check_file(path, written)


@pytest.mark.parametrize("change", [-1, -40, 1])
def test_another_size_is_found_without_reading(tmp_path: Path, change: int):
    path = tmp_path / "one.safetensors"
    written = write_tensors(path, {"one": torch.ones(30)})
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + b" " * change)
    message = rf"one\.safetensors has the wrong size: found {len(data) + change} bytes, expected"
    for check in (check_size, check_file):
        with pytest.raises(TensorFileError, match=message):
            check(path, written)


def test_a_missing_file_is_named(tmp_path: Path):
    path = tmp_path / "gone.safetensors"
    message = r"cannot read .*gone\.safetensors: No such file"
    for check in (check_size, check_file):
        with pytest.raises(TensorFileError, match=message):
            check(path, Written(nbytes=1, checksum=0))
    with pytest.raises(TensorFileError, match=r"cannot read .*gone\.safetensors"):
        kinds_of(path)
    with pytest.raises(TensorFileError, match=r"cannot read .*gone\.safetensors"):
        read_one(path, "one")


def test_a_file_that_cannot_be_read_any_more_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "one.safetensors"
    written = write_tensors(path, {"one": torch.ones(3)})

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(TensorFileError, match=r"cannot read .*one\.safetensors: Input/output"):
        check_file(path, written)


@pytest.mark.parametrize("data", [b"", b"not one", b"\xff" * 64, b"\x02" + bytes(7) + b"[]"])
def test_what_is_no_tensor_file_is_named(tmp_path: Path, data: bytes):
    (tmp_path / "odd.safetensors").write_bytes(data)
    for act in (kinds_of, lambda path: read_one(path, "a")):
        with pytest.raises(TensorFileError, match=r"cannot read .*odd\.safetensors"):
            act(tmp_path / "odd.safetensors")


def test_a_tensor_that_is_not_there_is_an_error(tmp_path: Path):
    write_tensors(tmp_path / "one.safetensors", {"one": torch.ones(3)})
    with pytest.raises(TensorFileError, match=r"cannot read .*one\.safetensors.*two"):
        read_one(tmp_path / "one.safetensors", "two")


# --------------------------------------------------------------------------------------------------
# What cannot be written


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full here")
def test_a_full_disk_is_an_error_with_the_files_name(tmp_path: Path):
    path = tmp_path / "one.safetensors"
    path.symlink_to(FULL)
    with pytest.raises(TensorFileError, match=r"cannot write .*one\.safetensors: No space left"):
        write_tensors(path, {"one": torch.ones(3)})


@pytest.mark.parametrize("fails_at", [1, 2, 4])
def test_a_disk_that_fills_up_midway_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
):
    whole, calls = os.write, list[int]()

    def write_until_full(to: int, data: Any) -> int:
        calls.append(len(data))
        if len(calls) == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(to, data)

    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 64)
    monkeypatch.setattr(os, "write", write_until_full)
    with pytest.raises(TensorFileError, match=r"cannot write .*one: No space left") as caught:
        write_tensors(tmp_path / "one", {"one": torch.ones(100)})
    assert isinstance(caught.value.__cause__, OSError)
    assert len(calls) == fails_at


def test_a_disk_that_fails_at_the_last_moment_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TensorFileError, match=r"cannot write .*one: Input/output"):
        write_tensors(tmp_path / "one", {"one": torch.ones(3)})


def test_a_folder_that_is_none_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for folder in ("file", "missing"):
        with pytest.raises(TensorFileError, match=rf"cannot write .*{folder}/one"):
            write_tensors(tmp_path / folder / "one", {"one": torch.ones(3)})


def test_a_dtype_that_the_format_lacks_is_an_error_with_the_tensors_name(tmp_path: Path):
    tensor = torch.zeros(2, dtype=torch.complex128)
    with pytest.raises(TensorFileError, match=r"cannot write .*one: 'odd'.*complex128"):
        write_tensors(tmp_path / "one", {"fine": torch.ones(1), "odd": tensor})


def test_what_is_read_must_be_what_was_announced(tmp_path: Path):
    with pytest.raises(AssertionError, match="one"):
        write_tensors(tmp_path / "one", {"one": torch.ones(3)}, read=lambda _: torch.ones(4))


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str):
    path = tmp_path / "one.safetensors"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    expected = Written(nbytes=path.stat().st_size, checksum=0)
    for read in (
        lambda: check_file(path, expected),
        lambda: open_to_read(path).__enter__(),
        lambda: kinds_of(path),
        lambda: read_one(path, "one"),
    ):
        with pytest.raises(TensorFileError, match=r"one\.safetensors"):
            read()
