"""Records of data files, one after the other, each with the place it came from.

What is read here, but for `.json` a line at a time, so that files may be larger than memory:

| file, also with `.gz` | a record is |
|---|---|
| `.txt` | a document, in column `text`: up to a blank line; or a line; or the file |
| `.jsonl` | the object in a line; blank lines are passed over |
| `.csv`, `.tsv` | a row; the first one has the names of the columns; what is empty is not there |
| `.json` | an object of the list that the file is, or has as its only list; or as `.jsonl` |

A folder stands for the files in it, in the order of their names. Everything else is left to the
`datasets` library, if it is installed: `.parquet`, `.arrow`, and names of the Hugging Face Hub:
`owner/name`, `owner/name:split`, `owner/name@configuration:split` (the split is `train` if none is
named).

Every error names the file and the line.
"""

from __future__ import annotations

import csv
import difflib
import gzip
import importlib
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

DocumentsEnd = Literal["blank lines", "line", "file"]
HUB_NAME = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@([\w.-]+))?(?::(.+))?")
SUFFIXES = (".txt", ".jsonl", ".parquet", ".csv", ".tsv", ".json", ".arrow")
EXPECTED = f"Expected a file name ending in {', '.join(SUFFIXES)}, optionally followed by .gz."
SHOWN = 60  # characters of a value in an error
LISTED = 12
LONE = re.compile(r"\\u[dD][89a-fA-F]")  # what may be the half of a character


class DataError(ValueError):
    """The data are not as expected; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record and where it was found."""

    values: Mapping[str, Any]
    place: str  # for errors: `train.jsonl, line 3`

    def error(self, what: str) -> DataError:
        """What is wrong with it, and its place."""
        return DataError(f"{self.place}: {what}")

    def value(self, column: str) -> Any:
        """What is in a column.

        Raises:
            DataError: there is no such column.
        """
        if column not in self.values:
            near = did_you_mean(column, self.values)
            raise self.error(f"there is no column {column!r}. Found {listed(self.values)}.{near}")
        return self.values[column]


def read_records(
    sources: str | Path | Sequence[str | Path], *, documents: DocumentsEnd = "blank lines"
) -> Iterator[Record]:
    """Records of files, folders of files, or datasets of the Hub, in order.

    That all of them exist and can be read is checked at once, before the first record is asked for.

    Args:
        sources: one or several.
        documents: what parts the documents of a `.txt` file: "blank lines" (and lines of blanks),
            "line" (each is a document) or "file" (all of it is one).

    Raises:
        DataError: a source is not there or cannot be read; also while reading.
    """
    named = [sources] if isinstance(sources, str | Path) else list(sources)
    if not named:
        raise DataError("no data were named. Expected a file, a folder, or several.")
    files = [file for source in named for file in _files(source, documents)]
    return (record for name, records in files for record in _filled(name, records))


def local_files(sources: Sequence[str]) -> list[Path] | None:
    """The files that sources stand for, in order; None: some are read by a name of the Hub."""
    found: list[Path] = []
    for path in (Path(source).expanduser() for source in sources):
        if path.is_dir():
            found += [one for one in sorted(path.iterdir()) if one.is_file() and _kind(one)]
        elif path.is_file():
            found.append(path)
        else:
            return None
    return found


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence for an error about an unknown name; empty if nothing is like it."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""


def shown(value: Any) -> str:
    """A value in an error: its beginning."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def listed(values: Iterable[Any]) -> str:
    """Values in an error: the first of them."""
    texts = [repr(value) for value in values]
    return ", ".join([*texts[:LISTED], "..."] if len(texts) > LISTED else texts) or "none"


# --------------------------------------------------------------------------------------------------
# What a source stands for

File = tuple[str, Iterator[Record]]  # its name, and what is in it, not yet opened


def _files(source: str | Path, documents: DocumentsEnd) -> list[File]:
    path = Path(source).expanduser()
    if path.is_file():
        return [_file(path, documents)]
    if path.is_dir():
        there = sorted(path.iterdir())
        files = [_file(one, documents) for one in there if one.is_file() and _kind(one)]
        if not files:
            others = ", ".join(one.name for one in there[:5]) or "nothing"
            raise DataError(f"{path} has no data files; found {others}. {EXPECTED}")
        return files
    named = HUB_NAME.fullmatch(str(source))
    if named is None or _kind(path):
        near = did_you_mean(path.name, [one.name for one in path.parent.glob("*")])
        raise DataError(f"{source} is not there.{near}")
    name, configuration, split = named.groups()
    what = f"{source} is no file or folder here. A dataset of the Hub"
    return [_left_to_library(str(source), what, name, configuration, split=split or "train")]


def _file(path: Path, documents: DocumentsEnd) -> File:
    kind = _kind(path)
    if kind is None:
        raise DataError(f"{path}: unsupported file type. {EXPECTED}")
    if kind == ".txt":
        return str(path), _documents(path, documents)
    if kind in READ_HERE:
        return str(path), READ_HERE[kind](path)
    what = f"{path}: a {kind} file"
    return _left_to_library(str(path), what, kind[1:], split="train", data_files=str(path))


def _kind(path: Path) -> str | None:
    """The suffix that says how a file is read; None if it is not known."""
    plain = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return plain.suffix.lower() if plain.suffix.lower() in SUFFIXES else None


def _left_to_library(source: str, what: str, *names: str | None, **settings: str) -> File:
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(
            f"{what} is read by the datasets library, which cannot be imported ({error}). Install "
            "it with: pip install datasets. Files that end in .txt, .jsonl, .json, .csv or .tsv, "
            "also with .gz, need nothing."
        ) from error
    load = partial(library.load_dataset, *names, streaming=True, **settings)
    return source, _rows(source, load)


# --------------------------------------------------------------------------------------------------
# Reading


def _filled(name: str, records: Iterator[Record]) -> Iterator[Record]:
    """The same records, of which there must be one."""
    first = next(records, None)
    if first is None:
        raise DataError(f"{name}: is empty, or has blank lines only. Expected a record or more.")
    yield first
    yield from records


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without what ends them.

    Raises:
        DataError: the file cannot be read, or is not UTF-8.
    """
    number = 0
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1:
                    _refuse_utf_16(path, line)
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, line {number}: is not UTF-8: found byte 0x{error.object[error.start]:02x} at "
            f"position {error.start + 1}. Convert the file, as with: iconv -f latin1 -t utf-8"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}, after line {number}: cannot be read: {reason}") from error


