"""Several ranks make the limit of a micro-batch smaller and larger together."""

from __future__ import annotations

from support.ranks import run_on_ranks

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch
from adaptive_batch.training import ConfiguredSize, MicroBatchSizer, OOMPolicy

NUM_STEPS = 18


def limits_of_steps() -> list[int]:
    """What a micro-batch of each step may hold on a rank, where the allocator of rank 1 had to ask
    twice in the first step, and rank 1 waits twice as long before its limit grows.
    """
    rank = distributed.rank()
    policy = OOMPolicy(grow_after=1 + rank)
    sizer = MicroBatchSizer(ConfiguredSize(micro_batch_size=32), policy=policy)
    fullest = MicroBatch(list(range(16)), 4)
    limits = []
    for step in range(NUM_STEPS):
        numbers, _ = sizer.agree([rank, step], fullest=fullest)
        assert list(numbers) == [1, step]
        limits.append(sizer.limit_of_step.amount)
        sizer.after_attempt(fullest, allocator_retried=rank == 1 and step == 0)
    return limits


def test_a_limit_shrinks_where_one_rank_has_no_room_and_grows_where_all_have():
    # A row less than the fullest, and an eighth of 32 more after twice eight steps.
    assert run_on_ranks(limits_of_steps, 2) == [[32, *[15] * 16, 19]] * 2
