"""What more memory would buy: plans of one model for other budgets, another host, a disk.

All of them are plans: simulated with the rates of one machine, not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from l2l.device import format_bytes, parse_bytes
from l2l.parameter_server import HostBudget
from l2l.planner.decisions import Plan
from l2l.planner.disk_tier import DiskTier, refuse_disk
from l2l.planner.planning import Planning
from l2l.planner.preview import UNLIMITED, Preview
from l2l.planner.simulation import Simulation

GIB = 2**30
LADDER = (
    1 / 16,
    1 / 8,
    1 / 4,
    1 / 2,
    1,
    1.5,
    2,
    3,
    4,
    6,
    8,
    12,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
)  # GiB of device memory
ENOUGH_GAIN = 0.01  # of speed; a budget that brings less than this brings nothing
NUM_IN_VAIN = 3  # budgets in a row, after which no larger one is planned for
MORE_DEVICE, MORE_HOST = "4GiB", "64GB"
DISK = "2TB@6.5/5GB/s"  # an SSD by its data sheet
SPARED = (0.5, 0.65, 0.8)  # of the host's memory, that a plan with a disk does with


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A step with some memory, as it is planned."""

    budget_bytes: int  # of the device
    host_bytes: int  # that it takes
    seconds: float
    bound: str
    compute_seconds: float  # of its matrix products alone, at their rate; 0: not known
    disk_read_bytes: int = 0

    @classmethod
    def of(cls, planned: Plan) -> Prospect:
        """That of a plan with a budget."""
        assert planned.budget_bytes is not None
        assert planned.predicted_seconds is not None
        assert planned.bound is not None
        return cls(
            budget_bytes=planned.budget_bytes,
            host_bytes=planned.total_bytes("host"),
            seconds=planned.predicted_seconds,
            bound=planned.bound,
            compute_seconds=0.0 if planned.bounds is None else planned.bounds.compute,
            disk_read_bytes=planned.disk_read_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """More of something, what a step would be with it, and what is to be said of that."""

    name: str
    prospect: Prospect | None  # None: it cannot be had, or changes nothing
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospects:
    """A plan, its step line by line, and what other memory would make of it."""

    plan: Plan
    simulation: Simulation
    by_budget: tuple[Prospect, ...]  # smallest first; what does not fit is not there
    purchases: tuple[Purchase, ...]


def foresee(preview: Preview) -> Prospects:
    """Plan for the memory that was asked for, and for other memory.

    Raises:
        DoesNotFitError: the model does not fit the memory that was asked for.
        ValueError: it cannot be planned for.
    """
    made = preview.planned()
    planned = preview.plan(made)
    now = Prospect.of(planned)
    return Prospects(
        plan=planned,
        simulation=made.simulate(),
        by_budget=_by_budget(preview, now),
        purchases=tuple(_purchases(preview, made, now)),
    )


def _with_budget(preview: Preview, budget_bytes: int) -> Prospect | None:
    """None: the model does not fit it."""
    try:
        return Prospect.of(preview.plan(preview.planned(budget_bytes=budget_bytes)))
    except ValueError:
        return None


def _by_budget(preview: Preview, now: Prospect) -> tuple[Prospect, ...]:
    """From the smallest budget that fits to where more brings nothing."""
    rungs = [int(rung * GIB) for rung in LADDER]
    found = [now]
    for budget in reversed([rung for rung in rungs if rung < now.budget_bytes]):
        smaller = _with_budget(preview, budget)
        if smaller is None:
            break
        found.insert(0, smaller)
    in_vain = 0
    for budget in (rung for rung in rungs if rung > now.budget_bytes):
        larger = _with_budget(preview, budget)
        if larger is not None:
            in_vain = 0 if larger.seconds < (1 - ENOUGH_GAIN) * found[-1].seconds else in_vain + 1
            found.append(larger)
        if in_vain == NUM_IN_VAIN:
            break
    return tuple(found)


def _purchases(preview: Preview, made: Planning, now: Prospect) -> Iterator[Purchase]:
    more = _with_budget(preview, now.budget_bytes + parse_bytes(MORE_DEVICE, name="MORE_DEVICE"))
    yield Purchase(name="4 GiB more on the device", prospect=more, note="")
    name = "64 GB more on the host"
    if made.host.limit_bytes >= UNLIMITED:
        note = (
            f"host memory is not limited in this plan, which takes {format_bytes(now.host_bytes)}"
        )
        yield Purchase(name=name, prospect=None, note=note)
    else:
        limit = made.host.limit_bytes + parse_bytes(MORE_HOST, name="MORE_HOST")
        richer = _with_host(preview, limit, None)
        limits = format_bytes(now.host_bytes), format_bytes(made.host.limit_bytes)
        note = "{} of {} are taken as it is".format(*limits)
        yield Purchase(name=name, prospect=richer, note=note)
    yield _with_disk(preview, made, now)


def _with_disk(preview: Preview, made: Planning, now: Prospect) -> Purchase:
    """An SSD lets a host do with less memory."""
    name = "an SSD (2 TB, 6.5 GB/s reading, 5 GB/s writing)"
    if made.disk is not None:
        return Purchase(name=name, prospect=None, note="there is a disk in this plan already")
    try:
        refuse_disk(made.optimizer, is_parallel=False)
    except ValueError as error:
        return Purchase(name=name, prospect=None, note=str(error))
    tier = DiskTier.of_text(DISK)
    for share in SPARED:
        found = _with_host(preview, int(share * now.host_bytes), tier)
        if found is not None and found.disk_read_bytes:
            sizes = format_bytes(found.host_bytes), format_bytes(now.host_bytes)
            note = "with {} on the host instead of {}".format(*sizes)
            return Purchase(name=name, prospect=found, note=note)
    return Purchase(name=name, prospect=None, note="it would spare next to no host memory")


def _with_host(preview: Preview, limit_bytes: int, disk: DiskTier | None) -> Prospect | None:
    host = HostBudget(limit_bytes=limit_bytes, rule="planned")
    try:
        return Prospect.of(preview.plan(preview.planned(host=host, disk=disk)))
    except ValueError:
        return None
