"""What becomes of each field of `TrainingArguments`, as data: kept, mapped, needless or refused."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, final

import torch
from torch import nn

logger = logging.getLogger("l2l")


@final
@dataclass(frozen=True, slots=True)
class Field:
    """What becomes of a field."""

    fate: Literal["kept", "mapped", "needless", "refused"]
    word: str = "the trainer's own code does it"
    allowed: tuple[Any, ...] = ()
    """Values that a refused field may have, besides those that ask for nothing."""


def _each(names: str, field: Field) -> dict[str, Field]:
    return dict.fromkeys(names.split(), field)


def _mapped(word: str) -> Field:
    return Field("mapped", word)


def _needless(word: str) -> Field:
    return Field("needless", word)


def _refused(remedy: str, *allowed: Any) -> Field:
    return Field("refused", remedy, allowed)


_ONE_PROCESS = "leave it out: layers of one process are streamed"
_OPTIM = "leave it out, or give the engine an optimizer: l2l=dict(optimizer=l2l.Lion(lr=1e-5))"
_EVALUATION = "leave it out: evaluation runs in the precision of training"

FIELDS: Mapping[str, Field] = {
    # How long, and at which rate
    **_each(
        "per_device_train_batch_size num_train_epochs max_steps lr_scheduler_type "
        "lr_scheduler_kwargs warmup_steps label_smoothing_factor average_tokens_across_devices "
        "neftune_noise_alpha",
        Field("kept"),
    ),
    "gradient_accumulation_steps": _mapped("microbatches of one step, where the loss allows it"),
    # The optimizer
    "optim": _mapped("AdamW, SGD or Lion of the engine; others are refused by their name"),
    **_each(
        "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon",
        _mapped("a setting of the engine's optimizer"),
    ),
    "max_grad_norm": _mapped("clip_norm, where the engine makes whole steps"),
    **_each("optim_args optim_target_modules", _refused(_OPTIM)),
    # Precision, memory and speed
    **_each("bf16 fp16", _mapped("precision")),
    **_each("bf16_full_eval fp16_full_eval", _refused(_EVALUATION)),
    "tf32": Field("kept", "a setting of torch, which the engine's passes obey"),
    "gradient_checkpointing": _needless("layers are always recomputed, as far as it saves memory"),
    "gradient_checkpointing_kwargs": _needless("goes with gradient_checkpointing"),
    "torch_compile": _mapped("compile"),
    "torch_compile_backend": _mapped("compile"),
    "torch_compile_mode": _refused("leave it out: torch_compile_backend is what the engine takes"),
    "use_liger_kernel": _refused("leave it out: the engine never makes whole logits of its loss"),
    "liger_kernel_config": _needless("goes with use_liger_kernel"),
    "use_cache": Field("kept"),
    "torch_empty_cache_steps": _needless("the engine stays within its budget"),
    "auto_find_batch_size": _refused(
        "leave it out: batches are cut into microbatches that fit l2l=dict(device_memory=...)"
    ),
    # What is logged, evaluated, saved, pushed
    **_each(
        "logging_strategy logging_steps logging_first_step log_on_each_node "
        "logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica "
        "disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id "
        "trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size "
        "prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object "
        "eval_accumulation_steps include_for_metrics batch_eval_metrics output_dir save_only_model "
        "save_strategy save_steps save_on_each_node save_total_limit enable_jit_checkpoint "
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
        "hub_revision load_best_model_at_end metric_for_best_model greater_is_better "
        "ignore_data_skip restore_callback_states_from_checkpoint resume_from_checkpoint do_train "
        "do_eval do_predict",
        Field("kept"),
    ),
    "skip_memory_metrics": Field("kept"),
    "debug": _refused("leave it out: the engine says which layer had a value that is not finite"),
    # Random numbers
    "seed": _mapped("seed of the engine, too"),
    **_each("full_determinism data_seed", Field("kept")),
    # Data
    **_each(
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor "
        "dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names "
        "train_sampling_strategy length_column_name",
        Field("kept"),
    ),
    # Devices and processes
    "use_cpu": _mapped("device"),
    "accelerator_config": Field("kept", "of data; the model is not placed"),
    "parallelism_config": _refused(_ONE_PROCESS),
    **_each(
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_backend fsdp deepspeed",
        _refused(_ONE_PROCESS),
    ),
    "ddp_timeout": _needless("there is one process"),
    "fsdp_config": _needless("goes with fsdp"),
    "local_rank": _refused(_ONE_PROCESS, -1, 0),
}
"""Every field that transformers has."""

_SERVER = "leave it out: `model.generate` streams layers"

FIELDS_OF_TRL: Mapping[str, Field] = {
    "activation_offloading": _refused("leave it out: what layers need is stashed on the host"),
    **_each(
        "use_vllm use_transformers_continuous_batching use_transformers_paged",
        _refused(_SERVER),
    ),
    "sync_ref_model": _refused("leave it out: a reference whose weights are streamed is fixed"),
    "cast_lm_head_to_fp32": _refused('leave it out, or use l2l=dict(precision="float32")'),
    "model_init_kwargs": _mapped("without a device_map: weights stay on the host"),
}
"""Fields of TRL's configs of which not only their trainer's code knows; the others are kept."""


def adapt(args: Any) -> None:
    """Refuse what is not for a streamed model, and turn off what it has no need of.

    Raises:
        ValueError: with all fields that are refused, what they are, and the remedies.
    """
    known = {**FIELDS, **FIELDS_OF_TRL}
    problems = [
        f"{name}={value!r}: {field.word}."
        for name, field, value in _given(args, known)
        if field.fate == "refused" and value not in field.allowed
    ]
    if problems:
        raise ValueError(
            f"{type(args).__name__} has what a streamed model does not take:\n  "
            + "\n  ".join(problems)
        )
    for name, field, _ in _given(args, known):
        if field.fate == "needless" and name not in ("ddp_timeout", "fsdp_config"):
            logger.info("%s is needless and turned off: %s.", name, field.word)
            setattr(args, name, None if name.endswith(("kwargs", "config", "steps")) else False)


def keep_on_host(args: Any) -> None:
    """Let TRL load models to the host.

    Raises:
        ValueError: it was told to load them elsewhere.
    """
    given = dict(args.model_init_kwargs or {})
    if given.get("device_map") not in (None, "cpu"):
        raise ValueError(
            f"model_init_kwargs has device_map={given['device_map']!r}. Leave it out: weights stay "
            "on the host, and layers come to the device when they run."
        )
    args.model_init_kwargs = {**given, "device_map": None}


def _given(args: Any, known: Mapping[str, Field]) -> Iterable[tuple[str, Field, Any]]:
    """Fields that ask for something."""
    for name in (one.name for one in fields(args)):
        value = getattr(args, name)
        if name in known and value not in (None, False, "", [], {}):
            yield name, known[name], value


def engine_settings(args: Any, model: nn.Module) -> dict[str, Any]:
    """What an engine is told of a trainer's arguments."""
    compiled = args.torch_compile_backend or True if args.torch_compile else None
    return {
        "device": args.device,
        "precision": _precision(args, model),
        "compile": compiled,
        "seed": args.seed,
    }


def _precision(args: Any, model: nn.Module) -> str:
    """As the arguments say; else that of the weights, whose masters are in float32 all the same."""
    if args.fp16:
        return "float16"
    kinds = {one.dtype for one in model.parameters() if one.is_floating_point()}
    if args.bf16 or torch.bfloat16 in kinds:
        return "bfloat16"
    return "float16" if torch.float16 in kinds else "float32"
