"""Which of the parameters of a test `make test` tries; `make thorough` tries the others."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], is_kept: Callable[[Any], bool]) -> list[Any]:
    """The same values for `pytest.mark.parametrize`; those that are not kept are thorough."""
    return [
        pytest.param(
            *(one if isinstance(one, tuple) else (one,)),
            marks=() if is_kept(one) else pytest.mark.thorough,
        )
        for one in values
    ]
