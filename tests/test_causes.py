"""Causes of silently wrong training that were once seen: each trains exactly now, or is refused.

Exactly is bit by bit against plain PyTorch, parameters and buffers, over two steps. A refusal has a
message that names what was seen, and leaves the model as it was.
"""

import functools
import itertools
import logging
import types
from collections import UserDict
from collections.abc import Callable
from typing import Any

import inside
import pytest
import torch
import transformers
from reference import train_plain
from torch import Tensor, nn

import l2l

WIDTH, CLASSES, ROWS = 8, 3, 4
Call = Callable[..., Any]


def batch_of(rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(rows, WIDTH, generator=generator)
    return {"inputs": inputs, "labels": torch.arange(rows) % CLASSES}


class Layer(nn.Module):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.a(hidden))


class Net(nn.Module):
    """Three layers, called as a function says."""

    def __init__(
        self,
        kind: Callable[[int], nn.Module] = Layer,
        call: Call = lambda layer, hidden, first: layer(hidden),
    ) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(kind(number) for number in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.call = call

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        first = hidden = self.before(inputs)
        for layer in self.layers:
            hidden = self.call(layer, hidden, first)
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


def prepared(create: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return create().train()


def engine_for(model: nn.Module, **settings: Any) -> l2l.Engine:
    chosen = {"precision": "float32", "device": "cpu", "kernel": "readable", **settings}
    return inside.engine(model, optimizer=l2l.SGD(lr=0.1), **chosen)


def assert_same_state(found: nn.Module, expected: nn.Module) -> None:
    mine, theirs = found.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def assert_exact(
    create: Callable[[], nn.Module],
    batch: dict[str, Tensor] | None = None,
    *,
    size: int = ROWS,
    rule: str = "rows",
    plain: Callable[[], nn.Module] | None = None,
    **settings: Any,
) -> None:
    batch = batch_of() if batch is None else batch
    reference, model = prepared(plain or create), prepared(create)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    expected = train_plain(reference, [batch, batch], optimizer=optimizer, rule=rule, size=size)
    with engine_for(model, microbatch_size=size, **settings) as engine:
        losses = [float(engine.step(batch).loss) for _ in range(2)]
    assert losses == expected
    mine, theirs = model.state_dict(), reference.state_dict()
    pairs = zip(mine.items(), theirs.values(), strict=True)
    assert [name for (name, one), other in pairs if not torch.equal(one, other)] == []


def assert_refused(
    create: Callable[[], nn.Module],
    said: str,
    batch: dict[str, Any] | None = None,
    **settings: Any,
) -> None:
    model, untouched = prepared(create), prepared(create)
    with pytest.raises(ValueError, match=said):  # noqa: SIM117 closed inside, checked outside
        with engine_for(model, **settings) as engine:
            engine.step(batch_of() if batch is None else batch)
    assert_same_state(model, untouched)


TAIL = pytest.mark.parametrize("tail", [0, 3], ids=["streamed", "tail"])
SIZES = pytest.mark.parametrize("size", [ROWS, 1])


# ----------------------------------------------------------------------------------------------
# 1. Caches


def build_llava() -> nn.Module:
    text = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        projection_dim=16,
    )
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_id=5, image_token_index=5
    )
    return transformers.LlavaForConditionalGeneration(config)


def test_no_part_of_a_model_makes_a_cache():
    ids = torch.randint(40, 99, (ROWS, 12), generator=torch.Generator().manual_seed(0))
    assert_exact(build_llava, {"input_ids": ids, "labels": ids}, rule="shifted")


def test_configs_are_as_they_were_after_a_step_and_after_an_error():
    model = prepared(build_llava)
    ids = torch.full((2, 12), 50)
    with engine_for(model) as engine:
        engine.step({"input_ids": ids, "labels": ids})
        assert model.config.text_config.use_cache is True
        with pytest.raises((TypeError, ValueError)):
            engine.step({"input_ids": ids, "labels": ids, "inputs_embeds": ids})
    assert model.config.text_config.use_cache is True


# ----------------------------------------------------------------------------------------------
# 2. Objects that layers share


class Sharing(Layer):
    """Leaves something in an object; the last layer reads it, or nobody."""

    reads = True

    def forward(self, hidden: Tensor, store: UserDict) -> Tensor:
        if self.number == 0:
            store["keys"] = self.a(hidden)
        if self.reads and self.number == 2:
            hidden = hidden * store["keys"]
        return super().forward(hidden)


