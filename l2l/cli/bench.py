"""`l2l bench`: host optimizers, steps beside other systems, the first step, the largest model."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from functools import partial

from l2l.bench import comparison, first, kernel, scale

SUBJECTS = {  # each has its HELP, its options, and `run`: a table, the same as data, the status
    "host": (kernel, "the host optimizers"),
    "step": (comparison, "training steps"),
    "first": (first, "the first step"),
    "scale": (scale, "the largest model"),
}
JSON = "print one line of JSON; what is for people goes to the standard error"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `l2l bench` takes."""
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    for name, (subject, about) in SUBJECTS.items():
        own = subjects.add_parser(name, help=about, description=subject.HELP)
        subject.add_options(own)
        own.add_argument("--json", action="store_true", help=JSON)
        own.set_defaults(parser=own)


def run(parsed: argparse.Namespace) -> int:
    """`l2l bench`; returns the exit status."""
    subject, _ = SUBJECTS[parsed.subject]
    with contextlib.redirect_stdout(sys.stderr if parsed.json else sys.stdout):
        table, found, status = subject.run(parsed, partial(print, flush=True))
        print(table)
    if parsed.json:
        print(json.dumps(found))
    return int(status)
