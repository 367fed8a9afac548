"""The engine as its user meets it: evaluate, predict, losses, schedulers, plan, close, failures.

That a step equals plain PyTorch in float32 is in test_parity.py; here are the other promises, and
training in bfloat16 against a reference that is written out.
"""

import gc
import math
import re
import warnings
import weakref
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import inside
import pytest
import torch
from families import (
    CLASSES,
    FAMILIES,
    HIDDEN,
    IGNORED,
    Batch,
    Family,
    build_gpt2,
    build_llama,
    causal_batch,
    prepare,
)
from reference import counts, loss_of, reference_gradients, split, train_plain
from sampled import sampled
from torch import Tensor, nn
from torch.optim import lr_scheduler

import l2l
from l2l.device import CheckingDevice
from l2l.device.byte_size import format_bytes
from l2l.engine import Engine
from l2l.parameter_server import ParameterServer
from l2l.proof import ProofMemory
from l2l.trial.trial import Trial

ROWS = 8
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.05}
SINGLE = {"foreach": False, "fused": False}  # torch's plain loop over parameters
SOME = ["llama_untied", "bert_classification", "mpnet", "hand_written"]


def make_engine(model: nn.Module, family: Family | None = None, **settings: Any) -> Engine:
    settings = {"precision": "float32", "device": "cpu", "kernel": "readable", **settings}
    return inside.engine(model, layers=family.layers if family else None, **settings)


def assert_same_state(found: nn.Module, expected: nn.Module) -> None:
    """Parameters and all buffers, also those that are not in a state_dict."""
    tensors = [
        dict(model.named_parameters()) | dict(model.named_buffers()) for model in (found, expected)
    ]
    assert list(tensors[0]) == list(tensors[1])
    unequal = [
        name for name, tensor in tensors[0].items() if not torch.equal(tensor, tensors[1][name])
    ]
    assert not unequal


# --------------------------------------------------------------------------------------------------
# Evaluate and predict


@pytest.mark.parametrize("name", SOME)
def test_evaluate_gives_the_loss_of_the_whole_batch(name: str) -> None:
    family = FAMILIES[name]
    batch = family.batch(ROWS)
    with torch.no_grad():
        expected = float(loss_of(family.build().eval(), batch))
    for size in (ROWS, 3, 1):
        with make_engine(family.build(), family, microbatch_size=size) as engine:
            found = engine.evaluate(batch)
        if size == ROWS:
            assert found == expected
        assert found == pytest.approx(expected, rel=1e-6)


def test_evaluate_leaves_dropout_out_and_training_alone() -> None:
    def build() -> nn.Module:
        return build_gpt2(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)

    def train(*, evaluating: bool) -> nn.Module:
        model = build()
        with make_engine(model, optimizer=l2l.AdamW(**ADAMW), microbatch_size=3, seed=1) as engine:
            for seed in range(2):
                if evaluating:
                    assert engine.evaluate(causal_batch(4)) == engine.evaluate(causal_batch(4))
                engine.step(causal_batch(ROWS, seed))
        return model

    assert_same_state(train(evaluating=True), train(evaluating=False))
    with make_engine(build()) as engine, torch.no_grad():
        expected = loss_of(build().eval(), causal_batch(ROWS))
        assert engine.evaluate(causal_batch(ROWS)) == float(expected)


@pytest.mark.parametrize("size", [ROWS, 3], ids=["one", "three"])
@pytest.mark.parametrize("name", ["llama_untied", "bert_classification", "vit_classification"])
def test_predict_gives_the_outputs_of_the_model_row_by_row(name: str, size: int) -> None:
    family = FAMILIES[name]
    batch = {key: tensor for key, tensor in family.batch(ROWS).items() if key != "labels"}
    plain = family.build().eval()
    with torch.no_grad():
        parts = [plain(**microbatch).logits for microbatch in split(batch, size)]
        whole = plain(**batch).logits
    with make_engine(family.build(), family, microbatch_size=size) as engine:
        outputs = engine.predict(batch)
    assert type(outputs) is type(plain(**batch))
    assert torch.equal(outputs.logits, torch.cat(parts))
    torch.testing.assert_close(outputs.logits, whole, rtol=1e-5, atol=1e-6)
    assert not outputs.logits.requires_grad
    assert outputs.loss is None


def test_predict_with_labels_gives_the_loss_too() -> None:
    family = FAMILIES["hand_written"]
    batch = family.batch(ROWS)
    with torch.no_grad():
        expected = family.build().eval()(**batch)
    with make_engine(family.build()) as engine:
        found = engine.predict(batch)
    assert torch.equal(found["logits"], expected["logits"])
    assert torch.equal(found["loss"], expected["loss"])


def test_predict_before_between_and_after_steps() -> None:
    family = FAMILIES["llama_untied"]
    plain, model = family.build(), family.build()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW, **SINGLE)

    def expected() -> Tensor:
        with torch.no_grad():
            return plain.eval()(**family.batch(3)).logits

    with make_engine(model, optimizer=l2l.AdamW(**ADAMW), microbatch_size=3) as engine:
        for seed in range(2):
            assert torch.equal(engine.predict(family.batch(3)).logits, expected())
            engine.step(family.batch(ROWS, seed))
            batches = [family.batch(ROWS, seed)]
            train_plain(plain.train(), batches, optimizer=optimizer, rule=family.rule, size=3)
        assert torch.equal(engine.predict(family.batch(3)).logits, expected())
    assert_same_state(model, plain)


