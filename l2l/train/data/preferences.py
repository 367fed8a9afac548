"""Prompts with completions that somebody has judged: pairs of a better and a worse one, or single.

[Note: completions] The formats are those of TRL. A text is taken as it is, after the token that
begins texts, and a completion ends with the end-of-text token. A list of messages goes through the
chat template ([Note: chat] in encoding.py). Without a prompt, it is what both completions begin
with: the messages that they share, or the characters.

Rows that are compared come in turn, and are never parted: the chosen one and the rejected one, or
of single completions the own one and, after the same prompt, the *unrelated* one: that of the
record before, in the order of the data (of the first: the last record's). Of these KTO estimates
how far the model has moved.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, final

from typing_extensions import override

from l2l.train.data.encoding import (
    EMPTY,
    LONG,
    UNANSWERED,
    Conversations,
    common_beginning,
    says_anything,
)
from l2l.train.data.reading import Record, shown

JUDGEMENTS = {True: 1.0, False: 0.0, "true": 1.0, "false": 0.0}  # 1 is True, and 0 False


@dataclass(frozen=True, slots=True)
class Chain:
    """A prompt, and the prompt with a completion."""

    texts: list[str]
    is_plain: bool  # no template has written what begins texts


class Completions(Conversations):
    """Completions of prompts, those of a record together."""

    roles: tuple[str, ...]

    @override
    def encode(self, block: list[Record]) -> None:
        found = [(record, self._completions(record)) for record in block]
        self.left_out[EMPTY] += sum(not chains for _, chains in found)
        texts = [text for _, chains in found for chain in chains for text in chain.texts]
        tokens = iter(self._tokens(texts))
        for record, chains in found:
            rows = [self._row(chain, [next(tokens) for _ in chain.texts]) for chain in chains]
            if not all(any(answers[1 : self._max_length]) for _, answers in rows):
                self.left_out[UNANSWERED] += 1
            elif rows:
                self._judge(record)
                for ids, answers in rows:
                    self._append(ids, answers=answers)

    def _judge(self, record: Record) -> None:
        """Note what else a record says of the examples that follow."""

    def _row(self, chain: Chain, tokens: list[list[int]]) -> tuple[list[int], bytes]:
        ids, answers = self._joined(chain.texts, tokens)
        first = self._first if chain.is_plain and ids[: len(self._first)] != self._first else []
        return first + ids, bytes(len(first)) + answers

    @cached_property
    def _first(self) -> list[int]:
        """What the tokenizer begins a text with."""
        first = self._tokenizer.bos_token_id
        return (
            [first] if first is not None and self._tokenizer("a")["input_ids"][0] == first else []
        )

    def _completions(self, record: Record) -> list[Chain]:
        """A chain for each of the record's completions; none if one says nothing."""
        values = [record.value(self.columns[role]) for role in self.roles]
        is_chat = [isinstance(value, list | tuple) for value in values]
        if any(is_chat) != all(is_chat):
            raise record.error(
                f"of {' and '.join(self.roles)}, one is a text and one a list of messages. "
                "Expected the same of both."
            )
        return self._chats(record) if is_chat[0] else self._texts(record)

    def _texts(self, record: Record) -> list[Chain]:
        texts = [self._text(record, role) for role in self.roles]
        if not all(texts):
            return []
        if "prompt" in self.columns:
            prompt = record.value(self.columns["prompt"])
            if not isinstance(prompt, str):
                raise record.error(
                    f"the prompt is {shown(prompt)}, but what follows is a text. Expected two "
                    "texts, or two lists of messages."
                )
        elif len(texts) == 1:
            prompt = ""
        else:
            prompt = common_beginning(*texts)
            prompt = prompt.removesuffix(" ")  # which tokenizers join to what follows
            texts = [text.removeprefix(prompt) for text in texts]
        return [Chain([prompt, prompt + text], is_plain=True) for text in texts]

    def _chats(self, record: Record) -> list[Chain]:
        chats = [self._messages_in(record, role) for role in self.roles]
        begins = chats[0][:1]
        if "prompt" in self.columns and begins and begins[0]["role"] == "assistant":
            value = record.value(self.columns["prompt"])
            if isinstance(value, str):
                prompt: list[dict[str, Any]] = [{"role": "user", "content": value}]
            else:
                prompt = self._messages_in(record, "prompt")
        else:  # they have it themselves
            shared = _shared(chats)
            prompt, chats = chats[0][:shared], [chat[shared:] for chat in chats]
        if not all(any(map(says_anything, chat)) for chat in chats):
            return []
        return [
            Chain(
                self._turn(record, [*prompt, *chat], len(prompt), len(prompt) + len(chat)),
                is_plain=False,
            )
            for chat in chats
        ]


@final
class Pairs(Completions):
    """A better and a worse completion, in turn."""

    group = 2
    roles = ("chosen", "rejected")


@final
class Judged(Completions):
    """A completion that is desirable or not; then the unrelated one ([Note: completions])."""

    group = 2
    roles = ("completion",)

    @override
    def _judge(self, record: Record) -> None:
        value = record.value(self.columns["label"])
        found = JUDGEMENTS.get(value.strip().lower() if isinstance(value, str) else value)
        if found is None:
            raise record.error(f"the label is {shown(value)}. Expected true or false.")
        self.numbers.setdefault("desirable", array("f")).extend([found, found])

    @override
    def finish(self) -> None:
        """Put the unrelated ones between."""
        lengths = self.full_lengths
        rows: list[tuple[array[int], bytearray]] = []
        for start, end in pairwise(self.offsets):
            rows.append((self.ids[start:end], self.answers[start:end]))
        self.ids, self.answers = array("i"), bytearray()
        self.offsets, self.full_lengths = array("q", [0]), array("q")
        before = rows[-1:] + rows[:-1]
        for (ids, marks), (their_ids, theirs), length in zip(rows, before, lengths, strict=True):
            start, their_start = marks.index(1), theirs.index(1)
            others = ids[:start] + their_ids[their_start:]
            for row, answers, whole in (
                (ids, marks, length),
                (others, marks[:start] + theirs[their_start:], len(others)),
            ):
                self._extend(row[: self._max_length], whole)
                self.answers += answers[: self._max_length]


@final
class Prompts(Completions):
    """Prompts alone, with their records, for rewards to read."""

    roles = ()

    @override
    def encode(self, block: list[Record]) -> None:
        """Append the prompts; one that leaves no room for a completion is counted."""
        found = [(record, self._prompt(record)) for record in block]
        tokens = self._tokens([text for _, (text, _) in found])
        for (record, (text, is_plain)), ids in zip(found, tokens, strict=True):
            row, _ = self._row(Chain([text], is_plain), [ids])
            if not text.strip() or not row:
                self.left_out[EMPTY] += 1
            elif self._max_length is not None and len(row) > self._max_length:
                self.left_out[LONG] = self.left_out.get(LONG, 0) + 1
            else:
                self._extend(row, len(row))
                self.records.append(dict(record.values))

    def _prompt(self, record: Record) -> tuple[str, bool]:
        """The text, and whether no template has made it."""
        if isinstance(record.value(self.columns["prompt"]), list | tuple):
            messages = self._messages_in(record, "prompt")
            return self._render(record, messages, ask=True), False
        return self._text(record, "prompt"), True

    @override
    def _ended(self, ids: list[int]) -> list[int]:
        return []


def _shared(chats: Sequence[Sequence[Any]]) -> int:
    """How many messages all chats begin with, the last one of each left aside."""
    most = min(map(len, chats)) - 1
    pairs = zip(chats[0][:most], chats[-1][:most], strict=True)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), most)
