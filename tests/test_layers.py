"""Layers that come and go between steps: always the engine that would have been made so."""

import copy
import gc
import itertools
import math
import random
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from families import FAMILIES, Family
from reference import accumulate, counts, split
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

import l2l
from l2l.model.modules import find_layers

ROWS = 4
ADAMW = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
PLANS: dict[str, dict[str, Any]] = {
    "eager": {},
    "some late": {"overrides": {"num_late": 2}},
    "rows on the host": {"embedding": "host"},
    "tail": {"overrides": {"num_tail": 2}},
    "clipped": {"clip_norm": 0.5},
    "halves": {"clip_norm": 0.5, "overrides": {"halves": True}, "embedding": "host"},
    "resident": {"clip_norm": 0.5, "overrides": {"num_tail": 2, "num_device_states": 1}},
}
EXACT = ("eager", "some late", "tail")


def make(family: Family, model: nn.Module | None = None, **settings: Any) -> l2l.Engine:
    given = {"device": "cpu", "precision": "float32", "microbatch_size": 2, "seed": 3}
    given |= {"optimizer": l2l.AdamW(**ADAMW), "embedding": "device"}
    return inside.engine(model or family.build(), layers=family.layers, **{**given, **settings})


def layers_of(model: nn.Module, name: str | None = None) -> nn.Module:
    (found,) = find_layers(model, name)
    return model.get_submodule(found.name)


class Shadow:
    """Plain PyTorch whose layers and optimizer state are changed by hand."""

    def __init__(self, family: Family, clip_norm: float | None) -> None:
        self.family, self.clip_norm = family, clip_norm
        self.model = family.build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)

    @property
    def layers(self) -> nn.ModuleList:
        return self.model.model.layers

    def step(self, batch: dict[str, Tensor]) -> float:
        microbatches = split(batch, 2)
        numbers = [counts(self.family.rule, one) for one in microbatches]
        self.model.zero_grad()
        loss = accumulate(self.model, microbatches, numbers)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        return float(loss)

    def copied(self, index: int, moments: str) -> nn.Module:
        made = copy.deepcopy(self.layers[index])
        if moments == "copied":
            for mine, theirs in zip(
                made.parameters(), self.layers[index].parameters(), strict=True
            ):
                if theirs in self.optimizer.state:
                    self.optimizer.state[mine] = copy.deepcopy(self.optimizer.state[theirs])
        return made

    def become(self, layers: Sequence[nn.Module]) -> None:
        self.model.model.layers = nn.ModuleList(layers)
        self.model.config.num_hidden_layers = len(layers)
        for index, layer in enumerate(layers):
            layer.self_attn.layer_idx = index
        old = self.optimizer.state
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, **ADAMW)
        for parameter in trained:
            if parameter in old:
                self.optimizer.state[parameter] = old[parameter]

    def set_frozen(self, chosen: Sequence[int], *, frozen: bool) -> None:
        for index in chosen:
            for parameter in self.layers[index].parameters():
                if parameter.requires_grad == frozen:
                    self.optimizer.state.pop(parameter, None)
                parameter.requires_grad_(not frozen)
        self.become(list(self.layers))


def change(draw: random.Random, engine: l2l.Engine, shadow: Shadow) -> str:
    """Make one random change on both."""
    number = len(shadow.layers)
    layers, moments = list(shadow.layers), draw.choice(["copied", "fresh"])
    kinds = ["insert", "freeze", "thaw"] + ["remove"] * (number > 1) + ["grow"] * (number < 4)
    kind = draw.choice(kinds if number < 7 else ["remove"])
    some = sorted(draw.sample(range(number), draw.randint(1, number)))
    if kind == "insert" and draw.random() < 0.7:
        index, position = draw.randrange(number), draw.randint(0, number)
        engine.layers.insert(position, copy_of=index, moments=moments)
        layers.insert(position, shadow.copied(index, moments))
    elif kind == "insert":
        position = draw.randint(0, number)
        torch.manual_seed(draw.randrange(1000))
        module = copy.deepcopy(shadow.family.build().model.layers[0])
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.1)
        layers.insert(position, copy.deepcopy(module))
        engine.layers.insert(position, module)
    elif kind == "remove":
        position = draw.randrange(number)
        engine.layers.remove(position)
        del layers[position]
    elif kind == "grow":
        engine.layers.grow(2, moments=moments)
        layers += [shadow.copied(index, moments) for index in range(number)]
    else:
        (engine.layers.freeze if kind == "freeze" else engine.layers.thaw)(some)
        shadow.set_frozen(some, frozen=kind == "freeze")
        return f"{kind} {some}"
    shadow.become(layers)
    return kind


