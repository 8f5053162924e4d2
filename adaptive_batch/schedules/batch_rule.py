"""A rule that says what a step holds as training goes on: checked, asked, and its answer cut to the bound."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass

from adaptive_batch.errors import GrowthFunctionError, SettingError

from .progress import Progress

Schedule = Callable[[Progress], int]
KEY = "batch_size_schedule"
# Far above any batch that can be trained; an answer beyond it is a mistake, in units for instance (tokens, bytes).
MOST_ROWS = 10**9
WHAT_WOULD_DO = "it must return what a step on one device holds: a whole number, 1 or more"


@dataclass(frozen=True)
class Asked:
    """The answer of a schedule before a step, and what became of it.

    Attributes:
        requested: what the rule asked for, on one device.
        after: what the step is to hold.
        maximum: the bound; None without one.
    """

    requested: int
    after: int
    maximum: int | None

    @property
    def was_cut(self) -> bool:
        """Whether the bound left less than was asked for."""
        return self.after < self.requested

    def describe(self, before: int) -> str:
        """Returns one line, such as ``batch_size 16 -> 24 (asked for 32, cut to the bound 24)``."""
        change = f"{before} -> {self.after}" if self.after != before else f"{before} unchanged"
        return f"batch_size {change}" + (
            f" (asked for {self.requested}, cut to the bound {self.maximum})" if self.was_cut else ""
        )


def ask(rule: Callable[[Progress], object], progress: Progress, *, maximum: int | None) -> Asked:
    """Asks a schedule what the next step is to hold, and cuts the answer to the bound.

    Args:
        rule: ``rule(progress)``; whole numbers of numpy and torch are accepted.
        progress: at the beginning of the step.
        maximum: the bound; None for none.

    Raises:
        GrowthFunctionError: the rule raised (its error is the cause), or answered with no whole number, 1 to 10**9.
    """
    try:
        answer = rule(progress)
    except Exception as error:
        raise GrowthFunctionError(
            f"{KEY} {name_of(rule)}({progress}) raised {type(error).__name__}: {error}"
        ) from error
    requested = whole_number(answer)
    if requested is None or not 1 <= requested <= MOST_ROWS:
        raise GrowthFunctionError(
            f"{KEY} {name_of(rule)}({progress}) returned {shortened(answer)}: {WHAT_WOULD_DO}, at most {MOST_ROWS}"
        )
    return Asked(requested, requested if maximum is None else min(requested, maximum), maximum)


def check_schedule(rule: object, *, key: str = KEY) -> None:
    """Checks that something can be called as a schedule.

    Raises:
        SettingError: it cannot be called, or not with one positional argument.
    """
    check_call(
        rule,
        Progress(),
        key=key,
        what="a function rule(progress) -> rows of a step on one device",
        call="rule(progress) with one positional argument",
    )


def check_call(function: object, /, *arguments: object, key: str, what: str, call: str) -> None:
    """Checks what can be known of a user's function without asking it.

    Args:
        function: what the configuration names.
        arguments: such as it will be called with.
        key: the configuration key, for the message.
        what: it should be, for the message.
        call: how it is called, for the message.

    Raises:
        SettingError: it cannot be called, or not with these arguments.
    """
    if not callable(function):
        raise SettingError(key, function, f"it is a {type(function).__name__}; give {what}")
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # some builtins do not tell
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise SettingError(key, name_of(function), f"it takes {signature} ({error}); it is called as {call}") from error


def needs_noise_scale(rule: object) -> bool:
    """Whether a rule reads what only training shows, such as the noise scale, so that no plan can be made ahead."""
    return getattr(rule, "needs_noise_scale", False) is True


def whole_number(value: object) -> int | None:
    """Returns a whole number of Python, numpy or torch as an int, and None for all else, their bools included."""
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None


def name_of(function: object) -> str:
    """Returns how a message calls a function: its path, or what an object says of itself."""
    qualified = getattr(function, "__qualname__", None)
    return repr(function) if qualified is None else f"{getattr(function, '__module__', '?')}.{qualified}"


def shortened(value: object) -> str:
    """Returns a value for a message: a huge number would fill the screen, or refuse to be printed at all."""
    if isinstance(value, int) and abs(value) > 10**18:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "..."
