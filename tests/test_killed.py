"""A run that is killed again and again ends as if it had been left alone.

Once in `make test`, twice in `make thorough`; for more, `L2L_KILLS=50 pytest tests/test_killed.py`
or reproduce/killed.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def campaign(script: str, folder: Path, *words: str) -> dict[str, Any]:
    """The last line of a script that kills runs."""
    command = [sys.executable, ROOT / "reproduce" / script, "--folder", folder, *words]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_runs_that_are_ended_while_they_save_or_export(tmp_path: Path) -> None:
    """By SIGKILL, SIGTERM and SIGINT; reproduce/kills_at_edges.py, also for those that start."""
    words = ("--kills", "6", "--steps", "4", "--edges", "save", "export")
    found = campaign("kills_at_edges.py", tmp_path / "killed", *words)
    assert found == {"kills": 6, "faults": 0}


@pytest.mark.parametrize(
    ("kills", "words"),
    [
        pytest.param("1", (), id="once"),
        pytest.param("2", (), id="in memory", marks=pytest.mark.thorough),
        pytest.param("2", ("--disk",), id="on disk", marks=pytest.mark.thorough),
    ],
)
def test_a_run_that_is_killed_ends_with_the_same_bits(
    tmp_path: Path, kills: str, words: tuple[str, ...]
) -> None:
    kills = os.environ.get("L2L_KILLS", kills)
    words = ("--kills", kills, "--steps", "12", *words)
    found = campaign("killed.py", tmp_path / "killed", *words)
    assert found["kills"] == int(kills)
    assert found["runs"] >= 1
    assert found["differences"] == []
