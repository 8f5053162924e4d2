"""Neither micro-batches nor out-of-memory errors change the result of a run of the recipe."""

import pytest
from support.cli import OURS, figures, losses, records, resume_run, same_weights

from adaptive_batch.errors import DoesNotFitError, SettingError
from adaptive_batch.report import read_records

LENGTHS = [5 + (11 * row) % 50 for row in range(32)]
ROWS = ("dataset._component_=support.components.OfLengths", f"dataset.lengths={LENGTHS}")
SGD = ("optimizer=torch.optim.SGD", "optimizer.lr=0.05")  # AdamW would turn rounding into steps
DROPOUT = "model.attn_dropout=0.2"
BASE = (*ROWS, *SGD, "epochs=1", "batch_size=16", "probe.objective=largest")
SMALL_MEMORY = "probe.device_memory=10MiB"
MUCH_MEMORY = "probe.device_memory=1GiB"


def all_records(finished):
    return read_records(finished.output_dir / "adaptive_batch" / "run.jsonl")


def audit(finished):
    """Return the position of each step in the data, which no memory setting may change."""
    names = ("step", "epoch", "position", "batch_size", "samples_seen", "tokens_seen")
    return [tuple(step[name] for name in names) for step in records(finished, "step")]


@pytest.fixture(scope="module")
def whole(small):
    """Each step as one batch."""
    return small.run_in_process(OURS, *BASE, "drop_last=False")


def test_a_micro_batch_above_a_known_bound_is_refused(small):
    found = ("use_maximum_batch_size=True", SMALL_MEMORY)
    for setting in ("micro_batch_size=30", "micro_batch_tokens=1600"):
        key, _, value = setting.partition("=")
        with pytest.raises(
            SettingError, match=rf"^{key}={value}: \d+ rows.* fit; give \d+ or less(, or auto)?$"
        ):
            small.run_in_process(OURS, *BASE, setting, *found)


# --- rows longer than any that was tried


def test_a_row_longer_than_those_of_the_search_is_tried_before_training(small, whole):
    finished = small.run_in_process(
        OURS, *BASE, "micro_batch_size=auto", SMALL_MEMORY, "probe.sequence_length=20"
    )
    (said,) = records(finished, "limit")
    assert said["length"] == max(LENGTHS)
    assert (
        f"a row of {max(LENGTHS)} tokens is longer than the 20 that were tried" in said["message"]
    )
    kinds = [record["kind"] for record in all_records(finished)]
    assert kinds.index("limit") < kinds.index("step")
    (plan,) = records(finished, "plan")
    assert plan["limit"] == said["after"]
    bound = records(finished, "bound")[-1]["max_batch_size"]
    assert said["after"] < said["before"] == bound  # as many rows of 20 tokens fit
    assert figures(finished, "loss") == pytest.approx(figures(whole, "loss"), rel=1e-5)
    assert audit(finished) == audit(whole)


# --- out of memory in a step


@pytest.mark.slow
def test_a_process_that_really_runs_out_of_memory_finishes_its_run(small):
    lengths = [1000 - 7 * row for row in range(32)]
    large = (
        "model.max_seq_len=1024",
        "epochs=1",
        "batch_size=16",
        "micro_batch_size=16",
        *SGD,
        "dataset._component_=support.components.OfLengths",
        f"dataset.lengths={lengths}",
    )
    confined = (
        "metric_logger._component_=support.components.Confining",
        "metric_logger.after_step=1",
        f"metric_logger.bytes_left={200 * 1024**2}",
    )
    survived = small.run(OURS, *large, *confined)
    undisturbed = small.run_in_process(OURS, *large)
    changes = records(survived, "limit")
    assert changes
    assert all(change["out_of_memory"] for change in changes)
    counted = figures(survived, "oom_count")
    assert counted[0] == 0
    assert counted[-1] == len(changes)
    assert audit(survived) == audit(undisturbed)
    assert figures(survived, "tokens_seen")[-1] == sum(lengths)
    assert figures(survived, "loss") == pytest.approx(figures(undisturbed, "loss"), rel=1e-4)
    assert len(survived.weights(0))


# --- out of memory elsewhere


def test_an_optimizer_step_out_of_memory_is_not_retried_and_the_run_resumes(small):
    keys = (*ROWS, "optimizer=support.components.FailingAdamW", "batch_size=16")
    undisturbed = small.run_in_process(OURS, *keys, "optimizer.fails_at=-1")
    output = small.fresh_folder()
    # In the second epoch.
    fails = ("optimizer.fails_at=4", f"output_dir={output}")
    with pytest.raises(
        DoesNotFitError,
        match=r"the optimizer step ran out of memory on cpu: .*resume_from_checkpoint",
    ):
        small.run_in_process(OURS, *keys, *fails)
    assert [path.name for path in output.glob("epoch_*")] == ["epoch_0"]
    assert len(losses(output)) == 3
    rest = resume_run(small, output, *keys, "optimizer.fails_at=-1")
    assert same_weights(rest.weights(1), undisturbed.weights(1))


# --- what is said


def test_with_the_optimizer_in_backward_a_step_that_does_not_fit_is_refused(small):
    in_backward = (*BASE, "optimizer_in_bwd=True", "micro_batch_size=auto")
    with pytest.raises(
        SettingError,
        match=r"optimizer_in_bwd=True: a step may have 16 rows, of which \d+ fit here",
    ):
        small.run_in_process(OURS, *in_backward, SMALL_MEMORY)
    assert set(figures(small.run_in_process(OURS, *in_backward, MUCH_MEMORY), "micro_batches")) == {
        1
    }
