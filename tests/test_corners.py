"""Corners where a step once went wrong, or might: each is compared with plain PyTorch, or named."""

import dataclasses
import gc
import threading

import inside
import pytest
import torch
from families import FAMILIES
from torch import Tensor, nn
from torch.nn import functional as F

import l2l
from l2l.device import CheckingDevice
from l2l.model.partition import Partition
from l2l.run.stash import pool_size

WIDTH, CLASSES, LENGTH = 8, 5, 6


class Small(nn.Module):
    """An embedding, layers given from outside, a head, and a loss over `targets`."""

    def __init__(self, *kinds: type[nn.Module], positions: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, WIDTH)
        self.positions = nn.Parameter(torch.randn(positions, WIDTH)) if positions else None
        self.layers = nn.ModuleList(kind() for kind in kinds or [Mixing] * 3)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor | None = None, targets: Tensor | None = None):
        hidden = self.embedding(ids)
        if self.positions is not None:
            hidden = hidden + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        wanted = labels if labels is not None else targets
        if wanted is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), wanted.flatten()), "logits": logits}


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


class InPlace(Mixing):
    """Writes into its input."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden += torch.tanh(self.linear(hidden.clone()))
        return hidden


class Expert(nn.Module):
    """Only rows that begin with a small number reach its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        chosen = hidden[:, 0, 0] > 0
        if not chosen.any():
            return hidden * 1.5
        return torch.where(chosen[:, None, None], hidden + self.linear(hidden), hidden * 1.5)


def batch_of(rows: int = 6, length: int = LENGTH, name: str = "labels") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows + length)
    ids = torch.randint(0, 11, (rows, length), generator=generator)
    return {"ids": ids, name: ids % CLASSES}


def make(model: nn.Module, **settings) -> l2l.Engine:
    settings = {"precision": "float32", "device": "cpu", "microbatch_size": 2, **settings}
    return inside.engine(model, **settings)


def plain_gradients(model: nn.Module, batch: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    rows = len(batch["ids"])
    for start in range(0, rows, size):
        part = {key: value[start : start + size] for key, value in batch.items()}
        loss = model(**part)["loss"] * (len(part["ids"]) / rows)
        if loss.requires_grad:
            loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def engine_gradients(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    recorder = l2l.RecordGradients()
    with make(model, optimizer=recorder) as engine:
        engine.step(batch)
    return recorder.gradients


def assert_same_gradients(build, batch: dict[str, Tensor]) -> None:
    found, expected = engine_gradients(build(), batch), plain_gradients(build(), batch, 2)
    assert set(found) == set(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_layers_that_write_into_their_input_train_exactly():
    assert_same_gradients(lambda: Small(InPlace, InPlace, Mixing), batch_of())


class Biased(Mixing):
    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        return super().forward(hidden) + bias


class HandsOver(Small):
    """Gives its layers a parameter as it is, as DeBERTa does: nothing has read it before."""

    def __init__(self) -> None:
        super().__init__(Biased, Biased, Biased)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, ids: Tensor, labels: Tensor):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden, self.bias)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def test_a_parameter_that_is_only_handed_to_the_layers_is_there_for_them():
    batch = batch_of()
    expected = plain_gradients(HandsOver(), batch, 2)
    found = engine_gradients(HandsOver(), batch)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-7), name


class Scaled(Mixing):
    def forward(self, hidden: Tensor, settings: dict[str, float]) -> Tensor:
        return hidden + settings["scale"] * torch.tanh(self.linear(hidden))


class ChangesItsDict(Small):
    """Gives all layers one dict, with other values in it."""

    def __init__(self) -> None:
        super().__init__(Scaled, Scaled, Scaled)

    def forward(self, ids: Tensor, labels: Tensor):
        hidden, settings = self.embedding(ids), {"scale": 0.0}
        for number, layer in enumerate(self.layers, start=1):
            settings["scale"] = 1 / number
            hidden = layer(hidden, settings)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def test_what_changes_in_a_dict_between_layers_is_seen():
    assert_same_gradients(ChangesItsDict, batch_of())


