"""The display of a terminal, by rich; imported only where rich is installed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TextIO, final

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from l2l.train.display import Display, Level, Status

REFRESH_SECONDS = 0.2


@final
class _StepsAndFacts(Progress):
    """A bar of the steps, and below it a line for each fact that is known."""

    facts: Iterable[tuple[str, str]] = ()

    @override
    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        lines = Table.grid(padding=(0, 2))
        for name, value in self.facts:
            lines.add_row(name, Text(value))
        yield lines


@final
class LiveDisplay(Display):
    """A bar and a table that are redrawn in place.

    They are drawn by whoever calls `show`: a thread of rich's own would take turns with those that
    update weights.
    """

    def __init__(self, stream: TextIO, *, level: Level = Level.USUAL) -> None:
        """Nothing is drawn before the first step."""
        super().__init__(stream, every_steps=1, level=level)
        columns = ("step", MofNCompleteColumn(), BarColumn(), TaskProgressColumn())
        console = Console(file=stream)
        self._progress = _StepsAndFacts(*columns, console=console, auto_refresh=False)
        self._last = 0.0

    @override
    def _write(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @override
    def show(self, status: Status) -> None:
        steps = self._progress
        if not steps.tasks:
            steps.add_task("", total=status.num_steps)
        elif status.step < status.num_steps and time.monotonic() - self._last < REFRESH_SECONDS:
            return
        self._last = time.monotonic()
        steps.start()
        steps.facts = status.parts()
        steps.update(steps.task_ids[0], completed=status.step, refresh=True)

    @override
    def close(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()
