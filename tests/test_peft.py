"""Models of peft train as they are: equal to plain PyTorch, cheap, and layers alike are alike."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import inside
import pytest
import torch
from families import FAMILIES, build_llama
from reference import counts, reference_gradients, split
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from typing_extensions import override

import l2l
from l2l.device.checking import ByteCount
from l2l.model import CutError, Partition
from l2l.planner.hardware import H200
from l2l.trial import Trial
from l2l.trial.trial import WORKSPACE_BYTES

peft = pytest.importorskip("peft")

ROWS = 6
BACKEND = "aot_eager_decomp_partition"  # traces and cuts as the real one does, and compiles nothing
TARGETS = {"gpt2": ["c_attn"], "bert_classification": ["query", "value"]}


def lora(**settings: Any) -> Any:
    return peft.LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], **settings}
    )


KINDS: dict[str, tuple[Callable[[], Any], int]] = {  # a config, and how many structures it makes
    "lora": (lora, 1),
    "all linear": (lambda: lora(target_modules="all-linear", task_type="CAUSAL_LM"), 1),
    "rslora": (lambda: lora(use_rslora=True), 1),
    "saved head": (lambda: lora(modules_to_save=["lm_head"]), 1),
    "saved norms": (lambda: lora(modules_to_save=["input_layernorm"]), 1),
    "saved embedding": (lambda: lora(modules_to_save=["embed_tokens"]), 1),
    "some layers": (lambda: lora(layers_to_transform=[1, 2]), 2),
    "ranks": (lambda: lora(rank_pattern={"layers.1.self_attn.q_proj": 2}), 2),
    "biases": (lambda: lora(bias="lora_only"), 1),
    "bias of lora": (lambda: lora(lora_bias=True), 1),
    "dora": (lambda: lora(use_dora=True), 1),
    "embedding": (lambda: lora(target_modules=["q_proj", "embed_tokens"]), 1),
    "head": (lambda: lora(target_modules=["q_proj", "lm_head"]), 1),
    "tokens": (lambda: lora(trainable_token_indices=[3, 4, 5]), 1),
    "parameters": (lambda: lora(target_modules=[], target_parameters=["down_proj.weight"]), 1),
    "ia3": (
        lambda: peft.IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        1,
    ),
    "vera": (lambda: peft.VeraConfig(target_modules=["q_proj", "o_proj"], r=8), 1),
    "prompt": (lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), 1),
    "p-tuning": (
        lambda: peft.PromptEncoderConfig(
            task_type="CAUSAL_LM",
            num_virtual_tokens=3,
            encoder_hidden_size=16,
        ),
        5,  # of so small a model the layers of the encoder of prompts are streamed too
    ),
}
IN_FRONT = ("prompt", "p-tuning")  # tokens before the first: so that its label counts too


def adapted(base: nn.Module, config: Any) -> Any:
    """A model with an adapter that is not what peft begins with, where many gradients are zero."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of biases that plain models do not have
        model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.05 * noise.to(parameter))
    return model


def build(kind: str = "lora", family: str = "llama_untied") -> Any:
    config = KINDS[kind][0]()
    if family in TARGETS:
        config.target_modules = set(TARGETS[family])
        config.fan_in_fan_out = family == "gpt2"
    return adapted(FAMILIES[family].build(), config)


def engine_of(model: nn.Module, **settings: Any) -> l2l.Engine:
    return inside.engine(model, device="cpu", precision="float32", **settings)


def assert_parity(make: Callable[[], Any], family: str, *, size: int, rule: Any = None) -> int:
    """Loss and gradients of a step, bit by bit; returns the number of structures."""
    rule, plain = rule or FAMILIES[family].rule, make()
    batch = FAMILIES[family].batch(ROWS)
    recorder = l2l.RecordGradients()
    with engine_of(make(), optimizer=recorder, microbatch_size=size) as engine:
        loss = engine.step(batch).loss
        number = len(set(inside.partition(engine).structures))
    microbatches = split(batch, size)
    numbers = [counts(rule, one) for one in microbatches]
    expected_loss, expected = reference_gradients(plain, microbatches, numbers)
    assert loss == pytest.approx(float(expected_loss), rel=1e-6)
    trained = {key for key, gradient in expected.items() if gradient is not None}
    assert trained
    assert trained <= {key for key, one in plain.named_parameters() if one.requires_grad}
    assert set(recorder.gradients) == trained
    assert all(torch.equal(recorder.gradients[key], expected[key]) for key in trained)
    return number


