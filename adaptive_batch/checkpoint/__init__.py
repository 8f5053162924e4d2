"""Checkpoints of steps that are complete or absent."""

from .checkpoint import Checkpoint
from .manager import CheckpointManager, latest_complete
from .optimizer_state import load_named_optimizer_state, named_optimizer_state

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "latest_complete",
    "load_named_optimizer_state",
    "named_optimizer_state",
]
