"""The recipe on two ranks: what one device does, dealt to both; and how all end when one cannot go
on.
"""

from __future__ import annotations

import json
import re

import pytest
import torch
from support.cli import OURS, SmallSetup, cosine_after, make_setup, records
from support.launch import Attempt, launch

from adaptive_batch.report import audit

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def setup(tmp_path_factory) -> SmallSetup:
    return make_setup(tmp_path_factory.mktemp("many"))


def finished(setup: SmallSetup, *overrides: str, **options) -> Attempt:
    attempt = launch(setup, 2, *overrides, **options)[-1]
    assert attempt.exit_statuses == [0, 0], attempt.output[-6000:]
    return attempt


def refused(setup: SmallSetup, *overrides: str, **options) -> str:
    """Return the output of ranks that all end soon, with one message."""
    (attempt,) = launch(setup, 2, *overrides, **options)
    assert all(attempt.exit_statuses), attempt.output[-6000:]
    assert attempt.spread < 10
    messages = re.findall(r"^(?:[A-Z]\w+Error: |rank \d+:)", attempt.output, flags=re.MULTILINE)
    assert messages[0].startswith("rank ") or len(messages) == 1, attempt.output[-6000:]
    assert attempt.output.count("Traceback (most") == messages[0].startswith("rank ")
    return attempt.output


def close(one: list[float], other: list[float], tolerance: float = 2e-4) -> bool:
    return len(one) == len(other) and all(
        abs(a - b) <= tolerance * abs(b) for a, b in zip(one, other, strict=True)
    )


# rows that are not as long as the cache says


@pytest.mark.slow
def test_all_ranks_count_again_after_one_finds_a_row_of_another_length(setup):
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
            setup, *keys, environment=lambda rank, lengths=lengths: {"LENGTHS": json.dumps(lengths)}
        )
    (said,) = records(attempt.output_dir, "recounted")
    assert said["epoch"] == 1
    assert audit(attempt.output_dir).problems == ()
    assert all(
        sum(changed[row] for row in step["rows"]) <= 120
        for step in records(attempt.output_dir, "step")
        if step["epoch"] == 1
    )


# what is saved when one ends


def test_an_interrupted_second_rank_names_the_last_save(setup):
    ends = (
        "loss=support.components.LossThatEnds",
        "loss.status=null",
        "loss.at=6",
        "loss.rank=1",
        "save_every_n_steps=1",
    )
    (attempt,) = launch(setup, 2, "batch_size=2", "epochs=1", *ends)
    assert attempt.exit_statuses == [1, 1]
    assert re.search(
        r"interrupted: resume_from_checkpoint=True resumes from \S*/step_2\n", attempt.output
    )


# what two ranks do is what one device does with the same steps


SEESAW = (
    "batch_size_schedule._component_=adaptive_batch.schedules.seesaw",
    "batch_size_schedule.factor=2",
    "grow_beyond_maximum=True",
    "micro_batch_size=4",
    *cosine_after(2),
    "scale_with_batch={beta2: half_life, weight_decay: per_token}",
)
WAYS = {
    "rows": (("batch_size=2",), ("batch_size=4",)),
    "tokens, validation, noise of the last step": (
        (
            "batch_tokens=80",
            "sync_gradients_every_micro_batch=False",
            "micro_batch_tokens=128",
            "dataset_val=${dataset}",
            "run_val_every_n_steps=3",
        ),
        (
            "batch_tokens=160",
            "micro_batch_tokens=128",
            "dataset_val=${dataset}",
            "run_val_every_n_steps=3",
        ),
    ),
    "a batch that doubles where the rate halves": (
        ("batch_size=2", *SEESAW),
        ("batch_size=4", *SEESAW),
    ),
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] * (way != "rows")) for way in WAYS]
)
def test_two_ranks_train_what_one_device_trains(setup, way):
    of_two, of_one = WAYS[way]
    many = finished(setup, *of_two)
    one = setup.run_in_process(OURS, *of_one)
    ours, theirs = records(many.output_dir, "step"), records(one.output_dir, "step")
    assert [step["rows"] for step in ours] == [step["rows"] for step in theirs]
    logged = ["grad_norm"] if "grad_norm" in theirs[0] else []
    logged += ["beta2", "weight_decay"] if SEESAW[-1] in of_one else []
    for figure in ("loss", "tokens_seen", "samples_seen", "lr", *logged):
        assert close([step[figure] for step in ours], [step[figure] for step in theirs]), figure
    for name, tensor in one.weights(1).items():
        assert torch.allclose(many.weights(1)[name], tensor, atol=2e-3), name
    validated = [
        [r["val_loss"] for r in records(d, "validation")] for d in (many.output_dir, one.output_dir)
    ]
    assert close(*validated)
    assert audit(many.output_dir).holds


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
    ids=["tensor parallel", "output apart"],
)
def test_other_divisions_of_the_model_train_the_same(setup, keys):
    rows = "batch_size=4" if keys is TENSOR_PARALLEL else "batch_size=2"
    many = finished(setup, "epochs=1", rows, *keys)
    one = setup.run_in_process(
        OURS, "epochs=1", "batch_size=4", *(keys[2:] if keys is TENSOR_PARALLEL else ())
    )
    assert close(
        [step["loss"] for step in records(many.output_dir, "step")],
        [step["loss"] for step in records(one.output_dir, "step")],
        1e-3,
    )
    assert audit(many.output_dir).holds


@pytest.mark.slow
def test_an_oom_that_other_ranks_cannot_hear_of_ends_all_and_a_restart_uses_a_lower_limit(setup):
    overrides = (
        "batch_size=4",
        "epochs=2",
        "clip_grad_norm=1.0",
        "save_every_n_steps=2",
        "micro_batch_size=4",
    )
    attempts = launch(
        setup, 2, *overrides, restarts=1, before="support.rank_faults.clipping_on_rank_one"
    )
    first, second = attempts
    assert first.exit_statuses == [1, 1], first.output[-5000:]
    assert second.exit_statuses == [0, 0], second.output[-5000:]
    assert first.spread < 10
    assert first.output.count("RankLostError") == 1
    assert "Traceback" not in first.output
    folder = second.output_dir
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


# bad input: all ranks end, at once, with one message


BAD = {
    "batch_increase_function=support.components.rows_by_rank": "_function is 5 on rank 1",
    "batch_size_schedule=support.components.batch_by_rank": "at step 3 is 3 on rank 1",
    "dataset.split=train[:1]": "its rows (1) are fewer than the ranks (2)",
    "batch_size=17": "one optimizer step takes 34 rows and the dataset has 32",
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", BAD)
def test_bad_input_ends_all_ranks_with_one_message(setup, setting):
    assert BAD[setting] in refused(setup, setting)


def test_ranks_with_different_configurations_are_refused_by_rank(setup):
    output = refused(setup, environment=lambda rank: {"OVERRIDES": "batch_size=2"} if rank else {})
    assert "batch_size='2': rank 1 was started with this, and rank 0 with 4" in output


def test_a_device_that_is_missing_on_one_rank_is_named(setup):
    output = refused(setup, before="support.rank_faults.no_device_on_rank_one")
    assert "device='cpu': rank 1 cannot use it: " in output


def test_a_bug_on_one_rank_ends_all_with_its_traceback_alone(setup):
    output = refused(setup, before="support.rank_faults.a_bug_on_rank_one")
    assert "no such layer" in output
    assert output.count("Traceback (most recent call last)") == 1
