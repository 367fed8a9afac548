"""`l2l report`: what a run folder tells, as a few lines, a plot of the losses, and JSON."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from l2l.bench import BOTTOM, FONT_SIZE, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from l2l.checkpoint import CheckpointError, CheckpointFolder, Manifest
from l2l.device import format_bytes
from l2l.train import BEST, Record, RunFolder, Settings, format_seconds, read_metrics

HELP = """Summarise a run: settings, steps, losses, speed, evaluations, checkpoints; also while it
goes on. Draws the losses as an SVG file. The last line is JSON."""

SMOOTHED = 0.05  # share of the run that the smooth curve averages over
TRAINING, EVALUATION = "#c2410c", "#1d4ed8"
NUM_TICKS = 6

Curve = Sequence[tuple[float, float]]  # step, loss


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `l2l report` takes."""
    parser.description = HELP
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="where to draw the losses (default: RUN/loss.svg)"
    )


def run(parsed: argparse.Namespace) -> int:
    """`l2l report`; returns the exit status."""
    try:
        folder = RunFolder.around(parsed.run)
        settings = Settings.of_table(tomllib.loads(folder.settings_file.read_text()))
        records = read_metrics(folder.metrics_file) if folder.metrics_file.exists() else []
        found = summarise(settings, records)
        found |= _checkpoints(folder)
        plot = parsed.plot or folder.root / "loss.svg"
        title = f"{settings.model.folder.name}, {settings.data.task}"
        plot.write_text(draw_losses(*_curves(records), title=title))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{folder.root}: {_title(settings)}")
    print("\n".join(_lines(found, settings)))
    print(f"losses: {plot}")
    print(json.dumps({"run": str(folder.root), **found, "plot": str(plot)}))
    return 0


def summarise(settings: Settings, records: Sequence[Record]) -> dict[str, Any]:
    """What the metrics of a run amount to."""
    steps = [record for record in records if record["kind"] == "step"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    losses = [record["loss"] for record in steps if record["loss"] is not None]
    speeds = [record["tokens"] / record["seconds"] for record in steps if record["seconds"]]
    name, more = BEST[settings.data.task]
    judged = [record for record in evaluations if record.get(name) is not None]
    best = None
    if judged:
        best = (max if more else min)(judged, key=lambda record: record[name])
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "lowest_loss": min(losses, default=None),
        "tokens": sum(record["tokens"] for record in steps),
        "seconds": round(sum(record["seconds"] for record in steps), 3),
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "skipped": sum(bool(record.get("skipped")) for record in steps),
        "given_up": next((one for one in records if one["kind"] == "diverged"), None),
        "first_evaluation": evaluations[0] if evaluations else None,
        "last_evaluation": evaluations[-1] if evaluations else None,
        "best_evaluation": best,
    }


def _checkpoints(folder: RunFolder) -> dict[str, Any]:
    listed: list[dict[str, Any]] = []
    num_steps = None
    for path in CheckpointFolder(folder.checkpoints).all():
        try:
            manifest = Manifest.read(path)
        except CheckpointError as error:
            listed.append({"folder": str(path), "damage": str(error)})
            continue
        num_steps = manifest.extra.get("num_steps")
        nbytes = sum(file.nbytes for file in manifest.files.values())
        listed.append({"folder": str(path), "step": manifest.step, "bytes": nbytes})
    return {
        "num_steps": num_steps,
        "checkpoints": listed,
        "model": str(folder.model) if folder.model.is_dir() else None,
    }


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
        yield (
            f"loss: {found['first_loss']:.4f} at first, {found['last_loss']:.4f} at last, "
            f"{found['lowest_loss']:.4f} at least"
        )
    if found["tokens_per_second"] is not None:
        yield (
            f"speed: {found['tokens_per_second']:,.0f} tokens/s; {found['tokens']:,} tokens in "
            f"{format_seconds(found['seconds'])}"
        )
    name, _ = BEST[settings.data.task]
    for word in ("first", "best", "last"):
        record = found[f"{word}_evaluation"]
        if record is not None and record.get(name) is not None:
            yield f"{word} evaluation: {name} {record[name]:.4f} after step {record['step']}"
    for one in found["checkpoints"]:
        facts = one.get("damage") or format_bytes(one["bytes"])
        yield f"checkpoint: {one['folder']}, {facts}"
    if found["model"]:
        yield f"model: {found['model']}"


# --------------------------------------------------------------------------------------------------
# The plot


