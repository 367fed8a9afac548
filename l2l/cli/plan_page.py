"""The page of a plan."""

from __future__ import annotations

from pathlib import Path

from l2l.device import format_bytes
from l2l.files import write_file
from l2l.page import (
    PLANNED,
    Document,
    Section,
    budget_section,
    choices_section,
    ledger_section,
    page_of,
    step_section,
)
from l2l.planner import Preview, Prospects, foresee


def write_plan(path: Path, name: str, preview: Preview) -> str:
    """Write the page of a plan; returns where it is.

    Raises:
        PageError: plotly is not installed.
    """
    write_file(path, page_of(plan_document(name, foresee(preview))))
    return str(path)


def prospect_sections(prospects: Prospects, *, measured: float | None = None) -> list[Section]:
    """What a simulated step and other budgets have to show."""
    assert prospects.plan.machine is not None
    machine = prospects.plan.machine.device_name
    return [
        step_section(prospects.plan, prospects.simulation),
        budget_section(prospects, machine=machine, measured=measured),
    ]


def plan_document(name: str, prospects: Prospects) -> Document:
    """A plan as a page."""
    plan = prospects.plan
    seconds, tokens, machine = plan.predicted_seconds, plan.num_tokens, plan.machine
    assert seconds is not None
    assert tokens is not None
    assert machine is not None
    peak, host = plan.total_bytes("device"), plan.total_bytes("host")
    choices = dict(plan.choices)
    rows, _, positions = choices.get("microbatch", "").partition(", ")
    number = int(choices["parameters"].replace(",", ""))
    return Document(
        title=Path(name).name,
        about=[f"A plan for {machine.device_name}. Nothing of it was measured."],
        status="plan",
        cards=[
            (
                "tokens/s",
                f"{tokens / seconds:,.0f}",
                f"{seconds:.3g} s a step of {tokens:,} tokens",
            ),
            ("bound by", plan.bound or "", "the lane that is busiest"),
            ("device memory", format_bytes(peak), f"of {format_bytes(plan.budget_bytes or 0)}"),
            ("host memory", format_bytes(host), ""),
            ("parameters", f"{number / 1e9:.3g} billion", choices["precision"]),
            ("microbatch", rows, positions),
        ],
        sections=[
            ledger_section(plan, kind=PLANNED),
            *prospect_sections(prospects),
            choices_section(plan, kind=PLANNED),
        ],
    )
