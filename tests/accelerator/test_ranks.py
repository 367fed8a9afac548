"""Several ranks on one CUDA device, and one rank that goes through NCCL.

NCCL wants a device for every rank, so ranks that share one talk through gloo: what they say is
staged on the host.
"""

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch

pytestmark = pytest.mark.accelerator

TRAINED = ("tied_clipped", "eager", "frozen_half", "experts", "uneven", "adafactor")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone") / "1"
    return ranks.run(folder, 1, device="cuda", scenarios=TRAINED)[1][0]


def assert_trained_alike(found: dict[str, Any], expected: dict[str, Any], bound: float) -> None:
    for name in TRAINED:
        assert found[name]["losses"] == pytest.approx(expected[name]["losses"], rel=1e-5), name
        for key, value in expected[name]["state"].items():
            difference = float((found[name]["state"][key] - value).abs().max())
            assert difference <= bound * (float(value.abs().max()) + 1e-3), (name, key)


def test_two_ranks_that_share_a_device_train_as_one(alone: dict[str, Any], tmp_path: Path):
    found = ranks.run(tmp_path, 2, device="cuda", scenarios=TRAINED)[2]
    for one in found:
        assert_trained_alike(one, alone, 1e-5)
    for name in TRAINED:
        for key, value in found[0][name]["state"].items():
            assert torch.equal(found[1][name]["state"][key], value), "ranks must agree bit by bit"


def test_one_rank_over_nccl_trains_as_one_without(alone: dict[str, Any], tmp_path: Path):
    [found] = ranks.run(tmp_path, 1, device="cuda", backend="nccl", scenarios=TRAINED)[1]
    assert_trained_alike(found, alone, 1e-5)
