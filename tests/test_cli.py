"""The command line: verbs, flags, a table for people or JSON for scripts."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from l2l import cli
from l2l.cli import verbs
from l2l.cli.plan import Source
from l2l.parameter_server import load_kernel
from l2l.planner.hardware import H200


def test_the_host_benchmark_is_a_table_or_json(capsys: pytest.CaptureFixture[str]):
    kernel = load_kernel()
    assert kernel is not None
    level = kernel.level
    assert cli.main(["bench", "host", "--parameters", "2e5", "--level", "portable", "--json"]) == 0
    kernel.set_level(level)
    shown = capsys.readouterr()
    lines = shown.err.strip().splitlines()
    found = json.loads(shown.out)
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
    monkeypatch.setattr("l2l.bench.kernel.load_kernel", lambda: None)
    assert cli.main(["bench", "host"]) == 2
    assert "make kernel" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["bench"], ["fly"], ["bench", "moon"]])
def test_an_incomplete_command_shows_its_usage(words, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    assert "usage: l2l" in capsys.readouterr().err


def test_without_a_verb_the_help_is_shown(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert not stopped.value.code
    shown = capsys.readouterr().out
    assert shown.startswith("usage: l2l")
    assert all(verb in shown for verb in verbs.VERBS)


def test_the_version_is_told_with_those_of_its_libraries(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert not stopped.value.code
    shown = capsys.readouterr().out
    assert f"torch {torch.__version__.partition('+')[0]}" in shown
    assert f"transformers {transformers.__version__}" in shown


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


# --------------------------------------------------------------------------------------------------
# Plan


@pytest.fixture
def nothing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without an accelerator."""
    for name in ("l2l.cli.plan.measured_hardware", "l2l.planner.preview.measured_hardware"):
        monkeypatch.setattr(name, lambda: None)
    monkeypatch.setattr("l2l.planner.preview.num_devices", lambda: 0)


