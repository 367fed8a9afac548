"""Models that do more than hand one hidden state straight on, compared with plain PyTorch.

The models are small and of our own; those of transformers are in test_census.py.
"""

import copy
from collections import UserDict

import inside
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import l2l

WIDTH, WORDS, ROWS = 8, 13, 4


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, out: int | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, out or width)
        self.is_residual = out is None

    def forward(self, hidden: Tensor) -> Tensor:
        found = torch.tanh(self.inner(self.norm(hidden)))
        return hidden + found if self.is_residual else found


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)


class CrossBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        scores = hidden @ self.key(memory).transpose(1, 2)
        return hidden + scores.softmax(-1) @ self.value(memory)


class EncoderDecoder(Base):
    """Two lists; every decoder layer is given the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(3))  # before the encoder
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.final = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        memory = self.embedding(ids)
        for layer in self.encoder:
            memory = layer(memory)
        memory = self.final(memory)
        hidden = self.embedding(labels.roll(1, dims=1)) + memory.mean(1, keepdim=True)
        for layer in self.decoder:
            hidden = layer(hidden, memory)
        return {"loss": mean_loss(self.head(hidden), labels)}


class Repeating(Base):
    """One list, called three times over; only the calls differ, by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(ids)
        for _ in range(3):
            for layer in self.layers:
                hidden = layer(hidden)
        return {"loss": mean_loss(self.head(hidden), labels)}


class Skipping(Base):
    """A U-Net: widths change, and later layers get what earlier ones made."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Block(WIDTH, 12), Block(12, 16)])
        self.up = nn.ModuleList([Block(16, 12), Block(24, WIDTH)])

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden, skipped = self.embedding(ids), []
        for layer in self.down:
            hidden = layer(hidden)
            skipped.append(hidden)
        hidden = self.up[0](hidden)
        hidden = self.up[1](torch.cat([hidden, skipped[0]], dim=-1))
        return {"loss": mean_loss(self.head(hidden), labels)}


class Supervised(Base):
    """The loss looks at every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden, seen = self.embedding(ids), []
        for layer in self.layers:
            hidden = layer(hidden)
            seen.append(hidden)
        losses = [mean_loss(self.head(one), labels) for one in seen]
        return {"loss": torch.stack(losses).mean()}


class Gated(Block):
    """Returns a second tensor, which has a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(hidden), self.gate(hidden)


class Routed(Supervised):
    """Gates of all layers are balanced by the loss, as router losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated() for _ in range(3))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden, gates = self.embedding(ids), []
        for layer in self.layers:
            hidden, gate = layer(hidden)
            gates.append(gate)
        used = torch.cat(gates).flatten(0, 1).softmax(-1).mean(0)
        return {"loss": mean_loss(self.head(hidden), labels) + 0.1 * (used * used).sum()}


