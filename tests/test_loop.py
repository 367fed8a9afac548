"""A loop of the user's own over the model itself is the same loop in plain PyTorch, bit by bit.

Every loop here is written once, for a model and an optimizer, and run twice: with an untouched
model and a torch optimizer, and with a model whose weights are in an engine. In float32 on the CPU
losses, gradients and weights are the same bits where one microbatch holds all rows; with several
they are close, as with gradient accumulation.
"""

import contextlib
import copy
import gc
import inspect
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
import torch.nn.functional as F
from families import (
    VOCABULARY,
    Batch,
    build_bert,
    build_gpt2,
    build_llama,
    build_mixtral,
    causal_batch,
    classification_batch,
    translation_batch,
)
from torch import Tensor, nn

import l2l
from l2l.model import Late
from l2l.run.layer_passes import LayerPasses

ROWS = 4
RATE = 1e-2
Loop = Callable[[nn.Module, torch.optim.Optimizer], list[Tensor]]
Result = tuple[list[Tensor], dict[str, Tensor | None], dict[str, Tensor]]


class Plain(nn.Module):
    """A model that knows nothing of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(8, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.0)) for _ in range(3)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, inputs: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.entry(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden) * scale


def build_plain() -> nn.Module:
    torch.manual_seed(0)
    return Plain()


def build_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def build_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(build_llama(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def vectors(rows: int, seed: int = 0) -> Batch:
    return {"inputs": torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Batch]]] = {
    "gpt2": (build_gpt2, causal_batch),
    "llama": (build_llama, causal_batch),
    "bert": (build_bert, classification_batch),
    "t5": (build_t5, translation_batch),
    "mixtral": (build_mixtral, causal_batch),
    "lora": (build_lora, causal_batch),
    "plain": (build_plain, vectors),
}


def engine_of(model: nn.Module, **settings: Any) -> l2l.Engine:
    defaults = {
        "optimizer": l2l.AdamW(lr=RATE),
        "precision": "float32",
        "device": "cpu",
        "kernel": "readable",
        "microbatch_size": ROWS,
        "autograd": True,
        "prove": False,
    }
    return inside.engine(model, **{**defaults, **settings})


def in_plain_pytorch(build: Callable[[], nn.Module], loop: Loop) -> Result:
    model = build().train()
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, foreach=False)
    return result(model, loop(model, optimizer))


def in_an_engine(build: Callable[[], nn.Module], loop: Loop, **settings: Any) -> Result:
    model = build().train()
    with engine_of(model, **settings) as engine:
        said = loop(model, engine.optimizer)
        found = result(model, said)
    assert {k: v.tolist() for k, v in model.state_dict().items()} == {
        k: v.tolist() for k, v in found[2].items()
    }
    return found


def result(model: nn.Module, said: list[Tensor]) -> Result:
    gradients = {
        name: None if one.grad is None else one.grad.clone()
        for name, one in model.named_parameters()
    }
    weights = {name: one.detach().clone() for name, one in model.state_dict().items()}
    return [one.detach().clone() for one in said], gradients, weights


def assert_same(found: Result, expected: Result, *, tolerance: float = 0.0) -> None:
    assert len(found[0]) == len(expected[0])
    pairs = [(f"said {i}", *pair) for i, pair in enumerate(zip(found[0], expected[0], strict=True))]
    for mine, theirs in ((found[1], expected[1]), (found[2], expected[2])):
        assert mine.keys() == theirs.keys()
        pairs += [(name, mine[name], theirs[name]) for name in mine]
    for name, one, other in pairs:
        assert (one is None) == (other is None), name
        if one is None or other is None:
            continue
        assert one.dtype is other.dtype, name
        if tolerance:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=name)
        else:
            assert torch.equal(one.isnan(), other.isnan()), name
            assert torch.equal(one.nan_to_num(), other.nan_to_num()), name


def compare(
    name: str, loop: Loop, *, tolerance: float = 0.0, prepare: Any = None, **settings: Any
) -> Result:
    build = MODELS[name][0]
    found, expected = in_an_engine(build, loop, **settings), in_plain_pytorch(build, loop)
    assert_same(found, expected, tolerance=tolerance)
    return found


def batches(name: str, number: int) -> Iterator[Batch]:
    return (MODELS[name][1](ROWS, seed) for seed in range(number))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The model's own, or, of one that has none, something made of its outputs."""
    outputs = model(**batch)
    return outputs.pow(2).mean() if isinstance(outputs, Tensor) else outputs.loss


