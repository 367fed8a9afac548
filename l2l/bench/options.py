"""Options of a benchmark: fields of a dataclass that say how the command line asks for them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, field, fields
from typing import Any

Tell = Callable[..., None]  # is given a line, and perhaps where it goes, as `print` is
TYPES = {"int": int, "float": float}  # of values, by the first word of a field's annotation


def option(flag: str, default: Any, words: str = "", **settings: Any) -> Any:
    """A field that a flag sets; `settings` are argparse's."""
    if default is not None:
        words = f"{words} (default: {default})" if words else f"default: {default}"
    return field(default=default, metadata={"flag": flag, "help": words, **settings})


def take_options(parser: argparse.ArgumentParser, kind: Any) -> None:
    """Let a parser take the options of a dataclass."""
    for one in _options_of(kind):
        settings = {"dest": one.name, "default": one.default, **one.metadata}
        flag = settings.pop("flag")
        settings["type"] = TYPES.get(one.type.partition(" ")[0], str)
        if "choices" not in settings:
            settings.setdefault("metavar", flag.removeprefix("--").replace("-", "_").upper())
        parser.add_argument(flag, **settings)


def take_several(
    parser: argparse.ArgumentParser, flag: str, choices: Iterable[str], default: Sequence[str]
) -> None:
    """Let a parser take some of several names."""
    names, usual = list(choices), list(default)
    words = f"of {', '.join(names)} (default: {'all' if usual == names else ' '.join(usual)})"
    parser.add_argument(flag, nargs="+", choices=names, default=usual, metavar="NAME", help=words)


def read_options(kind: Any, parsed: argparse.Namespace, **others: Any) -> Any:
    """The dataclass with what was asked for; `others` are fields without an option."""
    asked = {one.name: getattr(parsed, one.name) for one in _options_of(kind)}
    return kind(**asked, **others)


def as_words(options: Any) -> list[str]:
    """Words of a command line that ask for the same."""
    asked = {one.metadata["flag"]: getattr(options, one.name) for one in _options_of(options)}
    return [str(word) for pair in asked.items() if pair[1] is not None for word in pair]


def _options_of(kind: Any) -> list[Field[Any]]:
    return [one for one in fields(kind) if one.metadata]
