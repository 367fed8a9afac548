"""What a step may do otherwise changes nothing that it computes.

Rows of embedding tables gathered on the host, layers that stay with their epilogue, optimizer state
on the device, an epilogue in pieces, shared memory, compiled layers: each alone and all together,
against plain PyTorch (loss and gradients) and against the engine without them (training). Where the
arithmetic is the same, bit by bit; where sums are taken in another order (pieces, compiled layers,
tied tables over several microbatches), to 1e-6 of the largest element of each tensor.
"""

import functools
import itertools
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import inside
import pytest
import torch
from families import (
    FAMILIES,
    HIDDEN,
    IGNORED,
    LAYERS,
    LENGTH,
    VOCABULARY,
    Batch,
    Family,
    build_bert,
    build_gpt2,
    build_llama,
    causal_batch,
    hand_written_batch,
    masked_batch,
    prepare,
)
from reference import Gradients, counts, reference_gradients, shared_embeddings, split
from sampled import sampled
from torch import Tensor, nn

import l2l
import l2l.model.layer_pass
from l2l.device import CheckingDevice
from l2l.model import Route, same
from l2l.model.batch import Rule
from l2l.model.layer_pass import BackwardResult, Compiler, Handed, Packed, Program
from l2l.parameter_server import WaitingUpdate
from l2l.run import Usage
from l2l.run.lookup import TableLookup
from l2l.run.outer_pass import pieces
from l2l.run.transfer import Transfer
from l2l.schedule import Lane

ROWS, SIZE = 8, 3  # three microbatches, the last one smaller
EVEN = 6  # rows whose microbatches are all alike, so that compiled layers are compiled once
TOLERANCE = 1e-6
NOISE = 1e-8  # of the largest gradient: what may stand where the true one is zero (biases of keys)
BACKEND = "aot_eager_decomp_partition"  # the partitioner that "inductor" has, without its kernels

ON_HOST: dict[str, Any] = {"embedding": "host"}
EXACT: dict[str, dict[str, Any]] = {
    "lookup on the host": ON_HOST,
    "tail of one": {"overrides": {"num_tail": 1}},
    "tail of all": {"overrides": {"num_tail": LAYERS}},
    "shared memory": {"overrides": {"shares_memory": True}},
    "shared memory, host": {**ON_HOST, "overrides": {"shares_memory": True, "num_tail": 1}},
    "halves, host": {**ON_HOST, "overrides": {"halves": True}},
    "halves but one, host": {**ON_HOST, "overrides": {"halves": True, "num_whole": 1}},
}
IN_HALVES = EXACT["halves, host"]
WITH_STATE: dict[str, dict[str, Any]] = {
    "state of one": {"overrides": {"num_tail": 1, "num_device_states": 1}},
    "state of all": {"overrides": {"num_tail": LAYERS, "num_device_states": LAYERS}},
}
PIECES: dict[str, Any] = {"overrides": {"piece_tokens": 5}}
TOGETHER: dict[str, Any] = {
    **ON_HOST,
    "overrides": {
        "num_tail": 2,
        "num_device_states": 1,
        "piece_tokens": 5,
        "shares_memory": True,
    },
}

compiling = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch warns of itself


# --------------------------------------------------------------------------------------------------
# A small model whose parts can be exchanged


class Layer(nn.Module):
    def __init__(self, number: int, width: int = HIDDEN) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.outer(torch.tanh(self.inner(self.norm(hidden))))


class Numbered(Layer):
    """Its number counts."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.outer(torch.tanh(self.inner(self.norm(hidden)))) / (1 + self.number)


class Dropping(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        inner = nn.functional.dropout(torch.tanh(self.inner(self.norm(hidden))), 0.3, self.training)
        return hidden + nn.functional.dropout(self.outer(inner), 0.3, self.training)


class Writing(Layer):
    """Writes into its input."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden += 0.5
        return super().forward(hidden)


