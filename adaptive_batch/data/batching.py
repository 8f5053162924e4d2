"""Configuration of the rows of steps and of their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from adaptive_batch._util import check_options, check_whole, one_of, option
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import (
    Clock,
    Progress,
    ReferenceBatch,
    Schedule,
    Seesaw,
)

from .order import ORDERS

LONG_ROWS = ("error", "drop", "alone")


def _seed(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
        raise SettingError(key, value, "give a whole number")


@dataclass(frozen=True)
class Sampling:
    """Order of rows, and steps that hold tokens.

    Attributes:
        shuffle: whether `dataloader` shuffles the rows in each epoch.
        seed: seed of the order.
        sample_order: order of the rows. `dataloader`: torchtune's order. `random`: shuffled in
            each epoch. `seqlen`: from the shortest row to the longest.
        sample_window: number of shuffled rows that `seqlen` sorts at a time; None: all rows of the
            dataset.
        batch_tokens: number of real tokens (without padding) of a step on one device; replaces
            `batch_size`. The default micro-batch size is then `micro_batch_tokens: auto`.
        min_rows_per_batch: minimum number of rows of a step with `batch_tokens`, even if these rows
            have more than `batch_tokens` tokens. The last step of an epoch may have fewer rows.
        max_rows_per_batch: maximum number of rows of a step with `batch_tokens`.
        long_rows: handling of a row with more than `batch_tokens` tokens. `error`: end the run.
            `drop`: leave the row out and log it. `alone`: train the row in a step of its own.
        grow_beyond_maximum: whether a growing batch may exceed the maximum batch size. `True`: a
            larger batch runs as several micro-batches. `False`: the batch is limited to the
            maximum, and a line is logged.

    Raises:
        SettingError: a value cannot be used.
    """

    shuffle: bool = option(True)
    seed: int = option(0, _seed)
    sample_order: str = option("dataloader", one_of(*ORDERS), resume="epoch")
    sample_window: int | None = option(
        None, check_whole, resume="epoch", needs=("sample_order=seqlen",)
    )
    batch_tokens: int | None = option(None, check_whole, resume="epoch")
    min_rows_per_batch: int = option(1, check_whole, resume="epoch", needs=("batch_tokens",))
    max_rows_per_batch: int | None = option(
        None, check_whole, resume="epoch", needs=("batch_tokens",)
    )
    long_rows: str = option("error", one_of(*LONG_ROWS), resume="epoch", needs=("batch_tokens",))
    grow_beyond_maximum: bool = option(
        False, resume="report", needs=("batch_increase_function", "batch_size_schedule")
    )

    def __post_init__(self) -> None:
        check_options(self)
        self.check_together()

    def check_together(self) -> None:
        """Raise SettingError for options that contradict each other."""
        least = self.min_rows_per_batch
        if self.long_rows == "alone" and least > 1:
            remedy = (
                f"a row alone is fewer than min_rows_per_batch={least}; set error or drop, or"
                " remove min_rows_per_batch"
            )
            raise SettingError("long_rows", self.long_rows, remedy)
        if self.max_rows_per_batch is not None and least > self.max_rows_per_batch:
            remedy = f"must not be above max_rows_per_batch={self.max_rows_per_batch}"
            raise SettingError("min_rows_per_batch", least, remedy)


@dataclass(frozen=True, kw_only=True)
class Batching(Sampling):
    """Size of a step, order of rows and end of an epoch; the attributes of :class:`Sampling`, and:

    Attributes:
        batch_size: configured rows on one device, before a search or a rule changes them.
        gradient_accumulation_steps: factor of `batch_size` that gives the rows of a step.
        batch_increase_function: function `f(epoch, batch_size) -> int`: rows to add to
            `batch_size` at the start of each epoch.
        batch_size_schedule: function `rule(progress) -> int`: rows of a step on one device, or
            real tokens with `batch_tokens`.
        drop_last: whether the last, short step of an epoch is dropped.
        max_steps_per_epoch: most optimizer steps of an epoch; None for no limit.
        epochs: number of epochs; None for no limit.
    """

    batch_size: int = option(read=check_whole)
    gradient_accumulation_steps: int = 1
    batch_increase_function: Callable[[int, int], int] | None = None
    batch_size_schedule: Schedule | None = None
    drop_last: bool = False
    max_steps_per_epoch: int | None = option(None, check_whole)
    epochs: int | None = None

    def check_together(self) -> None:
        """Raise SettingError for options that contradict each other."""
        super().check_together()
        if None not in (self.batch_size_schedule, self.batch_increase_function):
            remedy = (
                "batch_increase_function is set too, and both set how the batch grows; remove one"
            )
            raise SettingError("batch_size_schedule", self.batch_size_schedule, remedy)

    def coupled(self, decay: Callable[[Progress], float], clock: Clock) -> Batching:
        """Return the same with its schedule coupled to the rate, whose decay is a function of
        progress by a clock.

        Raises:
            SettingError: the clock counts steps or two units, or an epoch ends by steps: there are
                fewer then for the same data.
        """
        rule = self.batch_size_schedule
        assert isinstance(rule, Seesaw)
        if clock.warmup != clock.decay or clock.decay == "steps":
            remedy = f"{rule} takes fewer steps for the same data; give samples or tokens"
            raise SettingError("lr_clock", str(clock), remedy)
        if self.max_steps_per_epoch is not None:
            remedy = (
                f"{rule} takes fewer steps for the same data, so that these would be more of it;"
                " set it to null, in a new run, and take fewer rows of the dataset"
            )
            raise SettingError("max_steps_per_epoch", self.max_steps_per_epoch, remedy)
        coupled = rule.coupled(self.batch_tokens or self.batch_size, decay)
        return replace(self, batch_size_schedule=coupled)

    @property
    def step_rows(self) -> int:
        """Rows of a step on one device before a search or a rule changes `batch_size`."""
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def depends_on_lengths(self) -> bool:
        """Return whether the lengths of the rows decide which rows a step has."""
        return bool(self.batch_tokens) or self.sample_order == "seqlen"

    @property
    def schedules_rows(self) -> bool:
        """Return whether a schedule decides how many rows a step has, and not how many tokens."""
        return self.batch_size_schedule is not None and not self.batch_tokens

    @property
    def ends(self) -> dict[str, Any]:
        """Arguments of :class:`EpochPlan` for the end of an epoch."""
        return {"drop_last": self.drop_last, "max_steps": self.max_steps_per_epoch}

    def global_batch(self, ranks: int) -> ReferenceBatch:
        """Return the configured batch of a number of ranks, which the rate was chosen for."""
        if isinstance(self.batch_size_schedule, Seesaw) and self.batch_tokens:
            return ReferenceBatch(self.batch_tokens * ranks, "tokens")
        return ReferenceBatch(self.step_rows * ranks, "rows")
