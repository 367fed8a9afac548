"""Loops as people write them: each is the same loop in plain PyTorch, or refused by name."""

import logging
import warnings
from typing import Any

import inside
import pytest
import torch
import torch.nn.functional as F
from families import build_gpt2, build_llama
from test_loop import (
    MODELS,
    ROWS,
    Loop,
    Plain,
    assert_same,
    batches,
    compare,
    engine_of,
    in_an_engine,
    in_plain_pytorch,
    loss_of,
    vectors,
)
from torch import Tensor, nn

import l2l


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


# --------------------------------------------------------------------------------------------------
# Several backwards through one call


def several(name: str, how: str) -> Loop:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        (batch,) = batches(name, 1)
        outputs = model(**batch)
        loss = outputs.loss
        if how == "of the loss":
            (loss / 2).backward(retain_graph=True)
            (loss / 4).backward(retain_graph=True)
        elif how == "of outputs":
            other = outputs.logits.square().mean()
            other.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            loss = loss + other
        else:  # outputs that nobody has asked for before the first
            loss.backward(retain_graph=True)
            outputs.logits.square().mean().backward(retain_graph=True)
            with torch.no_grad():
                model(**batch)
            model(**{k: v.flip(0) for k, v in batch.items()}).loss.backward()
        (loss * 2).backward()
        return [loss]

    return loop


@pytest.mark.parametrize("how", ["of the loss", "of outputs", "in between"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {}),
        ("gpt2", {"embedding": "host"}),  # rows are added to what the head has left
        ("t5", {}),
        ("llama", {"microbatch_size": 2}),
    ],
    ids=["llama", "tied, rows on the host", "two stacks", "microbatches"],
)
def test_a_graph_that_is_retained_takes_further_backwards(
    name: str, settings: dict[str, Any], how: str
) -> None:
    compare(name, several(name, how), tolerance=1e-5, **settings)


def test_a_router_loss_over_all_rows_takes_further_backwards() -> None:
    compare("mixtral", several("mixtral", "of the loss"), tolerance=1e-5, microbatch_size=2)


def test_what_was_retained_goes_with_the_graph() -> None:
    model = build_llama().train()
    (batch,) = batches("llama", 1)
    with engine_of(model) as engine:
        taken = []
        for _ in range(4):  # the graph before is there until this one is
            loss = model(**batch).loss
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            taken.append(sum(inside.arena(engine).bytes_by_name.values()))
        assert len(set(taken[1:])) == 1
        loss.backward()
        with pytest.raises(RuntimeError, match="retain_graph=True to all backwards but the last"):
            loss.backward()


# --------------------------------------------------------------------------------------------------
# Modes


