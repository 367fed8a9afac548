"""Random numbers of passes are their own: what other threads draw changes none, nor do passes."""

import importlib.util
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import inside
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import l2l
from l2l.device import CheckingDevice, random_numbers
from l2l.device.random_numbers import (
    LEFT_ALONE,
    RandomNumbers,
    current,
    kernel_of,
    random_operators,
)

BACKEND = "aot_eager_decomp_partition"  # traces and cuts as the real one does, and compiles nothing

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
WIDTH = 8


@pytest.fixture(scope="module")
def threads() -> ModuleType:
    """reproduce/threads.py, of which a part is run here."""
    path = Path(__file__).parents[1] / "reproduce" / "threads.py"
    spec = importlib.util.spec_from_file_location("threads_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def numbers() -> RandomNumbers:
    return RandomNumbers([torch.default_generator])


@pytest.mark.parametrize("steps", [50, pytest.param(200, marks=pytest.mark.thorough)])
def test_no_mask_changes_beside_threads_that_draw(threads: ModuleType, steps: int):
    """Nor do losses and weights, nor what the threads draw."""
    found = threads.beside_threads("cpu", steps=steps, compiled=False)
    assert found["draws of the threads"] > steps
    assert found["masks compared"] == 2 * 2 * 2 * steps  # layers, masks, microbatches, steps
    differ = {name: number for name, number in found.items() if "differ" in name}
    assert differ == dict.fromkeys(differ, 0)


def test_two_engines_in_two_threads_train_as_each_alone(threads: ModuleType):
    assert (
        threads.two_engines("cpu", steps=20, compiled=False)["losses and weights that differ"] == 0
    )


@pytest.mark.parametrize("backend", [False, BACKEND])
def test_the_callers_generator_is_not_touched_by_anything_an_engine_does(backend: bool | str):
    model, batch = Small(Dropping), {"ids": IDS, "labels": IDS}
    before = torch.get_rng_state()
    with inside.engine(model, device="cpu", microbatch_size=2, compile=backend) as engine:
        engine.step(batch)
        engine.step(batch)
        engine.evaluate(batch)
        engine.predict(batch)
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_draws_nothing_and_is_the_same_beside_threads(threads: ModuleType):
    batch = {"ids": torch.arange(24).view(4, 6) % 11, "labels": torch.arange(24).view(4, 6) % 7}
    model = threads.build()
    with inside.engine(model, device="cpu", microbatch_size=2, precision="float32") as engine:
        expected = engine.evaluate(batch)
        with threads.Drawers(["cpu"]).drawing():
            found = [engine.evaluate(batch) for _ in range(10)]
    assert found == [expected] * 10


# --------------------------------------------------------------------------------------------------
# Operators


def _draws(width: int = 5) -> dict[str, Callable[[], Tensor]]:
    x, half = torch.linspace(-1, 1, 4 * width).view(4, width), torch.full((4,), 0.5)
    grown, whole = x.clone().requires_grad_(), torch.arange(12).view(3, 4)
    torch.manual_seed(0)
    recurrent = nn.LSTM(width, width, 2, dropout=0.5)
    return {
        "dropout": lambda: F.dropout(grown, 0.5),
        "dropout in place": lambda: F.dropout(x.clone(), 0.5, inplace=True),
        "dropout in bfloat16": lambda: F.dropout(x.bfloat16(), 0.5),
        "native_dropout": lambda: torch.native_dropout(grown, 0.3, train=True)[0],
        "alpha_dropout": lambda: F.alpha_dropout(x, 0.5, training=True),
        "feature_dropout": lambda: F.dropout1d(x[None], 0.5),
        "rand": lambda: torch.rand(3, 4),
        "rand in another tensor": lambda: torch.rand(3, 4, out=torch.empty(3, 4)),
        "randn": lambda: torch.randn(3, 4),
        "randn in another tensor": lambda: torch.randn(3, 4, out=torch.empty(3, 4)),
        "randint": lambda: torch.randint(9, (4,)),
        "randint from": lambda: torch.randint(2, 9, (4,)),
        "randperm": lambda: torch.randperm(7),
        "randperm in another tensor": lambda: torch.randperm(7, out=torch.empty(7).long()),
        "rand_like": lambda: torch.rand_like(x),
        "rand_like in bfloat16": lambda: torch.rand_like(x, dtype=torch.bfloat16),
        "randn_like": lambda: torch.randn_like(x),
        "randint_like": lambda: torch.randint_like(whole, 9),
        "randint_like from": lambda: torch.randint_like(whole, 3, 9),
        "randint_like of a tensor": lambda: torch.randint_like(whole, torch.tensor(9)),
        "bernoulli": lambda: torch.bernoulli(half),
        "bernoulli_": lambda: torch.empty(9).bernoulli_(0.4),
        "multinomial": lambda: torch.multinomial(torch.ones(3, 4), 2),
        "normal": lambda: torch.normal(0.0, 1.0, (4,)),
        "normal of tensors": lambda: torch.normal(half, half),
        "poisson": lambda: torch.poisson(half),
        "binomial": lambda: torch.binomial(half * 18, half),
        "exponential_": lambda: torch.empty(4).exponential_(),
        "geometric_": lambda: torch.empty(4).geometric_(0.3),
        "cauchy_": lambda: torch.empty(4).cauchy_(),
        "log_normal_": lambda: torch.empty(4).log_normal_(),
        "random_": lambda: torch.empty(4).random_(),
        "uniform_": lambda: torch.empty(4).uniform_(2, 3),
        "gamma": lambda: torch._standard_gamma(half),
        "rrelu": lambda: F.rrelu(x, training=True),
        "gumbel": lambda: F.gumbel_softmax(x),
        "attention": lambda: F.scaled_dot_product_attention(x[None], x[None], x[None], None, 0.4),
        "a recurrent layer": lambda: recurrent(x)[0],
        "fractional pooling": lambda: F.fractional_max_pool2d(x.expand(1, 1, 4, width), 2, 3),
    }


class Watching(TorchDispatchMode):
    """Another dispatch mode, which passes everything on."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", _draws())
def test_a_seed_gives_the_bits_that_it_gives_torch(name: str, numbers: RandomNumbers):
    """And as many are drawn, from the own generator alone, also inside somebody's mode."""
    draw = _draws()[name]
    for mode in (torch.no_grad(), torch.enable_grad(), Watching()):
        torch.manual_seed(9)
        with mode:
            expected = draw()
        after = torch.get_rng_state()
        with numbers.scope(), mode:
            numbers.seed(9)
            assert torch.equal(draw(), expected)
        assert torch.equal(numbers.state()[0], after)
        assert torch.equal(torch.get_rng_state(), after)


def test_gradients_of_what_was_drawn_are_those_of_torch(numbers: RandomNumbers):
    for draw in (lambda x: F.dropout(x, 0.4), lambda x: torch.native_dropout(x, 0.4, True)[0]):
        x = torch.linspace(-1, 1, 20, requires_grad=True)
        torch.manual_seed(4)
        (expected,) = torch.autograd.grad(draw(x).square().sum(), [x])
        with numbers.scope():
            numbers.seed(4)
            (found,) = torch.autograd.grad(draw(x).square().sum(), [x])
        assert torch.equal(found, expected)


def test_every_operator_that_torch_says_draws_is_known():
    """A new one must be redirected, or be listed with a reason."""
    tagged = random_operators()
    assert len(tagged) > 100
    names = {str(operator): operator for operator in tagged}
    without = [one for one, operator in names.items() if kernel_of(operator) is None]
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    for one in without:
        packet = one.split(".")[1]
        assert packet in LEFT_ALONE or names[one].has_kernel_for_dispatch_key(implicit), one
    untagged = {"miopen_rnn", "_lstm_mps", "_flash_attention_forward_no_dropout_inplace"}
    assert {one.split(".")[1] for one in names} >= set(LEFT_ALONE) - untagged
    borrowing = {one for one in names if kernel_of(names[one]) is random_numbers._borrowing_kernel}
    fused = ("_flash_attention", "_efficient_attention", "_cudnn_", "_triton_", "_scaled_dot_")
    unusual = {one for one in borrowing if not one.removeprefix("aten.").startswith(fused)}
    assert all(one.endswith("out") for one in unusual), unusual  # these call the others


def test_untagged_operators_take_no_generator():
    """What has an argument for a generator draws: the tags leave nothing out."""
    tagged = set(map(str, random_operators()))
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten":
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            if any(argument.name == "generator" for argument in operator._schema.arguments):
                assert str(operator) in tagged


def test_a_generator_that_the_caller_gives_is_used(numbers: RandomNumbers):
    given = torch.Generator().manual_seed(2)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(2))
    with numbers.scope():
        state = numbers.state()
        assert torch.equal(torch.rand(4, generator=given), expected)
        assert torch.equal(torch.empty(4).uniform_(generator=given.manual_seed(2)), expected)
    assert torch.equal(numbers.state()[0], state[0])


