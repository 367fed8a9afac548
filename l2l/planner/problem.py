"""What a plan is made for: sizes and costs of a model's parts, a batch, and what was asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from l2l.parameter_server import UpdatePolicy
from l2l.planner.layer_cost import PassCost
from l2l.schedule import OuterUnit

COLLECTIVE_SECONDS = 30e-6  # that ranks need to begin to talk
MEMORY = ("working_bytes", "output_bytes", "kept_bytes")  # of a `PassCost`


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSize:
    """Bytes of a unit, by where they may be."""

    weight_bytes: int
    gradient_bytes: int  # sums, in float32
    staging_bytes: int  # as gradients cross the link
    state_bytes: int  # optimizer state, and what completes the master
    num_trained: int  # parameters

    @property
    def lent_bytes(self) -> int:
        """What is copied to the device for an update there."""
        return self.state_bytes + self.staging_bytes + self.weight_bytes


@dataclass(frozen=True, eq=False)
class CostCurve:
    """The cost of a pass for any number of rows, from those for some; only equal to itself.

    Arithmetic and traffic grow by a line. Memory is that of the worst moment, and each moment's
    grows by a line of its own: for few rows the worst is the end, when all gradients of weights are
    there, for many some place in the middle. Hence it is nowhere above the straight line between
    two numbers of rows, and beyond the last not above what is in proportion to it.
    """

    counted: tuple[tuple[int, PassCost], ...]  # for one row, for two, and perhaps for many

    def at(self, rows: float) -> PassCost:
        """The cost for so many rows."""
        (_, one), (_, two), *_ = self.counted
        return PassCost(
            matrix_flops=_line(one.matrix_flops, two.matrix_flops, rows - 1),
            moved_bytes=_line(one.moved_bytes, two.moved_bytes, rows - 1),
            num_kernels=max(one.num_kernels, two.num_kernels),
            **{name: self._memory(name, rows) for name in MEMORY},
        )

    def _memory(self, name: str, rows: float) -> int:
        last, most = self.counted[-1]
        if rows > last and len(self.counted) > 2:
            return int(getattr(most, name) * rows / last)
        pairs = list(pairwise(self.counted))
        (low, few), (high, many) = next((p for p in pairs if rows <= p[1][0]), pairs[-1])
        return int(_line(getattr(few, name), getattr(many, name), (rows - low) / (high - low)))


def _line(first: float, second: float, share: float) -> float:
    return max(0.0, first + (second - first) * share)


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The passes of one layer."""

    forward: CostCurve
    backward: CostCurve  # recomputation and backward
    kept_forward: CostCurve  # keeping everything, as layers of the tail do
    kept_backward: CostCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Ranks that train one model, a device each, and what joins them.

    Those of one host hold the model together; other hosts hold copies of it. Every device has a
    link of its own; memory and cores are their host's.
    """

    num_ranks: int = 1
    per_host: int = 1  # at most
    near_rate: float = math.inf  # bytes/s in and out of a device, from and to others of its host
    far_rate: float = math.inf  # the same across hosts
    # of a host, beside that of one device as it was measured. None: as many times as devices.
    host_speed: float | None = None

    @property
    def num_shares(self) -> int:
        """Ranks that hold a copy of the model together."""
        return min(self.num_ranks, self.per_host)

    @property
    def num_copies(self) -> int:
        """Copies of the model."""
        return -(-self.num_ranks // self.num_shares)

    @property
    def contention(self) -> float:
        """How much longer the host needs for a share because others update theirs meanwhile."""
        speed = self.num_shares if self.host_speed is None else self.host_speed
        return max(1.0, self.num_shares / speed)

    def gather_seconds(self, nbytes: float) -> float:
        """To get what others hold of so many bytes; or to give them their sums of as many."""
        number = self.num_shares
        return COLLECTIVE_SECONDS + nbytes * (number - 1) / number / self.near_rate

    def reduce_seconds(self, nbytes: float) -> float:
        """To sum so many bytes over all ranks, each its share."""
        copies, own = self.num_copies, nbytes / self.num_shares
        across = 2 * own * (copies - 1) / copies / self.far_rate
        return self.gather_seconds(nbytes) + across + (COLLECTIVE_SECONDS if copies > 1 else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything a plan depends on but the machine and the budget."""

    layers: tuple[UnitSize, ...]
    costs: tuple[LayerCosts, ...]  # for each layer
    outer: tuple[tuple[OuterUnit, UnitSize], ...]
    num_rows: int  # of a batch
    length: int  # positions in a row
    hidden_bytes: int  # of one row
    recorded_bytes: int  # of one row, about
    looked_up_bytes: int  # of one row
    head_parameters: int  # in matrices of the epilogue
    head_width: int  # its widest output: words
    logit_bytes: float  # of a piece's memory, for each of its logits
    logit_moved_bytes: float  # read and written by the loss, for each logit
    may_cut_rows: bool  # whether the epilogue may run on some rows of a microbatch
    may_cut_positions: bool
    may_keep: bool  # whether streamed layers can keep some of their results
    policy: UpdatePolicy
    update_bytes: float  # host memory traffic of an update, for each parameter
    eight_bit: bool
    has_halves: bool  # whether late updates can be done in two
    may_update_on_device: bool
    is_single: bool  # whether layers compute in float32
    buffer_bytes: int
    server_bytes: int  # of the parameter server, on the host
    host_limit_bytes: int
    together: Together = Together()
