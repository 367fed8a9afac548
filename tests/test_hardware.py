"""Facts of a machine: measured in a moment on the CPU, kept in a file that may be broken."""

import dataclasses
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from l2l.device import CheckingDevice, open_device
from l2l.parameter_server import load_kernel
from l2l.planner import hardware
from l2l.planner.hardware import _LARGE, H200, Hardware, known_hardware, probe


@pytest.fixture
def device():
    opened = open_device("cpu")
    yield opened
    opened.close()


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[Hardware]:
    """What `known_hardware` measured, made up."""
    measured: list[Hardware] = []

    def made_up(device, kernel, *, room) -> Hardware:
        facts = dataclasses.replace(
            H200,
            device_name=device.name,
            device_bytes=device.total_bytes(),
            host_rate=1e9 + len(measured),
        )
        measured.append(facts)
        return facts

    monkeypatch.setattr(hardware, "probe", made_up)
    return measured


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user who has no file yet would have it."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path / ".cache" / "l2l"


@pytest.mark.parametrize("with_kernel", [True, False])
def test_the_cpu_is_probed_in_a_moment(device: CheckingDevice, with_kernel: bool):
    kernel = load_kernel() if with_kernel else None
    start = time.perf_counter()
    found = probe(device, kernel)
    assert time.perf_counter() - start < 5  # under a second alone
    assert found.device_name == device.name
    assert found.device_bytes == device.total_bytes()
    assert found.num_threads == torch.get_num_threads()
    rates = {entry.name for entry in dataclasses.fields(found) if entry.name.endswith("_rate")}
    assert len(rates) == 8
    assert all(1e5 < getattr(found, name) < 1e15 for name in rates)


def test_a_probe_leaves_the_device_as_it_was(device: CheckingDevice):
    device.reset_peak()
    before = device.peak_bytes()
    probe(device, None)
    assert device.peak_bytes() == before


def test_the_cpu_has_the_memory_of_the_host(device: CheckingDevice):
    assert device.name
    assert 0 < device.free_bytes() <= device.total_bytes()


def test_facts_survive_as_text():
    assert Hardware.of_json(H200.to_json()) == H200


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        H200.to_json()[:-3],
        H200.to_json().replace("fetch_rate", "speed"),
        H200.to_json().replace("55000000000.0", '"fast"'),
        H200.to_json().replace("55000000000.0", "0.0"),
        H200.to_json().replace("55000000000.0", "NaN"),
    ],
)
def test_other_text_is_refused(text: str):
    with pytest.raises(ValueError, match=r".+"):
        Hardware.of_json(text)


def test_a_machine_is_measured_once_and_known_from_the_users_cache(
    device: CheckingDevice, probes: list, folder: Path
):
    first = known_hardware(device, None)
    assert known_hardware(device, None) == first
    assert len(probes) == 1
    [file] = folder.iterdir()
    assert file.match("hardware-*.json")
    assert torch.__version__.replace("+", "-") in file.name


def test_another_machine_is_measured_anew(
    device: CheckingDevice, probes: list, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    known_hardware(device, None)
    monkeypatch.setattr(CheckingDevice, "name", "another")
    known_hardware(device, None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    known_hardware(device, None)
    kernel = load_kernel()
    if kernel is not None:
        known_hardware(device, kernel)
    monkeypatch.setattr(CheckingDevice, "total_bytes", lambda _: 10**9)
    known_hardware(device, None)
    assert len(probes) == (4 if kernel is None else 5)


def test_a_broken_file_is_measured_anew_and_mended(
    device: CheckingDevice, probes: list, folder: Path
):
    known_hardware(device, None)
    [file] = folder.iterdir()
    for broken in (b"{", b"\xff\xfe", b""):
        file.write_bytes(broken)
        known_hardware(device, None)
    assert len(probes) == 4
    assert Hardware.of_json(file.read_text()) == probes[-1]


def test_a_folder_that_cannot_be_written_does_no_harm(
    device: CheckingDevice, probes: list, folder: Path
):
    folder.parent.write_text("")
    assert known_hardware(device, None) == probes[0]


def test_the_table_names_the_machine():
    table = str(H200)
    assert table.startswith("NVIDIA H200, 16 host threads\n")
    assert "55 GB/s" in table
    assert "700 Tflop/s" in table


def test_measuring_keeps_to_its_room_and_is_then_not_kept(
    device: CheckingDevice, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    rooms: list[int | None] = []

    def measured(*_: object, room: int | None) -> Hardware:
        rooms.append(room)
        return replace(H200, device_bytes=device.total_bytes())

    monkeypatch.setattr("l2l.planner.hardware.probe", measured)
    for room in (128 << 20, 128 << 20, 1 << 30, 128 << 20):
        known_hardware(device, None, room=room)
    assert rooms == [128 << 20, 128 << 20, 1 << 30], "a thorough measurement serves all"


@pytest.mark.parametrize("room", [1 << 20, 100 << 20, 1 << 40])
def test_sizes_of_measurements_fit_their_room(room: int):
    sizes = _LARGE.within(room)
    assert max(sizes.piece_bytes * 2, sizes.elementwise_bytes * 2) <= room
    assert 3 * 2 * sizes.matrix_side**2 <= room
    assert (sizes == _LARGE) == (room == 1 << 40)
