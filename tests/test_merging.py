"""A model of peft is exported as the plain model that it becomes when its adapter is merged."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES
from safetensors.torch import load_file
from test_peft import KINDS, adapted, build, engine_of, lora
from torch import Tensor

import l2l
from l2l.hugging_face import export_model

peft = pytest.importorskip("peft")
transformers.utils.logging.disable_progress_bar()


def predictions(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(**batch).logits
    return found


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("all linear", "llama_untied"),
        ("dora", "llama_untied"),
        ("saved head", "llama_untied"),
        ("saved norms", "llama_untied"),
        ("biases", "bert_classification"),
        ("embedding", "llama_untied"),
        ("tokens", "llama_untied"),
        ("parameters", "llama_untied"),
        ("ia3", "llama_untied"),
        ("vera", "llama_untied"),
        ("lora", "gpt2"),
        ("all linear", "qwen3_moe"),
    ],
)
def test_it_is_what_peft_makes_of_the_whole_model(kind: str, family: str, tmp_path: Path) -> None:
    model = build(kind, family)
    with engine_of(model, optimizer=l2l.AdamW(lr=1e-2)) as engine:
        engine.step(FAMILIES[family].batch(4))
        engine.export(tmp_path / "export", merge=True)
    whole = model.merge_and_unload()  # of which nothing was merged yet
    whole.save_pretrained(tmp_path / "reference")
    found, expected = (
        load_file(tmp_path / name / "model.safetensors") for name in ("export", "reference")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for name in ("config.json", "generation_config.json"):
        if (tmp_path / "reference" / name).exists():
            read = [
                json.loads((tmp_path / one / name).read_text()) for one in ("export", "reference")
            ]
            assert read[0] == read[1]
    _, report = type(whole).from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not any(report.values()), report


@pytest.mark.parametrize(
    "config",
    [
        lambda: lora(target_modules=["q_proj", "embed_tokens"]),
        lambda: lora(target_modules=["q_proj", "lm_head"]),
        lambda: lora(modules_to_save=["embed_tokens"]),
        lambda: lora(trainable_token_indices=[3, 4, 5]),
    ],
    ids=["embedding", "head", "saved embedding", "tokens"],
)
@pytest.mark.filterwarnings("ignore:Model.*tie_word_embeddings", "ignore:.*tied")
def test_what_the_adapter_has_made_different_is_tied_no_more(
    config: Callable[[], Any], tmp_path: Path
) -> None:
    """Where peft would merge an adapter of one place into the weight of both."""
    family = FAMILIES["llama_tied"]
    base: Any = family.build()
    model, batch = adapted(base, config()), family.batch(4)
    with engine_of(model, optimizer=l2l.AdamW(lr=1e-2)) as engine:
        engine.step(batch)
        expected = engine.predict(batch).logits
        engine.export(tmp_path / "export", merge=True)
    assert base.config.tie_word_embeddings, "the model's own is left alone"
    loaded = type(base).from_pretrained(tmp_path / "export")
    assert torch.dist(predictions(loaded, batch), expected) < 1e-5 * expected.norm()


def test_one_wrapped_module_is_in_memory_at_a_time(tmp_path: Path) -> None:
    model = build("all linear")
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def weight_of(name: str) -> Tensor:
        nonlocal most
        value: Tensor = model.get_parameter(name).detach().clone()
        alive.add(value)
        most = max(most, sum(one.nbytes for one in alive))
        return value

    export_model(model, tmp_path / "export", weight_of=weight_of, merge=True)
    assert most <= max(one.nbytes for one in model.parameters())


def test_it_is_merged_in_float32_and_rounded_once(tmp_path: Path) -> None:
    model = build("lora").to(torch.bfloat16)
    given = {name: one.detach() for name, one in model.named_parameters()}
    export_model(model, tmp_path / "export", weight_of=given.__getitem__, merge=True)
    place = "model.layers.0.self_attn.q_proj"
    base, a, b = (
        given[f"base_model.model.{place}.{name}.weight"].float()
        for name in ("base_layer", "lora_A.default", "lora_B.default")
    )
    found = load_file(tmp_path / "export" / "model.safetensors")[f"{place}.weight"]
    assert torch.equal(found, (base + (b @ a) * 2.0).bfloat16())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lambda: KINDS["prompt"][0](), "PROMPT_TUNING, which is not merged into weights"),
        (
            lambda: peft.AdaptionPromptConfig(
                task_type="CAUSAL_LM", adapter_len=4, adapter_layers=2
            ),
            r"ADAPTION_PROMPT, which peft does not merge: 'model.layers.1.self_attn'",
        ),
        (lambda: lora(lora_bias=True), r"peft cannot merge 'model.layers.0.self_attn.q_proj'"),
        (lambda: None, "the model has no adapter. Expected a peft.PeftModel"),
    ],
    ids=["prompt", "adaption", "bias", "none"],
)
def test_what_is_not_merged_is_refused(
    config: Callable[[], Any], words: str, tmp_path: Path
) -> None:
    model: Any = FAMILIES["llama_untied"].build()
    if config() is not None:
        model = adapted(model, config())
    with pytest.raises(ValueError, match=words):
        export_model(model, tmp_path / "export", weight_of=model.get_parameter, merge=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:Could not find a config file")
@pytest.mark.parametrize("kind", ["prompt", "p-tuning"])
def test_prompts_are_exported_as_they_were_trained(kind: str, tmp_path: Path) -> None:
    """Peft computes what it writes of them."""
    family = FAMILIES["llama_untied"]
    model, batch = build(kind), family.batch(4)
    with engine_of(model, optimizer=l2l.AdamW(lr=1e-2)) as engine:
        engine.step(batch)
        expected = engine.predict(batch).logits
        engine.export(tmp_path / "export")
    loaded = peft.PeftModel.from_pretrained(family.build(), tmp_path / "export")
    assert torch.dist(predictions(loaded, batch), expected) < 1e-5 * expected.norm()
