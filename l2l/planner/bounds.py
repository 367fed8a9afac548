"""How long a step takes at best: what it has to do, at the rates that were measured.

For each lane alone: matrix products at their peak, bytes over the link at the link's rate, updates
at that of the host's memory. Nothing waits, nothing is launched, nothing but that is done. What of
it a measured step reaches says how far it is from the speed of light, and of which lane.

What a plan chooses to do is what counts: layers that are computed again are work, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from l2l.planner.disk_tier import DiskTier
from l2l.planner.hardware import Hardware

WORDS: Mapping[str, str] = {
    "compute": "matrix products",
    "link": "the link",
    "host": "the host's memory",
    "disk": "the disk",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a step has to do."""

    matrix_flops: float = 0.0
    bytes_in: float = 0.0  # over the link, to the device
    bytes_out: float = 0.0
    bytes_read: float = 0.0  # from the disk
    bytes_written: float = 0.0
    num_updated: float = 0.0  # parameters, by the host
    update_bytes: float = 0.0  # host memory that an update reads and writes, for each
    eight_bit: bool = False  # whether updates are of 8-bit moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Seconds of a step at best, for each lane alone, and the lane that binds as it is planned."""

    compute: float
    link: float
    host: float
    disk: float = 0.0
    lane: str

    @classmethod
    def of(
        cls, work: Work, hardware: Hardware, *, lane: str, disk: DiskTier | None = None
    ) -> Bounds:
        """Those of some work on a machine."""
        both = min(work.bytes_in, work.bytes_out) / hardware.both_ways_rate
        inwards = max(0.0, work.bytes_in - work.bytes_out) / hardware.fetch_rate
        outwards = max(0.0, work.bytes_out - work.bytes_in) / hardware.drain_rate
        host = work.num_updated * work.update_bytes / hardware.host_rate
        if work.eight_bit:  # these may be bound by arithmetic
            host = max(host, work.num_updated / hardware.eight_bit_rate)
        compute = work.matrix_flops / hardware.matrix_rate
        return cls(
            compute=compute,
            link=both + inwards + outwards,
            host=host,
            disk=0.0 if disk is None else disk.seconds(work.bytes_read, work.bytes_written),
            lane=lane,
        )

    @property
    def seconds(self) -> dict[str, float]:
        """Of every lane that has something to do."""
        found = {name: float(getattr(self, name)) for name in WORDS}
        return {name: one for name, one in found.items() if one or name != "disk"}

    def shares(self, step_seconds: float) -> dict[str, float]:
        """What share of its rate each lane reaches in steps of so many seconds."""
        return {name: one / step_seconds for name, one in self.seconds.items()}

    def share(self, step_seconds: float) -> float:
        """The same of the lane that binds."""
        return self.shares(step_seconds)[self.lane]

    def describe(self, step_seconds: float) -> str:
        """A few words for people."""
        others = (
            f"{WORDS[name]} {share:.0%}"
            for name, share in self.shares(step_seconds).items()
            if name != self.lane
        )
        share = self.share(step_seconds)
        return f"{WORDS[self.lane]} at {share:.0%} of its rate; {', '.join(others)}"
