"""Memory estimates of training steps on fake tensors, for devices that are not available."""

from .allocator import AllocatorSettings, CachingAllocator
from .bounds import counted_fit, estimate_length, explained, traces_alike
from .compiled_parts import CompiledParts, check_compiler
from .cuda_operators import CudaKernels, left_out
from .devices import CONTEXT_BYTES, DEVICES, EstimatedDevice, alike, find_device, parse_devices
from .fake_step import (
    DevicesAsHost,
    FakeDevice,
    FakeStep,
    Resident,
    needs_values,
    runs_in_optimizer,
)
from .of_model import estimate_memory, estimate_step
from .result import (
    Change,
    CurveCheck,
    Fit,
    LengthEstimate,
    MemoryEstimate,
    Target,
    ranked,
    read_estimate,
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
    "alike",
    "check_compiler",
    "counted_fit",
    "estimate_length",
    "estimate_memory",
    "estimate_step",
    "explained",
    "find_device",
    "left_out",
    "needs_values",
    "parse_devices",
    "ranked",
    "read_estimate",
    "runs_in_optimizer",
    "traces_alike",
]
