"""Numbers of bytes as people write and read them."""

from __future__ import annotations

import re

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
BYTES_OF_UNIT = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
BYTES_OF_UNIT |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def format_bytes(nbytes: int) -> str:
    """Bytes for people: `1.50 GiB`."""
    value, unit = float(nbytes), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{value:.2f} {UNITS[unit]}"


def parse_bytes(value: int | str, *, name: str) -> int:
    """A number of bytes, or a text such as "8GiB" or "500 MB".

    Raises:
        ValueError: the text is not a size.
    """
    if isinstance(value, int):
        return value
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", value)
    if found is None or found[2].lower() not in BYTES_OF_UNIT:
        raise ValueError(f"{name}={value!r} is not a size. Expected bytes, or a text like '8GiB'.")
    return int(float(found[1]) * BYTES_OF_UNIT[found[2].lower()])
