"""How far an engine has come, and whether it can go on."""

from __future__ import annotations

import logging
from collections import deque
from typing import Literal, final

from l2l.device import Event
from l2l.engine.network import Network
from l2l.engine.resources import Resources
from l2l.run import Skips, Step
from l2l.schedule import Lane

logger = logging.getLogger("l2l")

MAX_STEPS_AHEAD = 2  # how far the host may run ahead of the device


@final
class Condition:
    """Owner of the number of steps, of the seed, and of steps whose end is not known yet.

    [Note: interrupts] in guard.py says why a step counts as running for so long.
    """

    def __init__(self, resources: Resources, network: Network, *, seed: int) -> None:
        """Nothing has run yet."""
        self._resources, self._network = resources, network
        self._state: Literal["open", "torn", "closed"] = "open"
        self._ends: deque[tuple[Event, Step]] = deque()  # of steps that the device may still run
        self.running: Step | None = None  # one whose end was not reached, or not noted
        self.skips = Skips()
        self.seed = seed
        self.step_number = 0

    @property
    def state(self) -> Literal["open", "torn", "closed"]:
        """Whether the engine can be used; torn: weights are of two steps, or the device failed."""
        if self._state == "closed":
            return "closed"
        return "torn" if self.is_torn or self._resources.device.has_failed else "open"

    @property
    def is_torn(self) -> bool:
        """Whether a step has failed in its updates, or has got there and not to its end."""
        running = self.running
        return (
            self._state == "torn"
            or self._resources.server.is_torn
            or (running is not None and running.updates_submitted)
        )

    def refuse_if_closed(self) -> None:
        """Refuse an engine that has given its weights back.

        Raises:
            RuntimeError: it has.
        """
        if self._state == "closed":
            raise RuntimeError("the engine is closed. Make a new one from the model.")

    def refuse_if_unusable(self) -> None:
        """Refuse an engine that is closed or torn; else clear up after an interrupt.

        Raises:
            RuntimeError: with what can be done.
        """
        self.refuse_if_closed()
        if self.is_torn:
            raise RuntimeError(
                "an earlier step failed after some layers had been updated, so the weights are of "
                "two steps. Go on from a checkpoint with engine.load, or make a new engine."
            )
        self.clean_up()  # an interrupt may have kept it from being done

    def clean_up(self) -> None:
        """Give up the step that runs, if there is one."""
        if self.running is None:
            return
        self._network.relay.abandon(self.running)
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

    def catch_up(self) -> bool:
        """Wait if the host is too far ahead of the device; whether a step's end was seen."""
        if len(self._ends) < MAX_STEPS_AHEAD:
            return False
        end, earlier = self._ends.popleft()
        end.synchronize()
        self.skips.learn(earlier)
        return True

    def note_submitted(self, step: Step) -> None:
        """All of a step is on its way; if it trains, it runs until it is counted."""
        self._ends.append((self._resources.device.record(Lane.COMPUTE), step))
        if not step.training:
            self.running = None
            return
        self.skips.add(step)
        if self._resources.scaler is not None:
            self._resources.scaler.unobserved = step

    def count(self) -> None:
        """Count the step that runs: only now the engine is whole again."""
        self.step_number += 1
        self.running = None

    def finish_step(self) -> None:
        """Wait until nothing runs; updates that were left to the next step still wait."""
        for lane in Lane:
            self._resources.device.record(lane).synchronize()
        if self._resources.scaler is not None:
            self._resources.scaler.observe()
        self.skips.learn_all()

    def begin_anew(self) -> None:
        """Give up whatever runs and waits: a checkpoint replaces all of it. Torn until then."""
        self._state = "torn"
        self._network.relay.abandon(self.running)
        self._resources.device.recover()
        self.skips.begin_anew()
        self.finish_step()
        self._resources.server.forget_updates()
        self._ends.clear()
        self.running = None

    def go_on_from(self, step_number: int) -> None:
        """Everything is there again, as it was after so many steps."""
        self.step_number, self._state = step_number, "open"

    def finish(self) -> Exception | None:
        """Wait for everything that runs or is being written; what went wrong with it."""
        self.clean_up()
        failure: Exception | None = None
        server, persistence = self._resources.server, self._network.persistence
        for finish in (server.settle_all, persistence.finish, self.skips.learn_all):
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
        self._network.give_back_buffers()