class LeavesBehind(Mixing):
    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.zeros(())

    def forward(self, hidden: Tensor) -> Tensor:
        self.extra = self.linear(hidden).square().mean()
        return super().forward(hidden)


class Appends(Mixing):
    def forward(self, hidden: Tensor, extra: list[Tensor]) -> Tensor:
        extra.append(self.linear(hidden).square().mean())
        return super().forward(hidden)


class ReadsWhatLayersLeave(Small):
    def __init__(self) -> None:
        super().__init__(*[LeavesBehind] * 3)

    def forward(self, ids: Tensor, labels: Tensor):
        outputs = super().forward(ids, labels)
        return {"loss": outputs["loss"] + sum(layer.extra for layer in self.layers)}


class GivesAList(Small):
    def __init__(self) -> None:
        super().__init__(*[Appends] * 3)

    def forward(self, ids: Tensor, labels: Tensor):
        hidden, extra = self.embedding(ids), []
        for layer in self.layers:
            hidden = layer(hidden, extra)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return {"loss": loss + sum(extra)}


class SetsAttributes(Small):
    def forward(self, ids: Tensor, labels: Tensor):
        for layer in self.layers:
            layer.mask = (ids > 4).float()
        return super().forward(ids, labels)


class ReturnsTwo(Mixing):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(hidden), self.linear(hidden).square().mean()


class AddsWhatLayersReturn(Small):
    def __init__(self) -> None:
        super().__init__(*[ReturnsTwo] * 3)

    def forward(self, ids: Tensor, labels: Tensor):
        hidden, total = self.embedding(ids), 0.0
        for layer in self.layers:
            hidden, extra = layer(hidden)
            total = total + extra
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return {"loss": loss + total}


class StacksWhatLayersReturn(AddsWhatLayersReturn):
    def forward(self, ids: Tensor, labels: Tensor):
        hidden, extras = self.embedding(ids), []
        for layer in self.layers:
            hidden, extra = layer(hidden)
            extras.append(extra)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return {"loss": loss + torch.stack(extras).sum()}


class TakesApart(Small):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Mixing(), Mixing()]) for _ in range(3))

    def forward(self, ids: Tensor, labels: Tensor):
        hidden = self.embedding(ids)
        for first, second in self.layers:
            hidden = second(first(hidden))
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


class WithoutGraph(Small):
    def forward(self, ids: Tensor, labels: Tensor):
        hidden = self.embedding(ids)
        with torch.no_grad():
            for layer in self.layers:
                hidden = layer(hidden)
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (ReadsWhatLayersLeave, "reads 'extra' of layer 0, which the layer writes"),
        (GivesAList, "layer 0 adds entries to its arguments"),
        (SetsAttributes, "sets 'mask' of layer 0"),
    ],
    ids=["left behind", "a list", "set"],
)
def test_what_goes_past_arguments_and_return_values_is_refused(build, said: str):
    with make(build()) as engine, pytest.raises(ValueError, match=said):
        engine.step(batch_of())


def assert_steps_of_the_whole_batch(build, batch: dict[str, Tensor], size: int) -> None:
    """Two steps of plain PyTorch: with all rows in one microbatch bit by bit."""
    plain, model, rows = build(), build(), len(batch["ids"])
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = plain(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    settings = {"optimizer": l2l.SGD(lr=0.1), "kernel": "readable", "microbatch_size": size}
    with make(model, **settings) as engine:
        found = [engine.step(batch).loss for _ in range(2)]
    assert found == losses if size == rows else found == pytest.approx(losses, rel=1e-6)
    for key, expected in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], expected, rtol=1e-6, atol=1e-6)
        assert size < rows or torch.equal(model.state_dict()[key], expected), key


SIZES = pytest.mark.parametrize("size", [6, 2, 4])  # one microbatch, three, and two unlike


@SIZES
def test_layers_that_run_without_a_graph_have_no_gradient(size: int):
    assert_steps_of_the_whole_batch(WithoutGraph, batch_of(), size)


