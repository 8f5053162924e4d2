"""What ranks tell each other before they run a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch
from adaptive_batch.errors import GrowthFunctionError

_ABSENT = "nothing"


class Division(NamedTuple):
    """How the rows of a step are divided, as all ranks have agreed.

    Attributes:
        pieces: micro-batches of this rank.
        num_pieces: micro-batches on the rank that has most.
        ends: whether any rank was asked to end before the step.
    """

    pieces: list[MicroBatch]
    num_pieces: int
    ends: bool = False

    @classmethod
    def agreed(cls, pieces: list[MicroBatch], *, ends: bool = False) -> Division:
        """Return the division of these micro-batches with the number of the rank that has most; a
        collective.
        """
        (num_pieces,) = distributed.all_reduce_max([len(pieces)])
        return cls(pieces, num_pieces, ends)


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
