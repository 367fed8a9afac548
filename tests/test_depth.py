"""Depth that changes from step to step: policies, chosen layers, and what a search needs."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from families import FAMILIES, Family
from reference import counts, reference_gradients, shared_embeddings, split
from torch import Tensor, nn

import l2l
from l2l.engine.depth import Choice, checked_layers
from l2l.model.modules import find_layers

ROWS = 6
ADAMW = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
CUT = ("llama_untied", "llama_tied", "gpt2", "gpt_neox", "bert_classification", "hand_written")
PLANS: dict[str, dict[str, Any]] = {
    "eager": {},
    "clipped": {"clip_norm": 0.5},
    "halves": {"clip_norm": 0.5, "overrides": {"halves": True, "num_whole": 1}},
    "some late": {"overrides": {"num_late": 2}},
    "tail": {"overrides": {"num_tail": 2}},
    "all tail": {"overrides": {"num_tail": 3}, "clip_norm": 0.5},
    "rows on the host": {"embedding": "host", "clip_norm": 0.5},
    "compiled": {"compile": "aot_eager", "overrides": {"keep": 0.5, "num_kept_cells": 2}},
}
every_plan = pytest.mark.parametrize(
    "plan",
    [
        pytest.param(name, marks=pytest.mark.thorough if name == "compiled" else ())
        for name in PLANS
    ],
)


def make(family: Family, **settings: Any) -> l2l.Engine:
    given = {"device": "cpu", "precision": "float32", "microbatch_size": 2, "seed": 3}
    given |= {"optimizer": l2l.AdamW(**ADAMW), "embedding": "device"}
    model = settings.pop("model", None) or family.build()
    return inside.engine(model, layers=family.layers, **{**given, **settings})


@dataclass(frozen=True)
class Given(l2l.Depth):
    """The same choice in every step."""

    choice: Choice

    def choose(self, *, step: int, num_layers: int, seed: int) -> Choice:
        return self.choice


def cut(model: nn.Module, chosen: Sequence[int], name: str | None) -> dict[str, str]:
    """Leave only some layers in a model; returns old names of parameters by their new ones."""
    old = {id(parameter): key for key, parameter in model.named_parameters()}
    found = find_layers(model, name)[0].name
    layers = model.get_submodule(found)
    kept = type(layers)(*[layers[i] for i in chosen]) if isinstance(layers, nn.Sequential) else None
    parent, _, last = found.rpartition(".")
    setattr(model.get_submodule(parent), last, kept or nn.ModuleList([layers[i] for i in chosen]))
    if hasattr(model, "config") and hasattr(model.config, "num_hidden_layers"):
        model.config.num_hidden_layers = len(chosen)
    return {key: old[id(parameter)] for key, parameter in model.named_parameters()}


# -- Equal to plain PyTorch ------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", [(0, 2), (1,), (0, 1, 2)])
@pytest.mark.parametrize("name", CUT)
def test_chosen_layers_have_the_gradients_of_plain_pytorch(name: str, chosen: tuple[int, ...]):
    family, recorder = FAMILIES[name], l2l.RecordGradients()
    batch, plain = family.batch(ROWS), family.build()
    names = cut(plain, chosen, family.layers)
    with make(family, optimizer=recorder) as engine:
        report = engine.step(batch, layers=list(chosen))
        assert report.layers == chosen
        loss = report.loss
        evaluated = engine.evaluate(batch, layers=chosen)
        logits = engine.predict(batch, layers=chosen)["logits"]
    microbatches = split(batch, 2)
    numbers = [counts(family.rule, one) for one in microbatches]
    expected_loss, gradients = reference_gradients(plain, microbatches, numbers)
    expected = {names[key]: value for key, value in gradients.items() if value is not None}
    assert recorder.gradients.keys() == expected.keys()
    tied = {names[key] for key in shared_embeddings(plain)}  # added up in another order
    for key, value in expected.items():
        found = recorder.gradients[key].view(value.shape)
        assert torch.allclose(found, value, rtol=1e-5, atol=1e-7), key
        assert key in tied or torch.equal(found, value), key
    assert loss == float(expected_loss)
    assert evaluated == pytest.approx(loss, rel=1e-5)
    assert len(logits) == ROWS


CHOICES = ((0, 1, 2), (0, 2), (1,), (2,), (0, 1), (0,), (1, 2), (0, 1, 2))


@every_plan
def test_steps_with_changing_layers_are_those_of_torch(plan: str):
    """Layers that are left out keep their weights, moments and counts of steps."""
    family = FAMILIES["llama_untied"]
    plain = family.build()
    names = dict(plain.named_parameters())
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    with make(family, kernel="readable", **PLANS[plan]) as engine:
        layers = inside.partition(engine).list_name
        for number, chosen in enumerate(CHOICES):
            batch = family.batch(ROWS, seed=number)
            engine.step(batch, layers=chosen)
            smaller = family.build()
            of_old = cut(smaller, chosen, family.layers)
            for key, parameter in smaller.named_parameters():
                parameter.data = names[of_old[key]].data
            microbatches = split(batch, 2)
            numbers = [counts(family.rule, one) for one in microbatches]
            _, gradients = reference_gradients(smaller, microbatches, numbers)
            for key, gradient in gradients.items():
                names[of_old[key]].grad = gradient
            if "clip_norm" in PLANS[plan]:
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        inside.server(engine).settle_all()
        steps = {
            index: max(inside.server(engine).units[f"L{index}"].steps.values())
            for index in range(3)
        }
        model = inside.model(engine)
    assert steps == dict(Counter(itertools.chain(*CHOICES)))
    assert layers == "model.layers"
    exact = plan in ("eager", "some late", "tail")
    for key, value in plain.state_dict().items():
        found = model.state_dict()[key]
        assert float((found - value).abs().max()) <= 1e-5 * float(value.abs().max()), key
        assert not exact or torch.equal(found, value), key


IDENTITIES: dict[str, l2l.Depth | None] = {
    "all": l2l.AllLayers(),
    "stochastic": l2l.StochasticDepth(last=1.0),
    "given": l2l.StochasticDepth(survival=[1.0, 1.0, 1.0]),
    "progressive": l2l.ProgressiveLayerDropping(final=1.0),
    "sampled": l2l.SampledArchitecture([[0], [1], [2]]),
    "a list": None,
}


def trained(family: Family, steps: int = 4, **settings: Any) -> tuple[list[float], dict]:
    model = family.build()
    layers = settings.pop("layers", None)
    with make(family, model=model, **settings) as engine:
        losses = [
            engine.step(family.batch(ROWS, seed=number), layers=layers).loss
            for number in range(steps)
        ]
        losses.append(engine.evaluate(family.batch(ROWS)))
    return losses, model.state_dict()


@cache
def plainly(plan: str) -> tuple[list[float], dict]:
    return trained(FAMILIES["llama_tied"], **PLANS[plan])


@pytest.mark.parametrize(
    ("name", "plan"),
    [(n, p) for n in IDENTITIES for p in PLANS if n == "stochastic" or p in ("eager", "clipped")],
)
def test_a_policy_that_leaves_nothing_out_changes_nothing(name: str, plan: str):
    family, plain = FAMILIES["llama_tied"], plainly(plan)
    layers = [0, 1, 2] if name == "a list" else None
    found = trained(family, depth=IDENTITIES[name], layers=layers, **PLANS[plan])
    assert found[0] == plain[0]
    assert all(torch.equal(found[1][key], value) for key, value in plain[1].items())


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_in_sixteen_bits_too(precision: str):
    family = FAMILIES["llama_tied"]
    plain = trained(family, precision=precision)
    found = trained(family, precision=precision, depth=l2l.StochasticDepth(last=1.0))
    assert found[0] == plain[0]
    some = trained(family, precision=precision, depth=l2l.StochasticDepth(last=0.2))
    assert all(math.isfinite(loss) for loss in some[0])


# -- What is left out costs nothing ----------------------------------------------------------------


@every_plan
def test_what_is_left_out_is_not_fetched_and_not_touched(plan: str):
    family = FAMILIES["llama_untied"]
    with make(family, **PLANS[plan]) as engine:
        batch = family.batch(ROWS)
        for _ in range(2):
            engine.step(batch, layers=[0, 1, 2])
        inside.server(engine).settle_all()
        before = {
            key: value.clone() for key, value in inside.server(engine).image("L1").tensors.items()
        }
        with engine.trace() as trace:
            engine.step(batch, layers=[0, 2])
            engine.step(batch, layers=[0, 2])
        inside.server(engine).settle_all()
        after = inside.server(engine).image("L1").tensors
        assert all(torch.equal(after[key], value) for key, value in before.items())
    words = [span.text.split() for span in trace.spans]
    assert not [one for one in words if "L1" in one]
    assert len([one for one in words if one[0] == "forward" and one[1] == "L0"]) in (0, 2 * 3)


def test_the_number_of_fetches_is_that_of_the_schedule():
    """Two for each layer, less those that are still there at the turn."""
    family = FAMILIES["llama_untied"]
    with make(family) as engine:
        for chosen, number in (((0, 1, 2), 4), ((0, 2), 2), ((1,), 1)):
            engine.step(family.batch(ROWS), layers=chosen)
            schedule = inside.schedules(engine)[next(reversed(inside.schedules(engine)))]
            fetched = [a for a in schedule.actions if a.kind == "fetch U" and "L" in a.unit]
            assert schedule.shape.layers == chosen
            assert len(fetched) == number


def test_schedules_are_not_kept_for_ever():
    family = FAMILIES["llama_tied"]
    with make(family, depth=l2l.StochasticDepth(last=0.3)) as engine:
        for number in range(40):
            engine.step(family.batch(2 + 2 * (number % 5)))
        assert len(inside.schedules(engine)) <= 32


def test_a_resident_model_can_begin_to_leave_layers_out():
    """Optimizer state that was on the device comes back to the host, once."""
    family = FAMILIES["llama_untied"]
    resident = {"num_tail": 3, "num_device_states": 3}
    with make(family, overrides=resident, clip_norm=0.5) as engine:
        losses = [
            engine.step(family.batch(ROWS, seed=n), layers=c).loss for n, c in enumerate(CHOICES)
        ]
        assert not inside.server(engine).units_on_device()
    with make(family, clip_norm=0.5) as engine:
        expected = [
            engine.step(family.batch(ROWS, seed=n), layers=c).loss for n, c in enumerate(CHOICES)
        ]
    assert losses == pytest.approx(expected, rel=1e-5)


# -- Policies --------------------------------------------------------------------------------------


def drawn(
    policy: l2l.Depth, number: int, *, num_layers: int = 4, seed: int = 5
) -> Iterator[Choice]:
    return (policy.choose(step=n, num_layers=num_layers, seed=seed) for n in range(number))


def test_stochastic_depth_draws_each_layer_with_its_probability():
    policy = l2l.StochasticDepth(last=0.2)
    found = Counter(layer for one in drawn(policy, 4000) for layer in one.layers)
    for layer, probability in enumerate((0.8, 0.6, 0.4, 0.2)):
        assert found[layer] / 4000 == pytest.approx(probability, abs=0.03)
    for one in itertools.islice(drawn(policy, 50), 50):
        expected = {layer: 1 - (layer + 1) / 4 * 0.8 for layer in one.layers}
        assert one.survival == pytest.approx(expected)


def test_progressive_dropping_begins_with_all_and_ends_with_few():
    policy = l2l.ProgressiveLayerDropping(final=0.5, rate=0.01)
    assert policy.last(0) == 1.0
    assert policy.last(100) == pytest.approx(0.5 + 0.5 * math.exp(-1))
    assert policy.choose(step=0, num_layers=12, seed=1).layers == tuple(range(12))
    late = [policy.choose(step=10_000 + n, num_layers=12, seed=1) for n in range(500)]
    mean = sum(len(one.layers) for one in late) / 500
    assert mean == pytest.approx(sum(1 - (n + 1) / 12 * 0.5 for n in range(12)), abs=0.3)


def test_an_architecture_has_one_candidate_of_each_position():
    policy = l2l.SampledArchitecture([[0, 1], [2], [3, 5, 6]])
    found = Counter(one.layers for one in drawn(policy, 600, num_layers=8))
    assert found.keys() == set(itertools.product((0, 1), (2,), (3, 5, 6)))
    assert min(found.values()) > 50


@pytest.mark.parametrize(
    "policy", [l2l.StochasticDepth(0.5), l2l.SampledArchitecture([[0, 1], [2, 3]])]
)
def test_choices_depend_on_seed_and_step_alone(policy: l2l.Depth):
    first, again, other = (list(drawn(policy, 40, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


class Linear(nn.Module):
    """Layers that add a linear function of what they get, and a linear loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(3)])
        self.last = nn.Linear(4, 1)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        outputs = self.last(hidden)[:, 0]
        return {"loss": (outputs * labels).mean(), "logits": outputs}


