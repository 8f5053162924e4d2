"""Functions named by dotted paths that each rank of a run calls first. Each injects an error on
rank 1.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch

from adaptive_batch.torchtune import Trainer
from adaptive_batch.training import RecipeStep

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def more_than_two_pairs_in_the_reference_on_rank_one() -> None:
    """Let rank 1 run out of memory in the reference with over two pairs, from the fifth call."""
    _fail_on_rank_one(Trainer, "reference_logits", from_call=5, where=are_more_than_two_pairs)


def trials_of_more_than_two_pairs_in_the_reference_on_rank_one() -> None:
    """Let rank 1 run out of memory in the reference with more than two pairs, in a search too."""
    _fail_on_rank_one(Trainer, "reference_logits", from_call=1, where=are_more_than_two_pairs)


def are_more_than_two_pairs(tokens: torch.Tensor) -> bool:
    return len(tokens) > 4


def clipping_on_rank_one() -> None:
    """Let rank 1 run out of memory as it clips the gradients of its fifth step."""
    _fail_on_rank_one(RecipeStep, "clip", from_call=5)


def a_bug_on_rank_one() -> None:
    """Let rank 1 raise a KeyError in its third forward."""
    _fail_on_rank_one(Trainer, "logits", from_call=3, error=KeyError("no such layer"))


def _fail_on_rank_one(
    owner: type,
    name: str,
    *,
    from_call: int,
    where: Callable[..., bool] = lambda *_, **__: True,
    error: Exception = OUT_OF_MEMORY,
) -> None:
    """Raise an error in a method from call `from_call` on, if `where` of its arguments is true."""
    whole, calls = getattr(owner, name), itertools.count(1)

    def failing(self: Any, *arguments: Any, **named: Any) -> Any:
        if next(calls) >= from_call and where(*arguments, **named):
            raise copy.copy(error)
        return whole(self, *arguments, **named)

    if os.environ["RANK"] == "1":
        setattr(owner, name, failing)
