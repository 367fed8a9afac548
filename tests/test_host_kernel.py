"""The native host kernel: as exact as torch, the same bits on every level and for any threads."""

import dataclasses
import itertools
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import l2l
from l2l.device import Event, open_device
from l2l.model import UnitTensors
from l2l.parameter_server import ParameterServer, eight_bit, host_kernel, precision, table_rows
from l2l.parameter_server.forms import form_of
from l2l.parameter_server.host_kernel import HostKernel, PreparedUpdates
from l2l.parameter_server.host_memory import Arena
from l2l.parameter_server.optimizer import Half, HostOptimizer, Update, UpdateOrder
from l2l.parameter_server.precision import PrecisionPolicy, join_master
from l2l.parameter_server.table_rows import RowGroups, TableRows
from l2l.parameter_server.waiting import WaitingUpdate

SIZES = [0, 1, 127, 129, 1025, 100_003]  # around blocks, tiles and chunks, and none a multiple
GRADIENT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMS = {"split": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
NUMBERS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
ADAMW, EIGHT_BIT = l2l.AdamW(**NUMBERS), l2l.AdamW(moments="8bit", **NUMBERS)
SGD = l2l.SGD(lr=1.0)


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


def make_update(
    optimizer: HostOptimizer, master: Tensor, gradient: Tensor, form: str = "float32", **numbers
) -> Update:
    """The first update of a weight, with fresh state."""
    weight, companion = master.to(FORMS[form], copy=True), None
    if form == "split":
        companion = torch.empty_like(master, dtype=torch.int16)
        precision.split_master(master, weight, companion)
    elif form == "float16":
        companion = master.clone()
    numel = master.numel()
    state = {
        name: torch.zeros(eight_bit.num_blocks(numel) if kind.per_block else numel).to(kind.dtype)
        for name, kind in optimizer.state_kinds(optimizer.defaults).items()
    }
    usual = {"position": 0, "step": 1, "settings": optimizer.defaults, "factor": 1.0, "seed": 0}
    return Update(
        name="weight",
        shape=(numel,),
        weight=weight,
        companion=companion,
        gradient=gradient,
        state=state,
        **{**usual, **numbers},
    )


def perform(
    kernel: HostKernel, optimizer: HostOptimizer, update: Update, num_threads: int = 1, **changes
) -> float:
    """An update with another gradient, step or settings."""
    changed = dataclasses.replace(update, **changes)
    return kernel.update(optimizer, changed, num_threads=num_threads)


def master_of(update: Update) -> Tensor:
    return precision.master_of(update.weight, update.companion).clone()


def correctly_rounded_root(values: Tensor) -> Tensor:
    """The float32 square root as the processor computes it; torch's may be off by one bit."""
    return values.double().sqrt().float()


def tensors_of(*tensors: Tensor | None) -> list[Tensor]:
    """Tensors as integers, so that equal means equal bits."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return [one.clone().view(integers[one.element_size()]) for one in tensors if one is not None]


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
        described, start = OPTIMIZERS[optimizer], random(numel, seed=0)
        update = make_update(described, start, start, form, factor=0.7)
        for step, half, ranges in itertools.product((1, 2, 3), halves, parts):
            before = master_of(update)
            found = perform(
                kernel,
                described,
                update,
                num_threads,
                gradient=random(numel, seed=step).to(dtype),
                step=step,
                half=half,
                ranges=ranges,
            )
            if sizes is not None:
                sizes.append((found, sum_of_squares(master_of(update) - before)))
        return tensors_of(*update.changed)

    return steps


OPTIMIZERS = {
    "adamw": ADAMW,
    "8-bit adamw": EIGHT_BIT,
    "sgd": l2l.SGD(lr=0.1, weight_decay=0.1),
    "momentum sgd": l2l.SGD(lr=0.1, weight_decay=0.1, momentum=0.9),
    "lion": l2l.Lion(lr=0.1, weight_decay=0.1),
    "schedule-free": l2l.ScheduleFreeAdamW(lr=0.1, weight_decay=0.1, warmup_steps=2),
}
WITH_HALVES = ["adamw", "8-bit adamw"]


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
        start, gradient = random(1025, seed=0), random(1025, seed=1)
        update = make_update(OPTIMIZERS[optimizer], start, gradient, form)
        perform(kernel, OPTIMIZERS[optimizer], update)
        return master_of(update)

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
    update = make_update(ADAMW, master, master, "split")
    for step in range(1, 6):
        gradient = random(1025, seed=step).bfloat16()
        perform(kernel, ADAMW, update, 2, gradient=gradient, step=step)
        weight_before, first, second = expected
        expected = plain_adamw(weight_before, gradient.float(), first, second, step=step)
    actual = (master_of(update), *update.state.values())
    assert_same_bits(tensors_of(*actual), tensors_of(*expected))


@pytest.mark.parametrize("form", FORMS)
def test_adamw_is_as_near_to_float64_as_torch_is(kernel: HostKernel, form: str) -> None:
    numel = 20_001
    master = random(numel, seed=0)
    theirs = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([theirs], foreach=False, **NUMBERS)
    exact = (master.double(), torch.zeros(numel).double(), torch.zeros(numel).double())
    update = make_update(ADAMW, master, master, form)
    for step in range(1, 31):
        gradient = random(numel, seed=step, scale=10.0 ** (step % 3 - 3))
        theirs.grad = gradient
        optimizer.step()
        exact_weight, first, second = exact
        exact = plain_adamw(exact_weight, gradient.double(), first, second, step=step)
        perform(kernel, ADAMW, update, 2, gradient=gradient, step=step)
    our_error = (master_of(update) - exact[0]).double()
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
        update = make_update(SGD, random(1025, seed=0), given, factor=factor)
        perform(kernel, SGD, update)
        masters.append(master_of(update))
    assert torch.equal(*masters)


def test_float16_gradients_are_read_exactly(kernel: HostKernel) -> None:
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    for level in kernel.available_levels:
        kernel.set_level(level)
        update = make_update(SGD, torch.zeros(2**16), patterns)
        perform(kernel, SGD, update, settings={**SGD.defaults, "lr": -1.0})
        assert torch.equal(update.weight.nan_to_num(nan=7e9), patterns.float().nan_to_num(nan=7e9))


def test_float16_weights_are_rounded_as_torch_rounds(kernel: HostKernel) -> None:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (2**20,), generator=generator).int()
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    ties = halves.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1, 4095, 4096, 4097, 8191])
    subnormals = (torch.arange(-5000, 5000) * 2.0**-26).view(torch.int32)
    master = torch.cat([patterns, ties.int().flatten(), subnormals]).view(torch.float32)
    for level in kernel.available_levels:
        kernel.set_level(level)
        update = make_update(SGD, master, torch.zeros_like(master), "float16")
        update.weight.zero_()
        perform(kernel, SGD, update, 2, settings={**SGD.defaults, "lr": 0.0})
        expected = master.half()
        assert torch.equal(update.weight.isnan(), expected.isnan())
        number = ~expected.isnan()
        same = update.weight.view(torch.int16)[number] == expected.view(torch.int16)[number]
        assert same.all()


def test_moments_below_the_smallest_normal_number_become_zero(kernel: HostKernel) -> None:
    update = make_update(ADAMW, torch.ones(64), torch.zeros(64), step=900)
    update.state["exp_avg"].fill_(1.2e-38)
    update.state["exp_avg_sq"].fill_(1.17e-38)
    perform(kernel, ADAMW, update)
    assert not any(moment.any() for moment in update.state.values())


# The split master


@pytest.mark.parametrize("level", host_kernel.LEVELS)
def test_split_is_a_bijection_on_all_patterns(kernel: HostKernel, level: str) -> None:
    if level not in kernel.available_levels:
        pytest.skip(f"this processor has no {level}")
    kernel.set_level(level)
    assert kernel.check_split_all(num_threads=2) == 0


def test_split_weight_is_the_nearest_bfloat16_and_joins_to_the_master(kernel: HostKernel) -> None:
    master = torch.cat([random(100_003, seed=0), torch.tensor([math.inf, -math.inf, 0.0, -0.0])])
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    remainder = torch.empty_like(master, dtype=torch.int16)
    kernel.split(master, weight, remainder, num_threads=2)
    is_tie = master.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(weight[~is_tie], master.bfloat16()[~is_tie])
    assert_same_bits(tensors_of(join_master(weight, remainder)), tensors_of(master))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("form", FORMS)
def test_nan_stays_nan(kernel: HostKernel, optimizer: str, form: str) -> None:
    # The last is what CUDA computes; a plain split would turn it into minus zero.
    patterns = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -0x400000]).int()
    gradient = torch.ones(300)
    gradient[100:105] = patterns.view(torch.float32)
    update = make_update(OPTIMIZERS[optimizer], torch.ones(300), gradient, form)
    perform(kernel, OPTIMIZERS[optimizer], update)
    if optimizer == "8-bit adamw":
        for name in ("exp_avg_unit", "exp_avg_sq_unit"):
            assert update.state[name].isnan().tolist() == [True, False, False]
    expected = gradient.isnan()
    assert torch.equal(update.weight.isnan(), expected)
    assert torch.equal(master_of(update).isnan(), expected)


# 8-bit moments


def plain_8bit_adamw(weight: Tensor, update: Update) -> Tensor:
    """What the kernel does, as a formula: the moments are updated, the weight is returned."""
    lr, (beta1, beta2), eps, decay = NUMBERS.values()
    step, state, gradient = update.step, update.state, update.gradient
    blend_first = torch.tensor(1 - beta1)
    correction = torch.tensor((1 - beta2**step) ** 0.5)
    kept = {
        **state,
        "exp_avg_unit": state["exp_avg_unit"] * (1 - blend_first),
        "exp_avg_sq_unit": state["exp_avg_sq_unit"] * correctly_rounded_root(torch.tensor(beta2)),
    }
    first, root = eight_bit.decode(kept)
    first = first + gradient * blend_first
    new_root = gradient * correctly_rounded_root(torch.tensor(1 - beta2))
    root = correctly_rounded_root(root * root + new_root * new_root)
    rate = torch.tensor(lr / (1 - beta1**step)) * correction
    seed = eight_bit.rounding_seed(3, step=step)
    eight_bit.encode(state, first, root, position=update.position, seed=seed)
    return weight * torch.tensor(1 - lr * decay) - rate * first / (
        root + torch.tensor(eps) * correction
    )


@pytest.mark.parametrize("numel", SIZES)
def test_8bit_adamw_is_the_formula_bit_by_bit(kernel: HostKernel, numel: int) -> None:
    expected = random(numel, seed=0)
    update, readable = (
        make_update(EIGHT_BIT, expected, expected, position=640, seed=3) for _ in range(2)
    )
    for step in range(1, 6):
        gradient = random(numel, seed=step)
        gradient[256:512] = 0  # blocks that stay empty
        gradient[:100] *= 1e-4
        readable = dataclasses.replace(readable, gradient=gradient, step=step)
        expected = plain_8bit_adamw(expected, readable)
        perform(kernel, EIGHT_BIT, update, 2, gradient=gradient, step=step)
    assert_same_bits(tensors_of(*update.changed), tensors_of(expected, *readable.state.values()))


def test_the_x87_unit_is_left_as_it_was(kernel: HostKernel) -> None:
    """It shares registers with MMX; whoever forgets to empty these leaves NaN to others."""
    for level in kernel.available_levels:
        kernel.set_level(level)
        update = make_update(EIGHT_BIT, torch.ones(1000), torch.ones(1000), seed=3)
        perform(kernel, EIGHT_BIT, update)
        assert float(np.longdouble(2) * np.longdouble(3)) == 6.0


def test_a_buffer_updated_in_pieces_gives_the_bits_of_the_whole(kernel: HostKernel) -> None:
    gradient = random(1000, seed=1)
    whole, pieces = (make_update(EIGHT_BIT, torch.ones(1000), gradient) for _ in range(2))
    perform(kernel, EIGHT_BIT, whole)
    for begin, end in ((0, 384), (384, 1000)):
        piece = pieces.cut(begin, end)
        own = {field.name: getattr(piece, field.name) for field in dataclasses.fields(piece)}
        perform(kernel, EIGHT_BIT, pieces, **own)
    assert_same_bits(tensors_of(*pieces.changed), tensors_of(*whole.changed))


def fresh_moments(numel: int) -> dict[str, Tensor]:
    return make_update(EIGHT_BIT, torch.zeros(numel), torch.zeros(numel)).state


def test_fresh_8bit_moments_decode_to_zero() -> None:
    first, root = eight_bit.decode(fresh_moments(300))
    assert not first.any()
    assert not root.any()


def test_8bit_rounding_is_unbiased() -> None:
    numel = 128 * 8
    first, root = random(numel, seed=0), random(numel, seed=1).abs()
    moments = fresh_moments(numel)
    decoded_first, decoded_root = torch.zeros(numel).double(), torch.zeros(numel).double()
    num_seeds = 400
    for step in range(num_seeds):
        seed = eight_bit.rounding_seed(0, step=step)
        eight_bit.encode(moments, first, root, position=0, seed=seed)
        once_first, once_root = eight_bit.decode(moments)
        decoded_first += once_first / num_seeds
        decoded_root += once_root / num_seeds
    # A code's step at value x is about 2 sqrt(x unit); a mean of 400 has a twentieth of its error.
    first_unit = moments["exp_avg_unit"].repeat_interleave(128)
    root_unit = moments["exp_avg_sq_unit"].repeat_interleave(128)
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
        for seed in range(1, 51):
            update = make_update(EIGHT_BIT, torch.zeros(1280), gradient, seed=seed)
            perform(kernel, EIGHT_BIT, update)
            first, second = update.state["exp_avg"], update.state["exp_avg_sq"]
            others = torch.arange(1280) % 128 != 0
            assert not first[others].any()
            assert (second[others] == 4).all()
            assert (first[::128].int().abs() >= 126).all()
            assert (second[::128] >= 254).all()


def test_a_second_moment_follows_gradients_that_shrink(kernel: HostKernel) -> None:
    """Where rounding to nearest would keep the old one for ever."""
    numel, num_steps = 1280, 6000
    shrinking = torch.arange(numel) % 4 != 0
    update = make_update(EIGHT_BIT, torch.zeros(numel), torch.zeros(numel))
    exact = torch.zeros(numel).double()
    generator = torch.Generator().manual_seed(0)
    for step in range(1, num_steps + 1):
        gradient = torch.randn(numel, generator=generator)
        if step > 1000:
            gradient[shrinking] *= 1 / 30
        exact = 0.999 * exact + 0.001 * gradient.double().square()
        perform(kernel, EIGHT_BIT, update, gradient=gradient, step=step)
    _, root = eight_bit.decode(update.state)
    ratio = root / exact.sqrt()
    assert ratio[shrinking].median() == pytest.approx(1.0, rel=0.05)
    assert ratio[~shrinking].median() == pytest.approx(1.0, rel=0.05)


def test_one_huge_gradient_among_tiny_ones_blows_nothing_up(kernel: HostKernel) -> None:
    """Exact AdamW can move a weight by lr * (1 - beta1) / sqrt(1 - beta2) = 3.2 lr."""
    numel = 128 * 64
    generator = torch.Generator().manual_seed(0)
    for huge, tiny in ((1.0, 1e-3), (1e3, 1e-6), (1e4, 1e-12)):
        optimizer = l2l.AdamW(lr=1.0, eps=0.0, weight_decay=0.0, moments="8bit")
        update = make_update(optimizer, torch.zeros(numel), torch.zeros(numel))
        largest = 0.0
        for step in range(1, 301):
            gradient = torch.randn(numel, generator=generator) * tiny
            if step % 10 == 1 and step < 150:
                gradient[5::128] = huge
            before = update.weight.clone()
            perform(kernel, optimizer, update, 2, gradient=gradient, step=step)
            largest = max(largest, float((update.weight - before).abs().max()))
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

    def train(moments: str) -> float:
        optimizer = l2l.AdamW(betas=(0.9, 0.99), weight_decay=0.0, moments=moments)
        update = make_update(optimizer, start, start, "split")
        choose = torch.Generator().manual_seed(1)
        for step in range(1, 601):
            batch = torch.randint(512, (64,), generator=choose)
            master = master_of(update).requires_grad_()
            loss = loss_of(master, batch)
            (gradient,) = torch.autograd.grad(loss, master)
            settings = {**optimizer.defaults, "lr": 3e-3 * (1 - step / 601)}
            perform(kernel, optimizer, update, gradient=gradient, step=step, settings=settings)
        return float(loss_of(master_of(update), torch.arange(512)))

    def loss_of(master: Tensor, batch: Tensor) -> Tensor:
        first, second, third = (
            part.view(shape) for part, shape in zip(master.split(sizes), shapes, strict=True)
        )
        hidden = ((inputs[batch] @ first).tanh() @ second).tanh()
        return ((hidden @ third - targets[batch]) ** 2).mean()

    exact = train("float32")
    assert exact < 0.1  # it starts above 1
    assert train("8bit") < 1.1 * exact


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
    described = l2l.SGD(lr=0.1, **numbers)
    update = make_update(described, master, master, "split")
    for momentum in update.state.values():
        momentum.fill_(math.nan)  # overwritten
    for step in range(1, 11):
        theirs.grad = random(1025, seed=step)
        optimizer.step()
        perform(kernel, described, update, 2, gradient=random(1025, seed=step), step=step)
    torch.testing.assert_close(master_of(update), theirs.detach(), rtol=1e-6, atol=1e-5)


def test_lion_is_its_formula(kernel: HostKernel) -> None:
    expected = random(1025, seed=0)
    optimizer, expected_momentum = l2l.Lion(lr=0.01, weight_decay=0.1), torch.zeros(1025)
    update = make_update(optimizer, expected, expected, "split")
    for step in range(1, 6):
        gradient = random(1025, seed=step)
        gradient[::3] = 0
        direction = torch.tensor(0.9) * expected_momentum + torch.tensor(1 - 0.9) * gradient
        expected = expected * torch.tensor(1 - 0.01 * 0.1) - torch.tensor(0.01) * direction.sign()
        expected_momentum = torch.tensor(0.99) * expected_momentum + torch.tensor(0.01) * gradient
        perform(kernel, optimizer, update, gradient=gradient, step=step)
    torch.testing.assert_close(master_of(update), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(update.state["exp_avg"], expected_momentum, rtol=1e-5, atol=1e-7)


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
        l2l.ScheduleFreeAdamW(weight_decay=0.1),
    ],
    ids=["adamw", "8-bit adamw", "sgd", "momentum sgd", "lion", "schedule-free"],
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
                kernel.update(optimizer, part, num_threads=2)
            else:
                optimizer.readable(part)
        return tensors_of(update.weight, update.companion, *update.state.values())

    for step in (1, 2):
        chosen, others = ranges_of(blocks, numel), ranges_of(~blocks, numel)
        whole = updated(step, None)
        assert_same_bits(updated(step, chosen), chosen_of(whole, updated(step), blocks))
        assert_same_bits(updated(step, others, chosen), whole)


def test_recorded_gradients_are_whole_whatever_the_ranges() -> None:
    optimizer = l2l.RecordGradients()
    assert optimizer.native_number(optimizer.defaults) is None
    ranges = torch.tensor([[128, 256]])
    update = update_of(optimizer, torch.float32, step=1, ranges=ranges)
    before = update.weight.clone()
    for part in (update, dataclasses.replace(update, ranges=ranges + 128)):
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
        UnitTensors(parameters=parameters, buffers={}),
        settings=order_of(shapes).settings,
        precision=PrecisionPolicy(link=torch.bfloat16),
        optimizer=optimizer,
    )
    server.add(form, UnitTensors(parameters=parameters, buffers={}))
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


Part = Callable[[WaitingUpdate, ParameterServer], None]


def refreshing(*rows: int, halves: bool) -> Part:
    def refresh(waiting: WaitingUpdate, server: ParameterServer) -> None:
        trained = server.units[waiting.unit].form.trained
        waiting.refresh(
            server, TableRows.of(trained, torch.tensor(rows)), halves=halves, refresher=None
        )

    return refresh


@pytest.mark.parametrize("path", ["readable", "native"])
@pytest.mark.parametrize("width", [128, 41], ids=["rows apart", "all rows at once"])
@pytest.mark.parametrize(
    "parts",
    [
        [WaitingUpdate.advance],
        [WaitingUpdate.advance, WaitingUpdate.advance],  # a step failed between them
        [WaitingUpdate.advance, refreshing(3, 8, halves=True)],
        [refreshing(3, halves=True), WaitingUpdate.advance, refreshing(3, 8, halves=True)],
        [refreshing(3, 8, 9, halves=True)],
        [refreshing(3, 8, 9, halves=True), WaitingUpdate.advance],
        [refreshing(8, 9, halves=True), refreshing(0, 3, halves=True), WaitingUpdate.advance],
        [refreshing(8, 9, halves=True), refreshing(0, 3, halves=False)],
        [refreshing(8, 9, halves=True), refreshing(0, 3, halves=False), WaitingUpdate.advance],
        [refreshing(8, 9, halves=False), refreshing(0, 3, halves=True)],
        [refreshing(8, 9, halves=False), refreshing(0, 3, halves=True), WaitingUpdate.advance],
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
    parts: Sequence[Part],
    width: int,
    path: str,
) -> None:
    """Of weights or rows that were done before, only what they lack."""
    shapes: Shapes = {"table": (12, width)}

    def trained(*before: Part) -> list[Tensor]:
        server = make_server(kernel if path == "native" else None, shapes)
        for step in (1, 2, 3):
            waiting = left_update(server, None if step == 2 else order_of(shapes), seed=step)
            for part in (*before, WaitingUpdate.perform):
                part(waiting, server)
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
    for part in (refreshing(3, 8, halves=True), WaitingUpdate.advance):
        part(waiting, halved)
    assert torch.equal(halved.weight("table"), whole.weight("table"))
    assert_same_bits(tensors_of(*halved.units["outer"].state.values()), tensors_of(*before))


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
    num_weights = 1 if form == "float32" else 2

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
                kernel.update(optimizer, part, num_threads=2)
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
            for level, num_threads in itertools.product(kernel.available_levels, (1, 5)):
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
    assert perform(kernel, SGD, make_update(SGD, weight, gradient), 2) == pytest.approx(
        sum_of_squares(gradient), rel=1e-7
    )


def test_the_size_of_a_change_that_is_no_number_is_none(kernel: HostKernel) -> None:
    for gradient, expected in ((math.inf, math.inf), (math.nan, math.nan)):
        gradients = torch.ones(300)
        gradients[200] = gradient
        update = make_update(SGD, torch.ones(300), gradients)
        assert perform(kernel, SGD, update) == pytest.approx(expected, nan_ok=True)


def test_several_updates_find_the_size_of_all_their_changes(kernel: HostKernel) -> None:
    optimizer = l2l.SGD(lr=0.5)
    gradients = [torch.full((300,), 2.0), torch.full((70_001,), 3.0)]
    updates = [make_update(optimizer, torch.ones_like(one), one) for one in gradients]
    expected = 300 + 70_001 * 1.5**2
    numbers = [optimizer.numbers(optimizer.defaults, 1, 1.0, 0)] * 2
    found = PreparedUpdates(kernel, optimizer, updates).perform(
        numbers, ranges=[None] * 2, num_threads=2
    )
    assert found == pytest.approx(expected, rel=1e-7)
    nothing = PreparedUpdates(kernel, optimizer, [])
    assert nothing.perform([], ranges=[], num_threads=2) == 0.0


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
    optimizer = l2l.SGD(lr=1e-4)
    update = update_of(optimizer, dtype, step=1, ranges=None)
    before = master_of(update)
    gradient = update.gradient.float() * 0.7
    if path == "native":
        perform(kernel, optimizer, update)
    else:
        optimizer.readable(update)
    assert master_of(update).dtype is torch.float32
    torch.testing.assert_close(master_of(update), before - 1e-4 * gradient, rtol=1e-6, atol=1e-9)


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
        table_rows.gather(table, ids, readable)
        assert torch.equal(found, table[ids])
        assert torch.equal(readable, table[ids])


def add_rows(kernel: HostKernel, target: Tensor, ids: Tensor, source: Tensor) -> float:
    """As `table_rows.add_rows`, natively."""
    groups = RowGroups.of(ids, without=None)
    return kernel.add_groups(target, groups, source, num_threads=2)


def gathering(kernel: HostKernel) -> list[Callable[[Tensor, Tensor, Tensor], None]]:
    """In both ways."""

    def native(table: Tensor, ids: Tensor, out: Tensor) -> None:
        kernel.gather(table, ids, out, num_threads=2)

    return [native, table_rows.gather]


@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
def test_ids_that_are_not_there_are_refused_before_anything_is_written(
    kernel: HostKernel, wrong: int
) -> None:
    for function in (*gathering(kernel), table_rows.add_rows):
        table, rows = torch.zeros(50, 7), torch.ones(9, 7)
        ids = torch.arange(9)
        ids[6] = wrong
        with pytest.raises(ValueError, match=rf"ids must lie in \[0, 50\), found .*{wrong}"):
            function(table, ids, rows)
        assert not table.any()
        assert rows.all()


def test_rows_that_do_not_fit_are_refused(kernel: HostKernel) -> None:
    ids, table = torch.arange(3), torch.zeros(5, 7)
    for gather in gathering(kernel):
        for wrong in ((table, ids, torch.zeros(3, 8)), (table[0], ids, torch.zeros(3, 7))):
            with pytest.raises(ValueError, match=r"expected a table"):
                gather(*wrong)
    for gather, error in zip(gathering(kernel), (ValueError, RuntimeError), strict=True):
        with pytest.raises(error):
            gather(table, ids, torch.zeros(3, 7).half())
    native = gathering(kernel)[0]
    with pytest.raises(ValueError, match=r"ids must be torch.int64"):
        native(table, ids.int(), torch.zeros(3, 7))
    with pytest.raises(ValueError, match=r"table must be contiguous"):
        native(torch.zeros(7, 5).T, ids, torch.zeros(3, 7))
    with pytest.raises(ValueError, match=r"target must be .* found torch.float16"):
        add_rows(kernel, table.half(), ids, torch.zeros(3, 7))
    with pytest.raises(ValueError, match=r"expected a table"):
        table_rows.add_rows(table, ids[:, None], torch.zeros(3, 7))


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
        expected_gain = table_rows.add_rows(expected, ids, source)
        size = expected.float().square().sum() + table.float().square().sum()
        gains = set()
        for level, num_threads in itertools.product(kernel.available_levels, (1, 2)):
            kernel.set_level(level)
            found = table.clone()
            groups = RowGroups.of(ids, without=None)
            gains.add(kernel.add_groups(found, groups, source, num_threads=num_threads))
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
    for add in (partial(add_rows, kernel), table_rows.add_rows):
        found = target.clone()
        assert add(found, ids, source) == pytest.approx(gain, rel=1e-12)
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
        gain = add_rows(kernel, target, torch.arange(2**16), source)
        assert math.isnan(gain)
        assert torch.equal(target.isnan(), ~number)
        assert torch.equal(target[number], expected[number])


# Copies, and what is refused


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 1_000_003])
def test_copies_change_their_range_and_nothing_else(kernel: HostKernel, num_bytes: int) -> None:
    source = torch.arange(num_bytes + 2).to(torch.uint8)
    memory = torch.full((num_bytes + 2,), 7, dtype=torch.uint8)
    inside = slice(1, num_bytes + 1)
    for num_threads in (1, 2, 5):
        kernel.copy(memory[inside], source[inside], num_threads=num_threads)
        assert torch.equal(memory[inside], source[inside])
        memory[inside] = 7
        assert memory[0] == memory[-1] == 7


def test_a_library_that_was_not_built_is_none(tmp_path: Path) -> None:
    assert host_kernel.load(tmp_path / "libhost_kernel.so") is None


def test_tensors_that_do_not_fit_are_refused(kernel: HostKernel) -> None:
    ones = torch.ones(4)
    update = make_update(SGD, ones, ones)
    with pytest.raises(ValueError, match=r"gradient must have the shape \(4,\), found \(3,\)"):
        perform(kernel, SGD, update, gradient=torch.ones(3))
    with pytest.raises(ValueError, match=r"gradient must be .*float16, found torch.float64"):
        perform(kernel, SGD, update, gradient=ones.double())
    with pytest.raises(ValueError, match=r"gradient must be contiguous"):
        perform(kernel, SGD, update, gradient=torch.ones(8)[::2])
    with pytest.raises(ValueError, match=r"num_threads must be at least 1"):
        perform(kernel, SGD, update, 0)
    adamw = make_update(ADAMW, ones, ones)
    with pytest.raises(ValueError, match=r"exp_avg must have the shape \(4,\)"):
        perform(kernel, ADAMW, adamw, state=fresh_moments(5))
    with pytest.raises(ValueError, match=r"exp_avg must be torch.float32, found torch.int8"):
        perform(kernel, ADAMW, adamw, state=fresh_moments(4))
    with pytest.raises(ValueError, match=r"cannot have a companion of torch.int32"):
        perform(kernel, SGD, update, weight=ones.bfloat16(), companion=ones.int())
    with pytest.raises(ValueError, match=r"companion must be in host memory, found it on meta"):
        perform(kernel, SGD, update, weight=ones.half(), companion=torch.ones(4, device="meta"))
    with pytest.raises(ValueError, match=r"position must be a multiple of 128"):
        perform(kernel, SGD, update, position=7)
    with pytest.raises(ValueError, match=r"step must be 1 at the first update"):
        perform(kernel, SGD, update, step=0)
    with pytest.raises(AssertionError, match=r"RecordGradients is not in the native kernel"):
        perform(kernel, l2l.RecordGradients(), update)
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
    groups = RowGroups.of(ids, without=without)
    parts = groups.by_last_position(sizes.cumsum(0))
    assert [len(part.rows) for part in parts] != [len(groups.rows), 0, 0, 0]
    assert sorted(torch.cat([part.rows for part in parts]).tolist()) == groups.rows.tolist()
    together, apart, gains = before.clone(), before.clone(), []
    gain = kernel.add_groups(together, groups, source, num_threads=2)
    for number, part in enumerate(parts):
        seen = source.clone()
        seen[int(sizes[: number + 1].sum()) :] = torch.nan  # what has not arrived yet
        if readable:
            gains.append(table_rows.add_rows(apart, part.ids(), seen[part.positions]))
        else:
            gains.append(kernel.add_groups(apart, part, seen, num_threads=2))
    assert torch.equal(apart, together)
    assert sum(gains) == pytest.approx(gain, rel=1e-12)


def test_prepared_updates_are_performed_when_asked_with_the_numbers_given(
    kernel: HostKernel,
) -> None:
    gradients = [torch.full((300,), 2.0), torch.full((70_001,), 3.0)]

    def updates() -> list[Update]:
        generator = torch.Generator().manual_seed(3)
        masters = [torch.randn(one.numel(), generator=generator) for one in gradients]
        return [make_update(SGD, *pair) for pair in zip(masters, gradients, strict=True)]

    def weights(updates: list[Update]) -> list[Tensor]:
        return [update.weight for update in updates]

    expected, found = updates(), updates()
    prepared = PreparedUpdates(kernel, SGD, found)
    assert all(map(torch.equal, weights(found), weights(updates())))
    for lr in (0.1, 0.3):
        settings = {**SGD.defaults, "lr": lr}
        for update in expected:
            perform(kernel, SGD, update, settings=settings)
        numbers = SGD.numbers(settings, 1, 1.0, 0)
        prepared.perform([numbers] * 2, ranges=[None] * 2, num_threads=2)
        assert all(map(torch.equal, weights(found), weights(expected)))
    with pytest.raises(ValueError, match="shorter"):
        prepared.perform([numbers], ranges=[None] * 2, num_threads=1)


def test_several_threads_may_call_at_once(kernel: HostKernel) -> None:
    """Each has work for more threads than there are; none may take a piece of another's."""
    numel, num_rounds = 200_003, 20
    updates = [
        make_update(SGD, torch.full((numel,), float(one)), torch.full((numel,), one + 1.0))
        for one in range(4)
    ]

    def call(caller: int) -> None:
        for _ in range(num_rounds):
            perform(kernel, SGD, updates[caller], 5)

    callers = [threading.Thread(target=call, args=(caller,)) for caller in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    for caller, update in enumerate(updates):
        expected = torch.full((numel,), float(caller - num_rounds * (caller + 1)))
        assert torch.equal(update.weight, expected)


def test_the_kernel_works_after_a_fork(kernel: HostKernel) -> None:
    """Only the thread that forks lives on in the child, whatever the others were doing."""
    update = make_update(SGD, torch.zeros(200_003), torch.ones(200_003))
    perform(kernel, SGD, update, 4)
    child = os.fork()
    if child == 0:
        perform(kernel, SGD, update, 4)
        os._exit(0 if bool((update.weight == -2.0).all()) else 1)
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
    assert torch.equal(update.weight, torch.full_like(update.weight, -1.0))


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