class Normalized(Plain):
    """Statistics of rows are kept before the layers, in them, and after them."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer[2] = nn.BatchNorm1d(16)
        self.before, self.after = nn.BatchNorm1d(16), nn.BatchNorm1d(4)

    def forward(self, inputs: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.before(self.entry(inputs))
        for layer in self.layers:
            hidden = layer(hidden)
        return self.after(self.head(hidden) * scale)


def build_normalized() -> nn.Module:
    torch.manual_seed(0)
    return Normalized()


def test_a_model_learns_in_either_mode_and_shows_its_buffers() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        said = []
        for seed, training in enumerate([True, True, False, True, False]):
            model.train(training)
            outputs = model(**vectors(ROWS, seed))
            said += [one.clone() for one in model.buffers()]
            loss = outputs.pow(3).mean()
            loss.backward(retain_graph=True)
            outputs.sin().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            said.append(loss)
        return said

    found = in_an_engine(build_normalized, loop)
    assert_same(found, in_plain_pytorch(build_normalized, loop), tolerance=1e-5)


def test_without_dropout_gradients_come_in_evaluation_mode() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        model.eval()
        return [step(model, optimizer, batch) for batch in batches("gpt2", 2)]

    def build() -> nn.Module:
        return build_gpt2(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)

    assert_same(in_an_engine(build, loop), in_plain_pytorch(build, loop))


def test_a_compiled_layer_is_for_the_mode_that_it_was_compiled_in() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        said = []
        for training, batch in zip([True, True, False, True], batches("llama", 4), strict=True):
            model.train(training)
            said.append(step(model, optimizer, batch))
        return said

    compare("llama", loop, tolerance=1e-4, compile="eager")


def test_modes_of_single_modules_are_refused_and_new_hooks_are_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build_llama().train()
    (batch,) = batches("llama", 1)
    with engine_of(model):
        model(**batch)
        model.get_submodule("model.layers.1").eval()
        with pytest.raises(ValueError, match=r"'model.layers.1' is in evaluation mode now"):
            model(**batch)
        model.train()
        called: list[Any] = []
        layer = model.get_submodule("model.layers.1.mlp")
        layer.register_forward_hook(lambda *given: called.append(given))
        with caplog.at_level(logging.WARNING, logger="l2l"):
            model(**batch)
            model(**batch)
        assert caplog.text.count("hooks of 'model.layers.1.mlp' were added") == 1
        assert not called


def test_modes_are_those_of_the_layers_that_are_left() -> None:
    model = build_llama().train()
    (batch,) = batches("llama", 1)
    with engine_of(model) as engine:
        step(model, engine.optimizer, batch)
        engine.layers.remove(1)
        for training in (False, True):
            model.train(training)
            step(model, engine.optimizer, batch)


# --------------------------------------------------------------------------------------------------
# Outputs


class Scored(Plain):
    """Takes its own loss, of targets under a name of their own."""

    def forward(self, inputs: Tensor, wanted: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        outputs = super().forward(inputs)
        return {"loss": F.mse_loss(outputs, wanted), "outputs": outputs}


class Paired(Scored):
    def forward(self, inputs: Tensor, wanted: Tensor) -> Any:
        found = super().forward(inputs, wanted)
        return found["outputs"], found["loss"]


@pytest.mark.parametrize("size", [ROWS, 3])
def test_a_loss_without_labels_is_that_of_all_rows(size: int) -> None:
    def build(kind: type[nn.Module] = Scored) -> nn.Module:
        torch.manual_seed(0)
        return kind()

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        said = []
        for seed in range(3):
            outputs = model(**vectors(ROWS, seed), wanted=torch.full((ROWS, 4), float(seed)))
            loss = outputs[1] if isinstance(outputs, tuple) else outputs["loss"]
            loss.backward()
            said.append(loss)
        return said

    found = in_an_engine(build, loop, microbatch_size=size)
    assert_same(found, in_plain_pytorch(build, loop), tolerance=1e-5)
    if size == ROWS:
        assert_same(in_an_engine(lambda: build(Paired), loop), in_plain_pytorch(build, loop))
        return
    with pytest.raises(ValueError, match=r"a number, as output 1, .* those of 2 microbatches"):
        in_an_engine(lambda: build(Paired), loop, microbatch_size=size)


# --------------------------------------------------------------------------------------------------
# Around the loop


def test_a_compiler_leaves_the_model_alone() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        compiled: Any = torch.compile(model, backend="eager")
        return [step(compiled, optimizer, batch) for batch in batches("llama", 2)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare("llama", loop)


def test_closures_batches_of_other_sizes_and_gradients_that_are_written_to() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        said = []
        for (rows, length), batch in zip(
            [(4, 12), (1, 5), (3, 9)], batches("llama", 3), strict=True
        ):
            part = {name: one[:rows, :length] for name, one in batch.items()}

            def close(part: Any = part) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, part)
                loss.backward()
                for one in model.parameters():
                    assert one.grad is not None
                    one.grad.data.mul_(0.5)
                nn.utils.clip_grad_value_(model.parameters(), 1e-2)
                return loss

            said.append(optimizer.step(close).detach())  # type: ignore[arg-type]
        return said

    compare("llama", loop)


def test_a_penalty_on_weights_is_added_by_hand() -> None:
    model = build_llama().train()
    (batch,) = batches("llama", 1)
    with engine_of(model):
        penalty = sum(one.square().sum() for one in model.parameters())
        with pytest.raises(RuntimeError, match=r"parameter.grad.add_\(...\), or are weight_decay"):
            (model(**batch).loss + penalty).backward()


def test_two_models_of_one_budget_learn_from_one_loss() -> None:
    def losses(first: nn.Module, second: nn.Module, *optimizers: Any) -> list[Tensor]:
        said = []
        for batch in batches("llama", 2):
            one, other = first(**batch), second(**batch)
            mine, theirs = one.logits.log_softmax(-1), other.logits.log_softmax(-1)
            distance = F.kl_div(mine, theirs, log_target=True, reduction="batchmean")
            loss = one.loss + other.loss + distance
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            said.append(loss.detach())
        return said

    plain = [MODELS[name][0]().train() for name in ("llama", "gpt2")]
    expected = losses(*plain, *(torch.optim.SGD(one.parameters(), lr=0.1) for one in plain))
    models = [MODELS[name][0]().train() for name in ("llama", "gpt2")]
    settings: dict[str, Any] = {"optimizer": l2l.SGD(lr=0.1)}
    with (
        engine_of(models[0], **settings) as first,
        engine_of(models[1], device_memory=first, **settings) as second,
    ):
        found = losses(*models, first.optimizer, second.optimizer)
    assert [float(one) for one in found] == pytest.approx([float(one) for one in expected])