def assert_same(engine: l2l.Engine, shadow: Shadow, *, exact: bool) -> None:
    """Weights, moments and counts of steps; tied weights are one."""
    inside.server(engine).settle_all()
    assert len(engine.layers) == len(shadow.layers)
    for name, parameter in shadow.model.named_parameters():
        state = shadow.optimizer.state.get(parameter, {}) if parameter.requires_grad else {}
        unit = inside.server(engine)._unit_of[name]
        assert (name in unit.form.trained.names) == parameter.requires_grad, name
        pairs = [(inside.server(engine).weight(name), parameter.detach())]
        if parameter.requires_grad:
            found = unit.state_of(name)
            nothing = torch.zeros_like(parameter)
            pairs += [(found[k].view(nothing.shape), state.get(k, nothing)) for k in found]
            assert unit.steps[name] == int(state.get("step", 0)), name
        for mine, theirs in pairs:
            bound = 1e-5 * float(theirs.abs().max()) + 1e-9
            assert float((mine - theirs).abs().max()) <= bound, name
            assert not exact or torch.equal(mine, theirs), name


def host_bytes(engine: l2l.Engine) -> dict[str, int]:
    kinds = ("weights", "exp_avg", "exp_avg_sq", "remainders", "masters")
    return {k: v for k, v in inside.arena(engine).bytes_by_name.items() if k in kinds and v}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("plan", PLANS)
def test_any_changes_give_the_engine_that_would_have_been_made_so(plan: str, seed: int):
    family, draw = FAMILIES["llama_untied"], random.Random(f"{plan} {seed}")
    shadow = Shadow(family, PLANS[plan].get("clip_norm"))
    engine = make(family, kernel="readable", **PLANS[plan])
    for number in range(8):
        done = change(draw, engine, shadow)
        assert_same(engine, shadow, exact=plan in EXACT)
        batch = family.batch(ROWS, seed=number)
        loss = engine.step(batch).loss
        assert loss == pytest.approx(shadow.step(batch), rel=1e-5), done
        assert_same(engine, shadow, exact=plan in EXACT)
    with make(family, copy.deepcopy(shadow.model), **PLANS[plan]) as fresh:
        fresh.step(family.batch(ROWS))
        assert host_bytes(engine) == host_bytes(fresh)
    engine.close()
    for name, value in shadow.model.state_dict().items():
        assert torch.allclose(
            inside.model(engine).state_dict()[name], value, rtol=1e-4, atol=1e-6
        ), name


SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": "bfloat16"},
    "float16": {"precision": "float16"},
    "8-bit": {"precision": "bfloat16", "optimizer": l2l.AdamW(**ADAMW, moments="8bit")},
    "Adafactor": {"precision": "bfloat16", "optimizer": l2l.Adafactor(lr=1e-2)},
    "SGD": {"optimizer": l2l.SGD(lr=1e-2, momentum=0.9), "clip_norm": 0.5},
    "compiled": {"compile": "aot_eager"},
}
RETURNING = [("llama_tied", name) for name in SETTINGS]
OFTEN = ("bert_classification", "gemma3", "gpt2", "hand_written", "sequential", "qwen3_next")
RETURNING += [
    pytest.param(name, "float32", marks=() if name in OFTEN else pytest.mark.thorough)
    for name in sorted(FAMILIES)
    if name != "llama_tied"
]


