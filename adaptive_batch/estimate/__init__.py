"""A training step on fake tensors: the memory it would need on a device that is not here."""

from .allocator import AllocatorSettings, CachingAllocator
from .cuda_workspace import fixed_overhead_bytes, left_out, workspace_bytes
from .devices import EstimatedDevice, parse_devices
from .fake_step import FakeDevice, FakeStep
from .result import (
    Change,
    CurveCheck,
    LengthEstimate,
    MemoryBreakdown,
    MemoryEstimate,
    Target,
    ranked,
    read_estimate,
)
from .tracker import StepTrace

__all__ = [
    "AllocatorSettings",
    "CachingAllocator",
    "Change",
    "CurveCheck",
    "EstimatedDevice",
    "FakeDevice",
    "FakeStep",
    "LengthEstimate",
    "MemoryBreakdown",
    "MemoryEstimate",
    "StepTrace",
    "Target",
    "fixed_overhead_bytes",
    "left_out",
    "parse_devices",
    "ranked",
    "read_estimate",
    "workspace_bytes",
]