def _curves(records: Sequence[Record]) -> tuple[Curve, Curve]:
    return tuple(  # type: ignore[return-value]
        [
            (record["step"], record["loss"])
            for record in records
            if record["kind"] == kind and record["loss"] is not None
        ]
        for kind in ("step", "evaluation")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Where a step and a loss lie in the picture."""

    last_step: float
    lowest: float
    highest: float

    @classmethod
    def around(cls, *curves: Curve) -> Frame:
        """A frame that holds all points, with a little room."""
        losses = [loss for curve in curves for _, loss in curve]
        lowest, highest = min(losses), max(losses)
        room = 0.05 * (highest - lowest) or 0.05 * abs(highest) or 1.0
        last = max(step for curve in curves for step, _ in curve)
        return cls(last_step=max(1, last), lowest=lowest - room, highest=highest + room)

    def place(self, step: float, loss: float) -> tuple[float, float]:
        """Pixels from the left and from the top."""
        across = step / self.last_step
        up = (loss - self.lowest) / (self.highest - self.lowest)
        return LEFT + across * (RIGHT - LEFT), BOTTOM - up * (BOTTOM - TOP)


def draw_losses(training: Curve, evaluation: Curve, *, title: str) -> str:
    """Losses over steps, as SVG: of training each and smoothed, of evaluations as points."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, Helvetica, Arial, sans-serif" '
        f'font-size="{FONT_SIZE}" fill="#1f2937">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, 34, f"Loss: {title}"),
    ]
    if training or evaluation:
        smooth = _smoothed(training)
        frame = Frame.around(training, evaluation)
        parts += _axes(frame)
        parts += [
            _curve(frame, training, colour=TRAINING, width=1, opacity=0.3),
            _curve(frame, smooth, colour=TRAINING, width=2, opacity=1.0),
            _curve(frame, evaluation, colour=EVALUATION, width=1.5, opacity=1.0),
        ]
        for step, loss in evaluation:
            x, y = frame.place(step, loss)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{EVALUATION}"/>')
        parts.append(_text(LEFT, 58, "training, and its running mean", colour=TRAINING))
        if evaluation:
            parts.append(_text(LEFT, 76, "evaluation", colour=EVALUATION))
    else:
        parts.append(_text(WIDTH / 2, HEIGHT / 2, "no step yet", anchor="middle"))
    return "\n".join([*parts, "</svg>", ""])


def _smoothed(curve: Curve) -> Curve:
    """A running mean that follows the curve."""
    width = max(1, round(SMOOTHED * len(curve)))
    losses = [loss for _, loss in curve]
    sums = [0.0]
    for loss in losses:
        sums.append(sums[-1] + loss)
    return [
        (step, (sums[end] - sums[max(0, end - width)]) / min(end, width))
        for end, (step, _) in enumerate(curve, start=1)
    ]


def _axes(frame: Frame) -> Iterator[str]:
    for loss in _ticks(frame.lowest, frame.highest):
        _, y = frame.place(0, loss)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}" stroke="#e5e7eb"/>'
        yield _text(LEFT - 10, y + 4, f"{loss:g}", anchor="end")
    for step in _ticks(0, frame.last_step):
        x, _ = frame.place(step, frame.lowest)
        yield f'<line x1="{x:.1f}" y1="{BOTTOM}" x2="{x:.1f}" y2="{BOTTOM + 5}" stroke="#6b7280"/>'
        yield _text(x, BOTTOM + 20, f"{step:,g}", anchor="middle")
    yield f'<line x1="{LEFT}" y1="{BOTTOM}" x2="{RIGHT}" y2="{BOTTOM}" stroke="#6b7280"/>'
    yield _text((LEFT + RIGHT) / 2, HEIGHT - 22, "step", anchor="middle")


def _ticks(lowest: float, highest: float) -> list[float]:
    """Round numbers between two others."""
    width = (highest - lowest) / NUM_TICKS
    magnitude = 10.0 ** math.floor(math.log10(width))
    step = next(n * magnitude for n in (1, 2, 5, 10) if n * magnitude >= width)
    first = math.ceil(lowest / step)
    return [round(number * step, 12) for number in range(first, math.floor(highest / step) + 1)]


def _curve(frame: Frame, curve: Curve, *, colour: str, width: float, opacity: float) -> str:
    path = " ".join("{:.1f},{:.1f}".format(*frame.place(*point)) for point in curve)
    return (
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
        f'stroke-opacity="{opacity}"/>'
    )


def _text(x: float, y: float, words: str, *, anchor: str = "start", colour: str = "") -> str:
    fill = f' fill="{colour}"' if colour else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{fill}>{escape(words)}</text>'
