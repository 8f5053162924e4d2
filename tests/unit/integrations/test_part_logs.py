"""Logs of parts are reduced to the value of the batch."""

from __future__ import annotations

import math

import pytest
import torch

from adaptive_batch.integrations.part_logs import over_parts

NAN = math.nan


@pytest.mark.parametrize(
    ("values", "reduction", "expected"),
    [
        ([1.0, 5.0], "mean", 4.0),
        ([1.0, 5.0], "sum", 6.0),
        ([1, 5], "min", 1),
        ([torch.tensor(1.0), torch.tensor([5.0])], "max", 5.0),
        # A part may have nothing that a metric is taken over.
        ([NAN, 5.0], "mean", 5.0),
        ([NAN, 5.0], "min", 5.0),
        (["one", "two"], "mean", "two"),
        ([None, 5.0], "sum", 5.0),
    ],
)
def test_numbers_are_reduced_and_the_last_of_other_values_is_kept(values, reduction, expected):
    assert over_parts(values, [0.25, 0.75], reduction) == expected


def test_a_value_that_no_part_has_stays_none():
    for reduction in ("mean", "min"):
        assert math.isnan(over_parts([NAN, NAN], [0.25, 0.75], reduction))
