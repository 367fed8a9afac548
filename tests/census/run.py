"""Train a tiny model of every class of transformers in plain PyTorch and through the engine.

    python tests/census/run.py OUT.jsonl [KINDS] [NAMES ..] [--part I/N]
    python tests/census/run.py --table OUT.jsonl [--into docs/models.md]
    python tests/census/run.py --shares [--into docs/models.md]

KINDS are those of cases.py, comma separated ("all": every one); NAMES are model types or classes.
Each case runs in a process of its own with a time limit, and adds a line to OUT.jsonl; cases that
are there already are not run again. `--table` prints the tables of one or more such files, or
writes them between the markers of a page; `--shares` does so with what is streamed at real size.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path[:0] = [
    str(Path(__file__).resolve().parents[number]) for number in (1, 2)
]  # `census`, `l2l`
if TYPE_CHECKING:
    from census.cases import Case

LIMIT_SECONDS = 90.0
Row = dict[str, Any]


def within(case: Case) -> Row:
    """Examine a case, in this process."""
    from census.compare import examine

    begun = time.monotonic()
    try:
        found = examine(case)
    except BaseException as error:
        why = f"the census itself: {type(error).__name__}: {error}"
        found = {"plain": "runs", "whole": {"verdict": "crash", "why": why}}
    return {**found, "seconds": round(time.monotonic() - begun, 1)}


def beside(case: Case, limit: float, examine: Callable[[Case], Row] = within) -> Row:
    """Examine a case in a process of its own, for no longer than the limit."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        try:
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(json.dumps(examine(case), default=str).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.set_blocking(reading, False)
    text, end = b"", time.monotonic() + limit
    while time.monotonic() < end:
        try:
            chunk = os.read(reading, 1 << 20)
        except BlockingIOError:
            time.sleep(0.02)
            continue
        if not chunk:
            break
        text += chunk
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if text:
        return json.loads(text)
    is_late = time.monotonic() >= end
    why = f"no result in {limit:.0f} s" if is_late else f"the process died: {status}"
    return {"plain": "runs", "whole": {"verdict": "hang" if is_late else "crash", "why": why}}


def one_line(case: Case, row: Row) -> str:
    parts = [case.kind, case.name, case.variant]
    if row["plain"] != "runs":
        parts.append(f"not tested: {row['plain'][:120]}")
    for name in ("whole", "rows"):
        if name in row:
            parts.append(
                f"{name}: {row[name]['verdict']} {row[name].get('why', '')[:120]}".rstrip()
            )
    return "  ".join(part for part in parts if part)


def run(out: Path, todo: list[Case], limit: float) -> None:
    lines = out.read_text().splitlines() if out.exists() else []
    done = {(row["kind"], row["class"], row["variant"]) for row in map(json.loads, lines)}
    with out.open("a") as file:
        for case in todo:
            if case.key in done:
                continue
            row = beside(case, limit)
            names = {"kind": case.kind, "class": case.name, "variant": case.variant}
            file.write(json.dumps({**names, "model_type": case.model_type, **row}) + "\n")
            file.flush()
            print(one_line(case, row), flush=True)


def chosen(kinds: str, names: list[str], part: str) -> list[Case]:
    from census.cases import ALL_KINDS, cases

    number, parts = map(int, part.split("/"))
    words = ALL_KINDS if kinds == "all" else kinds.split(",")
    todo = [case for kind in words for case in cases(kind)]
    todo = [case for case in todo if not names or {case.name, case.model_type} & set(names)]
    return todo[number - 1 :: parts]


def set_up() -> None:
    """One thread, no network, and no proof that is remembered from earlier."""
    home = tempfile.mkdtemp(prefix="census-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    os.environ |= {"HOME": home, "OMP_NUM_THREADS": "1"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import torch

    torch.set_num_threads(1)
    for name in ("compare", "cases"):
        importlib.import_module(f"census.{name}")
    for name in ("bert", "llama"):  # their code is imported by most
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def command() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", nargs="?", type=Path, help="a line of JSON for every case")
    parser.add_argument("kinds", nargs="?", default="all")
    parser.add_argument("names", nargs="*", help="model types or classes; none: all")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every Nth case, from the Ith")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for a case")
    parser.add_argument("--table", type=Path, nargs="+", metavar="OUT.jsonl")
    parser.add_argument("--shares", action="store_true", help="what is streamed at real size")
    parser.add_argument("--into", type=Path, help="a page with markers, instead of printing")
    given = parser.parse_args()
    if given.table:
        from census.table import tables, write_into

        text = tables([json.loads(line) for one in given.table for line in one.open()])
        write_into(given.into, text) if given.into else print(text)
    elif given.shares:
        from census.shares import BEGIN, END, table_of_shares
        from census.table import write_into

        text = table_of_shares()
        write_into(given.into, text, BEGIN, END) if given.into else print(text)
    elif given.out:
        set_up()
        run(given.out, chosen(given.kinds, given.names, given.part), given.limit)
    else:
        parser.error("OUT.jsonl, --table or --shares is missing")


if __name__ == "__main__":
    command()