@pytest.mark.parametrize("overrides", [{}, {"num_tail": 2}], ids=["streamed", "tail"])
def test_the_expected_network_is_the_whole_one(overrides: dict[str, Any]):
    """Of a linear network, summed over all choices with their probabilities: loss and gradients."""
    survival = (0.9, 0.5, 0.25)
    batch = {"inputs": torch.randn(4, 4), "labels": torch.randn(4)}
    given = {"device": "cpu", "precision": "float32", "microbatch_size": 2, "seed": 0}
    plain = Linear()
    loss = plain(**batch)["loss"]
    loss.backward()
    whole = loss.item()
    total, sums, probabilities = 0.0, {}, 0.0
    for runs in itertools.product((True, False), repeat=3):
        layers = tuple(index for index, one in enumerate(runs) if one)
        probability = math.prod(p if one else 1 - p for p, one in zip(survival, runs, strict=True))
        choice = Choice(layers, {index: survival[index] for index in layers})
        recorder = l2l.RecordGradients()
        with inside.engine(
            Linear(), optimizer=recorder, depth=Given(choice), overrides=overrides, **given
        ) as engine:
            report = engine.step(batch)
            assert report.layers == layers
            total += probability * report.loss
            assert engine.evaluate(batch) == pytest.approx(whole, rel=1e-5)
        for key, value in recorder.gradients.items():
            sums[key] = sums.get(key, 0.0) + probability * value
        probabilities += probability
    assert probabilities == pytest.approx(1.0)
    assert total == pytest.approx(whole, rel=1e-5)
    for key, parameter in plain.named_parameters():
        assert torch.allclose(sums[key].view(parameter.shape), parameter.grad, atol=1e-6), key