def write_config(folder: Path, kind: str, config: str, **settings: Any) -> Path:
    """A model folder with nothing but its configuration."""
    made = getattr(transformers, config)(**settings)
    made.architectures = [kind]
    made.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve billion parameters."""
    settings = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 48}
    return write_config(tmp_path, "LlamaForCausalLM", "LlamaConfig", **settings)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    """Status, last line and all that was printed of `l2l plan`."""
    status = cli.main(["plan", *words, "--json"])
    shown = capsys.readouterr()
    return status, json.loads(shown.out) if shown.out else {}, shown.out + shown.err


SMALL = ("--rows", "4", "--length", "256", "--device-memory", "12GiB")


@pytest.mark.usefixtures("nothing_here")
@pytest.mark.parametrize("what", ["folder", "file", "shape"])
def test_a_plan_is_printed_and_is_json_if_asked_for(
    what: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"folder": str(folder), "file": str(folder / "config.json"), "shape": "1b"}
    status, found, shown = planned(capsys, words[what], *SMALL)
    assert status == 0
    assert found["fits"]
    assert found["parameters"] == (1_235_814_400 if what == "shape" else 11_939_483_648)
    assert found["num_tokens"] == 1024
    assert found["tokens_per_second"] == pytest.approx(1024 / found["predicted_seconds"])
    assert found["bound"] in ("compute", "link", "host")
    assert found["device_bytes"] <= found["device_budget_bytes"] == 12 * 2**30
    assert found["host_bytes"] > 2 * found["parameters"]
    assert found["machine"] == "NVIDIA H200"
    assert "there is no accelerator here" in shown
    for name, value in found["choices"].items():
        assert name in shown
        assert value in shown
    assert "link, to the device" not in shown
    assert cli.main(["plan", words[what], *SMALL]) == 0
    plain = capsys.readouterr()
    assert not plain.err
    assert plain.out == shown.replace(f"{json.dumps(found)}\n", "")


@pytest.mark.usefixtures("nothing_here")
def test_a_plan_follows_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tiny", "--tokens", "512", "--length", "64", "--microbatch-size", "2"]
    words += ["--optimizer", "adamw-8bit", "--clip-norm", "1", "--precision", "float16"]
    status, found, _ = planned(capsys, *words, "--no-compile", "--device-memory", "2GiB")
    assert status == 0
    assert found["num_tokens"] == 512
    assert found["choices"]["microbatch"].startswith("2 rows")
    assert found["choices"]["precision"] == "float16"
    assert found["choices"]["update"].startswith("just in time")
    exact = planned(capsys, *words[:7], "--device-memory", "2GiB")[1]
    assert exact["choices"]["update"].startswith("eager")


@pytest.mark.usefixtures("nothing_here")
def test_a_plan_for_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(H200.to_json()) | {"device_name": "Half", "matrix_rate": 350e12}
    (tmp_path / "half.json").write_text(json.dumps(facts))
    words = ("1b", *SMALL, "--hardware", "--machine", str(tmp_path / "half.json"))
    status, found, shown = planned(capsys, *words)
    assert status == 0
    assert found["machine"] == "Half"
    assert found["hardware"] == facts
    assert "Half, 16 host threads" in shown
    assert "350 Tflop/s" in shown


@pytest.mark.usefixtures("nothing_here")
def test_the_most_layers_of_a_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_config(tmp_path, "GPT2LMHeadModel", "GPT2Config", n_embd=1024, n_head=16)
    words = (str(folder), *SMALL, "--largest", "--host-memory", "3GiB", "--clip-norm", "1")
    status, found, shown = planned(capsys, *words)
    assert status == 0
    names = [one["optimizer"] for one in found["largest"]]
    assert names == ["adamw", "adamw-8bit", "adafactor"]
    layers = [one["layers"] for one in found["largest"]]
    assert 12 < layers[0] < layers[1] < layers[2]
    for one in found["largest"]:
        assert one["host_bytes"] <= 3 * 2**30
        assert f"{one['layers']:,} layers, {one['parameters'] / 1e9:,.1f} billion" in shown
    assert "cannot clip" in shown


def test_deeper_models_repeat_the_kinds_of_their_layers(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    write_config(
        tmp_path,
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        hidden_size=64,
        num_hidden_layers=6,
        layer_types=kinds * 2,
    )
    source = Source(str(tmp_path), 64)
    assert source.period == 3
    assert all(parameter.is_meta for parameter in source.make(None).parameters())
    for number in (2, 6, 7, 12):
        layers = source.make(number).model.layers
        found = [layer.self_attn.layer_type for layer in layers]
        assert found == [kinds[index % 3] for index in range(number)]


@pytest.mark.usefixtures("nothing_here")
def test_what_does_not_fit_ends_with_status_1_and_what_would(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found, shown = planned(capsys, str(folder), "--device-memory", "2GiB")
    assert status == 1
    assert not found["fits"]
    assert found["reason"] in shown
    assert "Give --device-memory " in shown
    status, found, shown = planned(capsys, str(folder), *SMALL, "--host-memory", "30GiB")
    assert status == 1
    assert "What would fit: --optimizer adafactor" in found["reason"]


@pytest.mark.usefixtures("nothing_here")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere"], "3.2b, 7.5b, 50b, 1b, tiny"),
        (["tiny", "--tokens", "1000"], "--length"),
        (["tiny", "--rows", "0"], "--rows 0"),
        (["tiny", "--length", "1"], "at least 2 tokens a row"),
        (["tiny", "--device-memory", "much"], "is not a size"),
        (["tiny", "--machine", "nowhere.json"], "hardware-*.json"),
        (["tiny", "--microbatch-size", "0"], "at least 1 row"),
        (["tiny", "--optimizer", "adafactor", "--clip-norm", "1"], "cannot be used with Adafactor"),
    ],
)
def test_what_cannot_be_planned_is_named(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found, shown = planned(capsys, *words)
    assert status == 2
    assert not found
    assert expected in shown


@pytest.mark.usefixtures("nothing_here")
@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "moon"}'])
def test_a_file_that_is_no_configuration_is_named(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(text)
    status, _, shown = planned(capsys, str(tmp_path))
    assert status == 2
    assert "config.json is not a configuration" in shown
    assert "model_type" in shown


@pytest.mark.usefixtures("nothing_here")
def test_all_lists_of_layers_are_planned_for_or_the_one_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path, "BartForConditionalGeneration", "BartConfig", d_model=256)
    status, found, _ = planned(capsys, str(tmp_path), *SMALL)
    assert status == 0
    layers = found["choices"]["layers"]
    assert layers == "model.encoder.layers, model.decoder.layers, 24 of them"
    words = (str(tmp_path), *SMALL, "--layer-list", "model.decoder.layers")
    status, found, _ = planned(capsys, *words)
    assert status == 0
    assert found["choices"]["layers"] == "model.decoder.layers, 12 of them"
    status, _, shown = planned(capsys, str(tmp_path), *SMALL, "--layer-list", "decoder")
    assert status == 2
    assert "no list of layers 'decoder'" in shown
    assert "--layer-list NAME" in shown
    assert "model.encoder.layers: 12 modules" in shown


def test_the_help_of_a_plan_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    shown = capsys.readouterr().out
    assert "Nothing\nis allocated" in shown
    assert "l2l plan 3.2b --device-memory 8GiB" in shown
    flags = {word.strip("[]|,") for word in shown.split() if word.strip("[").startswith("--")}
    assert flags >= {
        "--rows",
        "--tokens",
        "--length",
        "--device-memory",
        "--host-memory",
        "--optimizer",
        "--clip-norm",
        "--precision",
        "--microbatch-size",
        "--no-compile",
        "--layer-list",
        "--machine",
        "--hardware",
        "--largest",
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--learning_rate", "1e-3"], "--learning_rate: Here it is --learning-rate."),
        (["train", "--learnin-rate", "1e-3"], "--learnin-rate: Did you mean --learning-rate?"),
        (["train", "--batch-size=8"], "--batch-size: Here it is --rows: all rows of a step"),
        (["train", "--lr", "1"], "--lr: Here it is --learning-rate."),
        (["train", "--max_seq_length", "9"], "--max_seq_length: Here it is --length."),
        (["train", "--gradient_accumulation_steps", "4"], "Here it is --rows: all rows of a step"),
        (["train", "--num_train_epochs", "1"], "Here it is --epochs."),
        (["train", "--report_to", "wandb"], "Here it is --set output.tensorboard=VALUE: true"),
        (["train", "--warmup-ratio", "0.1"], "Here it is --set schedule.warm_up_share=VALUE."),
        (["train", "--clip_norm", "1"], "Here it is --set training.clip_norm=VALUE."),
        (["train", "--gradient_checkpointing"], "Nothing is called so here: what is kept and"),
        (["bench", "step", "--device-memry=8GiB"], "Did you mean --device-memory?"),
        (["plan", "3.2b", "--batch_size", "8"], "--batch_size: Here it is --rows: all rows"),
        (["plan", "3.2b", "--moments", "8bit"], "unknown: --moments 8bit. l2l plan --help"),
    ],
)
def test_what_a_verb_does_not_take_is_said_with_what_it_does(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
