"""From records to token ids and labels, for each kind of task.

[Note: chat] Prompts and answers become a conversation, and conversations become text through the
tokenizer's chat template; if it has none, through `PLAIN_TEMPLATE`. An answer is what the template
adds to the conversation so far, asked for an answer, when the answer is put in: it starts where
generation will start, and ends with what will stop it. White space after that is not learnt; where
nothing stops it, the end-of-text token is added. Three things need care:

- Some templates write earlier answers in another way than the last one (without their thoughts).
  There, a conversation makes an example for each of its answers, as it will be met in use.
- Some begin an answer for the model (with a thought) otherwise than they write a given one. There,
  the answer is what follows the part that both have in common.
- Prompts are tokenized on their own, as they will be in use. Where the tokens of the whole begin
  otherwise, because one spans both sides, the answer is tokenized on its own too.

Templates that write today's date get a fixed one, so that examples are the same tomorrow.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import re
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from l2l.train.data.reading import DataError, Record, did_you_mean, listed, shown

# For tokenizers without a chat template; the trained model should be given it. With `</s>` as the
# end-of-text token, and after the beginning-of-text token where there is one:
#
#     User: What is the capital of France?
#
#     Assistant: Paris.</s>
PLAIN_TEMPLATE = (
    "{{ bos_token if bos_token is defined and bos_token else '' }}"
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' and eos_token is defined and eos_token %}"
    "{{ eos_token }}{% endif %}{{ '\\n\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

TEMPLATE_DATE = datetime.datetime(2025, 1, 1)
DATE_CODES = [f"%{code}" for code in (*"aAbBdHIjmMpSyY", "-d", "-m")]
FIXED_DATE = (  # before a template, in place of the function of this name that knows the day
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(f" | replace('{code}', '{TEMPLATE_DATE.strftime(code)}')" for code in DATE_CODES)
    + " }}{%- endmacro -%}"
)
EXPECTED = 'Expected a list of messages such as {"role": "user", "content": "..."}.'
EMPTY, UNANSWERED = "empty", "with no answer within the maximum length"  # why one is left out
LONG = "with a prompt that leaves no room for a completion"
SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant"}  # of messages with "from"

VALUE = r"\d{1,4000}"  # of a text that Python makes a number of
Class = int | str
A_CLASS = "a class: an integer from 0 on, or a text"
LABELS_ARE = {
    "regression": "a finite number, as the task is regression",
    "classification": f"{A_CLASS}; or another task, as regression",
}


class Encoder(ABC):
    """Makes examples of one task from records, and lays them end to end."""

    group = 1  # examples that belong together, one after the other

    def __init__(
        self, tokenizer: Any, columns: Mapping[str, str], labels: Labels, max_length: int | None
    ) -> None:
        self._tokenizer, self._max_length = tokenizer, max_length
        self.columns, self.labels = columns, labels
        self.ids = array("i")
        self.offsets = array("q", [0])
        self.full_lengths = array("q")  # before truncation
        self.answers = bytearray()  # for each token, whether it is learnt; empty: all are
        self.types = bytearray()
        self.numbers: dict[str, array[float]] = {}  # for each example, by name
        self.records: list[dict[str, Any]] = []  # of the examples, where rewards read them
        self.left_out = dict.fromkeys((EMPTY, UNANSWERED), 0)

    @abstractmethod
    def encode(self, block: list[Record]) -> None:
        """Append the examples of some records; records without text or answer are counted.

        Raises:
            DataError: a record is not as expected.
        """

    def finish(self) -> None:  # noqa: B027 (most have nothing left to do)
        """All records were seen."""

    def _append(self, ids: list[int], *, answers: bytes | None = None) -> None:
        """Append an example, truncated, unless nothing of it can be learnt."""
        kept = ids[: self._max_length]
        if not (len(kept) > 1 if answers is None else any(answers[1 : len(kept)])):
            self.left_out[UNANSWERED] += 1
            return
        self._extend(kept, len(ids))
        self.answers += (answers or b"")[: len(kept)]

    def _extend(self, ids: Sequence[int], full_length: int) -> None:
        self.ids.extend(ids)
        self.offsets.append(len(self.ids))
        self.full_lengths.append(full_length)

    def _text(self, record: Record, role: str) -> str:
        """A text; empty if it is blank."""
        name = self.columns[role]
        value = record.value(name)
        if value is not None and not isinstance(value, str):
            kind = type(value).__name__
            raise record.error(f"column {name!r} holds {shown(value)} ({kind}). Expected text.")
        return value if value and value.strip() else ""

    def _tokenized(self, *texts: list[str], **settings: Any) -> Any:
        if not any(texts):
            return {"input_ids": []}
        return self._tokenizer(*texts, return_attention_mask=False, verbose=False, **settings)


@final
class Documents(Encoder):
    """Texts, each with the end-of-text token after it."""

    @override
    def encode(self, block: list[Record]) -> None:
        end = self._tokenizer.eos_token_id
        texts = [text for record in block if (text := self._text(record, "text"))]
        self.left_out[EMPTY] += len(block) - len(texts)
        for ids in self._tokenized(texts, return_token_type_ids=False)["input_ids"]:
            ends = end is None or ids[-1:] == [end]
            self._append(ids if ends else [*ids, end])


class Conversations(Encoder):
    """Answers, after what they answer to ([Note: chat])."""

    @override
    def encode(self, block: list[Record]) -> None:
        found = [self._chains(record) for record in block]
        self.left_out[EMPTY] += found.count([])
        chains = [chain for one in found for chain in one]
        tokens = iter(self._tokens([text for chain in chains for text in chain]))
        for chain in chains:
            ids, answers = self._joined(chain, [next(tokens) for _ in chain])
            self._append(ids, answers=answers)

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        settings = {"add_special_tokens": False, "return_token_type_ids": False}
        return list(self._tokenized(texts, **settings)["input_ids"])

    def _joined(self, chain: list[str], tokens: list[list[int]]) -> tuple[list[int], bytes]:
        """Lay what each text of a chain adds end to end: prompt, answer, prompt, answer, ..."""
        ids: list[int] = []
        answers = bytearray()
        text_before, before = "", list[int]()
        for index, (text, whole) in enumerate(zip(chain, tokens, strict=True)):
            added = whole[len(before) :]
            if whole[: len(before)] != before:
                (added,) = self._tokens([text.removeprefix(text_before)])
            ids += added
            answers += bytes([index % 2]) * len(added)
            text_before, before = text, whole
        end = self._ended(ids)
        return ids + end, bytes(answers) + bytes([1]) * len(end)

    def _ended(self, ids: list[int]) -> list[int]:
        """What is missing at the end of an example: the end-of-text token, perhaps."""
        end = self._tokenizer.eos_token_id
        is_missing = end is not None and ids[-1:] and ids[-1] not in self._closing
        return [end] if is_missing else []

    @cached_property
    def _template(self) -> str:
        tokenizer = self._tokenizer
        found = tokenizer.get_chat_template() if tokenizer.chat_template else PLAIN_TEMPLATE
        return FIXED_DATE + found if "strftime_now" in found else str(found)

    @cached_property
    def _closing(self) -> set[int]:
        added = self._tokenizer.added_tokens_decoder.items()
        special = {number for number, token in added if token.special}
        return special.union(self._tokenizer.all_special_ids)

    def _chains(self, record: Record) -> list[list[str]]:
        """Texts that grow: up to the first answer, with it, up to the second, with it, ...

        One such chain, or one for each answer; none if there is no answer.
        """
        messages = self._messages(record)
        answers = [i for i, one in enumerate(messages) if i > 0 and one["role"] == "assistant"]
        if not any(says_anything(messages[index]) for index in answers):
            return []
        turns = [self._turn(record, messages, index) for index in answers]
        chain = [text for turn in turns for text in turn]
        grows = all(text.startswith(one) for one, text in itertools.pairwise(chain))
        return [chain] if grows else turns

    def _turn(
        self, record: Record, messages: list[dict[str, Any]], index: int, end: int | None = None
    ) -> list[str]:
        """The text up to an answer, and with it, or with all messages up to an end."""
        before = messages[:index]
        asked = self._render(record, before, ask=True)
        whole = self._render(record, messages[: end or index + 1], ask=False)
        prompt = common_beginning(asked, whole)
        if prompt != asked and not prompt.startswith(self._render(record, before, ask=False)):
            raise record.error(
                "the chat template renders the prompt differently once the answer follows: "
                f"{shown(asked[len(prompt) :])} becomes {shown(whole[len(prompt) :])}, so the "
                "answer's tokens cannot be located. Use another template."
            )
        return [prompt, max(whole.rstrip(), prompt, key=len)]

    def _render(self, record: Record, messages: list[dict[str, Any]], *, ask: bool) -> str:
        settings: dict[str, Any] = {"chat_template": self._template, "add_generation_prompt": ask}
        if tools := self._tools(record):
            settings["tools"] = tools
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **settings))
        except Exception as error:  # templates raise what they like
            roles = ", ".join(message["role"] for message in messages)
            what = f"the chat template refuses the messages (of {roles}): {error}"
            raise record.error(what) from error

    def _tools(self, record: Record) -> Any:
        """What a record says of tools: a list, or its JSON; None: nothing."""
        found = record.values.get(self.columns.get("tools", ""))
        if isinstance(found, str) and found.strip():
            try:
                found = json.loads(found)
            except ValueError as error:
                raise record.error(f"the tools are {shown(found)}, which is no JSON.") from error
        if found and not isinstance(found, list | tuple):
            raise record.error(f"the tools are {shown(found)}. Expected a list, or its JSON.")
        return found or None

    def _messages(self, record: Record) -> list[dict[str, Any]]:
        """The conversation, perhaps after what the system is told."""
        messages = self._spoken(record)
        is_there = self.columns.get("system") in record.values
        told = self._text(record, "system") if is_there else ""
        if told and messages and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": told}, *messages]
        return messages

    def _spoken(self, record: Record) -> list[dict[str, Any]]:
        if "messages" not in self.columns:
            prompt, answer = self._text(record, "prompt"), self._text(record, "completion")
            if self.columns.get("input") in record.values:
                about = self._text(record, "input")
                prompt = f"{prompt}\n\n{about}" if about else prompt
            return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return self._messages_in(record, "messages")

    def _messages_in(self, record: Record, role: str) -> list[dict[str, Any]]:
        name = self.columns[role]
        value = record.value(name)
        if not isinstance(value, list | tuple) or not all(isinstance(m, Mapping) for m in value):
            raise record.error(f"column {name!r} holds {shown(value)}. {EXPECTED}")
        return [_message(record, number, dict(one)) for number, one in enumerate(value, 1)]


class Sentences(Encoder):
    """A text or two, with a label."""

    def _label(self, record: Record) -> None:
        self.labels.add(record.value(self.columns["label"]), record)

    @override
    def encode(self, block: list[Record]) -> None:
        roles = [role for role in ("text", "pair") if role in self.columns]
        texts: list[list[str]] = []
        for record in block:
            sentences = [self._text(record, role) for role in roles]
            if any(sentences):
                texts.append(sentences)
                self._label(record)
        self.left_out[EMPTY] += len(block) - len(texts)
        sides = [list(side) for side in zip(*texts, strict=True)]
        found = self._tokenized(*sides)
        lengths = [len(ids) for ids in found["input_ids"]]
        if self._max_length is not None and max(lengths, default=0) > self._max_length:
            found = self._tokenized(*sides, truncation=True, max_length=self._max_length)
        for ids, length in zip(found["input_ids"], lengths, strict=True):
            self._extend(ids, length)
        for types in found.get("token_type_ids", ()):
            self.types += bytes(types)


def _message(record: Record, number: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates want it."""
    if "role" not in message and isinstance(message.get("from"), str):
        speaker = message["from"]
        return {"role": SPEAKERS.get(speaker, speaker), "content": message.get("value")}
    if not isinstance(message.get("role"), str):
        raise record.error(f"message {number} has no role; found {listed(message)}. {EXPECTED}")
    return message


