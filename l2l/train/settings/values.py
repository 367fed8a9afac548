"""One setting: what it is for, which values it may have, and errors that say so.

A field of a section is annotated with all that is known of it:

    rows: Annotated[int, About("Rows of a step.", least=1)] = 8

and `keys_of` makes a `Key` of it, which reads its value from TOML or from the command line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any


class SettingsError(ValueError):
    """A setting that cannot be; the message says where it stands and what may stand there."""


@dataclass(frozen=True, slots=True)
class About:
    """What is known of a setting, beside its type and its default."""

    words: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    changes_result: bool = True  # whether a run with another value ends with other weights

    def allows(self, value: Any) -> bool:
        """Whether a value of the right type is one of those that may be."""
        if self.choices:
            return value in self.choices
        numbers = value if isinstance(value, tuple) else (value,)
        return all(
            math.isfinite(number)
            and (self.least is None or number >= self.least)
            and (self.above is None or number > self.above)
            and (self.most is None or number <= self.most)
            for number in numbers
            if isinstance(number, int | float)
        )

    @property
    def bounds(self) -> str:
        """The bounds in words."""
        named = (("at least", self.least), ("above", self.above), ("at most", self.most))
        found = [f"{word} {number:g}" for word, number in named if number is not None]
        return f", {' and '.join(found)}" if found else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A setting of a section."""

    name: str
    kinds: tuple[Any, ...]  # the types that it may have, None left out
    default: Any  # MISSING: it must be given
    about: About

    def parse(self, value: Any, *, where: str) -> Any:
        """A value of a TOML file as its field wants it.

        Raises:
            SettingsError: it is of another type, or out of range.
        """
        for kind in self.kinds:
            with contextlib.suppress(TypeError):
                found = _as(value, kind)
                if self.about.allows(found):
                    return found
        raise SettingsError(
            f"{where} = {shown(value)}: expected {self.expected}."
            f"{did_you_mean(str(value), self.about.choices)} {self.name}: {self.about.words}"
        )

    def parse_text(self, value: str | bool | list[str], *, where: str) -> Any:  # noqa: FBT001 (a flag)
        """A value of the command line as its field wants it.

        Raises:
            SettingsError: it is of another type, or out of range.
        """
        number: Any = value
        if isinstance(value, str) and {int, float} & set(self.kinds):
            with contextlib.suppress(ValueError):
                number = float(value)
                number = int(value)
        return self.parse(number, where=where)

    @property
    def expected(self) -> str:
        """What may stand there, in words."""
        if self.about.choices:
            return f"one of {', '.join(map(shown, self.about.choices))}"
        return " or ".join(KINDS[kind] for kind in self.kinds) + self.about.bounds

    @property
    def is_switch(self) -> bool:
        """Whether it is true or false."""
        return bool in self.kinds

    @property
    def words(self) -> str:
        """What it is for, and its default if that is a value."""
        said = self.about.words
        if any(self.default is one for one in (MISSING, None, False)) or "Default:" in said:
            return said
        return f"{said} Default: {plain(self.default)}."


KINDS = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Path: "a path in quotes",
    tuple[float, float]: "two numbers in brackets",
    tuple[str, ...]: "a text, or several in brackets",
}


def keys_of(section: type[Any]) -> dict[str, Key]:
    """The settings of a section, by name."""
    hints = typing.get_type_hints(section, include_extras=True)
    found = {}
    for one in dataclasses.fields(section):
        annotated, about = typing.get_args(hints[one.name])
        kinds = (annotated,)
        if isinstance(annotated, types.UnionType):
            kinds = tuple(k for k in typing.get_args(annotated) if k is not types.NoneType)
        found[one.name] = Key(name=one.name, kinds=kinds, default=one.default, about=about)
    return found


def _as(value: Any, kind: Any) -> Any:
    """A value as one of the types of fields.

    Raises:
        TypeError: it is not.
    """
    if kind == tuple[str, ...]:
        parts = [value] if isinstance(value, str) else value
        if not isinstance(parts, list) or not parts:
            raise TypeError
        return tuple(_as(part, str) for part in parts)
    if kind == tuple[float, float]:
        if not isinstance(value, list) or len(value) != 2:
            raise TypeError
        return tuple(_as(part, float) for part in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str) and value:
        return Path(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError
    return value


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence with the name that is nearest; empty if none is near."""
    listed = list(known)
    near = [
        *difflib.get_close_matches(word, listed, n=1),
        *difflib.get_close_matches(word.replace("-", "_"), listed, n=1),
    ]
    return f" Did you mean {near[0]}?" if near else ""


def shown(value: Any) -> str:
    """A value as a TOML file has it."""
    if value is None:
        return "not set"
    try:
        return to_toml(plain(value))
    except TypeError:
        return str(value)


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def to_toml(value: Any) -> str:
    """A value of JSON as TOML has it."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
