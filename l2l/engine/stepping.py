"""Performing a batch: tried, planned for, proven, cut and run, by all ranks alike.

If the device has too little memory for that, and nothing was updated, it is done once more by a
plan that needs less.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from l2l.device import UpdateFailedError
from l2l.engine.casting import Casting
from l2l.engine.condition import Condition, Settings
from l2l.engine.depth import Choice
from l2l.engine.guard import Guard
from l2l.engine.lengths import Lengths
from l2l.engine.proving import Batches, Proving
from l2l.model import (
    Microbatch,
    Mode,
    Rule,
    Splitting,
    TokenLoss,
    Whole,
    asking_in,
    can_join,
    cutting_of,
    join_outputs,
    map_batch,
    move_batch,
    no_rows,
    num_rows,
    split_batch,
    split_into,
    take_rows,
    token_length,
    without_graph,
)
from l2l.parameter_server import check_settings
from l2l.planner import STATE_ON_HOST, DoesNotFitError, Findings
from l2l.run import Step

logger = logging.getLogger("l2l")

RANK_SEED = 0x9E3779B9  # ranks draw different random numbers
CALL_SEED = 0xC2B2AE35  # and so do calls of the model between two updates
REMEDY = (
    "split=, a function of (batch, start, end) that returns these rows, or a list of dicts, each "
    "of which is a microbatch"
)


@final
class Stepping:
    """Makes the device and a batch ready for each other, and runs it."""

    def __init__(self, condition: Condition, guard: Guard) -> None:
        """Nothing has run yet; signals of the guard are handled while a step may be given up."""
        self._condition, self._has, self._guard = condition, condition.has, guard
        self._proving = Proving(condition)
        self._splitting = Splitting.of_model(self._has.model, self._has.split)
        self._casting = Casting(self._has.precision.link)
        self._lengths = Lengths(condition, self._outputs_of)
        self._is_warned = False  # of statistics over microbatches
        self._is_told = False  # that batches cannot be cut

    def perform(
        self, batch: Batches, choice: Choice, *, settings: Settings | None = None, **wanted: Any
    ) -> tuple[Step, list[Microbatch]]:
        """Run a batch; arguments as for `_prepare`.

        Returns:
            the step, and the microbatches that this rank has rows for.
        """
        condition, has = self._condition, self._has
        with condition.network.running():
            condition.refuse_if_unusable()
            has.turns.take(condition)
            condition.settle_compiler()
            if not self._is_whole(choice.layers):
                has.planning.restrict(STATE_ON_HOST)
            while True:
                try:
                    step = self._prepare(batch, choice, settings=settings, **wanted)
                    own = step.microbatches[: step.num_own]
                    self._run(step)
                except torch.OutOfMemoryError as error:
                    # Ranks are in the middle of the step, or this engine is, or nothing takes less.
                    is_stuck = has.world.is_parallel or condition.is_torn
                    if is_stuck or not has.planning.tighten(str(error)):
                        raise
                    continue
                return step, own

    def predict(self, batch: Batches, choice: Choice) -> Any:
        """The model's outputs, on the host; a loss only if there are labels."""
        first, network = batch if isinstance(batch, Mapping) else batch[0], self._condition.network
        if (word := network.partition.collected(first)) is not None:
            raise ValueError(
                f"{word}={first[word]} in the batch requests outputs of single layers. Which of "
                "them are kept is found once: turn it off in the batch, or on in the model's "
                "config before the first one."
            )
        has_labels = "labels" in first
        step, own = self.perform(batch, choice, needs_loss=has_labels, keep_outputs=True)
        if not own:  # this rank has no rows
            return no_rows(step.outputs[0])
        shares = (network.facts.rule or Rule.UNKNOWN).output_shares(own)
        return join_outputs([step.outputs[m] for m in range(len(own))], shares)

    def follow(self, step: Step, side: str) -> None:
        """Another side of a step of which the first has run, to its end."""
        condition, has, program = self._condition, self._has, step.sides[side]
        assert has.gradients is not None
        with condition.network.running():
            condition.refuse_if_unusable()
            has.turns.take(condition)
            step.program, lookups = program, () if side == "outputs" else program.lookups
            step.rows = has.rows.begin(lookups, step.microbatches) if lookups else None
            has.transfer.reserve(program.shape)
            has.gradients.reserve(program.shape.collected)
            condition.network.partition.set_training(True, mode=step.mode)
            self._run(step)
            condition.finish_step()

    def _outputs_of(self, rows: Microbatch) -> Any:
        """The outputs of a few rows in evaluation mode, while a batch is prepared."""
        condition, has = self._condition, self._has
        with has.compiler.paused():
            step = self._prepare(
                rows, condition.chosen(), settings=None, needs_loss=False, keep_outputs=True
            )
            try:
                condition.network.relay.run(step)
            except BaseException:
                condition.network.relay.abandon(step)
                has.device.recover()
                raise
        condition.network.note_run(step.program)
        condition.finish_step()
        return step.outputs[0]

    def _run(self, step: Step) -> None:
        condition, has = self._condition, self._has
        # Ranks meet in every step: none gives one up that others go on with.
        between = None if has.world.is_parallel else self._guard.deliver
        try:
            if condition.begin(step):
                has.planning.mark(training=step.training and self._is_whole(step.layers))
            compiler, timeline = has.compiler, has.timeline
            before = compiler.seconds
            with timeline.phase("step"), compiler.running(has.planning.may_run_uncompiled()):
                condition.network.relay.run(step, between=between)
            timeline.move(compiler.seconds - before, "compiling", out_of="step")
            timeline.is_over |= step.training
            step.waited_for_compiler = compiler.has_waited
        except BaseException as error:
            if isinstance(error, UpdateFailedError):
                condition.tear()
            condition.clean_up()
            raise
        condition.network.note_run(step.program)
        condition.note_submitted(step)

    def _is_whole(self, layers: Sequence[int]) -> bool:
        return len(layers) == self._condition.network.partition.num_layers

    def _prepare(
        self,
        batch: Batches,
        choice: Choice,
        *,
        settings: Settings | None,
        needs_loss: bool = True,
        keep_outputs: bool = False,
        side: str = "",
        mode: Mode = "usual",
    ) -> Step:
        """Make a step; before, try two rows, plan and prove, if that was not done for its like.

        Args:
            batch: the rows of this rank.
            choice: the layers that run.
            settings: of the optimizer; None: nothing is updated.
            needs_loss: whether there must be a loss.
            keep_outputs: whether they are wanted, and not what the loss averages over.
            side: of a step in two sides, the one that runs.
            mode: of the user's modules, where it trains.

        Raises:
            ValueError: the batch is invalid, on this rank or another; nothing has changed.
        """
        has, network, training = self._has, self._condition.network, settings is not None
        # A rank without rows tries, plans and proves with one of another rank, and counts nothing.
        if training and not side:
            _refuse_asking(batch)
        given = self._splitting.of(_ordinary(batch, has_graph=bool(side)))
        batch = self._with_rows(given)
        has_own, batch = batch is given, self._as_one(batch)
        first = _most_telling(batch)
        learn = partial(network.learn, needs_loss=needs_loss)
        with has.timeline.phase("trial"):
            rule = self._casting.try_rows(first, learn).rule or Rule.ROWS
        batch = self._casting.cast(batch)
        proves = training and has.proves and not keep_outputs
        self._decide(_ordinary(batch, has_graph=False), proves=proves)
        keep_outputs |= bool(side) and not network.may_fuse()
        # Outputs have the order of the rows.
        whole = keep_outputs or bool(side)
        rows, grouping = (
            self._rows_of(batch),
            None if whole else self._lengths.grouping(batch, rule),
        )
        # All ranks need as many microbatches as the one with most: their lanes meet line by line.
        own = split_batch(batch, microbatch_size=rows) if has_own and grouping is None else []
        if grouping is not None and isinstance(batch, Mapping):
            own = grouping.take(batch)
        reasons, ignored, counts, numbers, tokens = self._ranks(
            own, rule, choice, counts=not keep_outputs
        )
        joint = not keep_outputs and self._is_joint(rule, reasons, own, sum(numbers))
        if training and sum(numbers) > 1:
            self._warn_of_batch_statistics()
        total = 1 if keep_outputs else sum(counts)
        if not keep_outputs and not joint:
            left_out = next(filter(None, ignored), None)
            rule.refuse_uncountable(num_microbatches=sum(numbers), total=total, ignored=left_out)
        microbatches, num_own = own, len(own)
        if grouping is None:
            microbatches, num_own = split_into(batch, max(1, *numbers), microbatch_size=rows)
        how: dict[str, Any] = {"keep_outputs": keep_outputs, "side": side}
        shape = network.shape(len(microbatches), training=training, joint=joint, **how)
        has.transfer.reserve(shape)
        if proves and not self._proving.is_done(batch):
            with has.timeline.phase("proof"):
                self._proving.check(rule)
        if settings is not None:
            check_settings(has.server, settings)
        network.partition.set_training(training, mode=mode)
        return self._condition.new_step(
            [self._pinned(one) for one in microbatches],
            choice,
            sources=[[*asking_in(one).values()] for one in microbatches],
            seed=self._condition.seed + has.world.rank * RANK_SEED + self._call_seed(side),
            settings=settings,
            rule=rule,
            joint=joint,
            total=total,
            num_own=num_own if has_own else 0,
            num_tokens_elsewhere=sum(tokens) - num_tokens(own),
            mode=mode,
            **how,
        )

    def _call_seed(self, side: str) -> int:
        """What lets each call of the model between two updates draw numbers of its own."""
        if not side:
            return 0
        self._condition.num_calls += 1
        return (self._condition.num_calls - 1) * CALL_SEED

    # ----------------------------------------------------------------------------------------------
    # The batch

    def _as_one(self, batch: Batches) -> Batches:
        """The batch, or a list of it alone if it cannot be cut.

        Raises:
            ValueError: it has more rows than a microbatch was to have, on this rank or another.
        """
        size, refusal = self._has.microbatch_size, None
        cutting = cutting_of(batch) if isinstance(batch, Mapping) else None
        if isinstance(batch, Mapping) and isinstance(cutting, Whole):
            if cutting.rows > (size or 1):
                reason = cutting.reason(batch)
                refusal = f"microbatch_size={size}, but {reason}. Pass {REMEDY}." if size else None
                self._tell_uncut(reason)
            batch = [batch]
        refusals = [] if size is None else self._has.world.gather_facts(refusal)
        for one in filter(None, refusals):
            raise ValueError(one)
        return batch

    def _tell_uncut(self, reason: str) -> None:
        if not self._is_told and self._has.microbatch_size is None:
            self._is_told = True
            logger.warning("%s. It is one microbatch. To have it cut, pass %s.", reason, REMEDY)

    def _with_rows(self, batch: Batches) -> Batches:
        """The batch; for a rank that has no rows, while others have, one of theirs."""
        world = self._has.world
        if not world.is_parallel or not isinstance(batch, Mapping):
            return batch
        rows = [v.shape[0] for v in batch.values() if isinstance(v, Tensor) and v.dim()]
        is_empty = bool(rows) and not any(rows)
        if not any(world.gather_facts(is_empty)):
            return batch
        own = None if is_empty else move_batch(take_rows(batch, 0, 1), "cpu")
        offered = [one for one in world.gather_facts(own) if one is not None]
        return offered[0] if is_empty and offered else batch

    def _rows_of(self, batch: Batches) -> int:
        """Rows of a microbatch."""
        if self._has.microbatch_size is not None or not isinstance(batch, Mapping):
            return self._has.microbatch_size or 1
        return max(1, self._has.planning.decisions.microbatch_tokens // token_length(batch))

    def _ranks(
        self, own: list[Microbatch], rule: Rule, choice: Choice, *, counts: bool
    ) -> list[Any]:
        """What all ranks have: targets that are left out, counts, microbatches, tokens.

        Raises:
            ValueError: they do not run the same layers, or of rows that may not be cut.
        """
        network = self._condition.network
        uncounted = rule.why_not_counted(own) if counts else None
        mine = (
            choice.layers,
            (network.trial.why_not_cut(rule, own, network.route) if counts else None) or uncounted,
            rule.ignored_targets(own) if counts else None,
            rule.total(own) if own and counts else 0,
            len(own),
            num_tokens(own),
        )
        layers, *ranks = zip(*self._has.world.gather_facts(mine), strict=True)
        if len(set(layers)) > 1:
            raise ValueError(f"ranks run layers {layers}. Expected the same on all ranks.")
        return ranks

    def _is_joint(
        self, rule: Rule, reasons: Sequence[str | None], own: list[Microbatch], number: int
    ) -> bool:
        """Whether one loss is taken over all microbatches, as it is not that of their parts.

        Raises:
            ValueError: it should be, but several ranks have rows, or they do not go together.
        """
        reason = next(filter(None, reasons), None)
        if number < 2 or (reason is None and rule is not Rule.UNKNOWN):
            return False
        if not self._has.world.is_parallel and can_join(own):
            network = self._condition.network
            obstacle = network.trial.why_not_joint(own, network.facts)
            if obstacle is None and not isinstance(self._has.loss, TokenLoss):
                return True
            obstacle = obstacle or "l2l.TokenLoss is taken over each of them"
            reason = reason or (
                f"the loss of {number} microbatches cannot be taken over all of their rows: "
                f"{obstacle}, or let one microbatch hold all rows: microbatch_size=all rows of a "
                "batch."
            )
        if reason is not None:
            raise ValueError(reason)
        return False

    def _pinned(self, microbatch: Microbatch) -> Microbatch:
        def pinned(one: Tensor) -> Tensor:
            found = self._has.device.pinned(one.detach() if one.requires_grad else one)
            return found.requires_grad_() if one.requires_grad else found

        return map_batch(pinned, microbatch)

    def _warn_of_batch_statistics(self) -> None:
        network = self._condition.network
        kind = None if self._is_warned else network.partition.batch_statistics()
        if not self._is_warned and kind is None and network.facts.mixes_rows:
            logger.warning(
                "the model computes rows with other rows before its loss: in several microbatches "
                "only those of the same one are seen, as with gradient accumulation in PyTorch. "
                "Give microbatch_size=all rows of a batch for what the whole batch gives."
            )
        self._is_warned = True
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
        network, planning, proving = self._condition.network, self._has.planning, self._proving
        must_plan = planning.must_plan(batch, rows=self._has.microbatch_size)
        ranks = self._has.world.gather_facts((must_plan, network.is_placed))
        must_plan, is_placed = any(rank[0] for rank in ranks), all(rank[1] for rank in ranks)
        is_proven = not proves or proving.is_done(batch)
        if not must_plan and is_proven and is_placed:
            return
        network.leave()
        try:
            if must_plan:
                with self._has.timeline.phase("planning"):
                    self._make_plan(batch)
            if proves and not proving.is_done(batch):  # the plan may have chosen other code
                with self._has.timeline.phase("proof"):
                    proving.see(batch)
        finally:  # if nothing fits, the choices made before hold
            network.enter()

    def _make_plan(self, batch: Batches) -> None:
        has, network = self._has, self._condition.network
        if any(has.world.gather_facts(has.planning.may_tile(batch))):
            network.learn_pointwise()
        found = Findings(
            facts=network.facts,
            record=partial(network.trial.record, route=network.route),
            buffer_bytes=network.buffer_bytes() + has.turns.bytes_of_others(self._condition),
            draws_random_numbers=bool(has.compiler.random),
        )
        try:
            has.planning.make(batch, found, rows=has.microbatch_size)
        except DoesNotFitError as error:
            raise has.turns.explained(error, has.device) from None
        if has.planning.measuring_seconds:
            has.timeline.move(has.planning.measuring_seconds, "measuring", out_of="planning")
        if has.world.is_parallel:  # all go by the plan of the one with most to do
            parts: list[Any] = [batch] if isinstance(batch, Mapping) else list(batch)
            plans = has.world.gather_facts((num_tokens(parts), has.planning.decisions))
            has.planning.agree(max(plans, key=lambda plan: plan[0])[1])


def _most_telling(batch: Batches) -> Mapping[str, Any]:
    """Of the parts of a batch the one to try: rows without images, say, would not show all."""
    parts = [batch] if isinstance(batch, Mapping) else split_batch(batch, microbatch_size=1)
    first = max(parts, key=len)
    num_rows(first)
    return without_graph(first) if asking_in(first) else first


def _ordinary(batch: Batches, *, has_graph: bool) -> Batches:
    """The batch without tensors of `torch.inference_mode()`, which would make others like them.

    Nor of a graph, unless gradients go back into that.
    """

    def ordinary(one: Tensor) -> Tensor:
        one = one.clone() if one.is_inference() else one
        return one.detach() if one.requires_grad and not has_graph else one

    parts = [batch] if isinstance(batch, Mapping) else batch
    tensors = (one for one in pytree.tree_leaves(parts) if isinstance(one, Tensor))
    if all(ordinary(one) is one for one in tensors):
        return batch
    made = [map_batch(ordinary, part) for part in parts]
    return made[0] if isinstance(batch, Mapping) else made


def _refuse_asking(batch: Batches) -> None:
    """Refuse tensors whose gradients nobody would get.

    Raises:
        ValueError: with what to do instead.
    """
    for part in [batch] if isinstance(batch, Mapping) else batch:
        for name, _ in asking_in(part):
            raise ValueError(
                f"{name!r} of the batch requires a gradient, which engine.step gives to nothing "
                "but parameters. Call the model in a loop of your own (autograd=True, "
                "docs/loops.md), or pass it with .detach()."
            )


def num_tokens(parts: Sequence[Mapping[str, Any]]) -> int:
    """Positions of all rows."""
    return sum(num_rows(one) * token_length(one) for one in parts)
