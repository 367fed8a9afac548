"""When units are updated: chosen from what the user asked for, and printed in the plan."""

from __future__ import annotations

import enum

import torch

from l2l.parameter_server.adafactor import Adafactor
from l2l.parameter_server.optimizer import Optimizer


class UpdatePolicy(enum.Enum):
    """When units are updated; the value is what the plan prints."""

    EAGER = "eager: each layer as soon as its gradient has arrived, under backward"
    JUST_IN_TIME = "just in time: once the whole gradient is known, under the next forward"
    ON_DEVICE = "on the device, right after the layer's backward"

    @classmethod
    def choose(
        cls,
        word: str | None,
        *,
        optimizer: Optimizer,
        clip_norm: float | None,
        link: torch.dtype,
        nonfinite: str = "stop",
    ) -> UpdatePolicy:
        """The policy for what the user asked.

        Raises:
            ValueError: the wishes exclude each other, or the word is not known.
        """
        words = {"eager": cls.EAGER, "just in time": cls.JUST_IN_TIME}
        if word is not None and word not in words:
            raise ValueError(f"update={word!r} is not known. Expected {sorted(words)} or None.")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm={clip_norm}; expected a number above 0, or None.")
        if nonfinite not in ("stop", "skip"):
            raise ValueError(f"nonfinite={nonfinite!r} is not known. Expected 'stop' or 'skip'.")
        if isinstance(optimizer, Adafactor):
            if nonfinite == "skip":
                raise ValueError(
                    "nonfinite='skip' cannot be used with Adafactor: it updates each layer on the "
                    "device right after its backward, before the gradients of the others are "
                    "known. Leave nonfinite='stop'."
                )
            if clip_norm is not None:
                raise ValueError(
                    "clip_norm cannot be used with Adafactor: it updates each layer on the device "
                    "right after its backward, so the gradients are gone when their global norm is "
                    "known. Adafactor clips every tensor's update by itself (its argument d)."
                )
            if word is not None or link is torch.float16:
                raise ValueError(
                    "Adafactor updates on the device: it takes no update= policy, and precision "
                    "'bfloat16' or 'float32'."
                )
            return cls.ON_DEVICE
        whole = "clip_norm" if clip_norm is not None else None
        whole = "nonfinite='skip'" if nonfinite == "skip" else whole
        whole = "precision='float16'" if link is torch.float16 else whole
        if word == "eager" and whole:
            raise ValueError(
                f"update='eager' and {whole} exclude each other: the whole gradient must be known "
                "before the first update. Leave update=None."
            )
        if word is not None:
            return words[word]
        return cls.JUST_IN_TIME if whole else cls.EAGER
