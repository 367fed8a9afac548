"""From a batch to microbatches: checked, tried and planned for, by all ranks alike."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from l2l.engine.cut import Batches, Cut
from l2l.engine.depth import Choice
from l2l.engine.network import Network
from l2l.engine.placement import Placement
from l2l.engine.proving import Proving
from l2l.engine.resources import Resources
from l2l.model import (
    Microbatch,
    Rule,
    ignored_targets,
    num_rows,
    refuse_uncountable,
    split_batch,
    split_into,
    take_rows,
    token_length,
    total_count,
)
from l2l.planner import Findings
from l2l.schedule import OuterUnit

logger = logging.getLogger("l2l")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """What the others must know of the batch that one rank has."""

    layers: tuple[int, ...]  # that it runs
    num_microbatches: int
    count: int  # what its loss averages over
    ignored: str | None  # targets that its loss leaves out
    num_tokens: int
    why_not_cut: str | None


@final
@dataclass(eq=False)
class Preparation:
    """Makes the device and a batch ready for each other."""

    resources: Resources
    network: Network
    placement: Placement
    proving: Proving
    proves: bool
    is_warned: bool = field(default=False, init=False)  # of statistics over microbatches

    def prepare(
        self, batch: Batches, choice: Choice, *, training: bool, needs_loss: bool, counts: bool
    ) -> Cut:
        """Cut a batch; before, try two rows, plan and prove, if that was not done for its like.

        Args:
            batch: the rows of this rank.
            choice: the layers that run.
            training: whether updates follow.
            needs_loss: whether there must be a loss.
            counts: whether it must be known what the loss averages over.

        Raises:
            ValueError: the batch is invalid, on this rank or another; nothing has changed.
        """
        # A rank without rows tries, plans and proves with one of another rank, and counts nothing.
        given, batch = batch, self._with_rows(batch)
        first = batch if isinstance(batch, Mapping) else split_batch(batch, microbatch_size=1)[0]
        num_rows(first)
        self.network.trial.run(dict(first), needs_loss=needs_loss)
        proves = training and self.proves
        self._decide(batch, proves=proves)
        rows, rule = self._rows_of(batch), self.network.trial.rule or Rule.ROWS
        # All ranks need as many microbatches as the one with most: their lanes meet line by line.
        own = split_batch(batch, microbatch_size=rows) if batch is given else []
        ranks = self._ranks(own, rule, choice, counts=counts)
        own_tokens = ranks[self.resources.world.rank].num_tokens
        num_microbatches = sum(rank.num_microbatches for rank in ranks)
        if training and num_microbatches > 1:
            self._warn_of_batch_statistics()
        total = sum(rank.count for rank in ranks) if counts else 1
        if counts:
            ignored = next((rank.ignored for rank in ranks if rank.ignored is not None), None)
            refuse_uncountable(
                rule, num_microbatches=num_microbatches, total=total, ignored=ignored
            )
        number = max(1, *(rank.num_microbatches for rank in ranks))
        microbatches, num_own = split_into(batch, number, microbatch_size=rows)
        self.resources.transfer.reserve(self.placement.shape(len(microbatches), training=training))
        if proves and not self.proving.is_done(batch):
            self.proving.check(rule)
        return Cut(
            microbatches=[self._pinned(one) for one in microbatches],
            num_own=num_own if batch is given else 0,
            rule=rule,
            total=total,
            num_tokens_elsewhere=sum(rank.num_tokens for rank in ranks) - own_tokens,
        )

    # ----------------------------------------------------------------------------------------------
    # The batch

    def _with_rows(self, batch: Batches) -> Batches:
        """The batch; for a rank that has no rows, while others have, one of theirs."""
        world = self.resources.world
        if not world.is_parallel or not isinstance(batch, Mapping):
            return batch
        rows = [v.shape[0] for v in batch.values() if isinstance(v, Tensor) and v.dim()]
        is_empty = bool(rows) and not any(rows)
        if not any(world.gather_facts(is_empty)):
            return batch
        own = {
            k: v.cpu() if isinstance(v, Tensor) else v for k, v in take_rows(batch, 0, 1).items()
        }
        offered = world.gather_facts(None if is_empty else own)
        return next((one for one in offered if one is not None), batch) if is_empty else batch

    def _rows_of(self, batch: Batches) -> int:
        """Rows of a microbatch."""
        if self.resources.microbatch_size is not None or not isinstance(batch, Mapping):
            return self.resources.microbatch_size or 1
        return max(1, self.resources.planning.decisions.microbatch_tokens // token_length(batch))

    def _ranks(
        self, own: list[Microbatch], rule: Rule, choice: Choice, *, counts: bool
    ) -> list[_Rank]:
        """What all ranks have; they must run the same layers, of rows that may be cut."""
        mine = _Rank(
            layers=choice.layers,
            num_microbatches=len(own),
            count=total_count(rule, own) if own and counts else 0,
            ignored=ignored_targets(rule, own) if counts else None,
            num_tokens=sum(num_rows(one) * token_length(one) for one in own),
            why_not_cut=self.network.trial.why_not_cut(own) if counts else None,
        )
        ranks = self.resources.world.gather_facts(mine)
        for number, rank in enumerate(ranks):
            if rank.layers != ranks[0].layers:
                raise ValueError(
                    f"rank 0 runs layers {ranks[0].layers}, rank {number} layers {rank.layers}. "
                    "Expected the same on all ranks."
                )
            if rank.why_not_cut is not None:
                raise ValueError(rank.why_not_cut)
        return ranks

    def _pinned(self, microbatch: Microbatch) -> Microbatch:
        pinned = self.resources.device.pinned
        return {k: pinned(v) if isinstance(v, Tensor) else v for k, v in microbatch.items()}

    def _warn_of_batch_statistics(self) -> None:
        kind = None if self.is_warned else self.network.partition.batch_statistics()
        self.is_warned = True
        if kind is not None:
            logger.warning(
                "the model has %s: in training it normalizes by the statistics of the rows of each "
                "microbatch, not of the whole batch, as with gradient accumulation in PyTorch. "
                "Give microbatch_size=all rows of a batch for those of the whole, or put these "
                "modules into evaluation mode.",
                kind,
            )

    # ----------------------------------------------------------------------------------------------
    # The device

    def _decide(self, batch: Batches, *, proves: bool) -> None:
        """Make the choices for batches like this one, unless they are made.

        While nothing is on the device, the model's own code is run for the proof.
        """
        must_plan = self.resources.planning.must_plan(batch, rows=self.resources.microbatch_size)
        facts = self.resources.world.gather_facts((must_plan, self.placement.is_made))
        must_plan, is_placed = any(fact[0] for fact in facts), all(fact[1] for fact in facts)
        is_proven = not proves or self.proving.is_done(batch)
        if not must_plan and is_proven and is_placed:
            return
        self.placement.leave()
        outer = self.placement.outer_units()
        try:
            if must_plan:
                self._make_plan(batch, outer)
            if proves and not self.proving.is_done(batch):  # the plan may have chosen other code
                self.proving.see(batch)
        finally:  # if nothing fits, the choices made before hold
            self.placement.enter(outer)

    def _make_plan(self, batch: Batches, outer: tuple[OuterUnit, ...]) -> None:
        trial, world = self.network.trial, self.resources.world
        found = Findings(
            outer=outer,
            usage=trial.usage,
            facts=self.network.outer.facts,
            record=trial.record,
            buffer_bytes=trial.resident_buffer_bytes(),
            draws_random_numbers=self.resources.compiler.draws_random_numbers,
        )
        self.resources.planning.make(batch, found, rows=self.resources.microbatch_size)
        if world.is_parallel:  # all go by the plan of the one with most to do
            parts: list[Any] = [batch] if isinstance(batch, Mapping) else list(batch)
            number = sum(num_rows(one) * token_length(one) for one in parts)
            plans = world.gather_facts((number, self.resources.planning.decisions))
            self.resources.planning.decisions = max(plans, key=lambda plan: plan[0])[1]
