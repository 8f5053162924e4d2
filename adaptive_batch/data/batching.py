"""What a step holds, as it is configured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from adaptive_batch.errors import SettingError
from adaptive_batch.schedules import (
    Reference,
    Schedule,
    Seesaw,
    check_increment,
    check_schedule,
)


@dataclass(frozen=True)
class Batching:
    """What a step holds, in which order rows come, and where an epoch ends; keys of the
    configuration mean what they do there.

    Attributes:
        batch_size: configured rows at once on one device, before a search or a rule changes them;
            a step has `gradient_accumulation_steps` times as many.
        shuffle: with the order ``dataloader``, False keeps the dataset's own order.
        seed: of the order.
        max_steps_per_epoch: optimizer steps after which an epoch ends; None for no limit.
        epochs: after which the growth function is not called any more; None for no limit.
    """

    batch_size: int
    gradient_accumulation_steps: int = 1
    batch_tokens: int | None = None
    batch_increase_function: Callable[[int, int], int] | None = None
    batch_size_schedule: Schedule | None = None
    grow_beyond_maximum: bool = False
    shuffle: bool = True
    seed: int = 0
    sample_order: str = "dataloader"
    sample_window: int | None = None
    min_rows_per_batch: int = 1
    max_rows_per_batch: int | None = None
    long_rows: str = "error"
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

    @property
    def ends(self) -> dict[str, Any]:
        """Where an epoch ends, as the functions of an epoch plan take it."""
        return {"drop_last": self.drop_last, "max_steps": self.max_steps_per_epoch}

    def global_batch(self, ranks: int) -> Reference:
        """Return the batch of so many ranks that is configured: what a rate was chosen for."""
        if isinstance(self.batch_size_schedule, Seesaw) and self.batch_tokens:
            return Reference(self.batch_tokens * ranks, "tokens")
        return Reference(self.batch_size * ranks, "rows")
