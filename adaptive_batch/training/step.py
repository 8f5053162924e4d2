"""What all ranks know before they run a step, agreed in one small collective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adaptive_batch import distributed
from adaptive_batch.errors import GrowthFunctionError

from .micro_batch_runner import MicroBatchRunner

_ABSENT = "nothing"


@dataclass(frozen=True)
class Agreement:
    """What all ranks know before they run a step.

    Attributes:
        num_micro_batches: of the rank that has most, as :meth:`MicroBatchRunner.num_micro_batches` returns them.
        ends: a rank was asked to end.
    """

    num_micro_batches: tuple[int, ...]
    ends: bool


def agree_on_step(
    runner: MicroBatchRunner, rows: Sequence[Any], *, batch: int, num_rows: int, ends: bool = False
) -> Agreement:
    """Agree with all ranks on a step; make the limit smaller where an allocator only just had room, or larger where all have room.

    Args:
        runner: runs the step, with its limit set.
        rows: of this rank.
        batch: what the step was asked to hold, which a rule of the user's may have answered differently elsewhere.
        num_rows: of the step on all ranks, as this one counts them.
        ends: this rank was asked to end.

    Raises:
        GrowthFunctionError: a rule has answered differently on some rank.
    """
    retry = runner.retry
    grown = retry.next_limit()
    mine = [
        int(ends),
        int(retry.allocator_retried),
        int(grown is None or not retry.has_room(grown)),
        batch,
        -batch,
        num_rows,
        -num_rows,
        *runner.num_micro_batches(rows),
    ]
    any_ends, must_ease, must_stay, largest, least, most_rows, least_rows, *most = distributed.all_reduce_max(mine)
    if largest != -least or most_rows != -least_rows:
        same_answers({"batch_size_schedule": batch, "the rows of the next step, which": num_rows})
    if must_ease:
        retry.ease()
    elif grown is not None and not must_stay:
        retry.grow(grown)
    if must_ease or not must_stay:
        most = distributed.all_reduce_max(runner.num_micro_batches(rows))
    return Agreement(tuple(most), bool(any_ends))


def same_answers(answers: Mapping[str, int]) -> None:
    """Refuse a user's function that answers differently on some rank.

    Args:
        answers: that it gave here, by what it was asked: the key of the function, and when.

    Raises:
        GrowthFunctionError: naming the rank.
    """
    first, *others = distributed.all_gather({asked: str(answer) for asked, answer in answers.items()})
    for rank, mine in enumerate(others, start=1):
        for name, value, of_first in differences(mine, first):
            raise GrowthFunctionError(
                f"{name} answers {value} on rank {rank} and {of_first} on rank 0; it must be the same function of the same "
                "arguments on all ranks"
            )


def differences(mine: Mapping[str, str], first: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each difference between two ranks, and the value of each."""
    for name in sorted(first.keys() | mine.keys()):
        if first.get(name) != mine.get(name):
            yield name, mine.get(name, _ABSENT), first.get(name, _ABSENT)
