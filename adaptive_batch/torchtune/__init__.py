"""The parts of the recipes; the only package that imports torchtune or omegaconf."""

from .checks import check_output_dir, without_effect
from .data import Data
from .estimates import estimate_devices
from .job import Job
from .launch import (
    all_ranks,
    no_component_exits,
    run_recipe,
    run_training,
    set_up_process,
    show_details,
    use_shipped_config,
)
from .limit_finder import LimitFinder
from .log import TrainingLog, build_profiler, record_memory_history
from .model import AdapterModel, FullModel
from .plan import TrainingPreview, build_rate, check_rate, couple_seesaw
from .resume import ResumedRun
from .settings import Settings, reference_tables
from .store import RunStore, Saver
from .task import Distillation, NextTokens, PreferencePairs, Task
from .trainer import Trainer, Validation

__all__ = [
    "AdapterModel",
    "Data",
    "Distillation",
    "FullModel",
    "Job",
    "LimitFinder",
    "NextTokens",
    "PreferencePairs",
    "ResumedRun",
    "RunStore",
    "Saver",
    "Settings",
    "Task",
    "Trainer",
    "TrainingLog",
    "TrainingPreview",
    "Validation",
    "all_ranks",
    "build_profiler",
    "build_rate",
    "check_output_dir",
    "check_rate",
    "couple_seesaw",
    "estimate_devices",
    "no_component_exits",
    "record_memory_history",
    "reference_tables",
    "run_recipe",
    "run_training",
    "set_up_process",
    "show_details",
    "use_shipped_config",
    "without_effect",
]
