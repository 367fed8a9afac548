"""Batches of four rows for every kind of model; `seed` selects another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .tiny import VOCABULARY, signature

ROWS = 4
LENGTH = 24
TARGETS = 10  # labels of a row, where a decoder makes them from something else
FIRST_WORD = 40  # ids below are special
IGNORED = -100

Batch = dict[str, Any]
Maker = Callable[[nn.Module, Any, int], Batch]  # from a model, its config and a seed


# --------------------------------------------------------------------------------------------------
# Tensors


def whole_numbers(low: int, high: int, *shape: int, seed: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1000 + seed))


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2000 + seed))


def words(seed: int, length: int = LENGTH) -> Tensor:
    return whole_numbers(FIRST_WORD, VOCABULARY, ROWS, length, seed=seed)


def classes(number: int, seed: int) -> Tensor:
    """One for each row."""
    return whole_numbers(0, number, ROWS, seed=seed + 2000)


def ragged(batch: Batch) -> Batch:
    """The same with a different number of labels in every row: the last ones are ignored."""
    labels = batch["labels"].clone()
    for row in range(1, ROWS):
        labels[row, labels.shape[1] - row * labels.shape[1] // 6 :] = IGNORED
    return {**batch, "labels": labels}


# --------------------------------------------------------------------------------------------------
# Text


def causal(model: nn.Module, config: Any, seed: int) -> Batch:
    ids = words(seed)
    return {"input_ids": ids, "labels": ids.clone()}


def masked(model: nn.Module, config: Any, seed: int, length: int = LENGTH) -> Batch:
    return {"input_ids": words(seed, length), "labels": words(seed + 50, length)}


def sequence(model: nn.Module, config: Any, seed: int) -> Batch:
    ids = words(seed)
    if config.is_encoder_decoder:  # it classifies by the end of the text
        ids[:, -1] = config.eos_token_id
    return {"input_ids": ids, "labels": classes(config.num_labels, seed)}


def token(model: nn.Module, config: Any, seed: int) -> Batch:
    labels = whole_numbers(0, config.num_labels, ROWS, LENGTH, seed=seed + 60)
    return {"input_ids": words(seed), "labels": labels}


def token_in_boxes(model: nn.Module, config: Any, seed: int) -> Batch:
    boxes = numbers(ROWS, LENGTH, 4, seed=seed).abs()
    return {**token(model, config, seed), "bbox": boxes}


def seq2seq(model: nn.Module, config: Any, seed: int) -> Batch:
    if not config.is_encoder_decoder:  # a model of sound and text, here with text only
        return causal(model, config, seed)
    return {"input_ids": words(seed), "labels": words(seed + 50, TARGETS)}


def perceiver(model: nn.Module, config: Any, seed: int) -> Batch:
    return {"inputs": words(seed, 64), "labels": words(seed + 50, 64)}


def question(model: nn.Module, config: Any, seed: int) -> Batch:
    starts, ends = classes(LENGTH, seed), classes(LENGTH, seed + 9)
    return {"input_ids": words(seed), "start_positions": starts, "end_positions": ends}


def choice(model: nn.Module, config: Any, seed: int) -> Batch:
    ids = words(seed, 2 * LENGTH).reshape(ROWS, 2, LENGTH)
    return {"input_ids": ids, "labels": classes(2, seed)}


def replaced_words(model: nn.Module, config: Any, seed: int) -> Batch:
    labels = whole_numbers(0, 2, ROWS, LENGTH, seed=seed + 70)
    return {"input_ids": words(seed), "labels": labels}


def masked_and(entry: str) -> Maker:
    """Masked words, and whether two sentences follow each other."""
    return lambda model, config, seed: {**masked(model, config, seed), entry: classes(2, seed)}


def masked_of(length: int) -> Maker:
    return lambda model, config, seed: masked(model, config, seed, length)


def without_cache(model: nn.Module, config: Any, seed: int) -> Batch:
    return {**causal(model, config, seed), "use_cache": False}


def started(maker: Maker) -> Maker:
    """For models made of two: their config does not say what a text begins with."""

    def make(model: nn.Module, config: Any, seed: int) -> Batch:
        model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
        return maker(model, config, seed)

    return make


# --------------------------------------------------------------------------------------------------
# Images and videos


def image_size(config: Any) -> tuple[int, int]:
    for one in (config, getattr(config, "vision_config", None), getattr(config, "encoder", None)):
        size = getattr(one, "image_size", None)
        if isinstance(size, int):
            return size, size
        if isinstance(size, list | tuple):
            return size[0], size[-1]
    return 64, 64


def pixels(config: Any, seed: int) -> Tensor:
    channels = getattr(config, "num_channels", 3) or 3
    return numbers(ROWS, channels, *image_size(config), seed=seed)


def image(model: nn.Module, config: Any, seed: int) -> Batch:
    return {"pixel_values": pixels(config, seed), "labels": classes(config.num_labels, seed)}


def image_to_text(model: nn.Module, config: Any, seed: int) -> Batch:
    return {"pixel_values": pixels(config, seed), "labels": words(seed, TARGETS)}


def video(model: nn.Module, config: Any, seed: int) -> Batch:
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", 4)
    name = "pixel_values" if "pixel_values" in signature(model.forward) else "pixel_values_videos"
    height, width = (16, 16) if config.model_type == "vjepa2" else image_size(config)
    values = numbers(ROWS, frames, 3, height, width, seed=seed)
    return {name: values, "labels": classes(config.num_labels, seed)}


def hidden_patches(model: nn.Module, config: Any, seed: int) -> Batch:
    (height, width), size = image_size(config), config.patch_size
    size = size if isinstance(size, int) else size[0]
    number = (height // size) * (width // size)
    chosen = whole_numbers(0, 2, ROWS, number, seed=seed + 80).bool()
    return {"pixel_values": pixels(config, seed), "bool_masked_pos": chosen}


def hidden_parts_of_video(model: nn.Module, config: Any, seed: int) -> Batch:
    number = (config.num_frames // config.tubelet_size) * 16
    chosen = (torch.arange(number) < number // 2).expand(ROWS, -1).clone()
    values = numbers(ROWS, config.num_frames, 3, 32, 32, seed=seed)
    return {"pixel_values": values, "bool_masked_pos": chosen}


def image_with_noise(model: nn.Module, config: Any, seed: int) -> Batch:
    return {"pixel_values": pixels(config, seed), "noise": numbers(ROWS, 16, seed=seed + 5)}


def segments(size: int) -> Maker:
    """A class for every pixel."""

    def make(model: nn.Module, config: Any, seed: int) -> Batch:
        labels = whole_numbers(0, 2, ROWS, size, size, seed=seed + 90)
        return {"pixel_values": numbers(ROWS, 3, size, size, seed=seed), "labels": labels}

    return make


def contrastive(model: nn.Module, config: Any, seed: int) -> Batch:
    """Pairs: the loss compares the rows with each other."""
    return {"input_ids": words(seed), "pixel_values": pixels(config, seed), "return_loss": True}


def contrastive_video(model: nn.Module, config: Any, seed: int) -> Batch:
    values = numbers(ROWS, 4, 3, 32, 32, seed=seed)
    return {"input_ids": words(seed), "pixel_values": values, "return_loss": True}


def contrastive_sound(model: nn.Module, config: Any, seed: int) -> Batch:
    features = numbers(ROWS, 1, 64, 8, seed=seed)
    return {"input_ids": words(seed), "input_features": features, "return_loss": True}


def patches(config: Any, seed: int) -> Batch:
    """Sixteen patches of each image, flat, with a mask."""
    size = getattr(config, "vision_config", config).patch_size
    return {
        "pixel_values": numbers(ROWS, 16, 3 * size * size, seed=seed),
        "pixel_attention_mask": torch.ones(ROWS, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * ROWS),
    }


def image_of_patches(model: nn.Module, config: Any, seed: int) -> Batch:
    return {**patches(config, seed), "labels": classes(config.num_labels, seed)}


def contrastive_patches(model: nn.Module, config: Any, seed: int) -> Batch:
    return {**patches(config, seed), "input_ids": words(seed), "return_loss": True}


def flattened_patches(model: nn.Module, config: Any, seed: int) -> Batch:
    return {
        "flattened_patches": numbers(ROWS, 6, 2 + 3 * 64, seed=seed).abs(),
        "attention_mask": torch.ones(ROWS, 6),
        "labels": words(seed, TARGETS),
    }


# --------------------------------------------------------------------------------------------------
# Sound


def sound(model: nn.Module, config: Any, seed: int) -> Batch:
    parameters, kind = signature(model.forward), model.config.model_type
    if kind == "audio-spectrogram-transformer":
        shape = config.max_length, config.num_mel_bins
        return {"input_values": numbers(ROWS, *shape, seed=seed)}
    if "input_values" in parameters:
        return {"input_values": numbers(ROWS, 3200, seed=seed)}
    if "input_features" not in parameters:
        raise NotImplementedError(f"which of {list(parameters)} is sound?")
    if kind == "whisper":
        shape = config.num_mel_bins, 2 * config.max_source_positions
        return {"input_features": numbers(ROWS, *shape, seed=seed)}
    bands = (
        getattr(config, "feature_projection_input_dim", None)
        or getattr(config, "input_dim", None)
        or getattr(getattr(config, "encoder_config", config), "num_mel_bins", 8)
    )
    return {"input_features": numbers(ROWS, 64, bands, seed=seed)}


def ctc(model: nn.Module, config: Any, seed: int) -> Batch:
    most = min(getattr(config, "vocab_size", 32), 30)
    labels = whole_numbers(3, most, ROWS, 3, seed=seed)
    return {**sound(model, config, seed), "labels": labels}


def ctc_with_mask(model: nn.Module, config: Any, seed: int) -> Batch:
    bands = getattr(getattr(config, "encoder_config", config), "num_mel_bins", 8)
    return {
        "input_features": numbers(ROWS, 64, bands, seed=seed),
        "attention_mask": torch.ones(ROWS, 64, dtype=torch.long),
        "labels": whole_numbers(3, 30, ROWS, 3, seed=seed),
    }


def audio(model: nn.Module, config: Any, seed: int) -> Batch:
    return {**sound(model, config, seed), "labels": classes(config.num_labels, seed)}


def speech(model: nn.Module, config: Any, seed: int) -> Batch:
    return {**sound(model, config, seed), "labels": words(seed + 50, TARGETS)}


def wave_to_text(model: nn.Module, config: Any, seed: int) -> Batch:
    return {"input_values": numbers(ROWS, 3200, seed=seed), "labels": words(seed, TARGETS)}


def hidden_sound(model: nn.Module, config: Any, seed: int) -> Batch:
    values = numbers(ROWS, 3200, seed=seed)
    number = int(model._get_feat_extract_output_lengths(torch.tensor(3200)))
    chosen = torch.zeros(ROWS, number, dtype=torch.bool)
    chosen[:, 1:4] = True
    others = whole_numbers(0, number, ROWS, number, 4, seed=seed)
    return {
        "input_values": values,
        "mask_time_indices": chosen,
        "sampled_negative_indices": others,
    }


def text_to_speech(model: nn.Module, config: Any, seed: int) -> Batch:
    return {
        "input_ids": words(seed),
        "labels": numbers(ROWS, 8, config.num_mel_bins, seed=seed),
        "speaker_embeddings": numbers(ROWS, config.speaker_embedding_dim, seed=seed),
    }


def codebooks(model: nn.Module, config: Any, seed: int) -> Batch:
    """Several codes at each place; their rows are not rows of the batch."""
    number = config.num_codebooks
    ids = whole_numbers(3, 60, ROWS * number, LENGTH, seed=seed)
    return {"input_ids": ids, "labels": whole_numbers(3, 60, ROWS, LENGTH, number, seed=seed + 50)}


# --------------------------------------------------------------------------------------------------
# Images and text


def image_token(config: Any) -> int | None:
    names = ("image_token_id", "image_token_index", "img_token_id", "image_token")
    for name in (*names, "media_token_id", "media_placeholder_token_id"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return None


def with_image(seed: int, token: int | None, number: int) -> Batch:
    """Words with that many image tokens after the second; those have no labels."""
    ids = words(seed)
    ids = torch.cat([ids[:, :2], torch.full((ROWS, number), token), ids[:, 2:]], dim=1)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == token, IGNORED)}


def _num_features(model: Any, entries: Batch) -> int:
    """How many places of a row an image takes, as the model itself says."""
    while not hasattr(model, "get_image_features") and hasattr(model, "model"):
        model = model.model
    known = signature(model.get_image_features)
    with torch.no_grad():
        found = model.get_image_features(**{k: v for k, v in entries.items() if k in known})
    found = getattr(found, "pooler_output", found)
    found = list(found) if isinstance(found, list | tuple) else [found]
    found = found[:1] if found[0].dim() == 3 else found
    return sum(one.numel() // one.shape[-1] for one in found) // ROWS


def image_and_text(model: nn.Module, config: Any, seed: int) -> Batch:
    """One image for each row."""
    parameters, token, size = signature(model.forward), image_token(config), image_size(config)
    entries: Batch = {"pixel_values": numbers(ROWS, 3, *size, seed=seed)}
    if token is None or "image_grid_thw" in parameters:
        return {**entries, **causal(model, config, seed)}
    if model.config.model_type in ("idefics2", "idefics3", "smolvlm"):
        entries["pixel_values"] = entries["pixel_values"][:, None]
    if "image_sizes" in parameters:
        entries["image_sizes"] = torch.tensor([size] * ROWS)
    entries |= with_image(seed, token, _num_features(model, entries))
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in parameters:
            entries[name] = (entries["input_ids"] == token).long()
    return entries


def llava(model: nn.Module, config: Any, seed: int) -> Batch:
    number = (image_size(config)[0] // 8) ** 2
    values = numbers(ROWS, 3, *image_size(config), seed=seed)
    return {"pixel_values": values, **with_image(seed, image_token(config), number)}


def llava_tiles(model: nn.Module, config: Any, seed: int) -> Batch:
    """Each image is two tiles."""
    entries = {
        "pixel_values": numbers(ROWS, 2, 3, 32, 32, seed=seed),
        "image_sizes": torch.tensor([[32, 32]] * ROWS),
    }
    number = _num_features(model, entries)
    return {**entries, **with_image(seed, image_token(config), number)}


def image_grid(model: nn.Module, config: Any, seed: int) -> Batch:
    """Patches of all rows in one flat list, as processors of Qwen make them: 16 for a row."""
    vision, token = config.vision_config, image_token(config)
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3) or 3
    depth = channels * getattr(vision, "temporal_patch_size", 2) * vision.patch_size**2
    entries = with_image(seed, token, 16 // getattr(vision, "spatial_merge_size", 2) ** 2)
    entries["pixel_values"] = numbers(ROWS * 16, depth, seed=seed)
    entries["image_grid_thw"] = torch.tensor([[1, 4, 4]] * ROWS)
    if "mm_token_type_ids" in signature(model.forward):
        entries["mm_token_type_ids"] = (entries["input_ids"] == token).long()
    return entries


def mllama(model: nn.Module, config: Any, seed: int) -> Batch:
    tiles = config.vision_config.max_num_tiles
    return {
        **causal(model, config, seed),
        "pixel_values": numbers(ROWS, 1, tiles, 3, *image_size(config), seed=seed),
        "aspect_ratio_ids": torch.ones(ROWS, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(ROWS, 1, tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(ROWS, LENGTH, 1, tiles, dtype=torch.long),
    }


def idefics(model: nn.Module, config: Any, seed: int) -> Batch:
    return {
        **causal(model, config, seed),
        "pixel_values": numbers(ROWS, 1, 3, *image_size(config), seed=seed),
        "image_attention_mask": torch.ones(ROWS, LENGTH, 1, dtype=torch.long),
    }


def kosmos(model: nn.Module, config: Any, seed: int) -> Batch:
    entries = with_image(seed, 5, config.latent_query_num)
    entries["image_embeds_position_mask"] = (entries["input_ids"] == 5).long()
    return {**entries, "pixel_values": numbers(ROWS, 3, *image_size(config), seed=seed)}


def queries(model: nn.Module, config: Any, seed: int) -> Batch:
    entries = with_image(seed, image_token(config), config.num_query_tokens)
    entries["pixel_values"] = numbers(ROWS, 3, *image_size(config), seed=seed)
    entries["attention_mask"] = torch.ones_like(entries["input_ids"])
    if "qformer_input_ids" in signature(model.forward):
        entries["qformer_input_ids"] = words(seed + 9)
        entries["qformer_attention_mask"] = torch.ones(ROWS, LENGTH, dtype=torch.long)
    return entries


def patches_and_text(model: nn.Module, config: Any, seed: int) -> Batch:
    return {**patches(config, seed), **with_image(seed, image_token(config), 4)}


def visual_words(model: nn.Module, config: Any, seed: int) -> Batch:
    ids = words(seed)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones(ROWS, LENGTH),
        "visual_embeds": numbers(ROWS, 4, config.visual_embedding_dim, seed=seed),
        "visual_attention_mask": torch.ones(ROWS, 4),
        "labels": torch.cat([ids, torch.full((ROWS, 4), IGNORED)], dim=1),
    }


# --------------------------------------------------------------------------------------------------
# Time series


def patched_series(model: nn.Module, config: Any, seed: int) -> Batch:
    channels = config.num_input_channels
    past = numbers(ROWS, config.context_length, channels, seed=seed)
    future = numbers(ROWS, config.prediction_length, channels, seed=seed + 1)
    return {"past_values": past, "future_values": future}


def series(model: nn.Module, config: Any, seed: int) -> Batch:
    past = config.context_length + max(config.lags_sequence)
    future, features = config.prediction_length, config.num_time_features
    return {
        "past_values": numbers(ROWS, past, seed=seed),
        "past_time_features": numbers(ROWS, past, features, seed=seed),
        "past_observed_mask": torch.ones(ROWS, past),
        "future_values": numbers(ROWS, future, seed=seed + 1),
        "future_time_features": numbers(ROWS, future, features, seed=seed + 2),
    }


def plain_series(model: nn.Module, config: Any, seed: int) -> Batch:
    future = numbers(ROWS, config.horizon_length, seed=seed + 1)
    return {"past_values": numbers(ROWS, 32, seed=seed), "future_values": future}