class Branching(Layer):
    """Looks at values, which compilers do not."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) if float(hidden.detach().sum()) > -1e9 else hidden


class Words(nn.Module):
    """A table, layers, a head; flags of the batch make it read its parameters in other places."""

    def __init__(
        self,
        layer: Callable[..., nn.Module] = Layer,
        *,
        width: int = HIDDEN,
        depth: int = LAYERS,
        tied: bool = False,
        padding: int | None = None,
        gate: float | None = None,
        peeks: bool = False,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width, padding_idx=padding)
        self.stack = nn.ModuleList(layer(number, width) for number in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.gate = None if gate is None else nn.Parameter(torch.tensor(gate))
        self.peeks = peeks

    def forward(
        self,
        ids: Tensor,
        labels: Tensor,
        scale: Tensor | None = None,
        *,
        by_copy: Tensor | None = None,
        table_before: Tensor | None = None,
        norm_before: Tensor | None = None,
        rows_after: Tensor | None = None,
    ) -> dict[str, Tensor]:
        hidden = first = self.words(ids if by_copy is None else ids.clone())
        if table_before is not None:
            hidden = hidden + self.words.weight.mean(dim=0)
        if norm_before is not None:
            hidden = self.norm(hidden)
        for layer in self.stack:
            hidden = layer(hidden)
        if self.gate is not None:
            hidden = hidden + self.gate * first
        if self.peeks:
            hidden = hidden + self.words.weight.detach().mean(dim=0)
        if rows_after is not None:
            hidden = hidden + self.words(ids)
        logits = self.head(self.norm(hidden))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss if scale is None else loss * scale.mean(), "logits": logits}


def build_words(*args: Any, **settings: Any) -> nn.Module:
    return prepare(lambda: Words(*args, **settings))


def words_family(*args: Any, **settings: Any) -> Family:
    build = partial(build_words, *args, **settings)
    return Family("words", build, hand_written_batch, "tokens")


# --------------------------------------------------------------------------------------------------
# Running and comparing


def make_engine(model: nn.Module, family: Family, **settings: Any) -> l2l.Engine:
    defaults = {"kernel": "readable", "microbatch_size": SIZE, "precision": "float32"}
    return inside.engine(model, layers=family.layers, device="cpu", **{**defaults, **settings})


def plain_gradients(family: Family, batch: Batch, size: int = SIZE) -> tuple[float, Gradients]:
    microbatches = split(batch, size)
    numbers = [counts(family.rule, one) for one in microbatches]
    used = [(one, number) for one, number in zip(microbatches, numbers, strict=True) if number]
    loss, gradients = reference_gradients(family.build(), *map(list, zip(*used, strict=True)))
    return float(loss), gradients


@functools.cache
def plain_step(name: str, size: int = SIZE, rows: int = ROWS) -> tuple[float, Gradients]:
    return plain_gradients(FAMILIES[name], FAMILIES[name].batch(rows), size)


def engine_gradients(
    family: Family, batch: Batch, **settings: Any
) -> tuple[float, dict[str, Tensor]]:
    recorder = l2l.RecordGradients()
    with make_engine(family.build(), family, optimizer=recorder, **settings) as engine:
        loss = engine.step(batch).loss
    return loss, recorder.gradients


def difference(found: Tensor, expected: Tensor, noise: float = 0.0) -> float:
    """The largest difference, as a part of what is allowed."""
    allowed = max(TOLERANCE * float(expected.abs().max()), noise)
    return float((found - expected).abs().max()) / allowed if allowed else float("nan")


def assert_gradients(
    found: tuple[float, dict[str, Tensor]],
    expected: tuple[float, Gradients],
    *,
    tolerant: set[str] | None = None,
) -> None:
    """Equal but for `tolerant` names, which may be a little off; None: all of them and the loss."""
    loss, gradients = found
    assert loss == (pytest.approx(expected[0], rel=TOLERANCE) if tolerant is None else expected[0])
    wanted = {name: one for name, one in expected[1].items() if one is not None}
    assert gradients.keys() == wanted.keys()
    noise = NOISE * max(float(one.abs().max()) for one in wanted.values())
    off = {
        name: difference(gradients[name], one, noise)
        for name, one in wanted.items()
        if not torch.equal(gradients[name], one)
    }
    wrong = {
        name: part
        for name, part in off.items()
        if (tolerant is not None and name not in tolerant) or not part <= 1.0
    }
    assert not wrong, f"{len(wrong)} of {len(wanted)} gradients are off: {wrong}"


def assert_same(
    found: dict[str, Tensor], expected: dict[str, Tensor], *, tolerance: float = 0.0
) -> None:
    """Equal states, or off by no more than a part of the largest element (and of one)."""
    assert found.keys() == expected.keys()
    wrong = {
        name: float((found[name] - one).abs().max())
        for name, one in expected.items()
        if not torch.equal(found[name], one)
        and not bool(((found[name] - one).abs() <= tolerance * (one.abs().max() + 0.1)).all())
    }
    assert not wrong, f"{len(wrong)} of {len(expected)} tensors are off: {wrong}"


# --------------------------------------------------------------------------------------------------
# One step: loss and gradients


@pytest.mark.parametrize("settings", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama_tied", ROWS),
        ("llama_tied", SIZE),
        ("llama_untied", SIZE),
        ("gpt2", ROWS),
        ("bert_masked_lm", SIZE),
        ("hand_written", SIZE),
    ],
)
def test_the_same_arithmetic_gives_the_same_bits(name: str, settings: dict, size: int):
    family = FAMILIES[name]
    found = engine_gradients(family, family.batch(ROWS), microbatch_size=size, **settings)
    tied = shared_embeddings(family.build()) if size < ROWS else set()
    assert_gradients(found, plain_step(name, size), tolerant=tied)


def uneven(batch: Batch) -> Batch:
    """Two rows without labels, and one with labels in its last positions only."""
    batch["labels"][:2] = IGNORED
    batch["labels"][2, :-2] = IGNORED
    return batch


@pytest.mark.parametrize("tokens", [24, 5, 7], ids=["of rows", "of thirds", "of halves"])
@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "bert_masked_lm", "hand_written"])
def test_an_epilogue_in_pieces(name: str, tokens: int):
    family = FAMILIES[name]
    batch = uneven(family.batch(ROWS, seed=6))
    expected = plain_gradients(family, batch)
    recorder = l2l.RecordGradients()
    settings = {"optimizer": recorder, "overrides": {"piece_tokens": tokens}}
    with make_engine(family.build(), family, **settings) as engine:
        engine.step(batch)  # the first step has its trial, too
        shapes: list[tuple[int, ...]] = []
        run = inside.outer(engine).run_epilogue

        def watch(inputs: Batch, delivered: Any, route: Route, **more: Any) -> Any:
            (hidden,) = delivered.values()
            shapes.append(tuple(hidden.shape[:2]))
            return run(inputs, delivered, route, **more)

        inside.outer(engine).run_epilogue = watch
        loss = engine.step(batch).loss
        num_training = len(shapes)
        assert engine.evaluate(batch) == pytest.approx(loss, rel=TOLERANCE)
    assert_gradients((loss, recorder.gradients), expected)
    largest, number = {24: ((2, LENGTH), 5), 5: ((1, 4), 3 * ROWS), 7: ((1, 6), 2 * ROWS)}[tokens]
    assert max(shapes) == largest
    assert len(shapes) == 2 * num_training
    assert 0 < num_training < number, "a piece without labels is left out"


@pytest.mark.parametrize("optimizer", [l2l.AdamW(), l2l.Adafactor()], ids=["host", "device"])
def test_memory_that_is_dropped_is_free(monkeypatch: pytest.MonkeyPatch, optimizer: Any):
    family, left = FAMILIES["llama_untied"], list[tuple[str, bool]]()
    drop = Transfer.drop

    def watched(transfer: Transfer, place: str) -> None:
        buffer = transfer._slots.get(place)
        storage = None if buffer is None else weakref.ref(buffer.untyped_storage())
        del buffer
        drop(transfer, place)
        left.append((place, storage is not None and storage() is not None))

    monkeypatch.setattr(Transfer, "drop", watched)
    settings = EXACT["shared memory"] | {"optimizer": optimizer}
    with make_engine(family.build(), family, **settings) as engine:
        for _ in range(2):
            engine.step(family.batch(ROWS))
    assert {place[0] for place, _ in left} == {"S", "G"}
    assert not [place for place, is_alive in left if is_alive]


def test_pieces_of_rows_where_a_row_has_one_label():
    family = FAMILIES["bert_classification"]
    found = engine_gradients(family, family.batch(ROWS), overrides={"piece_tokens": 5})
    assert_gradients(found, plain_step("bert_classification", SIZE))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("length", [1, 7, 16])
@pytest.mark.parametrize("tokens", [1, 3, 16, 40, None])
@pytest.mark.parametrize("within", [True, False])
def test_pieces_cover_everything_once(rows: int, length: int, tokens: int | None, within: bool):
    hidden = torch.zeros(rows, length, 1)
    found = pieces(rows, length, tokens=tokens, within_rows=within)
    for piece in found:
        part = piece.of(hidden)
        assert part.numel() > 0
        part += 1
        assert tokens is None or part.numel() <= max(tokens, 1 if within else length)
    assert bool((hidden == 1).all())


def test_a_loss_of_the_user_in_pieces():
    family = FAMILIES["llama_untied"]

    def loss(outputs: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        labels = batch["labels"][:, 1:]
        logits = outputs.logits[:, :-1].flatten(0, 1)
        total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        return total, (labels != IGNORED).sum()

    expected = plain_step("llama_untied", SIZE)
    for tokens in (5, 24):
        settings = {"loss": loss, "overrides": {"piece_tokens": tokens}}
        assert engine_gradients(family, family.batch(ROWS), **settings)[0] == pytest.approx(
            expected[0], rel=TOLERANCE
        )


def test_targets_that_are_ignored_but_not_counted_are_not_cut():
    class Renamed(Words):
        def forward(self, ids: Tensor, targets: Tensor) -> dict[str, Tensor]:
            return super().forward(ids, targets)

    family = Family("renamed", partial(prepare, Renamed), hand_written_batch, "tokens")
    batch = hand_written_batch(ROWS)
    renamed = {"ids": batch["ids"], "targets": batch["labels"].clone()}
    renamed["targets"][:2, :] = 5  # the trial finds two rows that count alike
    expected = plain_gradients(words_family(), {**batch, "labels": renamed["targets"]}, ROWS)
    recorder = l2l.RecordGradients()
    settings = {"optimizer": recorder, "microbatch_size": ROWS, "overrides": {"piece_tokens": 24}}
    with make_engine(family.build(), family, **settings) as engine:
        report = engine.step(renamed)
        assert inside.facts(engine).rule is Rule.ROWS
    assert_gradients((report.loss, recorder.gradients), expected, tolerant=set())


@compiling
@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "bert_masked_lm"])
def test_compiled_layers(name: str):
    family = FAMILIES[name]
    found = engine_gradients(family, family.batch(EVEN), compile=BACKEND)
    assert_gradients(found, plain_step(name, rows=EVEN))


@compiling
@pytest.mark.parametrize(
    ("name", "keep"), [("llama_tied", 0.3), ("llama_tied", 1.0), ("bert_masked_lm", 0.3)]
)
def test_compiled_layers_that_keep_results(name: str, keep: float, monkeypatch: Any):
    monkeypatch.setattr(l2l.model.layer_pass, "SMALL_BYTES", 0)
    family = FAMILIES[name]
    recorder = l2l.RecordGradients()
    overrides = {"keep": keep, "num_kept_cells": 2}
    settings = {"optimizer": recorder, "compile": BACKEND, "overrides": overrides, "prove": False}
    with make_engine(family.build(), family, **settings) as engine:
        kept: list[int] = []
        put = inside.stash(engine).put

        def watch(cell: str, value: str, tensors: list[Tensor]) -> None:
            kept.extend([sum(one.nbytes for one in tensors)] if value.startswith("k") else [])
            put(cell, value, tensors)

        inside.stash(engine).put = watch
        with engine.trace() as trace:
            loss = engine.step(family.batch(EVEN)).loss
    assert_gradients((loss, recorder.gradients), plain_step(name, rows=EVEN))
    assert len(kept) == LAYERS * 2
    assert min(kept) > 0
    assert any(span.text.startswith("fetch k") for span in trace.spans)


@compiling
@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
def test_all_together(name: str, monkeypatch: Any):
    monkeypatch.setattr(l2l.model.layer_pass, "SMALL_BYTES", 0)
    family = FAMILIES[name]
    overrides = {
        "keep": 0.3,
        "num_kept_cells": 2,
        "num_tail": 1,
        "piece_tokens": 5,
        "shares_memory": True,
    }
    settings = {**ON_HOST, "compile": BACKEND, "overrides": overrides}
    found = engine_gradients(family, family.batch(EVEN), **settings)
    assert_gradients(found, plain_step(name, rows=EVEN))


@pytest.mark.parametrize("num_tail", [0, 1, LAYERS])
def test_only_something_that_all_layers_are_given_is_trained(num_tail: int):
    """The hidden state requires no gradient where it enters, but it does from then on."""
    mpnet = FAMILIES["mpnet"]

    def build() -> nn.Module:
        model = mpnet.build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("relative_attention_bias" in name)
        return model

    family = Family("mpnet", build, mpnet.batch, mpnet.rule)
    batch = family.batch(ROWS)
    found = engine_gradients(family, batch, overrides={"num_tail": num_tail})
    assert len(found[1]) == 1
    assert_gradients(found, plain_gradients(family, batch), tolerant={*found[1]})


# --------------------------------------------------------------------------------------------------
# Training

STEPS = 6
ADAMW = l2l.AdamW(lr=2e-3, eps=1e-3, weight_decay=0.05)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"optimizer": ADAMW},
    "clipped": {"optimizer": ADAMW, "clip_norm": 0.05},
    "SGD": {"optimizer": l2l.SGD(lr=0.05, momentum=0.9, weight_decay=0.01)},
    "Lion": {"optimizer": l2l.Lion(lr=1e-3)},
    "8-bit": {"optimizer": l2l.AdamW(lr=2e-3, eps=1e-3, moments="8bit")},
}
Between = Callable[[l2l.Engine, Family, int], None]


def nothing(engine: l2l.Engine, family: Family, number: int) -> None:
    pass


def train(
    family: Family,
    *,
    steps: int = STEPS,
    rows: int = ROWS,
    change: Callable[[nn.Module], None] = lambda model: None,
    between: Between = nothing,
    **settings: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradient norms, and the weights at the end."""
    model = family.build()
    change(model)
    found = []
    with make_engine(model, family, **settings) as engine:
        for number in range(steps):
            report = engine.step(family.batch(rows, seed=number))
            between(engine, family, number)
            found += [report.loss, report.gradient_norm]
    return found, model.state_dict()


