"""An error of one rank is raised on all ranks and names the rank."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from support.processes import run_on_ranks

from adaptive_batch import distributed
from adaptive_batch.checkpoint.files import Ranks
from adaptive_batch.errors import CheckpointError

pytestmark = pytest.mark.slow


class HoldsALambda(Exception):
    """An error that cannot be pickled."""

    def __init__(self, text="held"):
        super().__init__(text)
        self.function = lambda: None


def wrapped():
    """Raise the error of torch.save on a full disk."""
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
    ranks = Ranks(dist.new_group(backend="gloo"))

    def on_rank_one(act, *arguments):
        return caught(lambda: ranks.each(lambda: act(*arguments) if ranks.rank == 1 else None))

    def as_it_is(error):
        def act():
            return failing(error) if ranks.rank == 1 else None

        return caught(lambda: distributed.from_each_rank(act, ranks.group))

    errors = [OSError(28, "full"), HoldsALambda(), CheckpointError("truncated"), TypeError("a set")]
    return {
        "wrapped": on_rank_one(wrapped),
        "failed": [on_rank_one(failing, error) for error in errors],
        "failed on zero": caught(lambda: ranks.first(wrapped)),
        "interrupted": on_rank_one(failing, KeyboardInterrupt()),
        "as it is": [as_it_is(error) for error in errors[:2]],
        "afterwards": ranks.each(lambda: "still together"),
    }


def test_a_failure_of_one_rank_is_raised_on_all_and_ranks_are_together_afterwards():
    # Other ranks raise the name of an error that cannot be pickled.
    held = [("RuntimeError", "rank 1 failed with HoldsALambda: held"), ("HoldsALambda", "held")]
    for rank, facts in enumerate(run_on_ranks(rank_facts, 2)):
        full = "[Errno 28] No space left on device"
        assert facts == {
            "wrapped": ("CheckpointError", f"rank 1: {full}"),
            "failed": [
                ("CheckpointError", "rank 1: [Errno 28] full"),
                ("CheckpointError", "rank 1: held"),
                ("CheckpointError", "rank 1: truncated"),
                ("TypeError", "rank 1: a set"),
            ],
            "failed on zero": ("CheckpointError", f"rank 0: {full}"),
            "interrupted": ("KeyboardInterrupt", ""),
            "as it is": [("OSError", "[Errno 28] full"), held[rank]],
            "afterwards": ["still together"] * 2,
        }
