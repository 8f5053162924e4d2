"""A logger that takes memory away from a program on emulated CUDA, named by a dotted path."""

from __future__ import annotations

import ctypes
import gc
import random
from typing import Any

import torch
from torchtune.training.metric_logging import DiskLogger


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


class Squeezing(DiskLogger):
    """A log after one of whose steps another program takes memory of the device. Of several ranks,
    the first has a log.

    Args:
        after_step: which.
        share: what is left to this process, of what training had above what it holds between steps.
    """

    def __init__(self, log_dir: str, filename: str, after_step: int, share: float) -> None:
        super().__init__(log_dir, filename)
        self.after_step, self.share = after_step, share

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        super().log_dict(payload, step)
        if step == self.after_step and "loss" in payload:
            torch.cuda.empty_cache()
            held, peak = torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()
            leave(held + int(self.share * (peak - held)))


KINDS = ("skewed", "very skewed", "bimodal", "one long row in 250", "equal")


def skewed_rows(
    tokenizer: object,
    *,
    number: int,
    longest: int,
    kind: str = "skewed",
    seed: int = 7,
    source: str = "",
    packed: bool = False,
) -> list[dict[str, Any]]:
    """A dataset of rows whose lengths vary, a few of them as long as any may be; `kind` is one of
    KINDS.
    """
    draw = random.Random(seed)

    def drawn() -> float:
        if kind == "equal":
            return longest / 2
        if kind == "bimodal":
            return draw.gauss(longest / 10 if draw.random() < 0.8 else 0.7 * longest, longest / 50)
        if kind == "one long row in 250":
            return longest if draw.random() < 1 / 250 else draw.gauss(longest / 10, longest / 50)
        spread = 0.8 if kind == "skewed" else 1.2
        return draw.lognormvariate(0, spread) * longest / 8

    lengths = [min(longest, max(8, round(drawn()))) for _ in range(number)]
    return [{"tokens": [1] * length, "labels": [1] * length} for length in lengths]
