"""Batches whose tensors do not all have rows first: cut exactly, or kept whole and said so.

Exactly is bit by bit against plain PyTorch over the same microbatches, cut here by hand.
"""

import logging
import pickle
import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import inside
import numpy
import pytest
import torch
import transformers
from families import FAMILIES
from reference import accumulate
from torch import Tensor, nn
from torch.nn import functional as F

import l2l
from l2l.model import Splitting, Whole, cutting_of, num_rows, some_rows, take_rows, token_length
from l2l.model.batch import Rule, join_rows, split_batch, trial_batch, turned

IMAGE, VIDEO, BEGIN, END = 5, 6, 7, 8
WORDS, IGNORED, LENGTH = 99, -100, 24
Batch = dict[str, Any]


# ----------------------------------------------------------------------------------------------
# Models and batches


def tokens(*rows: tuple[tuple[int, int], ...], close: bool = False) -> Batch:
    """Rows of words with placeholders: (which, how many) for each picture; `close`: no words."""
    generator = torch.Generator().manual_seed(len(rows))
    ids = torch.randint(20, WORDS, (len(rows), LENGTH), generator=generator)
    for row, pictures in zip(ids, rows, strict=True):
        place = 2
        for which, number in pictures:
            row[place - 1] = row[place - 1] if close else BEGIN
            row[place : place + number] = which
            place += number + (0 if close else 2)
    labels = torch.where(ids < 20, IGNORED, ids)
    labels[0, :7] = labels[-1, 15:] = IGNORED
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def grids(*sizes: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Sizes of pictures, and their patches below each other."""
    grid = torch.tensor(sizes)
    return grid, noise(int(grid.prod(1).sum()), 24)


def build_llava() -> nn.Module:
    text = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        projection_dim=16,
    )
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, image_token_index=IMAGE
    )
    return transformers.LlavaForConditionalGeneration(config)


def build_qwen() -> nn.Module:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": WORDS,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": rope,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 2,
            "window_size": 8,
            "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen_batch() -> Batch:
    """Rows of an image and a video, of words, of two videos, and of an image.

    Images have as many patches as videos.
    """
    batch = tokens(((IMAGE, 4), (VIDEO, 4)), (), ((VIDEO, 8), (VIDEO, 4)), ((IMAGE, 12),))
    batch["image_grid_thw"], batch["pixel_values"] = grids((1, 4, 4), (1, 12, 4))
    videos = grids((1, 4, 4), (2, 4, 4), (1, 4, 4))
    batch["video_grid_thw"], batch["pixel_values_videos"] = videos
    ids = batch["input_ids"]
    batch["mm_token_type_ids"] = (ids == IMAGE).long() + 2 * (ids == VIDEO)
    batch["second_per_grid_ts"] = [0.5, 1.0, 2.0]
    return batch


def qwen_rows() -> list[Batch]:
    """The same, cut by hand into one row each."""
    batch, found = qwen_batch(), []
    plain = ("input_ids", "labels", "attention_mask", "mm_token_type_ids")
    pictures = [((0, 1), (0, 16)), None, None, ((1, 2), (16, 64))]
    videos = [((0, 1), (0, 16)), None, ((1, 3), (16, 64)), None]
    for row in range(4):
        one: Batch = {name: batch[name][row : row + 1] for name in plain}
        if (where := pictures[row]) is not None:
            one["image_grid_thw"] = batch["image_grid_thw"][slice(*where[0])]
            one["pixel_values"] = batch["pixel_values"][slice(*where[1])]
        if (where := videos[row]) is not None:
            one["video_grid_thw"] = batch["video_grid_thw"][slice(*where[0])]
            one["pixel_values_videos"] = batch["pixel_values_videos"][slice(*where[1])]
            one["second_per_grid_ts"] = batch["second_per_grid_ts"][slice(*where[0])]
        found.append(one)
    return found


class GraphLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, edges: Tensor) -> Tensor:
        sums = torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]])
        return hidden + torch.tanh(self.linear(sums))


class Graphs(nn.Module):
    """Classifies graphs, all nodes of which are below each other."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.before = nn.Linear(3, 8)
        self.layers = nn.ModuleList(GraphLayer() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor, y: Tensor) -> dict[str, Tensor]:
        hidden = self.before(x)
        for layer in self.layers:
            hidden = layer(hidden, edges)
        sums = torch.zeros(y.shape[0], 8).index_add(0, graph, hidden)
        return {"loss": F.cross_entropy(self.head(sums), y)}


def graph_batch(*sizes: int) -> Batch:
    """Rings of nodes."""
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    rings = [
        torch.stack([torch.arange(size), (torch.arange(size) + 1) % size]) + start
        for size, start in zip(sizes, starts, strict=False)
    ]
    return {
        "x": torch.cat([noise(size, 3) for size in sizes]),
        "edges": torch.cat(rings, 1),
        "graph": torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
        "y": torch.arange(len(sizes)) % 4,
    }


def split_graphs(batch: Mapping[str, Any], start: int, end: int) -> Batch:
    is_in = (batch["graph"] >= start) & (batch["graph"] < end)
    first = int(is_in.nonzero()[0])
    return {
        "x": batch["x"][is_in],
        "edges": batch["edges"][:, is_in[batch["edges"][0]]] - first,
        "graph": batch["graph"][is_in] - start,
        "y": batch["y"][start:end],
    }


split_graphs.num_rows = lambda batch: len(batch["y"])  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------------------
# Two steps of the engine beside plain PyTorch


def prepared(create: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return create().train()


def engine_for(model: nn.Module, **settings: Any) -> l2l.Engine:
    chosen = {"precision": "float32", "device": "cpu", "kernel": "readable", **settings}
    return inside.engine(model, optimizer=l2l.SGD(lr=0.1), **chosen)


def assert_exact(
    create: Callable[[], nn.Module],
    batch: Any,
    parts: list[Batch],
    rule: Rule = Rule.SHIFTED_LABELS,
    **settings: Any,
) -> None:
    """What the engine makes of a batch is what plain PyTorch makes of these microbatches."""
    reference, model = prepared(create), prepared(create)
    optimizer, expected = torch.optim.SGD(reference.parameters(), lr=0.1), []
    numbers = [
        len(next(iter(one.values()))) if rule is Rule.ROWS else rule.count(one) for one in parts
    ]
    if rule is Rule.ROWS and "y" in parts[0]:
        numbers = [len(one["y"]) for one in parts]
    for _ in range(2):
        optimizer.zero_grad()
        expected.append(float(accumulate(reference, parts, numbers)))
        optimizer.step()
    with engine_for(model, **settings) as engine:
        losses = [float(engine.step(batch).loss) for _ in range(2)]
    assert losses == expected
    mine, theirs = model.state_dict(), reference.state_dict()
    assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []


TEXT = "model.language_model.layers"


@pytest.mark.parametrize("tail", [0, 2], ids=["streamed", "tail"])
def test_grids_of_images_and_videos_go_with_their_rows(tail: int):
    settings = {"layers": TEXT, "overrides": {"num_tail": tail}}
    assert_exact(build_qwen, qwen_batch(), qwen_rows(), microbatch_size=1, **settings)


def test_several_rows_with_images():
    batch, rows = qwen_batch(), qwen_rows()
    plain = ("input_ids", "labels", "attention_mask", "mm_token_type_ids")
    parts = [{n: batch[n][i : i + 2] for n in plain} for i in (0, 2)]
    for part, (one, two) in zip(parts, (rows[:2], rows[2:]), strict=True):
        for name in batch.keys() - set(plain):
            values = [each[name] for each in (one, two) if name in each]
            is_list = isinstance(values[0], list)
            part[name] = [*values[0], *values[-1]][:2] if is_list else torch.cat(values)
    assert_exact(build_qwen, batch, parts, microbatch_size=2, layers=TEXT)


def test_a_list_of_dicts_with_images():
    assert_exact(build_qwen, qwen_rows(), qwen_rows(), layers=TEXT)


IMAGES = {
    "one row has none": (((IMAGE, 4),), (), ((IMAGE, 4), (IMAGE, 4), (IMAGE, 4))),
    "as many as rows": (((IMAGE, 4),), (), ((IMAGE, 4), (IMAGE, 4))),
    "one each": (((IMAGE, 4),), ((IMAGE, 4),), ((IMAGE, 4),)),
    "the first has none": ((), (), ((IMAGE, 4), (IMAGE, 4))),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_of_one_size_go_with_their_rows(name: str):
    rows = IMAGES[name]
    batch = tokens(*rows)
    batch["pixel_values"] = noise(sum(map(len, rows)), 3, 16, 16)
    parts, place = [], 0
    for row, images in enumerate(rows):
        part = {n: v[row : row + 1] for n, v in batch.items() if n != "pixel_values"}
        if images:
            part["pixel_values"] = batch["pixel_values"][place : place + len(images)]
            place += len(images)
        parts.append(part)
    assert_exact(build_llava, batch, parts, microbatch_size=1, layers=TEXT)


def test_predictions_and_losses_of_rows_with_images():
    model, batch = prepared(build_qwen), qwen_batch()
    rows = qwen_rows()
    with torch.no_grad():
        model.eval()
        expected = torch.cat([model(**one).logits for one in rows])
        losses = torch.stack([model(**one).loss for one in rows])
        model.train()
    counts = torch.tensor([Rule.SHIFTED_LABELS.count(one) for one in rows])
    with engine_for(model, microbatch_size=1, layers=TEXT) as engine:
        found = engine.predict({n: v for n, v in batch.items() if n != "labels"})
        loss = engine.evaluate(batch)
    torch.testing.assert_close(found["logits"], expected, rtol=1e-5, atol=1e-6)
    assert loss == pytest.approx(float((losses * counts).sum() / counts.sum()), rel=1e-6)


def test_a_plan_cuts_rows_with_images():
    """On a device with a budget, rows are counted, recorded and cut for the plan too."""
    model = prepared(build_qwen)
    with engine_for(model, device_memory="1GiB", layers=TEXT) as engine:
        first = float(engine.step(qwen_batch()).loss)
    other = prepared(build_qwen)
    with engine_for(other, microbatch_size=1, layers=TEXT) as engine:
        assert first == pytest.approx(float(engine.step(qwen_batch()).loss), rel=1e-6)


# ----------------------------------------------------------------------------------------------
# The user's function


@pytest.mark.parametrize("size", [1, 2])
def test_graphs_are_cut_by_the_users_function(size: int):
    batch = graph_batch(3, 5, 2, 4)
    parts = [split_graphs(batch, i, i + size) for i in range(0, 4, size)]
    assert_exact(
        Graphs, batch, parts, Rule.ROWS, split=split_graphs, microbatch_size=size, nonfinite="skip"
    )


def test_a_function_that_returns_other_rows_is_refused():
    def one_more(batch: Mapping[str, Any], start: int, end: int) -> Batch:
        return split_graphs(batch, start, min(end + 1, 4))

    one_more.num_rows = split_graphs.num_rows  # type: ignore[attr-defined]
    model = prepared(Graphs)
    with (
        engine_for(model, split=one_more, microbatch_size=1) as engine,
        pytest.raises(ValueError, match=r"split= was asked for rows 0 to 2 of 4 and returned 3"),
    ):
        engine.step(graph_batch(3, 5, 2, 4))


def test_a_function_that_returns_wrong_rows_is_found_by_the_loss():
    def shifted(batch: Mapping[str, Any], start: int, end: int) -> Batch:
        found = split_graphs(batch, start, end)
        return {**found, "y": batch["y"].roll(1)[start:end]} if end - start == 1 else found

    shifted.num_rows = split_graphs.num_rows  # type: ignore[attr-defined]
    model = prepared(Graphs)
    with (
        engine_for(model, split=shifted, microbatch_size=1) as engine,
        pytest.raises(ValueError, match="cannot be combined"),
    ):
        engine.step(graph_batch(3, 5, 2, 4))


def test_a_users_loss_is_compared_over_parts_that_a_function_has_cut():
    def pairs(outputs: Any, batch: Mapping[str, Any]) -> Tensor:
        return (outputs["hidden"].sum(1)[:, None] - outputs["hidden"].sum(1)[None]).square().mean()

    class Embeds(Graphs):
        def forward(self, x: Tensor, edges: Tensor, graph: Tensor, y: Tensor) -> dict[str, Tensor]:
            hidden = self.before(x)
            for layer in self.layers:
                hidden = layer(hidden, edges)
            return {"hidden": self.head(torch.zeros(len(y), 8).index_add(0, graph, hidden))}

    model = prepared(Embeds)
    with (
        engine_for(model, split=split_graphs, loss=pairs, microbatch_size=2, prove=False) as engine,
        pytest.raises(ValueError, match=r"loss= cannot be cut into microbatches of 2 rows"),
    ):
        engine.step(graph_batch(3, 5, 2, 4))


# ----------------------------------------------------------------------------------------------
# What is not certain


def test_a_batch_that_nobody_can_cut_is_one_microbatch_and_said_once(
    caplog: pytest.LogCaptureFixture,
):
    batch = graph_batch(3, 5, 2, 4)
    with caplog.at_level(logging.WARNING, "l2l"):
        assert_exact(Graphs, batch, [batch], Rule.ROWS)
    said = [one.getMessage() for one in caplog.records if "split=" in one.getMessage()]
    assert len(said) == 1
    assert "'x' has 14 entries" in said[0]


def test_a_size_of_microbatches_that_cannot_be_is_refused():
    model = prepared(build_llava)
    batch = tokens(((IMAGE, 4),), ((IMAGE, 6),))
    batch["pixel_values"] = noise(3, 3, 16, 16)
    with (
        engine_for(model, microbatch_size=1, layers=TEXT) as engine,
        pytest.raises(ValueError, match=r"microbatch_size=1, .* 'pixel_values' .* split="),
    ):
        engine.step(batch)


def test_microbatches_of_graphs_need_a_weight_to_be_put_together():
    """How many graphs there are in each is not certain, so their mean over rows is not either."""
    parts = [graph_batch(3, 5, 2), graph_batch(4)]
    model = prepared(Graphs)
    with (
        engine_for(model) as engine,
        pytest.raises(ValueError, match=r"cannot be combined|not certain"),
    ):
        engine.step(parts)


class Packed(nn.Module):
    """Sequences in one row, told apart by where each ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList(PackedLayer() for _ in range(3))
        self.head = nn.Linear(8, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)
        assert int(cu_seqlens[-1]) == input_ids.shape[1]
        for layer in self.layers:
            hidden = layer(hidden, cu_seqlens)
        logits = self.head(hidden)[:, :-1].flatten(0, 1)
        return {"loss": F.cross_entropy(logits, labels[:, 1:].flatten())}


class PackedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor, ends: Tensor) -> Tensor:
        number = torch.bucketize(torch.arange(hidden.shape[1]), ends[1:], right=True)
        sums = torch.zeros(1, len(ends), 8).index_add(1, number, hidden)
        return hidden + torch.tanh(self.linear(sums[:, number]))


def packed(*lengths: int) -> Batch:
    generator = torch.Generator().manual_seed(len(lengths))
    ids = torch.randint(20, WORDS, (1, sum(lengths)), generator=generator)
    labels = ids.clone()
    ends = torch.tensor([0, *lengths]).cumsum(0)
    labels[0, ends[:-1]] = IGNORED
    return {"input_ids": ids, "labels": labels, "cu_seqlens": ends}


@pytest.mark.parametrize("memory", [None, "1GiB"], ids=["as it is", "planned"])
def test_packed_sequences_are_one_microbatch(memory: str | None, caplog: pytest.LogCaptureFixture):
    batch = packed(5, 9, 2)
    with caplog.at_level(logging.WARNING, "l2l"):
        assert_exact(Packed, batch, [batch], device_memory=memory)
    assert not [one for one in caplog.records if "split=" in one.getMessage()]


def test_packed_sequences_in_a_list_are_weighed_by_their_labels():
    parts = [packed(5, 9, 2), packed(7, 3)]
    assert_exact(Packed, parts, parts)


def test_pieces_of_the_epilogue_keep_rows_and_their_images_together():
    batch, rows = qwen_batch(), qwen_rows()
    overrides = {"piece_tokens": LENGTH, "microbatch_tokens": 4 * LENGTH}
    model, other = prepared(build_qwen), prepared(build_qwen)
    with engine_for(model, overrides=overrides, layers=TEXT) as engine:
        found = float(engine.step(batch).loss)
    with engine_for(other, layers=TEXT) as engine:
        assert found == pytest.approx(float(engine.step(rows).loss), rel=1e-6)
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6), name


class Boxes(nn.Module):
    """Finds boxes: the targets of a row are a dict, or a tensor of its own length."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.before = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, pixel_values: Tensor, labels: list[Any]) -> dict[str, Tensor]:
        hidden = self.before(pixel_values)
        for layer in self.layers:
            hidden = layer(hidden)
        found = [one["boxes"] if isinstance(one, dict) else one for one in labels]
        pairs = zip(self.head(hidden), found, strict=True)
        return {"loss": torch.stack([(a - b).square().mean() for a, b in pairs]).mean()}


@pytest.mark.parametrize("named", [True, False])
def test_lists_of_targets_go_with_their_rows(named: bool):
    boxes = [noise(number, 2) for number in (3, 1, 4, 2)]
    targets: list[Any] = [{"boxes": one} for one in boxes] if named else boxes
    batch = {"pixel_values": noise(4, 6), "labels": targets}
    parts = [{name: value[i : i + 2] for name, value in batch.items()} for i in (0, 2)]
    assert_exact(Boxes, batch, parts, Rule.ROWS, microbatch_size=2)


class Sentences(Boxes):
    """Rows of unequal length, which the model's code joins itself."""

    def forward(self, rows: list[Tensor], labels: list[Any]) -> dict[str, Tensor]:
        return super().forward(torch.stack([row.mean(0) for row in rows]), labels)


def test_rows_of_unequal_length_in_lists():
    rows = [noise(number, 6) for number in (3, 1, 4, 2)]
    batch = {"rows": rows, "labels": [noise(2, 2)] * 4}
    parts = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(4)]
    assert_exact(Sentences, batch, parts, Rule.ROWS, microbatch_size=1)


def test_a_list_of_something_else_is_not_cut():
    batch = {"rows": [noise(3, 6), noise(1, 6)], "pixel_values": noise(3, 6)}
    assert isinstance(cutting_of(known(batch)), Whole)
    assert isinstance(cutting_of(known({**batch, "rows": (noise(3, 6),)})), Whole)


# ----------------------------------------------------------------------------------------------
# The rule itself


def known(batch: Batch, **ids: int) -> Any:
    model = nn.Module()
    model.config = SimpleNamespace(
        text_config=SimpleNamespace(**(ids or {"image_token_id": IMAGE}))
    )
    return Splitting.of_model(model, None).of(batch)


def sizes(batch: Any) -> dict[str, tuple[int, ...]]:
    return dict(cutting_of(batch).sizes)


def test_entries_are_counted_by_row():
    found = known(qwen_batch(), image_token_id=IMAGE, video_token_id=VIDEO)
    assert sizes(found) == {
        "image_grid_thw": (1, 0, 0, 1),
        "pixel_values": (16, 0, 0, 48),
        "video_grid_thw": (1, 0, 2, 0),
        "pixel_values_videos": (16, 0, 48, 0),
        "second_per_grid_ts": (1, 0, 2, 0),
    }
    assert (num_rows(found), token_length(found)) == (4, LENGTH)
    for row, expected in enumerate(qwen_rows()):
        one = take_rows(found, row, row + 1)
        assert one.keys() == expected.keys()
        for name, value in expected.items():
            same = torch.equal if isinstance(value, Tensor) else list.__eq__
            assert same(one[name], value), name


def test_parts_are_joined_turned_and_sent_as_they_were():
    found = known(qwen_batch(), image_token_id=IMAGE, video_token_id=VIDEO)
    rows = [take_rows(found, row, row + 1) for row in range(4)]
    again = turned(turned(join_rows(rows)))
    assert sizes(again) == sizes(found)
    sent = pickle.loads(pickle.dumps(again))
    for one in (again, sent):
        for name, value in found.items():
            same = torch.equal if isinstance(value, Tensor) else list.__eq__
            assert same(one[name], value), name
    given = Splitting((lambda batch, start, end: batch), ()).of(graph_batch(3, 5))
    assert cutting_of(pickle.loads(pickle.dumps(given))) == Whole(2, "", is_sure=True)
    assert sizes(take_rows(sent, 2, 4))["video_grid_thw"] == (2, 0)
    assert [one.keys() for one in split_batch(found, microbatch_size=1)] == [
        one.keys() for one in rows
    ]


def test_a_trial_has_rows_with_all_entries():
    found = some_rows(known(qwen_batch(), image_token_id=IMAGE, video_token_id=VIDEO))
    assert found.keys() == qwen_batch().keys()
    assert num_rows(found) == 2
    (one,) = split_batch(known(tokens(((IMAGE, 4),))), microbatch_size=1)
    one["pixel_values"] = noise(2, 3, 16, 16)
    assert cutting_of(known(one)) is not None


def grid_batch(rows: Any, *images: tuple[int, int, int]) -> Batch:
    grid, pixels = grids(*images)
    return {**tokens(*rows), "image_grid_thw": grid, "pixel_values": pixels}


TWO = (((IMAGE, 4), (IMAGE, 4)), ((IMAGE, 4),))
UNCERTAIN = {
    "placeholders that end inside an image": grid_batch(
        (((IMAGE, 4),), ((IMAGE, 8),)), (1, 4, 8), (1, 4, 4)
    ),
    "too few placeholders": grid_batch((((IMAGE, 4),), ((IMAGE, 3),)), (1, 4, 4), (1, 4, 4)),
    "no placeholders": grid_batch(((), ()), (1, 4, 4), (1, 4, 4)),
    "runs of several sizes": {
        **tokens(((IMAGE, 8),), ((IMAGE, 2), (IMAGE, 2))),
        "pixel_values": noise(3, 3, 16, 16),
    },
    "a run that two may share": {
        **tokens(((IMAGE, 4),), ()),
        "pixel_values": noise(2, 3, 16, 16),
    },
    "images in a dimension of their own": {
        **tokens(((IMAGE, 4), (IMAGE, 4)), ()),
        "pixel_values": noise(2, 2, 3, 16, 16),
    },
    "sizes beside as many images as rows": {
        **tokens(((IMAGE, 4), (IMAGE, 4)), ()),
        "pixel_values": noise(2, 3, 16, 16),
        "image_sizes": torch.full((2, 2), 16),
    },
    "ends of sequences": {
        **tokens(*TWO),
        "pixel_values": noise(3, 3, 16, 16),
        "cu_seqlens": torch.tensor([0, 9, 48]),
    },
    "nothing to go by": {**tokens((), ()), "pixel_values": noise(4, 3, 16, 16)},
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_what_is_not_certain_is_not_cut(name: str):
    found = known(UNCERTAIN[name])
    assert isinstance(cutting_of(found), Whole)
    assert num_rows(found) == 1
    assert len(split_batch(found, microbatch_size=1)) == 1
    assert trial_batch(found, cut=True).keys() == found.keys()


def random_rows(draw: random.Random, kind: str) -> tuple[Batch, dict[str, tuple[int, ...]]]:
    """Rows with images and videos in any order, and what of every entry is a row's."""
    rows = [
        [draw.choice((IMAGE, VIDEO)) for _ in range(draw.choice((0, 1, 1, 2, 3)))] for _ in "abc"
    ]
    gap, same = draw.choice((0, 1)), {which: draw.randint(1, 6) for which in (IMAGE, VIDEO)}
    ids, batch, truth = torch.full((3, 60), 50), {}, {}
    patches: dict[int, list[list[int]]] = {IMAGE: [[], [], []], VIDEO: [[], [], []]}
    for row, pictures in enumerate(rows):
        place = 1
        for which in pictures:
            number = same[which] if kind == "same" else draw.choice((1, 2, 3, 4, 6))
            patches[which][row].append(4 * number)
            ids[row, place : place + number] = which
            place += number + gap
    for which, pixels, grid in (
        (IMAGE, "pixel_values", "image_grid_thw"),
        (VIDEO, "pixel_values_videos", "video_grid_thw"),
    ):
        every = [one for row in patches[which] for one in row]
        if every and kind == "grid":
            batch[grid] = torch.tensor([[1, 2, one // 2] for one in every])
            batch[pixels] = torch.zeros(sum(every), 4)
            truth[pixels] = tuple(map(sum, patches[which]))
        elif every:
            batch[pixels] = torch.zeros(
                len(every), *((3, 4, 4) if which == IMAGE else (2, 3, 4, 4))
            )
            truth[pixels] = tuple(map(len, patches[which]))
    return {"input_ids": ids, **batch}, truth


@pytest.mark.parametrize("kind", ["grid", "same", "varied"])
def test_what_is_cut_is_cut_right(kind: str):
    draw, num_cut = random.Random(0), 0
    for _ in range(1000):
        batch, truth = random_rows(draw, kind)
        found = known(batch, image_token_id=IMAGE, video_token_id=VIDEO)
        if not isinstance(cutting_of(found), Whole):
            mine = {} if found is batch else sizes(found)
            assert {name: mine.get(name, (1, 1, 1)) for name in truth} == truth
            num_cut += 1
    assert num_cut > (900 if kind == "grid" else 100)


def test_images_as_a_processor_gives_them():
    processor = transformers.Qwen2VLImageProcessor()
    shapes = (60, 90), (200, 100), (56, 56)
    pictures = [numpy.zeros((*shape, 3), dtype=numpy.uint8) for shape in shapes]
    images = processor(pictures, return_tensors="pt")
    numbers = (images["image_grid_thw"].prod(1) // processor.merge_size**2).tolist()
    ids = torch.full((3, 100), 50)
    ids[0, 1 : 1 + numbers[0]] = ids[2, 9 : 9 + numbers[1]] = IMAGE
    ids[2, 90 - numbers[2] : 90] = IMAGE
    found = known({"input_ids": ids, **images})
    assert sizes(found)["image_grid_thw"] == (1, 0, 2)
    assert torch.equal(
        take_rows(found, 2, 3)["pixel_values"], images["pixel_values"][4 * numbers[0] :]
    )


def test_what_may_belong_to_images_or_to_videos_is_not_cut():
    rows = ((IMAGE, 4), (IMAGE, 4)), ((VIDEO, 4),), ((VIDEO, 4),)
    batch = {**grid_batch(rows, (1, 4, 4), (1, 4, 4)), "seconds": torch.tensor([0.5, 1.0])}
    batch["video_grid_thw"], batch["pixel_values_videos"] = grids((1, 4, 4), (1, 4, 4))
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO}
    assert isinstance(cutting_of(known(batch, **ids)), Whole)
    del batch["seconds"]
    assert sizes(known(batch, **ids))["pixel_values"] == (32, 0, 0)
    assert sizes(known(batch, **ids))["pixel_values_videos"] == (0, 16, 16)


def test_two_ids_that_disagree_are_not_believed():
    batch = {**tokens(((IMAGE, 4), (VIDEO, 4)), ((IMAGE, 4),), ((VIDEO, 4),))}
    batch["pixel_values"] = noise(2, 3, 16, 16)
    assert isinstance(cutting_of(known(batch, image_token_id=IMAGE, video_token_id=VIDEO)), Whole)
    batch["pixel_values_videos"] = noise(2, 2, 3, 16, 16)
    found = known(batch, image_token_id=IMAGE, video_token_id=VIDEO)
    assert sizes(found) == {"pixel_values": (1, 1, 0), "pixel_values_videos": (1, 0, 1)}
    batch["video_seconds"] = batch["image_sizes"] = torch.ones(2, 2)
    more = known(batch, image_token_id=IMAGE, video_token_id=VIDEO)
    assert sizes(more) == sizes(found) | {"image_sizes": (1, 1, 0), "video_seconds": (1, 0, 1)}
    batch["seconds"] = torch.ones(2)
    assert isinstance(cutting_of(known(batch, image_token_id=IMAGE, video_token_id=VIDEO)), Whole)


def test_images_close_to_each_other_and_what_belongs_to_them():
    batch = tokens(((IMAGE, 4), (IMAGE, 4)), ((IMAGE, 4),), close=True)
    batch |= {"pixel_values": noise(3, 3, 16, 16), "image_sizes": torch.full((3, 2), 16)}
    known_number = known(batch, image_token_id=IMAGE, image_seq_length=4)
    assert sizes(known_number) == {"pixel_values": (2, 1), "image_sizes": (2, 1)}
    assert isinstance(cutting_of(known(batch)), Whole)  # they may be of 3, 5 and 4


def test_a_batch_without_any_image_loses_its_empty_entries():
    batch = {**tokens((), ()), "image_grid_thw": torch.zeros(0, 3, dtype=torch.int64)}
    batch["pixel_values"] = torch.zeros(0, 24)
    part = take_rows(known(batch), 0, 1)
    assert part.keys() == {"input_ids", "labels", "attention_mask"}


def test_positions_of_several_kinds_have_their_rows_second():
    batch = tokens((), (), ())
    for kinds in (3, 4):  # as many kinds as rows, and others
        batch["position_ids"] = torch.arange(kinds * 3 * LENGTH).view(kinds, 3, LENGTH)
        found = known(batch)
        assert torch.equal(take_rows(found, 1, 3)["position_ids"], batch["position_ids"][:, 1:])
        assert trial_batch(found, cut=True)["position_ids"].shape == (kinds, 2, LENGTH)


@pytest.mark.parametrize(
    "batch",
    [
        FAMILIES["llama_untied"].batch(4),
        {"pixel_values": noise(4, 3, 8, 8), "labels": torch.arange(4)},
        {**tokens(((IMAGE, 4),), ((IMAGE, 8),)), "pixel_values": noise(2, 2, 3, 16, 16)},
        {**tokens((), ()), "weight": 3.0, "names": ["a", "b"]},
    ],
    ids=["words", "images", "padded images", "others"],
)
def test_a_batch_with_rows_first_stays_as_it_is(batch: Batch):
    assert known(batch) is batch


def test_tensors_of_the_same_length_with_other_rows_are_a_mistake():
    batch = tokens((), (), ())
    batch["labels"] = batch["labels"][:2]
    with pytest.raises(ValueError, match=r"'labels': 2.*split="):
        num_rows(known(batch))
