"""A logger that reduces the memory of an emulated CUDA device, named by a dotted path."""

from __future__ import annotations

import ctypes
import gc
import random
from typing import Any

import torch
from support.stops import ActingLogger


def library() -> ctypes.CDLL | None:
    """Return the library of the emulated CUDA driver; None if PyTorch does not run on it."""
    try:
        return ctypes.CDLL("libcudastub.so")  # torch has loaded it if it exists
    except OSError:
        return None


def leave(nbytes: int) -> None:
    """Limit this process to `nbytes` of each device, including the context."""
    gc.collect()
    torch.cuda.empty_cache()
    cuda = library()
    assert cuda is not None
    cuda.cudastub_set_reserved(
        ctypes.c_ulonglong(torch.cuda.get_device_properties(0).total_memory - nbytes)
    )


class Squeezing(ActingLogger):
    """A logger that reduces the memory of its device after step `after_step`. Beyond the memory
    held between steps, `share` of the peak remains. Only rank 0 has a logger.
    """

    def act(self, step: int) -> None:
        if step == self.after_step:
            torch.cuda.empty_cache()
            held, peak = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
            leave(held + int(self.share * (peak - held)))


def bimodal_rows(tokenizer: object, *, number: int, longest: int, **_: Any) -> list[dict[str, Any]]:
    """Return rows of which four fifths have about a tenth of the longest length, the others 70%."""
    draw = random.Random(7)
    rows = []
    for _ in range(number):
        mean = longest / 10 if draw.random() < 0.8 else 0.7 * longest
        length = min(longest, max(8, round(draw.gauss(mean, longest / 50))))
        rows.append({"tokens": [1] * length, "labels": [1] * length})
    return rows
