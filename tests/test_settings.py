"""Settings: read from TOML and flags, filled in, refused with words that help."""

import dataclasses
import json
import math
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import l2l
from l2l import cli
from l2l.cli.train import FLAGS
from l2l.train.settings import (
    SECTIONS,
    Flag,
    ScheduleSettings,
    Settings,
    SettingsError,
    answer,
    help_text,
    reading,
)
from l2l.train.settings.words import ELSEWHERE

MINIMAL = """
[model]
folder = "model"
random_init = true
[data]
source = "text.txt"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder without weights, and data."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for name in ("text.txt", "other.txt"):
        (tmp_path / name).write_text("some words\n")
    return tmp_path


def read(folder: Path, more: str = "", **flags: str | bool) -> Settings:
    """Settings of a minimal file with some lines more, and flags by their name."""
    path = folder / "run.toml"
    path.write_text(MINIMAL + more)
    return Settings.read(path, flags=list(flags_of(**flags)))


def flags_of(**flags: str | bool):
    for name, value in flags.items():
        word = f"--{name.replace('_', '-')}"
        section, key, _ = FLAGS[word]
        yield Flag(word=word, section=section, key=key, value=value)


def refusal(folder: Path, more: str = "", **flags: str | bool) -> str:
    with pytest.raises(SettingsError) as refused:
        read(folder, more, **flags)
    return str(refused.value)


# --------------------------------------------------------------------------------------------------
# Values


def test_what_is_not_said_has_its_default(folder: Path) -> None:
    found = read(folder)
    assert found.training.rows == 8
    assert found.training.length == 1024
    assert found.training.epochs == 1.0
    assert found.training.steps is None
    assert found.training.clip_norm == 1.0
    assert found.optimizer.learning_rate == 2e-5
    assert found.optimizer.betas == (0.9, 0.999)
    assert found.schedule.warm_up_share == 0.03
    assert found.output.folder == folder / "runs" / "run"


@pytest.mark.parametrize(
    ("number", "device", "expected"),
    [(0, None, "float32"), (1, None, "bfloat16"), (1, "cpu", "float32"), (1, "cuda:0", "bfloat16")],
)
def test_on_the_cpu_precision_is_float32_unless_said(
    number: int, device: str, expected: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "num_devices", lambda: number)
    more = f'[training]\ndevice = "{device}"' if device else ""
    found = read(folder, more)
    assert found.training.precision == found.output.export_dtype == expected
    for said in ("bfloat16", "float16"):
        assert read(folder, more, precision=said).training.precision == said


def test_paths_are_relative_to_the_file_and_flags_to_where_one_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "mine.txt").write_text("words\n")
    monkeypatch.chdir(elsewhere)
    found = read(folder, data="mine.txt", output="here")
    assert found.model.folder == folder / "model"
    assert found.data.source == (str(elsewhere / "mine.txt"),)
    assert found.output.folder == elsewhere / "here"


def test_flags_go_before_the_file(folder: Path) -> None:
    more = '[training]\nrows = 4\nepochs = 3\n[optimizer]\nlearning_rate = 1e-3\nname = "lion"'
    found = read(folder, more, rows="16", steps="7", learning_rate="5e-4")
    assert found.training.rows == 16
    assert (found.training.steps, found.training.epochs) == (7, None)
    assert found.optimizer.learning_rate == 5e-4
    assert found.optimizer.name == "lion"


def test_flags_alone_make_a_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    flags = flags_of(model="model", data="text.txt", random_init=True, task="causal")
    found = Settings.read(None, flags=list(flags))
    assert found.model.random_init
    assert found.output.folder == folder / "runs" / "model-text"


def test_several_sources_and_names_of_the_hub_are_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read(folder, 'evaluation_source = ["text.txt", "other.txt"]')
    assert found.data.evaluation_source == (str(folder / "text.txt"), str(folder / "other.txt"))
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    assert "datasets" in refusal(folder, 'evaluation_source = "nobody/nothing"')


def test_rows_are_no_longer_than_the_model_is_made_for(folder: Path) -> None:
    config = folder / "model" / "config.json"
    config.write_text(json.dumps({"max_position_embeddings": 514}))
    (folder / "model" / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    assert read(folder).training.length == 512
    assert read(folder, length="600").training.length == 600


def test_an_optimizer_has_the_numbers_that_are_usual_for_it(folder: Path) -> None:
    found = read(folder, '[optimizer]\nname = "adafactor"')
    assert found.optimizer.learning_rate == 1e-3
    assert found.training.clip_norm == 0.0
    made = found.optimizer.make()
    assert isinstance(made, l2l.Adafactor)
    assert made.eps == (torch.finfo(torch.float32).eps, 1e-3)
    eight = read(folder, optimizer="adamw-8bit").optimizer.make()
    assert isinstance(eight, l2l.AdamW)
    assert eight.moments == "8bit"
    momentum = read(folder, '[optimizer]\nname = "sgd"\nmomentum = 0.9\nnesterov = true')
    assert momentum.optimizer.make() == dataclasses.replace(
        l2l.SGD(lr=1e-3, momentum=0.9, nesterov=True), groups=momentum.optimizer.make().groups
    )
    assert isinstance(read(folder, optimizer="lion").optimizer.make(), l2l.Lion)


def test_muon_has_the_rates_of_adamw_and_may_have_two(folder: Path) -> None:
    made = read(folder, optimizer="muon").optimizer.make()
    assert isinstance(made, l2l.Muon)
    others = l2l.AdamW(lr=2e-5, weight_decay=0.1)
    assert made == l2l.Muon(
        lr=2e-5, adjust_lr_fn="match_rms_adamw", others=others, groups=made.groups
    )
    more = '[optimizer]\nname = "muon"\nlearning_rate = 1e-3\nbetas = [0.9, 0.95]'
    made = read(folder, more).optimizer.make()
    assert isinstance(made, l2l.Muon)
    assert made.others == l2l.AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    more = '[optimizer]\nname = "muon"\nlearning_rate = 0.02\nothers_learning_rate = 1e-4\n'
    made = read(folder, f'{more}adjust_lr_fn = "original"\nns_steps = 4').optimizer.make()
    assert isinstance(made, l2l.Muon)
    assert (made.lr, made.ns_steps, made.adjust_lr_fn) == (0.02, 4, "original")
    assert isinstance(made.others, l2l.AdamW)
    assert made.others.lr == 1e-4
    assert "eps is not for muon" in refusal(folder, '[optimizer]\nname = "muon"\neps = 1e-8')


def test_without_a_schedule_there_is_none(folder: Path) -> None:
    more = '[optimizer]\nname = "schedule-free"\n'
    found = read(folder, more + "warmup_steps = 7")
    assert isinstance(found.optimizer.make(), l2l.ScheduleFreeAdamW)
    assert found.optimizer.warmup_steps == 7
    assert [found.schedule.factor(step, total=100) for step in (0, 50, 99)] == [1.0] * 3
    for schedule in ('shape = "cosine"', "warm_up_steps = 5"):
        said = refusal(folder, f"{more}[schedule]\n{schedule}")
        assert "schedule-free takes no schedule. Expected constant" in said


def test_biases_and_norms_do_not_decay_unless_they_should(folder: Path) -> None:
    groups = read(folder).optimizer.make().groups
    assert groups is not None
    assert groups("layer.weight", nn.Parameter(torch.zeros(2, 2))) is None
    assert groups("norm.weight", nn.Parameter(torch.zeros(2))) == {"weight_decay": 0.0}
    more = "[optimizer]\ndecay_biases_and_norms = true"
    assert read(folder, more).optimizer.make().groups is None


def test_float32_is_exported_as_it_is(folder: Path) -> None:
    assert read(folder, precision="float32").output.export_dtype == "float32"
    more = '[output]\nexport_dtype = "bfloat16"'
    assert read(folder, more, precision="float32").output.export_dtype == "bfloat16"


# --------------------------------------------------------------------------------------------------
# Back to TOML


@pytest.mark.parametrize(
    "more",
    [
        "",
        '[optimizer]\nname = "adafactor"\n[schedule]\nwarm_up_steps = 5\nshape = "linear"',
        '[optimizer]\nname = "muon"\nlearning_rate = 0.5',
        '[optimizer]\nname = "schedule-free"\nwarmup_steps = 3',
        '[training]\nsteps = 3\n[memory]\ndevice_memory = "8GiB"',
        'hold_out = 2\ntask = "instruct"\ntemplate = """{{ "a\\tb" }}\n\\"x\\""""\n'
        "[evaluation]\nevery_steps = 0",
    ],
)
def test_what_is_written_reads_as_the_same_settings(folder: Path, more: str) -> None:
    found = read(folder, more)
    found.output.folder.mkdir(parents=True)
    written = found.output.folder / "run.toml"
    written.write_text(found.to_toml())
    assert Settings.read(written) == found
    assert Settings.of_table(found.table()) == found
    assert json.loads(json.dumps(found.table())) == found.table()


def test_a_run_folder_may_be_moved(folder: Path) -> None:
    found = read(folder)
    moved = folder / "moved"
    moved.mkdir()
    (moved / "run.toml").write_text(found.to_toml())
    assert Settings.read(moved / "run.toml").output.folder == moved


def test_differences_are_those_that_change_the_result(folder: Path) -> None:
    before = read(folder, steps="10").table()
    assert read(folder, steps="10", output="x", device_memory="1GiB").differences(before) == []
    assert read(folder, steps="20", seed="3").differences(before) == [
        "[training] steps was 10 and is 20 from here",
        "[training] seed was 0 and is 3 from here",
    ]
    assert read(folder, epochs="2").differences(before) == [
        "[training] steps was 10 and is not set from here",
        "[training] epochs was not set and is 2.0 from here",
    ]


def test_what_earlier_settings_do_not_have_is_as_it_was(folder: Path) -> None:
    """Settings of before a key was added."""
    before = read(folder).table()
    del before["schedule"]["power"], before["optimizer"]["groups"], before["data"]["masked_share"]
    assert read(folder).differences(before) == []
    more = "[schedule]\npower = 2.0"
    assert read(folder, more).differences(before) == [
        "[schedule] power was not set and is 2.0 from here"
    ]


def test_when_to_evaluate_changes_the_result_where_it_decides(folder: Path) -> None:
    hold = "hold_out = 2\n[evaluation]\nevery_steps = "
    for more, number in (("", 0), ("\npatience = 2", 1), ("\n[checkpoint]\nbest = true", 1)):
        before = read(folder, f"{hold}5{more}").table()
        assert len(read(folder, f"{hold}6{more}").differences(before)) == number


# --------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("[training]\nstepss = 3", ["[training] has no setting stepss", "Did you mean steps?"]),
        ("[training]\nlearning_rate = 1", ["Did you mean learning_rate in [optimizer]?"]),
        ("[training]\nbatch_size = 8", ["batch_size. Here it is rows in [training]: all rows of"]),
        ("[training]\nlr = 1e-4", ["no setting lr. Here it is learning_rate in [optimizer]."]),
        ("[training]\nnum_train_epochs = 1", ["Here it is epochs in [training]."]),
        ("[training]\nreport_to = 'wandb'", ["Here it is tensorboard in [output]: true or false"]),
        ("max_seq_length = 8", ["has no setting max_seq_length. Here it is length in [training]."]),
        ("gradient_accumulation_steps = 8", ["Here it is rows in [training]"]),
        ("trust_remote_code = true", ["Nothing is called so here"]),
        ("[trainin]\nsteps = 3", ["trainin is no section", "Did you mean training?", "memory"]),
        ("[xyz]\nsteps = 3", ["xyz is no section. Expected one of model, data"]),
        ("[training]\nrows = 0", ["rows = 0", "greater than or equal to 1", "Rows of a step."]),
        ('[training]\nrows = "8"', ['rows = "8"', "expected a valid integer"]),
        ("[training]\nrows = 8.5", ["rows = 8.5", "expected a valid integer"]),
        ("[training]\nrows = true", ["rows = true", "expected a valid integer"]),
        ("[training]\nepochs = 0", ["epochs = 0", "greater than 0"]),
        ("[training]\nclip_norm = inf", ["clip_norm", "expected a finite number"]),
        ("[training]\ncompile = 1", ["compile = 1", "expected a valid boolean"]),
        (
            '[training]\nprecision = "bf16"',
            ['"bf16"', "'bfloat16', 'float16' or 'float32'", "Did you mean"],
        ),
        ("[training]\nsteps = 2\nepochs = 1", ["steps", "epochs", "Set only one of them"]),
        ("[training]\nrows = 1979-05-27", ["1979-05-27", "a valid integer"]),
        ('task = "clasification"', ["'causal'", "Did you mean classification?"]),
        ('task = "regression"\npacking = true', ["one label per row", "Set it to false"]),
        ('template = "x"', ["template is set", "has no chats"]),
        ("hold_out = 2\nevaluation_source = 'text.txt'", ["Set only one of them"]),
        ('evaluation_source = "gone.txt"', ["evaluation_source", "gone.txt is not there"]),
        ("evaluation_source = []", ["evaluation_source = []", "at least 1 item"]),
        ('[columns]\nlabel = "x"', ["label", "'causal' does not use"]),
        ("[optimizer]\nbetas = [0.9]", ["betas = [0.9]", "at least 2 items"]),
        ("[optimizer]\nbetas = [0.9, 1.5]", ["betas must lie in [0, 1)"]),
        ("[optimizer]\nmomentum = 0.9", ["momentum is not for adamw", "betas"]),
        ("[optimizer]\neps = [1e-8, 1e-3]", ["eps", "Expected the like of 1e-08"]),
        (
            '[optimizer]\nname = "adafactor"\neps = 1e-8',
            ["eps", "Expected the like of (1.19"],
        ),
        ('[optimizer]\nname = "adam"', ["Did you mean adamw?"]),
        ('[optimizer]\nname = "sgd"\nnesterov = true', ["nesterov needs momentum"]),
        ("[optimizer]\nlearning_rate = -1", ["greater than or equal to 0"]),
        ("[schedule]\nwarm_up_steps = 1\nwarm_up_share = 0.1", ["Set only one of them"]),
        ("[schedule]\nminimum_ratio = 2", ["less than or equal to 1"]),
        ('[memory]\ndevice_memory = "8 bananas"', ["8 bananas", "8GiB"]),
        ('[memory]\nhost_memory = "0GiB"', ["host_memory", "8GiB"]),
        ("[evaluation]\nevery_steps = 3", ["nothing to evaluate on", "--evaluation-data"]),
        ("[checkpoint]\nkeep = 0", ["keep = 0", "greater than or equal to 1"]),
        ('[output]\nfolder = "text.txt"', ["is a file", "Expected a folder"]),
        ('[output]\nfolder = ""', ["a path in quotes"]),
        ("[training", ["run.toml is not TOML"]),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(folder: Path, more: str, words: list[str]) -> None:
    found = refusal(folder, more)
    assert "run.toml" in found
    for word in words:
        assert word in found


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("rows", "eight", '--rows = "eight": expected a valid integer'),
        ("rows", "8.5", "--rows = 8.5: expected a valid integer"),
        ("learning_rate", "-1", "--learning-rate = -1: expected greater than or equal to 0"),
        ("task", "chat", "--task"),
        ("device_memory", "much", '--device-memory = "much"'),
        ("data", "gone.txt", "--data: gone.txt is not there"),
        ("model", "gone", "there is no such folder"),
    ],
)
def test_a_flag_that_cannot_be_is_named_as_a_flag(
    folder: Path, name: str, value: str, words: str
) -> None:
    found = refusal(folder, "", **{name: value})
    assert words in found
    assert "run.toml" not in found


def test_adafactor_is_not_clipped_and_not_float16(folder: Path) -> None:
    more = '[optimizer]\nname = "adafactor"\n[training]\n'
    assert "Expected 0" in refusal(folder, more + "clip_norm = 1.0")
    assert "bfloat16" in refusal(folder, more + 'precision = "float16"')


def test_what_stands_in_no_section_or_is_none_is_refused(folder: Path) -> None:
    path = folder / "run.toml"
    for text, words in (
        ("steps = 3", "Did you mean steps in [training]?"),
        ("what = 3", "what is no section"),
        ("training = 3", "training is a section"),
    ):
        path.write_text(text)
        with pytest.raises(SettingsError, match=r"run\.toml") as refused:
            Settings.read(path)
        assert words in str(refused.value)


def test_model_and_data_must_be_named_and_be_there(folder: Path) -> None:
    path = folder / "run.toml"
    path.write_text('[model]\nfolder = "model"')
    with pytest.raises(SettingsError, match="--data FILE"):
        Settings.read(path)
    with pytest.raises(SettingsError, match="--model FOLDER"):
        Settings.read(None)
    with pytest.raises(SettingsError, match=r"gone\.toml cannot be read"):
        Settings.read(folder / "gone.toml")
    path.write_text('[model]\nfolder = "model"\n[data]\nsource = "text.txt"')
    with pytest.raises(SettingsError, match="--random-init"):
        Settings.read(path)
    (folder / "model" / "config.json").unlink()
    with pytest.raises(SettingsError, match=r"has no config\.json"):
        Settings.read(path)


def test_every_word_from_elsewhere_leads_to_a_setting_and_is_none() -> None:
    for word in ELSEWHERE:
        found = answer(word, lambda section, key: SECTIONS[section][key] and f"{section}.{key}")
        assert found.startswith((" Here it is ", " Nothing is called so here: "))
        assert found.endswith(".")
    homes = {key for keys in SECTIONS.values() for key in keys}
    assert homes & set(ELSEWHERE) == {"warmup_steps"}, "schedule-free has it, in its own section"
    assert answer("moon", lambda *_: "") == ""


def test_any_setting_may_be_set_by_a_flag(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = (
        "schedule.warm_up_steps=7",
        "optimizer.betas=[0.5, 0.9]",
        "schedule.shape=linear",
        "memory.disk=fast",
    )
    path = folder / "run.toml"
    path.write_text(MINIMAL + "[schedule]\nwarm_up_share = 0.5")
    found = Settings.read(path, flags=[Flag.of_text(text) for text in texts])
    assert (found.schedule.warm_up_steps, found.schedule.warm_up_share) == (7, None)
    assert found.optimizer.betas == (0.5, 0.9)
    assert found.schedule.shape == "linear"
    assert found.memory.disk == Path.cwd() / "fast"
    for text, words in (
        ("warm_up_steps=7", "Did you mean schedule.warm_up_steps?"),
        ("schedule.warm_up_step=7", "Did you mean warm_up_steps?"),
        ("schedle.shape=linear", "Did you mean schedule?"),
        ("training.lr=1", "Here it is optimizer.learning_rate."),
    ):
        with pytest.raises(SettingsError) as refused:
            Flag.of_text(text)
        assert words in str(refused.value)
        assert cli.main(["train", str(path), "--set", text]) == 2
        assert words in capsys.readouterr().err
    assert cli.main(["train", str(path), "--set", "training.rows=0"]) == 2
    assert "--set training.rows = 0: expected" in capsys.readouterr().err


def test_several_data_may_follow_one_flag(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    monkeypatch.chdir(folder)
    monkeypatch.setattr("l2l.cli.train._run", lambda settings, *_: seen.append(settings) or 0)
    words = ["train", "--model", "model", "--random-init", "--data", "text.txt", "other.txt"]
    (folder / "more.toml").write_text("[training]\nrows = 3")
    for more in ([], ["more.toml"], ["--data", "text.txt"]):
        assert cli.main([*words, *more]) == 0
    sources = [[Path(one).name for one in settings.data.source] for settings in seen]
    assert sources == [["text.txt", "other.txt"]] * 2 + [["text.txt", "other.txt", "text.txt"]]
    assert [settings.training.rows for settings in seen] == [8, 3, 8], "a TOML file is no data"


# --------------------------------------------------------------------------------------------------
# Schedules


def factors(total: int, **settings: object) -> list[float]:
    schedule = ScheduleSettings(**settings)  # type: ignore[arg-type]
    return [schedule.factor(step, total=total) for step in range(total)]


def test_schedules_rise_evenly_and_then_follow_their_shape() -> None:
    assert factors(4, shape="constant", warm_up_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert factors(6, shape="linear", warm_up_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert factors(4, shape="linear", warm_up_share=0.5, minimum_ratio=0.5) == [0.5, 1, 1, 0.75]
    cosine = factors(5, shape="cosine", warm_up_steps=1, minimum_ratio=0.1)
    expected = [1.0, *(0.1 + 0.45 * (1 + math.cos(math.pi * n / 4)) for n in range(4))]
    assert cosine == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "settings", "theirs"),
    [
        ("linear", {}, {}),
        ("cosine", {}, {}),
        ("constant_with_warmup", {}, {}),
        ("inverse_sqrt", {}, {}),
        ("cosine_with_restarts", {"cycles": 3}, {"num_cycles": 3}),
        ("polynomial", {"power": 2.0, "minimum_ratio": 0.1}, {"power": 2.0, "lr_end": 0.1}),
        ("cosine_with_min_lr", {"minimum_ratio": 0.2}, {"min_lr_rate": 0.2}),
        (
            "warmup_stable_decay",
            {"decay_share": 0.25, "minimum_ratio": 0.1},
            {"num_decay_steps": 10, "min_lr_ratio": 0.1},
        ),
    ],
)
@pytest.mark.parametrize("rise", [0, 6])
def test_schedules_are_those_of_transformers_after_the_warm_up(
    name: str, settings: dict, theirs: dict, rise: int
) -> None:
    """In the warm-up the first step of transformers is made with a rate of 0; ours is not."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = transformers.get_scheduler(name, optimizer, rise, 40, theirs)
    (expected,) = ([one(step) for step in range(40)] for one in scheduler.lr_lambdas)
    found = factors(40, shape=name, warm_up_steps=rise, **settings)
    assert found[rise:] == pytest.approx(expected[rise:], abs=1e-12)
    if "minimum_ratio" not in settings:  # from which one of theirs rises
        assert found[:rise] == pytest.approx(expected[1 : rise + 1])


