"""How far an engine has come, with which layers, and whether it can go on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, final

import torch

from l2l.device import Event
from l2l.engine.depth import Choice, Depth, checked_depth, checked_layers
from l2l.engine.network import Network
from l2l.engine.resources import Resources
from l2l.model import Microbatch, Partition, Rule, asking_in
from l2l.parameter_server import UpdatePolicy
from l2l.run import Program, Skips, Step
from l2l.schedule import Lane

logger = logging.getLogger("l2l")

MAX_STEPS_AHEAD = 2  # how far the host may run ahead of the device

FIRST_SCALE = 2.0**16  # what torch.amp.GradScaler begins with

Settings = Mapping[str, Mapping[str, Any]]
"""Of the optimizer, by parameter."""


@final
class Condition:
    """Owner of the network, of the number of steps, the seed, and of steps that have not ended yet.

    [Note: interrupts] in guard.py says why a step counts as running for so long.
    """

    def __init__(
        self, resources: Resources, partition: Partition, *, depth: Depth, seed: int
    ) -> None:
        """Nothing has run yet."""
        self.has, self.seed, self.depth = resources, seed, depth
        self.network = Network(resources, partition)
        self.origins: tuple[int | None, ...] = tuple(range(partition.num_layers))
        """Of the present layers: see [Note: origins] in layers.py."""
        self.step_number = 0
        self.compiled_since: int | None = None
        """Steps before layers last became compiled ones; None: they were from the first on."""
        self.num_calls = 0  # of the model, since the last step
        self.seed_scale = FIRST_SCALE  # of the loss of a fused side in float16
        self.era = 0  # of the weights: changes whenever they do
        self.skips = Skips()
        self.running: Step | None = None  # one whose end was not reached, or not noted
        self._state: Literal["open", "torn", "closed"] = "open"
        self.has_averages = False  # for weights
        self._ends: deque[tuple[Event, Step]] = deque()  # of steps that the device may still run

    @property
    def state(self) -> Literal["open", "torn", "closed"]:
        """Whether the engine can be used; torn: weights are of two steps, or the device failed."""
        if self._state == "closed":
            return "closed"
        return "torn" if self.is_torn or self.has.device.has_failed else "open"

    @property
    def is_torn(self) -> bool:
        """Whether a step has failed in its updates, or has got there and not to its end."""
        running = self.running
        return (
            self._state == "torn"
            or self.has.server.is_torn
            or (running is not None and running.updates_submitted)
        )

    def refuse_if_unusable(self, *, or_torn: bool = True) -> None:
        """Refuse an engine that is closed or torn; else clear up after an interrupt.

        Raises:
            RuntimeError: with what can be done.
        """
        if self._state == "closed":
            raise RuntimeError("the engine is closed. Make a new one from the model.")
        if or_torn and self.is_torn:
            raise RuntimeError(
                "an earlier step failed after some layers had been updated, so the weights are a "
                "mix of two steps. Restore a checkpoint with engine.load, or create a new engine."
            )
        self.clean_up()  # an interrupt may have kept it from being done

    def refuse_if_averaged(self, operation: str) -> None:
        """Refuse what changes weights, or keeps them, while running means stand for them.

        Raises:
            RuntimeError: they do.
        """
        if self.has_averages:
            raise RuntimeError(
                f"{operation} inside engine.averaged(), where running means stand for the weights. "
                "Leave that block first."
            )

    def refuse_unless_training(self, operation: str) -> None:
        """Refuse what only an engine does that trains.

        Raises:
            RuntimeError: nothing of the model is trained, or not now.
        """
        self.refuse_if_averaged(operation)
        if self.has.is_frozen:
            raise RuntimeError(
                f"{operation} is for models that are trained, and no parameter of this one "
                "requires a gradient: it can be evaluated, predict, generate and be exported. To "
                "train it, make the engine from model.requires_grad_(True)."
            )

    def clean_up(self) -> None:
        """Give up the step that runs, if there is one."""
        if self.running is None:
            return
        self.network.relay.abandon(self.running)
        if self.is_torn:
            self._state = "torn"
        self.running = None

    def tear(self) -> None:
        """Note that the weights are of two steps."""
        self._state = "torn"

    def close(self) -> None:
        """Note that the weights are elsewhere."""
        self._state = "closed"

    # ----------------------------------------------------------------------------------------------
    # Layers

    def follow(self, partition: Partition, origins: tuple[int | None, ...]) -> None:
        """Go on with other layers, which are in the server."""
        self.network, self.origins = Network(self.has, partition), origins
        self.era += 1

    def choose_by(self, depth: Depth | None) -> None:
        """Let another policy choose the layers of every step."""
        self.depth = checked_depth(depth, self.network.partition.num_layers)

    def drawn(self) -> Choice:
        """What the policy chooses for the next step, which may be no layer at all."""
        number = self.network.partition.num_layers
        found = self.depth.choose(step=self.step_number, num_layers=number, seed=self.seed)
        if found.layers:
            checked_layers(found.layers, number)
        return found

    def chosen(self, layers: Sequence[int] | None = None) -> Choice:
        """The layers that were asked for; None: all."""
        number = self.network.partition.num_layers
        return Choice(tuple(range(number)) if layers is None else checked_layers(layers, number))

    # ----------------------------------------------------------------------------------------------
    # Steps

    def new_step(
        self,
        microbatches: list[Microbatch],
        choice: Choice,
        *,
        seed: int,
        settings: Settings | None,
        rule: Rule,
        joint: bool = False,
        keep_outputs: bool = False,
        side: str = "",
        **more: Any,
    ) -> Step:
        """Everything that one run of a schedule works on; without `settings` it does not train.

        Args:
            microbatches: in memory that lanes copy from.
            choice: the layers that run.
            seed: of random numbers.
            settings: of the optimizer.
            rule: what the loss averages over.
            joint: whether one loss is taken over all microbatches.
            keep_outputs: whether the model's outputs are wanted.
            side: of a step in two sides, which one.
            more: as of `Step`.
        """
        has, trains, number = self.has, settings is not None, len(microbatches)
        asks = bool(side) and any(map(asking_in, microbatches))
        program_of = partial(
            self.network.program, number, choice, seed=seed, training=trains, asks_inputs=asks
        )
        program = program_of(joint=joint, keep_outputs=keep_outputs, side=side)
        if side and has.precision.link is torch.float16:
            more["loss_scale"] = self.seed_scale
        names = {name: unit.form.trained.names for name, unit in has.server.units.items()}
        lookups = program.lookups
        return Step(
            program=program,
            sides=_sides(program_of, joint=joint, fused=not keep_outputs) if side else {},
            number=self.step_number,
            layers=choice.layers,
            survival=choice.survival,
            microbatches=microbatches,
            rule=rule,
            names=names if trains else {},
            flags=has.norm_records() if trains and has.world.is_parallel else {},
            device_losses=torch.zeros((number, 2), device=has.device.torch_device),
            losses=has.device.host_record(number, 2),
            norms=has.norm_records() if trains else {},
            settings=settings,
            keep_outputs=keep_outputs,
            clip_norm=has.clip_norm,
            compiles=has.compiler.is_on,
            checks_norms=has.policy is UpdatePolicy.JUST_IN_TIME,
            divide_by_weight=rule is Rule.SUM_AND_WEIGHT,
            rows=has.rows.begin(lookups, microbatches) if lookups else None,
            **more,
        )

    def begin(self, step: Step) -> bool:
        """A step runs from here on; whether an earlier one was seen to end, for which it waits."""
        self.running = step
        if len(self._ends) < MAX_STEPS_AHEAD:
            return False
        end, earlier = self._ends.popleft()
        end.synchronize()
        self.skips.learn(earlier)
        return True

    def note_submitted(self, step: Step) -> None:
        """All of a step is on its way; if it trains, it runs until it is counted."""
        self._ends.append((self.has.device.record(Lane.COMPUTE), step))
        if not step.training or step.program.shape.side:
            self.running = None
            return
        self.skips.add(step)
        if self.has.scaler is not None:
            self.has.scaler.note(step)

    def settle_compiler(self) -> None:
        """A step begins: use what was compiled beside those before, and say so."""
        if self.has.compiler.settle():
            self.compiled_since = self.step_number
            logger.info("layers run compiled from step %s on.", self.step_number + 1)

    def count(self) -> None:
        """Count the step that runs: only now the engine is whole again."""
        self.step_number += 1
        self.num_calls, self.era = 0, self.era + 1
        self.running = None

    def finish_step(self) -> None:
        """Wait until nothing runs; updates that were left to the next step still wait."""
        for lane in Lane:
            self.has.device.record(lane).synchronize()
        if self.has.scaler is not None:
            self.has.scaler.observe()
        self.skips.learn_all()

    def begin_anew(self) -> None:
        """Give up whatever runs and waits: a checkpoint replaces all of it. Torn until then."""
        self._state = "torn"
        self.era += 1
        self.network.relay.abandon(self.running)
        self.has.device.recover()
        self.skips.begin_anew()
        self.finish_step()
        self.has.server.forget_updates()
        self._ends.clear()
        self.running = None

    def go_on_from(self, step_number: int, seed: int) -> None:
        """Everything is there again, as it was after so many steps."""
        self.has.server.reseed(seed)
        self.step_number, self.seed, self._state = step_number, seed, "open"

    def finish(self) -> Exception | None:
        """Wait for everything that runs or is being written; what went wrong with it."""
        self.clean_up()
        self.has.compiler.close()
        failure: Exception | None = None
        persistence = self.network.persistence
        for finish in (self.has.server.settle_all, persistence.finish, self.skips.learn_all):
            try:
                finish()
            except Exception as error:  # the rest is to be finished all the same
                persistence.give_up()
                if failure is None:
                    failure = error
                else:
                    logger.warning("%s", error)
        return failure

    def before_reading(self) -> None:
        """Called before somebody reads the model's own parameters; its buffers follow then."""
        self.refuse_if_unusable()
        self.finish_step()
        self.network.give_back_buffers()


def _sides(program_of: Callable[..., Program], *, joint: bool, fused: bool) -> dict[str, Program]:
    """What may follow the forward side of a step, which is fused or not."""
    found = {"backward": program_of(side="backward", keep_outputs=True)}
    if fused:
        found["fused"] = program_of(side="backward", joint=joint)
        found["outputs"] = program_of(side="outputs", keep_outputs=True)
    return found
