"""Memory estimates of training steps on fake tensors, for devices that are not available."""

from .allocator import AllocatorSettings, CachingAllocator
from .compiled_parts import CompiledParts, check_compiler
from .cuda_operators import CudaKernels, left_out
from .devices import (
    CONTEXT_BYTES,
    DEVICES,
    EstimatedDevice,
    find_device,
    group_by_kernels,
    parse_devices,
)
from .fake_step import (
    DevicesAsHost,
    FakeDevice,
    FakeStep,
    Resident,
    explained_missing_values,
)
from .model_estimate import (
    counted_fit,
    estimate_length,
    estimate_memory,
    estimate_step,
)
from .result import (
    Change,
    CurveCheck,
    Fit,
    LengthEstimate,
    MemoryEstimate,
    Target,
    rank_changes,
)

__all__ = [
    "CONTEXT_BYTES",
    "DEVICES",
    "AllocatorSettings",
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
    "MemoryEstimate",
    "Resident",
    "Target",
    "check_compiler",
    "counted_fit",
    "estimate_length",
    "estimate_memory",
    "estimate_step",
    "explained_missing_values",
    "find_device",
    "group_by_kernels",
    "left_out",
    "parse_devices",
    "rank_changes",
]
