"""Which classes there are, and how a tiny model and two batches are made of each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from . import batches as make
from .batches import Batch, Maker
from .settings import SETTINGS
from .tiny import merged, tiny_config

MOST_PARAMETERS = 12_000_000
NUM_STEPS = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """A class of transformers with a kind of batch.

    Attributes:
        kind: key in `KINDS`, or "router" or "other".
        model_type: as its config calls it.
        name: of the class.
        maker: of its batches.
        variant: what is special about it, if it is there more than once.
        settings: of the config, besides those of the model type.
    """

    kind: str
    model_type: str
    name: str
    maker: Maker
    variant: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.name, self.variant


KINDS: dict[str, tuple[str, Maker]] = {  # the mapping of transformers, and what makes batches
    "causal": ("CAUSAL_LM", make.causal),
    "masked": ("MASKED_LM", make.masked),
    "sequence": ("SEQUENCE_CLASSIFICATION", make.sequence),
    "token": ("TOKEN_CLASSIFICATION", make.token),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM", make.seq2seq),
    "vlm": ("MULTIMODAL_LM", make.image_and_text),
    "vlm-text": ("MULTIMODAL_LM", make.causal),
    "image": ("IMAGE_CLASSIFICATION", make.image),
    "image-masked": ("MASKED_IMAGE_MODELING", make.hidden_patches),
    "video": ("VIDEO_CLASSIFICATION", make.video),
    "contrastive": ("ZERO_SHOT_IMAGE_CLASSIFICATION", make.contrastive),
    "audio": ("AUDIO_CLASSIFICATION", make.audio),
    "ctc": ("CTC", make.ctc),
    "speech": ("SPEECH_SEQ_2_SEQ", make.speech),
}
ALL_KINDS = (*KINDS, "router", "other")
LABELLED = {"causal", "masked", "token", "seq2seq", "vlm", "vlm-text", "speech", "router"}
_GRIDS = (
    *("CohereCompass", "Cosmos3Omni", "Exaone4_5_", "Glm46V", "Glm4v", "Glm4vMoe", "GlmOcr"),
    *("HyperCLOVAXVisionV2", "MiniMaxM3Sparse", "PaddleOCRVL", "Qwen2VL", "Qwen2_5_VL"),
    *("Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "Qwen4Exp"),
)
MAKERS: dict[str | tuple[str, str], Maker] = {  # of a class, or of a class in one kind
    "EncoderDecoderModel": make.started(make.seq2seq),
    "FSMTForConditionalGeneration": make.masked,
    "GitForCausalLM": make.image_and_text,
    "ImageGPTForImageClassification": make.sequence,
    "LasrForCTC": make.ctc_with_mask,
    "MusicgenForCausalLM": make.codebooks,
    "MusicgenMelodyForCausalLM": make.codebooks,
    "ParakeetForCTC": make.ctc_with_mask,
    "PerceiverForMaskedLM": make.perceiver,
    "Pix2StructForConditionalGeneration": make.flattened_patches,
    "Siglip2ForImageClassification": make.image_of_patches,
    "Siglip2Model": make.contrastive_patches,
    "SpeechEncoderDecoderModel": make.started(make.wave_to_text),
    "VisionEncoderDecoderModel": make.started(make.image_to_text),
    ("token", "BrosForTokenClassification"): make.token_in_boxes,
    **{("vlm", f"{name}ForConditionalGeneration"): make.image_grid for name in _GRIDS},
    ("vlm", "Blip2ForConditionalGeneration"): make.queries,
    ("vlm", "IdeficsForVisionText2Text"): make.idefics,
    ("vlm", "InstructBlipForConditionalGeneration"): make.queries,
    ("vlm", "Kosmos2ForConditionalGeneration"): make.kosmos,
    ("vlm", "Lfm2VlForConditionalGeneration"): make.patches_and_text,
    ("vlm", "LlavaForConditionalGeneration"): make.llava,
    ("vlm", "LlavaNextForConditionalGeneration"): make.llava_tiles,
    ("vlm", "LlavaNextVideoForConditionalGeneration"): make.llava_tiles,
    ("vlm", "LlavaOnevisionForConditionalGeneration"): make.llava_tiles,
    ("vlm", "MllamaForConditionalGeneration"): make.mllama,
}


def _other(model_type: str, name: str, maker: Maker, variant: str = "", **settings: Any) -> Case:
    return Case("other", model_type, name, maker, variant, settings)


_TWICE = ["sliding_attention", "full_attention"] * 2
_SERIES: dict[str, Any] = {
    **{"prediction_length": 6, "context_length": 12, "num_time_features": 2},
    **{"num_static_categorical_features": 0, "cardinality": [0], "embedding_dimension": [0]},
    **{"d_model": 32, "encoder_layers": 3, "decoder_layers": 3},
}
_HIDDEN_SOUND: dict[str, Any] = {
    **{"mask_time_prob": 0.05, "mask_time_length": 2, "num_negatives": 4}
}
_WITH_CACHE = {  # models whose text is run by a model inside, which makes a cache
    "aya_vision": "AyaVision",
    "cosmos3_omni": "Cosmos3Omni",
    "internvl": "InternVL",
    "llava": "Llava",
    "minimax_m3_vl": "MiniMaxM3Sparse",
    "moss_transcribe_diarize": "MossTranscribeDiarize",
    "qianfan_ocr": "QianfanOCR",
    "qwen3_5": "Qwen3_5",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen4_exp": "Qwen4Exp",
}
OTHERS = [
    # Other losses over text
    _other("bert", "BertForQuestionAnswering", make.question),
    _other("llama", "LlamaForQuestionAnswering", make.question),
    _other("xlm", "XLMForQuestionAnsweringSimple", make.question),
    _other("bert", "BertForMultipleChoice", make.choice),
    _other("bert", "BertForPreTraining", make.masked_and("next_sentence_label")),
    _other("albert", "AlbertForPreTraining", make.masked_and("sentence_order_label")),
    _other("electra", "ElectraForPreTraining", make.replaced_words),
    _other("funnel", "FunnelForPreTraining", make.replaced_words),
    # The same classes, differently set
    _other(
        *("gemma3n_text", "Gemma3nForCausalLM", make.causal, "own keys"),
        **{"num_kv_shared_layers": 0},
    ),
    _other(
        *("gemma4_text", "Gemma4ForCausalLM", make.causal, "shared keys"),
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": _TWICE},
    ),
    _other(
        *("big_bird", "BigBirdForMaskedLM", make.masked_of(64), "sparse"),
        **{"block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 128},
    ),
    _other(
        *("big_bird", "BigBirdForMaskedLM", make.masked_of(24), "too short to be sparse"),
        **{"block_size": 2, "num_random_blocks": 3, "max_position_embeddings": 128},
    ),
    _other("longformer", "LongformerForMaskedLM", make.masked_of(16), "window"),
    _other(
        *("wav2vec2", "Wav2Vec2ForCTC", make.ctc, "mean over rows"),
        **{"ctc_loss_reduction": "mean"},
    ),
    *(
        _other(model_type, f"{name}ForConditionalGeneration", make.without_cache, "no cache")
        for model_type, name in _WITH_CACHE.items()
    ),
    # Images, videos and sound
    _other("beit", "BeitForSemanticSegmentation", make.segments(32), out_indices=[0, 1, 2, 2]),
    _other(
        *("data2vec-vision", "Data2VecVisionForSemanticSegmentation", make.segments(32)),
        **{"out_indices": [0, 1, 2, 2]},
    ),
    _other("dpt", "DPTForSemanticSegmentation", make.segments(32)),
    _other("mobilevit", "MobileViTForSemanticSegmentation", make.segments(64)),
    _other("segformer", "SegformerForSemanticSegmentation", make.segments(64)),
    _other("upernet", "UperNetForSemanticSegmentation", make.segments(64)),
    _other("vit_mae", "ViTMAEForPreTraining", make.image_with_noise),
    _other("videomae", "VideoMAEForPreTraining", make.hidden_parts_of_video),
    _other("visual_bert", "VisualBertForPreTraining", make.visual_words),
    _other("x_clip", "XCLIPModel", make.contrastive_video),
    _other("clap", "ClapModel", make.contrastive_sound),
    _other("wav2vec2", "Wav2Vec2ForPreTraining", make.hidden_sound, **_HIDDEN_SOUND),
    _other(
        *("wav2vec2-conformer", "Wav2Vec2ConformerForPreTraining", make.hidden_sound),
        **_HIDDEN_SOUND,
    ),
    _other("speecht5", "SpeechT5ForTextToSpeech", make.text_to_speech, reduction_factor=2),
    _other("vits", "VitsModel", make.causal),
    _other("bark_semantic", "BarkSemanticModel", make.causal),
    # Time series
    _other("patchtst", "PatchTSTForPrediction", make.patched_series, do_mask_input=False),
    _other("patchtsmixer", "PatchTSMixerForPrediction", make.patched_series),
    _other("autoformer", "AutoformerForPrediction", make.series, **_SERIES),
    _other("informer", "InformerForPrediction", make.series, **_SERIES),
    _other(
        *("time_series_transformer", "TimeSeriesTransformerForPrediction", make.series), **_SERIES
    ),
    _other(
        *("timesfm", "TimesFmModelForPrediction", make.plain_series),
        **{"patch_length": 8, "horizon_length": 8, "context_length": 32},
    ),
]


def cases(kind: str) -> list[Case]:
    """All of a kind."""
    if kind == "other":
        return OTHERS
    if kind == "router":
        return [*_routers("causal"), *_routers("seq2seq")]
    mapping, maker = KINDS[kind]
    types: dict[str, list[str]] = {}
    for model_type, name in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
        types.setdefault(name if isinstance(name, str) else name[0], []).append(model_type)
    return [
        Case(kind, _own_type(name, many), name, MAKERS.get((kind, name)) or MAKERS.get(name, maker))
        for name, many in types.items()
    ]


def _own_type(name: str, types: Sequence[str]) -> str:
    """The model type that a class is named after, of several that use it."""
    return max(types, key=lambda one: name.lower().startswith(re.sub("[_-]", "", one)))


def _routers(kind: str) -> Iterator[Case]:
    """Those with a loss that balances experts, with that loss."""
    for case in cases(kind):
        try:
            config = getattr(transformers, case.name).config_class()
        except Exception:  # needs a package, or arguments
            continue
        if "output_router_logits" in vars(config):
            settings = {"output_router_logits": True}
            yield dataclasses.replace(case, kind="router", settings=settings)


def build(case: Case) -> tuple[nn.Module, Callable[[], list[Batch]]]:
    """A model, and what makes its batches.

    Raises:
        Exception: there is no tiny model of the class; not ours.
    """
    model_class = getattr(transformers, case.name)
    config_class = model_class.config_class
    if config_class is None:
        config_class = CONFIG_MAPPING[case.model_type]
    own = SETTINGS.get(case.model_type, {}), SETTINGS.get(case.name, {})
    config = tiny_config(config_class, merged(*own, case.settings))
    if case.kind == "sequence":
        for one in (config, getattr(config, "text_config", config)):
            one.pad_token_id = 0
    _refuse_large(model_class, config)
    torch.manual_seed(20)
    model = model_class(config).float().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            module.p = 0.0  # some have a default that no setting names

    def both() -> list[Batch]:
        return [case.maker(model, config, seed) for seed in range(NUM_STEPS)]

    return model, both


def _refuse_large(model_class: type[nn.Module], config: Any) -> None:
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(config).parameters())
    except Exception:  # computes with its weights when it is made
        return
    if size > MOST_PARAMETERS:
        raise OverflowError(f"{size:,} parameters are not a tiny model")
