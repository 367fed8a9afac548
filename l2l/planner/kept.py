"""Plans that were made before, for the same problem on the same machine: they are not looked for.

A search takes seconds and always finds the same. It is kept under a hash of what it depends on: our
code, sizes and costs of the model's parts, the batch, what was asked for, the machine's rates, the
budget. How much host memory is free differs a little from run to run, and so does what is free of
the device where no budget was given: these count roughly, and a plan that does not fit any more is
looked for anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, final

from l2l.files import cache_folder, own_source, write_file
from l2l.planner.decisions import Decisions
from l2l.planner.hardware import Hardware
from l2l.planner.memory import Memory
from l2l.planner.problem import Problem
from l2l.planner.search import SLACK, Candidate

FINDINGS = ("rows", "seconds", "bound")  # of a candidate, beside its decisions


@final
class KeptPlans:
    """Plans in a folder, by hash."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` None: nothing is kept."""
        self._folder = folder

    @classmethod
    def of_user(cls) -> KeptPlans:
        """In the user's cache folder, if there is one."""
        folder = cache_folder()
        return cls(None if folder is None else folder / "plans")

    def find(
        self,
        search: Callable[..., Candidate],
        problem: Problem,
        hardware: Hardware,
        *,
        budget_bytes: int,
        is_given: bool,
        **asked: Any,
    ) -> Candidate:
        """The plan that was found before, or what a search finds now.

        Args:
            search: finds a plan: `find_plan`.
            problem: what for.
            hardware: where.
            budget_bytes: of device memory.
            is_given: whether the user has named it.
            asked: what else the search is asked for.
        """
        search = partial(search, problem, hardware, budget_bytes=budget_bytes, **asked)
        if self._folder is None:
            return search()
        budget = str(budget_bytes) if is_given else f"{budget_bytes / hardware.device_bytes:.2f}"
        words = [own_source(), *_words(problem, hardware), budget, repr(sorted(asked.items()))]
        path = self._folder / f"{hashlib.sha256(repr(words).encode()).hexdigest()}.json"
        known = _read(path, Memory(problem), budget_bytes * (1 - SLACK))
        if known is not None:
            return known
        found = search()
        with contextlib.suppress(OSError, TypeError):
            text = {name: getattr(found, name) for name in FINDINGS}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(
                path, json.dumps({**text, "decisions": asdict(found.decisions)}), shared=True
            )
        return found


def _words(problem: Problem, hardware: Hardware) -> tuple[str, ...]:
    """What a search depends on; roughly, where it differs from run to run."""
    host = round(4 * math.log2(max(1, problem.host_limit_bytes)))
    exact = replace(problem, host_limit_bytes=0, context_bytes=0)
    return repr(exact), repr(replace(hardware, context_bytes=0)), str(host)


def _read(path: Path, memory: Memory, limit: float) -> Candidate | None:
    """A plan that was kept, if there is one and it fits."""
    try:
        found = json.loads(path.read_text())
        decisions = Decisions(**found.pop("decisions"))
        candidate = Candidate(decisions=decisions, ledger=memory.ledger(decisions), **found)
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None
    fits = memory.peak_bytes(decisions) <= limit and memory.fits_host(decisions)
    return candidate if fits else None
