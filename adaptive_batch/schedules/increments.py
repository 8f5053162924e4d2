"""Which batch size comes next.

An *increment* is ``f(epoch, batch_size) -> rows to add to batch_size``, asked at the start of each epoch, 0 included.
It is a function of the user's, or one of the ready-made ones here::

    batch_increase_function: my_module.my_function

    batch_increase_function:
      _component_: adaptive_batch.schedules.at_epochs
      additions: {1: 8, 2: 16}

    batch_increase_function:
      _component_: adaptive_batch.schedules.geometric
      factor: 2
      every: 1

A *schedule* is ``rule(progress) -> rows of a step on one device``, see :mod:`.batch_schedules`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from adaptive_batch.errors import GrowthFunctionError, SettingError

from .batch_rule import MOST_ROWS, check_call, name_of, shortened, whole_number

Increment = Callable[[int, int], int]
KEY = "batch_increase_function"
WHAT_WOULD_DO = "it must return how many rows to add to batch_size: a whole number, 0 or more"


@dataclass(frozen=True)
class Growth:
    """The answer of an increment at one epoch, and what became of it.

    Attributes:
        epoch: the epoch that starts, from 0.
        before: batch size, in rows, so far.
        requested: batch size that the increment asked for.
        after: batch size from now on, in rows.
        maximum: the bound, in rows; None without one.
    """

    epoch: int
    before: int
    requested: int
    after: int
    maximum: int | None

    @property
    def was_cut(self) -> bool:
        """Whether the bound left less than was asked for."""
        return self.after < self.requested

    def describe(self) -> str:
        """Returns one line, such as ``epoch 2: batch_size 16 -> 24 (asked for 40, cut to the bound 24)``."""
        change = f"{self.before} -> {self.after}" if self.after != self.before else f"{self.before} unchanged"
        if not self.was_cut:
            reason = ""
        elif self.after == self.maximum:
            reason = f" (asked for {self.requested}, cut to the bound {self.maximum})"
        else:
            reason = f" (asked for {self.requested}, already above the bound {self.maximum})"
        return f"epoch {self.epoch}: batch_size {change}{reason}"


def next_batch_size(
    increment: Callable[[int, int], object], *, epoch: int, batch_size: int, maximum: int | None
) -> Growth:
    """Asks an increment for the rows to add, and cuts the request to the bound.

    A batch size already above the bound, as after resuming on a smaller device, is kept: no row is added or taken away.

    Args:
        increment: ``f(epoch, batch_size) -> rows to add``; whole numbers of numpy and torch are accepted.
        epoch: the epoch that starts, from 0.
        batch_size: rows so far.
        maximum: the bound in rows; None for none.

    Returns:
        What was asked for and what comes of it.

    Raises:
        GrowthFunctionError: the function raised (its error is the cause), or answered with no whole number, 0 to 10**9.
    """
    call = f"{KEY} {name_of(increment)}(epoch={epoch}, batch_size={batch_size})"
    try:
        answer = increment(epoch, batch_size)
    except Exception as error:
        raise GrowthFunctionError(f"{call} raised {type(error).__name__}: {error}") from error
    rows = whole_number(answer)
    if rows is None or not 0 <= rows <= MOST_ROWS:
        raise GrowthFunctionError(f"{call} returned {shortened(answer)}: {WHAT_WOULD_DO}, at most {MOST_ROWS}")
    requested = batch_size + rows
    after = requested if maximum is None else min(requested, max(maximum, batch_size))
    return Growth(epoch=epoch, before=batch_size, requested=requested, after=after, maximum=maximum)


def check_increment(function: object, *, key: str = KEY) -> None:
    """Checks what can be known of an increment without asking it.

    Args:
        function: what the configuration names.
        key: the configuration key, for the message.

    Raises:
        SettingError: it cannot be called, or not with two positional arguments.
    """
    check_call(
        function,
        0,
        1,
        key=key,
        what="a function f(epoch, batch_size) -> rows to add",
        call="f(epoch, batch_size) with two positional arguments",
    )


@dataclass(frozen=True, repr=False)
class _AtEpochs:
    additions: Mapping[int, int]

    def __call__(self, epoch: int, batch_size: int) -> int:
        return self.additions.get(epoch, 0)

    def __repr__(self) -> str:
        return f"at_epochs({self.additions})"


def at_epochs(additions: Mapping[int | str, int]) -> Increment:
    """Makes an increment that adds rows at the start of given epochs.

    Args:
        additions: epoch, counted from 0, to the rows to add at its start, as in ``{1: 8, 2: 16}``.

    Returns:
        ``f(epoch, batch_size) -> rows to add``.

    Raises:
        SettingError: no epoch is given, one is given twice, or a number is not whole or below 0.
    """
    key = f"{KEY}.additions"
    if not isinstance(additions, Mapping) or not additions:
        raise SettingError(key, additions, "give rows to add by epoch, such as {1: 8, 2: 16}")
    by_epoch: dict[int, int] = {}
    for given_epoch, given_rows in additions.items():
        # Digits as text: keys of a mapping that came through JSON or the command line.
        is_text = isinstance(given_epoch, str) and given_epoch.isascii() and given_epoch.isdigit()
        epoch = int(given_epoch) if is_text else whole_number(given_epoch)
        rows = whole_number(given_rows)
        if epoch is None or epoch < 0:
            raise SettingError(key, additions, f"the epoch {given_epoch!r} must be a whole number, 0 or more")
        if rows is None or not 0 <= rows <= MOST_ROWS:
            raise SettingError(
                key, additions, f"the {given_rows!r} rows of epoch {epoch} must be a whole number, 0 to {MOST_ROWS}"
            )
        if epoch in by_epoch:
            raise SettingError(key, additions, f"epoch {epoch} is given twice")
        by_epoch[epoch] = rows
    return _AtEpochs(dict(sorted(by_epoch.items())))


@dataclass(frozen=True, repr=False)
class _Geometric:
    factor: float
    every: int

    def __call__(self, epoch: int, batch_size: int) -> int:
        if epoch == 0 or epoch % self.every != 0:
            return 0
        return max(1, math.floor(batch_size * self.factor + 0.5) - batch_size)

    def __repr__(self) -> str:
        return f"geometric(factor={self.factor}, every={self.every})"


def geometric(factor: float, *, every: int = 1) -> Increment:
    """Makes an increment that multiplies the batch size.

    At the start of each `every`-th epoch but epoch 0 the batch size becomes `factor` times itself, rounded to the
    nearest row, a half up; it grows by one row at least, so that a small batch times a small factor does not stand still.

    Args:
        factor: above 1.
        every: epochs from one multiplication to the next, 1 or more.

    Returns:
        ``f(epoch, batch_size) -> rows to add``.

    Raises:
        SettingError: `factor` is not a finite number above 1, or `every` not a whole number of 1 or more.
    """
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 1 < factor < math.inf:
        raise SettingError(f"{KEY}.factor", factor, "must be a number above 1, such as 2.0")
    whole_every = whole_number(every)
    if whole_every is None or whole_every < 1:
        raise SettingError(f"{KEY}.every", every, "must be a whole number of epochs, 1 or more")
    return _Geometric(factor=float(factor), every=whole_every)
