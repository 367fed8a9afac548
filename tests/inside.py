"""What tests, benchmarks and scripts see of the inside of an engine: all of it goes through here.

An engine that is arranged otherwise changes this file, and no test.
"""

from collections.abc import Callable, Mapping
from typing import Any

import l2l.engine.engine
from l2l.checkpoint import Persistence
from l2l.distributed import World
from l2l.engine.engine import PLACED as PLACED
from l2l.engine.engine import Engine
from l2l.model import Compiler, Partition
from l2l.parameter_server import Arena, ParameterServer
from l2l.planner import Planning
from l2l.proof import Proof, ProofMemory
from l2l.run import OuterPass, Relay, Scaler, Stash, Transfer
from l2l.schedule import OuterUnit, Schedule, Shape
from l2l.trial import Trial

# Names for `monkeypatch.setattr`.
COMPILER = "l2l.engine.engine.Compiler"
LOAD_KERNEL = "l2l.engine.engine.load_kernel"
MAKE_SCHEDULE = "l2l.engine.engine.make_schedule"
PROVEN = "l2l.engine.engine.PROVEN"
RUN_OF_PROOF = "l2l.engine.engine.Engine._prove"

run_of_proof = Engine._prove


def remember_proofs_in(memory: ProofMemory) -> None:
    """Let engines that are made from here on know, and note, what was proven."""
    l2l.engine.engine.PROVEN = memory


# --------------------------------------------------------------------------------------------------
# What an engine keeps for its life


def model(engine: Engine) -> Any:
    return engine._model


def world(engine: Engine) -> World:
    return engine._world


def link(engine: Engine) -> Any:
    """The type in which weights cross the link."""
    return engine._precision.link


def arena(engine: Engine) -> Arena:
    return engine._arena


def server(engine: Engine) -> ParameterServer:
    return engine._server


def compiler(engine: Engine) -> Compiler:
    return engine._compiler


def scaler(engine: Engine) -> Scaler | None:
    return engine._scaler


def transfer(engine: Engine) -> Transfer:
    return engine._transfer


def stash(engine: Engine) -> Stash:
    return engine._stash


def planning(engine: Engine) -> Planning:
    return engine._planning


# --------------------------------------------------------------------------------------------------
# What is made for the layers that it has now


def partition(engine: Engine) -> Partition:
    return engine._partition


def outer(engine: Engine) -> OuterPass:
    return engine._outer


def relay(engine: Engine) -> Relay:
    return engine._relay


def trial(engine: Engine) -> Trial:
    return engine._trial


def persistence(engine: Engine) -> Persistence:
    return engine._persistence


def proof(engine: Engine) -> Proof:
    return engine._proof


# --------------------------------------------------------------------------------------------------
# What is on the device


def outer_units(engine: Engine) -> tuple[OuterUnit, ...]:
    """Units around the layers, as they are placed."""
    return engine._placed


def schedules(engine: Engine) -> Mapping[Shape, Schedule]:
    """Those that are kept, the oldest first."""
    return engine._schedules


def change_shape(engine: Engine, change: Callable[[Shape], Shape]) -> None:
    """Let every step have another shape than the plan says."""
    shape = engine._shape
    engine._shape = lambda number, *, training: change(shape(number, training=training))


# --------------------------------------------------------------------------------------------------
# How far it has come, and whether it can go on


def seed(engine: Engine) -> int:
    return engine._seed


def count_a_step(engine: Engine) -> None:
    """Go on as if there had been one more."""
    engine._step_number += 1


def tear(engine: Engine) -> None:
    """Let the engine be as after a step that has failed in its updates."""
    engine._state = "torn"


def state(engine: Engine) -> str:
    """Open, torn or closed, as it was noted."""
    return engine._state


def finish_step(engine: Engine) -> None:
    """Wait until nothing runs."""
    engine._finish_step()


def clean_up(engine: Engine) -> None:
    """Give up a step that was interrupted, if there is one, as the next operation would."""
    if engine._running is not None:
        engine._refuse_if_unusable()
