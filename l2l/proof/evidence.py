"""What a run over the microbatches of a proof leaves behind, small enough to be compared later.

[Note: sketches] All gradients of a model are as large as the model, and neither run has room for
those of the other. So of a large gradient only a *sketch* is kept: its elements in rows of `WIDTH`,
the rows added up with random signs, twice. That is linear, so sketches of microbatches add up, and
the difference of two sketches is the sketch of the difference, whose norm it shows to a few
percent: whatever is wrong, be it one row of a table, is in it. Small gradients are kept whole.

[Note: rounding] Two runs that do the same in another order differ by rounding, and some gradients
are nothing else (that of the bias of keys is zero but for it). What differs by more than the
tolerance is therefore compared with how much rounding alone makes out: the model's own code again,
with the loss times `ODD_FACTOR`, so that every gradient is rounded elsewhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

WHOLE_ELEMENTS = 1 << 16  # of a gradient that is kept as it is
WIDTH = 2048
NUM_SIGNS = 2
CHUNK_ROWS = 8192  # that are added up at once
MAX_DEVICE_BYTES = 4 << 20  # of evidence on the device, whatever the depth
ODD_FACTOR = 1.37  # no power of two
NOISE_MARGIN = 16.0  # times what rounding alone was seen to make out
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.005, torch.bfloat16: 0.02}
"""Of two norms, by what crosses the link and runs on the device."""


class ProofError(ValueError):
    """The engine would not compute what the model's own code does."""


@final
@dataclass(slots=True)
class Evidence:
    """What one run has computed, of all microbatches together."""

    place: torch.device  # where sketches are made
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # by owner, those that got one
    buffers: dict[str, Tensor] = field(default_factory=dict)  # those that have changed
    _device_bytes: int = 0  # of gradients, those that no longer had room included

    def add(self, owner: str, gradient: Tensor) -> None:
        """Add a microbatch's gradient, or all of them, of a parameter or a piece of it."""
        found = _sketch(gradient, self.place)
        known = self.gradients.get(owner)
        if known is not None:
            self.gradients[owner] = known + found.to(known.device)
            return
        self._device_bytes += found.nbytes if found.device.type != "cpu" else 0
        has_room = self._device_bytes <= MAX_DEVICE_BYTES
        self.gradients[owner] = found if has_room else found.cpu()  # which waits for the device

    def scaled(self, factor: float) -> Evidence:
        """The same with gradients times a factor."""
        gradients = {owner: one * factor for owner, one in self.gradients.items()}
        return Evidence(self.place, list(self.losses), gradients, dict(self.buffers))

    @property
    def is_finite(self) -> bool:
        """Whether there is anything to compare."""
        return all(map(math.isfinite, self.losses)) and all(
            bool(one.isfinite().all()) for one in self.gradients.values()
        )


def _sketch(gradient: Tensor, place: torch.device) -> Tensor:
    """See [Note: sketches]; never waits for the device."""
    flat = gradient.detach().reshape(-1)
    if flat.numel() <= WHOLE_ELEMENTS:
        return flat.to(place, torch.float32, copy=True)
    wide = torch.float64 if place.type == "cpu" else torch.float32
    total = torch.zeros(NUM_SIGNS, WIDTH, dtype=wide, device=place)
    size = CHUNK_ROWS * WIDTH
    for number, start in enumerate(range(0, flat.numel(), size)):
        part = flat[start : start + size].to(place).to(wide)
        if short := -part.numel() % WIDTH:
            part = torch.nn.functional.pad(part, (0, short))
        rows = part.view(-1, WIDTH)
        for row, signs in zip(total, _signs(number, wide, place), strict=True):
            row += (rows * signs[: rows.shape[0], None]).sum(0)
    return total