# --------------------------------------------------------------------------------------------------
# Parity


SEVERAL = ("all linear", "saved embedding", "dora", "vera", "prompt")  # microbatches: the usual
OTHERS = [
    pytest.param(kind, 2, marks=pytest.mark.thorough) for kind in KINDS if kind not in SEVERAL
]


@pytest.mark.parametrize(
    ("kind", "size"), [*((kind, 6) for kind in KINDS), *((kind, 2) for kind in SEVERAL), *OTHERS]
)
def test_gradients_equal_those_of_plain_pytorch_bit_by_bit(kind: str, size: int) -> None:
    rule = "tokens" if kind in IN_FRONT else None
    number = assert_parity(lambda: build(kind), "llama_untied", size=size, rule=rule)
    assert number == KINDS[kind][1]


@pytest.mark.parametrize("size", [6, 2])
@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "bert_classification"])
def test_so_are_those_of_other_families(family: str, size: int) -> None:
    assert assert_parity(lambda: build("lora", family), family, size=size) == 1


def test_experts_have_adapters_too() -> None:
    """Of peft's wrapper of parameters, which sets them anew whenever it runs."""
    assert assert_parity(lambda: build("all linear", "qwen3_moe"), "qwen3_moe", size=6) == 2


def test_of_several_adapters_the_active_one_is_trained() -> None:
    def make() -> Any:
        model = build()
        model.add_adapter("other", lora(r=2))
        model.set_adapter("other")
        return model

    assert assert_parity(make, "llama_untied", size=6) == 1


def test_a_dropped_out_adapter_is_proven_and_differs_from_one_without() -> None:
    """The proof compares the first step with the model's own code, mask for mask."""
    losses = []
    for dropout in (0.0, 0.3):
        config = lora(lora_dropout=dropout, init_lora_weights=False)
        with engine_of(adapted(FAMILIES["llama_untied"].build(), config)) as engine:
            losses.append(engine.step(FAMILIES["llama_untied"].batch(ROWS)).loss)
            assert len(set(inside.partition(engine).structures)) == 1
            structure = inside.partition(engine).structures[0]
            assert (structure in inside.compiler(engine).random) is bool(dropout)
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
            r"'past_key_values' \(DynamicCache\).*prefix tuning",
        ),
        (
            lambda: peft.AdaLoraConfig(
                task_type="CAUSAL_LM", target_modules=["q_proj"], total_step=10
            ),
            r"layers\.0\.self_attn\.q_proj\.lora_A\.default'.*a penalty on weights",
        ),
    ],
    ids=["prefix tuning", "adalora"],
)
def test_what_cannot_be_right_is_refused_by_name(config: Callable[[], Any], words: str) -> None:
    model = adapted(FAMILIES["llama_untied"].build(), config())
    with engine_of(model) as engine, pytest.raises(CutError, match=words):
        engine.step(FAMILIES["llama_untied"].batch(ROWS))


def test_code_that_hooks_into_layers_is_refused() -> None:
    """As peft does for adapters that are named by row; layers run elsewhere."""

    class Hooking(Stack):
        @override
        def forward(self, inputs: Tensor) -> dict[str, Tensor]:
            for module in self.modules():
                if isinstance(module, Noting):
                    module.inner.register_forward_hook(lambda module, args, value: value * 2)
            return super().forward(inputs)

    with engine_of(Hooking()) as engine, pytest.raises(CutError, match="modifies layer 0"):
        engine.step({"inputs": torch.ones(4, 8)})


