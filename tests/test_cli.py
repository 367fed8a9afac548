"""The command line: verbs, flags, a table for people and a last line for scripts."""

import json

import pytest

from l2l import cli
from l2l.parameter_server import load_kernel


def test_the_host_benchmark_ends_with_a_line_of_json(capsys: pytest.CaptureFixture[str]):
    kernel = load_kernel()
    assert kernel is not None
    level = kernel.level
    assert cli.main(["bench", "host", "--parameters", "2e5", "--level", "portable"]) == 0
    kernel.set_level(level)
    lines = capsys.readouterr().out.strip().splitlines()
    found = json.loads(lines[-1])
    assert found["num_parameters"] == 200_000
    assert found["level"] == "portable"
    names = [one["name"] for one in found["results"]]
    assert names[:5] == [
        "copy (8 bytes read, 8 written)",
        "AdamW, exact",
        "AdamW, 8-bit moments",
        "SGD with momentum",
        "Lion",
    ]
    assert "torch fused AdamW, and its casts" in names
    assert all(one["parameters_per_second"] > 0 for one in found["results"])
    assert all(any(line.startswith(name) for line in lines) for name in names)


def test_an_unknown_level_is_named(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench", "host", "--parameters", "1e3", "--level", "sse"]) == 2
    assert "portable" in capsys.readouterr().err


def test_a_kernel_that_was_not_built_is_named(monkeypatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("l2l.cli.load_kernel", lambda: None)
    assert cli.main(["bench", "host"]) == 1
    assert "make kernel" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["bench"], ["fly"], ["bench", "moon"]])
def test_an_incomplete_command_shows_its_usage(words, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    assert "usage: l2l" in capsys.readouterr().err


def test_flags_of_the_host_benchmark(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["bench", "host", "--help"])
    shown = capsys.readouterr().out
    assert {word for word in shown.replace("[", " ").split() if word.startswith("--")} >= {
        "--parameters",
        "--threads",
        "--level",
    }


def test_flags_of_the_step_benchmark(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["bench", "step", "--help"])
    shown = capsys.readouterr().out
    assert {word for word in shown.replace("[", " ").split() if word.startswith("--")} >= {
        "--shape",
        "--layers",
        "--tokens",
        "--length",
        "--microbatch-size",
        "--device-memory",
        "--clip-norm",
        "--moments",
        "--steps",
        "--warm-up",
        "--systems",
        "--plain-variants",
        "--folder",
        "--time-limit",
    }


def test_a_workload_that_cannot_be_is_named(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench", "step", "--shape", "tiny", "--tokens", "1000"]) == 2
    assert "--length" in capsys.readouterr().err
