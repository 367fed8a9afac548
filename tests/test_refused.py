"""What cannot be trained exactly is refused by name, and the model is left as it was.

Some of these the engine can see when it is built, some only when a batch shows how the model runs
its layers; a user sees the same either way, so `attempt` does both. Each message must hold what
the reader needs to go on: what was seen, and the word that changes it. What was refused once and is
no longer trains exactly.
"""

import math
from collections.abc import Callable, Collection
from typing import Any

import inside
import pytest
import torch
import transformers
from families import (
    CLASSES,
    FAMILIES,
    HIDDEN,
    IGNORED,
    SPECIAL,
    VOCABULARY,
    Batch,
    ResidualLayer,
    build_bart,
    build_mixtral,
    causal_batch,
    classification_batch,
    masked_batch,
    prepare,
    translation_batch,
    vector_batch,
)
from reference import train_plain
from torch import Tensor, nn

import l2l
from l2l.model import Partition


def attempt(model: nn.Module, batch: Batch, **settings: Any) -> None:
    """Build an engine, take one step, close."""
    chosen = {"optimizer": l2l.SGD(lr=0.1), "precision": "float32", "device": "cpu", **settings}
    engine = inside.engine(model, **chosen)
    try:
        engine.step(batch)
    finally:
        engine.close()


def copy_of_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_unchanged(model: nn.Module, before: dict[str, Tensor]) -> None:
    after = model.state_dict()
    assert list(after) == list(before)
    changed = [name for name in before if not torch.equal(after[name], before[name])]
    assert not changed, f"refused, but these changed: {changed}"


def refusal(model: nn.Module, batch: Batch, **settings: Any) -> str:
    """The message of the ValueError; the model must be as it was, and still run by itself."""
    before = copy_of_state(model)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the tests look into the message
        attempt(model, batch, **settings)
    assert_unchanged(model, before)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    return str(caught.value).lower()


# ----------------------------------------------------------------------------------------------
# Models that cannot be cut
# ----------------------------------------------------------------------------------------------


def build_t5(model: str) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=8,
        d_ff=48,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        classifier_dropout=0.0,
        num_labels=CLASSES,
        decoder_start_token_id=0,
        **SPECIAL,
    )
    return prepare(lambda: getattr(transformers, model)(config))


def build_albert() -> nn.Module:
    config = transformers.AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=16,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        num_labels=CLASSES,
        **SPECIAL,
    )
    return prepare(lambda: transformers.AlbertForSequenceClassification(config))


class Unlisted(nn.Module):
    """Layers that are attributes, in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.second = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.third = nn.Linear(2 * HIDDEN, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.third(torch.tanh(self.second(torch.tanh(self.first(inputs))))).mean(dim=1)
        return {"loss": nn.functional.cross_entropy(logits, labels)}


class Bare(nn.Module):
    """A parameter and no module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, CLASSES))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(inputs.mean(dim=1) @ self.weight, labels)}


class Listed(nn.Module):
    """A list of layers, run in the order and as often as told."""

    def __init__(self, layers: list[nn.Module], order: list[int]) -> None:
        super().__init__()
        self.stack = nn.ModuleList(layers)
        self.order = order
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = inputs
        for number in self.order:
            hidden = self.stack[number](hidden)
        logits = self.head(hidden.mean(dim=1))
        return {"loss": nn.functional.cross_entropy(logits, labels)}


def residual_layers(number: int) -> list[nn.Module]:
    return [ResidualLayer(nn.LayerNorm(HIDDEN)) for _ in range(number)]


def test_a_weight_shared_by_two_layers_is_refused() -> None:
    def create() -> nn.Module:
        layers = residual_layers(3)
        layers[2].inner.weight = layers[0].inner.weight
        return Listed(layers, [0, 1, 2])

    message = refusal(prepare(create), vector_batch(4))
    assert "share" in message
    assert "inner.weight" in message


def test_a_model_without_layers_is_told_what_was_expected() -> None:
    message = refusal(prepare(Bare), vector_batch(4))
    assert "bare has no list of layers" in message
    assert "layers=" in message


def test_a_list_that_is_none_is_refused_with_what_was_seen() -> None:
    message = refusal(prepare(Unlisted), vector_batch(4), layers="third")
    assert "no list of layers 'third'" in message
    assert "layers=" in message
    assert "second: 1 modules, 2,112 of 3,493 parameters" in message


