"""What other code meets in a model that is in an engine: the truth, or an error that says more."""

import contextlib
import copy
import gc
import io
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import inside
import pytest
import torch
from families import FAMILIES, build_bert, causal_batch, classification_batch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from l2l.distributed import Share
from l2l.engine import Engine
from l2l.model import UnitTensors
from l2l.model.held import KEY, is_held, lent
from l2l.model.modules import CutError
from l2l.parameter_server import ParameterServer, UnitForm

Opened = tuple[Engine, nn.Module, dict[str, Tensor]]
RUN = "Use engine.step, engine.evaluate or engine.predict"
WRITE = "writes to .*Close the engine first"


def make_engine(model: nn.Module, **settings: Any) -> Engine:
    return inside.engine(model, **{"precision": "float32", "device": "cpu", **settings})


def same(found: Any, expected: Any) -> bool:
    return list(found) == list(expected) and all(
        found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name])
        for name in expected
    )


def opened(build: Callable[[], nn.Module], batch: Any, **settings: Any) -> Opened:
    """An engine after two steps, its model, and what a model has that was closed then."""
    states = []
    for _ in range(2):
        model = build()
        engine = make_engine(model, **settings)
        for seed in range(2):
            engine.step(batch(4, seed))
        if not states:
            engine.close()
        states.append((engine, model))
    return *states[1], {name: one.clone() for name, one in states[0][1].state_dict().items()}


@pytest.fixture(name="llama", scope="module")
def make_llama() -> Iterator[Opened]:
    """With tied weights, and clipped: all updates of the last step wait when somebody reads."""
    engine, model, expected = opened(FAMILIES["llama_tied"].build, causal_batch, clip_norm=1.0)
    assert len(inside.server(engine).waiting) == len(inside.server(engine).units)
    yield engine, model, expected
    assert same(model.state_dict(), expected)  # whatever was tried
    engine.close()
    assert same(model.state_dict(), expected)
    assert all(type(p) is nn.Parameter and KEY not in vars(p) for p in model.parameters())


# --------------------------------------------------------------------------------------------------
# Reading


def test_a_state_dict_is_the_truth(llama: Opened) -> None:
    engine, model, expected = llama
    assert same(model.state_dict(), expected)
    found = engine.state_dict()
    assert same(found, expected)
    assert all(type(one) is Tensor for one in found.values())
    assert found["lm_head.weight"] is found["model.embed_tokens.weight"]
    weights = dict(engine.named_weights())
    assert sorted(weights) == sorted(name for name, _ in model.named_parameters())
    assert all(torch.equal(one, expected[name]) for name, one in weights.items())


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_are_read(precision: str, dtype: torch.dtype) -> None:
    engine, model, expected = opened(
        lambda: FAMILIES["llama_untied"].build().to(dtype), causal_batch, precision=precision
    )
    with engine:
        assert same(model.state_dict(), expected)
        assert same(engine.state_dict(), expected)


def test_buffers_are_as_training_has_left_them() -> None:
    family = FAMILIES["batchnorm"]
    engine, model, expected = opened(family.build, family.batch)
    fresh = family.build().state_dict()
    name = next(name for name in expected if name.endswith("running_mean"))
    assert not torch.equal(fresh[name], expected[name])
    with engine:
        assert same(engine.state_dict(), expected)
        assert same(model.state_dict(), expected)


def test_what_is_read_after_a_step_is_of_that_step() -> None:
    family = FAMILIES["hand_written"]
    model = family.build()
    with make_engine(model) as engine:
        engine.step(family.batch(4))
        parameter = next(model.parameters())
        kept = parameter.detach()
        before = kept.clone()
        assert parameter.detach().data_ptr() == kept.data_ptr()
        engine.step(family.batch(4))
        assert torch.equal(kept, before)
        assert not torch.equal(parameter, before)


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "clone": lambda p: p.clone().detach(),
    "cpu": lambda p: p.cpu().detach(),
    "to": lambda p: p.to(torch.float64).float().detach(),
    "numpy": lambda p: torch.tensor(p.detach().numpy()),
    "numpy itself": lambda p: torch.tensor(p.numpy()),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "storage": lambda p: (
        torch.tensor(p.untyped_storage().tolist(), dtype=torch.uint8)
        .view(torch.float32)
        .view(p.shape)
    ),
    "rows": lambda p: torch.stack([row.detach() for row in p]),
    "flat": lambda p: torch.cat([p.view(-1), p.view(-1)])[: p.numel()].view(p.shape).detach(),
    "deepcopy": lambda p: copy.deepcopy(p).data,
    "copy": lambda p: copy.copy(p).data,
    "inference": torch.inference_mode()(lambda p: p.detach().clone()),
    "into another": torch.no_grad()(lambda p: torch.zeros_like(p).copy_(p)),
    "parameter": lambda p: nn.Parameter(p.data).data,
}


