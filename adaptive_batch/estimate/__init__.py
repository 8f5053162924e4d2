"""A training step on fake tensors: what a device that is not here would hold."""

from .attribution import StepTrace
from .cuda_difference import fixed_overhead_bytes, left_out, workspace_bytes
from .devices import EstimatedDevice, parse_devices
from .fake_step import FakeDevice, FakeStep
from .memory_plan import Change, Kinds, LengthEstimate, MemoryEstimate, Target, ranked
from .saved_plan import read_plan

__all__ = [
    "Change",
    "EstimatedDevice",
    "FakeDevice",
    "FakeStep",
    "Kinds",
    "LengthEstimate",
    "MemoryEstimate",
    "StepTrace",
    "Target",
    "fixed_overhead_bytes",
    "left_out",
    "parse_devices",
    "ranked",
    "read_plan",
    "workspace_bytes",
]
