"""The engine's side of the proof: the code that a step would run, run once without a change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from l2l.engine.condition import Condition
from l2l.model import Microbatch, Rule, like
from l2l.proof import FLOAT16_SCALE, Evidence
from l2l.run import PROLOGUE_SEED, mix_seed
from l2l.schedule import Lane

Batches = Mapping[str, Any] | Sequence[Mapping[str, Any]]


@final
@dataclass(frozen=True, eq=False)
class Proving:
    """Compares the first step with the model's own code: see `l2l.proof`."""

    condition: Condition

    def is_done(self, batch: Batches) -> bool:
        """Whether the code that a step would run now was proven, for all ranks."""
        return self.condition.network.proof.is_done(batch, self._path())

    def see(self, batch: Batches) -> None:
        """Run the model's own code, while nothing is on the device."""
        network = self.condition.network
        network.proof.see(
            batch,
            network.facts.rule or Rule.ROWS,
            network.route,
            cut=network.facts.cut,
            buffers=network.buffers(),
            seed_of=self._seed_of,
            room=self.condition.has.planning.budget.nbytes,
        )

    def check(self, rule: Rule) -> None:
        """Run the engine's on the same rows, and compare; nothing has changed afterwards.

        Raises:
            ProofError: they do not compute the same.
        """
        network = self.condition.network
        network.proof.check(rule, self._path(), self.run, network.buffers)

    def run(self, evidence: Evidence, rows: Sequence[Microbatch], total: int) -> float:
        """Run a step that changes nothing, to its end, with layers as they are, not compiled."""
        has, network = self.condition.has, self.condition.network
        step = self.condition.new_step(
            [like(one, one) for one in rows],
            self.condition.chosen(),
            seed=self.condition.seed,  # of all ranks that of the first, whose rows they run
            settings=has.optimizer.settings(),
            rule=network.facts.rule or Rule.ROWS,
            total=total * has.world.size,
            num_own=len(rows),
            loss_scale=1.0 if has.scaler is None else FLOAT16_SCALE,
            decided=(None,),  # no update, whatever the gradients
            witness=evidence.add,
        )
        step = replace(step, program=replace(step.program, compiles_loss=False))
        network.partition.set_training(not network.proof.on_host)
        try:
            has.transfer.reserve(step.program.shape)
            with has.compiler.paused():
                network.relay.run(step)
            network.note_run(step.program)
            for lane in Lane:
                has.device.record(lane).synchronize()
            network.relay.show_waiting(step)
            has.server.settle_all()
        except BaseException:
            network.relay.abandon(step)
            has.device.recover()
            has.server.forget_updates()
            raise
        evidence.losses.extend((step.losses[:, 0] * step.plain_factor(scaled=False)).tolist())
        return step.plain_factor(scaled=True)

    def _path(self) -> tuple[object, ...]:
        """What decides which code a step runs, sizes apart."""
        has, network = self.condition.has, self.condition.network
        decisions, outer = has.planning.decisions, has.planning.subject.outer_units(network.facts)
        return (
            has.device.torch_device.type,
            has.precision.link,
            has.policy.value,
            has.stash.policy,
            has.world.share.number,
            network.facts.rule,
            repr(network.facts.route),
            repr(sorted(unit.name for unit in outer if unit.looked_up)),
            *((name, bool(getattr(decisions, name))) for name in decisions.__slots__),
        )

    def _seed_of(self, layer: int | None, m: int) -> int:
        """The seeds of a proof: of all ranks those of the first, whose rows they run."""
        part = PROLOGUE_SEED if layer is None else layer
        return mix_seed(self.condition.seed, self.condition.step_number, part, m)
