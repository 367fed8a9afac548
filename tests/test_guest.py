"""Optimizers of torch that the server has not: run as they are, parameter by parameter."""

from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from families import FAMILIES
from reference import split
from torch import Tensor, nn

import l2l
from l2l.parameter_server import Inventory
from l2l.parameter_server.guest import Guest

FAMILY = FAMILIES["gpt2"]
NUM_STEPS = 4
SINGLE: dict[str, Any] = {"precision": "float32", "microbatch_size": 4}
Make = Callable[[Any], torch.optim.Optimizer]


class Whole(torch.optim.Optimizer):
    """Divides by the norm of a parameter's gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad / one.grad.norm(), alpha=group["lr"])


class Lamb(torch.optim.Optimizer):
    """As large a step as the weight is; counts in an int of its own, keeps a number and sums."""

    def __init__(self, parameters: Any, lr: float = 1e-2, betas: Any = (0.9, 0.99)) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for one in (one for one in group["params"] if one.grad is not None):
                state: dict[str, Any] = self.state[one]
                if not state:
                    state |= {"calls": 0, "trust": 1.0, "first": torch.zeros_like(one)}
                    state["sums"] = torch.zeros(one.shape[-1], dtype=torch.float64)
                state["calls"] += 1
                state["first"].lerp_(one.grad, 1 - beta1)
                square = one.grad.double().square().reshape(-1, one.shape[-1]).sum(0)
                state["sums"].mul_(beta2).add_(square, alpha=1 - beta2)
                root = (state["sums"] / (1 - beta2 ** state["calls"])).sqrt().float() + group["eps"]
                update = state["first"] / root
                state["trust"] = 0.5 * state["trust"] + float(one.norm() / (update.norm() + 1e-6))
                one.sub_(update, alpha=group["lr"] * min(10.0, state["trust"]))


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
WHOLE: dict[str, Make] = {  # these look at whole parameters, or keep other tensors
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, weight_decay=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-1, t0=2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2, weight_decay=0.01),
    "norm": Whole,
    "lamb": Lamb,
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


@pytest.mark.parametrize(
    ("name", "embedding"),
    [*product(GUESTS, ["host", "device"]), *zip(WHOLE, cycle(["host", "device"]), strict=False)],
)
def test_a_guest_trains_as_in_plain_pytorch(name: str, embedding: str) -> None:
    make, model = {**GUESTS, **WHOLE}[name], FAMILY.build()
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


def trained(
    make: Make, *, first: int = 0, to: int = NUM_STEPS, folder: Path | None = None, **settings: Any
) -> dict[str, Tensor]:
    """Weights after some steps, gone on from a folder if that is there, or saved to it."""
    model = FAMILY.build()
    with inside.engine(
        model, optimizer=make(model.parameters()), **{**SINGLE, **settings}
    ) as engine:
        if first and folder is not None:
            engine.load(folder)
        for seed in range(first, to):
            engine.step(FAMILY.batch(4, seed))
        if not first and folder is not None:
            engine.save(folder)
        return {name: one.clone() for name, one in engine.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "link"), [("asgd", "float32"), ("adafactor", "bfloat16"), ("lamb", "bfloat16")]
)
def test_whole_parameters_go_on_bit_by_bit_clipped_and_late(
    name: str, link: str, tmp_path: Path
) -> None:
    settings = {"clip_norm": 0.05, "embedding": "host", "precision": link}
    expected = trained(WHOLE[name], **settings)
    trained(WHOLE[name], to=2, folder=tmp_path / "saved", **settings)
    found = trained(WHOLE[name], first=2, folder=tmp_path / "saved", **settings)
    assert all(torch.equal(found[name], one) for name, one in expected.items())


@pytest.mark.parametrize("link", ["bfloat16", pytest.param("float16", marks=pytest.mark.thorough)])
def test_whole_parameters_have_masters_beside_sixteen_bits(link: str) -> None:
    exact, found = (trained(Lamb, precision=one, microbatch_size=4) for one in ("float32", link))
    for name, one in exact.items():
        torch.testing.assert_close(found[name], one, rtol=0.1, atol=0.02)


def test_state_of_any_shape_is_shown_and_taken_back_and_on_disk(tmp_path: Path) -> None:
    model = FAMILY.build()
    options = {"disk": tmp_path, "overrides": {"num_on_disk": 1}, **SINGLE}
    with inside.engine(model, optimizer=Lamb(model.parameters()), **options) as engine:
        for seed in range(NUM_STEPS):
            engine.step(FAMILY.batch(4, seed))
        state = engine.optimizer.state_dict()["state"]
        width = model.config.n_embd
        assert {tuple(one["sums"].shape) for one in state.values()} >= {(width,), (3 * width,)}
        assert all(int(one["calls"]) == NUM_STEPS for one in state.values())
        assert state[0]["sums"].dtype is torch.float64
        same(engine, plain(Lamb))


def test_what_sees_whole_parameters_updates_adapters(tmp_path: Path) -> None:
    """Of which most are smaller than what stands for larger ones."""

    def build() -> nn.Module:
        return nn.ModuleList([nn.Linear(300, 5), nn.Linear(5, 300)])

    expected, found = build(), build()
    found.load_state_dict(expected.state_dict())
    guest = Guest.of(torch.optim.Adafactor(found.parameters()))
    shapes = {k: one.shape for k, one in guest.kept(guest.defaults, (300, 5)).items()}
    assert shapes == {"step": (), "row_var": (300, 1), "col_var": (1, 5)}
    assert guest.kept(guest.defaults, (300,))["variance"].shape == (300,)


class Mixing(torch.optim.Optimizer):
    """Divides by the norm of all gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        every = [one for group in self.param_groups for one in group["params"]]
        norm = torch.stack([one.grad.norm() for one in every]).norm()
        for one in every:
            one.sub_(one.grad / norm, alpha=1e-2)


