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
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from l2l.distributed import Share

ALIGNMENT_ELEMENTS = 128
ALIGNMENT_BYTES = 256


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


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
    offset_bytes: int  # from the start of the buffer
    least: int = 0
    """Elements it has at least, if its fields need fewer."""

    @property
    def numel(self) -> int:
        """Number of elements, padding included."""
        if not self.fields:
            return self.least
        last = self.fields[-1]
        return max(self.least, round_up(last.offset + last.numel, ALIGNMENT_ELEMENTS))

    @property
    def nbytes(self) -> int:
        """Bytes of the segment, padding included."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
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
            end = fields[-1].offset + fields[-1].numel if fields else 0
            offset = round_up(end, ALIGNMENT_ELEMENTS)
            fields.append(Field(name=name, shape=tuple(shape), offset=offset))
        segments = [
            Segment(dtype=dtype, fields=tuple(fields), offset_bytes=0)
            for dtype, fields in by_dtype.items()
        ]
        return cls(segments=_placed(segments)).cut_for(num_shares)

    @classmethod
    def joined(cls, *layouts: FlatLayout) -> FlatLayout:
        """The segments of several layouts in one buffer, one after another."""
        return cls(segments=_placed([one for layout in layouts for one in layout.segments]))

    def cut_for(self, num_shares: int) -> FlatLayout:
        """The same, filled up so that it can be cut evenly into so many shares."""
        multiple, segments = ALIGNMENT_ELEMENTS * num_shares, []
        for segment in self.segments:
            bare = replace(segment, least=0)
            segments.append(replace(bare, least=round_up(bare.numel, multiple)))
        return FlatLayout(segments=_placed(segments))

    def held(self, share: Share) -> FlatLayout:
        """What a rank holds of the buffer ([Note: shares])."""
        if share.number == 1:
            return self
        segments = []
        for segment in self.segments:
            part = share.of(segment.numel)
            pieces = []
            for field in segment.fields:
                start = max(part.start, field.offset)
                size = min(part.stop, field.offset + field.numel) - start
                if size > 0:
                    piece = Field(name=field.name, shape=(size,), offset=start - part.start)
                    pieces.append(piece)
            size = part.stop - part.start
            segments.append(replace(segment, fields=tuple(pieces), least=size))
        return FlatLayout(segments=_placed(segments))

    def piece(self, name: str, share: Share) -> slice:
        """Which elements of a field a rank holds."""
        for segment in self.segments:
            for field in segment.fields:
                if field.name == name:
                    part = share.of(segment.numel)
                    start, stop = (place - field.offset for place in (part.start, part.stop))
                    start = min(max(start, 0), field.numel)
                    return slice(start, min(max(stop, start), field.numel))
        raise KeyError(name)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        if not self.segments:
            return 0
        last = self.segments[-1]
        return round_up(last.offset_bytes + last.nbytes, ALIGNMENT_BYTES)

    @property
    def names(self) -> tuple[str, ...]:
        """All field names."""
        return tuple(field.name for segment in self.segments for field in segment.fields)

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
        before = 0
        for segment in self.segments:
            for field in segment.fields:
                if field.name == name:
                    start = before + field.offset
                    return slice(start, start + field.numel)
            before += segment.numel
        raise KeyError(name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """A field's shape."""
        for segment in self.segments:
            for field in segment.fields:
                if field.name == name:
                    return field.shape
        raise KeyError(name)

    def dtype_of(self, name: str) -> torch.dtype | None:
        """A field's dtype; None if there is no such field."""
        for segment in self.segments:
            if any(field.name == name for field in segment.fields):
                return segment.dtype
        return None

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """One field of a byte buffer, shaped."""
        for segment in self.segments:
            for field in segment.fields:
                if field.name == name:
                    start = segment.offset_bytes + field.offset * segment.dtype.itemsize
                    end = start + field.numel * segment.dtype.itemsize
                    return buffer[start:end].view(segment.dtype).view(field.shape)
        raise KeyError(name)

    def astype(self, dtypes: dict[torch.dtype, torch.dtype]) -> FlatLayout:
        """The same fields with the dtype of every segment exchanged by the table.

        Segments stay apart even if they now share a dtype, so element offsets do not change.
        """
        segments = [
            replace(segment, dtype=dtypes.get(segment.dtype, segment.dtype))
            for segment in self.segments
        ]
        return FlatLayout(segments=_placed(segments))

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


def _placed(segments: list[Segment]) -> tuple[Segment, ...]:
    placed, end = [], 0
    for segment in segments:
        start = round_up(end, ALIGNMENT_BYTES)
        placed.append(replace(segment, offset_bytes=start))
        end = start + segment.nbytes
    return tuple(placed)
