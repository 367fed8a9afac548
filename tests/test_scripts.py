"""The demo and the scripts beside the package: each starts, and the demo runs to its end."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    path
    for folder in ("benchmarks", "examples", "reproduce")
    for path in (ROOT / folder).glob("*.py")
)


def run(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_says_how_it_is_used(path: Path, tmp_path: Path) -> None:
    found = run(path, "--help", folder=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "usage:" in found.stdout


def test_the_demo_trains_and_leaves_its_results(tmp_path: Path) -> None:
    words = ("--steps", "2", "--folder", tmp_path / "demo", "--device", "cpu")
    found = run(ROOT / "examples" / "demo.py", *words, folder=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "held-out loss" in found.stdout
    left = {path.name for path in (tmp_path / "demo").iterdir()}
    assert {"metrics.jsonl", "plan.txt", "model.safetensors"} <= left
