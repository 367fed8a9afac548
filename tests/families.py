"""The models every claim is tested on: one tiny random model per family, with its batches.

Each family differs from the others in something that matters to cutting a model at its list of
layers: what a layer returns, how it gets its arguments, what it gets besides the hidden state,
which weights are tied, which parameters get no gradient, what the loss averages over. Everything
is built from a configuration with a fixed seed, in float32, in training mode and without dropout
(the `build_...` functions take overrides, so that a test can turn dropout on).

After construction every parameter is moved a little by noise: biases that are all zero and norms
that are all one would hide a swap between layers.

Batches hold rows of several lengths, padded on the right, with -100 where a token label must be
ignored. Row 0 of seed 0 has no padding, so that masks the model leaves out for full rows are
tested beside masks it makes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

Batch = dict[str, Tensor]
Rule = Literal["shifted", "tokens", "rows"]

VOCABULARY = 67
LENGTH = 12
HIDDEN = 32
LAYERS = 3
CLASSES = 5
IGNORED = -100
FIRST_WORD = 3  # ids below are special: padding, beginning and end of text
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Family:
    """A tiny model, its batches, and what a test must know about it.

    Attributes:
        name: Key in `FAMILIES`.
        build: Gives a fresh model; two calls give equal weights.
        batch: Gives a batch of that many rows; `seed` selects another one.
        rule: What the loss averages over: labels after the first that are not ignored
            ("shifted"), labels that are not ignored ("tokens"), or "rows".
        layers: Dotted name of the list of layers, where the model has several.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[..., Batch]
    rule: Rule
    layers: str | None = None


