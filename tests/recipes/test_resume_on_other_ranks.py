"""Runs that cannot go on with another number of ranks are refused. Runs that can:
tests/test_trajectories.py and benchmarks/resume_across_ranks.py.
"""

import pytest
from support.cli import OURS
from support.resumes_on_ranks import (
    SGD,
    Part,
)

from adaptive_batch.distributed import EXIT_STATUS

pytestmark = pytest.mark.slow


def test_with_the_optimizer_in_backward_fewer_ranks_are_refused(small):
    overrides = (*SGD, "optimizer_in_bwd=True", "batch_size=2")
    asks = Part(2, 2).overrides()
    first = small.run(OURS, *overrides, *asks, ranks=2, expect=EXIT_STATUS)
    goes_on = (f"output_dir={first.output_dir}", "resume_from_checkpoint=True")
    refused = small.run(OURS, *overrides, *goes_on, ranks=1, expect=1)
    assert "Traceback" not in refused.output
    assert (
        "optimizer_in_bwd=True: the checkpoint's steps were distributed over 2 ranks, and"
        " 1 rank cannot split their rows; start 2 or more ranks, or start again with"
        " optimizer_in_bwd=False" in refused.output
    )


def test_two_ranks_replace_an_unfinished_run_only_with_overwrite_output_dir(small):
    overrides = (*SGD, "batch_size=2")
    asks = Part(1, 3).overrides()
    folder = small.run(OURS, *overrides, *asks, ranks=1, expect=EXIT_STATUS).output_dir
    assert (folder / "step_3").exists()
    again = (OURS, *overrides, "seed=8", "epochs=1", f"output_dir={folder}")
    refused = small.run(*again, ranks=2, expect=1)
    assert "(step_3); resume it" in refused.output
    assert (folder / "step_3").exists()
    saves = ("save_every_n_steps=5", "enable_async_checkpointing=True")
    small.run(*again, *saves, "overwrite_output_dir=True", ranks=2)
    saved = [path.name for path in (*folder.glob("step_*"), *folder.glob("epoch_*"))]
    assert saved == ["step_5", "epoch_0"]
