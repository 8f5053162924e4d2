"""A loop that is given a run log is audited and drawn as a run of the recipes is."""

from __future__ import annotations

import copy

import pytest
import torch
from support.loops import train, training
from support.sharded_model import Decoder, token_losses

from adaptive_batch import OOMPolicy, SettingError, geometric
from adaptive_batch.report import RunLog, audit, read_records, write_report


def logged(folder, *, state=None, epochs=2, until=10**9, **options):
    """A loop that writes into a folder, trained; from a state where one is given."""
    with RunLog(folder) as run_log:
        made = training(event=run_log, batch_increase_function=geometric(2.0), **options)
        if state is not None:
            made.loop.load_state_dict(state)
        train(made, epochs=epochs, until=until)
    return made.loop


def test_each_row_is_proved_to_be_used_once_and_the_run_is_drawn(tmp_path):
    logged(tmp_path, micro_batch_size=3)
    proof = audit(tmp_path)
    assert proof.holds, proof.lines
    assert [line[:8] for line in proof.lines if line.startswith("epoch ")] == [
        "epoch 0 ",
        "epoch 1 ",
    ]
    page, picture = write_report(tmp_path)
    assert page.stat().st_size
    assert picture.stat().st_size
    steps = [
        record
        for record in read_records(tmp_path / "adaptive_batch" / "run.jsonl")
        if record["kind"] == "step"
    ]
    assert [step["batch_size"] for step in steps] == [4] * 10 + [8] * 5
    assert all(step["lr"] > 0 and step["seconds"] > 0 for step in steps)
    assert steps[0]["micro_batches"] == 2


@pytest.mark.parametrize("steps", [3, 10, 12])
def test_a_run_that_goes_on_from_a_state_is_proved_across_its_restart(tmp_path, steps):
    loop = logged(tmp_path, until=steps)
    # What the process did after it had saved is rolled back.
    state = loop.state_dict()
    logged(tmp_path, state=state, until=steps + 1)
    logged(tmp_path, state=state)
    proof = audit(tmp_path)
    assert proof.holds, proof.lines
    assert f"starts   at step 0, {steps}, {steps}" in proof.lines


def test_an_epoch_that_was_skipped_on_resuming_is_named(tmp_path):
    state = copy.deepcopy(logged(tmp_path, epochs=1).state_dict())
    state["batches"]["progress"]["epoch"] += 1
    logged(tmp_path, state=state, epochs=3)
    proof = audit(tmp_path)
    assert not proof.holds
    assert any("resumed at step 10: epoch 2 instead of 1" in each for each in proof.problems)
    assert any("belongs to epoch 2, expected 1" in each for each in proof.problems)


def test_what_memory_has_cost_is_in_the_log(tmp_path):
    model = Decoder()

    def fails_above_two_rows(batch):
        if len(batch["tokens"]) > 2:
            torch.empty(2**50, dtype=torch.uint8)
        return token_losses(model, batch, "mean")

    policy = OOMPolicy(grow_after=100)
    logged(tmp_path, model=model, mean_loss=fails_above_two_rows, oom_policy=policy)
    records = read_records(tmp_path / "adaptive_batch" / "run.jsonl")
    limits = [record for record in records if record["kind"] == "limit"]
    assert [(limit["before"], limit["after"]) for limit in limits] == [(4, 2)]
    assert limits[0]["out_of_memory"]
    assert [record["oom_count"] for record in records if record["kind"] == "step"][:2] == [1, 1]
    assert audit(tmp_path).holds


def test_what_is_no_function_is_refused():
    with pytest.raises(SettingError, match=r"event=3: give a function, such as RunLog"):
        training(event=3)
