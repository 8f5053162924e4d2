"""What ranks tell each other before they run a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch
from adaptive_batch.errors import GrowthFunctionError

_ABSENT = "nothing"

# Micro-batches of this rank's rows of a step; where noise is sampled, those of the small batch and
# the others.
OwnPieces = tuple[list[MicroBatch], ...]


class Division(NamedTuple):
    """How the rows of a step are divided, as all ranks have agreed.

    Attributes:
        parts: micro-batches of this rank.
        counts: micro-batches of each part on the rank that has most.
        ends: whether any rank was asked to end before the step.
    """

    parts: OwnPieces
    counts: Sequence[int]
    ends: bool = False

    @classmethod
    def agreed(cls, parts: OwnPieces, *, ends: bool = False) -> Division:
        """Return the division of these micro-batches with the counts of the rank that has most; a
        collective.
        """
        return cls(parts, distributed.all_reduce_max([len(part) for part in parts]), ends)


class Question(NamedTuple):
    """What each rank says before a step.

    Attributes:
        batch_size: rows that run at once where no size is configured and all of them fit, see
            :meth:`MicroBatchSizer.limit`; alike on all ranks.
        num_rows: rows of the step on all ranks, as this one counts them; 0 where none does.
        requested: batch that was requested for the step, which a rule of the user's may have
            answered differently elsewhere.
        ends: whether this rank was asked to end.
    """

    batch_size: int
    num_rows: int = 0
    requested: int = 0
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
