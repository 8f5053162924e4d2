"""A training step on fake tensors: what a device that is not here would hold."""

from .attribution import StepTrace
from .cuda_difference import fixed_overhead_bytes, left_out, workspace_bytes
from .devices import PlannedDevice, planned_devices
from .fake_step import FakeDevice, FakeStep
from .memory_plan import Change, Kinds, LengthPlan, MemoryPlan, Target, ranked
from .saved_plan import read_plan

__all__ = [
    "Change",
    "FakeDevice",
    "FakeStep",
    "Kinds",
    "LengthPlan",
    "MemoryPlan",
    "PlannedDevice",
    "StepTrace",
    "Target",
    "fixed_overhead_bytes",
    "left_out",
    "planned_devices",
    "ranked",
    "read_plan",
    "workspace_bytes",
]
