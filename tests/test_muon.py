"""Muon on the matrices of layers, AdamW on the rest: against torch's own, on host and device."""

import copy
import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
from families import FAMILIES
from reference import split
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import l2l
from l2l.device import CheckingDevice
from l2l.parameter_server import Inventory, load_kernel
from l2l.planner.hardware import H200
from l2l.schedule import Lane

FAMILY = FAMILIES["llama_tied"]
NUM_STEPS = 3
MATRICES: dict[str, Any] = {"lr": 2e-2, "weight_decay": 0.1}
OTHERS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-3}
MUON = l2l.Muon(**MATRICES, others=l2l.AdamW(**OTHERS))
FEW = dataclasses.replace(MUON, ns_steps=1)
SINGLE: dict[str, Any] = {"precision": "float32", "microbatch_size": 4, "device": "cpu"}
ON_DEVICE = {
    "lent": {"num_shared": 3, "num_pieces": 4},
    "lent in one": {"num_shared": 3, "num_pieces": 1},
    "lent in many": {"num_shared": 3, "num_pieces": 30},
    "tail": {"num_tail": 3, "num_device_states": 3},
    "all": {"num_tail": 3, "num_device_states": 3, "outer_state": True},
}
Weights = dict[str, Tensor]


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    return ".layers." in f".{name}" and parameter.dim() == 2


def torch_optimizers(model: nn.Module, **settings: Any) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    matrices = [one for name, one in named if is_matrix(name, one)]
    rest = [one for name, one in named if not is_matrix(name, one)]
    muon = torch.optim.Muon(matrices, **{**MATRICES, **settings})
    return [muon, torch.optim.AdamW(rest, **OTHERS, foreach=False)]


@functools.cache
def plain(num_steps: int, clip_norm: float | None = None, **settings: Any) -> Weights:
    model = FAMILY.build()
    optimizers = torch_optimizers(model, **settings)
    for seed in range(num_steps):
        model.zero_grad()
        for microbatch in split(FAMILY.batch(4, seed), 4):
            model(**microbatch, use_cache=False).loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        for optimizer in optimizers:
            optimizer.step()
    return model.state_dict()


def train(optimizer: Any = MUON, num_steps: int = NUM_STEPS, **settings: Any) -> Weights:
    model = FAMILY.build()
    with inside.engine(model, optimizer=optimizer, **{**SINGLE, **settings}) as engine:
        for seed in range(num_steps):
            engine.step(FAMILY.batch(4, seed))
    return model.state_dict()


def difference(found: Weights, expected: Weights) -> float:
    return max(float((found[name] - one).abs().max()) for name, one in expected.items())


def test_twenty_steps_are_those_of_torch_bit_by_bit() -> None:
    assert difference(train(num_steps=20), plain(20)) == 0


def test_beside_an_accelerator_the_native_kernel_updates_the_rest() -> None:
    """The last bits of norms differ; five iterations in bfloat16 would make these some percent."""
    model, expected = FAMILY.build(), plain(8, ns_steps=1)
    with inside.engine(model, optimizer=FEW, **SINGLE) as engine:
        inside.server(engine)._kernel = load_kernel()
        for seed in range(8):
            engine.step(FAMILY.batch(4, seed))
        layer = inside.server(engine).units["L0"]
    assert 0 < difference(model.state_dict(), expected) <= 2e-4
    assert difference(expected, plain(0)) > 5e-2
    assert len(layer.prepared) > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"nesterov": False, "momentum": 0.8},
        {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3, "lr": 1e-3},
        {"ns_coefficients": (2.0, -1.5, 0.5), "weight_decay": 0.0, "eps": 1e-3},
    ],
    ids=str,
)
def test_settings_mean_what_they_do_in_torch(settings: dict[str, Any]) -> None:
    ours = dataclasses.replace(MUON, **settings)
    expected = plain(NUM_STEPS, **settings)
    assert difference(train(ours), expected) == 0
    assert difference(expected, plain(NUM_STEPS)) > 1e-4


