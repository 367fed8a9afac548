"""Records of data files, one after the other, each with the place it came from.

What is read here, a line at a time, so that files may be larger than memory:

| file | a record is |
|---|---|
| `.txt`, `.txt.gz` | a document, in column `text`: up to a blank line; or a line; or the file |
| `.jsonl`, `.jsonl.gz` | the object in a line; blank lines are passed over |

A folder stands for the files in it, in the order of their names. Everything else is left to the
`datasets` library, if it is installed: `.parquet`, `.csv`, `.tsv`, `.json`, `.arrow`, and names of
the Hugging Face Hub: `owner/name`, `owner/name:split`, `owner/name@configuration:split` (the split
is `train` if none is named).

Every error names the file and the line.
"""

from __future__ import annotations

import difflib
import gzip
import importlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

DocumentsEnd = Literal["blank lines", "line", "file"]
DOCUMENTS = get_args(DocumentsEnd)
HUB_NAME = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@([\w.-]+))?(?::(.+))?")
LIBRARY_READS = {  # suffix -> what `datasets` calls it, and its settings
    ".parquet": ("parquet", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".json": ("json", {}),
    ".arrow": ("arrow", {}),
}
WE_READ = (".txt", ".jsonl")
SHOWN = 60  # characters of a value in an error
LISTED = 12
LONE = re.compile(r"\\u[dD][89a-fA-F]")  # what may be the half of a character


class DataError(ValueError):
    """The data are not as expected; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record and where it was found."""

    values: Mapping[str, Any]
    source: str
    line: int
    unit: str = "line"  # what `line` counts

    @property
    def place(self) -> str:
        """For errors: `train.jsonl, line 3`."""
        return f"{self.source}, {self.unit} {self.line}"


def read_records(
    sources: str | Path | Sequence[str | Path], *, documents: str = "blank lines"
) -> Iterator[Record]:
    """Records of files, folders of files, or datasets of the Hub, in order.

    That all of them exist and can be read is checked at once, before the first record is asked for.

    Args:
        sources: one or several.
        documents: what parts the documents of a `.txt` file: "blank lines" (and lines of blanks),
            "line" (each is a document) or "file" (all of it is one).

    Raises:
        DataError: a source is not there or cannot be read; also while reading.
        ValueError: `documents` is not known.
    """
    if documents not in DOCUMENTS:
        raise ValueError(
            f"documents={documents!r} is not known. Expected one of {', '.join(DOCUMENTS)}."
            f"{did_you_mean(documents, DOCUMENTS)}"
        )
    listed = [sources] if isinstance(sources, str | Path) else list(sources)
    if not listed:
        raise DataError("no data were named. Expected a file, a folder, or several.")
    readers = [reader for source in listed for reader in _readers(source, documents)]
    return (record for reader in readers for record in reader())


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence for an error about an unknown name; empty if nothing is like it."""
    names = list(known)
    close = (difflib.get_close_matches(one, names, n=1) for one in (word, word.replace("-", "_")))
    return next((f" Did you mean {one[0]}?" for one in close if one), "")


def shown(value: Any) -> str:
    """A value in an error: its beginning."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def listed(values: Sequence[Any]) -> str:
    """Values in an error: the first of them."""
    texts = [repr(value) for value in values[:LISTED]]
    return ", ".join([*texts, "..."] if len(values) > LISTED else texts) or "none"


# --------------------------------------------------------------------------------------------------
# What a source stands for

Reader = Callable[[], Iterator[Record]]


def _readers(source: str | Path, documents: str) -> list[Reader]:
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.is_file() and _kind(one))
        if not files:
            others = sorted(one.name for one in path.iterdir())[:5]
            raise DataError(
                f"{path} has no data files; found {', '.join(others) or 'nothing'}. Expected files "
                f"that end in {', '.join((*WE_READ, *LIBRARY_READS))}, or in these and .gz."
            )
        return [_reader(one, documents) for one in files]
    if path.is_file():
        return [_reader(path, documents)]
    named = HUB_NAME.fullmatch(str(source))
    if named is None or _kind(path):
        near = did_you_mean(path.name, [one.name for one in _beside(path)])
        raise DataError(f"{source} is not there.{near}")
    library = _datasets(f"{source} is no file or folder here. A dataset of the Hub")
    name, configuration, split = named.groups()
    return [
        lambda: _of_library(
            str(source),
            lambda: library.load_dataset(
                name, configuration, split=split or "train", streaming=True
            ),
        )
    ]


