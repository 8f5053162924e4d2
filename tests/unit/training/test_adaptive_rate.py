"""What the rate of a step says for itself."""

import pytest
import torch

from adaptive_batch.schedules import parse_reference
from adaptive_batch.training import AdaptiveRate


def rate_of(**arguments):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-5)
    return AdaptiveRate(optimizer, **arguments)


@pytest.mark.parametrize("reference", [None, parse_reference(32), parse_reference("100tok")])
def test_a_rate_that_stays_says_what_scaling_would_give_where_the_batch_is_not_the_configured_one(
    reference,
):
    rate = rate_of(reference_batch_size=reference)
    assert rate.describe_unscaled(4, configured=4) is None
    line = "lr 2e-05 stays, chosen for a global batch of 4, now 64: linear scaling would give 0.00032, sqrt 8e-05"
    assert rate.describe_unscaled(64, configured=4) == line


def test_one_that_follows_does_not():
    rate = rate_of(lr_scaling="sqrt", reference_batch_size=4)
    assert rate.describe_unscaled(64, configured=4) is None
    assert rate.describe() == "lr 2e-05 belongs to 4 rows a step, and is scaled by the rule sqrt"
