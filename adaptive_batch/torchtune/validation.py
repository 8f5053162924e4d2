"""Validation during training: the loss on held-out rows, with its own micro-batch limit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from adaptive_batch import distributed
from adaptive_batch.memory import RandomState
from adaptive_batch.training import (
    ConfiguredSize,
    Evaluation,
    Evaluator,
    MicroBatchSizer,
    SearchScope,
)

from .data import Data, counted_by
from .job import Job
from .limit_finder import LimitFinder
from .log import TrainingLog
from .trainer import Trainer


class Validation:
    """Rows of `dataset_val` and their micro-batch limit.

    ``batch_size_val`` (or ``batch_size``, if that is ``auto``) and ``max_validation_batches``
    select the rows. The limit does not affect the selection.

    Args:
        job, data, trainer, log: job, rows, trainer and log of the run. The sizer of training also
            counts out-of-memory errors.
    """

    def __init__(self, job: Job, data: Data, trainer: Trainer, log: TrainingLog) -> None:
        settings = job.settings
        validation = settings.validation
        self._job = job
        self._data = data
        self._log = log
        self._engine = trainer.engine
        self._num_rows = validation.rows_of(
            len(data.dataset_val), batch_size=settings.batch_size, ranks=job.ranks
        )
        size = ConfiguredSize(micro_batch_size=validation.rows_at_once(settings.batch_size))
        if validation.fits_itself:
            size = ConfiguredSize(micro_batch_tokens="auto")
        self._sizer = MicroBatchSizer(
            size,
            layout=data.layout_val,
            memory=job.memory,
            on_change=counted_by(self._engine.sizer, log.limit_change, kind="validation_limit"),
        )
        self._loss = data.loss_val(self._engine.loss)
        loss = replace(self._loss, dummy_row=lambda: data.dataset_val[0])
        self._evaluator = Evaluator(self._engine, loss, self._sizer)

    def search(self, trainer: Trainer, limit_finder: LimitFinder) -> None:
        """Find the largest number of the longest rows that fits without gradients, with
        ``batch_size_val: auto``.

        Raises:
            DoesNotFitError: one row does not fit.
        """
        data = self._data
        if not self._job.settings.validation.fits_itself:
            return
        rows = data.trial_rows_val()
        length = data.layout_val.padded(rows.length)
        evaluation = Evaluation(
            partial(self._engine.try_evaluation, loss=self._loss, length=length),
            data.trial_rows(self._job.settings.probe.sequence_length),
        )
        *_, result = limit_finder.find(
            trainer,
            SearchScope(rows, evaluation=evaluation),
            maximum=limit_finder.rows_to_try(len(data.dataset_val), evaluation.lost_key),
            sizer=self._sizer,
        )
        self._engine.sizer.count_out_of_memory(result.num_out_of_memory)
        limit_finder.log_search("validation_bound", "rows of validation at once", result)

    def run_where_due(self, step: int) -> None:
        """Log the mean loss over the label tokens of the rows if the step interval has passed;
        training's state is unchanged.
        """
        every = self._job.settings.validation.run_val_every_n_steps
        if not every or step % every:
            return
        first = distributed.data_parallel_rank()
        rank_rows = range(first, self._num_rows, distributed.data_parallel_size())
        with RandomState(self._job.device):
            loss = self._evaluator.run(self._data.dataset_val[row] for row in rank_rows)
        self._log.validation(loss, rows=self._num_rows, step=step)
        # A collective, so it runs only after the evaluation succeeded.
        changed = self._data.dataset_val.recount()
        if changed:
            message = f"dataset_val: {changed}: the lengths that were cached are dropped"
            self._log.event("recounted", message)
