"""A tiny config of any architecture of transformers, by rules about the names of its settings.

A config's defaults say what there is and how it hangs together; the rules only make numbers small.
What a model type needs besides is in settings.py.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 99
LAYERS = 3

_HIDDEN = (
    "hidden_size|d_model|n_embd|embed_dim|embedding_size|embedding_dim|word_embed_proj_dim|"
    "projection_dim|hidden_dim|dim_model|attention_hidden_size|lru_width|"
    "feature_projection_input_dim|out_hidden_size|cross_attention_dim|proj_dim|vocab_hidden_size|"
    "emb_dim|codebook_dim|output_dim|input_dim|encoder_dim|projector_hidden_size|kv_dim|d_latents|"
    "vocab_dim|output_proj_dim|text_embed_dim|image_embed_dim|vision_hidden_size|text_hidden_size"
)
_INNER = (
    "intermediate_size|ffn_dim|d_ff|ffn_hidden_size|n_inner|mlp_dim|ff_dim|intermediate_dim|"
    "feed_forward_hidden_size|dim_ff|intermediate_size_mlp"
)
_HEADS = (
    "num_attention_heads|n_heads?|num_heads|attention_heads|num_self_attention_heads|"
    "num_cross_attention_heads"
)
_EXPERTS = (
    "num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts|"
    "num_sparse_experts|moe_num_primary_experts"
)
_CHOSEN_EXPERTS = (
    "num_experts_per_tok|num_experts_per_token|moe_topk|moe_top_k|moe_router_topk|moe_k|"
    "num_selected_experts|experts_per_token|router_top_k"
)
_POSITIONS = (
    "max_position_embeddings|n_positions|max_source_positions|max_target_positions|max_seq_len|"
    "max_seq_length|n_ctx|max_positions|max_sequence_length|max_context_length|axial_pos|"
    "original_max_position_embeddings"
)
_NUM_LAYERS = re.compile(
    "^(num_hidden_layers|n_layers?|num_layers|num_blocks|depth|layers|text_layers|vision_layers|"
    "qformer_layers|num_mem_blocks|decoder_depth|num_(encoder|decoder)_(hidden_)?layers|"
    "(encoder|decoder|text|vision|speech_encoder|t2u_encoder|t2u_decoder)_(num_)?(hidden_)?layers|"
    "(encoder|decoder|predictor|pred)_num_hidden_layers)$"
)
_RANDOM = re.compile(
    "drop|jitter|mask_time_prob|mask_feature_prob|noise_scale|attn_pdrop|label_smoothing"
)
_TOKEN = re.compile("(_token_id|_token_index|_token_ids|_id|_idx)$")
_WIDTHS = ("hidden_sizes", "embed_dims", "encoder_hidden_sizes", "decoder_hidden_sizes")

LARGEST = [  # the first that matches the name of an integer says how large it may be
    (re.compile(f"({_EXPERTS})$"), 4),
    (re.compile(f"^({_CHOSEN_EXPERTS})$"), 2),
    (re.compile("(num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num)$"), 2),
    (re.compile(f"({_HEADS})$"), 4),
    (re.compile("(lora_rank|_rank|low_rank_dim|lora_dim)$"), 16),
    (
        re.compile(
            "(head_dim|d_kv|kv_channels|d_head|head_size|attention_head_dim|attention_key_size)$"
        ),
        8,
    ),
    (re.compile(f"({_INNER})$"), 48),
    (re.compile(f"^(dim|width)$|(^|_)({_HIDDEN})$"), 32),
    (re.compile(f"({_POSITIONS})$"), 64),
]
EXACT: dict[str, Any] = {  # settings that have this value, where there are any of that name
    "num_labels": 3,
    "fast_lm_head": False,
    "aux_loss_coef": 0.1,
    # Heads, experts and layers of several kinds
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16},
    **{"n_group": 1, "topk_group": 1, "num_expert_group": 1, "moe_layer_freq": 1},
    **{"num_nextn_predict_layers": 0, "first_k_dense_replace": 1, "num_dense_layers": 1},
    **{"expert_layer_period": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    **{"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "query_pre_attn_scalar": 8},
    **{"attention_head_size": 8, "rotary_dim": 4, "mrope_section": [2, 1, 1]},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
    **{"laurel_rank": 4, "num_kv_shared_layers": 0, "pooler_hidden_size": 32, "num_latents": 4},
    **{"entity_emb_size": 16, "entity_vocab_size": 20, "num_query_tokens": 4},
    # Windows and blocks of attention
    **{"sliding_window": 4, "window_size": 4, "attention_window": 4, "block_size": 4},
    **{"relative_attention_num_buckets": 8},
    # State spaces, linear attention
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_num_heads": 8, "mamba_head_dim": 8},
    **{"mamba_d_state": 4, "ssm_state_size": 4, "state_size": 4, "mamba_n_groups": 1},
    **{"mamba_chunk_size": 8, "chunk_size": 8, "n_groups": 1, "mamba_ngroups": 1},
    **{"mamba_dt_rank": 4, "time_step_rank": 4, "mamba_d_ssm": 64, "conv_L_cache": 3},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    # Images and videos
    **{"image_size": 32, "patch_size": 8, "spatial_merge_size": 2, "backbone_image_size": 32},
    **{"num_frames": 4, "tubelet_size": [2, 8, 8]},
    # Sound
    **{"num_mel_bins": 8, "conv_dim": (16,) * 7, "tdnn_dim": (16,) * 5, "codevector_dim": 16},
    **{"proj_codevector_dim": 16, "num_codevectors_per_group": 8, "classifier_proj_size": 16},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
}
OF_CONFIG = {"Mamba2Config": {"num_heads": 8, "head_dim": 8, "hidden_size": 32, "n_groups": 1}}
_NOT_SETTINGS = {
    "transformers_version",
    "id2label",
    "label2id",
    "architectures",
    "dtype",
    "model_type",
}


class Tokens:
    """Ids for the special tokens of a model: small ones, and the same for the same."""

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}

    def of(self, name: str, old: int) -> int:
        for number, prefix in enumerate(("pad", "bos", "eos")):
            if name.startswith(prefix):
                return number
        return self._ids.setdefault(old, 3 + len(self._ids))


def _number(name: str, value: int, tokens: Tokens, layers: int) -> int | None:
    """A smaller number, or None where no rule is about it."""
    if _RANDOM.search(name):
        return 0
    if name.endswith("vocab_size") or name == "n_vocab":
        return VOCABULARY if value > 64 else value
    if _NUM_LAYERS.match(name):
        return min(value, layers)
    for pattern, largest in LARGEST:
        if pattern.search(name):
            return min(value, largest)
    return tokens.of(name, value) if _TOKEN.search(name) else None


def _several(name: str, values: Any, tokens: Tokens, layers: int, had_layers: int | None) -> Any:
    """A smaller list, or None where it may stay as it is."""
    kind, are_numbers = type(values), all(isinstance(one, int) for one in values)
    if name.endswith(("token_id", "token_ids")):
        return [tokens.of(name, one) for one in values] if are_numbers else None
    if name in ("depths", "layer_depths"):
        last = len(values) - 2
        return kind(min(one, 3) if i == last else 1 for i, one in enumerate(values))
    if name in (*_WIDTHS, "embed_dim", "dims", "widths") and are_numbers:
        factor = max(1, values[0] // 16)
        return kind(max(8, one // factor) for one in values)
    if had_layers and len(values) == had_layers > layers:  # one for each layer
        if all(isinstance(one, str) for one in values):  # each kind of layer, then as it was
            return kind([*dict.fromkeys(values), *values][:layers])
        return kind(values[:layers]) if are_numbers else None
    return None


def _smaller(
    settings: Mapping[str, Any], tokens: Tokens, exact: Mapping[str, Any]
) -> dict[str, Any]:
    """Those settings that change."""
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers")
    numbers = (settings.get(name) for name in names)
    had_layers = next((number for number in numbers if isinstance(number, int)), None)
    kinds_of_layers = [
        len(set(value))
        for name, value in settings.items()
        if isinstance(value, list | tuple) and "layer" in name and len(value) == had_layers
        if value and all(isinstance(one, str) for one in value)
    ]
    layers = max([LAYERS, *kinds_of_layers])
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if name in exact:
            found[name] = exact[name]
        elif isinstance(value, float) and _RANDOM.search(name):
            found[name] = 0.0
        elif isinstance(value, int) and not isinstance(value, bool):
            found[name] = _number(name, value, tokens, layers)
        elif isinstance(value, list | tuple) and value:
            found[name] = _several(name, value, tokens, layers, had_layers)
        elif isinstance(value, dict) and (changed := _smaller(value, tokens, exact)):
            found[name] = {**value, **changed}
    return {name: value for name, value in found.items() if value is not None}


def _own(default: PreTrainedConfig) -> dict[str, Any]:
    """What this config sets otherwise than its class: a part of another may."""
    try:
        plain = vars(type(default)())
    except Exception:
        return {}
    settings = {k: v for k, v in vars(default).items() if not isinstance(v, PreTrainedConfig)}
    return {
        name: value
        for name, value in settings.items()
        if name[0] != "_" and name not in _NOT_SETTINGS and name in plain and plain[name] != value
    }


def tiny_config(
    config_class: type[PreTrainedConfig],
    chosen: Mapping[str, Any],
    default: PreTrainedConfig | None = None,
    tokens: Tokens | None = None,
) -> PreTrainedConfig:
    """A tiny config of a class.

    `chosen` are settings by name; those of a config inside it by its name; under "*" those of all
    of them.
    """
    default, tokens = default or config_class(), tokens or Tokens()
    everywhere = chosen.get("*", {})
    all_settings = {name: value for name, value in vars(default).items() if name[0] != "_"}
    parts = {k: v for k, v in all_settings.items() if isinstance(v, PreTrainedConfig)}
    settings = {k: v for k, v in all_settings.items() if k not in parts}
    found = _smaller(settings, tokens, {**EXACT, **everywhere})
    if "qk_rope_head_dim" in settings and isinstance(settings.get("num_key_value_heads"), int):
        found["num_key_value_heads"] = 4  # as many as heads: they are latent
    found = {name: value for name, value in found.items() if name not in _NOT_SETTINGS}
    found |= OF_CONFIG.get(config_class.__name__, {})
    for name, part in parts.items():
        own = chosen.get(name)
        own = own if isinstance(own, dict) else {}
        found[name] = tiny_config(type(part), {"*": everywhere, **own}, part, tokens)
    others = {k: v for k, v in chosen.items() if k != "*"}
    found |= {k: v for k, v in others.items() if not (k in parts and isinstance(v, dict))}
    config = _construct(config_class, {**_own(default), **found})
    _forbid_chance(config)
    return config


def _construct(config_class: type[PreTrainedConfig], settings: dict[str, Any]) -> PreTrainedConfig:
    try:
        return config_class(**settings)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None:
            raise
        return config_class(**{k: v for k, v in settings.items() if k != unknown[1]})


def _forbid_chance(config: PreTrainedConfig) -> None:
    """Turn dropout off, also where the class has turned it on again."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _forbid_chance(value)
        elif isinstance(value, float) and _RANDOM.search(name):
            setattr(config, name, 0.0)


def merged(*many: Mapping[str, Any]) -> dict[str, Any]:
    """The later ones win, also within the settings of a config inside."""
    found: dict[str, Any] = {}
    for settings in many:
        for name, value in settings.items():
            old = found.get(name)
            is_part = isinstance(value, dict) and isinstance(old, dict)
            found[name] = {**old, **value} if is_part else value
    return found


def signature(function: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function by name."""
    return inspect.signature(function).parameters