@functools.cache
def plain_training(
    name: str, optimizer: str, steps: int = STEPS, rows: int = ROWS
) -> tuple[list[float], dict[str, Tensor]]:
    return train(FAMILIES[name], steps=steps, rows=rows, **OPTIMIZERS[optimizer])


ALL = {**EXACT, **WITH_STATE, "pieces": PIECES, "together": TOGETHER}


@pytest.mark.parametrize("optimizer", ["AdamW", "clipped"])
@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        *(("llama_tied", chosen) for chosen in ALL),
        *(("llama_untied", chosen) for chosen in ("lookup on the host", "together")),
    ],
)
def test_training_is_the_same(name: str, chosen: str, optimizer: str):
    settings = ALL[chosen]
    numbers, expected = plain_training(name, optimizer)
    found, state = train(FAMILIES[name], **OPTIMIZERS[optimizer], **settings)
    assert found == pytest.approx(numbers, rel=TOLERANCE)
    rounds = "embedding" in settings and optimizer == "clipped"  # the norm is added up otherwise
    exact = chosen in EXACT and not rounds
    assert_same(state, expected, tolerance=0.0 if exact else TOLERANCE)


@pytest.mark.parametrize("optimizer", ["SGD", "Lion", "8-bit"])
@pytest.mark.parametrize("kernel", ["readable", "native"])
def test_every_optimizer_trains_the_same(optimizer: str, kernel: str):
    settings = {**ON_HOST, **WITH_STATE["state of one"], "kernel": kernel}
    numbers, expected = plain_training("llama_tied", optimizer)
    found, state = train(FAMILIES["llama_tied"], **OPTIMIZERS[optimizer], **settings)
    # A difference in the last bit may round an 8-bit moment the other way.
    rounded = optimizer == "8-bit"
    assert found == pytest.approx(numbers, rel=1e-4 if rounded else TOLERANCE)
    assert_same(state, expected, tolerance=1e-3 if rounded else TOLERANCE)


