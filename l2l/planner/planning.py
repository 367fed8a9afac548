"""An engine's plan: made from its first batch, kept, compared with what is then measured."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, final

import torch

from l2l.device import Device, format_bytes, parse_bytes
from l2l.distributed import Share
from l2l.model import (
    Microbatch,
    Partition,
    Recording,
    num_rows,
    take_rows,
    token_length,
    trial_batch,
)
from l2l.parameter_server import (
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
from l2l.planner.line_costs import simulate_step
from l2l.planner.problem import Problem, Together
from l2l.planner.search import Candidate, DoesNotFitError, find_plan
from l2l.planner.survey import head_of, is_eight_bit, layer_costs, unit_size, update_bytes
from l2l.run import OuterFacts
from l2l.schedule import OuterUnit
from l2l.trial import Usage

logger = logging.getLogger("l2l")

FREE_SHARE = 0.9  # of free device memory that is used if the user names no budget
MIN_KEPT_BACK = 32 << 20  # of a budget, once a plan has turned out too tight
NUM_MARKS = 4  # steps after which prediction and measurement are compared


class _Logits(NamedTuple):
    """What a loss makes of each logit of a piece."""

    own: float  # values of the logits' own type that are there at once
    wide: float  # float32 values that are
    moved: float  # bytes, read and written


LOGITS = {
    "plain": _Logits(1.0, 3.1, 40.0),
    "put off": _Logits(1.0, 1.1, 40.0),
    "compiled": _Logits(1.05, 0.0, 10.0),
}


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


@final
class Planning:
    """Owner of an engine's choices."""

    def __init__(
        self,
        *,
        partition: Partition,
        forms: Mapping[str, UnitForm],
        device: Device | None,
        optimizer: Optimizer,
        policy: UpdatePolicy,
        kernel: HostKernel | None,
        budget: int | None,
        host: HostBudget,
        share: Share,
        compiled: bool,
        overrides: Mapping[str, Any],
        hardware: Hardware | None = None,
    ) -> None:
        """Nothing is planned yet.

        Without a `device`, `hardware` and `budget` say what the plan is for.
        """
        self._partition = partition
        self._forms = forms
        self._device = device
        self._optimizer = optimizer
        self._policy = policy
        self._kernel = kernel
        self.given_budget = self._budget = budget  # the latter is what is free, if none was given
        self._host = host
        self._share = share
        self._compiled = compiled
        self._overrides = dict(overrides)
        self._adopted: dict[str, Any] = {}  # choices of a checkpoint
        self._hardware = hardware
        self._candidate: Candidate | None = None
        self._problem: Problem | None = None
        self._num_tokens = 0
        self._most_tokens = 0  # of a microbatch, that the plan is for
        self._is_whole = False  # whether a batch was planned as one microbatch
        self._kept_back = 0  # bytes of the budget that plans leave alone, because one has failed
        self._marks: list[float] = []
        self.decisions = Decisions().override(self._overrides)

    def adopt(self, choices: Mapping[str, Any]) -> None:
        """Make these choices as a checkpoint says, where the user has not made them."""
        self._adopted = {k: v for k, v in choices.items() if k not in self._overrides}
        self.decisions = self.decisions.override(self._adopted)
        self._candidate, self._most_tokens = None, 0  # plan anew

    def adapt(self, partition: Partition, forms: Mapping[str, UnitForm]) -> None:
        """Plan for other layers from here on."""
        self._partition, self._forms = partition, forms
        self._candidate, self._most_tokens = None, 0
        self._marks.clear()

    def restrict(self, choices: Mapping[str, Any]) -> None:
        """Make these choices from here on, whatever else would be chosen."""
        if any(self._overrides.get(name) != value for name, value in choices.items()):
            self._overrides |= choices
            self._adopted = {k: v for k, v in self._adopted.items() if k not in choices}
            self.decisions = self.decisions.override(choices)
            self._candidate, self._most_tokens = None, 0  # plan anew

    @property
    def budget(self) -> int | None:
        """Bytes of the device that may be used; None: nothing was planned that is limited."""
        return self._budget

    def step_seconds(self) -> float | None:
        """How long a step takes, measured or else predicted."""
        recent = self._marks[-NUM_MARKS:]
        if len(recent) > 2:
            return min(later - earlier for earlier, later in pairwise(recent))
        return None if self._candidate is None else self._candidate.seconds

    def limit_device(self) -> None:
        """Hold torch to the budget from here on, if the user named one."""
        if self._device is not None and self._budget is not None:
            self._device.give_back()
            self._device.limit_memory(self._budget)

    def tighten(self, reason: str) -> bool:
        """Plan anew with less device memory, as a step has needed more than was foreseen.

        Returns:
            False: there is no plan, or so much was kept back already that something else is wrong.
        """
        if self._candidate is None or self._budget is None:
            return False
        more = max(MIN_KEPT_BACK, self._budget // 16)
        if self._kept_back + more > self._budget // 2:
            return False
        self._kept_back += more
        logger.warning(
            "a step needed more device memory than planned (%s); it is done again with a plan that "
            "leaves %s of the budget free.",
            reason.partition(". GPU")[0],
            format_bytes(self._kept_back),
        )
        self._candidate, self._most_tokens = None, 0
        return True

    def must_plan(self, batch: Any, *, rows: int | None) -> bool:
        """Whether a batch has larger microbatches than the plan is for, or should have."""
        if self._candidate is None:
            return not self._most_tokens
        if isinstance(batch, Mapping):
            length, total = token_length(batch), num_rows(batch)
            if rows is None and self._is_whole and total * length > self._num_tokens:
                return True  # only the batch was too small for larger ones
            chosen = rows or max(1, self.decisions.microbatch_tokens // length)
            return min(chosen, total) * length > self._most_tokens
        return max(num_rows(one) * token_length(one) for one in batch) > self._most_tokens

    def make(
        self,
        batch: Any,
        *,
        rows: int | None,
        outer: tuple[OuterUnit, ...],
        usage: Mapping[str, Usage],
        facts: OuterFacts,
        record: Callable[[Microbatch], Recording],
        buffer_bytes: int,
        draws_random_numbers: bool,
    ) -> None:
        """Choose for batches like this one.

        Layers that draw random numbers keep none of their results: the rest might not be computed
        again as it was ([Note: random numbers] in compiled_layer.py).

        Raises:
            ValueError: nothing fits the budget, or the host.
        """
        parts: Sequence[Mapping[str, Any]] = [batch] if isinstance(batch, Mapping) else batch
        longest = max(parts, key=token_length)
        length = token_length(longest)
        total = sum(num_rows(one) for one in parts)
        if not isinstance(batch, Mapping):
            rows = max(num_rows(one) for one in parts)
        elif rows is None and "microbatch_tokens" in {**self._adopted, **self._overrides}:
            rows = max(1, self.decisions.microbatch_tokens // length)
        number = sum(num_rows(one) * token_length(one) for one in parts)
        self._marks.clear()
        if not self._look_at_machine():
            self._num_tokens, self._most_tokens = number, 1  # the defaults hold for any batch
            return
        problem = self._problem_of(
            longest,
            total,
            outer=outer,
            usage=usage,
            facts=facts,
            record=record,
            buffer_bytes=buffer_bytes,
            may_keep=self._compiled and not draws_random_numbers,
        )
        if self._device is not None:
            self._device.give_back()
        self._candidate = self._find(problem, rows=rows, is_free=isinstance(batch, Mapping))
        self._problem, self._num_tokens = problem, number
        self._most_tokens = self._candidate.rows * length
        self._is_whole = self._candidate.rows >= total

    def _problem_of(
        self,
        longest: Mapping[str, Any],
        total: int,
        *,
        outer: tuple[OuterUnit, ...],
        usage: Mapping[str, Usage],
        facts: OuterFacts,
        record: Callable[[Microbatch], Recording],
        buffer_bytes: int,
        may_keep: bool,
    ) -> Problem:
        """What to plan for, in batches of so many rows, at most as long as the longest."""
        one = take_rows(longest, 0, 1)
        recordings = [record(one), record(trial_batch(one, cut=False))]
        hidden = recordings[0].hidden
        assert hidden is not None
        forms = self._forms
        layers = [forms[f"L{i}"] for i in range(self._partition.num_layers)]
        head_parameters, head_width = head_of([forms[u.name] for u in outer if u.in_epilogue])
        kind = "plain" if not facts.puts_off else "compiled" if self._compiled else "put off"
        logits = LOGITS[kind]
        return Problem(
            layers=tuple(unit_size(form) for form in layers),
            costs=layer_costs(self._partition, forms, recordings, fused=self._compiled),
            outer=tuple((unit, unit_size(forms[unit.name])) for unit in outer),
            num_rows=total,
            length=token_length(longest),
            hidden_bytes=hidden.nbytes,
            recorded_bytes=sum(tensor.nbytes for tensor in recordings[0].tensors),
            looked_up_bytes=sum(
                one[lookup.name].numel() * forms[unit.name].row_bytes(lookup.owner)
                for unit in outer
                if unit.looked_up
                for lookup in usage[unit.name].lookups
            ),
            head_parameters=head_parameters,
            head_width=head_width,
            logit_bytes=logits.own * hidden.element_size() + logits.wide * 4,
            logit_moved_bytes=logits.moved,
            may_cut_rows=facts.alone and not facts.changing,
            may_cut_positions=facts.within_rows or facts.puts_off,
            may_keep=may_keep,
            policy=self._policy,
            update_bytes=update_bytes(self._optimizer, layers[-1]),
            eight_bit=is_eight_bit(self._optimizer),
            has_halves=isinstance(self._optimizer, HostOptimizer) and self._optimizer.has_halves,
            may_update_on_device=device_update.supports(self._optimizer),
            is_single=hidden.dtype is torch.float32,
            buffer_bytes=buffer_bytes + (self._device.growth_bytes if self._device else 0),
            server_bytes=host_bytes(
                [form.held(self._share) for form in forms.values()], self._policy
            ),
            host_limit_bytes=self._host.limit_bytes,
        )

    def scaling(self, worlds: Sequence[Together]) -> tuple[ScalingPoint, ...]:
        """What several devices would do, each with the rows of this plan and its choices."""
        found, problem = self._candidate, self._problem
        assert found is not None
        assert problem is not None
        assert self._hardware is not None
        points = []
        outer = tuple((_gathered(unit), size) for unit, size in problem.outer)
        for world in worlds:
            own = problem if world.num_ranks == 1 else replace(problem, outer=outer)
            own = replace(own, together=world)
            decisions = (
                found.decisions if world.num_ranks == 1 else found.decisions.override(STATE_ON_HOST)
            )
            run = simulate_step(CostModel(own, self._hardware), decisions)
            points.append(
                ScalingPoint(
                    num_ranks=world.num_ranks,
                    seconds=run.seconds,
                    bound=run.bound,
                    host_bytes=problem.server_bytes // world.num_shares,
                )
            )
        return tuple(points)

    def _find(self, problem: Problem, *, rows: int | None, is_free: bool) -> Candidate:
        """The best choices; those of a checkpoint are dropped if they do not fit."""
        assert self._budget is not None
        assert self._hardware is not None
        find = partial(
            find_plan, problem, self._hardware, budget_bytes=self._budget - self._kept_back
        )
        chosen = {**self._adopted, **self._overrides}
        try:
            found = find(rows=rows, chosen=chosen)
        except DoesNotFitError:
            if not self._adopted:
                raise
            logger.warning(
                "the checkpoint's %s does not fit this budget and is chosen anew: results may "
                "differ in their last bits.",
                ", ".join(self._adopted),
            )
            rows = None if is_free and "microbatch_tokens" in self._adopted else rows
            self._adopted, chosen = {}, self._overrides
            found = find(rows=rows, chosen=chosen)
        _check_host(found, self._host)
        self.decisions = found.decisions.override(chosen)
        return found

    def _look_at_machine(self) -> bool:
        """Measure the machine and limit torch to the budget; False if there is none to keep to."""
        if self._device is None:
            return True
        if self._budget is None and self._device.torch_device.type == "cpu":
            return False
        if self._hardware is None:
            room = None if self._budget is None else self._budget // 2
            self._hardware = known_hardware(self._device, self._kernel, room=room)
            if self._budget is None:
                self._budget = int(FREE_SHARE * self._device.free_bytes())
                self._device.limit_memory(self._budget)
        return True

    def mark(self, *, training: bool) -> None:
        """A step has ended on the device."""
        if training:
            self._marks.append(time.perf_counter())
        else:
            self._marks.clear()
        if len(self._marks) == NUM_MARKS and self._candidate and self._device:
            logger.info("%s", "; ".join(self._measured(self._device.peak_bytes())))

    def _measured(self, peak_bytes: int) -> tuple[str, ...]:
        if len(self._marks) < 3:
            return ()
        recent = self._marks[-NUM_MARKS:]
        step = min(later - earlier for earlier, later in pairwise(recent))
        compared = ""
        if self._candidate is not None:
            off = step / self._candidate.seconds - 1
            compared = f" ({abs(off):.0%} {'more' if off > 0 else 'less'} than expected)"
        speed = f"{self._num_tokens / step:,.0f} tokens/s"
        return (
            f"measured: {step:.3f} s a step, {speed}{compared}; device peak "
            f"{format_bytes(peak_bytes)}",
        )

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
        found, decisions = self._candidate, self.decisions
        host = tuple(LedgerLine(place="host", purpose=k, nbytes=v) for k, v in arena.items())
        if found is None:
            device = tuple(
                LedgerLine(place="device", purpose=k, nbytes=v) for k, v in reserved.items()
            )
            return Plan(
                ledger=device + host,
                choices=(*choices, *describe(decisions, self._partition.num_layers, self._policy)),
                measured=self._measured(peak_bytes),
            )
        places = {"device"} if arena else {"device", "host"}
        planned = tuple(line for line in found.ledger if line.place in places)
        return Plan(
            ledger=planned + host,
            choices=(*choices, *describe(decisions, self._partition.num_layers, self._policy)),
            budget_bytes=self._budget,
            predicted_seconds=found.seconds,
            bound=found.bound,
            num_tokens=self._num_tokens,
            measured=self._measured(peak_bytes),
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


def describe(
    decisions: Decisions, num_layers: int, policy: UpdatePolicy
) -> tuple[tuple[str, str], ...]:
    """Choices for people."""
    tail = "none: all layers are streamed"
    if decisions.num_tail:
        tail = f"the last {decisions.num_tail} of {num_layers} layers stay on the device"
        if decisions.num_device_states:
            tail += f", {decisions.num_device_states} of them with their optimizer state"
    piece = decisions.piece_tokens
    kept = f"{decisions.keep:.0%} of what a layer makes" if decisions.num_kept_cells else "nothing"
    shared = "by the host alone"
    if decisions.num_shared:
        shared = f"by the host; of {decisions.num_shared} layers by the device, state lent"
    if decisions.halves:
        shared += ", weights first and moments afterwards"
        last = (
            "the last layer"
            if decisions.num_whole == 1
            else f"the last {decisions.num_whole} layers"
        )
        whole = [last] if decisions.num_whole else []
        whole += ["tables"] if decisions.whole_tables else []
        shared += f" but for {' and '.join(whole)}" if whole else ""
    late = f"{decisions.num_late} units in the next step" if decisions.num_late else "none"
    if policy is UpdatePolicy.JUST_IN_TIME:
        late = "all to the next step"
    around = "stays on the device with its state" if decisions.outer_state else "comes when needed"
    return (
        ("tail", tail),
        ("epilogue", f"in pieces of {piece:,} tokens" if piece else "a microbatch at once"),
        ("kept, not recomputed", kept),
        ("updates left", late),
        ("late updates", shared),
        ("around the layers", around),
        ("memory of the head", "shared with gradients" if decisions.shares_memory else "its own"),
    )


def _gathered(unit: OuterUnit) -> OuterUnit:
    """The same where ranks hold it together: tables are gathered, not looked up on the host."""
    before = unit.in_prologue or unit.looked_up
    return replace(unit, in_prologue=before, looked_up=False, device_state=False)
