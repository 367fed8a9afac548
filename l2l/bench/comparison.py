"""`l2l bench step`: one workload on this engine and on other systems, in one run.

Each system runs in a process of its own (`python -m l2l.bench.workload`), one after the other and
under a time limit, so that none can spoil another: what one leaves behind is gone, what fails is a
row that says so. Here are the list of runs, the process of one run, and what is made of the
outcomes: a table, data, and the points of a plot (plot.py). The last three are functions of the
outcomes alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from l2l.bench import child_process
from l2l.bench.options import Tell, read_options, take_options, take_several
from l2l.bench.peers import PEERS, PLAIN_VARIANTS
from l2l.bench.plot import PlotError, Point, draw
from l2l.bench.workload import ENGINE, FAILED, PLAIN, Measurement, Run, Workload
from l2l.device import parse_bytes
from l2l.planner import Bounds

HELP = """Train one model for a few steps with this engine and, in the same run, with other
systems: plain PyTorch with everything on the device, FSDP2, DeepSpeed and RoundPipe, the last two
where they are installed. Each runs in a process of its own. Prints a table.
Ends with status 1 if a run failed."""

SYSTEMS = (ENGINE, *dict.fromkeys(system for system, _ in PEERS))
LAUNCHED = ("fsdp2", "deepspeed")  # they expect the variables that torch's launcher sets
LONGEST_NOTE = 160


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `l2l bench step` takes."""
    take_options(parser, Workload)
    take_options(parser, Run)
    words = "budgets of the engine, such as 4GiB 16GiB: a run for each (default: its own)"
    parser.add_argument("--device-memory", nargs="+", default=[], metavar="SIZE", help=words)
    take_several(parser, "--systems", SYSTEMS, [ENGINE, PLAIN])
    take_several(parser, "--plain-variants", PLAIN_VARIANTS, PLAIN_VARIANTS)
    words = "for results.json, speed.svg, the engine's traces and what each process printed"
    parser.add_argument("--folder", type=Path, help=words)
    words = "for each system (default: 600)"
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS", help=words)


def run(parsed: argparse.Namespace, tell: Tell) -> tuple[str, Any, int]:
    """`l2l bench step`.

    Raises:
        ValueError: an option does not fit the workload.
    """
    parsed.clip_norm = parsed.clip_norm or None
    asked = read_options(Run, parsed, workload=read_options(Workload, parsed))
    budgets, variants = parsed.device_memory, parsed.plain_variants
    runs = list_runs(asked, parsed.systems, plain_variants=variants, device_memory=budgets)
    aside = partial(tell, file=sys.stderr)
    aside(f"{len(runs)} runs, the first: {runs[0].label}")
    table, found = compare(runs, parsed.time_limit, aside, folder=parsed.folder)
    return table, found, int(any(one["status"] == FAILED for one in found["results"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one run: a measurement, or a note that says why there is none."""

    run: Run
    status: str  # MEASURED, NOT_INSTALLED or FAILED
    measurement: Measurement | None = None
    note: str = ""

    @property
    def kind(self) -> str:
        """What the system is to the engine: of the plot's KINDS."""
        if self.run.system in (ENGINE, PLAIN):
            return "engine" if self.run.system == ENGINE else "in memory"
        return "not exact" if self.caveat else "exact"

    @property
    def caveat(self) -> str:
        """Why the system does not train exactly; empty if it does."""
        if self.run.system != ENGINE:
            return PEERS[self.run.system, self.run.variant].caveat
        return "" if self.run.moments == "float32" else f"{self.run.moments} moments"

    @property
    def data(self) -> dict[str, Any]:
        """All of it, for JSON."""
        asked = {name: getattr(self.run, name) for name in ("system", "variant", "device_memory")}
        if self.run.system == ENGINE:
            asked["moments"] = self.run.moments
        said = {"caveat": self.caveat, "status": self.status, "note": self.note}
        return {**asked, **said, **(self.measurement or {})}


def list_runs(
    run: Run,
    systems: Iterable[str],
    *,
    plain_variants: Sequence[str] = PLAIN_VARIANTS,
    device_memory: Iterable[str] = (),
) -> list[Run]:
    """The runs of a comparison: `run` once for every budget, all variants of other systems.

    Raises:
        ValueError: an option does not fit the workload.
    """
    runs: list[Run] = []
    for system in dict.fromkeys(systems):
        if system == ENGINE:
            budgets: list[str | None] = [*dict.fromkeys(device_memory)]
            runs += [replace(run, device_memory=budget) for budget in budgets or [None]]
        runs += [
            replace(run, system=system, variant=variant)
            for name, variant in PEERS
            if name == system and (system != PLAIN or variant in plain_variants)
        ]
    return runs


# ---- one run, in its own process ----------------------------------------------------------------


def compare(
    runs: Iterable[Run], time_limit_seconds: float, tell: Tell, *, folder: Path | None = None
) -> tuple[str, dict[str, Any]]:
    """Run one after the other; returns a table, and the same as data.

    Args:
        runs: what to run.
        time_limit_seconds: for each; a run that takes longer is ended.
        tell: is given a line for each run.
        folder: for results.json, speed.svg, the engine's traces and what each process printed.
    """
    outcomes: list[Outcome] = []
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        name = run.label.replace(" ", "-")
        if folder is not None and run.system == ENGINE:
            run = replace(run, trace=str(folder / f"{name}-trace.json"))
        output, errors, note = child_process.run(_command(run), time_limit_seconds)
        outcome = read_outcome(run, output=output, errors=errors, note=note)
        outcomes.append(outcome)
        found = outcome.measurement
        shown = f"{found['tokens_per_second']:,.0f} tokens/s" if found else outcome.status
        tell(f"{run.label}: {shown}")
        table, data = describe(outcomes)
        if folder is not None:  # after each, so that nothing is lost if this is stopped
            (folder / f"{name}.log").write_text(f"{output}\n{errors}")
            (folder / "results.json").write_text(json.dumps(data, indent=1))
            try:
                plot = draw(plot_points(outcomes), title=table.splitlines()[0])
                (folder / "speed.svg").write_text(plot)
            except PlotError as error:
                tell(f"no speed.svg: {error}")
    return table, data


def read_outcome(run: Run, *, output: str, errors: str, note: str) -> Outcome:
    """What came of a run whose process has ended.

    Args:
        run: what was run.
        output: what the process printed; among it the line of JSON, which other systems' own words
            may follow.
        errors: what it printed to the error stream.
        note: how it ended, where that alone is why there is no line.
    """
    for line in reversed(output.splitlines()):
        with contextlib.suppress(json.JSONDecodeError):
            found = json.loads(line)
            if isinstance(found, dict) and "status" in found:
                return Outcome(run=run, **found)
    last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
    return Outcome(run=run, status=FAILED, note=f"{note}: {last}" if last else note)


def _command(run: Run) -> list[str]:
    run = replace(run, started_at=time.time())
    command = [sys.executable, "-m", "l2l.bench.workload", run.to_json()]
    if run.system not in LAUNCHED:
        return command
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port}
    variables |= {"MASTER_ADDR": "127.0.0.1"}
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *command]


# ---- the table ----------------------------------------------------------------------------------

COLUMNS = {  # and how wide they are; the names of systems come before them
    "tokens/s": 10,
    "x exact peer": 14,
    "x in memory": 13,
    "device GiB": 12,
    "budget": 9,
    "host GiB": 10,
    "of bound": 15,
}
LEGEND = (
    "x exact peer: times the fastest other system that trains exactly from host memory. "
    "x in memory: times the fastest plain loop\nwith everything on the device. device: most "
    "that was taken from the driver. host: most resident memory of the process. of bound: "
    "the lane\nthat binds, and what share of its measured rate it reaches."
)


def describe(outcomes: Sequence[Outcome]) -> tuple[str, dict[str, Any]]:
    """The table, and the same as data."""
    exact, in_memory = (_fastest(outcomes, kind) for kind in ("exact", "in memory"))
    rows = [_row(one, exact=exact, in_memory=in_memory) for one in outcomes]
    data = {
        "workload": asdict(outcomes[0].run.workload),
        "best_exact_peer_tokens_per_second": exact,
        "fastest_in_memory_tokens_per_second": in_memory,
        "results": [one.data for one in outcomes],
    }
    lines = [_title(outcomes), _cells("system", list(COLUMNS), "exact?"), *rows, LEGEND]
    return "\n".join(lines), data


def _cells(name: str, cells: Sequence[str], last: str) -> str:
    filled = (f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True))
    return f"{name:<30}{''.join(filled)}  {last}"


