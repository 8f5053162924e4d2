"""Base learning rates of a schedule when a run resumes."""

import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, StepLR

from adaptive_batch.schedules import Progress
from adaptive_batch.torchtune.plan import reset_to_base_rates
from adaptive_batch.training import AdaptiveRate


def optimizer(*rates):
    return SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


def rates(one):
    return [float(group["lr"]) for group in one.param_groups]


def third(step):
    return 1 / (1 + step / 3)


def test_each_group_returns_to_its_base_rate_and_a_tensor_changes_in_place():
    one = optimizer(0.5, 0.25)
    one.param_groups[1]["lr"] = kept = torch.tensor(0.25)
    scheduler = StepLR(one, 1)
    one.step()
    scheduler.step()
    assert rates(one) != [0.5, 0.25]
    reset_to_base_rates([one])
    assert rates(one) == [0.5, 0.25]
    assert one.param_groups[1]["lr"] is kept


def test_optimizers_in_backward_without_a_base_rate_use_that_of_the_first():
    """torchtune saves the base rate only in the scheduler's optimizer, the first one."""
    several = [optimizer(0.1) for _ in range(3)]
    LambdaLR(several[0], third)
    for one in several:
        one.param_groups[0]["lr"] = 0.1 * third(6)
    reset_to_base_rates(several)
    rate = AdaptiveRate(several, LambdaLR(several[0], third))
    assert rate.set(progress=Progress(steps=7))["lr"] == 0.1 * third(7)
    assert [rates(one) for one in several] == [[0.1 * third(7)]] * 3