def _reader(path: Path, documents: str) -> Reader:
    kind = _kind(path)
    if kind == ".jsonl":
        return lambda: _objects(path)
    if kind == ".txt":
        return lambda: _documents(path, documents)
    if kind is None:
        raise DataError(
            f"{path}: files like this are not known. Expected a name that ends in "
            f"{', '.join((*WE_READ, *LIBRARY_READS))}, or in one of these and .gz."
        )
    library = _datasets(f"{path}: a {kind} file")
    builder, settings = LIBRARY_READS[kind]
    return lambda: _of_library(
        str(path),
        lambda: library.load_dataset(
            builder, data_files=str(path), split="train", streaming=True, **settings
        ),
    )


def _kind(path: Path) -> str | None:
    """The suffix that says how a file is read; None if it is not known."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    kind = suffixes[-1] if suffixes else ""
    return kind if kind in WE_READ or kind in LIBRARY_READS else None


def _beside(path: Path) -> list[Path]:
    return list(path.parent.iterdir()) if path.parent.is_dir() else []


def _datasets(what: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"{what} is read by the datasets library, which cannot be imported ({error}). Install "
            "it with: pip install datasets. Files that end in .txt, .jsonl, .txt.gz or .jsonl.gz "
            "need nothing."
        ) from error


# --------------------------------------------------------------------------------------------------
# Reading


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without what ends them.

    Raises:
        DataError: the file cannot be read, is not UTF-8, or has no lines.
    """
    number = 0
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, line {number}: is not UTF-8: found byte 0x{error.object[error.start]:02x} at "
            f"position {error.start + 1}. Convert the file, as with: iconv -f latin1 -t utf-8"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}, after line {number}: cannot be read: {reason}") from error
    if number == 0:
        raise DataError(f"{path}: is empty. Expected at least one record.")


def _objects(path: Path) -> Iterator[Record]:
    found = False
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if LONE.search(line):
                json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            lone = error.object[error.start]
            raise DataError(
                f"{path}, line {number}: has the half of a character, \\u{ord(lone):04x}, in "
                f"{shown(line)}. Expected whole characters: remove it."
            ) from error
        except (ValueError, RecursionError) as error:
            where = f" at position {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            reason = getattr(error, "msg", "nested too deeply")
            if not isinstance(error, json.JSONDecodeError | RecursionError):
                reason = str(error)  # a number that is too long
            raise DataError(
                f"{path}, line {number}: is not JSON: {reason}{where} of {shown(line)}. Expected "
                "one whole object a line."
            ) from error
        if not isinstance(value, dict):
            raise DataError(
                f"{path}, line {number}: found {shown(line)}. Expected an object such as "
                '{"text": "..."}.'
            )
        found = True
        yield Record(value, str(path), number)
    if not found:
        raise DataError(f"{path}: has blank lines only. Expected at least one record.")


def _documents(path: Path, documents: str) -> Iterator[Record]:
    found = False
    held: list[str] = []
    first = 1
    for number, line in _lines(path):
        blank = not line.strip()
        if documents == "line" or (documents == "blank lines" and blank):
            if held:
                yield Record({"text": "\n".join(held)}, str(path), first)
            held = []
        if blank and (not held or documents == "line"):
            continue
        if not held:
            first, found = number, True
        held.append(line)
    if not found:
        raise DataError(f"{path}: has blank lines only. Expected at least one document.")
    if held:
        yield Record({"text": "\n".join(held)}, str(path), first)


def _of_library(source: str, load: Callable[[], Iterable[Mapping[str, Any]]]) -> Iterator[Record]:
    number = 0
    try:
        for number, values in enumerate(load(), 1):
            yield Record(values, source, number, "row")
    except Exception as error:  # whatever the library raises, for a file or a name of the user's
        raise DataError(
            f"{source}, after row {number}: the datasets library cannot read it: "
            f"{type(error).__name__}: {error}"
        ) from error
    if number == 0:
        raise DataError(f"{source}: is empty. Expected at least one record.")
