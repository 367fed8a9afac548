"""What `l2l train` says of model folders in which something is wrong: a sample of the campaign.

`python reproduce/damaged_model_folders.py` tries all of them.
"""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "reproduce"))

import damaged_model_folders as campaign  # noqa: E402

SAMPLE = campaign.cases()[::12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    campaign.prepare(made)
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    found = {}
    for model, task in (("llama", "causal"), ("bert", "classification")):
        status, said, found[model] = campaign.train(folder / model, folder, task=task)
        assert status == 0, said
        assert found[model]
    return found


def test_there_are_enough_damages() -> None:
    assert len(campaign.cases()) >= 136
    assert len({(case.model, case.file, case.name) for case in campaign.cases()}) >= 136


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: f"{case.model}-{case.file}-{case.name}")
def test_a_damage_is_refused_with_the_name_of_its_file(
    case: campaign.Case, folder: Path, expected: dict[str, str]
) -> None:
    found, said = campaign.outcome(case, folder, expected)
    assert found in ("named", "not needed"), said
