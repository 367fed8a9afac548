"""LoRA models of peft train as they are: equal to plain PyTorch, and cheap."""

import inside
import pytest
import torch
from families import FAMILIES
from reference import counts, reference_gradients, split

import l2l

peft = pytest.importorskip("peft")

ROWS = 6


def build(name: str = "llama_tied", **settings: object) -> torch.nn.Module:
    torch.manual_seed(0)
    base = FAMILIES[name].build()
    targets = {"gpt2": ["c_attn"], "bert_classification": ["query", "value"]}
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=targets.get(name, ["q_proj", "v_proj"]),
        fan_in_fan_out=name == "gpt2",
        **settings,
    )
    model = peft.get_peft_model(base, config)
    with torch.no_grad():  # peft begins with B = 0, where gradients of A are zero
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.1)
    return model


@pytest.mark.parametrize("size", [6, 2])
@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "bert_classification"])
def test_gradients_equal_those_of_plain_pytorch_bit_by_bit(name: str, size: int) -> None:
    family = FAMILIES[name]
    model, plain = build(name), build(name)
    batch = family.batch(ROWS)
    recorder = l2l.RecordGradients()
    with inside.engine(
        model, optimizer=recorder, precision="float32", device="cpu", microbatch_size=size
    ) as engine:
        loss = engine.step(batch).loss
    microbatches = split(batch, size)
    numbers = [counts(family.rule, one) for one in microbatches]
    expected_loss, expected = reference_gradients(plain, microbatches, numbers)
    assert loss == pytest.approx(float(expected_loss), rel=1e-6)
    trained = {key for key, gradient in expected.items() if gradient is not None}
    assert trained
    assert set(recorder.gradients) == trained
    assert all("lora" in key for key in trained)
    assert all(torch.equal(recorder.gradients[key], expected[key]) for key in trained)


def test_only_adapters_change_and_only_they_have_state() -> None:
    model = build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with inside.engine(
        model, optimizer=l2l.AdamW(lr=1e-2), device="cpu", precision="float32"
    ) as engine:
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
    model = build()
    numel = sum(parameter.numel() for parameter in model.parameters())
    model.to(torch.bfloat16)
    with inside.engine(model, optimizer=l2l.AdamW(lr=1e-2), device="cpu") as engine:
        engine.step(FAMILIES["llama_tied"].batch(ROWS))
        held = dict(inside.arena(engine).bytes_by_name)
    assert held["weights"] < 2.2 * numel + 20_000
