"""BERT-Large on a device held to 16 GiB: the engine against plain PyTorch at its best microbatch.

    python benchmarks/bert_large.py [--results FILE] [--variants all] [--budgets 16GiB 2GiB]

Sequence classification with random weights, dropout 0.1, `sdpa` attention, AdamW without clipping,
the same batch in every step. The engine runs in bfloat16 with float32 masters on the host. Plain
PyTorch has everything on the device: weights, gradients and moments in float32, the arithmetic in
float32 or under autocast to bfloat16 (`amp`), with and without recomputation of the layers, eager
and compiled. It takes the largest microbatch that fits and adds gradients up to the same batch; the
allocator is set as the engine sets it.

Every run has a process of its own and a time limit; one that fails is a row that says so. Prints a
table for each length and batch, then one line of JSON. With `--results` rows are written as they
come, and those that are there already are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import l2l
from l2l.bench import child_process
from l2l.device.byte_size import parse_bytes
from l2l.planner import DoesNotFitError

ENGINE = "engine"
MEASURED, DOES_NOT_FIT, FAILED = "measured", "does not fit", "failed"  # what comes of a run
LEARNING_RATE = 1e-5
MAX_ROWS = 256  # of a microbatch of plain PyTorch; the search goes down from here
STATE_BYTES = 16  # per parameter of plain PyTorch: weight, gradient, two moments
LONGEST_NOTE = 160

SHAPES = {
    "large": {
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "vocab_size": 30522,
    },
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "vocab_size": 1000,
    },
}

# Words of a variant, joined by "-". "compiled" compiles the layers, one program for all of them;
# "compiled-model" the whole model, which takes minutes. "tf32" rounds the factors of products.
VARIANTS = tuple(
    "-".join(word for word in words if word)
    for words in product(
        ("amp", "float32", "tf32"), ("", "compiled", "compiled-model"), ("", "recompute")
    )
)
GROUPS = {
    "eager": ("amp", "amp-recompute", "float32", "float32-recompute"),
    "compiled": tuple(
        f"{precision}-compiled{recompute}"
        for precision, recompute in product(("amp", "float32"), ("", "-recompute"))
    ),
}
GROUPS["all"] = (*GROUPS["eager"], *GROUPS["compiled"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: a workload, and who does it."""

    shape: str
    length: int  # of a row, in tokens
    batch: int  # rows of a step
    variant: str  # ENGINE, or one of VARIANTS
    device_memory: str  # the engine's budget, or what plain PyTorch is held to
    num_warm_up: int  # steps that are not timed
    num_steps: int  # steps that are

    @property
    def words(self) -> list[str]:
        """What the variant is made of."""
        return self.variant.split("-")

    @property
    def label(self) -> str:
        """The name of the row."""
        return f"engine {self.device_memory}" if self.variant == ENGINE else f"plain {self.variant}"

    @property
    def most_rows(self) -> int:
        """The largest microbatch that is tried."""
        return min(self.batch, MAX_ROWS)

    def make_batch(self) -> dict[str, Tensor]:
        """Random tokens and labels, on the host; the same for every system."""
        generator = torch.Generator().manual_seed(1)
        vocabulary = SHAPES[self.shape]["vocab_size"]
        size = (self.batch, self.length)
        return {
            "input_ids": torch.randint(0, vocabulary, size, generator=generator),
            "labels": torch.randint(0, 2, (self.batch,), generator=generator),
        }

    def make_model(self, device: torch.device) -> BertForSequenceClassification:
        """The model with random weights in float32, the same for every system."""
        config = BertConfig(
            **SHAPES[self.shape],
            max_position_embeddings=max(512, self.length),
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            num_labels=2,
            problem_type="single_label_classification",
            attn_implementation="sdpa",
        )
        torch.manual_seed(0)
        with device:
            return BertForSequenceClassification(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one run showed."""

    step_seconds: float  # the median
    all_step_seconds: list[float]
    tokens_per_second: float
    samples_per_second: float
    reserved_bytes: int | None  # the most taken from the device. None: the CPU, nobody counts
    allocated_bytes: int | None  # of them in tensors
    host_bytes: int  # the most resident memory of the process
    microbatch: int  # rows
    num_retries: int  # in the timed steps: memory was full, and had to be tidied before going on
    num_parameters: int
    losses: list[float]
    device: str
    torch_version: str
    plan: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What came of a run: a measurement, or why there is none."""

    case: Case
    status: str
    measurement: Measurement | None = None
    note: str = ""
    seconds: float = 0.0  # of the whole process

    @classmethod
    def of(cls, found: dict[str, Any]) -> Self:
        """A row from its JSON."""
        measurement = found["measurement"] and Measurement(**found["measurement"])
        return cls(**{**found, "case": Case(**found["case"]), "measurement": measurement})

    @property
    def summary(self) -> str:
        """One line for who waits."""
        found = self.measurement
        if found is None:
            return f"{self.case.label}: {self.status} {self.note}".rstrip()
        return (
            f"{self.case.label}: {found.tokens_per_second:,.0f} tokens/s, "
            f"microbatch {found.microbatch}, {_gibibytes(found.reserved_bytes)} GiB"
        )


# ---- in the process of a run --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The steps of a run, as seen by who reads their losses."""

    losses: list[float]
    seconds: list[float]  # of the timed steps
    num_retries: int


def find_device() -> torch.device:
    """The accelerator if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def time_steps(step: Callable[[], float], case: Case) -> Timing:
    """Run a case's steps; a step lasts from one reading of the loss to the next."""
    losses, marks, retries = [], [], []
    for _ in range(case.num_warm_up + case.num_steps):
        losses.append(step())
        marks.append(time.perf_counter())
        retries.append(_count_retries())
    seconds = [later - earlier for earlier, later in pairwise(marks)][-case.num_steps :]
    return Timing(
        losses=losses, seconds=seconds, num_retries=retries[-1] - retries[case.num_warm_up - 1]
    )


def summarize(case: Case, timing: Timing, **facts: Any) -> Measurement:
    """The measurement of a case whose steps are done."""
    median = statistics.median(timing.seconds)
    on_accelerator = torch.cuda.is_available()
    reserved = torch.cuda.max_memory_reserved() if on_accelerator else None
    allocated = torch.cuda.max_memory_allocated() if on_accelerator else None
    return Measurement(
        step_seconds=median,
        all_step_seconds=timing.seconds,
        tokens_per_second=case.batch * case.length / median,
        samples_per_second=case.batch / median,
        num_retries=timing.num_retries,
        losses=timing.losses,
        host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        device=torch.cuda.get_device_name() if on_accelerator else "CPU",
        torch_version=torch.__version__,
        **{"reserved_bytes": reserved, "allocated_bytes": allocated, **facts},
    )


def measure_engine(case: Case) -> Measurement:
    """The engine, given the model on the host.

    Raises:
        DoesNotFitError: the budget is too small.
    """
    device = find_device()
    model = case.make_model(device).cpu()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    _forget(device)
    batch = case.make_batch()
    with l2l.Engine(
        model,
        optimizer=l2l.AdamW(lr=LEARNING_RATE),
        precision="bfloat16",
        device=device,
        device_memory=case.device_memory,
    ) as engine:
        timing = time_steps(lambda: engine.step(batch).loss, case)
        plan = engine.plan
        return summarize(
            case,
            timing,
            num_parameters=num_parameters,
            microbatch=int(dict(plan.choices)["microbatch"].partition(" rows")[0]),
            reserved_bytes=engine.device.peak_bytes(),
            plan=str(plan),
        )


def measure_plain(case: Case) -> Measurement | None:
    """Plain PyTorch with the largest microbatch that fits. None: not even one row does."""
    _hold_to(case.device_memory)
    start = rows = case.most_rows
    if "compiled" in case.words:  # every try compiles anew, so begin near the end
        start = rows = min(start, max(1, 2 * rows_without_compiler(case)))
    found = None
    while found is None and rows:
        found, rows = attempt(case, rows), rows // 2
    if found is None:
        return None
    while start == found.microbatch < case.most_rows and _may_double(found, case):
        start = min(2 * start, case.most_rows)
        found = attempt(case, start) or found
    if found.num_retries:  # it fits, but barely: half may be faster
        half = attempt(case, max(1, found.microbatch // 2))
        found = max(found, half or found, key=lambda one: one.tokens_per_second)
    return found


def rows_without_compiler(case: Case) -> int:
    """The largest microbatch that fits if nothing is compiled, found in two short steps each."""
    variant = "-".join(word for word in case.words if word not in ("compiled", "model"))
    rows = case.most_rows
    while rows:
        batch = min(case.batch, 2 * rows)  # the second microbatch runs beside gradients
        brief = replace(case, variant=variant, batch=batch, num_warm_up=1, num_steps=1)
        if attempt(brief, rows) is not None:
            break
        rows //= 2
    return rows


def attempt(case: Case, rows: int) -> Measurement | None:
    """Plain PyTorch with one size of microbatches. None: the device has too little memory."""
    device = find_device()
    _forget(device)
    try:
        model = case.make_model(device)
        timing = time_steps(plain_step(model, case, rows=rows, device=device), case)
    except torch.OutOfMemoryError:
        return None
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return summarize(case, timing, num_parameters=num_parameters, microbatch=rows)


def plain_step(
    model: BertForSequenceClassification, case: Case, *, rows: int, device: torch.device
) -> Callable[[], float]:
    """A training loop as it is usually written; returns its step."""
    model.train()
    precision = case.words[0]
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if "recompute" in case.words:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "compiled" in case.words:
        for part in (model,) if "model" in case.words else model.bert.encoder.layer:
            part.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    parts = {name: value.to(device).split(rows) for name, value in case.make_batch().items()}
    microbatches = [
        dict(zip(parts, part, strict=True)) for part in zip(*parts.values(), strict=True)
    ]

    def step() -> float:
        total = torch.zeros((), device=device)
        for one in microbatches:
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "amp"):
                loss = model(**one).loss * (len(one["labels"]) / case.batch)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return step


def run_here(text: str) -> None:
    """Run the case given as JSON; the last line printed is JSON too."""
    case = Case(**json.loads(text))
    try:
        found = measure_engine(case) if case.variant == ENGINE else measure_plain(case)
        note = ""
    except (DoesNotFitError, torch.OutOfMemoryError) as error:
        found, note = None, _first_line(str(error))
    status = DOES_NOT_FIT if found is None else MEASURED
    print(json.dumps(asdict(Row(case=case, status=status, measurement=found, note=note))))


def _may_double(found: Measurement, case: Case) -> bool:
    """Whether twice the rows could fit; a tenth is allowed for what does not grow with them."""
    state = STATE_BYTES * found.num_parameters
    expected = 2 * (found.allocated_bytes or 0) - state
    return expected <= 1.1 * parse_bytes(case.device_memory, name="--device-memory")


def _hold_to(device_memory: str) -> None:
    """Let torch take no more than this, with the allocator's settings that the engine uses."""
    if not torch.cuda.is_available():
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    total = torch.cuda.get_device_properties(0).total_memory
    allowed = parse_bytes(device_memory, name="--device-memory")
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total))


