"""What is logged of the steps of an epoch before they are trained."""

from adaptive_batch.data import Batching, DatasetAdapter, StepPlanner
from adaptive_batch.schedules import Progress
from adaptive_batch.training import MicroBatchSizer


def test_steps_that_min_rows_take_beyond_the_budget_are_logged_once_an_epoch():
    rows = DatasetAdapter([{"tokens": [1] * length} for length in (9, 9, 1, 1, 1, 1)], None)
    batching = Batching(batch_size=1, shuffle=False, batch_tokens=10, min_rows_per_batch=2)
    said = []
    planner = StepPlanner(
        rows, batching, MicroBatchSizer(), event=lambda kind, message, **facts: said.append(message)
    )
    planner.start_epoch(planner.begin(Progress()))
    assert said == [
        "epoch 0: 1 of 2 steps have more than batch_tokens, up to 18 over all ranks, for"
        " min_rows_per_batch=2"
    ]
