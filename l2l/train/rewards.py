"""Rewards written in Python: functions of a user's file.

    def is_short(prompts, completions, **columns):
        return [-len(text) for text in completions]

A function is given lists of equal length: the prompts as the data have them, completions (texts; of
chats a list with the assistant's message), `completion_ids`, and every other column of the data
under its name. It gives a number for each, or None where it has nothing to say.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from l2l.train.folder import TrainingError

Function = Callable[..., Sequence[float | None]]


@final
@dataclass(frozen=True, slots=True)
class Rewards:
    """Some functions, and what each counts."""

    functions: Mapping[str, Function]  # by name
    weights: Tensor  # [functions]

    @classmethod
    def of(cls, words: Sequence[str], weights: Sequence[float] | None) -> Rewards:
        """Read them, each as FILE.py:FUNCTION.

        Raises:
            TrainingError: one is not there.
        """
        found = {word.rpartition(":")[2]: _function(word) for word in words}
        if len(found) < len(words):
            raise TrainingError("two rewards have the same name. Expected names that differ.")
        return cls(found, torch.tensor(weights or [1.0] * len(words)))

    def of_completions(self, **given: Sequence[Any]) -> Tensor:
        """What each function says of each completion, [completions, functions]; NaN: nothing.

        Raises:
            TrainingError: one gives something else.
        """
        number = len(given["completions"])
        rows = [self._said(name, number, given) for name in self.functions]
        return torch.tensor(rows, dtype=torch.float32).T

    def total(self, each: Tensor) -> Tensor:
        """The rewards of completions, [completions]."""
        return (each * self.weights).nansum(1)

    def _said(self, name: str, number: int, given: Mapping[str, Any]) -> list[float]:
        said = list(self.functions[name](**given))
        numbers = [math.nan if one is None else one for one in said]
        is_known = all(isinstance(one, int | float) for one in numbers)
        if len(said) != number or not is_known:
            what = f"{len(said)} values" if is_known else f"{said!r:.60}"
            raise TrainingError(
                f"the reward {name} has given {what} for {number} completions. Expected a number "
                "for each, or None."
            )
        return [float(one) for one in numbers]


def _function(word: str) -> Function:
    path, _, name = word.rpartition(":")
    if not path or not Path(path).is_file():
        raise TrainingError(
            f"the reward {word!r}: there is no file {path or word}. Expected FILE.py:FUNCTION."
        )
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise TrainingError(f"the reward {word!r}: {path} has no function {name!r}.")
    function: Function = found
    return function
