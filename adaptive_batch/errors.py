"""Errors of this package:

    AdaptiveBatchError
      SettingError          ValueError    a setting is invalid; names key, value and fix
      GrowthFunctionError   ValueError    a growth function failed or returned an invalid value
      DoesNotFitError       RuntimeError  one row does not fit; names sizes and remedies
      RankLostError         RuntimeError  a rank failed while other ranks wait in a collective
      NonfiniteLossError    RuntimeError  the loss or gradients of a step are NaN or infinite
      CheckpointError       RuntimeError  a file is missing, truncated or from another run
      TorchVersionError     ImportError   the installed torch lacks a required name

Each is also a subclass of the built-in error after its name. Mistakes of the user raise these
errors; assertions indicate bugs of this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Fixes if a row does not fit.
MEMORY_REMEDIES = (
    "shorten the rows, recompute activations (torch.utils.checkpoint), use an optimizer with less"
    " state or a chunked loss, or allow more memory"
)


class AdaptiveBatchError(Exception):
    """Base class of the errors of this package."""


# Limit of the characters of a value in messages.
_LONGEST = 1000


class SettingError(AdaptiveBatchError, ValueError):
    """A setting is invalid.

    Args:
        key: key of the setting, dotted if nested (``probe.headroom``).
        value: given value.
        remedy: problem and suggested fix.
    """

    def __init__(self, key: str, value: object, remedy: str) -> None:
        self.key = key
        self.value = value
        self.remedy = remedy
        shown = repr(value)
        if len(shown) > _LONGEST:
            shown = f"{shown[:_LONGEST]}..."
        super().__init__(f"{key}={shown}: {remedy}")

    def __reduce__(self) -> tuple[type[SettingError], tuple[str, object, str]]:
        # Errors are sent between processes.
        return type(self), (self.key, self.value, self.remedy)


class GrowthFunctionError(AdaptiveBatchError, ValueError):
    """A growth function raised an error or returned an invalid value. The message names its
    arguments.
    """


class DoesNotFitError(AdaptiveBatchError, RuntimeError):
    """One row does not fit in memory, or a batch that does not fit cannot be split. The message
    names sizes and remedies.
    """


class RankLostError(AdaptiveBatchError, RuntimeError):
    """This rank failed while other ranks wait in a collective, so all ranks must end.

    Args:
        message: description with figures.
        facts: the figures as plain values for the log; ``limit`` and ``unit`` are the micro-batch
            limit for a restart.
    """

    def __init__(self, message: str, facts: Mapping[str, Any]) -> None:
        self.facts = dict(facts)
        super().__init__(message)

    def __reduce__(self) -> tuple[type[RankLostError], tuple[str, dict[str, Any]]]:
        return type(self), (str(self), self.facts)


class NonfiniteLossError(AdaptiveBatchError, RuntimeError):
    """The loss or the gradients of a step are NaN or infinite. The message describes earlier
    events.
    """


class CheckpointError(AdaptiveBatchError, RuntimeError):
    """A checkpoint cannot be used. The message names the file and the suggested fix."""


class TorchVersionError(AdaptiveBatchError, ImportError):
    """The installed torch lacks a required name. The message has the name and the supported
    versions.
    """
