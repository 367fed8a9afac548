"""`l2l bench scale`: how many layers, on which text, and what is said of it."""

import json
import math

import pytest
import torch

from l2l import cli
from l2l.bench.scale import Scale, text_ids
from l2l.bench.workload import SHAPES


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_those_of_a_model_without_weights(shape: str):
    scale = Scale(shape=shape)
    for number in (1, 3):
        assert scale.least_layers(scale.count(number)) == number
        assert all(one.is_meta for one in scale.with_layers(number).parameters())


def test_fifty_billion_parameters_are_58_layers():
    scale = Scale()
    assert scale.least_layers(50e9) == 58
    assert scale.count(57) < 50e9 <= scale.count(58)


def test_text_is_numbered_by_how_often_words_occur():
    ids = text_ids(20_000, 500)
    assert ids.shape == (20_000,)
    assert ids.dtype is torch.int64
    counts = ids.bincount(minlength=500)
    assert int(counts[0]) == int(counts[:-1].max())
    assert bool((counts[:-2] >= counts[1:-1]).all())
    assert int(counts[-1]) > 0, "what is rare shares a number"
    assert torch.equal(ids[:100], text_ids(20_000, 500)[:100])


def test_the_largest_model_grows_with_the_host():
    found = [
        Scale(
            shape="tiny",
            optimizer="adamw",
            device_memory="1400MiB",
            host_memory=size,
            num_tokens=256,
            length=64,
        ).most_layers()
        for size in ("20MiB", "40MiB")
    ]
    assert found[0] > 1
    assert found[1] == pytest.approx(2 * found[0], rel=0.35)


def test_a_model_is_trained_and_described(capsys: pytest.CaptureFixture[str]):
    words = "bench scale --shape tiny --parameters 2e5 --tokens 64 --length 32 --steps 2"
    assert cli.main([*words.split(), "--json"]) == 0
    shown = capsys.readouterr()
    lines = shown.err.strip().splitlines()
    (found,) = json.loads(shown.out)
    assert found["num_parameters"] >= 2e5
    assert len(found["steps"]) == 2
    assert all(math.isfinite(step["loss"]) for step in found["steps"])
    assert 0 < found["busy"]["compute"] <= 1
    assert found["largest_layers"] is None
    assert sum(line.startswith("step ") for line in lines) == 2
    assert any(line.startswith("busy in the last step: compute ") for line in lines)
    assert found["plan"].splitlines()[0] in lines


def test_several_optimizers_each_have_a_row(capsys: pytest.CaptureFixture[str]):
    words = "bench scale --shape tiny --parameters 2e5 --tokens 64 --length 32 --steps 1"
    assert cli.main([*words.split(), "--json", "--optimizer", "adamw", "adamw-8bit"]) == 0
    shown = capsys.readouterr()
    lines = shown.err.strip().splitlines()
    assert [one["optimizer"] for one in json.loads(shown.out)] == ["adamw", "adamw-8bit"]
    assert sum(line.startswith("| adamw") for line in lines) >= 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--parameters 10", "with a single layer"),
        ("--device-memory much", "--device-memory"),
        ("--host-memory 3apples", "--host-memory"),
        ("--tokens 100 --length 64", "whole number of rows"),
        ("--steps 0", "--steps 0"),
    ],
)
def test_what_makes_no_sense_is_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench", "scale", "--shape", "tiny", *words.split()]) == 2
    assert said in capsys.readouterr().err
