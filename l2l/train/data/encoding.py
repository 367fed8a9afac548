"""From records to token ids, for each kind of task.

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
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from typing_extensions import override

from l2l.train.data.columns import value_of
from l2l.train.data.labels import RowLabels
from l2l.train.data.reading import DataError, Record, listed, shown

PLAIN_TEMPLATE = (
    "{{ bos_token if bos_token is defined and bos_token else '' }}"
    "{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' and eos_token is defined and eos_token %}"
    "{{ eos_token }}{% endif %}{{ '\\n\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For tokenizers without a chat template; the trained model should be given it. With `</s>` as the
end-of-text token, and after the beginning-of-text token where there is one:

    User: What is the capital of France?

    Assistant: Paris.</s>
"""

TEMPLATE_DATE = datetime.datetime(2025, 1, 1)
DATE_CODES = {f"%{code}": TEMPLATE_DATE.strftime(f"%{code}") for code in "aAbBdHIjmMpSyY"}
DATE_CODES |= {"%-d": "1", "%-m": "1"}
FIXED_DATE = (  # before a template, in place of the function of this name that knows the day
    "{%- macro strftime_now(format) -%}{{ format"
    + "".join(f" | replace('{code}', '{text}')" for code, text in DATE_CODES.items())
    + " }}{%- endmacro -%}"
)
SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant"}  # of messages with "from"


@dataclass(frozen=True, slots=True)
class Encoded:
    """One example."""

    ids: list[int]
    answers: bytes | None = None  # for each token, whether it is learnt; None: all are
    types: list[int] | None = None
    full_length: int | None = None  # if it is truncated already
    has_label: bool = False


class Encoder(ABC):
    """Makes examples of one task from records."""

    def __init__(
        self, tokenizer: Any, columns: Mapping[str, str], *, labels: RowLabels | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self.columns = columns
        self.labels = labels
        self.num_empty = 0

    @abstractmethod
    def encode(self, block: list[Record]) -> Iterator[Encoded]:
        """The examples of some records; records without text or answer are counted.

        Raises:
            DataError: a record is not as expected.
        """

    def _text(self, record: Record, role: str) -> str:
        """A text; empty if it is blank."""
        value = value_of(record, self.columns[role])
        if value is None:
            return ""
        if not isinstance(value, str):
            raise DataError(
                f"{record.place}: column {self.columns[role]!r} holds {shown(value)} "
                f"({type(value).__name__}). Expected text."
            )
        return value if value.strip() else ""

    def _tokens(self, texts: list[str], *, special: bool) -> list[list[int]]:
        if not texts:
            return []
        found = self._tokenizer(
            texts,
            add_special_tokens=special,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return list(found["input_ids"])


@final
class Documents(Encoder):
    """Texts, each with the end-of-text token after it."""

    def __init__(self, tokenizer: Any, columns: Mapping[str, str]) -> None:
        super().__init__(tokenizer, columns)
        self._end: int | None = tokenizer.eos_token_id
        if self._end is None:
            warnings.warn(
                "the tokenizer has no end-of-text token (eos_token), so documents end without one "
                "and the model will not learn where to stop.",
                stacklevel=4,
            )

    @override
    def encode(self, block: list[Record]) -> Iterator[Encoded]:
        texts = [text for record in block if (text := self._text(record, "text"))]
        self.num_empty += len(block) - len(texts)
        for ids in self._tokens(texts, special=True):
            if self._end is not None and ids[-1:] != [self._end]:
                ids.append(self._end)
            yield Encoded(ids)


@final
class Conversations(Encoder):
    """Answers, after what they answer to ([Note: chat])."""

    def __init__(self, tokenizer: Any, columns: Mapping[str, str], *, template: str | None) -> None:
        super().__init__(tokenizer, columns)
        own = tokenizer.get_chat_template() if tokenizer.chat_template else PLAIN_TEMPLATE
        self._template = template or own
        if "strftime_now" in self._template:
            self._template = FIXED_DATE + self._template
        self._closing = set(tokenizer.all_special_ids) | {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }

    @override
    def encode(self, block: list[Record]) -> Iterator[Encoded]:
        chains: list[list[str]] = []
        for record in block:
            found = self._chains(record)
            self.num_empty += not found
            chains += found
        tokens = iter(self._tokens([text for chain in chains for text in chain], special=False))
        for chain in chains:
            yield self._join(chain, [next(tokens) for _ in chain])

    def _join(self, chain: list[str], tokens: list[list[int]]) -> Encoded:
        """Lay what each text of a chain adds end to end: prompt, answer, prompt, answer, ..."""
        ids: list[int] = []
        answers = bytearray()
        text_before, before = "", list[int]()
        for index, (text, whole) in enumerate(zip(chain, tokens, strict=True)):
            if whole[: len(before)] == before:
                added = whole[len(before) :]
            else:
                added = self._tokens([text.removeprefix(text_before)], special=False)[0]
            ids += added
            answers += bytes([index % 2]) * len(added)
            text_before, before = text, whole
        end = self._tokenizer.eos_token_id
        if end is not None and ids[-1:] and ids[-1] not in self._closing:
            ids.append(end)
            answers.append(1)
        return Encoded(ids, bytes(answers))

    def _chains(self, record: Record) -> list[list[str]]:
        """Texts that grow: up to the first answer, with it, up to the second, with it, ...

        One such chain, or one for each answer; none if there is no answer.
        """
        messages = self._messages(record)
        answered = [
            index
            for index, message in enumerate(messages)
            if index > 0 and message["role"] == "assistant"
        ]
        if not any(_says_anything(messages[index]) for index in answered):
            return []
        turns = [self._turn(record, messages, index) for index in answered]
        chain = [text for turn in turns for text in turn]
        if all(text.startswith(one) for one, text in itertools.pairwise(chain)):
            return [chain]
        return [list(turn) for turn in turns]

    def _turn(self, record: Record, messages: list[dict[str, Any]], index: int) -> tuple[str, str]:
        """The text up to an answer, and with it."""
        asked = self._render(record, messages[:index], ask=True)
        whole = self._render(record, messages[: index + 1], ask=False)
        prompt = _common_beginning(asked, whole)
        if prompt != asked and not prompt.startswith(
            self._render(record, messages[:index], ask=False)
        ):
            raise DataError(
                f"{record.place}: the chat template writes what is before an answer in another way "
                f"once the answer is there: {shown(asked[len(prompt) :])} becomes "
                f"{shown(whole[len(prompt) :])}. So it cannot be told what the answer is. Give "
                "another template."
            )
        return prompt, max(whole.rstrip(), prompt, key=len)

    def _render(self, record: Record, messages: list[dict[str, Any]], *, ask: bool) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    chat_template=self._template,
                    tokenize=False,
                    add_generation_prompt=ask,
                )
            )
        except Exception as error:  # templates raise what they like
            raise DataError(
                f"{record.place}: the chat template refuses the messages (of "
                f"{', '.join(message['role'] for message in messages)}): {error}"
            ) from error

    def _messages(self, record: Record) -> list[dict[str, Any]]:
        if "messages" not in self.columns:
            return self._question_and_answer(record)
        value = value_of(record, self.columns["messages"])
        if not isinstance(value, list | tuple) or not all(isinstance(m, Mapping) for m in value):
            raise DataError(
                f"{record.place}: column {self.columns['messages']!r} holds {shown(value)}. "
                'Expected a list of messages such as {"role": "user", "content": "..."}.'
            )
        return [_message(record, number, dict(one)) for number, one in enumerate(value, 1)]

    def _question_and_answer(self, record: Record) -> list[dict[str, Any]]:
        prompt, answer = self._text(record, "prompt"), self._text(record, "completion")
        if "input" in self.columns and self.columns["input"] in record.values:
            about = self._text(record, "input")
            prompt = f"{prompt}\n\n{about}" if about else prompt
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