@SIZES
def test_layers_that_are_lists_are_taken_apart(size: int):
    """Their parts are the layers."""
    assert_steps_of_the_whole_batch(TakesApart, batch_of(), size)


class TellsOfRows(Mixing):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(hidden), self.linear(hidden).square().mean(dim=(1, 2))


class AddsWhatLayersTellOfRows(AddsWhatLayersReturn):
    def __init__(self) -> None:
        Small.__init__(self, *[TellsOfRows] * 3)

    def forward(self, ids: Tensor, labels: Tensor):
        hidden, total = self.embedding(ids), 0.0
        for layer in self.layers:
            hidden, extra = layer(hidden)
            total = total + extra
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return {"loss": loss + total.mean()}


class StacksWhatLayersTellOfRows(AddsWhatLayersTellOfRows):
    def forward(self, ids: Tensor, labels: Tensor):
        hidden, extras = self.embedding(ids), []
        for layer in self.layers:
            hidden, extra = layer(hidden)
            extras.append(extra)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return {"loss": loss + torch.stack(extras).mean(dim=1).sum()}


@SIZES
@pytest.mark.parametrize("build", [AddsWhatLayersTellOfRows, StacksWhatLayersTellOfRows])
def test_what_layers_return_beside_the_hidden_state_may_be_of_rows(build, size: int):
    assert_steps_of_the_whole_batch(build, batch_of(), size)


class ReturnsAPenalty(Mixing):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(hidden), self.linear.weight.square().sum()


class AddsPenalties(AddsWhatLayersReturn):
    def __init__(self) -> None:
        Small.__init__(self, *[ReturnsAPenalty] * 3)


class StacksPenalties(StacksWhatLayersReturn):
    def __init__(self) -> None:
        Small.__init__(self, *[ReturnsAPenalty] * 3)


@SIZES
@pytest.mark.parametrize("build", [AddsPenalties, StacksPenalties])
def test_what_layers_return_beside_the_hidden_state_may_be_the_same_for_all_rows(build, size: int):
    assert_steps_of_the_whole_batch(build, batch_of(), size)


class CentersBefore(Small):
    """Rows have to do with each other: their mean is subtracted."""

    def forward(self, ids: Tensor, labels: Tensor):
        hidden = self.center(self.embedding(ids))
        for layer in self.layers:
            hidden = self.center_between(layer(hidden))
        return {"loss": F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}

    def center(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(dim=0, keepdim=True)

    def center_between(self, hidden: Tensor) -> Tensor:
        return hidden


class CentersBetween(CentersBefore):
    def center(self, hidden: Tensor) -> Tensor:
        return hidden

    def center_between(self, hidden: Tensor) -> Tensor:
        return hidden - hidden.mean(dim=0, keepdim=True)


@pytest.mark.parametrize("build", [AddsWhatLayersReturn, StacksWhatLayersReturn])
def test_what_layers_return_of_all_rows_together_takes_one_microbatch(build):
    """Every microbatch has a mean of its own, and that of the batch can be another."""
    assert_steps_of_the_whole_batch(build, batch_of(), 6)
    with make(build(), microbatch_size=2) as engine:
        with pytest.raises(ValueError, match=r"3 microbatches .* no rows and depends on them"):
            engine.step(batch_of())
        with pytest.raises(ValueError, match="no rows and depends on them"):
            engine.evaluate(batch_of())


@pytest.mark.parametrize("build", [CentersBefore, CentersBetween])
def test_rows_that_depend_on_others_before_the_loss_take_one_microbatch(build):
    assert_steps_of_the_whole_batch(build, batch_of(), 6)
    with make(build(), microbatch_size=2) as engine:
        with pytest.raises(ValueError, match=r"3 microbatches .* depends on the other rows"):
            engine.step(batch_of())
        with pytest.raises(ValueError, match="depends on the other rows"):
            engine.evaluate(batch_of())


class IgnoresZero(Small):
    def forward(self, ids: Tensor, labels: Tensor):
        logits = self.head(self.layers[2](self.layers[1](self.layers[0](self.embedding(ids)))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)}


@SIZES
def test_a_loss_that_ignores_another_number_is_that_of_the_whole_batch(size: int):
    assert_steps_of_the_whole_batch(IgnoresZero, batch_of(), size)


class TwoHeads(Small):
    """A little of the loss is a mean over something else."""

    def forward(self, ids: Tensor, labels: Tensor, kinds: Tensor):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss + 0.01 * F.cross_entropy(logits.mean(1), kinds)}


