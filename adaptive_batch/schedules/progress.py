"""How far training has come, and how long a part of it is: ``2ep``, ``100ba``, ``10000sp``, ``1.5e6tok``.

Every rule reads :class:`Progress`; nothing else keeps time. The notation of durations is Composer's. Durations of different
units are never equal and cannot be ordered; only with a :class:`Progress` can any of them be compared with what has been done.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar, TypeAlias

from adaptive_batch.errors import SettingError

UNITS_TEXT = "ep (epochs), ba (optimizer steps), sp (samples) or tok (tokens)"


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
        batch: what was requested for the last step on one device, in rows or, by `batch_tokens`, in tokens; 0 before the first.
        noise_scale: the smoothed gradient noise scale, in rows; None where it is not measured or not known yet.
        batch_before_epoch, noise_scale_before_epoch: the same two where the current epoch began.
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

    @property
    def epochs(self) -> float:
        """Epochs that are done, and the part of this one."""
        return self.epoch + (self.epoch_rows / self.rows_per_epoch if self.rows_per_epoch else 0.0)

    def after_step(self, *, rows: int, tokens: int) -> Progress:
        """Return the progress after one optimizer step of that many rows and real tokens, over all ranks."""
        return replace(
            self,
            epoch_rows=self.epoch_rows + rows,
            steps=self.steps + 1,
            samples=self.samples + rows,
            tokens=self.tokens + tokens,
            epoch_steps=self.epoch_steps + 1,
            epoch_tokens=self.epoch_tokens + tokens,
        )

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
        """Return it as plain numbers, which ``torch.load(weights_only=True)`` reads; ``Progress(**state)`` restores it."""
        return asdict(self)


class _Amount:
    """The base of the units: an amount, and how much of it has been done."""

    suffix: ClassVar[str]
    amount: float

    def done(self, progress: Progress) -> float:
        """Return how much of this unit training has consumed so far, over all ranks."""
        return float(self._done(progress))

    def share(self, progress: Progress) -> Fraction:
        """Return the part of this duration that has been done: 0 at the beginning, 1 where it is reached, and more beyond.

        It is exact: a tenth of an epoch of 10 rows is one row, which floats would miss by their rounding.
        """
        return self._done(progress) / Fraction(str(self.amount))

    def reached(self, progress: Progress) -> bool:
        """Return whether training has consumed that much, or more."""
        return self._done(progress) >= Fraction(str(self.amount))

    def _done(self, progress: Progress) -> Fraction:
        raise NotImplementedError

    def __str__(self) -> str:
        short = f"{self.amount:g}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
        return f"{short if float(short) == self.amount else self.amount}{self.suffix}"


@dataclass(frozen=True, order=True)
class Epochs(_Amount):
    """Epochs and parts of one, counted in the rows that have been stepped."""

    amount: float
    suffix = "ep"

    def _done(self, progress: Progress) -> Fraction:
        rows = progress.rows_per_epoch
        return progress.epoch + (Fraction(progress.epoch_rows, rows) if rows else Fraction(0))

    __str__ = _Amount.__str__


@dataclass(frozen=True, order=True)
class Steps(_Amount):
    """Optimizer steps."""

    amount: int
    suffix = "ba"

    def _done(self, progress: Progress) -> Fraction:
        return Fraction(progress.steps)

    __str__ = _Amount.__str__


@dataclass(frozen=True, order=True)
class Samples(_Amount):
    """Rows, over all ranks."""

    amount: int
    suffix = "sp"

    def _done(self, progress: Progress) -> Fraction:
        return Fraction(progress.samples)

    __str__ = _Amount.__str__


@dataclass(frozen=True, order=True)
class Tokens(_Amount):
    """Real tokens, over all ranks; padding is not counted."""

    amount: int
    suffix = "tok"

    def _done(self, progress: Progress) -> Fraction:
        return Fraction(progress.tokens)

    __str__ = _Amount.__str__


Duration: TypeAlias = Epochs | Steps | Samples | Tokens


def parse_duration(value: object, *, key: str) -> Duration:
    """Read a duration with its unit.

    Args:
        value: such as ``0.5ep``, ``100ba``, ``10000sp`` or ``1.5e6tok``; a duration is returned as it is.
        key: the setting, for the message.

    Returns:
        The duration, in the type of its unit. Only epochs may have a fraction.

    Raises:
        SettingError: there is no unit or an unknown one, or the number is none, negative, not finite, or not whole.
    """
    if isinstance(value, Epochs | Steps | Samples | Tokens):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise SettingError(key, value, f"give a number with a unit, such as 2ep or 100ba: {UNITS_TEXT}")
    text = str(value).strip()
    number, unit = _number_and_unit(text)
    if not unit:
        raise SettingError(key, value, f"it has no unit; give one of {UNITS_TEXT}, such as {text}ba")
    if unit not in ("ep", "ba", "sp", "tok"):
        raise SettingError(key, value, f"unknown unit {unit!r}; give one of {UNITS_TEXT}")
    try:
        amount = float(number)
    except ValueError:
        raise SettingError(key, value, f"{number!r} is no number; write it such as 2{unit}") from None
    if not math.isfinite(amount):
        raise SettingError(key, value, "it must be finite")
    if amount < 0:
        raise SettingError(key, value, "it must not be negative")
    if unit == "ep":
        return Epochs(amount)
    if amount != int(amount):
        raise SettingError(key, value, f"{unit} are counted in whole ones; only ep may have a fraction")
    if unit == "ba":
        return Steps(int(amount))
    return Samples(int(amount)) if unit == "sp" else Tokens(int(amount))


def _number_and_unit(text: str) -> tuple[str, str]:
    """Divide into the number and the unit; no unit where the text is a number alone."""
    for unit in ("ep", "ba", "sp", "tok"):
        if text.endswith(unit):
            return text[: -len(unit)].strip(), unit
    try:
        float(text)
    except ValueError:
        letters = re.search(r"[^\W\d_]*$", text)
        unit = letters.group() if letters else ""
        return text[: len(text) - len(unit)].strip(), unit
    return text, ""