@pytest.mark.parametrize("plan", ["eager", "tail", "compiled"])
def test_survival_is_that_of_plain_pytorch(plan: str):
    """x + (layer(x) - x) / p, forward and backward, on a real model."""
    family, recorder = FAMILIES["llama_untied"], l2l.RecordGradients()
    survival = {0: 0.8, 2: 0.3}
    plain, batch = family.build(), family.batch(ROWS)
    names = cut(plain, (0, 2), family.layers)
    for layer, index in zip(plain.model.layers, (0, 2), strict=True):
        layer.register_forward_hook(
            lambda _, given, output, p=survival[index]: given[0] + (output - given[0]) / p
        )
    settings = {**PLANS[plan], "optimizer": recorder, "depth": Given(Choice((0, 2), survival))}
    with make(family, **settings) as engine:
        loss = engine.step(batch).loss
    microbatches = split(batch, 2)
    numbers = [counts(family.rule, one) for one in microbatches]
    expected_loss, gradients = reference_gradients(plain, microbatches, numbers)
    assert loss == pytest.approx(float(expected_loss), rel=1e-6)
    for key, value in gradients.items():
        difference = float((recorder.gradients[names[key]].view(value.shape) - value).abs().max())
        assert difference <= 2e-6 * float(value.abs().max()) + 1e-9, key


