"""The manifest of a checkpoint: what it says, how it is written, and what it must be to be read.

A manifest may have been damaged, or changed by hand and given a new checksum. Whoever reads it can
rely on every field: `Manifest.read` refuses what is missing, of another type, or out of range.
docs/checkpoint_format.md describes the fields.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from l2l.files import TensorFileError, open_to_read

FORMAT = "l2l checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
BUFFERS = "buffers"
MAX_BYTES = 1 << 30  # of a manifest
MOST = 2**63 - 1  # of any number
FILE = re.compile(r"(buffers|(O|[LT]\d{1,9})(?:-(\d{1,9})of(\d{1,9}))?)", re.ASCII)
CHECKSUM = re.compile(r"[0-9a-f]{8}")


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message names the file."""


class OtherCheckpointError(CheckpointError):
    """A checkpoint is whole, but of another model, optimizer or precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file of tensors, as the manifest knows it."""

    nbytes: int
    checksum: int
    steps: Mapping[str, int] = field(default_factory=dict)  # parameter -> updates so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    state: Mapping[str, Any]
    """What the engine needs besides its tensors, as JSON."""
    files: Mapping[str, FileRecord]  # by name without suffix
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the caller wants back."""

    @property
    def num_shares(self) -> int:
        """How many ranks held the model together."""
        return int(self.state.get("num_shares", 1))

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder.

        Raises:
            CheckpointError: it cannot be written.
        """
        body = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "state": self.state,
            "extra": self.extra,
            "files": {
                name: {
                    "bytes": one.nbytes,
                    "checksum": f"{one.checksum:08x}",
                    "steps": _shortened(one.steps),
                }
                for name, one in self.files.items()
            },
        }
        path = folder / MANIFEST
        try:
            body = plain(body)
            text = json.dumps({**body, "checksum": checksum_of(body)}, indent=1)
            with path.open("w") as file:
                file.write(text + "\n")
        except (OSError, TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"cannot write {path}: {error}") from error

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint.

        Raises:
            CheckpointError: it is missing, damaged, not as it must be, or of a newer version.
        """
        path = folder / MANIFEST
        try:
            return cls._of(_parsed(path))
        except OSError as error:
            raise CheckpointError(
                f"cannot read {path}: {error.strerror or error}. Expected the folder of a "
                "checkpoint."
            ) from error
        except TensorFileError as error:
            raise CheckpointError(str(error)) from error
        except _OtherFileError as error:
            raise CheckpointError(f"{path} {error}") from error
        except (ValueError, RecursionError, MemoryError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise CheckpointError(f"{path} is damaged: {reason or 'it is too large'}.") from error

    @classmethod
    def _of(cls, body: Any) -> Manifest:
        """What was read, if it is all there and as it must be.

        Raises:
            ValueError: it is not, with the field.
        """
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise _OtherFileError("is not the manifest of a checkpoint of l2l.")
        if not is_number(body.get("version"), least=0) or body["version"] != VERSION:
            raise _OtherFileError(
                f"is of version {body.get('version')!r}; this l2l reads version {VERSION}. Use the "
                "l2l that wrote it, or a newer one."
            )
        checksum = body.pop("checksum", None)
        if checksum != checksum_of(body):
            raise ValueError(f"found checksum {checksum_of(body)}, expected {checksum!r}")
        _check(body, FIELDS, "")
        found = cls(
            step=body["step"],
            state=body["state"],
            files={name: _record(name, one, body["step"]) for name, one in body["files"].items()},
            extra=body["extra"],
        )
        _check(found.state, STATE, "state.")
        _check(found.state["choices"], CHOICES, "state.choices.")
        if found.state.get("layers") is not None:
            _check_layers(found.state["layers"])
        if (found.state["link"] == "float16") != (found.state["loss_scale"] is not None):
            raise ValueError("state.loss_scale must be there with float16, and only then")
        _check_shares(found)
        return found


class _OtherFileError(ValueError):
    """A file is not a manifest that can be read; the message goes on after its name."""


def plain(value: Any) -> Any:
    """A copy as it would come back from JSON.

    Raises:
        TypeError, ValueError, RecursionError: JSON cannot hold it.
    """
    return json.loads(json.dumps(value, allow_nan=False))


def checksum_of(body: Mapping[str, Any]) -> str:
    """The checksum of a manifest's other fields."""
    return f"{zlib.crc32(json.dumps(body, sort_keys=True).encode()):08x}"