def test_an_operator_without_a_generator_borrows_the_default_one(numbers: RandomNumbers):
    torch.manual_seed(6)
    expected = torch.rand(3)
    before = torch.get_rng_state()
    numbers.seed(6)
    run = lambda: torch.empty(3).uniform_(generator=torch.default_generator)  # noqa: E731
    assert torch.equal(numbers.borrow(torch.device("cpu"), run), expected)
    assert torch.equal(numbers.state()[0], before)
    assert torch.equal(torch.get_rng_state(), before)
    with numbers.scope():  # parts of the operator draw from there too: the state moves on, once
        numbers.seed(6)
        assert torch.equal(numbers.borrow(torch.device("cpu"), lambda: torch.rand(3)), expected)
        assert torch.equal(numbers.state()[0], before)


class OfAnAccelerator:
    """A generator whose state is a seed and a position."""

    def __init__(self) -> None:
        self.seed, self.position = 1, 0

    def get_state(self) -> Tensor:
        return torch.tensor([self.seed, self.position]).view(torch.uint8)

    def set_state(self, state: Tensor) -> None:
        self.seed, self.position = state.view(torch.int64).tolist()


def test_a_fused_kernel_runs_again_if_somebody_else_has_drawn(numbers: RandomNumbers):
    device = torch.device("cuda", 0)
    own, default = OfAnAccelerator(), OfAnAccelerator()
    numbers._own[device], numbers._defaults[device] = own, default
    own.seed, default.seed = 5, 7

    def borrow(key: str, *, moves: int, others: list[int | None]) -> list[tuple[int, int]]:
        used = []

        def run() -> list[tuple[int, int]]:
            other = others.pop(0) if others else 0
            if other is None:
                default.seed = 99
            else:
                default.position += other
            used.append((default.seed, default.position))
            default.position += moves
            return used

        found = numbers.borrow(device, run, key)
        assert (default.seed, default.position) == (7, 0)
        return found

    # the first run is slow, and others draw the same beside it again and again
    trials = [*[4] * 20, 0, None, *[4] * (random_numbers.TRIALS - 22)]
    found = borrow("a", moves=8, others=[400, *trials, 4, 4])
    assert found[-3:] == [(5, 4), (5, 4), (5, 0)]
    assert borrow("a", moves=8, others=[4, None]) == [(5, 12), (99, 8), (5, 8)]
    assert own.position == 16
    assert borrow("b", moves=4, others=[]) == [(5, 16)] * (random_numbers.TRIALS + 1)
    found = borrow("a", moves=12, others=[])  # it moves further by itself
    assert set(found) == {(5, 20)}
    assert own.position == 32


