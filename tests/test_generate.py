"""Generating layer by layer: the tokens of the model's own `generate`, whatever the depth."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import inside
import pytest
import torch
import transformers
from census.cases import build, cases
from families import FAMILIES, SPECIAL, VOCABULARY, build_llama
from torch import nn
from torch.utils._pytree import tree_leaves

import l2l
from l2l.engine import generation
from l2l.run import Decoding

DECODERS = ("llama_tied", "llama_untied", "qwen3", "qwen3_moe", "gpt2", "gemma3", "opt", "mixtral")
ROWS, NEW = 4, 6


def prompts(rows: int = ROWS, length: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0  # padded on the left
    return {"input_ids": ids * mask, "attention_mask": mask}


def plain(model: nn.Module, **options: Any) -> torch.Tensor:
    model.eval()
    torch.manual_seed(0)
    return model.generate(**prompts(), **options)


def engine(model: nn.Module, **settings: Any) -> l2l.Engine:
    return inside.engine(model, **{"device": "cpu", "precision": "float32", **settings})


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device with little room."""
    monkeypatch.setattr(generation, "_most_staying", lambda *_: 0)
    monkeypatch.setattr("l2l.planner.planning.Planning.room_for_tensors", lambda _: 1 << 30)


def test_layers_whose_weights_are_on_disk_give_the_same_tokens(tmp_path: Path) -> None:
    expected = plain(build_llama(), do_sample=False, max_new_tokens=NEW)
    settings = {"disk": tmp_path, "overrides": {"num_on_disk": 2, "num_weights_on_disk": 3}}
    with engine(build_llama(), **settings) as one:
        for _ in range(2):
            found = one.generate(**prompts(), do_sample=False, max_new_tokens=NEW)
            assert torch.equal(found, expected)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    "beams": {"num_beams": 3, "do_sample": False},
    "in chunks": {"do_sample": False, "prefill_chunk_size": 2},
    "without a cache": {"do_sample": False, "use_cache": False},
}


@pytest.mark.parametrize("name", DECODERS)
def test_tokens_are_those_of_the_model(name: str) -> None:
    make = FAMILIES[name].build
    expected = plain(make(), do_sample=False, max_new_tokens=NEW)
    with engine(make()) as one:
        found = one.generate(**prompts(), do_sample=False, max_new_tokens=NEW)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_all_of_its_options_do_what_they_do(name: str) -> None:
    options = {**OPTIONS[name], "max_new_tokens": NEW}
    expected = plain(build_llama(), **options)
    with engine(build_llama()) as one:
        torch.manual_seed(0)
        assert torch.equal(one.generate(**prompts(), **options), expected)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}], ids=["cache", "no cache"])
@pytest.mark.parametrize("kind", ["input_ids", "inputs_embeds"])
def test_long_prompts_pass_in_chunks_where_they_may(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "MAX_TOKENS", 8)
    given = {"input_ids": prompts()["input_ids"], "inputs_embeds": torch.randn(ROWS, 5, 32)}[kind]
    options = {kind: given, **options, "do_sample": False, "max_new_tokens": NEW}
    expected = build_llama().eval().generate(**options)
    with engine(build_llama()) as one:
        assert torch.equal(one.generate(**options), expected)


def test_what_layers_leave_is_there_too() -> None:
    options = {"output_hidden_states": True, "return_dict_in_generate": True, "max_new_tokens": 3}
    expected = plain(build_llama(), do_sample=False, **options)
    with engine(build_llama()) as one:
        found = one.generate(**prompts(), do_sample=False, **options)
    pairs = zip(tree_leaves(found.hidden_states), tree_leaves(expected.hidden_states), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


SHARING = ("Gemma3nForCausalLM", "Gemma4ForCausalLM", "DeepseekV4ForCausalLM", "ZayaForCausalLM")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHARING)
def test_layers_that_write_into_a_dict_or_differ_in_size(name: str) -> None:
    case = next(one for one in cases("causal") if one.name == name)
    model, options = build(case)[0], {"do_sample": False, "max_new_tokens": 3}
    expected = plain(copy.deepcopy(model), **options)
    with engine(model) as one:
        assert torch.equal(one.generate(**prompts(), **options), expected)


def build_t5() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
        **SPECIAL,
    )
    return transformers.T5ForConditionalGeneration(config)


def build_bart() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
        **SPECIAL,
    )
    return transformers.BartForConditionalGeneration(config)


@pytest.mark.parametrize("build", [build_t5, build_bart])
def test_an_encoder_runs_once_and_its_decoder_for_every_token(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Decoding] = []
    create = Decoding.__init__

    def note(self: Decoding, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Decoding, "__init__", note)
    expected = plain(build(), do_sample=False, max_new_tokens=NEW)
    with engine(build()) as one:
        found = one.generate(**prompts(), do_sample=False, max_new_tokens=NEW)
    assert torch.equal(found, expected)
    (decoding,) = made
    assert decoding.num_fetched < 8  # two layers at a time, which is all of a decoder


