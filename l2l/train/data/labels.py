"""Labels of rows: a class or a number for each example."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor

from l2l.train.data.reading import DataError, Record, did_you_mean, listed, shown

MAX_DIGITS = 4000  # of a text that Python makes a number of
Class = int | str
EXPECTED = {
    "regression": "a finite number, as the task is regression",
    "classification": "a class: an integer from 0 on, or a text; or another task, as regression",
}


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
            raise record.error(f"the label is {shown(value)}. Expected {EXPECTED[self._task]}.")
        other = next(iter(self._known or self._labels), label)
        if type(label) is not type(other):
            whose = "of the training data" if self._known else "before"
            kind = "texts" if isinstance(other, str) else "integers"
            what = f"the label is {shown(value)}, but the labels {whose} are {kind}"
            raise record.error(f"{what}. Expected one kind.")
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
    are_texts = isinstance(classes[0], str)
    if are_texts and not all(one.isdecimal() and len(one) <= MAX_DIGITS for one in classes):
        return sorted(classes)
    found = sorted(classes, key=int)
    if not are_texts and found != list(range(len(found))):
        raise DataError(
            f"the labels are {listed(found)}. Expected integers from 0 on, each at least once, or "
            "texts. Number them so, or write them as texts."
        )
    return found
