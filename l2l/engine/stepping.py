"""Performing a batch: prepared, run by the relay, and once more if the device had too little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from l2l.device import UpdateFailedError
from l2l.engine.condition import Condition
from l2l.engine.cut import Batches, Cut, Settings, make_step
from l2l.engine.depth import Choice
from l2l.engine.guard import Guard
from l2l.engine.network import Network
from l2l.engine.placement import Placement
from l2l.engine.preparation import Preparation
from l2l.engine.resources import Resources
from l2l.model import Rule, join_outputs, no_rows
from l2l.planner import STATE_ON_HOST
from l2l.run import Program, Step


@final
@dataclass(frozen=True, eq=False)
class Stepping:
    """Trains, evaluates and predicts."""

    resources: Resources
    network: Network
    condition: Condition
    placement: Placement
    preparation: Preparation
    guard: Guard  # of signals, which are handled between lines while a step may be given up

    def train(self, batch: Batches, layers: Sequence[int] | None) -> Step:
        """One optimizer step; without `layers` the engine's depth chooses some."""
        condition, optimizer = self.condition, self.resources.optimizer
        condition.refuse_if_unusable()
        condition.skips.refuse()
        if layers is not None:
            choice = self.network.chosen(layers)
        else:
            choice = self.network.drawn(step=condition.step_number, seed=condition.seed)
        step, _ = self._perform(batch, choice, settings=optimizer.settings())
        condition.count()
        optimizer.step()
        return step

    def evaluate(self, batch: Batches, layers: Sequence[int] | None) -> Step:
        """Forward only, in evaluation mode."""
        return self._perform(batch, self.network.chosen(layers), settings=None)[0]

    def predict(self, batch: Batches, layers: Sequence[int] | None) -> Any:
        """The model's outputs, on the host; a loss only if there are labels."""
        first = batch if isinstance(batch, Mapping) else batch[0]
        if (word := self.network.partition.collected(first)) is not None:
            raise ValueError(
                f"{word} asks for what single layers return, which the relay does not keep. Turn "
                "it off, in the batch or in the model's config."
            )
        choice, labelled = self.network.chosen(layers), "labels" in first
        step, cut = self._perform(
            batch, choice, settings=None, needs_loss=labelled, keep_outputs=True
        )
        own = cut.microbatches[: step.num_own]
        if not own:  # this rank has no rows
            return no_rows(step.outputs[0])
        shares = (self.network.trial.rule or Rule.UNKNOWN).output_shares(own)
        return join_outputs([step.outputs[m] for m in range(len(own))], shares)

    # ----------------------------------------------------------------------------------------------

    def _perform(
        self,
        batch: Batches,
        choice: Choice,
        *,
        settings: Settings | None,
        needs_loss: bool = True,
        keep_outputs: bool = False,
    ) -> tuple[Step, Cut]:
        """Run a batch; with less memory in use if the device had too little for the plan."""
        training = settings is not None
        with self.network.running():
            self.condition.refuse_if_unusable()
            if not self._is_whole(choice.layers):
                self.resources.planning.restrict(STATE_ON_HOST)
            while True:
                try:
                    cut = self.preparation.prepare(
                        batch,
                        choice,
                        training=training,
                        needs_loss=needs_loss,
                        counts=not keep_outputs,
                    )
                    if settings is not None:
                        self.resources.server.check_settings(settings)
                    self.network.partition.set_training(training)
                    step = make_step(
                        self.resources,
                        cut,
                        choice,
                        number=self.condition.step_number,
                        settings=settings,
                        keep_outputs=keep_outputs,
                    )
                    seed = self.network.seed_of_rank(self.condition.seed)
                    number = len(cut.microbatches)
                    program = self.placement.program(number, choice, training=training, seed=seed)
                    self._run(program, step)
                except torch.OutOfMemoryError as error:
                    if not self._may_try_again(error):
                        raise
                    continue
                return step, cut

    def _may_try_again(self, error: torch.OutOfMemoryError) -> bool:
        """Whether nothing was updated and there is a plan that needs less memory."""
        if self.resources.world.is_parallel or self.condition.is_torn:
            return False  # other ranks are in the middle of the step, or this one is
        return self.resources.planning.tighten(str(error))

    def _run(self, program: Program, step: Step) -> None:
        # Ranks meet in every step: none gives one up that others go on with.
        between = None if self.resources.world.is_parallel else self.guard.deliver
        self.condition.running = step
        try:
            if self.condition.catch_up():
                self.resources.planning.mark(training=step.training and self._is_whole(step.layers))
            self.network.relay.run(program, step, between=between)
        except BaseException as error:
            if isinstance(error, UpdateFailedError):
                self.condition.tear()
            self.condition.clean_up()
            raise
        self.placement.note_run(program.schedule)
        self.condition.note_submitted(step)

    def _is_whole(self, layers: Sequence[int]) -> bool:
        return len(layers) == self.network.partition.num_layers
