"""What the time until the end of the first step goes to."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import final


@final
class Timeline:
    """Seconds by phase, of everything that is done once: until the first step was handed over."""

    def __init__(self) -> None:
        """Nothing has been done."""
        self.seconds: dict[str, float] = {}
        self.is_over = False  # whether the first step was handed over
        self._inner = 0.0  # seconds of phases within the one that runs

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block, but for phases inside it."""
        outer, self._inner, began = self._inner, 0.0, time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.add(name, took - self._inner)
            self._inner = outer + took

    def add(self, name: str, seconds: float) -> None:
        """Count some more of a phase."""
        if not self.is_over:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def move(self, seconds: float, name: str, *, out_of: str) -> None:
        """Count some of a phase as another."""
        self.add(name, seconds)
        self.add(out_of, -seconds)