# --------------------------------------------------------------------------------------------------
# Scopes


def test_a_scope_is_of_its_thread_and_ends(numbers: RandomNumbers):
    seen: list[RandomNumbers | None] = []
    with numbers.scope():
        assert current() is numbers
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
    assert seen == [None]
    assert current() is None
    with pytest.raises(RuntimeError, match="stop"), numbers.scope():
        raise RuntimeError("stop")
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(2), expected)


def test_a_reference_may_go_back_and_forth_between_two_sequences(numbers: RandomNumbers):
    with numbers.scope():
        numbers.seed(1)
        expected = torch.rand(4)
        numbers.seed(1)
        first = torch.rand(2)
        outer = numbers.state()
        numbers.seed(2)
        torch.rand(3)
        numbers.set_state(outer)
        assert torch.equal(torch.cat([first, torch.rand(2)]), expected)


def test_a_scope_inside_another_leaves_that_as_it_was(numbers: RandomNumbers):
    inner = RandomNumbers([torch.default_generator])
    with numbers.scope():
        numbers.seed(1)
        state = numbers.state()
        with inner.scope():
            inner.seed(1)
            expected = torch.rand(2)
        assert torch.equal(numbers.state()[0], state[0])
        assert torch.equal(torch.rand(2), expected)


def test_functions_for_the_state_are_about_the_threads_own(numbers: RandomNumbers):
    callers = torch.get_rng_state()
    with numbers.scope():
        numbers.seed(3)
        own = torch.get_rng_state()
        first = torch.rand(3)
        torch.set_rng_state(own)
        assert torch.equal(torch.rand(3), first)
        torch.manual_seed(3)
        assert torch.equal(torch.rand(3), first)
        with torch.random.fork_rng(devices=[]):
            torch.rand(3)
        assert not torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), callers)


# --------------------------------------------------------------------------------------------------
# Layers


class Dropping(nn.Module):
    """A layer with dropout; `kind` says how it is recomputed, besides by the engine."""

    reentrant: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def inner(self, hidden: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.linear(F.dropout(hidden, 0.3))), 0.3)

    def forward(self, hidden: Tensor) -> Tensor:
        noise = torch.rand_like(hidden)
        if self.reentrant is None:
            return hidden + self.inner(hidden) * noise
        return hidden + checkpoint(self.inner, hidden, use_reentrant=self.reentrant) * noise


class Checkpointed(Dropping):
    reentrant = False


class CheckpointedReentrantly(Dropping):
    reentrant = True


