"""A page as data, and as one HTML file that needs nothing else.

The library that draws (plotly.js, of the installed package plotly) is part of the file. The file
asks the browser to run the scripts that it was written with and no others, by their hashes, and to
load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from l2l.page.markup import NOTHING, Markup, as_json, element, joined

OWN = Path(__file__).parent
MEASURED, PLANNED = "measured", "planned"


class PageError(ValueError):
    """No page can be written; the message says what to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What plotly draws: its traces and layout, as its JSON has them."""

    name: str
    about: str  # for those who do not see it
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    height: int = 320
    zooms: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Something to look at, with words before and after it."""

    name: str
    title: str
    kind: str = ""  # MEASURED, PLANNED, or neither
    before: Markup = NOTHING
    controls: Markup = NOTHING
    figures: Sequence[Figure] = ()
    after: Markup = NOTHING
    is_half: bool = False  # of the page's width, where there is room


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A page."""

    title: str
    about: Sequence[str]
    status: str  # a word or two
    cards: Sequence[tuple[str, str, str]]  # a name, what is to be seen at once, a little more
    sections: Sequence[Section]


def content_of(document: Document) -> dict[str, Any]:
    """What of a page changes while a run goes on: words by the name of their place, figures."""
    words = {"top": _top(document)}
    for one in document.sections:
        words |= {f"{one.name}-before": one.before, f"{one.name}-after": one.after}
    return {
        "names": [one.name for one in document.sections],
        "title": document.title,
        "words": words,
        "main": joined(*map(_section, document.sections)),
        "figures": {
            figure.name: {
                "traces": figure.traces,
                "layout": figure.layout,
                "height": figure.height,
                "zooms": figure.zooms,
            }
            for one in document.sections
            for figure in one.figures
        },
    }


def page_of(document: Document, *, live: str = "") -> str:
    """A page as HTML; `live` is where what changes can be asked for, empty: nowhere.

    Raises:
        PageError: plotly is not installed.
    """
    content = content_of(document)
    drawn = {name: content[name] for name in ("names", "figures")}
    scripts = [_library(), (OWN / "page.js").read_text()]
    asks = "connect-src 'self'; " if live else ""
    policy = (
        f"default-src 'none'; {asks}img-src data: blob:; style-src 'unsafe-inline'; script-src "
        f"{' '.join(map(_hash, scripts))}; base-uri 'none'; form-action 'none'"
    )
    head = joined(
        element("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", document.title),
        Markup(f"<style>{(OWN / 'page.css').read_text()}</style>"),
    )
    asked = {"data_live": live} if live else {}
    body = joined(
        element("header", content["words"]["top"], id="top"),
        element("main", Markup(content["main"]), id="main"),
        element("footer", _FOOT),
        Markup(f'<script type="application/json" id="content">{as_json(drawn)}</script>'),
        *(Markup(f"<script>{script}</script>") for script in scripts),
    )
    parts = element("head", head), element("body", body, **asked)
    return f"<!doctype html>\n{element('html', *parts, lang='en')}\n"


def require_library() -> None:
    """Say what is missing before work is done for a page.

    Raises:
        PageError: plotly is not installed.
    """
    _library()


_FOOT = joined(
    "What is marked ",
    element("span", MEASURED, class_="kind measured"),
    " happened; what is marked ",
    element("span", PLANNED, class_="kind planned"),
    " is simulated from measured rates of a machine. Drag over a figure to zoom, or use its "
    "buttons; double-click to see all of it again.",
)


@cache
def _library() -> str:
    """The text of plotly.js.

    Raises:
        PageError: plotly is not installed.
    """
    try:
        text: str = importlib.import_module("plotly.offline").get_plotlyjs()
    except ModuleNotFoundError as error:
        raise PageError(
            f"a page needs {error.name}, which is not installed. Install it with: pip install "
            "'l2l[report]'"
        ) from error
    return text.replace("</script", "<\\/script")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _top(document: Document) -> Markup:
    cards = (
        element(
            "div",
            element("dt", name),
            element("dd", element("strong", value), element("span", more)),
            class_="card",
        )
        for name, value, more in document.cards
    )
    return joined(
        element(
            "div",
            element("h1", document.title),
            element("span", document.status, class_="status", id="status"),
            class_="heading",
        ),
        *(element("p", line) for line in document.about),
        element("dl", *cards, class_="cards"),
    )


def _section(one: Section) -> Markup:
    kind = element("span", one.kind, class_=f"kind {one.kind}") if one.kind else ""
    figures = (
        element(
            "div",
            class_="figure",
            id=f"figure-{figure.name}",
            data_figure=figure.name,
            role="img",
            aria_label=figure.about,
            style=f"height:{figure.height}px",
        )
        for figure in one.figures
    )
    return element(
        "section",
        element("h2", one.title, kind),
        element("div", one.before, class_="words", id=f"{one.name}-before"),
        one.controls,
        *figures,
        element("div", one.after, class_="words", id=f"{one.name}-after"),
        id=one.name,
        class_="half" if one.is_half else "whole",
    )
