"""Every step gets its batch from the seed and its number alone; documents in a row stay apart."""

import itertools
from typing import Any

import inside
import pytest
import torch
from families import FAMILIES, VOCABULARY, build_bert, build_gpt2, build_llama
from torch import Tensor, nn

from l2l.train.data import Batches, Examples, num_targets, packing_holds, padded_length

PAD = 0
IGNORED = -100


def make(*lengths: int, answers: Any = None, **settings: Any) -> Examples:
    """Examples whose tokens are numbered from 1 on, so that each tells where it came from."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    flags = None if answers is None else torch.tensor(answers, dtype=torch.bool)
    return Examples(
        task="causal" if answers is None else "instruct",
        ids=torch.arange(1, sum(lengths) + 1, dtype=torch.int32),
        offsets=offsets,
        full_lengths=offsets.diff(),
        answers=flags,
        **settings,
    )


def classes(*lengths: int, **settings: Any) -> Examples:
    labels = torch.arange(len(lengths)) % 3
    examples = make(*lengths, targets=labels, num_labels=3, **settings)
    object.__setattr__(examples, "task", "classification")
    return examples


def varied(number: int, *, most: int = 60) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, most, (number,), generator=generator).tolist()


def tokens_of(batch: dict[str, Tensor]) -> list[int]:
    return sorted(batch["input_ids"][batch["input_ids"] != PAD].tolist())


def firsts(batch: dict[str, Tensor]) -> list[int]:
    return batch["input_ids"][:, 0].tolist()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# --------------------------------------------------------------------------------------------------
# Which rows a step gets

either = pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])


@either
def test_a_batch_is_a_function_of_the_seed_and_the_step(packing) -> None:
    examples = make(*varied(100))
    settings = {"pad_id": PAD, "rows": 4, "length": 64, "packing": packing}
    first = Batches(examples, seed=3, **settings)
    forward = [first.batch(step) for step in range(40)]
    second = Batches(examples, seed=3, **settings)
    assert all(same(second.batch(step), forward[step]) for step in (39, 0, 17, 16, 18, 39, 3))
    other = Batches(examples, seed=4, **settings)
    assert not any(same(other.batch(step), forward[step]) for step in range(40))


@either
@pytest.mark.parametrize(("number", "rows"), [(50, 4), (48, 4), (3, 8), (1, 2), (7, 1)])
def test_every_token_comes_once_in_an_epoch(packing, number, rows) -> None:
    """Also where batches span epochs: the stream of rows is cut where one ends."""
    examples = make(*varied(number))
    batches = Batches(examples, pad_id=PAD, rows=rows, length=64, packing=packing, seed=0)
    epochs = 5
    steps = batches.num_steps(epochs)
    stream = [row for step in range(steps) for row in batches.batch(step)["input_ids"]]
    orders = []
    for epoch in range(epochs):
        some = stream[epoch * batches.num_rows : (epoch + 1) * batches.num_rows]
        found = sorted(token for row in some for token in row.tolist() if token != PAD)
        assert found == examples.ids.tolist()
        orders.append(tuple(int(row[0]) for row in some))
    assert batches.num_rows < 7 or len(set(orders)) == epochs
    assert steps * rows >= epochs * batches.num_rows > (steps - 1) * rows


@either
def test_evaluation_sees_every_row_once(packing) -> None:
    examples = make(*varied(50))
    batches = Batches(examples, pad_id=PAD, rows=4, length=64, packing=packing)
    found = list(batches.in_order())
    assert sorted(token for batch in found for token in tokens_of(batch)) == examples.ids.tolist()
    sizes = [batch["input_ids"].shape[0] for batch in found]
    assert sizes[:-1] == [4] * (len(sizes) - 1)
    assert sum(sizes) == batches.num_rows
    assert 1 <= sizes[-1] <= 4
    assert same(found[0], next(batches.in_order()))


def test_evaluation_without_packing_keeps_the_order_of_the_examples() -> None:
    examples = make(5, 3, 9)
    batches = Batches(examples, pad_id=PAD, rows=2, length=64, packing=False)
    assert [firsts(batch) for batch in batches.in_order()] == [[1, 6], [9]]


@either
def test_counts_of_steps(packing) -> None:
    examples = make(*varied(50))
    batches = Batches(examples, pad_id=PAD, rows=4, length=64, packing=packing)
    assert batches.num_steps(1) == -(-batches.num_rows // 4)
    assert batches.num_steps(0.5) == -(-batches.num_rows // 8)
    ten = Batches(make(*[8] * 10), pad_id=PAD, rows=11, length=8, packing=packing)
    assert ten.num_steps(1.1) == 1  # 1.1 * 10 is a little more than 11


# --------------------------------------------------------------------------------------------------
# Padded rows


def test_rows_are_padded_on_the_right_to_a_multiple() -> None:
    batches = Batches(make(5, 3), pad_id=PAD, rows=2, length=100, packing=False)
    (batch,) = batches.in_order()
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert batch["input_ids"].shape == (2, 8)
    assert batch["input_ids"][1, :5].tolist() == [6, 7, 8, PAD, PAD]
    assert batch["labels"][1, :5].tolist() == [IGNORED, 7, 8, IGNORED, IGNORED]
    assert batch["attention_mask"].sum(1).tolist() == [5, 3]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert num_targets(batch) == 6
    assert firsts(next(Batches(make(5), pad_id=9, packing=False).in_order())) == [1]


def test_the_length_of_a_batch_is_at_most_that_of_a_row() -> None:
    batches = Batches(make(60, 97), pad_id=PAD, rows=1, length=100, packing=False)
    assert [batch["input_ids"].shape[1] for batch in batches.in_order()] == [64, 100]


def test_batches_are_of_similar_length_and_come_in_mixed_order() -> None:
    examples = make(*varied(640, most=500))
    batches = Batches(examples, pad_id=PAD, rows=8, length=512, packing=False)
    widths = [batches.batch(step)["input_ids"].shape[1] for step in range(batches.num_steps(1))]
    assert batches.padding < 0.2
    assert batches.padding == pytest.approx(1 - examples.ids.numel() / (8 * sum(widths)))
    assert widths != sorted(widths)
    assert "640 rows padded by length" in str(batches)


def test_batches_are_of_similar_length_in_every_epoch() -> None:
    """Where the epochs are no whole number of batches, one in each is mixed, and no more."""
    examples = make(*varied(643, most=500))
    batches = Batches(examples, pad_id=PAD, rows=8, length=512, packing=False)
    steps = range(batches.num_steps(3), batches.num_steps(4))
    ends = [batches.batch(step)["attention_mask"].sum(1) for step in steps]
    mixed = [
        step
        for step, lengths in zip(steps, ends, strict=True)
        if lengths.sort()[0].ne(lengths).any()
    ]
    assert len(mixed) <= 1


def test_labels_of_rows_go_with_their_rows() -> None:
    lengths = varied(30)
    types = torch.arange(sum(lengths)) % 2
    examples = classes(*lengths, token_types=types.to(torch.uint8))
    batches = Batches(examples, pad_id=PAD, rows=4, length=64, packing=False)
    starts = {int(examples.ids[start]): index for index, start in enumerate(examples.offsets[:-1])}
    for step in range(15):
        batch = batches.batch(step)
        assert set(batch) == {"input_ids", "labels", "attention_mask", "token_type_ids"}
        assert batch["labels"].tolist() == [starts[first] % 3 for first in firsts(batch)]
        expected = torch.where(batch["attention_mask"].bool(), (batch["input_ids"] - 1) % 2, 0)
        assert torch.equal(batch["token_type_ids"], expected)
        assert num_targets(batch) == 4


def test_rows_with_a_label_are_neither_packed_nor_cut() -> None:
    with pytest.raises(ValueError, match=r"neither share a row.*packing=False"):
        Batches(classes(3, 4), pad_id=PAD)
    with pytest.raises(ValueError, match=r"length=40.*max_length=32"):
        Batches(classes(3, 40), pad_id=PAD, length=32, packing=False)


# --------------------------------------------------------------------------------------------------
# Packed rows


def test_a_packed_row_restarts_its_positions_with_every_document() -> None:
    (batch,) = Batches(make(4, 2, 3), pad_id=PAD, rows=4, length=11).in_order()
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 7, 8, 9, 5, 6, PAD, PAD]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1, 0, 1]]
    x = IGNORED
    assert batch["labels"].tolist() == [[x, 2, 3, 4, x, 8, 9, x, 6, x, x]]
    assert num_targets(batch) == 6


def test_long_documents_are_cut_into_parts() -> None:
    examples = make(20, 3)
    batches = Batches(examples, pad_id=PAD, rows=8, length=8)
    (batch,) = batches.in_order()
    rows = sorted(batch["input_ids"].tolist())
    assert rows == [
        [1, 2, 3, 4, 5, 6, 7, 8],
        [9, 10, 11, 12, 13, 14, 15, 16],
        [17, 18, 19, 20, 21, 22, 23, PAD],
    ]
    assert num_targets(batch) == 7 + 7 + 3 + 2


@either
def test_parts_of_which_nothing_is_learnt_are_left_out(packing) -> None:
    """A prompt of nine tokens: its answer begins in the second part, whose first token is none."""
    flags = [0] * 9 + [1] * 4 + [0, 0, 1]
    examples = make(13, 3, answers=flags)
    batches = Batches(examples, pad_id=PAD, rows=8, length=8, packing=packing)
    (batch,) = batches.in_order()
    learnt = batch["labels"][batch["labels"] != IGNORED]
    assert sorted(learnt.tolist()) == [10, 11, 12, 13, 16]
    assert tokens_of(batch) == [*range(9, 14), 14, 15, 16]
    with pytest.raises(ValueError, match="none of 1 examples has a token to learn"):
        Batches(make(4, answers=[1, 0, 0, 0]), pad_id=PAD, packing=packing)


def test_parts_that_fill_a_row_exactly_do() -> None:
    batches = Batches(make(5, 8, 3, 4, 4), pad_id=PAD, rows=8, length=8)
    assert (batches.num_rows, batches.padding) == (3, 0.0)


def test_packing_leaves_little_room_and_keeps_documents_whole() -> None:
    examples = make(*varied(3000, most=400))
    batches = Batches(examples, pad_id=PAD, rows=8, length=512)
    assert batches.padding < 0.01
    seen: list[int] = []
    for batch in batches.in_order():
        follows = batch["position_ids"][:, 1:] != 0
        real = batch["input_ids"][:, 1:] != PAD
        assert (batch["input_ids"].diff()[follows & real] == 1).all()
        seen += batch["input_ids"][(batch["position_ids"] == 0) & (batch["input_ids"] != PAD)]
    assert sorted(map(int, seen)) == (examples.offsets[:-1] + 1).tolist()
    assert f"{batches.num_rows:,} rows of 512 tokens, packed" in str(batches)


def test_what_is_packed_together_depends_on_the_seed() -> None:
    examples = make(*varied(60))
    rows = [
        next(Batches(examples, pad_id=PAD, rows=60, length=64, seed=seed).in_order())["input_ids"]
        for seed in (0, 0, 1)
    ]
    assert torch.equal(rows[0], rows[1])
    assert {tuple(row.tolist()) for row in rows[0]} != {tuple(row.tolist()) for row in rows[2]}


# --------------------------------------------------------------------------------------------------
# What models make of packed rows

LENGTHS = (5, 9, 3, 12, 7, 2, 16, 30, 4)
BUILD = {"llama": build_llama, "gpt2": build_gpt2, "qwen3": FAMILIES["qwen3"].build}
attentions = pytest.mark.parametrize("attention", ["sdpa", "eager"])
models = pytest.mark.parametrize("name", BUILD)


def documents() -> Examples:
    """Of words that the models know; some of them with a prompt that is not learnt."""
    total = sum(LENGTHS)
    generator = torch.Generator().manual_seed(5)
    examples = make(*LENGTHS, answers=(torch.rand(total, generator=generator) < 0.8).tolist())
    words = torch.randint(3, VOCABULARY, (total,), generator=generator)
    examples.ids.copy_(words)
    return examples


def build(name: str, attention: str) -> nn.Module:
    model = BUILD[name]().eval()
    model.set_attn_implementation(attention)
    return model


def plain_loss(model: nn.Module, batch: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return model(**batch, use_cache=False).loss.item()


def one_by_one(model: nn.Module, examples: Examples, length: int) -> tuple[float, int]:
    """The mean over all labels, of documents that are alone in their batch, and their number."""
    total, number = 0.0, 0
    for start, end in itertools.pairwise(examples.offsets.tolist()):
        for first in range(start, end, length):
            part = slice(first, min(first + length, end))
            ids = examples.ids[part].long()[None]
            labels = ids.masked_fill(~examples.answers[part], IGNORED)
            count = int((labels[:, 1:] != IGNORED).sum())
            if count:
                total += count * plain_loss(model, {"input_ids": ids, "labels": labels})
                number += count
    return total / number, number


@attentions
@models
def test_packed_rows_have_the_loss_of_their_documents_one_by_one(name, attention) -> None:
    model = build(name, attention)
    examples = documents()
    expected, number = one_by_one(model, examples, length=24)
    batches = list(Batches(examples, pad_id=PAD, rows=3, length=24).in_order())
    assert len(batches) > 1
    assert sum(num_targets(batch) for batch in batches) == number
    found = sum(num_targets(batch) * plain_loss(model, batch) for batch in batches) / number
    assert found == pytest.approx(expected, abs=1e-5)
    joined = [
        {**batch, "position_ids": torch.arange(24).expand_as(batch["input_ids"])}
        for batch in batches
    ]
    leaking = sum(num_targets(batch) * plain_loss(model, batch) for batch in joined) / number
    assert abs(leaking - expected) > 1e-4, "the test cannot tell"


@attentions
@models
def test_so_they_have_through_the_engine(name, attention) -> None:
    model = build(name, attention)
    examples = documents()
    expected, number = one_by_one(model, examples, length=24)
    (batch,) = Batches(examples, pad_id=PAD, rows=8, length=24).in_order()
    padded = list(Batches(examples, pad_id=PAD, rows=8, length=24, packing=False).in_order())
    with inside.engine(model, device="cpu", precision="float32", microbatch_size=2) as engine:
        assert engine.evaluate(batch) == pytest.approx(expected, abs=1e-5)
        losses = [num_targets(one) * engine.evaluate(one) for one in padded]
        assert packing_holds(engine.evaluate, batch)
    assert sum(losses) / number == pytest.approx(expected, abs=1e-5)


@attentions
@models
def test_packing_is_found_to_hold(name, attention) -> None:
    model = build(name, attention)
    (batch,) = Batches(documents(), pad_id=PAD, rows=8, length=24).in_order()
    assert packing_holds(lambda one: plain_loss(model, one), batch)


@pytest.mark.parametrize("name", ["opt", "falcon", "mamba"])
def test_models_that_let_documents_see_each_other_are_found_out(name) -> None:
    model = FAMILIES[name].build().eval()
    (batch,) = Batches(documents(), pad_id=PAD, rows=8, length=24).in_order()
    assert not packing_holds(lambda one: plain_loss(model, one), batch)


def test_a_cache_lets_documents_see_each_other_and_is_found_out() -> None:
    model = build("llama", "sdpa")
    (batch,) = Batches(documents(), pad_id=PAD, rows=8, length=24).in_order()

    def cached(one: dict[str, Tensor]) -> float:
        with torch.no_grad():
            return model(**one, use_cache=True).loss.item()

    assert not packing_holds(cached, batch)


def test_attention_that_takes_packed_rows_one_at_a_time_only_is_found_out() -> None:
    model = build("llama", "sdpa")
    (batch,) = Batches(documents(), pad_id=PAD, rows=8, length=24).in_order()

    def one_row_only(one: dict[str, Tensor]) -> float:
        if one["input_ids"].shape[0] > 1:
            one = {key: value for key, value in one.items() if key != "position_ids"}
        return plain_loss(model, one)

    assert not packing_holds(one_row_only, batch)


def test_positions_that_do_not_restart_are_found_out() -> None:
    """What is before a document has no effect on it, but its loss is not that of it alone."""

    def counting_on(one: dict[str, Tensor]) -> float:
        apart = bool((one["position_ids"].diff() < 0).any())
        return 5.0 if apart else 3.0 + one["input_ids"][0, 0].item() / 1000

    (batch,) = Batches(documents(), pad_id=PAD, rows=8, length=24).in_order()
    assert not packing_holds(counting_on, batch)


def test_models_that_take_no_positions_are_found_out_and_other_errors_pass() -> None:
    (batch,) = Batches(documents(), pad_id=PAD, rows=8, length=24).in_order()

    def refusing(input_ids: Tensor, labels: Tensor) -> float:
        return 0.0

    assert not packing_holds(lambda one: refusing(**one), batch)
    bert = build_bert()  # has a label for each row
    with pytest.raises(ValueError, match="batch_size"):
        packing_holds(lambda one: plain_loss_of(bert, one), batch)


def plain_loss_of(model: nn.Module, batch: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return model(**batch).loss.item()


@pytest.mark.parametrize("length", [2, 3, 4, 7])
def test_packing_can_be_tried_on_the_shortest_rows(length) -> None:
    model = build("llama", "sdpa")
    batch = next(Batches(documents(), pad_id=PAD, rows=1, length=length).in_order())
    assert packing_holds(lambda one: plain_loss(model, one), batch)


def test_short_rows_are_padded_by_little() -> None:
    lengths = [padded_length(number) for number in range(1, 2000)]
    assert lengths[:3] == [8, 8, 8]
    assert [padded_length(number) for number in (64, 65, 128, 129, 257)] == [64, 80, 128, 160, 320]
    for number, length in enumerate(lengths, 1):
        assert number <= length <= max(number + 7, 1.25 * number)
        assert length % 8 == 0
    assert lengths == sorted(lengths)
    assert len({*lengths[:512]}) <= 24, "few lengths, of which each is compiled for"
