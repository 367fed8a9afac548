"""Engines of one process share one budget of the device, which they use in turns.

What each has on the checking device is counted: while one is at work, the other has nothing there
but its buffers, so that the two together stay within what one of them was given.
"""

from typing import Any

import inside
import pytest
import torch
import torch.nn.functional as F
from families import build_llama, build_mixtral, causal_batch
from torch import Tensor, nn

import l2l
from l2l.device import CheckingDevice, checking
from l2l.device.limits import LIMITS, MemoryLimits

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
BUDGET, MUCH_MIB = "240MiB", 240 << 20  # the student stays on the device, with its state
LITTLE = 200_000  # bytes: tables of positions, and logits that the test has been given
PLACE = torch.device("cpu")
SINGLE: dict[str, Any] = {"precision": "float32", "prove": False}

pytestmark = pytest.mark.usefixtures("as_h200")


def student(**settings: Any) -> l2l.Engine:
    settings = {"device_memory": BUDGET, "optimizer": l2l.AdamW(lr=1e-3), **settings}
    return inside.engine(build_llama(**SIZES), device="cpu", **SINGLE, **settings)


def teacher(beside: l2l.Engine, **settings: Any) -> l2l.Engine:
    model = build_llama(**SIZES).requires_grad_(False)
    return inside.engine(model, **{**SINGLE, "device_memory": beside, **settings})


def words(seed: int = 0) -> dict[str, Tensor]:
    return {"input_ids": causal_batch(8, seed)["input_ids"]}


def test_whoever_begins_has_all_of_it() -> None:
    """Two steps, with words of a teacher between them, are the steps alone."""
    with student() as alone:
        expected = [alone.step(causal_batch(8, seed)).loss for seed in range(3)]
        weights = alone.state_dict()
    with student() as one:
        found = [one.step(causal_batch(8, 0)).loss]
        tail = dict(one.plan.choices)["tail"]
        assert "6 of them with their optimizer state" in tail
        much = inside.live_bytes(one)
        assert much > 20 << 20
        with teacher(one) as other:
            for seed in (1, 2):
                other.device.reset_peak()
                logits = other.predict(words()).logits
                assert inside.live_bytes(one) < LITTLE
                assert inside.live_bytes(one) + other.device.peak_bytes() <= MUCH_MIB
                found.append(one.step(causal_batch(8, seed)).loss)
                assert inside.live_bytes(other) < LITTLE
                assert inside.live_bytes(one) > much // 2
            assert dict(one.plan.choices)["device memory"] == "2 engines use it in turns"
            assert other.plan.budget_bytes == one.plan.budget_bytes == MUCH_MIB
            assert LIMITS.of_others(PLACE, one.device) == 0 or LIMITS.total(PLACE) is None
        assert one.state_dict().keys() == weights.keys()
        assert all(torch.equal(one.state_dict()[name], weights[name]) for name in weights)
    assert found == expected
    with torch.no_grad():
        assert torch.equal(logits, build_llama(**SIZES)(**words()).logits)


def test_generating_is_a_turn_as_well() -> None:
    options = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    with student() as one, teacher(one) as other:
        expected = other.generate(**words(), **options)
        one.step(causal_batch(8))
        assert torch.equal(other.generate(**words(), **options), expected)
        assert inside.live_bytes(one) < LITTLE
        one.step(causal_batch(8))
        assert inside.live_bytes(other) < LITTLE
        assert torch.equal(one.generate(**words(), **options)[:, :8], words()["input_ids"][:, :8])


