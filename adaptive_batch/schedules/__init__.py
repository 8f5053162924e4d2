"""What training has consumed, and how the batch size and the learning rate follow it."""

from .batch_rule import KEY, Asked, Schedule, ask, check_schedule, needs_noise_scale
from .batch_schedules import by_noise_scale, linear_ramp, ramp_by_doubling, steps
from .clock import Clock, TrainingClock, after_warmup, schedule_clock
from .epoch_plan import EpochPlan, rows_of_next_step, walk
from .increments import Growth, at_epochs, check_increment, geometric, next_batch_size
from .learning_rate import RULES, LearningRate, Reference, describe_unscaled, parse_reference, scale_learning_rate
from .lr_scheduler import write_rate
from .noise_scale import NoiseSample, NoiseScale, squared_norm
from .preview import PlannedStep, as_record, asked_ahead, check_stages, stages_of, table
from .progress import Progress

__all__ = [
    "KEY",
    "RULES",
    "Asked",
    "Clock",
    "EpochPlan",
    "Growth",
    "LearningRate",
    "NoiseSample",
    "NoiseScale",
    "PlannedStep",
    "Progress",
    "Reference",
    "Schedule",
    "TrainingClock",
    "after_warmup",
    "as_record",
    "ask",
    "asked_ahead",
    "at_epochs",
    "by_noise_scale",
    "check_increment",
    "check_schedule",
    "check_stages",
    "describe_unscaled",
    "geometric",
    "linear_ramp",
    "needs_noise_scale",
    "next_batch_size",
    "parse_reference",
    "ramp_by_doubling",
    "rows_of_next_step",
    "scale_learning_rate",
    "schedule_clock",
    "squared_norm",
    "stages_of",
    "steps",
    "table",
    "walk",
    "write_rate",
]
