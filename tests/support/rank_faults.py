"""What a rank of tests/support/launch.py calls first, named by dotted paths: it makes something go
wrong on that rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from adaptive_batch.distributed.fsdp import _Recorded
from adaptive_batch.probe import DryRun
from adaptive_batch.torchtune import Trainer
from adaptive_batch.training import BoundSearch, RecipeStep


def more_than_two_rows_on_rank_one() -> None:
    """Rank one runs out of memory in the forward of its third micro-batch of training and later
    ones, where they have more than two rows.
    """
    if os.environ["RANK"] == "1":
        _fail(
            Trainer,
            "logits",
            from_call=6,
            where=lambda tokens, **_: len(tokens) > 2,
        )


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
    """Rank one runs out of memory in the clipping of its fifth step, in the first attempt."""
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        _fail(RecipeStep, "clip", from_call=5)


def clipping_in_the_first_step_on_rank_one() -> None:
    """Rank one runs out of memory in the clipping of its first step, in the first attempt."""
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        _fail(RecipeStep, "clip", from_call=1)


def a_trial_of_more_than_two_rows_and_clipping_on_rank_one() -> None:
    """Rank one runs out of memory within a collective of a trial of more than two rows, in every
    attempt, and in clipping in the second.
    """
    if os.environ["RANK"] == "1":
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
            _fail(RecipeStep, "clip", from_call=4)  # the one of the probe's first step is another
        whole_trial, whole_call, rows = DryRun.__call__, _Recorded.__call__, [0]

        def trial(self: DryRun, batch_size: int) -> Any:
            rows[0] = batch_size
            try:
                return whole_trial(self, batch_size)
            finally:
                rows[0] = 0

        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            if rows[0] > 2:
                self._sharding._is_inside = True
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return whole_call(self, *arguments, **options)

        DryRun.__call__, _Recorded.__call__ = trial, call  # type: ignore[method-assign]


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


def less_memory_on_rank_one() -> None:
    """Rank one has half of the memory that is configured."""
    if os.environ["RANK"] == "1":
        whole = BoundSearch.budget_bytes
        BoundSearch.budget_bytes = lambda self: whole(self) // 2  # type: ignore[method-assign]


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
