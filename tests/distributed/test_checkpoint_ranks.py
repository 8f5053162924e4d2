"""A failure of one rank is raised on all with the rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from support.ranks import run_on_ranks

from adaptive_batch import distributed
from adaptive_batch.checkpoint.dcp import Ranks
from adaptive_batch.errors import CheckpointError

pytestmark = pytest.mark.slow


class HoldsALambda(Exception):
    def __init__(self, text="held"):
        super().__init__(text)
        self.function = lambda: None


def wrapped():
    """Raise as torch.save does on a full disk."""
    try:
        raise OSError(28, "No space left on device")
    except OSError:
        raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904


def failing(error):
    raise error


def caught(call):
    try:
        return call()
    except BaseException as error:
        return type(error).__name__, str(error)


def rank_facts():
    group = dist.new_group(backend="gloo")
    ranks = Ranks(group)
    errors = [OSError(28, "full"), HoldsALambda(), CheckpointError("truncated"), TypeError("a set")]
    is_last = ranks.rank == 1
    return {
        "wrapped": caught(lambda: ranks.each(lambda: wrapped() if is_last else None)),
        "failed": [
            caught(lambda error=error: ranks.each(lambda: failing(error) if is_last else None))
            for error in errors
        ],
        "failed on zero": caught(lambda: ranks.first(wrapped)),
        "interrupted": caught(
            lambda: ranks.each(lambda: failing(KeyboardInterrupt()) if is_last else None)
        ),
        "as itself": [
            caught(
                lambda error=error: distributed.from_each_rank(
                    lambda: failing(error) if is_last else None, group
                )
            )
            for error in errors
        ],
        "afterwards": ranks.each(lambda: "still together"),
    }


@pytest.fixture(scope="module")
def facts():
    return run_on_ranks(rank_facts, 2)


def test_a_failure_of_one_rank_is_raised_on_all_with_its_cause_and_the_rank(facts):
    full = ("CheckpointError", "rank 1: [Errno 28] No space left on device")
    for one in facts:
        assert one["wrapped"] == full
        assert one["failed"] == [
            ("CheckpointError", "rank 1: [Errno 28] full"),
            ("CheckpointError", "rank 1: held"),
            ("CheckpointError", "rank 1: truncated"),
            ("TypeError", "rank 1: a set"),
        ]
        assert one["failed on zero"] == (
            "CheckpointError",
            "rank 0: [Errno 28] No space left on device",
        )


def test_an_error_without_rank_is_raised_unchanged_if_it_can_be_sent(facts):
    for rank, one in enumerate(facts):
        assert one["as itself"] == [
            ("OSError", "[Errno 28] full"),
            (
                ("HoldsALambda", "held")
                if rank == 1
                else ("RuntimeError", "rank 1 failed with HoldsALambda: held")
            ),
            ("CheckpointError", "truncated"),
            ("TypeError", "a set"),
        ]


def test_an_interruption_of_one_rank_ends_all_and_ranks_are_together_afterwards(facts):
    for one in facts:
        assert one["interrupted"] == ("KeyboardInterrupt", "")
        assert one["afterwards"] == ["still together"] * 2


def test_one_process_needs_no_group_and_sees_the_error_itself():
    alone = Ranks()
    assert (alone.rank, alone.count) == (0, 1)
    result, error = object(), HoldsALambda()
    for act in (
        lambda call: alone.each(call)[0],
        alone.first,
        lambda call: distributed.from_each_rank(call)[0],
    ):
        assert act(lambda: result) is result
        with pytest.raises(HoldsALambda) as caught:
            act(lambda: failing(error))
        assert caught.value is error