# --------------------------------------------------------------------------------------------------
# The loops


def ordinary(name: str, *, num_backwards: int = 1) -> Loop:
    """The loop that everybody writes, with accumulation."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        said = []
        for number, batch in enumerate(batches(name, 2 * num_backwards)):
            loss = loss_of(model, batch)
            (loss / num_backwards).backward()
            said.append(loss)
            if number % num_backwards == num_backwards - 1:
                said.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                if number < 2 * num_backwards - 1:
                    optimizer.zero_grad()
        return said

    return loop


@pytest.mark.parametrize("name", MODELS)
def test_an_ordinary_loop_gives_the_bits_of_plain_pytorch(name: str) -> None:
    # In T5 a table is read before both stacks and after them: its gradient is a sum of three.
    compare(name, ordinary(name), tolerance=1e-5 if name == "t5" else 0.0)


@pytest.mark.parametrize("name", MODELS)
def test_several_microbatches_give_the_same_as_all_rows(name: str) -> None:
    # Adam divides by roots of squares: one step shows the gradients, which are close.
    def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        loss = loss_of(model, next(batches(name, 1)))
        loss.backward()
        return [loss]

    compare(name, one_step, tolerance=1e-6, microbatch_size=2)


@pytest.mark.parametrize(
    ("name", "embedding"), [("gpt2", "host"), ("gpt2", "device"), ("llama", "host")]
)
def test_gradients_add_up_over_backwards(name: str, embedding: str) -> None:
    compare(name, ordinary(name, num_backwards=2), embedding=embedding)

    def thirds(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        for batch in batches(name, 3):  # a third is no power of two: rounded elsewhere
            (loss_of(model, batch) / 3).backward()
        return []

    compare(name, thirds, embedding=embedding, tolerance=1e-6)


def preferences(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """A loss over pairs of rows, with a reference in between, and two forwards before backward."""
    said = []
    for chosen, rejected in zip(batches("llama", 2), batches("llama", 4), strict=False):
        first = model(input_ids=chosen["input_ids"]).logits
        with torch.no_grad():
            reference = model(input_ids=chosen["input_ids"]).logits
        second = model(input_ids=rejected["input_ids"].flip(0)).logits
        margin = (first - reference).log_softmax(-1)[..., 1].sum(-1)
        margin = margin - second.log_softmax(-1)[..., 2].sum(-1)
        loss = -F.logsigmoid(0.1 * (margin[0::2] - margin[1::2])).mean()
        loss.backward()
        said += [loss, reference]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return said


def test_a_loss_over_pairs_with_a_reference_in_between() -> None:
    compare("llama", preferences, tolerance=1e-6)
    compare("lora", preferences, tolerance=1e-6)


def test_two_forwards_then_two_backwards() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        first, second, third = (model(**batch).loss for batch in batches("llama", 3))
        del third  # and one without a backward
        second.backward()
        (4 * first).backward()
        optimizer.step()
        return [first, second]

    compare("llama", loop, embedding="device")
    compare("llama", loop, embedding="host")


def test_a_loss_of_ones_own_beside_the_models() -> None:
    """Logits are made when they are asked for; both losses have gradients."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        said = []
        for batch in batches("llama", 2):
            outputs = model(**batch)
            with torch.no_grad():
                entropy = torch.distributions.Categorical(logits=outputs.logits).entropy().mean()
            own = F.kl_div(
                outputs["logits"].log_softmax(-1),
                torch.full_like(outputs[1], 0.01),
                reduction="batchmean",
            )
            (outputs.loss + own).backward()
            optimizer.step()
            said += [outputs.loss, entropy, own]
        return said

    compare("llama", loop)
    compare("llama", loop, microbatch_size=3, tolerance=1e-5)