def is_number(value: object, *, least: int, most: int = MOST) -> bool:
    """Whether a value of JSON is a whole number in a range."""
    return type(value) is int and least <= value <= most


def _shortened(steps: Mapping[str, int]) -> dict[str, int]:
    """Numbers of updates; those of all parameters under "" if they are equal."""
    return {"": next(iter(steps.values()))} if len(set(steps.values())) == 1 else dict(steps)


# --------------------------------------------------------------------------------------------------
# Reading


def _parsed(path: Path) -> Any:
    """A file of JSON in which every key comes once and every number is finite.

    Raises:
        OSError, TensorFileError: it cannot be read.
        ValueError, RecursionError: it is no such file.
    """
    with open_to_read(path) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES:,} bytes")
    return json.loads(
        data.decode(),
        object_pairs_hook=_without_repetition,
        parse_constant=_finite,
        parse_float=_finite,
    )


def _without_repetition(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there more than once")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"found the number {text[:40]}")
    return number


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a field must be."""

    words: str
    holds: Callable[[Any], bool]
    required: bool = True


def _count(words: str = "a whole number, not negative", *, least: int = 0, most: int = MOST) -> Any:
    return _Rule(words, lambda value: is_number(value, least=least, most=most))


def _maybe(rule: _Rule, *, required: bool = True) -> _Rule:
    return _Rule(f"null or {rule.words}", lambda v: v is None or rule.holds(v), required)


def _optional(rule: _Rule) -> _Rule:
    return _Rule(rule.words, rule.holds, required=False)


def _is_loss_scale(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"value", "growth_interval", "num_good_steps"}
        and (type(value["value"]) is float or is_number(value["value"], least=0))
        and value["value"] >= 0
        and is_number(value["growth_interval"], least=1)
        and is_number(value["num_good_steps"], least=0)
    )


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)


_TABLE = _Rule("an object", lambda value: isinstance(value, dict))
_TEXT = _Rule("a string", lambda value: isinstance(value, str))
_FLAG = _Rule("true or false", lambda value: isinstance(value, bool))
_POSITIVE = _count("a whole number, at least 1", least=1)
_NUMBER = _count()

FIELDS: Mapping[str, _Rule] = {"step": _NUMBER, "state": _TABLE, "files": _TABLE, "extra": _TABLE}
STATE: Mapping[str, _Rule] = {
    "link": _Rule(
        "'float32', 'bfloat16' or 'float16'",
        lambda value: value in ("float32", "bfloat16", "float16"),
    ),
    "optimizer": _TEXT,
    "moments": _maybe(_TEXT),
    "groups": _Rule("a list of objects", lambda value: _is_list_of(dict, value)),
    "num_shares": _optional(_POSITIVE),
    "loss_scale": _maybe(_Rule("the numbers of a loss scale", _is_loss_scale)),
    "seed": _count("a whole number of 64 bits", least=-(2**63), most=2**64 - 1),
    "choices": _TABLE,
    "layers": _maybe(_TABLE, required=False),
}
CHOICES: Mapping[str, _Rule] = {
    "microbatch_size": _maybe(_POSITIVE),
    "microbatch_tokens": _POSITIVE,
    "piece_tokens": _maybe(_POSITIVE),
    "compiled": _FLAG,
    "looked_up": _optional(_Rule("a list of strings", lambda value: _is_list_of(str, value))),
    "device_memory": _maybe(_NUMBER, required=False),
    "depth": _optional(_TEXT),
    "num_tail": _optional(_NUMBER),
    "num_device_states": _optional(_NUMBER),
    "num_shared": _optional(_NUMBER),
    "keep": _optional(
        _Rule("a number from 0 to 1", lambda v: type(v) in (int, float) and 0 <= v <= 1)
    ),
    "num_kept_cells": _optional(_NUMBER),
    "outer_state": _optional(_FLAG),
}
RECORD: Mapping[str, _Rule] = {
    "bytes": _NUMBER,
    "checksum": _Rule(
        "8 hexadecimal digits",
        lambda value: isinstance(value, str) and CHECKSUM.fullmatch(value) is not None,
    ),
    "steps": _TABLE,
}


def _check(found: Mapping[str, Any], rules: Mapping[str, _Rule], where: str) -> None:
    """Compare fields with what they must be.

    Raises:
        ValueError: with the field.
    """
    for name, rule in rules.items():
        if name not in found:
            if rule.required:
                raise ValueError(f"it has no {where}{name}")
        elif not rule.holds(found[name]):
            raise ValueError(f"{where}{name} is {_shown(found[name])}; expected {rule.words}")


def _record(name: str, found: Any, step: int) -> FileRecord:
    """What it says of a file."""
    if FILE.fullmatch(name) is None:
        raise ValueError(f"files has {name[:80]!r}, which no file of a checkpoint is called")
    if not isinstance(found, dict):
        raise ValueError(f"files.{name} is {_shown(found)}; expected an object")
    _check(found, RECORD, f"files.{name}.")
    for owner, number in found["steps"].items():
        if not is_number(number, least=0, most=step):
            raise ValueError(
                f"files.{name}.steps has {_shown(number)} for {owner[:80]!r}; expected at most the "
                f"{step} steps of the checkpoint"
            )
    return FileRecord(
        nbytes=found["bytes"], checksum=int(found["checksum"], 16), steps=found["steps"]
    )


def _check_layers(found: Mapping[str, Any]) -> None:
    """Compare what it says of layers with itself."""
    origins, frozen, given = (found.get(name) for name in ("origins", "frozen", "given"))
    if (
        not isinstance(given, list)
        or len(given) != 2
        or not is_number(given[0], least=1)
        or not _are_layers(given[1], given[0])
    ):
        raise ValueError(f"state.layers.given is {_shown(given)}; expected a number and layers")
    if not isinstance(origins, list) or not all(
        one is None or is_number(one, least=0, most=given[0] - 1) for one in origins
    ):
        raise ValueError(f"state.layers.origins is {_shown(origins)}; expected layers or null")
    if not _are_layers(frozen, len(origins)):
        raise ValueError(f"state.layers.frozen is {_shown(frozen)}; expected some of the layers")


def _are_layers(value: Any, number: int) -> bool:
    """Whether these are some of so many layers, in order, each once."""
    return (
        isinstance(value, list)
        and all(is_number(one, least=0, most=number - 1) for one in value)
        and all(one < other for one, other in itertools.pairwise(value))
    )


def _check_shares(found: Manifest) -> None:
    """Compare the shares that files are of with their number."""
    number, indices = found.num_shares, dict[str, set[int]]()
    for name in found.files:
        match = FILE.fullmatch(name)
        assert match is not None
        if name == BUFFERS:
            continue
        index, of = int(match[3] or 1), int(match[4] or 1)
        if of != number or not 1 <= index <= of or (of == 1 and match[3] is not None):
            raise ValueError(f"files has {name!r}, but state.num_shares is {number}")
        indices.setdefault(match[2], set()).add(index)
    for unit, own in indices.items():
        if len(own) != number:
            raise ValueError(f"files has {len(own)} shares of {unit}; expected {number}")
    if number > 1 and not indices:
        raise ValueError(f"state.num_shares is {number}, but there are no files")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} ..."
