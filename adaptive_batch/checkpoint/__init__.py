"""Atomic checkpoints of training steps."""

from .checkpoint import (
    Checkpoint,
    CheckpointManager,
    checkpoints_in,
    clear_leftovers,
    newest_complete,
    remove_folder,
)
from .content import load_named_optimizer_state, named_optimizer_state, parameter_name
from .files import SavedFile, saving

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "SavedFile",
    "checkpoints_in",
    "clear_leftovers",
    "load_named_optimizer_state",
    "named_optimizer_state",
    "newest_complete",
    "parameter_name",
    "remove_folder",
    "saving",
]
