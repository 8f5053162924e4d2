"""NCCL between processes, with a library that sends small messages through shared memory.

It checks the order and sizes of collectives on all ranks, and the results of small ones.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import TESTS, subprocess_environment

pytestmark = pytest.mark.cuda_stack


def run(what: str, *, ranks: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    script = TESTS / "support/cuda_stack/collectives.py"
    variables = subprocess_environment(
        EMULATE_DEVICE_COUNT=str(ranks), EMULATE_COPIED_BYTES="65536", OMP_NUM_THREADS="1"
    )
    return subprocess.run(
        [*command, str(script), what], env=variables, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_small_messages_arrive_and_large_ones_do_not_block(ranks):
    done = run("right", ranks=ranks)
    assert done.returncode == 0, done.stderr[-6000:]
    assert not list(Path("/dev/shm").glob("cudastub-*"))


def test_different_collectives_of_ranks_are_an_error():
    done = run("different", ranks=2)
    assert done.returncode != 0
    assert "rank 0 of 2 calls AllReduce of 32 bytes" in done.stderr
    assert "rank 1 AllReduce of 16" in done.stderr
