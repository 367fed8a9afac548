"""Checkpoints: their format, folders of them, saving beside training, checked loading."""

from l2l.checkpoint.checkpoint import Checkpoint, CheckpointFolder, SavedModel, Saving
from l2l.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, OtherCheckpointError
from l2l.checkpoint.persistence import Expected, Persistence