@SIZES
def test_a_loss_that_is_a_little_of_something_else_is_not_miscounted(size: int):
    batch = batch_of() | {"kinds": torch.arange(6) % CLASSES}
    batch["labels"][:2, 1:] = -100
    assert_steps_of_the_whole_batch(TwoHeads, batch, size)


def test_microbatches_of_different_lengths_have_no_loss_of_all_rows():
    """So a loss that is no mean over rows, or labels, cannot be taken of them."""
    batches = [batch_of(2) | {"kinds": torch.arange(2)}]
    batches.append(batch_of(2, length=4) | {"kinds": torch.arange(2)})
    with make(TwoHeads()) as engine, pytest.raises(ValueError, match="cannot be combined into"):
        engine.step(batches)


def test_a_model_of_fixed_length_is_rehearsed_at_that_length():
    assert_same_gradients(lambda: Small(positions=40), batch_of(length=40))


def test_a_trained_expert_without_tokens_at_the_bottom_is_left_out():
    def build() -> nn.Module:
        model = Small(Expert, Mixing, Mixing)
        model.requires_grad_(False)
        model.embedding.weight[:, 0] = torch.where(torch.arange(11) < 6, 1.0, -1.0)
        model.layers[0].requires_grad_(True)
        return model

    batch = batch_of(rows=8)
    chosen = build().embedding(batch["ids"])[:, 0, 0] > 0
    order = torch.argsort(chosen.int(), stable=True)  # microbatches without any come first
    assert 2 <= int((~chosen).sum()) <= 6
    assert_same_gradients(build, {key: value[order] for key, value in batch.items()})


