"""The native host kernel: as exact as torch, the same bits on every level and for any threads."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from l2l.parameter_server import host_kernel
from l2l.parameter_server.host_kernel import (
    AdamWUpdate,
    EightBitMoments,
    Float16Weight,
    Float32Weight,
    HostKernel,
    LionUpdate,
    Moments,
    SGDUpdate,
    SplitWeight,
    Weight,
    correctly_rounded_root,
)

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


Steps = Callable[[HostKernel, str, torch.dtype, int, int], list[Tensor]]


def steps_of(optimizer: str) -> Steps:
    """Three updates of some optimizer: (kernel, form, gradient dtype, numel, threads) -> state."""

    def steps(
        kernel: HostKernel, form: str, dtype: torch.dtype, numel: int, num_threads: int
    ) -> list[Tensor]:
        weight = make_weight(kernel, form, random(numel, seed=0))
        moments = Moments(first=torch.zeros(numel), second=torch.zeros(numel))
        eight_bit = EightBitMoments.zeros(numel)
        momentum = torch.zeros(numel)
        for step in (1, 2, 3):
            gradient = random(numel, seed=step).to(dtype)
            common = {"weight": weight, "gradient": gradient, "num_threads": num_threads}
            adamw = AdamWUpdate(step=step, factor=0.7, **NUMBERS)
            sgd = {"lr": 0.1, "weight_decay": 0.1, "step": step, "factor": 0.7}
            lion = LionUpdate(lr=0.1, betas=(0.9, 0.99), weight_decay=0.1, factor=0.7)
            match optimizer:
                case "adamw":
                    kernel.adamw(adamw, moments=moments, **common)
                case "8-bit adamw":
                    kernel.adamw(adamw, moments=eight_bit, **common)
                case "sgd":
                    kernel.sgd(SGDUpdate(**sgd), **common)
                case "momentum sgd":
                    kernel.sgd(SGDUpdate(momentum=0.9, **sgd), momentum=momentum, **common)
                case "lion":
                    kernel.lion(lion, momentum=momentum, **common)
        return tensors_of(weight, moments, eight_bit, momentum)

    return steps


OPTIMIZERS = ["adamw", "8-bit adamw", "sgd", "momentum sgd", "lion"]


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
    moments.encode(first, root, seed=host_kernel.rounding_seed(3, step=step))
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
        moments.encode(first, root, seed=host_kernel.rounding_seed(0, step=step))
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
    error = host_kernel._rough_root(values).double() / values.double().sqrt() - 1
    assert error.abs().max() < 9e-4  # a quarter of a code in 255, where more than a half would do
    assert host_kernel._rough_root(torch.zeros(1)).item() == 0
    subnormal = torch.tensor([1e-45, 1e-40])
    assert host_kernel._rough_root(subnormal).abs().max() < 1e-18


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
    codes = host_kernel._codes(scaled, random_bits, smallest=torch.tensor(0.0))
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
    assert not host_kernel._codes(zeros, random_bits, smallest=torch.tensor(0.0)).any()


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
