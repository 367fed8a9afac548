"""float32, bfloat16 and float16 in one training run each: how fast, and do they learn the same?

A byte-level language model (a Llama shape with random weights, the same for all) learns the
standard library's sources under a small device budget, with AdamW, warm-up, cosine decay and
clipping. The last 5% of the text are held out. Every precision sees the same batches and runs in a
process of its own. What one has measured is kept in the folder at once, so the same command goes on
where a killed run was; losses.csv and losses.svg (points: single steps; lines: means of ten) are
written anew with each. Prints a table, then one line of JSON.

    python benchmarks/precision.py [--steps 300] [--device-memory 2GiB] [--folder runs/precision]
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import platform
import statistics
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import l2l
from l2l.bench import Curve, child_process, draw_curves
from l2l.device.byte_size import format_bytes
from l2l.parameter_server.precision import DTYPES

REFERENCE = "float32"
COLOURS = {"float32": "#475569", "bfloat16": "#c2410c", "float16": "#1d4ed8"}
VOCABULARY_SIZE = -(-256 // 64) * 64  # bytes, padded to whole tiles
HEAD_SIZE = 64
BUDGET = "2GiB"  # on an accelerator
HELD_OUT_SHARE = 0.05
NUM_UNTIMED = 10  # first steps: planning, compiling, caches
SMOOTHING_STEPS = 10
COLUMNS = (
    "precision",
    "tokens/s",
    "x float32",
    "loss, first tenth",
    "last tenth",
    "held out",
    "to float32",
    "curve, largest difference",
    "mean",
    "device peak",
    "skipped",
)

Batch = dict[str, Tensor]
Loss = float | None  # None: not finite, which JSON does not have
Result = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What results must agree in to be compared, and to be taken up again."""

    layers: int
    hidden: int
    length: int  # of a row, in bytes
    rows: int  # a step
    steps: int
    learning_rate: float
    held_out_batches: int
    seed: int
    device: str
    device_memory: str | None
    text_checksum: int  # another Python has another standard library

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "rows", "steps", "held_out_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')}: expected at least 1.")
        if self.length < 2:
            raise ValueError(f"--length {self.length}: expected at least 2 bytes.")
        if self.hidden % HEAD_SIZE:
            raise ValueError(f"--hidden {self.hidden}: expected a multiple of {HEAD_SIZE}.")


# ---- text and model -----------------------------------------------------------------------------


def standard_library_text() -> bytes:
    """All sources of the running Python's standard library, without packages installed there."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    installed = ("site-packages/", "dist-packages/")
    return b"\n".join(
        sources[name].read_bytes()
        for name in sorted(sources)
        if not name.startswith(installed) and sources[name].is_file()
    )


def split_text(text: bytes) -> tuple[Tensor, Tensor]:
    """What is trained on, and what is held out."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    end = int(len(data) * (1 - HELD_OUT_SHARE))
    return data[:end], data[end:]


def batch_at(data: Tensor, starts: Tensor, length: int) -> Batch:
    """Rows of the text; the model itself shifts its labels."""
    ids = data[starts[:, None] + torch.arange(length)].long()
    return {"input_ids": ids, "labels": ids}


def training_batches(data: Tensor, settings: Settings) -> Iterator[Batch]:
    """Random rows, for ever; the same for every precision."""
    generator = torch.Generator().manual_seed(settings.seed)
    while True:
        most = len(data) - settings.length + 1
        starts = torch.randint(most, (settings.rows,), generator=generator)
        yield batch_at(data, starts, settings.length)


def held_out_batches(data: Tensor, settings: Settings) -> Iterator[Batch]:
    """Rows spread evenly over what is held out."""
    number = settings.held_out_batches * settings.rows
    starts = torch.arange(number) * (len(data) - settings.length) // max(1, number - 1)
    for part in starts.split(settings.rows):
        yield batch_at(data, part, settings.length)


def make_model(settings: Settings) -> LlamaForCausalLM:
    """The model with its first weights, in float32."""
    torch.manual_seed(settings.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=settings.hidden,
            intermediate_size=math.ceil(settings.hidden * 8 / 3 / 64) * 64,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.hidden // HEAD_SIZE,
            num_key_value_heads=settings.hidden // HEAD_SIZE,
            vocab_size=VOCABULARY_SIZE,
            max_position_embeddings=settings.length,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
    )


# ---- one precision, in its own process ----------------------------------------------------------


