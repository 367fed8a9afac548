"""Examples: token ids of records, and what is to be learnt of them.

| task | a record | what is learnt |
|---|---|---|
| causal | a text | every token but the first; the text ends with the end-of-text token |
| instruct | a prompt and an answer, or a conversation | the answers |
| classification | a text or two, and a class | the class |
| regression | a text or two, and a number | the number |
| multi-label | a text or two, and a list of classes | which of all classes it has |
| token-classification | a list of words, and one of their classes | the class of every word |
| masked | a text | tokens that are hidden, by all others |
| dpo, orpo, simpo, reward | a prompt, and a better and a worse completion | which is better |
| kto | a prompt, a completion, and whether it is desirable | that |
| grpo | a prompt, and whatever rewards read | completions of the model's own, by their rewards |

A task has roles: the text, its label, the prompt, the answer to it. Which column plays which role
is found by the names that are usual for it, in the first record, unless it is named. Once the text
is named, a pair is used only if it is named too; so with prompt and input. How conversations become
tokens is said in encoding.py.

Millions of examples are cheap: all ids are in one flat int32 tensor, with one offset for each
example; what is learnt is one flag for each token, and absent where that is every token.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

import torch
from torch import Tensor
from typing_extensions import override

from l2l.model import IGNORED
from l2l.train.data.encoders import MaskedTexts, SeveralLabels, WordLabels
from l2l.train.data.encoding import Conversations, Documents, Encoder, Labels, Sentences
from l2l.train.data.preferences import Judged, Pairs, Prompts
from l2l.train.data.reading import DataError, Record, listed

Task = Literal[
    "causal",
    "instruct",
    "masked",
    "classification",
    "multi-label",
    "regression",
    "token-classification",
    "dpo",
    "orpo",
    "simpo",
    "kto",
    "reward",
    "grpo",
]
PAIR = ("prompt", "chosen", "rejected")
ROLES: Mapping[Task, tuple[str, ...]] = {
    "causal": ("text",),
    "masked": ("text",),
    "token-classification": ("text", "label"),
    "multi-label": ("text", "pair", "label"),
    "instruct": ("messages", "prompt", "input", "completion", "system", "tools"),
    "classification": ("text", "pair", "label"),
    "regression": ("text", "pair", "label"),
    "dpo": PAIR,
    "orpo": PAIR,
    "simpo": PAIR,
    "kto": ("prompt", "completion", "label"),
    "reward": PAIR,
    "grpo": ("prompt",),
}
ENCODERS: Mapping[Task, type[Encoder]] = {
    "causal": Documents,
    "masked": MaskedTexts,
    "token-classification": WordLabels,
    "multi-label": SeveralLabels,
    "instruct": Conversations,
    "classification": Sentences,
    "regression": Sentences,
    "dpo": Pairs,
    "orpo": Pairs,
    "simpo": Pairs,
    "kto": Judged,
    "reward": Pairs,
    "grpo": Prompts,
}

TEXTS = ("text", "content", "document")
WORDS = ("tokens", "words")
TAGS = ("ner_tags", "tags", "labels", "pos_tags", "label")
MESSAGES = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "instruction", "question", "query", "input")
BESIDE = {"system": ("system_prompt", "system"), "tools": ("tools",)}  # of a conversation
COMPLETIONS = ("completion", "output", "response", "answer")
INPUTS = {"instruction": "input"}  # what such a prompt is about, where it is there and not blank
PAIRS = {  # what goes with such a text, if it is there
    "sentence1": "sentence2",
    "premise": "hypothesis",
    "question1": "question2",
    "text1": "text2",
    "text": "text_pair",
    "question": "sentence",
}
SENTENCES = (*PAIRS, "sentence")
LABELS = ("label", "labels", "score", "target", "class")

PAIRED = {"chosen": ("chosen",), "rejected": ("rejected",)}
JUDGED: Mapping[Task, Mapping[str, Sequence[str]]] = {  # the roles besides the prompt
    **dict.fromkeys(("dpo", "orpo", "simpo", "reward"), PAIRED),
    "kto": {"completion": COMPLETIONS, "label": LABELS},
}

USUAL: Mapping[Task, Mapping[str, Sequence[str]]] = {  # the roles, where these are all
    "causal": {"text": TEXTS},
    "masked": {"text": TEXTS},
    "token-classification": {"text": WORDS, "label": TAGS},
    "grpo": {"prompt": PROMPTS},
}

BLOCK_RECORDS = 1000  # tokenized at once, by as many threads as the tokenizer uses
BLOCK_CHARACTERS = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What is made of records.

    Attributes:
        task: what is learnt of them.
        columns: role -> name of its column, for those that are not to be found by usual names.
        max_length: longer examples lose their last tokens, longer pairs those of the longer text.
            None: nothing is lost; `Batches` cuts long documents into parts, best for causal.
    """

    task: Task = "causal"
    columns: Mapping[str, str] = field(default_factory=dict)
    max_length: int | None = None

    def __post_init__(self) -> None:
        roles, task = ROLES[self.task], f"task {self.task!r}"
        if "messages" in roles and "messages" in self.columns:
            roles, task = ("messages", "system", "tools"), f"{task} with messages"
        others = [role for role in self.columns if role not in roles]
        if others:
            what = f"columns name the {others[0]}, which {task} does not use"
            raise ValueError(f"{what}. Expected {', '.join(roles)}.")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Examples:
    """Tokenized examples, in few flat tensors. Print it."""

    task: str
    ids: Tensor  # [tokens], int32
    offsets: Tensor  # [examples + 1], int64: example i is ids[offsets[i]:offsets[i + 1]]
    full_lengths: Tensor  # [examples], int64: before truncation
    answers: Tensor | None = None  # [tokens], bool: what is learnt; None: all, or rows have labels
    token_types: Tensor | None = None  # [tokens], uint8; None: the tokenizer makes none
    targets: Tensor | None = None  # [examples], int64 or float32: labels of rows; or of each class
    token_targets: Tensor | None = None  # [tokens], int32: labels of tokens, or IGNORED
    num_labels: int | None = None  # of rows: how many classes, or 1
    label_names: tuple[str, ...] = ()  # of classes, in the order of their numbers, if texts
    group: int = 1  # examples that come one after the other and are never parted: pairs
    numbers: Mapping[str, Tensor] = field(default_factory=dict)  # [examples], for losses, by name
    records: Sequence[Mapping[str, Any]] = ()  # of the examples, where rewards read them
    columns: Mapping[str, str] = field(default_factory=dict)  # by role
    unused: tuple[str, ...] = ()  # columns that nothing was made of
    num_records: int = 0
    left_out: Mapping[str, int] = field(default_factory=dict)  # why -> how many

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def num_groups(self) -> int:
        """How many there are that may be parted from each other."""
        return len(self) // self.group

    @property
    def lengths(self) -> Tensor:
        """Tokens of each example."""
        return self.offsets.diff()

    @override
    def __str__(self) -> str:
        """What was read, in numbers: a few lines for people."""
        notes = ", ".join(f"{number:,} {why}" for why, number in self.left_out.items() if number)
        number, learnt = self.ids.numel(), self.ids.numel() - len(self)
        if self.answers is not None:
            learnt = int(self.answers.sum() - self.answers[self.offsets[:-1]].sum())
        together = {1: "examples", 2: "pairs"}[self.group]
        share = f", {learnt:,} of them learnt ({learnt / max(1, number):.0%})"
        labels = (self.targets, self.token_targets)
        is_text = all(one is None for one in labels) and self.task != "masked"
        share = share if is_text and not self.records else ""
        truncated = int((self.full_lengths > self.lengths).sum())
        return (
            f"{self.num_groups:,} {together} of {self.num_records:,} records (columns "
            f"{', '.join(self.columns.values())}{self.told_unused()})"
            f"{notes and f'; left out: {notes}'}\n"
            f"{number:,} tokens{share}\n"
            f"the longest has {int(self.full_lengths.max()):,} tokens; "
            f"{f'{truncated:,}' if truncated else 'none'} truncated"
        )

    def told_unused(self) -> str:
        """Columns that are not used, after what is; empty if all are."""
        return f"; not used: {', '.join(map(repr, self.unused))}" if self.unused else ""

    def numbered_as(self, names: Sequence[str]) -> Examples:
        """The same with classes numbered in this order, if these are all of their names."""
        if not self.label_names or not {*self.label_names} <= {*names}:
            return self
        numbers = torch.tensor([names.index(name) for name in self.label_names])
        named: dict[str, Any] = {"label_names": tuple(names), "num_labels": len(names)}
        if self.token_targets is not None:
            there = self.token_targets != IGNORED
            found = self.token_targets.clone()
            found[there] = numbers[found[there].long()].int()
            return replace(self, token_targets=found, **named)
        targets = self.targets
        if targets is not None and targets.dim() == 2:
            given, targets = targets, targets.new_zeros(len(targets), len(names))
            targets[:, numbers] = given
        elif targets is not None:
            targets = numbers[targets]
        return replace(self, targets=targets, **named)

    def with_numbers(self, **numbers: Tensor) -> Examples:
        """The same with more that is known of each example."""
        return replace(self, numbers={**self.numbers, **numbers})

    def take(self, indices: Tensor) -> Examples:
        """Some of the examples, or groups of them, in the order of the indices."""
        num_records, indices = indices.numel(), members(indices, self.group)
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
            token_targets=None if self.token_targets is None else self.token_targets[tokens],
            numbers={name: one[indices] for name, one in self.numbers.items()},
            records=[self.records[index] for index in indices.tolist()] if self.records else (),
            num_records=num_records,
            left_out={},
        )

    def hold_out(self, number: int, *, seed: int = 0) -> tuple[Examples, Examples]:
        """All but `number` examples, and those, drawn by the seed; each in the order of the data.

        Raises:
            ValueError: there are not so many.
        """
        if not 0 < number < self.num_groups:
            most = self.num_groups - 1
            raise ValueError(f"{number} of {most + 1} examples cannot be held out; at most {most}.")
        order = torch.randperm(self.num_groups, generator=torch.Generator().manual_seed(seed))
        return self.take(order[number:].sort().values), self.take(order[:number].sort().values)

    def fingerprint(self) -> str:
        """A short text that differs if anything differs that a model is trained on."""
        digest = hashlib.sha256(f"{self.task} {self.num_labels} {self.label_names}".encode())
        parts = (self.ids, self.offsets, self.answers, self.token_types, self.targets)
        more = [] if self.token_targets is None else [self.token_targets]
        for tensor in (*parts, *more, *self.numbers.values()):
            kind = "none" if tensor is None else f"{tensor.dtype} {tensor.numel()} "
            digest.update(kind.encode())
            if tensor is not None:
                digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
        if self.records:
            digest.update(json.dumps(self.records, sort_keys=True, default=str).encode())
        return digest.hexdigest()[:16]