def common_beginning(one: str, other: str) -> str:
    """What two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))]


def says_anything(message: Mapping[str, Any]) -> bool:
    """Whether there is something to learn in a message."""
    content = message.get("content")
    said = content.strip() if isinstance(content, str) else content
    return bool(said) or bool(message.get("tool_calls"))


# --------------------------------------------------------------------------------------------------
# Labels


@final
class Labels:
    """Collects labels, and makes them numbers.

    Classes are integers from 0 on; or texts, which are numbered in their order (by value, if
    digits).
    """

    def __init__(self, task: str, known: Iterable[Class]) -> None:
        """Begin with none; `known` are the classes of training, if these are of other data."""
        self._task = task
        self._known = {label: number for number, label in enumerate(known)}
        self._labels: list[Any] = []

    def add(self, value: Any, record: Record) -> None:
        """The label of the next example.

        Raises:
            DataError: it is none, or not like the others.
        """
        label = _number(value) if self._task == "regression" else _class(value)
        if label is None:
            what = LABELS_ARE.get(self._task, A_CLASS)
            raise record.error(f"the label is {shown(value)}. Expected {what}.")
        if type(label) is not type(next(iter(self._labels), label)):
            kind = "integers" if isinstance(label, str) else "texts"
            raise record.error(f"the label is {shown(value)}, but the labels before are {kind}.")
        if self._known and label not in self._known:
            near = did_you_mean(label, map(str, self._known)) if isinstance(label, str) else ""
            raise record.error(
                f"the label {label!r} is not among those of the training data: "
                f"{listed(self._known)}.{near}"
            )
        self._labels.append(label)

    def finish(self) -> tuple[Tensor, list[Class]]:
        """All labels as numbers, and the classes in their order; for regression, these are none.

        Raises:
            DataError: together they make no sense.
        """
        if self._task == "regression":
            return torch.tensor(self._labels, dtype=torch.float32), []
        classes = [*self._known] or _in_order([*dict.fromkeys(self._labels)])
        if len(classes) < 2:
            raise DataError(f"all labels are {listed(classes)}. Expected at least two classes.")
        numbers = {label: number for number, label in enumerate(classes)}
        return torch.tensor([numbers[label] for label in self._labels]), classes


def _number(value: Any) -> float | None:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _class(value: Any) -> Class | None:
    if isinstance(value, str) and value.strip():
        return sys.intern(value.strip())  # one text for all rows of a class
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return int(value) if is_whole and value >= 0 else None


def _in_order(classes: list[Any]) -> list[Class]:
    have_value = all(re.fullmatch(VALUE, str(one)) for one in classes)
    found = sorted(classes, key=int) if have_value else sorted(classes)
    if isinstance(found[0], int) and found != list(range(len(found))):
        what = f"the labels are {listed(found)}. Expected integers from 0 on, each at least once"
        raise DataError(f"{what}, or texts. Number them so, or write them as texts.")
    return found
