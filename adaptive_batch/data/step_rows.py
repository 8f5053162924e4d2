"""The rows of each step, read in this process: handed out as far ahead as they are asked for, and
run in order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from adaptive_batch import distributed
from adaptive_batch._util import count
from adaptive_batch.schedules import Progress

from .adaptive_batches import AdaptiveBatches
from .dataset import DatasetAdapter
from .step_planner import PlannedRows
from .step_queue import RowReader


class StepRows:
    """Hands out this rank's rows of each step, and takes them back as they are run; reports where
    training begins and where an epoch ends.

    Args:
        batches: decides which rows a step has; progress moves in it.
        dataset: its rows.
    """

    def __init__(self, batches: AdaptiveBatches, dataset: DatasetAdapter) -> None:
        self._batches = batches
        self._queue = batches.queue
        self._planner = batches.planner
        self._dataset = dataset
        self._reader = RowReader(dataset)
        # Those of each step that was handed out and is not done, the oldest first.
        self._waiting: list[list[Any]] = []
        self._has_begun = False

    def steps(self) -> Iterator[list[Any]]:
        """Yield the rows of each step that is left of the current epoch; what was handed out before
        and is not done comes again.
        """
        self._waiting.clear()
        for step in self._queue.steps():
            rows = self._reader.read(step.own, following=step.following)
            if self._planner.batching.batch_size_schedule is not None:
                own_tokens = sum(map(self._dataset.length, rows))
                self._queue.count_tokens(sum(distributed.all_gather(own_tokens)))
            self._waiting.append(rows)
            yield rows

    def begin_step(self, rows: Sequence[Any]) -> PlannedRows:
        """Begin the step that comes next, whose rows these must be; return its plan. Before the
        first one, report where training starts or resumes.

        Raises:
            ValueError: they are those of another step.
        """
        waiting = self._waiting
        if not waiting or len(rows) != len(waiting[0]):
            next_rows = f"{len(waiting[0])} rows come next" if waiting else "none are waiting"
            raise ValueError(
                f"{len(rows)} rows were given, and {next_rows}: run each step that is handed out"
                " once, in order"
            )
        # Rows may have been copied on their way, so only those of another step are known to be
        # wrong.
        if not _are_same(rows, waiting[0]) and any(_are_same(rows, later) for later in waiting):
            raise ValueError(
                "a step that was handed out before has not been run: run each step once, in order"
            )
        if not self._has_begun:
            self._has_begun = True
            progress = self._queue.progress
            num_rows = len(self._dataset)
            begins = "resuming" if progress.steps else "starting"
            self._batches.report(
                "start",
                f"{begins} with epoch {progress.epoch}, step {progress.steps};"
                f" {count(num_rows, 'row')}",
                resumed=bool(progress.steps),
                rows=num_rows,
                ranks=distributed.world_size(),
                progress=progress.state_dict(),
            )
        return self._queue.oldest

    def done(self, *, tokens: int) -> Progress:
        """Count the step that came next as done; return the progress after it, which is within its
        epoch.

        Args:
            tokens: its real tokens over all ranks.
        """
        self._waiting.pop(0)
        return self._queue.done(tokens=tokens, ends_epoch=False)

    def end_epoch(self, progress: Progress) -> None:
        """Go to the next epoch if no step of this one is left, and report the epoch.

        Args:
            progress: progress after the last step, as :meth:`done` returned it.
        """
        epochs = self._planner.epochs
        if not epochs.is_over(progress):
            return
        reasons = epochs.left_out(progress)
        left_out = "".join(f", {rows} left out by {reason}" for reason, rows in reasons.items())
        self._batches.report(
            "epoch",
            f"epoch {progress.epoch}: {count(progress.epoch_rows, 'row')} trained{left_out}",
            epoch=progress.epoch,
            used=progress.epoch_rows,
            left_out=sum(reasons.values()),
            reasons=reasons,
        )
        self._queue.end_epoch()

    def forget(self) -> None:
        """Forget the steps that were handed out: training resumes elsewhere."""
        self._waiting.clear()
        self._has_begun = False


def _are_same(rows: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(rows) == len(others) and all(map(operator.is_, rows, others))