def members(groups: Tensor, size: int) -> Tensor:
    """The examples of groups of so many."""
    return (groups[:, None] * size + torch.arange(size)).view(-1)


def make_examples(
    records: Iterable[Record],
    *,
    tokenizer: Any,
    form: Form,
    like: Examples | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Examples:
    """Tokenize records.

    Args:
        records: from `read_records`; they are read once, and not kept.
        tokenizer: one of transformers.
        form: what to make of them.
        like: examples whose classes hold here too: those of training, for data to evaluate on.
        tell: is told, again and again, how far it is.

    Raises:
        DataError: a record is not as expected, with its file and line; or nothing is left.
    """
    encoder: Encoder | None = None
    num_records = 0
    there: dict[str, None] = {}  # names of columns, in order
    for block in _blocks(records):
        encoder = encoder or _encoder(block[0], tokenizer=tokenizer, form=form, like=like)
        num_records += len(block)
        for record in block:
            there.update(dict.fromkeys(record.values))
        encoder.encode(block)
        tell(f"tokenizing: {num_records:,} records, {len(encoder.ids):,} tokens so far")
    if encoder is None:
        raise DataError("there are no records. Expected at least one.")
    encoder.finish()
    if not encoder.full_lengths:
        notes = ", ".join(f"{number:,} {why}" for why, number in encoder.left_out.items())
        what = f"none of {num_records:,} records is left: {notes} of {form.max_length}"
        raise DataError(f"{what} (columns {', '.join(encoder.columns.values())}).")
    has_labels = "label" in encoder.columns and not encoder.numbers
    targets, classes = encoder.labels.finish() if has_labels else (None, [])
    of_tokens = None
    if isinstance(encoder, WordLabels) and targets is not None:
        of_tokens, targets = encoder.token_targets(targets), None
    if isinstance(encoder, SeveralLabels) and targets is not None:
        targets = encoder.matrix(targets, classes)
    answers, types = encoder.answers, encoder.types
    return Examples(
        task=form.task,
        ids=torch.frombuffer(encoder.ids, dtype=torch.int32),
        offsets=torch.tensor(encoder.offsets),
        full_lengths=torch.tensor(encoder.full_lengths),
        answers=torch.frombuffer(answers, dtype=torch.bool) if answers else None,
        token_types=torch.frombuffer(types, dtype=torch.uint8) if types else None,
        targets=targets,
        token_targets=of_tokens,
        num_labels=max(1, len(classes)) if has_labels else None,
        label_names=tuple(one for one in classes if isinstance(one, str)),
        group=encoder.group,
        numbers={name: torch.tensor(values) for name, values in encoder.numbers.items()},
        records=encoder.records,
        columns=encoder.columns,
        unused=tuple(one for one in there if one not in encoder.columns.values())
        if not encoder.records
        else (),
        num_records=num_records,
        left_out=encoder.left_out,
    )


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
    if form.task == "causal" and tokenizer.eos_token_id is None:
        warnings.warn(
            "the tokenizer has no end-of-text token (eos_token), so documents end without one and "
            "the model will not learn where to stop.",
            stacklevel=3,
        )
    known: Iterable[int | str] = ()
    if like is not None and form.task != "regression":
        known = like.label_names or range(like.num_labels or 0)
    columns, labels = _find_columns(first, form), Labels(form.task, known)
    return ENCODERS[form.task](tokenizer, columns, labels, form.max_length)


# --------------------------------------------------------------------------------------------------
# Columns


def _find_columns(record: Record, form: Form) -> dict[str, str]:
    """The column of each role, in the order in which they are used.

    Raises:
        DataError: there is none for a role that needs one.
    """
    named, there = form.columns, record.values
    for role, name in named.items():
        if role not in ("input", "system", "tools"):  # which single records may lack
            record.value(name)

    def find(role: str, usual: Sequence[str]) -> str:
        found = named.get(role) or next((name for name in usual if name in there), None)
        if found is None:
            what = f"there is no column for the {role}. Found {listed(there)}; looked for"
            advice = f"Say which column it is ({role} = 'NAME' under [columns] of a TOML file)"
            raise record.error(f"{what} {listed(usual)}. {advice}, or name another task.")
        return found

    if form.task in USUAL:
        return {role: find(role, usual) for role, usual in USUAL[form.task].items()}
    if form.task == "instruct":
        beside = {role: name for role, name in named.items() if role in BESIDE}
        if not named:
            usual = ((role, next((n for n in BESIDE[role] if n in there), "")) for role in BESIDE)
            beside = {role: name for role, name in usual if name}
        if "messages" in named or (not named and any(name in there for name in MESSAGES)):
            return {"messages": find("messages", MESSAGES), **beside}
        prompt = find("prompt", PROMPTS)
        about = named.get("input") or (None if "prompt" in named else INPUTS.get(prompt))
        middle = {"input": about} if about else {}
        completion = find("completion", COMPLETIONS)
        return {"prompt": prompt, **middle, "completion": completion, **beside}
    if form.task in JUDGED:
        prompt = named.get("prompt") or next((name for name in PROMPTS if name in there), "")
        found = {role: find(role, usual) for role, usual in JUDGED[form.task].items()}
        return {**({"prompt": prompt} if prompt else {}), **found}
    text = find("text", SENTENCES)
    pair = named.get("pair")
    if pair is None and "text" not in named and PAIRS.get(text) in there:
        pair = PAIRS[text]
    return {"text": text, **({"pair": pair} if pair else {}), "label": find("label", LABELS)}
