"""Atomic checkpoints of training steps."""

from .checkpoint import (
    Checkpoint,
    CheckpointManager,
    SkippedCheckpoint,
    checkpoints_in,
    newest_complete,
    remove_folder,
)
from .files import SavedFile, reason, saving
from .optimizer_state import (
    load_named_optimizer_state,
    named_optimizer_state,
    parameter_name,
)

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "SavedFile",
    "SkippedCheckpoint",
    "checkpoints_in",
    "load_named_optimizer_state",
    "named_optimizer_state",
    "newest_complete",
    "parameter_name",
    "reason",
    "remove_folder",
    "saving",
]
