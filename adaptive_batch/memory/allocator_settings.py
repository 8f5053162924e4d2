"""Settings of PyTorch's allocator in the environment, and expandable segments."""

from __future__ import annotations

import logging
import os
import re
import sys

import torch

from adaptive_batch import distributed
from adaptive_batch._torch import PrivateNames

private = PrivateNames("expandable segments")

log = logging.getLogger("adaptive_batch")

# PyTorch reads the first of these variables that is set.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# Shares of memory for `headroom: auto`. With expandable segments, varying lengths reserve up to 1%
# more than trials measure. With other segments, 1% led to an OOM in 3 of 18 runs.
HEADROOM_EXPANDABLE = 0.01
_HEADROOM = 0.05

_EXPANDABLE = "expandable_segments:True"


def allocator_settings() -> tuple[str, dict[str, str]]:
    """Return the variable that configures PyTorch's allocator, or "", and its settings by name."""
    variable = next((name for name in ALLOCATOR_VARIABLES if name in os.environ), "")
    text = re.sub(r"\s", "", os.environ.get(variable, ""))
    settings = re.findall(r"(\w+):(\[[^\]]*\]|[^,]*)", text)
    return variable, dict(settings)


def segments_expand() -> bool:
    """Return whether the environment enables expandable segments."""
    _, settings = allocator_settings()
    return settings.get("expandable_segments") == "True"


def auto_headroom(*, expands: bool) -> float:
    """Return the share of memory that ``headroom: auto`` leaves free.

    Args:
        expands: whether the step runs on one GPU with expandable segments.
    """
    return HEADROOM_EXPANDABLE if expands else _HEADROOM


def segments_can_expand() -> bool:
    """Return whether PyTorch supports expandable segments here (Linux; untested on AMD GPUs)."""
    return sys.platform == "linux" and torch.version.hip is None


def expand_segments() -> None:
    """Enable expandable segments before CUDA is initialized, unless the environment configures the
    allocator.
    """
    variable, _ = allocator_settings()
    if not variable and segments_can_expand():
        os.environ[ALLOCATOR_VARIABLES[0]] = _EXPANDABLE


def expand_segments_in_script(device: torch.device | None = None) -> None:
    """Enable expandable segments in a program that may have initialized CUDA already, and log it.

    Settings in the environment, or made by the program with
    `torch.cuda.memory._set_allocator_settings`, are kept. Segments that are already allocated do
    not change.

    Args:
        device: device of the model, whose driver is checked if it is a CUDA device; None if it is
            not known yet.
    """
    variable, _ = allocator_settings()
    is_not_cuda = device is not None and device.type != "cuda"
    if variable or is_not_cuda or not segments_can_expand() or not torch.cuda.is_available():
        return
    # New settings would replace settings that the program has made.
    if private.allocator_snapshot()["allocator_settings"][ALLOCATOR_VARIABLES[0]]:
        return
    _set_expandable(True)
    if distributed.is_rank_zero():
        log.info(
            "enabled expandable segments of the CUDA allocator (%s=%s): steps of different lengths"
            " fragment other segments",
            ALLOCATOR_VARIABLES[0],
            _EXPANDABLE,
        )
    if device is not None:
        check_segments(device)


def check_segments(device: torch.device) -> None:
    """Disable expandable segments and log it if the driver does not support them, as on some
    virtual machines.
    """
    if device.type != "cuda" or os.environ.get(ALLOCATOR_VARIABLES[0]) != _EXPANDABLE:
        return
    _set_expandable(True)
    # A new stream has no cached blocks, so the request reaches the driver.
    new_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(new_stream):
            torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        # The driver supports expandable segments; any other error means that it does not.
        return
    except RuntimeError as error:
        _set_expandable(False)
        reason, _, _ = str(error).partition("\n")
        log.info("%s: expandable segments disabled: the driver lacks them (%s)", device, reason)
    torch.cuda.empty_cache()


def _set_expandable(expands: bool) -> None:
    settings = f"expandable_segments:{expands}"
    os.environ[ALLOCATOR_VARIABLES[0]] = settings
    # PyTorch may have read the environment already.
    private.set_allocator_settings(settings)
