"""Examples: token ids of records, and what is to be learnt of them.

| task | a record | what is learnt |
|---|---|---|
| causal | a text | every token but the first; the text ends with the end-of-text token |
| instruct | a prompt and an answer, or a conversation | the answers |
| classification | a text or two, and a class | the class |
| regression | a text or two, and a number | the number |

How columns are found is said in columns.py, how conversations become tokens in encoding.py.

Millions of examples are cheap: all ids are in one flat int32 tensor, with one offset for each
example; what is learnt is one flag for each token, and absent where that is every token.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from l2l.train.data.columns import ROLES, Columns, find_columns
from l2l.train.data.encoding import Conversations, Documents, Encoded, Encoder, Sentences
from l2l.train.data.labels import Classes, ClassLabels, NumberLabels
from l2l.train.data.reading import DataError, Record, did_you_mean

TASKS = tuple(ROLES)
BLOCK_RECORDS = 1000  # tokenized at once, by as many threads as the tokenizer uses
BLOCK_CHARACTERS = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What is made of records."""

    task: str = "causal"
    columns: Columns = field(default_factory=Columns)
    max_length: int | None = None
    """Longer examples lose their last tokens, longer pairs those of the longer text. None: nothing
    is lost; `Batches` cuts long documents into parts, which is best for causal."""
    template: str | None = None
    """A chat template instead of the tokenizer's own."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(
                f"task={self.task!r} is not known. Expected one of {', '.join(TASKS)}."
                f"{did_you_mean(self.task, TASKS)}"
            )
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length={self.max_length}; expected at least 2 tokens, or None.")
        if self.template is not None and self.task != "instruct":
            raise ValueError(
                f"a template is given, but task {self.task!r} uses none. Leave it out, or say task "
                "'instruct'."
            )
        self.columns.check(self.task)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What was read, in numbers. Print it."""

    num_records: int
    num_examples: int
    num_tokens: int
    num_answer_tokens: int | None
    """Tokens that are learnt; None where rows have labels."""
    num_truncated: int
    longest: int
    """Tokens of the longest example, before it was truncated."""
    num_empty: int
    """Records without text, or without an answer in them."""
    num_unanswered: int
    """Examples left out as nothing can be learnt of them: of one token, or with the answer beyond
    the maximum length."""
    columns: tuple[str, ...]

    @override
    def __str__(self) -> str:
        """A few lines for people."""
        counts = [
            (self.num_empty, "empty"),
            (self.num_unanswered, "with no answer within the maximum length"),
        ]
        notes = [f"{number:,} {why}" for number, why in counts if number]
        learnt = ""
        if self.num_answer_tokens is not None:
            share = self.num_answer_tokens / max(1, self.num_tokens)
            learnt = f", {self.num_answer_tokens:,} of them learnt ({share:.0%})"
        return "\n".join(
            [
                f"{self.num_examples:,} examples of {self.num_records:,} records (columns "
                f"{', '.join(self.columns)})"
                + (f"; left out: {', '.join(notes)}" if notes else ""),
                f"{self.num_tokens:,} tokens{learnt}",
                f"the longest has {self.longest:,} tokens; "
                + (f"{self.num_truncated:,} truncated" if self.num_truncated else "none truncated"),
            ]
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Examples:
    """Tokenized examples, in few flat tensors."""

    task: str
    ids: Tensor  # [tokens], int32
    offsets: Tensor  # [examples + 1], int64: example i is ids[offsets[i]:offsets[i + 1]]
    full_lengths: Tensor  # [examples], int64: before truncation
    answers: Tensor | None = None  # [tokens], bool: what is learnt; None: all, or rows have labels
    token_types: Tensor | None = None  # [tokens], uint8; None: the tokenizer makes none
    targets: Tensor | None = None  # [examples], int64 or float32: labels of rows
    num_labels: int | None = None  # of rows: how many classes, or 1
    label_names: tuple[str, ...] = ()  # of classes, in the order of their numbers, if texts
    columns: Mapping[str, str] = field(default_factory=dict)  # by role
    num_records: int = 0
    num_empty: int = 0
    num_unanswered: int = 0

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> Tensor:
        """Tokens of each example."""
        return self.offsets.diff()

    @property
    def statistics(self) -> Statistics:
        """What was read, in numbers."""
        lengths = self.lengths
        learnt = int((lengths - 1).sum()) if self.targets is None else None
        if self.answers is not None:
            learnt = int(self.answers.sum() - self.answers[self.offsets[:-1]].sum())
        return Statistics(
            num_records=self.num_records,
            num_examples=len(self),
            num_tokens=self.ids.numel(),
            num_answer_tokens=learnt,
            num_truncated=int((self.full_lengths > lengths).sum()),
            longest=int(self.full_lengths.max()),
            num_empty=self.num_empty,
            num_unanswered=self.num_unanswered,
            columns=tuple(self.columns.values()),
        )

    def numbered_as(self, names: Sequence[str]) -> Examples:
        """The same with classes numbered in this order, if these are their names."""
        if self.targets is None or not self.label_names or set(names) != {*self.label_names}:
            return self
        numbers = torch.tensor([names.index(name) for name in self.label_names])
        return replace(self, targets=numbers[self.targets], label_names=tuple(names))

    def take(self, indices: Tensor) -> Examples:
        """Some of the examples, in the order of the indices."""
        lengths = self.lengths[indices]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        shift = self.offsets[indices] - offsets[:-1]
        tokens = torch.arange(int(offsets[-1])) + shift.repeat_interleave(lengths)
        return replace(
            self,
            ids=self.ids[tokens],
            offsets=offsets,
            full_lengths=self.full_lengths[indices],
            answers=None if self.answers is None else self.answers[tokens],
            token_types=None if self.token_types is None else self.token_types[tokens],
            targets=None if self.targets is None else self.targets[indices],
            num_records=indices.numel(),
            num_empty=0,
            num_unanswered=0,
        )

    def hold_out(self, number: int, *, seed: int = 0) -> tuple[Examples, Examples]:
        """All but `number` examples, and those, drawn by the seed; each in the order of the data.

        Raises:
            ValueError: there are not so many.
        """
        if not 0 < number < len(self):
            raise ValueError(
                f"{number} of {len(self)} examples cannot be held out. Expected 1 to "
                f"{len(self) - 1}."
            )
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return self.take(order[number:].sort().values), self.take(order[:number].sort().values)

    def fingerprint(self) -> str:
        """A short text that differs if anything differs that a model is trained on."""
        digest = hashlib.sha256(f"{self.task} {self.num_labels} {self.label_names}".encode())
        for tensor in (self.ids, self.offsets, self.answers, self.token_types, self.targets):
            if tensor is None:
                digest.update(b"none")
            else:
                digest.update(f"{tensor.dtype} {tensor.numel()} ".encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()[:16]


def make_examples(
    records: Iterable[Record],
    *,
    tokenizer: Any,
    form: Form,
    like: Examples | None = None,
) -> Examples:
    """Tokenize records.

    Args:
        records: from `read_records`; they are read once, and not kept.
        tokenizer: one of transformers.
        form: what to make of them.
        like: examples whose classes hold here too: those of training, for data to evaluate on.

    Raises:
        DataError: a record is not as expected, with its file and line; or nothing is left.
    """
    encoder: Encoder | None = None
    flat = _Flat()
    num_records = 0
    for block in _blocks(records):
        encoder = encoder or _encoder(block[0], tokenizer=tokenizer, form=form, like=like)
        num_records += len(block)
        for encoded in encoder.encode(block):
            flat.add(encoded, max_length=form.max_length)
    if encoder is None:
        raise DataError("there are no records. Expected at least one.")
    if not flat.ends:
        raise DataError(
            f"none of {num_records:,} records is left: {encoder.num_empty:,} are empty, and "
            f"{flat.num_unanswered:,} have no answer within the maximum length of "
            f"{form.max_length} (columns {', '.join(encoder.columns.values())})."
        )
    targets, classes = encoder.labels.finish() if encoder.labels else (None, None)
    return Examples(
        task=form.task,
        ids=torch.frombuffer(flat.ids, dtype=torch.int32),
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(flat.ends)]),
        full_lengths=torch.tensor(flat.full_lengths),
        answers=torch.frombuffer(flat.answers, dtype=torch.bool) if flat.answers else None,
        token_types=torch.frombuffer(flat.types, dtype=torch.uint8) if flat.types else None,
        targets=targets,
        num_labels=classes.number if classes else None,
        label_names=classes.names if classes else (),
        columns=encoder.columns,
        num_records=num_records,
        num_empty=encoder.num_empty,
        num_unanswered=flat.num_unanswered,
    )


