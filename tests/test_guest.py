"""Optimizers of torch that the server has not: run as they are, parameter by parameter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from families import FAMILIES
from reference import split
from torch import Tensor, nn

import l2l

FAMILY = FAMILIES["gpt2"]
NUM_STEPS = 4
SINGLE: dict[str, Any] = {"precision": "float32", "microbatch_size": 4}
Make = Callable[[Any], torch.optim.Optimizer]

GUESTS: dict[str, Make] = {
    "adam with decay": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, maximize=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


def plain(make: Make, *, steps: int = NUM_STEPS) -> nn.Module:
    model = FAMILY.build()
    optimizer = make(model.parameters())
    for seed in range(steps):
        optimizer.zero_grad()
        for microbatch in split(FAMILY.batch(4, seed), 4):
            model(**microbatch, use_cache=False).loss.backward()
        optimizer.step()
    return model


def same(engine: l2l.Engine, model: nn.Module, rtol: float = 1e-5) -> None:
    found = engine.state_dict()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.data, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("name", GUESTS)
@pytest.mark.parametrize("embedding", ["host", "device"])
def test_a_guest_trains_as_in_plain_pytorch(name: str, embedding: str) -> None:
    make, model = GUESTS[name], FAMILY.build()
    with inside.engine(
        model, optimizer=make(model.parameters()), embedding=embedding, **SINGLE
    ) as engine:
        for seed in range(NUM_STEPS):
            engine.step(FAMILY.batch(4, seed))
        same(engine, plain(make))


def test_updates_of_the_next_step_and_settings_by_group_and_a_schedule() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2]},
        ]
        return torch.optim.RMSprop(groups, lr=1e-3)

    expected, model = FAMILY.build(), FAMILY.build()
    optimizer = make(expected.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    with inside.engine(
        model, optimizer=make(model.parameters()), clip_norm=0.05, **SINGLE
    ) as engine:
        own = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1 / (step + 1))
        for seed in range(NUM_STEPS):
            batch = FAMILY.batch(4, seed)
            optimizer.zero_grad()
            expected(**batch, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.05)
            optimizer.step()
            schedule.step()
            engine.step(batch)
            own.step()
        same(engine, expected)


def test_its_state_is_shown_saved_and_loaded(tmp_path: Path) -> None:
    make, model = GUESTS["adagrad"], FAMILY.build()
    with inside.engine(model, optimizer=make(model.parameters()), **SINGLE) as engine:
        for seed in range(2):
            engine.step(FAMILY.batch(4, seed))
        state = engine.optimizer.state_dict()["state"][0]
        assert set(state) == {"step", "sum"}
        assert float(state["step"]) == 2
        assert float(state["sum"].min()) >= 0.1
        engine.save(tmp_path / "saved")
    model = FAMILY.build()
    with inside.engine(model, optimizer=make(model.parameters()), **SINGLE) as engine:
        engine.load(tmp_path / "saved")
        for seed in range(2, NUM_STEPS):
            engine.step(FAMILY.batch(4, seed))
        same(engine, plain(make))
    model = FAMILY.build()
    other = torch.optim.Rprop(model.parameters())
    with (
        inside.engine(model, optimizer=other, **SINGLE) as engine,
        pytest.raises(l2l.CheckpointError, match=r"with the optimizer Adagrad; the .* has Rprop"),
    ):
        engine.load(tmp_path / "saved")


def test_adam_without_decay_is_fast() -> None:
    model = FAMILY.build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with inside.engine(model, optimizer=optimizer, kernel="readable", **SINGLE) as engine:
        assert isinstance(inside.server(engine).optimizer, l2l.AdamW)
        for seed in range(NUM_STEPS):
            engine.step(FAMILY.batch(4, seed))
        same(engine, plain(lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False)))


class Whole(torch.optim.Optimizer):
    """Divides by the norm of a parameter's gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad / one.grad.norm(), alpha=group["lr"])


class Own(torch.optim.Optimizer):
    """Counts in an int, keeps an attribute, and replaces its state instead of writing into it."""

    def __init__(self, parameters: Any, power: float = 0.5) -> None:
        self.power = power
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                state: dict[str, Any] = self.state[one]
                state["step"] = state.get("step", 0) + 1
                before: Tensor | float = state.get("mean", 0.0)
                state["mean"] = 0.9 * before + one.grad.abs()
                one.data = one - group["lr"] / state["step"] * one.grad / (
                    state["mean"] ** self.power + 1e-3
                )


def test_an_optimizer_of_the_users_own() -> None:
    model = FAMILY.build()
    with inside.engine(model, optimizer=Own(model.parameters(), power=0.7), **SINGLE) as engine:
        for seed in range(NUM_STEPS):
            engine.step(FAMILY.batch(4, seed))
        same(engine, plain(lambda p: Own(p, power=0.7)))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Whole, "does not treat every element by itself"),
        (lambda p: torch.optim.LBFGS(p), "cannot update one parameter at a time"),
        (lambda p: torch.optim.NAdam(p), "keeps mu_product"),
        (lambda p: torch.optim.Adafactor(p), "keeps row_var, col_var"),
        (lambda p: torch.optim.SparseAdam(p), "cannot update one parameter at a time"),
    ],
)
def test_what_cannot_be_a_guest_is_refused_by_name(make: Make, said: str) -> None:
    model = FAMILY.build()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    optimizer = make(model.parameters())
    with pytest.raises(ValueError, match=rf"{type(optimizer).__name__} {said}.*Expected one of"):
        inside.engine(model, optimizer=optimizer, **SINGLE)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
