"""How far training has come, and how long a part of it is: ``2ep``, ``100ba``, ``10000sp``,
``1.5e6tok``.

Every rule reads :class:`Progress`; nothing else keeps time. The notation of durations is
Composer's.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any

from adaptive_batch.errors import SettingError

from .epoch_plan import Pace


@dataclass(frozen=True)
class Progress:
    """What training has consumed so far, over all ranks, and what else a rule may read.

    Attributes:
        epoch: epochs that are done.
        epoch_rows: rows of the current epoch that have been stepped.
        steps: optimizer steps.
        samples: rows.
        tokens: real tokens, padding not counted.
        epoch_steps: optimizer steps of the current epoch.
        epoch_tokens: real tokens of the current epoch.
        rows_per_epoch: rows that an epoch has; 0 where that is not known.
        batch: what was requested for the last step on one device, in rows or, by `batch_tokens`, in
            tokens; 0 before the first.
        noise_scale: the smoothed gradient noise scale, in rows; None where it is not measured or
            not known yet.
        batch_before_epoch, noise_scale_before_epoch: the same two where the current epoch began.
        pace: what clocks count by; None where no clock needs it. It is planned again when training
            resumes, and not saved.
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
        """Epochs that are done, and the part of this one."""
        if not self.rows_per_epoch:
            return float(self.epoch)
        return self.epoch + self.epoch_rows / self.rows_per_epoch

    def after_step(self, *, rows: int, tokens: int, **measured: Any) -> Progress:
        """Return the progress after one optimizer step of that many rows and real tokens, over all
        ranks; `measured` is what else of it the step has changed, such as its `noise_scale`.
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
        # Each step makes one, and replace() takes twice as long.
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
        """Return the progress at which the current epoch began."""
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
        """Return it as plain numbers, which ``torch.load(weights_only=True)`` reads.

        ``Progress(**state)`` restores it.
        """
        names = [field.name for field in fields(self) if field.name != "pace"]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Duration:
    """An amount of training, over all ranks.

    Attributes:
        amount: 0 or more; whole but for epochs.
        unit: ``ep``, ``ba``, ``sp`` or ``tok``.
    """

    amount: float
    unit: str

    def share(self, progress: Progress) -> Fraction:
        """Return the part of this duration that has been done: 0 at the beginning, 1 where it is
        reached, and more beyond.

        It is exact: a tenth of an epoch of 10 rows is one row, which floats would miss by their
        rounding.
        """
        return self._done(progress) / Fraction(str(self.amount))

    def _done(self, progress: Progress) -> Fraction:
        if self.unit != "ep":
            return Fraction(
                {"ba": progress.steps, "sp": progress.samples, "tok": progress.tokens}[self.unit]
            )
        rows = progress.rows_per_epoch
        if not rows:
            return Fraction(progress.epoch)
        return progress.epoch + Fraction(progress.epoch_rows, rows)

    def __str__(self) -> str:
        short = f"{self.amount:g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
        if float(short) != self.amount:
            return f"{self.amount}{self.unit}"
        return f"{short}{self.unit}"


def parse_duration(value: object, *, key: str) -> Duration:
    """Read a duration with its unit, such as ``0.5ep``, ``100ba``, ``10000sp`` or ``1.5e6tok``, for
    the setting `key`.

    Raises:
        SettingError: it is 0, has no unit or no finite number, or a fraction of something other
            than epochs.
    """
    match = None
    if isinstance(value, str):
        match = re.fullmatch(r"(.*?)\s*(ep|ba|sp|tok)", value.strip())
    if match is None:
        raise SettingError(
            key,
            value,
            "give a number with a unit, such as 2ep (epochs), 100ba (optimizer steps), 10000sp"
            " (samples) or 1e6tok (tokens)",
        )
    number, unit = match.groups()
    try:
        amount = float(number)
    except ValueError:
        amount = math.nan
    if not 0 < amount < math.inf:
        raise SettingError(key, value, f"write it such as 2{unit}, with a finite number above 0")
    if unit != "ep" and amount != int(amount):
        raise SettingError(
            key, value, f"{unit} are counted in whole ones; only ep may have a fraction"
        )
    return Duration(amount if unit == "ep" else int(amount), unit)
