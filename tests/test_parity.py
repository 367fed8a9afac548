"""A step of the engine is a step of plain PyTorch, bit by bit in float32 on the CPU.

Loss and gradients are compared for every family and for one, three (ragged) and eight
microbatches; weights after training for a few families and each optimizer that has a counterpart
in torch. Two places are compared with a tolerance of 1e-6 of the largest element instead:
embeddings tied to the head when there are several microbatches (see
`reference.shared_embeddings`), and the encoder-decoder families, whose encoder runs in the
prologue and gets one sum of gradients from all decoder layers.
"""

from collections.abc import Callable
from typing import Any

import inside
import pytest
import torch
from families import (
    FAMILIES,
    IGNORED,
    Batch,
    Family,
    build_bert,
    build_gpt2,
    build_llama,
    causal_batch,
    classification_batch,
)
from reference import counts, reference_gradients, shared_embeddings, split, train_plain
from torch import Tensor, nn

import l2l

ROWS = 8
SIZES = {"one": 8, "three": 3, "eight": 1}  # number of microbatches -> rows of each
TOLERANCE = 1e-6
TOLERANT_FAMILIES = {"bart", "whisper"}

every_family = pytest.mark.parametrize("name", FAMILIES)
every_split = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)


def make_engine(model: nn.Module, family: Family | None = None, **settings: Any) -> l2l.Engine:
    layers = family.layers if family else None
    settings = {"kernel": "readable", **settings}
    return inside.engine(model, precision="float32", device="cpu", layers=layers, **settings)


def plain_step(family: Family, model: nn.Module, size: int, seed: int = 0):
    microbatches = split(family.batch(ROWS, seed), size)
    numbers = [counts(family.rule, microbatch) for microbatch in microbatches]
    return reference_gradients(model, microbatches, numbers)


def engine_step(
    family: Family, model: nn.Module, size: int, seed: int = 0
) -> tuple[Any, dict[str, Tensor]]:
    recorder = l2l.RecordGradients()
    engine = make_engine(model, family, optimizer=recorder, microbatch_size=size)
    report = engine.step(family.batch(ROWS, seed))
    engine.close()
    return report, recorder.gradients


def assert_close(found: Tensor, expected: Tensor, name: str, *, noise: float = 0.0) -> None:
    """Within the tolerance, or within noise where the true value is zero (the bias of keys)."""
    difference = float((found - expected).abs().max())
    allowed = max(TOLERANCE * float(expected.abs().max()), noise)
    assert difference <= allowed, f"{name} is off by {difference:.3g}, allowed is {allowed:.3g}"


def assert_same_state(found: nn.Module, expected: nn.Module) -> None:
    states = found.state_dict(), expected.state_dict()
    assert list(states[0]) == list(states[1])
    unequal = [name for name in states[0] if not torch.equal(states[0][name], states[1][name])]
    assert not unequal, f"{len(unequal)} of {len(states[0])} tensors differ: {unequal}"


# ----------------------------------------------------------------------------------------------
# The reference itself
# ----------------------------------------------------------------------------------------------


@every_family
def test_plain_training_repeats_itself_bit_by_bit(name: str) -> None:
    family = FAMILIES[name]
    first_loss, first = plain_step(family, family.build(), 3)
    second_loss, second = plain_step(family, family.build(), 3)
    assert torch.isfinite(first_loss)
    assert torch.equal(first_loss, second_loss)
    for parameter_name, gradient in first.items():
        again = second[parameter_name]
        if gradient is None:
            assert again is None
        else:
            assert again is not None
            assert torch.equal(gradient, again)


# A norm over the rows makes the loss depend on how they are split.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "batchnorm"])
def test_the_loss_of_the_microbatches_is_the_loss_of_the_batch(name: str) -> None:
    family = FAMILIES[name]
    whole, _ = plain_step(family, family.build(), ROWS)
    for size in SIZES.values():
        loss, _ = plain_step(family, family.build(), size)
        torch.testing.assert_close(loss, whole, rtol=1e-5, atol=0)


@every_family
def test_batches_have_rows_of_several_lengths_and_ignored_labels(name: str) -> None:
    family = FAMILIES[name]
    batch = family.batch(ROWS)
    assert {len(tensor) for tensor in batch.values()} == {ROWS}
    if "attention_mask" in batch:
        assert len(set(batch["attention_mask"].sum(dim=1).tolist())) > 2
    numbers = [counts(family.rule, microbatch) for microbatch in split(batch, 1)]
    assert min(numbers) > 0
    if family.rule != "rows":
        assert len(set(numbers)) > 1


