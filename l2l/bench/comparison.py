"""`l2l bench step`: one workload on this engine and on other systems, in one run.

Each system runs in a process of its own (`python -m l2l.bench.workload`), one after the other and
under a time limit, so that none can spoil another: what one leaves behind is gone, what fails is a
row that says so. Here are the list of runs, the process of one run, and what is made of the
outcomes: a table, data, and the points of a plot (plot.py). The last three are functions of the
outcomes alone.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from l2l.bench import child_process
from l2l.bench.peers import PEERS, find_peer
from l2l.bench.plot import Point
from l2l.bench.workload import ENGINE, FAILED, MEASURED, Measurement, Run, Workload
from l2l.device import parse_bytes

SYSTEMS = (ENGINE, *dict.fromkeys(peer.system for peer in PEERS))
PLAIN_VARIANTS = tuple(peer.variant for peer in PEERS if peer.system == "plain")
LAUNCHED = ("fsdp2", "deepspeed")  # they expect the variables that torch's launcher sets
LONGEST_NOTE = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one run: a measurement, or a note that says why there is none."""

    run: Run
    status: str  # MEASURED, NOT_INSTALLED or FAILED
    measurement: Measurement | None = None
    note: str = ""

    @property
    def in_memory(self) -> bool:
        """Whether the system keeps everything on the device."""
        return self.run.system != ENGINE and find_peer(self.run.system, self.run.variant).in_memory

    @property
    def caveat(self) -> str:
        """Why the system does not train exactly; empty if it does."""
        if self.run.system != ENGINE:
            return find_peer(self.run.system, self.run.variant).caveat
        return "" if self.run.moments == "float32" else f"{self.run.moments} moments"

    @property
    def data(self) -> dict[str, Any]:
        """All of it, for JSON."""
        asked = {name: getattr(self.run, name) for name in ("system", "variant", "device_memory")}
        if self.run.system == ENGINE:
            asked["moments"] = self.run.moments
        said = {"caveat": self.caveat, "status": self.status, "note": self.note}
        return {**asked, **said, **(asdict(self.measurement) if self.measurement else {})}


def list_runs(
    workload: Workload,
    *,
    systems: Sequence[str],
    plain_variants: Sequence[str] = PLAIN_VARIANTS,
    device_memory: Sequence[str] = (),
    microbatch_size: int | None = None,
    moments: Literal["float32", "8bit"] = "float32",
) -> list[Run]:
    """The runs of a comparison: the engine once for every budget, all variants of the others.

    Raises:
        ValueError: an option does not fit the workload.
    """
    budgets: Sequence[str | None] = list(dict.fromkeys(device_memory)) or [None]
    runs: list[Run] = []
    for system in dict.fromkeys(systems):
        if system == ENGINE:
            runs += [
                Run(
                    workload=workload,
                    microbatch_size=microbatch_size,
                    device_memory=budget,
                    moments=moments,
                )
                for budget in budgets
            ]
            continue
        runs += [
            Run(
                workload=workload,
                system=system,
                variant=peer.variant,
                microbatch_size=microbatch_size,
            )
            for peer in PEERS
            if peer.system == system and (system != "plain" or peer.variant in plain_variants)
        ]
    return runs


# ---- one run, in its own process ----------------------------------------------------------------


def compare(
    runs: Iterable[Run], *, time_limit_seconds: float, folder: Path | None = None
) -> Iterator[Outcome]:
    """Run one after the other.

    Args:
        runs: what to run.
        time_limit_seconds: for each; a run that takes longer is ended.
        folder: for the engine's traces and for what each process printed.

    Yields:
        The outcome of each run as soon as it is there.
    """
    for run in runs:
        name = run.label.replace(" ", "-")
        if folder is not None and run.system == ENGINE:
            run = replace(run, trace=str(folder / f"{name}-trace.json"))
        output, errors, note = child_process.run(_command(run), time_limit_seconds)
        if folder is not None:
            (folder / f"{name}.log").write_text(f"{output}\n{errors}")
        yield read_outcome(run, output=output, errors=errors, note=note)


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
            if not isinstance(found, dict) or "status" not in found:
                continue
            if found["status"] == MEASURED:
                measurement = Measurement(**found["measurement"])
                return Outcome(run=run, status=MEASURED, measurement=measurement)
            return Outcome(run=run, status=found["status"], note=found["note"])
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