@pytest.mark.parametrize(("name", "kind"), RETURNING)
def test_there_and_back_is_as_if_nothing_had_been(name: str, kind: str):
    """A copy that is removed again, anywhere; buffers that layers change stay as they are."""
    family = FAMILIES[name]
    results = []
    for changes in (False, True):
        model = family.build()
        with make(family, model, **SETTINGS[kind]) as engine:
            engine.step(family.batch(ROWS))
            number = len(engine.layers)
            for position in (0, 1, number) if changes else ():
                engine.layers.insert(position, copy_of=number - 1)
                engine.layers.remove(position)
            losses = [engine.step(family.batch(ROWS, seed=n)).loss for n in range(2)]
        results.append((losses, model.state_dict()))
    assert results[0][0] == results[1][0]
    for key, value in results[0][1].items():
        assert torch.equal(results[1][1][key], value), key


@pytest.mark.parametrize("kind", SETTINGS)
def test_copies_have_everything_of_what_they_are_copied_from(kind: str):
    family = FAMILIES["llama_tied"]
    with make(family, **SETTINGS[kind]) as engine:
        for number in range(2):
            engine.step(family.batch(ROWS, seed=number))
        engine.layers.grow(2)
        engine.layers.insert(0, copy_of=1, moments="fresh")
        server = inside.server(engine)
        for mine, theirs in ((4, 1), (5, 2), (6, 3)):
            one, other = (server.image(f"L{index}") for index in (mine, theirs))
            assert list(one.steps.values()) == list(other.steps.values())
            for first, second in zip(one.tensors.values(), other.tensors.values(), strict=True):
                assert torch.equal(first, second)
        fresh, source = (server.image(f"L{index}") for index in (0, 2))
        assert set(fresh.steps.values()) == {0}
        for (name, value), (_, theirs) in zip(
            fresh.tensors.items(), source.tensors.items(), strict=True
        ):
            is_state = "|" in name and name.rpartition("|")[2] not in ("remainders", "masters")
            same = torch.zeros_like(value) if is_state else theirs
            assert torch.equal(value, same), name


@pytest.mark.parametrize(
    "rounds", [25, pytest.param(250, marks=pytest.mark.thorough)], ids=["hundred", "thousand"]
)
def test_a_thousand_changes_leave_nothing_behind(rounds: int):
    family = FAMILIES["llama_tied"]
    with make(family, clip_norm=0.5) as engine:
        engine.step(family.batch(ROWS))
        engine.layers.insert(0, copy_of=0)
        engine.layers.remove(0)
        engine.step(family.batch(ROWS))
        before = dict(inside.arena(engine).bytes_by_name)
        gc.collect()
        objects, memory = len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(rounds):
            engine.layers.insert(number % 4, copy_of=number % 3)
            engine.layers.freeze([0, 2])
            engine.layers.thaw([0, 2])
            engine.layers.remove(number % 4)
        engine.step(family.batch(ROWS))
        gc.collect()
        assert dict(inside.arena(engine).bytes_by_name) == before
        assert len(gc.get_objects()) < objects + 3000
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
        assert grown < 64 * 1024  # KiB


def test_compiled_layers_are_not_compiled_again():
    family = FAMILIES["llama_tied"]
    with make(family, compile="aot_eager") as engine:
        engine.step(family.batch(ROWS))
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        engine.layers.grow(2)
        engine.layers.remove(1)
        engine.step(family.batch(ROWS))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


# -- Going on --------------------------------------------------------------------------------------


def train(engine: l2l.Engine, family: Family, numbers: Sequence[int]) -> list[float]:
    return [engine.step(family.batch(ROWS, seed=number)).loss for number in numbers]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "8-bit", "Adafactor"])