def test_one_expert_never_gets_a_gradient_and_one_only_sometimes() -> None:
    family = FAMILIES["hand_written"]

    def untouched(microbatch: Batch) -> set[int]:
        _, gradients = reference_gradients(family.build(), [microbatch], [1])
        names = (f"stack.1.experts.{expert}.0.weight" for expert in range(4))
        return {expert for expert, name in enumerate(names) if gradients[name] is None}

    single_rows = [untouched(microbatch) for microbatch in split(family.batch(ROWS), 1)]
    assert all(3 in experts for experts in single_rows)
    assert {2 in experts for experts in single_rows} == {True, False}
    assert untouched(family.batch(ROWS, 0)) == {3}
    assert untouched(family.batch(ROWS, 1)) == {2, 3}


# ----------------------------------------------------------------------------------------------
# One step: loss and gradients
# ----------------------------------------------------------------------------------------------


@every_split
@every_family
def test_loss_and_gradients_equal_plain_pytorch(name: str, size: int) -> None:
    family = FAMILIES[name]
    plain = family.build()
    expected_loss, expected = plain_step(family, plain, size)
    report, found = engine_step(family, family.build(), size)

    several = size < ROWS
    tolerant = set(expected) if name in TOLERANT_FAMILIES else set()
    tolerant |= shared_embeddings(plain) if several else set()

    if name in TOLERANT_FAMILIES:
        assert_close(torch.tensor(float(report.loss)), expected_loss, "loss")
    else:
        assert float(report.loss) == float(expected_loss)
    assert set(found) == {key for key, gradient in expected.items() if gradient is not None}
    noise = 1e-10 * max(float(gradient.abs().max()) for gradient in found.values())
    unequal = []
    for key, gradient in found.items():
        assert gradient.dtype == torch.float32
        assert gradient.shape == expected[key].shape
        if key in tolerant:
            assert_close(gradient, expected[key], key, noise=noise)
        elif not torch.equal(gradient, expected[key]):
            unequal.append(key)
    assert not unequal, f"{len(unequal)} of {len(found)} gradients differ: {unequal}"


@every_family
def test_recording_gradients_leaves_the_weights_as_they_were(name: str) -> None:
    family = FAMILIES[name]
    model = family.build()
    engine_step(family, model, 3)
    expected = dict(family.build().named_parameters())
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[key]), key


def test_a_list_of_microbatches_of_several_lengths_is_one_step() -> None:
    family = FAMILIES["llama_untied"]
    microbatches = split(family.batch(ROWS), 3)
    for microbatch, length in zip(microbatches, (12, 11, 12), strict=True):
        for key, tensor in microbatch.items():
            microbatch[key] = tensor[:, :length].contiguous()
    numbers = [counts(family.rule, microbatch) for microbatch in microbatches]
    expected_loss, expected = reference_gradients(family.build(), microbatches, numbers)

    recorder = l2l.RecordGradients()
    engine = make_engine(family.build(), family, optimizer=recorder)
    report = engine.step(microbatches)
    engine.close()
    assert float(report.loss) == float(expected_loss)
    for key, gradient in expected.items():
        assert torch.equal(recorder.gradients[key], gradient), key


@pytest.mark.parametrize("name", ["llama_untied", "mpnet"])
@pytest.mark.parametrize("ignored", [0, 1, 2])
def test_a_microbatch_in_which_every_label_is_ignored_counts_nothing(
    name: str, ignored: int
) -> None:
    """Its own mean is 0 / 0; the loss of the whole batch is that of the other microbatches."""
    family = FAMILIES[name]
    microbatches = split(family.batch(6), 2)
    others = [each for number, each in enumerate(microbatches) if number != ignored]
    numbers = [counts(family.rule, microbatch) for microbatch in others]
    expected_loss, expected = reference_gradients(family.build(), others, numbers)

    batch = family.batch(6)
    batch["labels"][2 * ignored : 2 * ignored + 2] = IGNORED
    recorder = l2l.RecordGradients()
    engine = make_engine(family.build(), family, optimizer=recorder, microbatch_size=2)
    report = engine.step(batch)
    engine.close()
    assert float(report.loss) == float(expected_loss)
    for key, gradient in expected.items():
        assert torch.equal(recorder.gradients[key], gradient), key


# ----------------------------------------------------------------------------------------------
# Twenty steps: weights
# ----------------------------------------------------------------------------------------------

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.02}
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.05}
SINGLE = {"foreach": False, "fused": False}  # torch's plain loop over parameters
TRAINED = {"llama_untied": 4, "bert_classification": 4, "hand_written": 4, "gpt2": 8}


def train_with_engine(
    family: Family, model: nn.Module, *, optimizer: Any, size: int, steps: int, **settings: Any
) -> list[float]:
    engine = make_engine(model, family, optimizer=optimizer, microbatch_size=size, **settings)
    losses = [float(engine.step(family.batch(ROWS, seed)).loss) for seed in range(steps)]
    engine.close()
    return losses


