"""`l2l watch`: the page of a run, live while it goes on, on this machine alone."""

from __future__ import annotations

import argparse
import contextlib
import threading
from pathlib import Path

from l2l.cli.report import run_folder
from l2l.cli.run_page import document_of, prospects_of
from l2l.cli.signals import Interrupted
from l2l.page import page_of, serve
from l2l.planner import Prospects

PORT = 8265

HELP = """Serve the page of a run on 127.0.0.1, live while the run goes on. Nothing is written,
nothing outside the run folder is shown, and only this machine can ask. On another machine, bring
it here with: ssh -L 8265:127.0.0.1:8265 HOST. Ctrl-C ends it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `l2l watch` takes."""
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    words = f"default: {PORT}; 0: any that is free"
    parser.add_argument("--port", type=int, default=PORT, help=words)
    words = "also plan for other budgets, once: reads the config.json of the model that the run "
    parser.add_argument("--plans", action="store_true", help=words + "names")


def run(parsed: argparse.Namespace) -> int:
    """`l2l watch`; returns the exit status."""
    folder = run_folder(parsed.run)
    page_of(document_of(folder))  # what is missing or damaged is said here
    known: list[Prospects | str] = []
    if parsed.plans:
        look = threading.Thread(target=lambda: known.append(prospects_of(folder)), daemon=True)
        look.start()

    def say(address: str) -> None:
        print(f"{folder.root}: {address} (Ctrl-C ends it)", flush=True)

    with contextlib.suppress(Interrupted):
        serve(lambda: document_of(folder, *known), port=parsed.port, then=say)
    return 0
