"""The steps of another library's trainer, told to the function of ``StepOptions(event=...)``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from adaptive_batch import distributed
from adaptive_batch.schedules import Progress
from adaptive_batch.training import AdaptiveStep, LoopEvents


class DrawnRows:
    """A sampler, whose row numbers are kept in the order in which it draws them.

    Args:
        sampler: sampler that draws them.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._drawn: deque[int] = deque()
        self._num_skipped = 0

    def __iter__(self) -> Iterator[int]:
        self._drawn.clear()
        for number in self._sampler:
            self._drawn.append(int(number))
            yield number

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_sampler":
            raise AttributeError(name)
        # Such as set_epoch, which loaders look for.
        return getattr(self._sampler, name)

    def skip(self, num_rows: int) -> None:
        """Leave out the first rows of the next epoch, which were used before training resumed."""
        self._num_skipped = num_rows

    def take(self, num_rows: int) -> list[int]:
        """Return the oldest rows that were drawn, at most so many, and forget them."""
        for _ in range(self._num_skipped):
            self._drawn.popleft()
        self._num_skipped = 0
        return [self._drawn.popleft() for _ in range(min(num_rows, len(self._drawn)))]


def keep_drawn_rows(loader: DataLoader[Any]) -> DrawnRows | None:
    """Let a loader's sampler keep what it draws; None where that does not show the rows of a batch:
    on several ranks, of a stream, or where batches are made otherwise.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    has_rows = hasattr(batches, "sampler") and isinstance(getattr(batches, "batch_size", None), int)
    if distributed.world_size() > 1 or not has_rows:
        return None
    if not isinstance(batches.sampler, DrawnRows):
        batches.sampler = DrawnRows(batches.sampler)
    drawn_rows: DrawnRows = batches.sampler
    return drawn_rows


class StepLog:
    """Tells of each optimizer step with its rows, of where training begins, and of its end.

    Args:
        event: function that is told, such as a :class:`adaptive_batch.report.RunLog`.
        num_rows: rows of the dataset.
        take_rows: function that returns the row numbers of the next batch; None where they are not
            known, so that an audit refuses to prove anything.
        progress: where training begins.
    """

    def __init__(
        self,
        event: Callable[..., object],
        *,
        num_rows: int,
        take_rows: Callable[[], list[int]] | None,
        progress: Progress,
    ) -> None:
        self._event = event
        self._events = LoopEvents(event, num_rows=num_rows)
        self._take_rows = take_rows
        self._num_rows = num_rows
        self._progress = progress
        self._events.begins(progress)
        self._begin_step()

    @classmethod
    def of_equal_batches(
        cls,
        event: Callable[..., object],
        drawn_rows: DrawnRows | None,
        *,
        num_rows: int,
        batch_rows: int,
        drops_last: bool,
        epoch: int,
        num_batches: int,
        num_steps: int,
    ) -> StepLog:
        """Return a log of batches of a constant size.

        Args:
            event: function that is told.
            drawn_rows: the loader's sampler; None where rows are not known.
            num_rows: rows of the dataset.
            batch_rows: rows of a batch, on all ranks.
            drops_last: whether a last batch of fewer rows is left out.
            epoch: epochs that are done.
            num_batches: batches of the current epoch that are done.
            num_steps: optimizer steps that are done.
        """
        rows_per_epoch = num_rows
        if drops_last:
            rows_per_epoch -= num_rows % batch_rows
        position = num_batches * batch_rows
        progress = Progress(
            epoch=epoch,
            epoch_rows=position,
            steps=num_steps,
            samples=epoch * rows_per_epoch + position,
            rows_per_epoch=num_rows,
        )
        take_rows = None
        if drawn_rows is not None:
            take_rows = partial(drawn_rows.take, batch_rows)
        return cls(event, num_rows=num_rows, take_rows=take_rows, progress=progress)

    def _begin_step(self) -> None:
        self._rows: list[int] = []
        self._num_used = 0
        self._num_parts = 0
        self._loss = 0.0
        self._began = time.perf_counter()

    def add(self, loss: float, step: AdaptiveStep) -> None:
        """Count a batch that was run, one of those that an optimizer's step accumulates.

        Args:
            loss: its part of the loss of the optimizer's step.
            step: what ran it.
        """
        if self._take_rows is not None:
            self._rows += self._take_rows()
        self._num_used += sum(len(piece.rows) for piece in step.pieces)
        self._num_parts += step.num_pieces
        self._loss += loss

    def step(self, *, epoch: int, lr: float, step: AdaptiveStep) -> None:
        """Tell of the optimizer's step that was taken."""
        if epoch != self._progress.epoch:
            self._progress = self._progress.after_epoch()
        facts: dict[str, Any] = {}
        # Trainers give all ranks as many rows, but for the last batch of an epoch.
        batch_size = distributed.world_size() * self._num_used
        if self._take_rows is not None:
            facts["rows"] = self._rows
            batch_size = len(self._rows)
        self._progress = self._progress.after_step(rows=batch_size, tokens=0)
        self._event(
            "step",
            "",
            step=self._progress.steps,
            epoch=epoch,
            position=self._progress.epoch_rows,
            seconds=round(time.perf_counter() - self._began, 6),
            loss=self._loss,
            lr=lr,
            batch_size=batch_size,
            micro_batches=self._num_parts,
            samples_seen=self._progress.samples,
            oom_count=step.sizer.num_out_of_memory,
            **facts,
        )
        self._begin_step()

    def end_epoch(self, *, reason: str) -> None:
        """Tell of an epoch that is over; its rows that were not used are left out for a reason."""
        num_left = self._num_rows - self._progress.epoch_rows
        reasons = {reason: num_left} if num_left > 0 else {}
        self._events.epoch(self._progress, reasons)

    def end(self, *, epochs: int | None) -> None:
        """Tell that training has ended.

        Args:
            epochs: epochs that were asked for; None where training was told to stop before.
        """
        message = f"training ended after step {self._progress.steps}"
        if epochs is None:
            self._event("stopped", message)
        else:
            self._event("end", message, epochs=epochs)
