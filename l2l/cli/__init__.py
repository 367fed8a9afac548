"""The command line: each verb parses, calls one function, prints.

Importing this is quick, so that signals are in hand before what takes seconds is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from l2l.cli import signals


def command() -> NoReturn:
    """The command `l2l`: the whole process is its own."""
    signals.handle(signals.end_at_once)
    status = _run(None)
    signals.let_end()  # what was to be done is done
    sys.exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit status. Signals are handled as before when it returns."""
    with signals.handled(signals.end_at_once):
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    from l2l.cli.verbs import run

    return run(arguments)
