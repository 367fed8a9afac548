"""The ranks that train one model together, and what they say to each other.

Data parallel over `torch.distributed`: every rank has its own rows and the same schedule. Ranks of
one *group* hold the model together, each a share of every flat buffer ([Note: shares] in
layout.py); several groups, one for each node, say, hold copies of it.

    gather    weights: every rank of a group gets the shares of the others
    reduce    gradients: every rank gets its own share of the sum over all ranks
    pool      a few numbers: everybody gets their sum

All of these are in place, in one flat tensor. Each kind has process groups of its own and runs on a
lane of its own, so that one never waits for another that was given later. The host's own facts
(`gather_facts`) go through gloo.

Where the device's backend cannot do something, it is staged on the host.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import override

T = TypeVar("T")
MEETING_TIME = timedelta(seconds=60)  # in which all ranks must have begun
WAITING_TIME = timedelta(minutes=10)  # for another rank, in a step
SAVING_TIME = timedelta(hours=2)  # until all have written what they hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One of several equal parts ([Note: shares] in layout.py)."""

    index: int = 0
    number: int = 1

    def of(self, numel: int) -> slice:
        """This part of so many elements."""
        size = numel // self.number
        return slice(self.index * size, (self.index + 1) * size)


class World:
    """All ranks, from one of them; here a single one, which has nobody to talk to."""

    rank = 0
    size = 1
    is_parallel = False
    """Whether ranks talk to each other in a step."""
    share = Share()
    """What this rank holds of every buffer."""

    def gather(self, whole: Tensor) -> None:
        """Fill a flat tensor, whose share of this rank is in its place, with those of others."""

    def reduce(self, whole: Tensor) -> None:
        """Make this rank's share of a flat tensor the sum over all ranks; the rest is undefined."""

    def pool(self, numbers: Tensor, *, within_group: bool = False) -> None:
        """Make a tensor the sum over all ranks, or over those that hold a model together."""

    def gather_host(self, own: Tensor) -> Tensor:
        """Shares of a flat tensor of bytes in host memory, one after another."""
        return own

    def gather_facts(self, fact: T) -> list[T]:
        """What every rank says, small and picklable, in order."""
        return [fact]

    def gather_saved(self, fact: T) -> list[T]:
        """The same for threads that save, one at a time on each rank."""
        return [fact]


@final
class Ranks(World):
    """The ranks of `torch.distributed`."""

    is_parallel = True

    def __init__(self, *, group_size: int | None = None) -> None:
        """Make process groups; all ranks must do this together.

        Args:
            group_size: ranks that hold a model together. None: those of one node if there are
                several nodes, else all.

        Raises:
            ValueError: it does not divide the number of ranks.
        """
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        number = _group_size(self.size) if group_size is None else group_size
        if number < 1 or self.size % number:
            raise ValueError(
                f"group_size={number} does not divide the {self.size} ranks. Expected a number of "
                "ranks that hold one copy of the model together."
            )
        self.share = Share(index=self.rank % number, number=number)
        everybody = list(range(self.size))
        groups = [everybody[start : start + number] for start in everybody[::number]]
        copies = [everybody[index::number] for index in range(number)]
        self._backend = dist.get_backend()
        self._gathering = _own_group(groups, self._backend)
        self._reducing = _own_group(groups, self._backend)
        self._copying = _own_group(copies, self._backend) if number < self.size else None
        self._pooling = _own_group([everybody], self._backend)
        self._pooling_within = _own_group(groups, self._backend)
        self._host = _own_group([everybody], "gloo")
        self._host_group = _own_group(groups, "gloo")
        self._saving = _own_group([everybody], "gloo", SAVING_TIME)

    @override
    def gather(self, whole: Tensor) -> None:
        own = whole[self.share.of(whole.numel())]
        if self._speaks_of(whole):
            dist.all_gather_into_tensor(whole, own, group=self._gathering)
        else:
            whole.copy_(_gather(own.cpu(), self.share.number, self._gathering))

    @override
    def reduce(self, whole: Tensor) -> None:
        own = whole[self.share.of(whole.numel())]
        if self._speaks_of(whole):
            dist.reduce_scatter_tensor(own, whole, group=self._reducing)
        else:
            self._sum(whole, self._reducing)
        if self._copying is not None:
            self._sum(own, self._copying)

    @override
    def pool(self, numbers: Tensor, *, within_group: bool = False) -> None:
        self._sum(numbers, self._pooling_within if within_group else self._pooling)

    @override
    def gather_host(self, own: Tensor) -> Tensor:
        return _gather(own, self.share.number, self._host_group)

    @override
    def gather_facts(self, fact: T, *, group: Any = None) -> list[T]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, fact, group=group or self._host)
        return found

    @override
    def gather_saved(self, fact: T) -> list[T]:
        return self.gather_facts(fact, group=self._saving)

    def _speaks_of(self, tensor: Tensor) -> bool:
        """Whether the backend takes tensors of this device, and scatters."""
        return self._backend == "nccl" and tensor.is_cuda

    def _sum(self, tensor: Tensor, group: Any) -> None:
        in_place = tensor.device.type == "cpu" and tensor.is_contiguous()
        if in_place or self._speaks_of(tensor):
            dist.all_reduce(tensor, group=group)
            return
        staged = tensor.cpu()
        dist.all_reduce(staged, group=group)
        tensor.copy_(staged)