@compiling
def test_compiled_training_is_close():
    overrides = {**TOGETHER["overrides"], "keep": 0.3, "num_kept_cells": 2}
    settings = {**TOGETHER, "compile": BACKEND, "overrides": overrides}
    numbers, expected = plain_training("llama_tied", "clipped", rows=EVEN)
    found, state = train(FAMILIES["llama_tied"], rows=EVEN, **OPTIMIZERS["clipped"], **settings)
    assert found == pytest.approx(numbers, rel=1e-5)
    assert_same(state, expected, tolerance=1e-5)


def look(engine: l2l.Engine, family: Family, number: int) -> None:
    """Everything that asks for the present weights or state."""
    if number % 2:
        engine.evaluate(family.batch(5, seed=20 + number))
    if number == 2:
        engine.predict(family.batch(4, seed=30))
    if number in (0, 3):
        state = engine.optimizer.state_dict()["state"]
        assert {int(one["step"]) for one in state.values()} == {number + 1}


@pytest.mark.parametrize(
    "settings",
    [ON_HOST, IN_HALVES, *WITH_STATE.values(), TOGETHER],
    ids=["host", "halves", *WITH_STATE, "together"],
)
def test_looking_between_steps_changes_nothing(settings: dict):
    _, expected = plain_training("llama_tied", "clipped")
    family, optimizer = FAMILIES["llama_tied"], OPTIMIZERS["clipped"]
    _, state = train(family, between=look, **optimizer, **settings)
    assert_same(state, expected, tolerance=TOLERANCE)


def test_evaluation_prediction_and_state_are_those_of_the_last_step():
    family = FAMILIES["llama_untied"]
    found = []
    for settings in ({}, TOGETHER):
        seen: list[Tensor] = []

        def note(
            engine: l2l.Engine, family: Family, number: int, seen: list[Tensor] = seen
        ) -> None:
            seen.append(torch.tensor(engine.evaluate(family.batch(5, seed=number))))
            seen.append(engine.predict(family.batch(5, seed=number)).logits)
            if number == 1:
                state = engine.optimizer.state_dict()["state"]
                seen.extend(one[key].clone() for one in state.values() for key in sorted(one))

        train(family, steps=3, between=note, **OPTIMIZERS["clipped"], **settings)
        found.append({str(index): one for index, one in enumerate(seen)})
    assert len(found[0]) > 60
    assert_same(found[1], found[0], tolerance=TOLERANCE)


def freeze_halves(model: nn.Module) -> None:
    for parameter in list(model.parameters())[1::2]:
        parameter.requires_grad_(False)


