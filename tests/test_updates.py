"""When and how the parameter server updates: policies, clipping, precisions, optimizers."""

import dataclasses
import itertools
import warnings

import inside
import pytest
import torch
from families import FAMILIES, Family
from reference import accumulate, counts, split
from sampled import sampled
from torch import Tensor, nn

import l2l
from l2l.device import CheckingDevice
from l2l.model import UnitTensors
from l2l.parameter_server import adafactor, host_kernel
from l2l.parameter_server.forms import form_of
from l2l.parameter_server.precision import PrecisionPolicy
from l2l.schedule import Lane

ROWS, SIZE = 6, 2
CLIPPED = ("llama_untied", "gpt2", "bert_classification", "mixtral", "hand_written")


def make_engine(model: nn.Module, family: Family, **settings) -> l2l.Engine:
    settings = {"precision": "float32", "device": "cpu", "microbatch_size": SIZE, **settings}
    return inside.engine(model, layers=family.layers, **settings)


def train(name: str, *, steps: int = 4, **settings) -> dict[str, Tensor]:
    family = FAMILIES[name]
    model = family.build()
    with make_engine(model, family, **settings) as engine:
        for number in range(steps):
            engine.step(family.batch(ROWS, seed=number))
    return model.state_dict()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    unequal = [key for key in expected if not torch.equal(found[key], expected[key])]
    assert not unequal


def gradients_by_plain_pytorch(model: nn.Module, family: Family, number: int) -> None:
    microbatches = split(family.batch(ROWS, seed=number), SIZE)
    model.zero_grad()
    accumulate(model, microbatches, [counts(family.rule, one) for one in microbatches])


@pytest.mark.parametrize("name", sampled(CLIPPED, lambda name: name in ("gpt2", "mixtral")))
def test_fifty_clipped_steps_equal_those_of_plain_pytorch(name: str):
    family = FAMILIES[name]
    numbers = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.05}
    plain = family.build()
    optimizer = torch.optim.AdamW(plain.parameters(), **numbers)
    norms = []
    for number in range(50):
        gradients_by_plain_pytorch(plain, family, number)
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)))
        optimizer.step()
    assert min(norms) > 0.05, "the norm must bite in every step"

    model = family.build()
    with make_engine(model, family, optimizer=l2l.AdamW(**numbers), clip_norm=0.05) as engine:
        assert "just in time" in str(engine.plan)
        reports = [engine.step(family.batch(ROWS, seed=number)) for number in range(50)]
        found_norms = [report.gradient_norm for report in reports]
    assert found_norms == pytest.approx(norms, rel=1e-3)
    for key, expected in plain.state_dict().items():
        found = model.state_dict()[key]
        allowed = 1e-5 * (float(expected.abs().max()) + 1e-3)
        assert float((found - expected).abs().max()) <= allowed, key


