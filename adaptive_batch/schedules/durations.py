"""How long a part of training is: ``2ep``, ``100ba``, ``10000sp``, ``1.5e6tok``, each unit a type of its own.

The notation is Composer's. Durations of different units are never equal and cannot be ordered; only with a
:class:`~adaptive_batch.progress.Progress` at hand can any of them be compared with what has been done.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, TypeAlias

from adaptive_batch.errors import SettingError

from .progress import Progress

UNITS_SAID = "ep (epochs), ba (optimizer steps), sp (samples) or tok (tokens)"


class _Amount:
    """What the units have in common: an amount, and how much of it has been done."""

    suffix: ClassVar[str]
    amount: float

    def done(self, progress: Progress) -> float:
        """How much of this unit training has consumed so far, over all ranks."""
        return float(self._done(progress))

    def share(self, progress: Progress) -> Fraction:
        """The part of this duration that has been done: 0 at the beginning, 1 where it is reached, and more beyond.

        It is exact: a tenth of an epoch of 10 rows is one row, which floats would miss by their rounding.
        """
        return self._done(progress) / Fraction(str(self.amount))

    def reached(self, progress: Progress) -> bool:
        """Whether training has consumed that much, or more."""
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
    """Reads a duration with its unit.

    Args:
        value: such as ``0.5ep``, ``100ba``, ``10000sp`` or ``1.5e6tok``; a duration is given back as it is.
        key: the setting, for the message.

    Returns:
        The duration, in the type of its unit. Only epochs may have a fraction.

    Raises:
        SettingError: there is no unit or an unknown one, or the number is none, negative, not finite, or not whole.
    """
    if isinstance(value, Epochs | Steps | Samples | Tokens):
        return value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise SettingError(key, value, f"give a number with a unit, such as 2ep or 100ba: {UNITS_SAID}")
    text = str(value).strip()
    number, unit = _divided(text)
    if not unit:
        raise SettingError(key, value, f"it has no unit; give one of {UNITS_SAID}, such as {text}ba")
    if unit not in ("ep", "ba", "sp", "tok"):
        raise SettingError(key, value, f"unknown unit {unit!r}; give one of {UNITS_SAID}")
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


def _divided(text: str) -> tuple[str, str]:
    """The number and the unit; no unit where the text is a number alone."""
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