def test_a_run_goes_on_exactly_with_layers_that_were_changed(kind: str, tmp_path: Path):
    family = FAMILIES["llama_tied"]
    model, again = family.build(), family.build()
    with make(family, model, **SETTINGS[kind]) as engine:
        train(engine, family, [0])
        engine.layers.grow(2)
        engine.layers.remove(1)
        train(engine, family, [1])
        if kind != "Adafactor":
            engine.layers.freeze(0)
        train(engine, family, [2])
        engine.save(tmp_path / "saved")
        losses = train(engine, family, [3, 4])
    with make(family, again, **SETTINGS[kind]) as engine:
        engine.load(tmp_path / "saved")
        assert len(engine.layers) == 5
        assert engine.layers.frozen == (() if kind == "Adafactor" else (0,))
        assert train(engine, family, [3, 4]) == losses
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def test_an_engine_of_the_new_depth_takes_the_checkpoint_as_it_is(tmp_path: Path):
    family = FAMILIES["llama_tied"]
    with make(family) as engine:
        train(engine, family, [0])
        engine.layers.grow(2)
        engine.save(tmp_path / "saved")
        losses = train(engine, family, [1])
    config = family.build().config
    config.num_hidden_layers = 6
    model = type(family.build())(config)
    with make(family, model) as engine:
        engine.load(tmp_path / "saved")
        assert train(engine, family, [1]) == losses


def test_a_module_that_was_inserted_must_be_inserted_again(tmp_path: Path):
    family = FAMILIES["llama_tied"]

    def module() -> nn.Module:
        return copy.deepcopy(family.build().model.layers[1])

    with make(family) as engine:
        engine.layers.insert(1, module())
        train(engine, family, [0])
        engine.save(tmp_path / "saved")
        losses = train(engine, family, [1])
    with make(family) as engine:
        train(engine, family, [0])
        with pytest.raises(l2l.CheckpointError, match="layer 1 is not a copy of any layer of this"):
            engine.load(tmp_path / "saved")
        assert len(engine.layers) == 3
        engine.layers.insert(1, module())
        engine.load(tmp_path / "saved")
        assert train(engine, family, [1]) == losses


def changed_and_saved(folder: Path, name: str, model: nn.Module | None = None) -> None:
    """A checkpoint of an engine with three layers that now has others."""
    with make(FAMILIES["llama_tied"], model) as engine:
        if name == "grown":
            engine.layers.grow(2)
        elif name == "removed":
            engine.layers.remove(0)
        else:
            engine.layers.freeze(1)
        engine.save(folder)


@pytest.mark.parametrize("name", ["grown", "removed", "frozen"])
def test_a_checkpoint_of_another_model_is_refused_before_layers_follow_it(
    tmp_path: Path, name: str
):
    family = FAMILIES["llama_tied"]
    config = family.build().config
    config.intermediate_size *= 2
    changed_and_saved(tmp_path / "saved", name, type(family.build())(config))
    with make(family) as alone:
        expected = train(alone, family, [0, 1])
    model = family.build()
    with make(family, model) as engine:
        losses = train(engine, family, [0])
        modules, units = list(model.modules()), dict(inside.server(engine).units)
        state, flags = engine.layers.state(), [p.requires_grad for p in model.parameters()]
        with pytest.raises(l2l.CheckpointError, match=r"L\d\.safetensors: .*another model"):
            engine.load(tmp_path / "saved")
        assert list(model.modules()) == modules
        assert inside.server(engine).units == units
        assert all(inside.server(engine).units[name] is unit for name, unit in units.items())
        assert engine.layers.state() == state
        assert [p.requires_grad for p in model.parameters()] == flags
        assert model.config.num_hidden_layers == 3
        assert losses + train(engine, family, [1]) == expected


def test_layers_follow_by_origin_where_their_number_is_the_same(tmp_path: Path):
    """Layer types differ: the first of two layers must be the second of the given ones."""
    family = FAMILIES["gemma3"]
    with make(family) as engine:
        train(engine, family, [0])
        engine.layers.remove(0)
        engine.save(tmp_path / "saved")
        types, losses = list(inside.model(engine).config.layer_types), train(engine, family, [1])
    assert types[0] != types[1]
    with make(family) as engine:
        engine.layers.remove(2)  # 0 1: as many, but layer 2 is gone
        with pytest.raises(l2l.CheckpointError, match="layer 1 is not a copy of any layer of this"):
            engine.load(tmp_path / "saved")
        assert engine.layers.origins == (0, 1)
    with make(family) as engine:
        engine.layers.insert(3, copy_of=1)
        engine.layers.remove(0)
        engine.layers.remove(0)
        assert engine.layers.origins == (2, 1)
        engine.load(tmp_path / "saved")
        assert engine.layers.origins == (1, 2)
        assert list(inside.model(engine).config.layer_types) == types
        assert train(engine, family, [1]) == losses


