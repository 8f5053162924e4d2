"""What ranks report to each other before a step, and the plan that they agree on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch
from adaptive_batch.errors import GrowthFunctionError

_ABSENT = "nothing"


class MicroBatchPlan(NamedTuple):
    """The micro-batches of a step, as all ranks have agreed.

    Attributes:
        micro_batches: micro-batches of this rank.
        number: micro-batches on the rank that has most; all ranks run as many.
        ends: whether any rank was asked to end before the step.
    """

    micro_batches: list[MicroBatch]
    number: int
    ends: bool = False

    @classmethod
    def agreed(cls, micro_batches: list[MicroBatch], *, ends: bool = False) -> MicroBatchPlan:
        """Return the plan of these micro-batches; a collective that finds the largest number."""
        (number,) = distributed.all_reduce_max([len(micro_batches)])
        return cls(micro_batches, number, ends)

    @property
    def slots(self) -> list[MicroBatch | None]:
        """Return what this rank runs in turn: None where other ranks have more micro-batches."""
        return [*self.micro_batches, *[None] * (self.number - len(self.micro_batches))]


class RankReport(NamedTuple):
    """What each rank reports before a step.

    Attributes:
        batch_size: rows that run at once where no size is configured and all of them fit, see
            :meth:`MicroBatchSizer.limit`; the same on all ranks.
        num_rows: rows of the step on all ranks, as this one counts them; 0 where none does.
        requested: batch that was requested for the step; a user's rule may have given another
            answer on another rank.
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
