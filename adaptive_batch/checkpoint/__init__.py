"""Checkpoints of steps that are complete or absent, and what tells damage in any other folder that
was saved.
"""

from .checkpoint import Checkpoint
from .failures import reason, saving
from .manager import CheckpointManager, checkpoints_in, remove_folder
from .manifest import (
    SavedFile,
    SkippedCheckpoint,
    changed_content,
    changed_size,
    manifest_text,
    newest_complete,
    read_manifest,
)
from .optimizer_state import (
    load_named_optimizer_state,
    map_leaves,
    named_optimizer_state,
    parameter_name,
)

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "SavedFile",
    "SkippedCheckpoint",
    "changed_content",
    "changed_size",
    "checkpoints_in",
    "load_named_optimizer_state",
    "manifest_text",
    "map_leaves",
    "named_optimizer_state",
    "newest_complete",
    "parameter_name",
    "read_manifest",
    "reason",
    "remove_folder",
    "saving",
]
