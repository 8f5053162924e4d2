"""An evaluation in parts after an out-of-memory error."""

import math

import pytest
import torch
from torch import nn

from adaptive_batch import DoesNotFitError, StepOptions
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.training import EvaluationParts
from adaptive_batch.training.evaluation_parts import _differ, _states_differ


def evaluation_of(model, join=torch.cat):
    return EvaluationParts(
        model, split=None, num_labels=None, is_exact=True, join=join, fix="", options=StepOptions()
    )


@pytest.mark.parametrize("place", ["check", "outputs"])
def test_an_oom_in_the_check_or_while_outputs_are_joined_halves_the_parts(place):
    model = nn.Linear(4, 1)
    left = [place]
    snapshots = []

    def fail(at):
        if left and left[0] == at:
            left.pop()
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def forward(batch):
        if len(batch["x"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        outputs = model(batch["x"]).detach()
        return outputs.square().mean(), outputs

    def snapshot():
        snapshots.append("")
        is_of_check = len(snapshots) > 1
        return lambda: is_of_check and fail("check")

    evaluation = evaluation_of(model, lambda outputs: fail("outputs") or torch.cat(outputs))
    batch = {"x": torch.randn(8, 4)}
    loss, outputs, weights = evaluation.run(batch, forward, snapshot=snapshot)
    expected = model(batch["x"]).detach()
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(loss, expected.square().mean())
    assert weights == [0.25] * 4
    assert evaluation.sizer.limit() == MicroBatchLimit(2)


@pytest.mark.parametrize("num_unlabelled", [0, 1, 2, 3])
def test_rows_without_labels_do_not_change_the_mean_over_labels(num_unlabelled):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    batch = {"x": torch.randn(8, 5, 4), "labels": torch.randint(0, 3, (8, 5))}
    batch["labels"][:num_unlabelled] = -100
    batch["labels"][5, 2:] = -100

    def forward(part):
        if len(part["x"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        outputs = model(part["x"]).detach()
        shifted = outputs[:, :-1].flatten(0, 1), part["labels"][:, 1:].flatten()
        return nn.functional.cross_entropy(*shifted), outputs

    loss, _, _ = evaluation_of(model).run(batch, forward, snapshot=lambda: lambda: None)
    shifted = model(batch["x"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    torch.testing.assert_close(loss, nn.functional.cross_entropy(*shifted).detach())


def sums_of_rows(batch):
    values = next(iter(batch.values()))
    if len(values) > 2:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return None, values.sum(1)


def test_an_oom_of_a_batch_that_cannot_be_divided_is_an_error():
    values = torch.ones(4, 3)
    batch = {"x": values, "views": [values, values]}
    evaluation = evaluation_of(nn.Linear(1, 1))
    with pytest.raises(DoesNotFitError, match=r"ran out of memory, and .*: .*views cannot be"):
        evaluation.run(batch, sums_of_rows, snapshot=lambda: lambda: None)


def test_a_single_packed_row_fits_after_batches_of_several_were_split():
    positions = torch.tensor([0, 1, 2, 0, 1]).repeat(4, 1)
    batch = {"input_ids": positions + 1, "position_ids": positions}
    evaluation = evaluation_of(nn.Linear(1, 1))
    for rows in (4, 1):
        part = {key: value[:rows] for key, value in batch.items()}
        _, sums, _ = evaluation.run(part, sums_of_rows, snapshot=lambda: lambda: None)
        assert sums.tolist() == [9] * rows


@pytest.mark.parametrize(
    ("ours", "halves", "differ"),
    [
        ([1.0, 2.0], [1.0, 2.0], False),
        ([1.0, 2.0], [1.0, 2.1], True),
        ([math.nan, 2.0], [math.nan, 2.0], False),
        ([math.nan, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [math.nan, 2.0], True),
        ([-math.inf, 2.0], [-math.inf, 2.0], False),
        ([-math.inf, 2.0], [-math.inf, 2.1], True),
        ([-math.inf, 2.0], [math.inf, 2.0], True),
        ([-math.inf, 2.0], [0.0, 2.0], True),
        ([math.nan], [math.nan, math.nan], True),
    ],
)
def test_a_nonfinite_result_equals_only_itself(ours, halves, differ):
    ours, halves = torch.tensor(ours), torch.tensor(halves)
    assert _differ(ours, halves, 1e-3) == differ
    assert _states_differ(torch.zeros_like(ours), ours, halves, 1e-3) == differ