def test_exports_have_the_present_depth(tmp_path: Path):
    family = FAMILIES["gemma3"]
    batch = family.batch(ROWS)
    with make(family) as engine:
        engine.step(batch)
        engine.layers.insert(1, copy_of=2)
        engine.layers.remove(0)
        engine.layers.grow(2)
        engine.step(batch)
        expected = engine.predict(batch).logits
        engine.export(tmp_path / "model")
        types = list(inside.model(engine).config.layer_types)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert loaded.config.num_hidden_layers == len(types) == 6
    assert types == list(itertools.islice(itertools.cycle(types[:3]), 6))
    with torch.no_grad():
        found = loaded.eval()(**batch, use_cache=False).logits
    assert torch.equal(found, expected)


def smol(types: list[str], rope: list[int]) -> SmolLM3ForCausalLM:
    torch.manual_seed(0)
    special = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = SmolLM3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=len(types),
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        no_rope_layers=rope,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=types,
        **special,
    )
    return SmolLM3ForCausalLM(config)


def test_a_number_that_is_not_the_layers_own_is_left_alone():
    """With two layers, a flag that is 0 and 1 looks like a number of layers."""
    model = smol(["full_attention"] * 2, [0, 1])
    with inside.engine(model, device="cpu", precision="float32") as engine:
        engine.layers.grow(2)
        assert [one.self_attn.use_rope for one in model.model.layers] == [0, 1, 0, 1]
        assert [one.self_attn.layer_idx for one in model.model.layers] == [0, 1, 2, 3]
        assert model.config.no_rope_layers == [0, 1, 0, 1]


def test_lists_of_the_config_have_the_entry_of_an_inserted_module():
    family = FAMILIES["gemma3"]
    model = family.build()
    types = list(model.config.layer_types)
    with make(family, model) as engine:
        engine.layers.insert(1, copy.deepcopy(family.build().model.layers[2]))
        assert model.config.layer_types == [types[0], types[2], *types[1:]]
        assert math.isfinite(engine.step(family.batch(ROWS)).loss)


def test_a_module_that_a_config_cannot_describe_is_refused():
    full, near = "full_attention", "sliding_attention"
    ids = torch.randint(64, (2, 16))
    batch = {"input_ids": ids, "labels": ids}
    for types, rope, name in (
        ([full, near], [1, 1], "layer_types"),
        ([full] * 2, [0, 1], "no_rope"),
    ):
        model = smol(types, rope)
        with inside.engine(model, device="cpu", precision="float32") as engine:
            layer = copy.deepcopy(smol([full, full], [1, 1]).model.layers[0])
            with pytest.raises(ValueError, match=f"config.{name}.* has one value per layer"):
                engine.layers.insert(1, layer)
            assert len(engine.layers) == model.config.num_hidden_layers == 2
            assert math.isfinite(engine.step(batch).loss)


def test_groups_of_the_optimizer_follow():
    family = FAMILIES["llama_tied"]

    def groups(name: str, _: Tensor) -> dict[str, float]:
        return {"lr": 1e-3} if "layers.1" in name else {}

    optimizer = l2l.AdamW(**ADAMW, groups=groups)
    with make(family, optimizer=optimizer) as engine:
        scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 0.5**step)
        engine.layers.insert(3, copy_of=1)
        engine.layers.remove(0)
        engine.step(family.batch(ROWS))
        scheduler.step()
        rates = {name: one["lr"] for name, one in engine.optimizer.settings().items()}
    own = {layer: {v for k, v in rates.items() if f"layers.{layer}." in k} for layer in range(3)}
    assert own == {0: {0.5e-3}, 1: {0.5e-2}, 2: {0.5e-3}}