def test_only_adapters_change_and_only_they_have_state() -> None:
    model = build("lora", "llama_tied")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with engine_of(model, optimizer=l2l.AdamW(lr=1e-2)) as engine:
        for seed in range(3):
            engine.step(FAMILIES["llama_tied"].batch(ROWS, seed=seed))
        held = dict(inside.arena(engine).bytes_by_name)
    after = model.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    adapters = {key: parameter for key, parameter in model.named_parameters() if "lora" in key}
    assert changed == set(adapters)
    frozen = sum(p.numel() for key, p in model.named_parameters() if key not in adapters)
    moments = sum(p.numel() for p in adapters.values()) * 4
    assert moments <= held["exp_avg"] < moments + 4 * 128 * len(adapters)
    assert held["weights"] >= 4 * frozen


def test_frozen_weights_take_two_bytes_each_in_bfloat16() -> None:
    model = build("lora", "llama_tied")
    numel = sum(parameter.numel() for parameter in model.parameters())
    model.to(torch.bfloat16)
    with inside.engine(model, optimizer=l2l.AdamW(lr=1e-2), device="cpu") as engine:
        engine.step(FAMILIES["llama_tied"].batch(ROWS))
        held = dict(inside.arena(engine).bytes_by_name)
    assert held["weights"] < 2.2 * numel + 20_000


# --------------------------------------------------------------------------------------------------
# Layers with equal adapters are one structure


def structures_of(model: Any) -> list[str]:
    return Partition(model, layers=None).structures


def _other_scale(layer: Any) -> None:
    layer.self_attn.q_proj.set_scale("default", 3.0)


def _without_adapter(layer: Any) -> None:
    layer.self_attn.q_proj.enable_adapters(False)


def _other_adapter(layer: Any) -> None:
    layer.self_attn.q_proj.set_adapter("other")
    for parameter in layer.parameters():
        parameter.requires_grad_(False)


def _hooked(layer: Any) -> None:
    layer.self_attn.q_proj.register_forward_hook(lambda module, args, value: value * 2)


@pytest.mark.parametrize("change", [_other_scale, _without_adapter, _other_adapter, _hooked])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_layers_that_really_differ_are_not_alike(kind: str, change: Callable[[Any], None]) -> None:
    model = build(kind)
    model.add_adapter("other", KINDS[kind][0]())
    model.set_adapter("default")
    layers = model.base_model.model.model.layers
    if change is _other_adapter:  # which of them requires gradients is not what tells them apart
        model.requires_grad_(False)
    assert len(set(structures_of(model))) == 1
    change(layers[1])
    first, second, third = structures_of(model)
    assert first == third != second


