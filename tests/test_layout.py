"""Flat layouts: fields disjoint, aligned and complete; views; offsets that outlive the dtype."""

import random

import pytest
import torch

from l2l.parameter_server.layout import (
    ALIGNMENT_BYTES,
    ALIGNMENT_ELEMENTS,
    Field,
    FlatLayout,
    Segment,
    round_up,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)
SHAPES = ((), (0,), (1,), (127,), (128,), (129,), (3, 5), (16, 8), (2, 0, 3), (7, 11, 2), (1000,))

Description = tuple[str, tuple[int, ...], torch.dtype]


def described(seed: int) -> list[Description]:
    """Some tensors of some dtypes, in some order."""
    source = random.Random(seed)
    count = source.randint(0, 12)
    return [(f"t{i}", source.choice(SHAPES), source.choice(DTYPES)) for i in range(count)]


every_seed = pytest.mark.parametrize("seed", range(60))


def positions(layout: FlatLayout) -> list[tuple[int, int, Segment, Field]]:
    """First and last byte of every field."""
    return [
        (
            segment.offset_bytes + field.offset * segment.dtype.itemsize,
            segment.offset_bytes + (field.offset + field.numel) * segment.dtype.itemsize,
            segment,
            field,
        )
        for segment in layout.segments
        for field in segment.fields
    ]


@every_seed
def test_a_layout_holds_every_tensor_once(seed: int) -> None:
    tensors = described(seed)
    layout = FlatLayout.of(tensors)
    found = {
        field.name: (field.shape, segment.dtype)
        for segment in layout.segments
        for field in segment.fields
    }
    assert found == {name: (shape, dtype) for name, shape, dtype in tensors}
    assert len(layout.names) == len(tensors)
    assert layout.numel == sum(torch.Size(shape).numel() for _, shape, _ in tensors)
    assert len({segment.dtype for segment in layout.segments}) == len(layout.segments)
    for segment in layout.segments:
        order = [name for name, _, dtype in tensors if dtype is segment.dtype]
        assert [field.name for field in segment.fields] == order


@every_seed
def test_fields_are_disjoint_and_inside(seed: int) -> None:
    layout = FlatLayout.of(described(seed))
    end = 0
    for first, last, _, _ in positions(layout):
        assert end <= first <= last
        end = last
    assert end <= layout.nbytes


@every_seed
def test_fields_and_segments_are_aligned(seed: int) -> None:
    layout = FlatLayout.of(described(seed))
    assert layout.nbytes % ALIGNMENT_BYTES == 0
    for segment in layout.segments:
        assert segment.offset_bytes % ALIGNMENT_BYTES == 0
        assert segment.numel % ALIGNMENT_ELEMENTS == 0
        assert all(field.offset % ALIGNMENT_ELEMENTS == 0 for field in segment.fields)


@every_seed
def test_little_is_lost_to_padding(seed: int) -> None:
    layout = FlatLayout.of(described(seed))
    used = sum(last - first for first, last, _, _ in positions(layout))
    allowed = sum(
        ALIGNMENT_BYTES + len(segment.fields) * ALIGNMENT_ELEMENTS * segment.dtype.itemsize
        for segment in layout.segments
    )
    assert layout.nbytes - used <= allowed


@every_seed
def test_what_is_written_through_views_is_read_through_views(seed: int) -> None:
    layout = FlatLayout.of(described(seed))
    buffer = torch.full((layout.nbytes + 64,), 0xFF, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    written = {
        name: torch.randint(-100, 100, view.shape, generator=generator).to(view.dtype)
        for name, view in layout.views(buffer).items()
    }
    for name, view in layout.views(buffer).items():
        view.copy_(written[name])
    for name, view in layout.views(buffer).items():
        assert torch.equal(view, written[name]), name
        assert view.is_contiguous()
    outside = torch.ones_like(buffer, dtype=torch.bool)
    for first, last, _, _ in positions(layout):
        outside[first:last] = False
    assert (buffer[outside] == 0xFF).all()


@every_seed
def test_segments_cover_their_fields(seed: int) -> None:
    layout = FlatLayout.of(described(seed))
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for flat in layout.segment_views(buffer):
        flat.fill_(1)
    for name, view in layout.views(buffer).items():
        assert (view == 1).all(), name


@every_seed
def test_another_dtype_leaves_element_offsets_alone(seed: int) -> None:
    layout = FlatLayout.of(described(seed))
    wide = layout.astype({torch.bfloat16: torch.float32, torch.float16: torch.float32})
    assert wide.names == layout.names
    for one, other in zip(layout.segments, wide.segments, strict=True):
        assert one.fields == other.fields
        assert one.numel == other.numel
        assert other.offset_bytes % ALIGNMENT_BYTES == 0
        half = one.dtype in (torch.bfloat16, torch.float16)
        assert other.dtype is (torch.float32 if half else one.dtype)
    back = wide.astype({torch.float32: torch.float32})
    assert back == wide


def test_an_exchange_of_dtypes_can_be_undone() -> None:
    layout = FlatLayout.of([("a", (5,), torch.bfloat16), ("b", (300,), torch.bfloat16)])
    wide = layout.astype({torch.bfloat16: torch.float32})
    assert wide.nbytes == 2 * layout.nbytes
    assert wide.astype({torch.float32: torch.bfloat16}) == layout


def test_a_layout_of_nothing_takes_no_bytes() -> None:
    layout = FlatLayout.of([])
    assert layout.nbytes == 0
    assert layout.numel == 0
    assert layout.views(torch.empty(0, dtype=torch.uint8)) == {}


def test_a_small_layout_written_out() -> None:
    layout = FlatLayout.of(
        [
            ("norm", (3,), torch.float32),
            ("steps", (), torch.int64),
            ("weight", (4, 50), torch.float32),
        ]
    )
    assert [(first, last, field.name) for first, last, _, field in positions(layout)] == [
        (0, 12, "norm"),
        (512, 512 + 800, "weight"),
        (1536, 1544, "steps"),
    ]
    assert layout.nbytes == 1536 + 128 * 8


@pytest.mark.parametrize(
    "buffer",
    [torch.zeros(511, dtype=torch.uint8), torch.zeros(128), torch.zeros(2, 512).to(torch.uint8)],
    ids=["short", "not_bytes", "not_flat"],
)
def test_a_buffer_that_does_not_fit_is_refused(buffer: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        FlatLayout.of([("a", (5,), torch.float32)]).views(buffer)


def test_rounding_up() -> None:
    assert [round_up(value, 4) for value in (0, 1, 3, 4, 5, 8)] == [0, 4, 4, 4, 8, 8]
