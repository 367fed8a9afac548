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

import torch

from l2l.device import Device, format_bytes, parse_bytes
from l2l.distributed import World
from l2l.model import (
    Partition,
    Recording,
    Rule,
    num_rows,
    take_rows,
    token_length,
    trial_batch,
)
from l2l.parameter_server import (
    AdamW,
    HostBudget,
    HostKernel,
    HostOptimizer,
    Optimizer,
    UnitForm,
    UpdatePolicy,
    device_update,
    host_bytes,
)
from l2l.planner.cost_model import CostModel
from l2l.planner.decisions import STATE_ON_HOST, Decisions, LedgerLine, Plan, ScalingPoint
from l2l.planner.hardware import Hardware, known_hardware
from l2l.planner.problem import (
    Problem,
    Together,
    head_of,
    layer_costs,
    passed_on,
    unit_size,
    update_bytes,
)
from l2l.planner.search import Candidate, DoesNotFitError, find_plan
from l2l.run import Facts, Usage
from l2l.schedule import OuterUnit, Shape

logger = logging.getLogger("l2l")

FREE_SHARE = 0.9  # of free device memory that is used if the user names no budget
MIN_KEPT_BACK = 32 << 20  # of a budget, once a plan has turned out too tight
LARGE_UNIT_BYTES = 16 << 20  # a smaller table is not worth a lookup on the host
NUM_MARKS = 4  # steps after which prediction and measurement are compared
# For each logit of a piece: values of its own type and float32 values that are there at once, bytes
# that the loss reads and writes.
LOGITS = {"plain": (1.0, 3.1, 40.0), "put off": (1.0, 1.1, 40.0), "compiled": (1.05, 0.0, 10.0)}


