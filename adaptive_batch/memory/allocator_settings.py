"""What the environment asks of PyTorch's allocator, and the setting that recipes add."""

from __future__ import annotations

import logging
import os
import re
import sys

import torch

from adaptive_batch._torch import PrivateNames

private = PrivateNames("expandable segments")

log = logging.getLogger("adaptive_batch")

# PyTorch reads its allocator's settings from the first of these that is set.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# Settings by which a large block serves large requests alone.
_LIMITS_OF_DIVISION = {"max_split_size_mb", "roundup_power2_divisions"}

_EXPANDABLE = "expandable_segments:True"
_NOT_EXPANDABLE = "expandable_segments:False"


def allocator_settings() -> tuple[str, dict[str, str]]:
    """Return the variable that sets PyTorch's allocator, empty where none does, and its settings by
    name.
    """
    variable = next((name for name in ALLOCATOR_VARIABLES if name in os.environ), "")
    text = re.sub(r"\s", "", os.environ.get(variable, ""))
    settings = re.findall(r"(\w+):(\[[^\]]*\]|[^,]*)", text)
    return variable, dict(settings)


def segments_expand() -> bool:
    """Whether the environment asks PyTorch's allocator for expandable segments."""
    _, settings = allocator_settings()
    return settings.get("expandable_segments") == "True"


def segments_can_expand() -> bool:
    """Whether PyTorch's allocator has expandable segments here: on Linux alone, and AMD's devices
    are untried.
    """
    return sys.platform == "linux" and torch.version.hip is None


def large_blocks_are_divided() -> bool:
    """Whether the environment leaves PyTorch's allocator as it is, with segments that stay as they
    were made, and whose blocks are divided whatever their size.
    """
    _, settings = allocator_settings()
    is_native = settings.get("backend", "native") == "native"
    return is_native and not segments_expand() and not settings.keys() & _LIMITS_OF_DIVISION


def expand_segments() -> None:
    """Ask PyTorch's allocator of CUDA memory for expandable segments, before it is first used.

    Where the environment has settings of the allocator, these are left as they are, and so is
    an allocator that has none.
    """
    variable, _ = allocator_settings()
    if not variable and segments_can_expand():
        os.environ[ALLOCATOR_VARIABLES[0]] = _EXPANDABLE


def check_segments(device: torch.device) -> None:
    """Do without expandable segments, with one line in the log, where the driver of a CUDA device
    has none, as some virtual machines have not.
    """
    if device.type != "cuda" or os.environ.get(ALLOCATOR_VARIABLES[0]) != _EXPANDABLE:
        return
    # PyTorch reads the environment once, and may have done so.
    allocator = private("torch._C", "_accelerator_setAllocatorSettings")
    allocator._accelerator_setAllocatorSettings(_EXPANDABLE)
    try:
        torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        # The driver knows what they are.
        return
    except RuntimeError as error:
        os.environ[ALLOCATOR_VARIABLES[0]] = _NOT_EXPANDABLE
        allocator._accelerator_setAllocatorSettings(_NOT_EXPANDABLE)
        reason, _, _ = str(error).partition("\n")
        log.info("%s: no expandable segments (%s); the allocator does without them", device, reason)