def test_a_list_that_does_not_exist_is_refused_by_name() -> None:
    model = FAMILIES["llama_untied"].build()
    message = refusal(model, causal_batch(4), layers="model.layer")
    assert "model.layer" in message
    assert "model.layers" in message


# ----------------------------------------------------------------------------------------------
# Models that were refused when only one list of layers could be run, in order: they train exactly
# ----------------------------------------------------------------------------------------------


SIZES = pytest.mark.parametrize("size", [4, 1])


def assert_exact(
    create: Callable[[], nn.Module],
    batch: Batch,
    size: int,
    *,
    added_otherwise: Collection[str] = (),
    least_share: float = 0.8,
    **settings: Any,
) -> None:
    """Two steps are those of plain PyTorch over the whole batch: with all rows in one microbatch
    bit by bit, but for the rounding of gradients that are added up in another order.
    """
    rows = len(batch["labels"])
    model, plain = create(), create()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    losses = train_plain(plain, [batch, batch], optimizer=optimizer, rule="rows", size=rows)
    chosen = {"precision": "float32", "device": "cpu", "kernel": "readable", **settings}
    with inside.engine(model, optimizer=l2l.SGD(lr=0.1), microbatch_size=size, **chosen) as engine:
        found = [float(engine.step(batch).loss) for _ in range(2)]
        assert engine.streamed_share > least_share
    assert found == losses if size == rows else found == pytest.approx(losses, rel=1e-6)
    state = model.state_dict()
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(state[name], expected, rtol=1e-6, atol=1e-6)
        assert size < rows or name in added_otherwise or torch.equal(state[name], expected), name


def build_conditional_t5() -> nn.Module:
    return build_t5("T5ForConditionalGeneration")


@SIZES
def test_t5_trains_exactly_with_both_of_its_lists_of_layers(size: int) -> None:
    """The first layer of each makes the position bias that the next ones add to their scores."""
    assert_exact(build_conditional_t5, translation_batch(4), size, least_share=0.99)


@SIZES
def test_t5_trains_exactly_with_its_encoder_named(size: int) -> None:
    settings = {"layers": "encoder.block", "least_share": 0.3}
    assert_exact(build_conditional_t5, translation_batch(4), size, **settings)


@SIZES
def test_t5_trains_exactly_with_its_decoder_named(size: int) -> None:
    """The code before the decoder looks up rows for both: one gradient, to which the head's is
    added, where autograd adds the decoder's rows to the head's first.
    """
    settings = {"layers": "decoder.block", "least_share": 0.5}
    table = [f"{name}.weight" for name in ("shared", "encoder.embed_tokens")]
    table += [f"{name}.weight" for name in ("decoder.embed_tokens", "lm_head")]
    batch = translation_batch(4)
    assert_exact(build_conditional_t5, batch, size, added_otherwise=table, **settings)


@SIZES
def test_layers_that_are_given_more_than_the_hidden_state_train_exactly(size: int) -> None:
    batch = masked_batch(4, num_labels=CLASSES)
    assert_exact(lambda: build_t5("T5ForTokenClassification"), batch, size)


@SIZES
def test_albert_trains_exactly_with_one_layer_that_is_called_three_times(size: int) -> None:
    assert_exact(build_albert, classification_batch(4), size)


@SIZES
def test_one_layer_listed_three_times_trains_exactly(size: int) -> None:
    def create() -> nn.Module:
        return prepare(lambda: Listed(residual_layers(1) * 3, [0, 1, 2]))

    assert_exact(create, vector_batch(4), size)


@SIZES
@pytest.mark.parametrize("order", [[0, 2, 1], [0, 1, 1, 2], [0, 2]], ids=str)
def test_layers_train_exactly_however_often_and_in_whatever_order_they_are_called(
    order: list[int], size: int
) -> None:
    def create() -> nn.Module:
        return prepare(lambda: Listed(residual_layers(3), order))

    assert_exact(create, vector_batch(4), size)


@SIZES
def test_a_loss_over_the_routers_of_all_layers_is_that_of_the_whole_batch(size: int) -> None:
    assert_exact(lambda: build_mixtral(output_router_logits=True), causal_batch(4), size)


@SIZES
def test_the_largest_part_of_a_model_without_a_list_is_its_layer(size: int) -> None:
    assert_exact(lambda: prepare(Unlisted), vector_batch(4), size, least_share=0.6)


