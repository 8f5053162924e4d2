"""What ranks tell each other before they run a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch
from adaptive_batch.errors import GrowthFunctionError

_ABSENT = "nothing"


@dataclass(frozen=True)
class Division:
    """How this rank's rows of a step are divided.

    Attributes:
        parts: micro-batches; where noise is sampled, those of the small batch and the others.
        counts: micro-batches of each part on the rank that has most; None until ranks agree on
            them.
        num_rows: rows of the step on all ranks; None until ranks agree on them.
    """

    parts: tuple[list[MicroBatch], ...]
    counts: tuple[int, ...] | None = None
    num_rows: int | None = None

    @property
    def own_counts(self) -> tuple[int, ...]:
        """Micro-batches of each part on this rank."""
        return tuple(map(len, self.parts))

    def agreed(self) -> Division:
        """Return the division with the counts of the rank that has most; a collective unless they
        are known.
        """
        if self.counts is not None:
            return self
        return replace(self, counts=tuple(distributed.all_reduce_max(list(self.own_counts))))


@dataclass(frozen=True)
class Question:
    """What each rank says before a step.

    Attributes:
        batch: batch that was requested for the step, which a rule of the user's may have answered
            differently elsewhere.
        num_rows: rows of the step on all ranks, as this one counts them.
        ends: whether this rank was asked to end.
    """

    batch: int = 0
    num_rows: int = 0
    ends: bool = False


def same_answers(answers: Mapping[str, int]) -> None:
    """Refuse a user's function that answers differently on some rank.

    Args:
        answers: that it gave here, by what it was asked: the key of the function, and when.

    Raises:
        GrowthFunctionError: naming the rank.
    """
    texts = {call: str(answer) for call, answer in answers.items()}
    first, *later = distributed.all_gather(texts)
    for rank, of_rank in enumerate(later, start=1):
        for name, value, of_first in differences(of_rank, first):
            raise GrowthFunctionError(
                f"{name} answers {value} on rank {rank} and {of_first} on rank 0; it must be the"
                " same function of the same arguments on all ranks"
            )


def differences(
    mine: Mapping[str, str], first: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each difference between two ranks, and the value of each."""
    for name in sorted(first.keys() | mine.keys()):
        if first.get(name) != mine.get(name):
            yield name, mine.get(name, _ABSENT), first.get(name, _ABSENT)
