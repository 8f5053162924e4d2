"""On two ranks packed batches are split alike, and gradients are the mean of both ranks'."""

import copy

import pytest
from support.packed_batches import FORMS, FORMS_IN_ROWS, Attends
from support.processes import run_on_ranks
from support.sharded_model import whole_gradients
from torch.distributed.fsdp import fully_shard

from adaptive_batch import AdaptiveStep, distributed

ALL_FORMS = FORMS | FORMS_IN_ROWS
LENGTHS = ([5, 3, 8, 2], [7, 4])


def split_on_ranks(form):
    model = Attends()
    alone = copy.deepcopy(model)
    for lengths in LENGTHS:
        (alone(ALL_FORMS[form](lengths)) / len(LENGTHS)).backward()
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    fully_shard(model)

    def forward_backward(part):
        (model(part.batch) * part.share).backward()

    step = AdaptiveStep(model, forward_backward, micro_batch_size=1)
    step(ALL_FORMS[form](LENGTHS[distributed.rank()]))
    found = whole_gradients(model)
    errors = [float((found[name] - expected[name]).abs().max()) for name in expected]
    return max(errors), step.num_micro_batches


@pytest.mark.parametrize("form", ["positions", "flattened", "torchtitan", "rows of positions"])
def test_gradients_are_the_mean_of_both_ranks(form):
    for error, num_micro_batches in run_on_ranks(split_on_ranks, 2, form):
        assert error < 1e-12
        assert num_micro_batches == 4