@pytest.mark.parametrize("kernel", ["native", "readable"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_eager_and_just_in_time_give_the_same_bits(precision: str, kernel: str):
    settings = {"optimizer": l2l.AdamW(lr=1e-2), "precision": precision, "kernel": kernel}
    eager = train("llama_tied", update="eager", **settings)
    late = train("llama_tied", update="just in time", **settings)
    clipped = train("llama_tied", clip_norm=1e9, **settings)
    halved = train("llama_tied", clip_norm=1e9, overrides={"halves": True}, **settings)
    assert_equal(late, eager)
    assert_equal(clipped, eager)
    assert_equal(halved, eager)


IN_ANY_ORDER = {
    "clipped": {"clip_norm": 0.1, "optimizer": l2l.SGD(lr=0.1, momentum=0.9)},
    "adafactor": {"optimizer": l2l.Adafactor(lr=0.01)},
}
OFTEN = (Lane.FETCH, Lane.UPDATE, Lane.DRAIN)


@pytest.mark.parametrize(
    ("kind", "first"),
    sampled(
        itertools.product(IN_ANY_ORDER, [None, *Lane]),
        lambda one: "clipped" in one or one[1] in OFTEN,
    ),
)
def test_every_order_the_waits_allow_gives_the_same_bits(kind: str, first: Lane | None):
    settings = IN_ANY_ORDER[kind]
    expected = train("llama_untied", **settings)
    assert_equal(train("llama_untied", device=CheckingDevice(first=first), **settings), expected)


def test_a_learning_rate_schedule_is_the_same_with_late_updates():
    family = FAMILIES["llama_untied"]
    results = []
    for settings in ({"update": "eager"}, {"update": "just in time"}):
        model = family.build()
        with make_engine(model, family, optimizer=l2l.AdamW(lr=1e-2), **settings) as engine:
            schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda n: 0.5**n)
            for number in range(4):
                engine.step(family.batch(ROWS, seed=number))
                schedule.step()
                if number == 1:
                    engine.evaluate(family.batch(ROWS, seed=9))
        results.append(model.state_dict())
    assert_equal(results[1], results[0])


def test_evaluation_sees_the_updates_that_wait():
    family = FAMILIES["llama_untied"]
    losses = []
    for policy in ("eager", "just in time"):
        with make_engine(family.build(), family, update=policy) as engine:
            engine.step(family.batch(ROWS))
            losses.append(engine.evaluate(family.batch(ROWS)))
            losses.append(engine.evaluate(family.batch(ROWS)))
            losses.append(engine.step(family.batch(ROWS)).loss)
    assert losses[:3] == losses[3:]


def state_of(engine: l2l.Engine) -> dict[str, Tensor]:
    server = inside.server(engine)
    server.settle_all()
    found = {}
    for name, unit in server.units.items():
        found[f"{name} weights"] = unit.weights.clone()
        if unit.companion is not None:
            found[f"{name} companion"] = unit.companion.clone()
        found |= {f"{name} {key}": value.clone() for key, value in unit.state.items()}
        found[f"{name} steps"] = torch.tensor(list(unit.steps.values()))
    return found


def test_a_float16_overflow_skips_the_whole_step_and_halves_the_scale():
    family = FAMILIES["llama_tied"]
    model = family.build()
    with make_engine(model, family, precision="float16", optimizer=l2l.AdamW(lr=1e-3)) as engine:
        inside.scaler(engine).scale.value = 1024.0
        good = engine.step(family.batch(ROWS))
        assert not good.skipped
        before = state_of(engine)
        inside.scaler(engine).scale.value = 2.0**40  # planted: scaled gradients cannot fit float16
        bad = engine.step(family.batch(ROWS, seed=1))
        assert bad.skipped
        assert torch.isfinite(torch.tensor(bad.loss))
        assert_equal(state_of(engine), before)
        following = engine.step(family.batch(ROWS, seed=2))
        assert following.loss_scale == 2.0**39
        inside.scaler(engine).scale.value = 1024.0
        assert not engine.step(family.batch(ROWS, seed=3)).skipped
        moved = state_of(engine)
    assert any(not torch.equal(moved[key], before[key]) for key in before)


def test_the_loss_scale_doubles_after_enough_good_steps():
    family = FAMILIES["llama_tied"]
    with make_engine(family.build(), family, precision="float16") as engine:
        inside.scaler(engine).scale.value, inside.scaler(engine).scale.growth_interval = 8.0, 2
        found = [engine.step(family.batch(ROWS)).loss_scale for _ in range(5)]
    assert found == [8.0, 8.0, 16.0, 16.0, 32.0]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_sixteen_bits_on_the_link_train_like_float32(precision: str):
    family = FAMILIES["llama_tied"]
    losses = []
    for kind in ("float32", precision):
        optimizer = l2l.AdamW(lr=3e-3)
        with make_engine(family.build(), family, precision=kind, optimizer=optimizer) as engine:
            for _ in range(30):
                engine.step(family.batch(ROWS))
            losses.append(engine.evaluate(family.batch(ROWS)))
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_the_native_kernel_agrees_with_the_readable_arithmetic():
    for optimizer in (
        l2l.AdamW(lr=1e-3, eps=1e-3),
        l2l.SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
        l2l.SGD(lr=0.1, momentum=0.9, nesterov=True),
        l2l.SGD(lr=0.1),
        l2l.Lion(lr=1e-4),
        l2l.AdamW(lr=1e-3, eps=1e-3, moments="8bit"),
    ):
        native = train("llama_tied", optimizer=optimizer, kernel="native")
        readable = train("llama_tied", optimizer=optimizer, kernel="readable")
        for key, expected in readable.items():
            # A difference in the last bit may flip the rounding of an 8-bit moment.
            flip = 5e-5 if getattr(optimizer, "moments", None) == "8bit" else 1e-6
            allowed = 1e-5 * float(expected.abs().max()) + flip
            assert float((native[key] - expected).abs().max()) <= allowed, (optimizer, key)


def test_adafactor_equals_that_of_torch():
    family = FAMILIES["llama_untied"]
    numbers = {"lr": 1e-2, "weight_decay": 0.01}
    plain = family.build()
    optimizer = torch.optim.Adafactor(plain.parameters(), **numbers, foreach=False)
    for number in range(5):
        gradients_by_plain_pytorch(plain, family, number)
        optimizer.step()
    found = train("llama_untied", steps=5, optimizer=l2l.Adafactor(**numbers))
    for key, expected in plain.state_dict().items():
        allowed = 1e-5 * float(expected.abs().max())
        assert float((found[key] - expected).abs().max()) <= allowed, key


@pytest.mark.parametrize("shape", [(), (70,), (33, 20), (5, 6, 7)], ids=str)
@pytest.mark.parametrize("finite", [True, False])
def test_adafactor_gives_the_same_some_rows_at_a_time(
    shape: tuple[int, ...], finite: bool, monkeypatch: pytest.MonkeyPatch
):
    optimizer = l2l.Adafactor(lr=0.1, weight_decay=0.1)
    settings = optimizer.defaults

    def revised() -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(5)
        weight = torch.randn(shape, generator=generator)
        state = {name: torch.zeros(one) for name, one in optimizer.state_shapes(shape).items()}
        for _ in range(3):
            optimizer.revise(
                weight,
                torch.randn(shape, generator=generator),
                state,
                settings=settings,
                finite=torch.tensor(finite),
                generator=generator,
            )
        return {"weight": weight, **state}

    whole = revised()
    monkeypatch.setattr(adafactor, "REVISED_PIECE", 64)
    pieces = adafactor.pieces_of(torch.empty(shape))
    assert len(pieces) == {(): 1, (70,): 2, (33, 20): 11, (5, 6, 7): 5}[shape]
    for name, found in revised().items():
        torch.testing.assert_close(found, whole[name], rtol=1e-6, atol=1e-7)
    assert bool(whole["step"]) == finite


def test_adafactor_rounds_stochastically_and_reproducibly():
    settings = {"optimizer": l2l.Adafactor(lr=1e-4), "precision": "bfloat16"}
    first = train("llama_untied", seed=1, **settings)
    assert_equal(train("llama_untied", seed=1, **settings), first)
    other = train("llama_untied", seed=2, **settings)
    assert any(not torch.equal(other[key], first[key]) for key in first)


def test_stochastic_rounding_is_right_on_average():
    from l2l.parameter_server.adafactor import store

    value = 1.0 + 2.0**-10  # an eighth of the way between two bfloat16 numbers
    weight = torch.empty(100_000, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    store(weight, torch.full((100_000,), value), finite=torch.tensor(True), generator=generator)
    assert set(weight.float().unique().tolist()) == {1.0, 1.0078125}
    assert float(weight.double().mean()) == pytest.approx(value, abs=5e-5)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan])
    out = torch.empty(3, dtype=torch.bfloat16)
    store(out, special, finite=torch.tensor(True), generator=generator)
    assert torch.equal(out[:2].float(), special[:2])
    assert out[2].isnan()