def freeze_lower(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.2" in name)


def freeze_upper(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" in name)


def freeze_but_adapters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "v_proj" in name)


@pytest.mark.parametrize(
    "change",
    [freeze_halves, freeze_lower, freeze_upper, freeze_but_adapters],
    ids=["halves", "lower", "upper", "adapters"],
)
def test_training_with_frozen_parameters_is_the_same(change: Callable[[nn.Module], None]):
    family = FAMILIES["llama_tied"]
    numbers, expected = train(family, steps=3, change=change, optimizer=ADAMW)
    for settings in (ON_HOST, TOGETHER, {**ON_HOST, **WITH_STATE["state of all"]}):
        found, state = train(family, steps=3, change=change, optimizer=ADAMW, **settings)
        assert found == pytest.approx(numbers, rel=TOLERANCE)
        assert_same(state, expected, tolerance=TOLERANCE)
    fresh = family.build().state_dict()
    assert 0 < sum(torch.equal(fresh[name], one) for name, one in expected.items()) < len(fresh)


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_whose_loss_is_not_finite_changes_nothing(tied: bool):
    family = words_family(tied=tied)

    def batch(number: int) -> Batch:
        scale = torch.full((ROWS,), torch.nan if number in (1, 2) else 1.0)
        return {**family.batch(ROWS, seed=number), "scale": scale}

    found = []
    for settings, skipped in (({}, True), (TOGETHER, True), (IN_HALVES, True), ({}, False)):
        model = family.build()
        with make_engine(model, family, clip_norm=0.05, optimizer=ADAMW, **settings) as engine:
            for number in range(5) if skipped else (0, 3, 4):
                report = engine.step(batch(number))
                assert report.skipped == (number in (1, 2))
            state = engine.optimizer.state_dict()["state"]
            assert {int(one["step"]) for one in state.values()} == {3}
        found.append(model.state_dict())
    assert_same(found[0], found[3])
    assert_same(found[1], found[3], tolerance=TOLERANCE)
    assert_same(found[2], found[3], tolerance=TOLERANCE)


@pytest.mark.parametrize("then", ["close", "look", "step"])
def test_a_step_that_fails_loses_no_update(then: str):
    """Updates on the device wait for the next step, which may fail before it does them."""
    family = FAMILIES["llama_untied"]
    found = []
    for fails in (False, True):
        model = family.build()
        settings = {**TOGETHER, "optimizer": ADAMW, "clip_norm": 0.05}
        with make_engine(model, family, **settings) as engine:
            engine.step(family.batch(ROWS))
            for kind in ("forward Pro m", "loss m") if fails else ():
                perform = inside.relay(engine)._perform[kind]
                inside.relay(engine)._perform[kind] = lambda *_: (_ for _ in ()).throw(
                    OSError("planted")
                )
                with pytest.raises(OSError, match="planted"):
                    engine.step(family.batch(ROWS, seed=1))
                inside.relay(engine)._perform[kind] = perform
            if then == "look":
                look(engine, family, 0)
            if then != "close":
                engine.step(family.batch(ROWS, seed=2))
        found.append(model.state_dict())
    assert_same(found[1], found[0])


HALVES = {"update U host late weights", "update U host late moments"}


def kinds_of(engine: l2l.Engine) -> set[str]:
    """What the schedules have in them that the engine has run so far."""
    schedules = inside.schedules(engine).values()
    return {action.kind for schedule in schedules for action in schedule.actions}


def moments_of(engine: l2l.Engine) -> dict[str, Tensor]:
    """And numbers of steps, after all updates."""
    return {
        f"{index} {name}": tensor.clone()
        for index, state in engine.optimizer.state_dict()["state"].items()
        for name, tensor in state.items()
    }


def is_every_pair(one: tuple[Any, ...]) -> bool:
    """Half of all: each two of these settings meet in all four ways."""
    return sum(value in one for value in (True, "bfloat16", "8bit", "native")) % 2 == 0


@pytest.mark.parametrize(
    ("tied", "precision", "moments", "kernel"),
    sampled(
        itertools.product(
            (True, False), ("float32", "bfloat16"), ("float32", "8bit"), ("readable", "native")
        ),
        is_every_pair,
    ),
)
def test_updates_in_halves_give_the_same_bits(
    tied: bool, precision: str, moments: str, kernel: str, monkeypatch: pytest.MonkeyPatch
):
    refresh, refreshed = WaitingUpdate.refresh, set[bool]()

    def watched(waiting: WaitingUpdate, *args: Any, **more: Any) -> None:
        refreshed.add(more["halves"])
        refresh(waiting, *args, **more)

    monkeypatch.setattr(WaitingUpdate, "refresh", watched)
    family = words_family(width=128, tied=tied, padding=0)
    optimizer = l2l.AdamW(lr=2e-3, weight_decay=0.05, moments=moments)
    settings = {"precision": precision, "kernel": kernel, "optimizer": optimizer, "clip_norm": 0.05}

    def trained(*, halves: bool) -> dict[str, Tensor]:
        model, overrides, seen, reports = family.build(), {"halves": halves}, {}, []
        with make_engine(model, family, overrides=overrides, **ON_HOST, **settings) as engine:
            refreshed.clear()
            for number in range(STEPS):
                scale = torch.full((ROWS,), torch.nan if number == 2 else 1.0)
                reports.append(engine.step({**family.batch(ROWS, seed=number), "scale": scale}))
                if number in (2, 3):
                    evaluated = engine.evaluate(family.batch(5, seed=20 + number))
                    seen[f"evaluated {number}"] = torch.tensor(evaluated)
            assert [report.skipped for report in reports] == [n == 2 for n in range(STEPS)]
            assert (kinds_of(engine) >= HALVES) == halves
            assert ("weights first and moments afterwards" in str(engine.plan)) == halves
            seen |= {str(n): torch.tensor(one.loss) for n, one in enumerate(reports) if n != 2}
            seen |= moments_of(engine)
            assert refreshed == {halves, False}, "rows are done whole for an evaluation"
        return {**seen, **model.state_dict()}

    assert_same(trained(halves=True), trained(halves=False))


@pytest.mark.parametrize("optimizer", ["SGD", "Lion"])
def test_an_optimizer_without_halves_updates_at_once(optimizer: str):
    settings = {**OPTIMIZERS[optimizer], "kernel": "native", "clip_norm": 0.05, "steps": 3}

    def watch(engine: l2l.Engine, family: Family, number: int) -> None:
        assert not HALVES & kinds_of(engine)

    family = words_family(width=128)
    expected = train(family, **ON_HOST, **settings)[1]
    assert_same(train(family, between=watch, **IN_HALVES, **settings)[1], expected)


@pytest.mark.parametrize("then", ["close", "look", "step"])
@pytest.mark.parametrize("settings", [{}, ON_HOST, TOGETHER], ids=["device", "host", "together"])
def test_a_step_in_halves_that_fails_loses_no_update(settings: dict, then: str):
    """It has submitted the updates that were left, of which the next one must do nothing twice."""
    family = words_family(width=128, tied=True)

    def trained(*, halves: bool, fails: bool) -> dict[str, Tensor]:
        overrides = {**settings.get("overrides", {}), "halves": halves}
        chosen = {**settings, **OPTIMIZERS["clipped"], "overrides": overrides}
        model = family.build()
        with make_engine(model, family, **chosen) as engine:
            engine.step(family.batch(ROWS))
            for kind in ("forward U m", "loss m") if fails else ():
                perform = inside.relay(engine)._perform[kind]
                inside.relay(engine)._perform[kind] = lambda *_: (_ for _ in ()).throw(
                    OSError("planted")
                )
                with pytest.raises(OSError, match="planted"):
                    engine.step(family.batch(ROWS, seed=1))
                inside.relay(engine)._perform[kind] = perform
            if then == "look":
                look(engine, family, 0)
            if then != "close":
                engine.step(family.batch(ROWS, seed=2))
                engine.step(family.batch(ROWS, seed=3))
            assert ("update U host late weights" in kinds_of(engine)) == (
                halves and (fails or then != "close")
            )
            moments = moments_of(engine) if then != "close" else {}
        return {**moments, **model.state_dict()}

    expected = trained(halves=False, fails=False)
    for halves, fails in ((False, True), (True, False), (True, True)):
        assert_same(trained(halves=halves, fails=fails), expected)


@pytest.mark.parametrize("then", ["close", "evaluate", "step"])
@pytest.mark.parametrize("settings", [{}, ON_HOST], ids=["device", "host"])
def test_a_step_that_is_interrupted_between_the_halves_loses_no_update(settings: dict, then: str):
    """Weights are done, moments are not: the next step finds both so."""
    family = words_family(width=128)

    def trained(*, interrupted: bool) -> dict[str, Tensor]:
        model = family.build()
        chosen = {**OPTIMIZERS["clipped"], **settings, "overrides": {"halves": True}}
        with make_engine(model, family, **chosen) as engine:
            engine.step(family.batch(ROWS))
            if interrupted:
                prepare = inside.relay(engine)._prepare
                moments = prepare["update U host late moments"]
                prepare["update U host late moments"] = lambda *_: (_ for _ in ()).throw(
                    KeyboardInterrupt
                )
                with pytest.raises(KeyboardInterrupt):
                    engine.step(family.batch(ROWS, seed=1))
                prepare["update U host late moments"] = moments
                assert inside.server(engine).waiting
            if then == "evaluate":
                engine.evaluate(family.batch(5, seed=20))
            if then != "close":
                engine.step(family.batch(ROWS, seed=2))
            moments = moments_of(engine) if then != "close" else {}
        return {**moments, **model.state_dict()}

    assert_same(trained(interrupted=True), trained(interrupted=False))


def test_a_batch_may_be_filled_anew():
    family = FAMILIES["llama_untied"]
    expected = train(family, steps=3, optimizer=ADAMW, **ON_HOST)[1]
    model, batch = family.build(), family.batch(ROWS)
    with make_engine(model, family, optimizer=ADAMW, **ON_HOST) as engine:
        for number in range(3):
            for name, tensor in family.batch(ROWS, seed=number).items():
                batch[name].copy_(tensor)
            engine.step(batch)
            batch["input_ids"].fill_(5)
    assert_same(model.state_dict(), expected)


def test_a_learning_rate_schedule_reaches_late_updates():
    family = FAMILIES["llama_tied"]
    found = []
    for settings in ({}, TOGETHER):
        model = family.build()
        with make_engine(model, family, optimizer=ADAMW, **settings) as engine:
            schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda n: 0.3**n)
            for number in range(4):
                engine.step(family.batch(ROWS, seed=number))
                schedule.step()
        found.append(model.state_dict())
    assert_same(found[1], found[0], tolerance=TOLERANCE)