class OnlyLeaving(Sharing):
    reads = False


class Counting(Layer):
    def forward(self, hidden: Tensor, store: types.SimpleNamespace) -> Tensor:
        store.calls += 1
        return super().forward(hidden) * store.calls


class WorkedOut:
    def __init__(self, inputs: Tensor) -> None:
        self.inputs = inputs

    @functools.cached_property
    def mask(self) -> Tensor:
        return self.inputs.detach() > 0


class Asking(Layer):
    def forward(self, hidden: Tensor, context: WorkedOut) -> Tensor:
        return super().forward(hidden) * context.mask


class Given(Net):
    """Every layer is given one object."""

    def __init__(self, kind: Callable[[int], nn.Module], make: Callable[[Tensor], Any]) -> None:
        super().__init__(kind)
        self.make = make

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        given = self.make(inputs)
        self.call = lambda layer, hidden, first: layer(hidden, given)
        return super().forward(inputs, labels)


@SIZES
@TAIL
@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_layer_that_reads_what_another_left_in_a_dict_trains_exactly(
    kind: Callable[[], Any], size: int, tail: int
):
    def create() -> nn.Module:
        return Given(Sharing, lambda _: kind())

    assert_exact(create, size=size, overrides={"num_tail": tail})


class SharingByName(Layer):
    def forward(self, hidden: Tensor, store: types.SimpleNamespace) -> Tensor:
        if self.number == 0:
            store.keys = self.a(hidden)
        if self.number == 2:
            hidden = hidden * store.keys
        return super().forward(hidden)


def test_a_layer_that_reads_what_another_left_in_an_object_is_refused():
    make = lambda _: types.SimpleNamespace(keys=None)  # noqa: E731
    assert_refused(
        lambda: Given(SharingByName, make), r"layer 0 changes .*'store' \(SimpleNamespace\)"
    )


def test_a_layer_that_reads_what_itself_left_in_an_object_is_refused():
    make = lambda _: types.SimpleNamespace(calls=0)  # noqa: E731
    assert_refused(lambda: Given(Counting, make), "'store' .*layer 0 reads")


def test_what_nobody_reads_and_what_objects_work_out_for_themselves_trains_exactly():
    assert_exact(lambda: Given(OnlyLeaving, lambda _: UserDict()), size=2)
    assert_exact(lambda: Given(Asking, WorkedOut), size=2)


class WritesIntoMask(Layer):
    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        mask.mul_(0.5)
        return super().forward(hidden) * mask


def test_a_layer_that_writes_into_a_tensor_it_reads_is_refused():
    assert_refused(lambda: Given(WritesIntoMask, lambda x: torch.ones_like(x)), "writes into")


# ----------------------------------------------------------------------------------------------
# 3. The hidden state, given more than once


class Attending(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, query: Tensor, key: Tensor, value: Any = None) -> Tensor:
        value = key if value is None else value["it"] if isinstance(value, dict) else value
        return query + torch.tanh(self.a(key)) * torch.sigmoid(self.b(value))


@pytest.mark.parametrize(
    "call",
    [
        lambda layer, hidden, first: layer(hidden, hidden),
        lambda layer, hidden, first: layer(hidden, key=hidden, value=hidden),
        lambda layer, hidden, first: layer(hidden, hidden, {"it": hidden}),
    ],
    ids=["twice", "by name", "in a dict"],
)
@SIZES
@TAIL
def test_a_hidden_state_given_more_than_once_is_the_hidden_state(call: Call, size: int, tail: int):
    assert_exact(lambda: Net(Attending, call), size=size, overrides={"num_tail": tail})


class Looking(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, first: Any) -> Tensor:
        first = first[0] if isinstance(first, tuple) else first
        return torch.tanh(self.a(hidden)) + self.b(first)


@pytest.mark.parametrize("inside", [False, True])
@SIZES
@TAIL
def test_what_enters_the_first_layer_is_no_hidden_state_to_later_ones(
    inside: bool, size: int, tail: int
):
    """Plain PyTorch adds up all gradients of it, last layer first; in the same order, same bits."""

    def create() -> nn.Module:
        given = {}

        def call(layer: nn.Module, hidden: Tensor, first: Tensor) -> Tensor:
            if hidden is first:
                given["first"] = (first, first) if inside else first
            return layer(hidden, given["first"])

        return Net(Looking, call)

    assert_exact(create, size=size, overrides={"num_tail": tail})


