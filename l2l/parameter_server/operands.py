"""What the host kernel works on: forms of weights and moments, ranges, and rows of tables.

`EightBitMoments.encode` and `.decode` do in PyTorch, bit by bit, what the library does with 8-bit
moments (eight_bit.py). They are its oracle, and serve to take moments from elsewhere and to show
them. `gather`
and `add_rows` do in PyTorch what the library does with rows, where it was not built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from l2l.parameter_server.eight_bit import BLOCK_SIZE, decoded, encoded, num_blocks

GRADIENT_FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TARGET_FORMS = {torch.float32: 0, torch.bfloat16: 1}


def check_tensor(
    tensor: Tensor, *, name: str, dtypes: tuple[torch.dtype, ...], numel: int | None = None
) -> None:
    """Raise ValueError unless `tensor` is something the library can walk through."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be in host memory, found it on {tensor.device}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be {expected}, found {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, found shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}"
        )
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name} must have {numel} elements, found {tensor.numel()}")


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SplitWeight:
    """A float32 master as the bfloat16 that crosses the link, and the 16 bits that are missing."""

    weight: Tensor  # bfloat16 [numel]
    remainder: Tensor  # int16 [numel]

    def __post_init__(self) -> None:
        check_tensor(self.weight, name="weight", dtypes=(torch.bfloat16,))
        numel = self.weight.numel()
        check_tensor(self.remainder, name="remainder", dtypes=(torch.int16,), numel=numel)


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Float32Weight:
    """A weight that crosses the link in float32 and is its own master."""

    weight: Tensor  # float32 [numel]

    def __post_init__(self) -> None:
        check_tensor(self.weight, name="weight", dtypes=(torch.float32,))


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Float16Weight:
    """A float32 master, and the float16 copy that crosses the link (nearest even; may overflow)."""

    weight: Tensor  # float16 [numel], only written
    master: Tensor  # float32 [numel]

    def __post_init__(self) -> None:
        check_tensor(self.weight, name="weight", dtypes=(torch.float16,))
        check_tensor(self.master, name="master", dtypes=(torch.float32,), numel=self.weight.numel())


Weight = SplitWeight | Float32Weight | Float16Weight


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Moments:
    """Both moments of AdamW in float32."""

    first: Tensor  # float32 [numel]
    second: Tensor  # float32 [numel]

    def __post_init__(self) -> None:
        check_tensor(self.first, name="first", dtypes=(torch.float32,))
        check_tensor(self.second, name="second", dtypes=(torch.float32,), numel=self.first.numel())


