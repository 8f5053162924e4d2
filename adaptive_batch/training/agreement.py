"""What all ranks know before they run a step, agreed in one small collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from adaptive_batch import distributed
from adaptive_batch.data import MicroBatch, MicroBatchLimit
from adaptive_batch.errors import GrowthFunctionError

from .sizing import MicroBatchSizer

_ABSENT = "nothing"


@dataclass(frozen=True)
class Division:
    """How this rank's rows of a step are divided.

    Attributes:
        parts: micro-batches; where noise is sampled, those of the small batch and the others.
        counts: micro-batches of each part on the rank that has most; None until ranks agree on
            them.
    """

    parts: tuple[list[MicroBatch], ...]
    counts: tuple[int, ...] | None = None

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


def agree_on_step(
    sizer: MicroBatchSizer,
    divide: Callable[[MicroBatchLimit], Division],
    question: Question,
    *,
    fullest: MicroBatch,
    rows_at_once: int,
) -> tuple[Division, bool]:
    """Agree with all ranks on a step; make the limit smaller where an allocator only just had room,
    or larger where all have room.

    Args:
        sizer: decides what a micro-batch of the step may hold.
        divide: function that divides this rank's rows within a limit.
        question: what this rank says of the step.
        fullest: the largest micro-batch of this rank's last step.
        rows_at_once: see :meth:`MicroBatchSizer.limit`.

    Returns:
        The division, with the counts that all ranks know; and whether a rank was asked to end.

    Raises:
        GrowthFunctionError: a rule has answered differently on some rank.
    """
    grown = sizer.next_limit()
    division = divide(sizer.limit(rows_at_once))
    must_stay = grown is None or not sizer.has_room(grown)
    answers = [
        int(question.ends),
        int(sizer.must_ease),
        int(must_stay),
        question.batch,
        -question.batch,
        question.num_rows,
        -question.num_rows,
    ]
    agreed = distributed.all_reduce_max([*answers, *division.own_counts])
    any_ends, any_eases, any_stays, most_batch, least_batch, most_rows, least_rows, *counts = agreed
    if most_batch != -least_batch or most_rows != -least_rows:
        same_answers(
            {
                "batch_size_schedule": question.batch,
                "the rows of the next step, which": question.num_rows,
            }
        )
    division = replace(division, counts=tuple(counts))
    if any_eases:
        sizer.ease(fullest, rows_at_once=rows_at_once)
    elif grown is not None and not any_stays:
        sizer.grow(grown)
    if any_eases or not any_stays:
        division = divide(sizer.limit(rows_at_once)).agreed()
    return division, bool(any_ends)


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
