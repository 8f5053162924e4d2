"""Progress of training, the plan of an epoch, and durations such as ``2ep`` or ``1.5e6tok``.

All rules read :class:`Progress`. The notation of durations is Composer's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from adaptive_batch._util import count
from adaptive_batch.errors import SettingError


@dataclass(frozen=True)
class EpochPlan:
    """The optimizer steps of an epoch.

    Attributes:
        rows: rows of the epoch, over all ranks.
        global_rows: rows of one full optimizer step, the global batch; the rounded mean if steps
            differ.
        steps: optimizer steps of the epoch.
        sizes: rows of each step; None if all have `global_rows`, except perhaps the last.
        tokens: real tokens of the trained rows; 0 if they are not counted.
        most_steps: steps after which the epoch ends even if rows are left; None for no limit.
        is_estimate: True if the steps depend on measurements during training.
    """

    rows: int
    global_rows: int
    steps: int
    sizes: Sequence[int] | None = None
    tokens: int = 0
    most_steps: int | None = None
    is_estimate: bool = False

    @classmethod
    def from_rows(
        cls, rows: int, *, global_rows: int, drop_last: bool, max_steps: int | None = None
    ) -> EpochPlan:
        """Divide `rows` into equal steps and drop or train the short last one.

        `max_steps` shortens the epoch unless it is None.
        """
        steps = rows // global_rows
        if not drop_last and rows % global_rows:
            steps += 1
        if max_steps is not None:
            steps = min(steps, max_steps)
        return cls(rows, global_rows, steps, most_steps=max_steps)

    @classmethod
    def from_sizes(
        cls, sizes: Sequence[int], *, drop_last: bool = False, max_steps: int | None = None
    ) -> EpochPlan:
        """Plan steps of the given numbers of rows and drop or train the short last one."""
        trained = sizes[:-1] if drop_last else sizes
        # A limit of None keeps all steps.
        trained = trained[:max_steps]
        mean_rows = round(sum(trained) / max(1, len(trained)))
        return cls(sum(sizes), mean_rows, len(trained), trained, most_steps=max_steps)

    def describe(self) -> str:
        """Describe the number of steps and their rows."""
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
        """Rows that the steps of the epoch train."""
        if self.sizes is None:
            return min(self.rows, self.slots)
        return sum(self.sizes)

    @cached_property
    def slots(self) -> int:
        """Rows that full steps would train: a short last step counts in full if the others are
        equal.
        """
        if self.sizes is None:
            return self.steps * self.global_rows
        all_but_last = self.sizes[:-1]
        if len(set(all_but_last)) == 1 and self.sizes[-1] <= self.sizes[0]:
            return len(self.sizes) * self.sizes[0]
        return sum(self.sizes)


@dataclass(frozen=True)
class Pace:
    """Two plans of an epoch that a schedule's clock compares.

    Attributes:
        reference: plan with the initial batch.
        plan: plan with the current batch.
    """

    reference: EpochPlan
    plan: EpochPlan


@dataclass(frozen=True)
class Progress:
    """Progress of training over all ranks, and other values that a rule may read.

    Attributes:
        epoch: finished epochs.
        epoch_rows: trained rows of the current epoch.
        steps: optimizer steps.
        samples: rows.
        tokens: real tokens, without padding.
        epoch_steps: optimizer steps of the current epoch.
        epoch_tokens: real tokens of the current epoch.
        rows_per_epoch: rows of an epoch; 0 if unknown.
        batch: requested batch of the last step on one device, in rows or (`batch_tokens`) in
            tokens; 0 before the first step.
        noise_scale: smoothed gradient noise scale in rows; None if it is not measured or not known
            yet.
        batch_before_epoch, noise_scale_before_epoch: `batch` and `noise_scale` at the start of the
            current epoch.
        pace: plans that clocks compare; None if no clock needs them. It is not saved: resuming
            plans again.
    """

    epoch: int = 0
    epoch_rows: int = 0
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    epoch_steps: int = 0
    epoch_tokens: int = 0
    rows_per_epoch: int = 0
    batch: int = 0
    noise_scale: float | None = None
    batch_before_epoch: int = 0
    noise_scale_before_epoch: float | None = None
    pace: Pace | None = field(default=None, repr=False, compare=False)

    @property
    def epochs(self) -> float:
        """Trained epochs, with the fraction of the current one."""
        if not self.rows_per_epoch:
            return float(self.epoch)
        return self.epoch + self.epoch_rows / self.rows_per_epoch

    def after_step(self, *, rows: int, tokens: int, **measured: Any) -> Progress:
        """Return the progress after one optimizer step.

        Args:
            rows: rows of the step, over all ranks.
            tokens: real tokens of the step, over all ranks.
            measured: other changed values, such as `noise_scale`.
        """
        changed = {
            **measured,
            "epoch_rows": self.epoch_rows + rows,
            "steps": self.steps + 1,
            "samples": self.samples + rows,
            "tokens": self.tokens + tokens,
            "epoch_steps": self.epoch_steps + 1,
            "epoch_tokens": self.epoch_tokens + tokens,
        }
        # This runs at each step, and dataclasses.replace() takes twice as long.
        return Progress(**(vars(self) | changed))

    def after_epoch(self) -> Progress:
        """Return the progress at the start of the next epoch."""
        return replace(
            self,
            epoch=self.epoch + 1,
            epoch_rows=0,
            epoch_steps=0,
            epoch_tokens=0,
            batch_before_epoch=self.batch,
            noise_scale_before_epoch=self.noise_scale,
        )

    def at_epoch_start(self) -> Progress:
        """Return the progress at the start of the current epoch."""
        return replace(
            self,
            batch=self.batch_before_epoch,
            noise_scale=self.noise_scale_before_epoch,
            epoch_rows=0,
            steps=self.steps - self.epoch_steps,
            samples=self.samples - self.epoch_rows,
            tokens=self.tokens - self.epoch_tokens,
            epoch_steps=0,
            epoch_tokens=0,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers for a checkpoint; ``Progress(**state)`` restores them."""
        names = [field.name for field in fields(self) if field.name != "pace"]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Duration:
    """An amount of training, over all ranks.

    Attributes:
        amount: 0 or more; a whole number unless the unit is ``ep``.
        unit: ``ep``, ``ba``, ``sp`` or ``tok``.
    """

    amount: float
    unit: str

    def share(self, progress: Progress) -> Fraction:
        """Return the fraction of this duration that training has reached; above 1 beyond its end.

        It is exact: a tenth of an epoch of 10 rows is one row, which floats could miss.
        """
        return self._trained(progress) / Fraction(str(self.amount))

    def _trained(self, progress: Progress) -> Fraction:
        """Return the training so far in the unit of this duration."""
        if self.unit == "ep":
            fraction_of_epoch = Fraction(0)
            if progress.rows_per_epoch:
                fraction_of_epoch = Fraction(progress.epoch_rows, progress.rows_per_epoch)
            return progress.epoch + fraction_of_epoch
        return Fraction(
            {"ba": progress.steps, "sp": progress.samples, "tok": progress.tokens}[self.unit]
        )

    def __str__(self) -> str:
        return f"{self.amount}".removesuffix(".0") + self.unit


def parse_duration(value: object, *, key: str) -> Duration:
    """Read a duration with its unit, such as ``0.5ep``, ``100ba``, ``10000sp`` or ``1.5e6tok``.

    Raises:
        SettingError: the value of `key` lacks a unit, is not finite and above 0, or is fractional
            in a unit other than epochs.
    """
    amount = math.nan
    unit = ""
    match = re.fullmatch(r"(.*?)\s*(ep|ba|sp|tok)", str(value).strip())
    if match is not None:
        unit = match[2]
        with suppress(ValueError):
            amount = float(match[1])
    # NaN is not above 0.
    is_valid = 0 < amount < math.inf and (unit == "ep" or amount == int(amount))
    if not is_valid:
        remedy = (
            "give a number above 0 with a unit, such as 0.5ep (epochs), 100ba (optimizer steps),"
            " 10000sp (samples) or 1e6tok (tokens); only ep may have a fraction"
        )
        raise SettingError(key, value, remedy)
    return Duration(amount if unit == "ep" else int(amount), unit)
