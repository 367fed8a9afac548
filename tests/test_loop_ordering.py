"""Every wait of a step in two sides matters: see test_ordering.py.

The loop here calls the model twice before the first backward, so that what waits on the host is of
two calls, and adds up the gradients of both.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from test_ordering import (
    LENGTH,
    WORDS,
    Batch,
    MakeSchedule,
    Result,
    TokenClassifier,
    Translator,
    build_of,
    build_three,
    build_tied,
    build_untied,
    contrast,
    is_same,
    kinds_of_waits,
    make_batch,
    make_engine,
    make_sequences,
    make_tokens,
    scheduled,
    waits_that_are_not_missed,
)
from torch import Tensor, nn

from l2l.run import Relay
from l2l.schedule import Lane, Shape, make_schedule


class ContrastiveTokens(TokenClassifier):
    """Its loss compares rows with each other."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(ids, labels)["logits"]
        return {"loss": contrast(logits, labels), "logits": logits}


def make_words(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, WORDS, (4, LENGTH), generator=generator),
        "labels": torch.arange(4),
    }


Loss = Callable[[Any, int], Tensor]
HOST = {"embedding": "host"}
TIGHT = {"num_slots": 1, "num_cells": 3, "num_gradient_slots": 1, "shares_memory": True}


def make_asking_batch(seed: int) -> Batch:
    """What the model is called with requires a gradient itself."""
    batch = make_batch(seed)
    return {**batch, "inputs": batch["inputs"].requires_grad_()}


def by_loss(outputs: Any, call: int) -> Tensor:
    return outputs["loss"]


def by_logits(outputs: Any, call: int) -> Tensor:
    return outputs["logits"].square().mean()


def by_turns(outputs: Any, call: int) -> Tensor:
    """The loss alone, then with something of the logits: so every side of a fused step runs."""
    return by_loss(outputs, call) + (by_logits(outputs, call) if call else 0.0)


MAIN: tuple[Any, ...] = (build_tied, make_tokens, by_turns, {**HOST, "overrides": TIGHT})
OTHERS: dict[str, tuple[Any, ...]] = {
    "one unit around the layers": (build_three, make_batch, by_logits, {}),
    "tied, on the host": (build_tied, make_tokens, by_turns, HOST),
    "untied, on the host": (build_untied, make_tokens, by_turns, HOST),
    "untied, on the device": (build_untied, make_tokens, by_turns, {"embedding": "device"}),
    "what it is called with": (build_three, make_asking_batch, by_turns, {}),
    "two stacks": (partial(build_of, Translator), make_sequences, by_turns, {}),
    "a loss that compares rows": (
        partial(build_of, ContrastiveTokens, tied=True),
        make_words,
        by_loss,
        HOST,
    ),
}
CASES = {"tied, tight": MAIN, **OTHERS}


def loop(
    model: nn.Module, optimizer: Any, batch: Callable[[int], Batch], loss: Loss, *expected: Result
) -> Result:
    """What two calls say, the gradients of both, and the weights after a step by them.

    With what is `expected` it ends with the first loss that is another: that says enough.
    """
    given = [batch(call) for call in range(2)]
    outputs = [model(**one) for one in given]
    disturb(model, batch(2))
    losses = [loss(one, call) for call, one in enumerate(outputs)]
    disturb(model, batch(3))
    said = [float(one.detach()) for one in losses]
    if expected and said != expected[0][0]:
        return said, {}
    for one in reversed(losses):
        (one / 2).backward()
    gradients = {
        f"{name} grad": torch.tensor(torch.nan) if one.grad is None else one.grad.clone()
        for name, one in model.named_parameters()
    }
    for call, one in enumerate(given):
        gradients |= {f"{name} {call}": x.grad for name, x in one.items() if x.grad is not None}
    optimizer.step()
    return said, gradients


def disturb(model: nn.Module, batch: Batch) -> None:
    """Let another step run: what the last one has left in cells is gone."""
    with torch.no_grad():
        model(**batch)


def engine_result(
    name: str, make: MakeSchedule, first: Lane | None, *expected: Result
) -> tuple[Result, list[Shape]]:
    build, batch, loss, settings = CASES[name]
    model = build()
    with scheduled(make) as shapes:
        engine = make_engine(model, first, autograd=True, **settings)
        try:
            said, gradients = loop(model, engine.optimizer, batch, loss, *expected)
        finally:
            engine.close()
    return (said, {**gradients, **model.state_dict()}), shapes


def plain_result(name: str) -> Result:
    build, batch, loss, _ = CASES[name]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    said, gradients = loop(model, optimizer, batch, loss)
    return said, {**gradients, **model.state_dict()}


def shapes_that_run(name: str) -> list[Shape]:
    """Of the schedules that are made, those that the loop really runs."""
    found: list[Shape] = []
    run = Relay.run

    def run_and_note(relay: Relay, step: Any, **how: Any) -> None:
        found.extend([step.program.shape] if step.program.shape.side else [])
        run(relay, step, **how)

    with mock.patch.object(Relay, "run", run_and_note):
        engine_result(name, make_schedule, None)
    return list(dict.fromkeys(found))


def assert_every_wait_is_missed(name: str) -> list[Shape]:
    expected, shapes = engine_result(name, make_schedule, None)
    plain = plain_result(name)
    assert expected[0] == pytest.approx(plain[0], rel=1e-5)
    for owner, tensor in plain[1].items():
        torch.testing.assert_close(expected[1][owner], tensor, rtol=1e-5, atol=1e-6)
    schedules = {shape: make_schedule(shape) for shape in shapes if shape.side}

    def is_right(make: MakeSchedule, first: Lane) -> bool:
        return is_same(engine_result(name, make, first, expected)[0], expected)

    for first in Lane:
        assert is_right(make_schedule, first), first
    used = shapes_that_run(name)
    for shape in used:
        others = {key: one for key, one in schedules.items() if key != shape}
        survivors = waits_that_are_not_missed(is_right, {**others, shape: schedules[shape]})
        assert not survivors, f"{shape.side}: {survivors}"
    return used


def test_a_step_in_two_sides_fails_when_any_wait_is_deleted() -> None:
    used = assert_every_wait_is_missed("tied, tight")
    assert [(shape.side, shape.fused) for shape in used] == [
        ("forward", True),
        ("outputs", False),
        ("backward", False),
        ("backward", True),
    ]
    assert sum(len(kinds_of_waits(make_schedule(shape))) for shape in used) > 100


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHERS)
def test_so_do_others(name: str) -> None:
    used = assert_every_wait_is_missed(name)
    assert any(shape.joint for shape in used) == ("compares rows" in name)
