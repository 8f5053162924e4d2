"""What a search tries: the step of training, on the worst rows that it may meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from adaptive_batch._util import count
from adaptive_batch.data import RowOrder, largest_rows, longest_rows
from adaptive_batch.memory import OptimizerInBackward

from .parts import BatchSource
from .splitters import counted_sample, length_in_sample
from .step import Step


class MeasuredRows(Protocol):
    """Rows by number, measured as :class:`.DatasetAdapter` does."""

    @property
    def lengths(self) -> torch.Tensor: ...
    @property
    def other_bytes(self) -> torch.Tensor: ...

    def __getitem__(self, number: int) -> Any: ...


@dataclass(frozen=True)
class LongestRows:
    """The rows of trials: those of which training may meet no larger ones.

    Attributes:
        first: function that returns that many of them, largest first, in the form that a trial
            takes.
        length: tokens of the longest; 0 where they are not known.
        name: name of a single one in errors.
        in_order: function that returns rows in the order in which training takes them: any number
            from any position on; None where there is no order.
        beside_longest: the same rows beside the one with most tokens, to which they are padded;
            None where the first has as many.
    """

    first: Callable[[int], Any]
    length: int
    name: str
    in_order: Callable[[int, int], list[Any]] | None = None
    beside_longest: LongestRows | None = None

    @classmethod
    def of_sample(
        cls, sample: Callable[[int], Any], split: Callable[[Any], BatchSource], device: torch.device
    ) -> LongestRows:
        """Return the rows of a function that makes a batch of that many, as each trial makes its
        own.

        Args:
            sample: the function.
            split: function that makes a batch ready to be split.
            device: device whose random numbers stay as they were.
        """
        length = length_in_sample(sample, split, device)
        counted = counted_sample(sample, split)
        return cls(lambda size: partial(counted, size), length, _name(length))

    @classmethod
    def of_dataset(
        cls,
        rows: MeasuredRows,
        *,
        length: int | None = None,
        are_alike: bool = False,
        source: str = "",
        prepare: Callable[[Any], Any] = lambda row: row,
        order: Callable[[], RowOrder | torch.Tensor] | None = None,
    ) -> LongestRows:
        """Return the rows of a dataset whose tensors have most bytes.

        Args:
            rows: the dataset.
            length: tokens that `prepare` cuts or fills each row to; None if it leaves them.
            are_alike: whether all rows have one length, which errors do not name.
            source: end of the name of a row.
            prepare: function that returns what a trial takes of a row.
            order: function that returns the numbers of rows in the order of training; None where
                trials need no order.
        """
        lengths = rows.lengths
        numbers = largest_rows(lengths, rows.other_bytes)
        read: list[Any] = []

        def first(size: int) -> list[Any]:
            for place in range(len(read), size):
                read.append(prepare(rows[numbers[place % len(numbers)]]))
            return read[:size]

        def in_order(begin: int, size: int) -> list[Any]:
            assert order is not None
            in_turn = order()
            if not len(in_turn):
                return first(size)
            places = torch.arange(begin, begin + size) % len(in_turn)
            return [rows[number] for number in in_turn[places].tolist()]

        largest_length = int(lengths[numbers[0]]) if length is None else length
        name = "one row" if are_alike else _name(largest_length) + source
        made = cls(first, largest_length, name, None if order is None else in_order)
        (longest,) = longest_rows(lengths, 1)
        longest_length = int(lengths[longest])
        if length is not None or longest_length == largest_length:
            return made

        @cache
        def longest_row() -> Any:
            return prepare(rows[longest])

        beside = replace(
            made,
            first=lambda size: [longest_row(), *first(size - 1)],
            length=longest_length,
            name=_name(longest_length) + source,
        )
        return replace(made, beside_longest=beside)


def _name(length: int) -> str:
    return f"one row of {count(length, 'token')}" if length else "one row"


@dataclass(frozen=True)
class Evaluation:
    """A search for the most rows that can be run without gradients, in place of trained.

    Attributes:
        run: function that runs rows without gradients.
        trained: rows of training, one of which is stepped so that the optimizer's state is there.
        name: what it does with rows, in texts.
        kind: kind of micro-batch by which ranks know its collectives, see
            :meth:`Sharding.micro_batch`.
        in_training_mode: whether the model is in training mode, and not in evaluation mode.
        lost_key: key of the facts of a rank that is lost, under which they have the rows of the
            trial.
    """

    run: Callable[[Any], object]
    trained: LongestRows
    name: str = "evaluating rows"
    kind: bool | str = True
    in_training_mode: bool = False
    lost_key: str = "trial_rows_val"


@dataclass(frozen=True)
class TriedStep:
    """The step of training that trials run, through the code that training runs.

    Attributes:
        engine: runs its micro-batches.
        optimizer: optimizer of the model's parameters, or the optimizers in backward.
        try_rows: function that runs forward and backward of some rows at once, in the form of
            :class:`LongestRows`; ``is_last=False`` where gradients are not reduced.
        clip: function that clips the gradients before the optimizer's step.
        row_length: function that returns the tokens of a row.
        keep_gradients: function that leaves the unsharded gradients which are there between the
            micro-batches of a step; None where there are none.
        held: frozen modules that the step runs beside the model.
    """

    engine: Step
    optimizer: Optimizer | OptimizerInBackward
    try_rows: Callable[..., None]
    clip: Callable[[], object] = lambda: None
    row_length: Callable[[Any], int] = lambda row: 1
    keep_gradients: Callable[[Any], object] | None = None
    held: Sequence[nn.Module] = ()

    def step(self) -> None:
        """Clip the gradients, and step the optimizer."""
        self.clip()
        assert isinstance(self.optimizer, Optimizer)
        self.optimizer.step()