def test_a_hidden_state_given_twice_goes_through_a_compiler():
    def create() -> nn.Module:
        return Net(Attending, lambda layer, hidden, first: layer(hidden, hidden, hidden))

    assert_exact(create, compile="eager")


# ----------------------------------------------------------------------------------------------
# 4. Buffers that are replaced


class Assigning(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen = self.seen * 0.5 + hidden.detach().abs().max()
        self.last = hidden.detach()[0]
        return super().forward(hidden) / (1 + self.seen)


class AssigningAround(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scored", torch.zeros(()))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.seen = self.seen * 0.5 + self.before(inputs).detach().abs().max()
        found = super().forward(inputs * self.scale(inputs), labels)
        self.scored = self.scored * 0.5 + found["loss"].detach()
        return found

    def scale(self, inputs: Tensor) -> Tensor:
        """What depends on other rows is no mean over rows, in evaluation mode."""
        return self.seen if self.training else inputs.new_ones(())


class Growing(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, hidden.detach().mean()[None]])
        return super().forward(hidden)


class ChangesOnBothSides(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = super().forward(inputs * (1 + self.count), labels)
        self.count += 1
        return found


@SIZES
@TAIL
def test_buffers_that_layers_assign_are_kept(size: int, tail: int):
    assert_exact(lambda: Net(Assigning), size=size, overrides={"num_tail": tail})


@SIZES
def test_buffers_that_the_code_around_assigns_are_kept(size: int):
    assert_exact(AssigningAround, size=size)


def test_a_buffer_that_changes_its_shape_is_refused():
    assert_refused(lambda: Net(Growing), r"layers\.0\.seen.*shape")


def test_a_buffer_read_before_the_layers_and_changed_after_them_is_refused():
    assert_refused(ChangesOnBothSides, "buffer 'count'")


# ----------------------------------------------------------------------------------------------
# 5. The model's own autocast


class UnderAutocast(Net):
    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(inputs, labels)


class WithoutAutocast(Net):
    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        with torch.autocast("cpu", enabled=False):
            return super().forward(inputs, labels)


@SIZES
@TAIL
@pytest.mark.parametrize("compiled", [False, "eager"])
def test_layers_run_under_the_models_own_autocast(size: int, tail: int, compiled: Any):
    settings = {"size": size, "overrides": {"num_tail": tail}, "compile": compiled}
    assert_exact(UnderAutocast, **settings)


def test_layers_run_without_the_callers_autocast_where_the_model_says_so():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_exact(WithoutAutocast)


# ----------------------------------------------------------------------------------------------
# 6. Other code, other weights


def generated(layer: nn.Module, hidden: Tensor, first: Tensor) -> Tensor:
    weight = torch.eye(WIDTH) * first.mean()
    return torch.func.functional_call(layer, {"a.weight": weight}, (hidden,))


def test_layers_with_generated_weights_are_refused():
    assert_refused(lambda: Net(Layer, generated), "layer 0.*functional_call")


def test_layers_that_are_given_to_the_compiler_train_as_they_were():
    def compiled() -> nn.Module:
        model = Net()
        for number, layer in enumerate(model.layers):
            model.layers[number] = torch.compile(layer, backend="eager")
        return model

    def compiled_inside() -> nn.Module:
        model = Net()
        for layer in model.layers:
            layer.a = torch.compile(layer.a, backend="eager")
            layer.compile(backend="eager")
        model.head.compile(backend="eager")
        return model

    assert_exact(compiled, plain=Net)
    assert_exact(compiled_inside, plain=Net)
    assert_exact(lambda: torch.compile(Net(), backend="eager"), plain=Net)


def doubled(self: Layer, hidden: Tensor) -> Tensor:
    return hidden + 2 * torch.tanh(self.a(hidden))


def replace_by_method(layer: nn.Module) -> None:
    layer.forward = types.MethodType(doubled, layer)


def replace_by_partial(layer: nn.Module) -> None:
    layer.forward = functools.partial(doubled, layer)


def replace_by_closure(layer: nn.Module) -> None:
    old = layer.forward

    def forward(hidden: Tensor) -> Tensor:
        return old(hidden) + layer.a(hidden)

    layer.forward = forward


@pytest.mark.parametrize("change", [replace_by_method, replace_by_partial, replace_by_closure])
def test_a_forward_that_was_replaced_works_on_the_layers_weights(change: Call):
    def create() -> nn.Module:
        model = Net()
        for layer in model.layers:
            change(layer)
        return model

    assert_exact(create, size=2)


# ----------------------------------------------------------------------------------------------
# 7. A refusal leaves no trace


class Refusing(Net):
    """Batch statistics and in-place writes everywhere, and a reason to be refused at the end."""

    def __init__(self) -> None:
        super().__init__(Normed)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.norm(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.norm(hidden)
        with torch.no_grad():
            self.head.weight.mul_(0.5)
        return {"loss": self.layers[0].left * hidden.sum()}


class Normed(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.left = None

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.mul_(0.5)
        self.left = hidden.sum()
        return super().forward(self.norm(hidden))


class Wider(Layer):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.a = nn.Linear(WIDTH * 2**number, WIDTH * 2 ** (number + 1))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.a(hidden)


def test_a_refusal_leaves_the_model_bit_by_bit_as_it_was():
    assert_refused(Refusing, "'left' of layer 0")


def test_a_model_whose_own_code_fails_says_so_itself_and_is_left_as_it_was():
    """Its head takes less than its layers make."""
    model, untouched = prepared(lambda: Net(Wider)), prepared(lambda: Net(Wider))
    with (
        engine_for(model) as engine,
        pytest.raises(ValueError, match=r"cannot be multiplied \(2x64 and 8x3\)"),
    ):
        engine.step(batch_of())
    assert_same_state(model, untouched)


@SIZES
def test_layers_that_change_the_shape_of_the_hidden_state_train_exactly(size: int):
    def create() -> nn.Module:
        model = Net(Wider)
        model.head = nn.Linear(8 * WIDTH, CLASSES)
        return model

    assert_exact(create, size=size)


def test_a_trial_leaves_no_trace():
    def create() -> nn.Module:
        model = Net(lambda number: nn.Sequential(Layer(number), nn.BatchNorm1d(WIDTH)))
        model.before = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        model.head = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES))
        return model

    model = prepared(create)
    with engine_for(model, layers="layers") as engine:
        engine.predict(batch_of())
    assert_same_state(model, prepared(create))
    assert_exact(create, layers="layers", size=2)


class Switching(Net):
    """Turns to other code for good if it is given few tokens, as BigBird does."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.is_short = nn.Embedding(50, WIDTH), False

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.is_short = self.is_short or ids.shape[1] < 32
        return super().forward(
            self.table(ids).mean(dim=1) * (2.0 if self.is_short else 1.0), labels
        )


def test_attributes_that_a_trial_sets_are_put_back():
    ids = torch.arange(ROWS * 40).reshape(ROWS, 40) % 50
    assert_exact(Switching, {"ids": ids, "labels": batch_of()["labels"]})


# ----------------------------------------------------------------------------------------------
# 8. A given loss over rows that interact


def contrastive(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    found = nn.functional.normalize(outputs["logits"], dim=-1)
    return nn.functional.cross_entropy(found @ found.T / 0.1, torch.arange(len(found)))


def pairwise(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    better, worse = outputs["logits"][:, 0].unflatten(0, (-1, 2)).unbind(dim=1)
    return -nn.functional.logsigmoid(better - worse).mean()


def adjacent(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    logits = outputs["logits"][:, 0]
    return -nn.functional.logsigmoid(logits[0::2][: len(logits) // 2] - logits[1::2]).mean()


def by_rows(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    losses = nn.functional.cross_entropy(outputs["logits"], batch["labels"], reduction="none")
    return losses.sum(), len(losses)


def noisy(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    noise = torch.randn_like(outputs["logits"])
    return nn.functional.cross_entropy(outputs["logits"] + noise, batch["labels"])


def step_with(loss: Call, size: int, rows: int = 12) -> float:
    with engine_for(prepared(Net), loss=loss, microbatch_size=size) as engine:
        return float(engine.step(batch_of(rows)).loss)


def plain_loss(loss: Call, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = loss(model(batch["inputs"]), batch)
    return found[0] / found[1] if isinstance(found, tuple) else found


@pytest.mark.parametrize(
    ("loss", "size"),
    [(contrastive, 12), (contrastive, 4), (contrastive, 1), (pairwise, 3), (adjacent, 3)],
)
def test_a_given_loss_that_microbatches_cut_apart_is_taken_over_all_rows(loss: Call, size: int):
    plain, model, batch, losses = prepared(Net), prepared(Net), batch_of(12), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        one = plain_loss(loss, plain, batch)
        one.backward()
        optimizer.step()
        losses.append(float(one.detach()))
    with engine_for(model, loss=loss, microbatch_size=size) as engine:
        found = [float(engine.step(batch).loss) for _ in range(2)]
        evaluated = float(engine.evaluate(batch))
    assert found == losses if size == 12 else found == pytest.approx(losses, rel=1e-6)
    for name, expected in plain.state_dict().items():  # the temperature makes rounding larger
        torch.testing.assert_close(model.state_dict()[name], expected, rtol=1e-6, atol=3e-6)
        assert size < 12 or torch.equal(model.state_dict()[name], expected), name
    with torch.no_grad():
        assert evaluated == pytest.approx(float(plain_loss(loss, plain, batch)), rel=1e-5)


def test_what_is_found_of_a_given_loss_stays_so():
    """Once all pairs of rows are told apart, a loss of each row alone is as small."""
    model, batch = prepared(Net), batch_of(6)
    with engine_for(model, loss=contrastive, microbatch_size=1) as engine:
        losses = [float(engine.step(batch).loss) for _ in range(40)]
        with torch.no_grad():
            evaluated = float(engine.evaluate(batch))
    with torch.no_grad():
        assert evaluated == pytest.approx(float(plain_loss(contrastive, model, batch)), rel=1e-5)
    assert all(0 < one < before for before, one in itertools.pairwise(losses))


@pytest.mark.parametrize("scale", [30.0, 1000.0])
def test_a_given_loss_of_rows_that_are_told_apart_well_is_taken_over_all_rows(scale: float):
    """That of the first six is all but nothing, or nothing, as that of any three of them is."""

    def sharp(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        found = nn.functional.normalize(batch["inputs"] + 1e-6 * outputs["logits"].mean(), dim=-1)
        return nn.functional.cross_entropy(scale * found @ found.T, torch.arange(len(found)))

    inputs = torch.eye(WIDTH)[[0, 1, 2, 3, 4, 5, 0, 1, 2]]
    batch = {"inputs": inputs, "labels": torch.arange(9) % CLASSES}
    with torch.no_grad():
        model = prepared(Net)
        assert float(sharp(model(inputs[:6]), {"inputs": inputs[:6]})) < 1e-8
        expected = float(sharp(model(inputs), batch))
    with engine_for(prepared(Net), loss=sharp, microbatch_size=3) as engine:
        assert float(engine.step(batch).loss) == pytest.approx(expected, rel=1e-5)


class Centered(Net):
    """Compares rows before its loss does."""

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return super().forward(inputs - inputs.mean(dim=0), labels)


@pytest.mark.parametrize(("loss", "size"), [(contrastive, 4), (pairwise, 3)])
def test_a_given_loss_of_rows_that_are_compared_before_it_is_refused(loss: Call, size: int):
    settings = {"loss": loss, "microbatch_size": size}
    assert_refused(Centered, r"loss=.*microbatch_size=all rows", batch_of(12), **settings)


@pytest.mark.parametrize(
    ("loss", "size"),
    [(contrastive, 12), (pairwise, 4), (pairwise, 2), (adjacent, 6), (by_rows, 5)],
)
def test_a_given_loss_that_microbatches_leave_whole_is_that_of_the_batch(loss: Call, size: int):
    with torch.no_grad():
        expected = float(plain_loss(loss, prepared(Net), batch_of(12)))
    assert step_with(loss, size) == pytest.approx(expected, rel=1e-6)


def test_groups_of_three_stay_together_in_large_microbatches():
    def triples(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        logits = outputs["logits"][: len(outputs["logits"]) // 3 * 3, 0]
        return logits.unflatten(0, (-1, 3)).softmax(dim=1)[:, 0].mean()

    assert step_with(triples, 33, rows=66) > 0


def test_a_given_loss_that_draws_random_numbers_is_taken_as_it_is():
    assert step_with(noisy, 4) > 0


# ----------------------------------------------------------------------------------------------
# 9. Statistics of microbatches


@pytest.mark.parametrize(("size", "times"), [(2, 1), (ROWS, 0)])
def test_statistics_of_microbatches_are_said_once(size: int, times: int, caplog: Any):
    model = prepared(lambda: Net(lambda _: nn.Sequential(Layer(), nn.BatchNorm1d(WIDTH))))
    engine = engine_for(model, layers="layers", microbatch_size=size)
    with caplog.at_level(logging.WARNING, logger="l2l"), engine:
        engine.step(batch_of())
        engine.step(batch_of())
    assert sum("BatchNorm1d" in record.getMessage() for record in caplog.records) == times


# ----------------------------------------------------------------------------------------------
# 10. What single layers return


def build_llama(**settings: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        attn_implementation="eager",  # which others return no attentions
        **settings,
    )
    return transformers.LlamaForCausalLM(config)


COLLECTED = ("output_hidden_states", "output_attentions")
IDS = torch.randint(0, 99, (ROWS, 6), generator=torch.Generator().manual_seed(2))


def test_a_prediction_refuses_a_batch_that_asks_for_what_single_layers_return():
    with engine_for(prepared(build_llama)) as engine:
        for word in COLLECTED:
            with pytest.raises(ValueError, match=f"{word}.*config"):
                engine.predict({"input_ids": IDS, word: True})
        assert engine.predict({"input_ids": IDS, COLLECTED[0]: False}).logits.shape[0] == ROWS


@SIZES
def test_a_prediction_has_what_single_layers_return_where_the_config_asks_for_it(size: int):
    model, plain = (prepared(lambda: build_llama(**dict.fromkeys(COLLECTED, True))) for _ in "ab")
    with torch.no_grad():
        expected = plain.eval()(input_ids=IDS, use_cache=False)
    with engine_for(model, microbatch_size=size) as engine:
        found = engine.predict({"input_ids": IDS})
        without = engine.predict({"input_ids": IDS, **dict.fromkeys(COLLECTED, False)})
        model.config.output_attentions = False
        with pytest.raises(ValueError, match="other outputs of it are collected"):
            engine.predict({"input_ids": IDS})
        model.config.output_attentions = True
        again = engine.predict({"input_ids": IDS})
    assert "hidden_states" not in without
    torch.testing.assert_close(without.logits, expected.logits, rtol=1e-6, atol=1e-6)
    for mine in (found, again):
        assert len(mine.hidden_states) == 4
        assert len(mine.attentions) == 3
        tensors = [*mine.hidden_states, *mine.attentions, mine.logits]
        theirs = [*expected.hidden_states, *expected.attentions, expected.logits]
        tolerance = 1e-6 if size < ROWS else 0
        for one, other in zip(tensors, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


class LookingBack(nn.Module):
    """Its loss looks at hidden states and attentions that hooks collect."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.inner, self.first = build_llama(), first

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        words = dict.fromkeys(COLLECTED, True)
        found = self.inner(input_ids=input_ids, labels=labels, use_cache=False, **words)
        seen = torch.stack(found.hidden_states[self.first :]).square().mean()
        return {"loss": found.loss + seen + sum(one.std() for one in found.attentions)}


@SIZES
@pytest.mark.parametrize("first", [0, 1])
def test_a_loss_of_what_hooks_collect_is_that_of_the_whole_batch(first: int, size: int):
    """The first hidden state is made before the layers, and its gradient in two parts."""
    batch = {"input_ids": IDS, "labels": IDS}
    plain, model = (prepared(lambda: LookingBack(first)) for _ in "ab")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = train_plain(plain, [batch] * 2, optimizer=optimizer, rule="rows", size=ROWS)
    with engine_for(model, microbatch_size=size) as engine:
        losses = [float(engine.step(batch).loss) for _ in range(2)]
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, other in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], other, rtol=1e-6, atol=1e-6)
    if first and size == ROWS:
        assert_same_state(model, plain)


# ----------------------------------------------------------------------------------------------
# 11. Hooks and weights that are made of others


def hooked() -> nn.Module:
    model = Net()
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        layer.register_forward_hook(lambda module, args, output: output + module.a.bias)
        layer.a.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))
    return model


def normalized(norm: Call) -> nn.Module:
    model = Net()
    for layer in model.layers:
        norm(layer.a)
    return model


@SIZES
@pytest.mark.parametrize(
    "create",
    [
        hooked,
        lambda: normalized(nn.utils.parametrizations.weight_norm),
        lambda: normalized(nn.utils.parametrizations.spectral_norm),
        lambda: normalized(nn.utils.parametrizations.orthogonal),
    ],
    ids=["hooks", "weight norm", "spectral norm", "orthogonal"],
)
def test_hooks_and_parametrizations_train_exactly(create: Callable[[], nn.Module], size: int):
    assert_exact(create, size=size)


def test_hooks_for_gradients_of_parameters_are_refused():
    """They would not be called, and nothing else would see that."""

    def create() -> nn.Module:
        model = Net()
        model.layers[1].a.weight.register_hook(lambda gradient: gradient * 0.5)
        return model

    assert_refused(create, r"'layers\.1\.a\.weight' has a hook")