def test_weights_cross_the_link_once_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that are there already: slots are as few as two."""
    fetched: list[int] = []
    for depth in (6, 12):
        with engine(build_llama(num_hidden_layers=depth)) as one, one.trace() as trace:
            one.generate(**prompts(), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW)
        fetches = [span for span in trace.spans if span.text.startswith("fetch L")]
        fetched.append(len(fetches))
    assert fetched[0] <= 6 * NEW + 2
    assert fetched[1] <= 12 * NEW + 2
    assert fetched[1] > 1.8 * fetched[0]


def test_layers_for_which_there_is_room_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_most_staying", lambda *_: 4)
    expected = plain(build_llama(num_hidden_layers=6), do_sample=False, max_new_tokens=NEW)
    with engine(build_llama(num_hidden_layers=6)) as one, one.trace() as trace:
        found = one.generate(**prompts(), do_sample=False, max_new_tokens=NEW)
    assert torch.equal(found, expected)
    fetches = [span.text for span in trace.spans if span.text.startswith("fetch L")]
    assert fetches == ["fetch L0 S0", "fetch L1 S1"]


def test_training_goes_on_as_if_nothing_had_been_generated() -> None:
    batch, settings = FAMILIES["llama_tied"].batch, {"clip_norm": 0.1, "seed": 3}

    def losses(*, generates: bool) -> list[float]:
        found = []
        with engine(build_llama(), **settings, optimizer=l2l.AdamW(lr=0.01)) as one:
            for seed in range(3):
                found.append(one.step(batch(ROWS, seed=seed)).loss)
                if generates:
                    one.generate(**prompts(), max_new_tokens=2)
            found.append(one.evaluate(batch(ROWS)))
        return found

    assert losses(generates=True) == losses(generates=False)


def test_what_was_trained_is_what_generates() -> None:
    with engine(build_llama(), optimizer=l2l.AdamW(lr=0.1), clip_norm=0.1) as one:
        one.step(FAMILIES["llama_tied"].batch(ROWS))
        found = one.generate(**prompts(), do_sample=False, max_new_tokens=NEW)
        model = build_llama()
        model.load_state_dict(one.state_dict())
    assert torch.equal(found, plain(model, do_sample=False, max_new_tokens=NEW))
    assert not torch.equal(found, plain(build_llama(), do_sample=False, max_new_tokens=NEW))


def test_a_frozen_model_generates() -> None:
    model = build_llama().requires_grad_(False)
    expected = plain(model, do_sample=False, max_new_tokens=NEW)
    with engine(model) as one:
        found = one.generate(**prompts(), do_sample=False, max_new_tokens=NEW)
    assert torch.equal(found, expected)


def test_a_model_with_an_adapter_generates() -> None:
    peft = pytest.importorskip("peft")

    def build() -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(build_llama(), config)

    expected = plain(build(), do_sample=False, max_new_tokens=NEW)
    with engine(build()) as one:
        found = one.generate(**prompts(), do_sample=False, max_new_tokens=NEW)
    assert torch.equal(found, expected)


def test_device_memory_is_constant_in_depth() -> None:
    peaks = []
    for depth in (4, 16):
        with engine(build_llama(num_hidden_layers=depth)) as one:
            one.generate(**prompts(), max_new_tokens=2, use_cache=False)
            peaks.append(one.device.peak_bytes())
    assert peaks[0] == peaks[1]


def test_an_error_of_the_model_leaves_the_engine_as_it_was() -> None:
    batch = FAMILIES["llama_tied"].batch(ROWS)
    with engine(build_llama()) as one:
        with pytest.raises(ValueError, match="model_kwargs"):
            one.generate(**prompts(), max_new_tokens=2, no_such_option=True)
        first = one.step(batch).loss
    with engine(build_llama()) as other:
        assert other.step(batch).loss == first


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        engine(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))) as one,
        pytest.raises(ValueError, match="no method 'generate'"),
    ):
        one.generate(torch.zeros(1, 2))
    monkeypatch.undo()
    monkeypatch.setattr("l2l.planner.planning.Planning.room_for_tensors", lambda _: 1000)
    with engine(build_llama()) as one, pytest.raises(ValueError, match="for fewer rows at a time"):
        one.generate(**prompts(), max_new_tokens=2)


@pytest.mark.parametrize(("room", "staying"), [(100, 10), (99, 7), (70, 5), (20, 0), (19, None)])
def test_how_many_layers_stay(
    room: int, staying: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert generation._most_staying([10] * 10, room) == staying