@contextlib.contextmanager
def started_by_torchrun(device: str | None) -> Iterator[World]:
    """The ranks that torchrun has started, inside the block; a single process is one alone.

    Args:
        device: as the user said; None: the accelerator if there is one.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield World()
        return
    on_cpu = device == "cpu" or not torch.accelerator.is_available()
    if not on_cpu:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    # Nothing is said through this group: what takes long is only that somebody does not come.
    dist.init_process_group("gloo" if on_cpu else "nccl", timeout=MEETING_TIME)
    try:
        yield Ranks(group_size=dist.get_world_size())
    finally:
        dist.destroy_process_group()


def open_world(*, group_size: int | None = None) -> World:
    """The ranks of `torch.distributed` if it is initialised with several, else one rank alone.

    A single rank that is given its `group_size` goes through the collectives too.

    Raises:
        ValueError: the groups cannot be made so.
    """
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() > 1 or group_size is not None:
            return Ranks(group_size=group_size)
    elif group_size not in (None, 1):
        raise ValueError(
            f"group_size={group_size}, but there is only one process. Launch several with "
            "torchrun, and call torch.distributed.init_process_group first."
        )
    return World()


def refuse_different_weights(world: World, model: nn.Module) -> None:
    """Refuse models that are not the same on all ranks; looks at some numbers of each parameter.

    Raises:
        ValueError: with the first parameter that differs.
    """
    if not world.is_parallel:
        return
    found = world.gather_facts({name: _sample(p) for name, p in model.named_parameters()})
    for rank, theirs in enumerate(found):
        for name in dict.fromkeys((*found[0], *theirs)):
            if found[0].get(name) != theirs.get(name):
                raise ValueError(
                    f"the models on rank 0 and rank {rank} differ in {name!r}. Call "
                    "torch.manual_seed with the same seed first, or load weights from a folder."
                )


def _sample(parameter: Any) -> tuple[Any, ...]:
    if parameter.is_meta or not parameter.numel() or is_traceable_wrapper_subclass(parameter):
        return tuple(parameter.shape)
    flat = parameter.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // 7)].double().nan_to_num()
    return (*parameter.shape, parameter.requires_grad, *some.tolist())


def _own_group(groups: list[list[int]], backend: str, patience: timedelta = WAITING_TIME) -> Any:
    """A process group for each list of ranks; returns the one that this rank is in."""
    make_groups: Callable[..., Any] = dist.new_subgroups_by_enumeration
    return make_groups(groups, timeout=patience, backend=backend)[0]


def _group_size(size: int) -> int:
    """Ranks of one node, if all nodes have as many."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    number = int(local) if local.isdigit() else size
    return number if 0 < number < size and size % number == 0 else size


def _gather(own: Tensor, number: int, group: Any) -> Tensor:
    """Shares in host memory, as bytes: not every backend knows every dtype."""
    given = own.contiguous().view(torch.uint8)
    parts = [torch.empty_like(given) for _ in range(number)]
    dist.all_gather(parts, given, group=group)
    return torch.cat(parts).view(own.dtype)
