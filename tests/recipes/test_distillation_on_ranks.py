"""Distillation on two ranks: one that runs out of memory in the teacher costs both a retry."""

from __future__ import annotations

import pytest
from support.cli import losses, make_setup
from support.distillation import FULL, LORA, METRICS, OURS, write_teacher
from support.launch import launch

from adaptive_batch.report import audit, read_records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SGD = (
    "optimizer=torch.optim.SGD",
    "optimizer.lr=0.05",
    "optimizer.fused=False",
    "epochs=1",
    "max_steps_per_epoch=3",
)


@pytest.mark.parametrize("kind", ["LoRA", pytest.param("full", marks=pytest.mark.nightly)])
def test_a_rank_that_runs_out_of_memory_in_the_teacher_costs_a_retry(tmp_path, kind):
    setup = make_setup(tmp_path)
    own = (*(LORA if kind == "LoRA" else FULL), *write_teacher(setup), *SGD)
    fault = "support.rank_faults.more_than_two_rows_in_the_teacher_on_rank_one"
    attempts = [
        attempt
        for before in (fault, "")
        for attempt in launch(setup, 2, *own, recipe=OURS, before=before)
    ]
    for attempt in attempts:
        assert attempt.exit_statuses == [0, 0], attempt.output[-6000:]
    retried, undisturbed = (attempt.output_dir for attempt in attempts)
    records = read_records(retried / "adaptive_batch" / "run.jsonl")
    (change,) = (record for record in records if record["kind"] == "limit")
    assert (change["before"], change["after"], change["rows"]) == (4, 2, 4)
    assert audit(retried).holds
    for name in ("loss", *METRICS):
        expected = [pytest.approx(float(loss), rel=1e-5) for loss in losses(undisturbed, name=name)]
        assert [float(loss) for loss in losses(retried, name=name)] == expected != []
