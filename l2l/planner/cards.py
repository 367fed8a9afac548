"""Common cards by name, with the figures of their data sheets: for plans, not measured.

A data sheet has what a card would do at best. What it does is assumed to be the share of that that
the H200 of docs/benchmarks.md was measured to do of its own data sheet. What is about the host is
that machine's too, as long as nothing else is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from l2l.planner.hardware import H200, Hardware


@dataclass(frozen=True, slots=True)
class Card:
    """What a data sheet says: decimal units, products without sparsity, float32 accumulation."""

    memory: float  # GB
    link: float  # GB/s in each direction: PCI Express 4.0 with 16 lanes is 31.5
    products: float  # Tflop/s of bfloat16 matrix products
    single: float  # Tflop/s of float32
    bandwidth: float  # GB/s of its memory


SHEETS: Mapping[str, Card] = {
    "RTX 3060": Card(12, 31.5, 25.5, 12.7, 360),
    "RTX 3070": Card(8, 31.5, 40.6, 20.3, 448),
    "RTX 3080": Card(10, 31.5, 59.5, 29.8, 760),
    "RTX 3090": Card(24, 31.5, 71.0, 35.6, 936),
    "RTX 4060": Card(8, 15.8, 30.2, 15.1, 272),
    "RTX 4060 Ti 16GB": Card(16, 15.8, 44.1, 22.1, 288),
    "RTX 4070": Card(12, 31.5, 58.3, 29.1, 504),
    "RTX 4080": Card(16, 31.5, 97.5, 48.7, 717),
    "RTX 4090": Card(24, 31.5, 165.2, 82.6, 1008),
    "RTX 5060 Ti 16GB": Card(16, 31.5, 47.4, 23.7, 448),
    "RTX 5070": Card(12, 63, 61.7, 30.9, 672),
    "RTX 5070 Ti": Card(16, 63, 87.9, 43.9, 896),
    "RTX 5080": Card(16, 63, 112.6, 56.3, 960),
    "RTX 5090": Card(32, 63, 209.5, 104.8, 1792),
    "L40S": Card(48, 31.5, 362, 91.6, 864),
    "A100 40GB": Card(40, 31.5, 312, 19.5, 1555),
    "A100 80GB": Card(80, 31.5, 312, 19.5, 2039),
    "H100": Card(80, 63, 989, 67, 3350),
    "H200": Card(141, 63, 989, 67, 4800),
    "B200": Card(180, 63, 2250, 75, 7700),
}
MEASURED = SHEETS["H200"]  # what was measured of it is in `H200`
NOT_MEASURED = ", by its data sheet"  # how names of such a machine end


def card(name: str) -> Hardware:
    """A machine with a card that is called so, such as "RTX 4090" or "a100-80gb".

    Raises:
        ValueError: no card is known by the name, or several are.
    """
    found = [known for known in SHEETS if _plain(known) == _plain(name)]
    found = found or [known for known in SHEETS if _plain(name) and _plain(name) in _plain(known)]
    if len(found) != 1:
        what = f"is one of {', '.join(found)}" if found else "is not known"
        raise ValueError(
            f"the card {name!r} {what}. Expected one of {', '.join(SHEETS)}. Any other machine is "
            "described by the file ~/.cache/l2l/hardware-*.json, which l2l writes there."
        )
    (known,) = found
    if known == "H200":
        return H200
    sheet = SHEETS[known]
    link, memory = sheet.link / MEASURED.link, sheet.bandwidth / MEASURED.bandwidth
    return replace(
        H200,
        device_name=f"{known}{NOT_MEASURED}",
        device_bytes=int(sheet.memory * 1e9),
        fetch_rate=H200.fetch_rate * link,
        drain_rate=H200.drain_rate * link,
        both_ways_rate=H200.both_ways_rate * link,
        matrix_rate=H200.matrix_rate * sheet.products / MEASURED.products,
        single_rate=H200.single_rate * sheet.single / MEASURED.single,
        memory_rate=H200.memory_rate * memory,
    )


def with_host(hardware: Hardware, host_rate: float) -> Hardware:
    """The same with a host whose exact AdamW reads and writes so many bytes a second."""
    share = host_rate / hardware.host_rate
    rate = hardware.eight_bit_rate * share
    return replace(hardware, host_rate=host_rate, eight_bit_rate=rate)


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|[^a-z0-9]", "", name.lower())
