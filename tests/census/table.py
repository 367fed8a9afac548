"""Tables in Markdown of what the census found."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- census: begin -->", "<!-- census: end -->"
VERDICTS = ("exact", "close", "said", "refused", "refused by the proof", "wrong", "crash",
            "hang", "random")  # fmt: skip
FALLBACKS = ("in one microbatch after all", "not streamed")
RUNS = {"whole": "All rows in one microbatch", "rows": "Rows singly"}
MOST_OF_REASON = 150

Row = dict[str, Any]


def verdict_of(found: Row | None) -> str:
    if found is None:
        return "-"
    return "refused by the proof" if found.get("by_proof") else found["verdict"]


def fallbacks(found: Row | None) -> list[str]:
    """What the engine did otherwise than it was asked to, and said so."""
    if found is None or found["verdict"] in ("refused", "crash", "hang"):
        return []
    said = " ".join(found.get("said", ()))
    marks = (
        re.search("one microbatch|a single microbatch", said) is not None,
        found.get("streamed") == 0 or re.search("not streamed|unstreamed", said) is not None,
    )
    return [name for name, holds in zip(FALLBACKS, marks, strict=True) if holds]


def reason(found: Row | None) -> str:
    """Why it was refused, without what differs from model to model."""
    why = (found or {}).get("why", "").partition(" Expected ")[0].replace("|", "/")
    why = re.sub(r"^\w+ (has|is|runs) ", r"the model \1 ", why)
    why = re.sub(r"'[^']*'|`[^`]*`", "..", re.sub(r"\[[^\]]*\]", "[..]", why))
    why = re.sub(r"(?<![A-Za-z])\d+(\.\d+)?(e-?\d+)?", "N", why)
    why = re.sub(r"(\.\., )+\.\.", "..", why)
    return why if len(why) <= MOST_OF_REASON else why[:MOST_OF_REASON].rsplit(" ", 1)[0] + " .."


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def by(rows: Iterable[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    found: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def summary(rows: Sequence[Row], run: str) -> str:
    """Numbers of verdicts, a line for every kind."""
    columns = (*VERDICTS, *FALLBACKS)
    lines = []
    for kind, many in [*by(rows, lambda row: row["kind"]).items(), ("all", list(rows))]:
        counted = Counter(verdict_of(row.get(run)) for row in many)
        counted.update(mark for row in many for mark in fallbacks(row.get(run)))
        tested = sum(run in row for row in many)
        lines.append([kind, len(many), tested, *(counted[column] for column in columns)])
    wanted = [
        i for i, total in enumerate(lines[-1]) if total or columns[i - 3] in ("wrong", "crash")
    ]
    head = ["kind", "cases", "tested", *columns]
    return markdown([head[i] for i in wanted], ([line[i] for i in wanted] for line in lines))


def refusals(rows: Sequence[Row]) -> str:
    """How often what was refused."""
    counted: Counter[tuple[str, str]] = Counter()
    for row in rows:
        for run in RUNS:
            found = row.get(run)
            if found and found["verdict"] == "refused":
                by_proof = "by the proof: " if found["by_proof"] else ""
                counted[run, by_proof + reason(found)] += 1
    reasons = Counter({why: 0 for _, why in counted})
    for (_, why), number in counted.items():
        reasons[why] += number
    lines = ([why, counted["whole", why], counted["rows", why]] for why, _ in reasons.most_common())
    return markdown(["refused because", "one microbatch", "rows singly"], lines)


def label(row: Row, suffix: str) -> str:
    """Its class, what is special about it, and how much of it is streamed, if not nearly all."""
    text = row["class"].removesuffix(suffix) or row["class"]
    text += f" ({row['variant']})" if row["variant"] else ""
    share = row.get("whole", {}).get("streamed")
    return text if share is None or share >= 0.95 else f"{text} {100 * share:.0f}%"


def classes(rows: Sequence[Row]) -> str:
    """All classes, those that fared alike on one line."""
    lines = []
    for kind, many in by(rows, lambda row: row["kind"]).items():
        endings = Counter(re.sub("^.*?(?=For[A-Z]|$)", "", row["class"]) for row in many)
        suffix = endings.most_common(1)[0][0]
        alike = by(many, _fared)
        for (whole, singly, why), same in sorted(alike.items(), key=_rank):
            names = ", ".join(sorted((label(row, suffix) for row in same), key=str.lower))
            lines.append([f"{kind}: {suffix}" if suffix else kind, whole, singly, why, names])
    head = ["kind: ending of names", "one microbatch", "rows singly", "why", "classes"]
    return markdown(head, lines)


def _fared(row: Row) -> tuple[str, str, str]:
    if row["plain"] != "runs":
        return "not tested", "", "needs a package, or no tiny model runs in plain PyTorch"
    runs = [row.get(run) for run in RUNS]
    whole, singly = (", ".join([verdict_of(found), *fallbacks(found)]) for found in runs)
    return whole, singly, next(filter(None, map(reason, runs)), "")


def _rank(group: tuple[tuple[str, str, str], list[Row]]) -> tuple[int, int, str]:
    whole, singly, why = group[0]
    order = {name: number for number, name in enumerate(VERDICTS)}
    first, second = (order.get(word.partition(",")[0], 99) for word in (whole, singly))
    return first, second, why


def tables(rows: Sequence[Row]) -> str:
    """All of them, one after the other."""
    numbers = f"{len(rows)} cases, {len({row['class'] for row in rows})} classes"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    parts = [f"{numbers}; {versions}; {date.today()}."]
    for run, title in RUNS.items():
        parts += [f"### {title}", summary(rows, run)]
    parts += ["### Refused", refusals(rows), "### By class", classes(rows)]
    return "\n\n".join(parts)


def write_into(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Replace what is between two markers."""
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} lacks the lines {begin!r} and {end!r}; expected both.")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
