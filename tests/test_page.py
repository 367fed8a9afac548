"""The page of a run and of a plan: what it shows, what it refuses to be made to do, the server."""

import base64
import hashlib
import http.client
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training import train, write_settings, write_tiny
from typing_extensions import override

import l2l
from l2l import cli
from l2l.bench.workload import Workload
from l2l.cli.run_page import document_of, prospects_of
from l2l.cli.signals import Interrupted
from l2l.page import PLANNED, Document, content_of, ledger_section, page_of, run_sections
from l2l.page import document as document_module
from l2l.page.curves import MOST_COLUMNS, MOST_POINTS, means, thinned
from l2l.page.markup import as_json, element, escaped, in_figure
from l2l.page.serving import LIVE, _Server
from l2l.planner import H200, KeptPlans, Preview, Prospects, foresee, look
from l2l.train import Planned, RunFolder, read_metrics
from l2l.train.planned import outline_of

HOSTILE = "</script><script>hacked=1</script><img src=x onerror=hacked=1>&lt;b&gt;\u2028\"'"
NUM_STEPS = 60


def steps_of(number: int, *, layers: int = 4) -> list[dict[str, Any]]:
    """Lines of steps that begin at 1."""
    return [
        {
            "kind": "step",
            "step": step,
            "loss": None if step == 7 else 4.0 / step + 1.0,
            "learning_rate": 1e-3 * step,
            "gradient_norm": 2.0 / step,
            "layer_norms": [10.0 ** -(layer + step % 3) for layer in range(layers)],
            "tokens": 1024,
            "seconds": 0.5,
            "bound": "link",
            "share_of_bound": 0.8,
            **({"skipped": True} if step == 7 else {}),
        }
        for step in range(1, number + 1)
    ]


def write_made_up_run(folder: Path, *, prompt: str = "once", name: str = "model") -> RunFolder:
    """A run folder as if something had been trained."""
    made = RunFolder(folder)
    folder.mkdir()
    made.settings_file.write_text(f"""
[model]
folder = {json.dumps(f"/nowhere/{name}")}
[data]
source = ["data.txt"]
task = "causal"
[training]
steps = {NUM_STEPS}
rows = 4
length = 32
[optimizer]
learning_rate = 1e-3
[samples]
prompts = [{json.dumps(prompt)}]
[output]
folder = "."
""")
    lines = steps_of(NUM_STEPS)
    lines += [
        {"kind": "evaluation", "step": step, "loss": 5.0 / step, "perplexity": 3.0, prompt: 0.5}
        for step in (20, 40, 60)
    ]
    lines.append({"kind": "checkpoint", "step": 40, "folder": "checkpoints/step-00000040"})
    made.metrics_file.write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    said = {"kind": "sample", "step": 60, "prompt": prompt, "completion": f"{prompt} upon a time"}
    made.samples_file.write_text(f"{json.dumps(said)}\n")
    return made


def preview_of(**asked: Any) -> Preview:
    model = Workload(shape="tiny").model(torch.device("meta"))
    given = {"num_rows": 32, "length": 128, "device_memory": "2GiB", "hardware": H200, **asked}
    return look(model, **given)