@pytest.mark.parametrize("read", READS)
def test_reading_tells_the_truth(llama: Opened, read: str) -> None:
    _, model, expected = llama
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(READS[read](model.get_parameter(name)), expected[name])


def test_questions_are_answered(llama: Opened) -> None:
    engine, model, expected = llama
    plain = FAMILIES["llama_tied"].build()
    for name, parameter in model.named_parameters():
        other = plain.get_parameter(name)
        assert is_held(parameter)
        assert isinstance(parameter, nn.Parameter)
        for ask in ("shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "nbytes"):
            assert getattr(parameter, ask) == getattr(other, ask)
        assert (len(parameter), parameter.dim()) == (len(other), other.dim())
        assert torch.equal(parameter, expected[name])
        assert not (parameter != expected[name]).any()
        assert parameter.norm().item() == expected[name].norm().item()
    with inside.server(engine).reader.running():  # also in a step
        parameter = model.lm_head.weight
        assert parameter.new_zeros(3).tolist() == [0, 0, 0]
        assert torch.zeros_like(parameter).shape == parameter.shape
        assert {parameter: 1}[parameter] == 1


@pytest.mark.parametrize("build", [FAMILIES["llama_tied"].build, build_bert], ids=["llama", "bert"])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_save_pretrained(tmp_path: Path, build: Any, shard: str) -> None:
    batch = causal_batch if build is not build_bert else classification_batch
    engine, model, expected = opened(build, batch)
    with engine:
        model.save_pretrained(tmp_path, max_shard_size=shard)
        assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
        found = type(model).from_pretrained(tmp_path)
        assert same(found.state_dict(), expected)


def test_files_of_safetensors(llama: Opened, tmp_path: Path) -> None:
    _, model, expected = llama
    save_model(model, str(tmp_path / "model.safetensors"))
    found = load_file(tmp_path / "model.safetensors")
    assert len(found) == len(expected) - 1  # tied
    assert all(torch.equal(one, expected[name]) for name, one in found.items())
    tensors = model.state_dict()
    with pytest.raises(RuntimeError, match="share memory"):  # as it says of ordinary tied models
        save_file(tensors, tmp_path / "tensors.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "tensors.safetensors")
    assert same(load_file(tmp_path / "tensors.safetensors"), dict(sorted(tensors.items())))


def test_pickles(llama: Opened) -> None:
    _, model, expected = llama
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert same(found, expected)
    assert found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    assert_ordinary(found, expected)


def assert_ordinary(model: Any, expected: Any) -> None:
    """A model of its own with these weights, tied, that trains."""
    assert same(model.state_dict(), expected)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    model(**causal_batch(2)).loss.backward()
    torch.optim.AdamW(model.parameters()).step()
    assert not same(model.state_dict(), expected)


def test_a_deep_copy_is_an_ordinary_model(llama: Opened) -> None:
    _, model, expected = llama
    assert_ordinary(copy.deepcopy(model), expected)


def test_an_average_of_weights(llama: Opened) -> None:
    _, model, expected = llama
    average = AveragedModel(model)
    for _ in range(2):
        average.update_parameters(model)
    assert torch.equal(average.module.lm_head.weight, expected["lm_head.weight"])


# --------------------------------------------------------------------------------------------------
# Writing

WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "zero_": torch.no_grad()(lambda p: p.zero_()),
    "with gradients on": lambda p: p.zero_(),
    "data": lambda p: p.data.mul_(2),
    "detach": lambda p: p.detach().add_(1),
    "view": lambda p: p.data.view(-1)[3:5].fill_(1),
    "item": lambda p: p.data.__setitem__(0, 1.0),
    "rows": lambda p: [row.zero_() for row in p.data],
    "init": lambda p: nn.init.normal_(p),
    "out": lambda p: torch.add(torch.zeros(p.shape), 1, out=p.data),
    "foreach": torch.no_grad()(lambda p: torch._foreach_add_([p], 1.0)),
    "inference": torch.inference_mode()(lambda p: p.data.zero_()),
}


@pytest.mark.parametrize("write", WRITES)
def test_writing_is_refused(llama: Opened, write: str) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(RuntimeError, match=f"{WRITE}.*") as caught:
        WRITES[write](llama[1].get_parameter(name))
    assert name in str(caught.value)
    assert same(llama[1].state_dict(), llama[2])


def test_an_array_cannot_be_written_to(llama: Opened) -> None:
    with pytest.raises(ValueError, match="read-only"):
        llama[1].lm_head.weight.detach().numpy().fill(0)


def test_the_model_cannot_be_changed(llama: Opened) -> None:
    _, model, expected = llama
    parameter = model.lm_head.weight
    with pytest.raises(RuntimeError, match=WRITE):
        model.load_state_dict(expected)
    for change in (model.bfloat16, lambda: model.to("meta"), lambda: move(parameter)):
        with pytest.raises(RuntimeError, match=r"is given another tensor.*Close the engine first"):
            change()
    with pytest.raises(RuntimeError, match=r"requires_grad of .*engine\.layers\.freeze"):
        model.requires_grad_(requires_grad=False)
    with pytest.raises(RuntimeError, match=r"is given a gradient.*engine\.step"):
        parameter.grad = torch.zeros(parameter.shape)
    with pytest.raises(RuntimeError, match="It would never run"):
        parameter.register_hook(print)
    model.zero_grad()
    assert model.requires_grad_() is model  # as it is
    assert model.to("cpu").float() is model
    assert parameter is model.lm_head.weight


def move(parameter: nn.Parameter) -> None:
    parameter.data = torch.zeros(parameter.shape)


def test_a_parameter_that_was_replaced_is_noticed() -> None:
    family = FAMILIES["hand_written"]
    model = family.build()
    with make_engine(model) as engine:
        engine.step(family.batch(2))
        name, parameter = next(iter(model.named_parameters()))
        state = {key: one.clone() for key, one in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        with pytest.raises(RuntimeError, match=f"{name!r} was replaced by another parameter"):
            engine.step(family.batch(2))
        assert torch.equal(parameter, state[name])


def test_code_that_does_not_ask_torch_gets_no_address(llama: Opened) -> None:
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        torch.utils.dlpack.to_dlpack(llama[1].lm_head.weight)


TESTS = Path(__file__).parent


def run_apart(code: str) -> str:
    """What a process prints that may crash; a signal fails."""
    code = textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (TESTS, TESTS.parent)))},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_other_optimizers_neither_crash_nor_change_anything() -> None:
    """In one process, which takes long to start: torch's own, then a trainer of transformers."""
    found = run_apart(
        """
        import tempfile
        import torch
        from families import FAMILIES, causal_batch
        from l2l.engine import Engine
        from transformers import Trainer, TrainingArguments

        def try_all(model):
            for kind in (torch.optim.AdamW, torch.optim.SGD):
                for way in ({"fused": True}, {"foreach": True}, {"foreach": False}):
                    try:
                        kind(model.parameters(), lr=0.1, **way).step()
                        print("nothing")
                    except RuntimeError as error:
                        print("writes to" in str(error) and "engine.close()" in str(error))

        for left in (True, False):
            model = FAMILIES["llama_tied"].build()
            if left:
                model(**causal_batch(2)).loss.backward()
            with Engine(model, precision="float32", device="cpu") as engine:
                before = engine.state_dict()
                try_all(model)
                after = engine.state_dict()
                assert all(torch.equal(after[name], before[name]) for name in before)
        rows = [{name: one[0] for name, one in causal_batch(1, seed).items()} for seed in range(8)]
        model = FAMILIES["llama_tied"].build()
        with tempfile.TemporaryDirectory() as folder:
            given = TrainingArguments(output_dir=folder, max_steps=2, report_to=[])
            with Engine(model, precision="float32", device="cpu"):
                try:
                    Trainer(model=model, args=given, train_dataset=rows).train()
                except RuntimeError as error:
                    print("engine.step" in str(error))
        """
    )
    words = [word for word in found.split() if word in ("True", "False", "nothing")]
    assert words == 6 * ["True"] + 6 * ["nothing"] + ["True"]


