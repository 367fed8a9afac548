"""Spans of a run: which action ran on which lane, from when to when.

Each span has the text of its line in the schedule. A trace can be written in the Chrome format
(open it in Perfetto or chrome://tracing) and summed up: how much of the time each lane was busy,
how much of the host's updates lay under device compute, and what bound the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import final

SOURCES = {
    "host": ("update",),
    "link": ("fetch", "drain", "stash", "unstash", "lend"),
    "disk": ("read", "write"),
}
MOSTLY_BUSY = 0.1  # of the time: with less idle than this the device itself is the bound


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one lane; seconds since the trace began."""

    lane: str
    text: str
    start: float
    end: float


@final
@dataclass(slots=True)
class Trace:
    """Spans in no particular order."""

    spans: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(span.end for span in self.spans) - min(span.start for span in self.spans)

    def busy_seconds(self, lane: str) -> float:
        """Time in which a lane had something to do."""
        return sum(end - start for start, end in _merged(self._of(lane)))

    def overlap_seconds(self, lane: str, other: str) -> float:
        """Time in which both lanes had something to do."""
        return _overlap(_merged(self._of(lane)), _merged(self._of(other)))

    def idle_seconds(self) -> dict[str, float]:
        """Time in which the device computed nothing, by who was at work meanwhile."""
        busy = _merged(self._of("compute"))
        idle = [(end, start) for (_, end), (start, _) in pairwise(busy)]
        found = {"in all": sum(end - start for start, end in idle)}
        for name, lanes in SOURCES.items():
            spans = _merged(one for lane in lanes for one in self._of(lane))
            found[name] = _overlap(idle, spans)
        return found

    def bound(self) -> str:
        """What the time was bound by: "compute", "link", "host" or "disk"."""
        idle = self.idle_seconds()
        if idle["in all"] <= MOSTLY_BUSY * self.seconds:
            return "compute"
        return "host" if idle["host"] >= idle["link"] else "link"

    def summary(self) -> str:
        """One line per lane, busy seconds and share of the trace; then what bound it."""
        lanes = sorted({span.lane for span in self.spans})
        rows = [f"{'lane':<10}{'busy':>10}{'share':>8}   over {self.seconds:.3f} s"]
        for lane in lanes:
            busy = self.busy_seconds(lane)
            rows.append(f"{lane:<10}{busy:>8.3f} s{busy / max(self.seconds, 1e-9):>8.1%}")
        idle = self.idle_seconds()
        rows.append(
            f"{self.bound()} bound: the device computed nothing for {idle['in all']:.3f} s; the "
            f"host was updating in {idle['host']:.3f} s of that, the link copying in "
            f"{idle['link']:.3f} s"
        )
        return "\n".join(rows)

    def write(self, path: Path) -> None:
        """Write the trace in the Chrome format."""
        lanes = sorted({span.lane for span in self.spans})
        events = [
            {
                "name": span.text,
                "ph": "X",
                "pid": 0,
                "tid": lanes.index(span.lane),
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
            }
            for span in self.spans
        ]
        events += [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": index, "args": {"name": lane}}
            for index, lane in enumerate(lanes)
        ]
        path.write_text(json.dumps({"traceEvents": events}))

    def _of(self, lane: str) -> Iterable[tuple[float, float]]:
        return ((span.start, span.end) for span in self.spans if span.lane == lane)


def _overlap(mine: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> float:
    """Time that lies in ranges of both."""
    return sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in mine
        for other_start, other_end in theirs
    )


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans as disjoint ranges, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
