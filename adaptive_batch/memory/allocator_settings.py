"""Settings of PyTorch's allocator: read from the environment, with expandable segments added."""

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

# PyTorch reads its allocator's settings from the first of these that is set.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# What `headroom: auto` leaves free. Where segments expand, varying lengths take a percent more than
# trials of such lengths have shown; elsewhere that was an out-of-memory error in 3 runs of 18.
HEADROOM_EXPANDABLE = 0.01
_HEADROOM = 0.05

_EXPANDABLE = "expandable_segments:True"


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


def auto_headroom(*, expands: bool) -> float:
    """Return the share of memory that ``headroom: auto`` leaves free.

    Args:
        expands: whether one GPU runs the step, and its allocator has expandable segments.
    """
    return HEADROOM_EXPANDABLE if expands else _HEADROOM


def segments_can_expand() -> bool:
    """Whether PyTorch's allocator has expandable segments here: on Linux alone, and AMD's devices
    are untried.
    """
    return sys.platform == "linux" and torch.version.hip is None


def expand_segments() -> None:
    """Ask PyTorch's allocator of CUDA memory for expandable segments, before it is first used.

    Where the environment has settings of the allocator, these are left as they are, and so is
    an allocator that has none.
    """
    variable, _ = allocator_settings()
    if not variable and segments_can_expand():
        os.environ[ALLOCATOR_VARIABLES[0]] = _EXPANDABLE


def expand_segments_in_script(device: torch.device | None = None) -> None:
    """Switch on expandable segments in a program that may have initialised CUDA already, with one
    line in the log. Settings of the environment, or of the program by
    `torch.cuda.memory._set_allocator_settings`, are left as they are.

    Segments that were allocated before stay as they are; later ones expand.

    Args:
        device: device of the model, nothing is done for one that is not CUDA's; None where no
            device is known yet. The driver of a known device is checked.
    """
    variable, _ = allocator_settings()
    is_elsewhere = device is not None and device.type != "cuda"
    if variable or is_elsewhere or not segments_can_expand() or not torch.cuda.is_available():
        return
    # Settings that are given later replace all that the program has given.
    if private.allocator_snapshot()["allocator_settings"][ALLOCATOR_VARIABLES[0]]:
        return
    _set_expandable(True)
    if distributed.is_rank_zero():
        log.info(
            "CUDA's allocator uses expandable segments from now on (%s=%s), since steps of"
            " different lengths fragment other segments",
            ALLOCATOR_VARIABLES[0],
            _EXPANDABLE,
        )
    if device is not None:
        check_segments(device)


def check_segments(device: torch.device) -> None:
    """Do without expandable segments, with one line in the log, where the driver of a CUDA device
    has none, as some virtual machines have not.
    """
    if device.type != "cuda" or os.environ.get(ALLOCATOR_VARIABLES[0]) != _EXPANDABLE:
        return
    _set_expandable(True)
    # A new stream has no cached block that would serve the request without the driver.
    new_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(new_stream):
            torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        # The driver knows what they are.
        return
    except RuntimeError as error:
        _set_expandable(False)
        reason, _, _ = str(error).partition("\n")
        log.info("%s: no expandable segments (%s); the allocator does without them", device, reason)
    torch.cuda.empty_cache()


def _set_expandable(expands: bool) -> None:
    settings = f"expandable_segments:{expands}"
    os.environ[ALLOCATOR_VARIABLES[0]] = settings
    # PyTorch reads the environment once, and may have done so.
    private.set_allocator_settings(settings)