def assert_same_training(
    name: str,
    *,
    size: int,
    steps: int,
    plain_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    engine_optimizer: Callable[[nn.Module], Any],
    change: Callable[[nn.Module], None] = lambda model: None,
) -> tuple[nn.Module, nn.Module]:
    """Train one model with plain PyTorch and one with the engine; their states are equal."""
    family = FAMILIES[name]
    plain, model = family.build(), family.build()
    change(plain)
    change(model)
    expected = train_plain(
        plain,
        (family.batch(ROWS, seed) for seed in range(steps)),
        optimizer=plain_optimizer(plain),
        rule=family.rule,
        size=size,
    )
    optimizer = engine_optimizer(model)
    losses = train_with_engine(family, model, optimizer=optimizer, size=size, steps=steps)
    assert losses == expected
    assert_same_state(model, plain)
    assert not torch.equal(*(next(iter(each.parameters())) for each in (model, family.build())))
    return model, plain


@pytest.mark.parametrize(("name", "size"), TRAINED.items(), ids=TRAINED)
def test_twenty_steps_of_sgd_equal_torch(name: str, size: int) -> None:
    assert_same_training(
        name,
        size=size,
        steps=20,
        plain_optimizer=lambda model: torch.optim.SGD(model.parameters(), **SGD, **SINGLE),
        engine_optimizer=lambda model: l2l.SGD(**SGD),
    )