def _refuse_utf_16(path: Path, beginning: bytes) -> None:
    """Text of 16 bits a character, as Windows writes it.

    Raises:
        DataError: a file begins as such a text does.
    """
    head = beginning[:64]
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or head.count(0) > len(head) // 4:
        raise DataError(
            f"{path}: is UTF-16, expected UTF-8. Convert the file: iconv -f utf-16 -t utf-8 "
            f"'{path.name}' > 'utf8-{path.name}'"
        )


def _objects(path: Path) -> Iterator[Record]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if LONE.search(line):
                json.dumps(value, ensure_ascii=False).encode()
            problem = None if isinstance(value, dict) else f"found {shown(line)}"
        except UnicodeEncodeError as error:
            lone = ord(error.object[error.start])
            problem = f"contains an unpaired surrogate, \\u{lone:04x}, in {shown(line)}"
        except json.JSONDecodeError as error:
            problem = f"is not JSON: {error.msg} at position {error.colno} of {shown(line)}"
        except (ValueError, RecursionError) as error:  # a number that is too long, or brackets
            problem = f"is not JSON: {error}, in {shown(line)}"
        if problem:
            raise DataError(
                f"{path}, line {number}: {problem}. Expected one whole object a line, such as "
                '{"text": "..."}.'
            )
        yield Record(value, f"{path}, line {number}")


def _array(path: Path) -> Iterator[Record]:
    """Objects of a list; or a line each, where the file is no JSON as a whole."""
    text = "\n".join(line for _, line in _lines(path))
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("["):
            at = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
            raise DataError(
                f"{path}: is not JSON{at}: {error}. Expected a list of objects."
            ) from error
        yield from _objects(path)
        return
    if LONE.search(text):
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            lone = f"\\u{ord(error.object[error.start]):04x}"
            raise DataError(f"{path}: contains an unpaired surrogate, {lone}.") from error
    if isinstance(found, dict):
        lists = [one for one in found.values() if isinstance(one, list) and one]
        lists = [one for one in lists if all(isinstance(item, dict) for item in one)]
        found = lists[0] if len(lists) == 1 else [found]
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise DataError(
            f"{path}: found {shown(found)}. Expected a list of objects, such as "
            '[{"text": "..."}], or an object with one such list in it.'
        )
    for number, value in enumerate(found, 1):
        yield Record(value, f"{path}, object {number}")


def _rows_of_text(path: Path, *, delimiter: str) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)
    lines = (f"{line}\n" for _, line in _lines(path))
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    names: list[str] = []
    try:
        for values in rows:
            if not names:
                names = [name.strip() for name in values]
                if len({*names}) < len(names):
                    raise DataError(f"{path}, line 1: columns have the same name: {listed(names)}.")
            elif values:
                place = f"{path}, line {rows.line_num}"
                if len(values) != len(names):
                    raise DataError(
                        f"{place}: found {len(values)} values, expected {len(names)}: "
                        f"{listed(names)}. Values with a {'tab' if delimiter != ',' else 'comma'} "
                        'or a line break in them stand in double quotes: "...".'
                    )
                row = zip(names, values, strict=True)
                yield Record({name: value or None for name, value in row}, place)
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num}: {error}. Expected rows of CSV.") from error


READ_HERE: Mapping[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _objects,
    ".json": _array,
    ".csv": partial(_rows_of_text, delimiter=","),
    ".tsv": partial(_rows_of_text, delimiter="\t"),
}


def _documents(path: Path, end: DocumentsEnd) -> Iterator[Record]:
    held: list[str] = []
    place = ""
    for number, line in _lines(path):
        is_blank = not line.strip()
        ends_here = {"blank lines": is_blank, "line": True, "file": False}[end]
        if held and ends_here:
            yield Record({"text": "\n".join(held)}, place)
            held = []
        if is_blank and not held:
            continue
        place = place if held else f"{path}, line {number}"
        held.append(line)
    if held:
        yield Record({"text": "\n".join(held)}, place)


def _rows(source: str, load: Callable[[], Iterable[Mapping[str, Any]]]) -> Iterator[Record]:
    number = 0
    try:
        for number, values in enumerate(load(), 1):
            yield Record(values, f"{source}, row {number}")
    except Exception as error:  # whatever the library raises, for a file or a name of the user's
        what = f"{source}, after row {number}: the datasets library cannot read it"
        raise DataError(f"{what}: {type(error).__name__}: {error}") from error