# -- Going on --------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["eager", "halves"])
def test_a_run_makes_the_same_choices_when_it_is_resumed(plan: str, tmp_path: Path):
    family = FAMILIES["llama_tied"]
    settings = {**PLANS[plan], "depth": l2l.StochasticDepth(last=0.3), "seed": 11}
    model = family.build()
    with make(family, model=model, **settings) as engine:
        layers = []
        for number in range(8):
            layers.append(engine.step(family.batch(ROWS, seed=number)).layers)
            if number == 3:
                engine.save(tmp_path / "saved")
    assert len(set(layers)) > 2
    resumed = family.build()
    with make(family, model=resumed, **{**settings, "seed": 12}) as engine:
        engine.load(tmp_path / "saved")
        again = [engine.step(family.batch(ROWS, seed=number)).layers for number in range(4, 8)]
    assert again == layers[4:]
    for key, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[key], value), key


def test_another_policy_than_the_checkpoints_is_said(tmp_path: Path, caplog):
    family = FAMILIES["llama_tied"]
    with make(family, depth=l2l.StochasticDepth(last=0.3)) as engine:
        engine.step(family.batch(ROWS))
        engine.save(tmp_path / "saved")
    with make(family) as engine:
        engine.load(tmp_path / "saved")
    assert (
        "depth=StochasticDepth(last=0.3, survival=None), this engine has AllLayers()" in caplog.text
    )