@pytest.mark.parametrize(
    "kind",
    ["lora", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("all linear", "dora"))],
)
def test_a_deep_model_is_compiled_once(kind: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    batch, found = FAMILIES["llama_untied"].batch(ROWS), []
    for backend in (False, BACKEND):
        model = adapted(build_llama(num_hidden_layers=7), KINDS[kind][0]())
        recorder = l2l.RecordGradients()
        with engine_of(model, optimizer=recorder, compile=backend, microbatch_size=3) as engine:
            engine.step(batch)
            assert len(set(inside.partition(engine).structures)) == 1
            assert len(inside.compiler(engine).programs) == bool(backend)
        found.append(recorder.gradients)
    # One for the first layer, whose input requires no gradient, and one for all others.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        assert torch.dist(gradient, found[1][name]) <= 2e-6 * gradient.norm()


class Notes:
    """What a layer notes for itself."""

    def __init__(self) -> None:
        self.gain = 0.0


class Noting(nn.Module):
    """Works out, when it first runs, what its weights tell it once and for all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.notes: Any = Notes()

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.notes.gain:
            self.notes.gain = float(self.inner.in_features + 2 * self.number)
        return hidden + torch.tanh(self.inner(hidden)) * self.notes.gain


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Noting() for _ in range(3))
        for number, layer in enumerate(self.layers):
            layer.number = number

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            inputs = layer(inputs)
        return {"loss": inputs.pow(2).mean()}


def test_layers_that_note_something_for_themselves_keep_it_for_themselves() -> None:
    """They hold equal objects: if one program ran them all, each would find the first one's."""
    assert len(set(structures_of(Stack()))) == 1
    batch = {"inputs": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}
    expected = Stack()(**batch)["loss"].item()
    with engine_of(Stack(), compile=BACKEND) as engine:
        assert engine.step(batch).loss == pytest.approx(expected, rel=1e-6)
        assert inside.partition(engine).structures[0] in inside.compiler(engine).uncompiled


# --------------------------------------------------------------------------------------------------
# The trial


@pytest.mark.parametrize("number", [2, 6])
def test_a_trial_holds_one_layer_whatever_their_number(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every layer has a structure of its own. What the message would ask for is what it takes."""
    base = Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=number,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=512,
        )
    )
    ranks = {rf".*layers\.{index}\..*": index + 1 for index in range(number)}
    model = adapted(base, lora(target_modules="all-linear", rank_pattern=ranks))
    run, taken = Trial.run, []

    def counted(trial: Trial, rows: Any, *given: Any, **settings: Any) -> Any:
        with ByteCount() as count:
            found = run(trial, rows, *given, **settings)
        taken.append((count.peak_bytes, count.live_bytes, trial.least_bytes(found.rows)))
        return found

    monkeypatch.setattr(Trial, "run", counted)
    ids = torch.randint(0, 512, (4, 8))
    with engine_of(model) as engine:
        engine.step({"input_ids": ids, "labels": ids})
        assert len(set(inside.partition(engine).structures)) == number
        sizes = {n: one.form.weight_layout.nbytes for n, one in inside.server(engine).units.items()}
    around = sum(nbytes for name, nbytes in sizes.items() if name[0] != "L")
    layer = max(nbytes for name, nbytes in sizes.items() if name[0] == "L")
    peak, left, told = taken[0]
    assert around + layer <= peak < around + 1.25 * layer
    assert left < 1000
    assert 0.9 * peak < told - WORKSPACE_BYTES < 1.2 * peak


def test_a_model_of_14_billion_parameters_is_planned_for_in_seconds() -> None:
    """48 layers with adapters on every matrix, 16,384 tokens, 8 GiB."""
    with torch.device("meta"):
        base = Qwen2ForCausalLM(
            Qwen2Config(
                hidden_size=5120,
                intermediate_size=13824,
                num_hidden_layers=48,
                num_attention_heads=40,
                num_key_value_heads=8,
                vocab_size=152064,
            )
        ).to(torch.bfloat16)
        model = peft.get_peft_model(base, lora(r=16, target_modules="all-linear"))
    assert 14.7e9 < sum(one.numel() for one in base.parameters()) < 14.9e9
    assert len(set(structures_of(model))) == 1
    began = time.perf_counter()
    plan = l2l.plan(model, num_rows=16, length=1024, device_memory="8GiB", hardware=H200)
    assert time.perf_counter() - began < 20
    assert plan.total_bytes("device") <= 8 << 30
    assert plan.total_bytes("host") < 60 << 30
    assert plan.predicted_seconds < 4.0


class Scored(Stack):
    """Its loss is nothing where its inputs are: what that averages over is not known then."""

    @override
    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = super().forward(inputs)["loss"]
        return {"loss": found * (inputs * labels[:, None]).abs().mean()}


def test_a_later_trial_finds_nothing_else_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = Trial.run, []

    def watched(trial: Trial, rows: Any, known: Any, *, needs_loss: bool) -> Any:
        if trial.must_run(known, needs_loss=needs_loss):
            seen.append(len(inside.places(engine)))
        return run(trial, rows, known, needs_loss=needs_loss)

    monkeypatch.setattr(Trial, "run", watched)
    some = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.ones(4)
    settings = {"device_memory": "200MiB", "overrides": {"num_tail": 1}, "prove": False}
    with engine_of(Scored(), microbatch_size=4, **settings) as engine:
        for inputs in (torch.zeros(4, 8), some, some):
            engine.step({"inputs": inputs, "labels": labels})
        assert inside.places(engine)
    assert seen == [0, 0]
