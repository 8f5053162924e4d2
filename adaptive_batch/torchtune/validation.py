"""Validation during training: the loss on rows that are not trained on, with a limit apart from training's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.data import MicroBatchLimit
from adaptive_batch.memory import RandomState
from adaptive_batch.report import RunLog
from adaptive_batch.training import Evaluator

from .bound_finder import BoundFinder
from .data import Data
from .job import Job
from .limit_finder import LimitFinder
from .trainer import Trainer


class Validation:
    """The rows of `dataset_val`, and how many of them are run at once.

    Which rows are validated on depends on ``batch_size_val`` (or ``batch_size``, where that is ``auto``) and
    ``max_validation_batches`` alone, never on what fits.

    Args:
        job, data, trainer: of the run.
        bounds: finds what fits, for ``batch_size_val: auto``.
        limit_finder: of training; out-of-memory errors are counted and logged there.
        record: of the run.

    Attributes:
        num_rows: rows that are validated on.

    Raises:
        DoesNotFitError: not one row fits.
    """

    def __init__(
        self,
        job: Job,
        data: Data,
        trainer: Trainer,
        bounds: BoundFinder,
        *,
        limit_finder: LimitFinder,
        record: RunLog,
    ) -> None:
        settings, runner = job.settings.validation, trainer.runner
        assert settings is not None
        self._job, self._data, self._record = job, data, record
        self.num_rows = settings.rows_of(len(data.dataset_val), ranks=job.ranks)
        limit = MicroBatchLimit(settings.batch_size)
        if settings.fits_itself:
            bound = bounds.of_validation(trainer)
            limit_finder.limits.num_out_of_memory += bound.num_out_of_memory
            tokens = data.shapes_val.padded_tokens([bound.sequence_length] * bound.max_batch_size)
            limit = MicroBatchLimit(tokens, "tokens")
            record.event(
                "validation_bound",
                f"validation: {count(bound.max_batch_size, 'row')} of {count(bound.sequence_length, 'token')} fit at once",
                max_batch_size=bound.max_batch_size,
                sequence_length=bound.sequence_length,
                trials=len(bound.trials),
                out_of_memory=bound.num_out_of_memory,
                seconds=round(sum(bound.seconds), 2),
            )
        self._evaluator = Evaluator(
            runner,
            replace(data.loss_val(runner.loss), dummy_row=lambda: data.dataset_val[0]),
            limit=limit,
            layout=data.shapes_val,
            on_change=limit_finder.lower_in_validation,
        )

    def run(self) -> float:
        """The mean loss over the label tokens of the rows. Training goes on as if this had not been."""
        random_state = RandomState(self._job.device)
        try:
            loss = self._evaluator.run(self._rows())
        finally:
            random_state.restore()
        if changed := self._data.dataset_val.recount():  # a collective, which no rank that fails may begin alone
            message = f"dataset_val: {changed}: the lengths that were cached are dropped"
            self._record.event("recounted", message)
        return loss

    def _rows(self) -> Iterator[dict[str, Any]]:
        mine = range(distributed.data_parallel_rank(), self.num_rows, distributed.data_parallel_size())
        return (self._data.dataset_val[row] for row in mine)
