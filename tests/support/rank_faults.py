"""Functions that each rank of a run calls first, named by dotted paths: each makes
something fail on that rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from adaptive_batch.torchtune import Trainer
from adaptive_batch.training import RecipeStep


def more_than_two_pairs_in_the_reference_on_rank_one() -> None:
    """Rank one runs out of memory before the reference, with more than two pairs."""
    if os.environ["RANK"] == "1":
        _fail(Trainer, "reference_logits", from_call=5, where=lambda tokens: len(tokens) > 4)


def trials_of_more_than_two_pairs_in_the_reference_on_rank_one() -> None:
    """Rank one runs out of memory before the reference, with more than two pairs, from the start:
    in a search, too.
    """
    if os.environ["RANK"] == "1":
        _fail(Trainer, "reference_logits", from_call=1, where=lambda tokens: len(tokens) > 4)


def clipping_on_rank_one() -> None:
    """Rank one runs out of memory in the clipping of its fifth step."""
    if os.environ["RANK"] == "1":
        _fail(RecipeStep, "clip", from_call=5)


def a_bug_on_rank_one() -> None:
    """Rank one fails in its third forward, and not for lack of memory."""
    if os.environ["RANK"] == "1":
        _fail(
            Trainer,
            "logits",
            from_call=3,
            error=lambda: KeyError("no such layer"),
        )


def no_device_on_rank_one() -> None:
    """Rank one finds no device, as on a machine with fewer GPUs than ranks."""
    if os.environ["RANK"] == "1":
        from torchtune import utils

        def get_device(device: str | None = None) -> torch.device:
            raise RuntimeError("The local rank is larger than the number of available GPUs.")

        utils.get_device = get_device


def _fail(
    owner: type,
    name: str,
    *,
    from_call: int,
    where: Callable[..., bool] = lambda *_, **__: True,
    error: Callable[[], BaseException] = lambda: torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB"
    ),
) -> None:
    """From its so-manieth call on, a method raises where `where` says so of its arguments."""
    whole, calls = getattr(owner, name), [0]

    def failing(self: Any, *arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] >= from_call and where(*arguments, **named):
            raise error()
        return whole(self, *arguments, **named)

    setattr(owner, name, failing)
