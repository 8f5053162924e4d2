"""A logger that takes memory away from a program on emulated CUDA, named by a dotted path."""

from __future__ import annotations

import ctypes
import gc
import random
from typing import Any

import torch
from support.stops import ActingLogger


def library() -> ctypes.CDLL | None:
    """The CUDA without a device, where PyTorch runs on it."""
    try:
        return ctypes.CDLL("libcudastub.so")  # which torch has loaded, if it is there
    except OSError:
        return None


def leave(nbytes: int) -> None:
    """Let this process have so many bytes of each device from now on, context included, without
    what earlier tests have left.
    """
    gc.collect()
    torch.cuda.empty_cache()
    cuda = library()
    assert cuda is not None
    cuda.cudastub_set_reserved(
        ctypes.c_ulonglong(torch.cuda.get_device_properties(0).total_memory - nbytes)
    )


class Squeezing(ActingLogger):
    """A log after one of whose steps another program takes memory of the device. Of several ranks,
    the first has a log. This process keeps a `share` of what training had above what it holds
    between steps.
    """

    def act(self, step: int) -> None:
        if step == self.after_step:
            torch.cuda.empty_cache()
            held, peak = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
            leave(held + int(self.share * (peak - held)))


def bimodal_rows(tokenizer: object, *, number: int, longest: int, **_: Any) -> list[dict[str, Any]]:
    """A dataset whose lengths are around a tenth of the longest, or around 7 tenths for a fifth."""
    draw = random.Random(7)
    rows = []
    for _ in range(number):
        mean = longest / 10 if draw.random() < 0.8 else 0.7 * longest
        length = min(longest, max(8, round(draw.gauss(mean, longest / 50))))
        rows.append({"tokens": [1] * length, "labels": [1] * length})
    return rows
