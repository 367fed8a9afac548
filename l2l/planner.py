"""The plan: what is placed where, in bytes, and the choices that led there; frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(nbytes: int) -> str:
    """Bytes for people: `1.50 GiB`."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.2f} {UNITS[unit]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What a plan decides. The defaults take least memory and need no measurement."""

    microbatch_tokens: int = 8192
    num_slots: int = 2
    num_cells: int = 6
    num_gradient_slots: int = 2
    num_tail: int = 0
    """Layers, the last of them, that stay on the device for the whole step."""
    num_device_states: int = 0
    """Of these, how many have their optimizer state on the device."""
    piece_tokens: int | None = None
    """Positions that pass the epilogue at once; None: all of a microbatch."""
    keep: float = 0.0
    """Share of its intermediate results that a streamed layer keeps instead of recomputing."""
    num_kept_cells: int = 0
    num_late: int = 0
    """Units whose update is left to the next step although it could be done in its own."""
    shares_memory: bool = False
    """Whether head and layers' gradients take turns in the same memory."""

    def override(self, choices: Mapping[str, Any]) -> Decisions:
        """The same with some choices made otherwise.

        Raises:
            ValueError: there is no such choice.
        """
        unknown = set(choices) - set(self.__slots__)
        if unknown:
            raise ValueError(
                f"overrides has {sorted(unknown)}, which the plan does not decide. Expected names "
                f"among {', '.join(self.__slots__)}."
            )
        return replace(self, **choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """Bytes for one purpose in one place."""

    place: str  # "device" or "host"
    purpose: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The ledger and the choices."""

    ledger: tuple[LedgerLine, ...]
    choices: tuple[tuple[str, str], ...]

    def total_bytes(self, place: str) -> int:
        """Sum of the ledger's lines for a place."""
        return sum(line.nbytes for line in self.ledger if line.place == place)

    def __str__(self) -> str:
        labels = [line.purpose for line in self.ledger] + [name for name, _ in self.choices]
        width = max(map(len, labels), default=0) + 2
        rows: list[str] = []
        for place in ("device", "host"):
            rows.append(f"{place}: {format_bytes(self.total_bytes(place))}")
            rows += [
                f"  {line.purpose:<{width}}{format_bytes(line.nbytes):>12}"
                for line in self.ledger
                if line.place == place
            ]
        rows.append("choices:")
        rows += [f"  {name + ':':<{width}}{value}" for name, value in self.choices]
        return "\n".join(rows)
