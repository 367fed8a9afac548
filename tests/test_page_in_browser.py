"""Pages in a real browser: drawn, silent, readable on a phone and in the dark, live."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, installed, open_browser
from test_page import (
    HOSTILE,
    NUM_STEPS,
    few_budgets,  # noqa: F401 (a fixture)
    planned_of,
    preview_of,
    served,
    steps_of,
    write_made_up_run,
)

from l2l.cli.plan_page import plan_document
from l2l.cli.run_page import document_of
from l2l.page import page_of
from l2l.planner import foresee

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(installed() is None, reason="no Chromium is installed"),
]
DESK, PHONE = 1280, 390
SMALLEST_CONTRAST = 4.5  # that WCAG 2 asks of text, level AA
CONTRASTS = """(() => {
  const parts = (text) => text.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const found = parts(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const found = {};
  const words = "h1,h2,h3,p,dt,dd span,dd strong,td,th,summary,.kind,.status,footer,label";
  for (const one of document.querySelectorAll(words)) {
    const ink = light(parts(getComputedStyle(one).color));
    const pair = [ink, light(behind(one))].sort((a, b) => b - a);
    const name = `${one.tagName} ${one.className}`;
    found[name] = Math.min(found[name] || 99, (pair[0] + 0.05) / (pair[1] + 0.05));
  }
  return found;
})()"""
DRAWN = """[...document.querySelectorAll(".figure")].map((one) =>
  [one.dataset.figure, Boolean(one.querySelector(".main-svg")), one.getAttribute("aria-label")])"""
OVERFLOWING = """[...document.querySelectorAll("section, .card, header")].filter((one) =>
  one.scrollWidth > one.clientWidth + 1 || one.getBoundingClientRect().right > innerWidth + 1)
  .map((one) => one.id || one.className)"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses: of a run, of a hostile one, of a plan."""
    folder = tmp_path_factory.mktemp("pages")
    prospects = foresee(preview_of(host_memory="8GiB"))
    plain = write_made_up_run(folder / "plain")
    hostile = write_made_up_run(folder / "hostile", prompt=HOSTILE, name=HOSTILE)
    planned_of(prospects).write(plain.plan_file)
    planned_of(prospects, choices=((HOSTILE, HOSTILE),)).write(hostile.plan_file)
    documents = {
        "run": document_of(plain, prospects),
        "hostile": document_of(hostile, prospects),
        "plan": plan_document("tiny", prospects),
    }
    found = {}
    for name, document in documents.items():
        path = folder / f"{name}.html"
        path.write_text(page_of(document))
        found[name] = path.as_uri()
    return found


@pytest.fixture
def browser() -> Iterator[Browser]:
    with open_browser() as found:
        yield found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [DESK, PHONE])
@pytest.mark.parametrize("name", ["run", "hostile", "plan"])
def test_a_page_is_drawn_readable_and_silent(
    name: str, width: int, dark: bool, pages: dict[str, str], browser: Browser
) -> None:
    browser.show(pages[name], width=width, dark=dark)
    figures = browser.value(DRAWN)
    expected = {"ledger", "host", "step", "budget"}
    if name != "plan":
        expected |= {"loss", "rate", "norm", "layers", "speed", "metrics"}
    assert {figure for figure, _, _ in figures} == expected
    assert all(is_drawn and about for _, is_drawn, about in figures)
    assert browser.value("document.documentElement.scrollWidth") == width
    assert browser.value(OVERFLOWING) == []
    contrasts = browser.value(CONTRASTS)
    assert len(contrasts) > 6
    assert {k: v for k, v in contrasts.items() if v < SMALLEST_CONTRAST} == {}
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(13, 17, 23)" if dark else "rgb(246, 247, 249)")
    assert browser.value("typeof hacked") == "undefined"
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert browser.said == []
    assert {address.partition(":")[0] for address in browser.asked} <= {"file", "data"}


def test_what_was_injected_would_be_refused(tmp_path: Path, browser: Browser) -> None:
    """Even if text were not escaped: scripts that the page was not written with do not run."""
    page = page_of(document_of(write_made_up_run(tmp_path / "run")))
    path = tmp_path / "page.html"
    path.write_text(page.replace("</main>", "</main><script>hacked=1</script>"))
    browser.show(path.as_uri(), width=DESK)
    assert browser.value("typeof hacked") == "undefined"
    assert any("Content Security Policy" in one for one in browser.said)


def test_smoothing_and_scale_are_the_readers(pages: dict[str, str], browser: Browser) -> None:
    browser.show(pages["run"], width=DESK)
    mean = "document.getElementById('figure-loss').data[1].y"
    raw = browser.value("document.getElementById('figure-loss').data[0].y")
    browser.value(
        "(() => { const s = document.getElementById('smoothing'); s.value = 0;"
        "s.dispatchEvent(new Event('input')); })()"
    )
    assert browser.value(mean) == raw
    browser.value(
        "(() => { const s = document.getElementById('smoothing'); s.value = 10;"
        "s.dispatchEvent(new Event('input')); })()"
    )
    width = round(0.1 * NUM_STEPS)
    known = [value for value in raw if value is not None]
    assert browser.value(mean)[-1] == pytest.approx(sum(known[-width:]) / width)
    browser.value("document.getElementById('logarithmic').click()")
    assert browser.value("document.getElementById('figure-loss').layout.yaxis.type") == "log"
    assert browser.said == []


def test_a_live_page_follows_its_run_and_keeps_its_zoom(tmp_path: Path, browser: Browser) -> None:
    folder = write_made_up_run(tmp_path / "run")
    with served(folder) as server:
        browser.show(f"http://127.0.0.1:{server.server_port}/", width=DESK)
        browser.value("Plotly.relayout('figure-loss', {'xaxis.range': [10, 20]}).then(() => 1)")
        with folder.metrics_file.open("a") as file:
            file.write(json.dumps({**steps_of(1)[0], "step": NUM_STEPS + 1}) + "\n")
        last = "document.getElementById('figure-loss').data[0].x.at(-1)"
        browser.wait(f"{last} === {NUM_STEPS + 1}")
        assert browser.value("document.getElementById('figure-loss').layout.xaxis.range") == [
            10,
            20,
        ]
        assert str(NUM_STEPS + 1) in browser.value("document.querySelector('.card').textContent")
        samples = tmp_path / "samples"
        folder.samples_file.rename(samples)  # a section less
        browser.wait("!document.getElementById('samples')")
        samples.rename(folder.samples_file)
        browser.wait("Boolean(document.getElementById('samples'))")
        assert browser.value("document.querySelectorAll('.main-svg').length") > 0
        assert browser.said == []
        hosts = {address.split("/")[2] for address in browser.asked if address.startswith("http")}
        assert hosts == {f"127.0.0.1:{server.server_port}"}
    browser.wait("document.getElementById('status').textContent.includes('has ended')")