def _forget(device: torch.device) -> None:
    """Leave nothing of an earlier try: neither memory nor programs for other sizes."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _count_retries() -> int:
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


# ---- all runs -----------------------------------------------------------------------------------


def run_apart(case: Case, time_limit_seconds: float) -> Row:
    """Run a case in a process of its own; whatever happens there, a row comes back."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    output, errors, note = child_process.run(command, time_limit_seconds)
    seconds = time.perf_counter() - began
    with contextlib.suppress(ValueError, IndexError, TypeError, KeyError):
        return replace(Row.of(json.loads(output.splitlines()[-1])), seconds=seconds)
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
    note = (f"{note}: {last}" if last else note)[:LONGEST_NOTE]
    return Row(case=case, status=FAILED, note=note, seconds=seconds)


def read_rows(path: Path | None) -> dict[Case, Row]:
    """The rows of an earlier call."""
    if path is None or not path.exists():
        return {}
    rows = [Row.of(found) for found in json.loads(path.read_text())]
    return {row.case: row for row in rows}


def write_rows(path: Path | None, rows: dict[Case, Row]) -> None:
    """Write all rows, whole or not at all."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps([asdict(row) for row in rows.values()], indent=1))
    beside.replace(path)


def list_cases(options: argparse.Namespace, length: int, batch: int) -> Iterator[Case]:
    """The cases of one table: the engine with every budget, then plain PyTorch."""
    names = [name for word in options.variants for name in GROUPS.get(word, (word,))]
    runs = [(ENGINE, budget) for budget in dict.fromkeys(options.budgets)]
    runs += [(name, options.device_memory) for name in dict.fromkeys(names)]
    for variant, device_memory in runs:
        yield Case(
            shape=options.shape,
            length=length,
            batch=batch,
            variant=variant,
            device_memory=device_memory,
            num_warm_up=options.warm_up,
            num_steps=options.steps,
        )


# ---- the table ----------------------------------------------------------------------------------


def describe(rows: Sequence[Row], device_memory: str) -> str:
    """The rows of one length and batch as a table, the fastest first."""
    measured = [row.measurement for row in rows if row.measurement]
    case = rows[0].case
    title = f"## BERT {case.shape}, {case.length} tokens x {case.batch} rows a step"
    if measured:
        title += f"; {measured[0].device}, torch {measured[0].torch_version}"
    engines = {row.case.label: row.measurement for row in rows if row.case.variant == ENGINE}
    header = ["system", "microbatch", "tokens/s", "samples/s", "device GiB", "host GiB"]
    for label in engines:
        header += [f"{label}: speed", "memory"]
    lines = [header, ["---"] * len(header)]
    lines += [_cells(row, engines) for row in sorted(rows, key=_rank)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    legend = (
        f"Plain PyTorch is held to {device_memory} (not on the CPU). device: the most that torch "
        "reserved. The last columns: times the\nspeed and times the device memory of this row."
    )
    return f"\n{title}\n\n{table}\n\n{legend}\n"


def _rank(row: Row) -> tuple[float, str]:
    return (-row.measurement.tokens_per_second if row.measurement else 0.0, row.case.label)


def _cells(row: Row, engines: dict[str, Measurement | None]) -> list[str]:
    found = row.measurement
    if found is None:
        return [row.case.label, row.status, *["-"] * (4 + 2 * len(engines))]
    cells = [
        row.case.label,
        str(found.microbatch),
        f"{found.tokens_per_second:,.0f}",
        f"{found.samples_per_second:,.1f}",
        _gibibytes(found.reserved_bytes),
        _gibibytes(found.host_bytes),
    ]
    for engine in engines.values():
        is_other = engine is not None and row.case.variant != ENGINE
        speed = engine.tokens_per_second / found.tokens_per_second if engine and is_other else None
        memory = None
        if engine and is_other and engine.reserved_bytes and found.reserved_bytes:
            memory = engine.reserved_bytes / found.reserved_bytes
        cells += ["-" if ratio is None else f"{ratio:.2f}x" for ratio in (speed, memory)]
    return cells


def _gibibytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**30:.2f}"


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")[:LONGEST_NOTE]


# -------------------------------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="large")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256], help="rows of a step")
    parser.add_argument("--budgets", nargs="*", default=["16GiB", "2GiB"], help="of the engine")
    parser.add_argument("--device-memory", default="16GiB", help="what plain PyTorch is held to")
    parser.add_argument(
        "--variants",
        nargs="*",
        choices=(*GROUPS, *VARIANTS),
        default=["eager"],
        metavar="VARIANT",
        help=f"of plain PyTorch: {', '.join(GROUPS)}, or names: {', '.join(VARIANTS)}",
    )
    parser.add_argument("--steps", type=int, default=5, help="timed; the median counts")
    parser.add_argument("--warm-up", type=int, default=2, help="steps that are not timed")
    parser.add_argument("--time-limit", type=float, default=300, help="seconds, for each run")
    parser.add_argument("--stop-after", type=float, help="seconds; no run is started later")
    parser.add_argument("--results", type=Path, help="JSON; what is there is not run again")
    parser.add_argument("--retry", action="store_true", help="run failed rows again")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # how a run's own process is started
    options = parser.parse_args()
    if min(options.steps, options.warm_up, *options.lengths, *options.batches) < 1:
        parser.error("--steps, --warm-up, --lengths, --batches: expected numbers above 0.")
    try:
        for size in (*options.budgets, options.device_memory):
            parse_bytes(size, name="--budgets or --device-memory")
    except ValueError as error:
        parser.error(str(error))
    return options


def main() -> None:
    """Run what is not there yet, table by table."""
    options = parse_options()
    if options.case is not None:
        run_here(options.case)
        return
    began = time.perf_counter()
    rows = read_rows(options.results)
    if options.retry:
        rows = {case: row for case, row in rows.items() if row.status != FAILED}
    asked: list[Row] = []
    for length, batch in product(options.lengths, options.batches):
        cases = list(list_cases(options, length, batch))
        for case in cases:
            late = options.stop_after and time.perf_counter() - began > options.stop_after
            if case in rows or late:
                continue
            rows[case] = run_apart(case, options.time_limit)
            write_rows(options.results, rows)
            seconds = rows[case].seconds
            print(f"{length} x {batch}: {rows[case].summary} ({seconds:.0f} s)", flush=True)
        present = [rows[case] for case in cases if case in rows]
        if present:
            print(describe(present, options.device_memory), flush=True)
        asked += present
    print(json.dumps([asdict(row) for row in asked]))


if __name__ == "__main__":
    main()
