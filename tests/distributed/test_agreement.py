"""What fails on one rank fails on all, and says where; what succeeds is known to all."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from support.ranks import run_on_ranks
from torch.distributed.checkpoint.api import CheckpointException

from adaptive_batch.distributed import Agreement, portable
from adaptive_batch.errors import CheckpointError


class HoldsALambda(Exception):
    def __init__(self, text="held"):
        super().__init__(text)
        self.function = lambda: None


def wrapped():
    """As torch.save tells of a disk that is full."""
    try:
        raise OSError(28, "No space left on device")
    except OSError:
        raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904


def failing(error):
    raise error


def told(ranks, call):
    try:
        return call()
    except BaseException as error:
        return type(error).__name__, ranks.reason(error)


def rank_facts():
    ranks = Agreement(dist.new_group(backend="gloo"))
    on_one = [OSError(28, "full"), HoldsALambda(), CheckpointError("torn"), KeyboardInterrupt()]
    return {
        "who": (ranks.rank, ranks.num_ranks),
        "gathered": ranks.gathered(lambda: ranks.rank * 10),
        "from zero": ranks.from_rank_zero(lambda: ranks.rank),
        "wrapped": told(ranks, lambda: ranks.gathered(lambda: wrapped() if ranks.rank == 1 else None)),
        "failed": [
            told(ranks, lambda error=error: ranks.gathered(lambda: failing(error) if ranks.rank == 1 else None))
            for error in on_one
        ],
        "failed on zero": told(ranks, lambda: ranks.from_rank_zero(wrapped)),
        "afterwards": ranks.gathered(lambda: "still together"),
    }


@pytest.fixture(scope="module")
def facts():
    return run_on_ranks(rank_facts, 2)


def test_each_rank_learns_what_all_made(facts):
    assert [one["who"] for one in facts] == [(0, 2), (1, 2)]
    for one in facts:
        assert one["gathered"] == [0, 10]
        assert one["from zero"] == 0


def test_a_failure_of_one_rank_is_raised_on_all_with_its_cause_and_the_rank(facts):
    full = ("CheckpointException", "rank 1: [Errno 28] No space left on device")
    for one in facts:
        assert one["wrapped"] == full
        assert one["failed"][:3] == [
            ("CheckpointException", "rank 1: [Errno 28] full"),
            ("CheckpointException", "rank 1: HoldsALambda: held"),
            ("CheckpointException", "rank 1: torn"),
        ]
        assert one["failed on zero"] == ("CheckpointException", "rank 0: [Errno 28] No space left on device")


def test_an_interruption_stays_one_where_it_came_and_is_a_failure_elsewhere(facts):
    assert facts[0]["failed"][3] == ("CheckpointException", "rank 1: interrupted by KeyboardInterrupt")
    assert facts[1]["failed"][3][0] == "KeyboardInterrupt"


def test_ranks_are_together_after_a_failure(facts):
    for one in facts:
        assert one["afterwards"] == ["still together"] * 2


def test_one_process_needs_no_group_and_sees_the_error_itself():
    alone = Agreement()
    assert (alone.rank, alone.num_ranks) == (0, 1)
    result, error = object(), HoldsALambda()
    assert alone.gathered(lambda: result)[0] is result
    assert alone.from_rank_zero(lambda: result) is result
    with pytest.raises(HoldsALambda) as caught:
        alone.gathered(lambda: failing(error))
    assert caught.value is error
    assert (
        alone.reason(CheckpointException("write", {0: (OSError(27, "File too large"), None)}))
        == "[Errno 27] File too large"
    )


def test_a_copy_of_an_error_is_without_what_was_wrapped_around_it():
    with pytest.raises(RuntimeError) as caught:
        wrapped()
    copy = portable(caught.value)
    assert (type(copy), str(copy), copy.__cause__, copy.__context__) == (
        OSError,
        "[Errno 28] No space left on device",
        None,
        None,
    )