# --------------------------------------------------------------------------------------------------
# Where values are stashed, and in which dtype


def train(
    model: nn.Module, family: Family, *, steps: int = 2, size: int = 2, **settings: Any
) -> list[float]:
    settings = {"optimizer": l2l.AdamW(**ADAMW), **settings}
    with make_engine(model, family, microbatch_size=size, **settings) as engine:
        return [engine.step(family.batch(ROWS, seed)).loss for seed in range(steps)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_stashing_on_the_device_gives_the_same_bits(precision: str) -> None:
    family = FAMILIES["mpnet"]
    models = {"host": family.build(), "device": family.build()}
    losses = [
        train(model, family, stash=stash, precision=precision) for stash, model in models.items()
    ]
    assert losses[0] == losses[1]
    assert_same_state(models["host"], models["device"])


def rounded_half_up(master: Tensor) -> Tensor:
    """To bfloat16, ties away from zero."""
    upper = (master.view(torch.int32) + 0x8000) >> 16
    return upper.to(torch.int16).view(torch.bfloat16)


def train_bfloat16(
    masters: nn.Module, runs: nn.Module, batches: list[Batch], *, family: Family, size: int
) -> list[float]:
    """Float32 masters, and a model that runs in bfloat16 with float32 buffers.

    Each step: weights are the masters, rounded. Gradients of microbatches are added in float32 and
    rounded to bfloat16 once, as they leave the device. AdamW works on the masters.
    """
    optimizer = torch.optim.AdamW(masters.parameters(), **ADAMW, **SINGLE)
    for parameter in runs.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    pairs = list(zip(masters.parameters(), runs.parameters(), strict=True))
    losses = []
    for batch in batches:
        sums: dict[nn.Parameter, Tensor] = {}
        total = torch.zeros(())
        for master, parameter in pairs:
            parameter.data.copy_(rounded_half_up(master.data))
        microbatches = split(batch, size)
        numbers = [counts(family.rule, microbatch) for microbatch in microbatches]
        for microbatch, number in zip(microbatches, numbers, strict=True):
            runs.zero_grad()
            share = number / sum(numbers)
            loss = loss_of(runs, microbatch)
            (loss * share).backward()
            total = total + (loss.detach() * share).float()
            for master, parameter in pairs:
                if parameter.grad is not None:
                    gradient = parameter.grad.float()
                    sums[master] = sums[master] + gradient if master in sums else gradient
        optimizer.zero_grad()
        for master, gradient in sums.items():
            master.grad = gradient.to(torch.bfloat16).float()
        optimizer.step()
        losses.append(float(total))
    return losses


@pytest.mark.parametrize("size", [ROWS, 3], ids=["one", "three"])
@pytest.mark.parametrize("name", ["llama_untied", "hand_written"])
def test_bfloat16_training_is_rounded_where_it_says_and_nowhere_else(name: str, size: int) -> None:
    family = FAMILIES[name]
    masters, model = family.build(), family.build()
    batches = [family.batch(ROWS, seed) for seed in range(2)]
    expected = train_bfloat16(masters, family.build(), batches, family=family, size=size)
    losses = train(model, family, size=size, precision="bfloat16")
    assert losses == expected
    assert_same_state(model, masters)


def test_bfloat16_keeps_the_masters_bits_that_do_not_cross_the_link() -> None:
    """With a learning rate too small for most bfloat16 weights to move, masters still move."""
    family = FAMILIES["llama_untied"]
    model, before = family.build(), family.build()
    train(model, family, precision="bfloat16", optimizer=l2l.SGD(lr=1e-4))
    for name, layer in before.model.layers.named_parameters():
        found = model.model.layers.get_parameter(name)
        same = rounded_half_up(found) == rounded_half_up(layer)
        assert same.float().mean() > 0.9, name
        assert not torch.equal(found[same], layer[same]) or layer.dim() == 1, name


# --------------------------------------------------------------------------------------------------
# The user's own loss


def summed_loss(outputs: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Sum over labels, and how many there are."""
    logits, labels = outputs["logits"][:, :-1], batch["labels"][:, 1:]
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss, (labels != IGNORED).sum()


def row_loss(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    """A mean over rows that has nothing to do with the model's own loss."""
    return (outputs["logits"].flatten(1).square().mean(dim=1) * (1 + batch["labels"])).mean()


def gradients_with(loss: Any, family: Family, size: int) -> tuple[Any, dict[str, Tensor]]:
    recorder = l2l.RecordGradients()
    with make_engine(
        family.build(), family, loss=loss, optimizer=recorder, microbatch_size=size
    ) as engine:
        report = engine.step(family.batch(ROWS))
    return report, recorder.gradients


def assert_close_gradients(found: dict[str, Tensor], model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        difference = (found[name] - parameter.grad).abs().max()
        assert difference <= 1e-6 * max(1.0, float(parameter.grad.abs().max())), name


@pytest.mark.parametrize("size", [ROWS, 3, 1], ids=["one", "three", "eight"])
def test_a_loss_given_as_sum_and_weight_is_that_of_the_whole_batch(size: int) -> None:
    family = FAMILIES["llama_untied"]
    batch = family.batch(ROWS)
    plain = family.build()
    total, weight = summed_loss(plain(**batch), batch)
    (total / weight).backward()
    report, found = gradients_with(summed_loss, family, size)
    assert report.loss == pytest.approx((total / weight).item(), rel=1e-6)
    assert_close_gradients(found, plain)
    norm = torch.stack([parameter.grad.norm() for parameter in plain.parameters()]).norm()
    assert report.gradient_norm == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("size", [ROWS, 3, 1], ids=["one", "three", "eight"])
def test_a_loss_given_as_a_number_is_a_mean_over_rows(size: int) -> None:
    family = FAMILIES["bert_classification"]
    batch = family.batch(ROWS)
    plain = family.build()
    loss = row_loss(plain(**batch), batch)
    loss.backward()
    report, found = gradients_with(row_loss, family, size)
    assert report.loss == pytest.approx(loss.item(), rel=1e-6)
    assert_close_gradients(found, plain)


def test_the_users_loss_is_what_evaluate_gives() -> None:
    family = FAMILIES["llama_untied"]
    batch = family.batch(ROWS)
    with torch.no_grad():
        total, weight = summed_loss(family.build().eval()(**batch), batch)
    for size in (ROWS, 3):
        with make_engine(family.build(), loss=summed_loss, microbatch_size=size) as engine:
            assert engine.evaluate(batch) == pytest.approx((total / weight).item(), rel=1e-6)


def test_the_norm_in_the_report_is_that_of_all_gradients() -> None:
    family = FAMILIES["hand_written"]
    microbatches = split(family.batch(ROWS), 3)
    numbers = [counts(family.rule, microbatch) for microbatch in microbatches]
    _, gradients = reference_gradients(family.build(), microbatches, numbers)
    norms = [gradient.norm() for gradient in gradients.values() if gradient is not None]
    with make_engine(family.build(), family, microbatch_size=3) as engine:
        report = engine.step(family.batch(ROWS))
        assert report.gradient_norm == pytest.approx(float(torch.stack(norms).norm()), rel=1e-5)
        assert report.num_tokens == family.batch(ROWS)["ids"].numel()
        assert not report.skipped
        assert "loss=" in repr(report)


# --------------------------------------------------------------------------------------------------
# The optimizer as PyTorch sees it

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=6),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_drive_the_engine(name: str) -> None:
    """Learning rate, and with one cycle also betas; warnings would be errors here."""
    family = FAMILIES["bert_classification"]
    plain, model = family.build(), family.build()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW, **SINGLE)
    scheduler = SCHEDULERS[name](optimizer)
    expected, rates = [], []
    for seed in range(4):
        batches = [family.batch(ROWS, seed)]
        expected += train_plain(plain, batches, optimizer=optimizer, rule="rows", size=3)
        rates.append(scheduler.get_last_lr())
        scheduler.step()
    assert rates[0] != rates[1]

    with (
        warnings.catch_warnings(),
        make_engine(model, family, optimizer=l2l.AdamW(**ADAMW), microbatch_size=3) as engine,
    ):
        warnings.simplefilter("error")
        scheduler = SCHEDULERS[name](engine.optimizer)
        losses, found_rates = [], []
        for seed in range(4):
            losses.append(engine.step(family.batch(ROWS, seed)))
            found_rates.append(scheduler.get_last_lr())
            scheduler.step()
        losses = [report.loss for report in losses]
    assert found_rates == rates
    assert losses == expected
    assert_same_state(model, plain)


def test_the_state_of_the_optimizer_has_the_names_and_bits_of_torch() -> None:
    family = FAMILIES["hand_written"]
    plain, model = family.build(), family.build()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW, **SINGLE)
    batches = [family.batch(ROWS, seed) for seed in range(2)]
    train_plain(plain, batches, optimizer=optimizer, rule=family.rule, size=3)
    with make_engine(model, optimizer=l2l.AdamW(**ADAMW), microbatch_size=3) as engine:
        assert engine.optimizer.state_dict()["state"] == {}
        for batch in batches:
            engine.step(batch)
        found = engine.optimizer.state_dict()
        expected = optimizer.state_dict()
        assert found["state"].keys() == expected["state"].keys()
        for key, state in expected["state"].items():
            assert found["state"][key].keys() == state.keys() == {"step", "exp_avg", "exp_avg_sq"}
            for name, tensor in state.items():
                assert torch.equal(found["state"][key][name], tensor), name
        group = found["param_groups"][0]
        assert {key: group[key] for key in ADAMW} == ADAMW
        assert group["params"] == expected["param_groups"][0]["params"]