def _row(outcome: Outcome, *, exact: float | None, in_memory: float | None) -> str:
    name, found = outcome.run.label, outcome.measurement
    if found is None:
        note = f"{outcome.status}: {outcome.note}" if outcome.note else outcome.status
        return f"{name:<30}{note[:LONGEST_NOTE]}"
    speed = found["tokens_per_second"]
    cells = [
        f"{speed:,.0f}",
        *("-" if best is None else f"{speed / best:.2f}" for best in (exact, in_memory)),
        _gibibytes(found["device_peak_bytes"]),
        outcome.run.device_memory or "-",
        _gibibytes(found["host_peak_bytes"]),
        _of_bound(found),
    ]
    return _cells(name, cells, f"no: {outcome.caveat}" if outcome.caveat else "yes")


def _title(outcomes: Sequence[Outcome]) -> str:
    workload = outcomes[0].run.workload
    found = next((one.measurement for one in outcomes if one.measurement), None)
    words = [
        f"Llama shape {workload.shape}",
        f"{found['num_parameters']:,} parameters" if found else "",
        f"{workload.num_tokens:,} tokens a step in rows of {workload.length:,}",
        f"AdamW, clipped at {workload.clip_norm:g}" if workload.clip_norm else "AdamW",
        f"{found['device']}, torch {found['torch_version']}" if found else "",
    ]
    return "; ".join(word for word in words if word)


def _fastest(outcomes: Iterable[Outcome], kind: str) -> float | None:
    found = [one.measurement for one in outcomes if one.kind == kind and one.measurement]
    return max((one["tokens_per_second"] for one in found), default=None)


def _of_bound(found: Measurement) -> str:
    """The lane that binds the engine, and what share of its measured rate it has reached."""
    if not found.get("bounds"):
        return "-"
    bounds = Bounds(**found["bounds"])
    return f"{bounds.lane} {bounds.share(found['step_seconds']):.0%}"


def _gibibytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**30:.2f}"


# ---- the points of the plot ---------------------------------------------------------------------


def plot_points(outcomes: Iterable[Outcome]) -> list[Point]:
    """The runs that can be drawn."""
    points: list[Point] = []
    for one in outcomes:
        found, budget = one.measurement or {}, one.run.device_memory
        nbytes = found.get("device_peak_bytes")
        if budget is not None:
            nbytes = parse_bytes(budget, name="--device-memory")
        label = budget or ENGINE if one.kind == "engine" else one.run.label
        if found and nbytes:
            points.append(Point(label, one.kind, (nbytes, found["tokens_per_second"])))
    return points
