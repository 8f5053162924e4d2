"""What training has consumed, and how the batch size and the learning rate follow it."""

from .batch_rules import (
    KEY,
    ClampedBatch,
    Schedule,
    check_increment,
    check_schedule,
    needs_noise_scale,
    next_batch_size,
    request_batch,
)
from .batch_schedules import EXAMPLES, at_epochs, by_noise_scale, geometric, linear_ramp, ramp_by_doubling, steps
from .clock import UNITS, Clock, TrainingClock
from .epoch_plan import EpochPlan
from .learning_rate import (
    RULES,
    LearningRate,
    Reference,
    describe_unscaled,
    parse_reference,
    scale_learning_rate,
    write_rate,
)
from .noise_scale import NoiseSample, NoiseScale, squared_norm
from .preview import PlannedStep, as_record, batch_sizes_ahead, check_increments, check_stages, stages_of, table
from .progress import Progress

__all__ = [
    "EXAMPLES",
    "KEY",
    "RULES",
    "UNITS",
    "ClampedBatch",
    "Clock",
    "EpochPlan",
    "LearningRate",
    "NoiseSample",
    "NoiseScale",
    "PlannedStep",
    "Progress",
    "Reference",
    "Schedule",
    "TrainingClock",
    "as_record",
    "at_epochs",
    "batch_sizes_ahead",
    "by_noise_scale",
    "check_increment",
    "check_increments",
    "check_schedule",
    "check_stages",
    "describe_unscaled",
    "geometric",
    "linear_ramp",
    "needs_noise_scale",
    "next_batch_size",
    "parse_reference",
    "ramp_by_doubling",
    "request_batch",
    "scale_learning_rate",
    "squared_norm",
    "stages_of",
    "steps",
    "table",
    "write_rate",
]
