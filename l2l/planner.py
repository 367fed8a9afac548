"""The plan: what is placed where, in bytes, and the choices that led there; frozen data."""

from __future__ import annotations

from dataclasses import dataclass

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(nbytes: int) -> str:
    """Bytes for people: `1.50 GiB`."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.2f} {UNITS[unit]}"


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
