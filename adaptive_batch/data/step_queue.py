"""Where training is: the steps that were handed out, and those that are done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from adaptive_batch.schedules import Progress

from .step_planner import PlannedRows, StepPlanner


class RowReader:
    """Reads the rows of a dataset in this process, a step at a time, so that a step may have any
    number of them.

    Args:
        dataset: map-style; its rows are returned as they are. If it has ``expect``, it is told
            which rows are likely next.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._expect: Callable[[Iterable[int]], object] = getattr(
            dataset, "expect", lambda numbers: None
        )

    def begin(self) -> None:
        """Begin an epoch: draw the random number that torch's own loader draws then, as it does in
        torchtune's recipes.
        """
        iter(DataLoader(self._dataset, batch_size=None))
        self._expect([])

    def read(self, numbers: Sequence[int], *, following: Iterable[int] = ()) -> list[Any]:
        """Read some rows.

        Args:
            numbers: row numbers.
            following: row numbers that are likely to be read next.
        """
        rows = [self._dataset[number] for number in numbers]
        self._expect(following)
        return rows


class _HandedOut(NamedTuple):
    """A step that is not done, and the real tokens of its rows over all ranks, as far as they are
    counted.
    """

    step: PlannedRows
    tokens: int

    @property
    def after(self) -> Progress:
        """Progress when it is done."""
        return self.step.progress.after_step(rows=len(self.step.numbers), tokens=self.tokens)


class StepQueue:
    """Hands out the steps of an epoch, as far ahead as they are asked for; progress moves as they
    are done.

    Args:
        planner: plans the steps.
        counts_tokens: whether the tokens of rows, which a rule may read ahead of training, are
            counted here; else the user counts them.

    Attributes:
        progress: what training has consumed: the steps that are done.
    """

    def __init__(self, planner: StepPlanner, *, counts_tokens: bool = False) -> None:
        self._planner = planner
        self._counts_tokens = counts_tokens
        self._progress = Progress(rows_per_epoch=planner.epochs.num_rows)
        self._is_begun = False
        self._ahead: deque[_HandedOut] = deque()

    @property
    def progress(self) -> Progress:
        """What training has consumed, with the pace of the epoch."""
        pace = self._planner.clock.pace
        if self._progress.pace is not pace:
            self._progress = replace(self._progress, pace=pace)
        return self._progress

    def resume(self, progress: Progress, *, is_begun: bool = False) -> None:
        """Go to another place in training.

        Args:
            progress: that place.
            is_begun: whether its epoch has been begun by the planner.
        """
        self._progress = progress
        self._is_begun = is_begun
        self._ahead.clear()

    def begin_epoch(self) -> None:
        """Grow the batch by the growth function, and plan the epoch."""
        self._progress = self._planner.begin_epoch(self._progress)
        self._is_begun = True

    def steps(self) -> Iterator[PlannedRows]:
        """Yield the steps that are left of the current epoch; what was handed out before and is not
        done comes again.
        """
        self._ahead.clear()
        if not self._is_begun:
            self.begin_epoch()
        epoch = self._progress.epoch
        progress = self._progress
        self._planner.start_epoch(progress)
        step = self._planner.next_step(progress)
        while step is not None:
            tokens = 0
            if self._counts_tokens:
                tokens = self._planner.epochs.num_tokens(step.numbers)
            self._ahead.append(_HandedOut(step, tokens))
            yield step
            if self._progress.epoch > epoch:
                return
            # What is done is known exactly; what is ahead, as far as its tokens are counted.
            progress = self._progress
            if self._ahead:
                progress = self._ahead[-1].after
            step = self._planner.next_step(progress)

    def read_steps(self, reader: RowReader) -> Iterator[tuple[PlannedRows, list[Any]]]:
        """Yield the steps that are left of the current epoch, each with this rank's rows."""
        for step in self.steps():
            yield step, reader.read(step.own, following=step.following)

    def count_tokens(self, tokens: int) -> None:
        """Take the real tokens, over all ranks, of the step that was handed out last."""
        self._ahead[-1] = self._ahead[-1]._replace(tokens=tokens)

    @property
    def oldest(self) -> PlannedRows:
        """The oldest step that was handed out and is not done."""
        return self._ahead[0].step

    def done(
        self, *, tokens: int | None = None, ends_epoch: bool = True, **measured: Any
    ) -> Progress:
        """Count the oldest step that was handed out as done; return the progress after it.

        Args:
            tokens: its real tokens over all ranks; None for those that were counted as it was
                handed out.
            ends_epoch: whether the next epoch begins with the last step of this one; else
                :meth:`end_epoch` begins it.
            measured: what else of progress the step has measured, such as its `noise_scale`.

        Raises:
            ValueError: no step is waiting.
        """
        if not self._ahead:
            raise ValueError(
                "no batch is waiting: call step() once for each batch that was handed out"
            )
        step, counted_tokens = self._ahead.popleft()
        if tokens is None:
            tokens = counted_tokens
        self._progress = self._progress.after_step(
            rows=len(step.numbers), tokens=tokens, batch=step.progress.batch, **measured
        )
        if ends_epoch and self._planner.epochs.is_over(self._progress):
            self.end_epoch()
        return self._progress

    def end_epoch(self) -> None:
        """Go to the beginning of the next epoch."""
        self._progress = self._progress.after_epoch()
        self._is_begun = False