@pytest.fixture(scope="module", autouse=True)
def few_budgets() -> Iterator[None]:
    """Plans take time; none is kept in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("l2l.planner.prospects.LADDER", (1.5, 4))
        patch.setattr(KeptPlans, "of_user", classmethod(lambda cls: cls(None)))
        yield


@pytest.fixture(scope="module")
def prospects() -> Prospects:
    return foresee(preview_of(host_memory="8GiB"))


def planned_of(prospects: Prospects, **more: Any) -> Planned:
    ids = torch.empty((4, 32), dtype=torch.int64, device="meta")
    plan = replace(prospects.plan, **more)
    return Planned(plan=plan, num_steps=NUM_STEPS, outline={"input_ids": ids, "labels": ids})


class Seen(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._in = ""
        self.feed(text)
        self.close()

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = tag
        if tag == "script":
            self.scripts.append("")

    @override
    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    @override
    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts[-1] += data
        elif self._in != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    @property
    def content(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


def traces_of(document: Document, figure: str) -> list[Any]:
    return list(content_of(document)["figures"][figure]["traces"])


# --------------------------------------------------------------------------------------------------
# Text


def test_all_text_is_escaped_where_it_is_put_in() -> None:
    made = element("p", HOSTILE, element("b", "bold"), title=HOSTILE, data_name="x")
    seen = Seen(made)
    assert [tag for tag, _ in seen.tags] == ["p", "b"]
    assert seen.tags[0][1] == {"title": HOSTILE, "data-name": "x"}
    assert "".join(seen.texts) == f"{HOSTILE}bold"
    assert escaped(made) is made
    assert "<" not in in_figure(HOSTILE)
    with pytest.raises(AssertionError):
        element("p onclick=x", "")


def test_json_in_a_script_ends_no_script() -> None:
    value = {"a": [HOSTILE, 1.5, float("nan")], HOSTILE: None}
    made = as_json(value)
    assert not set(made) & set("<>&\u2028\u2029")
    assert json.loads(made) == {"a": [HOSTILE, 1.5, None], HOSTILE: None}


def test_text_has_a_length_and_turns_no_other_around() -> None:
    shown = escaped("x" * 100_000)
    assert len(shown) < 5000
    assert "100,000 characters" in shown
    assert "\u202e" not in escaped("abc\u202edef\x00")


# --------------------------------------------------------------------------------------------------
# A run


def test_a_hostile_run_folder_adds_no_element_and_no_script(
    tmp_path: Path, prospects: Prospects
) -> None:
    folder = write_made_up_run(tmp_path / "run", prompt=HOSTILE, name=HOSTILE)
    line = replace(prospects.plan.ledger[0], purpose=HOSTILE)
    machine = replace(H200, device_name=HOSTILE)
    made = planned_of(
        prospects,
        ledger=(line, *prospects.plan.ledger),
        choices=((HOSTILE, HOSTILE),),
        machine=machine,
    )
    made.write(folder.plan_file)
    whole = replace(prospects, plan=made.plan)
    hostile = Seen(page_of(document_of(folder, whole)))
    plain = write_made_up_run(tmp_path / "other")
    planned_of(prospects, ledger=made.plan.ledger).write(plain.plan_file)
    expected = Seen(page_of(document_of(plain, prospects)))
    assert len(hostile.scripts) == 3
    counts = [[tag for tag, _ in one.tags].count("script") for one in (hostile, expected)]
    assert counts == [3, 3]
    kinds = {tag for tag, _ in hostile.tags}
    assert kinds == {tag for tag, _ in expected.tags}
    assert "img" not in kinds
    assert not [name for _, found in hostile.tags for name in found if name.startswith("on")]
    for words in (HOSTILE, f"{HOSTILE} upon a time"):
        assert any(words.replace("\u2028", "") in t.replace("\u2028", "") for t in hostile.texts)
    strings = json.dumps(hostile.content, ensure_ascii=False)
    assert "<img" not in strings
    assert "&lt;img" in strings


def test_a_page_runs_the_scripts_it_was_written_with_and_loads_nothing(tmp_path: Path) -> None:
    page = page_of(document_of(write_made_up_run(tmp_path / "run")))
    seen = Seen(page)
    policies = [found["content"] for tag, found in seen.tags if "http-equiv" in found]
    (policy,) = policies
    assert policy is not None
    hashes = re.findall(r"'sha256-([^']+)'", policy)
    scripts = seen.scripts[1:]
    assert hashes == [
        base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts
    ]
    assert policy.startswith("default-src 'none'; img-src data: blob:;")
    assert "connect-src" not in policy
    assert "connect-src 'self'" in page_of(document_of(RunFolder(tmp_path / "run")), live="/x")
    assert not [found for _, found in seen.tags if {"src", "href"} & set(found)]
    assert "plotly.js" in scripts[0][:300]


def test_a_page_shows_what_happened(tmp_path: Path) -> None:
    folder = write_made_up_run(tmp_path / "run")
    document = document_of(folder)
    loss = {one["name"]: one for one in traces_of(document, "loss")}
    steps = steps_of(NUM_STEPS)
    assert loss["training"]["x"] == [one["step"] for one in steps]
    assert loss["training"]["y"] == [one["loss"] for one in steps]
    assert loss["evaluation"]["x"] == [20, 40, 60]
    assert loss["skipped steps"]["x"] == [7]
    assert loss["checkpoints"]["x"] == [40]
    assert traces_of(document, "rate")[0]["y"] == [one["learning_rate"] for one in steps]
    assert traces_of(document, "norm")[0]["y"] == [one["gradient_norm"] for one in steps]
    assert set(traces_of(document, "speed")[0]["y"]) == {2048.0}
    (layers,) = traces_of(document, "layers")
    assert layers["customdata"] == [[one["layer_norms"][k] for one in steps] for k in range(4)]
    assert layers["z"][3][:2] == pytest.approx([-4, -5])
    assert [one["name"] for one in traces_of(document, "metrics")] == ["once, evaluation"]
    seen = Seen(page_of(document))
    for words in ("5.0000 at first", "1 of them skipped", "bound by link, at 80%", "once upon"):
        assert words in seen.text
    for words in ("finished", "/nowhere/model", "learning_rate", "2,048 tokens/s"):
        assert words in seen.text
    assert not any("memory" in name for name in content_of(document)["names"])


def test_a_run_that_has_no_step_yet_has_a_page(tmp_path: Path) -> None:
    folder = write_made_up_run(tmp_path / "run")
    folder.metrics_file.unlink()
    folder.samples_file.unlink()
    assert "no step yet" in Seen(page_of(document_of(folder))).text


def test_a_run_of_an_earlier_version_has_a_page(tmp_path: Path) -> None:
    folder = write_made_up_run(tmp_path / "run")
    names = {"layer_norms", "bound", "share_of_bound"}
    lines = [
        {name: value for name, value in one.items() if name not in names}
        for one in read_metrics(folder.metrics_file)
    ]
    folder.metrics_file.write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    told = prospects_of(folder)
    assert isinstance(told, str)
    assert "no plan.json" in told
    names = set(content_of(document_of(folder, told))["names"])
    assert "loss" in names
    assert not names & {"layers", "memory", "step", "budget"}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("metrics.jsonl", '{"kind": "step", "step": 1}\n', "KeyError"),
        ("metrics.jsonl", '{"kind": "step", "step": "1"}\n', "step is no number"),
        ("plan.json", '{"plan": {}}', "is not a plan"),
        ("plan.json", '{"num_steps": 1, "num_labels": null, "batch": {"a": ["load", 2]}}', "plan"),
        ("run.toml", "[model", "Expected"),
    ],
)
def test_what_is_not_as_a_run_writes_it_is_said(
    name: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_made_up_run(tmp_path / "run")
    (folder.root / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        document_of(folder)
    assert cli.main(["watch", str(folder.root), "--port", "0"]) == 2
    assert capsys.readouterr().err


def test_nothing_is_followed_out_of_a_run_folder(tmp_path: Path) -> None:
    folder = write_made_up_run(tmp_path / "run")
    other = tmp_path / "secret.jsonl"
    other.write_text('{"kind": "sample", "step": 1, "prompt": "secret", "completion": ""}\n')
    folder.samples_file.unlink()
    folder.samples_file.symlink_to(other)
    with pytest.raises(ValueError, match="leads out of the run folder"):
        document_of(folder)


def test_long_curves_keep_their_lowest_and_highest_values() -> None:
    points = [(float(step), float(step % 97)) for step in range(100_000)]
    points[51_234] = (51_234.0, -5.0)
    few = thinned(points)
    assert len(few) <= 2 * MOST_POINTS
    assert (51_234.0, -5.0) in few
    assert {value for _, value in few} >= {0.0, 96.0}
    assert [step for step, _ in few] == sorted(step for step, _ in few)
    assert len(means(points)) == MOST_POINTS
    assert thinned(points[:100]) == means(points[:100]) == points[:100]
    sections = {one.name: one for one in run_sections(steps_of(2000))}
    (layers,) = sections["layers"].figures[0].traces
    assert len(layers["x"]) == MOST_COLUMNS
    assert layers["x"][-1] == 2000


# --------------------------------------------------------------------------------------------------
# Plans


def test_a_plan_is_written_down_and_read_again(tmp_path: Path, prospects: Prospects) -> None:
    made = planned_of(prospects)
    made.write(tmp_path / "plan.json")
    found = Planned.read(tmp_path / "plan.json")
    assert found is not None
    assert found.plan == made.plan
    assert found.num_steps == NUM_STEPS
    assert {name: (one.shape, one.dtype) for name, one in found.outline.items()} == {
        name: (one.shape, one.dtype) for name, one in made.outline.items()
    }
    assert Planned.read(tmp_path / "nothing.json") is None


def test_prospects_are_plans(prospects: Prospects) -> None:
    model = Workload(shape="tiny").model(torch.device("meta"))
    given: dict[str, Any] = {"num_rows": 32, "length": 128, "hardware": H200}
    own = l2l.plan(model, device_memory="2GiB", host_memory="8GiB", **given)
    assert prospects.plan == own
    assert prospects.simulation.seconds == pytest.approx(own.predicted_seconds)
    budgets = [one.budget_bytes for one in prospects.by_budget]
    assert budgets == sorted(set(budgets))
    assert 2 * 2**30 in budgets
    assert max(budgets) > 2 * 2**30 > min(budgets)
    smallest = prospects.by_budget[0]
    again = l2l.plan(model, device_memory=smallest.budget_bytes, host_memory="8GiB", **given)
    assert again.predicted_seconds == smallest.seconds
    more, host, disk = prospects.purchases
    assert more.prospect is not None
    assert more.prospect.budget_bytes == 6 * 2**30
    assert host.prospect is not None
    assert "of 8.00 GiB are taken" in host.note
    assert disk.prospect is None or disk.prospect.disk_read_bytes > 0
    without_limit = foresee(preview_of()).purchases[1]
    assert without_limit.prospect is None
    assert "not limited" in without_limit.note


def test_the_memory_of_a_phase_adds_up(prospects: Prospects) -> None:
    plan = prospects.plan
    section = ledger_section(plan, kind=PLANNED, peak_bytes=2**30)
    bars = [one for one in section.figures[0].traces if one["type"] == "bar"]
    sums = [sum(values) for values in zip(*(one["x"] for one in bars), strict=True)]
    expected = [nbytes / 2**30 for nbytes in plan.phases().values()]
    assert sorted(sums) == pytest.approx(sorted(expected))
    edges = [one["x0"] for one in section.figures[0].layout["shapes"]]
    assert edges == [2.0, 1.0]
    host = sum(one["x"][0] for one in section.figures[1].traces)
    assert host == pytest.approx(plan.total_bytes("host") / 2**30, rel=1e-6) or host > 1
    assert "measured: 1.00 GiB" in section.before


def test_a_step_is_drawn_lane_by_lane(tmp_path: Path, prospects: Prospects) -> None:
    folder = write_made_up_run(tmp_path / "run")
    planned_of(prospects).write(folder.plan_file)
    document = document_of(folder, prospects)
    seconds, trace = prospects.simulation.seconds, prospects.simulation.trace
    drawn = [one for one in traces_of(document, "step") if one["y"][:1] == ["device computes"]]
    assert {"forward", "backward"} <= {one["name"] for one in drawn}
    factor = 1.0 if seconds >= 1 else 1e3
    busy = sum(sum(one["x"]) for one in drawn) / factor
    assert busy == pytest.approx(trace.busy_seconds("compute"), rel=0.02)
    curve = traces_of(document, "budget")[0]
    speeds = [prospects.plan.num_tokens / one.seconds for one in prospects.by_budget]
    assert curve["y"] == pytest.approx(speeds)
    stars = [one for one in traces_of(document, "budget") if "measured" in one["name"]]
    assert [one["y"] for one in stars] == [[2048.0]]
    text = Seen(page_of(document)).text
    for words in ("4 GiB more on the device", "64 GB more on the host", "an SSD", "bound by"):
        assert words in text


def test_plan_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "machine.json").write_text(H200.to_json())
    words = ["plan", "tiny", "--rows", "32", "--length", "128", "--device-memory", "2GiB"]
    words += ["--machine", str(tmp_path / "machine.json"), "--html"]
    words += [str(tmp_path / "plan.html"), "--json"]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["html"] == str(tmp_path / "plan.html")
    seen = Seen((tmp_path / "plan.html").read_text())
    assert seen.content["names"] == ["memory", "step", "budget", "choices"]
    assert f"{found['tokens_per_second']:,.0f}" in seen.text


# --------------------------------------------------------------------------------------------------
# A run that was trained


def test_a_trained_run_has_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = write_tiny(tmp_path)
    prompts = {"prompts": ["one two"], "max_new_tokens": 3}
    settings = write_settings(tiny, tmp_path, samples=prompts, training={"steps": 4})
    assert train(settings)
    folder = RunFolder(tmp_path / "run")
    planned = Planned.read(folder.plan_file)
    assert planned is not None
    assert planned.num_steps == 4
    assert outline_of(planned.outline)["input_ids"].shape == (4, 32)
    steps = [one for one in read_metrics(folder.metrics_file) if one["kind"] == "step"]
    for one in steps:
        rest = one["gradient_norm"] ** 2 - sum(norm**2 for norm in one["layer_norms"])
        assert len(one["layer_norms"]) == 2
        assert rest > 0  # embedding and head
    assert cli.main(["report", str(folder.root), "--html", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    page = Path(found["html"])
    assert page == folder.root / "report.html"
    seen = Seen(page.read_text())
    names = seen.content["names"]
    assert names[:4] == ["loss", "rate", "norm", "layers"]
    assert {"memory", "step", "budget", "samples", "settings"} <= set(names)
    assert "for NVIDIA H200" in seen.text
    assert "measured in this run" not in json.dumps(seen.content)  # it ran elsewhere
    assert cli.main(["report", str(folder.root), "--no-plans", "--html", str(tmp_path / "a")]) == 0
    assert "budget" not in Seen((tmp_path / "a").read_text()).content["names"]


def test_without_the_library_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_made_up_run(tmp_path / "run")
    document_module._library.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    monkeypatch.setattr("l2l.cli.run_page.prospects_of", lambda _: pytest.fail("planned"))
    assert cli.main(["report", str(folder.root), "--html"]) == 2
    assert "pip install 'l2l[report]'" in capsys.readouterr().err
    assert not (folder.root / "report.html").exists()
    for words in (["watch", str(folder.root), "--port", "0"], ["plan", "tiny", "--html", "x"]):
        assert cli.main(words) == 2
        shown = capsys.readouterr()
        assert "pip install 'l2l[report]'" in shown.err
        assert not shown.out
    document_module._library.cache_clear()


# --------------------------------------------------------------------------------------------------
# The server


def test_watch_says_where_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_made_up_run(tmp_path / "run")
    ports, names = [], []

    def serve(look: Callable[[], Document], *, port: int, then: Callable[[str], None]) -> None:
        ports.append(port)
        names.append(look().title)
        then("http://127.0.0.1:1/")
        raise Interrupted(2)

    monkeypatch.setattr("l2l.cli.watch.serve", serve)
    assert cli.main(["watch", str(folder.root), "--port", "1234"]) == 0
    assert (ports, names) == ([1234], ["model, causal"])
    assert f"{folder.root}: http://127.0.0.1:1/ (Ctrl-C ends it)" in capsys.readouterr().out


@contextmanager
def served(folder: RunFolder) -> Iterator[_Server]:
    server = _Server(0, lambda: document_of(folder))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(
    server: _Server, path: str, *, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


def test_a_run_is_served_as_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("l2l.page.serving.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("l2l.page.serving.SHARE", 0)
    monkeypatch.setattr("l2l.cli.run_page.time.strftime", lambda _: "now")
    folder = write_made_up_run(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in folder.root.iterdir()}
    with served(folder) as server:
        status, headers, page = ask(server, "/")
        assert status == 200
        assert headers["X-Frame-Options"] == "DENY"
        assert Seen(page).tags[0][0] == "html"
        assert f'data-live="{LIVE}"' in page
        status, headers, body = ask(server, LIVE)
        assert status == 200
        assert json.loads(body)["figures"]["loss"]["traces"][0]["x"][-1] == NUM_STEPS
        assert ask(server, LIVE, If_None_Match=headers["ETag"])[0] == 304
        assert {path: path.stat().st_mtime_ns for path in folder.root.iterdir()} == before
        with folder.metrics_file.open("a") as file:
            file.write(json.dumps({**steps_of(1)[0], "step": NUM_STEPS + 1}) + "\n")
        status, _, body = ask(server, LIVE, If_None_Match=headers["ETag"])
        assert status == 200
        assert json.loads(body)["figures"]["loss"]["traces"][0]["x"][-1] == NUM_STEPS + 1
        folder.metrics_file.write_text("broken\n\n")
        status, _, body = ask(server, LIVE)
        assert status == 503
        assert "is not JSON" in body


def test_nothing_else_is_served(tmp_path: Path) -> None:
    folder = write_made_up_run(tmp_path / "run")
    with served(folder) as server:
        assert server.server_address[0] == "127.0.0.1"
        for path in ("/run.toml", "/../run.toml", "/etc/passwd", "/?x", "/%2e%2e/run.toml"):
            assert ask(server, path)[0] == 404
        for name in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", ""):
            assert ask(server, "/", Host=name)[0] == 403
        assert ask(server, "/", Host=f"localhost:{server.server_port}")[0] == 200
        for method in ("POST", "PUT", "DELETE"):
            assert ask(server, "/", method=method)[0] == 501


def test_a_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_made_up_run(tmp_path / "run")
    with served(folder) as server:
        assert cli.main(["watch", str(folder.root), "--port", str(server.server_port)]) == 2
    assert "Name another with --port" in capsys.readouterr().err


def test_a_run_is_looked_at_seldom_however_many_ask(tmp_path: Path) -> None:
    folder, looks = write_made_up_run(tmp_path / "run"), []
    server = _Server(0, lambda: (looks.append(1), document_of(folder))[1])
    for _ in range(20):
        server.latest.content()
    server.server_close()
    assert len(looks) == 1


def test_what_is_seen_first(tmp_path: Path) -> None:
    folder = write_made_up_run(tmp_path / "run")
    document = document_of(folder)
    cards = {name: value for name, value, _ in document.cards}
    assert cards["step"] == str(NUM_STEPS)
    assert cards["skipped steps"] == "1"
    assert cards["best evaluation"] == f"{5 / 60:.4f}"
    assert cards["bound by"] == "link"