def test_only_the_loss_makes_no_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("outputs are made")

    monkeypatch.setattr("l2l.run.output_passes.OutputPasses.forward", refuse)
    compare("llama", ordinary("llama"))
    model = build_llama().train()
    with engine_of(model):
        outputs = model(**next(batches("llama", 1)))
        assert isinstance(outputs.logits, Late)
        assert outputs.logits.dtype is torch.float32
        with pytest.raises(AssertionError, match="outputs are made"):
            outputs.logits.float().sum()


def test_scalers_and_schedulers_drive_it() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        said = []
        for number, batch in enumerate(batches("gpt2", 4)):
            loss = model(**batch).loss * (torch.inf if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            said.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            before = model.get_parameter("transformer.ln_f.weight").detach().clone()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            after = model.get_parameter("transformer.ln_f.weight").detach()
            assert torch.equal(before, after) == (number == 1), "a bad step is left out"
            said += [torch.tensor(scaler.get_scale()), torch.tensor(scheduler.get_last_lr())]
            optimizer.zero_grad()
        return said

    with warnings.catch_warnings():  # torch warns where the first step is left out
        warnings.simplefilter("ignore")
        compare("gpt2", loop)


def test_what_a_loop_does_to_gradients_is_what_the_optimizer_uses() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        names = dict(model.named_parameters())
        seen: list[Tensor] = []
        names["model.layers.0.mlp.up_proj.weight"].register_hook(lambda one: one * 2)
        names["model.layers.1.mlp.up_proj.weight"].register_post_accumulate_grad_hook(
            lambda one: seen.append(one.grad.clone())
        )
        kept = []
        for batch in batches("llama", 3):
            model(**batch).loss.backward()
            model(**batch).loss.backward()
            generator = torch.Generator().manual_seed(1)
            for one in model.parameters():
                one.grad += torch.randn(one.shape, generator=generator) * 1e-3
            names["lm_head.weight"].grad = names["lm_head.weight"].grad.clone().clamp(-0.01, 0.01)
            names["model.layers.1.input_layernorm.weight"].grad = None
            optimizer.step()
            kept.append(names["model.norm.weight"].grad)  # it stays what it is
            optimizer.zero_grad()
        return [*seen, *kept]

    compare("llama", loop)


def test_updates_are_left_to_the_next_forward_and_gradients_do_not_change_until_then() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        said = []
        norm = model.get_parameter("model.norm.weight")
        for number, batch in enumerate(batches("llama", 5)):
            loss = model(**batch).loss
            loss.backward()
            held = norm.grad if number == 2 else None  # by somebody who writes to it later
            optimizer.step()
            if held is not None:
                held.zero_()
            if number == 0:
                said.append(norm.grad.clone())  # it is there, as it was
            elif number == 1:
                model.zero_grad(set_to_none=False)
            elif number == 3:
                continue  # the next gradient is added to it
            else:
                model.zero_grad()
            said.append(loss)
        return said

    compare("llama", loop)
    model = build_llama().train()
    with engine_of(model) as engine:
        model(**next(batches("llama", 1))).loss.backward()
        engine.optimizer.step()
        waiting = inside.server(engine).waiting
        assert len(waiting) == len(inside.server(engine).units)
        assert all(one.grad is not None for one in model.parameters())
        engine.optimizer.zero_grad()
        assert all(one.grad is None for one in model.parameters())
        assert waiting, "nobody has needed the weights"
        model.get_parameter("model.norm.weight").sum()
        assert not waiting


def test_rows_of_a_table_have_a_dense_gradient() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        said = []
        for batch in batches("llama", 3):
            model(**batch).loss.backward()
            said.append(model.get_parameter("model.embed_tokens.weight").grad.clone())
            optimizer.step()
            optimizer.zero_grad()
        return said

    said, _, _ = compare("llama", loop, embedding="host")
    assert all(bool((one == 0).all(-1).any()) for one in said), "some rows are not looked up"


def test_a_router_loss_is_taken_over_all_rows() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        loss = model(**next(batches("mixtral", 1))).loss
        (loss / 2).backward()
        return [loss]

    compare("mixtral", loop, microbatch_size=2, tolerance=1e-6)


# --------------------------------------------------------------------------------------------------
# What the model is meanwhile


def test_the_model_is_what_it_was() -> None:
    model, untouched = build_llama().train(), build_llama().train()
    batch = next(batches("llama", 1))
    with engine_of(model) as engine:
        assert type(model) is type(untouched)
        assert inspect.signature(model.forward) == inspect.signature(untouched.forward)
        assert type(model(**batch)) is type(untouched(**batch))
        copied = copy.deepcopy(model)
        assert torch.equal(copied(**batch).loss, untouched(**batch).loss), "it runs by itself"
        assert copied.lm_head.weight.grad is None
        again = pickle.loads(pickle.dumps(model))
        assert torch.equal(again(**batch).loss, untouched(**batch).loss)
        model.eval()
        assert model(**batch).loss.requires_grad
        with torch.no_grad():
            outputs = model(**batch)
        assert not outputs.loss.requires_grad
        assert torch.equal(outputs.logits, untouched.eval()(**batch).logits)
        ids = batch["input_ids"][:2, :4]
        options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(ids, **options), untouched.generate(ids, **options))
        engine.step(batch)
    assert "forward" not in model.__dict__
    assert not model.lm_head.weight.requires_grad or model(**batch).loss.requires_grad