def rate_factor(step: int, num_steps: int) -> float:
    """Linear warm-up over the first tenth, then a cosine down to a tenth."""
    num_warm_up = max(1, num_steps // 10)
    if step < num_warm_up:
        return (step + 1) / num_warm_up
    done = min(1.0, (step - num_warm_up) / max(1, num_steps - num_warm_up))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def train(
    engine: l2l.Engine, batches: Iterator[Batch], *, num_steps: int, name: str
) -> tuple[list[float], list[float], int]:
    """Losses and seconds of the steps, and how many left the weights alone.

    A step's time is that between two readings of the loss. Whether a step was skipped is asked one
    step late: asked at once it would wait for the backward pass, in float16 alone.
    """
    schedule = torch.optim.lr_scheduler.LambdaLR(
        engine.optimizer, lambda step: rate_factor(step, num_steps)
    )
    losses, num_skipped, earlier = [], 0, None
    marks = [time.perf_counter()]
    for number, batch in enumerate(islice(batches, num_steps), start=1):
        report = engine.step(batch)
        schedule.step()
        losses.append(report.loss)
        num_skipped += earlier is not None and earlier.skipped
        marks.append(time.perf_counter())
        earlier = report
        if number % 50 == 0 or number in (1, num_steps):
            words = f"{name}: step {number}/{num_steps}, loss {losses[-1]:.4f}"
            print(words, file=sys.stderr, flush=True)
    num_skipped += earlier is not None and earlier.skipped
    return losses, [end - begin for begin, end in pairwise(marks)], num_skipped


def measure(precision: str, settings: Settings) -> Result:
    """Train with one precision."""
    training, held_out = split_text(standard_library_text())
    model = make_model(settings)
    with l2l.Engine(
        model,
        optimizer=l2l.AdamW(lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.1),
        device=settings.device,
        device_memory=settings.device_memory,
        precision=precision,
        clip_norm=1.0,
        seed=settings.seed,
    ) as engine:
        engine.device.reset_peak()
        batches = training_batches(training, settings)
        losses, seconds, num_skipped = train(
            engine, batches, num_steps=settings.steps, name=precision
        )
        peak_bytes = engine.device.peak_bytes()
        evaluated = [engine.evaluate(batch) for batch in held_out_batches(held_out, settings)]
        plan, device = str(engine.plan), engine.device.name
    step_seconds = statistics.median(seconds[NUM_UNTIMED:] or seconds)
    tenth = max(1, settings.steps // 10)
    kept = [finite_or_none(loss) for loss in losses]
    return {
        "precision": precision,
        "tokens_per_second": settings.rows * settings.length / step_seconds,
        "step_seconds": step_seconds,
        "total_seconds": sum(seconds),
        "first_tenth": mean_of(kept[:tenth]),
        "last_tenth": mean_of(kept[-tenth:]),
        "held_out": finite_or_none(statistics.fmean(evaluated)),
        "device_peak_bytes": peak_bytes,
        "num_skipped": num_skipped,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_text_bytes": len(training) + len(held_out),
        "device": device,
        "torch_version": torch.__version__,
        "python_version": platform.python_version(),
        "float32_products": torch.get_float32_matmul_precision(),
        "losses": kept,
        "plan": plan,
    }


def finite_or_none(loss: float) -> Loss:
    """A loss as JSON can hold it."""
    return loss if math.isfinite(loss) else None


def mean_of(losses: Sequence[Loss]) -> Loss:
    """The mean of those that are finite: one overflow must not hide the others."""
    finite = [loss for loss in losses if loss is not None]
    return statistics.fmean(finite) if finite else None


# ---- all of them --------------------------------------------------------------------------------


def result_path(folder: Path, precision: str) -> Path:
    """Where the result of one precision is kept."""
    return folder / f"{precision}.json"


def kept_result(folder: Path, precision: str, settings: Settings) -> Result | None:
    """What an earlier call has measured.

    Raises:
        ValueError: it has measured something else.
    """
    path = result_path(folder, precision)
    if not path.exists():
        return None
    kept = json.loads(path.read_text())
    asked = asdict(settings)
    others = [name for name, value in asked.items() if kept["settings"].get(name) != value]
    if others:
        raise ValueError(
            f"{path} was measured with another {', '.join(others)}. Give another --folder, or "
            "remove the file to measure it again."
        )
    return kept["result"]


def run_alone(precision: str, settings: Settings, folder: Path) -> Result | None:
    """Measure in a process of its own and keep the result; None: it failed, and has said why."""
    command = [sys.executable, __file__, *sys.argv[1:], "--alone", precision]
    with child_process.started(command) as process:
        output = process.communicate()[0]
    if process.returncode != 0:
        print(f"{precision} failed: exit status {process.returncode}", file=sys.stderr, flush=True)
        return None
    result = json.loads(output.splitlines()[-1])
    path = result_path(folder, precision)
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"settings": asdict(settings), "result": result}))
    part.replace(path)  # whole or not at all
    return result


def smoothed(losses: Sequence[Loss]) -> list[Loss]:
    """Means over the last steps."""
    ends = range(1, len(losses) + 1)
    return [mean_of(losses[max(0, end - SMOOTHING_STEPS) : end]) for end in ends]


