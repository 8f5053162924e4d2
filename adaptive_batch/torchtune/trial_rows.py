"""The rows of trials: the longest of training and of validation, or of a given length."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.data import PlannedEpoch, RowLengths
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import Progress
from adaptive_batch.training import LongestRows

from .data import Data
from .job import Job


class TrialRows:
    """Reads and cuts rows for trials; each length that was read once is kept.

    Args:
        job: job of the run.
        data: rows of the run.
    """

    def __init__(self, job: Job, data: Data) -> None:
        self._job = job
        self._data = data
        self._read: dict[int | str, LongestRows] = {}

    def check(self) -> None:
        """Read the rows of each probed length; refuse those that the model does not take.

        Raises:
            SettingError: a length is beyond the model's.
        """
        probe = self._job.settings.probe
        longest = self._job.max_row_length or sys.maxsize
        for length in dict.fromkeys((probe.sequence_length, *probe.sequence_lengths)):
            key = "probe.sequence_lengths"
            if length == probe.sequence_length:
                key = "probe.sequence_length"
            if isinstance(length, int) and length > longest:
                raise SettingError(
                    key, length, f"the model takes {count(longest, 'token')} at most"
                )
            rows = self.of_length(length)
            if rows.length > longest:
                remedy = (
                    f"rows have up to {count(rows.length, 'token')}, and the model takes {longest}"
                    f" at most; set tokenizer.max_seq_len={longest} or less"
                )
                raise SettingError(key, length, remedy)

    def probed(self) -> LongestRows:
        """Return the rows of ``probe.sequence_length``."""
        return self.of_length(self._job.settings.probe.sequence_length)

    def of_length(self, length: int | str) -> LongestRows:
        """Return rows of training.

        Args:
            length: ``longest``, ``max_seq_len`` or a number of tokens.
        """
        rows = self._read.get(length)
        if rows is None:
            rows = self._of_length(length)
            self._read[length] = rows
        return rows

    def _of_length(self, length: int | str) -> LongestRows:
        dataset = self._data.dataset
        if length == "max_seq_len":
            limit = getattr(self._data.tokenizer, "max_seq_len", None)
            if limit is None:
                raise SettingError(
                    "probe.sequence_length",
                    length,
                    "the tokenizer has no max_seq_len; set it, or give a number",
                )
            length = int(limit) * len(self._job.task.fields)
        if length == "longest":
            return LongestRows.of_dataset(
                dataset, prepare=self._job.task.filled, order=cache(self._order)
            )
        tokens = int(length)
        return LongestRows.of_dataset(
            dataset,
            length=tokens,
            prepare=lambda row: self._resized(row, tokens),
            order=cache(partial(self._order, tokens)),
        )

    def of_validation(self) -> LongestRows:
        """Return the largest rows of validation."""
        return LongestRows.of_dataset(
            self._data.dataset_val, prepare=self._job.task.filled, source=" of dataset_val"
        )

    def _order(self, longest: int = sys.maxsize) -> torch.Tensor:
        """Return the numbers of rows of up to so many tokens, about in the first epoch's order."""
        data = self._data
        # A schedule changes the order little, and may need a rate, which is not there yet.
        batching = replace(self._job.batching(), batch_size_schedule=None)
        rows = data.dataset
        epoch = PlannedEpoch(
            len(rows),
            batching,
            Progress(),
            ranks=distributed.data_parallel_size(),
            divisible=data.configured_layout.uniform in ("rows", "both"),
            measure=lambda: RowLengths(rows.lengths, rows.real_lengths),
        )
        order = epoch.order[:]
        return order[data.dataset.lengths[order] <= longest]

    def _resized(self, row: dict[str, Any], length: int) -> dict[str, Any]:
        """Return a row of text cut or repeated to so many tokens."""
        task = self._job.task
        # A picture of a row can be neither cut nor repeated with its text.
        extra_fields = sorted(set(row) - {"mask"}.union(*task.fields))
        if extra_fields:
            raise SettingError(
                "probe.sequence_length",
                length,
                f"rows with {', '.join(extra_fields)} have a length of their own; use longest",
            )
        resized: dict[str, Any] = task.resized(row, length)
        return resized
