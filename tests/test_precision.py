"""The split master is a bijection; rounding differs from torch's at exact ties only."""

import pytest
import torch
from torch import Tensor, nn

from l2l.parameter_server.precision import (
    PrecisionPolicy,
    join_master,
    parse_precision,
    split_master,
)

SIGN = -(2**31)
UPPER_HALVES = torch.arange(-(2**15), 2**15, dtype=torch.int64) << 16
LOWER_HALVES = (0x0000, 0x0001, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF)
RANDOM = torch.randint(-(2**31), 2**31, (500_000,), generator=torch.Generator().manual_seed(0))
PATTERNS = {
    "edges": torch.cat([UPPER_HALVES + lower for lower in LOWER_HALVES]),
    "one_upper_half": (0x3F80 << 16) + torch.arange(2**16),
    "next_to_infinity": (0x7F7F << 16) + torch.arange(2**16),
    "not_a_number": (0x7FC0 << 16) + torch.arange(2**16),
    "largest": (0x7FFF << 16) + torch.arange(2**16),
    "denormal": torch.arange(2**16),
    "negative_denormal": SIGN + torch.arange(2**16),
    "random": RANDOM,
}

every_pattern = pytest.mark.parametrize("name", PATTERNS)


def masters(name: str) -> Tensor:
    return PATTERNS[name].to(torch.int32).view(torch.float32)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.empty(master.shape, dtype=torch.bfloat16)
    remainder = torch.empty(master.shape, dtype=torch.int16)
    split_master(master, weight, remainder)
    return weight, remainder


@every_pattern
def test_joining_gives_back_what_was_split(name: str) -> None:
    master = masters(name)
    joined = join_master(*split(master))
    assert torch.equal(joined.view(torch.int32), master.view(torch.int32))


def test_splitting_gives_back_what_was_joined() -> None:
    """With all weights, and with the remainders at both ends and between."""
    weights = torch.arange(-(2**15), 2**15).to(torch.int16)
    for remainder in (-(2**15), -(2**15) + 1, -1, 0, 1, 12345, 2**15 - 1):
        remainders = torch.full_like(weights, remainder)
        weight, found = split(join_master(weights.view(torch.bfloat16), remainders))
        assert torch.equal(weight.view(torch.int16), weights)
        assert torch.equal(found, remainders)


def test_no_two_masters_share_a_pair() -> None:
    bits = RANDOM.unique()
    weight, remainder = split(bits.to(torch.int32).view(torch.float32))
    pairs = weight.view(torch.int16).long() * 2**16 + remainder.long()
    assert pairs.unique().numel() == bits.numel()


@every_pattern
def test_the_weight_is_nearest_even_except_at_exact_ties(name: str) -> None:
    master = masters(name)
    master = master[~master.isnan()]
    weight, _ = split(master)
    nearest = master.to(torch.bfloat16)
    differs = weight.view(torch.int16) != nearest.view(torch.int16)
    lower = master.view(torch.int32) & 0xFFFF
    assert (lower[differs] == 0x8000).all()
    away = weight[differs].double().abs() - nearest[differs].double().abs()
    assert (away > 0).all()  # up in bit space is away from zero


def test_ties_go_away_from_zero() -> None:
    master = torch.tensor([0x3F808000, 0x3F818000, 0xBF808000 - 2**32], dtype=torch.int64)
    weight, remainder = split(master.to(torch.int32).view(torch.float32))
    assert [f"{bits & 0xFFFF:04x}" for bits in weight.view(torch.int16).tolist()] == [
        "3f81",
        "3f82",
        "bf81",
    ]
    assert remainder.tolist() == [-(2**15)] * 3


def test_what_bfloat16_holds_has_no_remainder() -> None:
    weights = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    weight, remainder = split(weights.float())
    assert (remainder == 0).all()
    kept = ~weights.isnan()
    assert torch.equal(weight.view(torch.int16)[kept], weights.view(torch.int16)[kept])


def test_special_values() -> None:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1.0, -2.5, torch.nan])
    weight, remainder = split(special)
    expected = special.to(torch.bfloat16)
    assert torch.equal(weight[:-1].view(torch.int16), expected[:-1].view(torch.int16))
    assert weight[-1].isnan()
    assert (remainder == 0).all()


def test_the_largest_masters_round_to_infinity_and_come_back() -> None:
    largest = torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
    weight, remainder = split(largest)
    assert weight.isinf().all()
    assert torch.equal(join_master(weight, remainder), largest)


def test_shapes_other_than_flat_are_split_too() -> None:
    master = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    weight, remainder = split(master)
    assert weight.shape == remainder.shape == (3, 5)
    assert torch.equal(join_master(weight, remainder), master)


# --------------------------------------------------------------------------------------------------
# Which dtype


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("float32", torch.float32),
        ("bfloat16", torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_precision_is_a_word_or_a_dtype(given: object, expected: torch.dtype) -> None:
    assert parse_precision(given) is expected


@pytest.mark.parametrize("given", ["float64", "bf16", "", torch.float64, torch.int8])
def test_other_precisions_are_refused(given: object) -> None:
    with pytest.raises(ValueError, match="Expected one of 'float32', 'bfloat16'"):
        parse_precision(given)


def test_parameters_have_the_dtype_of_the_link_unless_the_model_keeps_them() -> None:
    model = nn.Module()
    model._keep_in_fp32_modules_strict = {"router"}
    policy = PrecisionPolicy.for_model(model, precision="bfloat16")
    assert policy.link_dtype("layers.0.weight", torch.float32) is torch.bfloat16
    assert policy.link_dtype("layers.0.weight", torch.float64) is torch.bfloat16
    assert policy.link_dtype("layers.0.router.weight", torch.float32) is torch.float32
    assert policy.link_dtype("router.weight", torch.bfloat16) is torch.float32
    assert policy.link_dtype("layers.0.subrouter.weight", torch.float32) is torch.bfloat16
    assert policy.link_dtype("layers.0.index", torch.int64) is torch.int64


def test_a_list_for_float16_alone_says_nothing_about_bfloat16() -> None:
    model = nn.Module()
    model._keep_in_fp32_modules = ["wo"]
    policy = PrecisionPolicy.for_model(model, precision="bfloat16")
    assert policy.link_dtype("layers.0.wo.weight", torch.float32) is torch.bfloat16
