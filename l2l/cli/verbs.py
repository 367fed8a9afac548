"""The verbs of the command line: a module each, imported when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial

from l2l.cli import signals

VERBS = {
    "train": "train a model, or go on with a run",
    "plan": "what an engine would do with a model",
    "report": "what came of a run",
    "watch": "a page about a run that goes on",
    "export": "the model of a checkpoint, for others",
    "bench": "measure this machine",
}


def run(arguments: Sequence[str] | None) -> int:
    """Run a verb; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="l2l",
        description="Layer-to-layer training: models that do not fit the device.",
        epilog="What is kept from run to run (measured rates, plans, proofs, compiled programs) is "
        "in ~/.cache/l2l: delete that folder, or a part of it, and it is made anew.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    add = partial(verbs.add_parser, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsers = {name: add(name, help=about) for name, about in VERBS.items()}
    name = words[0] if words else ""
    if name not in VERBS:
        parser.parse_args(words)  # shows the help, or says what is wrong
        return 2
    try:
        verb = importlib.import_module(f"l2l.cli.{name}")
    except ModuleNotFoundError as error:
        if error.name != "pydantic":  # which the extra `train` installs
            raise
        advice = "Install it with: pip install 'l2l[train]'"
        print(f"l2l {name} needs {error.name}, which is not installed. {advice}", file=sys.stderr)
        return 1
    own = parsers[name]
    own.description, own.epilog = getattr(verb, "HELP", None), getattr(verb, "EXAMPLES", None)
    own.set_defaults(parser=own)
    verb.add_options(own)
    parsed, unknown = parser.parse_known_args(words)
    if unknown:
        parsed.parser.error(_unknown(parsed.parser, unknown))
    if name == "train":
        return int(verb.run(parsed))
    try:
        signals.handle(signals.interrupt)
        status = int(verb.run(parsed))
        signals.let_end()
    except signals.Interrupted as error:
        print("interrupted", file=sys.stderr)
        return signals.status_of(error.args[0])
    except (ValueError, OSError) as error:  # what was asked for cannot be, and why
        print(error, file=sys.stderr)
        return 1 if name == "export" else 2
    return status


def _unknown(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """What to say of arguments that a verb does not take."""
    known = [option for action in parser._actions for option in action.option_strings]
    given = [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("-")]
    close = [match for word in given for match in get_close_matches(word, known, n=1, cutoff=0.75)]
    hint = f" Did you mean {' and '.join(close)}?" if close else ""
    return f"unknown: {' '.join(words)}.{hint} {parser.prog} --help lists what there is."
