"""The budget is what the driver counts: context and libraries are part of it."""

import inside
import pytest
import torch
from families import build_llama, causal_batch

import l2l
from l2l.device import CheckingDevice
from l2l.device.limits import LIMITS
from l2l.planner import H200
from l2l.planner.hardware import Hardware

MIB = 1 << 20
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H200."""
    monkeypatch.setattr(CheckingDevice, "context_bytes", lambda _: 100 * MIB)
    monkeypatch.setattr("l2l.planner.planning.known_hardware", lambda *_, **__: H200)


def engine(budget: str) -> l2l.Engine:
    return inside.engine(build_llama(**SIZES), device="cpu", device_memory=budget, prove=False)


def of_context(plan: l2l.Plan) -> int:
    return sum(one.nbytes for one in plan.ledger if one.purpose == "context, libraries")


@pytest.mark.usefixtures("context")
def test_the_plan_has_a_line_for_it_and_torch_gets_the_rest() -> None:
    with engine("1400MiB") as one:
        one.step(causal_batch(4))
        assert of_context(one.plan) == max(100 * MIB, H200.context_bytes)
        assert one.plan.total_bytes("device") <= 1400 * MIB
        device = torch.device("cpu")
        assert LIMITS.total(device) == 1400 * MIB - H200.context_bytes


@pytest.mark.usefixtures("context")
def test_a_budget_that_the_context_takes_is_refused() -> None:
    with engine("900MiB") as one, pytest.raises(ValueError, match=r"context, libraries 8\d\d"):
        one.step(causal_batch(4))


def test_a_machine_that_nobody_knows_yet_is_measured_in_spite_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """There is no room to measure in; the refusal says what takes it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(CheckingDevice, "context_bytes", lambda _: 100 * MIB)
    with engine("90MiB") as one:
        with pytest.raises(ValueError, match=r"context, libraries 100.00 MiB"):
            one.step(causal_batch(4))
        with pytest.raises(ValueError, match=r"found 0 B beside context and libraries"):
            one.generate(causal_batch(4)["input_ids"], max_new_tokens=2)


def test_what_a_process_has_grown_to_is_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """Kernels are loaded when they are first used, after the plan was made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    grown = [0]
    monkeypatch.setattr(CheckingDevice, "context_bytes", lambda _: grown[0])
    with engine("200MiB") as one:
        one.step(causal_batch(4))
        assert of_context(one.plan) == 0
        grown[0] = 10 * MIB
        for _ in range(5):
            one.step(causal_batch(4))
    grown[0] = 0
    (file,) = (tmp_path / ".cache" / "l2l").glob("hardware-*.json")
    assert Hardware.of_json(file.read_text()).context_bytes == 10 * MIB
    with engine("200MiB") as one:
        one.step(causal_batch(4))
        assert of_context(one.plan) == 10 * MIB
