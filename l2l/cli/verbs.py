"""The verbs of the command line: a module each, imported when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import metadata

from l2l.cli import signals

VERBS = {
    "train": "train a model, or go on with a run",
    "plan": "what an engine would do with a model",
    "report": "what came of a run",
    "watch": "a page about a run that goes on",
    "export": "the model of a checkpoint, for others",
    "bench": "measure this machine",
}
SHOWN = ("l2l", "torch", "transformers")  # whose versions are told


def run(arguments: Sequence[str] | None) -> int:
    """Run a verb; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="l2l",
        description="Layer-to-layer training: models that do not fit the device.",
        epilog="What is kept from run to run (measured rates, plans, proofs, compiled programs, "
        "tokens) is in ~/.cache/l2l: delete that folder, or a part of it, and it is made anew.",
    )
    parser.add_argument("--version", action="version", version=_versions())
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    add = partial(verbs.add_parser, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsers = {name: add(name, help=about) for name, about in VERBS.items()}
    name = words[0] if words else ""
    if name not in VERBS:
        parser.parse_args(words or ["--help"])  # shows the help, or says what is wrong
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
        answer = getattr(verb, "answer_to", None)
        own.exit(2, _unknown(parsed.parser, unknown, answer))
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


def _versions() -> str:
    """What is installed, for who asks or reports something."""
    found = []
    for name in SHOWN:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join([*found, f"Python {platform.python_version()}"])


def _unknown(
    parser: argparse.ArgumentParser, words: Sequence[str], answer: Callable[[str], str] | None
) -> str:
    """What to say of arguments that a verb does not take; it may know an answer to one."""
    known = [option for action in parser._actions for option in action.option_strings]
    lines = [
        f"{parser.prog}: unknown: {' '.join(words)}. {parser.prog} --help lists what there is."
    ]
    for word in (word.partition("=")[0] for word in words if word.startswith("--")):
        close = get_close_matches(word.replace("_", "-"), known, n=1, cutoff=0.75)
        hint = f" Did you mean {close[0]}?" if close else ""
        hint = (answer and answer(word.removeprefix("--").replace("-", "_"))) or hint
        lines += [f"  {word}:{hint}"] if hint else []
    return "\n".join(lines) + "\n"
