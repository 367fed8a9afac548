"""Text for a page: what is HTML already is `Markup`, all else is escaped where it is put in.

A run folder is other people's bytes: names, samples and settings may hold anything. So nothing but
`element` makes HTML, `in_figure` is asked for every word in a figure (plotly reads a little HTML
there), and `as_json` leaves no character in a script that could end it.
"""

from __future__ import annotations

import html
import json
import math
import re
from typing import Any

EMPTY = frozenset({"input", "meta", "br"})  # elements without content
MOST_CHARACTERS = 4000  # of one text in a page
NAME = re.compile(r"[a-z][a-z0-9-]*")
ENDING = {ord(one): f"\\u{ord(one):04x}" for one in "<>&\u2028\u2029"}  # in a script
INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Markup(str):
    """HTML."""

    __slots__ = ()


NOTHING = Markup()


def escaped(text: object) -> Markup:
    """Any text as HTML; HTML as it is."""
    return text if isinstance(text, Markup) else Markup(html.escape(plain(text)))


def plain(text: object) -> str:
    """Text of a bounded length, without characters that change how others are shown."""
    words = str(text)
    if len(words) > MOST_CHARACTERS:
        words = f"{words[:MOST_CHARACTERS]} ... ({len(words):,} characters)"
    return INVISIBLE.sub("\N{REPLACEMENT CHARACTER}", words)


def element(tag: str, *children: object, **attributes: object) -> Markup:
    """An element; of attributes, `class_` is class and `data_figure` is data-figure."""
    words = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    assert all(map(NAME.fullmatch, (tag, *words)))
    told = "".join(f' {name}="{html.escape(plain(value))}"' for name, value in words.items())
    if tag in EMPTY:
        return Markup(f"<{tag}{told}>")
    return Markup(f"<{tag}{told}>{joined(*children)}</{tag}>")


def joined(*children: object) -> Markup:
    """One after the other."""
    return Markup("".join(map(escaped, children)))


def in_figure(text: object) -> str:
    """Text as plotly shows it as it is."""
    return html.escape(plain(text), quote=False)


def as_json(value: Any) -> Markup:
    """A value as JSON that can stand in a script; numbers that are not finite are null."""
    return Markup(json.dumps(_finite(value), allow_nan=False).translate(ENDING))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def table(
    heads: list[str], rows: list[list[object]], *, numbers: frozenset[int] = frozenset()
) -> Markup:
    """A table that scrolls where it is too wide; `numbers` are columns that align right."""

    def cells(tag: str, row: list[Any]) -> Markup:
        kinds = ({"class_": "number"} if at in numbers else {} for at in range(len(row)))
        return joined(*(element(tag, one, **kind) for one, kind in zip(row, kinds, strict=True)))

    head = element("thead", element("tr", cells("th", list(heads)))) if heads else ""
    body = element("tbody", *(element("tr", cells("td", row)) for row in rows))
    kind = {"class_": "wide"} if heads else {}
    return element("div", element("table", head, body, **kind), class_="scrolls", tabindex=0)