@pytest.mark.parametrize("first", Lane)
def test_every_order_the_waits_allow(first: Lane):
    _, expected = plain_training("llama_tied", "clipped", steps=3)
    settings = {**OPTIMIZERS["clipped"], **TOGETHER}
    model, family = FAMILIES["llama_tied"].build(), FAMILIES["llama_tied"]
    device = CheckingDevice(first=first)
    engine = inside.engine(
        model, precision="float32", device=device, kernel="readable", microbatch_size=3, **settings
    )
    with engine:
        for number in range(3):
            engine.step(family.batch(ROWS, seed=number))
            look(engine, family, number)
    assert_same(model.state_dict(), expected, tolerance=TOLERANCE)


@pytest.mark.parametrize(
    ("tied", "optimizer", "kernel"),
    [
        (True, "AdamW", "readable"),
        (True, "clipped", "native"),
        (True, "8-bit", "native"),
        (False, "AdamW", "native"),
        (False, "clipped", "readable"),
        (False, "8-bit", "readable"),
    ],
)
def test_rows_of_whole_blocks_are_updated_apart(
    tied: bool, optimizer: str, kernel: str, monkeypatch: pytest.MonkeyPatch
):
    """Rows of 128 elements: those of the next step's words first, the others later."""
    family = words_family(width=128, tied=tied, padding=0)
    rows: list[int] = []
    refresh = WaitingUpdate.refresh

    def watched(waiting: WaitingUpdate, server: Any, ids: Any, **more: Any) -> None:
        rows.append(len(ids.rows))
        refresh(waiting, server, ids, **more)

    def watch(engine: l2l.Engine, family: Family, number: int) -> None:
        if number == 0:
            monkeypatch.setattr(WaitingUpdate, "refresh", watched)
        if number == 2:
            engine.evaluate(family.batch(2, seed=40))

    settings = {**OPTIMIZERS[optimizer], "kernel": kernel}
    numbers, expected = train(family, steps=4, embedding="device", **settings)
    found, state = train(family, steps=4, between=watch, **ON_HOST, **settings)
    assert found == pytest.approx(numbers, rel=TOLERANCE)
    assert_same(state, expected, tolerance=TOLERANCE if optimizer == "clipped" or tied else 0.0)
    assert len(rows) > 3  # each microbatch of two steps and of the evaluation
    assert 0 < max(rows) < VOCABULARY


# --------------------------------------------------------------------------------------------------
# The norm


@pytest.mark.parametrize("kernel", ["readable", "native"])
@pytest.mark.parametrize("padding", [None, 0, 5])
@pytest.mark.parametrize("tied", [True, False])
def test_the_norm_counts_rows_that_the_host_adds(tied: bool, padding: int | None, kernel: str):
    family = words_family(tied=tied, padding=padding)
    batch = family.batch(ROWS)
    batch["ids"][:, 2] = 5
    _, gradients = plain_gradients(family, batch)
    expected = torch.stack([one.norm() for one in gradients.values() if one is not None]).norm()
    with make_engine(family.build(), family, kernel=kernel, **ON_HOST) as engine:
        assert engine.step(batch).gradient_norm == pytest.approx(float(expected), rel=TOLERANCE)
    found = engine_gradients(family, batch, **ON_HOST)
    assert_gradients(found, plain_gradients(family, batch), tolerant={"words.weight"})
    if padding is not None and not tied:
        assert not found[1]["words.weight"][padding].any()


# --------------------------------------------------------------------------------------------------
# What the trial finds out


def lookup_by(unit: str, owner: str, name: str, padding: int | None) -> TableLookup:
    return TableLookup(unit=unit, owner=owner, name=name, padding_idx=padding)


LLAMA = lookup_by("T0", "model.embed_tokens.weight", "input_ids", 0)
GPT2 = lookup_by("T0", "transformer.wte.weight", "input_ids", None)
BERT = lookup_by("T0", "bert.embeddings.word_embeddings.weight", "input_ids", 0)
READ_BEFORE = Usage(before=True, after=False)
READ_AFTER = Usage(before=False, after=True)
USAGE = {
    "llama_untied": {
        "T0": Usage(before=False, after=False, lookups=(LLAMA,)),
        "T1": READ_AFTER,  # the head
        "O": READ_AFTER,
    },
    "llama_tied": {"T0": Usage(before=False, after=True, lookups=(LLAMA,)), "O": READ_AFTER},
    "gpt2": {
        "T0": Usage(before=False, after=True, lookups=(GPT2,)),
        "T1": READ_BEFORE,
        "O": READ_AFTER,
    },
    "bert_masked_lm": {
        "T0": Usage(before=False, after=True, lookups=(BERT,)),
        "T1": READ_BEFORE,
        "T2": READ_BEFORE,
        "O": Usage(before=True, after=True),
    },
}


@pytest.mark.parametrize("name", USAGE)
def test_what_is_read_before_and_after_the_layers(name: str):
    family = FAMILIES[name]
    with make_engine(family.build(), family, optimizer=l2l.RecordGradients(), **ON_HOST) as engine:
        engine.step(family.batch(ROWS))
        assert inside.facts(engine).alone
        assert inside.facts(engine).usage == USAGE[name]
        units = {unit.name: unit for unit in inside.outer_units(engine)}
        assert units["T0"].looked_up
        assert not units["T0"].in_prologue
        assert not any(unit.looked_up for unit in units.values() if unit.name != "T0")


@pytest.mark.parametrize("size", [ROWS, SIZE])
@pytest.mark.parametrize("gate", [0.5, 0.0], ids=["open", "closed"])
def test_an_epilogue_that_uses_the_embedding_is_not_alone(gate: float, size: int):
    """Also where a factor of zero hides it: that factor is trained."""

    def build() -> nn.Module:
        model = build_words(gate=gate)
        nn.init.constant_(model.gate, gate)
        return model

    family = Family("gated", build, hand_written_batch, "tokens")
    batch = family.batch(ROWS)
    recorder = l2l.RecordGradients()
    settings = {**ON_HOST, "overrides": {"num_tail": 1, "piece_tokens": 5, "shares_memory": True}}
    with make_engine(
        family.build(), family, optimizer=recorder, microbatch_size=size, **settings
    ) as engine:
        loss = engine.step(batch).loss
        assert not inside.facts(engine).alone
        assert not inside.facts(engine).usage
        assert not any(unit.looked_up for unit in inside.outer_units(engine))
    found = (loss, recorder.gradients)
    assert_gradients(found, plain_gradients(family, batch, size), tolerant={"words.weight"})
    assert bool(recorder.gradients["gate"].abs() > 0)