def loop(model: nn.Module, other: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Its two models take turns between a forward and its backward, and in several ways."""
    said = []
    for seed in range(2):
        found = model(**causal_batch(8, seed))
        with torch.no_grad():
            wanted = other(**words(seed)).logits.log_softmax(-1)
        distance = F.kl_div(
            found.logits.log_softmax(-1), wanted, log_target=True, reduction="batchmean"
        )
        (found.loss + distance).backward()
        with torch.no_grad():
            other(**words(seed))
        optimizer.step()
        optimizer.zero_grad()
        said += [found.loss.detach(), distance.detach()]
    return said


@pytest.mark.parametrize("build", [build_llama, build_mixtral])
def test_a_loop_over_both_gives_the_bits_of_plain_pytorch(build: Any) -> None:
    """Of routers, what layers have left for the loss waits for the backward pass, too."""
    settings = {} if build is build_llama else {"output_router_logits": True}
    model, other = build(**settings).train(), build_llama().requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    expected = loop(model, other, optimizer)
    model, other = build(**settings).train(), build_llama().requires_grad_(False).eval()
    with (
        inside.engine(
            model,
            optimizer=l2l.AdamW(lr=1e-3, weight_decay=1e-2),
            device_memory=BUDGET,
            device="cpu",
            kernel="readable",
            microbatch_size=8,
            autograd=True,
            **SINGLE,
        ) as one,
        l2l.Engine(other, device_memory=one, autograd=True, microbatch_size=8, **SINGLE),
    ):
        found = loop(model, other, one.optimizer)
    assert [one.tolist() for one in found] == [one.tolist() for one in expected]


def test_a_teacher_that_is_asked_within_a_step_is_refused_and_can_be_asked_later() -> None:
    asks = [True]

    def loss(outputs: Any, batch: Any) -> Tensor:
        if asks:
            other.predict(words())
        return outputs.loss

    with student(loss=loss) as one, teacher(one) as other:
        wanted = r"engine.predict needs the device memory of an engine that is at work"
        with pytest.raises((RuntimeError, ValueError), match=wanted):
            one.step(causal_batch(8))
        asks.clear()
        other.predict(words())
        assert one.step(causal_batch(8)).loss > 0


def test_an_engine_that_is_torn_keeps_the_others_waiting_until_it_is_closed() -> None:
    one = student()
    with teacher(one) as other:
        one.step(causal_batch(8))
        inside.tear(one)
        with pytest.raises(RuntimeError, match=r"load, or close it"):
            other.predict(words())
        with pytest.warns(UserWarning, match="mix of two steps"):
            one.close()
        assert other.predict(words()).logits.isfinite().all()
        with teacher(other) as third:  # it goes on with those that are left
            third.predict(words())
            assert inside.live_bytes(other) < LITTLE


def test_what_cannot_share_is_refused_and_leaves_the_model_alone() -> None:
    with student() as one, student(stash="device") as apart:
        with pytest.raises(ValueError, match="stash='device'"):
            teacher(apart)
        with pytest.raises(ValueError, match="stash='device'"):
            teacher(one, stash="device")
        closed = one
    model = build_llama().requires_grad_(False)
    with pytest.raises(ValueError, match="is an engine that is closed"):
        l2l.Engine(model, device_memory=closed)
    assert model.lm_head.weight.isfinite().all()


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> MemoryLimits:
    """Of this test's engines alone: other tests leave engines to the collector."""
    found = MemoryLimits()
    monkeypatch.setattr(checking, "LIMITS", found)
    return found


def test_budgets_of_their_own_add_up_and_may_not_be_more_than_there_is(
    limits: MemoryLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckingDevice, "total_bytes", lambda _: 400 << 20)
    with student() as one:
        with teacher(one):
            assert limits.total(PLACE) == MUCH_MIB
        with teacher(one, device_memory="160MiB"):
            assert limits.total(PLACE) == 400 << 20
        with pytest.raises(
            ValueError,
            match=r"device_memory=161.00 MiB, but .* may take 240.00 MiB of "
            r"the 400.00 MiB .* device_memory=the other engine",
        ):
            teacher(one, device_memory="161MiB")
        assert limits.total(PLACE) == MUCH_MIB


def test_too_little_that_others_have_left_says_so(
    limits: MemoryLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, where the free memory is the budget if none is given."""
    with student(), teacher(None) as other:
        inside.planning(other).budget.nbytes = 1 << 20
        with pytest.raises(ValueError, match=r"may take 240.00 MiB of the device, so nothing"):
            other.predict(words())