def test_adafactor_keeps_weights_and_state_when_the_loss_is_not_finite():
    family = FAMILIES["llama_untied"]
    with make_engine(family.build(), family, optimizer=l2l.Adafactor()) as engine:
        engine.step(family.batch(ROWS))
        before = state_of(engine)
        inside.outer(engine).loss_function = lambda outputs, batch: outputs.loss * torch.nan
        assert engine.step(family.batch(ROWS)).skipped
        assert_equal(state_of(engine), before)


@pytest.mark.parametrize(
    ("optimizer", "precision", "expected"),
    [
        (l2l.AdamW(), "bfloat16", 12),
        (l2l.AdamW(), "float32", 12),
        (l2l.AdamW(), "float16", 14),
        (l2l.AdamW(moments="8bit"), "bfloat16", 6 + 8 / 128),
        (l2l.Lion(), "bfloat16", 8),
        (l2l.ScheduleFreeAdamW(), "bfloat16", 12),
        (l2l.SGD(), "bfloat16", 4),
        (l2l.Adafactor(), "bfloat16", 2),
    ],
)
def test_bytes_of_the_host_for_a_parameter(optimizer, precision: str, expected: float):
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(2048, 16, 8192)
    parameters = dict(layer.named_parameters())
    form = form_of(
        "L0",
        UnitTensors(parameters=parameters, buffers={}),
        settings=dict.fromkeys(parameters, optimizer.defaults),
        precision=PrecisionPolicy.for_model(layer, precision=precision),
        optimizer=optimizer,
    )
    num_parameters = sum(parameter.numel() for parameter in layer.parameters())
    assert sum(form.bytes_by_kind().values()) / num_parameters == pytest.approx(expected, rel=0.01)