@functools.lru_cache(maxsize=128)
def _signs(number: int, dtype: torch.dtype, place: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    drawn = torch.randint(0, 2, (NUM_SIGNS, CHUNK_ROWS), generator=generator)
    return (2 * drawn - 1).to(place, dtype)


# --------------------------------------------------------------------------------------------------


def check(
    mine: Evidence,
    theirs: Evidence,
    *,
    tolerance: float,
    order: Iterable[str],
    noise: Callable[[bool], Evidence | None],
) -> None:
    """Compare what the engine has found with what the model's own code has.

    Args:
        mine: the engine's.
        theirs: of the model's own code.
        tolerance: of norms of differences, relative.
        order: names of parameters, as the model has them.
        noise: gives, if that is wanted here or on another rank, the model's own code once more,
            rounded elsewhere ([Note: rounding]).

    Raises:
        ProofError: they differ.
    """
    pairs = {owner: (mine.gradients.get(owner), theirs.gradients.get(owner)) for owner in order}
    distances = {owner: _distance(*pair) for owner, pair in pairs.items()}
    suspects = [o for o, (_, own) in pairs.items() if distances[o] > tolerance * _norm(own)]
    again = noise(bool(suspects))
    _check_losses(mine.losses, theirs.losses, tolerance)
    for owner in suspects:
        assert again is not None
        found, expected = pairs[owner]
        if not distances[owner] <= NOISE_MARGIN * _distance(again.gradients.get(owner), expected):
            raise ProofError(
                f"the engine's gradient of {owner!r} is not that of the model's own code: "
                f"{_unlike(_norm(found), _norm(expected), distances[owner])} {_ADVICE}"
            )
    _check_buffers(mine.buffers, theirs.buffers, tolerance)


def _norm(one: Tensor | None) -> float:
    return 0.0 if one is None else float(torch.linalg.vector_norm(one.cpu().double()))


def _distance(mine: Tensor | None, theirs: Tensor | None) -> float:
    """The norm of a difference; no gradient is one of zero, and what is not finite is far."""
    if mine is None or theirs is None:
        return _norm(mine if theirs is None else theirs)
    found = _norm(mine.cpu().double() - theirs.cpu().double())
    return found if math.isfinite(found) else math.inf


def _check_losses(mine: list[float], theirs: list[float], tolerance: float) -> None:
    for number, (found, expected) in enumerate(zip(mine, theirs, strict=True)):
        if not abs(found - expected) <= tolerance * max(abs(expected), 1e-3):
            raise ProofError(
                f"the engine computes a loss of {found:.6g} where the model's own forward gives "
                f"{expected:.6g} (two rows, microbatch {number}). Usually the model runs its "
                "layers inside a context manager, with weights other than their own, with a shared "
                f"object, or with code that depends on more of the batch than its rows. {_ADVICE}"
            )


def _unlike(found: float, expected: float, distance: float) -> str:
    """How two gradients differ, by their norms, and what that usually means."""
    if not found:
        return (
            f"there is none, and there should be one of norm {expected:.3g}. That usually means "
            "that something reaches the loss past the arguments and return values of the layers: "
            "an object, a list, an attribute, a parameter that a loss or another layer reads."
        )
    if not expected:
        return (
            f"it should be zero and has a norm of {found:.3g}. That usually means that the layer "
            "is run with other weights (torch.func.functional_call), or the graph is cut."
        )
    return (
        f"it differs by {distance / expected:.2%} of its norm. That usually means that layers "
        "share more than their hidden state: a cache or an object that they change, or weights or "
        "masks that are not the same when a layer is computed again."
    )


def _check_buffers(
    mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float
) -> None:
    for owner in {**theirs, **mine}:
        found, expected = mine.get(owner), theirs.get(owner)
        alike = found is not None and expected is not None and found.shape == expected.shape
        distance = _distance(found, expected) if alike else math.inf
        if not distance <= tolerance * max(_norm(expected), 1e-6):
            raise ProofError(
                f"the buffer {owner!r} is not what the model's own code leaves there after two "
                f"microbatches: it is off by {distance:.3g}, its norm is {_norm(expected):.3g}. "
                "That usually means that it is replaced, changes in one of both only, or is "
                f"updated more than once. {_ADVICE}"
            )


_ADVICE = (
    "Nothing has been changed. prove=False trains it nevertheless; please report the model, "
    "so that it can be trained exactly."
)