def test_torchs_own_are_taken_over(caplog: pytest.LogCaptureFixture) -> None:
    expected = train()
    for order in (1, -1):
        model = FAMILY.build()
        optimizers = torch_optimizers(model)[::order]
        with inside.engine(model, optimizer=optimizers, **SINGLE) as engine:
            for seed in range(NUM_STEPS):
                engine.step(FAMILY.batch(4, seed))
            found = {name: one.clone() for name, one in engine.state_dict().items()}
            kinds = [group["use_muon"] for group in engine.optimizer.param_groups]
            assert kinds == [True, False]
        assert difference(found, expected) == 0
    model = FAMILY.build()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.warns(UserWarning, match="not in the optimizer"):
        engine = inside.engine(model, optimizer=torch_optimizers(model)[0], **SINGLE)
    with engine:
        engine.step(FAMILY.batch(4))
        found = {name: one.clone() for name, one in engine.state_dict().items()}
    changed = {name for name, one in found.items() if not torch.equal(one, before[name])}
    assert changed == {n for n, one in model.named_parameters() if is_matrix(n, one)}
    assert "slower" not in caplog.text


@pytest.mark.parametrize(
    ("name", "clip_norm"),
    [
        ("lent", None),
        ("lent", 0.05),
        ("lent in one", 0.05),
        ("tail", None),
        ("all", 0.05),
        pytest.param("lent in one", None, marks=pytest.mark.thorough),
        pytest.param("lent in many", 0.05, marks=pytest.mark.thorough),
        pytest.param("tail", 0.05, marks=pytest.mark.thorough),
        pytest.param("all", None, marks=pytest.mark.thorough),
    ],
)
def test_the_device_updates_as_the_host_does(name: str, clip_norm: float | None) -> None:
    """Layers whose state stays, and those whose is lent, in their own step or the next."""
    settings: dict[str, Any] = {"clip_norm": clip_norm, "optimizer": FEW}
    found = train(overrides=ON_DEVICE[name], **settings)
    assert difference(found, train(**settings)) <= 1e-4
    if name != "all":  # there the rest is on the device, too, and its last bits differ
        settings["optimizer"] = MUON
        assert difference(train(overrides=ON_DEVICE[name], **settings), train(**settings)) <= 1e-6


@pytest.mark.parametrize("link", ["bfloat16", "float16"])
def test_masters_are_float32_on_host_and_device(link: str) -> None:
    """Steps are far below what sixteen bits can tell apart."""
    small = dataclasses.replace(FEW, lr=1e-5, weight_decay=0.0)
    exact = plain(8, ns_steps=1, lr=1e-5, weight_decay=0.0)
    for overrides in ({}, ON_DEVICE["lent"]):
        found = train(small, 8, precision=link, overrides=overrides)
        moved = {name: one - plain(0)[name] for name, one in found.items()}
        wanted = {name: one - plain(0)[name] for name, one in exact.items()}
        for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.2.self_attn.q_proj.weight"):
            cosine = torch.cosine_similarity(moved[name].flatten(), wanted[name].flatten(), dim=0)
            assert cosine > 0.95
            assert float(moved[name].norm()) == pytest.approx(float(wanted[name].norm()), rel=0.05)


@pytest.mark.parametrize(
    ("first", "clip_norm"),
    [
        (Lane.REWORK, None),
        (Lane.COMPUTE, 0.05),
        *(
            pytest.param(*one, marks=pytest.mark.thorough)
            for one in itertools.product([None, Lane.LEND, Lane.FETCH, Lane.DRAIN], [None, 0.05])
        ),
    ],
)
def test_every_order_the_waits_allow_gives_the_same_bits(
    first: Lane | None, clip_norm: float | None
) -> None:
    settings: dict[str, Any] = {"clip_norm": clip_norm, "overrides": ON_DEVICE["lent"]}
    found = train(device=CheckingDevice(first=first), **settings)
    assert difference(found, train(**settings)) == 0