# ----------------------------------------------------------------------------------------------
# Batches
# ----------------------------------------------------------------------------------------------


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def _words(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, both [rows, LENGTH]; rows have different lengths."""
    ids = torch.randint(FIRST_WORD, VOCABULARY, (rows, LENGTH), generator=_generator(seed))
    lengths = LENGTH - (5 * torch.arange(rows) + seed) % (LENGTH // 2)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return ids * mask, mask


def causal_batch(rows: int, seed: int = 0) -> Batch:
    """Next-token labels: ignored on the padding and on a prompt of zero to three words."""
    ids, mask = _words(rows, seed)
    answered = torch.arange(LENGTH) >= (torch.arange(rows) % 4)[:, None]
    labels = ids.masked_fill(~(mask.bool() & answered), IGNORED)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def masked_batch(rows: int, seed: int = 0, num_labels: int = VOCABULARY) -> Batch:
    """Labels on the first word and on about a third of the others, ignored elsewhere."""
    ids, mask = _words(rows, seed)
    generator = _generator(seed + 500)
    labels = torch.randint(0, num_labels, (rows, LENGTH), generator=generator)
    chosen = torch.rand(rows, LENGTH, generator=generator) < 0.35
    chosen[:, 0] = True  # each row has something to predict, also as a microbatch of its own
    labels = labels.masked_fill(~(chosen & mask.bool()), IGNORED)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def classification_batch(rows: int, seed: int = 0) -> Batch:
    """One label per row."""
    ids, mask = _words(rows, seed)
    labels = torch.randint(0, CLASSES, (rows,), generator=_generator(seed + 500))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def image_batch(rows: int, seed: int = 0) -> Batch:
    """Images of 8 x 8 pixels, one label each."""
    generator = _generator(seed)
    pixels = torch.randn(rows, 3, 8, 8, generator=generator)
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return {"pixel_values": pixels, "labels": labels}


def translation_batch(rows: int, seed: int = 0) -> Batch:
    """Source words and target labels of other lengths than the source."""
    ids, mask = _words(rows, seed)
    target, target_mask = _words(rows, seed + 2)
    labels = target.masked_fill(target_mask == 0, IGNORED)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def speech_batch(rows: int, seed: int = 0) -> Batch:
    """Spectra of 8 bands and target labels."""
    features = torch.randn(rows, 8, 2 * LENGTH, generator=_generator(seed))
    target, mask = _words(rows, seed + 2)
    return {"input_features": features, "labels": target.masked_fill(mask == 0, IGNORED)}


def masks(kind: str, ids: Tensor) -> dict[str, Tensor]:
    """Entries of a batch that say what words may attend to."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    match kind:
        case "all ones":
            return {"attention_mask": torch.ones_like(ids)}
        case "padded":
            return {"attention_mask": (positions < ids.shape[1] - 2).long()}
        case "packed":
            return {"position_ids": positions % (ids.shape[1] // 2)}
    return {}


def hand_written_batch(rows: int, seed: int = 0) -> Batch:
    """Words for `HandWritten`: the expert of a word is its id modulo four.

    No word goes to expert 3. Words for expert 2 are in every third row (1, 4, 7, ...) when the
    seed is even and in no row when it is odd, so that this expert goes without gradient in some
    microbatches and in some steps.
    """
    ids, mask = _words(rows, seed)
    experts = torch.randint(0, 2, (rows, LENGTH), generator=_generator(seed + 500))
    if seed % 2 == 0:
        experts[1::3, :4] = 2
    ids = ids // 4 % (VOCABULARY // 4) * 4 + experts
    labels = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=_generator(seed + 900))
    labels[:, ::5] = IGNORED
    return {"ids": ids, "labels": labels.masked_fill(mask == 0, IGNORED)}


def vector_batch(rows: int, seed: int = 0) -> Batch:
    """Sequences of vectors, one label each."""
    generator = _generator(seed)
    inputs = torch.randn(rows, LENGTH, HIDDEN, generator=generator)
    return {"inputs": inputs, "labels": torch.randint(0, CLASSES, (rows,), generator=generator)}


# ----------------------------------------------------------------------------------------------
# Hand-written models
# ----------------------------------------------------------------------------------------------


class DenseLayer(nn.Module):
    """Residual layer; takes the experts' choice as `ExpertLayer` does, and leaves it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.inner = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.outer = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor, experts: Tensor, scale: float) -> tuple[Tensor, None]:
        return hidden + scale * self.outer(torch.tanh(self.inner(self.norm(hidden)))), None


class ExpertLayer(nn.Module):
    """Each word goes to one expert of four; an expert without words does not run at all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))
            for _ in range(4)
        )

    def forward(self, hidden: Tensor, experts: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        normed = self.norm(hidden)
        change = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            chosen = experts == number
            if chosen.any():
                change = change.index_put((chosen,), expert(normed[chosen]))
        return hidden + scale * change, experts


class HandWritten(nn.Module):
    """Layers in an `nn.ModuleList`, positional arguments, tuples, experts, a dict with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Parameter(torch.randn(LENGTH, HIDDEN))
        self.stack = nn.ModuleList([DenseLayer(), ExpertLayer(), DenseLayer()])
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.words(ids) + self.places[: ids.shape[1]]
        experts = ids % 4
        for layer in self.stack:
            hidden = layer(hidden, experts, 0.5)[0]
        logits = self.head(self.norm(hidden))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class OverRows(nn.Module):
    """Batch norm over rows and places: its buffers change with every microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden.transpose(1, 2)).transpose(1, 2)


class ResidualLayer(nn.Module):
    """Takes a tensor and returns a tensor."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.inner = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.outer = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.outer(torch.relu(self.inner(self.norm(hidden))))


class SequentialClassifier(nn.Module):
    """Layers in an `nn.Sequential`, called as a whole and not one by one."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.entry = nn.Linear(HIDDEN, HIDDEN)
        self.stack = nn.Sequential(*(ResidualLayer(norm()) for _ in range(LAYERS)))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.stack(self.entry(inputs)).mean(dim=1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def _create_sequential() -> nn.Module:
    return SequentialClassifier(lambda: nn.LayerNorm(HIDDEN))


def _create_batchnorm() -> nn.Module:
    return SequentialClassifier(OverRows)


# ----------------------------------------------------------------------------------------------
# Building
# ----------------------------------------------------------------------------------------------


def prepare(create: Callable[[], nn.Module]) -> nn.Module:
    """Create a model under the fixed seed, ready to train, each parameter moved by noise."""
    torch.manual_seed(20)
    model = create().float().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.03)
    return model


