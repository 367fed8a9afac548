"""Engines that share one budget of a device: they use its memory in turns.

`Engine(teacher, device_memory=engine)` plans with the same budget as the other engine, all of it.
Whichever begins something on the device lets the one before bring back to the host what it has
there from step to step, as `engine.generate` does; the next step of that one brings it again. So
the two never take more than the budget together, but for buffers of models, which stay and are
counted in both plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from l2l.device import Device, format_bytes
from l2l.distributed import World
from l2l.planner import Budget, DoesNotFitError

if TYPE_CHECKING:
    from l2l.engine.condition import Condition
    from l2l.engine.guard import Guard


@final
class Turns:
    """Owner of whose turn it is; shared by the engines with one budget."""

    def __init__(self, budget: Budget) -> None:
        """Nobody uses it yet."""
        self.budget = budget
        self._members: dict[Condition, Guard] = {}
        self._holder: Condition | None = None  # the only one that may have something on the device

    def check(self, device: Device, *, world: World, stash: str) -> None:
        """Refuse an engine that cannot use the budget, or for which there is none.

        Raises:
            ValueError: with what to do instead.
        """
        for other in self._members:
            if other.has.device.torch_device != device.torch_device:
                raise ValueError(
                    f"device_memory= is that of an engine on {other.has.device.torch_device}, and "
                    f"this one is to be on {device.torch_device}. Give it a size."
                )
            if world.is_parallel:
                raise ValueError(
                    "device_memory= of another engine is for one process, found several ranks. "
                    "Give each engine a size."
                )
            if "device" in (stash, other.has.stash.policy):
                raise ValueError(
                    "stash='device' keeps what waits on the device, so nobody else can have its "
                    "memory meanwhile. Leave it out, or give each engine a size."
                )
        if not self._members:
            _refuse_too_much(self.budget, device)
        self._free_holder("l2l.Engine(...)")  # weights may pass through the device on their way

    def join(self, condition: Condition, guard: Guard) -> None:
        """An engine uses the budget from here on."""
        self._members[condition] = guard

    def leave(self, condition: Condition) -> None:
        """An engine is closed."""
        self._members.pop(condition, None)
        self._holder = None if self._holder is condition else self._holder

    def take(self, condition: Condition) -> None:
        """It is an engine's turn: the one before gives its device memory back.

        Raises:
            RuntimeError: that one is at work, or torn.
        """
        if self._holder is not condition:
            self._free_holder(self._members[condition].operation)
            self._holder = condition

    def explained(self, error: DoesNotFitError, device: Device) -> DoesNotFitError:
        """The same error; where other engines have left too little, with what to do."""
        promised = 0 if self.budget.given is not None else device.promised_bytes()
        if not promised:
            return error
        return DoesNotFitError(
            f"{error} Other engines of this process may take {format_bytes(promised)} of the "
            "device, so nothing more was free. Give device_memory=the other engine, so that both "
            "use the same memory in turns, or each a part of it."
        )

    def _free_holder(self, operation: str) -> None:
        if self._holder is not None:
            _free(self._holder, self._members[self._holder], operation)
            self._holder = None

    @property
    def described(self) -> str:
        """For people; empty: an engine has its budget alone."""
        number = len(self._members)
        return f"{number} engines use it in turns" if number > 1 else ""

    def others(self, condition: Condition) -> list[Condition]:
        """Engines that share the budget with this one."""
        return [other for other in self._members if other is not condition]

    def bytes_of_others(self, condition: Condition) -> int:
        """What the others keep on the device while it is not their turn."""
        return sum(other.network.buffer_bytes() for other in self.others(condition))


def _free(condition: Condition, guard: Guard, operation: str) -> None:
    """Let an engine bring everything that it has on the device back to the host."""
    try:
        guard.enter(operation, holds=False)
    except RuntimeError as error:
        raise RuntimeError(
            f"{operation} needs the device memory of an engine that is at work: the two share one "
            "device_memory, and take turns. Call it before or after (what a teacher says, say, "
            "before the student's step), or give each engine a device_memory of its own."
        ) from error
    try:
        condition.clean_up()
        if condition.is_torn:
            raise RuntimeError(
                f"{operation} needs the device memory of another engine, of which a step has "
                "failed in its updates. Restore a checkpoint there with engine.load, or close it."
            )
        condition.finish_step()
        condition.network.leave()
    finally:
        guard.leave()


def _refuse_too_much(budget: Budget, device: Device) -> None:
    """Refuse a budget for which the device has no room beside those of other engines.

    Raises:
        ValueError: with what to do instead.
    """
    promised, total = device.promised_bytes(), device.total_bytes()
    if promised and budget.given is not None and promised + budget.given > total:
        raise ValueError(
            f"device_memory={format_bytes(budget.given)}, but other engines of this process may "
            f"take {format_bytes(promised)} of the {format_bytes(total)} that the device has. Give "
            "device_memory=the other engine, so that both use the same memory in turns; or each a "
            "part of it; or close the other first."
        )