@final
class _Flat:
    """Examples laid end to end."""

    def __init__(self) -> None:
        self.ids = array("i")
        self.ends = array("q")
        self.full_lengths = array("q")
        self.answers = bytearray()
        self.types = bytearray()
        self.num_unanswered = 0

    def add(self, encoded: Encoded, *, max_length: int | None) -> None:
        """Append an example, truncated, unless nothing of it can be learnt."""
        ids = encoded.ids[:max_length]
        answers = None if encoded.answers is None else encoded.answers[: len(ids)]
        learns = len(ids) > 1 if answers is None else any(answers[1:])
        if not learns and not encoded.has_label:
            self.num_unanswered += 1
            return
        self.ids.extend(ids)
        self.ends.append(len(self.ids))
        self.full_lengths.append(encoded.full_length or len(encoded.ids))
        self.answers += answers or b""
        self.types += bytes(encoded.types or ())


def _blocks(records: Iterable[Record]) -> Iterator[list[Record]]:
    block: list[Record] = []
    characters = 0
    for record in records:
        block.append(record)
        characters += sum(len(v) for v in record.values.values() if isinstance(v, str))
        if len(block) == BLOCK_RECORDS or characters >= BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


def _encoder(first: Record, *, tokenizer: Any, form: Form, like: Examples | None) -> Encoder:
    columns = find_columns(first, task=form.task, columns=form.columns)
    if form.task == "causal":
        return Documents(tokenizer, columns)
    if form.task == "instruct":
        return Conversations(tokenizer, columns, template=form.template)
    classes = Classes(like.num_labels or 0, like.label_names) if like is not None else None
    labels = NumberLabels() if form.task == "regression" else ClassLabels(classes)
    return Sentences(tokenizer, columns, labels=labels, max_length=form.max_length)