COLUMNS = (
    ("system", 30),
    ("tokens/s", 10),
    ("x exact peer", 14),
    ("x in memory", 13),
    ("device GiB", 12),
    ("budget", 9),
    ("host GiB", 10),
)


def describe(outcomes: Sequence[Outcome]) -> tuple[str, dict[str, Any]]:
    """The table, and the same as data."""
    exact = _fastest(one for one in outcomes if _is_exact_peer(one))
    in_memory = _fastest(one for one in outcomes if one.in_memory)
    header = "".join(
        f"{name:<{width}}" if name == "system" else f"{name:>{width}}" for name, width in COLUMNS
    )
    rows = [_row(one, exact=exact, in_memory=in_memory) for one in outcomes]
    data = {
        "workload": asdict(outcomes[0].run.workload),
        "best_exact_peer_tokens_per_second": exact,
        "fastest_in_memory_tokens_per_second": in_memory,
        "results": [one.data for one in outcomes],
    }
    legend = (
        "x exact peer: times the fastest other system that trains exactly from host memory. "
        "x in memory: times the fastest plain loop\nwith everything on the device. device: most "
        "that was taken from the driver. host: most resident memory of the process."
    )
    return "\n".join([_title(outcomes), f"{header}  exact?", *rows, legend]), data


def _row(outcome: Outcome, *, exact: float | None, in_memory: float | None) -> str:
    name = f"{outcome.run.label:<{COLUMNS[0][1]}}"
    found = outcome.measurement
    if found is None:
        note = f"{outcome.status}: {outcome.note}" if outcome.note else outcome.status
        return f"{name}{note[:LONGEST_NOTE]}"
    speed = found.tokens_per_second
    cells = [
        f"{speed:,.0f}",
        "-" if exact is None else f"{speed / exact:.2f}",
        "-" if in_memory is None else f"{speed / in_memory:.2f}",
        _gibibytes(found.device_peak_bytes),
        outcome.run.device_memory or "-",
        _gibibytes(found.host_peak_bytes),
    ]
    widths = [width for _, width in COLUMNS[1:]]
    filled = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{name}{filled}  {f'no: {outcome.caveat}' if outcome.caveat else 'yes'}"


def _title(outcomes: Sequence[Outcome]) -> str:
    workload = outcomes[0].run.workload
    words = [f"Llama shape {workload.shape}"]
    found = next((one.measurement for one in outcomes if one.measurement), None)
    if found is not None:
        words.append(f"{found.num_parameters:,} parameters")
    words.append(f"{workload.num_tokens:,} tokens a step in rows of {workload.length:,}")
    words.append(f"AdamW, clipped at {workload.clip_norm:g}" if workload.clip_norm else "AdamW")
    if found is not None:
        words.append(f"{found.device}, torch {found.torch_version}")
    return "; ".join(words)


def _is_exact_peer(outcome: Outcome) -> bool:
    return outcome.run.system != ENGINE and not outcome.in_memory and not outcome.caveat


def _fastest(outcomes: Iterable[Outcome]) -> float | None:
    return max(
        (one.measurement.tokens_per_second for one in outcomes if one.measurement), default=None
    )


def _gibibytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**30:.2f}"


# ---- the points of the plot ---------------------------------------------------------------------


def plot_points(outcomes: Iterable[Outcome]) -> list[Point]:
    """The runs that can be drawn."""
    points: list[Point] = []
    for one in outcomes:
        found, budget = one.measurement, one.run.device_memory
        nbytes = found.device_peak_bytes if found else None
        if budget is not None:
            nbytes = parse_bytes(budget, name="--device-memory")
        if found is None or not nbytes:
            continue
        kind = "in memory" if one.in_memory else "not exact" if one.caveat else "exact"
        label = one.run.label
        if one.run.system == ENGINE:
            kind, label = "engine", budget or ENGINE
        points.append(
            Point(
                label=label,
                kind=kind,
                device_bytes=nbytes,
                tokens_per_second=found.tokens_per_second,
            )
        )
    return points
