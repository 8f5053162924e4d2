"""Functions named by dotted paths that each rank of a run calls first. Each injects an error on
rank 1.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Container
from typing import Any

import torch

from adaptive_batch.torchtune import Trainer
from adaptive_batch.training import RecipeStep

OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def more_than_two_pairs_in_the_reference_on_rank_one() -> None:
    """Let rank 1 run out of memory in the second call of the reference with over two pairs."""
    _fail_on_rank_one(Trainer, "reference_logits", numbers=[2], where=_are_more_than_two_pairs)


def trials_of_more_than_two_pairs_in_the_reference_on_rank_one() -> None:
    """Let rank 1 run out of memory in each call of the reference with over two pairs."""
    each = range(1, 1000)
    _fail_on_rank_one(Trainer, "reference_logits", numbers=each, where=_are_more_than_two_pairs)


def _are_more_than_two_pairs(trainer: Trainer, tokens: torch.Tensor, **_: Any) -> bool:
    return len(tokens) > 4


def clipping_on_rank_one() -> None:
    """Let rank 1 run out of memory as it clips the gradients of its fifth step."""
    _fail_on_rank_one(RecipeStep, "clip", numbers=[5])


def a_bug_on_rank_one() -> None:
    """Let rank 1 raise a KeyError in its third forward."""
    _fail_on_rank_one(Trainer, "logits", numbers=[3], error=KeyError("no such layer"))


def _fail_on_rank_one(
    owner: type, name: str, *, error: Exception = OUT_OF_MEMORY, **when: Any
) -> None:
    def fail() -> None:
        raise copy.copy(error)

    if os.environ["RANK"] == "1":
        before_call(owner, name, fail, **when)


def before_call(
    owner: type,
    name: str,
    act: Callable[[], object],
    *,
    numbers: Container[int],
    where: Callable[..., bool] = lambda *_, **__: True,
) -> None:
    """Run a function before some calls of a method. Calls are counted from 1, if `where` of their
    arguments is true.
    """
    whole, calls = getattr(owner, name), itertools.count(1)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        if where(*arguments, **named) and next(calls) in numbers:
            act()
        return whole(*arguments, **named)

    setattr(owner, name, wrapped)