def test_engine_step_goes_on_working_in_between() -> None:
    model, other = build_llama().train(), build_llama().train()
    batch = next(batches("llama", 1))
    with engine_of(model) as engine, engine_of(other, autograd=False) as plain:
        for _ in range(2):
            model(**batch).loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            engine.step(batch)
            plain.step(batch)
            plain.step(batch)
        assert engine.step_number == plain.step_number == 4
        found, expected = engine.state_dict(), plain.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_dropout_differs_from_call_to_call_and_is_the_same_again_in_its_backward() -> None:
    model = build_gpt2(resid_pdrop=0.5).train()
    batch = next(batches("gpt2", 1))
    with engine_of(model) as engine:
        first, second = model(**batch).loss, model(**batch).loss
        assert first != second
        first.backward()
        weight = model.get_parameter("transformer.h.0.mlp.c_fc.weight")
        gradient = weight.grad.clone()
        epsilon, direction = 1e-2, torch.randn(weight.shape)
        expected = float((gradient * direction).sum())
        engine.optimizer.zero_grad()
        losses = []
        state = {name: one.clone() for name, one in engine.state_dict().items()}
    for sign in (1, -1):
        other = build_gpt2(resid_pdrop=0.5).train()
        other.load_state_dict(state)
        with torch.no_grad():
            other.get_parameter("transformer.h.0.mlp.c_fc.weight").add_(
                direction, alpha=sign * epsilon
            )
        with engine_of(other):
            losses.append(float(other(**batch).loss.detach()))
    assert (losses[0] - losses[1]) / (2 * epsilon) == pytest.approx(expected, rel=0.05)


# --------------------------------------------------------------------------------------------------
# What is refused, and what is left behind


def test_without_autograd_a_call_is_refused_with_the_remedy() -> None:
    model = build_llama().train()
    with engine_of(model, autograd=False), pytest.raises(RuntimeError, match="autograd=True"):
        model(**next(batches("llama", 1)))


