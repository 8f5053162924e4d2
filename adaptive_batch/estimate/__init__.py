"""A training step on fake tensors: the memory it would need on a device that is not here."""

from .allocator import AllocatorSettings, CachingAllocator
from .compiled_parts import CompiledParts, not_estimated, uses_cuda_graphs
from .cuda_workspace import CudaKernels, left_out
from .devices import CONTEXT_BYTES, EstimatedDevice, alike, parse_devices, this_device
from .estimator import estimate_length, traces_alike
from .fake_step import Between, DevicesAsHost, FakeDevice, FakeStep, Run, needs_values
from .length_replay import (
    REPLAYED_STEPS,
    LengthPlan,
    PlannedSteps,
    Shape,
    StepLog,
    StepReplay,
    TracedShapes,
    batches_in_order,
    checked_lengths,
    lengths_of_quantiles,
    packed_row_lengths,
    replay_lengths,
    step_logs,
)
from .of_model import estimate_memory, estimate_step
from .result import (
    Change,
    CurveCheck,
    Fit,
    LengthEstimate,
    LengthReplay,
    MemoryBreakdown,
    MemoryEstimate,
    ReplayedMemory,
    Target,
    ranked,
    read_estimate,
)
from .simulated_memory import SimulatedMemory
from .tracker import StepTrace
from .trial_replay import TrialPiece, TrialSteps

__all__ = [
    "CONTEXT_BYTES",
    "REPLAYED_STEPS",
    "AllocatorSettings",
    "Between",
    "CachingAllocator",
    "Change",
    "CompiledParts",
    "CudaKernels",
    "CurveCheck",
    "DevicesAsHost",
    "EstimatedDevice",
    "FakeDevice",
    "FakeStep",
    "Fit",
    "LengthEstimate",
    "LengthPlan",
    "LengthReplay",
    "MemoryBreakdown",
    "MemoryEstimate",
    "PlannedSteps",
    "ReplayedMemory",
    "Run",
    "Shape",
    "SimulatedMemory",
    "StepLog",
    "StepReplay",
    "StepTrace",
    "Target",
    "TracedShapes",
    "TrialPiece",
    "TrialSteps",
    "alike",
    "batches_in_order",
    "checked_lengths",
    "estimate_length",
    "estimate_memory",
    "estimate_step",
    "left_out",
    "lengths_of_quantiles",
    "needs_values",
    "not_estimated",
    "packed_row_lengths",
    "parse_devices",
    "ranked",
    "read_estimate",
    "replay_lengths",
    "step_logs",
    "this_device",
    "traces_alike",
    "uses_cuda_graphs",
]