class Unseen(Dropping):
    """Draws what no operator of torch draws: here, from the default generator as it is."""

    def inner(self, hidden: Tensor) -> Tensor:
        mask = torch.empty_like(hidden).bernoulli_(0.7, generator=torch.default_generator)
        return torch.tanh(self.linear(hidden * mask))


class Later(Dropping):
    """Draws nothing before the third step."""

    draws = False

    def inner(self, hidden: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.linear(hidden)), 0.3 if Later.draws else 0.0)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(hidden)


class Small(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        numbers = RandomNumbers([torch.default_generator])
        with numbers.scope():  # whatever other threads draw
            numbers.seed(0)
            self.embedding = nn.Embedding(11, WIDTH)
            self.layers = nn.ModuleList(kind() for _ in range(3))
            self.head = nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


IDS = torch.arange(24).view(4, 6) % 11


def trained(
    kind: type[nn.Module],
    *,
    steps: int = 4,
    after_step: Callable[[int], object] = bool,
    **settings: object,
) -> tuple[list[float], list[Tensor]]:
    """Losses and weights; layers streamed and resident."""
    model = Small(kind)
    losses = []
    with inside.engine(
        model,
        device="cpu",
        precision="float32",
        optimizer=l2l.SGD(lr=0.1),
        microbatch_size=2,
        overrides={"num_tail": 1},
        seed=1,
        **settings,
    ) as engine:
        for number in range(steps):
            losses.append(engine.step({"ids": IDS, "labels": IDS}).loss)
            after_step(number)
    return losses, list(model.parameters())


def assert_same(
    found: tuple[list[float], list[Tensor]], expected: tuple[list[float], list[Tensor]]
) -> None:
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))


def test_checkpoints_inside_layers_repeat_their_masks(threads: ModuleType):
    """As layers without them, which draw the same numbers, and beside a thread that draws.

    Not reentrant ones: torch refuses these where gradients are asked for by input.
    """
    before, drawers = torch.get_rng_state(), threads.Drawers(["cpu"])
    with drawers.drawing():
        found = trained(Checkpointed)
    assert drawers.num_different() == {"cpu": 0}
    torch.set_rng_state(before)
    assert_same(found, trained(Dropping))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", [Checkpointed, CheckpointedReentrantly])
def test_checkpoints_inside_a_scope_repeat_their_masks(
    numbers: RandomNumbers, kind: type[nn.Module]
):
    found = []
    callers = torch.get_rng_state()
    for one in (kind, Dropping):
        model = Small(one)
        with numbers.scope():
            numbers.seed(5)
            model(IDS, IDS)["loss"].backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
    assert torch.equal(torch.get_rng_state(), callers)


def test_what_was_not_seen_to_draw_in_the_trial_may_draw_later(threads: ModuleType):
    def run() -> tuple[list[float], list[Tensor]]:
        def begin(number: int) -> None:
            Later.draws = number >= 1

        Later.draws = False
        found = trained(Later, steps=5, after_step=begin)
        Later.draws = False
        return found

    expected = run()
    with threads.Drawers(["cpu"]).drawing():
        assert_same(run(), expected)
    assert expected[0] != trained(Later, steps=5)[0]


def test_what_draws_where_nobody_sees_it_is_seeded_as_well():
    """World in its process it is exact, and the caller's numbers are put back."""
    runs = []
    for callers_seed in (1, 2):

        def disturb(number: int, callers_seed: int = callers_seed) -> None:
            torch.manual_seed(callers_seed + number)

        runs.append(trained(Unseen, after_step=disturb))
    assert_same(*runs)
    states = []
    trained(Unseen, after_step=lambda _: states.append(torch.get_rng_state()))
    assert all(torch.equal(one, states[0]) for one in states)


def test_a_device_seeds_the_default_generators_only_if_it_must():
    for kind, must in ((Dropping, False), (Unseen, True)):
        device = CheckingDevice()
        assert not device.random_numbers.seeds_defaults
        del device
        model = Small(kind)
        with inside.engine(model, device="cpu", microbatch_size=2) as engine:
            engine.step({"ids": IDS, "labels": IDS})
            assert engine.device.random_numbers.seeds_defaults is must
            assert inside.compiler(engine).random


@pytest.mark.parametrize("backend", [BACKEND, pytest.param("inductor", marks=pytest.mark.thorough)])
def test_compiled_layers_draw_from_the_own_generator(threads: ModuleType, backend: str):
    """The numbers of uncompiled ones, also beside a thread that draws while they compile."""
    drawers = threads.Drawers(["cpu"])
    with drawers.drawing():
        found = trained(Dropping, compile=backend)
    assert drawers.num_different() == {"cpu": 0}
    expected = trained(Dropping)
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)