@pytest.mark.parametrize("overrides", [{}, ON_DEVICE["lent"]], ids=["host", "lent"])
def test_it_goes_on_bit_by_bit(overrides: dict[str, Any], tmp_path: Path) -> None:
    settings = {**SINGLE, "optimizer": MUON, "clip_norm": 0.05, "precision": "bfloat16"}
    settings["overrides"] = overrides
    expected = train(num_steps=4, **settings)
    with inside.engine(FAMILY.build(), **settings) as engine:
        for seed in range(2):
            engine.step(FAMILY.batch(4, seed))
        engine.save(tmp_path / "saved")
        shown = engine.optimizer.state_dict()["state"]
    shapes = [sorted((k, tuple(v.shape)) for k, v in one.items()) for one in shown.values()]
    assert [("momentum_buffer", (32, 32)), ("step", ())] in shapes
    assert [("exp_avg", (32,)), ("exp_avg_sq", (32,)), ("step", ())] in shapes
    model = FAMILY.build()
    with inside.engine(model, **settings) as engine:
        engine.load(tmp_path / "saved")
        for seed in range(2, 4):
            engine.step(FAMILY.batch(4, seed))
    assert difference(model.state_dict(), expected) == 0


def test_momentum_is_kept_of_matrices_alone(tmp_path: Path) -> None:
    """And of everything else what AdamW keeps: four bytes a parameter less."""
    settings = {**SINGLE, "disk": tmp_path, "overrides": {"num_on_disk": 1}}
    with inside.engine(FAMILY.build(), optimizer=MUON, **settings) as engine:
        for seed in range(NUM_STEPS):
            engine.step(FAMILY.batch(4, seed))
        forms = {name: unit.form for name, unit in inside.server(engine).units.items()}
        found = {name: one.clone() for name, one in engine.state_dict().items()}
    assert difference(found, train()) == 0
    kinds = forms["L0"].bytes_by_kind()
    shapes = forms["L0"].trained.shapes().values()
    assert kinds["momentum_buffer"] == sum(4 * s[0] * s[1] for s in shapes if len(s) == 2)
    assert kinds["exp_avg"] == kinds["exp_avg_sq"] == 2 * 128 * 4  # the norms, each at a block
    assert set(forms["T0"].state_kinds) == {"exp_avg", "exp_avg_sq"}


def test_a_user_chooses_what_is_whose() -> None:
    def groups(name: str, parameter: nn.Parameter) -> dict[str, Any] | None:
        if "down_proj" in name:
            return {"use_muon": False, "weight_decay": 0.5}
        return {"lr": 0.5} if "q_proj" in name else None

    model = FAMILY.build()
    with inside.engine(model, optimizer=l2l.Muon(groups=groups), **SINGLE) as engine:
        engine.step(FAMILY.batch(4))
        found = {(g["use_muon"], g["lr"], g["weight_decay"]) for g in engine.optimizer.param_groups}
        assert found == {
            (True, 1e-3, 0.1),
            (True, 0.5, 0.1),
            (False, 1e-3, 0.5),
            (False, 1e-3, 0.01),
        }
        assert all(("betas" in g) != g["use_muon"] for g in engine.optimizer.param_groups)
        assert all(("momentum" in g) == g["use_muon"] for g in engine.optimizer.param_groups)
    with pytest.raises(ValueError, match=r"for .*norm.*use_muon is for matrices, found .*\(32,\)"):
        inside.engine(
            FAMILY.build(), optimizer=l2l.Muon(groups=lambda *_: {"use_muon": True}), **SINGLE
        )
    with pytest.raises(ValueError, match=r"\['betas'\] for .*proj.*Muon has .*ns_steps"):
        inside.engine(
            FAMILY.build(), optimizer=l2l.Muon(groups=lambda *_: {"betas": (0.9, 0.9)}), **SINGLE
        )


def test_a_table_in_its_hands_is_updated_as_a_whole() -> None:
    def groups(name: str, parameter: nn.Parameter) -> dict[str, Any] | None:
        return {"use_muon": True} if "embed" in name else None

    optimizer = l2l.Muon(**MATRICES, groups=groups)
    settings = {"clip_norm": 0.05, "optimizer": optimizer}
    on_host = train(embedding="host", **settings)
    assert difference(on_host, train(embedding="device", **settings)) <= 1e-6


