"""How an epoch divides into optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from adaptive_batch._util import count


@dataclass(frozen=True)
class EpochPlan:
    """How an epoch divides into optimizer steps.

    Attributes:
        rows: rows that the epoch has, over all ranks.
        global_rows: rows of one full optimizer step, the global batch; where steps differ, their
            mean, rounded.
        steps: optimizer steps that the epoch has.
        sizes: rows of each step; None where all are `global_rows` but perhaps the last.
        tokens: real tokens of the rows that are stepped; 0 where they are not counted.
        most_steps: steps after which the epoch ends whatever rows are left; None for no such limit.
        is_estimate: the steps depend on what is measured in training, so `steps` and `sizes` are an
            estimate.
    """

    rows: int
    global_rows: int
    steps: int
    sizes: Sequence[int] | None = None
    tokens: int = 0
    most_steps: int | None = None
    is_estimate: bool = False

    @classmethod
    def of(
        cls, rows: int, *, global_rows: int, drop_last: bool, max_steps: int | None = None
    ) -> EpochPlan:
        """Divide `rows` into steps; the last, short one is dropped or trained.

        `max_steps` cuts the epoch; None cuts nothing.
        """
        steps = rows // global_rows
        if not drop_last and rows % global_rows:
            steps += 1
        if max_steps is not None:
            steps = min(steps, max_steps)
        return cls(rows, global_rows, steps, most_steps=max_steps)

    @classmethod
    def of_sizes(
        cls, sizes: Sequence[int], *, drop_last: bool = False, max_steps: int | None = None
    ) -> EpochPlan:
        """Divide into steps of given numbers of rows; the last one, which the end of the epoch cut,
        is dropped or trained.
        """
        kept = sizes[: len(sizes) - drop_last][:max_steps]
        return cls(
            sum(sizes), round(sum(kept) / max(1, len(kept))), len(kept), kept, most_steps=max_steps
        )

    def rows_of_step(self, step: int) -> int:
        """Return the rows of step number `step` of the epoch, counted from 0."""
        if self.sizes is not None:
            return self.sizes[step]
        return min(self.global_rows, self.rows - step * self.global_rows)

    def describe(self) -> str:
        """Return how many steps the epoch has, of how many rows."""
        sizes = [self.global_rows] if self.sizes is None else self.sizes
        smallest = min(sizes, default=0)
        largest = max(sizes, default=0)
        rows = count(largest, "row")
        if smallest < largest:
            rows = f"{smallest} to {largest} rows"
        about = "about " if self.is_estimate else ""
        return f"{about}{count(self.steps, 'step')} of {rows}"

    @cached_property
    def stepped_rows(self) -> int:
        """Rows that the epoch's steps have."""
        if self.sizes is None:
            return min(self.rows, self.slots)
        return sum(self.sizes)

    @cached_property
    def slots(self) -> int:
        """Rows that the epoch's steps could have; a short last step counts in full where the others
        are of one size.
        """
        if self.sizes is None:
            return self.steps * self.global_rows
        # Steps of one size but for a short last one.
        if len(set(self.sizes[:-1])) == 1 and self.sizes[-1] <= self.sizes[0]:
            return len(self.sizes) * self.sizes[0]
        return sum(self.sizes)


@dataclass(frozen=True)
class Pace:
    """What a schedule's clock counts by.

    Attributes:
        reference: an epoch, divided by the batch that training began with.
        plan: the current epoch, divided by the current batch.
    """

    reference: EpochPlan
    plan: EpochPlan
