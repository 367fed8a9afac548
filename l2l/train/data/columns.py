"""Which columns of a record are used for what.

A task has roles: the text, its label, the prompt, the answer to it. Which column plays which role
is found by the names that are usual for it, in the first record, unless it is named. Once the text
is named, a pair is used only if it is named too; so with prompt and input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from l2l.train.data.reading import Record, listed

Task = Literal["causal", "instruct", "classification", "regression"]
ROLES: Mapping[Task, tuple[str, ...]] = {
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
            roles, task = ("messages",), f"{task} with messages"
        others = [role for role in self.columns if role not in roles]
        if others:
            what = f"columns name the {others[0]}, which {task} does not use"
            raise ValueError(f"{what}. Expected {', '.join(roles)}.")


def find_columns(record: Record, form: Form) -> dict[str, str]:
    """The column of each role, in the order in which they are used.

    Raises:
        DataError: there is none for a role that needs one.
    """
    named, there = form.columns, record.values
    for role, name in named.items():
        if role != "input":  # which single records may lack
            record.value(name)

    def find(role: str, usual: Sequence[str]) -> str:
        found = named.get(role) or next((name for name in usual if name in there), None)
        if found is None:
            raise record.error(
                f"there is no column for the {role}. Found {listed(there)}; looked for "
                f"{listed(usual)}. Say which column it is ({role} = 'NAME' under [columns] of a "
                "TOML file), or name another task."
            )
        return found

    if form.task == "causal":
        return {"text": find("text", TEXTS)}
    if form.task == "instruct":
        if "messages" in named or (not named and any(name in there for name in MESSAGES)):
            return {"messages": find("messages", MESSAGES)}
        prompt = find("prompt", PROMPTS)
        about = named.get("input") or (None if "prompt" in named else INPUTS.get(prompt))
        middle = {"input": about} if about else {}
        return {"prompt": prompt, **middle, "completion": find("completion", COMPLETIONS)}
    text = find("text", SENTENCES)
    pair = named.get("pair")
    if pair is None and "text" not in named and PAIRS.get(text) in there:
        pair = PAIRS[text]
    return {"text": text, **({"pair": pair} if pair else {}), "label": find("label", LABELS)}