# --------------------------------------------------------------------------------------------------
# Running


def test_one_of_several_ranks_cannot_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["hand_written"].build()
    with make_engine(model) as engine:
        together = SimpleNamespace(share=Share(index=0, number=2))
        with monkeypatch.context() as patch:
            patch.setattr(inside.server(engine), "world", together)
            with pytest.raises(
                RuntimeError, match=r"engine\.state_dict\(\).* on all ranks together"
            ):
                model.state_dict()


def test_the_model_cannot_be_called(llama: Opened) -> None:
    _, model, _ = llama
    hidden = torch.randn(2, 3, model.config.hidden_size)
    ids = torch.ones((1, 3), dtype=torch.long)
    calls: list[Callable[[], Any]] = [
        lambda: model(**causal_batch(2)),
        torch.no_grad()(lambda: model(**causal_batch(2))),
        lambda: model.generate(ids, max_new_tokens=2),
        lambda: model.model.layers[0].mlp(hidden),
        lambda: model.model.norm(hidden),
        lambda: model.lm_head(hidden),
        lambda: hidden @ model.lm_head.weight.T.detach() + F.linear(hidden, model.lm_head.weight),
        lambda: torch.einsum("btd,vd->btv", hidden, model.lm_head.weight),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=RUN):
            call()


