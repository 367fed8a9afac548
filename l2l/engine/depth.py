"""Which layers a step runs. The layers are data, so a step may leave some of them out.

A policy yields a `Choice` for every step, from a seed and the number of the step alone: a run that
is resumed makes the same choices, and so do all ranks. Layers that are left out are not fetched,
not computed and not updated; their moments and their counts of steps stay as they are. Evaluation,
prediction and export see the whole network.

[Note: survival] A layer that runs with probability p is weighed so that the expected network is the
whole one: training computes x + (layer(x) - x) / p. Evaluation computes layer(x).
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

from typing_extensions import override


@final
@dataclass(frozen=True, slots=True)
class Choice:
    """The layers of a step."""

    layers: tuple[int, ...]
    survival: Mapping[int, float] = field(default_factory=dict)
    """How probable it was, below 1, that a layer runs ([Note: survival])."""


class Depth(ABC):
    """Chooses the layers of every training step."""

    skips: ClassVar[bool] = True
    """Whether it ever leaves a layer out."""

    @abstractmethod
    def choose(self, *, step: int, num_layers: int, seed: int) -> Choice:
        """The layers of a step; depends on nothing but these numbers."""

    def check(self, num_layers: int) -> None:
        """Refuse a network that the policy is not for.

        Raises:
            ValueError: with what does not fit.
        """
        if num_layers < 1:
            raise ValueError("the model has no layers to choose from.")


@final
@dataclass(frozen=True, slots=True)
class AllLayers(Depth):
    """Every layer, in every step."""

    skips: ClassVar[bool] = False

    @override
    def choose(self, *, step: int, num_layers: int, seed: int) -> Choice:
        return Choice(tuple(range(num_layers)))


@final
@dataclass(frozen=True, slots=True)
class StochasticDepth(Depth):
    """Leaves out each layer with a probability of its own.

    Args:
        last: how probable it is that the last layer runs. The others: 1 - (l / L) (1 - last) for
            layer l = 1 .. L, linear in depth (Huang et al., 2016).
        survival: that of every layer instead, first to last.
    """

    last: float = 0.5
    survival: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for one in (self.last, *(self.survival or ())):
            _check_probability(one, "StochasticDepth")
        if self.survival is not None:
            object.__setattr__(self, "survival", tuple(self.survival))

    @override
    def check(self, num_layers: int) -> None:
        if self.survival is not None and len(self.survival) != num_layers:
            raise ValueError(
                f"StochasticDepth has {len(self.survival)} probabilities, the model {num_layers} "
                "layers. Expected one for each."
            )

    @override
    def choose(self, *, step: int, num_layers: int, seed: int) -> Choice:
        self.check(num_layers)
        return _drawn(self.survival or _linear(self.last, num_layers), _random(seed, step))


@final
@dataclass(frozen=True, slots=True)
class ProgressiveLayerDropping(Depth):
    """Leaves out more and more as training goes on.

    How probable it is that the last layer runs falls from 1 towards `final`:
    (1 - final) exp(-rate * step) + final, with the others linear in depth (Zhang and He, 2020).
    """

    final: float = 0.5
    rate: float = 1e-3

    def __post_init__(self) -> None:
        _check_probability(self.final, "ProgressiveLayerDropping")
        if not self.rate >= 0:
            raise ValueError(f"ProgressiveLayerDropping: rate={self.rate}; expected 0 or more.")

    def last(self, step: int) -> float:
        """How probable it is that the last layer runs."""
        return (1 - self.final) * math.exp(-self.rate * step) + self.final

    @override
    def choose(self, *, step: int, num_layers: int, seed: int) -> Choice:
        return _drawn(_linear(self.last(step), num_layers), _random(seed, step))


@final
@dataclass(frozen=True, slots=True)
class SampledArchitecture(Depth):
    """One of several candidate layers at every position, drawn anew for every step.

    Args:
        positions: for each position the indices of its candidates, each of them once, such as
            [[0, 1], [2, 3, 4]].
    """

    positions: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        positions = tuple(tuple(candidates) for candidates in self.positions)
        object.__setattr__(self, "positions", positions)
        flat = [index for candidates in positions for index in candidates]
        if not positions or not all(positions) or flat != sorted(set(flat)) or flat[0] < 0:
            raise ValueError(
                f"SampledArchitecture: positions={[list(one) for one in positions]}; expected at "
                "least one position, at least one candidate at each, and indices that are strictly "
                "increasing from position to position: layers run in their order."
            )

    @override
    def check(self, num_layers: int) -> None:
        last = self.positions[-1][-1]
        if last >= num_layers:
            raise ValueError(
                f"SampledArchitecture has candidate {last}, but the model has {num_layers} layers."
            )

    @override
    def choose(self, *, step: int, num_layers: int, seed: int) -> Choice:
        self.check(num_layers)
        draw = _random(seed, step)
        return Choice(tuple(draw.choice(candidates) for candidates in self.positions))


def checked_depth(depth: Depth | None, num_layers: int) -> Depth:
    """The policy for a network; None: all layers.

    Raises:
        ValueError: it is not for this one.
    """
    found = AllLayers() if depth is None else depth
    found.check(num_layers)
    return found


def checked_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """The layers that a user has named.

    Raises:
        ValueError: there are none, one does not exist, or they are not strictly increasing.
    """
    found = tuple(int(index) for index in layers)
    last, odd = num_layers - 1, [index for index in found if not 0 <= index < num_layers]
    if odd:
        raise ValueError(
            f"layers={list(found)} has {odd[0]}, but the model has layers 0 to {last}."
        )
    if not found or list(found) != sorted(set(found)):
        raise ValueError(f"layers={list(found)}; expected one or more, strictly increasing.")
    return found


def _linear(last: float, num_layers: int) -> list[float]:
    return [1 - (index + 1) / num_layers * (1 - last) for index in range(num_layers)]


def _drawn(survival: Sequence[float], draw: random.Random) -> Choice:
    drawn = [draw.random() < probability for probability in survival]
    layers = tuple(index for index, runs in enumerate(drawn) if runs)
    return Choice(layers, {i: survival[i] for i in layers if survival[i] < 1})


def _random(seed: int, step: int) -> random.Random:
    """Random numbers that are the same on every machine."""
    return random.Random(f"layers {seed} {step}")


def _check_probability(value: float, name: str) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name}={value}; expected a probability above 0 and at most 1.")
