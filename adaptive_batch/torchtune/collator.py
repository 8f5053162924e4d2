"""Makes rows a batch by the configured function, and refuses one that leaves rows out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchtune.data import padded_collate_packed

from adaptive_batch.errors import SettingError

from .config_errors import one_line
from .job import Job
from .task import COLLATE_REMEDY


class Collator:
    """Makes rows a batch on the host: padded, or stacked where the dataset has packed them.

    Args:
        job: job of the run.
        pad_id: token that rows are padded with.
        packed: whether the rows are packed.

    Attributes:
        collate: function that makes rows a batch as they are.
    """

    def __init__(self, job: Job, *, pad_id: int, packed: bool) -> None:
        self._job = job
        self._pad_id = pad_id
        # A function that cannot be used is refused even where it is not.
        padded = job.task.collate_function(pad_id)
        self.collate = padded_collate_packed if packed else padded

    def to_length(self, rows: Sequence[dict[str, Any]], length: int) -> dict[str, Any]:
        """Collate rows to at least that many tokens each."""
        lengthened = self._job.task.lengthened(rows, length, pad_id=self._pad_id)
        return self._of_all(rows, self.collate(lengthened))

    def _of_all(self, rows: Sequence[dict[str, Any]], batch: dict[str, Any]) -> dict[str, Any]:
        """Refuse a batch that has left out rows, which a step would count as trained; a function
        may lay all of them in one.
        """
        num_sequences = len(rows) * len(self._job.task.fields)
        if "tokens" in batch and len(batch["tokens"]) not in (1, num_sequences):
            remedy = (
                f"it made {len(batch['tokens'])} rows of {num_sequences}; return all of them, and"
                " filter rows in the dataset"
            )
            raise SettingError("collate_fn", self._job.cfg.get("collate_fn"), remedy)
        return batch

    def check(self, rows: Sequence[dict[str, Any]]) -> None:
        """Refuse rows that cannot be collated."""
        try:
            batch = self.collate([dict(row) for row in rows])
            _ = batch["labels"]
        except Exception as error:
            # Of collate functions of the user's, it may be any.
            problem = f"it fails on the dataset's rows ({type(error).__name__}: {one_line(error)})"
            remedy = f"{problem}; {COLLATE_REMEDY}"
            raise SettingError("collate_fn", self._job.cfg.get("collate_fn"), remedy) from error
        self._of_all(rows, batch)
