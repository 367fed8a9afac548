"""What people read of a run: its settings, and what the model said."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from l2l.page.document import Section
from l2l.page.markup import Markup, element, joined, table

MOST_STEPS = 20  # that samples are shown of: the first, and the last ones


def settings_section(table_of: Mapping[str, Mapping[str, Any]]) -> Section:
    """All settings in force, section by section."""
    parts = []
    for name, values in table_of.items():
        rows: list[list[object]] = [[key, _told(value)] for key, value in values.items()]
        if rows:
            parts.append(element("div", element("h3", name), table([], rows), class_="part"))
    return Section(name="settings", title="Settings", after=element("div", *parts, class_="parts"))


def _told(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def samples_section(samples: Sequence[Mapping[str, Any]]) -> Section | None:
    """What the model said to its prompts, the latest first; None: nothing."""
    said = sorted((one for one in samples if one.get("kind") == "sample"), key=_step)
    by_step = [(step, list(own)) for step, own in groupby(said, key=_step)]
    if not by_step:
        return None
    left = len(by_step) - MOST_STEPS
    shown = by_step if left <= 0 else [by_step[0], *by_step[1 - MOST_STEPS :]]
    blocks = [_block(step, own) for step, own in reversed(shown)]
    newest, *older = blocks
    parts: list[Markup] = [newest]
    if older:
        words = f"{len(older)} earlier" + (
            f", and {left} more in samples.jsonl" if left > 0 else ""
        )
        parts.append(element("details", element("summary", words), *older))
    return Section(name="samples", title="Samples", after=joined(*parts))


def _step(sample: Mapping[str, Any]) -> int:
    return int(sample["step"])


def _block(step: int, own: Sequence[Mapping[str, Any]]) -> Markup:
    said = (
        element(
            "blockquote",
            element("span", one.get("prompt", ""), class_="prompt"),
            element("span", one.get("completion", ""), class_="completion"),
        )
        for one in own
    )
    return joined(element("h3", f"after step {step:,}"), *said)


def note_section(title: str, words: str) -> Section:
    """What is not there, and why."""
    return Section(name="note", title=title, before=element("p", words))