# -- What a search needs ---------------------------------------------------------------------------


@every_plan
def test_the_report_has_the_norm_of_every_layer(plan: str):
    family, recorder = FAMILIES["llama_untied"], l2l.RecordGradients()
    batch = family.batch(ROWS)
    with make(family, **{**PLANS[plan], "clip_norm": None, "optimizer": recorder}) as engine:
        found = engine.step(batch, layers=[0, 2]).layer_norms
        inside.server(engine).settle_all()
        for layer, norm in found.items():
            own = [v for k, v in recorder.gradients.items() if f"layers.{layer}." in k]
            expected = float(torch.cat([one.view(-1) for one in own]).norm())
            assert norm == pytest.approx(expected, rel=1e-5)
    assert found.keys() == {0, 2}


@pytest.mark.parametrize(
    ("kernel", "plan"), [*(("native", plan) for plan in PLANS), ("readable", "eager")]
)
def test_the_report_has_how_far_every_layer_was_moved(plan: str, kernel: str):
    family = FAMILIES["llama_untied"]
    with make(family, kernel=kernel, **PLANS[plan]) as engine:

        def weights(layer: int) -> Tensor:
            owners = inside.server(engine).units[f"L{layer}"].form.trained.names
            return torch.cat(
                [inside.server(engine).weight(owner).clone().view(-1) for owner in owners]
            )

        before = {layer: weights(layer) for layer in range(3)}
        report = engine.step(family.batch(ROWS), layers=[0, 2])
        inside.server(engine).settle_all()
        found = report.update_norms
        assert found.keys() == {0, 2}
        for layer, norm in found.items():
            assert norm == pytest.approx(float((weights(layer) - before[layer]).norm()), rel=1e-3)


# -- Errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([], "expected one or more"),
        ([0, 3], "has 3, but the model has layers 0 to 2"),
        ([-1, 0], "has -1"),
        ([1, 0], "strictly increasing"),
        ([1, 1], "strictly increasing"),
    ],
)
def test_layers_that_cannot_be_are_refused(layers: list[int], words: str):
    family = FAMILIES["llama_tied"]
    with make(family) as engine:
        loss = engine.step(family.batch(ROWS)).loss
        for act in (engine.step, engine.evaluate, engine.predict):
            with pytest.raises(ValueError, match=words):
                act(family.batch(ROWS), layers=layers)
        assert engine.step_number == 1
        assert engine.step(family.batch(ROWS)).loss < loss
    with pytest.raises(ValueError, match=words):
        checked_layers(layers, 3)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (lambda: l2l.StochasticDepth(last=0.0), "0.0; expected a probability"),
        (lambda: l2l.StochasticDepth(survival=[1.0, 1.2]), "1.2; expected a probability"),
        (lambda: l2l.ProgressiveLayerDropping(final=-1), "-1; expected a probability"),
        (lambda: l2l.ProgressiveLayerDropping(rate=-1.0), "rate=-1.0; expected 0 or more"),
        (lambda: l2l.SampledArchitecture([]), "at least one position"),
        (lambda: l2l.SampledArchitecture([[0], []]), "at least one candidate"),
        (lambda: l2l.SampledArchitecture([[1], [0]]), "strictly increasing"),
    ],
)
def test_policies_that_cannot_be_are_refused(policy: Any, words: str):
    with pytest.raises(ValueError, match=words):
        policy()


@pytest.mark.parametrize(
    ("layers", "words"), [((0, 3), "has 3, but the model"), ((1, 0), "strictly increasing")]
)
def test_a_choice_that_cannot_be_is_refused(layers: tuple[int, ...], words: str):
    """Of a policy that somebody else has written."""
    family = FAMILIES["llama_tied"]
    with make(family, depth=Given(Choice(layers))) as engine:
        with pytest.raises(ValueError, match=words):
            engine.step(family.batch(ROWS))
        assert engine.step_number == 0


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (l2l.StochasticDepth(survival=[1.0, 0.5]), "2 probabilities, the model 3 layers"),
        (l2l.SampledArchitecture([[0, 1], [5]]), "candidate 5, but the model has 3 layers"),
    ],
)
def test_policies_for_another_network_are_refused(policy: l2l.Depth, words: str):
    family = FAMILIES["llama_tied"]
    model = family.build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=words):
        make(family, model=model, depth=policy)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