def test_the_optimizer_shows_its_state_under_the_names_of_torch():
    family = FAMILIES["llama_untied"]
    for state in ("exp_avg", "momentum_buffer"):
        model, plain = family.build(), family.build()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(plain.parameters())
        if state == "momentum_buffer":
            optimizer = torch.optim.SGD(plain.parameters(), momentum=0.9)
        described = l2l.AdamW() if state == "exp_avg" else l2l.SGD(lr=1e-3, momentum=0.9)
        with make_engine(model, family, optimizer=described, clip_norm=1.0) as engine:
            assert not engine.optimizer.state_dict()["state"]
            engine.step(family.batch(ROWS))
            gradients_by_plain_pytorch(plain, family, 0)
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            found = engine.optimizer.state_dict()["state"]
            expected = optimizer.state_dict()["state"]
            assert set(found) == set(expected)
            for index, tensors in expected.items():
                assert found[index][state].shape == tensors[state].shape
                assert torch.allclose(found[index][state], tensors[state], atol=1e-6)
            view = found[0][state]
            inside.server(engine).settle_all()
            assert view.untyped_storage().data_ptr() in {
                buffer.untyped_storage().data_ptr()
                for unit in inside.server(engine).units.values()
                for buffer in unit.state.values()
            }


def test_what_excludes_each_other_is_refused():
    family = FAMILIES["llama_untied"]
    for settings, word in (
        ({"optimizer": l2l.Adafactor(), "clip_norm": 1.0}, "Adafactor"),
        ({"optimizer": l2l.Adafactor(), "precision": "float16"}, "bfloat16"),
        ({"update": "eager", "clip_norm": 1.0}, "clip_norm"),
        ({"update": "eager", "precision": "float16"}, "float16"),
        ({"update": "never"}, "just in time"),
        ({"clip_norm": 0.0}, "above 0"),
        ({"kernel": "fast"}, "readable"),
        ({"host_memory": "lots"}, "8GiB"),
    ):
        model = family.build()
        with pytest.raises(ValueError, match=word):
            make_engine(model, family, **settings)
        assert not any(parameter.isnan().any() for parameter in model.parameters())


def test_a_host_too_small_is_refused_before_anything_is_taken():
    family = FAMILIES["llama_untied"]
    model = family.build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(ValueError, match=r"needs .* found .*8bit.*Adafactor"):
        make_engine(model, family, precision="bfloat16", host_memory=9 * num_parameters)
    with pytest.raises(ValueError, match="more memory"):
        make_engine(model, family, host_memory=1000)
    assert_equal(model.state_dict(), before)


