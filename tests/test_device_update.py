"""Updates on the device: those of the readable optimizers, from numbers that lie there too."""

import dataclasses
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from l2l.parameter_server import device_update
from l2l.parameter_server.adafactor import Adafactor
from l2l.parameter_server.device_update import NUM_NUMBERS
from l2l.parameter_server.eight_bit import encode, encoded, num_blocks, rounding_seed
from l2l.parameter_server.optimizer import NUMBERS, FlatUnit, HostOptimizer, Update
from l2l.parameter_server.optimizers import (
    SGD,
    AdamW,
    Lion,
    RecordGradients,
    ScheduleFreeAdamW,
)
from l2l.parameter_server.precision import join_master, split_master

EIGHT_BIT = AdamW(lr=1e-2, weight_decay=0.1, moments="8bit")
EXACT = {
    "adamw": AdamW(lr=1e-2, weight_decay=0.1),
    "adamw_large_eps": AdamW(lr=1e-2, betas=(0.3, 0.9), eps=1e-2, weight_decay=0.0),
    "sgd": SGD(lr=1e-2),
    "sgd_decay": SGD(lr=1e-2, weight_decay=0.1),
    "momentum": SGD(lr=1e-2, momentum=0.9, dampening=0.2),
    "nesterov": SGD(lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "lion": Lion(lr=1e-3, weight_decay=0.1),
    "schedule-free": ScheduleFreeAdamW(lr=1e-2, weight_decay=0.1, warmup_steps=3),
}
ALL = {**EXACT, "eight_bit": EIGHT_BIT}
FORMS = [torch.float32, torch.bfloat16, torch.float16]
NUMEL, POSITION, SEED = 1000, 128 * 5, 12345

every_exact = pytest.mark.parametrize("optimizer", EXACT.values(), ids=EXACT.keys())
every_optimizer = pytest.mark.parametrize("optimizer", ALL.values(), ids=ALL.keys())
every_form = pytest.mark.parametrize("form", FORMS, ids=["float32", "bfloat16", "float16"])


def random(numel: int, *, seed: int) -> Tensor:
    """Normal numbers whose sizes differ, as those of gradients do."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(numel, generator=generator).exp()
    return torch.randn(numel, generator=generator) * sizes


def make_unit(
    optimizer: HostOptimizer,
    form: torch.dtype,
    *,
    numel: int = NUMEL,
    position: int = POSITION,
    gradient: torch.dtype = torch.float32,
    device: str = "cpu",
) -> FlatUnit:
    """A fresh unit, all in views of one buffer, the per-block ones at an odd place."""
    buffer = torch.zeros(20 * numel + 4096, dtype=torch.uint8, device=device)
    end = 0

    def take(length: int, dtype: torch.dtype) -> Tensor:
        nonlocal end
        start = -(-end // 256) * 256 + (4 if length != numel else 0)
        end = start + length * dtype.itemsize
        return buffer[start:end].view(dtype)

    master = random(numel, seed=0)
    weight, companion = take(numel, form), None
    weight.copy_(master)
    if form is torch.bfloat16:
        companion = take(numel, torch.int16)
        split_master(master.to(device), weight, companion)
    elif form is torch.float16:
        companion = take(numel, torch.float32)
        companion.copy_(master)
    return FlatUnit(
        weight=weight,
        companion=companion,
        gradient=torch.zeros(numel, dtype=gradient, device=device),
        state={
            name: take(num_blocks(numel) if kind.per_block else numel, kind.dtype)
            for name, kind in optimizer.state_kinds(optimizer.defaults).items()
        },
        position=position,
    )


def copy_of(unit: FlatUnit) -> FlatUnit:
    return dataclasses.replace(
        unit,
        weight=unit.weight.clone().cpu(),
        companion=None if unit.companion is None else unit.companion.clone().cpu(),
        gradient=unit.gradient.clone().cpu(),
        state={name: tensor.clone().cpu() for name, tensor in unit.state.items()},
    )


def tensors_of(unit: FlatUnit) -> dict[str, Tensor]:
    """All that an update writes, as integers, so that equal means equal bits."""
    written = {"weight": unit.weight, "companion": unit.companion, **unit.state}
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return {
        name: tensor.clone().cpu().view(integers[tensor.element_size()])
        for name, tensor in written.items()
        if tensor is not None
    }


def assert_same_bits(found: FlatUnit, expected: FlatUnit) -> None:
    for name, tensor in tensors_of(expected).items():
        assert torch.equal(tensors_of(found)[name], tensor), name


def master_of(unit: FlatUnit) -> Tensor:
    if unit.companion is None:
        return unit.weight.cpu()
    if unit.weight.dtype is torch.bfloat16:
        return join_master(unit.weight.cpu(), unit.companion.cpu())
    return unit.companion.cpu()


def plan_of(step: int, optimizer: HostOptimizer) -> dict:
    """The settings of a step: a schedule that moves, a factor that clips now and then."""
    settings = {**optimizer.defaults, "lr": optimizer.defaults["lr"] * (1 + step) / 11}
    return {"settings": settings, "step": step, "factor": 1.0 if step % 3 else 0.37, "seed": SEED}


def step_on_device(
    optimizer: HostOptimizer, unit: FlatUnit, step: int, *, apply: bool = True, **options
) -> None:
    given = device_update.numbers(optimizer, apply=apply, **plan_of(step, optimizer))
    on_device = torch.tensor(given).to(unit.weight.device)
    device_update.update(optimizer, unit, on_device, **{"compiled": False, **options})


def step_readably(optimizer: HostOptimizer, unit: FlatUnit, step: int) -> None:
    optimizer.readable(
        Update(
            name="weight",
            shape=tuple(unit.weight.shape),
            weight=unit.weight,
            companion=unit.companion,
            gradient=unit.gradient,
            state=unit.state,
            position=unit.position,
            **plan_of(step, optimizer),
        )
    )


def assert_close(found: Tensor, expected: Tensor, *, relative: float = 1e-6) -> None:
    difference = float((found.cpu().double() - expected.double()).abs().max())
    assert difference <= relative * float(expected.abs().max())


def check_twenty_steps(
    optimizer: HostOptimizer, unit: FlatUnit, *, compiled: bool, relative: float = 1e-6
) -> None:
    expected = copy_of(unit)
    for step in range(1, 21):
        gradient = random(unit.weight.numel(), seed=step)
        unit.gradient.copy_(gradient)
        expected.gradient.copy_(gradient)
        step_on_device(optimizer, unit, step, compiled=compiled)
        step_readably(optimizer, expected, step)
    if optimizer is EIGHT_BIT:
        assert_moments_within_one_code(unit, expected)
        assert_close(master_of(unit), master_of(expected), relative=1e-3)
    else:
        assert_close(master_of(unit), master_of(expected), relative=relative)
        for name, tensor in expected.state.items():
            assert_close(unit.state[name], tensor, relative=relative)
    if unit.weight.dtype is torch.float16:
        assert torch.equal(unit.weight, unit.companion.half())


def assert_moments_within_one_code(found: FlatUnit, expected: FlatUnit) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        code, expected_code = found.state[name].cpu().int(), expected.state[name].int()
        assert int((code - expected_code).abs().max()) <= 1
        assert float((code != expected_code).float().mean()) < 1e-2
        unit, expected_unit = found.state[f"{name}_unit"].cpu(), expected.state[f"{name}_unit"]
        assert ((unit - expected_unit).abs() <= 2e-2 * expected_unit).all()


@pytest.mark.parametrize("gradient", FORMS, ids=["float32", "bfloat16", "float16"])
@every_form
@every_optimizer
def test_twenty_steps_are_those_of_the_readable_version(
    optimizer: HostOptimizer, form: torch.dtype, gradient: torch.dtype
):
    check_twenty_steps(optimizer, make_unit(optimizer, form, gradient=gradient), compiled=False)


@every_exact
def test_errors_are_no_larger_than_those_of_the_readable_version(optimizer: HostOptimizer):
    unit = make_unit(optimizer, torch.float32, numel=20_000)
    readable = copy_of(unit)
    exact = {"weight": unit.weight.double()}
    exact |= {name: tensor.double() for name, tensor in unit.state.items()}
    for step in range(1, 21):
        gradient = random(unit.weight.numel(), seed=step)
        unit.gradient.copy_(gradient)
        readable.gradient.copy_(gradient)
        step_on_device(optimizer, unit, step)
        step_readably(optimizer, readable, step)
        plan = plan_of(step, optimizer)
        fields = {"name": "", "shape": (), "weight": exact["weight"], "companion": None}
        fields |= {"gradient": gradient, "state": exact, "position": 0}
        factored = gradient.double() * plan["factor"]
        optimizer.arithmetic(exact["weight"], factored, Update(**fields, **plan))

    def errors(found: FlatUnit) -> Tensor:
        tensors = {"weight": found.weight, **found.state}
        differences = [tensors[name].double() - exact[name] for name in exact]
        return torch.stack([difference.square().mean().sqrt() for difference in differences])

    assert (errors(unit) <= 2 * errors(readable)).all()


def difficult(numel: int) -> tuple[Tensor, Tensor]:
    """Moments with blocks of all sorts: usual, zero, tiny, huge, infinite, not a number."""
    first, root = random(numel, seed=1), random(numel, seed=2).abs()
    for block, (scale, entry) in enumerate(
        [(0.0, 0.0), (1e-20, 1e-30), (1e-40, 1e-42), (1e30, 3e38), (1, torch.inf), (1, torch.nan)]
    ):
        begin = 128 * (block + 1)
        for values in (first, root):
            values[begin : begin + 128] *= scale
            values[begin + 7] = entry
    return first, root


def check_codes(*, numel: int, position: int, seed: int, device: str) -> None:
    first, root = difficult(numel)
    expected = make_unit(EIGHT_BIT, torch.float32, numel=numel).state
    encode(expected, first, root, position=position, seed=seed)
    whole = numel // 128 * 128
    for start, stop in ((0, whole), (whole, numel)):
        if start == stop:
            continue
        width = min(stop - start, 128)
        found = encoded(
            first[start:stop].view(-1, width).to(device),
            root[start:stop].view(-1, width).to(device),
            torch.full((1, 1), (position + start) // 128, device=device),
            torch.tensor(seed, device=device),
        )
        blocks = slice(start // 128, num_blocks(stop))
        assert torch.equal(found["exp_avg"].flatten().cpu(), expected["exp_avg"][start:stop])
        assert torch.equal(found["exp_avg_sq"].flatten().cpu(), expected["exp_avg_sq"][start:stop])
        for name in ("exp_avg_unit", "exp_avg_sq_unit"):
            units = found[name].flatten().cpu()
            assert torch.allclose(units, expected[name][blocks], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", [0, 1, 0xFFFFFFFF, rounding_seed(SEED, step=77)])
@pytest.mark.parametrize(
    ("numel", "position"), [(1280, 0), (100_003, 128 * 3), (1281, 128 * (2**32 + 5))]
)
def test_codes_are_those_of_the_readable_encoding(numel: int, position: int, seed: int):
    check_codes(numel=numel, position=position, seed=seed, device="cpu")


def check_that_nothing_changes(unit: FlatUnit, optimizer: HostOptimizer, *, compiled: bool) -> None:
    """From random bits and a gradient that is not a number."""
    generator = torch.Generator().manual_seed(3)
    for tensor in (unit.weight, unit.companion, *unit.state.values()):
        if tensor is not None:
            bits = tensor.view(torch.uint8)
            bits.copy_(torch.randint(0, 256, bits.shape, generator=generator, dtype=torch.uint8))
    unit.gradient.fill_(torch.nan)
    before = copy_of(unit)
    step_on_device(optimizer, unit, 1, apply=False, compiled=compiled)
    assert_same_bits(unit, before)


@every_form
@every_optimizer
def test_a_step_that_does_not_count_leaves_every_bit(optimizer: HostOptimizer, form: torch.dtype):
    check_that_nothing_changes(make_unit(optimizer, form), optimizer, compiled=False)


@every_form
@every_optimizer
def test_pieces_give_the_bits_of_the_whole(optimizer: HostOptimizer, form: torch.dtype):
    unit = make_unit(optimizer, form)
    pieces = copy_of(unit)
    for step in range(1, 4):
        for one in (unit, pieces):
            one.gradient.copy_(random(NUMEL, seed=step))
        step_on_device(optimizer, unit, step)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_update, "PIECE", 256)
            step_on_device(optimizer, pieces, step)
    assert_same_bits(pieces, unit)


@every_form
@every_optimizer
@pytest.mark.parametrize("numel", [0, 1, 127, 128, 129])
def test_every_length_is_updated(optimizer: HostOptimizer, form: torch.dtype, numel: int):
    unit = make_unit(optimizer, form, numel=numel)
    expected = copy_of(unit)
    for one in (unit, expected):
        one.gradient.copy_(random(numel, seed=1))
    step_on_device(optimizer, unit, 1)
    step_readably(optimizer, expected, 1)
    if numel:
        assert_close(master_of(unit), master_of(expected))


def check_not_a_number(unit: FlatUnit, optimizer: HostOptimizer, compiled: bool) -> None:
    unit.gradient.copy_(random(NUMEL, seed=1))
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, 0x7FC00000, -1], dtype=torch.int32)
    master = master_of(unit)
    master[:4] = bits.view(torch.float32)
    split_master(master.to(unit.weight.device), unit.weight, unit.companion)
    step_on_device(optimizer, unit, 1, compiled=compiled)
    assert unit.weight[:4].isnan().all()
    assert (master_of(unit)[:4].view(torch.int32) == 0x7FC00000).all()
    assert unit.weight[4:].isfinite().all()


@every_optimizer
def test_what_is_not_a_number_stays_so_on_the_link(optimizer: HostOptimizer):
    check_not_a_number(make_unit(optimizer, torch.bfloat16), optimizer, compiled=False)


def test_a_group_without_momentum_leaves_the_buffer_of_its_neighbour():
    plain, shared = SGD(lr=0.1, weight_decay=0.1), SGD(lr=0.1, momentum=0.9)
    unit, expected = make_unit(shared, torch.float32), make_unit(plain, torch.float32)
    unit.state["momentum_buffer"].fill_(7.0)
    for step in (1, 2):
        for one in (unit, expected):
            one.gradient.copy_(random(NUMEL, seed=step))
            step_on_device(plain, one, step)
    assert torch.equal(unit.weight, expected.weight)
    assert (unit.state["momentum_buffer"] == 7.0).all()


@every_optimizer
def test_numbers_are_exact_in_float32(optimizer: HostOptimizer):
    given = device_update.numbers(
        optimizer, optimizer.defaults, step=123_456, factor=1 / 3, apply=True, seed=2**40 + 99
    )
    assert len(given) == NUM_NUMBERS
    assert torch.tensor(given, dtype=torch.float32).tolist() == given
    named = dict(zip(NUMBERS, given, strict=True))
    assert named["apply"] == 1.0
    if isinstance(optimizer, AdamW):
        seed = (int(named["seed_high"]) << 16) + int(named["seed_low"])
        assert seed == rounding_seed(2**40 + 99, step=123_456)


def test_what_cannot_be_done_is_refused():
    for optimizer in (Adafactor(), RecordGradients()):
        assert not device_update.supports(optimizer)
    assert all(device_update.supports(optimizer) for optimizer in ALL.values())
    recorder = RecordGradients()
    with pytest.raises(ValueError, match="RecordGradients"):
        device_update.numbers(recorder, recorder.defaults, step=1, factor=1.0, apply=True)
    with pytest.raises(ValueError, match="step"):
        device_update.numbers(EIGHT_BIT, EIGHT_BIT.defaults, step=0, factor=1.0, apply=True)
    unit = make_unit(EIGHT_BIT, torch.bfloat16)
    with pytest.raises(NotImplementedError):
        device_update.update(recorder, unit, torch.zeros(NUM_NUMBERS), compiled=False)
    with pytest.raises(ValueError, match="zip"):
        device_update.update(EIGHT_BIT, unit, torch.zeros(3), compiled=False)
    for changes, word in (
        ({"position": 100}, "position"),
        ({"companion": None}, "companion"),
        ({"gradient": torch.zeros(3)}, "gradient"),
        ({"state": {"exp_avg_unit": torch.zeros(3)}}, "exp_avg_unit"),
    ):
        with pytest.raises(ValueError, match=word):
            dataclasses.replace(unit, **changes)


def test_a_failed_compilation_is_one_warning_and_the_eager_update(monkeypatch):
    monkeypatch.setattr(device_update, "_functions", {})

    def compile_nothing(function, **_):
        def fail(*_):
            raise RuntimeError("planted\nand more")

        return fail

    monkeypatch.setattr(torch, "compile", compile_nothing)
    found, expected = (
        [make_unit(optimizer, torch.bfloat16) for optimizer in ALL.values()] for _ in range(2)
    )

    def take_two_steps(units: list[FlatUnit], *, compiled: bool) -> None:
        for optimizer, unit in zip(ALL.values(), units, strict=True):
            step_on_device(optimizer, unit, 1, compiled=compiled)
            step_on_device(optimizer, unit, 2, compiled=compiled)

    with pytest.warns(UserWarning, match="eagerly.*planted and more$") as caught:
        take_two_steps(found, compiled=True)
    assert len(caught) == 1
    take_two_steps(expected, compiled=False)
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)


class Memory(TorchDispatchMode):
    """Counts the bytes of storages made inside and not yet freed."""

    def __init__(self):
        super().__init__()
        self.present = self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self.present += storage.nbytes()
                self.most = max(self.most, self.present)
                weakref.finalize(storage, self.free, storage.nbytes())
        return result

    def free(self, num_bytes: int):
        self.present -= num_bytes


@every_form
@every_optimizer
def test_little_memory_is_taken_between(optimizer: HostOptimizer, form: torch.dtype, monkeypatch):
    """Whatever the size of the unit: it is updated in pieces."""
    monkeypatch.setattr(device_update, "PIECE", 1 << 14)
    unit = make_unit(optimizer, form, numel=1 << 16)
    with Memory() as memory:
        step_on_device(optimizer, unit, 1)
    assert 0 < memory.most <= (56 if optimizer is EIGHT_BIT else 36) * (1 << 14)


def make_cuda_unit(optimizer: HostOptimizer, form: torch.dtype, **options) -> FlatUnit:
    """With the gradients' usual dtype: every combination of dtypes is compiled apart."""
    return make_unit(optimizer, form, gradient=torch.bfloat16, device="cuda", **options)


@pytest.mark.accelerator
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@every_form
@every_optimizer
def test_twenty_steps_on_cuda(optimizer: HostOptimizer, form: torch.dtype, compiled: bool):
    unit = make_cuda_unit(optimizer, form, numel=10_003)
    check_twenty_steps(optimizer, unit, compiled=compiled, relative=3e-6)


@pytest.mark.accelerator
def test_codes_on_cuda_are_those_of_the_readable_encoding():
    check_codes(numel=1_000_003, position=128 * 3, seed=rounding_seed(SEED, step=5), device="cuda")


@pytest.mark.accelerator
@every_form
@every_optimizer
def test_a_compiled_step_that_does_not_count_leaves_every_bit(
    optimizer: HostOptimizer, form: torch.dtype
):
    unit = make_cuda_unit(optimizer, form)
    check_that_nothing_changes(unit, optimizer, compiled=True)


@pytest.mark.accelerator
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@every_optimizer
def test_what_cuda_makes_of_nan_stays_so_on_the_link(optimizer: HostOptimizer, compiled: bool):
    check_not_a_number(make_cuda_unit(optimizer, torch.bfloat16), optimizer, compiled)


@pytest.mark.accelerator
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@every_optimizer
def test_cuda_neither_waits_nor_takes_more_than_the_estimate(
    optimizer: HostOptimizer, compiled: bool
):
    unit = make_cuda_unit(optimizer, torch.bfloat16, numel=1 << 24)
    given = device_update.numbers(optimizer, apply=True, **plan_of(1, optimizer))
    on_device = torch.tensor(given).cuda()
    device_update.update(optimizer, unit, on_device, compiled=compiled)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        device_update.update(optimizer, unit, on_device, compiled=compiled)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    piece = device_update.FALLBACK_PIECE if compiled else device_update.PIECE
    most = (56 if optimizer is EIGHT_BIT else 36) * piece
    assert torch.cuda.max_memory_allocated() - before <= most


@pytest.fixture
def compilations():
    """Counts what is compiled from here on, from an empty cache."""
    torch._dynamo.reset()
    device_update._functions.clear()
    counters = torch._dynamo.utils.counters["stats"]
    counters.clear()
    yield lambda: counters["unique_graphs"]
    torch._dynamo.reset()
    device_update._functions.clear()


@pytest.mark.accelerator
@every_optimizer
def test_one_compilation_serves_all_lengths_positions_and_steps(
    optimizer: HostOptimizer, compilations
):
    for step, blocks in enumerate((3000, 2, 3, 17, 128, 14), start=1):
        options = {"numel": 128 * blocks + step % 2, "position": 128 * (step - 1)}
        unit = make_cuda_unit(optimizer, torch.bfloat16, **options)
        unit.gradient.copy_(random(unit.weight.numel(), seed=step))
        expected = copy_of(unit)
        step_on_device(optimizer, unit, step, compiled=True)
        step_readably(optimizer, expected, step)
        assert_close(master_of(unit), master_of(expected))
    assert compilations() == 1
