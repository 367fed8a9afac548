"""The native host kernel: as exact as torch, the same bits on every level and for any threads."""

import contextlib
import dataclasses
import itertools
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import l2l
from l2l.device import Event, open_device
from l2l.parameter_server import ParameterServer, eight_bit, host_kernel, operands
from l2l.parameter_server.coefficients import AdamWUpdate, LionUpdate, SGDUpdate
from l2l.parameter_server.division import form_of
from l2l.parameter_server.host_kernel import Half, HostKernel
from l2l.parameter_server.host_memory import Arena
from l2l.parameter_server.operands import (
    EightBitMoments,
    Float16Weight,
    Float32Weight,
    Moments,
    SplitWeight,
    Weight,
    correctly_rounded_root,
)
from l2l.parameter_server.optimizer import HostOptimizer, Update
from l2l.parameter_server.precision import PrecisionPolicy, join_master
from l2l.parameter_server.waiting import UpdateOrder, WaitingUpdate

SIZES = [0, 1, 127, 129, 1025, 100_003]  # around blocks, tiles and chunks, and none a multiple
GRADIENT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = ["split", "float32", "float16"]
NUMBERS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def loaded() -> HostKernel:
    kernel = host_kernel.load()
    if kernel is None:
        pytest.skip("the host kernel is not built: make kernel")
    return kernel


@pytest.fixture
def kernel(loaded: HostKernel) -> Iterator[HostKernel]:
    yield loaded
    loaded.set_level(loaded.available_levels[-1])


def random(numel: int, *, seed: int, scale: float = 1.0) -> Tensor:
    """Normal numbers whose sizes differ, as those of gradients do."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(numel, generator=generator).exp()
    return torch.randn(numel, generator=generator) * sizes * scale


def make_weight(kernel: HostKernel, form: str, master: Tensor) -> Weight:
    if form == "float32":
        return Float32Weight(weight=master.clone())
    if form == "float16":
        return Float16Weight(weight=master.half(), master=master.clone())
    weight = SplitWeight(
        weight=torch.empty_like(master, dtype=torch.bfloat16),
        remainder=torch.empty_like(master, dtype=torch.int16),
    )
    kernel.split(master, weight=weight, num_threads=1)
    return weight


def master_of(kernel: HostKernel, weight: Weight) -> Tensor:
    match weight:
        case Float32Weight():
            return weight.weight.clone()
        case Float16Weight():
            return weight.master.clone()
        case SplitWeight():
            master = torch.empty(weight.weight.numel())
            kernel.join(weight, master=master, num_threads=1)
            return master


def tensors_of(*holders: object) -> list[Tensor]:
    """Every tensor in weights and moments, as integers, so that equal means equal bits."""
    found = []
    for holder in holders:
        names = getattr(type(holder), "__slots__", ())
        values = [holder] if isinstance(holder, Tensor) else [getattr(holder, n) for n in names]
        found += [value for value in values if isinstance(value, Tensor)]
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return [tensor.clone().view(integers[tensor.element_size()]) for tensor in found]


def sum_of_squares(values: Tensor) -> float:
    return float(values.double().square().sum())


Steps = Callable[[HostKernel, str, torch.dtype, int, int], list[Tensor]]


def steps_of(
    optimizer: str,
    *,
    parts: Sequence[Tensor | None] = (None,),
    halves: Sequence[Half | None] = (None,),
    sizes: list[tuple[float, float]] | None = None,
) -> Steps:
    """Three updates of some optimizer: (kernel, form, gradient dtype, numel, threads) -> state.

    Each is made in halves, and these in parts, given as ranges. To `sizes` is added what each part
    found as the size of its change, and what that is.
    """

    def steps(
        kernel: HostKernel, form: str, dtype: torch.dtype, numel: int, num_threads: int
    ) -> list[Tensor]:
        weight = make_weight(kernel, form, random(numel, seed=0))
        moments = Moments(first=torch.zeros(numel), second=torch.zeros(numel))
        eight_bit = EightBitMoments.zeros(numel)
        momentum = torch.zeros(numel)
        for step, half, ranges in itertools.product((1, 2, 3), halves, parts):
            common = {
                "weight": weight,
                "gradient": random(numel, seed=step).to(dtype),
                "num_threads": num_threads,
                "ranges": ranges,
            }
            adamw = AdamWUpdate(step=step, factor=0.7, **NUMBERS)
            sgd = {"lr": 0.1, "weight_decay": 0.1, "step": step, "factor": 0.7}
            lion = LionUpdate(lr=0.1, betas=(0.9, 0.99), weight_decay=0.1, factor=0.7)
            before = master_of(kernel, weight)
            with contextlib.nullcontext() if sizes is None else kernel.preparing() as prepared:
                match optimizer:
                    case "adamw":
                        kernel.adamw(adamw, moments=moments, half=half, **common)
                    case "8-bit adamw":
                        kernel.adamw(adamw, moments=eight_bit, half=half, **common)
                    case "sgd":
                        kernel.sgd(SGDUpdate(**sgd), **common)
                    case "momentum sgd":
                        kernel.sgd(SGDUpdate(momentum=0.9, **sgd), momentum=momentum, **common)
                    case "lion":
                        kernel.lion(lion, momentum=momentum, **common)
            if sizes is not None and prepared is not None:
                found = prepared.perform(num_threads=num_threads)
                sizes.append((found, sum_of_squares(master_of(kernel, weight) - before)))
        return tensors_of(weight, moments, eight_bit, momentum)

    return steps


OPTIMIZERS = ["adamw", "8-bit adamw", "sgd", "momentum sgd", "lion"]
WITH_HALVES = OPTIMIZERS[:2]


def assert_same_bits(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Every level, any number of threads


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("form", FORMS)
def test_every_level_gives_the_same_bits(kernel: HostKernel, optimizer: str, form: str) -> None:
    steps = steps_of(optimizer)
    for dtype in GRADIENT_DTYPES:
        for numel in SIZES:
            results = []
            for level in kernel.available_levels:
                kernel.set_level(level)
                assert kernel.level == level
                results.append(steps(kernel, form, dtype, numel, 1))
            for result in results[1:]:
                assert_same_bits(results[0], result)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_number_of_threads_gives_the_same_bits(kernel: HostKernel, optimizer: str) -> None:
    steps = steps_of(optimizer)
    results = [steps(kernel, "split", torch.bfloat16, 100_003, threads) for threads in (1, 2, 5)]
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_split_and_float32_weights_have_the_same_master(kernel: HostKernel, optimizer: str) -> None:
    def master(form: str) -> Tensor:
        weight = make_weight(kernel, form, random(1025, seed=0))
        gradient = random(1025, seed=1)
        common = {"weight": weight, "gradient": gradient, "num_threads": 1}
        if optimizer == "sgd":
            kernel.sgd(SGDUpdate(lr=0.1, step=1), **common)
        elif optimizer == "momentum sgd":
            momentum = torch.zeros(1025)
            kernel.sgd(SGDUpdate(lr=0.1, momentum=0.9, step=1), momentum=momentum, **common)
        elif optimizer == "lion":
            update = LionUpdate(lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)
            kernel.lion(update, momentum=torch.zeros(1025), **common)
        else:
            moments = (
                Moments(first=torch.zeros(1025), second=torch.zeros(1025))
                if optimizer == "adamw"
                else EightBitMoments.zeros(1025)
            )
            kernel.adamw(AdamWUpdate(step=1, **NUMBERS), moments=moments, **common)
        return master_of(kernel, weight)

    assert torch.equal(master("split"), master("float32"))
    assert torch.equal(master("split"), master("float16"))


# Exact AdamW


def plain_adamw(
    weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, *, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW as a formula, in the dtype of its tensors; scalars are rounded to it once."""

    def scalar(value: float) -> Tensor:
        return torch.tensor(value, dtype=weight.dtype)

    lr, (beta1, beta2), eps, decay = NUMBERS.values()
    first = first + (gradient - first) * scalar(1 - beta1)
    second = second * scalar(beta2) + scalar(1 - beta2) * gradient * gradient
    root = second.sqrt() if weight.dtype == torch.float64 else correctly_rounded_root(second)
    denominator = root / scalar((1 - beta2**step) ** 0.5) + scalar(eps)
    rate = scalar(lr / (1 - beta1**step))
    return weight * scalar(1 - lr * decay) - rate * first / denominator, first, second