def test_an_optimizer_is_made_when_none_is_given() -> None:
    family = FAMILIES["bert_classification"]
    plain, model = family.build(), family.build()
    optimizer = torch.optim.AdamW(plain.parameters(), **SINGLE)
    train_plain(plain, [family.batch(ROWS)], optimizer=optimizer, rule="rows", size=ROWS)
    train(model, family, steps=1, size=ROWS, optimizer=None)
    assert_same_state(model, plain)


# --------------------------------------------------------------------------------------------------
# The plan, and memory


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_plan_is_a_ledger_that_sums_up(precision: str) -> None:
    family = FAMILIES["llama_untied"]
    with make_engine(family.build(), precision=precision, microbatch_size=2) as engine:
        engine.step(family.batch(ROWS))
        plan = engine.plan
    numel = sum(parameter.numel() for parameter in family.build().parameters())
    for place in ("device", "host"):
        lines = [line.nbytes for line in plan.ledger if line.place == place]
        assert plan.total_bytes(place) == sum(lines) > 0
        assert min(lines) >= 0
    by_purpose = {(line.place, line.purpose): line.nbytes for line in plan.ledger}
    assert len(by_purpose) == len(plan.ledger)
    masters = by_purpose["host", "weights"] + by_purpose.get(("host", "remainders"), 0)
    assert 4 * numel <= masters <= 4 * numel * 1.5  # padding weighs much in a tiny model
    for moment in ("exp_avg", "exp_avg_sq"):
        assert 4 * numel <= by_purpose["host", moment] <= 4 * numel * 1.5
    for purpose in ("weight slots, streamed", "gradient slots, streamed", "boundary cells"):
        assert by_purpose["device", purpose] > 0
    assert by_purpose["host", "stash"] > 0


