"""adaptive_full_finetune on two ranks: errors on one rank, and divisions of the model.

tests/test_trajectories.py and benchmarks/resume_across_ranks.py compare trajectories of two ranks.
"""

from __future__ import annotations

import json
import re

import pytest
from support.cli import OURS, Finished, block, records, resumes
from support.stops import asks_at_step
from support.trajectories import SGD

from adaptive_batch.distributed import EXIT_STATUS
from adaptive_batch.report import audit

pytestmark = pytest.mark.timeout(900)


def finished(small, *overrides: str, **options) -> Finished:
    return small.run(OURS, *overrides, ranks=2, **options)


def refused(small, *overrides: str, **options) -> str:
    """Return the output of ranks that all end within ten seconds, with one message."""
    attempt = finished(small, *overrides, expect=None, **options)
    assert attempt.spread < 10
    messages = re.findall(r"^(?:[A-Z]\w+Error: |rank \d+:)", attempt.output, flags=re.MULTILINE)
    assert messages[0].startswith("rank ") or len(messages) == 1, attempt.output[-6000:]
    assert attempt.output.count("Traceback (most") == messages[0].startswith("rank ")
    return attempt.output


@pytest.mark.slow
def test_all_ranks_recount_lengths_after_one_reads_a_changed_row(small):
    counted = [8 + row % 9 for row in range(32)]
    changed = [45 if row in (3, 7) else length for row, length in enumerate(counted)]
    keys = (
        "dataset._component_=support.components.OfLengthsNow",
        "batch_tokens=60",
        "micro_batch_tokens=500",
        "epochs=2",
    )
    for lengths in (counted, changed):
        attempt = finished(
            small, *keys, environment=lambda rank, lengths=lengths: {"LENGTHS": json.dumps(lengths)}
        )
    (said,) = records(attempt.output_dir, "recounted")
    assert said["epoch"] == 1
    assert audit(attempt.output_dir).problems == ()
    assert all(
        sum(changed[row] for row in step["rows"]) <= 120
        for step in records(attempt.output_dir, "step")
        if step["epoch"] == 1
    )


def test_an_interrupted_second_rank_names_the_last_save(small):
    ends = block("loss", "support.components.LossThatEnds", status="null", at=6, rank=1)
    keys = ("batch_size=2", "epochs=1", "save_every_n_steps=1")
    attempt = finished(small, *keys, *ends, expect=1)
    assert re.search(
        r"interrupted: resume_from_checkpoint=True resumes from \S*/step_2\n", attempt.output
    )


TENSOR_PARALLEL = (
    "tensor_parallel_dim=2",
    "tensor_parallel_plan._component_=torchtune.models.llama3.base_llama_tp_plan",
    "optimizer.fused=False",
    "clip_grad_norm=0.5",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [TENSOR_PARALLEL, ("custom_sharded_layers=[tok_embeddings,output]",)],
    ids=["tensor parallel", "output layer separate"],
)
def test_other_divisions_of_the_model_do_not_change_losses(small, keys):
    rows = "batch_size=4" if keys is TENSOR_PARALLEL else "batch_size=2"
    many = finished(small, "epochs=1", rows, *keys)
    one = small.run_in_process(
        OURS, "epochs=1", "batch_size=4", *(keys[2:] if keys is TENSOR_PARALLEL else ())
    )
    expected = [pytest.approx(step["loss"], rel=1e-3) for step in records(one, "step")]
    assert [step["loss"] for step in records(many, "step")] == expected
    assert audit(many.output_dir).holds


@pytest.mark.slow
def test_an_oom_during_clipping_ends_all_ranks_and_a_restart_lowers_the_limit(small):
    folder = small.fresh_folder()
    overrides = (
        *("batch_size=4", "epochs=2", "clip_grad_norm=1.0", "save_every_n_steps=2"),
        *("micro_batch_size=4", f"output_dir={folder}", "resume_from_checkpoint=auto"),
    )
    fault = "support.rank_faults.clipping_on_rank_one"
    first = finished(small, *overrides, before=fault, expect=1)
    finished(small, *overrides)
    assert first.spread < 10
    assert first.output.count("RankLostError") == 1
    assert "Traceback" not in first.output
    (ended,) = records(folder, "ended")
    assert (ended["rank"], ended["reason"], ended["limit"], ended["unit"]) == (
        1,
        "out_of_memory",
        2,
        "rows",
    )
    assert json.loads((folder / "adaptive_batch" / "lost.json").read_text())["limit"] == 2
    starts = records(folder, "start")
    assert [start["resumed"] for start in starts] == [False, True]
    assert starts[1]["progress"]["steps"] == 4
    assert [step["micro_batches"] for step in records(folder, "step")] == [1] * 4 + [2] * 4
    assert audit(folder).holds


BAD = {
    "batch_increase_function=support.components.rows_by_rank": "_function is 5 on rank 1",
    "batch_size_schedule=support.components.batch_by_rank": "at step 3 is 3 on rank 1",
    "dataset.split=train[:1]": "its rows (1) are fewer than the ranks (2)",
    "batch_size=17": "one optimizer step takes 34 rows and the dataset has 32",
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", BAD)
def test_bad_input_ends_all_ranks_with_one_message(small, setting):
    assert BAD[setting] in refused(small, setting)


def test_ranks_with_different_configurations_are_refused_by_rank(small):
    output = refused(small, environment=lambda rank: {"OVERRIDES": "batch_size=2"} if rank else {})
    assert "batch_size='2': rank 1 was started with this, and rank 0 with 4" in output


def test_a_bug_on_one_rank_ends_all_ranks_with_one_traceback(small):
    output = refused(small, before="support.rank_faults.a_bug_on_rank_one")
    assert "no such layer" in output
    assert output.count("Traceback (most recent call last)") == 1


@pytest.mark.slow
def test_with_the_optimizer_in_backward_a_resume_on_fewer_ranks_is_refused(small):
    overrides = (*SGD, "optimizer_in_bwd=True", "batch_size=2")
    asks = asks_at_step(2)
    first = small.run(OURS, *overrides, *asks, ranks=2, expect=EXIT_STATUS)
    goes_on = resumes(OURS, first.output_dir)
    refused = small.run(OURS, *overrides, *goes_on, ranks=1, expect=1)
    assert "Traceback" not in refused.output
    assert (
        "optimizer_in_bwd=True: the checkpoint's steps were distributed over 2 ranks, and"
        " 1 rank cannot split their rows; start 2 or more ranks, or start again with"
        " optimizer_in_bwd=False" in refused.output
    )


@pytest.mark.slow
def test_two_ranks_replace_an_unfinished_run_only_with_overwrite_output_dir(small):
    overrides = (*SGD, "batch_size=2")
    asks = asks_at_step(3)
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