def with_differences(result: Result, reference: Result | None) -> Result:
    """A result with what it differs in from float32; without its curve and its plan."""
    found = {name: value for name, value in result.items() if name not in ("losses", "plan")}
    names = ("speed_ratio", "held_out_difference", "curve_largest", "curve_mean")
    found |= dict.fromkeys(names)
    if reference is None:
        return found
    found["speed_ratio"] = result["tokens_per_second"] / reference["tokens_per_second"]
    if result["held_out"] is not None and reference["held_out"] is not None:
        found["held_out_difference"] = result["held_out"] / reference["held_out"] - 1
    curves = zip(smoothed(result["losses"]), smoothed(reference["losses"]), strict=True)
    apart = [abs(one - two) for one, two in curves if one is not None and two is not None]
    if apart:
        found |= {"curve_largest": max(apart), "curve_mean": statistics.fmean(apart)}
    return found


def table_row(found: Result) -> str:
    """A line of the table."""

    def cell(name: str, form: str) -> str:
        return "-" if found[name] is None else format(found[name], form)

    cells = (
        found["precision"],
        cell("tokens_per_second", ",.0f"),
        cell("speed_ratio", ".2f"),
        cell("first_tenth", ".4f"),
        cell("last_tenth", ".4f"),
        cell("held_out", ".4f"),
        cell("held_out_difference", "+.3%"),
        cell("curve_largest", ".4f"),
        cell("curve_mean", ".4f"),
        format_bytes(found["device_peak_bytes"]),
        cell("num_skipped", "d"),
    )
    return f"| {' | '.join(cells)} |"


def title_of(result: Result, settings: Settings) -> str:
    """What was trained, where."""
    return (
        f"{result['device']}, torch {result['torch_version']}, Python {result['python_version']}; "
        f"{result['num_parameters'] / 1e6:,.1f}M parameters, {settings.rows} rows of "
        f"{settings.length} bytes a step, {settings.device_memory or 'no'} budget"
    )


def write_curves(results: Sequence[Result], settings: Settings, folder: Path) -> None:
    """The losses as a table and as a picture."""
    with (folder / "losses.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *(result["precision"] for result in results)])
        curves = zip(*(result["losses"] for result in results), strict=True)
        writer.writerows([number, *row] for number, row in enumerate(curves, start=1))
    title = title_of(results[0], settings)
    curves_of = {result["precision"]: result["losses"] for result in results}
    (folder / "losses.svg").write_text(draw(curves_of, title=title))


# ---- the picture --------------------------------------------------------------------------------


def draw(curves: dict[str, list[Loss]], *, title: str) -> str:
    """Losses over steps as SVG."""
    drawn = []
    for name, losses in curves.items():
        means = smoothed(losses)
        for kind, values in (("steps", losses), ("mean", means)):
            points = [(step, loss) for step, loss in enumerate(values, start=1) if loss is not None]
            single = kind == "steps"
            drawn.append(
                Curve(
                    name=f"{name} {kind}",
                    points=points,
                    colour=COLOURS[name],
                    width=0 if single else 2,
                    point_size=1.5 if single else 0,
                    label="" if single else name,
                )
            )
    return draw_curves(
        drawn,
        heading="Training loss by precision",
        title=title,
        unit="loss, in nats a byte",
        from_zero=True,
    )


# -------------------------------------------------------------------------------------------------


def parse() -> tuple[argparse.Namespace, Settings]:
    """The options, and the settings that follow from them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/precision"))
    parser.add_argument("--precisions", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768, help=f"a multiple of {HEAD_SIZE}")
    parser.add_argument("--length", type=int, default=512, help="bytes a row")
    parser.add_argument("--rows", type=int, default=32, help="rows a step")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=6e-4, help="at its highest")
    parser.add_argument("--held-out-batches", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default=None, help="default: the accelerator, else the CPU")
    parser.add_argument(
        "--device-memory", default=None, help=f"default: {BUDGET}; on the CPU no budget"
    )
    parser.add_argument("--alone", choices=list(DTYPES), help="measure one, in this process")
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = ("layers", "hidden", "length", "rows", "steps", "learning_rate", "held_out_batches")
    settings = Settings(
        **{name: getattr(options, name) for name in names},
        seed=options.seed,
        device=device,
        device_memory=options.device_memory or (None if device == "cpu" else BUDGET),
        text_checksum=zlib.crc32(standard_library_text()),
    )
    return options, settings


def main() -> int:
    """Measure what is not measured yet; a precision that fails does not stop the others."""
    options, settings = parse()
    if options.alone is not None:
        print(json.dumps(measure(options.alone, settings)))
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    asked = [name for name in DTYPES if name in options.precisions]
    kept = {name: kept_result(options.folder, name, settings) for name in asked}
    results: list[Result] = []
    for name in asked:
        result = kept[name] or run_alone(name, settings, options.folder)
        if result is None:
            continue
        results.append(result)
        write_curves(results, settings, options.folder)
    if not results:
        return 1
    reference = next((one for one in results if one["precision"] == REFERENCE), None)
    found = [with_differences(result, reference) for result in results]
    print(f"{title_of(results[0], settings)}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    print("\n".join(map(table_row, found)))
    print(json.dumps({"settings": asdict(settings), "results": found}))
    return 0 if len(results) == len(asked) else 1


if __name__ == "__main__":
    sys.exit(main())
