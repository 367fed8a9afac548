"""Checkpoints: their format, folders of them, saving beside training, checked loading."""

from l2l.checkpoint.checkpoint import (
    MANIFEST,
    Checkpoint,
    CheckpointError,
    CheckpointFolder,
    Manifest,
    OtherCheckpointError,
    Saving,
)
from l2l.checkpoint.persistence import Expected, Persistence
from l2l.checkpoint.saved_model import SavedModel
