"""PyTorch's CUDA build on a device that does not exist.

A program runs unchanged: PyTorch's allocator, operators, compiler and errors are its own. The CUDA
below them accounts for memory and computes only small values. `adaptive-batch emulate` starts it.
This package imports nothing of ours: processes of the program import it without adaptive_batch.
"""

from .launcher import Device, emulate, install_cuda_build
from .process import EmulationError

__all__ = [
    "Device",
    "EmulationError",
    "emulate",
    "install_cuda_build",
]