@pytest.mark.parametrize(("name", "size"), TRAINED.items(), ids=TRAINED)
def test_twenty_steps_of_adamw_equal_torch(name: str, size: int) -> None:
    assert_same_training(
        name,
        size=size,
        steps=20,
        plain_optimizer=lambda model: torch.optim.AdamW(model.parameters(), **ADAMW, **SINGLE),
        engine_optimizer=lambda model: l2l.AdamW(**ADAMW),
    )


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Weight decay on matrices only, not on norms and biases."""
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": 0.1},
        {
            "params": [each for each in parameters if each.ndim <= 1],
            "weight_decay": 0.0,
            "lr": 0.01,
        },
    ]
    return torch.optim.AdamW(groups, lr=3e-3, **SINGLE)


@pytest.mark.parametrize("name", ["bert_classification", "hand_written"])
def test_the_groups_of_a_torch_optimizer_are_taken_over(name: str) -> None:
    assert_same_training(
        name, size=4, steps=5, plain_optimizer=two_groups, engine_optimizer=two_groups
    )


def freeze_every_second_parameter(model: nn.Module) -> None:
    for parameter in list(model.parameters())[1::2]:
        parameter.requires_grad_(False)


@pytest.mark.parametrize("name", ["llama_untied", "bert_classification", "hand_written"])
def test_training_with_half_of_the_parameters_frozen_equals_torch(name: str) -> None:
    model, _ = assert_same_training(
        name,
        size=4,
        steps=5,
        plain_optimizer=lambda model: torch.optim.AdamW(
            [each for each in model.parameters() if each.requires_grad], **ADAMW, **SINGLE
        ),
        engine_optimizer=lambda model: l2l.AdamW(**ADAMW),
        change=freeze_every_second_parameter,
    )
    fresh = list(FAMILIES[name].build().parameters())
    for before, after in list(zip(fresh, model.parameters(), strict=True))[1::2]:
        assert not after.requires_grad
        assert torch.equal(before, after)


@pytest.mark.parametrize("size", [8, 3])
def test_training_with_whole_layers_frozen_equals_torch(size: int) -> None:
    def freeze(model: nn.Module) -> None:
        for layer in model.model.layers[:2]:
            layer.requires_grad_(False)

    assert_same_training(
        "llama_untied",
        size=size,
        steps=3,
        plain_optimizer=lambda model: torch.optim.AdamW(
            [each for each in model.parameters() if each.requires_grad], **ADAMW, **SINGLE
        ),
        engine_optimizer=lambda model: l2l.AdamW(**ADAMW),
        change=freeze,
    )


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_buffers_that_a_layer_changes_change_once_per_microbatch(size: int) -> None:
    model, plain = assert_same_training(
        "batchnorm",
        size=size,
        steps=3,
        plain_optimizer=lambda model: torch.optim.SGD(model.parameters(), **SGD, **SINGLE),
        engine_optimizer=lambda model: l2l.SGD(**SGD),
    )
    buffers = dict(model.named_buffers())
    assert buffers.keys() == dict(plain.named_buffers()).keys()
    for key, buffer in plain.named_buffers():
        assert torch.equal(buffers[key], buffer), key
    assert int(buffers["stack.0.norm.norm.num_batches_tracked"]) == 3 * -(-ROWS // size)


# ----------------------------------------------------------------------------------------------
# Dropout
# ----------------------------------------------------------------------------------------------

WITH_DROPOUT = {
    "llama": Family("llama", lambda: build_llama(attention_dropout=0.5), causal_batch, "shifted"),
    "bert": Family(
        "bert",
        lambda: build_bert(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3),
        classification_batch,
        "rows",
    ),
    "gpt2": Family(
        "gpt2",
        lambda: build_gpt2(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3),
        causal_batch,
        "shifted",
    ),
}


every_dropout = pytest.mark.parametrize("name", WITH_DROPOUT)


@every_dropout
def test_dropout_is_a_function_of_the_seed(name: str) -> None:
    family = WITH_DROPOUT[name]

    def train(seed: int, *, callers_seed: int) -> tuple[nn.Module, list[float]]:
        model = family.build()
        torch.manual_seed(callers_seed)  # the caller's own random numbers have no say
        optimizer = l2l.SGD(**SGD)
        return model, train_with_engine(
            family, model, optimizer=optimizer, size=3, steps=3, seed=seed
        )

    first, first_losses = train(5, callers_seed=1)
    second, second_losses = train(5, callers_seed=2)
    other, other_losses = train(6, callers_seed=1)
    assert first_losses == second_losses
    assert_same_state(first, second)
    assert first_losses != other_losses
    assert any(
        not torch.equal(*pair) for pair in zip(first.parameters(), other.parameters(), strict=True)
    )


@every_dropout
def test_dropout_draws_another_mask_for_each_step_and_microbatch(name: str) -> None:
    family = WITH_DROPOUT[name]
    batch = family.batch(4)
    twice = {key: torch.cat([tensor, tensor]) for key, tensor in batch.items()}

    def losses(*batches: Batch) -> list[float]:
        settings = {"optimizer": l2l.RecordGradients(), "microbatch_size": 4, "seed": 5}
        engine = make_engine(family.build(), **settings)
        found = [float(engine.step(each).loss) for each in batches]
        engine.close()
        return found

    first, second = losses(batch, batch)
    assert first != second
    assert losses(batch) == [first]
    assert losses(twice) != [first]  # the mean over two equal microbatches, but for their masks


@every_dropout
def test_gradients_with_dropout_belong_to_the_loss_that_was_drawn(name: str) -> None:
    """Recompute draws the masks of the forward: the gradient is the slope of that very loss.

    Moving the layers' weights along their gradient by a small distance must change the loss of
    the same step with the same seed by that distance times the norm. With masks of its own in
    recompute the gradient is that of another loss, and the slope is off by far more than 2%.
    """
    family = WITH_DROPOUT[name]

    def step(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
        recorder = l2l.RecordGradients()
        engine = make_engine(model, optimizer=recorder, microbatch_size=3, seed=5)
        loss = float(engine.step(family.batch(ROWS)).loss)
        engine.close()
        return loss, recorder.gradients

    _, found = step(family.build())
    in_layers = [key for key in found if any(part.isdigit() for part in key.split("."))]
    gradients = {key: found[key] for key in in_layers}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()

    def loss_at(distance: float) -> float:
        model = family.build()
        with torch.no_grad():
            for key, gradient in gradients.items():
                model.get_parameter(key).add_(gradient, alpha=distance / float(norm))
        return step(model)[0]

    slope = (loss_at(0.02) - loss_at(-0.02)) / 0.04
    assert slope == pytest.approx(float(norm), rel=0.02)


@pytest.mark.parametrize(
    "build",
    [
        lambda: build_llama(attention_dropout=0.1),
        lambda: build_gpt2(resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1),
        lambda: build_bert(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1),
    ],
    ids=["llama", "gpt2", "bert"],
)
def test_a_recomputed_layer_gives_the_bits_of_its_forward(build: Callable[[], nn.Module]) -> None:
    model = build()
    batch = classification_batch(6) if "Classification" in type(model).__name__ else causal_batch(6)
    with make_engine(model, microbatch_size=2, seed=1) as engine:
        outputs: list[list[Tensor]] = [[] for _ in inside.partition(engine).layers]
        engine.step(batch)  # the first step has its trial, too
        for part, kept in zip(inside.partition(engine).layers, outputs, strict=True):
            part.module.register_forward_hook(
                lambda _module, _inputs, value, kept=kept: kept.append(
                    (value[0] if isinstance(value, tuple) else value).detach().clone()
                )
            )
        engine.step(batch)
    for kept in outputs:
        assert len(kept) == 6  # three microbatches forward, then again
        assert all(torch.equal(a, b) for a, b in zip(kept[:3], kept[3:], strict=True))
        assert not torch.equal(kept[0], kept[1])
