"""A run that goes on with more ranks, or with fewer, is the one that one device would have trained.
The long form: benchmarks/resume_across_ranks.py.
"""

import re
import shutil
from dataclasses import replace

import pytest
from support.cli import records
from support.launch import launch
from support.resumes_on_ranks import (
    SGD,
    WAYS,
    Part,
    Way,
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


def test_more_ranks_resume_within_an_epoch(small):
    way = replace(WAYS["3 ranks"], parts=(Part(1, 3), Part(3)))
    done = train_in_parts(small, way)
    assert_goes_on_as_alone(done[-1].output_dir, train_alone(small, way), weights=1e-8)
    assert "ranks 1 -> 3: batch_size still refers to 1 rank" in done[1].output


def test_a_schedule_resumes_with_its_rows_divided_among_more_ranks(small):
    schedule = (
        "batch_size=4",
        "batch_size_schedule._component_=adaptive_batch.schedules.steps",
        "batch_size_schedule.batch_sizes=[2,6]",
        "batch_size_schedule.thresholds=[2ba]",
        "grow_beyond_maximum=True",
        "micro_batch_size=2",
        "epochs=1",
    )
    parts = train_in_parts(small, Way((*SGD, *schedule), (Part(1, 3), Part(2))))
    assert "ranks 1 -> 2: batch_size still refers to 1 rank" in parts[1].output
    sizes = [len(step["rows"]) for step in records(parts[1].output_dir, "step")]
    assert sizes[:4] == [2, 2, 6, 6]


def test_one_and_four_ranks_resume_from_an_epoch_of_two(small):
    way = WAYS["epoch of 2 on 1"]
    whole = train_alone(small, way)
    (first,) = train_in_parts(small, replace(way, parts=way.parts[:1]))
    for ranks in (1, 4):
        folder = small.fresh_folder()
        shutil.copytree(first.output_dir, folder, dirs_exist_ok=True)
        (ended,) = launch(
            small, ranks, *way.overrides, f"output_dir={folder}", "resume_from_checkpoint=True"
        )
        assert ended.exit_statuses == [0] * ranks, ended.output
        assert re.search(r"resuming from \S+/step_\d+ at epoch 1, ", ended.outputs[0])
        assert_goes_on_as_alone(folder, whole, weights=1e-6)


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


@pytest.mark.parametrize("in_background", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_two_ranks_replace_an_unfinished_run_only_with_overwrite_output_dir(small, in_background):
    overrides = (*SGD, "batch_size=2")
    (first,) = launch(small, 1, *overrides, *Part(1, 3).overrides())
    folder = first.output_dir
    assert (folder / "step_3").exists()
    again = (*overrides, "seed=8", "epochs=1", f"output_dir={folder}")
    (refused,) = launch(small, 2, *again)
    assert refused.exit_statuses == [1, 1]
    assert "(step_3); resume it" in refused.output
    assert (folder / "step_3").exists()
    saves = ("save_every_n_steps=5", f"enable_async_checkpointing={in_background}")
    (ended,) = launch(small, 2, *again, *saves, "overwrite_output_dir=True")
    assert ended.exit_statuses == [0, 0], ended.output
    saved = [path.name for path in (*folder.glob("step_*"), *folder.glob("epoch_*"))]
    assert saved == ["step_5", "epoch_0"]
