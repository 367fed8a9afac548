"""Which columns of a record are used for what.

A task has roles: the text, its label, the prompt, the answer to it. Which column plays which role
is found by the names that are usual for it, in the first record, unless it is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from l2l.train.data.reading import DataError, Record, did_you_mean, listed

Task = Literal["causal", "instruct", "classification", "regression"]
ROLES: Mapping[str, tuple[str, ...]] = {
    "causal": ("text",),
    "instruct": ("messages", "prompt", "input", "completion"),
    "classification": ("text", "pair", "label"),
    "regression": ("text", "pair", "label"),
}

TEXTS = ("text", "content", "document")
MESSAGES = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "instruction", "question", "query", "input")
COMPLETIONS = ("completion", "output", "response", "answer")
INPUTS = {"instruction": "input"}  # what such a prompt is about, where it is there and not blank
SENTENCES = ("sentence1", "premise", "question1", "text1", "text", "question", "sentence")
PAIRS = {  # what goes with such a text, if it is there
    "sentence1": "sentence2",
    "premise": "hypothesis",
    "question1": "question2",
    "text1": "text2",
    "text": "text_pair",
    "question": "sentence",
}
LABELS = ("label", "labels", "score", "target", "class")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names of columns; None: found by their usual names.

    Once the text is named, a pair is used only if it is named too; so with prompt and input.
    """

    text: str | None = None
    """Of causal, classification and regression."""
    pair: str | None = None
    """The second text of classification and regression; optional."""
    label: str | None = None
    """Of classification and regression."""
    prompt: str | None = None
    """Of instruct."""
    input: str | None = None
    """What the prompt is about; follows it after a blank line; optional, also in single records."""
    completion: str | None = None
    """The answer to the prompt."""
    messages: str | None = None
    """A conversation: a list of objects with `role` and `content`; of instruct, alone."""

    def given(self) -> dict[str, str]:
        """Those that are named."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        return {role: name for role, name in named.items() if name is not None}

    def check(self, task: str) -> None:
        """Refuse what a task does not use.

        Raises:
            ValueError: a column is named that the task does not use, or one too many.
        """
        given = self.given()
        for role in given:
            if role not in ROLES[task]:
                raise ValueError(
                    f"columns name the {role}, which task {task!r} does not use. Expected "
                    f"{', '.join(ROLES[task])}."
                )
        if "messages" in given and len(given) > 1:
            raise ValueError(
                f"columns name messages and {', '.join(sorted(given.keys() - {'messages'}))}. "
                "Expected messages alone, or prompt and completion."
            )


def find_columns(record: Record, *, task: str, columns: Columns) -> dict[str, str]:
    """The column of each role, in the order in which they are used.

    Raises:
        DataError: there is none for a role that needs one.
    """
    given = columns.given()
    for role, name in given.items():
        if role != "input":
            value_of(record, name)

    def find(role: str, usual: Sequence[str]) -> str:
        found = given.get(role) or next((name for name in usual if name in record.values), None)
        if found is None:
            raise DataError(
                f"{record.place}: there is no column for the {role}. Found "
                f"{listed(list(record.values))}; looked for {listed(usual)}. Say which column it "
                f"is ({role} = 'NAME' under [columns] of a TOML file), or name another task."
            )
        return found

    if task == "causal":
        return {"text": find("text", TEXTS)}
    if task == "instruct":
        if "messages" in given or (not given and any(name in record.values for name in MESSAGES)):
            return {"messages": find("messages", MESSAGES)}
        prompt = find("prompt", PROMPTS)
        about = given.get("input") or (None if "prompt" in given else INPUTS.get(prompt))
        middle = {"input": about} if about else {}
        return {"prompt": prompt, **middle, "completion": find("completion", COMPLETIONS)}
    text = find("text", SENTENCES)
    pair = given.get("pair")
    if pair is None and "text" not in given and PAIRS.get(text) in record.values:
        pair = PAIRS[text]
    return {"text": text, **({"pair": pair} if pair else {}), "label": find("label", LABELS)}


def value_of(record: Record, column: str) -> Any:
    """What a record has in a column.

    Raises:
        DataError: it has no such column.
    """
    if column not in record.values:
        raise DataError(
            f"{record.place}: there is no column {column!r}. Found {listed(list(record.values))}."
            f"{did_you_mean(column, record.values)}"
        )
    return record.values[column]
