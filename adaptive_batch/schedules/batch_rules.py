"""Validation and calls of the user's batch size rules.

A *schedule* is ``rule(progress) -> rows of one optimizer step on one device`` (tokens if
``batch_tokens`` is set), called before each step. An *increment* is ``f(epoch, batch_size) -> rows
to add to batch_size``, called at the start of each epoch, 0 included. :mod:`.batch_schedules` has
ready-made schedules and increments.
"""

from __future__ import annotations

import copy
import inspect
import operator
import reprlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from adaptive_batch.errors import GrowthFunctionError, SettingError

from .progress import Progress

Schedule = Callable[[Progress], int]
Increment = Callable[[int, int], int]
Rule = TypeVar("Rule")
KEY = "batch_size_schedule"
INCREMENT_KEY = "batch_increase_function"
# No device trains a larger batch: the rule probably returned tokens or bytes.
MOST_ROWS = 10**9


@dataclass(frozen=True)
class ClampedBatch:
    """The batch on one device that a rule requested, before and after the cut to `maximum`."""

    requested: int
    after: int
    maximum: int | None

    def describe(self, before: int) -> str:
        """Return one line, such as ``batch_size 16 -> 24 (asked for 32, cut to the bound 24)``."""
        line = f"batch_size {before} unchanged"
        if self.after != before:
            line = f"batch_size {before} -> {self.after}"
        if self.after == self.requested:
            return line
        reason = "cut to" if self.after == self.maximum else "already above"
        return f"{line} (asked for {self.requested}, {reason} the bound {self.maximum})"


def request_batch(
    rule: Callable[[Progress], object], progress: Progress, *, maximum: int | None
) -> ClampedBatch:
    """Call a schedule before a step and clamp its result to `maximum` (None: no bound).

    Raises:
        GrowthFunctionError: the rule raised an error (kept as the cause) or did not return a whole
            number from 1 to 10**9.
    """
    call = f"{KEY} {_name_of(rule)}({progress})"
    remedy = "the batch of a step on one device"
    requested = _call(rule, progress, call=call, least=1, remedy=remedy)
    return ClampedBatch(requested, at_most(requested, maximum), maximum)


def next_batch_size(
    increment: Callable[[int, int], object], *, epoch: int, batch_size: int, maximum: int | None
) -> ClampedBatch:
    """Call an increment at the start of an epoch and clamp the batch size to `maximum` (None: no
    bound).

    A batch size already above the bound, for example after resuming on a smaller device, is kept.

    Raises:
        GrowthFunctionError: the function raised an error (kept as the cause) or did not return a
            whole number from 0 to 10**9.
    """
    call = f"{INCREMENT_KEY} {_name_of(increment)}(epoch={epoch}, batch_size={batch_size})"
    rows = _call(
        increment,
        epoch,
        batch_size,
        call=call,
        least=0,
        remedy="the rows to add to batch_size",
    )
    requested = batch_size + rows
    # A batch that is already above the bound does not shrink.
    clamped = max(at_most(requested, maximum), batch_size)
    return ClampedBatch(requested, clamped, maximum)


def check_increments(
    increment: Increment, *, first_epoch: int, epochs: int, batch_size: int
) -> list[int]:
    """Call a growth function for all remaining epochs, before the maximum batch size is known.

    A result is refused only if it is invalid for the unclamped batch size and for the initial one:
    the maximum may clamp the batch to any size between them.

    Returns:
        The unclamped batch size of each epoch, up to the first invalid result.

    Raises:
        GrowthFunctionError: a result is invalid; the message names its epoch and batch size.
    """
    increment = copy_rule(increment)
    sizes = [batch_size]
    for epoch in range(first_epoch, epochs):
        try:
            batch = next_batch_size(increment, epoch=epoch, batch_size=sizes[-1], maximum=None)
        except GrowthFunctionError:
            next_batch_size(increment, epoch=epoch, batch_size=batch_size, maximum=None)
            break
        sizes.append(batch.after)
    return sizes[1:]


def copy_rule(rule: Rule) -> Rule:
    """Return a deep copy if possible, so that trial calls do not change the rule's state."""
    # A rule that holds a file or a lock cannot be copied.
    with suppress(Exception):
        return copy.deepcopy(rule)
    return rule


def at_most(rows: int, maximum: int | None) -> int:
    """Return `rows`, limited to `maximum` unless that is None."""
    return rows if maximum is None else min(rows, maximum)


def _call(
    function: Callable[..., object], /, *arguments: object, call: str, least: int, remedy: str
) -> int:
    """Call a user's function and check its result; `call` and `remedy` go into the message."""
    try:
        answer = function(*arguments)
    except (Exception, SystemExit) as error:
        raise GrowthFunctionError(f"{call} raised {type(error).__name__}: {error}") from error
    number = whole_number(answer)
    if number is None or not least <= number <= MOST_ROWS:
        bits = (number or 0).bit_length()
        # Python refuses to print thousands of digits.
        if bits > 64:
            shown = f"a number of {bits} bits"
        else:
            shown = reprlib.repr(answer)
        raise GrowthFunctionError(
            f"{call} returned {shown}: it must return {remedy}: a whole number, {least} to"
            f" {MOST_ROWS}"
        )
    return number


def check_schedule(rule: object, *, key: str = KEY) -> None:
    """Check that `rule` can be called with one positional argument.

    Raises:
        SettingError: it cannot.
    """
    _check_call(rule, Progress(), key=key, form="rule(progress) -> rows of a step on one device")


def check_increment(function: object, *, key: str = INCREMENT_KEY) -> None:
    """Check that `function` can be called with two positional arguments.

    Raises:
        SettingError: it cannot.
    """
    _check_call(function, 0, 1, key=key, form="f(epoch, batch_size) -> rows to add")


def _check_call(function: object, /, *arguments: object, key: str, form: str) -> None:
    """Check a user's function without calling it."""
    if not callable(function):
        raise SettingError(
            key, function, f"it is a {type(function).__name__}; give a function {form}"
        )
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        # Some builtins have no signature.
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        remedy = (
            f"it takes ({', '.join(signature.parameters)}) ({error}); give a function {form} with"
            " positional arguments, or, in a config, a block "
        )
        remedy += "{_component_: ..., ...} if it builds one"
        raise SettingError(key, _name_of(function), remedy) from error


def needs_noise_scale(rule: object) -> bool:
    """Return whether a rule reads the measured noise scale, so that training cannot be planned."""
    return getattr(rule, "needs_noise_scale", False) is True


def reads_tokens(rule: object) -> bool:
    """Return whether a ready-made rule depends on the tokens trained so far."""
    return getattr(rule, "reads_tokens", False) is True


def whole_number(value: object) -> int | None:
    """Return an integer of Python, numpy or torch as an int, and None for bools and all other
    values.
    """
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None


def _name_of(function: object) -> str:
    """Return a function's dotted path for messages, or the `repr` of an object without one."""
    qualified = getattr(function, "__qualname__", None)
    if qualified is None:
        return repr(function)
    module = getattr(function, "__module__", "?")
    return f"{module}.{qualified}"
