"""Validation during training: the loss on held-out rows, with its own micro-batch limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.memory import RandomState
from adaptive_batch.probe import ProbeResult
from adaptive_batch.training import (
    ConfiguredSize,
    Evaluation,
    Evaluator,
    MicroBatchSizer,
    SearchScope,
)

from .data import Data, counted_by
from .job import Job
from .limit_finder import LimitFinder, search_facts
from .log import TrainingLog
from .trainer import Trainer


class Validation:
    """Rows of `dataset_val` and their micro-batch limit.

    ``batch_size_val`` (or ``batch_size``, if that is ``auto``) and ``max_validation_batches``
    select the rows. The limit does not affect the selection.

    Args:
        job, data, trainer: job, rows and trainer of the run.
        limit_finder: search for the limit with ``batch_size_val: auto``.
        log: log of the run. The sizer of training also counts out-of-memory errors.

    Attributes:
        num_rows: number of validation rows.

    Raises:
        DoesNotFitError: one row does not fit.
    """

    def __init__(
        self,
        job: Job,
        data: Data,
        trainer: Trainer,
        limit_finder: LimitFinder,
        log: TrainingLog,
    ) -> None:
        settings = job.settings
        validation = settings.validation
        assert validation.is_on
        self._job = job
        self._data = data
        self._log = log
        self._engine = trainer.engine
        self.num_rows = validation.rows_of(
            len(data.dataset_val), batch_size=settings.batch_size, ranks=job.ranks
        )
        size = ConfiguredSize(micro_batch_size=validation.rows_at_once(settings.batch_size))
        if validation.fits_itself:
            size = ConfiguredSize(micro_batch_tokens="auto")
        sizer = MicroBatchSizer(
            size,
            layout=data.layout_val,
            memory=job.memory,
            on_change=counted_by(self._engine.sizer, log.limit_change, kind="validation_limit"),
        )
        if validation.fits_itself:
            result = self._find(trainer, limit_finder, sizer)
            self._engine.sizer.count_out_of_memory(result.num_out_of_memory)
            log.event(
                "validation_bound",
                f"validation: {count(result.max_batch_size, 'row')} of"
                f" {count(result.sequence_length, 'token')} fit at once",
                sequence_length=result.sequence_length,
                **search_facts(result),
            )
        loss = replace(data.loss_val(self._engine.loss), dummy_row=lambda: data.dataset_val[0])
        self._evaluator = Evaluator(self._engine, loss, sizer)

    def _find(
        self, trainer: Trainer, limit_finder: LimitFinder, sizer: MicroBatchSizer
    ) -> ProbeResult:
        """Search for the largest number of the longest rows that fits without gradients."""
        data = self._data
        rows = data.trial_rows_val()
        length = data.layout_val.padded(rows.length)
        loss = data.loss_val(self._engine.loss)
        evaluate = partial(self._engine.try_evaluation, loss=loss, length=length)
        resident = data.trial_rows(self._job.settings.probe.sequence_length)
        scope = SearchScope(rows, evaluation=Evaluation(evaluate, resident))
        maximum = limit_finder.rows_to_try(len(data.dataset_val), "trial_rows_val")
        *_, result = limit_finder.find(trainer, scope, maximum=maximum, sizer=sizer)
        return result

    def run_where_due(self, step: int) -> None:
        """Log the loss on the validation rows if the step interval has passed."""
        every = self._job.settings.validation.run_val_every_n_steps
        if every and step % every == 0:
            self._log.validation(self.run(), rows=self.num_rows, step=step)

    def run(self) -> float:
        """Return the mean loss over the label tokens of the rows; training's state is unchanged."""
        with RandomState(self._job.device):
            loss = self._evaluator.run(self._rows())
        # A collective, so it runs only after the evaluation succeeded.
        changed = self._data.dataset_val.recount()
        if changed:
            message = f"dataset_val: {changed}: the lengths that were cached are dropped"
            self._log.event("recounted", message)
        return loss

    def _rows(self) -> Iterator[dict[str, Any]]:
        first = distributed.data_parallel_rank()
        rank_rows = range(first, self.num_rows, distributed.data_parallel_size())
        return (self._data.dataset_val[row] for row in rank_rows)
