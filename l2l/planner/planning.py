"""An engine's plan: made from its first batch, kept, compared with what is then measured."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, final

from l2l.device import Device, format_bytes
from l2l.distributed import World
from l2l.model import TILE_TOKENS, Partition, num_rows, token_length
from l2l.parameter_server import HostBudget, HostKernel, Optimizer, UnitForm, UpdatePolicy
from l2l.planner.bounds import Bounds, Work
from l2l.planner.budget import Budget
from l2l.planner.cost_model import CostModel
from l2l.planner.decisions import STATE_ON_HOST, Decisions, LedgerLine, Plan, ScalingPoint
from l2l.planner.disk_tier import DiskTier
from l2l.planner.hardware import Hardware, known_hardware, remember
from l2l.planner.kept import KeptPlans
from l2l.planner.problem import Problem, Together
from l2l.planner.search import SLACK, Candidate, DoesNotFitError, find_plan
from l2l.planner.simulation import Simulation
from l2l.planner.subject import Findings, Subject
from l2l.run import Facts
from l2l.schedule import Shape

logger = logging.getLogger("l2l")

FREE_SHARE = 0.9  # of free device memory that is used if the user names no budget
MIN_KEPT_BACK = 32 << 20  # of a budget, once a plan has turned out too tight
NUM_MARKS = 4  # steps after which prediction and measurement are compared


@final
@dataclass(kw_only=True, eq=False)
class Planning:
    """Owner of an engine's choices.

    Without a `device`, `hardware` and `budget` say what the plan is for. `embedding` says
    where rows of tables are looked up: on the "host", the "device", or, with None, where it pays.
    `needs_slices` says that the head must come in slices, or in one: a loss asks for
    log-probabilities. `disk` is where what memory has no room for may go, perhaps yet to be
    measured; of `least_on_disk` layers state, and weights, are there from the beginning.
    """

    partition: Partition
    forms: Mapping[str, UnitForm]
    optimizer: Optimizer
    policy: UpdatePolicy
    budget: Budget
    host: HostBudget
    compiled: bool
    overrides: Mapping[str, Any]
    device: Device | None = None
    kernel: HostKernel | None = None
    world: World = field(default_factory=World)
    embedding: str | None = None
    needs_slices: bool = False
    hardware: Hardware | None = None
    kept: KeptPlans = field(default_factory=partial(KeptPlans, None))
    disk: DiskTier | Callable[[], DiskTier] | None = None
    least_on_disk: tuple[int, int] = (0, 0)
    spills: bool = True

    def __post_init__(self) -> None:
        slices = int(self.needs_slices)
        least = Decisions(num_head_slices=slices).with_parts(*self.least_on_disk)
        self.decisions = least.override(self.overrides)
        self._adopted: dict[str, Any] = {}  # choices of a checkpoint
        self._kept_back = 0  # bytes of the budget that plans leave alone, because one has failed
        self._num_tokens = 0
        self._is_whole = False  # whether a batch was planned as one microbatch
        self._marks: list[float] = []
        self.computed_share = 1.0  # of the positions of a batch; less where padding is left out
        self.measuring_seconds = 0.0  # of the machine, or to read what was measured
        self._problem: Problem | None = None
        self.adapt(self.partition, self.forms)

    def forget(self) -> None:
        """Let choices be made anew, as more is known of the model."""
        self._candidate: Candidate | None = None
        self._bounds: Bounds | None = None
        self._work = Work()  # of a step
        self._fits_plain = True  # whether there is room for passes that are not compiled
        self._most_tokens = 0  # of a microbatch, that the plan is for

    @property
    def _chosen(self) -> dict[str, Any]:
        return {**self._adopted, **self.overrides}

    def adopt(self, choices: Mapping[str, Any]) -> None:
        """Make these choices as a checkpoint says, where the user has not made them."""
        self._adopted = {k: v for k, v in choices.items() if k not in self.overrides}
        self.decisions = self.decisions.override(self._adopted)
        self.forget()

    def adapt(self, partition: Partition, forms: Mapping[str, UnitForm]) -> None:
        """Plan for other layers from here on."""
        self.partition, self.forms = partition, forms
        self.subject = Subject(
            partition=partition,
            forms=forms,
            optimizer=self.optimizer,
            policy=self.policy,
            host=self.host,
            compiled=self.compiled,
            device=self.device,
            world=self.world,
            embedding=self.embedding,
            needs_slices=self.needs_slices,
        )
        self.forget()
        self._marks.clear()

    def shape(
        self,
        facts: Facts,
        num_microbatches: int,
        *,
        whole_head: bool,
        **how: Any,
    ) -> Shape:
        """The shape of a step as it is decided now; arguments as for `Decisions.shape`."""
        route = facts.route or self.partition.straight
        if self.needs_slices and not whole_head:  # of this batch, which may be of another kind
            self.subject.refuse_slices(facts, None)
        return self.decisions.shape(
            num_microbatches=num_microbatches,
            layers=[self.subject.layers[layer] for layer in route.layers],
            route=route,
            outer=self.subject.outer_units(facts),
            update=self.policy,
            has_halves=self.subject.has_halves,
            parallel=self.world.is_parallel,
            whole_head=whole_head,
            **how,
        )

    def agree(self, decisions: Decisions) -> None:
        """Go by the decisions of another rank."""
        self.decisions = decisions

    def restrict(self, choices: Mapping[str, Any]) -> None:
        """Make these choices from here on, whatever else would be chosen."""
        if any(self.overrides.get(name) != value for name, value in choices.items()):
            self.overrides = {**self.overrides, **choices}
            self._adopted = {k: v for k, v in self._adopted.items() if k not in choices}
            self.decisions = self.decisions.override(choices)
            self.forget()

    def limit_device(self) -> None:
        """Hold torch to the budget from here on; without one there is no limit until it is known.

        Torch has one limit for a process: that of all its engines together.
        """
        if self.device is not None:
            self.device.give_back()
            self._limit()

    def _limit(self) -> None:
        assert self.device is not None
        self.device.limit_memory(
            self.budget.nbytes, context_bytes=self._context_bytes, group=self.budget
        )

    @property
    def _context_bytes(self) -> int:
        """What the process takes of the device beside tensors, once it has loaded all kernels."""
        known = 0 if self.hardware is None else self.hardware.context_bytes
        return max(known, 0 if self.device is None else self.device.context_bytes())

    def room_for_tensors(self) -> int | None:
        """Bytes of the budget beside the context; None: there is no budget."""
        if self.budget.nbytes is None and self.device is not None:
            if self.device.torch_device.type == "cpu":
                return None
            return int(FREE_SHARE * self.device.free_bytes())
        assert self.budget.nbytes is not None
        return int((self.budget.nbytes - self._context_bytes) * (1 - SLACK))

    def tighten(self, reason: str) -> bool:
        """Plan anew with less device memory, as a step has needed more than was foreseen.

        Returns:
            False: there is no plan, or so much was kept back already that something else is wrong.
        """
        if self._candidate is None or self.budget.nbytes is None:
            return False
        kept_back = self._kept_back + max(MIN_KEPT_BACK, self.budget.nbytes // 16)
        if kept_back > self.budget.nbytes // 2:
            return False
        self._kept_back = kept_back
        logger.warning(
            "a step needed more device memory than planned (%s); it is done again with a plan that "
            "leaves %s of the budget free.",
            reason.partition(". GPU")[0],
            format_bytes(kept_back),
        )
        self.forget()
        return True

    def must_plan(self, batch: Any, *, rows: int | None) -> bool:
        """Whether a batch has larger microbatches than the plan is for, or should have."""
        if self._candidate is None:
            return not self._most_tokens
        if not isinstance(batch, Mapping):
            return max(num_rows(one) * token_length(one) for one in batch) > self._most_tokens
        length, total = token_length(batch), num_rows(batch)
        if rows is None and self._is_whole and total * length > self._num_tokens:
            return True  # only the batch was too small for larger ones
        chosen = rows or max(1, self.decisions.microbatch_tokens // length)
        return min(chosen, total) * length > self._most_tokens

    def may_tile(self, batch: Any) -> bool:
        """Whether rows may be so long that layers run in tiles."""
        parts = [batch] if isinstance(batch, Mapping) else batch
        is_long = max(map(token_length, parts)) > TILE_TOKENS
        return is_long or bool(self._chosen.get("tile_tokens"))

    def make(self, batch: Any, found: Findings, *, rows: int | None) -> None:
        """Choose for batches like this one.

        Raises:
            ValueError: nothing fits the budget, or the host.
        """
        is_free = isinstance(batch, Mapping)
        parts: Sequence[Mapping[str, Any]] = [batch] if is_free else batch
        longest = max(parts, key=token_length)
        length, total = token_length(longest), sum(map(num_rows, parts))
        if not is_free:
            rows = max(map(num_rows, parts))
        elif rows is None and "microbatch_tokens" in self._chosen:
            rows = max(1, self.decisions.microbatch_tokens // length)
        number = sum(num_rows(one) * token_length(one) for one in parts)
        self.subject.refuse_slices(found.facts, self._chosen.get("num_head_slices"))
        self._marks.clear()
        if not self._look_at_machine():
            self._num_tokens, self._most_tokens = number, 1  # the defaults hold for any batch
            return
        problem = self._state(longest, total, found, self._chosen.get("tile_tokens"))
        if self.device is not None:
            self.device.give_back()
        try:
            self._candidate = self._find(problem, rows=rows, is_free=is_free)
        except DoesNotFitError:
            if not any(found.facts.pointwise.values()) or "tile_tokens" in self._chosen:
                raise
            # Slower, as nothing is compiled then: only where nothing else fits.
            problem = self._state(longest, total, found, TILE_TOKENS)
            self._candidate = self._find(problem, rows=rows, is_free=is_free)
        self._problem, self._num_tokens = problem, number
        self._most_tokens = self._candidate.rows * length
        self._is_whole = self._candidate.rows >= total

    def _state(
        self, longest: Mapping[str, Any], total: int, found: Findings, tile_tokens: int | None
    ) -> Problem:
        """What to plan for, on this machine."""
        problem = self.subject.problem(longest, total, found, tile_tokens)
        if callable(self.disk):
            self.disk = self.disk()
        return replace(
            problem,
            context_bytes=self._context_bytes,
            disk=self.disk,
            least_on_disk=self.least_on_disk,
            spills=self.spills and self.disk is not None,
        )

    def _look_at_machine(self) -> bool:
        """Measure the machine and limit torch to the budget; False if there is none to keep to."""
        device = self.device
        if device is not None and self.budget.nbytes is None and device.torch_device.type == "cpu":
            return False
        if device is not None and self.hardware is None:
            room = (
                None
                if self.budget.nbytes is None
                else (self.budget.nbytes - self._context_bytes) // 2
            )
            began = time.perf_counter()
            self.hardware = known_hardware(device, self.kernel, room=room)
            self.measuring_seconds = time.perf_counter() - began
            if self.budget.nbytes is None:
                self.budget.nbytes = device.context_bytes() + int(FREE_SHARE * device.free_bytes())
            self._limit()
        return True

    def _find(self, problem: Problem, *, rows: int | None, is_free: bool) -> Candidate:
        """The best choices; those of a checkpoint are dropped if they do not fit."""
        assert self.budget.nbytes is not None
        assert self.hardware is not None
        left = self.budget.nbytes - self._kept_back
        known = partial(self.kept.find, find_plan, is_given=self.budget.given is not None)
        find = partial(known, problem, self.hardware, budget_bytes=left)
        try:
            found = find(rows=rows, chosen=self._chosen)
        except DoesNotFitError:
            if not self._adopted:
                raise
            logger.warning(
                "the checkpoint's %s does not fit this budget and is chosen anew: results may "
                "differ in their last bits.",
                ", ".join(self._adopted),
            )
            rows = None if is_free and "microbatch_tokens" in self._adopted else rows
            self._adopted = {}
            found = find(rows=rows, chosen=self._chosen)
        _check_host(found, self.host)
        self.decisions = found.decisions.override(self._chosen)
        model = CostModel(problem, self.hardware)
        self._fits_plain = model.memory.plain_bytes(found.decisions) <= left * (1 - SLACK)
        self._work = work = model.work(found.decisions)
        self._bounds = Bounds.of(work, model.hardware, lane=found.bound, disk=problem.disk)
        return found

    def scaling(self, worlds: Sequence[Together]) -> tuple[ScalingPoint, ...]:
        """What several devices would do, each with the rows of this plan and its choices."""
        found, problem = self._candidate, self._problem
        assert found is not None
        assert problem is not None
        assert self.hardware is not None
        points = []
        for world in worlds:
            own, decisions = replace(problem, together=world), found.decisions
            if world.num_ranks > 1:
                own, decisions = _gathered(own), decisions.override(STATE_ON_HOST)
            run = CostModel(own, self.hardware).simulate(decisions)
            share = problem.server_bytes // world.num_shares
            points.append(ScalingPoint(world.num_ranks, run.seconds, run.bound, share))
        return tuple(points)

    def simulate(self) -> Simulation:
        """A step as it was planned, line by line."""
        assert self._candidate is not None
        assert self._problem is not None
        assert self.hardware is not None
        return CostModel(self._problem, self.hardware).simulate(self._candidate.decisions)

    @property
    def bounds(self) -> Bounds | None:
        """What a step takes at best, if it computes all that was planned for."""
        return self._bounds if self.computed_share == 1.0 else None

    def may_run_uncompiled(self) -> bool:
        """Whether the plan has room for passes of layers that are not compiled yet."""
        return self._candidate is None or self._fits_plain

    def mark(self, *, training: bool) -> None:
        """A step has ended on the device."""
        if training:
            self._marks.append(time.perf_counter())
        else:
            self._marks.clear()
        if len(self._marks) == NUM_MARKS and self._candidate and self.device:
            logger.info("%s", "; ".join(self._measured(self.device.peak_bytes())))
            self._note_context(self.device)

    def _note_context(self, device: Device) -> None:
        """Remember how much the process takes beside tensors, now that all kernels are loaded."""
        assert self.hardware is not None
        assert self._problem is not None
        found = device.context_bytes()
        if found > self._problem.context_bytes:
            self.hardware = replace(self.hardware, context_bytes=found)
            remember(self.hardware, device, self.kernel)
            self._limit()

    def step_seconds(self) -> float | None:
        """How long a step takes, measured or else predicted."""
        recent = self._marks[-NUM_MARKS:]
        if len(recent) > 2:
            return min(later - earlier for earlier, later in pairwise(recent))
        return None if self._candidate is None else self._candidate.seconds

    def _measured(self, peak_bytes: int) -> tuple[str, ...]:
        step, compared = self.step_seconds(), ""
        if step is None or len(self._marks) < 3:
            return ()
        if self._candidate is not None and self.computed_share == 1.0:
            off = step / self._candidate.seconds - 1
            compared = f" ({abs(off):.0%} {'more' if off > 0 else 'less'} than expected)"
        speed = f"{self.computed_share * self._num_tokens / step:,.0f} tokens/s{compared}"
        found = [f"measured: {step:.3f} s a step, {speed}; device peak {format_bytes(peak_bytes)}"]
        if self.bounds is not None:
            found.append(f"measured, of its bounds: {self.bounds.describe(step)}")
        return tuple(found)

    def microbatch(self, rows: int | None) -> str:
        """How large a microbatch is, for people."""
        if self._candidate is not None:
            return f"{self._candidate.rows} rows, {self.decisions.microbatch_tokens:,} tokens"
        if rows is not None:
            return f"{rows} rows"
        return f"about {self.decisions.microbatch_tokens:,} tokens"

    def plan(
        self,
        *,
        arena: Mapping[str, int],
        reserved: Mapping[str, int],
        choices: tuple[tuple[str, str], ...],
        peak_bytes: int,
        first_step: tuple[tuple[str, float], ...] = (),
    ) -> Plan:
        """The plan as it is now: planned bytes on the device, those taken on the host."""
        found = self._candidate
        expected: dict[str, Any] = {}
        if found is None:
            device = [LedgerLine("device", purpose, n) for purpose, n in reserved.items()]
        else:
            device = [line for line in found.ledger if line.place == "device" or not arena]
            expected = {
                "budget_bytes": self.budget.nbytes,
                "predicted_seconds": found.seconds,
                "bound": found.bound,
                "bounds": self.bounds,
                "disk_read_bytes": int(self._work.bytes_read),
                "disk_written_bytes": int(self._work.bytes_written),
                "num_tokens": self._num_tokens,
                "machine": self.hardware,
                "host_limit_bytes": self.host.limit_bytes,
            }
        described = self.decisions.describe(self.partition.num_layers, self.policy)
        return Plan(
            ledger=(*device, *(LedgerLine("host", purpose, n) for purpose, n in arena.items())),
            choices=(*choices, *described),
            measured=self._measured(peak_bytes),
            first_step=first_step,
            **expected,
        )


def _gathered(problem: Problem) -> Problem:
    """The same where tables are gathered from several ranks, not looked up on the host."""
    stays = problem.route.num_stacks > 1
    outer = tuple(
        (
            replace(
                unit,
                in_prologue=unit.before_layers,
                in_epilogue=unit.in_epilogue or (stays and unit.before_layers),
                looked_up=False,
            ),
            size,
        )
        for unit, size in problem.outer
    )
    return replace(problem, outer=outer)


def _check_host(found: Candidate, host: HostBudget) -> None:
    """Refuse choices for which the host has no room: the kernel would kill the process."""
    lines = [line for line in found.ledger if line.place == "host"]
    needed = sum(line.nbytes for line in lines)
    if needed > host.limit_bytes:
        parts = ", ".join(f"{line.purpose} {format_bytes(line.nbytes)}" for line in lines)
        raise DoesNotFitError(
            f"the step needs {format_bytes(needed)} of host memory ({parts}), found "
            f"{format_bytes(host.limit_bytes)} ({host.rule}). Give host_memory="
            f"'{math.ceil(needed / 2**20)}MiB' or more, or a batch of fewer rows."
        )
