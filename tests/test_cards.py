"""Plans for cards by name: data sheets, taken as far as an H200 was measured to reach its own."""

import dataclasses
import json

import pytest

from l2l import cli
from l2l.planner import H200, NOT_MEASURED, SHEETS, card, with_host


@pytest.fixture(autouse=True)
def nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without an accelerator."""
    for name in ("l2l.cli.plan.measured_hardware", "l2l.planner.preview.measured_hardware"):
        monkeypatch.setattr(name, lambda: None)
    monkeypatch.setattr("l2l.planner.preview.num_devices", lambda: 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5070 Ti", "RTX 5070 Ti"),
        ("a100-80gb", "A100 80GB"),
        ("4060 ti", "RTX 4060 Ti 16GB"),
        ("b200", "B200"),
    ],
)
def test_a_card_is_found_by_its_name(name: str, expected: str) -> None:
    assert card(name).device_name == f"{expected}{NOT_MEASURED}"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a100", "is one of A100 40GB, A100 80GB"),
        ("RTX 9999", "is not known"),
        ("", "is not known"),
    ],
)
def test_a_name_of_none_or_several_is_refused(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        card(name)
    assert "RTX 3060, " in str(refused.value)


def test_a_card_reaches_of_its_data_sheet_what_the_measured_one_does() -> None:
    assert card("H200") == H200
    found, sheet, measured = card("RTX 3090"), SHEETS["RTX 3090"], SHEETS["H200"]
    assert found.device_bytes == 24_000_000_000
    assert found.matrix_rate / sheet.products == pytest.approx(H200.matrix_rate / measured.products)
    assert found.single_rate / sheet.single == pytest.approx(H200.single_rate / measured.single)
    assert found.memory_rate / sheet.bandwidth == pytest.approx(
        H200.memory_rate / measured.bandwidth
    )
    for rate in ("fetch_rate", "drain_rate", "both_ways_rate"):
        assert getattr(found, rate) == pytest.approx(getattr(H200, rate) / 2)  # a PCIe older
        assert getattr(found, rate) < sheet.link * 1e9
    assert found.host_rate == H200.host_rate
    slow = with_host(found, H200.host_rate / 4)
    assert slow.eight_bit_rate == H200.eight_bit_rate / 4
    assert slow.matrix_rate == found.matrix_rate


def test_every_sheet_makes_a_machine_that_is_slower_than_it_says() -> None:
    for name, sheet in SHEETS.items():
        found = card(name)
        assert found.matrix_rate < sheet.products * 1e12
        assert found.memory_rate < sheet.bandwidth * 1e9
        assert name == "H200" or found.device_bytes == sheet.memory * 1e9


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict, str]:
    status = cli.main(["plan", "tiny", "--rows", "4", "--length", "256", *words, "--json"])
    shown = capsys.readouterr()
    return status, json.loads(shown.out) if shown.out else {}, shown.err


def test_a_plan_for_a_card_says_that_nothing_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, found, shown = plan(capsys, "--card", "RTX 3060")
    assert status == 0
    assert found["machine"] == "RTX 3060, by its data sheet"
    assert found["device_budget_bytes"] == int(0.9 * 12e9)
    assert "nothing was measured" in shown
    assert "--host-memory" in shown
    slow = plan(capsys, "--card", "RTX 3060", "--host-rate", "40GB/s", "--hardware")[1]
    assert slow["hardware"]["host_rate"] == 40e9
    assert slow["hardware"]["matrix_rate"] == card("RTX 3060").matrix_rate


def test_cards_are_compared_and_what_does_not_fit_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    little = dataclasses.replace(SHEETS["RTX 3070"], memory=1.0)
    monkeypatch.setitem(SHEETS, "RTX 3070", little)  # type: ignore[misc]
    status, found, shown = plan(capsys, "--card", "RTX 3070", "H100")
    assert status == 0
    small, large = found["cards"]
    assert [small["fits"], large["fits"]] == [False, True]
    assert "of device memory, found a budget of" in small["reason"]
    assert "RTX 3070          does not fit: the step needs" in shown
    assert f"{large['tokens_per_second']:,.0f}" in shown
    assert plan(capsys, "--card", "RTX 3070")[0] == 1


@pytest.mark.thorough
def test_without_a_limit_host_memory_is_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--card", "H100", "--device-memory", "12GiB", "--tokens", "65536")
    needed = cli.main(["plan", "7.5b", "--length", "1024", *words, "--json"])
    assert needed == 0
    least = json.loads(capsys.readouterr().out)
    assert least["choices"]["kept, not recomputed"] == "nothing"
    cli.main(["plan", "7.5b", "--length", "1024", *words, "--host-memory", "1TiB", "--json"])
    more = json.loads(capsys.readouterr().out)
    assert more["choices"]["kept, not recomputed"] != "nothing"
    assert least["host_bytes"] < more["host_bytes"]
    assert least["predicted_seconds"] >= more["predicted_seconds"]


def test_a_card_that_is_not_known_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "1b", "--card", "RTX 1"]) == 2
    assert "Expected one of RTX 3060" in capsys.readouterr().err