def test_only_nan_is_the_same_as_nan():
    nan, zero = torch.tensor([torch.nan]), torch.zeros(1)
    assert same(nan, nan)
    assert same(zero, zero)
    assert not same(nan, zero)
    assert not same(zero, nan)


def test_a_table_that_the_epilogue_reads_without_gradient():
    family = words_family(peeks=True)
    batch = family.batch(ROWS)
    found = engine_gradients(family, batch, **ON_HOST)
    assert_gradients(found, plain_gradients(family, batch), tolerant=set())
    settings = {**OPTIMIZERS["AdamW"], "steps": 3}
    expected = train(family, embedding="device", **settings)[1]
    assert_same(train(family, **ON_HOST, **settings)[1], expected)


@pytest.mark.parametrize("flag", ["by_copy", "table_before", "norm_before", "rows_after"])
@pytest.mark.parametrize("embedding", ["host", "device"])
def test_a_later_batch_that_reads_otherwise_is_tried_anew(embedding: str, flag: str):
    family, recorder = words_family(), l2l.RecordGradients()
    with make_engine(family.build(), family, optimizer=recorder, embedding=embedding) as engine:
        for seed, more in enumerate([{}, {flag: torch.ones(ROWS)}, {}]):
            batch = {**family.batch(ROWS, seed=seed), **more}
            loss = engine.step(batch).loss
            engine.state_dict()  # updates that the step has left are done, too
            assert_gradients((loss, recorder.gradients), plain_gradients(family, batch))


@pytest.mark.parametrize(
    ("embedding", "flag", "name"),
    [
        ("host", "by_copy", "words"),
        ("host", "table_before", "words"),
        ("host", "norm_before", "norm"),
        ("device", "rows_after", "words"),
    ],
)
def test_a_later_batch_that_reads_otherwise_is_refused(
    embedding: str, flag: str, name: str, monkeypatch: pytest.MonkeyPatch
):
    """Where its entries do not tell that it may."""
    monkeypatch.setattr("l2l.engine.network.Network._may_be_others", lambda *_, **__: False)
    family = words_family()
    settings = {**TOGETHER, "embedding": embedding, "optimizer": ADAMW}
    expected = train(family, steps=2, **settings)[1]
    model = family.build()
    with make_engine(model, family, **settings) as engine:
        engine.step(family.batch(ROWS))
        odd = {**family.batch(ROWS), flag: torch.ones(ROWS)}
        with pytest.raises(RuntimeError, match=rf"'{name}\.weight'.*first\s+batch"):
            engine.step(odd)
        engine.step(family.batch(ROWS, seed=1))
    assert_same(model.state_dict(), expected)


@pytest.mark.parametrize("wrong", [VOCABULARY, -1])
def test_ids_without_a_row_are_refused_before_anything_happens(wrong: int):
    family = FAMILIES["llama_tied"]
    settings = {**TOGETHER, **OPTIMIZERS["clipped"]}
    expected = train(family, steps=2, **settings)[1]
    model = family.build()
    with make_engine(model, family, **settings) as engine:
        engine.step(family.batch(ROWS))
        bad = family.batch(ROWS, seed=3)
        bad["input_ids"][-1, 3] = wrong
        for use in (engine.step, engine.evaluate, engine.predict):
            with pytest.raises(ValueError, match=rf"{wrong}.*model\.embed_tokens\.weight.*0\s+to"):
                use(bad)
        without = {key: value for key, value in bad.items() if key != "input_ids"}
        with pytest.raises(ValueError, match=r"no tensor 'input_ids'.*embed_tokens"):
            engine.step(without)
        engine.step(family.batch(ROWS, seed=1))
    assert_same(model.state_dict(), expected)


def test_entries_of_the_batch_that_share_memory_are_told_apart():
    """The first batch has its ids as labels too, the second has not."""
    family = words_family()
    recorder = l2l.RecordGradients()
    with make_engine(family.build(), family, optimizer=recorder, **ON_HOST) as engine:
        ids = family.batch(ROWS)["ids"]
        engine.step({"labels": ids, "ids": ids})
        batch = family.batch(ROWS)
        loss = engine.step(batch).loss
    assert_gradients((loss, recorder.gradients), plain_gradients(family, batch), tolerant=set())


# --------------------------------------------------------------------------------------------------
# Compiled layers


@compiling
@pytest.mark.parametrize("depth", [2, 5])
def test_one_program_serves_any_depth(depth: int):
    family = words_family(depth=depth)
    batch = family.batch(EVEN)
    recorder = l2l.RecordGradients()
    settings = {"optimizer": recorder, "compile": BACKEND}
    with make_engine(family.build(), family, **settings) as engine:
        loss = engine.step(batch).loss
        engine.evaluate(batch)
        assert len(inside.compiler(engine).programs) == 1
        assert all(map(inside.compiler(engine).compiles, inside.partition(engine).structures))
    assert_gradients((loss, recorder.gradients), plain_gradients(family, batch))


@compiling
def test_compiled_layers_take_any_length():
    family = words_family(depth=2)
    recorder = l2l.RecordGradients()
    settings = {"optimizer": recorder, "compile": BACKEND, "overrides": {"num_tail": 1}}
    with make_engine(family.build(), family, **settings) as engine:
        for length in (12, 7, 9, 12):
            batch = {key: value[:, :length] for key, value in family.batch(EVEN).items()}
            loss = engine.step(batch).loss
            inside.server(engine).settle_all()
            assert_gradients((loss, recorder.gradients), plain_gradients(family, batch))
        assert len(inside.compiler(engine).programs) == 2  # streamed, and in the tail


@compiling
@pytest.mark.parametrize("which", ["words", "gpt2"])
def test_a_layer_whose_number_counts(which: str):
    """Its template runs with every number, but is itself a layer with one."""
    family = words_family(Numbered, depth=2)
    if which == "gpt2":
        build = partial(build_gpt2, scale_attn_by_inverse_layer_idx=True)
        family = Family("gpt2", build, causal_batch, "shifted")
    batch = family.batch(EVEN)
    expected = plain_gradients(family, batch)
    recorder = l2l.RecordGradients()
    settings = {"optimizer": recorder, "compile": BACKEND}
    with make_engine(family.build(), family, **settings) as engine:
        for _ in range(2):
            loss = engine.step(batch).loss
            inside.server(engine).settle_all()
            assert_gradients((loss, recorder.gradients), expected)
            assert engine.evaluate(batch) == pytest.approx(expected[0], rel=TOLERANCE)
        assert all(map(inside.compiler(engine).compiles, inside.partition(engine).structures))