def test_the_plan_prints_every_line_and_choice() -> None:
    family = FAMILIES["llama_untied"]
    with make_engine(family.build(), microbatch_size=2, stash="device") as engine:
        before = str(engine.plan)
        engine.step(family.batch(ROWS))
        plan = engine.plan
    assert "loss averages over" in before
    text = str(plan)
    for line in plan.ledger:
        assert line.purpose in text
    for name, value in plan.choices:
        assert name in text
        assert value in text
    choices = dict(plan.choices)
    assert choices["layers"] == "model.layers, 3 of them"
    assert choices["precision"] == "float32"
    assert choices["stash"] == "device"
    assert choices["microbatch"] == "2 rows"
    assert choices["tail"] == "none: all layers are streamed"
    assert choices["layers run"] == "as they are"
    assert "labels that are not ignored" in choices["loss averages over"]


BUDGETED = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
MIN_MIB, MAX_MIB = 146, 240  # all layers streamed; everything on the device, with its state


def train_in(budget: str | None, batches: list[Batch], **settings: Any) -> tuple[Any, ...]:
    """Losses and weights of training in a budget, and the last plan."""
    model = build_llama(**BUDGETED)
    with make_engine(
        model, device_memory=budget, optimizer=l2l.AdamW(**ADAMW), seed=0, **settings
    ) as engine:
        losses = [engine.step(batch).loss for batch in batches]
        plan = engine.plan
    return losses, model, plan


def longer(batch: Batch) -> Batch:
    """Rows of twice the length."""
    return {name: torch.cat([tensor, tensor], dim=1) for name, tensor in batch.items()}