def test_adapters_beside_a_frozen_base() -> None:
    peft = pytest.importorskip("peft")

    def build() -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
        return peft.get_peft_model(FAMILY.build(), config)

    expected, model = build(), build()
    matrices = [one for one in expected.parameters() if one.requires_grad]
    optimizer = torch.optim.Muon(matrices, **MATRICES)
    for seed in range(NUM_STEPS):
        expected.zero_grad()
        expected(**FAMILY.batch(4, seed), use_cache=False).loss.backward()
        optimizer.step()
    with inside.engine(model, optimizer=MUON, **SINGLE) as engine:
        for seed in range(NUM_STEPS):
            engine.step(FAMILY.batch(4, seed))
    trained = [name for name, one in expected.named_parameters() if one.requires_grad]
    assert len(trained) == len(matrices) == 12
    assert difference(model.state_dict(), expected.state_dict()) <= 1e-5


def test_layers_that_come_join_the_groups_that_take_them() -> None:
    model = FAMILY.build()
    with inside.engine(model, optimizer=MUON, **SINGLE) as engine:
        engine.step(FAMILY.batch(4))
        engine.layers.insert(1, copy.deepcopy(FAMILY.build().model.layers[0]))
        engine.layers.insert(0, copy_of=2, moments="copied")
        for seed in range(2):
            engine.step(FAMILY.batch(4, seed))
        for group in engine.optimizer.param_groups:
            names = {n for n, one in model.named_parameters() for p in group["params"] if p is one}
            assert names
            matrices = {name for name in names if is_matrix(name, model.get_parameter(name))}
            assert matrices == (names if group["use_muon"] else set())
        inside.server(engine).settle_all()
        units = inside.server(engine).units
        assert [max(units[f"L{i}"].steps.values()) for i in range(5)] == [3, 3, 2, 3, 3]


def test_a_running_mean_and_eight_bit_moments_of_the_rest() -> None:
    others = l2l.AdamW(**OTHERS, moments="8bit")
    optimizer = l2l.Muon(**MATRICES, others=others, average=0.5)
    model = FAMILY.build()
    with inside.engine(model, optimizer=optimizer, **SINGLE) as engine:
        engine.step(FAMILY.batch(4, 0))
        first = dict(engine.named_weights())
        engine.step(FAMILY.batch(4, 1))
        second = {name: one.clone() for name, one in engine.named_weights()}
        with engine.averaged():
            mean = dict(engine.named_weights())
    for name, one in mean.items():
        torch.testing.assert_close(one, (first[name] + second[name]) / 2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": -1.0}, "lr must not be negative"),
        ({"ns_steps": 100}, "ns_steps must lie in"),
        ({"adjust_lr_fn": "mine"}, "adjust_lr_fn must be one of"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients must be three"),
        ({"others": l2l.Muon()}, "others must be l2l.AdamW"),
        ({"others": l2l.AdamW(average=0.9)}, "others must be l2l.AdamW"),
        ({"others": l2l.ScheduleFreeAdamW()}, "others must be l2l.AdamW"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"Muon: {said}"):
        l2l.Muon(**settings)


def test_layers_of_odd_sizes_and_of_nothing_train() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 5), nn.PReLU(5)]
            self.layers = nn.ModuleList(layers)
            for index, layer in enumerate(layers):
                layer.nothing = nn.Parameter(torch.zeros(0, 3 + index))  # type: ignore[assignment]

        def forward(self, values: Tensor, targets: Tensor) -> Tensor:
            for layer in self.layers:
                values = layer(values)
            return nn.functional.mse_loss(values, targets)

    torch.manual_seed(0)
    batch = {"values": torch.randn(8, 5), "targets": torch.randn(8, 5)}
    start = Odd().state_dict()
    lent, stays = {"num_shared": 4, "num_pieces": 2}, {"num_tail": 4, "num_device_states": 4}
    for overrides in ({}, lent, stays):
        model = Odd()
        model.load_state_dict(start)
        settings = {**SINGLE, "overrides": overrides, "clip_norm": 1.0}
        with inside.engine(model, optimizer=l2l.Muon(lr=0.05), **settings) as engine:
            losses = [engine.step(batch).loss for _ in range(30)]
        assert losses[-1] < 0.8 * losses[0]


