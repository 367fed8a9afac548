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
        on_device, is_half = isinstance(optimizer, Adafactor), link is torch.float16
        norm = 1.0 if clip_norm is None else clip_norm
        needing = {
            "precision='float16'": is_half,
            "nonfinite='skip'": nonfinite == "skip",
            "clip_norm": clip_norm is not None,
        }
        whole = next((reason for reason, is_there in needing.items() if is_there), None)
        problems = {
            f"update={word!r} is not known. Expected {sorted(words)} or None.": (
                word is not None and word not in words
            ),
            f"clip_norm={clip_norm}; expected a number above 0, or None.": not norm > 0,
            f"nonfinite={nonfinite!r} is not known. Expected 'stop' or 'skip'.": (
                nonfinite not in ("stop", "skip")
            ),
            "Adafactor updates on the device: it takes no update= policy, and precision 'bfloat16' "
            "or 'float32'.": on_device and (word is not None or is_half),
            f"{whole} cannot be used with Adafactor: it updates each layer on the device right "
            "after its backward, before the gradients of the others are known, and then they are "
            "gone. It clips every tensor's update by itself (its argument d).": on_device and whole,
            f"update='eager' cannot be combined with {whole}, which needs the whole gradient "
            "before the first update. Leave update=None.": word == "eager" and whole,
        }
        for problem, is_there in problems.items():
            if is_there:
                raise ValueError(problem)
        if on_device:
            return cls.ON_DEVICE
        if word is not None:
            return words[word]
        return cls.JUST_IN_TIME if whole else cls.EAGER
