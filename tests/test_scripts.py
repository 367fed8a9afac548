"""The demo and the scripts beside the package: each starts, and the examples run to their end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(
    path
    for folder in ("benchmarks", "examples", "examples/trainers", "reproduce")
    for path in (ROOT / folder).glob("*.py")
)


def run(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def helps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each script has said; asking.py loads once what most of them import."""
    folder = tmp_path_factory.mktemp("helps")
    found = run(ROOT / "tests" / "asking.py", folder, *SCRIPTS, folder=folder)
    assert found.returncode == 0, found.stderr
    return folder


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_says_how_it_is_used(path: Path, helps: Path) -> None:
    text, _, status = (helps / path.stem).read_text().rstrip().rpartition("\n")
    assert status == "0", text
    assert "usage:" in text


def test_a_script_as_users_start_it_says_how_it_is_used(tmp_path: Path) -> None:
    found = run(ROOT / "examples" / "search.py", "--help", folder=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "usage:" in found.stdout


def test_the_demo_trains_and_leaves_its_results(tmp_path: Path) -> None:
    words = ("--steps", "2", "--folder", tmp_path / "demo", "--device", "cpu")
    found = run(ROOT / "examples" / "demo.py", *words, folder=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "held-out loss" in found.stdout
    left = {path.name for path in (tmp_path / "demo").iterdir()}
    assert {"metrics.jsonl", "plan.txt", "model.safetensors"} <= left


EXAMPLES = {  # what each leaves behind, and what its last line tells
    "progressive_stacking": ({"stacking.svg"}, {"12 layers", "3, 6, 12 layers", "3 layers"}),
    "layer_dropping": ({"dropping.svg"}, {"all layers", "stochastic depth"}),
    "search": ({"search.svg", "model"}, {"chosen", "held_out", "exported"}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_of_depth_runs_to_its_end(name: str, tmp_path: Path) -> None:
    files, keys = EXAMPLES[name]
    words = ("--steps", "4", "--seed", "3", "--output", tmp_path / "found")
    found = run(ROOT / "examples" / f"{name}.py", *words, folder=tmp_path)
    assert found.returncode == 0, found.stderr
    last = json.loads(found.stdout.splitlines()[-1])
    assert keys <= last.keys()
    assert files | {"results.json"} <= {path.name for path in (tmp_path / "found").iterdir()}
    if name == "search":
        assert last["exported"] == pytest.approx(last["held_out"], rel=1e-5)
