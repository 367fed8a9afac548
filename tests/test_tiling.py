"""Long rows: what layers do position by position runs some positions at a time, to the same end."""

import inside
import pytest
import torch
from families import FAMILIES, LENGTH, build_llama
from reference import counts, reference_gradients, split
from torch import Tensor, nn

import l2l
from l2l.model import Tiles, find_pointwise
from l2l.model.tiling import tiled

ROWS = 4
TILE = {"tile_tokens": 8}  # of rows of 12 positions, two of which are in a microbatch


def largest(gradients: dict[str, Tensor | None]) -> float:
    return max(float(one.abs().max()) for one in gradients.values() if one is not None)


@pytest.mark.parametrize(
    "name", ["llama_tied", "gpt2", "gemma3", "qwen3_moe", "bert_classification"]
)
@pytest.mark.parametrize("size", [4, 2])
def test_gradients_are_those_of_plain_pytorch(name: str, size: int) -> None:
    family = FAMILIES[name]
    batch, recorder = family.batch(ROWS), l2l.RecordGradients()
    with inside.engine(
        family.build(),
        optimizer=recorder,
        precision="float32",
        device="cpu",
        microbatch_size=size,
        overrides=TILE,
    ) as engine:
        loss = engine.step(batch).loss
        assert any(inside.facts(engine).pointwise.values())
        assert "in tiles of 8 tokens" in str(engine.plan)
    parts = split(batch, size)
    numbers = [counts(family.rule, one) for one in parts]
    expected_loss, expected = reference_gradients(family.build(), parts, numbers)
    assert loss == pytest.approx(float(expected_loss), rel=1e-6)
    within = 1e-6 * largest(expected)
    for key, gradient in expected.items():
        if gradient is not None:
            assert float((recorder.gradients[key] - gradient).abs().max()) <= within, key


class Layer(nn.Module):
    """Parts of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.perceptron = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.mean = Mean()
        self.noise = nn.Dropout(0.5)
        self.counter = Counter()
        self.mixing = nn.Conv1d(12, 12, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.perceptron(self.norm(hidden))
        hidden = self.noise(self.mean(hidden))
        return self.mixing(self.counter(hidden))


class Mean(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(1, keepdim=True)


class Counter(nn.Module):
    """Notes that it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.number += 1
        return hidden * 2


def test_only_parts_are_found_that_give_each_position_what_they_give_it_alone() -> None:
    torch.manual_seed(0)
    layer, hidden = Layer(), torch.randn(2, 12, 8)
    with torch.no_grad():
        assert find_pointwise(layer, lambda: layer(hidden), hidden) == ("norm", "perceptron")


class Places(nn.Module):
    """Has something for every position, which training has not changed yet."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.places = nn.Linear(8, 8), nn.Parameter(torch.zeros(8192, 8))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden) + self.places[: hidden.shape[1]]


class Share(Places):
    """Will mix positions, by a share that is zero yet, and lets nothing spread that is none."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner(hidden) + self.places[0] * hidden.nan_to_num().mean(1, keepdim=True)


class Full(Places):
    """An expert with room for so many positions of a row, of which there are fewer in a trial."""

    def forward(self, hidden: Tensor) -> Tensor:
        chosen = hidden[..., :1] > 0
        return hidden + self.inner(hidden) * (chosen & (chosen.cumsum(1) <= 64))


@pytest.mark.parametrize("kind", [Places, Share, Full])
def test_parts_that_are_so_in_a_short_row_or_before_training_are_no_such(
    kind: type[nn.Module],
) -> None:
    torch.manual_seed(0)
    layer, hidden = nn.Sequential(kind()), torch.randn(2, 12, 8)
    with torch.no_grad():
        assert "0" not in find_pointwise(layer, lambda: layer(hidden), hidden)


def test_a_part_that_is_too_large_to_be_tried_is_not_taken_for_another() -> None:
    class Large(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            if hidden.shape[1] > 12:
                raise torch.OutOfMemoryError("no room")
            return hidden

    layer, hidden = nn.Sequential(Large()), torch.randn(2, 12, 8)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        find_pointwise(layer, lambda: layer(hidden), hidden)


def test_a_part_that_somebody_watches_runs_whole() -> None:
    layer, hidden = Layer(), torch.randn(2, 12, 8)
    layer.perceptron[0].register_forward_hook(lambda *_: None)
    with torch.no_grad():
        found = find_pointwise(layer, lambda: layer(hidden), hidden)
    assert found == ("norm", "perceptron.1")  # what is inside of it may still be


def test_inside_the_block_a_part_sees_so_many_positions_of_all_rows() -> None:
    layer, hidden, seen = Layer(), torch.randn(2, 12, 8), []
    own = layer.perceptron.forward

    def watch(value: Tensor) -> Tensor:
        seen.append(value.shape[1])
        return own(value)

    layer.perceptron.forward = watch
    whole = layer(hidden)
    with tiled(layer, Tiles(("perceptron",), 10)):
        torch.manual_seed(0)
        found = layer.perceptron(hidden)
    assert seen == [12, 5, 5, 2]
    assert layer.perceptron.forward is watch
    assert found.shape == whole.shape
    assert torch.allclose(found, own(hidden))


def test_random_numbers_are_drawn_as_ever() -> None:
    """Dropout is in no tile: its masks are those of a layer that runs whole."""

    def losses(**settings: object) -> list[float]:
        model = FAMILIES["bert_classification"].build()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3
        with inside.engine(
            model, optimizer=l2l.SGD(lr=0.1), precision="float32", device="cpu", seed=3, **settings
        ) as engine:
            return [engine.step(FAMILIES["bert_classification"].batch(ROWS)).loss for _ in range(3)]

    assert losses(overrides=TILE) == pytest.approx(losses(), rel=1e-6)


def test_a_checkpoint_goes_on_in_tiles(tmp_path) -> None:
    def engine(**settings: object) -> l2l.Engine:
        optimizer = l2l.SGD(lr=0.1)
        return inside.engine(
            build_llama(), optimizer=optimizer, precision="float32", device="cpu", **settings
        )

    batch = FAMILIES["llama_tied"].batch(ROWS)
    with engine(overrides=TILE) as one:
        one.step(batch)
        one.save(tmp_path / "one")
        expected = one.step(batch).loss
    with engine() as other:
        other.load(tmp_path / "one")
        assert other.step(batch).loss == expected
        assert "in tiles of 8 tokens" in str(other.plan)


def test_longer_rows_take_little_more_than_their_own_tensors() -> None:
    """Of 8 times as many positions: what is not in proportion to the row does not grow."""
    model = build_llama(hidden_size=256, intermediate_size=2048, num_hidden_layers=4)

    def working(length: int, **overrides: object) -> int:
        plan = l2l.plan(
            model,
            num_rows=1,
            length=length,
            device_memory="64GiB",
            compile=False,
            overrides={"num_tail": 0, "piece_tokens": 128, **overrides},
        )
        (line,) = (
            one
            for one in plan.ledger
            if one.purpose == "one layer at work" and one.phase == "backward"
        )
        return line.nbytes

    few, many = working(2048, tile_tokens=1024), working(16384, tile_tokens=1024)
    row = 256 * 2 * (16384 - 2048)  # bytes of a hidden state, as far as it is longer
    assert many - few < 24 * row  # queries, keys, values, outputs, residuals and their gradients
    assert working(16384) - working(2048) > 2 * (many - few)
    assert LENGTH < 2048