def test_adamw_is_the_formula_bit_by_bit(kernel: HostKernel) -> None:
    master = random(1025, seed=0)
    expected = (master, torch.zeros(1025), torch.zeros(1025))
    weight = make_weight(kernel, "split", master)
    moments = Moments(first=torch.zeros(1025), second=torch.zeros(1025))
    for step in range(1, 6):
        gradient = random(1025, seed=step).bfloat16()
        update = AdamWUpdate(step=step, **NUMBERS)
        kernel.adamw(update, weight=weight, gradient=gradient, moments=moments, num_threads=2)
        weight_before, first, second = expected
        expected = plain_adamw(weight_before, gradient.float(), first, second, step=step)
    actual = (master_of(kernel, weight), moments.first, moments.second)
    assert_same_bits(tensors_of(*actual), tensors_of(*expected))


@pytest.mark.parametrize("form", FORMS)
def test_adamw_is_as_near_to_float64_as_torch_is(kernel: HostKernel, form: str) -> None:
    numel = 20_001
    master = random(numel, seed=0)
    theirs = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([theirs], foreach=False, **NUMBERS)
    exact = (master.double(), torch.zeros(numel).double(), torch.zeros(numel).double())
    weight = make_weight(kernel, form, master)
    moments = Moments(first=torch.zeros(numel), second=torch.zeros(numel))
    for step in range(1, 31):
        gradient = random(numel, seed=step, scale=10.0 ** (step % 3 - 3))
        theirs.grad = gradient
        optimizer.step()
        exact_weight, first, second = exact
        exact = plain_adamw(exact_weight, gradient.double(), first, second, step=step)
        update = AdamWUpdate(step=step, **NUMBERS)
        kernel.adamw(update, weight=weight, gradient=gradient, moments=moments, num_threads=2)
    our_error = (master_of(kernel, weight) - exact[0]).double()
    their_error = (theirs.detach() - exact[0]).double()
    assert our_error.norm() <= 1.05 * their_error.norm()
    assert our_error.abs().max() <= 1.5 * their_error.abs().max()


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
def test_gradient_is_multiplied_by_the_factor_in_float32(
    kernel: HostKernel, dtype: torch.dtype
) -> None:
    gradient = random(1025, seed=1).to(dtype)
    masters = []
    for given, factor in ((gradient, 1 / 3), (gradient.float() * torch.tensor(1 / 3), 1.0)):
        weight = make_weight(kernel, "float32", random(1025, seed=0))
        update = SGDUpdate(lr=1.0, step=1, factor=factor)
        kernel.sgd(update, weight=weight, gradient=given, num_threads=1)
        masters.append(master_of(kernel, weight))
    assert torch.equal(*masters)


def test_float16_gradients_are_read_exactly(kernel: HostKernel) -> None:
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    for level in kernel.available_levels:
        kernel.set_level(level)
        weight = Float32Weight(weight=torch.zeros(2**16))
        update = SGDUpdate(lr=-1.0, step=1)
        kernel.sgd(update, weight=weight, gradient=patterns, num_threads=1)
        assert torch.equal(weight.weight.nan_to_num(nan=7e9), patterns.float().nan_to_num(nan=7e9))


def test_float16_weights_are_rounded_as_torch_rounds(kernel: HostKernel) -> None:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (2**20,), generator=generator).int()
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    ties = halves.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1, 4095, 4096, 4097, 8191])
    subnormals = (torch.arange(-5000, 5000) * 2.0**-26).view(torch.int32)
    master = torch.cat([patterns, ties.int().flatten(), subnormals]).view(torch.float32)
    for level in kernel.available_levels:
        kernel.set_level(level)
        weight = Float16Weight(weight=torch.zeros_like(master).half(), master=master.clone())
        update = SGDUpdate(lr=0.0, step=1)
        kernel.sgd(update, weight=weight, gradient=torch.zeros_like(master), num_threads=2)
        expected = master.half()
        assert torch.equal(weight.weight.isnan(), expected.isnan())
        number = ~expected.isnan()
        same = weight.weight.view(torch.int16)[number] == expected.view(torch.int16)[number]
        assert same.all()


def test_moments_below_the_smallest_normal_number_become_zero(kernel: HostKernel) -> None:
    weight = Float32Weight(weight=torch.ones(64))
    moments = Moments(first=torch.full((64,), 1.2e-38), second=torch.full((64,), 1.17e-38))
    update = AdamWUpdate(step=900, **NUMBERS)
    kernel.adamw(update, weight=weight, gradient=torch.zeros(64), moments=moments, num_threads=1)
    assert not moments.first.any()
    assert not moments.second.any()


# The split master


@pytest.mark.parametrize("level", host_kernel.LEVELS)
def test_split_is_a_bijection_on_all_patterns(kernel: HostKernel, level: str) -> None:
    if level not in kernel.available_levels:
        pytest.skip(f"this processor has no {level}")
    kernel.set_level(level)
    assert kernel.check_split_all(num_threads=2) == 0


def test_split_weight_is_the_nearest_bfloat16_and_joins_to_the_master(kernel: HostKernel) -> None:
    master = torch.cat([random(100_003, seed=0), torch.tensor([math.inf, -math.inf, 0.0, -0.0])])
    weight = make_weight(kernel, "split", master)
    assert isinstance(weight, SplitWeight)
    is_tie = master.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(weight.weight[~is_tie], master.bfloat16()[~is_tie])
    assert_same_bits(tensors_of(master_of(kernel, weight)), tensors_of(master))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("form", FORMS)
def test_nan_stays_nan(kernel: HostKernel, optimizer: str, form: str) -> None:
    # The last is what CUDA computes; a plain split would turn it into minus zero.
    patterns = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -0x400000]).int()
    weight = make_weight(kernel, form, torch.ones(300))
    gradient = torch.ones(300)
    gradient[100:105] = patterns.view(torch.float32)
    common = {"weight": weight, "gradient": gradient, "num_threads": 1}
    match optimizer:
        case "adamw":
            moments = Moments(first=torch.zeros(300), second=torch.zeros(300))
            kernel.adamw(AdamWUpdate(step=1, **NUMBERS), moments=moments, **common)
        case "8-bit adamw":
            eight_bit = EightBitMoments.zeros(300)
            kernel.adamw(AdamWUpdate(step=1, **NUMBERS), moments=eight_bit, **common)
            assert eight_bit.first_unit.isnan().tolist() == [True, False, False]
            assert eight_bit.second_unit.isnan().tolist() == [True, False, False]
        case "sgd":
            kernel.sgd(SGDUpdate(lr=0.1, step=1), **common)
        case "momentum sgd":
            update = SGDUpdate(lr=0.1, momentum=0.9, step=1)
            kernel.sgd(update, momentum=torch.zeros(300), **common)
        case "lion":
            update = LionUpdate(lr=0.1, betas=(0.9, 0.99), weight_decay=0.1)
            kernel.lion(update, momentum=torch.zeros(300), **common)
    expected = gradient.isnan()
    assert torch.equal(weight.weight.isnan(), expected)
    assert torch.equal(master_of(kernel, weight).isnan(), expected)


# 8-bit moments


def plain_8bit_adamw(
    weight: Tensor, gradient: Tensor, moments: EightBitMoments, *, step: int
) -> Tensor:
    """What the kernel does, as a formula: the moments are updated, the weight is returned."""
    lr, (beta1, beta2), eps, decay = NUMBERS.values()
    blend_first = torch.tensor(1 - beta1)
    correction = torch.tensor((1 - beta2**step) ** 0.5)
    kept = dataclasses.replace(
        moments,
        first_unit=moments.first_unit * (1 - blend_first),
        second_unit=moments.second_unit * correctly_rounded_root(torch.tensor(beta2)),
    )
    first, root = kept.decode()
    first = first + gradient * blend_first
    new_root = gradient * correctly_rounded_root(torch.tensor(1 - beta2))
    root = correctly_rounded_root(root * root + new_root * new_root)
    rate = torch.tensor(lr / (1 - beta1**step)) * correction
    moments.encode(first, root, seed=eight_bit.rounding_seed(3, step=step))
    return weight * torch.tensor(1 - lr * decay) - rate * first / (
        root + torch.tensor(eps) * correction
    )


@pytest.mark.parametrize("numel", SIZES)
def test_8bit_adamw_is_the_formula_bit_by_bit(kernel: HostKernel, numel: int) -> None:
    expected = random(numel, seed=0)
    expected_moments = EightBitMoments.zeros(numel, position=640)
    weight = Float32Weight(weight=expected.clone())
    moments = EightBitMoments.zeros(numel, position=640)
    for step in range(1, 6):
        gradient = random(numel, seed=step)
        gradient[256:512] = 0  # blocks that stay empty
        gradient[:100] *= 1e-4
        expected = plain_8bit_adamw(expected, gradient, expected_moments, step=step)
        update = AdamWUpdate(step=step, seed=3, **NUMBERS)
        kernel.adamw(update, weight=weight, gradient=gradient, moments=moments, num_threads=2)
    assert_same_bits(tensors_of(weight, moments), tensors_of(expected, expected_moments))