def test_what_does_not_go_with_it_is_refused() -> None:
    model = FAMILY.build()
    with pytest.raises(ValueError, match=r"Muon looks at whole parameters, and 2 ranks"):
        Inventory.of(
            model,
            optimizer=MUON,
            precision="float32",
            base=None,
            layers=None,
            clip_norm=None,
            num_shares=2,
        )
    parameters = list(model.parameters())
    for beside, said in (
        ([torch.optim.AdamW(parameters)], "a list of AdamW, AdamW"),
        ([torch.optim.Muon(parameters[1:2]), torch.optim.Rprop(parameters)], "Muon and Rprop"),
    ):
        both = beside if len(beside) == 2 else [*beside, *beside]
        with pytest.raises(ValueError, match=said):
            inside.engine(model, optimizer=both, **SINGLE)


def test_a_plan_lets_the_device_make_all_updates_of_layers(as_h200: None) -> None:
    settings: dict[str, Any] = {**SINGLE, "microbatch_size": None, "clip_norm": 0.05}
    model = FAMILY.build()
    with inside.engine(
        model, optimizer=MUON, device_memory="512MiB", compile=False, **settings
    ) as engine:
        for seed in range(NUM_STEPS):
            engine.step(FAMILY.batch(4, seed))
        found = {name: one.clone() for name, one in engine.state_dict().items()}
        decisions = inside.planning(engine).decisions
        assert decisions.num_shared + decisions.num_device_states == 3
        assert "updates of matrices at work" in str(engine.plan)
        matrices = [one for name, one in model.named_parameters() if is_matrix(name, one)]
        words = f"21 matrices with {sum(one.numel() for one in matrices):,} parameters, AdamW 2,"
        assert words in str(engine.plan)
    assert difference(found, train(**settings)) <= 1e-2
    with inside.engine(
        FAMILY.build(), optimizer=MUON, device_memory="512MiB", autograd=True, **SINGLE
    ) as engine:
        engine.evaluate(FAMILY.batch(4))
        assert inside.planning(engine).decisions.num_shared == 0


def test_a_plan_counts_products_and_what_is_lent() -> None:
    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=6,
        num_attention_heads=16,
        vocab_size=2048,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = torch.zeros(16, 1024, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}

    def planned(num_steps: int, memory: str, clip_norm: float | None) -> l2l.Plan:
        return l2l.plan(
            model,
            batch,
            optimizer=l2l.Muon(ns_steps=num_steps),
            device_memory=memory,
            clip_norm=clip_norm,
            hardware=H200,
        )

    square, wide = 6 * 2048**3, 4 * 2048**2 * 6144 + 2 * 2048**3
    products = 6 * (4 * square + 3 * wide)  # of one iteration
    for memory, clip_norm in (("3GiB", 1.0), ("60GiB", None)):
        none, few, many = (planned(number, memory, clip_norm) for number in (0, 30, 90))
        longer = (many.predicted_seconds or 0.0) - (few.predicted_seconds or 0.0)
        assert longer == pytest.approx(60 * products / H200.matrix_rate, rel=0.05)
        assert (few.predicted_seconds or 0.0) > (none.predicted_seconds or 0.0)
        lines = {line.purpose: line.nbytes for line in few.ledger}
        largest = 2048 * 6144
        assert lines["updates of matrices at work"] > 6 * largest
        if memory == "3GiB":
            a_piece = (2 + 2 + 2 + 4) * largest  # weight, remainder, gradient, momentum
            assert lines["lent optimizer state"] >= 4 * a_piece
        else:
            assert "lent optimizer state" not in lines
