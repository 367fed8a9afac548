"""`l2l bench step`: runs, what is read from their processes, table, plot, and all of it once."""

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from l2l.bench.comparison import (
    Outcome,
    compare,
    describe,
    list_runs,
    plot_points,
    read_outcome,
)
from l2l.bench.peers import PLAIN_VARIANTS
from l2l.bench.plot import KINDS, PlotError, Point, draw
from l2l.bench.workload import FAILED, MEASURED, NOT_INSTALLED, Run, Workload

ROOT = Path(__file__).parent.parent
GIB = 2**30


def measured(speed: float, peak_gib: float | None, **run) -> Outcome:
    measurement = {
        "step_seconds": 65536 / speed,
        "all_step_seconds": [65536 / speed],
        "tokens_per_second": speed,
        "losses": [11.8],
        "device_peak_bytes": None if peak_gib is None else int(peak_gib * GIB),
        "device_allocated_bytes": None,
        "host_peak_bytes": 40 * GIB,
        "model_seconds": 1.0,
        "build_seconds": 2.0,
        "first_step_seconds": 9.0,
        "num_parameters": 3_212_749_824,
        "microbatch_size": 8,
        "device": "H200",
        "torch_version": "2.11",
    }
    return Outcome(run=Run(**run), status=MEASURED, measurement=measurement)


OUTCOMES = [
    measured(12_000, 3.9, device_memory="4GiB"),
    measured(16_000, 7.5, device_memory="8GiB"),
    measured(20_000, 15.0, device_memory="16GiB"),
    measured(25_000, 55.2, system="plain", variant="compiled"),
    measured(8_000, 16.1, system="deepspeed", variant="zero-3"),
    measured(10_000, 6.0, system="roundpipe", variant="synchronous"),
    measured(17_000, 6.0, system="roundpipe", variant="default"),
    Outcome(run=Run(system="fsdp2", variant="offload"), status=NOT_INSTALLED),
    Outcome(
        run=Run(system="deepspeed", variant="zero-2"), status=FAILED, note="ValueError: no such <x>"
    ),
]


def row_of(table: str, label: str) -> str:
    (row,) = [line for line in table.splitlines() if line.startswith(f"{label} ")]
    return " ".join(row.removeprefix(label).split())


# ---- runs ---------------------------------------------------------------------------------------


def test_the_engine_runs_once_for_every_budget_and_others_in_all_variants():
    runs = list_runs(
        Run(),
        systems=["engine", "plain", "deepspeed", "roundpipe"],
        plain_variants=["eager"],
        device_memory=["4GiB", "16GiB"],
    )
    assert [run.label for run in runs] == [
        "engine 4GiB",
        "engine 16GiB",
        "plain eager",
        "deepspeed zero-3",
        "deepspeed zero-2",
        "roundpipe synchronous",
        "roundpipe default",
    ]
    assert [run.label for run in list_runs(Run(), systems=["engine", "plain"])] == [
        "engine",
        *(f"plain {variant}" for variant in PLAIN_VARIANTS),
    ]


def test_a_run_survives_the_way_to_its_process():
    run = Run(workload=Workload(shape="tiny", clip_norm=None), device_memory="4GiB", moments="8bit")
    assert Run.from_json(run.to_json()) == run
    assert Run.from_json('{"workload": {"shape": "tiny"}}').workload == Workload(shape="tiny")


