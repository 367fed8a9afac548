"""What a run shows and writes: plain lines, a live display, metrics.jsonl, TensorBoard events."""

import io
import json
import math
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typing_extensions import override

from l2l.cli.report import draw_losses
from l2l.planner import Bounds
from l2l.train import display as display_module
from l2l.train.display import Display, Level, Status, format_seconds, open_display
from l2l.train.folder import RunFolder
from l2l.train.live_display import LiveDisplay
from l2l.train.progress import INTERRUPTED, NUM_DETAILED, Progress, open_events, read_metrics


@dataclass
class FakeReport:
    """A step's numbers; notes when they are read."""

    number: int
    read: list[int] = field(default_factory=list)
    skipped: bool = False
    loss_scale: float = 1.0
    num_tokens: int = 100
    compiled: bool | None = None

    @property
    def loss(self) -> float:
        self.read.append(self.number)
        return math.nan if self.skipped else 1.0 / self.number

    @property
    def gradient_norm(self) -> float:
        return 0.5

    @property
    def layer_norms(self) -> dict[int, float]:
        return {0: 0.123456, 2: math.nan if self.skipped else 1.0 / self.number}


class Silent(Display):
    """Remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.shown: list[Status] = []

    @override
    def say(self, text: str, level: Level = Level.USUAL) -> None:
        self.said.append(text)

    @override
    def show(self, status: Status) -> None:
        self.shown.append(status)

    @override
    def close(self) -> None:
        pass


def start(
    path: Path, display: Display | None = None, *, step: int = 0, num_steps: int = 10
) -> Progress:
    shown = display or Silent()
    return Progress(RunFolder(path), shown, tensorboard=False, step=step, num_steps=num_steps)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def without_times(records: list[dict]) -> list[dict]:
    return [{k: v for k, v in record.items() if k != "seconds"} for record in records]


# --------------------------------------------------------------------------------------------------
# Metrics


def test_a_step_is_read_two_steps_later(tmp_path: Path) -> None:
    read: list[int] = []
    run = start(tmp_path)
    for number in range(1, 5):
        run.step_begun(number, FakeReport(number, read), learning_rate=0.1)
    assert sorted(set(read)) == [1, 2]
    run.catch_up()
    run.close()
    assert sorted(set(read)) == [1, 2, 3, 4]
    assert [record["step"] for record in lines_of(tmp_path)] == [1, 2, 3, 4]


def test_steps_before_layers_were_compiled_say_so(tmp_path: Path) -> None:
    run = start(tmp_path)
    for number in (1, 2, 3):
        run.step_begun(number, FakeReport(number, compiled=number > 2), learning_rate=0.1)
    run.catch_up()
    run.close()
    assert [record.get("compiled") for record in lines_of(tmp_path)] == [False, False, None]


def test_what_takes_much_room_is_written_of_some_steps_of_a_long_run(tmp_path: Path) -> None:
    run = start(tmp_path, num_steps=2 * NUM_DETAILED)
    for number in range(1, 7):
        run.step_begun(number, FakeReport(number), learning_rate=0.1)
        run.status.peak_bytes = 100 * (number // 3)
    run.catch_up()
    run.close()
    lines = lines_of(tmp_path)
    assert [one["step"] for one in lines if "layer_norms" in one] == [1, 2, 4, 6]
    assert [one.get("peak_bytes") for one in lines if "peak_bytes" in one] == [100, 200]


def test_a_line_has_the_numbers_of_a_step(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.step_begun(1, FakeReport(4), learning_rate=2e-5)
    run.step_begun(2, FakeReport(2, skipped=True, loss_scale=1024.0), learning_rate=1e-5)
    run.catch_up()
    run.close()
    first, second = lines_of(tmp_path)
    assert first.pop("seconds") >= 0
    assert first == {
        "kind": "step",
        "step": 1,
        "loss": 0.25,
        "learning_rate": 2e-5,
        "gradient_norm": 0.5,
        "layer_norms": [0.1235, None, 0.25],
        "tokens": 100,
    }
    assert second["layer_norms"] == [0.1235, None, None]
    assert "compiled" not in second
    assert (second["loss"], second["skipped"], second["loss_scale"]) == (None, True, 1024.0)
    assert run.status.num_skipped == 1


def write_run(path: Path, steps: range, *, stopped_after: int | None = None) -> Progress:
    """Steps with an evaluation after each even one and a checkpoint after each fourth."""
    run = start(path, step=steps.start)
    for done in range(steps.start, steps.stop):
        number = done + 1
        run.step_begun(number, FakeReport(number, skipped=number == 3), learning_rate=0.1)
        if number % 2 == 0:
            run.catch_up()
            run.evaluated(number, {"loss": 2.0 / number}, seconds=1.0)
        if number % 4 == 0:
            run.catch_up()
            run.note("checkpoint", number, folder=f"step-{number}")
        if number == stopped_after:
            run.catch_up()
            run.note("checkpoint", number, folder=f"step-{number}", **{INTERRUPTED: True})
            break
    else:
        run.catch_up()
    run.close()
    return run


@pytest.mark.parametrize("resumed", [4, 6])
def test_the_file_of_an_interrupted_run_is_that_of_an_uninterrupted_one(
    tmp_path: Path, resumed: int
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    write_run(whole, range(10))
    write_run(parts, range(10), stopped_after=6)
    with (parts / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 7, "lo')  # killed while it wrote
    run = write_run(parts, range(resumed, 10))
    assert without_times(lines_of(parts)) == without_times(lines_of(whole))
    assert run.status.num_skipped == 1


def test_a_run_from_the_beginning_begins_a_new_file(tmp_path: Path) -> None:
    write_run(tmp_path, range(4))
    start(tmp_path).close()
    assert lines_of(tmp_path) == []


def test_what_was_done_before_is_known(tmp_path: Path) -> None:
    write_run(tmp_path, range(5))
    display = Silent()
    run = start(tmp_path, display, step=4)
    assert [run.has("evaluation", step) for step in (2, 3, 4)] == [True, False, True]
    assert [run.has("checkpoint", step) for step in (2, 4)] == [False, True]
    run.step_begun(5, FakeReport(5), learning_rate=0.1)
    run.catch_up()
    assert display.shown[-1].evaluation == "after step 4: loss 0.5000"
    run.close()


@pytest.mark.parametrize("line", [b"\xff\xfe", b"[1]", b'{"kind": "step"}', b"7" * 5000])
def test_metrics_that_are_not_ours_are_refused_with_their_line(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "step", "step": 1}\n' + line + b"\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2, is not JSON"):
        read_metrics(path)
    path.write_bytes(b'{"kind": "step", "step": 1}\n' + line)
    assert len(read_metrics(path)) == 1, "torn at the end"


def test_a_file_that_is_no_metrics_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1}\nnonsense\n{}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2, is not JSON"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_numbers_that_are_not_finite_are_null_and_said_so(tmp_path: Path) -> None:
    display = Silent()
    run = start(tmp_path, display)
    run.evaluated(0, {"loss": 1.0, "pearson": math.nan}, seconds=0.1)
    run.close()
    assert lines_of(tmp_path)[0]["pearson"] is None
    assert display.said == ["evaluation after step 0: loss 1.0000, pearson not finite"]


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    run = Progress(folder, Silent(), tensorboard=True, step=3, num_steps=5)
    run.step_begun(4, FakeReport(4), learning_rate=0.125)
    run.catch_up()
    run.evaluated(4, {"perplexity": 3.0}, seconds=0.1)
    run.close()
    written = next((tmp_path / "events").iterdir()).read_bytes()
    for tag in (b"training/loss", b"training/gradient_norm", b"evaluation/perplexity"):
        assert tag in written


def test_without_tensorboard_there_are_no_events(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert open_events(tmp_path / "events", step=0) is None
    assert not (tmp_path / "events").exists()


# --------------------------------------------------------------------------------------------------
# Displays

BOUNDS = Bounds(compute=1.0, link=2.0, host=0.5, lane="link")
STATUS = Status(
    step=7,
    num_steps=10,
    loss=1.5,
    learning_rate=2e-5,
    gradient_norm=0.25,
    epoch=1.75,
    tokens_per_second=12345.6,
    seconds_left=200.0,
    peak_bytes=3 * 2**30,
    budget_bytes=8 * 2**30,
    bounds=BOUNDS,
    step_seconds=4.0,
    num_skipped=2,
    evaluation="after step 5: loss 1.6",
    saving="step-00000005",
)


def test_plain_lines_come_every_few_steps_and_at_the_end() -> None:
    stream = io.StringIO()
    display = Display(stream, every_steps=4)
    for step in range(1, 11):
        display.show(Status(step=step, num_steps=10, loss=0.5))
    assert stream.getvalue().splitlines() == [
        "step 4/10  loss 0.5000",
        "step 8/10  loss 0.5000",
        "step 10/10  loss 0.5000",
    ]


def test_a_plain_line_has_all_that_is_known() -> None:
    stream = io.StringIO()
    Display(stream, every_steps=7).show(STATUS)
    assert stream.getvalue() == (
        "step 7/10  epoch 1.75  loss 1.5000  learning rate 2.00e-05  gradient norm 0.250  "
        "12,346 tokens/s  bound by link at 50%  about 3 min left  device 3.00 GiB of 8.00 GiB  "
        "skipped 2 steps, not finite\n"
    )


@pytest.mark.parametrize("level", list(Level))
def test_a_display_says_what_is_at_its_level(level: Level) -> None:
    stream = io.StringIO()
    display = Display(stream, every_steps=1, level=level)
    for one in Level:
        display.say(one.name, one)
    display.show(Status(step=1, num_steps=1))
    expected = [one.name for one in Level if one <= level]
    shown = stream.getvalue().split()
    assert shown[: len(expected)] == expected
    assert ("step" in shown) == (level > Level.NEEDED)


def test_work_that_takes_long_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(display_module.time, "monotonic", lambda: now)
    stream = io.StringIO()
    display = Display(stream, every_steps=1)
    for passed in (1, 2, 6, 7, 12):
        now = 100.0 + passed
        display.say_passing(f"after {passed}")
    assert stream.getvalue().split("\n") == ["after 6", "after 12", ""]


def test_a_quiet_terminal_is_not_drawn_on() -> None:
    assert type(open_display(Terminal(), every_steps=1, level=Level.NEEDED)) is Display


def test_a_long_silence_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    display = Display(stream, every_steps=100)
    display.show(Status(step=1, num_steps=200))
    assert not stream.getvalue()
    monkeypatch.setattr(display_module, "LONGEST_SILENCE_SECONDS", 0.0)
    display.show(Status(step=2, num_steps=200))
    assert stream.getvalue().startswith("step 2/200")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    @override
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_live_display_and_a_file_does_not(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert type(open_display(io.StringIO(), every_steps=1)) is Display
    stream = Terminal()
    display = open_display(stream, every_steps=1)
    assert isinstance(display, LiveDisplay)
    display.say("hello [not markup]")
    display.show(STATUS)
    display.say("between")
    display.close()
    shown = stream.getvalue()
    assert "hello [not markup]" in shown
    assert "between" in shown
    for name, value in STATUS.parts():
        assert name in shown
        assert value in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor comes back


def test_without_rich_a_terminal_gets_plain_lines(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert type(open_display(Terminal(), every_steps=1)) is Display


def test_the_status_follows_the_run(tmp_path: Path) -> None:
    display = Silent()
    run = start(tmp_path, display)
    run.status.peak_bytes, run.status.budget_bytes, run.status.bounds = 10, 20, BOUNDS
    run.status.saving = "step-00000002"
    for number in (1, 2, 3):
        run.step_begun(number, FakeReport(number), learning_rate=0.1)
    run.catch_up()
    run.close()
    first, _, last = display.shown
    assert not first.tokens_per_second  # the first one is planned, and perhaps compiled
    assert last.tokens_per_second
    assert last.seconds_left
    assert (last.step, last.num_steps, last.loss) == (3, 10, 1 / 3)
    assert (last.learning_rate, last.gradient_norm, last.epoch) == (0.1, 0.5, 0.0)
    assert (last.bounds, last.peak_bytes, last.saving) == (BOUNDS, 10, "step-00000002")
    assert last.step_seconds
    for line in lines_of(tmp_path):
        assert line["bound"] == "link"
        assert line["share_of_bound"] > 0


def test_epochs_are_counted(tmp_path: Path) -> None:
    display, folder = Silent(), RunFolder(tmp_path)
    run = Progress(folder, display, 4, 10, tensorboard=False, steps_an_epoch=2.5)
    run.step_begun(5, FakeReport(5), learning_rate=0.1)
    run.catch_up()
    run.close()
    assert display.shown[-1].epoch == 2.0


def test_times_are_for_people() -> None:
    assert [format_seconds(seconds) for seconds in (3, 89, 150, 5000, 7500)] == [
        "about 3 s",
        "about 89 s",
        "about 2 min",
        "about 83 min",
        "about 2 h 5 min",
    ]


# --------------------------------------------------------------------------------------------------
# Loss curves


SVG = "{http://www.w3.org/2000/svg}"


def curve(drawn: str, name: str) -> tuple[list[tuple[float, ...]], int]:
    """Places along a line of a picture, and how many marks are on it."""
    groups = ElementTree.fromstring(drawn).iter(f"{SVG}g")
    (found,) = [one for one in groups if one.get("id") == name]
    line = found.find(f"{SVG}path")
    assert line is not None
    corners = line.get("d", "").replace("M", "").split("L")
    return [tuple(map(float, c.split())) for c in corners], len(list(found.iter(f"{SVG}use")))


def test_losses_are_drawn_inside_the_picture() -> None:
    training = [(step, 5.0 / step) for step in range(1, 101)]
    drawn = draw_losses(training, [(0, 5.5), (50, 0.2)], title="a < b")
    assert "a &lt; b" in drawn
    curves = [curve(drawn, name) for name in ("training", "mean", "evaluation")]
    assert [(len(points), marks) for points, marks in curves] == [(100, 0), (100, 0), (2, 2)]
    assert all(0 <= x <= 648 and 0 <= y <= 403 for points, _ in curves for x, y in points)
    assert all(lower > upper for (_, upper), (_, lower) in pairwise(curves[0][0]))


@pytest.mark.parametrize("training", [[], [(1, 2.0)], [(1, 0.0), (2, 0.0)]])
def test_few_losses_can_be_drawn(training: list[tuple[float, float]]) -> None:
    drawn = draw_losses(training, [], title="short")
    assert ElementTree.fromstring(drawn).tag == f"{SVG}svg"
    assert ("no step yet" in drawn) == (not training)