@final
class Sentences(Encoder):
    """A text or two, with a label."""

    def __init__(
        self,
        tokenizer: Any,
        columns: Mapping[str, str],
        *,
        labels: RowLabels,
        max_length: int | None,
    ) -> None:
        super().__init__(tokenizer, columns, labels=labels)
        self._row_labels = labels
        self._max_length = max_length

    @override
    def encode(self, block: list[Record]) -> Iterator[Encoded]:
        texts: list[tuple[str, ...]] = []
        for record in block:
            sentences = tuple(
                self._text(record, role) for role in ("text", "pair") if role in self.columns
            )
            if any(sentences):
                texts.append(sentences)
                self._row_labels.add(value_of(record, self.columns["label"]), record)
            else:
                self.num_empty += 1
        if not texts:
            return
        found = self._together(texts)
        lengths = [len(ids) for ids in found["input_ids"]]
        if self._max_length is not None and max(lengths) > self._max_length:
            found = self._together(texts, truncation=True, max_length=self._max_length)
        types = found.get("token_type_ids") or [None] * len(texts)
        for ids, one, length in zip(found["input_ids"], types, lengths, strict=True):
            yield Encoded(ids, types=one, full_length=length, has_label=True)

    def _together(self, texts: list[tuple[str, ...]], **settings: Any) -> Any:
        sides = [list(side) for side in zip(*texts, strict=True)]
        return self._tokenizer(*sides, return_attention_mask=False, verbose=False, **settings)


def _message(record: Record, number: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message as templates want it."""
    if "role" not in message and isinstance(message.get("from"), str):
        speaker = message["from"]
        return {"role": SPEAKERS.get(speaker, speaker), "content": message.get("value")}
    if not isinstance(message.get("role"), str):
        raise DataError(
            f"{record.place}: message {number} has no role; found {listed(list(message))}. "
            'Expected {"role": "user", "content": "..."}.'
        )
    return message


def _common_beginning(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))]


def _says_anything(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    said = content.strip() if isinstance(content, str) else content
    return bool(said) or bool(message.get("tool_calls"))