def parse_budget(device_memory: int | str | None) -> int | None:
    """The device memory that may be used, in bytes.

    Raises:
        ValueError: the text is not a size.
    """
    if device_memory is None:
        return None
    found = parse_bytes(device_memory, name="device_memory")
    if found < 1:
        raise ValueError(f"device_memory={device_memory!r}; expected a size above 0, or None.")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What is known of a model by trying it, or by looking at it."""

    facts: Facts
    record: Callable[[dict[str, Any]], Sequence[Recording]]
    buffer_bytes: int
    # Such layers keep none of their results: the rest might not be computed again as it was ([Note:
    # random numbers] in layer_pass.py).
    draws_random_numbers: bool


@final
@dataclass(kw_only=True, eq=False)
class Planning:
    """Owner of an engine's choices.

    Without a `device`, `hardware` and `given_budget` say what the plan is for. `embedding` says
    where rows of tables are looked up: on the "host", the "device", or, with None, where it pays.
    """

    partition: Partition
    forms: Mapping[str, UnitForm]
    optimizer: Optimizer
    policy: UpdatePolicy
    given_budget: int | None
    host: HostBudget
    compiled: bool
    overrides: Mapping[str, Any]
    device: Device | None = None
    kernel: HostKernel | None = None
    world: World = field(default_factory=World)
    embedding: str | None = None
    hardware: Hardware | None = None

    def __post_init__(self) -> None:
        self.budget = self.given_budget  # what is free, once that is known, if none was given
        self.decisions = Decisions().override(self.overrides)
        self._adopted: dict[str, Any] = {}  # choices of a checkpoint
        self._kept_back = 0  # bytes of the budget that plans leave alone, because one has failed
        self._num_tokens = 0
        self._is_whole = False  # whether a batch was planned as one microbatch
        self._marks: list[float] = []
        self._problem: Problem | None = None
        optimizer = self.optimizer
        self._has_halves = isinstance(optimizer, HostOptimizer) and optimizer.has_halves
        self.adapt(self.partition, self.forms)

    def _forget(self) -> None:
        """Let choices be made anew."""
        self._candidate: Candidate | None = None
        self._most_tokens = 0  # of a microbatch, that the plan is for

    @property
    def _chosen(self) -> dict[str, Any]:
        return {**self._adopted, **self.overrides}

    def adopt(self, choices: Mapping[str, Any]) -> None:
        """Make these choices as a checkpoint says, where the user has not made them."""
        self._adopted = {k: v for k, v in choices.items() if k not in self.overrides}
        self.decisions = self.decisions.override(self._adopted)
        self._forget()

    def adapt(self, partition: Partition, forms: Mapping[str, UnitForm]) -> None:
        """Plan for other layers from here on."""
        self.partition, self.forms = partition, forms
        layers = range(partition.num_layers)
        self._layers = tuple(unit_size(forms[f"L{index}"]) for index in layers)
        self._forget()
        self._marks.clear()

    def outer_units(self, facts: Facts) -> tuple[OuterUnit, ...]:
        """Units around the layers, before anything is decided.

        The host looks up in tables where it was told to, or in large ones. A table that ranks hold
        together is gathered like a layer. With several stacks, what any code before them reads
        stays for the whole step.
        """
        is_one_stack = facts.route is None or facts.route.num_stacks == 1
        on_device = self.world.is_parallel or self.policy is UpdatePolicy.ON_DEVICE
        is_told, may_look_up = self.embedding == "host", self.embedding != "device"
        found = []
        for name, form in self.forms.items():
            if name.startswith("L"):
                continue
            usage = facts.usage.get(name, Usage(before=True, after=True))
            pays = is_told or form.weight_layout.nbytes >= LARGE_UNIT_BYTES
            looks_up = bool(usage.lookups) and not usage.before
            looked_up = looks_up and pays and may_look_up and not on_device
            before = usage.before or (bool(usage.lookups) and not looked_up)
            found.append(
                OuterUnit(
                    name=name,
                    in_prologue=before,
                    in_epilogue=usage.after or (before and not is_one_stack),
                    looked_up=looked_up,
                    trained=bool(form.trained.names),
                )
            )
        return tuple(found)

    def shape(
        self,
        facts: Facts,
        num_microbatches: int,
        *,
        training: bool,
        joint: bool,
        before: tuple[frozenset[str], tuple[str, ...]],
    ) -> Shape:
        """The shape of a step as it is decided now; arguments as for `Decisions.shape`."""
        route = facts.route or self.partition.straight
        return self.decisions.shape(
            num_microbatches=num_microbatches,
            layers=[self._layers[layer] for layer in route.layers],
            route=route,
            outer=self.outer_units(facts),
            update=self.policy,
            has_halves=self._has_halves,
            parallel=self.world.is_parallel,
            training=training,
            joint=joint,
            before=before,
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
            self._forget()

    def limit_device(self) -> None:
        """Hold torch to the budget from here on, if the user named one."""
        if self.device is not None and self.budget is not None:
            self.device.give_back()
            self.device.limit_memory(self.budget)

    def tighten(self, reason: str) -> bool:
        """Plan anew with less device memory, as a step has needed more than was foreseen.

        Returns:
            False: there is no plan, or so much was kept back already that something else is wrong.
        """
        if self._candidate is None or self.budget is None:
            return False
        kept_back = self._kept_back + max(MIN_KEPT_BACK, self.budget // 16)
        if kept_back > self.budget // 2:
            return False
        self._kept_back = kept_back
        logger.warning(
            "a step needed more device memory than planned (%s); it is done again with a plan that "
            "leaves %s of the budget free.",
            reason.partition(". GPU")[0],
            format_bytes(kept_back),
        )
        self._forget()
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
        self._marks.clear()
        if not self._look_at_machine():
            self._num_tokens, self._most_tokens = number, 1  # the defaults hold for any batch
            return
        problem = self._problem_of(longest, total, found)
        if self.device is not None:
            self.device.give_back()
        self._candidate = self._find(problem, rows=rows, is_free=is_free)
        self._problem, self._num_tokens = problem, number
        self._most_tokens = self._candidate.rows * length
        self._is_whole = self._candidate.rows >= total

    def _problem_of(self, longest: Mapping[str, Any], total: int, found: Findings) -> Problem:
        """What to plan for, in batches of so many rows, at most as long as the longest."""
        one = take_rows(longest, 0, 1)
        recordings = [found.record(one), found.record(trial_batch(one, cut=False))]
        forms, facts, optimizer = self.forms, found.facts, self.optimizer
        route = facts.route or self.partition.straight
        collects = any(call.lists for each in recordings[0] for call in each.calls.values())
        handed = [values for each in recordings[0] for values in passed_on(each)]
        hidden = max((values[0] for values in handed), key=lambda one: one.nbytes)
        outer = self.outer_units(facts)
        layers = [forms[f"L{i}"] for i in range(self.partition.num_layers)]
        head = [forms[unit.name] for unit in outer if unit.in_epilogue]
        head_parameters, head_width = head_of(head)
        kind = "plain" if not facts.puts_off else "compiled" if self.compiled else "put off"
        own, wide, moved = LOGITS[kind]
        looked_up = [facts.usage[unit.name] for unit in outer if unit.looked_up]
        lookups = [lookup for usage in looked_up for lookup in usage.lookups]
        return Problem(
            layers=tuple(self._layers[layer] for layer in route.layers),
            route=route,
            costs=layer_costs(
                self.partition, layers, recordings, route, fused=self.compiled and not collects
            ),
            outer=tuple((unit, unit_size(forms[unit.name])) for unit in outer),
            num_rows=total,
            length=token_length(longest),
            hidden_bytes=max(sum(one.nbytes for one in values) for values in handed),
            recorded_bytes=max(
                sum(tensor.nbytes for tensor in each.tensors) for each in recordings[0]
            ),
            aside_bytes=sum(each.aside_bytes for each in recordings[0]),
            joint=facts.rule is Rule.UNKNOWN and self.policy is not UpdatePolicy.ON_DEVICE,
            looked_up_bytes=sum(
                one[lookup.name].numel() * forms[lookup.unit].row_bytes(lookup.owner)
                for lookup in lookups
            ),
            head_parameters=head_parameters,
            head_width=head_width,
            logit_bytes=own * hidden.element_size() + wide * 4,
            logit_moved_bytes=moved,
            may_cut_rows=facts.alone and not any(facts.changing) and route.is_straight,
            may_cut_positions=facts.within_rows or facts.puts_off,
            may_keep=self.compiled and not found.draws_random_numbers,
            policy=self.policy,
            update_bytes=update_bytes(optimizer, layers[-1]),
            eight_bit=isinstance(optimizer, AdamW) and optimizer.moments == "8bit",
            has_halves=self._has_halves,
            may_update_on_device=device_update.supports(optimizer),
            is_single=hidden.dtype is torch.float32,
            buffer_bytes=found.buffer_bytes + (self.device.growth_bytes if self.device else 0),
            server_bytes=host_bytes(
                [one.held(self.world.share) for one in forms.values()], self.policy
            ),
            parallel=self.world.is_parallel,
            host_limit_bytes=self.host.limit_bytes,
        )

    def _look_at_machine(self) -> bool:
        """Measure the machine and limit torch to the budget; False if there is none to keep to."""
        device = self.device
        if device is not None and self.budget is None and device.torch_device.type == "cpu":
            return False
        if device is not None and self.hardware is None:
            room = None if self.budget is None else self.budget // 2
            self.hardware = known_hardware(device, self.kernel, room=room)
            if self.budget is None:
                self.budget = int(FREE_SHARE * device.free_bytes())
                device.limit_memory(self.budget)
        return True

    def _find(self, problem: Problem, *, rows: int | None, is_free: bool) -> Candidate:
        """The best choices; those of a checkpoint are dropped if they do not fit."""
        assert self.budget is not None
        assert self.hardware is not None
        left = self.budget - self._kept_back
        find = partial(find_plan, problem, self.hardware, budget_bytes=left)
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
            if world.num_ranks > 1:  # tables are gathered, not looked up on the host
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
                own, decisions = replace(own, outer=outer), decisions.override(STATE_ON_HOST)
            run = CostModel(own, self.hardware).simulate(decisions)
            share = problem.server_bytes // world.num_shares
            points.append(ScalingPoint(world.num_ranks, run.seconds, run.bound, share))
        return tuple(points)

    def mark(self, *, training: bool) -> None:
        """A step has ended on the device."""
        if training:
            self._marks.append(time.perf_counter())
        else:
            self._marks.clear()
        if len(self._marks) == NUM_MARKS and self._candidate and self.device:
            logger.info("%s", "; ".join(self._measured(self.device.peak_bytes())))

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
        if self._candidate is not None:
            off = step / self._candidate.seconds - 1
            compared = f" ({abs(off):.0%} {'more' if off > 0 else 'less'} than expected)"
        speed = f"{self._num_tokens / step:,.0f} tokens/s{compared}"
        peak = format_bytes(peak_bytes)
        return (f"measured: {step:.3f} s a step, {speed}; device peak {peak}",)

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
    ) -> Plan:
        """The plan as it is now: planned bytes on the device, those taken on the host."""
        found = self._candidate
        expected: dict[str, Any] = {}
        if found is None:
            device = [LedgerLine("device", purpose, n) for purpose, n in reserved.items()]
        else:
            device = [line for line in found.ledger if line.place == "device" or not arena]
            expected = {
                "budget_bytes": self.budget,
                "predicted_seconds": found.seconds,
                "bound": found.bound,
                "num_tokens": self._num_tokens,
            }
        described = self.decisions.describe(self.partition.num_layers, self.policy)
        return Plan(
            ledger=(*device, *(LedgerLine("host", purpose, n) for purpose, n in arena.items())),
            choices=(*choices, *described),
            measured=self._measured(peak_bytes),
            **expected,
        )


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
