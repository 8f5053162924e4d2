"""Resume points that are complete or absent."""

from .manager import ResumePoint, ResumePoints, newest_whole
from .optimizer_state import load_named_optimizer_state, named_optimizer_state
from .resume_point import flush_folder

__all__ = [
    "ResumePoint",
    "ResumePoints",
    "flush_folder",
    "load_named_optimizer_state",
    "named_optimizer_state",
    "newest_whole",
]