@final
@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EightBitMoments:
    """Both moments of AdamW in 8 bits, with a unit for every 128 elements. All zeros is fresh.

    `position` is that of the first element in its layer's flat buffer. Together with the seed of an
    update it determines the rounding: a range updated in pieces gives the bits of the whole.
    """

    first: Tensor  # int8 [numel]
    second: Tensor  # uint8 [numel], codes of the second moment's root
    first_unit: Tensor  # float32 [ceil(numel / 128)]
    second_unit: Tensor  # float32 [ceil(numel / 128)]
    position: int = 0

    def __post_init__(self) -> None:
        check_tensor(self.first, name="first", dtypes=(torch.int8,))
        numel = self.first.numel()
        check_tensor(self.second, name="second", dtypes=(torch.uint8,), numel=numel)
        units = num_blocks(numel)
        check_tensor(self.first_unit, name="first_unit", dtypes=(torch.float32,), numel=units)
        check_tensor(self.second_unit, name="second_unit", dtypes=(torch.float32,), numel=units)
        if self.position < 0 or self.position % BLOCK_SIZE:
            raise ValueError(
                f"position must be a multiple of {BLOCK_SIZE}, so that units belong to whole "
                f"blocks; found {self.position}"
            )

    @classmethod
    def zeros(cls, numel: int, *, position: int = 0) -> EightBitMoments:
        """Fresh moments."""
        return cls(
            first=torch.zeros(numel, dtype=torch.int8),
            second=torch.zeros(numel, dtype=torch.uint8),
            first_unit=torch.zeros(num_blocks(numel)),
            second_unit=torch.zeros(num_blocks(numel)),
            position=position,
        )

    def decode(self) -> tuple[Tensor, Tensor]:
        """The first moment and the root of the second, float32 [numel] each."""
        numel = self.first.numel()
        units = (_per_element(unit, numel) for unit in (self.first_unit, self.second_unit))
        return decoded(self.first, self.second, *units)

    def encode(self, first: Tensor, root: Tensor, *, seed: int) -> None:
        """Take over a first moment and the root of a second, rounded by `seed`."""
        numel = self.first.numel()
        check_tensor(first, name="first", dtypes=(torch.float32,), numel=numel)
        check_tensor(root, name="root", dtypes=(torch.float32,), numel=numel)
        whole = numel // BLOCK_SIZE * BLOCK_SIZE
        for start, stop in ((0, whole), (whole, numel)):  # rows of whole blocks, and what is left
            if start == stop:
                continue
            span, blocks = slice(start, stop), slice(start // BLOCK_SIZE, num_blocks(stop))
            width = min(stop - start, BLOCK_SIZE)
            made = encoded(
                first[span].view(-1, width),
                root[span].view(-1, width),
                first_block=torch.tensor(self.position // BLOCK_SIZE + blocks.start),
                seed=torch.tensor(seed),
            )
            self.first[span] = made["exp_avg"].view(-1)
            self.second[span] = made["exp_avg_sq"].view(-1)
            self.first_unit[blocks] = made["exp_avg_unit"].view(-1)
            self.second_unit[blocks] = made["exp_avg_sq_unit"].view(-1)


def checked_ranges(ranges: Tensor, *, numel: int) -> Tensor:  # int64 [n, 2]
    """Ranges of elements in increasing order.

    Args:
        ranges: int64 [n, 2], begin and end of each, in any order.
        numel: what they are ranges of.

    Raises:
        ValueError: two overlap, or one is not made of whole blocks of `numel` elements (the last
            block may be a part of one).
    """
    if ranges.dim() != 2 or ranges.shape[1] != 2:
        raise ValueError(f"ranges must have shape [n, 2], found {tuple(ranges.shape)}")
    check_tensor(ranges, name="ranges", dtypes=(torch.int64,))
    begins, ends = ranges.unbind(1)
    at_block = ((ranges % BLOCK_SIZE == 0) | (ranges == numel)).all(1)
    wrong = ~(at_block & (begins >= 0) & (begins <= ends) & (ends <= numel))
    if wrong.any():
        raise ValueError(
            f"ranges must be of whole blocks of {BLOCK_SIZE} within {numel} elements, found "
            f"{ranges[wrong][0].tolist()}"
        )
    if (begins[1:] >= ends[:-1]).all():  # as they usually come
        return ranges
    ranges = ranges[begins < ends]
    ranges = ranges[ranges[:, 0].argsort()]
    overlapping = (ranges[:-1, 1] > ranges[1:, 0]).nonzero()
    if len(overlapping):
        first = int(overlapping[0])
        raise ValueError(f"ranges must not overlap, found {ranges[first : first + 2].tolist()}")
    return ranges


def _check_rows(table: Tensor, ids: Tensor, rows: Tensor, *, names: tuple[str, str]) -> None:
    """Raise ValueError unless `rows` are like those of `table` and it has the ids."""
    table_name, rows_name = names
    if table.dim() != 2:
        raise ValueError(f"{table_name} must have two dimensions, found {tuple(table.shape)}")
    if ids.dim() != 1:
        raise ValueError(f"ids must have one dimension, found {tuple(ids.shape)}")
    check_tensor(ids, name="ids", dtypes=(torch.int64,))
    expected = (len(ids), table.shape[1])
    if tuple(rows.shape) != expected:
        raise ValueError(f"{rows_name} must have shape {expected}, found {tuple(rows.shape)}")
    if len(ids):
        smallest, largest = (int(limit) for limit in ids.aminmax())
        if smallest < 0 or largest >= len(table):
            raise ValueError(
                f"ids must lie in [0, {len(table)}), found {smallest if smallest < 0 else largest}"
            )


def check_gather(table: Tensor, ids: Tensor, out: Tensor) -> None:
    """Refuse tensors that `gather` cannot take."""
    check_tensor(table, name="table", dtypes=(table.dtype,))
    check_tensor(out, name="out", dtypes=(table.dtype,))
    _check_rows(table, ids, out, names=("table", "out"))


def check_add_rows(target: Tensor, ids: Tensor, source: Tensor) -> None:
    """Refuse tensors that `add_rows` cannot take."""
    check_tensor(target, name="target", dtypes=tuple(TARGET_FORMS))
    check_tensor(source, name="source", dtypes=tuple(GRADIENT_FORMS))
    _check_rows(target, ids, source, names=("target", "source"))


def gather(table: Tensor, ids: Tensor, out: Tensor) -> None:
    """`HostKernel.gather` in PyTorch."""
    check_gather(table, ids, out)
    torch.index_select(table, 0, ids, out=out)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroups:
    """Which of many rows are to be added to which: the rows of each distinct id, in their order."""

    rows: Tensor  # distinct ids, ascending
    starts: Tensor  # of each id's positions, and the end of the last
    positions: Tensor

    @classmethod
    def of(cls, ids: Tensor, *, without: int | None) -> RowGroups:
        """Group ids, leaving one out."""
        ordered, positions = ids.sort(stable=True)
        if without is not None:
            counted = ordered != without
            ordered, positions = ordered[counted], positions[counted]
        rows, counts = torch.unique_consecutive(ordered, return_counts=True)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return cls(rows=rows, starts=starts, positions=positions)

    def by_last_position(self, ends: Tensor) -> list[RowGroups]:
        """The groups in several: those whose last position is below the first end, and so on."""
        counts = self.starts.diff()
        last = self.positions[self.starts[1:] - 1]
        part = torch.bucketize(last, ends, right=True)
        part_of_position = part.repeat_interleave(counts)
        found = []
        for number in range(len(ends)):
            own = part == number
            starts = torch.cat([counts.new_zeros(1), counts[own].cumsum(0)])
            positions = self.positions[part_of_position == number]
            found.append(RowGroups(rows=self.rows[own], starts=starts, positions=positions))
        return found

    def ids(self) -> Tensor:
        """The id of each position."""
        return self.rows.repeat_interleave(self.starts.diff())


def add_rows(target: Tensor, ids: Tensor, source: Tensor, *, without: int | None = None) -> float:
    """`HostKernel.add_rows` in PyTorch: the same target, and the same result but for rounding."""
    check_add_rows(target, ids, source)
    if without is not None:
        ids, source = ids[ids != without], source[ids != without]
    distinct, group = torch.unique(ids, return_inverse=True)
    sums = torch.zeros(len(distinct), target.shape[1]).index_add_(0, group, source.float())
    before = target[distinct].float()
    after = before + sums
    target[distinct] = after.to(target.dtype)
    return float((after.double().square() - before.double().square()).sum())


def correctly_rounded_root(values: Tensor) -> Tensor:
    """The float32 square root as the processor computes it; torch's may be off by one bit."""
    return values.double().sqrt().float()


def _per_element(of_blocks: Tensor, numel: int) -> Tensor:
    return of_blocks.repeat_interleave(BLOCK_SIZE)[:numel]
