"""A model as the server is to hold it, before any memory is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self, final

import torch
from torch import nn

from l2l.distributed import Share
from l2l.model import Partition, quantize
from l2l.parameter_server.forms import UnitForm, alternatives, forms_of, host_bytes
from l2l.parameter_server.host_memory import HostBudget
from l2l.parameter_server.optimizer import HostOptimizer, Optimizer, Settings
from l2l.parameter_server.policy import UpdatePolicy
from l2l.parameter_server.precision import PrecisionPolicy
from l2l.parameter_server.torch_optimizer import GivenOptimizer, Groups, ServerOptimizer, groups_of


@final
@dataclass(frozen=True, kw_only=True)
class Inventory:
    """How a model is cut, in which precision it is held, and how it is updated."""

    partition: Partition
    precision: PrecisionPolicy
    optimizer: Optimizer
    groups: Groups  # of parameters that are trained
    names: Mapping[nn.Parameter, str]
    policy: UpdatePolicy
    num_shares: int  # ranks that hold it together
    drains_sums: bool  # whether gradients leave the device in float32

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        optimizer: GivenOptimizer,
        precision: str | torch.dtype,
        base: str | None,
        layers: str | Sequence[str] | None,
        clip_norm: float | None,
        own_loss: bool = True,
        update: str | None = None,
        nonfinite: str = "stop",
        num_shares: int = 1,
        drains_sums: bool = False,
    ) -> Self:
        """What follows from arguments as the engine's.

        Raises:
            ValueError: an argument is invalid, or the model cannot be cut.
        """
        types = PrecisionPolicy.for_model(model, precision=precision)
        partition = Partition(model, layers=layers, own_loss=own_loss, gradient_hooks=drains_sums)
        if base is not None:
            quantize(partition.layers, base, dtype_of=types.link_dtype)
        _refuse_shares(partition, num_shares)
        in_layers = {owner for one in partition.layer_tensors for owner in one.parameters}
        description, groups = groups_of(optimizer, model, in_layers)
        _refuse_pieces(description, num_shares)
        return cls(
            partition=partition,
            precision=types,
            optimizer=description,
            groups=groups,
            names={parameter: name for name, parameter in model.named_parameters()},
            policy=UpdatePolicy.choose(
                update,
                optimizer=description,
                clip_norm=clip_norm,
                link=types.link,
                nonfinite=nonfinite,
            ),
            num_shares=num_shares,
            drains_sums=drains_sums,
        )

    def server_optimizer(self) -> ServerOptimizer:
        """What stands for the optimizer in loops of PyTorch."""
        of_all = self.optimizer.defaults  # one inside it may have other settings
        of_all = {k: v for k, v in of_all.items() if all(k in group for group in self.groups)}
        return ServerOptimizer(self.groups, of_all, names=self.names)

    def settings(self) -> dict[str, Settings]:
        """By parameter that is trained."""
        return self.server_optimizer().settings()

    @cached_property
    def forms(self) -> list[UnitForm]:
        """What units are made of."""
        return self.forms_with(self.optimizer)

    def forms_with(self, other: Optimizer) -> list[UnitForm]:
        """The same with another optimizer."""
        settings = self.settings()
        if other.defaults.keys() != self.optimizer.defaults.keys():
            settings = dict.fromkeys(settings, other.defaults)
        return forms_of(
            self.partition,
            optimizer=other,
            settings=settings,
            precision=self.precision,
            num_shares=self.num_shares,
            drains_sums=self.drains_sums,
        )

    def check(
        self,
        budget: HostBudget,
        share: Share,
        *,
        others: Mapping[str, int] | None = None,
    ) -> None:
        """Refuse a host that is too small.

        Raises:
            ValueError: with what other optimizers would take, and `others`.
        """
        needed = host_bytes([one.held(share) for one in self.forms], self.policy)
        if needed > budget.limit_bytes:
            known = alternatives(self.forms_with, self.policy, self.precision.link)
            budget.check(needed, alternatives={**known, **(others or {})})


def _refuse_pieces(optimizer: Optimizer, num_shares: int) -> None:
    """Refuse an optimizer of whole parameters of which every rank would hold a piece."""
    by_parameter = isinstance(optimizer, HostOptimizer) and optimizer.is_by_parameter
    if by_parameter and num_shares > 1:
        raise ValueError(
            f"{optimizer.name} looks at whole parameters, and {num_shares} ranks hold pieces of "
            "them. Run one process for each copy of the model (execution=l2l.Execution("
            "group_size=1)), or take an optimizer that treats every element by itself."
        )


def _refuse_shares(partition: Partition, num_shares: int) -> None:
    """Refuse quantized weights of which every rank would hold a piece."""
    parts = (partition.skeleton, *partition.layers)
    found = next((owner for part in parts for owner in part.tensors.formats), None)
    if found is not None and num_shares > 1:
        raise ValueError(
            f"{found!r} is quantized, and {num_shares} ranks hold the model together: "
            "shares of quantized weights are not supported. Run one process for each copy "
            "(execution=l2l.Execution(group_size=1)), or train in 16 bits."
        )