def test_policies_and_changes_go_together():
    family = FAMILIES["llama_tied"]
    with make(family, depth=l2l.SampledArchitecture([[0], [1, 2]])) as engine:
        engine.step(family.batch(ROWS))
        with pytest.raises(ValueError, match="candidate 2, but the model has 2 layers"):
            engine.layers.remove(2)
        engine.depth = None
        engine.layers.remove(2)
        assert engine.step(family.batch(ROWS)).layers == (0, 1)
        engine.depth = l2l.StochasticDepth(last=0.5)
        engine.layers.grow(3)
        assert set(engine.step(family.batch(ROWS)).layers) <= set(range(6))


# -- Errors ----------------------------------------------------------------------------------------


class Narrow(nn.Module):
    """Another hidden size."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return self.linear(hidden_states)


class Odd(nn.Module):
    """Arguments that no layer is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, hidden_states: Tensor, picture: Tensor) -> Tensor:
        return self.linear(hidden_states) + picture


ERRORS: dict[str, tuple[Callable[[l2l.Engine], None], str]] = {
    "position": (lambda e: e.layers.insert(5, copy_of=0), "position=5; expected 0 to 3"),
    "source": (lambda e: e.layers.insert(0, copy_of=3), "copy_of=3, but there are layers 0 to 2"),
    "both": (lambda e: e.layers.insert(0, Narrow(32, 32), copy_of=1), "either a module or copy_of"),
    "neither": (lambda e: e.layers.insert(0), "either a module or copy_of"),
    "moments": (lambda e: e.layers.grow(2, moments="old"), "moments='old' is not known"),
    "factor": (lambda e: e.layers.grow(1), "factor=1; expected at least 2"),
    "remove": (lambda e: e.layers.remove(-1), "position=-1, but there are layers 0 to 2"),
    "freeze": (lambda e: e.layers.freeze([0, 9]), "layer=9, but there are layers 0 to 2"),
    "width": (lambda e: e.layers.insert(1, Narrow(48, 48)), "does not run in the place of layer 1"),
    "output": (
        lambda e: e.layers.insert(1, Narrow(32, 48)),
        r"returns \[2, \d+, 48\] where layer 1",
    ),
    "arguments": (
        lambda e: e.layers.insert(1, Odd()),
        r"Odd.forward takes \(hidden_states, picture",
    ),
    "twice": (
        lambda e: e.layers.insert(1, layers_of(inside.model(e))[0]),
        "the module is in the model already",
    ),
    "meta": (lambda e: e.layers.insert(1, Narrow(32, 32).to("meta")), "on the meta device"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_is_refused_and_changes_nothing(name: str):
    family = FAMILIES["llama_tied"]
    act, words = ERRORS[name]
    losses = []
    for wrong in (False, True):
        with make(family) as engine:
            engine.step(family.batch(ROWS))
            if wrong:
                with pytest.raises(ValueError, match=words):
                    act(engine)
                assert len(engine.layers) == 3
                assert inside.model(engine).config.num_hidden_layers == 3
            losses.append(engine.step(family.batch(ROWS)).loss)
    assert losses[0] == losses[1]


def test_the_last_layer_stays():
    family = FAMILIES["llama_tied"]
    with make(family) as engine:
        engine.layers.remove(0)
        engine.layers.remove(0)
        with pytest.raises(ValueError, match="the only layer cannot be removed"):
            engine.layers.remove(0)
        assert math.isfinite(engine.step(family.batch(ROWS)).loss)


def test_a_change_for_which_the_host_has_no_room_is_refused():
    family = FAMILIES["llama_tied"]
    with make(family, host_memory="600KiB") as engine:
        engine.step(family.batch(ROWS))
        with pytest.raises(ValueError, match="of host memory"):
            engine.layers.grow(8)
        assert len(engine.layers) == 3
        assert inside.model(engine).config.num_hidden_layers == 3
        assert math.isfinite(engine.step(family.batch(ROWS)).loss)
