"""What an engine makes of the optimizer, and of the schedulers, that a loop has made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from l2l.parameter_server import AdamW, Lion, Optimizer

BY_TORCH = ("adamw_torch", "adamw_torch_fused", "sgd")
"""Names of TrainingArguments for what torch has and an engine takes over."""

_8_BIT = ("adamw_torch_8bit", "adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit")
_LION = ("lion_32bit", "paged_lion_32bit")


def _adamw(args: Any, **more: Any) -> Optimizer:
    betas = (args.adam_beta1, args.adam_beta2)
    return AdamW(
        lr=args.learning_rate,
        betas=betas,
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        **more,
    )


def _lion(args: Any, **more: Any) -> Optimizer:
    betas = (args.adam_beta1, args.adam_beta2)
    return Lion(lr=args.learning_rate, betas=betas, weight_decay=args.weight_decay, **more)


def _adamw_8_bit(args: Any, **more: Any) -> Optimizer:
    return _adamw(args, moments="8bit", **more)


OWN: Mapping[str, Callable[..., Optimizer]] = {
    "paged_adamw_32bit": _adamw,
    **dict.fromkeys(_8_BIT, _adamw_8_bit),
    **dict.fromkeys(_LION, _lion),
}
"""Names of TrainingArguments for what an engine has, and a library would make otherwise."""


def by_name(args: Any, decaying: Iterable[str]) -> Optimizer:
    """The engine's optimizer of this name.

    Args:
        args: the trainer's.
        decaying: names of the parameters that weight decay is for.

    Raises:
        ValueError: there is none.
    """
    name = str(getattr(args.optim, "value", args.optim))
    if name not in OWN:
        raise ValueError(
            f"optim={name!r} does not run in an engine. Expected one of {sorted([*BY_TORCH, *OWN])}"
            ", or one of the engine's own: l2l=dict(optimizer=l2l.Adafactor(lr=1e-3)), with "
            "max_grad_norm=0."
        )
    decayed = frozenset(decaying)

    def groups(parameter_name: str, parameter: nn.Parameter) -> Mapping[str, Any] | None:
        return None if parameter_name in decayed else {"weight_decay": 0.0}

    return OWN[name](args, groups=groups)


def unscheduled(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer anew, without what schedulers have noted in it."""
    groups = [{k: v for k, v in one.items() if k != "initial_lr"} for one in optimizer.param_groups]
    made: Any = type(optimizer)
    return made(groups)  # type: ignore[no-any-return]


def drive(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let a scheduler, and those inside it, drive another optimizer from here on."""
    for inner in getattr(scheduler, "_schedulers", ()):
        drive(inner, optimizer)
    before = getattr(scheduler, "optimizer", None)
    if before is None or before is optimizer:
        return
    if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):  # schedulers look for a first step
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    for own, old in zip(optimizer.param_groups, before.param_groups, strict=True):
        own.update({name: old[name] for name in ("initial_lr", "lr") if name in old})
    scheduler.optimizer = optimizer
