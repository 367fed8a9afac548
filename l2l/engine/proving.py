"""The engine's side of the proof: the code that a step would run, run once without a change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from l2l.engine.condition import Condition
from l2l.engine.cut import Batches, Cut, make_step
from l2l.engine.network import Network
from l2l.engine.placement import Placement
from l2l.engine.resources import Resources
from l2l.model import Microbatch, Rule
from l2l.proof import FLOAT16_SCALE, Evidence
from l2l.run import PROLOGUE_SEED, Step, mix_seed
from l2l.schedule import Lane


@final
@dataclass(frozen=True, eq=False)
class Proving:
    """Compares the first step with the model's own code: see `l2l.proof`."""

    resources: Resources
    network: Network
    condition: Condition
    placement: Placement

    def is_done(self, batch: Batches) -> bool:
        """Whether the code that a step would run now was proven, for all ranks."""
        return self.network.proof.is_done(batch, self._path())

    def see(self, batch: Batches) -> None:
        """Run the model's own code, while nothing is on the device."""
        trial = self.network.trial
        self.network.proof.see(
            batch,
            trial.rule or Rule.ROWS,
            cut=trial.cut,
            buffers=trial.present_buffers(),
            seed_of=self._seed_of,
            room=self.resources.planning.budget,
        )

    def check(self, rule: Rule) -> None:
        """Run the engine's on the same rows, and compare; nothing has changed afterwards.

        Raises:
            ProofError: they do not compute the same.
        """
        self.network.proof.check(rule, self._path(), self.run, self.network.trial.present_buffers)

    def run(self, evidence: Evidence, rows: Sequence[Microbatch], total: int) -> float:
        """Run a step that changes nothing; see `Proof.check`."""
        has, relay = self.resources, self.network.relay
        step = self._step_for(evidence, rows, total)
        self.network.partition.set_training(not self.network.proof.on_host)
        try:
            self._run(step, len(rows))
        except BaseException:
            relay.abandon(step)
            has.device.recover()
            has.server.forget_updates()
            raise
        evidence.losses = (step.losses[:, 0] * step.plain_factor(scaled=False)).tolist()
        return step.plain_factor(scaled=True)

    def _step_for(self, evidence: Evidence, rows: Sequence[Microbatch], total: int) -> Step:
        has = self.resources
        cut = Cut(
            microbatches=[dict(one) for one in rows],
            num_own=len(rows),
            rule=self.network.trial.rule or Rule.ROWS,
            total=total * has.world.size,
        )
        number, settings = self.condition.step_number, has.optimizer.settings()
        step = make_step(has, cut, self.network.chosen(None), number=number, settings=settings)
        step.decided, step.witness = (None,), evidence.add  # no update, whatever the gradients
        if has.scaler is not None:
            step.loss_scale = FLOAT16_SCALE
        return step

    def _run(self, step: Step, number: int) -> None:
        """Run it to its end, with layers as they are, not compiled."""
        has, relay = self.resources, self.network.relay
        has.transfer.reserve(self.placement.shape(number, training=True))
        with has.compiler.paused():
            # Of all ranks that of the first, whose rows they run.
            seed, everything = self.condition.seed, self.network.chosen(None)
            program = self.placement.program(number, everything, training=True, seed=seed)
            relay.run(replace(program, compiles_loss=False), step)
        self.placement.note_run(program.schedule)
        for lane in Lane:
            has.device.record(lane).synchronize()
        relay.show_waiting(step)
        has.server.settle_all()

    def _path(self) -> tuple[object, ...]:
        """What decides which code a step runs, sizes apart."""
        has, trial = self.resources, self.network.trial
        decisions = has.planning.decisions
        amounts = {name: bool(getattr(decisions, name)) for name in decisions.__slots__}
        return (
            has.device.torch_device.type,
            has.precision.link,
            has.policy.value,
            has.stash.policy,
            has.world.share.number,
            trial.rule,
            repr(sorted(filter(has.looks_up, trial.usage))),
            *amounts.items(),
        )

    def _seed_of(self, layer: int | None, m: int) -> int:
        """The seeds of a proof: of all ranks those of the first, whose rows they run."""
        part = PROLOGUE_SEED if layer is None else layer
        return mix_seed(self.condition.seed, self.condition.step_number, part, m)
