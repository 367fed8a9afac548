"""A run that is killed again and again ends as if it had been left alone.

Twice here; `L2L_KILLS=50 pytest tests/test_killed.py`, or reproduce/killed.py, for more.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_run_that_is_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    kills = os.environ.get("L2L_KILLS", "2")
    command = [sys.executable, ROOT / "reproduce" / "killed.py", "--kills", kills, "--steps", "12"]
    done = subprocess.run(
        [*map(str, command), "--folder", str(tmp_path / "killed")],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == int(kills)
    assert found["runs"] >= 1
    assert found["differences"] == []
