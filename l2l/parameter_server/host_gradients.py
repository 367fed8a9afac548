"""Gradients that wait on the host for the user's own code: `.grad` of the model's parameters.

The host adds what a backward pass has made to what is there, as PyTorch does: the first gradient of
a parameter is taken over, further ones are added to its `.grad`, whatever tensor that is by then.
Gradients lie in float32 in one flat buffer for each unit, by which the optimizer updates it; what
the user has put in their place is copied there first.

A gradient that was taken away (`zero_grad`) while somebody still holds it stays as it is: the next
one gets memory of its own.

[Note: gradients away] An optimizer step leaves its updates to the next forward pass, under which
they cost nothing, as other steps do ([Note: updates that wait] in waiting.py). The gradients they
read must not change until then. So they are taken out of `.grad`, where something stands for them
that brings them back, with the update done, as soon as anybody uses it: after a `zero_grad` nobody
does. Gradients that somebody holds, who might write to them, are used at once.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import final

import torch
from torch import Tensor, nn
from typing_extensions import override

from l2l.model import GradientsAway, late
from l2l.parameter_server.host_memory import Arena
from l2l.parameter_server.store import ParameterServer


@final
class HostGradients(GradientsAway):
    """Owner of the memory of gradients, and of which parameters have one."""

    def __init__(self, arena: Arena, server: ParameterServer) -> None:
        """There are no gradients, and no memory for them yet."""
        self._arena, self._server = arena, server
        self._parameters: dict[str, nn.Parameter] = {}
        self._memory: dict[str, Tensor] = {}  # by unit
        self._given: dict[str, weakref.ref[Tensor]] = {}  # the last gradient, by parameter
        self._elsewhere: Tensor | None = None  # for gradients that the user has put there
        self._away: dict[str, Tensor] = {}  # see [Note: gradients away]
        self._new: dict[str, Tensor] = {}  # of the backward pass that runs
        self._hooked: dict[str, Tensor] = {}  # the same, for hooks to see

    def follow(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Be about these parameters from here on; gradients that others have stay theirs."""
        self.bring_back_all()
        for memory in self._memory.values():  # units may have other sizes
            self._arena.give_back("gradients", memory)
        self._memory.clear()
        self._parameters = dict(parameters)

    @override
    def get(self, owner: str) -> Tensor | None:
        """See [Note: gradients away]."""
        gradient = self._away.get(owner)
        if gradient is None:
            return None
        if self._server.unit_of(owner) not in self._server.waiting:
            self._bring_back(owner)
            return gradient

        def use() -> Tensor:
            self._server.settle_all()
            self._bring_back(owner)  # unless it was dropped: then only who asks here has it
            return gradient

        return late(use, gradient.dtype)

    @override
    def drop(self, owner: str) -> None:
        self._away.pop(owner, None)

    def bring_back_all(self) -> None:
        """Let all gradients be in `.grad` again; no update reads them any more."""
        for owner in [*self._away]:
            self._bring_back(owner)

    def _bring_back(self, owner: str) -> None:
        if owner in self._away:
            _set_gradient(self._parameters[owner], self._away.pop(owner))

    def send_away(self, unit: str, received: Collection[str]) -> bool:
        """Take the gradients of a unit out of `.grad`.

        Returns:
            False: somebody holds one, or they are not where updates read them.
        """
        parameters = {owner: self._parameters[owner] for owner in received}
        layout = self._server.units[unit].form.gradient_layout
        for owner, parameter in parameters.items():
            is_there = unit in self._memory and _is_at(
                gradient_of(parameter), layout.view(self._memory[unit], owner)
            )
            if not is_there or _count_holders(parameter) != NOBODY:
                return False
        for owner, parameter in parameters.items():
            gradient = gradient_of(parameter)
            assert gradient is not None
            self._away[owner] = gradient
            _remove_gradient(parameter)
        return True

    def reserve(self, units: Collection[str]) -> None:
        """Take the memory for gradients of these units, as far as it is not there."""
        for unit in units:
            if unit not in self._memory:
                nbytes = self._server.units[unit].form.gradient_layout.nbytes
                memory = self._arena.take("gradients", nbytes, torch.uint8, registered=False)
                self._memory[unit] = memory

    def collect(self, unit: str, staging: Tensor, received: Collection[str], factor: float) -> None:
        """Add the gradients that a unit has received; for the thread of the update lane.

        Args:
            unit: whose they are.
            staging: where they are, which is overwritten.
            received: the parameters that have got one.
            factor: what they are to be multiplied with.
        """
        layout = self._server.units[unit].form.staging_layout
        with torch.no_grad():
            for owner in layout.names:
                if owner not in received:
                    continue
                new = layout.view(staging, owner)
                if factor != 1.0:
                    new.mul_(factor)
                parameter = self._parameters[owner]
                if _hooks(parameter, "_backward_hooks"):
                    self._hooked[owner] = new.clone()
                else:
                    self._add(unit, owner, new)

    def publish(self) -> None:
        """Let the parameters have what was collected, and run their hooks."""
        hooked, self._hooked = self._hooked, {}
        for owner, gradient in hooked.items():
            for hook in _hooks(self._parameters[owner], "_backward_hooks"):
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            with torch.no_grad():
                self._add(self._server.unit_of(owner), owner, gradient)
        touched = [*self._new]
        for owner, gradient in self._new.items():
            _set_gradient(self._parameters[owner], gradient)
            self._given[owner] = weakref.ref(gradient)
        self._new = {}
        for owner in touched:
            parameter = self._parameters[owner]
            for hook in _hooks(parameter, "_post_accumulate_grad_hooks"):
                hook(parameter)

    def forget_new(self) -> None:
        """Forget what a backward pass that failed has made, as far as it stands alone."""
        self._new, self._hooked = {}, {}

    def _add(self, unit: str, owner: str, new: Tensor) -> None:
        present = gradient_of(self._parameters[owner])
        if present is not None:
            present.add_(new)
            self._touched(owner, present)
            return
        known = self._given.get(owner)
        is_held = known is not None and known() is not None
        target = torch.empty_like(new, dtype=torch.float32) if is_held else self._own(unit, owner)
        self._new[owner] = target.copy_(new)

    def _touched(self, owner: str, present: Tensor) -> None:
        self._new[owner] = present

    def _own(self, unit: str, owner: str) -> Tensor:
        """A parameter's place in the memory of its unit, as a tensor that is no view."""
        layout = self._server.units[unit].form.gradient_layout
        view = layout.view(self._memory[unit], owner)
        whole = torch.empty(0, dtype=view.dtype)
        return whole.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())

    def present(self) -> Iterator[tuple[str, Tensor, frozenset[str]]]:
        """Units that have gradients: the memory of all, and the parameters that have one."""
        for unit, one in self._server.units.items():
            received = frozenset(
                owner
                for owner in one.form.trained.names
                if gradient_of(self._parameters[owner]) is not None
            )
            if not received:
                continue
            yield unit, self._flat(unit, received), received

    def _flat(self, unit: str, received: Collection[str]) -> Tensor:
        """Gradients of a unit in one buffer: where they are, or a copy if some are elsewhere."""
        layout = self._server.units[unit].form.gradient_layout
        gradients = {owner: gradient_of(self._parameters[owner]) for owner in received}
        if unit in self._memory:
            places = {owner: layout.view(self._memory[unit], owner) for owner in received}
            if all(_is_at(gradients[owner], place) for owner, place in places.items()):
                return self._memory[unit]
        if self._elsewhere is None or self._elsewhere.nbytes < layout.nbytes:
            self._elsewhere = torch.empty(layout.nbytes, dtype=torch.uint8)
        for owner, gradient in gradients.items():
            assert gradient is not None
            layout.view(self._elsewhere, owner).copy_(gradient.detach())
        return self._elsewhere

    def norm(self) -> float:
        """The norm of all gradients together."""
        found = [gradient_of(parameter) for parameter in self._parameters.values()]
        norms = torch._foreach_norm([one.float() for one in found if one is not None])
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    def are_there(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(gradient_of(one) is not None for one in self._parameters.values())

    @property
    def nbytes(self) -> int:
        """Host bytes that are taken."""
        return sum(memory.nbytes for memory in self._memory.values())

    def close(self) -> None:
        """Let go of the memory; gradients that parameters have stay theirs."""
        self._memory.clear()
        self._new, self._hooked = {}, {}


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """What is in `.grad` of a parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def _count_holders(parameter: nn.Parameter) -> tuple[int, int]:
    """How many hold a parameter's gradient: objects of Python, and others such as views of it."""
    gradient = gradient_of(parameter)
    count = getattr(gradient, "_use_count", None)
    return sys.getrefcount(gradient), -1 if count is None else count()


def _nobody() -> tuple[int, int]:
    """The same where nobody does; of a torch that does not count, nothing that is ever found."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    found = _count_holders(parameter)
    return found if found[1] > 0 else (0, 0)


def _is_at(gradient: Tensor | None, place: Tensor) -> bool:
    return (
        gradient is not None
        and gradient.data_ptr() == place.data_ptr()
        and gradient.dtype is place.dtype
        and gradient.is_contiguous()
    )


def _set_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        if parameter.dtype is not gradient.dtype:
            parameter.grad_dtype = gradient.dtype
        parameter.grad = gradient


def _remove_gradient(parameter: nn.Parameter) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = None


def _hooks(parameter: nn.Parameter, kind: str) -> list[Callable[[Tensor], Tensor | None]]:
    with torch._C.DisableTorchFunctionSubclass():
        return list((getattr(parameter, kind) or {}).values())


NOBODY = _nobody()