class Pair(Block):
    def forward(self, hidden: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(hidden) + 0.5 * other, other * 1.5 + hidden


class Paired(Base):
    """Two tensors go from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(ids)
        other = hidden.cos()
        for layer in self.layers:
            hidden, other = layer(hidden, other)
        return {"loss": mean_loss(self.head(hidden + other), labels)}


class Towers(Base):
    """Rows of one tower are told apart by those of the other: a loss over all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(Block() for _ in range(2))
        self.right = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        one, other = self.embedding(ids), self.embedding(labels)
        for layer in self.left:
            one = layer(one)
        for layer in self.right:
            other = layer(other)
        scores = one.mean(1) @ self.head.weight.T @ self.head.weight @ other.mean(1).T
        return {"loss": F.cross_entropy(scores, torch.arange(len(ids)))}


class RowsSecond(Supervised):
    """Hidden states are [length, rows, width], and the loss tells rows apart."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(ids).transpose(0, 1)
        for layer in self.layers:
            hidden = layer(hidden)
        rows = F.normalize(self.head(hidden).mean(0), dim=-1)
        return {"loss": F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))}


MODELS = (EncoderDecoder, Repeating, Skipping, Supervised, Routed, Paired, Towers, RowsSecond)
NUM_STACKS = {EncoderDecoder: 2, Repeating: 1, Skipping: 2, Supervised: 1, Paired: 1, Towers: 2}


def batch_of(rows: int = ROWS, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, WORDS, (rows, 5), generator=generator) for _ in "ab")
    return {"ids": ids, "labels": labels}


def engine_of(model: nn.Module, **settings) -> l2l.Engine:
    found = {"optimizer": l2l.SGD(lr=0.1), "precision": "float32", "device": "cpu", **settings}
    return inside.engine(model, kernel="readable", **found)


def plain_steps(model: nn.Module, number: int = 2) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(number):
        optimizer.zero_grad()
        loss = model(**batch_of(seed=step))["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def engine_steps(model: nn.Module, number: int = 2, **settings) -> list[float]:
    with engine_of(model, **settings) as engine:
        return [engine.step(batch_of(seed=step)).loss for step in range(number)]


def assert_close(found: nn.Module, expected: nn.Module, tolerance: float = 1e-6) -> None:
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", MODELS)
def test_one_microbatch_gives_the_bits_of_plain_pytorch(kind):
    expected, found = kind(), kind()
    losses = plain_steps(expected)
    assert engine_steps(found, microbatch_size=ROWS) == losses
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


@pytest.mark.parametrize("kind", MODELS)
def test_several_microbatches_give_the_step_of_the_whole_batch(kind):
    expected, found = kind(), kind()
    losses = plain_steps(expected)
    assert engine_steps(found, microbatch_size=1) == pytest.approx(losses, rel=1e-6)
    assert_close(found, expected)


@pytest.mark.parametrize("scale", [30.0, 1000.0])
def test_rows_that_are_told_apart_well_are_compared_with_all_others(scale):
    """The loss of the first two is all but nothing, or nothing, as that of each alone is."""

    class Sharp(Towers):
        def forward(self, ids: Tensor, texts: Tensor) -> dict[str, Tensor]:
            one, other = self.embedding(ids).mean(1), self.embedding(texts).mean(1)
            for layer in self.left:
                one = layer(one)
            for layer in self.right:
                other = layer(other)
            scores = scale * F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).T
            return {"loss": F.cross_entropy(scores, torch.arange(len(ids)))}

    def create() -> nn.Module:
        model = Sharp()
        with torch.no_grad():
            for layer in [*model.left, *model.right]:
                layer.inner.weight.zero_()
                layer.inner.bias.zero_()
            model.embedding.weight[1] = -model.embedding.weight[0]
        return model

    ids = torch.tensor([0, 1, 2, 2, 2, 3])[:, None].expand(6, 5).contiguous()
    batch = {"ids": ids, "texts": ids}
    expected, found = create(), create()
    assert float(expected(ids[:2], ids[:2])["loss"].detach()) < 1e-8
    loss = expected(**batch)["loss"]
    loss.backward()
    torch.optim.SGD(expected.parameters(), lr=1e-3).step()
    with engine_of(found, microbatch_size=1, optimizer=l2l.SGD(lr=1e-3)) as engine:
        assert engine.step(batch).loss == pytest.approx(loss.item(), rel=1e-5)
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("kind", [EncoderDecoder, Skipping, Routed, Paired])
@pytest.mark.parametrize("overrides", [{"num_tail": 1}, {"num_cells": 16}, {"num_slots": 1}])
def test_any_plan_gives_the_same(kind, overrides):
    expected, found = kind(), kind()
    plain_steps(expected)
    engine_steps(found, microbatch_size=2, overrides=overrides)
    assert_close(found, expected)


def test_layers_are_numbered_as_listed_and_run_as_called():
    with engine_of(EncoderDecoder(), microbatch_size=2) as engine:
        engine.step(batch_of())
        route = inside.route(engine)
        assert route.layers == (3, 4, 0, 1, 2)
        assert route.stacks == (2,)
        assert engine.streamed_share > 0.7


@pytest.mark.parametrize("kind", NUM_STACKS)
def test_a_stack_begins_only_where_it_must(kind):
    with engine_of(kind(), microbatch_size=2) as engine:
        engine.step(batch_of())
        assert inside.route(engine).num_stacks == NUM_STACKS[kind]


def test_a_list_that_is_named_is_streamed_alone():
    expected, found = EncoderDecoder(), EncoderDecoder()
    plain_steps(expected)
    with engine_of(found, layers="decoder", microbatch_size=2) as engine:
        for step in range(2):
            engine.step(batch_of(seed=step))
        assert inside.route(engine).num_stacks == 1
    assert_close(found, expected)


@pytest.mark.parametrize("kind", [EncoderDecoder, Repeating, Towers])
def test_clipping_adamw_and_a_checkpoint(kind, tmp_path):
    settings = {"optimizer": l2l.AdamW(lr=0.01), "clip_norm": 0.1, "microbatch_size": 2}
    expected, found = kind(), kind()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        expected(**batch_of(seed=step))["loss"].backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        optimizer.step()
    with engine_of(kind(), **settings) as engine:
        engine.step(batch_of(seed=0))
        engine.save(tmp_path / "saved")
    with engine_of(found, **settings) as engine:
        engine.load(tmp_path / "saved")
        for step in (1, 2):
            engine.step(batch_of(seed=step))
        engine.evaluate(batch_of())
        assert engine.evaluate(batch_of()) == pytest.approx(
            float(copy.deepcopy(expected)(**batch_of())["loss"].detach()), rel=1e-4
        )
    assert_close(found, expected, 1e-4)


def test_frozen_encoder():
    expected, found = EncoderDecoder(), EncoderDecoder()
    for model in (expected, found):
        model.encoder.requires_grad_(False)
        model.embedding.requires_grad_(False)
    plain_steps(expected)
    engine_steps(found, microbatch_size=ROWS)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


def test_an_output_that_nothing_uses_gives_no_gradient():
    class Unused(EncoderDecoder):
        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            hidden = self.embedding(ids)
            before = self.encoder[0](hidden)
            self.encoder[1](before)
            for layer in self.decoder:
                before = layer(before, hidden)
            return {"loss": mean_loss(self.head(before), labels)}

    expected, found = Unused(), Unused()
    optimizer = {"optimizer": l2l.AdamW(lr=0.1, weight_decay=0.5)}
    plain = torch.optim.AdamW(expected.parameters(), lr=0.1, weight_decay=0.5)
    expected(**batch_of())["loss"].backward()
    plain.step()
    engine_steps(found, 1, microbatch_size=2, **optimizer)
    unused = expected.encoder[1].inner.weight
    assert torch.equal(found.encoder[1].inner.weight, unused)
    assert_close(found, expected, 1e-5)


def test_dropout_is_the_same_in_the_code_that_runs_again():
    class Dropping(EncoderDecoder):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Dropout(0.5))
            self.final = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.5))

    # The proof compares the step with the model's own code, with the same random numbers.
    losses = engine_steps(Dropping(), microbatch_size=2)
    assert losses == engine_steps(Dropping(), microbatch_size=2)


def test_layers_called_in_another_order_than_when_tried_are_refused():
    class Moody(EncoderDecoder):
        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            if int(ids[0, 0]) == 0:
                self.encoder[0](self.embedding(ids))
            return super().forward(ids, labels)

    rows = batch_of()
    rows["ids"][:, 0] = 1
    with engine_of(Moody(), microbatch_size=2, prove=False) as engine:
        engine.step(rows)
        rows["ids"][:, 0] = 0
        with pytest.raises(ValueError, match="is called"):
            engine.step(rows)


def test_layers_cannot_be_left_out_where_more_than_a_hidden_state_is_handed_on():
    with (
        engine_of(Paired(), microbatch_size=2) as engine,
        pytest.raises(ValueError, match="left out"),
    ):
        engine.step(batch_of(), layers=[0, 2])


def test_layers_of_several_stacks_can_be_left_out():
    class Fewer(EncoderDecoder):
        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            memory = self.final(self.encoder[1](self.embedding(ids)))
            hidden = self.embedding(labels.roll(1, dims=1)) + memory.mean(1, keepdim=True)
            for layer in self.decoder[1:]:
                hidden = layer(hidden, memory)
            return {"loss": mean_loss(self.head(hidden), labels)}

    expected, found = Fewer(), EncoderDecoder()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    expected(**batch_of())["loss"].backward()
    optimizer.step()
    with engine_of(found, microbatch_size=2) as engine:
        engine.step(batch_of(), layers=[1, 2, 4])
    assert_close(found, expected)


def test_insertion_is_refused_with_several_lists():
    with (
        engine_of(EncoderDecoder(), microbatch_size=2) as engine,
        pytest.raises(ValueError, match="one list"),
    ):
        engine.layers.insert(1, copy_of=0)


class Seeing(EncoderDecoder):
    """Rows may come without what the encoder sees."""

    def forward(self, ids: Tensor, labels: Tensor, seen: Tensor | None = None) -> dict[str, Tensor]:
        hidden = memory = self.embedding(ids)
        if seen is not None:
            memory = self.embedding(seen)
            for layer in self.encoder:
                memory = layer(memory)
        for layer in self.decoder:
            hidden = layer(hidden, memory)
        return {"loss": mean_loss(self.head(hidden), labels)}


@pytest.mark.parametrize("size", [1, ROWS])
@pytest.mark.parametrize("tail", [0, 2])
def test_batches_of_several_kinds(size, tail):
    kinds = [True, False, False, True, False]
    batches = [batch_of(seed=step) for step in range(len(kinds))]
    for batch, sees in zip(batches, kinds, strict=True):
        batch |= {"seen": batch["ids"].flip(1)} if sees else {}
    expected, found = Seeing(), Seeing()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        expected(**batch)["loss"].backward()
        optimizer.step()
    settings = {"optimizer": l2l.AdamW(lr=0.01), "overrides": {"num_tail": tail}}
    with engine_of(found, microbatch_size=size, **settings) as engine:
        for batch in batches:
            engine.step(batch)
    assert_close(found, expected, 1e-5)


class StoringBlock(CrossBlock):
    """Writes keys and values into a dict, or reads what another layer has written."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    def forward(self, hidden: Tensor, store: dict[str, Tensor]) -> Tensor:
        if not self.reads:
            store["memory"] = hidden.tanh()
        return super().forward(hidden, store["memory"])


class Storing(Base):
    def __init__(self, store: type) -> None:
        super().__init__()
        self.layers = nn.ModuleList(StoringBlock(reads) for reads in (False, True, True))
        self.store = store

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden, store = self.embedding(ids), self.store()
        for layer in self.layers:
            hidden = layer(hidden, store=store)
        return {"loss": mean_loss(self.head(hidden), labels)}


@pytest.mark.parametrize("store", [dict, UserDict])
def test_what_layers_leave_in_a_dict_for_others(store):
    expected, found = Storing(store), Storing(store)
    losses = plain_steps(expected)
    assert engine_steps(found, microbatch_size=ROWS) == losses
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
    again = Storing(store)
    engine_steps(again, microbatch_size=1)
    assert_close(again, expected)


def test_layers_that_write_into_their_input_leave_the_batch_alone():
    class Rectified(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            inner = (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WORDS))
            self.layers = nn.Sequential(*inner)

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": mean_loss(self.layers(inputs), labels)}

    batch = {"inputs": torch.randn(ROWS, 5, WIDTH), "labels": batch_of()["labels"]}
    given = batch["inputs"].clone()
    expected, found = Rectified(), Rectified()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    expected(**batch)["loss"].backward()
    optimizer.step()
    with engine_of(found, microbatch_size=ROWS) as engine:
        engine.step(batch)
    assert torch.equal(batch["inputs"], given)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name