def test_a_kernel_that_was_not_built_is_one_warning_and_the_slow_path(monkeypatch):
    monkeypatch.setattr(inside.LOAD_KERNEL, lambda: None)
    family = FAMILIES["llama_untied"]
    expected = train("llama_untied", steps=2, kernel="readable")
    model = family.build()
    with pytest.warns(UserWarning, match="make kernel") as caught:
        engine = make_engine(model, family)
    assert len(caught) == 1
    with warnings.catch_warnings(), engine:
        for number in range(2):
            engine.step(family.batch(ROWS, seed=number))
    assert_equal(model.state_dict(), expected)


class Odd(nn.Module):
    """Layers of no parameter, of one, and of odd numbers of them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.layers = nn.ModuleList([nn.Tanh(), Scale(), nn.Linear(5, 5, bias=False), nn.Tanh()])

    def forward(self, ids, labels):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(hidden.flatten(0, 1), labels.flatten())


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, hidden):
        return hidden * self.weight


@pytest.mark.parametrize(
    ("optimizer", "clip_norm"),
    [
        *list(
            itertools.product(
                [l2l.AdamW(lr=0.1), l2l.AdamW(lr=0.1, moments="8bit"), l2l.Lion(lr=0.01)],
                [None, 0.1],
            )
        ),
        (l2l.Adafactor(lr=0.1), None),
    ],
)
def test_layers_of_odd_sizes_and_of_none_train(optimizer, clip_norm):
    torch.manual_seed(0)
    model = Odd()
    ids = torch.randint(0, 5, (4, 3))
    settings = {"precision": "bfloat16", "device": "cpu", "microbatch_size": 3}
    with inside.engine(model, optimizer=optimizer, clip_norm=clip_norm, **settings) as engine:
        losses = [engine.step({"ids": ids, "labels": ids}).loss for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]


def test_a_step_that_fails_after_an_update_began_tears_the_engine(monkeypatch):
    family = FAMILIES["llama_untied"]
    engine = make_engine(family.build(), family)
    engine.step(family.batch(ROWS))
    backward = inside.relay(engine)._perform["backward Pro m"]
    inside.relay(engine)._perform["backward Pro m"] = lambda *_: (_ for _ in ()).throw(
        OSError("planted")
    )
    with pytest.raises(OSError, match="planted"):
        engine.step(family.batch(ROWS))
    inside.relay(engine)._perform["backward Pro m"] = backward
    with pytest.raises(RuntimeError, match="two steps"):
        engine.step(family.batch(ROWS))
    with pytest.warns(UserWarning, match="two steps"):
        engine.close()


def test_a_step_that_fails_before_any_update_leaves_everything_as_it_was():
    family = FAMILIES["llama_untied"]
    expected = train("llama_untied", steps=2, clip_norm=0.1)
    model = family.build()
    with make_engine(model, family, clip_norm=0.1) as engine:
        engine.step(family.batch(ROWS, seed=0))
        backward = inside.relay(engine)._perform["backward Pro m"]
        inside.relay(engine)._perform["backward Pro m"] = lambda *_: (_ for _ in ()).throw(
            OSError("planted")
        )
        with pytest.raises(OSError, match="planted"):
            engine.step(family.batch(ROWS, seed=1))
        inside.relay(engine)._perform["backward Pro m"] = backward
        engine.step(family.batch(ROWS, seed=1))
    assert_equal(model.state_dict(), expected)


def test_the_kernel_is_built_here():
    assert host_kernel.load() is not None


@pytest.mark.parametrize("num_late", [1, 2, 3])
def test_some_updates_may_be_late_and_the_others_eager(num_late: int):
    """The policy between the two that have a name: what is drained last waits for the next step."""
    expected = train("llama_untied", update="eager")
    family = FAMILIES["llama_untied"]
    model = family.build()
    with make_engine(model, family, update="eager") as engine:
        inside.change_shape(
            engine,
            lambda shape: dataclasses.replace(shape, num_late=num_late if shape.training else 0),
        )
        for number in range(4):
            engine.step(family.batch(ROWS, seed=number))
            assert list(inside.server(engine).waiting) == ["L1", "L0", "T0"][-num_late:]
    assert_equal(model.state_dict(), expected)
