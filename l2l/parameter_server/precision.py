"""In which dtype a tensor crosses the link and runs on the device, and what its master is.

The parameter server keeps a float32 *master* of every trained parameter. What crosses the link is
the *link weight*: the master itself (`precision="float32"`), or 16 bits of it.

[Note: split master] With bfloat16 on the link, the link weight is the upper half of the master,
rounded, and the server keeps only the 16 bits that complete it, the *remainder*: 4 bytes together,
no second copy of weights anywhere. Rounding is half up in bit space,

    weight = (bits + 0x8000) >> 16        remainder = bits - (weight << 16)   (signed, 16 bits)

because that is a bijection between 2^32 masters and 2^16 x 2^16 pairs. Round to nearest even is
not: even weights would have 65,537 masters. The two differ only at exact ties. A NaN that
arithmetic makes (0x7fc00000) has a NaN for its weight. No bijection can promise that for all NaN
patterns: a few have infinity or zero for their weight, and still join to what they were split from.
The native kernel therefore stores every NaN as 0x7fc00000.

[Note: loss scale] float16 has few small numbers: gradients of a plain loss would vanish. So the
loss is multiplied with a scale that is as large as it can be, and the update divides by it. An
overflow shows as a loss or gradient norm that is not finite; then the step is skipped whole and the
scale halved. After `growth_interval` good steps it doubles.

Parameters are cast the way `from_pretrained(dtype=...)` casts: floating parameters to the link
dtype; buffers keep theirs (`inv_freq` stays float32), as do modules that a Hugging Face model lists
in `_keep_in_fp32_modules`. There is no autocast.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Container
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from l2l.model import format_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COMPANION = {torch.bfloat16: torch.int16, torch.float16: torch.float32}
"""What completes a 16-bit link weight, by its dtype: the bits that it lacks, or a master apart."""


def parse_precision(precision: str | torch.dtype) -> torch.dtype:
    """The link dtype named by the user.

    Raises:
        ValueError: the word or dtype is not one of `DTYPES`.
    """
    found = DTYPES.get(precision) if isinstance(precision, str) else precision
    if found is None or found not in DTYPES.values():
        known = ", ".join(repr(name) for name in DTYPES)
        raise ValueError(
            f"precision={precision!r} is not known. Expected one of {known}, or the torch dtype of "
            "that name."
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """Which dtype each parameter has on the link and on the device."""

    link: torch.dtype
    keep_float32: tuple[str, ...] = ()  # module names that stay float32 whatever the link

    @classmethod
    def for_model(cls, model: nn.Module, *, precision: str | torch.dtype) -> PrecisionPolicy:
        """The policy for a model, with the modules it asks to keep in float32."""
        link = parse_precision(precision)
        listed = getattr(model, "_keep_in_fp32_modules", None) or ()
        strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        # As in transformers: the plain list is for float16 only, the strict one for both.
        keep = tuple(strict) + (tuple(listed) if link is torch.float16 else ())
        return cls(link=link, keep_float32=tuple(sorted(keep)))

    def link_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """What a parameter called `name`, stored as `dtype`, is on the link."""
        if not dtype.is_floating_point:
            return dtype
        kept = any(re.search(rf"(^|\.){re.escape(word)}(\.|$)", name) for word in self.keep_float32)
        return torch.float32 if kept else self.link

    def warn_of_rounding(self, model: nn.Module, *, trained: Container[str]) -> None:
        """Say that frozen parameters which do not fit the link dtype come back rounded.

        A trained parameter has a master; a frozen one is kept in the link dtype alone.
        """
        rounded = [
            name
            for name, parameter in model.named_parameters()
            if name not in trained
            and format_of(parameter) is None
            and self.link_dtype(name, parameter.dtype).itemsize < parameter.dtype.itemsize
        ]
        if rounded:
            warnings.warn(
                f"{len(rounded)} frozen parameters, the first {rounded[0]!r}, are kept in "
                f"{str(self.link).removeprefix('torch.')} and come back rounded to it. Load the "
                "model in that dtype, or use precision='float32', to avoid this.",
                stacklevel=4,
            )


def split_master(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write a float32 master as bfloat16 `weight` and int16 `remainder` ([Note: split master])."""
    bits = master.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    weight.view(torch.int16).copy_(upper.to(torch.int16))
    remainder.copy_((bits - (upper << 16)).to(torch.int16))


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of a bfloat16 `weight` and its int16 `remainder`."""
    bits = weight.view(torch.int16).to(torch.int32)
    bits <<= 16  # in place: masters are large
    bits += remainder
    return bits.view(torch.float32)


def master_of(weight: Tensor, companion: Tensor | None) -> Tensor:
    """The float32 master of a link weight and what completes it; in place, if one of them is it."""
    if companion is None:
        return weight
    return companion if companion.dtype is torch.float32 else join_master(weight, companion)


def store_master(master: Tensor, weight: Tensor, companion: Tensor | None) -> None:
    """Write a master as a link weight and what completes it."""
    if companion is not None and companion.dtype is torch.int16:
        split_master(master, weight, companion)
        return
    weight.copy_(master)
    if companion is not None:
        companion.copy_(master)


@final
@dataclass(slots=True, kw_only=True)
class LossScale:
    """The dynamic scale of a float16 loss ([Note: loss scale])."""

    value: float = 65536.0
    growth_interval: int = 2000
    num_good_steps: int = 0

    def observe(self, *, finite: bool) -> None:
        """Adapt to how a step went."""
        if not finite:
            self.value, self.num_good_steps = self.value / 2, 0
            return
        self.num_good_steps += 1
        if self.num_good_steps == self.growth_interval:
            self.value, self.num_good_steps = self.value * 2, 0
