"""What the rate of a step says for itself."""

import pytest
import torch

from adaptive_batch.data import Batching, StepPlanner
from adaptive_batch.schedules import Clock, parse_reference
from adaptive_batch.training import MicroBatchSizer, StepRate


def of_batch(batch_size, **keys):
    planner = StepPlanner(
        [{"tokens": [1, 2]}] * 64, Batching(batch_size, gradient_accumulation_steps=2), MicroBatchSizer(), ranks=1
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-5)
    return StepRate(planner, [optimizer], None, Clock(), **keys)


@pytest.mark.parametrize("reference", [None, parse_reference(32), parse_reference("100tok")])
def test_a_rate_that_stays_says_what_scaling_would_give_where_the_batch_is_not_the_configured_one(reference):
    rate = of_batch(2, rule="none", reference=reference)
    assert rate.describe_unscaled(4) is None
    line = "lr 2e-05 stays, chosen for a global batch of 4, now 64: linear scaling would give 0.00032, sqrt 8e-05"
    assert rate.describe_unscaled(64) == line


def test_one_that_follows_does_not():
    rate = of_batch(2, rule="sqrt")
    assert rate.describe_unscaled(64) is None
    assert rate.describe() == "lr 2e-05 belongs to 4 rows a step, and is scaled by the rule sqrt"
