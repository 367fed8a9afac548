"""Labels of rows: a class or a number for each example."""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from l2l.train.data.reading import DataError, Record, did_you_mean, listed, shown

MAX_DIGITS = 4000  # of a text that Python makes a number of


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of training, which hold for other data too."""

    number: int
    names: tuple[str, ...] = ()  # in the order of their numbers; empty: they were integers


class RowLabels(ABC):
    """Collects labels, and makes them numbers."""

    @abstractmethod
    def add(self, value: Any, record: Record) -> None:
        """The label of the next example.

        Raises:
            DataError: it is none.
        """

    @abstractmethod
    def finish(self) -> tuple[Tensor, Classes]:
        """All labels as numbers, and what they may be; for regression, that is one.

        Raises:
            DataError: together they make no sense.
        """


@final
class NumberLabels(RowLabels):
    """Finite numbers, for regression."""

    def __init__(self) -> None:
        self._values = array("d")

    @override
    def add(self, value: Any, record: Record) -> None:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise DataError(
                f"{record.place}: the label is {shown(value)}. Expected a finite number, as the "
                "task is regression."
            )
        self._values.append(number)

    @override
    def finish(self) -> tuple[Tensor, Classes]:
        return torch.tensor(self._values, dtype=torch.float32), Classes(1)


class _Kind(enum.Enum):
    NUMBERS = "integers"
    NAMES = "texts"


@final
class ClassLabels(RowLabels):
    """Integers from 0 on; or texts, which are numbered in their order (by value, if digits)."""

    def __init__(self, classes: Classes | None) -> None:
        self._classes = classes
        self._seen: dict[int | str, int] = {}  # label -> the how manieth to be met
        self._met = array("q")
        self._kind: _Kind | None = None
        if classes is not None:
            self._kind = _Kind.NAMES if classes.names else _Kind.NUMBERS

    @override
    def add(self, value: Any, record: Record) -> None:
        label = _parse(value, record)
        kind = _Kind.NAMES if isinstance(label, str) else _Kind.NUMBERS
        self._kind = self._kind or kind
        if kind is not self._kind:
            whose = "before" if self._classes is None else "of the training data"
            raise DataError(
                f"{record.place}: the label is {shown(value)}, but the labels {whose} are "
                f"{self._kind.value}. Expected one kind."
            )
        if label not in self._seen:
            self._check_known(label, record)
            self._seen[label] = len(self._seen)
        self._met.append(self._seen[label])

    @override
    def finish(self) -> tuple[Tensor, Classes]:
        classes = self._classes
        if self._kind is _Kind.NAMES:
            seen = [str(label) for label in self._seen]
            digits = all(one.isdecimal() and len(one) <= MAX_DIGITS for one in seen)
            order: Callable[[str], Any] = int if digits else str
            names = classes.names if classes else tuple(sorted(seen, key=order))
            numbers = [names.index(name) for name in seen]
            classes = classes or Classes(len(names), names)
        else:
            numbers = [int(label) for label in self._seen]
            if classes is None and sorted(numbers) != list(range(len(numbers))):
                raise DataError(
                    f"the labels are {listed(sorted(numbers))}. Expected integers from 0 on, each "
                    "at least once, or texts. Number them so, or write them as texts."
                )
            classes = classes or Classes(len(numbers))
        if classes.number < 2:
            raise DataError(
                f"all labels are {listed([*self._seen])}. Expected at least two classes."
            )
        return torch.tensor(numbers)[torch.tensor(self._met)], classes

    def _check_known(self, label: int | str, record: Record) -> None:
        if self._classes is None:
            return
        known: Sequence[Any] = self._classes.names or range(self._classes.number)
        if label not in known:
            near = did_you_mean(label, known) if isinstance(label, str) else ""
            raise DataError(
                f"{record.place}: the label {label!r} is not among those of the training data: "
                f"{listed(known)}.{near}"
            )


def _parse(value: Any, record: Record) -> int | str:
    if isinstance(value, str) and value.strip():
        return value.strip()
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not whole or value < 0:
        raise DataError(
            f"{record.place}: the label is {shown(value)}. Expected a class: an integer from 0 on, "
            "or a text. For other numbers, the task is regression."
        )
    return int(value)