def test_backward_is_refused_twice_for_other_weights_and_with_create_graph() -> None:
    model = build_llama().train()
    batch = next(batches("llama", 1))
    with engine_of(model) as engine:
        loss = model(**batch).loss
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
        loss = model(**batch).loss
        with pytest.raises(RuntimeError, match="create_graph"):
            loss.backward(create_graph=True)
        loss = model(**batch).loss
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.grad(loss, [model.get_parameter("model.norm.weight")])
        outputs = model(**batch)
        outputs.loss.backward()
        with pytest.raises(RuntimeError, match="cannot be made any more"):
            outputs.logits.sum()
        loss = model(**batch).loss
        engine.optimizer.step()
        with pytest.raises(RuntimeError, match="weights have changed"):
            loss.backward()


def test_an_error_in_the_users_loss_leaves_the_engine_as_it_was() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        said = []
        for batch in batches("llama", 2):
            with contextlib.suppress(ZeroDivisionError):
                outputs = model(**batch)
                outputs.loss / (1 // 0)
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            said.append(loss)
        return said

    compare("llama", loop)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_interrupt_leaves_the_engine_usable(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a backward pass had added by then stays, as in PyTorch: gradients are to be dropped."""
    batch, inputs, passes = next(batches("llama", 1)), LayerPasses._inputs, []

    def one(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return [loss]

    def interrupted(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        def fail(*args: Any, **how: Any) -> Any:
            passes.append(None)
            if len(passes) == 2:
                raise KeyboardInterrupt
            return inputs(*args, **how)

        with monkeypatch.context() as patch:
            run = model(**batch).loss.backward if where == "backward" else lambda: model(**batch)
            patch.setattr(LayerPasses, "_inputs", fail)
            with pytest.raises(KeyboardInterrupt):
                run()
        optimizer.zero_grad()
        optimizer.step()  # of nothing
        return one(model, optimizer)

    found = in_an_engine(build_llama, interrupted, embedding="host")
    assert_same(found, in_plain_pytorch(build_llama, one))


def test_a_call_of_a_closed_engine_cannot_go_back() -> None:
    model = build_llama().train()
    with engine_of(model):
        loss = model(**next(batches("llama", 1))).loss
    with pytest.raises(RuntimeError, match="engine is closed"):
        loss.backward()


def test_a_frozen_model_can_be_called() -> None:
    model, batch = build_llama().requires_grad_(False).train(), next(batches("llama", 1))
    with engine_of(model, optimizer=None):
        with torch.no_grad():
            assert torch.equal(model(**batch).loss, build_llama().train()(**batch).loss)
        with pytest.raises(RuntimeError, match="for models that are trained"):
            model(**batch)


def test_what_a_forward_without_backward_has_kept_is_used_again() -> None:
    model = build_llama().train()
    batch = next(batches("llama", 1))
    with engine_of(model, embedding="host", microbatch_size=1) as engine:
        model(**batch).loss.backward()
        arena = inside.arena(engine)
        taken = []
        gc.collect()
        for _ in range(3):
            model(**batch)  # and forgotten
            model(**batch).loss.backward()
            taken.append(sum(arena.bytes_by_name.values()))
        assert len(set(taken)) == 1


# --------------------------------------------------------------------------------------------------
# Other types, other optimizers, other libraries


@pytest.mark.parametrize("microbatch_size", [ROWS, 2])
def test_a_number_of_items_of_all_batches_divides_the_loss(microbatch_size: int) -> None:
    """As trainers of transformers have it, where gradients accumulate."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        said = []
        for batch in batches("llama", 2):
            loss = model(**batch, num_items_in_batch=torch.tensor(64)).loss
            loss.backward()
            said.append(loss)
        return said

    compare("llama", loop, tolerance=1e-6, microbatch_size=microbatch_size)

    def classified(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        (batch,) = batches("bert", 1)
        loss = model(**batch, num_items_in_batch=3).loss  # which it does not use
        loss.backward()
        return [loss]

    compare("bert", classified, tolerance=1e-6, microbatch_size=microbatch_size)


def test_a_model_is_asked_to_go_to_a_device_and_stays() -> None:
    """As trainers do; it would have no memory there."""
    with engine_of(build_llama().train()) as engine:
        model = inside.model(engine)
        assert model.to("meta") is model
        assert model.cuda(0) is model
        assert model.cpu() is model
        assert model.to(torch.device("cpu"), torch.float32) is model
        with pytest.raises(RuntimeError, match="precision="):
            model.to(torch.bfloat16)
        model(**next(batches("llama", 1))).loss.backward()
    assert "to" not in model.__dict__


def test_inference_mode_leaves_nothing_behind() -> None:
    (batch,) = batches("llama", 1)
    with engine_of(build_llama().train()) as engine:
        model = inside.model(engine)
        with torch.inference_mode():
            made = {name: one.clone() for name, one in batch.items()}
            logits = model(**made).logits
            assert engine.evaluate(made) > 0
        with torch.no_grad():
            assert torch.equal(model(**batch).logits, logits)
        loss = model(**batch).loss
        loss.backward()
        engine.optimizer.step()


def test_a_number_that_divides_a_part_of_the_loss_is_refused() -> None:
    (batch,) = batches("mixtral", 1)
    with engine_of(build_mixtral(output_router_logits=True).train()) as engine:
        model = inside.model(engine)
        with pytest.raises(ValueError, match=r"divides a part of its loss.*output_router_logits"):
            model(**batch, num_items_in_batch=torch.tensor(64))
        model(**batch).loss.backward()


def trained(precision: str, loop: Loop, **settings: Any) -> dict[str, Tensor]:
    model = build_llama().train()
    with engine_of(model, precision=precision, kernel="native", **settings) as engine:
        loop(model, engine.optimizer)
        return engine.state_dict()


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_in_16_bits_it_is_near_a_step_of_the_engine(precision: str) -> None:
    def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cpu", enabled=precision == "float16")
        for batch in batches("llama", 4):
            with torch.autocast("cpu", dtype=torch.bfloat16):  # which has no effect
                loss = model(**batch).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return []

    model = build_llama().train()
    settings = {"precision": precision, "autograd": False, "optimizer": l2l.SGD(lr=0.1)}
    with engine_of(model, **settings) as engine:
        for batch in batches("llama", 4):
            engine.step(batch)
        expected = engine.state_dict()
    found = trained(precision, scaled, optimizer=l2l.SGD(lr=0.1))
    start = build_llama().state_dict()
    for name in expected:
        moved, off = (expected[name] - start[name]).norm(), (found[name] - expected[name]).norm()
        assert off <= 0.02 * moved + 1e-6, name


def test_gradients_of_16_bit_parameters_are_float32_and_moments_may_have_8_bits() -> None:
    model = build_llama().to(torch.bfloat16).train()
    optimizer = l2l.AdamW(lr=RATE, moments="8bit")
    with engine_of(model, precision="bfloat16", kernel="native", optimizer=optimizer) as engine:
        before = [float(engine.evaluate(batch)) for batch in batches("llama", 2)]
        for _ in range(4):
            for batch in batches("llama", 2):
                model(**batch).loss.backward()
            assert {one.grad.dtype for one in model.parameters()} == {torch.float32}
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        after = [float(engine.evaluate(batch)) for batch in batches("llama", 2)]
    assert sum(after) < sum(before)


def test_the_engines_own_clipping_is_that_of_torch() -> None:
    def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        for batch in batches("llama", 2):
            model(**batch).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return []

    def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        for batch in batches("llama", 2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return []

    found = in_an_engine(build_llama, plain, clip_norm=0.1)
    assert_same(found, in_plain_pytorch(build_llama, clipped), tolerance=1e-6)


def test_the_optimizers_state_is_saved_and_loaded_as_torch_does() -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
        for seed in seeds:
            model(**causal_batch(ROWS, seed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    model = build_llama().train()
    with engine_of(model) as engine:
        steps(model, engine.optimizer, range(2))
        weights = engine.state_dict()
        state = copy.deepcopy(engine.optimizer.state_dict())
        steps(model, engine.optimizer, range(2, 4))
        expected = engine.state_dict()
    other = build_llama().train()
    other.load_state_dict(weights)
    with engine_of(other) as engine:
        engine.optimizer.load_state_dict(state)
        steps(other, engine.optimizer, range(2, 4))
        found = engine.state_dict()
        state["param_groups"][0]["params"].pop()
        with pytest.raises(ValueError, match="expected groups of"):
            engine.optimizer.load_state_dict(state)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("background", [False, True])
def test_checkpoints_have_updates_that_were_left(background: bool, tmp_path: Path) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
        for seed in seeds:
            model(**causal_batch(ROWS, seed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    model, other = build_llama().train(), build_llama().train()
    with engine_of(model) as engine:
        steps(model, engine.optimizer, range(2))
        saving = engine.save(tmp_path / "checkpoint", background=background)
        steps(model, engine.optimizer, range(2, 4))
        saving.wait()
        expected = engine.state_dict()
    with engine_of(other) as engine:
        loss = other(**causal_batch(ROWS, 0)).loss
        loss.backward()  # whose gradient is no part of the checkpoint
        engine.load(tmp_path / "checkpoint")
        assert engine.step_number == 2
        engine.optimizer.zero_grad()
        steps(other, engine.optimizer, range(2, 4))
        found = engine.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_accelerate_prepares_model_and_optimizer() -> None:
    accelerate = pytest.importorskip("accelerate")

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        prepared, optimizer = accelerator.prepare(model, optimizer)
        said = []
        for batch in batches("llama", 4):
            with accelerator.accumulate(prepared):
                loss = prepared(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            said.append(loss)
        return said

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compare("llama", loop)


def test_what_does_not_go_with_it_is_refused_by_name() -> None:
    for settings, reason in (
        ({"loss": lambda outputs, batch: outputs.loss}, "loss= is for engine.step"),
        ({"optimizer": l2l.Adafactor(), "precision": "bfloat16"}, "Adafactor updates layers"),
    ):
        model = build_llama()
        with pytest.raises(ValueError, match=reason):
            engine_of(model, **settings)
        assert "forward" not in model.__dict__


def test_the_plan_and_the_budget_count_gradients() -> None:
    model = build_llama().train()
    with engine_of(model) as engine:
        model(**next(batches("llama", 1))).loss.backward()
        lines = {one.purpose: one.nbytes for one in engine.plan.ledger if one.place == "host"}
        number = sum(one.numel() for one in model.parameters())
        assert 4 * number <= lines["gradients"] < 4 * number * 1.2
    needed = {}
    for autograd in (False, True):
        with pytest.raises(ValueError, match="host_memory") as error:
            engine_of(build_llama(), autograd=autograd, host_memory=1000)
        needed[autograd] = str(error.value)
    assert needed[True] != needed[False]


def test_changing_layers_goes_on_with_gradients_of_the_new_ones() -> None:
    model = build_llama().train()
    with engine_of(model) as engine:
        batch = next(batches("llama", 1))
        model(**batch).loss.backward()
        engine.layers.remove(1)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        model(**batch).loss.backward()
        assert all(one.grad is not None for one in model.parameters())
        engine.optimizer.step()
        model.train(mode=False)
        with torch.inference_mode():
            expected = model(**batch).logits
    assert torch.equal(model.eval()(**batch).logits, expected)
