"""Kill training runs at their edges: while they start, save a checkpoint, export the model.

    python reproduce/kills_at_edges.py --kills 200

A small model is trained with `l2l train` once undisturbed. Then each run is ended once, by SIGKILL,
SIGTERM or SIGINT, at a random instant of one of the three edges, and the same command is run again
to its end. That end must be the undisturbed one: weights, moments and metrics bit by bit, the same
files and no others. Besides, what was ended with SIGTERM or SIGINT must have said so in one line,
without a traceback, with the right exit status, and must have left no half-written file.

Runs that are ended while they start are processes of their own. The others are forked from a
process that has imported everything, and call the command's own function: nothing in the code that
is ended knows of this. A signal that comes before the interpreter has reached the package cannot be
handled by it; those are counted apart. Ends with status 1 if anything is not as it should be.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from killed import differences, metrics, prepare

from l2l import cli

EDGES = ("start", "save", "export")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
NEEDED = (  # by a run, imported before it is forked
    "l2l.cli.train",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.modeling_utils",
)
HALF_WRITTEN = ("*.partial", "*.old", "*.deleted", "*.replaced")
KEPT = 2  # checkpoints
LONGEST_SECONDS = 300.0


@dataclass
class Tally:
    """What came of the kills of one kind."""

    kills: int = 0
    too_early: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, status: int, *, is_early: bool, faults: Iterable[str]) -> None:
        """One more."""
        self.kills += 1
        self.too_early += is_early
        self.statuses[status] += 1
        self.faults.update(list(faults))


class Run:
    """A run of the command in another process, which may be ended."""

    def __init__(self, folder: Path, output: Path, log: Path, *, is_forked: bool) -> None:
        words = ["train", str(folder / "run.toml"), "--output", str(output)]
        self.log, self.output = log, output
        self.num_steps = int(re.search(r"steps = (\d+)", (folder / "run.toml").read_text())[1])
        log.write_bytes(b"")
        if is_forked:
            self._process = None
            self.pid = os.fork()
            if self.pid == 0:
                _be_the_command(words, log)
        else:
            with log.open("ab") as file:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "l2l", *words], stdout=file, stderr=file
                )
            self.pid = self._process.pid
        self._status: int | None = None

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self._process is not None:
            return self._process.poll()
        if self._status is None:
            pid, found = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(found) if pid else None
        return self._status

    def wait(self) -> int:
        """The exit status, once there is one."""
        began = time.monotonic()
        while self.status is None:
            if time.monotonic() - began > LONGEST_SECONDS:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.005)
        assert self.status is not None
        return self.status

    @property
    def handles_signals(self) -> bool:
        """Whether the package has taken SIGTERM in hand."""
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
            caught = next(line for line in lines if line.startswith("SigCgt"))
            return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
        return False


def _be_the_command(words: list[str], log: Path) -> None:
    """In a forked child: do what `l2l` does, and end."""
    status = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        sys.argv = ["l2l", *words]
        cli.command()
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait_for_edge(run: Run, edge: str, chance: random.Random, *, seconds: float) -> bool:
    """Wait until an instant of an edge; False if the run was over before."""
    if edge == "save":
        step = chance.choice(range(2, run.num_steps + 1, 2))
        watched = run.output / f"checkpoints/step-{step:08d}.partial"
    elif edge == "export":
        watched = run.output / "model.partial"
    else:
        watched = None
    while watched is not None and not watched.exists():
        if run.status is not None:
            return False
    instant = time.monotonic() + chance.uniform(0, seconds)
    while time.monotonic() < instant:
        if run.status is not None:
            return False
    return run.status is None


def is_right(status: int, number: int, log: str, *, is_early: bool) -> str | None:
    """What is wrong with how a process has ended; None if nothing is."""
    ended = "the trained model is in" in log
    if number == signal.SIGKILL:
        was_over = status == 0 and ended  # just before
        return None if was_over or status == -number else f"status {status}"
    if is_early:
        return None
    if "Traceback" in log:
        return "traceback"
    stopped = "stopped after step" in log or "interrupted before the first step" in log
    allowed = {128 + number} if not ended else {0, -number}
    if "stopped after step" in log and "interrupted before" not in log:
        allowed = {130} if number == signal.SIGINT else {0}
    if "nothing was written" in log:
        allowed, stopped = {128 + number}, True
    if status not in allowed:
        return f"status {status}"
    return None if stopped or ended else "no word"


def files_of(output: Path) -> set[str]:
    """All files, but of checkpoints: which of them are kept depends on where a run was stopped."""
    found = {path.relative_to(output) for path in output.rglob("*")}
    return {
        path.as_posix() for path in found if not re.match(r"checkpoints/step-\d+(/|$)", str(path))
    }


def half_written(output: Path) -> list[str]:
    return [path.name for pattern in HALF_WRITTEN for path in output.rglob(pattern)]


def judge(output: Path, expected: Path, status: int) -> list[str]:
    """What is wrong with a run that has come to its end."""
    if status != 0:
        return [f"ends with {status} when run again"]
    found = ["other bits"] if differences(output, expected) else []
    if files_of(output) != files_of(expected):
        found.append(f"other files: {sorted(files_of(output) ^ files_of(expected))}")
    if len(list((output / "checkpoints").glob("step-*"))) != KEPT:
        found.append("other checkpoints")
    steps = [one["step"] for one in metrics(output)]
    if steps != list(range(1, len(steps) + 1)):
        found.append("steps lost or twice")
    return found


def end_once(
    folder: Path, edge: str, number: signal.Signals, chance: random.Random, *, seconds: float
) -> tuple[int, bool, dict[str, str]] | None:
    """End a run and run it again: how it ended, whether too early, what was wrong; None: missed."""
    output, log, expected = folder / "run", folder / "log.txt", folder / "undisturbed"
    shutil.rmtree(output, ignore_errors=True)
    run = Run(folder, output, log, is_forked=edge != "start")
    if not wait_for_edge(run, edge, chance, seconds=seconds):
        run.wait()
        return None
    is_early = edge == "start" and not run.handles_signals
    os.kill(run.pid, number)
    status = run.wait()
    said = log.read_text()
    faults = [is_right(status, number, said, is_early=is_early)]
    if number != signal.SIGKILL and half_written(output):
        faults.append(f"left behind: {half_written(output)}")
    faults += judge(output, expected, Run(folder, output, log, is_forked=True).wait())
    text = f"{said[-1500:]}\n-- then --\n{log.read_text()[-1500:]}"
    return status, is_early, {fault: text for fault in faults if fault}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--edges", nargs="+", choices=EDGES, default=list(EDGES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/kills_at_edges"))
    options = parser.parse_args()
    folder, log = options.folder, options.folder / "log.txt"
    shutil.rmtree(folder, ignore_errors=True)
    prepare(folder, steps=options.steps)
    for name in NEEDED:
        importlib.import_module(name)
    if Run(folder, folder / "undisturbed", log, is_forked=True).wait() != 0:
        print(log.read_text()[-2000:])
        return 1
    seconds = {"start": 0.0, "save": 0.05, "export": 0.1}
    if "start" in options.edges:
        seconds["start"] = start_up_seconds(folder, log)
        print(f"from the beginning to the first step: {seconds['start']:.1f} s", flush=True)
    chance = random.Random(options.seed)
    tallies = {(edge, number): Tally() for edge in options.edges for number in SIGNALS}
    kinds, num_done = list(tallies), 0
    while num_done < options.kills:
        edge, number = kinds[num_done % len(kinds)]
        found = end_once(folder, edge, number, chance, seconds=seconds[edge])
        if found is None:  # the run was over before
            continue
        status, is_early, faults = found
        tallies[edge, number].add(status, is_early=is_early, faults=faults)
        for fault, text in faults.items():
            (folder / f"fault-{num_done}.txt").write_text(f"{edge} {number} {fault}\n{text}")
        num_done += 1
        if num_done % 20 == 0:
            show(tallies)
    show(tallies)
    wrong = sum(sum(tally.faults.values()) for tally in tallies.values())
    print(json.dumps({"kills": num_done, "faults": wrong}))
    return 1 if wrong else 0


def start_up_seconds(folder: Path, log: Path) -> float:
    """How long a process takes to its first step."""
    began, output = time.monotonic(), folder / "timed"
    run = Run(folder, output, log, is_forked=False)
    while run.status is None and not (output / "metrics.jsonl").exists():
        time.sleep(0.01)
    seconds = time.monotonic() - began
    run.wait()
    shutil.rmtree(output, ignore_errors=True)
    return seconds


def show(tallies: dict[tuple[str, signal.Signals], Tally]) -> None:
    print(f"\n{'edge':8}{'signal':9}{'kills':>6}{'too early':>11}  exit statuses, faults")
    for (edge, number), tally in tallies.items():
        statuses = ", ".join(f"{status}: {n}" for status, n in sorted(tally.statuses.items()))
        faults = "; ".join(f"{n} x {fault}" for fault, n in tally.faults.items()) or "no faults"
        print(
            f"{edge:8}{number.name:9}{tally.kills:>6}{tally.too_early:>11}  {statuses}; {faults}",
            flush=True,
        )


if __name__ == "__main__":
    raise SystemExit(main())
