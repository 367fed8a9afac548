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

from l2l.distributed import Share
from l2l.files import TensorFileError, Written, open_to_read

FORMAT = "l2l checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
BUFFERS = "buffers"
MAX_BYTES = 1 << 30  # of a manifest
MOST = 2**63 - 1  # of any number
FILE = re.compile(r"(?:buffers|(O|[LT]\d{1,9})(?:-\d{1,9}of\d{1,9})?)", re.ASCII)
CHECKSUM = re.compile(r"[0-9a-f]{8}")


class CheckpointError(ValueError):
    """A checkpoint cannot be written or read; the message names the file."""


class OtherCheckpointError(CheckpointError):
    """A checkpoint is whole, but of another model, optimizer or precision."""


@dataclass(frozen=True, slots=True)
class FileRecord(Written):
    """A file of tensors, as the manifest knows it."""

    steps: Mapping[str, int] = field(default_factory=dict)  # parameter -> updates so far


def file_name(unit: str, share: Share) -> str:
    """The name, without suffix, of the file with a share of a unit."""
    return unit if share.number == 1 else f"{unit}-{share.index + 1}of{share.number}"


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
    def shares(self) -> list[Share]:
        """The shares of units that there are, one for each rank that held the model."""
        number = int(self.state.get("num_shares", 1))
        return [Share(index=index, number=number) for index in range(number)]

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder.

        Raises:
            CheckpointError: it cannot be written.
        """
        records = {
            name: {
                "bytes": one.nbytes,
                "checksum": f"{one.checksum:08x}",
                "steps": _shortened(one.steps),
            }
            for name, one in self.files.items()
        }
        said = {"step": self.step, "state": self.state, "extra": self.extra, "files": records}
        path = folder / MANIFEST
        try:
            body = plain({"format": FORMAT, "version": VERSION, **said})
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
            body = _parsed(path)
            if not isinstance(body, dict) or body.get("format") != FORMAT:
                raise CheckpointError(f"{path} is not the manifest of a checkpoint of l2l.")
            if not is_number(body.get("version"), least=VERSION, most=VERSION):
                found = f"{path} has format version {body.get('version')!r}"
                raise CheckpointError(
                    f"{found}, but this l2l reads version {VERSION}. Use a newer one."
                )
            return cls._of(body)
        except CheckpointError:
            raise
        except TensorFileError as error:
            raise CheckpointError(f"{error}. Expected the folder of a checkpoint.") from error
        except (ValueError, RecursionError, MemoryError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise CheckpointError(f"{path} is damaged: {reason or 'it is too large'}.") from error

    @classmethod
    def _of(cls, body: dict[str, Any]) -> Manifest:
        """What was read, if it is all there and as it must be.

        Raises:
            ValueError: it is not, with the field.
        """
        checksum = body.pop("checksum", None)
        if checksum != checksum_of(body):
            raise ValueError(f"found checksum {checksum_of(body)}, expected {checksum!r}")
        _check(body, FIELDS, "")
        step, state, files = body["step"], body["state"], body["files"]
        records = {name: _record(name, one, step) for name, one in files.items()}
        _check(state, STATE, "state.")
        _check(state, LATER_STATE, "state.", required=False)
        _check(state["choices"], CHOICES, "state.choices.")
        _check(state["choices"], LATER_CHOICES, "state.choices.", required=False)
        if state.get("layers") is not None:
            _check_layers(state["layers"])
        if (state["link"] == "float16") != (state["loss_scale"] is not None):
            raise ValueError("state.loss_scale must be present with float16 and null otherwise")
        _check_shares(files, int(state.get("num_shares", 1)))
        return cls(step=step, state=state, files=records, extra=body["extra"])


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
        TensorFileError: it cannot be read.
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
        raise ValueError(f"key {twice!r} occurs more than once")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"found the number {text[:40]}")
    return number


Rule = tuple[str, Callable[[Any], bool]]
"""What a field must be, in words, and whether it is."""


def _count(least: int, words: str) -> Rule:
    return f"a whole number, {words}", lambda value: is_number(value, least=least)


def _maybe(rule: Rule) -> Rule:
    words, holds = rule
    return f"null or {words}", lambda value: value is None or holds(value)


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is kind for one in value)


def _is_loss_scale(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == LOSS_SCALE.keys()
        and all(holds(value[name]) for name, (_, holds) in LOSS_SCALE.items())
    )


_TABLE: Rule = ("an object", lambda value: isinstance(value, dict))
_TEXT: Rule = ("a string", lambda value: isinstance(value, str))
_FLAG: Rule = ("true or false", lambda value: isinstance(value, bool))
_POSITIVE, _NUMBER = _count(1, "at least 1"), _count(0, "not negative")
_LINKS = ("float32", "bfloat16", "float16")

FIELDS: Mapping[str, Rule] = {"step": _NUMBER, "state": _TABLE, "files": _TABLE, "extra": _TABLE}
LOSS_SCALE: Mapping[str, Rule] = {
    "value": (
        "a number, not negative",
        lambda value: is_number(value, least=0) or (type(value) is float and value >= 0),
    ),
    "growth_interval": _POSITIVE,
    "num_good_steps": _NUMBER,
}
STATE: Mapping[str, Rule] = {
    "link": ("'float32', 'bfloat16' or 'float16'", lambda value: value in _LINKS),
    "optimizer": _TEXT,
    "moments": _maybe(_TEXT),
    "groups": ("a list of objects", lambda value: _is_list_of(dict, value)),
    "loss_scale": _maybe(("the numbers of a loss scale", _is_loss_scale)),
    "seed": (
        "a whole number of 64 bits",
        lambda value: is_number(value, least=-(2**63), most=2**64 - 1),
    ),
    "choices": _TABLE,
}
LATER_STATE: Mapping[str, Rule] = {"num_shares": _POSITIVE, "layers": _maybe(_TABLE)}
"""What a checkpoint has as well, but for those of earlier days."""
CHOICES: Mapping[str, Rule] = {
    "microbatch_size": _maybe(_POSITIVE),
    "microbatch_tokens": _POSITIVE,
    "piece_tokens": _maybe(_POSITIVE),
    "compiled": _FLAG,
}
LATER_CHOICES: Mapping[str, Rule] = {
    "looked_up": ("a list of strings", lambda value: _is_list_of(str, value)),
    "device_memory": _maybe(_NUMBER),
    "depth": _TEXT,
    "num_tail": _NUMBER,
    "num_device_states": _NUMBER,
    "num_shared": _NUMBER,
    "keep": ("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
    "num_kept_cells": _NUMBER,
    "outer_state": _FLAG,
    "num_head_slices": _NUMBER,
    "tile_tokens": _maybe(_POSITIVE),
}
RECORD: Mapping[str, Rule] = {
    "bytes": _NUMBER,
    "checksum": (
        "8 hexadecimal digits",
        lambda value: isinstance(value, str) and CHECKSUM.fullmatch(value) is not None,
    ),
    "steps": _TABLE,
}


def _check(
    found: Mapping[str, Any], rules: Mapping[str, Rule], where: str, *, required: bool = True
) -> None:
    """Compare fields with what they must be.

    Raises:
        ValueError: with the field.
    """
    for name, (words, holds) in rules.items():
        if name not in found:
            if required:
                raise ValueError(f"it has no {where}{name}")
        elif not holds(found[name]):
            raise ValueError(f"{where}{name} is {_shown(found[name])}; expected {words}")


def _record(name: str, found: Any, step: int) -> FileRecord:
    """What it says of a file."""
    if FILE.fullmatch(name) is None:
        raise ValueError(f"files contains {name[:80]!r}, not a valid checkpoint file name")
    _check({name: found}, {name: _TABLE}, "files.")
    _check(found, RECORD, f"files.{name}.")
    rule = (f"at most the {step} steps", lambda value: is_number(value, least=0, most=step))
    _check(found["steps"], dict.fromkeys(found["steps"], rule), f"files.{name}.steps.")
    return FileRecord(found["bytes"], int(found["checksum"], 16), found["steps"])


def _check_layers(found: Mapping[str, Any]) -> None:
    """Compare what it says of layers with itself."""

    def is_given(value: Any) -> bool:
        pair = isinstance(value, list) and len(value) == 2
        return pair and is_number(value[0], least=1) and _are_layers(value[1], value[0])

    def are_origins(value: Any) -> bool:
        return isinstance(value, list) and all(
            one is None or is_number(one, least=0, most=found["given"][0] - 1) for one in value
        )

    rules: dict[str, Rule] = {
        "given": ("a number and layers", is_given),
        "origins": ("layers or null", are_origins),
        "frozen": ("some of the layers", lambda value: _are_layers(value, len(found["origins"]))),
    }
    _check(found, rules, "state.layers.")


def _are_layers(value: Any, number: int) -> bool:
    """Whether these are some of so many layers, in order, each once."""
    return (
        isinstance(value, list)
        and all(is_number(one, least=0, most=number - 1) for one in value)
        and all(one < other for one, other in itertools.pairwise(value))
    )


def _check_shares(files: Mapping[str, Any], number: int) -> None:
    """Compare the shares that files are of with their number."""
    found: dict[str, list[str]] = {}  # by unit
    for name in files:
        match = FILE.fullmatch(name)
        if match is not None and name != BUFFERS:
            found.setdefault(match[1], []).append(name)
    for unit, names in found.items():
        # No more than there are files: the number may be anything.
        shares = [Share(index=index, number=number) for index in range(min(number, len(names)))]
        strange = sorted(set(names) - {file_name(unit, share) for share in shares})
        if strange or len(names) != number:
            shown = strange[0] if strange else names[0]
            raise ValueError(f"files has {shown!r}, but state.num_shares is {number}")
    if number > 1 and not found:
        raise ValueError(f"state.num_shares is {number}, but there are no files")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} ..."
