"""The plan that a run goes by, in its folder, and what it takes to plan for its model again.

`plan.json` is one JSON object: the entries of the plan, the shapes of a step's tensors, and how
many classes the data have. A run writes it once, after its first step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from l2l.files import write_file
from l2l.planner import (
    Bounds,
    Hardware,
    KeptPlans,
    LedgerLine,
    Plan,
    Prospects,
    foresee,
    look,
    measured_hardware,
)
from l2l.train.prepared import engine_options, make_model, make_tokenizer
from l2l.train.settings import Settings

MOST_BYTES = 1 << 20  # of a plan.json
MOST_NAME = 64
PRIVATE = ("first_step", "measured", "scaling")  # entries of a plan that are of no use later


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a `plan.json` has."""

    plan: Plan
    num_steps: int  # of the run
    outline: Mapping[str, Tensor]  # of a step, without values
    num_labels: int | None = None

    def write(self, path: Path) -> None:
        """Write it down."""
        plan = {name: one for name, one in asdict(self.plan).items() if name not in PRIVATE}
        shapes = {
            name: [str(one.dtype).removeprefix("torch."), *one.shape]
            for name, one in self.outline.items()
        }
        found = {
            "num_steps": self.num_steps,
            "num_labels": self.num_labels,
            "batch": shapes,
            "plan": plan,
        }
        write_file(path, json.dumps(found) + "\n")

    @classmethod
    def read(cls, path: Path) -> Planned | None:
        """What a run has written; None: it has not.

        Raises:
            ValueError: it is something else.
        """
        if not path.exists():
            return None
        try:
            if path.stat().st_size > MOST_BYTES:
                raise ValueError(f"it is larger than {MOST_BYTES} bytes")
            found = json.loads(path.read_text())
            number = found["num_labels"]
            return cls(
                plan=_plan_of(found["plan"]),
                num_steps=int(found["num_steps"]),
                outline={str(name): _outline(one) for name, one in found["batch"].items()},
                num_labels=None if number is None else int(number),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise ValueError(
                f"{path} is not a plan as l2l train writes it: {type(error).__name__}: {error}. "
                "Delete the file: training does not need it."
            ) from error

    def prospects(self, settings: Settings) -> Prospects:
        """Plan again for the run's model on its machine, and for other memory.

        Raises:
            ValueError: the model is not there any more, or cannot be planned for.
        """
        tokenizer = make_tokenizer(settings)
        model = make_model(
            settings, tokenizer=tokenizer, num_labels=self.num_labels, label_names=()
        )
        options, plan = engine_options(settings), self.plan
        if plan.host_limit_bytes is not None:
            options["host_memory"] = plan.host_limit_bytes
        if plan.budget_bytes is not None:
            options["device_memory"] = plan.budget_bytes
        options["disk"] = _disk_of(settings)
        return foresee(
            look(
                model,
                self.outline,
                compile=settings.training.compile is not False,
                hardware=plan.machine or measured_hardware(),
                kept=KeptPlans.of_user(),
                **options,
            )
        )


def outline_of(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """A batch without values."""
    tensors = {name: one for name, one in batch.items() if isinstance(one, Tensor)}
    return {name: torch.empty_like(one, device="meta") for name, one in tensors.items()}


def _disk_of(settings: Settings) -> str | None:
    """The run's disk by its figures: a report measures nothing."""
    memory = settings.memory
    if memory.disk is None:
        return None
    if memory.disk_rates is None or memory.disk_size is None:
        raise ValueError(
            "the run keeps optimizer state on a disk whose figures are not in its settings: give "
            "[memory] disk_rates and disk_size for plans to be made again."
        )
    return f"{memory.disk_size}@{memory.disk_rates}"


def _plan_of(found: Mapping[str, Any]) -> Plan:
    """A plan, every number of it checked: the file may be anybody's."""

    def maybe(name: str, kind: type) -> Any:
        value = found.get(name)
        return None if value is None else kind(value)

    bounds, machine = found.get("bounds"), found.get("machine")
    return Plan(
        ledger=tuple(
            LedgerLine(
                str(one["place"]), str(one["purpose"]), int(one["nbytes"]), str(one["phase"])
            )
            for one in found["ledger"]
        ),
        choices=tuple((str(name), str(value)) for name, value in found["choices"]),
        budget_bytes=maybe("budget_bytes", int),
        predicted_seconds=maybe("predicted_seconds", float),
        bound=maybe("bound", str),
        bounds=None if bounds is None else _bounds_of(bounds),
        num_tokens=maybe("num_tokens", int),
        disk_read_bytes=int(found.get("disk_read_bytes", 0)),
        disk_written_bytes=int(found.get("disk_written_bytes", 0)),
        machine=None if machine is None else Hardware.of_json(json.dumps(machine)),
        host_limit_bytes=maybe("host_limit_bytes", int),
    )


def _bounds_of(found: Mapping[str, Any]) -> Bounds:
    lane, seconds = (
        str(found["lane"]),
        {name: float(found[name]) for name in found if name != "lane"},
    )
    made = Bounds(lane=lane, **seconds)
    if lane not in made.seconds:
        raise ValueError(f"no lane is called {lane!r}")
    return made


def _outline(one: Any) -> Tensor:
    name, *shape = one
    kind = getattr(torch, name) if re.fullmatch(r"[a-z0-9_]+", name) else None
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"no type of numbers is called {name[:MOST_NAME]!r}")
    return torch.empty([int(size) for size in shape], dtype=kind, device="meta")
