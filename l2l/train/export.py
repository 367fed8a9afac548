"""`l2l export`: the model of a checkpoint that `l2l train` has written, without an engine."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from l2l.checkpoint import MANIFEST, Checkpoint, CheckpointError, CheckpointFolder, SavedModel
from l2l.files import whole_folder
from l2l.hugging_face import export_model
from l2l.model import Format, Partition, format_of, plain_values, quantize
from l2l.parameter_server import PrecisionPolicy
from l2l.train.folder import RunFolder, TrainingError
from l2l.train.prepared import engine_options, make_model, make_tokenizer
from l2l.train.settings import Settings


def read_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint, with settings as `l2l train` writes them, if there are any.

    Raises:
        CheckpointError: it cannot be read, or its settings are something else.
    """
    found = Checkpoint(folder)
    tables = found.manifest.extra.get("settings", {})
    if not isinstance(tables, dict) or not all(isinstance(one, dict) for one in tables.values()):
        raise CheckpointError(
            f"{folder / MANIFEST} is damaged: its settings are not what l2l train writes."
        )
    return found


def export_checkpoint(
    path: Path,
    folder: Path,
    *,
    dtype: str | None = None,
    model_folder: Path | None = None,
    merge: bool = False,
) -> Path:
    """Write the model of a checkpoint, or of a run's last one, as a Hugging Face folder.

    Args:
        path: a run folder, or a checkpoint.
        folder: to write.
        dtype: of the weights; None: as the run's settings say, or if merged as the model has them.
        model_folder: where config and tokenizer are, if not where they were when it was trained.
        merge: write the whole model, with the adapter that was trained in its weights.

    Returns:
        the checkpoint.

    Raises:
        ValueError: there is no such checkpoint, it is damaged, or the folder cannot be written.
    """
    checkpoint = _checkpoint_of(path)
    files = read_checkpoint(checkpoint)
    extra = files.manifest.extra
    if "settings" not in extra:
        raise TrainingError(f"{checkpoint} was not written by l2l train, so its model is unknown.")
    settings = Settings.of_table(extra["settings"])
    if model_folder is not None:
        described = settings.model.model_copy(update={"folder": model_folder})
        settings = settings.model_copy(update={"model": described})
    tokenizer, labels = make_tokenizer(settings), extra.get("label_names", [])
    number = extra.get("num_labels")
    model = make_model(settings, tokenizer=tokenizer, num_labels=number, label_names=labels)
    files.check()
    saved, shapes = SavedModel(files), {k: v.shape for k, v in model.named_parameters()}
    saved.check(model)
    formats = _formats(settings, model)

    def weight_of(name: str) -> Tensor:
        if settings.optimizer.averages and (mean := saved.read_mean(name)) is not None:
            return mean.view(shapes[name])
        if name in formats:
            return plain_values(saved.read_format(name, formats[name]))
        return saved.read(name, shapes[name])

    export_model(
        model,
        folder,
        weight_of=weight_of,
        buffers={k: saved.read(k, v.shape) for k, v in model.named_buffers() if k in saved},
        dtype=dtype or (None if merge else settings.output.export_dtype),
        tokenizer=tokenizer,
        merge=merge,
    )
    return checkpoint


def _formats(settings: Settings, model: nn.Module) -> dict[str, Format]:
    """Of quantized weights, by name."""
    options = engine_options(settings)
    if options["base"] is None:
        known = ((name, format_of(one)) for name, one in model.named_parameters())
        return {name: one for name, one in known if one is not None}
    types = PrecisionPolicy.for_model(model, precision=options["precision"])
    layers = Partition(model, layers=options["layers"]).layers
    quantize(layers, options["base"], dtype_of=types.link_dtype)
    return {owner: one for part in layers for owner, one in part.tensors.formats.items()}


def _checkpoint_of(path: Path) -> Path:
    checkpoint, run = whole_folder(path), RunFolder(path)
    if (checkpoint / MANIFEST).is_file():
        return checkpoint
    if not run.settings_file.is_file():
        beside = " or ".join(one.name for one in CheckpointFolder(path.parent).all())
        raise TrainingError(
            f"{path} is not a run folder, nor a checkpoint. Expected what l2l train has "
            f"written{f': {beside}' if beside else '.'}"
        )
    found = CheckpointFolder(run.checkpoints).latest()
    if found is None:
        raise TrainingError(f"{run.checkpoints} has no checkpoint. Expected one to export.")
    return found
