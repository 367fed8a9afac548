"""Where every tensor of a unit lies inside one flat buffer: pure arithmetic, no memory.

A *unit* (a layer, or the outer parameters around the layers) moves as a whole, so its tensors share
one contiguous buffer. Parameter server, slot, gradient buffer and checkpoint agree about the inside
of that buffer because they hold the same `FlatLayout`:

    bytes  0            256          512                                         nbytes
           | norm.weight | norm.bias  | attention.query.weight ........ | padding |
             Field 0       Field 1      Field 2

Fields of one dtype form a segment; every field starts at a multiple of `ALIGNMENT_ELEMENTS`
elements of its segment and every segment at a multiple of `ALIGNMENT_BYTES` bytes. Alignment counts
elements, not bytes, so that two layouts of the same tensors in different dtypes (a bfloat16 weight,
its float32 gradient, its moments) have the *same element offsets*: one index runs over all of them.

[Note: shares] Several ranks may hold a buffer together: each segment is cut into as many equal runs
of elements as there are ranks, at multiples of `ALIGNMENT_ELEMENTS`. What a rank holds is a layout
again, of pieces of fields, each in one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from l2l.distributed import Share

ALIGNMENT_ELEMENTS = 128
ALIGNMENT_BYTES = 256


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def rows_of_slice(num_rows: int, num_slices: int) -> int:
    """Rows of the largest of so many slices of a matrix: even where it has many."""
    size = -(-num_rows // num_slices)
    even = round_up(size, ALIGNMENT_ELEMENTS)  # matrix products like that
    return even if even * (num_slices - 1) < num_rows else size


def gathered(sizes: Sequence[int], most: int) -> list[slice]:
    """Neighbours in groups, at most so many, of which the largest is small."""
    limit = max([*sizes, -(-sum(sizes) // most)], default=0)
    while True:
        groups, room = list[slice](), 0
        for index, size in enumerate(sizes):
            if size > room or not groups:
                groups.append(slice(index, index))
                room = limit
            groups[-1] = slice(groups[-1].start, index + 1)
            room -= size
        if len(groups) <= most:
            return groups
        limit += -(-limit // 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One tensor inside a segment."""

    name: str
    shape: tuple[int, ...]
    offset: int  # in elements, from the start of the segment

    @property
    def numel(self) -> int:
        """Number of elements, without padding."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Fields of one dtype, back to back."""

    dtype: torch.dtype
    fields: tuple[Field, ...]
    numel: int = 0  # padding included
    offset_bytes: int = 0  # from the start of the buffer

    @property
    def nbytes(self) -> int:
        """Bytes of the segment, padding included."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class FlatLayout:
    """The inside of one flat buffer."""

    segments: tuple[Segment, ...]

    @classmethod
    def of(
        cls, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], *, num_shares: int = 1
    ) -> FlatLayout:
        """Lay out tensors given as (name, shape, dtype), in order within each dtype.

        With several shares, every segment is filled up so that it can be cut evenly.
        """
        by_dtype: dict[torch.dtype, list[Field]] = {}
        for name, shape, dtype in tensors:
            fields = by_dtype.setdefault(dtype, [])
            offset = round_up(_end(fields), ALIGNMENT_ELEMENTS)
            fields.append(Field(name=name, shape=tuple(shape), offset=offset))
        found = (Segment(dtype=dtype, fields=tuple(fields)) for dtype, fields in by_dtype.items())
        return cls(segments=tuple(found)).cut_for(num_shares)

    @classmethod
    def joined(cls, *layouts: FlatLayout) -> FlatLayout:
        """The segments of several layouts in one buffer, one after another."""
        return cls(segments=_placed(one for layout in layouts for one in layout.segments))

    def cut_for(self, num_shares: int) -> FlatLayout:
        """The same, filled up so that it can be cut evenly into so many shares."""
        multiple = ALIGNMENT_ELEMENTS * num_shares
        found = (replace(one, numel=round_up(_end(one.fields), multiple)) for one in self.segments)
        return FlatLayout(segments=_placed(found))

    def held(self, share: Share) -> FlatLayout:
        """What a rank holds of the buffer ([Note: shares])."""
        if share.number == 1:
            return self
        segments = []
        for segment in self.segments:
            part = share.of(segment.numel)
            pieces = {field: self.piece(field.name, share) for field in segment.fields}
            fields = tuple(
                Field(
                    name=field.name,
                    shape=(piece.stop - piece.start,),
                    offset=field.offset + piece.start - part.start,
                )
                for field, piece in pieces.items()
                if piece.stop > piece.start
            )
            segments.append(replace(segment, fields=fields, numel=part.stop - part.start))
        return FlatLayout(segments=_placed(segments))

    @cached_property
    def _places(self) -> dict[str, tuple[int, Segment, Field]]:
        """By field: the elements before its segment, the segment, and the field."""
        found, before = dict[str, tuple[int, Segment, Field]](), 0
        for segment in self.segments:
            found |= {field.name: (before, segment, field) for field in segment.fields}
            before += segment.numel
        return found

    def piece(self, name: str, share: Share) -> slice:
        """Which elements of a field a rank holds."""
        _, segment, field = self._places[name]
        part = share.of(segment.numel)
        start = min(max(part.start - field.offset, 0), field.numel)
        return slice(start, min(max(part.stop - field.offset, start), field.numel))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        ends = [one.offset_bytes + one.nbytes for one in self.segments]
        return round_up(max(ends, default=0), ALIGNMENT_BYTES)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All field names."""
        return tuple(field.name for segment in self.segments for field in segment.fields)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """All shapes, by field name."""
        return {field.name: field.shape for one in self.segments for field in one.fields}

    @property
    def numel(self) -> int:
        """Number of elements of all fields, without padding."""
        return sum(field.numel for segment in self.segments for field in segment.fields)

    @property
    def padded_numel(self) -> int:
        """Number of elements of all segments, padding included."""
        return sum(segment.numel for segment in self.segments)

    def span(self, name: str) -> slice:
        """A field's elements if all segments stand in one row of elements."""
        before, _, field = self._places[name]
        return slice(before + field.offset, before + field.offset + field.numel)

    def dtype_of(self, name: str) -> torch.dtype | None:
        """A field's dtype; None if there is no such field."""
        return self._places[name][1].dtype if name in self._places else None

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """A field's shape; None if there is no such field."""
        return self._places[name][2].shape if name in self._places else None

    @cached_property
    def by_start(self) -> dict[int, str]:
        """Names of fields that have elements, by the first element of `span`."""
        spans = {name: self.span(name) for name in self.names}
        return {span.start: name for name, span in spans.items() if span.stop > span.start}

    def start_of(self, name: str) -> int:
        """Where a tensor begins, in bytes."""
        _, segment, field = self._places[name]
        return segment.offset_bytes + field.offset * segment.dtype.itemsize

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """One field of a byte buffer, shaped."""
        _, segment, field = self._places[name]
        size = segment.dtype.itemsize
        start = segment.offset_bytes + field.offset * size
        return buffer[start : start + field.numel * size].view(segment.dtype).view(field.shape)

    def astype(self, dtypes: dict[torch.dtype, torch.dtype]) -> FlatLayout:
        """The same fields with the dtype of every segment exchanged by the table.

        Segments stay apart even if they now share a dtype, so element offsets do not change.
        """
        found = (replace(one, dtype=dtypes.get(one.dtype, one.dtype)) for one in self.segments)
        return FlatLayout(segments=_placed(found))

    def segment_views(self, buffer: Tensor) -> list[Tensor]:
        """One 1-d view per segment of a byte buffer."""
        assert buffer.dtype is torch.uint8, "a flat buffer is bytes"
        assert buffer.dim() == 1, "a flat buffer is one-dimensional"
        assert buffer.numel() >= self.nbytes, (buffer.numel(), self.nbytes)
        return [
            buffer[segment.offset_bytes : segment.offset_bytes + segment.nbytes].view(segment.dtype)
            for segment in self.segments
        ]

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """One shaped view per field of a byte buffer."""
        return {
            field.name: flat[field.offset : field.offset + field.numel].view(field.shape)
            for segment, flat in zip(self.segments, self.segment_views(buffer), strict=True)
            for field in segment.fields
        }


def _end(fields: Sequence[Field]) -> int:
    return fields[-1].offset + fields[-1].numel if fields else 0


def _placed(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    placed, end = list[Segment](), 0
    for segment in segments:
        placed.append(replace(segment, offset_bytes=round_up(end, ALIGNMENT_BYTES)))
        end = placed[-1].offset_bytes + segment.nbytes
    return tuple(placed)
