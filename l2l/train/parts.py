"""Parts of a run that its settings describe: tokenizer, model, engine; also of one to export."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn

from l2l.checkpoint import (
    MANIFEST,
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
    Manifest,
    SavedModel,
)
from l2l.engine import Engine
from l2l.files import whole_folder
from l2l.hugging_face import RandomInit, empty_model, export_model, read_json, tokenizer_of
from l2l.train.data import PLAIN_TEMPLATE
from l2l.train.folder import RunFolder, TrainingError
from l2l.train.settings import LANGUAGE_TASKS, Settings

VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")  # of a config.json


def make_tokenizer(settings: Settings) -> Any:
    """The model's tokenizer, with the chat template that is trained with.

    Raises:
        ValueError: the folder has none.
    """
    data, tokenizer = settings.data, tokenizer_of(settings.model.folder)
    if data.task == "instruct" and (data.template or not tokenizer.chat_template):
        tokenizer.chat_template = data.template or PLAIN_TEMPLATE
    return tokenizer


def pad_id_of(tokenizer: Any) -> int:
    """A token to fill rows up with."""
    offers = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(number) for number in offers if number is not None)


def make_model(
    settings: Settings,
    *,
    pad_id: int,
    num_labels: int | None = None,
    label_names: Iterable[str] = (),
) -> nn.Module:
    """The model, on the meta device.

    Raises:
        ValueError: transformers makes none of the folder.
    """
    task = settings.data.task
    names = dict(enumerate(label_names))
    if task in LANGUAGE_TASKS:
        return empty_model(settings.model.folder, task="causal")
    model = empty_model(settings.model.folder, task=task, num_labels=num_labels)
    config: Any = model.config
    config.pad_token_id = pad_id  # decoders look for the last token of a row by it
    if names:
        config.id2label = names
        config.label2id = {name: number for number, name in names.items()}
    return model


def make_engine(settings: Settings, model: nn.Module) -> Engine:
    """The engine that the settings describe, with the weights that training begins with.

    Raises:
        ValueError: it cannot be made, or the model does not fit.
    """
    training, memory = settings.training, settings.memory
    begins_random = settings.model.random_init
    return Engine(
        model,
        weights=RandomInit(training.seed) if begins_random else settings.model.folder,
        allow_missing_weights=settings.model.allow_missing_weights,
        optimizer=settings.optimizer.make(),
        device=training.device,
        device_memory=memory.device_memory,
        host_memory=memory.host_memory,
        microbatch_size=training.microbatch_size,
        depth=training.depth(),
        precision=training.precision,
        clip_norm=training.clip_norm or None,
        layers=settings.model.layer_list,
        compile=training.compile,
        seed=training.seed,
    )


def model_fingerprint(folder: Path) -> str:
    """A short text that differs if the model in a folder has another shape."""
    config = read_json(folder / "config.json")
    kept = {key: value for key, value in config.items() if key not in VOLATILE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def run_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, with what `l2l train` writes into it as it must be.

    Raises:
        CheckpointError: it cannot be read, or is not.
    """
    found = Manifest.read(folder)
    tables, number, names = (
        found.extra.get(name, default)
        for name, default in (("settings", {}), ("num_labels", None), ("label_names", []))
    )
    if (
        not isinstance(tables, dict)
        or not all(isinstance(one, dict) for one in tables.values())
        or not (number is None or (type(number) is int and number > 0))
        or not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
    ):
        raise CheckpointError(
            f"{folder / MANIFEST} is damaged: settings, num_labels or label_names are not what l2l "
            "train writes."
        )
    return found


def export_checkpoint(
    path: Path, folder: Path, *, dtype: str | None = None, model_folder: Path | None = None
) -> Path:
    """Write the model of a checkpoint, or of a run's last one, as a Hugging Face folder.

    Args:
        path: a run folder, or a checkpoint.
        folder: to write.
        dtype: of the weights; None: as the run's settings say.
        model_folder: where config and tokenizer are, if not where they were when it was trained.

    Returns:
        the checkpoint.

    Raises:
        ValueError: there is no such checkpoint, it is damaged, or the folder cannot be written.
    """
    checkpoint = whole_folder(path)
    if not (checkpoint / MANIFEST).is_file():
        run = RunFolder(path)
        if not run.settings_file.is_file():
            beside = [one.name for one in CheckpointFolder(path.parent).all()]
            raise TrainingError(
                f"{path} is not a run folder, nor a checkpoint. Expected what l2l train has "
                f"written{': ' + ' or '.join(beside) if beside else '.'}"
            )
        found = CheckpointFolder(run.checkpoints).latest()
        if found is None:
            raise TrainingError(f"{run.checkpoints} has no checkpoint. Expected one to export.")
        checkpoint = found
    extra = run_manifest(checkpoint).extra
    if "settings" not in extra:
        raise TrainingError(f"{checkpoint} was not written by l2l train, so its model is unknown.")
    settings = Settings.of_table(extra["settings"])
    if model_folder is not None:
        described = settings.model.model_copy(update={"folder": model_folder})
        settings = settings.model_copy(update={"model": described})
    tokenizer = make_tokenizer(settings)
    model = make_model(
        settings,
        pad_id=pad_id_of(tokenizer),
        num_labels=extra.get("num_labels"),
        label_names=extra.get("label_names", []),
    )
    files = Checkpoint(checkpoint)
    files.check()
    saved, shapes = SavedModel(files), {k: v.shape for k, v in model.named_parameters()}
    saved.check(model)
    export_model(
        model,
        folder,
        weight_of=lambda name: saved.read(name, shapes[name]),
        buffers={k: saved.read(k, v.shape) for k, v in model.named_buffers() if k in saved},
        dtype=dtype or settings.output.export_dtype,
        tokenizer=tokenizer,
    )
    return checkpoint
