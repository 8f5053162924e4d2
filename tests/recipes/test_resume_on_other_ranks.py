"""A run that goes on with more ranks, or with fewer, is the one that one device would have trained.
The long form: benchmarks/resume_across_ranks.py.
"""

import re
from dataclasses import replace

import pytest
from support.launch import launch
from support.resumes_on_ranks import (
    SGD,
    WAYS,
    Part,
    compare,
    train_alone,
    train_in_parts,
)

from adaptive_batch.distributed import EXIT_STATUS

pytestmark = pytest.mark.slow

ROUNDING = 2e-6  # of a loss in float32, relative: measured up to 3e-7


def assert_goes_on_as_alone(folder, whole, *, weights):
    """Every step's rows, batch and learning rate, the audit, losses within rounding, weights within
    `weights` of their norm.
    """
    found = compare(folder, whole)
    assert found["differing"] == []
    assert found["audit"][-1].startswith("verdict  holds: ")
    epochs = [line.partition(": ")[2] for line in found["audit"] if line.startswith("epoch ")]
    assert epochs == ["32 of 32 rows used"] * 2
    assert found["loss"] < ROUNDING
    assert found["weights"] < weights


def test_more_ranks_resume_within_an_epoch_and_at_its_end(small):
    way = replace(WAYS["3 ranks"], parts=(Part(1, 3), Part(3, epoch=0), Part(4)))
    done = train_in_parts(small, way)
    assert_goes_on_as_alone(done[-1].output_dir, train_alone(small, way), weights=1e-8)
    assert "ranks 1 -> 3: batch_size still refers to 1 rank" in done[1].output
    assert re.search(r"resuming from \S+/step_\d+ at epoch 1, ", done[2].output)


def test_with_the_optimizer_in_backward_fewer_ranks_are_refused(
    small,
):
    overrides = (*SGD, "optimizer_in_bwd=True", "batch_size=2")
    (first,) = launch(small, 2, *overrides, *Part(2, 2).overrides())
    assert first.exit_statuses == [EXIT_STATUS] * 2
    (refused,) = launch(
        small, 1, *overrides, f"output_dir={first.output_dir}", "resume_from_checkpoint=True"
    )
    assert refused.exit_statuses == [1]
    assert "Traceback" not in refused.output
    assert (
        "optimizer_in_bwd=True: the checkpoint's steps were distributed over 2 ranks, and"
        " 1 rank cannot split their rows; start 2 or more ranks, or start again with"
        " optimizer_in_bwd=False" in refused.output
    )


def test_two_ranks_replace_an_unfinished_run_only_with_overwrite_output_dir(small):
    overrides = (*SGD, "batch_size=2")
    (first,) = launch(small, 1, *overrides, *Part(1, 3).overrides())
    folder = first.output_dir
    assert (folder / "step_3").exists()
    again = (*overrides, "seed=8", "epochs=1", f"output_dir={folder}")
    (refused,) = launch(small, 2, *again)
    assert refused.exit_statuses == [1, 1]
    assert "(step_3); resume it" in refused.output
    assert (folder / "step_3").exists()
    saves = ("save_every_n_steps=5", "enable_async_checkpointing=True")
    (ended,) = launch(small, 2, *again, *saves, "overwrite_output_dir=True")
    assert ended.exit_statuses == [0, 0], ended.output
    saved = [path.name for path in (*folder.glob("step_*"), *folder.glob("epoch_*"))]
    assert saved == ["step_5", "epoch_0"]