@pytest.mark.parametrize("name", ["batchnorm", "mamba", "hand_written", "bert_classification"])
def test_other_models_cannot_be_called(name: str) -> None:
    family = FAMILIES[name]
    model = family.build()
    with make_engine(model, layers=family.layers), pytest.raises(RuntimeError, match=RUN):
        model(**family.batch(2))


def test_no_gradient_comes_from_what_was_read(llama: Opened) -> None:
    parameter, x = llama[1].lm_head.weight, torch.ones(67, 32, requires_grad=True)
    losses: list[Callable[[], Tensor]] = [
        lambda: parameter.pow(2).sum(),
        lambda: (x + parameter).sum(),
        lambda: (x + parameter[:, :]).sum(),
        lambda: torch.stack([parameter, parameter]).norm(),
    ]
    for loss in losses:
        with pytest.raises(RuntimeError, match=r"a gradient was asked for .*engine\.step"):
            loss().backward()
    with pytest.raises(RuntimeError, match=r"inside torch\.no_grad\(\)"):
        torch.zeros(67, 32).add_(parameter)
    assert x.grad is None or not x.grad.isnan().any()
    (x * parameter.detach()).sum().backward()  # which gives none to an ordinary one either


def test_a_loss_that_reads_weights_is_refused() -> None:
    family = FAMILIES["hand_written"]
    model = family.build()
    name, parameter = next(iter(model.named_parameters()))

    def loss(outputs: Any, batch: Any) -> Tensor:
        return outputs["loss"] + parameter.pow(2).sum()

    with make_engine(model, loss=loss) as engine:
        for run in (engine.step, engine.evaluate):
            with pytest.raises(CutError, match=f"reads {name!r} of the model itself"):
                run(family.batch(2))
    assert same(model.state_dict(), family.build().state_dict())


def test_a_layer_that_runs_another_module_is_refused() -> None:
    family = FAMILIES["hand_written"]
    model = family.build()
    layer = model.stack[1]
    kept = {"forward": layer.forward}  # where nobody finds it to make it the copy's
    layer.forward = lambda *args, **kwargs: kept["forward"](*args, **kwargs)
    with make_engine(model) as engine:
        with pytest.raises(CutError, match=r"reads 'stack\.1\..* of the model itself"):
            engine.step(family.batch(2))
        del layer.forward


# --------------------------------------------------------------------------------------------------
# Changes of the layers, lending, closing


