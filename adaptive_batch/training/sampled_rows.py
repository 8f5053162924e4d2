"""The step of a loop as an estimate runs it: rows come from its dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from adaptive_batch._torch import disable_current_modes
from adaptive_batch._util import count
from adaptive_batch.data import DatasetAdapter, check_loss
from adaptive_batch.errors import SettingError
from adaptive_batch.estimate import (
    FakeDevice,
    Fit,
    LengthPlan,
    PlannedSteps,
    checked_lengths,
    packed_row_lengths,
)

from .packing import tokens_key
from .part_runner import PartRunner


class SampledRows:
    """Runs rows of a dataset on a device that is not here, and plans steps of real lengths.

    Args:
        dataset: rows, and their lengths.
        make_batch: function that returns a batch of rows, on the host.
        rows_apart: function that returns a context manager in which the rows of a batch do not see
            each other.
        mean_loss: function that returns the mean loss of a batch over its labels.
        parts: plans parts.

    Attributes:
        longest: tokens of the longest row.
    """

    def __init__(
        self,
        dataset: DatasetAdapter,
        make_batch: Callable[[Sequence[Any]], Any],
        rows_apart: Callable[[Any], AbstractContextManager[object]],
        mean_loss: Callable[[Any], torch.Tensor],
        parts: PartRunner,
    ) -> None:
        self._dataset = dataset
        self._make_batch = make_batch
        self._rows_apart = rows_apart
        self._mean_loss = mean_loss
        self._parts = parts
        (longest,) = dataset.longest(1)
        self.longest = dataset.length(longest)

    def run(self, device: FakeDevice, num_rows: int) -> None:
        """Run forward and backward of so many of the longest rows."""
        rows = self._dataset.longest(min(num_rows, len(self._dataset)))
        self._run_rows([rows[number % len(rows)] for number in range(num_rows)], device)

    def length_plan(
        self, lengths: Any, batches: Callable[[int], Iterable[Sequence[int]]]
    ) -> LengthPlan:
        """Return how steps of rows of these lengths are divided and run.

        Args:
            lengths: tokens of each row of the dataset.
            batches: function that returns the row numbers of each step where so many rows fit.

        Raises:
            SettingError: lengths that cannot be used.
        """
        dataset = self._dataset
        tokens = checked_lengths(
            lengths, longest=self.longest, owner="the longest row of the dataset"
        )
        if len(tokens) != len(dataset):
            remedy = f"give one for each of the {count(len(dataset), 'row')} of the dataset"
            raise SettingError("lengths", f"{len(tokens)} numbers", remedy)
        # What an empty row is padded to.
        tokens = [max(1, length) for length in tokens]
        row_of_length = dict(zip(tokens, range(len(tokens)), strict=True))

        def steps(fit: Fit) -> PlannedSteps:
            most_rows = fit.max_batch_size
            drawn = []
            for numbers in batches(most_rows):
                drawn.append([tokens[number] for number in numbers])
            limit = self._parts.runner.sizer.limit_where_fits(
                most_rows, length=self.longest, batch_size=len(drawn[0])
            )
            return PlannedSteps.of(drawn, limit, partial(self._parts.plan, limit=limit))

        def run(device: FakeDevice, num_rows: int, length: int) -> None:
            row = dataset[row_of_length[length]]
            self._run_rows([row] * num_rows, device)

        return LengthPlan(steps, run if self._parts.runner.sizer.layout.pads else self._run_packed)

    def _run_packed(self, device: FakeDevice, num_rows: int, num_tokens: int) -> None:
        """Run forward and backward of packed rows that have so many tokens in all."""
        (longest,) = self._dataset.longest(1)
        key = tokens_key(longest)
        rows = []
        for length in packed_row_lengths(num_rows, num_tokens):
            rows.append({key: [0] * length, "labels": [0] * length})
        self._run_rows(rows, device)

    def _run_rows(self, rows: Sequence[Any], device: FakeDevice) -> None:
        """Run forward and backward of rows, which are collated on the host."""
        with disable_current_modes():
            batch = self._make_batch(rows)
            apart = self._rows_apart(batch)
        on_device = {"batch": batch}
        device.batch(on_device)
        with apart:
            loss = check_loss(self._mean_loss(on_device["batch"]))
            loss.backward()  # type: ignore[no-untyped-call]