def _transformer(model: str, config: str, **settings: Any) -> nn.Module:
    chosen = getattr(transformers, config)(**settings)
    return prepare(lambda: getattr(transformers, model)(chosen))


def _decoder_settings(**overrides: Any) -> dict[str, Any]:
    """What most decoders since Llama call their sizes."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        **SPECIAL,
        **overrides,
    }


def build_llama(**overrides: Any) -> nn.Module:
    """Llama; untied unless told otherwise."""
    settings = _decoder_settings(tie_word_embeddings=False, **overrides)
    return _transformer("LlamaForCausalLM", "LlamaConfig", **settings)


def _build_llama_tied() -> nn.Module:
    settings = _decoder_settings(tie_word_embeddings=True)
    return _transformer("LlamaForCausalLM", "LlamaConfig", **settings)


def _build_qwen3() -> nn.Module:
    settings = _decoder_settings(head_dim=8, tie_word_embeddings=False)
    return _transformer("Qwen3ForCausalLM", "Qwen3Config", **settings)


def _build_qwen3_moe() -> nn.Module:
    """Experts packed in one tensor per layer; the middle layer is dense."""
    settings = _decoder_settings(
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        mlp_only_layers=[1],
        tie_word_embeddings=False,
    )
    return _transformer("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **settings)


def _build_qwen3_next() -> nn.Module:
    """Linear attention beside full attention, experts with a shared one."""
    settings = _decoder_settings(
        head_dim=8,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        tie_word_embeddings=False,
    )
    return _transformer("Qwen3NextForCausalLM", "Qwen3NextConfig", **settings)


def build_gpt2(**overrides: Any) -> nn.Module:
    """GPT-2, tied, learned positions, one matrix for query, key and value."""
    settings = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **overrides}
    sizes = {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4}
    return _transformer(
        "GPT2LMHeadModel", "GPT2Config", n_positions=32, **sizes, **SPECIAL, **settings
    )


def _build_gpt_neox() -> nn.Module:
    settings = _decoder_settings(
        attention_dropout=0.0, hidden_dropout=0.0, tie_word_embeddings=False
    )
    del settings["num_key_value_heads"]
    return _transformer("GPTNeoXForCausalLM", "GPTNeoXConfig", **settings)


def _build_opt() -> nn.Module:
    """Learned positions computed from the attention mask; tied."""
    return _transformer(
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        word_embed_proj_dim=HIDDEN,
        ffn_dim=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=32,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        **SPECIAL,
    )


def _build_phi3() -> nn.Module:
    settings = _decoder_settings(
        original_max_position_embeddings=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attention_dropout=0.0,
        tie_word_embeddings=False,
    )
    return _transformer("Phi3ForCausalLM", "Phi3Config", **settings)


def _build_falcon() -> nn.Module:
    """Attention and feed-forward side by side, one key and value head."""
    return _transformer(
        "FalconForCausalLM",
        "FalconConfig",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **SPECIAL,
    )


def _build_gemma3() -> nn.Module:
    """Windows of four words in the outer layers, full attention between them; tied."""
    settings = _decoder_settings(
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    return _transformer("Gemma3ForCausalLM", "Gemma3TextConfig", **settings)


def build_mixtral(**overrides: Any) -> nn.Module:
    """Mixtral; its router loss is off unless told otherwise."""
    settings = _decoder_settings(
        num_local_experts=4, num_experts_per_tok=2, sliding_window=None, tie_word_embeddings=False
    )
    settings |= {"output_router_logits": False, **overrides}
    return _transformer("MixtralForCausalLM", "MixtralConfig", **settings)


def _encoder_settings(**overrides: Any) -> dict[str, Any]:
    """What BERT and its kin call their sizes."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **SPECIAL,
        **overrides,
    }


