"""Hugging Face in and out: configurations, tokenizers, weights, new heads, exported folders."""

from l2l.hugging_face.adapters import ALL_LINEAR, Lora, with_lora
from l2l.hugging_face.export import SHARD_BYTES, export_model
from l2l.hugging_face.folder import (
    ADAPTED,
    base_of,
    class_names,
    empty_model,
    first_line,
    library,
    read_config,
    read_json,
    sees_what_follows,
    tokenizer_of,
)
from l2l.hugging_face.weights import Incoming, RandomInit
