"""What can go wrong, as a tree:

    AdaptiveBatchError
      SettingError          ValueError    a key, the value it was given, and the suggested fix
      GrowthFunctionError   ValueError    a growth function failed or returned no number of rows
      DoesNotFitError       RuntimeError  one row does not fit; numbers and remedies
      RankLostError         RuntimeError  one rank failed where the others cannot learn of it
      NonfiniteLossError    RuntimeError  a step's loss or gradients are NaN or infinite
      CheckpointError       RuntimeError  a file is missing, truncated, or of another run
      TorchVersionError     ImportError   this torch lacks a name that is needed

Each is also the built-in error beside its name.

A user's mistake is one of these. An assertion is ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The end of a sentence that something does not fit, in keys of the configuration.
MEMORY_REMEDIES = (
    "shorten the rows (tokenizer.max_seq_len), set enable_activation_checkpointing=True or"
    " optimizer_in_bwd=True, use an 8-bit optimizer or a chunked loss, or allow more memory"
)


class AdaptiveBatchError(Exception):
    """Base of every error that this package raises on purpose."""


# Characters of a value that are shown.
_LONGEST = 1000


class SettingError(AdaptiveBatchError, ValueError):
    """A setting cannot be used: its key, dotted where it is nested (``probe.headroom``), its value,
    and the suggested fix.
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
        # It crosses processes.
        return type(self), (self.key, self.value, self.remedy)


class GrowthFunctionError(AdaptiveBatchError, ValueError):
    """A growth function raised, or its answer is not a number of rows. The message names the epoch
    and the batch size.
    """


class DoesNotFitError(AdaptiveBatchError, RuntimeError):
    """Not even one row fits in memory, or a batch that does not fit cannot be split. The message
    carries the numbers and the remedies.
    """


class RankLostError(AdaptiveBatchError, RuntimeError):
    """This rank failed where the others wait for it in a collective, so all ranks must end.

    Args:
        message: what happened, with numbers.
        facts: the same as plain values, for the record; ``limit`` and ``unit`` say what a
            micro-batch may hold when training is started again.
    """

    def __init__(self, message: str, facts: Mapping[str, Any]) -> None:
        self.facts = dict(facts)
        super().__init__(message)

    def __reduce__(self) -> tuple[type[RankLostError], tuple[str, dict[str, Any]]]:
        return type(self), (str(self), self.facts)


class NonfiniteLossError(AdaptiveBatchError, RuntimeError):
    """The loss or the gradients of a step are NaN or infinite, and training is to stop there. The
    message names what came before.
    """


class CheckpointError(AdaptiveBatchError, RuntimeError):
    """A checkpoint cannot be used. The message names the file and the suggested fix."""


class TorchVersionError(AdaptiveBatchError, ImportError):
    """The installed torch lacks a name that is needed. The message says which, and which versions
    have it.
    """
