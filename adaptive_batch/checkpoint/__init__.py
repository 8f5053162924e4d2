"""Checkpoints of steps that are complete or absent, and what tells damage in any other folder that was saved."""

from .checkpoint import Checkpoint
from .failures import reason, saving
from .manager import CheckpointManager, checkpoints_in, latest_complete
from .manifest import SavedFile, SkippedCheckpoint, newest_complete, other_content, other_size, signed, unsigned
from .optimizer_state import load_named_optimizer_state, named_optimizer_state

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "SavedFile",
    "SkippedCheckpoint",
    "checkpoints_in",
    "latest_complete",
    "load_named_optimizer_state",
    "named_optimizer_state",
    "newest_complete",
    "other_content",
    "other_size",
    "reason",
    "saving",
    "signed",
    "unsigned",
]
