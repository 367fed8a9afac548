"""Examples that were tokenized before: kept in files, under a hash of all that they depend on.

That is the bytes of the data, the tokenizer (the files of its folder and its chat template), what
is to be made of the records, this package's code and the versions of what tokenizes. So what is
found is what would be made now. A file that is damaged is made anew; data that change while they
are read are not kept; of the files, those that were used last are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from torch import Tensor

from l2l.files import (
    TensorReader,
    Written,
    cache_folder,
    check_file,
    kinds_of,
    own_source,
    write_file,
    write_tensors,
)
from l2l.train.data.examples import Examples, Form, make_examples
from l2l.train.data.reading import DocumentsEnd, local_files, read_records

logger = logging.getLogger("l2l")

MOST_BYTES = 4 << 30  # of all files together
LEAST_SECONDS = 2.0  # what is tokenized faster is not worth a file
TENSORS = ("ids", "offsets", "full_lengths", "answers", "token_types", "targets", "token_targets")
FACTS = (
    *("task", "num_labels", "label_names", "group", "columns", "unused", "num_records"),
    "left_out",
)
LIBRARIES = ("transformers", "tokenizers")
NUMBERS = "numbers."  # how names of tensors of `Examples.numbers` begin
OF_TOKENIZER = (".json", ".txt", ".model", ".jinja")  # files of a model folder that may be its own


@final
class KeptExamples:
    """Makes examples, or finds those that were made before."""

    def __init__(
        self,
        folder: Path | None,
        *,
        most_bytes: int = MOST_BYTES,
        least_seconds: float = LEAST_SECONDS,
    ) -> None:
        """`folder` None: nothing is kept."""
        self._folder, self._most_bytes, self._least_seconds = folder, most_bytes, least_seconds

    @classmethod
    def of_user(cls) -> KeptExamples:
        """In the user's cache folder, if there is one."""
        folder = cache_folder()
        return cls(None if folder is None else folder / "tokens")

    def make(
        self,
        sources: Sequence[str],
        *,
        documents: DocumentsEnd,
        model_folder: Path,
        tokenizer: Any,
        form: Form,
        like: Examples | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> Examples:
        """The examples of some data; arguments as those of `make_examples` and `read_records`.

        `model_folder` is where the tokenizer is from.

        Raises:
            DataError: a record is not as expected.
        """
        records = read_records(sources, documents=documents)  # says at once what is not there
        words = (repr(form), documents, str(tokenizer.chat_template), _classes(like))
        files, began = local_files(sources), time.monotonic()
        before = None if files is None else [_state(path) for path in files]
        key = self._key(files, model_folder, words)
        known = None if key is None else self._read(key)
        if known is not None:
            return known
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = make_examples(records, tokenizer=tokenizer, form=form, like=like, tell=tell)
        said = [str(one.message) for one in caught]
        _warn(said)
        took = time.monotonic() - began
        is_same = files is not None and [_state(path) for path in files] == before
        if key is not None and is_same and took >= self._least_seconds and not found.records:
            with contextlib.suppress(OSError, ValueError):  # a full disk keeps nobody from training
                self._write(key, found, said)
        return found

    def _key(
        self, files: list[Path] | None, model_folder: Path, words: tuple[str, ...]
    ) -> Path | None:
        """Where the examples are kept; None: they are not."""
        if self._folder is None or files is None:
            return None
        versions = [importlib.import_module(name).__version__ for name in LIBRARIES]
        parts = [own_source(), *versions, *words]
        own = (path for path in model_folder.iterdir() if path.suffix in OF_TOKENIZER)
        for path in (*sorted(own), *files):
            if path.is_file():
                with path.open("rb") as file:
                    parts += [path.name, hashlib.file_digest(file, "sha256").hexdigest()]
        return self._folder / hashlib.sha256(repr(parts).encode()).hexdigest()

    def _read(self, key: Path) -> Examples | None:
        """What is kept under a key; None: nothing, or it is damaged."""
        tensors, about = _files_of(key)
        try:
            facts = json.loads(about.read_text())
            said, written = facts.pop("warnings"), Written(**facts.pop("written"))
            check_file(tensors, written)
            names = kinds_of(tensors)
            read = TensorReader(dict.fromkeys(names, tensors))
            found: dict[str, Any] = {name: read(name) for name in names}
            numbers = {
                name.removeprefix(NUMBERS): found.pop(name)
                for name in names
                if name.startswith(NUMBERS)
            }
            facts |= {name: tuple(facts[name]) for name in ("label_names", "unused")}
            examples = Examples(**found, **facts, numbers=numbers)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        with contextlib.suppress(OSError):
            os.utime(about)  # used last
        logger.info("these data were tokenized before, with this tokenizer: %s", tensors)
        _warn(said)
        return examples

    def _write(self, key: Path, examples: Examples, said: list[str]) -> None:
        """Keep examples; those that were not used for longest go."""
        tensors, about = _files_of(key)
        key.parent.mkdir(parents=True, exist_ok=True)
        values: dict[str, Tensor] = {
            name: value for name in TENSORS if (value := getattr(examples, name)) is not None
        }
        values |= {NUMBERS + name: value for name, value in examples.numbers.items()}
        if sum(value.nbytes for value in values.values()) > self._most_bytes:
            return
        own = tensors.with_name(f"{tensors.name}.{os.getpid()}.partial")
        try:
            written = write_tensors(own, values)
            own.rename(tensors)
        finally:
            own.unlink(missing_ok=True)
        facts: dict[str, Any] = {name: getattr(examples, name) for name in FACTS}
        facts |= {"warnings": said, "written": {"nbytes": written.nbytes}}
        facts["written"]["checksum"] = written.checksum
        write_file(about, json.dumps(facts), shared=True)
        self._prune(key.parent)

    def _prune(self, folder: Path) -> None:
        """Let go of what was not used for longest, until the rest is not too much."""
        total = 0
        kept = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for about in kept:
            tensors = about.with_suffix(".safetensors")
            total += tensors.stat().st_size if tensors.exists() else 0
            if total > self._most_bytes:
                about.unlink(missing_ok=True)
                tensors.unlink(missing_ok=True)


def _files_of(key: Path) -> tuple[Path, Path]:
    return key.with_suffix(".safetensors"), key.with_suffix(".json")


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _classes(like: Examples | None) -> str:
    """What the classes of training say of those of other data."""
    return "" if like is None else repr((like.task, like.num_labels, like.label_names))


def _warn(said: list[str]) -> None:
    for text in said:
        warnings.warn(text, stacklevel=2)
