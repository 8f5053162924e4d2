"""One step of a loop after the other: its gradients, its learning rate, and what is told of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch.data import AdaptiveBatches, PlannedRows, StepRows
from adaptive_batch.distributed import reshard
from adaptive_batch.errors import NonfiniteLossError

from .agreement import RankReport
from .loop_events import LoopEvents, log_event
from .loop_rate import LoopRate
from .loop_search import LoopSearch
from .model_checks import check_gradients_are_clear
from .nonfinite import NonfiniteSteps
from .options import StepOptions
from .pending_step import PendingStep
from .row_step import RowStep
from .step_result import StepResult

log = logging.getLogger("adaptive_batch")


class LoopStep:
    """Takes the rows of a step that was handed out, leaves their gradients and the rate of
    ``optimizer.step()``, and counts the step as done.

    Args:
        model: model on its device.
        optimizer: optimizer of its parameters.
        step: forward and backward of rows.
        search: knows what steps fit.
        batches: batches whose progress moves.
        rate: learning rate of each step.
        options: how a step runs.

    Attributes:
        learning_rate: rate of the last step, of the first group; None before it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        step: RowStep,
        search: LoopSearch,
        batches: AdaptiveBatches,
        rate: LoopRate,
        options: StepOptions,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._step = step
        self._search = search
        self._batches = batches
        self._epochs = batches.planner.epochs
        self._rows = StepRows(batches, step.dataset)
        self._rate = rate
        self._events = LoopEvents(options.event, num_rows=len(step.dataset))
        if options.event is not None:
            batches.tell(options.event)
        self._runner = step.step.parts
        self._nonfinite = NonfiniteSteps(
            options.on_nonfinite_loss, self._runner, event=partial(log_event, options.event)
        )
        self._pending_step = PendingStep(model, optimizer)
        self._warned_unlabelled = False
        self.learning_rate: float | None = None

    def steps(self) -> Iterator[list[Any]]:
        """Hand out the rows of each step that is left of the current epoch."""
        for rows in self._rows.steps():
            self._rate.describe_batch()
            yield rows

    def run(self, rows: Sequence[Any]) -> StepResult:
        """Run the step that comes next; see :meth:`AdaptiveLoop.run`."""
        if not torch.is_grad_enabled():
            raise ValueError("gradients are off, as under torch.no_grad(): run() needs them")
        planned = self._rows.next_step(rows)
        batch_size = self._batches.rows_on_largest_rank(planned.progress.batch)
        self._search.check_fits(batch_size)
        reshard(self._model)
        if self._runner.has_gradients():
            check_gradients_are_clear(self._model, self._optimizer)
        progress = self._batches.progress
        self._events.begins(progress)
        began = time.perf_counter()
        report = RankReport(
            batch_size=batch_size,
            num_rows=len(planned.numbers),
            requested=planned.progress.batch,
        )
        result = self._step.run(rows, report)
        batch = result.tokens if self._rate.counts_tokens else result.rows
        lr = self._rate.apply(progress, batch=batch)["lr"]
        self.learning_rate = lr
        self._look_at(result, planned, lr=lr)
        self._end(planned, result, lr=lr, seconds=time.perf_counter() - began)
        return result

    def _look_at(self, result: StepResult, planned: PlannedRows, *, lr: float) -> None:
        """Tell of a result that is not finite, or without labels; drop its gradients where it is
        not to be taken.
        """
        try:
            self._nonfinite.drops(result, planned.progress, lr=lr)
        except NonfiniteLossError:
            self._rate.restore()
            raise
        if not result.micro_batches and not self._warned_unlabelled:
            self._warned_unlabelled = True
            log.warning(
                "a step of %d rows had no label to learn from; see num_labels, if that should"
                " not be",
                result.rows,
            )

    def _end(self, planned: PlannedRows, result: StepResult, *, lr: float, seconds: float) -> None:
        """Count a step as done, and its epoch where it is over."""
        progress = self._rows.done(tokens=result.tokens)
        self._events.step(
            result,
            progress,
            numbers=planned.numbers,
            lr=lr,
            seconds=seconds,
            num_out_of_memory=self._step.sizer.num_out_of_memory,
        )
        if self._epochs.is_over(progress):
            self._events.epoch(progress, self._epochs.left_out(progress))
            self._batches.queue.end_epoch()
        self._pending_step.ran()

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Return where training is, as plain values.

        Raises:
            ValueError: the gradients of the last step wait for ``optimizer.step()``.
        """
        self._pending_step.check_taken()
        return {
            "batches": self._batches.state_dict(),
            "step": self._search.state_dict(),
            "rate": self._rate.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state."""
        self._batches.load_state_dict(state["batches"])
        self._rows.forget()
        self._events.forget_beginning()
        self._search.load_state_dict(state["step"])
        self._rate.load_state_dict(state["rate"])
