"""What a tiny model of some types needs besides the rules of tiny.py, found by trying."""

from typing import Any

from .tiny import VOCABULARY

Settings = dict[str, Any]

_ROPE: Settings = {"rope_type": "default", "rope_theta": 10000.0}
_ROPE_OF_IMAGES: Settings = {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}
_ROPE_OF_GLM: Settings = {
    "rope_parameters": {**_ROPE_OF_IMAGES["rope_parameters"], "partial_rotary_factor": 1.0}
}
_GLM: Settings = {"text_config": _ROPE_OF_GLM, "vision_config": {"out_hidden_size": 32}}
_TWO_KINDS = ["sliding_attention", "full_attention"]
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}
_COMPASS = {"layer_types": [*_TWO_KINDS, "sliding_attention"]}
_SWIN: Settings = {
    **{"image_size": 128, "patch_size": 4, "embed_dim": 16, "encoder_stride": 32},
    **{"depths": [1, 1, 2, 1], "num_heads": [2, 2, 4, 4], "window_size": 4},
}
_EFFICIENT: Settings = {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.3}
_ZAMBA: Settings = {
    **{"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "num_key_value_heads": 4,
}
_QWEN4: Settings = {
    "*": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        **{"indexer_budget": 4, "indexer_compress_ratio": 2, "ngram_vocab_size_base": 64},
        **{"hc_lowrank": 4, "make_ngram_vocab_size_divisible_by": 1},
        **{"split_ngram_parts": 1, "heads_per_ngram": 2},
    }
}
_DEEPSTACK: Settings = {
    "vision_config": {
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
}
_WINDOWS = {"window_size": 32, "fullatt_block_indexes": [1], "out_hidden_size": 32}
_QUERIES: Settings = {
    "text_config": {"word_embed_proj_dim": 32},
    "image_token_index": 5,
    "image_token_id": 5,
}
_STARTS = {"decoder_start_token_id": 0}
_ONE_TILE = {"image_grid_pinpoints": [[32, 32]]}
_THIN_CONVOLUTIONS = {"conv_dim": (16,) * 13}

SETTINGS: dict[str, Settings] = {  # of a model type, or of one class
    # Text
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": _COMPASS,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {
        **{"n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"n_shared_experts": 1, "first_k_dense_replace": 1},
    },
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4, "vocab_size": VOCABULARY},
    "gemma3n_text": {
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": _TWO_KINDS * 2},
        **{"intermediate_size": 48, "activation_sparsity_pattern": [0.0] * 4},
    },
    "gemma4_assistant": {"*": {"hidden_size_per_layer_input": 0}},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 16,
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "ministral": {"head_dim": 8},
    "mistral4": {"num_key_value_heads": 4, "rope_parameters": _ROPE},
    "mobilebert": {
        **{"embedding_size": 32, "true_hidden_size": 32, "intra_bottleneck_size": 32},
        **{"hidden_size": 32, "use_bottleneck": True},
    },
    "mpnet": {"relative_attention_num_buckets": 32},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": _QWEN4,
    "qwen4_exp_text": _QWEN4,
    "reformer": {
        **{"is_decoder": True, "axial_pos_shape": [4, 6], "axial_pos_embds_dim": [16, 16]},
        **{"attn_layers": ["local", "lsh", "local"], "num_buckets": 2, "hash_seed": 0},
        **{"lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4, "feed_forward_size": 48},
    },
    "ReformerForMaskedLM": {"is_decoder": False},
    "ReformerForSequenceClassification": {"is_decoder": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_ZAMBA, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {
        **_ZAMBA,
        **{"n_mamba_heads": 8, "num_mem_blocks": 1, "num_attention_heads": 4, "adapter_rank": 4},
        **{"intermediate_size": 48, "mamba_headdim": 8},
    },
    # Text to text
    **dict.fromkeys(("longt5", "mt5", "switch_transformers", "t5", "udop", "umt5"), _STARTS),
    # Images and videos
    "align": {"vision_config": {**_EFFICIENT, "hidden_dim": 64}},
    "bit": {"embedding_size": 32, "hidden_sizes": [32, 32, 64, 64], "image_size": 64},
    "convnext": {"image_size": 64},
    "convnextv2": {"image_size": 64},
    "deit": {"encoder_stride": 8},
    "donut-swin": _SWIN,
    "efficientnet": {**_EFFICIENT, "hidden_dim": 320},
    "hiera": {
        **{"image_size": [64, 64], "patch_size": [7, 7], "embed_dim": 16},
        **{"depths": [1, 1, 2, 1], "num_heads": [1, 2, 4, 4]},
    },
    "levit": {
        **{"image_size": 224, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 2, 2]},
        **{"key_dim": [8, 8, 8], "depths": [2, 2, 2], "patch_size": 16},
    },
    "maskformer-swin": {**_SWIN, "image_size": 64},
    "mobilevit": {
        **{"image_size": 64, "hidden_sizes": [16, 24, 32], "patch_size": 2},
        "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
    },
    "mobilevitv2": {
        **{"image_size": 64, "patch_size": 2},
        **{"base_attn_unit_dims": [16, 24, 32], "n_attn_blocks": [2, 2, 2]},
    },
    "siglip2": {"vision_config": {"num_patches": 16}},
    "swin": _SWIN,
    "swinv2": _SWIN,
    "textnet": {"image_size": 64, "stem_out_channels": 16},
    "videomae": {"tubelet_size": 2},
    "vit": {"encoder_stride": 8},
    "vjepa2": {
        **{"tubelet_size": 2, "crop_size": 16, "patch_size": 8, "frames_per_clip": 4},
        **{"pred_num_hidden_layers": 2, "pred_hidden_size": 32, "pred_num_attention_heads": 4},
        "num_pooler_layers": 1,
    },
    # Sound
    "cohere_asr": {"pad_token_id": 0, "decoder_start_token_id": 3},
    "granite_speech5_ctc": {"*": {"context_size": 16}},
    "moonshine": {
        **{"pad_token_id": 0},
        **{"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    },
    "pop2piano": {**_STARTS, "d_kv": 8},
    "sew": _THIN_CONVOLUTIONS,
    "sew-d": _THIN_CONVOLUTIONS,
    "speech_to_text": {"input_feat_per_channel": 8, "conv_channels": 32, "num_conv_layers": 2},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "whisper": {"max_source_positions": 16},
    # Images and text
    "blip-2": _QUERIES,
    "cohere_compass": {"text_config": _COMPASS},
    "cosmos3_omni": _DEEPSTACK,
    "exaone4_5": {"vision_config": _WINDOWS},
    "gemma3": {"mm_tokens_per_image": 4},
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe", "glm_ocr"), _GLM),
    "hunyuan_vl": {"text_config": {"head_dim": 8}},
    "idefics": {"cross_layer_interval": 2},
    "instructblip": _QUERIES,
    "kosmos-2": {"latent_query_num": 4},
    "lfm2_vl": {
        **{"vision_config": {"num_patches": 16}, "downsample_factor": 2},
        "text_config": _CONVOLUTIONS,
    },
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), _ONE_TILE),
    "mllama": {
        "text_config": {"cross_attention_layers": [1]},
        "vision_config": {
            **{"intermediate_layers_indices": [0, 1], "num_global_layers": 2},
            "vision_output_dim": 96,
        },
    },
    "paddleocr_vl": {"text_config": _ROPE_OF_IMAGES},
    "pix2struct": {**_STARTS, "pad_token_id": 0, "vision_config": {"patch_embed_hidden_size": 192}},
    "qwen2_5_omni_thinker": {"text_config": _ROPE_OF_IMAGES},
    "qwen2_5_vl": {"text_config": _ROPE_OF_IMAGES, "vision_config": _WINDOWS},
    "qwen2_vl": {
        "text_config": _ROPE_OF_IMAGES,
        "vision_config": {"embed_dim": 32, "hidden_size": 32},
    },
    "qwen3_vl": _DEEPSTACK,
    "qwen3_vl_moe": _DEEPSTACK,
}
