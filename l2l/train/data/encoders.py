"""Encoders for models that see whole texts: hidden tokens, labels of words, several labels.

- masked: a text is cut into rows as the tokenizer cuts it, each with the tokens that begin and end
  one; which tokens are hidden is drawn anew for every step (objective.py).
- token-classification: a record has a list of words and a list of as many classes. A word's class
  is learnt at its first token.
- multi-label: a record has a list of classes, of any number.
"""

from __future__ import annotations

from array import array
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from l2l.model import IGNORED
from l2l.train.data.encoding import EMPTY, Class, Encoder, Sentences
from l2l.train.data.reading import DataError, Record, shown


@final
class MaskedTexts(Encoder):
    """Texts, in rows of the model's own length."""

    @override
    def encode(self, block: list[Record]) -> None:
        texts = [text for record in block if (text := self._text(record, "text"))]
        self.left_out[EMPTY] += len(block) - len(texts)
        settings: dict[str, Any] = {"return_token_type_ids": False}
        if self._max_length is not None and self._tokenizer.is_fast:
            settings |= {"truncation": True, "return_overflowing_tokens": True}
            settings["max_length"] = self._max_length
        for ids in self._tokenized(texts, **settings)["input_ids"]:
            self._append(ids)


@final
class WordLabels(Encoder):
    """Lists of words with a class each."""

    _said = 0  # classes so far
    _of_tokens: array[int]  # for each token the number of its class among all that were said, or -1

    @override
    def encode(self, block: list[Record]) -> None:
        if not self._said:
            self._of_tokens = array("q")
        rows = [self._words(record) for record in block]
        kept = [(words, classes, record) for words, classes, record in rows if words]
        self.left_out[EMPTY] += len(rows) - len(kept)
        if not kept:
            return
        lists = [words for words, _, _ in kept]
        for (words, classes, record), (ids, word_of) in zip(kept, self._split(lists), strict=True):
            del words
            first = self._said
            for one in classes:
                self.labels.add(one, record)
            self._said += len(classes)
            before: int | None = None
            for word in word_of[: self._max_length]:
                is_first = word is not None and word != before
                self._of_tokens.append(first + word if is_first and word is not None else -1)
                before = word
            self._extend(ids[: self._max_length], len(ids))

    def _words(self, record: Record) -> tuple[list[str], list[Any], Record]:
        words, classes = (record.value(self.columns[role]) for role in ("text", "label"))
        if not isinstance(words, list | tuple) or not all(isinstance(one, str) for one in words):
            raise record.error(f"the words are {shown(words)}. Expected a list of texts.")
        if not isinstance(classes, list | tuple) or len(classes) != len(words):
            found = f"{len(classes)} classes" if isinstance(classes, list | tuple) else "none"
            raise record.error(f"{len(words)} words have {found}. Expected one for each word.")
        return list(words), list(classes), record

    def _split(self, lists: list[list[str]]) -> list[tuple[list[int], list[int | None]]]:
        """Token ids, and of which word each token is."""
        if not self._tokenizer.is_fast:
            raise DataError("the tokenizer knows no words. Expected a fast one (tokenizer.json).")
        settings = {"return_attention_mask": False, "verbose": False}
        try:
            found = self._tokenizer(lists, is_split_into_words=True, **settings)
        except Exception as error:  # some take words only if they are told so when they are made
            raise DataError(
                f"the tokenizer takes no lists of words: {error}. Some do with "
                '"add_prefix_space": true in tokenizer_config.json.'
            ) from error
        return [(ids, found.word_ids(row)) for row, ids in enumerate(found["input_ids"])]

    def token_targets(self, numbers: Tensor) -> Tensor:
        """Of each token the class that is learnt; `numbers` are all that were said, in order."""
        places = torch.tensor(self._of_tokens)
        found = torch.full(places.shape, IGNORED, dtype=torch.int32)
        found[places >= 0] = numbers[places[places >= 0]].int()
        return found


@final
class SeveralLabels(Sentences):
    """A text or two, with any number of classes."""

    _numbers: array[int] | None = None  # of classes, for each example

    @override
    def _label(self, record: Record) -> None:
        found = record.value(self.columns["label"])
        if not isinstance(found, list | tuple):
            raise record.error(f"the labels are {shown(found)}. Expected a list of classes.")
        for one in dict.fromkeys(found):
            self.labels.add(one, record)
        if self._numbers is None:
            self._numbers = array("q")
        self._numbers.append(len(dict.fromkeys(found)))

    def matrix(self, numbers: Tensor, classes: list[Class]) -> Tensor:
        """Which classes examples have: ones and zeros [examples, classes]."""
        counts = torch.tensor(self._numbers or array("q"))
        rows = torch.arange(counts.numel()).repeat_interleave(counts)
        found = torch.zeros(counts.numel(), len(classes))
        found[rows, numbers] = 1.0
        return found