def test_modules_in_evaluation_mode_stay_in_it():
    """Layers of one class, of which one has its statistics frozen."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(LENGTH)

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + self.norm(hidden)

    def build() -> nn.Module:
        model = Small(Normed, Normed, Normed).train()
        model.layers[0].eval()
        return model

    batch, model, plain = batch_of(), build(), build()
    with make(model, optimizer=l2l.SGD(lr=0.1), kernel="readable") as engine:
        engine.step(batch)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, foreach=False)
    plain_gradients(plain, batch, 2)
    optimizer.step()
    for key, expected in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], expected), key
    assert int(model.layers[0].norm.num_batches_tracked) == 0
    assert int(model.layers[1].norm.num_batches_tracked) == 3


@SIZES
def test_ignored_targets_of_another_name_are_not_miscounted(size: int):
    batch = batch_of(name="targets")
    batch["targets"][4:, 1:] = -100
    assert_steps_of_the_whole_batch(Small, batch, size)


def test_targets_of_another_name_that_are_ignored_in_later_batches_are_not_miscounted():
    """The first batch has shown a mean over rows, and these rows do not show the contrary."""
    batch = batch_of(name="targets")
    batch["targets"][4:, 1:] = -100
    with make(Small()) as engine:
        assert not engine.step(batch_of(name="targets")).skipped
        with pytest.raises(ValueError, match="'targets' contains -100"):
            engine.step(batch)
        assert not engine.step(batch_of(name="targets")).skipped


def test_a_prediction_has_the_loss_of_the_whole_batch():
    batch = batch_of()
    batch["labels"][:2, 1:] = -100
    with make(Small()) as engine:
        found = engine.predict(batch)
        assert float(found["loss"]) == pytest.approx(engine.evaluate(batch))
        assert found["logits"].shape == (6, LENGTH, CLASSES)
        assert engine.predict({"ids": batch["ids"]})["logits"].shape == (6, LENGTH, CLASSES)


@dataclasses.dataclass
class Unregistered:
    logits: Tensor


class ReturnsAnObject(Small):
    def forward(self, ids: Tensor) -> Unregistered:
        return Unregistered(super().forward(ids)["logits"])


def test_outputs_that_cannot_be_joined_are_refused_and_not_cut():
    ids = batch_of()["ids"]
    with make(ReturnsAnObject()) as engine, pytest.raises(ValueError, match="cannot be joined"):
        engine.predict({"ids": ids})
    with make(Small()) as engine, pytest.raises(ValueError, match="different lengths"):
        engine.predict([{"ids": ids}, {"ids": ids[:, :3]}])


@pytest.mark.parametrize(
    "settings",
    [{}, {"clip_norm": 1.0}, {"optimizer": l2l.Adafactor()}],
    ids=["eager", "clipped", "on the device"],
)
def test_a_batch_of_total_weight_zero_is_skipped(settings: dict):
    def loss(outputs, batch):
        kept = (batch["labels"] != 0).float()
        losses = F.cross_entropy(
            outputs["logits"].flatten(0, 1), batch["labels"].flatten(), reduction="none"
        )
        return (losses * kept.flatten()).sum(), kept.sum()

    model = Small()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    batch = batch_of()
    with make(model, loss=loss, **settings) as engine:
        assert engine.step({**batch, "labels": torch.zeros_like(batch["labels"])}).skipped
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in before)
    with make(model, loss=loss, **settings) as engine:
        assert not engine.step(batch).skipped
    assert any(not torch.equal(model.state_dict()[key], before[key]) for key in before)


def test_momentum_may_differ_by_group():
    def groups(name: str, parameter: nn.Parameter) -> dict[str, float]:
        return {"momentum": 0.0} if parameter.dim() < 2 else {}

    results = []
    for kernel in ("native", "readable"):
        model = Small()
        optimizer = l2l.SGD(lr=0.1, momentum=0.9, groups=groups)
        with make(model, optimizer=optimizer, kernel=kernel) as engine:
            for _ in range(3):
                engine.step(batch_of())
        results.append(model.state_dict())
    for key, expected in results[1].items():
        assert torch.allclose(results[0][key], expected, atol=1e-6), key


def test_a_setting_that_needs_new_state_is_refused():
    with make(Small(), optimizer=l2l.SGD(lr=0.1)) as engine:
        engine.step(batch_of())
        engine.optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(ValueError, match="momentum_buffer"):
            engine.step(batch_of())
        engine.optimizer.param_groups[0]["momentum"] = 0.0
        assert not engine.step(batch_of()).skipped


class Refusing:
    """A device that runs out of host memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.left = after
        self.original = CheckingDevice.host_empty
        monkeypatch.setattr(CheckingDevice, "host_empty", self)

    def __get__(self, device, kind=None):
        def host_empty(nbytes: int, *, registered: bool) -> Tensor:
            self.left -= 1
            if self.left < 0:
                raise MemoryError("planted")
            return self.original(device, nbytes, registered=registered)

        return host_empty


@pytest.mark.parametrize("after", [0, 3, 5, 7])
def test_a_model_is_whole_again_when_its_engine_cannot_be_made(monkeypatch, after: int):
    model = Small()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    Refusing(monkeypatch, after)
    with pytest.raises(MemoryError, match="planted"):
        make(model)
    assert all(torch.equal(model.state_dict()[key], before[key]) for key in before)


def test_a_model_in_another_engine_is_refused():
    model = Small()
    with make(model), pytest.raises(ValueError, match="another engine"):
        make(model)
    make(model).close()


def test_a_scheduler_on_the_torch_optimizer_is_refused():
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with pytest.raises(ValueError, match=r"engine\.optimizer"):
        make(model, optimizer=optimizer)


def test_frozen_parameters_that_are_rounded_are_named():
    model = Small()
    model.head.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"2 frozen parameters, the first 'head\.weight'"):
        make(model, precision="bfloat16").close()


