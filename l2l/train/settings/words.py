"""What settings are called elsewhere: whoever types such a word reads what it is called here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

ROWS = "training.rows, all rows of a step: batch size x gradient accumulation steps x devices"
LENGTH = "training.length"
PRECISION = 'training.precision, such as "bfloat16"'
EVALUATION = "data.evaluation_source"
MODEL = "model.folder, a folder that is here: nothing is downloaded"
NOT_NEEDED = ", and it need not be said"

# A word -> "section.key" of ours, or nothing if there is none, and perhaps a remark after a comma.
ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("batch_size", "train_batch_size", "per_device_train_batch_size"), ROWS),
    "gradient_accumulation_steps": ROWS,
    "gradient_accumulation": ROWS,
    "accumulate_grad_batches": ROWS,
    **dict.fromkeys(("eval_batch_size", "per_device_eval_batch_size"), "evaluation.rows"),
    "micro_batch_size": "training.microbatch_size",
    "micro_batch": "training.microbatch_size",
    **dict.fromkeys(("lr", "base_lr", "max_lr"), "optimizer.learning_rate"),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "seq_length", "seq_len"), LENGTH),
    **dict.fromkeys(("max_length", "sequence_len", "block_size", "cutoff_len"), LENGTH),
    **dict.fromkeys(("context_length", "model_max_length"), LENGTH),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "n_epochs", "epoch"), "training.epochs"),
    **dict.fromkeys(("max_steps", "max_train_steps", "num_steps", "n_steps"), "training.steps"),
    **dict.fromkeys(("warmup_steps", "num_warmup_steps"), "schedule.warm_up_steps"),
    **dict.fromkeys(("warmup_ratio", "warmup"), "schedule.warm_up_share"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler"), "schedule.shape"),
    "min_lr_ratio": "schedule.minimum_ratio",
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val", "grad_clip"), "training.clip_norm"),
    "optim": "optimizer.name",
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "optimizer.betas, both in a list"),
    "adam_epsilon": "optimizer.eps",
    **dict.fromkeys(("bf16", "fp16", "mixed_precision", "dtype", "torch_dtype"), PRECISION),
    **dict.fromkeys(("model_name_or_path", "model_name", "model_id", "base_model"), MODEL),
    "tokenizer_name": ", the tokenizer is the one in the model's folder",
    **dict.fromkeys(("dataset", "datasets", "dataset_name", "data_files"), "data.source"),
    **dict.fromkeys(("train_file", "train_data", "data_path"), "data.source"),
    **dict.fromkeys(("validation_file", "eval_file", "eval_data", "eval_dataset"), EVALUATION),
    **dict.fromkeys(
        ("val_set_size", "test_size", "validation_split"),
        "data.hold_out, a number of examples or a share",
    ),
    "chat_template": "data.template",
    **dict.fromkeys(("dataset_text_field", "text_column", "text_field"), "columns.text"),
    **dict.fromkeys(("label_column", "label_column_name"), "columns.label"),
    **dict.fromkeys(("lora_r", "r"), "lora.rank"),
    **dict.fromkeys(("use_lora", "use_peft", "peft"), "lora.enabled"),
    **dict.fromkeys(("lora_target_modules", "target_modules"), "lora.targets"),
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    **dict.fromkeys(("use_dora", "lora_dora"), "lora.dora"),
    "use_rslora": "lora.rslora",
    "load_in_4bit": 'lora.base, "nf4"',
    "load_in_8bit": 'lora.base, "int8"',
    **dict.fromkeys(("gpu_memory", "max_memory"), "memory.device_memory"),
    **dict.fromkeys(("output_dir", "out_dir"), "output.folder"),
    "save_steps": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    **dict.fromkeys(("eval_steps", "eval_strategy"), "evaluation.every_steps"),
    "evaluation_strategy": "evaluation.every_steps",
    "logging_steps": "output.every_steps",
    **dict.fromkeys(
        ("report_to", "use_wandb", "wandb_project"),
        "output.tensorboard, true or false; metrics.jsonl has all numbers in any case",
    ),
    "load_best_model_at_end": "checkpoint.best",
    "metric_for_best_model": "evaluation.metric",
    "early_stopping_patience": "evaluation.patience",
    "early_stopping_threshold": "evaluation.least_gain",
    "torch_compile": "training.compile",
    "max_completion_length": "grpo.max_new_tokens",
    **dict.fromkeys(
        ("gradient_checkpointing", "use_gradient_checkpointing", "activation_checkpointing"),
        f", what is kept and what recomputed is planned{NOT_NEEDED}",
    ),
    **dict.fromkeys(
        ("deepspeed", "fsdp", "offload", "device_map"),
        "memory.device_memory, all that has to be said of what goes where",
    ),
    "resume_from_checkpoint": f", the same command goes on from the last checkpoint{NOT_NEEDED}",
    "overwrite_output_dir": ", --no-resume begins anew and keeps the earlier run",
    "trust_remote_code": ", code of a model's folder is not run",
    "dataloader_num_workers": f", data are tokenized before the first step{NOT_NEEDED}",
    "push_to_hub": ", nothing is uploaded: the trained model is in the run folder's model/",
}


def answer(word: str, say: Callable[[str, str], str]) -> str:
    """A sentence about a word that is used elsewhere, after a blank; empty if it is not known.

    `say` is given section and key of a setting, and says how it is set.
    """
    place, _, remark = ELSEWHERE.get(word.lower().replace("-", "_"), "").partition(", ")
    if not place:
        return f" Nothing is called so here: {remark}." if remark else ""
    section, _, key = place.partition(".")
    return f" Here it is {say(section, key)}{f': {remark}' if remark else ''}."
