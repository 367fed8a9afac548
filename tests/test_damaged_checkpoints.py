"""A sample of reproduce/damaged_checkpoints.py: they are refused, and nothing changes."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "reproduce" / "damaged_checkpoints.py"
NUM_TRIES = 44  # every damage twice


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("damaged_checkpoints", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_damages_are_refused_or_change_nothing(campaign: ModuleType, tmp_path: Path):
    for name in campaign.KINDS:
        campaign.prepare(tmp_path / "whole", name)
    tries = campaign.Tries(tmp_path, seed=1)
    found = [tries.make(number) for number in range(NUM_TRIES)]
    wrong = [one for one in found if one[1] not in ("refused", "loaded exactly")]
    assert not wrong, wrong[0]
    outcomes = [outcome for _, outcome, _ in found]
    assert outcomes.count("refused") > NUM_TRIES / 2
    assert "loaded exactly" in outcomes


def test_what_the_campaign_looks_for_is_seen(campaign: ModuleType, tmp_path: Path):
    """It tells an engine that has loaded other bits, and one that has changed."""
    campaign.prepare(tmp_path, "SGD")
    saved, older = (tmp_path / "SGD" / str(step) for step in (campaign.SAVED, campaign.OLDER))
    with campaign.own_engine("SGD") as engine:
        before = campaign.contents(engine)
        engine.load(saved)
        assert campaign.wrongly_loaded(engine, saved) == []
        assert {"step", "L0 layers.0.linear.weight"} <= {*campaign.wrongly_loaded(engine, older)}
        assert {"step", "seed", "buffer scale", "L1 steps"} <= {
            *campaign.differences(campaign.contents(engine), before),
            "buffer scale",  # which is the same in all
        }