@compiling
@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_that_writes_into_its_input_runs_as_it_is(frozen: bool):
    def build() -> nn.Module:
        model = build_words(Writing)
        model.words.requires_grad_(not frozen)
        return model

    family = Family("writing", build, hand_written_batch, "tokens")
    batch = family.batch(EVEN)
    found = engine_gradients(family, batch, compile=BACKEND, overrides={"num_tail": 1})
    assert_gradients(found, plain_gradients(family, batch), tolerant=set())


@compiling
@pytest.mark.parametrize("which", ["branching", "hand_written"])
def test_a_layer_that_does_not_compile_is_one_warning(which: str):
    family = FAMILIES["hand_written"] if which == "hand_written" else words_family(Branching)
    batch = family.batch(EVEN)
    recorder = l2l.RecordGradients()
    settings = {"optimizer": recorder, "compile": BACKEND, "overrides": {"num_tail": 1}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with make_engine(family.build(), family, **settings) as engine:
            for _ in range(2):
                loss = engine.step(batch).loss
    told = [str(one.message) for one in caught if one.category is UserWarning]
    assert len(told) == 1
    assert ("ExpertLayer" if which == "hand_written" else "Branching") in told[0]
    assert "compile=False" in told[0]
    tolerant = None if which == "hand_written" else set()
    assert_gradients((loss, recorder.gradients), plain_gradients(family, batch), tolerant=tolerant)


DROPPING = {
    "words": words_family(Dropping),
    "bert": Family(
        "bert",
        partial(
            build_bert,
            "BertForMaskedLM",
            hidden_dropout_prob=0.3,
            attention_probs_dropout_prob=0.3,
        ),
        masked_batch,
        "tokens",
    ),
    "llama": Family("llama", partial(build_llama, attention_dropout=0.5), causal_batch, "shifted"),
}


@compiling
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("words", {}),
        ("words", {"num_tail": 1, "keep": 0.3, "num_kept_cells": 2}),
        ("bert", {"num_tail": 1}),
        ("llama", {"keep": 0.3, "num_kept_cells": 2}),
    ],
)
def test_compiled_dropout_draws_what_the_layers_own_code_draws(name: str, overrides: dict):
    family = DROPPING[name]
    batch = family.batch(EVEN)
    expected = engine_gradients(family, batch, seed=5)
    recorder = l2l.RecordGradients()
    settings = {"seed": 5, "compile": BACKEND, "overrides": overrides}
    with make_engine(family.build(), family, optimizer=recorder, **settings) as engine:
        loss = engine.step(batch).loss
        assert all(map(inside.compiler(engine).compiles, inside.partition(engine).structures))
    assert_gradients((loss, recorder.gradients), expected)
    assert engine_gradients(family, batch, seed=6)[0] != expected[0]


@compiling
def test_compiled_dropout_is_a_function_of_the_seed():
    family = DROPPING["words"]
    settings = {"compile": BACKEND, "overrides": {"num_tail": 1}, "steps": 2, "rows": EVEN}
    first, state = train(family, seed=5, optimizer=ADAMW, **settings)
    torch.manual_seed(1)  # the caller's own random numbers have no say
    again, same = train(family, seed=5, optimizer=ADAMW, **settings)
    other, _ = train(family, seed=6, optimizer=ADAMW, **settings)
    assert again == first
    assert_same(same, state)
    assert other != first


@compiling
@pytest.mark.parametrize("num_tail", [0, LAYERS])
def test_compiled_gradients_with_dropout_belong_to_the_loss_that_was_drawn(num_tail: int):
    """As in test_parity: the loss along the gradient grows by the norm of the gradient."""
    family = DROPPING["words"]
    batch = family.batch(EVEN)
    settings = {"compile": BACKEND, "seed": 5, "overrides": {"num_tail": num_tail}}
    _, gradients = engine_gradients(family, batch, **settings)
    gradients = {name: one for name, one in gradients.items() if name.startswith("stack")}
    norm = float(torch.stack([one.norm() for one in gradients.values()]).norm())

    def loss_at(distance: float) -> float:
        model = family.build()
        with torch.no_grad():
            for name, one in gradients.items():
                model.get_parameter(name).add_(one, alpha=distance / norm)
        moved = Family("moved", lambda: model, family.batch, family.rule)
        return engine_gradients(moved, batch, **settings)[0]

    assert (loss_at(0.02) - loss_at(-0.02)) / 0.04 == pytest.approx(norm, rel=0.02)


@compiling
def test_compiled_layers_that_do_not_repeat_their_random_numbers_run_as_they_are(monkeypatch: Any):
    backward = Program.backward

    def other_numbers(self: Program, *args: Any, **more: Any) -> BackwardResult:
        torch.manual_seed(77)
        return backward(self, *args, **more)

    monkeypatch.setattr(Program, "backward", other_numbers)
    family = DROPPING["words"]
    batch = family.batch(EVEN)
    expected = engine_gradients(family, batch, seed=5)
    with pytest.warns(UserWarning, match="random numbers") as caught:
        found = engine_gradients(family, batch, seed=5, compile=BACKEND)
    assert len([one for one in caught if one.category is UserWarning]) == 1
    assert_gradients(found, expected)


def test_the_comparison_of_random_layers():
    large, noise = torch.randn(64), 1e-9 * torch.randn(8)

    def result(weight: Tensor, bias: Tensor, **more: Tensor) -> BackwardResult:
        parameters = {"weight": weight, "bias": bias, **more}
        return BackwardResult(hidden=torch.ones(4), parameters=parameters, recorded={})

    compiler, right = Compiler(backend=BACKEND), result(large, noise)
    compiler.note_random("a")
    program = compiler.program("a", keep=0.0)
    assert program is not None
    handed, infinite = Handed(program, Packed()), result(torch.inf * large, noise)
    assert compiler.check("a", program, infinite, infinite)
    assert compiler.must_check("a", handed)  # that told nothing
    assert compiler.check("a", program, result(1.001 * large, -noise), right)
    assert not compiler.must_check("a", handed)
    later = compiler.program("a", keep=0.5)
    assert later is not None
    assert later.own_random_numbers  # also in a program that is made after the comparison
    for wrong in (result(1.2 * large, noise), result(large, noise, more=noise)):
        compiler = Compiler(backend=BACKEND)
        compiler.note_random("a")
        with pytest.warns(UserWarning, match="compile=False"):
            assert not compiler.check("a", program, wrong, right)
        assert not compiler.compiles("a")