def test_layers_that_come_and_go() -> None:
    family = FAMILIES["hand_written"]
    model = family.build()
    with make_engine(model) as engine:
        engine.step(family.batch(2))
        removed = model.stack[0]
        kept = {name: one.clone() for name, one in model.stack[1].state_dict().items()}
        engine.layers.remove(0)
        with pytest.raises(RuntimeError, match="was removed from the engine"):
            removed.state_dict()
        assert same(model.stack[0].state_dict(), kept)
        engine.layers.insert(0, copy_of=0)
        assert same(model.stack[0].state_dict(), kept)
        assert all(is_held(parameter) for parameter in model.parameters())
        engine.layers.freeze(0)
        engine.step(family.batch(2))
        assert same(model.stack[0].state_dict(), kept)
        assert not same(model.stack[1].state_dict(), kept)
        expected = engine.state_dict()
    assert same(model.state_dict(), expected)


class Marked(nn.Parameter):
    """A parameter of a class of its own, with an attribute."""


def test_parameters_of_other_classes() -> None:
    family = FAMILIES["hand_written"]
    model = family.build()
    parameter = next(model.parameters())
    parameter.__class__, parameter.mark = Marked, 7
    before = parameter.detach().clone()
    with make_engine(model):
        assert isinstance(parameter, Marked)
        assert type(parameter) is not Marked
        found = copy.deepcopy(parameter)
        assert (type(found), found.mark, vars(found)) == (Marked, 7, {"mark": 7})
        assert torch.equal(found, before)
    assert type(parameter) is Marked
    assert vars(parameter) == {"mark": 7}
    assert torch.equal(parameter, before)


def test_parameters_can_be_lent_a_tensor() -> None:
    family = FAMILIES["hand_written"]
    model = family.build()
    with make_engine(model) as engine:
        engine.step(family.batch(2))
        expected = engine.state_dict()
        parameters = dict(model.named_parameters())
        with contextlib.ExitStack() as stack:
            for name, parameter in parameters.items():
                stack.enter_context(lent(parameter, expected[name].double()))
                assert not is_held(parameter)
                assert parameter.requires_grad
            batch = family.batch(2)
            batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
            model(**batch)["loss"].backward()
            assert any(parameter.grad is not None for parameter in parameters.values())
        for parameter in parameters.values():
            assert is_held(parameter)
            assert parameter.dtype is torch.float32
            assert parameter.grad is None
        model.zero_grad()
        assert all(parameters[name] is one for name, one in model.named_parameters())
        assert same(model.state_dict(), expected)
        engine.step(family.batch(2))


def test_closing_without_giving_back() -> None:
    model = FAMILIES["hand_written"].build()
    make_engine(model).close(give_back=False)
    with pytest.raises(RuntimeError, match=r"has no weights: .*were let go"):
        model.state_dict()
    with pytest.raises(ValueError, match=r"hold no values.*were let go"):
        make_engine(model)


def test_a_model_has_one_engine_at_a_time(llama: Opened) -> None:
    with pytest.raises(
        ValueError, match=r"hold no values.*in another engine. Close that one first"
    ):
        make_engine(llama[1])


def test_a_dropped_engine_gives_the_weights_back() -> None:
    engine, model, expected = opened(FAMILIES["llama_tied"].build, causal_batch, clip_norm=1.0)
    assert inside.server(engine).waiting
    gc.collect()
    del engine
    with pytest.warns(UserWarning, match=r"dropped without engine\.close\(\); the weights were"):
        gc.collect()
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert same(model.state_dict(), expected)


def test_an_engine_that_cannot_give_back_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FAMILIES["hand_written"].build()
    engine = make_engine(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(type(inside.server(engine)), "give_back", fail)
    del engine
    with pytest.warns(UserWarning, match=r"lost weights \(planted\): go on from a checkpoint"):
        gc.collect()
    with pytest.raises(RuntimeError, match="has no weights: "):
        model.state_dict()


def test_an_engine_that_could_not_be_made_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    add = ParameterServer.add

    def fail(server: ParameterServer, form: UnitForm, tensors: UnitTensors, **how: Any) -> None:
        if form.name == "T0":
            raise RuntimeError("planted")
        add(server, form, tensors, **how)

    monkeypatch.setattr(ParameterServer, "add", fail)
    model = FAMILIES["hand_written"].build()
    with pytest.raises(RuntimeError, match="planted"):
        make_engine(model)
    gc.collect()  # where a warning would be an error
    assert same(model.state_dict(), FAMILIES["hand_written"].build().state_dict())
    assert not any(is_held(parameter) for parameter in model.parameters())
