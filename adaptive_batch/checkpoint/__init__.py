"""Atomic checkpoints of training steps."""

from .checkpoint import (
    Checkpoint,
    CheckpointManager,
    checkpoints_in,
    clear_leftovers,
    newest_complete,
    remove_folder,
)
from .files import SavedFile, saving
from .optimizer_state import (
    load_named_optimizer_state,
    named_optimizer_state,
    parameter_name,
)

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