def test_the_x87_unit_is_left_as_it_was(kernel: HostKernel) -> None:
    """It shares registers with MMX; whoever forgets to empty these leaves NaN to others."""
    for level in kernel.available_levels:
        kernel.set_level(level)
        weight, moments = Float32Weight(weight=torch.ones(1000)), EightBitMoments.zeros(1000)
        update = AdamWUpdate(step=1, seed=3, **NUMBERS)
        kernel.adamw(
            update, weight=weight, gradient=torch.ones(1000), moments=moments, num_threads=1
        )
        assert float(np.longdouble(2) * np.longdouble(3)) == 6.0


def test_a_buffer_updated_in_pieces_gives_the_bits_of_the_whole(kernel: HostKernel) -> None:
    gradient = random(1000, seed=1)
    update = AdamWUpdate(step=1, **NUMBERS)
    whole_weight, pieces_weight = torch.ones(1000), torch.ones(1000)
    whole, pieces = EightBitMoments.zeros(1000), EightBitMoments.zeros(1000)
    for begin, end, moments, weight in (
        (0, 1000, whole, whole_weight),
        (0, 384, pieces, pieces_weight),
        (384, 1000, pieces, pieces_weight),
    ):
        blocks = slice(begin // 128, -(-end // 128))
        kernel.adamw(
            update,
            weight=Float32Weight(weight=weight[begin:end]),
            gradient=gradient[begin:end],
            moments=EightBitMoments(
                first=moments.first[begin:end],
                second=moments.second[begin:end],
                first_unit=moments.first_unit[blocks],
                second_unit=moments.second_unit[blocks],
                position=begin,
            ),
            num_threads=1,
        )
    assert_same_bits(tensors_of(whole_weight, whole), tensors_of(pieces_weight, pieces))


def test_fresh_8bit_moments_decode_to_zero() -> None:
    first, root = EightBitMoments.zeros(300).decode()
    assert not first.any()
    assert not root.any()


def test_8bit_rounding_is_unbiased() -> None:
    numel = 128 * 8
    first, root = random(numel, seed=0), random(numel, seed=1).abs()
    moments = EightBitMoments.zeros(numel)
    decoded_first, decoded_root = torch.zeros(numel).double(), torch.zeros(numel).double()
    num_seeds = 400
    for step in range(num_seeds):
        moments.encode(first, root, seed=eight_bit.rounding_seed(0, step=step))
        once_first, once_root = moments.decode()
        decoded_first += once_first / num_seeds
        decoded_root += once_root / num_seeds
    # A code's step at value x is about 2 sqrt(x unit); a mean of 400 has a twentieth of its error.
    first_unit = moments.first_unit.repeat_interleave(128)
    root_unit = moments.second_unit.repeat_interleave(128)
    first_step = 2 * (first.abs() * first_unit).sqrt() + first_unit
    root_step = 2 * (root * root_unit).sqrt() + root_unit
    resolved = root > 16 * root_unit  # below, the smallest code holds
    assert ((decoded_first - first) / first_step).abs().max() < 0.11
    assert ((decoded_root - root) / root_step).abs()[resolved].max() < 0.11


def test_the_rough_root_is_near_over_the_whole_range_of_codes() -> None:
    values = torch.cat([torch.logspace(-38, 5, 500_000), torch.linspace(0, 255**2, 500_000)[1:]])
    error = eight_bit._rough_root(values).double() / values.double().sqrt() - 1
    assert error.abs().max() < 9e-4  # a quarter of a code in 255, where more than a half would do
    assert eight_bit._rough_root(torch.zeros(1)).item() == 0
    subnormal = torch.tensor([1e-45, 1e-40])
    assert eight_bit._rough_root(subnormal).abs().max() < 1e-18


@pytest.mark.parametrize("largest_code", [127, 255])
def test_codes_are_those_of_an_exact_square_root(largest_code: int) -> None:
    generator = torch.Generator().manual_seed(0)
    squares = torch.arange(largest_code + 1.0).square()
    beside = torch.cat([squares * (1 + delta) for delta in (-1e-6, 0, 1e-6, 1e-3)])
    scaled = torch.cat(
        [
            torch.rand(2**20, generator=generator) * largest_code**2,
            (torch.rand(2**20, generator=generator) * largest_code).square(),
            torch.rand(2**18, generator=generator) * 4,
            beside.repeat(100),
        ]
    ).clamp(max=largest_code**2)
    random_bits = torch.randint(2**16, scaled.shape, generator=generator)
    codes = eight_bit._codes(scaled, random_bits, smallest=torch.tensor(0.0))
    exact, u = scaled.double(), random_bits.double() / 2**16
    low = exact.sqrt().floor()
    threshold = low * low + u * (2 * low + 1)
    decided = (exact - threshold).abs() > 1e-6 * (exact + 1)  # else float32 may round either way
    expected = low + (exact > threshold)
    assert decided.float().mean() > 0.95
    assert torch.equal(codes[decided].double(), expected[decided])
    assert ((codes - expected).abs() <= 1).all()
    assert codes.max() <= largest_code


def test_zero_has_code_zero_for_every_random_number() -> None:
    random_bits = torch.arange(2**16)
    zeros = torch.zeros(2**16)
    assert not eight_bit._codes(zeros, random_bits, smallest=torch.tensor(0.0)).any()


def test_zeros_beside_others_stay_zero_and_the_largest_keeps_its_code(kernel: HostKernel) -> None:
    gradient = torch.zeros(1280)
    gradient[::128] = torch.tensor([1e-12, 1e-3, 3.0, -7.0, 1e9, -1e-9, 0.1, 0.3, -1e4, 123.0])
    for level in kernel.available_levels:
        kernel.set_level(level)
        for step in range(1, 51):
            moments = EightBitMoments.zeros(1280)
            weight = Float32Weight(weight=torch.zeros(1280))
            update = AdamWUpdate(seed=step, step=1, **NUMBERS)
            kernel.adamw(update, weight=weight, gradient=gradient, moments=moments, num_threads=1)
            others = torch.arange(1280) % 128 != 0
            assert not moments.first[others].any()
            assert (moments.second[others] == 4).all()
            assert (moments.first[::128].int().abs() >= 126).all()
            assert (moments.second[::128] >= 254).all()


def test_a_second_moment_follows_gradients_that_shrink(kernel: HostKernel) -> None:
    """Where rounding to nearest would keep the old one for ever."""
    numel, num_steps = 1280, 6000
    shrinking = torch.arange(numel) % 4 != 0
    weight = Float32Weight(weight=torch.zeros(numel))
    moments = EightBitMoments.zeros(numel)
    exact = torch.zeros(numel).double()
    generator = torch.Generator().manual_seed(0)
    for step in range(1, num_steps + 1):
        gradient = torch.randn(numel, generator=generator)
        if step > 1000:
            gradient[shrinking] *= 1 / 30
        exact = 0.999 * exact + 0.001 * gradient.double().square()
        update = AdamWUpdate(step=step, **NUMBERS)
        kernel.adamw(update, weight=weight, gradient=gradient, moments=moments, num_threads=1)
    _, root = moments.decode()
    ratio = root / exact.sqrt()
    assert ratio[shrinking].median() == pytest.approx(1.0, rel=0.05)
    assert ratio[~shrinking].median() == pytest.approx(1.0, rel=0.05)


def test_one_huge_gradient_among_tiny_ones_blows_nothing_up(kernel: HostKernel) -> None:
    """Exact AdamW can move a weight by lr * (1 - beta1) / sqrt(1 - beta2) = 3.2 lr."""
    numel = 128 * 64
    generator = torch.Generator().manual_seed(0)
    for huge, tiny in ((1.0, 1e-3), (1e3, 1e-6), (1e4, 1e-12)):
        weight = Float32Weight(weight=torch.zeros(numel))
        moments = EightBitMoments.zeros(numel)
        largest = 0.0
        for step in range(1, 301):
            gradient = torch.randn(numel, generator=generator) * tiny
            if step % 10 == 1 and step < 150:
                gradient[5::128] = huge
            before = weight.weight.clone()
            update = AdamWUpdate(step=step, lr=1.0, betas=(0.9, 0.999), eps=0.0, weight_decay=0.0)
            kernel.adamw(update, weight=weight, gradient=gradient, moments=moments, num_threads=2)
            largest = max(largest, float((weight.weight - before).abs().max()))
        assert largest < 3.5


def test_8bit_adamw_trains_like_exact_adamw(kernel: HostKernel) -> None:
    """A small network on a task with an answer: both reach the same loss."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 32, generator=generator)
    targets = (inputs @ torch.randn(32, 8, generator=generator)).sin()
    shapes = [(32, 96), (96, 96), (96, 8)]
    sizes = [rows * columns for rows, columns in shapes]
    start = torch.cat(
        [torch.randn(rows * columns, generator=generator) / rows**0.5 for rows, columns in shapes]
    )

    def train(moments: Moments | EightBitMoments) -> float:
        weight = make_weight(kernel, "split", start)
        choose = torch.Generator().manual_seed(1)
        for step in range(1, 601):
            batch = torch.randint(512, (64,), generator=choose)
            master = master_of(kernel, weight).requires_grad_()
            loss = loss_of(master, batch)
            (gradient,) = torch.autograd.grad(loss, master)
            update = AdamWUpdate(
                lr=3e-3 * (1 - step / 601), betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, step=step
            )
            kernel.adamw(update, weight=weight, gradient=gradient, moments=moments, num_threads=1)
        return float(loss_of(master_of(kernel, weight), torch.arange(512)))

    def loss_of(master: Tensor, batch: Tensor) -> Tensor:
        first, second, third = (
            part.view(shape) for part, shape in zip(master.split(sizes), shapes, strict=True)
        )
        hidden = ((inputs[batch] @ first).tanh() @ second).tanh()
        return ((hidden @ third - targets[batch]) ** 2).mean()

    numel = start.numel()
    exact = train(Moments(first=torch.zeros(numel), second=torch.zeros(numel)))
    assert exact < 0.1  # it starts above 1
    assert train(EightBitMoments.zeros(numel)) < 1.1 * exact


# The other optimizers


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.5},
        {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
    ],
    ids=str,
)
def test_sgd_is_that_of_torch(kernel: HostKernel, numbers: dict[str, float]) -> None:
    master = random(1025, seed=0)
    theirs = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.SGD([theirs], lr=0.1, foreach=False, **numbers)
    weight = make_weight(kernel, "split", master)
    momentum = torch.full((1025,), math.nan) if "momentum" in numbers else None  # overwritten
    for step in range(1, 11):
        theirs.grad = random(1025, seed=step)
        optimizer.step()
        update = SGDUpdate(lr=0.1, step=step, **numbers)
        gradient = random(1025, seed=step)
        kernel.sgd(update, weight=weight, gradient=gradient, momentum=momentum, num_threads=2)
    torch.testing.assert_close(master_of(kernel, weight), theirs.detach(), rtol=1e-6, atol=1e-5)


def test_lion_is_its_formula(kernel: HostKernel) -> None:
    expected = random(1025, seed=0)
    weight = make_weight(kernel, "split", expected)
    momentum, expected_momentum = torch.zeros(1025), torch.zeros(1025)
    for step in range(1, 6):
        gradient = random(1025, seed=step)
        gradient[::3] = 0
        direction = torch.tensor(0.9) * expected_momentum + torch.tensor(1 - 0.9) * gradient
        expected = expected * torch.tensor(1 - 0.01 * 0.1) - torch.tensor(0.01) * direction.sign()
        expected_momentum = torch.tensor(0.99) * expected_momentum + torch.tensor(0.01) * gradient
        update = LionUpdate(lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
        kernel.lion(update, weight=weight, gradient=gradient, momentum=momentum, num_threads=1)
    torch.testing.assert_close(master_of(kernel, weight), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(momentum, expected_momentum, rtol=1e-5, atol=1e-7)


# Updates of ranges


def blocks_of(numel: int) -> Tensor:
    """About half of the blocks: runs longer than a chunk, single ones, and the last."""
    blocks = torch.arange(eight_bit.num_blocks(numel))
    generator = torch.Generator().manual_seed(0)
    chosen = torch.where(
        blocks < 300, blocks > 3, torch.rand(len(blocks), generator=generator) < 0.4
    )
    chosen[-1:] = True
    return chosen


def ranges_of(blocks: Tensor, numel: int) -> Tensor:
    """The ranges of some blocks, in no order; the last block of a run has a range of its own."""
    edges = torch.cat([torch.zeros(1), blocks.float(), torch.zeros(1)]).diff()
    begins, ends = (edges > 0).nonzero(), (edges < 0).nonzero()
    last = ends - 1
    ranges = torch.cat([torch.cat([begins, last], 1), torch.cat([last, ends], 1)])
    order = torch.randperm(len(ranges), generator=torch.Generator().manual_seed(1))
    return (ranges[order] * eight_bit.BLOCK_SIZE).clamp(max=numel)


def chosen_of(whole: list[Tensor], before: list[Tensor], blocks: Tensor) -> list[Tensor]:
    """What an update of some blocks gives: those of the whole update, all others as before."""
    numel = max(len(tensor) for tensor in before)
    elements = blocks.repeat_interleave(eight_bit.BLOCK_SIZE)[:numel]
    return [
        torch.where(elements if len(old) == numel else blocks, new, old)
        for new, old in zip(whole, before, strict=True)
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("form", FORMS)
def test_ranges_get_the_bits_of_the_whole_update(
    kernel: HostKernel, optimizer: str, form: str
) -> None:
    numel = 100_003
    blocks = blocks_of(numel)
    chosen, others = ranges_of(blocks, numel), ranges_of(~blocks, numel)
    for dtype in GRADIENT_DTYPES:
        before = steps_of(optimizer, parts=())(kernel, form, dtype, numel, 1)
        whole = steps_of(optimizer)(kernel, form, dtype, numel, 1)
        expected = chosen_of(whole, before, blocks)
        for level, num_threads in itertools.product(kernel.available_levels, (1, 2)):
            kernel.set_level(level)
            only_chosen = steps_of(optimizer, parts=(chosen,))
            assert_same_bits(only_chosen(kernel, form, dtype, numel, num_threads), expected)
        in_two_parts = steps_of(optimizer, parts=(chosen, others))
        assert_same_bits(in_two_parts(kernel, form, dtype, numel, 2), whole)


@pytest.mark.parametrize("numel", [0, 1, 128, 130, 40_000])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_range_changes_nothing_and_one_range_may_be_everything(
    kernel: HostKernel, optimizer: str, numel: int
) -> None:
    def steps(*parts: Tensor | None) -> list[Tensor]:
        return steps_of(optimizer, parts=parts)(kernel, "split", torch.bfloat16, numel, 2)

    nothing = torch.empty(0, 2, dtype=torch.int64)
    assert_same_bits(steps(nothing, torch.tensor([[0, 0], [numel, numel]])), steps())
    assert_same_bits(steps(torch.tensor([[0, numel]])), steps(None))


def update_of(
    optimizer: HostOptimizer, dtype: torch.dtype, *, step: int, ranges: Tensor | None
) -> Update:
    """An update of 1,925 elements whose numbers are always the same."""
    numel = 1925
    settings = optimizer.defaults
    state = {
        name: random(eight_bit.num_blocks(numel) if kind.per_block else numel, seed=3)
        .abs()
        .mul(10)
        .clamp(max=100)
        .to(kind.dtype)
        for name, kind in optimizer.state_kinds(settings).items()
    }
    companions = {torch.bfloat16: torch.int16, torch.float16: torch.float32}
    master = random(numel, seed=0)
    return Update(
        name="table",
        shape=(275, 7),
        weight=master.to(dtype),
        companion=master.to(companions[dtype]) if dtype in companions else None,
        gradient=random(numel, seed=1).to(dtype),
        state=state,
        position=640,
        step=step,
        settings=settings,
        factor=0.7,
        seed=3,
        ranges=ranges,
    )


@pytest.mark.parametrize("path", ["readable", "native"])
@pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
@pytest.mark.parametrize(
    "optimizer",
    [
        l2l.AdamW(),
        l2l.AdamW(moments="8bit"),
        l2l.SGD(weight_decay=0.1),
        l2l.SGD(momentum=0.9, nesterov=True),
        l2l.Lion(weight_decay=0.1),
    ],
    ids=["adamw", "8-bit adamw", "sgd", "momentum sgd", "lion"],
)
def test_optimizers_honour_ranges(
    kernel: HostKernel, optimizer: HostOptimizer, dtype: torch.dtype, path: str
) -> None:
    numel = 1925
    blocks = torch.arange(eight_bit.num_blocks(numel)) % 3 != 1

    def updated(step: int, *parts: Tensor | None) -> list[Tensor]:
        update = update_of(optimizer, dtype, step=step, ranges=None)
        for ranges in parts:
            part = dataclasses.replace(update, ranges=ranges)
            if path == "native":
                optimizer.native(kernel, part, num_threads=2)
            else:
                optimizer.readable(part)
        return tensors_of(update.weight, update.companion, *update.state.values())

    for step in (1, 2):
        chosen, others = ranges_of(blocks, numel), ranges_of(~blocks, numel)
        whole = updated(step, None)
        assert_same_bits(updated(step, chosen), chosen_of(whole, updated(step), blocks))
        assert_same_bits(updated(step, others, chosen), whole)


@pytest.mark.parametrize("path", ["readable", "native"])
def test_recorded_gradients_are_whole_whatever_the_ranges(kernel: HostKernel, path: str) -> None:
    optimizer = l2l.RecordGradients()
    ranges = torch.tensor([[128, 256]])
    update = update_of(optimizer, torch.float32, step=1, ranges=ranges)
    before = update.weight.clone()
    for part in (update, dataclasses.replace(update, ranges=ranges + 128)):
        if path == "native":
            optimizer.native(kernel, part, num_threads=1)
        else:
            optimizer.readable(part)
        expected = update.gradient.view(275, 7) * 0.7
        assert torch.equal(optimizer.gradients["table"], expected)
    assert torch.equal(update.weight, before)


Shapes = dict[str, tuple[int, ...]]


def order_of(shapes: Shapes) -> UpdateOrder:
    return UpdateOrder(
        settings=dict.fromkeys(shapes, l2l.AdamW().defaults), received=frozenset(shapes)
    )


def make_server(kernel: HostKernel | None, shapes: Shapes) -> ParameterServer:
    """With one unit, "outer", and 8-bit moments."""
    optimizer = l2l.AdamW(moments="8bit")
    server = ParameterServer(
        arena=Arena(open_device("cpu")), optimizer=optimizer, kernel=kernel, seed=5
    )
    parameters = {
        name: nn.Parameter(random(math.prod(shape), seed=0).view(shape))
        for name, shape in shapes.items()
    }
    form = form_of(
        "outer",
        parameters=parameters,
        buffers={},
        settings=order_of(shapes).settings,
        precision=PrecisionPolicy(link=torch.bfloat16),
        optimizer=optimizer,
    )
    server.add(form, parameters=parameters, buffers={})
    return server


def staged_gradient(server: ParameterServer, *, seed: int) -> Tensor:
    nbytes = server.units["outer"].form.staging_layout.nbytes
    return random(nbytes // 2, seed=seed).bfloat16().view(torch.uint8)


def tensors_of_unit(server: ParameterServer, *, steps: int) -> list[Tensor]:
    unit = server.units["outer"]
    assert set(unit.steps.values()) == {steps}
    return tensors_of(unit.weights, unit.companion, *unit.state.values())


@pytest.mark.parametrize("path", ["readable", "native"])
def test_the_parameter_server_updates_in_parts_of_one_step(kernel: HostKernel, path: str) -> None:
    shapes: Shapes = {"table": (50, 41), "norm": (41,)}
    order = order_of(shapes)
    blocks = torch.arange(eight_bit.num_blocks(50 * 41)) % 2 == 0
    chosen, others = ranges_of(blocks, 50 * 41), ranges_of(~blocks, 50 * 41)

    def trained(*, in_parts: bool) -> list[Tensor]:
        server = make_server(kernel if path == "native" else None, shapes)
        for step in (1, 2):
            staged = staged_gradient(server, seed=step)
            if in_parts:
                server.update("outer", staged, order, {"table": chosen})
                only_table = dataclasses.replace(order, received=frozenset({"table"}))
                server.update("outer", staged, only_table, {"table": others}, count_step=False)
            else:
                server.update("outer", staged, order)
        return tensors_of_unit(server, steps=2)

    assert_same_bits(trained(in_parts=True), trained(in_parts=False))


def left_update(server: ParameterServer, order: UpdateOrder | None, *, seed: int) -> WaitingUpdate:
    """Of a step that is skipped, if there is no order."""
    return WaitingUpdate(
        unit="outer",
        order=lambda: order,
        drained=mock.Mock(spec=Event),
        gradient=staged_gradient(server, seed=seed),
    )


def refreshing(*rows: int, halves: bool) -> Callable[[ParameterServer, WaitingUpdate], None]:
    return lambda server, waiting: server.refresh(
        waiting, server.table_rows(waiting.unit, torch.tensor(rows)), halves=halves
    )


@pytest.mark.parametrize("path", ["readable", "native"])
@pytest.mark.parametrize("width", [128, 41], ids=["rows apart", "all rows at once"])
@pytest.mark.parametrize(
    "parts",
    [
        [ParameterServer.advance],
        [ParameterServer.advance, ParameterServer.advance],  # a step failed between them
        [ParameterServer.advance, refreshing(3, 8, halves=True)],
        [refreshing(3, halves=True), ParameterServer.advance, refreshing(3, 8, halves=True)],
        [refreshing(3, 8, 9, halves=True)],
        [refreshing(3, 8, 9, halves=True), ParameterServer.advance],
        [refreshing(8, 9, halves=True), refreshing(0, 3, halves=True), ParameterServer.advance],
        [refreshing(8, 9, halves=True), refreshing(0, 3, halves=False)],
        [refreshing(8, 9, halves=True), refreshing(0, 3, halves=False), ParameterServer.advance],
        [refreshing(8, 9, halves=False), refreshing(0, 3, halves=True)],
        [refreshing(8, 9, halves=False), refreshing(0, 3, halves=True), ParameterServer.advance],
    ],
    ids=[
        "all",
        "all twice",
        "all, rows",
        "rows and all, rows",
        "rows",
        "rows and all",
        "rows, rows and all",
        "rows, whole rows",
        "rows, whole rows and all",
        "whole rows, rows",
        "whole rows, rows and all",
    ],
)
def test_what_is_left_of_an_update_is_done_last(
    kernel: HostKernel,
    parts: Sequence[Callable[[ParameterServer, WaitingUpdate], None]],
    width: int,
    path: str,
) -> None:
    """Of weights or rows that were done before, only what they lack."""
    shapes: Shapes = {"table": (12, width)}

    def trained(*before: Callable[[ParameterServer, WaitingUpdate], None]) -> list[Tensor]:
        server = make_server(kernel if path == "native" else None, shapes)
        for step in (1, 2, 3):
            waiting = left_update(server, None if step == 2 else order_of(shapes), seed=step)
            for part in (*before, ParameterServer.perform):
                part(server, waiting)
        return tensors_of_unit(server, steps=2)

    assert_same_bits(trained(*parts), trained())


def test_weights_are_those_of_the_whole_update_once_it_has_advanced(kernel: HostKernel) -> None:
    shapes: Shapes = {"table": (12, 128)}
    order, whole, halved = (
        order_of(shapes),
        make_server(kernel, shapes),
        make_server(kernel, shapes),
    )
    for server in (whole, halved):
        server.update("outer", staged_gradient(server, seed=1), order)
    before = [tensor.clone() for tensor in halved.units["outer"].state.values()]
    waiting = left_update(halved, order, seed=2)
    whole.update("outer", staged_gradient(whole, seed=2), order)
    for part in (refreshing(3, 8, halves=True), ParameterServer.advance):
        part(halved, waiting)
    assert torch.equal(halved.weight("table"), whole.weight("table"))
    assert_same_bits(tensors_of(*halved.units["outer"].state.values()), tensors_of(*before))


def test_ranges_that_do_not_fit_are_refused(kernel: HostKernel) -> None:
    def refused(ranges: Tensor, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            kernel.sgd(
                SGDUpdate(lr=0.1, step=1),
                weight=Float32Weight(weight=torch.ones(300)),
                gradient=torch.ones(300),
                ranges=ranges,
                num_threads=1,
            )

    refused(torch.tensor([0, 128]), r"ranges must have shape \[n, 2\], found \(2,\)")
    refused(torch.tensor([[0, 128]]).int(), r"ranges must be torch.int64")
    refused(torch.tensor([[0, 128], [64, 128]]), r"whole blocks of 128 .* found \[64, 128\]")
    refused(torch.tensor([[0, 200]]), r"within 300 elements, found \[0, 200\]")
    refused(torch.tensor([[0, 384]]), r"found \[0, 384\]")
    refused(torch.tensor([[-128, 128]]), r"found \[-128, 128\]")
    refused(torch.tensor([[128, 0]]), r"found \[128, 0\]")
    refused(torch.tensor([[128, 300], [0, 256]]), r"overlap, found \[\[0, 256\], \[128, 300\]\]")


# Updates in halves


@pytest.mark.parametrize("optimizer", WITH_HALVES)
@pytest.mark.parametrize("form", FORMS)
def test_both_halves_give_the_bits_of_the_whole_update(
    kernel: HostKernel, optimizer: str, form: str
) -> None:
    for dtype, numel in itertools.product(GRADIENT_DTYPES, SIZES):
        whole = steps_of(optimizer)(kernel, form, dtype, numel, 1)
        blocks = blocks_of(numel)
        ranges = (ranges_of(blocks, numel), ranges_of(~blocks, numel))
        for level, parts in itertools.product(kernel.available_levels, ((None,), ranges)):
            kernel.set_level(level)
            halved = steps_of(optimizer, parts=parts, halves=("weights", "moments"))
            assert_same_bits(halved(kernel, form, dtype, numel, 2), whole)


@pytest.mark.parametrize("optimizer", WITH_HALVES)
@pytest.mark.parametrize("form", FORMS)
def test_a_half_leaves_the_other_alone(kernel: HostKernel, optimizer: str, form: str) -> None:
    numel = 1025
    num_weights = len(tensors_of(make_weight(kernel, form, torch.ones(numel))))

    def steps(*halves: Half | None) -> tuple[list[Tensor], list[Tensor]]:
        made = steps_of(optimizer, halves=halves)(kernel, form, torch.bfloat16, numel, 1)
        return made[:num_weights], made[num_weights:]

    weights_before, moments_before = steps()
    _, moments = steps(None)
    for level in kernel.available_levels:
        kernel.set_level(level)
        moved, untouched = steps("weights")
        assert_same_bits(untouched, moments_before)
        assert not any(map(torch.equal, moved, weights_before))
        untouched, moved = steps("moments")
        assert_same_bits(untouched, weights_before)
        assert_same_bits(moved, moments)  # which do not depend on weights


@pytest.mark.parametrize("path", ["readable", "native"])
@pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_optimizers_honour_halves(
    kernel: HostKernel, moments: str, dtype: torch.dtype, path: str
) -> None:
    optimizer = l2l.AdamW(moments=moments)
    assert optimizer.has_halves
    blocks = torch.arange(eight_bit.num_blocks(1925)) % 3 != 1
    chosen, others = ranges_of(blocks, 1925), ranges_of(~blocks, 1925)

    def updated(*parts: tuple[Half | None, Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        update = update_of(optimizer, dtype, step=3, ranges=None)
        for half, ranges in parts:
            part = dataclasses.replace(update, half=half, ranges=ranges)
            if path == "native":
                optimizer.native(kernel, part, num_threads=2)
            else:
                optimizer.readable(part)
        return tensors_of(update.weight, update.companion), tensors_of(*update.state.values())

    weights, state = updated((None, None))
    weights_before, state_before = updated()
    for order in (("weights", "moments"), (None,)):  # of the chosen rows; the others in halves
        parts = [(half, chosen) for half in order]
        found = updated(*parts, ("weights", others), ("moments", others))
        assert_same_bits([*found[0], *found[1]], [*weights, *state])
    found = updated(("weights", None))
    assert_same_bits([*found[0], *found[1]], [*weights, *state_before])
    found = updated(("moments", None))
    assert_same_bits([*found[0], *found[1]], [*weights_before, *state])
    found = updated(("weights", chosen), ("moments", others))
    assert_same_bits(found[0], chosen_of(weights, weights_before, blocks))
    assert_same_bits(found[1], chosen_of(state, state_before, ~blocks))


@pytest.mark.parametrize(
    "optimizer", [l2l.SGD(momentum=0.9), l2l.Lion(), l2l.RecordGradients()], ids=repr
)
def test_optimizers_of_one_pass_have_no_halves(optimizer: HostOptimizer) -> None:
    assert not optimizer.has_halves


# Sizes of changes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("optimizer", "halves"),
    [
        *itertools.product(OPTIMIZERS, [(None,)]),
        *itertools.product(WITH_HALVES, [("weights", "moments")]),
    ],
)
def test_an_update_finds_the_size_of_its_change(
    kernel: HostKernel, optimizer: str, form: str, halves: Sequence[Half | None]
) -> None:
    """In the same bits at any level and for any threads; and measured or not, it changes alike."""
    for dtype, numel in itertools.product(GRADIENT_DTYPES, SIZES):
        whole = steps_of(optimizer)(kernel, form, dtype, numel, 1)
        blocks = blocks_of(numel)
        for parts in ((None,), (ranges_of(blocks, numel), ranges_of(~blocks, numel))):
            found = []
            for level, num_threads in itertools.product(kernel.available_levels, (1, 2, 5)):
                kernel.set_level(level)
                sizes: list[tuple[float, float]] = []
                steps = steps_of(optimizer, parts=parts, halves=halves, sizes=sizes)
                assert_same_bits(steps(kernel, form, dtype, numel, num_threads), whole)
                found.append([size for size, _ in sizes])
            assert all(other == found[0] for other in found)
            for number, (size, expected) in enumerate(sizes):
                half = halves[number // len(parts) % len(halves)]
                assert size == pytest.approx(expected, rel=1e-6, abs=0)
                assert half != "moments" or size == 0.0


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_the_size_of_many_changes_is_as_exact_as_that_of_few(
    kernel: HostKernel, scale: float
) -> None:
    weight, gradient = torch.zeros(3_000_001), random(3_000_001, seed=1, scale=scale)
    with kernel.preparing() as prepared:
        _sgd(kernel, [weight], [gradient], lr=1.0)
    assert prepared.perform(num_threads=2) == pytest.approx(sum_of_squares(gradient), rel=1e-7)


def test_the_size_of_a_change_that_is_no_number_is_none(kernel: HostKernel) -> None:
    for gradient, expected in ((math.inf, math.inf), (math.nan, math.nan)):
        weight, gradients = torch.ones(300), torch.ones(300)
        gradients[200] = gradient
        with kernel.preparing() as prepared:
            _sgd(kernel, [weight], [gradients], lr=1.0)
        assert prepared.perform(num_threads=1) == pytest.approx(expected, nan_ok=True)


def test_several_updates_find_the_size_of_all_their_changes(kernel: HostKernel) -> None:
    weights = [torch.ones(numel) for numel in (300, 70_001)]
    gradients = [torch.full((300,), 2.0), torch.full((70_001,), 3.0)]
    with kernel.preparing() as prepared:
        _sgd(kernel, weights, gradients, lr=0.5)
    expected = 300 + 70_001 * 1.5**2
    assert prepared.perform(num_threads=2) == pytest.approx(expected, rel=1e-7)
    with kernel.preparing() as nothing:
        pass
    assert nothing.perform(num_threads=2) == 0.0


@pytest.mark.parametrize("path", ["readable", "native"])
def test_the_parameter_server_adds_the_sizes_of_changes(kernel: HostKernel, path: str) -> None:
    shapes: Shapes = {"table": (50, 41), "norm": (41,)}
    blocks = torch.arange(eight_bit.num_blocks(50 * 41)) % 2 == 0
    chosen, others = ranges_of(blocks, 50 * 41), ranges_of(~blocks, 50 * 41)
    server = make_server(kernel if path == "native" else None, shapes)

    def masters() -> Tensor:
        unit = server.units["outer"]
        owned = [(unit.weight_of(name), unit.companion_of(name)) for name in shapes]
        return torch.cat([join_master(*pair).view(-1) for pair in owned])

    for step in (1, 2):
        changes = {"another": 3.0}
        order = dataclasses.replace(order_of(shapes), changes=changes)
        only_table = dataclasses.replace(order, received=frozenset({"table"}))
        staged, before = staged_gradient(server, seed=step), masters()
        server.update("outer", staged, order, {"table": chosen}, half="weights")
        chosen_size = changes["outer"]
        assert chosen_size == pytest.approx(sum_of_squares(masters() - before), rel=1e-6)
        server.update("outer", staged, order, {"table": chosen}, count_step=False, half="moments")
        assert changes["outer"] == chosen_size
        server.update("outer", staged, only_table, {"table": others}, count_step=False)
        size = sum_of_squares(masters() - before)
        assert size > 1.5 * chosen_size > 0
        assert changes == {"another": 3.0, "outer": pytest.approx(size, rel=1e-6)}


@pytest.mark.parametrize("path", ["readable", "native"])
@pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
def test_the_master_of_an_update_is_what_changes(
    kernel: HostKernel, dtype: torch.dtype, path: str
) -> None:
    update = update_of(l2l.SGD(lr=1e-4), dtype, step=1, ranges=None)
    before = update.master()
    gradient = update.gradient.float() * 0.7
    if path == "native":
        l2l.SGD().native(kernel, update, num_threads=1)
    else:
        l2l.SGD().readable(update)
    assert update.master().dtype is torch.float32
    torch.testing.assert_close(update.master(), before - 1e-4 * gradient, rtol=1e-6, atol=1e-9)
    without = dataclasses.replace(update, companion=None)
    assert torch.equal(without.master(), update.weight.float())


# Rows of tables


def repeated_ids(count: int, *, rows: int) -> Tensor:
    """Ids of which few come often (more than half are the last one) and many never."""
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(count, generator=generator).pow(4) * rows).long()
    ids[torch.rand(count, generator=generator) < 0.6] = rows - 1
    return ids


@pytest.mark.parametrize("width", [0, 1, 7, 515])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
)
def test_gather_copies_rows(kernel: HostKernel, dtype: torch.dtype, width: int) -> None:
    table = (random(50 * width, seed=0) * 100).abs().to(dtype).view(50, width)
    for count, num_threads in itertools.product((0, 1, 700), (1, 2)):
        ids = repeated_ids(count, rows=50)
        found = torch.ones(count, width, dtype=dtype)
        kernel.gather(table, ids, found, num_threads=num_threads)
        readable = torch.ones(count, width, dtype=dtype)
        operands.gather(table, ids, readable)
        assert torch.equal(found, table[ids])
        assert torch.equal(readable, table[ids])


def in_native_and_readable(
    kernel: HostKernel, name: str, num_threads: int = 2
) -> list[Callable[..., float | None]]:
    def native(*arguments: Tensor) -> float | None:
        result: float | None = getattr(kernel, name)(*arguments, num_threads=num_threads)
        return result

    return [native, getattr(operands, name)]


@pytest.mark.parametrize("name", ["gather", "add_rows"])
@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
def test_ids_that_are_not_there_are_refused_before_anything_is_written(
    kernel: HostKernel, name: str, wrong: int
) -> None:
    for function in in_native_and_readable(kernel, name):
        table, rows = torch.zeros(50, 7), torch.ones(9, 7)
        ids = torch.arange(9)
        ids[6] = wrong
        with pytest.raises(ValueError, match=rf"ids must lie in \[0, 50\), found {wrong}"):
            function(table, ids, rows)
        assert not table.any()
        assert rows.all()


def test_rows_that_do_not_fit_are_refused(kernel: HostKernel) -> None:
    ids = torch.arange(3)
    for gather in in_native_and_readable(kernel, "gather"):
        with pytest.raises(ValueError, match=r"out must have shape \(3, 7\), found \(3, 8\)"):
            gather(torch.zeros(5, 7), ids, torch.zeros(3, 8))
        with pytest.raises(ValueError, match=r"out must be torch.float32, found torch.float16"):
            gather(torch.zeros(5, 7), ids, torch.zeros(3, 7).half())
        with pytest.raises(ValueError, match=r"ids must be torch.int64"):
            gather(torch.zeros(5, 7), ids.int(), torch.zeros(3, 7))
        with pytest.raises(ValueError, match=r"table must have two dimensions, found \(35,\)"):
            gather(torch.zeros(35), ids, torch.zeros(3, 7))
        with pytest.raises(ValueError, match=r"table must be contiguous"):
            gather(torch.zeros(7, 5).T, ids, torch.zeros(3, 7))
    for add_rows in in_native_and_readable(kernel, "add_rows"):
        with pytest.raises(ValueError, match=r"target must be .* found torch.float16"):
            add_rows(torch.zeros(5, 7).half(), ids, torch.zeros(3, 7))
        with pytest.raises(ValueError, match=r"source must have shape \(3, 7\), found \(4, 7\)"):
            add_rows(torch.zeros(5, 7), ids, torch.zeros(4, 7))
        with pytest.raises(ValueError, match=r"ids must have one dimension, found \(3, 1\)"):
            add_rows(torch.zeros(5, 7), ids[:, None], torch.zeros(3, 7))


@pytest.mark.parametrize("width", [0, 1, 7, 1037])
@pytest.mark.parametrize("source_dtype", GRADIENT_DTYPES)
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
def test_add_rows_is_the_readable_one_bit_by_bit(
    kernel: HostKernel, target_dtype: torch.dtype, source_dtype: torch.dtype, width: int
) -> None:
    table = random(50 * width, seed=0).to(target_dtype).view(50, width)
    table[3] = -0.0
    for count in (0, 1, 300):  # more than 64 source rows for one target row are shared by columns
        ids = repeated_ids(count, rows=50)
        source = random(count * width, seed=1).to(source_dtype).view(count, width)
        expected = table.clone()
        expected_gain = operands.add_rows(expected, ids, source)
        size = expected.float().square().sum() + table.float().square().sum()
        gains = set()
        for level, num_threads in itertools.product(kernel.available_levels, (1, 2)):
            kernel.set_level(level)
            found = table.clone()
            gains.add(kernel.add_rows(found, ids, source, num_threads=num_threads))
            assert_same_bits(tensors_of(found), tensors_of(expected))
        assert len(gains) == 1
        assert gains.pop() == pytest.approx(expected_gain, rel=1e-12, abs=1e-13 * float(size))


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
def test_add_rows_is_its_formula(kernel: HostKernel, target_dtype: torch.dtype) -> None:
    """Sums in the order of the ids, then added to the target, then rounded."""
    target = random(6 * 9, seed=0).to(target_dtype).view(6, 9)
    source = random(40 * 9, seed=1).bfloat16().view(40, 9)
    ids = repeated_ids(40, rows=6)
    ids[ids == 2] = 3
    expected, gain = target.clone(), 0.0
    for row in set(ids.tolist()):
        total = torch.zeros(9)
        for position in (ids == row).nonzero().flatten().tolist():
            total = total + source[position].float()
        after = target[row].float() + total
        gain += float(after.double().square().sum() - target[row].double().square().sum())
        expected[row] = after.to(target_dtype)
    for add_rows in in_native_and_readable(kernel, "add_rows"):
        found = target.clone()
        assert add_rows(found, ids, source) == pytest.approx(gain, rel=1e-12)
        assert_same_bits(tensors_of(found), tensors_of(expected))


def test_added_rows_are_rounded_as_torch_rounds_and_show_what_is_not_finite(
    kernel: HostKernel,
) -> None:
    halves = torch.arange(2**16, dtype=torch.int32) << 16
    ties = halves[:, None] + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    source = ties.int().view(torch.float32)
    expected = source.bfloat16()
    number = ~expected.isnan()
    for level in kernel.available_levels:
        kernel.set_level(level)
        target = torch.zeros(2**16, 6, dtype=torch.bfloat16)
        gain = kernel.add_rows(target, torch.arange(2**16), source, num_threads=2)
        assert math.isnan(gain)
        assert torch.equal(target.isnan(), ~number)
        assert torch.equal(target[number], expected[number])


# Sums, copies, and what is refused


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
def test_sum_of_squares_is_exact_and_the_same_for_every_level_and_thread(
    kernel: HostKernel, dtype: torch.dtype
) -> None:
    for numel in SIZES:
        gradient = random(numel, seed=0).to(dtype)
        sums = set()
        for level in kernel.available_levels:
            kernel.set_level(level)
            sums |= {kernel.sum_of_squares(gradient, num_threads=n) for n in (1, 2, 3)}
        assert len(sums) == 1
        assert sums.pop() == pytest.approx(float(gradient.double().square().sum()), rel=1e-13)


def test_sum_of_squares_does_not_overflow_and_shows_what_is_not_finite(kernel: HostKernel) -> None:
    gradient = torch.full((1000,), 1e38)
    assert kernel.sum_of_squares(gradient, num_threads=1) == pytest.approx(1e79)
    gradient[999] = math.inf
    assert kernel.sum_of_squares(gradient, num_threads=1) == math.inf
    gradient[3] = math.nan
    assert math.isnan(kernel.sum_of_squares(gradient, num_threads=1))


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 1_000_003])
def test_zero_and_copy_change_their_range_and_nothing_else(
    kernel: HostKernel, num_bytes: int
) -> None:
    source = torch.arange(num_bytes + 2).to(torch.uint8)
    memory = torch.full((num_bytes + 2,), 7, dtype=torch.uint8)
    inside = slice(1, num_bytes + 1)
    for num_threads in (1, 2, 5):
        address = memory.data_ptr() + 1
        kernel.copy(
            address,
            source=source.data_ptr() + 1,
            num_bytes=num_bytes,
            num_threads=num_threads,
        )
        assert torch.equal(memory[inside], source[inside])
        memory[inside] = 7
        assert memory[0] == memory[-1] == 7


def test_a_library_that_was_not_built_is_none(tmp_path: Path) -> None:
    assert host_kernel.load(tmp_path / "libhost_kernel.so") is None


def test_tensors_that_do_not_fit_are_refused(kernel: HostKernel) -> None:
    ones = torch.ones(4)
    weight = Float32Weight(weight=torch.ones(4))
    update = SGDUpdate(lr=0.1, step=1)
    with pytest.raises(ValueError, match=r"gradient must have 4 elements, found 3"):
        kernel.sgd(update, weight=weight, gradient=torch.ones(3), num_threads=1)
    with pytest.raises(ValueError, match=r"gradient must be .*float16, found torch.float64"):
        kernel.sgd(update, weight=weight, gradient=ones.double(), num_threads=1)
    with pytest.raises(ValueError, match=r"gradient must be contiguous"):
        kernel.sgd(update, weight=weight, gradient=torch.ones(8)[::2], num_threads=1)
    with pytest.raises(ValueError, match=r"num_threads must be at least 1"):
        kernel.sgd(update, weight=weight, gradient=ones, num_threads=0)
    with pytest.raises(ValueError, match=r"if and only if"):
        kernel.sgd(update, weight=weight, gradient=ones, momentum=ones, num_threads=1)
    with pytest.raises(ValueError, match=r"moments must have 4 elements"):
        kernel.adamw(
            AdamWUpdate(step=1, **NUMBERS),
            weight=weight,
            gradient=ones,
            moments=EightBitMoments.zeros(5),
            num_threads=1,
        )
    with pytest.raises(ValueError, match=r"remainder must be torch.int16"):
        SplitWeight(weight=ones.bfloat16(), remainder=ones.int())
    with pytest.raises(ValueError, match=r"master must be in host memory, found it on meta"):
        Float16Weight(weight=ones.half(), master=torch.ones(4, device="meta"))
    with pytest.raises(ValueError, match=r"position must be a multiple of 128"):
        EightBitMoments.zeros(5, position=7)
    with pytest.raises(ValueError, match=r"step must be 1 at the first update"):
        AdamWUpdate(step=0, **NUMBERS)
    with pytest.raises(ValueError, match=r"level 'avx1024' cannot run here"):
        kernel.set_level("avx1024")


@pytest.mark.parametrize("without", [None, 3])
@pytest.mark.parametrize("readable", [False, True])
def test_rows_added_as_they_become_complete_give_the_same_bits(
    kernel: HostKernel, without: int | None, readable: bool
) -> None:
    """A row is added with the microbatch that has it last, all of its gradients at once."""
    generator = torch.Generator().manual_seed(7)
    sizes = torch.tensor([40, 1, 60, 30])
    ids = torch.randint(0, 25, (int(sizes.sum()),), generator=generator)
    source = torch.randn(len(ids), 16, generator=generator).bfloat16()
    before = torch.randn(25, 16, generator=generator).bfloat16()
    groups = operands.RowGroups.of(ids, without=without)
    parts = groups.by_last_position(sizes.cumsum(0))
    assert [len(part.rows) for part in parts] != [len(groups.rows), 0, 0, 0]
    assert sorted(torch.cat([part.rows for part in parts]).tolist()) == groups.rows.tolist()
    together, apart, gains = before.clone(), before.clone(), []
    gain = kernel.add_groups(together, groups, source, num_threads=2)
    for number, part in enumerate(parts):
        seen = source.clone()
        seen[int(sizes[: number + 1].sum()) :] = torch.nan  # what has not arrived yet
        if readable:
            gains.append(operands.add_rows(apart, part.ids(), seen[part.positions]))
        else:
            gains.append(kernel.add_groups(apart, part, seen, num_threads=2))
    assert torch.equal(apart, together)
    assert sum(gains) == pytest.approx(gain, rel=1e-12)


def _sgd(kernel: HostKernel, weights: list[Tensor], gradients: list[Tensor], lr: float) -> None:
    for weight, gradient in zip(weights, gradients, strict=True):
        kernel.sgd(
            SGDUpdate(lr=lr, step=1),
            weight=Float32Weight(weight=weight),
            gradient=gradient,
            num_threads=1,
        )


def test_prepared_updates_are_performed_when_asked_with_the_numbers_given(
    kernel: HostKernel,
) -> None:
    def tensors() -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        return [torch.randn(numel, generator=generator) for numel in (300, 70_001)]

    gradients = [torch.full((300,), 2.0), torch.full((70_001,), 3.0)]
    expected, found = tensors(), tensors()
    with kernel.preparing() as prepared:
        _sgd(kernel, found, gradients, lr=0.1)
    assert all(map(torch.equal, found, tensors()))
    for lr in (0.1, 0.3):
        _sgd(kernel, expected, gradients, lr=lr)
        prepared.perform([SGDUpdate(lr=lr, step=1)] * 2, num_threads=2)
        assert all(map(torch.equal, found, expected))
    _sgd(kernel, expected, gradients, lr=0.3)
    prepared.perform(num_threads=3)
    assert all(map(torch.equal, found, expected))
    with pytest.raises(ValueError, match="shorter"):
        prepared.perform([SGDUpdate(lr=0.1, step=1)], num_threads=1)


def test_nothing_is_prepared_after_a_failure(kernel: HostKernel) -> None:
    weight = torch.ones(300)
    with contextlib.suppress(KeyError), kernel.preparing():
        raise KeyError
    _sgd(kernel, [weight], [torch.ones(300)], lr=0.5)
    assert torch.equal(weight, torch.full((300,), 0.5))


def test_several_threads_may_call_at_once(kernel: HostKernel) -> None:
    """Each has work for more threads than there are; none may take a piece of another's."""
    numel, num_rounds = 200_003, 20
    weights = [torch.full((numel,), float(caller)) for caller in range(4)]
    gradients = [torch.full((numel,), float(caller + 1)) for caller in range(4)]

    def call(caller: int) -> None:
        for _ in range(num_rounds):
            kernel.sgd(
                SGDUpdate(lr=1.0, step=1),
                weight=Float32Weight(weight=weights[caller]),
                gradient=gradients[caller],
                num_threads=5,
            )

    callers = [threading.Thread(target=call, args=(caller,)) for caller in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    for caller, weight in enumerate(weights):
        assert torch.equal(weight, torch.full((numel,), float(caller - num_rounds * (caller + 1))))


def test_the_kernel_works_after_a_fork(kernel: HostKernel) -> None:
    """Only the thread that forks lives on in the child, whatever the others were doing."""
    weight, gradient = torch.zeros(200_003), torch.ones(200_003)
    _sgd_with_threads(kernel, weight, gradient)
    child = os.fork()
    if child == 0:
        _sgd_with_threads(kernel, weight, gradient)
        os._exit(0 if bool((weight == -2.0).all()) else 1)
    for _ in range(100):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child did not end")
    assert status == 0
    assert torch.equal(weight, torch.full_like(weight, -1.0))


def _sgd_with_threads(kernel: HostKernel, weight: Tensor, gradient: Tensor) -> None:
    kernel.sgd(
        SGDUpdate(lr=1.0, step=1),
        weight=Float32Weight(weight=weight),
        gradient=gradient,
        num_threads=4,
    )


def test_a_library_of_another_version_is_refused(tmp_path: Path):
    source = tmp_path / "other.cpp"
    names = ("level", "highest_level", "set_level", "updates", "sum_of_squares", "split", "join")
    names += ("check_split", "copy", "gather", "add_rows", "job_bytes", "call_bytes")
    source.write_text(
        'extern "C" {\n'
        + "".join(f"long host_kernel_{name}() {{ return 1; }}\n" for name in names)
        + "}\n"
    )
    library = tmp_path / "other.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    with pytest.raises(OSError, match=r"of another version\. Build it again"):
        host_kernel.load(library)
