"""NCCL between processes, with a library that sends small messages through shared memory.

It checks the order and sizes of collectives on all ranks, and the results of small ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.paths import TESTS
from support.processes import run_torchrun

pytestmark = pytest.mark.cuda_stack


SCRIPT = TESTS / "support/cuda_stack/collectives.py"


@pytest.mark.parametrize("ranks", [2, 3])
def test_small_messages_arrive_and_large_ones_do_not_block(ranks):
    run_torchrun(ranks, SCRIPT, "right", EMULATE_DEVICE_COUNT=str(ranks))
    assert not list(Path("/dev/shm").glob("cudastub-*"))


def test_different_collectives_of_ranks_are_an_error():
    done = run_torchrun(2, SCRIPT, "different", expect=1, EMULATE_DEVICE_COUNT="2")
    assert "rank 0 of 2 calls AllReduce of 32 bytes" in done.stderr
    assert "rank 1 AllReduce of 16" in done.stderr
