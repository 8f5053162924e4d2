"""Device memory: budgets, measurements, the curve of a step's peak, snapshots of the training
state.
"""

from adaptive_batch._random import RandomState

from .curve import Line, MemoryCurve, Trace
from .device import (
    ALLOCATOR_VARIABLES,
    GIB,
    DeviceMemory,
    Room,
    Usage,
    allocator_settings,
    auto_headroom,
    budget_bytes,
    check_device_memory,
    check_segments,
    device_memory,
    expand_segments,
    expand_segments_in_script,
    host_available_bytes,
    is_out_of_memory,
    parse_size,
    plain_tensors,
    recover,
    segments_expand,
    storage_bytes,
    tensors_in,
    wanted_bytes,
)
from .packed_attention import estimated_attention, packed_attention
from .snapshot import (
    OptimizerInBackward,
    TensorSnapshot,
    TrainingSnapshot,
    optimizer_list,
    optimizer_state_tensors,
)
from .tracker import MemoryTracker

__all__ = [
    "ALLOCATOR_VARIABLES",
    "GIB",
    "DeviceMemory",
    "Line",
    "MemoryCurve",
    "MemoryTracker",
    "OptimizerInBackward",
    "RandomState",
    "Room",
    "TensorSnapshot",
    "Trace",
    "TrainingSnapshot",
    "Usage",
    "allocator_settings",
    "auto_headroom",
    "budget_bytes",
    "check_device_memory",
    "check_segments",
    "device_memory",
    "estimated_attention",
    "expand_segments",
    "expand_segments_in_script",
    "host_available_bytes",
    "is_out_of_memory",
    "optimizer_list",
    "optimizer_state_tensors",
    "packed_attention",
    "parse_size",
    "plain_tensors",
    "recover",
    "segments_expand",
    "storage_bytes",
    "tensors_in",
    "wanted_bytes",
]
