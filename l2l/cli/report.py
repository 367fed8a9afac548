"""`l2l report`: what a run folder tells, as a few lines and a plot of the losses, or as JSON."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from l2l.bench import Curve, PlotError, draw_curves
from l2l.checkpoint import CheckpointError, CheckpointFolder, Manifest
from l2l.device import describe_wear, format_bytes
from l2l.train import KINDS, Record, RunFolder, Settings, format_seconds, read_metrics

HELP = """Summarise a run: settings, steps, losses, speed, evaluations, checkpoints; also while it
goes on. Draws the losses as an SVG file."""

SMOOTHED = 0.05  # share of the run that the smooth curve averages over
TRAINING, EVALUATION = "#c2410c", "#1d4ed8"

Points = Sequence[tuple[float, float]]  # step, loss


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `l2l report` takes."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    words = "where to draw the losses (default: RUN/loss.svg)"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=words)
    words = "also write a page to look at (default: RUN/report.html): one file, for any browser"
    parser.add_argument("--html", nargs="?", const=Path(), type=Path, metavar="FILE", help=words)
    words = "leave out of the page what other budgets would bring, which takes a minute to plan"
    parser.add_argument("--no-plans", action="store_true", help=words)
    words = "print one line of JSON; what is for people goes to the standard error"
    parser.add_argument("--json", action="store_true", help=words)


def run(parsed: argparse.Namespace) -> int:
    """`l2l report`; returns the exit status."""
    with contextlib.redirect_stdout(sys.stderr if parsed.json else sys.stdout):
        found = _reported(parsed)
    if parsed.json:
        print(json.dumps(found))
    return 0


def _reported(parsed: argparse.Namespace) -> dict[str, Any]:
    """Print what there is to say, and draw it."""
    folder = run_folder(parsed.run)
    settings = Settings.of_table(tomllib.loads(folder.settings_file.read_text()))
    records = read_metrics(folder.metrics_file)
    found = summarise(settings, records) | _checkpoints(folder)
    told = str(parsed.plot or folder.root / "loss.svg")
    plot: str | None = told
    losses = (_losses(records, kind) for kind in ("step", "evaluation"))
    title = f"{settings.model.folder.name}, {settings.data.task}"
    try:
        Path(told).write_text(draw_losses(*losses, title=title))
    except PlotError as error:
        plot, told = None, str(error)
    print(f"{folder.root}: {_title(settings)}")
    print("\n".join(_lines(found, settings)))
    print(f"losses: {told}")
    if parsed.html is not None:
        page = parsed.html if parsed.html != Path() else folder.root / "report.html"
        from l2l.cli.run_page import write_run  # which needs what is above

        write_run(page, folder, plans=not parsed.no_plans)
        print(f"page: {page}")
        found["html"] = str(page)
    return {"run": str(folder.root), **found, "plot": plot}


def run_folder(path: Path) -> RunFolder:
    """The run folder that a path is, or is a checkpoint of."""
    for folder in (RunFolder(path), RunFolder(path.absolute().parent.parent)):
        if folder.settings_file.is_file():
            return folder
    raise ValueError(
        f"{path} is not a run folder, nor a checkpoint in one: there is no run.toml. Expected what "
        "l2l train has written."
    )


def summarise(settings: Settings, records: Sequence[Record]) -> dict[str, Any]:
    """What the metrics of a run amount to."""
    steps, evaluations = (
        [record for record in records if record["kind"] == kind] for kind in ("step", "evaluation")
    )
    losses = [loss for _, loss in _losses(steps, "step")]
    speeds = [record["tokens"] / record["seconds"] for record in steps if record["seconds"]]
    kind = KINDS[settings.data.task]
    judged = [record for record in evaluations if record.get(kind.best) is not None]
    best = sorted(judged, key=lambda record: record[kind.best], reverse=kind.more_is_better)
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "first_loss": next(iter(losses), None),
        "last_loss": next(reversed(losses), None),
        "lowest_loss": min(losses, default=None),
        "tokens": sum(record["tokens"] for record in steps),
        "seconds": round(sum(record["seconds"] for record in steps), 3),
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        **_bound(steps),
        "uncompiled": sum(record.get("compiled") is False for record in steps),
        "disk_written": sum(record.get("disk_written", 0) for record in steps),
        "skipped": sum(bool(record.get("skipped")) for record in steps),
        "given_up": next((one for one in records if one["kind"] == "diverged"), None),
        "first_evaluation": next(iter(evaluations), None),
        "last_evaluation": next(reversed(evaluations), None),
        "best_evaluation": next(iter(best), None),
    }


def _bound(steps: Sequence[Record]) -> dict[str, Any]:
    """The lane that bound the last steps that say so, and what share of its rate these reached."""
    told = [record for record in steps if record.get("bound")]
    lane = told[-1]["bound"] if told else None
    shares = [record["share_of_bound"] for record in told if record["bound"] == lane]
    return {"bound": lane, "share_of_bound": statistics.median(shares) if shares else None}


def _checkpoints(folder: RunFolder) -> dict[str, Any]:
    listed: list[dict[str, Any]] = []
    num_steps = None
    for path in CheckpointFolder(folder.checkpoints).all():
        try:
            manifest = Manifest.read(path)
            num_steps = manifest.extra.get("num_steps")
            nbytes = sum(file.nbytes for file in manifest.files.values())
            facts: dict[str, Any] = {"step": manifest.step, "bytes": nbytes}
        except CheckpointError as error:
            facts = {"damage": str(error)}
        listed.append({"folder": str(path), **facts})
    model = str(folder.model) if folder.model.is_dir() else None
    return {"num_steps": num_steps, "checkpoints": listed, "model": model}


def _title(settings: Settings) -> str:
    training, optimizer = settings.training, settings.optimizer
    sources = ", ".join(Path(source).name for source in settings.data.source)
    return (
        f"{settings.data.task} with {settings.model.folder.name} on {sources}; {training.rows} "
        f"rows of {training.length} tokens, {optimizer.name} {optimizer.learning_rate:g} "
        f"{settings.schedule.shape}, {training.precision}"
    )


def _lines(found: dict[str, Any], settings: Settings) -> Iterator[str]:
    total = f" of {found['num_steps']}" if found["num_steps"] else ""
    skipped = f", {found['skipped']} of them skipped" if found["skipped"] else ""
    yield f"steps: {found['steps']}{total}{skipped}"
    if found["given_up"]:
        yield f"given up: no step could be made from {found['given_up']['since']} on"
    if found["last_loss"] is not None:
        first, last, least = (found[f"{name}_loss"] for name in ("first", "last", "lowest"))
        yield f"loss: {first:.4f} at first, {last:.4f} at last, {least:.4f} at least"
    if found["tokens_per_second"] is not None:
        took = f"{found['tokens']:,} tokens in {format_seconds(found['seconds'])}"
        yield f"speed: {found['tokens_per_second']:,.0f} tokens/s; {took}"
    if found["uncompiled"]:
        yield f"compiled: all steps but {found['uncompiled']}, which began while it was compiled"
    if found["bound"] is not None:
        yield f"bound by: {found['bound']}, at {found['share_of_bound']:.0%} of its measured rate"
    if found["disk_written"]:
        written = format_bytes(found["disk_written"])
        wear = describe_wear(found["disk_written"] // found["steps"])
        yield f"disk: {written} written; {wear}"
    name = KINDS[settings.data.task].best
    for word in ("first", "best", "last"):
        record = found[f"{word}_evaluation"]
        if record is not None and record.get(name) is not None:
            yield f"{word} evaluation: {name} {record[name]:.4f} after step {record['step']}"
    for one in found["checkpoints"]:
        yield f"checkpoint: {one['folder']}, {one.get('damage') or format_bytes(one['bytes'])}"
    if found["model"]:
        yield f"model: {found['model']}"


# --------------------------------------------------------------------------------------------------
# The plot


def _losses(records: Sequence[Record], kind: str) -> Points:
    return [
        (record["step"], record["loss"])
        for record in records
        if record["kind"] == kind and record.get("loss") is not None
    ]


def draw_losses(training: Points, evaluation: Points, *, title: str) -> str:
    """Losses over steps, as SVG: of training each and smoothed, of evaluations as points.

    Raises:
        PlotError: matplotlib is not installed.
    """
    mean, judged = "training, and its running mean", "evaluation" if evaluation else ""
    curves = [
        Curve(name="training", points=training, colour=TRAINING, width=1, opacity=0.3),
        Curve(name="mean", points=_smoothed(training), colour=TRAINING, width=2, label=mean),
        Curve(name="evaluation", points=evaluation, colour=EVALUATION, point_size=6, label=judged),
    ]
    return draw_curves(curves, heading="Loss", title=title, unit="loss")


def _smoothed(points: Points) -> Points:
    """A running mean that follows the curve."""
    width = max(1, round(SMOOTHED * len(points)))
    sums = list(itertools.accumulate((loss for _, loss in points), initial=0.0))
    return [
        (step, (sums[end] - sums[max(0, end - width)]) / min(end, width))
        for end, (step, _) in enumerate(points, start=1)
    ]