@SIZES
def test_two_lists_of_layers_are_both_streamed(size: int) -> None:
    assert_exact(build_bart, translation_batch(4), size, least_share=0.99)
    names = {one.name for one in Partition(build_bart(), layers=None).lists}
    assert names == {"model.encoder.layers", "model.decoder.layers"}


# ----------------------------------------------------------------------------------------------
# Batches that mean nothing
# ----------------------------------------------------------------------------------------------


def test_a_batch_of_no_rows_is_refused() -> None:
    family = FAMILIES["llama_untied"]
    empty = {name: tensor[:0] for name, tensor in family.batch(4).items()}
    assert "row" in refusal(family.build(), empty)


def test_tensors_of_unequal_rows_are_refused_by_name() -> None:
    family = FAMILIES["llama_untied"]
    batch = family.batch(4)
    batch["labels"] = batch["labels"][:3]
    message = refusal(family.build(), batch)
    assert "labels" in message
    assert "3" in message
    assert "4" in message


@pytest.mark.parametrize("name", ["llama_untied", "bert_masked_lm", "hand_written"])
def test_a_batch_in_which_every_label_is_ignored_is_refused(name: str) -> None:
    family = FAMILIES[name]
    batch = family.batch(4)
    batch["labels"] = torch.full_like(batch["labels"], IGNORED)
    message = refusal(family.build(), batch)
    assert "label" in message


def test_a_batch_with_labels_only_where_nothing_predicts_them_is_refused() -> None:
    """The first label of a row has no word before it: after the shift nothing is left."""
    batch = causal_batch(4)
    batch["labels"] = torch.full_like(batch["labels"], IGNORED)
    batch["labels"][:, 0] = batch["input_ids"][:, 0]
    assert "label" in refusal(FAMILIES["llama_untied"].build(), batch)


# ----------------------------------------------------------------------------------------------
# Settings and states
# ----------------------------------------------------------------------------------------------


def test_an_unknown_precision_is_refused_with_the_known_ones() -> None:
    family = FAMILIES["llama_untied"]
    message = refusal(family.build(), family.batch(4), precision="float31")
    assert "float31" in message
    assert "bfloat16" in message


@pytest.mark.parametrize("size", [0, -1])
def test_a_microbatch_of_no_rows_is_refused(size: int) -> None:
    family = FAMILIES["llama_untied"]
    message = refusal(family.build(), family.batch(4), microbatch_size=size)
    assert "microbatch_size" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused() -> None:
    family = FAMILIES["llama_untied"]
    message = refusal(family.build(), family.batch(4), device="cuda")
    assert "cuda" in message


def test_a_step_after_close_is_refused() -> None:
    family = FAMILIES["llama_untied"]
    model = family.build()
    engine = inside.engine(model, optimizer=l2l.SGD(lr=0.1), precision="float32", device="cpu")
    engine.step(family.batch(4))
    engine.close()
    before = copy_of_state(model)
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)close"):
        engine.step(family.batch(4))
    assert_unchanged(model, before)


@pytest.mark.parametrize("size", [4, 1])
def test_a_step_whose_loss_is_not_a_number_is_skipped(size: int) -> None:
    family = FAMILIES["llama_untied"]
    model = family.build()
    with torch.no_grad():
        model.model.norm.weight[3] = math.inf
    before = copy_of_state(model)
    engine = inside.engine(
        model,
        optimizer=l2l.AdamW(lr=0.1, weight_decay=0.1),
        precision="float32",
        device="cpu",
        microbatch_size=size,
    )
    report = engine.step(family.batch(4))
    assert math.isnan(float(report.loss))
    assert report.skipped is True
    engine.close()
    assert_unchanged(model, before)


def test_training_goes_on_after_a_bad_batch() -> None:
    """A refused batch leaves no trace: the next step equals that of an engine that never saw it."""
    family = FAMILIES["llama_untied"]
    good = family.batch(4)
    bad = {name: tensor[:0] for name, tensor in good.items()}
    models = family.build(), family.build()
    for model, batches in zip(models, ([good, good], [good, bad, good]), strict=True):
        engine = inside.engine(
            model, optimizer=l2l.AdamW(lr=0.01), precision="float32", device="cpu", seed=5
        )
        for batch in batches:
            if batch is bad:
                with pytest.raises(ValueError, match=r"(?i)row"):
                    engine.step(batch)
            else:
                engine.step(batch)
        engine.close()
    assert_unchanged(models[1], copy_of_state(models[0]))
