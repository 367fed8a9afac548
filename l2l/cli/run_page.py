"""The page of a run: what its folder has to show, now.

A run folder is other people's bytes. Nothing is followed out of it, what is too large is refused,
and what is not as `l2l train` writes it is said.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from l2l.cli.plan_page import prospect_sections
from l2l.cli.report import summarise
from l2l.device import format_bytes
from l2l.files import write_file
from l2l.page import (
    MEASURED,
    PLANNED,
    Document,
    Section,
    choices_section,
    ledger_section,
    note_section,
    page_of,
    require_library,
    run_sections,
    samples_section,
    settings_section,
)
from l2l.planner import Prospects
from l2l.train import KINDS, Planned, Record, RunFolder, Settings, format_seconds, read_metrics

MOST_BYTES = 256 << 20  # of a file that is read
SILENT_SECONDS, SILENT_STEPS = 120.0, 10  # after which a run does not go on any more
NUM_RECENT = 20  # steps by which the time that is left is told


def write_run(path: Path, folder: RunFolder, *, plans: bool) -> None:
    """Write the page of a run.

    Raises:
        ValueError: plotly is not installed, or the folder is not as l2l train writes it.
    """
    require_library()
    prospects = prospects_of(folder) if plans else None
    write_file(path, page_of(document_of(folder, prospects)))


def prospects_of(folder: RunFolder) -> Prospects | str:
    """Plans of a run's model for other budgets, or why there are none."""
    try:
        planned = Planned.read(_own(folder, folder.plan_file))
        if planned is None:
            return "there is no plan.json: the run was made before it was written"
        return planned.prospects(_settings(folder))
    except (ValueError, OSError) as error:
        return str(error)


def document_of(folder: RunFolder, prospects: Prospects | str | None = None) -> Document:
    """A run as it is now; `prospects` as `prospects_of` has them, None: nobody asked.

    Raises:
        ValueError: the folder is not as l2l train writes it.
    """
    settings, records = _settings(folder), _records(folder, folder.metrics_file)
    planned, samples = (
        Planned.read(_own(folder, folder.plan_file)),
        _records(folder, folder.samples_file),
    )
    try:
        found = summarise(settings, records)
        sections = [
            *run_sections(records),
            *_planned_sections(planned, records, found, prospects),
            *filter(None, [samples_section(samples)]),
            settings_section(settings.table()),
        ]
        return Document(
            title=f"{settings.model.folder.name}, {settings.data.task}",
            about=_about(folder, settings),
            status=_status(folder, _num_steps(planned, settings), records, found),
            cards=_cards(settings, _num_steps(planned, settings), records, found),
            sections=sections,
        )
    except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{folder.metrics_file} or a file beside it is not as l2l train writes it: "
            f"{type(error).__name__}: {error}."
        ) from error


# --------------------------------------------------------------------------------------------------
# Files


def _own(folder: RunFolder, path: Path) -> Path:
    """A file of a run folder.

    Raises:
        ValueError: it lies elsewhere, or is too large.
    """
    real = path.resolve()
    if not real.is_relative_to(folder.root.resolve()):
        raise ValueError(f"{path} leads out of the run folder: it is not read.")
    if real.exists() and real.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} has more than {format_bytes(MOST_BYTES)}: it is not read.")
    return path


def _settings(folder: RunFolder) -> Settings:
    return Settings.of_table(tomllib.loads(_own(folder, folder.settings_file).read_text()))


def _records(folder: RunFolder, path: Path) -> list[Record]:
    found = read_metrics(_own(folder, path))
    if any(not isinstance(one["step"], int) for one in found):
        raise ValueError(f"{path} has lines whose step is no number.")
    return found


# --------------------------------------------------------------------------------------------------
# What is seen first


def _about(folder: RunFolder, settings: Settings) -> list[str]:
    training, optimizer = settings.training, settings.optimizer
    sources = ", ".join(Path(source).name for source in settings.data.source)
    return [
        f"{sources}; {training.rows} rows of {training.length} tokens a step, {optimizer.name} "
        f"{optimizer.learning_rate:g} {settings.schedule.shape}, {training.precision}",
        f"{folder.root.absolute()}, as of {time.strftime('%Y-%m-%d %H:%M')}",
    ]


def _num_steps(planned: Planned | None, settings: Settings) -> int | None:
    return settings.training.steps if planned is None else planned.num_steps


def _status(
    folder: RunFolder, total: int | None, records: Sequence[Record], found: Mapping[str, Any]
) -> str:
    if found["given_up"]:
        return "given up"
    if not records:
        return "no step yet"
    if found["steps"] == total:
        return "finished"
    recent = [one["seconds"] for one in records[-NUM_RECENT:] if one["kind"] == "step"]
    silent = time.time() - folder.metrics_file.stat().st_mtime
    is_silent = silent > max(SILENT_SECONDS, SILENT_STEPS * max(recent, default=0.0))
    return f"silent for {format_seconds(silent)}" if is_silent else "going on"


def _cards(
    settings: Settings,
    total: int | None,
    records: Sequence[Record],
    found: Mapping[str, Any],
) -> list[tuple[str, str, str]]:
    steps = [one for one in records if one["kind"] == "step"]
    name = KINDS[settings.data.task].best
    cards = [("step", f"{found['steps']:,}", f"of {total:,}" if total else "")]
    if found["last_loss"] is not None:
        cards.append(("loss", f"{found['last_loss']:.4f}", f"{found['first_loss']:.4f} at first"))
    best = found["best_evaluation"]
    if best is not None:
        after = f"{name}, after step {best['step']:,}"
        cards.append(("best evaluation", f"{best[name]:.4f}", after))
    if found["tokens_per_second"] is not None:
        more = f"{found['tokens']:,} tokens in {format_seconds(found['seconds'])}"
        cards.append(("tokens/s", f"{found['tokens_per_second']:,.0f}", more))
    if steps and total and found["steps"] < total:
        recent = [one["seconds"] for one in steps[-NUM_RECENT:]]
        left = (total - found["steps"]) * sum(recent) / len(recent)
        cards.append(("left", format_seconds(left), f"{total - found['steps']:,} steps"))
    if found["bound"] is not None:
        share = f"at {found['share_of_bound']:.0%} of its measured rate"
        cards.append(("bound by", str(found["bound"]), share))
    cards.append(("skipped steps", f"{found['skipped']:,}", ""))
    return cards


def _planned_sections(
    planned: Planned | None,
    records: Sequence[Record],
    found: Mapping[str, Any],
    prospects: Prospects | str | None,
) -> list[Section]:
    if planned is None:
        return []
    peak = max((int(one.get("peak_bytes", 0)) for one in records), default=0)
    sections = [ledger_section(planned.plan, kind=PLANNED, peak_bytes=peak)]
    if isinstance(prospects, str):
        sections.append(note_section("Speed over device memory", f"Not planned: {prospects}"))
    elif prospects is not None:
        is_own = planned.plan.machine is not None
        measured = found["tokens_per_second"] if is_own else None
        sections += prospect_sections(prospects, measured=measured)
    kind = PLANNED if planned.plan.predicted_seconds else MEASURED
    return [*sections, choices_section(planned.plan, kind=kind)]
