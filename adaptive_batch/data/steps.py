"""Which rows each step takes where the batch may grow: by a constant size, a growth function or a schedule."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from adaptive_batch import distributed
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import (
    Asked,
    Growth,
    Progress,
    Schedule,
    ask,
    check_increment,
    check_schedule,
    needs_noise_scale,
    next_batch_size,
    rows_of_next_step,
    walk,
)

from .balance import balance_by_rows
from .dataset import DatasetAdapter
from .stream import RowSampler

log = logging.getLogger("adaptive_batch")


@dataclass(frozen=True)
class StepRows:
    """A step whose rows were handed out.

    Attributes:
        asked: rows that it was asked to hold on one device.
        rows: rows that it holds on all ranks.
        mine: those of this rank.
    """

    asked: int
    rows: int
    mine: list[Any]


class StepSampler:
    """Hands out the rows of steps, each row once an epoch, to each rank its own.

    Args:
        rows: of an epoch.
        batch_size: rows of a step on one device, before a rule changes it.
        shuffle, seed: of their order, see :class:`adaptive_batch.stream.RowSampler`.
        increment: ``f(epoch, batch_size) -> rows to add``, asked once as an epoch starts; None adds none.
        schedule: ``rule(progress) -> rows of a step on one device``, asked for each step; None for `batch_size`.
        on_change: is told the batch size before and after a rule has changed it.

    Attributes:
        batch_size: rows of a step on one device now.
        ranks: a step has `batch_size` rows for each of so many.
        maximum: what a rule may not pass; None for no limit.

    Raises:
        SettingError: a rule cannot be called, or there are two.
    """

    def __init__(
        self,
        rows: DatasetAdapter,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        increment: Callable[[int, int], int] | None,
        schedule: Schedule | None,
        on_change: Callable[[int, int], object],
    ) -> None:
        if increment is not None:
            check_increment(increment)
        if schedule is not None:
            check_schedule(schedule)
            if needs_noise_scale(schedule):
                remedy = "this loop measures nothing that it could follow; give steps, linear_ramp or ramp_by_doubling"
                raise SettingError("batch_size_schedule", schedule, remedy)
            if increment is not None:
                raise SettingError("batch_size_schedule", schedule, "give it or batch_increase_function, not both")
        self._rows = rows
        self._stream = RowSampler(rows, shuffle=shuffle, seed=seed)
        self._order = {"shuffle": shuffle, "seed": seed, "dataset": len(rows)}
        self._increment, self._schedule = increment, schedule
        self._on_change = on_change
        self._grown_in = -1  # the last epoch whose start has asked the increment
        self._waiting: deque[StepRows] = deque()
        self.batch_size = batch_size
        self.ranks = distributed.data_parallel_size()
        self.maximum: int | None = None

    def rest_of_epoch(self, progress: Progress) -> Iterator[list[Any]]:
        """This rank's rows of each step that is left of the epoch; they may be taken ahead of training."""
        self._waiting.clear()
        self._grow(progress)
        # A loader draws a random number as it begins, which going on within an epoch would draw again.
        with torch.random.fork_rng(devices=[]):
            self._stream.start_epoch(progress.epoch, position=progress.epoch_rows)
        while progress.epoch_rows < len(self._rows):
            asked = self._ask(progress)
            size = rows_of_next_step(progress, step_rows=asked * self.ranks, rows=len(self._rows), drop_last=False)
            mine = balance_by_rows(size, distributed.data_parallel_size())[distributed.data_parallel_rank()]
            rows = self._stream.take(size, only=mine)
            self._waiting.append(StepRows(asked, size, rows))
            yield rows
            tokens = distributed.all_reduce_total(sum(map(self._rows.length, rows))) if self._schedule else 0
            progress = replace(progress, batch=asked).after_step(rows=size, tokens=tokens)

    def next_of(self, rows: Sequence[Any]) -> StepRows:
        """The step of some rows, which must be the first of those that wait to be trained on.

        Raises:
            ValueError: it is not.
        """
        first = self._waiting[0] if self._waiting else None
        if first is None or len(rows) != len(first.mine):
            comes = "none are waiting" if first is None else f"{len(first.mine)} rows come next"
            raise ValueError(
                f"{len(rows)} rows were given, and {comes}: run each step that is handed out once, in order"
            )
        # Rows may have been copied on their way, so only those of another step are known to be wrong.
        if not _are(rows, first.mine) and any(_are(rows, later.mine) for later in self._waiting):
            raise ValueError("a step that was handed out before has not been run: run each step once, in order")
        return first

    def has_run(self, step: StepRows) -> None:
        """Let go of the step that :meth:`next_of` has given."""
        assert self._waiting[0] is step
        self._waiting.popleft()

    @property
    def follows_schedule(self) -> bool:
        """Whether a schedule says what each step holds."""
        return self._schedule is not None

    def num_steps(self, progress: Progress, epochs: int) -> int:
        """Steps that are left of so many epochs, as the rules answer now."""
        batch_size, steps = self.batch_size, 0
        while progress.epoch < epochs:
            if self._increment is not None and progress.epoch > self._grown_in:
                batch_size = self._grown(progress.epoch, batch_size).after
            tokens_before = None
            if self._schedule is not None:
                tokens_before = [0, *self._rows.lengths[self._stream.order(progress.epoch)].cumsum(0).tolist()]
            rest = walk(
                progress,
                batch=_constant(batch_size) if self._schedule is None else lambda at: self._answer(at).after,
                ranks=self.ranks,
                rows=len(self._rows),
                drop_last=False,
                tokens_before=tokens_before,
            )
            before = tokens_before or [0] * (len(self._rows) + 1)
            for at, size in rest:
                tokens = before[at.epoch_rows + size] - before[at.epoch_rows]
                progress, steps = at.after_step(rows=size, tokens=tokens), steps + 1
            progress = progress.after_epoch()
        return steps

    def state_dict(self) -> dict[str, Any]:
        """What going on needs beside progress, as plain values."""
        return {"order": self._order, "ranks": self.ranks, "batch_size": self.batch_size, "grown_in": self._grown_in}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            SettingError: rows would come in another order.
        """
        for key, saved in state["order"].items():
            if (now := self._order[key]) != saved:
                which = "has so many rows" if key == "dataset" else "is"
                raise SettingError(key, now, f"what was saved {which}: {saved}; go on with that")
        self.ranks, self.batch_size, self._grown_in = state["ranks"], state["batch_size"], state["grown_in"]
        self._waiting.clear()

    def _grow(self, progress: Progress) -> None:
        if self._increment is None or progress.epoch_steps or progress.epoch <= self._grown_in:
            return
        growth = distributed.from_rank_zero(lambda: self._grown(progress.epoch, self.batch_size))
        self._grown_in = progress.epoch
        self._change(growth.after, growth.describe())

    def _grown(self, epoch: int, batch_size: int) -> Growth:
        assert self._increment is not None
        return next_batch_size(self._increment, epoch=epoch, batch_size=batch_size, maximum=self.maximum)

    def _ask(self, progress: Progress) -> int:
        """Rows of the step that comes next, on one device."""
        if self._schedule is not None:
            asked = distributed.from_rank_zero(lambda: self._answer(progress))
            self._change(asked.after, f"step {progress.steps}: {asked.describe(self.batch_size)}")
        return self.batch_size

    def _answer(self, progress: Progress) -> Asked:
        assert self._schedule is not None
        return ask(self._schedule, progress, maximum=self.maximum)

    def _change(self, after: int, message: str) -> None:
        before, self.batch_size = self.batch_size, after
        if distributed.is_rank_zero() and (before != after or self._increment is not None):
            log.info("%s", message)
        if before != after:
            self._on_change(before, after)


def _are(rows: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(rows) == len(others) and all(one is other for one, other in zip(rows, others, strict=True))


def _constant(batch_size: int) -> Callable[[Progress], int]:
    return lambda progress: batch_size