def test_others_take_eight_rows_or_the_most_that_divide_the_batch():
    assert Run(system="plain", variant="eager").usual_microbatch_size == 8
    twelve = Workload(num_tokens=12 * 1024)
    assert Run(workload=twelve, system="plain", variant="eager").usual_microbatch_size == 6
    assert Run(workload=twelve, microbatch_size=4).usual_microbatch_size == 4


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Workload(num_tokens=1000), "--tokens"),
        (lambda: Workload(num_warm_up=0), "--warm-up"),
        (lambda: Workload(num_layers=0), "--layers"),
        (lambda: Workload(clip_norm=-1.0), "--clip-norm"),
        (lambda: Run(microbatch_size=7), "--microbatch-size"),
        (lambda: Run(device_memory="much"), "--device-memory"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_option_to_change(make, named):
    with pytest.raises(ValueError, match=named):
        make()


# ---- processes ----------------------------------------------------------------------------------


def test_the_line_of_json_is_found_before_what_other_systems_print_last():
    line = json.dumps({"status": NOT_INSTALLED, "note": ""})
    output = f"[1, 2]\nhello\n{line}\nbye\n{{}}\n3\n"
    found = read_outcome(Run(), output=output, errors="a warning", note="exit status 0")
    assert (found.status, found.note) == (NOT_INSTALLED, "")


def test_a_process_that_dies_is_a_row_with_its_last_words():
    found = read_outcome(Run(), output="", errors="first\nlast\n\n", note="exit status -9")
    assert (found.status, found.note) == (FAILED, "exit status -9: last")


def test_a_run_past_its_time_is_ended_and_does_not_stop_the_others(tmp_path):
    runs = [Run(workload=Workload(shape="tiny"), device_memory=size) for size in ("1GiB", "2GiB")]
    said = []
    table, data = compare(runs, 0.01, said.append, folder=tmp_path)
    assert said == ["engine 1GiB: failed", "engine 2GiB: failed"]
    assert [one["status"] for one in data["results"]] == [FAILED, FAILED]
    assert table.count("0.01 s (--time-limit)") == 2


# ---- the table ----------------------------------------------------------------------------------


def test_the_table_compares_with_the_best_exact_peer_and_the_fastest_loop_in_memory():
    table, data = describe(OUTCOMES)
    assert data["best_exact_peer_tokens_per_second"] == 10_000
    assert data["fastest_in_memory_tokens_per_second"] == 25_000
    rows = {
        "engine 4GiB": "12,000 1.20 0.48 3.90 4GiB 40.00 - yes",
        "plain compiled": "25,000 2.50 1.00 55.20 - 40.00 - no: no float32 master",
        "roundpipe synchronous": "10,000 1.00 0.40 6.00 - 40.00 - yes",
        "roundpipe default": "17,000 1.70 0.68 6.00 - 40.00 - no: weights one step stale",
        "fsdp2 offload": "not installed",
        "deepspeed zero-2": "failed: ValueError: no such <x>",
    }
    assert {label: row_of(table, label) for label in rows} == rows
    assert "3,212,749,824 parameters" in table.splitlines()[0]
    json.dumps(data)


def test_ratios_without_anything_to_compare_with_are_left_open():
    table, data = describe([measured(12_000, None, moments="8bit")])
    assert row_of(table, "engine 8bit moments") == "12,000 - - - - 40.00 - no: 8bit moments"
    assert data["best_exact_peer_tokens_per_second"] is None


# ---- the plot -----------------------------------------------------------------------------------


def elements_in(element: ElementTree.Element, tag: str) -> list[ElementTree.Element]:
    return list(element.iter(f"{{http://www.w3.org/2000/svg}}{tag}"))


def elements(text: str, tag: str) -> list[ElementTree.Element]:
    return elements_in(ElementTree.fromstring(text), tag)


def group(text: str, name: str) -> ElementTree.Element:
    """What is drawn under a name."""
    (found,) = [one for one in elements(text, "g") if one.get("id") == name]
    return found


def words(text: str) -> list[str | None]:
    return [element.text for element in elements(text, "text")]


def test_the_plot_has_a_line_over_budgets_and_a_labelled_point_for_every_run():
    points = plot_points(OUTCOMES)
    text = draw(points, title="title & more")
    drawn = {kind: group(text, kind) for kind in KINDS}
    line = elements_in(drawn["engine"], "path")[0].get("d", "")
    (x4, y4), (x8, y8), (x16, y16) = [
        tuple(map(float, place.split())) for place in line.replace("M", "").split("L")
    ]
    assert x8 - x4 == pytest.approx(x16 - x8, abs=0.2)  # memory by its logarithm
    assert y4 - y8 == pytest.approx(y8 - y16, abs=0.2)  # speed as it is
    assert {"title & more", *(point.label for point in points)} <= set(words(text))
    assert [point.label for point in points][2:5] == ["16GiB", "plain compiled", "deepspeed zero-3"]
    assert {legend for _, legend in KINDS.values()} <= set(words(text))
    for kind in KINDS:
        assert len(elements_in(drawn[kind], "use")) == sum(one.kind == kind for one in points)
    assert {"4 GiB", "8 GiB", "16 GiB", "32 GiB"} <= set(words(text))
    assert {"0", "5,000", "25,000"} <= set(words(text))
    assert text == draw(points, title="title & more")


def test_points_in_one_place_have_labels_apart():
    names = ["first", "second", "third", "fourth", "fifth"]
    points = [Point(label=name, kind="exact", place=(GIB, 100.0)) for name in names]
    labels = [e for e in elements(draw(points, title=""), "text") if e.text in names]
    assert len({label.get("transform") for label in labels}) == 5


def test_labels_lie_in_the_picture_and_off_the_line():
    points = plot_points(OUTCOMES)
    text = draw(points, title="")
    by_label = {one.text: one for one in elements(text, "text")}
    marks = [mark for kind in KINDS for mark in elements_in(group(text, kind), "use")]
    places = {(float(mark.get("x", 0)), float(mark.get("y", 0))) for mark in marks}
    for point in points:
        x, y = (float(by_label[point.label].get(name, -1)) for name in ("x", "y"))
        assert 0 <= x <= 648
        assert 0 <= y <= 403
        assert (x, y) not in places


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotError, match=r"matplotlib.*pip install 'l2l\[plot\]'"):
        draw([], title="")


@pytest.mark.parametrize("kind", KINDS)
def test_one_point_is_enough_for_axes_and_none_is_said(kind):
    point = Point(label="here", kind=kind, place=(1.5 * 2**20, 0.3))
    assert {"here", "1 MiB", "2 MiB"} <= set(words(draw([point], title="")))
    assert "nothing was measured" in words(draw([], title=""))


# ---- all of it ----------------------------------------------------------------------------------


def test_engine_and_plain_loop_train_the_same_model_side_by_side(tmp_path):
    options = "--shape tiny --tokens 256 --length 32 --steps 1 --warm-up 1 --time-limit 300"
    command = f"-m l2l bench step {options} --systems engine plain --plain-variants eager --json"
    done = subprocess.run(
        [sys.executable, *command.split(), "--folder", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    found = json.loads(done.stdout)
    assert json.loads((tmp_path / "results.json").read_text()) == found
    engine, plain = found["results"]
    assert [engine["status"], plain["status"]] == [MEASURED, MEASURED]
    assert engine["losses"] == pytest.approx(plain["losses"], rel=1e-3)
    assert engine["num_parameters"] == plain["num_parameters"] < 1_000_000
    assert engine["first_step_seconds"] > engine["model_seconds"] + engine["build_seconds"]
    assert engine["busy"]["compute"] > 0
    assert "model.layers" in engine["plan"]
    assert any(line.startswith("engine ") for line in lines)
    assert any(line.startswith("plain eager ") for line in lines)
    assert "traceEvents" in json.loads((tmp_path / "engine-trace.json").read_text())
    assert words((tmp_path / "speed.svg").read_text())