def test_batches_of_many_lengths_share_the_memory_of_the_stash():
    with make(Small(*[Mixing] * 12)) as engine:
        for length in (96, 88, 80, 90, 72, 64, 95, 33, 17, 60):
            engine.step(batch_of(rows=12, length=length))
        largest = inside.arena(engine).bytes_by_name["stash"]
        for length in (96, 50, 88, 20):
            engine.step(batch_of(rows=12, length=length))
        assert inside.arena(engine).bytes_by_name["stash"] == largest
        engine.step(batch_of(rows=12, length=96))
        assert inside.arena(engine).bytes_by_name["stash"] == largest


def test_sizes_in_the_pool_waste_little():
    for nbytes in (1, 4096, 5000, 100_000, 3 << 20, (3 << 20) + 1, 50 << 20):
        assert nbytes <= pool_size(nbytes) <= max(2 * 4096, 1.14 * nbytes)


def test_a_kept_report_does_not_keep_the_batch():
    with make(Small()) as engine:
        reports = [engine.step(batch_of()) for _ in range(3)]
        assert all(not report._step.microbatches for report in reports)
        assert all(not report._step.calls for report in reports)
        assert reports[0].loss > 0


def test_a_dropped_engine_leaves_no_thread_behind():
    gc.collect()
    before = threading.active_count()
    for _ in range(4):
        engine = make(Small())
        engine.step(batch_of())
        del engine
        with pytest.warns(UserWarning, match=r"dropped without engine\.close\(\)"):
            gc.collect()
    for _ in range(100):  # a thread may still be busy with its last update
        gc.collect()
        if threading.active_count() <= before:
            break
        threading.Event().wait(0.05)
    assert threading.active_count() <= before


def test_a_trace_ends_with_its_block_even_after_an_error():
    with make(Small()) as engine:
        with pytest.raises(OSError, match="planted"), engine.trace():
            raise OSError("planted")
        with engine.trace() as trace:
            engine.step(batch_of())
        before = len(trace.spans)
        engine.step(batch_of())
        assert len(trace.spans) == before > 0
        assert {"compute", "fetch", "drain", "update"} <= {span.lane for span in trace.spans}
        assert "compute" in trace.summary()


def test_a_trace_is_written_for_a_viewer(tmp_path):
    import json

    family = FAMILIES["sequential"]
    with make(family.build(), layers=family.layers) as engine:
        with engine.trace() as trace:
            engine.step(family.batch(4))
        trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event["name"].startswith("backward L0 m0") for event in events)
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


class Wrapper(nn.Module):
    """Hands everything on, as adapters do; says nothing of a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = FAMILIES["llama_untied"].build()
        self.config = self.inner.config

    def forward(self, input_ids: Tensor, **others):
        return self.inner(input_ids=input_ids, **others)


def test_a_wrapped_model_makes_no_cache_that_both_passes_append_to():
    batch = FAMILIES["llama_untied"].batch(6)
    losses = []
    for build in (FAMILIES["llama_untied"].build, Wrapper):
        model = build()
        assert model.config.use_cache
        with make(model) as engine:
            losses.append([engine.step(batch).loss for _ in range(2)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next", "qwen3_moe"])
def test_layers_of_one_kind_have_one_structure(name: str) -> None:
    """So that each kind is compiled once, although layers know their number and own functions."""
    partition = Partition(FAMILIES[name].build(), layers=None)
    first, second, third = partition.structures
    assert first == third != second
    assert partition.templates[0].module is partition.templates[2].module
    template = partition.templates[2]
    numbers = [(module, word) for module, word, value in template.own if value == 2]
    assert numbers == [(module, word) for module, word, _ in template.own]
    assert name == "qwen3_moe" or "layer_idx" in [word for _, word in numbers]
    for expected, one in enumerate(partition.templates):
        with one.tensors({owner: torch.empty(()) for owner in one.names.values()}):
            found = {module.__dict__[word] for module, word in numbers}
            assert expected == 1 or found <= {expected}
    assert all(module.__dict__[word] == 0 for module, word in numbers)