def build_bert(model: str = "BertForSequenceClassification", **overrides: Any) -> nn.Module:
    """BERT with one of its heads."""
    settings = _encoder_settings(num_labels=CLASSES, **overrides)
    return _transformer(model, "BertConfig", **settings)


def _build_mpnet() -> nn.Module:
    """Its position bias is computed once, given to every layer, and requires a gradient."""
    settings = _encoder_settings(num_labels=CLASSES, relative_attention_num_buckets=32)
    return _transformer("MPNetForTokenClassification", "MPNetConfig", **settings)


def _build_vit() -> nn.Module:
    settings = _encoder_settings(num_labels=CLASSES, image_size=8, patch_size=4)
    for name in ("vocab_size", "max_position_embeddings", *SPECIAL):
        del settings[name]
    return _transformer("ViTForImageClassification", "ViTConfig", **settings)


def _build_mamba() -> nn.Module:
    return _transformer(
        "MambaForCausalLM",
        "MambaConfig",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        state_size=4,
        num_hidden_layers=LAYERS,
        tie_word_embeddings=False,
        **SPECIAL,
    )


def build_bart() -> nn.Module:
    """BART: two lists of layers."""
    stacks = {"decoder_start_token_id": 2, "forced_eos_token_id": None, "scale_embedding": True}
    return _transformer(
        "BartForConditionalGeneration", "BartConfig", **_encoder_decoder_settings(**stacks)
    )


def _build_whisper() -> nn.Module:
    settings = _encoder_decoder_settings(
        num_mel_bins=8,
        max_source_positions=LENGTH,
        max_target_positions=32,
        decoder_start_token_id=1,
    )
    del settings["max_position_embeddings"]
    return _transformer("WhisperForConditionalGeneration", "WhisperConfig", **settings)


def _encoder_decoder_settings(**overrides: Any) -> dict[str, Any]:
    """What BART and Whisper call their sizes."""
    return {
        "vocab_size": VOCABULARY,
        "d_model": HIDDEN,
        "encoder_layers": LAYERS,
        "decoder_layers": LAYERS,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 32,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        **SPECIAL,
        **overrides,
    }


_ALL: tuple[Family, ...] = (
    Family("llama_tied", _build_llama_tied, causal_batch, "shifted"),
    Family("llama_untied", build_llama, causal_batch, "shifted"),
    Family("qwen3", _build_qwen3, causal_batch, "shifted"),
    Family("qwen3_moe", _build_qwen3_moe, causal_batch, "shifted"),
    Family("qwen3_next", _build_qwen3_next, causal_batch, "shifted"),
    Family("gpt2", build_gpt2, causal_batch, "shifted"),
    Family("gpt_neox", _build_gpt_neox, causal_batch, "shifted"),
    Family("opt", _build_opt, causal_batch, "shifted"),
    Family("phi3", _build_phi3, causal_batch, "shifted"),
    Family("falcon", _build_falcon, causal_batch, "shifted"),
    Family("gemma3", _build_gemma3, causal_batch, "shifted"),
    Family("mixtral", build_mixtral, causal_batch, "shifted"),
    Family("mamba", _build_mamba, causal_batch, "shifted"),
    Family("bert_classification", build_bert, classification_batch, "rows"),
    Family("bert_masked_lm", partial(build_bert, "BertForMaskedLM"), masked_batch, "tokens"),
    Family("mpnet", _build_mpnet, partial(masked_batch, num_labels=CLASSES), "tokens"),
    Family("vit_classification", _build_vit, image_batch, "rows"),
    Family("bart", build_bart, translation_batch, "tokens", "model.decoder.layers"),
    Family("whisper", _build_whisper, speech_batch, "tokens", "model.decoder.layers"),
    Family("hand_written", partial(prepare, HandWritten), hand_written_batch, "tokens"),
    Family("sequential", partial(prepare, _create_sequential), vector_batch, "rows"),
    Family("batchnorm", partial(prepare, _create_batchnorm), vector_batch, "rows"),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
