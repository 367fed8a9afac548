"""AdamW without a schedule of rates, against the equations of "The Road Less Scheduled"."""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from families import FAMILIES
from reference import split
from torch import Tensor, nn

import l2l

FAMILY = FAMILIES["llama_tied"]
NUM_STEPS = 20
SINGLE: dict[str, Any] = {"precision": "float32", "microbatch_size": 4, "device": "cpu"}
OPTIMIZER = l2l.ScheduleFreeAdamW(lr=1e-2, eps=1e-3, weight_decay=0.1, warmup_steps=6)
Weights = dict[str, Tensor]


@dataclass
class Equations:
    """Weights at three points: gradients are of y, z steps, x is its mean."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    warmup_steps: int

    def begin(self, model: nn.Module) -> None:
        self.y = dict(model.named_parameters())
        self.x, self.z = ({k: one.detach().clone() for k, one in self.y.items()} for _ in range(2))
        self.v = {name: torch.zeros_like(one) for name, one in self.x.items()}
        self.t, self.sum_of_squares = 0, 0.0

    @torch.no_grad()
    def step(self) -> None:
        self.t += 1
        (beta1, beta2), decay = self.betas, self.weight_decay
        gamma = self.lr * min(1.0, self.t / self.warmup_steps if self.warmup_steps else 1.0)
        self.sum_of_squares += gamma**2
        c = gamma**2 / self.sum_of_squares
        for name, y in self.y.items():
            assert y.grad is not None
            self.v[name] = beta2 * self.v[name] + (1 - beta2) * y.grad**2
            root = (self.v[name] / (1 - beta2**self.t)).sqrt()
            self.z[name] = self.z[name] - gamma * y.grad / (root + self.eps) - gamma * decay * y
            self.x[name] = (1 - c) * self.x[name] + c * self.z[name]
            y.copy_((1 - beta1) * self.z[name] + beta1 * self.x[name])


@functools.cache
def plain(
    optimizer: Any = OPTIMIZER, num_steps: int = NUM_STEPS, clip_norm: float | None = None
) -> tuple[Weights, Weights]:
    """Weights that are trained, and their means."""
    model, equations = FAMILY.build(), Equations(**optimizer.defaults)
    equations.begin(model)
    for seed in range(num_steps):
        model.zero_grad()
        for microbatch in split(FAMILY.batch(4, seed), 4):
            model(**microbatch, use_cache=False).loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        equations.step()
    return {name: one.detach() for name, one in equations.y.items()}, equations.x


def weights_and_means(engine: l2l.Engine) -> tuple[Weights, Weights]:
    now = {name: one.clone() for name, one in engine.named_weights()}
    with engine.averaged():
        return now, {name: one.clone() for name, one in engine.named_weights()}


def train(
    optimizer: Any = OPTIMIZER, num_steps: int = NUM_STEPS, **settings: Any
) -> tuple[Weights, Weights]:
    with inside.engine(FAMILY.build(), optimizer=optimizer, **{**SINGLE, **settings}) as engine:
        for seed in range(num_steps):
            engine.step(FAMILY.batch(4, seed))
        return weights_and_means(engine)


def difference(found: tuple[Weights, Weights], expected: tuple[Weights, Weights]) -> float:
    """The largest, of weights or means."""
    return max(
        float((one[name] - value).abs().max())
        for one, other in zip(found, expected, strict=True)
        for name, value in other.items()
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"kernel": "native"},
        {"kernel": "readable"},
        {"clip_norm": 0.05, "embedding": "host"},
        {"clip_norm": 0.05, "overrides": {"num_shared": 2, "num_pieces": 3}},
        {"overrides": {"num_shared": 2, "num_tail": 1, "num_device_states": 1}},
        {"overrides": {"num_tail": 3, "num_device_states": 3, "outer_state": True}},
    ],
    ids=str,
)
def test_twenty_steps_are_those_of_the_equations(settings: dict[str, Any]) -> None:
    expected = plain(clip_norm=settings.get("clip_norm"))
    assert difference(train(**settings), expected) <= 1e-5
    assert difference(expected[:1], expected[1:]) > 1e-3
    assert difference(expected, (plain(num_steps=0)[0],) * 2) > 1e-2


@pytest.mark.parametrize("change", [{"warmup_steps": 0}, {"betas": (0.5, 0.9)}, {"betas": (0, 0)}])
def test_settings_mean_what_they_say(change: dict[str, Any]) -> None:
    other = replace(OPTIMIZER, **change)
    assert difference(train(other, 8), plain(other, 8)) <= 1e-5
    assert difference(plain(other, 8), plain(num_steps=8)) > 1e-4


@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_the_share_of_a_step_is_that_of_its_squared_rate(warmup: int) -> None:
    rates = [min(1.0, step / max(1, warmup)) for step in range(1, 30)]
    for step in range(1, 30):
        expected = rates[step - 1] ** 2 / sum(rate**2 for rate in rates[:step])
        assert l2l.ScheduleFreeAdamW.share(step, warmup) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "link", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.thorough)]
)
def test_the_means_are_evaluated_and_exported_and_leave_no_trace(link: str, tmp_path: Path) -> None:
    settings = {**SINGLE, "optimizer": OPTIMIZER, "precision": link}
    batch = FAMILY.batch(4, 9)
    expected = train(num_steps=4, **settings)
    with inside.engine(FAMILY.build(), **settings) as engine:
        for seed in range(4):
            engine.step(FAMILY.batch(4, seed))
            with engine.averaged():
                of_means = engine.evaluate(batch)
                engine.export(tmp_path / "means", dtype="float32")
        of_weights = engine.evaluate(batch)
        assert difference(weights_and_means(engine), expected) == 0
    exported = FAMILIES["llama_tied"].build().from_pretrained(tmp_path / "means")
    for name, one in exported.named_parameters():
        assert torch.equal(one, expected[1][name]), name
    model = FAMILY.build()
    for weights, found in zip(expected, (of_weights, of_means), strict=True):
        model.load_state_dict(weights, strict=False)
        loss = model(**batch, use_cache=False).loss.item()
        assert found == pytest.approx(loss, rel=1e-5 if link == "float32" else 2e-2)
    assert of_means != of_weights


@pytest.mark.parametrize("link", ["float32", "bfloat16"])
def test_it_goes_on_bit_by_bit(link: str, tmp_path: Path) -> None:
    settings = {**SINGLE, "optimizer": OPTIMIZER, "precision": link, "clip_norm": 0.05}
    expected = train(num_steps=8, **settings)
    with inside.engine(FAMILY.build(), **settings) as engine:
        for seed in range(4):
            engine.step(FAMILY.batch(4, seed))
        engine.save(tmp_path / "saved")
    with inside.engine(FAMILY.build(), **settings) as engine:
        engine.load(tmp_path / "saved")
        for seed in range(4, 8):
            engine.step(FAMILY.batch(4, seed))
        assert difference(weights_and_means(engine), expected) == 0


def test_it_takes_no_more_memory_than_adamw() -> None:
    taken = []
    for optimizer in (OPTIMIZER, l2l.AdamW()):
        with inside.engine(FAMILY.build(), optimizer=optimizer, **SINGLE) as engine:
            forms = [unit.form for unit in inside.server(engine).units.values()]
            taken.append(sum(sum(form.bytes_by_kind().values()) for form in forms))
    assert taken[0] == taken[1]


def test_what_it_cannot_be_is_refused() -> None:
    for settings, said in (
        ({"average": 0.9}, "average must be None"),
        ({"warmup_steps": -1}, "warmup_steps must not be negative"),
        ({"betas": (1.0, 0.9)}, "betas must lie in"),
    ):
        with pytest.raises(ValueError, match=f"ScheduleFreeAdamW: {said}"):
            l2l.ScheduleFreeAdamW(**settings)
