"""What tests, benchmarks and scripts see of the inside of an engine: all of it goes through here.

An engine that is arranged otherwise changes this file, and no test.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import l2l
import l2l.engine.engine
import l2l.engine.network
from l2l.checkpoint import Persistence
from l2l.distributed import World
from l2l.engine import Engine
from l2l.engine.checkpoints import PLACED as PLACED
from l2l.engine.proving import Proving
from l2l.model import Compiler, Partition, Route
from l2l.parameter_server import Arena, ParameterServer
from l2l.planner import KeptPlans, Planning
from l2l.proof import Proof, ProofMemory
from l2l.run import Facts, OuterPass, Relay, Scaler, Stash, Transfer
from l2l.schedule import OuterUnit, Schedule, Shape
from l2l.trial import Trial

EXECUTION = frozenset(field.name for field in dataclasses.fields(l2l.Execution))


def engine(model: Any, **settings: Any) -> Engine:
    """An engine, with what belongs into `l2l.Execution` among its settings."""
    execution = {name: settings.pop(name) for name in EXECUTION & settings.keys()}
    execution = {name: one for name, one in execution.items() if (name, one) != ("overrides", None)}
    return Engine(model, execution=l2l.Execution(**execution), **settings)


# Names for `monkeypatch.setattr`.
COMPILER = "l2l.engine.resources.Compiler"
LOAD_KERNEL = "l2l.engine.resources.load_kernel"
MAKE_SCHEDULE = "l2l.engine.network.make_schedule"
PROVEN = "l2l.engine.network.PROVEN"
RUN_OF_PROOF = "l2l.engine.proving.Proving.run"

run_of_proof = Proving.run


def keep_plans_in(plans: KeptPlans) -> None:
    """Let engines that are made from here on keep their plans there."""
    l2l.engine.engine.PLANS = plans


def remember_proofs_in(memory: ProofMemory) -> None:
    """Let engines that are made from here on know, and note, what was proven."""
    l2l.engine.network.PROVEN = memory


# --------------------------------------------------------------------------------------------------
# What an engine keeps for its life


def model(engine: Engine) -> Any:
    return engine._resources.model


def world(engine: Engine) -> World:
    return engine._resources.world


def link(engine: Engine) -> Any:
    """The type in which weights cross the link."""
    return engine._resources.precision.link


def arena(engine: Engine) -> Arena:
    return engine._resources.arena


def server(engine: Engine) -> ParameterServer:
    return engine._resources.server


def compiler(engine: Engine) -> Compiler:
    return engine._resources.compiler


def scaler(engine: Engine) -> Scaler | None:
    return engine._resources.scaler


def transfer(engine: Engine) -> Transfer:
    return engine._resources.transfer


def places(engine: Engine) -> Mapping[str, Any]:
    """Slots, gradient slots and places for lent state that have memory now."""
    return transfer(engine)._slots


def weight_slots(engine: Engine) -> dict[str, Any]:
    return {name: slot for name, slot in places(engine).items() if name.startswith("S")}


def stash(engine: Engine) -> Stash:
    return engine._resources.stash


def planning(engine: Engine) -> Planning:
    return engine._resources.planning


# --------------------------------------------------------------------------------------------------
# What is made for the layers that it has now


def partition(engine: Engine) -> Partition:
    return engine._condition.network.partition


def outer(engine: Engine) -> OuterPass:
    return engine._condition.network.outer


def relay(engine: Engine) -> Relay:
    return engine._condition.network.relay


def facts(engine: Engine) -> Facts:
    """What the trial has found."""
    return engine._condition.network.facts


def trial(engine: Engine) -> Trial:
    return engine._condition.network.trial


def present_buffers(engine: Engine) -> dict[str, Any]:
    """Buffers on the device, as training has left them."""
    return engine._condition.network.buffers()


def persistence(engine: Engine) -> Persistence:
    return engine._condition.network.persistence


def proof(engine: Engine) -> Proof:
    return engine._condition.network.proof


# --------------------------------------------------------------------------------------------------
# What is on the device


def outer_units(engine: Engine) -> tuple[OuterUnit, ...]:
    """Units around the layers, as they are placed."""
    return engine._condition.network.shape(1, training=True).outer


def schedules(engine: Engine) -> Mapping[Shape, Schedule]:
    """Those that are kept, the oldest first."""
    return engine._condition.network.schedules


def change_shape(engine: Engine, change: Callable[[Shape], Shape]) -> None:
    """Let every step have another shape than the plan says."""
    network = engine._condition.network
    shape = network.shape
    network.shape = lambda number, **how: change(shape(number, **how))


# --------------------------------------------------------------------------------------------------
# How far it has come, and whether it can go on


def seed(engine: Engine) -> int:
    return engine._condition.seed


def count_a_step(engine: Engine) -> None:
    """Go on as if there had been one more."""
    engine._condition.step_number += 1


def tear(engine: Engine) -> None:
    """Let the engine be as after a step that has failed in its updates."""
    engine._condition.tear()


def state(engine: Engine) -> str:
    """Open, torn or closed, as it was noted."""
    return engine._condition._state


def finish_step(engine: Engine) -> None:
    """Wait until nothing runs."""
    engine._condition.finish_step()


def clean_up(engine: Engine) -> None:
    """Give up a step that was interrupted, if there is one, as the next operation would."""
    if engine._condition.running is not None:
        engine._condition.refuse_if_unusable()


def route(engine: Engine) -> Route:
    """How the model's code runs its layers."""
    return engine._condition.network.route


def live_bytes(engine: Engine) -> int:
    """What it has on the checking device now."""
    return engine.device._reserved.live_bytes