def assert_close_training(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    for one, other in zip(found[1].parameters(), expected[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("as_h200")
@pytest.mark.parametrize(
    ("clip_norm", "size"),
    sampled(product((None, 0.5), (None, 4)), lambda one: one in ((None, 4), (0.5, None))),
)
def test_training_in_any_budget_is_the_same(clip_norm: float | None, size: int | None) -> None:
    batches = [causal_batch(ROWS, seed) for seed in range(3)]
    settings: dict[str, Any] = {"clip_norm": clip_norm, "microbatch_size": size}
    expected = train_in(None, batches, **settings)
    tails = []
    for budget in (MIN_MIB, 155, MAX_MIB):
        found = train_in(f"{budget}MiB", batches, **settings)
        assert_close_training(found, expected)
        plan = found[2]
        assert plan.budget_bytes == budget << 20
        assert plan.total_bytes("device") <= plan.budget_bytes
        tails.append(dict(plan.choices)["tail"])
    assert tails[0] == "none: all layers are streamed"
    assert tails[-1].startswith("the last 6 of 6 layers")
    assert len(set(tails)) == 3


@pytest.mark.usefixtures("as_h200")
@pytest.mark.parametrize("budget", [MIN_MIB, 180, MAX_MIB])
def test_the_ledger_of_a_budget_sums_up(budget: int) -> None:
    batches = [causal_batch(ROWS)]
    _, _, plan = train_in(f"{budget}MiB", batches, clip_norm=0.5)
    device = [line for line in plan.ledger if line.place == "device"]
    always = sum(line.nbytes for line in device if line.phase == "always")
    phases = plan.phases()
    assert phases.keys() == {line.phase for line in device} - {"always"}
    for phase, nbytes in phases.items():
        assert nbytes == always + sum(line.nbytes for line in device if line.phase == phase)
    assert plan.total_bytes("device") == max(phases.values()) <= budget << 20
    host = [line.nbytes for line in plan.ledger if line.place == "host"]
    assert plan.total_bytes("host") == sum(host) > 0
    text = str(plan)
    assert f"of {format_bytes(budget << 20)}" in text
    for phase in phases:
        assert f"{phase}: " in text
    assert plan.predicted_seconds is not None
    assert plan.num_tokens == batches[0]["input_ids"].numel()
    assert f"{plan.predicted_seconds:.3f} s a step" in text
    assert f"{plan.bound} bound" in text


@pytest.mark.usefixtures("as_h200")
def test_a_budget_that_is_too_small_names_one_that_is_not() -> None:
    model, batch = build_llama(**BUDGETED), causal_batch(ROWS)
    with (
        make_engine(model, device_memory="100MiB") as engine,
        pytest.raises(ValueError, match=r"found a budget of 100.00 MiB") as refused,
    ):
        engine.step(batch)
    assert_same_state(model, build_llama(**BUDGETED))
    advice = re.search(r"device_memory='(\d+MiB)'", str(refused.value))
    assert advice is not None
    losses = train_in(advice[1], [batch, batch])[0]
    assert losses == pytest.approx(train_in(None, [batch, batch])[0], abs=1e-5)


@pytest.mark.parametrize("wrong", ["0GiB", -1, "much"])
def test_a_budget_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="device_memory="):
        make_engine(build_llama(), device_memory=wrong)


@pytest.mark.usefixtures("as_h200")
@pytest.mark.parametrize("num_steps", [2, 6])
@pytest.mark.parametrize("budget", [None, "180MiB"])
def test_what_was_measured_is_in_the_plan_after_some_steps(
    budget: str | None, num_steps: int
) -> None:
    batches = [causal_batch(ROWS, seed) for seed in range(num_steps)]
    plan = train_in(budget, batches)[2]
    if num_steps == 2:
        assert plan.measured == ()
        return
    line, *of_bounds = plan.measured
    assert line in str(plan)
    assert [one in str(plan) for one in of_bounds] == [True] * (budget is not None)
    assert re.match(r"measured: \d+\.\d{3} s a step, [\d,]+ tokens/s", line)
    assert ("expected" in line) == (budget is not None)


@pytest.mark.usefixtures("as_h200")
@pytest.mark.parametrize(
    ("budget", "clip_norm"),
    sampled(product((170, MAX_MIB), (None, 0.5)), lambda one: one in ((170, 0.5), (MAX_MIB, None))),
)
def test_a_longer_batch_is_planned_anew_and_nothing_is_lost(
    budget: int, clip_norm: float | None
) -> None:
    """State and weights that stayed on the device come back before they are placed again."""
    short = [causal_batch(ROWS, seed) for seed in range(2)]
    batches = [*short, longer(short[0]), short[1], longer(longer(short[1])), short[0]]
    expected = train_in(None, batches, clip_norm=clip_norm)
    found = train_in(f"{budget}MiB", batches, clip_norm=clip_norm)
    assert_close_training(found, expected)
    tokens = dict(found[2].choices)["microbatch"]
    assert tokens == f"{ROWS} rows, {batches[4]['input_ids'].numel():,} tokens"


def run_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, verbs: set[str], *, times: int = 1
) -> list[str]:
    """Let the device have no memory the first times that lines of a kind run; returns these."""
    failed: list[str] = []
    submit = CheckingDevice.submit

    def failing(device: CheckingDevice, lane: Any, text: str, work: Any) -> None:
        if text.startswith(tuple(verbs)) and len(failed) < times:
            failed.append(text)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 MiB. GPU 0 has")
        submit(device, lane, text, work)

    monkeypatch.setattr(CheckingDevice, "submit", failing)
    return failed


@pytest.mark.usefixtures("as_h200")
@pytest.mark.parametrize(
    ("verb", "clip_norm"),
    sampled(
        [*product(("forward L", "loss"), (None, 0.5)), ("backward L", 0.5)],
        lambda one: one in (("forward L", 0.5), ("loss", None), ("backward L", 0.5)),
    ),
)
def test_a_step_that_the_device_has_too_little_memory_for_is_done_again(
    verb: str,
    clip_norm: float | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    batches = [causal_batch(ROWS, seed) for seed in range(3)]
    settings: dict[str, Any] = {"clip_norm": clip_norm, "overrides": {"num_tail": 1}}
    expected = train_in("300MiB", batches, **settings)
    failed = run_out_of_memory(monkeypatch, {verb}, times=2)
    found = train_in("300MiB", batches, **settings)
    assert len(failed) == 2
    assert_close_training(found, expected)
    assert found[2].total_bytes("device") < (300 - 64) << 20
    told = [one.getMessage() for one in caplog.records if "done again" in one.getMessage()]
    assert len(told) == 2
    assert "CUDA out of memory. Tried to allocate 1 MiB)" in told[0]
    assert "leaves 64.00 MiB of the budget free" in told[1]


@pytest.mark.usefixtures("as_h200")
def test_state_comes_back_from_a_device_whose_first_step_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next plan may have it on the host."""
    placed: list[str] = []
    place = ParameterServer.place_state

    def note(server: ParameterServer, name: str, device: torch.device) -> None:
        placed.append(name)
        place(server, name, device)

    monkeypatch.setattr(ParameterServer, "place_state", note)
    settings: dict[str, Any] = {"overrides": {"num_tail": 1, "num_device_states": 1}}
    with make_engine(build_llama(**BUDGETED), device_memory="300MiB", **settings) as engine:
        run_out_of_memory(monkeypatch, {"forward L"})
        engine.step(causal_batch(ROWS))
        last = f"L{inside.partition(engine).num_layers - 1}"
    assert placed.count(last) >= 4  # back at first, there, back and there again


def test_a_device_with_too_little_memory_for_a_trial_says_what_would_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_out(_: Trial) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with make_engine(build_llama(**BUDGETED)) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(Trial, "_weights", run_out)
            with pytest.raises(
                ValueError,
                match=r"the largest layer .* are needed, on the device \(device_memory\)",
            ):
                engine.step(causal_batch(ROWS))
        assert math.isfinite(engine.step(causal_batch(ROWS)).loss)


@pytest.mark.usefixtures("as_h200")
def test_a_proof_that_needs_more_memory_than_planned_is_made_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = causal_batch(ROWS)
    with make_engine(build_llama(**BUDGETED), device_memory="300MiB", prove=False) as engine:
        expected = engine.step(batch).loss
    inside.remember_proofs_in(ProofMemory(None))
    failed = run_out_of_memory(monkeypatch, {"loss"})
    with make_engine(build_llama(**BUDGETED), device_memory="300MiB") as engine:
        assert engine.step(batch).loss == pytest.approx(expected, abs=1e-6)
    assert len(failed) == 1
    assert "a step needed more device memory than planned" in caplog.text


@pytest.mark.usefixtures("as_h200")
def test_a_step_that_has_begun_to_update_is_not_done_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_out_of_memory(monkeypatch, {"backward L"})
    settings: dict[str, Any] = {"overrides": {"num_tail": 1}, "prove": False}
    engine = make_engine(build_llama(**BUDGETED), device_memory="300MiB", **settings)
    with pytest.raises(torch.OutOfMemoryError):
        engine.step(causal_batch(ROWS))
    with pytest.raises(RuntimeError, match="failed"):
        engine.step(causal_batch(ROWS))
    with pytest.warns(UserWarning, match="weights"):
        engine.close()


@pytest.mark.usefixtures("as_h200")
def test_predictions_and_losses_are_made_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = causal_batch(ROWS)
    with make_engine(build_llama(**BUDGETED), device_memory="220MiB") as engine:
        expected = engine.evaluate(batch), engine.predict(batch)["logits"]
    failed = run_out_of_memory(monkeypatch, {"loss"})
    with make_engine(build_llama(**BUDGETED), device_memory="220MiB") as engine:
        assert engine.evaluate(batch) == pytest.approx(expected[0], abs=1e-6)
        torch.testing.assert_close(engine.predict(batch)["logits"], expected[1])
    assert failed


@pytest.mark.usefixtures("as_h200")
@pytest.mark.parametrize("budget", [None, "220MiB"])
def test_a_device_without_memory_for_any_plan_says_so(
    budget: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_out_of_memory(monkeypatch, {"loss"}, times=100)
    with (
        make_engine(build_llama(**BUDGETED), device_memory=budget) as engine,
        pytest.raises((torch.OutOfMemoryError, ValueError), match=r"out of memory|needs .* of"),
    ):
        engine.step(causal_batch(ROWS))


@pytest.mark.usefixtures("as_h200")
def test_a_small_first_batch_does_not_make_microbatches_small() -> None:
    with make_engine(build_llama(**BUDGETED), device_memory=f"{MAX_MIB}MiB") as engine:
        rows = []
        for number in (1, ROWS, 2, 2 * ROWS, ROWS):
            engine.evaluate(causal_batch(number))
            rows.append(dict(engine.plan.choices)["microbatch"].split()[0])
    assert rows == ["1", "8", "8", "16", "16"]


@pytest.mark.usefixtures("as_h200")
def test_a_batch_that_does_not_fit_leaves_the_engine_usable() -> None:
    batch = causal_batch(ROWS)
    long = {name: tensor.repeat(1, 200) for name, tensor in batch.items()}
    expected = train_in(None, [batch, batch], clip_norm=0.5)
    model = build_llama(**BUDGETED)
    settings = {"optimizer": l2l.AdamW(**ADAMW), "clip_norm": 0.5, "seed": 0}
    with make_engine(model, device_memory="200MiB", **settings) as engine:
        losses = [engine.step(batch).loss]
        before = dict(engine.plan.choices)
        assert "with their optimizer state" in before["tail"]
        with pytest.raises(ValueError, match="shorter rows"):
            engine.step(long)
        losses.append(engine.step(batch).loss)
        assert dict(engine.plan.choices) == before
    assert_close_training((losses, model), expected)


@pytest.mark.usefixtures("as_h200")
def test_evaluating_in_a_budget_sees_the_updated_weights() -> None:
    batch = causal_batch(ROWS)
    losses = []
    for budget in (None, f"{MIN_MIB}MiB", f"{MAX_MIB}MiB"):
        settings = {"optimizer": l2l.AdamW(**ADAMW), "device_memory": budget, "clip_norm": 0.5}
        with make_engine(build_llama(**BUDGETED), **settings) as engine:
            engine.step(batch)
            losses.append([engine.evaluate(batch), engine.evaluate(longer(batch))])
            engine.step(batch)
            losses[-1].append(engine.evaluate(batch))
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[2] == pytest.approx(losses[0], abs=1e-5)


def peak(*, num_layers: int = 4, num_microbatches: int = 8, stash: str = "host") -> int:
    """Most device memory that the second step of training takes."""
    model = build_llama(num_hidden_layers=num_layers)
    batch = causal_batch(2 * num_microbatches)
    with make_engine(model, microbatch_size=2, stash=stash) as engine:
        engine.step(batch)
        engine.device.reset_peak()
        engine.step(batch)
        return engine.device.peak_bytes()


def test_device_memory_is_constant_in_the_number_of_layers() -> None:
    peaks = [peak(num_layers=number) for number in (4, 8, 16)]
    assert max(peaks) <= 1.01 * min(peaks), peaks


def test_device_memory_is_constant_in_the_number_of_microbatches() -> None:
    peaks = [peak(num_microbatches=number) for number in (2, 8, 32)]
    assert max(peaks) <= 1.01 * min(peaks), peaks


def test_a_stash_on_the_device_is_counted_there() -> None:
    assert peak(stash="device") > 1.1 * peak()
    assert peak(stash="device", num_layers=8) > 1.1 * peak(stash="device")


# --------------------------------------------------------------------------------------------------
# Open and close


def test_a_closed_engine_leaves_an_ordinary_module() -> None:
    family = FAMILIES["llama_untied"]
    model = family.build()
    model.model.layers[0].requires_grad_(False)
    parameters = dict(model.named_parameters())
    required = {name: parameter.requires_grad for name, parameter in parameters.items()}
    modules = list(model.modules())
    hooks = [dict(module._forward_hooks) for module in modules]
    train(model, family)

    assert list(model.modules()) == modules
    assert [dict(module._forward_hooks) for module in modules] == hooks
    assert "forward" not in vars(model)
    found = dict(model.named_parameters())
    assert list(found) == list(parameters)
    for name, parameter in parameters.items():
        assert found[name] is parameter
        assert parameter.requires_grad == required[name]
        assert parameter.dtype is torch.float32
        assert parameter.is_contiguous()
        assert parameter.isfinite().all()
        assert parameter.untyped_storage().nbytes() == 4 * parameter.numel()
    loss_of(model, family.batch(2)).backward()
    assert all((p.grad is not None) == p.requires_grad for p in parameters.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_model_in_bfloat16_is_one_again_when_closed(precision: str) -> None:
    family = FAMILIES["llama_untied"]
    model = family.build().to(torch.bfloat16)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    train(model, family, precision=precision)
    for name, parameter in model.named_parameters():
        assert parameter.dtype is torch.bfloat16
        assert not torch.equal(parameter, before[name])


def test_closing_without_a_step_changes_nothing() -> None:
    for precision in ("float32", "bfloat16"):
        model = FAMILIES["batchnorm"].build()
        make_engine(model, precision=precision).close()
        assert_same_state(model, FAMILIES["batchnorm"].build())


def test_parameters_are_hollow_while_the_engine_is_open() -> None:
    family = FAMILIES["llama_untied"]
    model = family.build()
    with make_engine(model) as engine:
        engine.step(family.batch(2))
        for parameter in model.parameters():
            with torch._C.DisableTorchFunctionSubclass():  # what it holds itself: see l2l/held.py
                assert parameter.isnan().all()
                assert parameter.untyped_storage().nbytes() == 4
            assert parameter.isfinite().all()
            assert parameter.shape.numel() > 1
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_model_can_have_one_engine_after_another() -> None:
    family = FAMILIES["bert_classification"]
    model, plain = family.build(), family.build()
    for _ in range(2):
        train(model, family, steps=1)
        train(plain, family, steps=1)
    assert_same_state(model, plain)


def test_a_closed_engine_refuses_and_closes_again_quietly() -> None:
    family = FAMILIES["bert_classification"]
    engine = make_engine(family.build())
    with engine as same:
        assert same is engine
    engine.close()
    for method in (engine.step, engine.evaluate, engine.predict):
        with pytest.raises(RuntimeError, match="closed"):
            method(family.batch(2))


def test_leaving_the_context_by_an_error_gives_the_weights_back() -> None:
    family = FAMILIES["bert_classification"]
    model = family.build()

    def fail() -> None:
        with make_engine(model):
            raise KeyError("from the user's own code")

    with pytest.raises(KeyError, match="own code"):
        fail()
    assert_same_state(model, family.build())


class NormsAround(nn.Module):
    """Batch norms before and after the layers: buffers that change outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.BatchNorm1d(HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.after = nn.BatchNorm1d(HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.register_buffer("constant", torch.rand(HIDDEN), persistent=False)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.before(inputs.mean(dim=1)) * self.constant
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.after(hidden))
        return {"loss": nn.functional.cross_entropy(logits, labels)}


def own_loss(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
    return outputs["loss"]


@pytest.mark.parametrize("loss", [None, own_loss], ids=["of_the_model", "of_the_user"])
@pytest.mark.parametrize("size", [ROWS, 4], ids=["one", "two"])
def test_buffers_around_the_layers_are_those_of_plain_training(size: int, loss: Any) -> None:
    plain, model = prepare(NormsAround), prepare(NormsAround)
    batches = [FAMILIES["batchnorm"].batch(ROWS, seed) for seed in range(3)]
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW, **SINGLE)
    expected = train_plain(plain, batches, optimizer=optimizer, rule="rows", size=size)
    settings = {"optimizer": l2l.AdamW(**ADAMW), "microbatch_size": size, "loss": loss}
    with make_engine(model, **settings) as engine:
        losses = [engine.step(batch).loss for batch in batches]
        evaluated = engine.evaluate(batches[0])
    assert losses == expected
    assert_same_state(model, plain)
    with torch.no_grad():
        found = loss_of(plain.eval(), batches[0])
    assert evaluated == pytest.approx(float(found), rel=1e-6)


# --------------------------------------------------------------------------------------------------
# Failures


class FailingLoss:
    """The mean over rows; fails at one of its calls after `arm`."""

    def __init__(self) -> None:
        self.remaining: int | None = None

    def arm(self, calls: int) -> None:
        self.remaining = calls

    def __call__(self, outputs: Any, batch: Mapping[str, Any]) -> Tensor:
        if self.remaining is not None:
            self.remaining -= 1
            if self.remaining == 0:
                self.remaining = None
                raise ArithmeticError("the loss cannot be")
        return nn.functional.cross_entropy(outputs["logits"], batch["labels"])


@pytest.mark.parametrize("calls", [1, 2, 4])
def test_a_loss_that_fails_leaves_the_weights_and_the_engine_usable(calls: int) -> None:
    family = FAMILIES["bert_classification"]
    plain, model = family.build(), family.build()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW, **SINGLE)
    batches = [family.batch(ROWS, seed) for seed in (0, 1)]
    expected = train_plain(plain, batches, optimizer=optimizer, rule="rows", size=2)

    loss = FailingLoss()
    settings = {"optimizer": l2l.AdamW(**ADAMW), "microbatch_size": 2, "loss": loss}
    with make_engine(model, family, **settings) as engine:
        first = engine.step(batches[0])
        loss.arm(calls)
        with pytest.raises(ArithmeticError, match="cannot be"):
            engine.step(family.batch(ROWS, 5))
        second = engine.step(batches[1])
        assert [first.loss, second.loss] == expected
    assert_same_state(model, plain)


def test_a_report_can_be_read_after_a_later_step_failed() -> None:
    family = FAMILIES["bert_classification"]
    loss = FailingLoss()
    with make_engine(family.build(), family, microbatch_size=2, loss=loss) as engine:
        report = engine.step(family.batch(ROWS))
        loss.arm(2)
        with pytest.raises(ArithmeticError, match="cannot be"):
            engine.step(family.batch(ROWS))
        assert report.loss > 0
        assert report.gradient_norm > 0


def test_a_loss_that_fails_in_an_evaluation_leaves_the_engine_usable() -> None:
    family = FAMILIES["bert_classification"]
    loss = FailingLoss()
    with make_engine(family.build(), family, microbatch_size=2, loss=loss) as engine:
        expected = engine.evaluate(family.batch(ROWS))
        loss.arm(3)
        with pytest.raises(ArithmeticError, match="cannot be"):
            engine.evaluate(family.batch(ROWS))
        assert engine.evaluate(family.batch(ROWS)) == expected


class FailingLayer(nn.Module):
    """Its backward pass fails when `failing` has its number."""

    def __init__(self, number: int, failing: set[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.number = number
        self.failing = failing

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.linear(hidden)
        if self.number in self.failing and hidden.requires_grad:
            hidden.register_hook(self.fail)
        return hidden

    def fail(self, _: Tensor) -> None:
        raise ArithmeticError("no backward pass")


class FailingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.failing: set[int] = set()
        self.layers = nn.ModuleList(FailingLayer(number, self.failing) for number in range(4))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = inputs
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden.mean(dim=1))
        return {"loss": nn.functional.cross_entropy(logits, labels)}


def test_an_engine_that_failed_between_updates_says_so() -> None:
    """When layer 0 fails, layers above it have been updated already."""
    model = FailingModel()
    batch = FAMILIES["sequential"].batch(4)
    engine = make_engine(model, microbatch_size=2)
    engine.step(batch)
    model.failing.add(0)
    with pytest.raises(ArithmeticError, match="no backward pass"):
        engine.step(batch)
    with pytest.raises(RuntimeError, match="weights are a mix of two steps"):
        engine.step(batch)
    with pytest.warns(UserWarning, match="of two steps"):
        engine.close()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_step_whose_loss_is_not_finite_is_skipped() -> None:
    family = FAMILIES["sequential"]
    model, plain = family.build(), family.build()
    bad = family.batch(ROWS)
    bad["inputs"][5] = torch.inf
    good = family.batch(ROWS, 1)
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW, **SINGLE)
    expected = train_plain(plain, [good], optimizer=optimizer, rule="rows", size=3)
    with make_engine(model, optimizer=l2l.AdamW(**ADAMW), microbatch_size=3) as engine:
        report = engine.step(bad)
        assert report.skipped
        found = engine.step(good)
        assert [found.loss] == expected
        assert not found.skipped
    assert_same_state(model, plain)


def test_a_batch_is_left_as_it_was() -> None:
    family = FAMILIES["llama_untied"]
    batch = family.batch(ROWS)
    with make_engine(family.build(), microbatch_size=3) as engine:
        engine.step(batch)
        engine.evaluate(batch)
        engine.predict(batch)
    for key, tensor in family.batch(ROWS).items():
        assert torch.equal(batch[key], tensor)


def test_the_callers_random_numbers_are_left_alone() -> None:
    family = FAMILIES["gpt2"]
    with make_engine(build_gpt2(resid_pdrop=0.3), microbatch_size=3) as engine:
        torch.manual_seed(3)
        expected = torch.rand(4)
        torch.manual_seed(3)
        engine.step(family.batch(ROWS))
        engine.evaluate(family.batch(ROWS))
        assert torch.equal(torch.rand(4), expected)


def test_a_closed_engine_holds_no_memory_even_before_cycles_are_collected():
    """Else the next engine of a process finds a device that is full."""
    family = FAMILIES["llama_tied"]
    engine = inside.engine(family.build(), overrides={"num_tail": 1, "num_device_states": 1})
    engine.step(family.batch(4))
    units = inside.server(engine).units.values()
    tensors = [one for unit in units for one in (unit.weights, *unit.kept().values())]
    storages = [weakref.ref(one.untyped_storage()) for one in tensors]
    del tensors, units
    gc.disable()
    try:
        engine.close()
        assert not any(storage() is not None for storage in storages)
    finally:
        gc.enable()
