"""What the user's own modules are while an engine runs copies of them.

An engine takes modes and hooks over when it is made. Later the user's code may change them on the
model itself, which its copies do not see: modes of the whole model are followed, others refused,
and of hooks that nobody calls the user is told.
"""

from __future__ import annotations

import logging
from typing import Literal, final

from torch import nn

logger = logging.getLogger("l2l")

Mode = Literal["usual", "everywhere", "evaluation"]
"""That modules train in as the engine has it from the model, that all of them train, or none."""
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@final
class Modes:
    """Knows what a model's modules were when its engine was made."""

    def __init__(self, model: nn.Module) -> None:
        """They are as they are to be in training."""
        self._modules = dict(model.named_modules())
        self._usual = [one.training or not model.training for one in self._modules.values()]
        self._hooks = [_hooks_of(one) for one in self._modules.values()]
        self._is_told = False

    def now(self) -> Mode:
        """The mode of the model.

        Raises:
            ValueError: some modules are in another one than the rest, as they were not before.
        """
        found = [one.training for one in self._modules.values()]
        if found == self._usual:
            return "usual"
        if all(found) or not any(found):
            return "everywhere" if all(found) else "evaluation"
        pairs = zip(self._modules, found, self._usual, strict=True)
        name, mode = next((name, mode) for name, mode, usual in pairs if mode != usual)
        raise ValueError(
            f"{name!r} is in {'training' if mode else 'evaluation'} mode now, and was not when its "
            "model was given to the engine, which follows model.train() and model.eval() of the "
            "whole model only. Set the modes of single modules before the engine is made."
        )

    def tell_of_hooks(self) -> None:
        """Say once if a module inside the model has other hooks than when the engine was made."""
        pairs = zip(self._modules.items(), self._hooks, strict=True)
        for (name, module), hooks in pairs if not self._is_told else ():
            if name and _hooks_of(module) != hooks:
                self._is_told = True
                logger.warning(
                    "hooks of %r were added or removed since the model was given to its engine, "
                    "which goes on with those that it had: new ones are not called. Set them "
                    "before the engine is made.",
                    name,
                )
                return


def _hooks_of(module: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(getattr(module, kind)) for kind in HOOKS]
