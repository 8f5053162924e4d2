"""What a step holds, as it is configured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from adaptive_batch._util import check_bool, check_choice, check_whole
from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import (
    Clock,
    Progress,
    Reference,
    Schedule,
    Seesaw,
    check_increment,
    check_schedule,
)

from .order import ORDERS
from .token_sampler import LONG_ROWS


@dataclass(frozen=True)
class Sampling:
    """In which order rows come, and steps that hold tokens.

    Attributes:
        shuffle: whether the order ``dataloader`` takes the rows in a new order in each epoch.
        seed: seed of the order.
        sample_order: ``dataloader``, ``random``, or ``seqlen``: sorted by length.
        sample_window: rows within which ``seqlen`` sorts; None for the whole dataset.
        batch_tokens: tokens of a step on one device, in place of `batch_size` rows; None for rows.
        min_rows_per_batch: the fewest rows of a step by tokens on one device, also where they have
            more than `batch_tokens`; the last step of an epoch may have fewer.
        max_rows_per_batch: the most rows of a step by tokens; None for no limit.
        long_rows: what becomes of a row above `batch_tokens`: ``error``, ``drop`` or ``alone``.
        grow_beyond_maximum: whether rules may pass the largest batch that fits, in several
            micro-batches.

    Raises:
        SettingError: a value cannot be used.
    """

    shuffle: bool = True
    seed: int = 0
    sample_order: str = "dataloader"
    sample_window: int | None = None
    batch_tokens: int | None = None
    min_rows_per_batch: int = 1
    max_rows_per_batch: int | None = None
    long_rows: str = "error"
    grow_beyond_maximum: bool = False

    def __post_init__(self) -> None:
        check_choice("sample_order", self.sample_order, ORDERS)
        check_choice("long_rows", self.long_rows, LONG_ROWS)
        for key in ("shuffle", "grow_beyond_maximum"):
            check_bool(key, getattr(self, key))
        seed = self.seed
        if isinstance(seed, bool) or not isinstance(seed, int) or abs(seed) >= 2**63:
            raise SettingError("seed", seed, "give a whole number")
        least = check_whole("min_rows_per_batch", self.min_rows_per_batch)
        if self.long_rows == "alone" and least > 1:
            remedy = (
                f"a row alone is fewer than min_rows_per_batch={least}; set error or drop, or"
                " remove min_rows_per_batch"
            )
            raise SettingError("long_rows", self.long_rows, remedy)
        for key in ("batch_tokens", "max_rows_per_batch", "sample_window"):
            if getattr(self, key) is not None:
                check_whole(key, getattr(self, key))


@dataclass(frozen=True, kw_only=True)
class Batching(Sampling):
    """What a step holds, in which order rows come, and where an epoch ends; keys of the
    configuration mean what they do there.

    Attributes, besides those of :class:`Sampling`:
        batch_size: configured rows on one device, before a search or a rule changes them; a step
            has `gradient_accumulation_steps` times as many.
        max_steps_per_epoch: optimizer steps after which an epoch ends; None for no limit.
        epochs: after which the growth function is not called any more; None for no limit.
    """

    batch_size: int
    gradient_accumulation_steps: int = 1
    batch_increase_function: Callable[[int, int], int] | None = None
    batch_size_schedule: Schedule | None = None
    drop_last: bool = False
    max_steps_per_epoch: int | None = None
    epochs: int | None = None

    def check_rules(self) -> None:
        """Raise SettingError for a growth function or a schedule that cannot be called, and for two
        at once.
        """
        if self.batch_increase_function is not None:
            check_increment(self.batch_increase_function)
        if self.batch_size_schedule is not None:
            check_schedule(self.batch_size_schedule)
            if self.batch_increase_function is not None:
                remedy = "give it or batch_increase_function, not both"
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
    def depends_on_lengths(self) -> bool:
        """Return whether the lengths of the rows decide which rows a step has."""
        return bool(self.batch_tokens) or self.sample_order == "seqlen"

    @property
    def ends(self) -> dict[str, Any]:
        """Where an epoch ends, as the functions of an epoch plan take it."""
        return {"drop_last": self.drop_last, "max_steps": self.max_steps_per_epoch}

    def global_batch(self, ranks: int) -> Reference:
        """Return the batch of so many ranks that is configured: what a rate was chosen for."""
        if isinstance(self.batch_size_schedule, Seesaw) and self.batch_tokens:
            return Reference(self.batch_tokens * ranks, "tokens")
        rows = self.batch_size * self.gradient_accumulation_steps
        return Reference(rows * ranks, "rows")