def test_schedules_have_sense_at_their_ends() -> None:
    assert factors(1, warm_up_share=0.03) == [1.0]
    assert factors(2, warm_up_steps=10) == [0.5, 1.0]
    late = ScheduleSettings(shape="linear", warm_up_steps=0, minimum_ratio=0.2)
    assert late.factor(99, total=10) == pytest.approx(0.2)


# --------------------------------------------------------------------------------------------------
# Help


def test_the_help_is_a_toml_file_with_every_setting() -> None:
    text = help_text()
    assert set(tomllib.loads(text)) == set(SECTIONS)
    for keys in SECTIONS.values():
        for name, key in keys.items():
            assert f"# {name} = " in text
            assert key["description"].endswith(".")
    said = [line for line in text.splitlines() if not line.startswith("#  ") and "..." not in line]
    found = tomllib.loads("\n".join(line.removeprefix("# ") for line in said))
    assert found["training"]["rows"] == 8
    assert found["schedule"].items() >= {"shape": "cosine", "minimum_ratio": 0.0}.items()


def test_flags_say_what_their_settings_say(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for word, (section, key, _) in FLAGS.items():
        assert word in shown
        assert SECTIONS[section][key]["description"] in shown
    for word in ("--dry-run", "--no-resume", "--help-settings", "--debug"):
        assert word in shown
    assert cli.main(["train", "--help-settings"]) == 0
    assert capsys.readouterr().out.strip() == help_text().strip()


def test_a_refusal_ends_with_status_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "run.toml"
    path.write_text(MINIMAL + "[training]\nstepss = 3")
    assert cli.main(["train", str(path)]) == 2
    shown = capsys.readouterr()
    assert "Did you mean steps?" in shown.err
    assert "Traceback" not in shown.err
    assert not shown.out


# --------------------------------------------------------------------------------------------------
# Adapters


def test_an_adapter_is_trained_if_anything_is_said_of_it(folder: Path) -> None:
    plain = read(folder)
    assert plain.lora.make() is None
    assert "lora" not in plain.table()
    assert read(folder, precision="bfloat16").output.export_dtype == "bfloat16"
    for found in (read(folder, "[lora]\nrank = 4"), read(folder, lora_rank="4", lora=True)):
        lora = found.lora.make()
        assert lora is not None
        assert (lora.rank, lora.alpha, lora.targets) == (4, 8.0, ("all-linear",))
        assert found.output.export_dtype == "float32"
        assert found.optimizer.learning_rate == 2e-5, "as without one"
        assert Settings.of_table(tomllib.loads(found.to_toml())).lora == found.lora
    named = read(folder, lora_target=["q_proj", "v_proj"], lora_alpha="16", dora=True)
    assert named.lora.targets == ("q_proj", "v_proj")
    assert (named.lora.rank, named.lora.alpha, named.lora.dora) == (16, 16.0, True)
    assert read(folder, "[lora]\nenabled = false\nrank = 4").lora.make() is None
    assert "[lora] rank = 0: expected" in refusal(folder, "[lora]\nrank = 0")
    assert "--lora-dropout = 1.0" in refusal(folder, lora_dropout="1.0")