class Counting(torch.optim.Optimizer):
    """Counts steps where no state is."""

    def __init__(self, parameters: Any, *, in_groups: bool) -> None:
        super().__init__(parameters, {"lr": 1e-2, "calls": 0})
        self.calls, self._in_groups = 0, in_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if self._in_groups:
                group["calls"] += 1
            else:
                self.calls += 1
            for one in group["params"]:
                one.sub_(one.grad, alpha=group["lr"])


class Remembering(torch.optim.Optimizer):
    """Keeps a gradient in a dict of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.last: dict[Any, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad + self.last.get(one, 0.0), alpha=group["lr"])
                self.last[one] = one.grad.clone()


class Listing(torch.optim.Optimizer):
    """Keeps a list of gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one].setdefault("past", []).append(one.grad.clone())
                one.sub_(sum(self.state[one]["past"]), alpha=group["lr"])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: torch.optim.LBFGS(p), "cannot update one parameter at a time"),
        (lambda p: torch.optim.SparseAdam(p), "cannot update one parameter at a time"),
        (Mixing, "mixes parameters"),
        (lambda p: Counting(p, in_groups=True), "changes its own calls"),
        (lambda p: Counting(p, in_groups=False), "changes its own calls"),
        (Remembering, "mixes parameters, or keeps something outside"),
        (Listing, "keeps past, which is a list"),
        (lambda p: Growing(p, first=2), "keeps past, whose shape changes"),
    ],
)
def test_what_cannot_be_a_guest_is_refused_by_name(make: Make, said: str) -> None:
    model = FAMILY.build()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    optimizer = make(model.parameters())
    with pytest.raises(ValueError, match=rf"{type(optimizer).__name__} {said}.*Expected one of"):
        inside.engine(model, optimizer=optimizer, **SINGLE)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


class Growing(torch.optim.Optimizer):
    """Keeps more and more, from some step on."""

    def __init__(self, parameters: Any, first: int = 5) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self._first = first

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                state["calls"] = state.get("calls", 0) + 1
                past = state.get("past", one.grad.new_ones(1))
                more = one.grad.norm().view(1) if state["calls"] >= self._first else past[:0]
                state["past"] = torch.cat([past, more])
                one.sub_(one.grad / state["past"].sum(), alpha=group["lr"])


def test_state_that_does_not_follow_from_the_shape_is_an_error() -> None:
    model = FAMILY.build()
    engine = inside.engine(model, optimizer=Growing(model.parameters()), **SINGLE)
    for seed in range(4):
        engine.step(FAMILY.batch(4, seed))
    said = r"the optimizer Growing keeps .*'past': \(2,\).* as when it was tried"
    with pytest.raises(RuntimeError, match=said):
        print(engine.step(FAMILY.batch(4, 4)).loss, engine.state_dict())
    with pytest.raises(RuntimeError, match=said):
        engine.close()


def test_ranks_hold_no_pieces_of_whole_parameters() -> None:
    model = FAMILY.build()
    with pytest.raises(ValueError, match=r"Whole looks at whole parameters, and 2 ranks"):
        Inventory.of(
            model,
            optimizer=Whole(model.parameters()),
            precision="float32",
            base=None,
            layers=None,
            clip_norm=None,
            num_shares=2,
        )
