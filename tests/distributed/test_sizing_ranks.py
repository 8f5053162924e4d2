"""Several ranks make the limit of a micro-batch smaller and larger together."""

from __future__ import annotations

from support.processes import run_on_ranks

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.training import MicroBatchSizer, OOMPolicy
from adaptive_batch.training.sizing import ShrinkRequest

NUM_STEPS = 6


def limits_of_steps() -> list[int]:
    """Return the limit of each step; rank 1 ran out of memory, and waits twice as long to retry."""
    rank = distributed.rank()
    sizer = MicroBatchSizer(micro_batch_size=32, policy=OOMPolicy(grow_after=2 + 2 * rank))
    sizer.lower({1: ShrinkRequest(32, 4, MicroBatchLimit(16), "no memory")})
    limits = []
    for _ in range(NUM_STEPS):
        sizer.retry_if_due()
        limits.append(sizer.limit().amount)
        sizer.after_attempt()
    return limits


def test_a_limit_shrinks_where_one_rank_has_no_room_and_is_tried_again_where_all_have():
    assert run_on_ranks(limits_of_steps, 2) == [[16] * 4 + [32] * 2] * 2
